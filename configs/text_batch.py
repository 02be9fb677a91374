"""Does the learning rate follow the batch size? A small GPT on the bytes of a text.

    mupax sweep --config text_batch --config.dataset=text:FILE --workdir runs/text-batch

Add --config.base_batch_size=64 and another --workdir for the same with the rule of
docs/rules.md, section 8. All batch sizes take the same examples.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults("sweep")
    c.dataset = "text:input.txt"
    c.data.context = 32
    c.batch_size = 64
    c.steps = 400  # of a batch of 64
    c.model = ConfigDict({"name": "gpt", "branch_multiplier": 1.0, "head_dim": 16})
    c.model.width = 32
    c.model.depth = 2
    c.base_width = 32
    c.base_depth = 2
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.1})
    c.optimizer.mask = "matrices"  # biases and norms do not decay
    c.learning_rate = 2.0**-7
    c.schedule.warmup = 40
    c.sweep.axes.learning_rate = "2**[-10:-4:1]"
    c.sweep.choices = (("batch_size", (16, 64, 256, 512)),)
    c.sweep.equal_examples = True
    c.sweep.seeds = 3
    c.sweep.average_last = 50
    return c

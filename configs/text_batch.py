"""Sweep the learning rate over batch sizes: a small GPT on the bytes of a text.

    mupax sweep --config text_batch --config.dataset=text:FILE --workdir runs/text-batch

Runs at all batch sizes see the same number of examples. Add --config.base_batch_size=64
and another --workdir to scale hyperparameters by the rules of docs/rules.md, section 8
(Malladi et al. 2022, arXiv:2205.10287).
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults("sweep")
    c.dataset = "text:input.txt"
    c.data.context = 32
    c.batch_size = 64
    c.steps = 400  # at batch size 64
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

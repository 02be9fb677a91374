"""A GPT on the bytes of a text, at its base size.

    mupax train --config text_gpt_small --config.dataset=text:FILE

Results: benchmarks/results.md, also of larger models at the same learning rate.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "text:input.txt"
    c.data = ConfigDict({"context": 64, "tokenizer": "bytes"})
    c.model = ConfigDict({"name": "gpt", "width": 32, "depth": 2, "head_dim": 16})
    c.base_width = 32
    c.base_depth = 2
    c.optimizer = ConfigDict({"name": "adam"})
    c.learning_rate = 2.0**-5.5  # near the optimum at this size
    c.schedule.warmup = 100
    c.batch_size = 16
    c.steps = 1500
    c.log_every = 75
    c.eval_every = 1500
    c.save_every = 500
    return c

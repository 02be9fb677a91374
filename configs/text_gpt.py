"""A small GPT on the bytes of a text, e.g. tinyshakespeare.

    mupax train --config text_gpt --config.dataset=text:FILE

Result on tinyshakespeare with --config.steps=400: test loss of 1.980 nats per byte.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "text:input.txt"
    c.data = ConfigDict({"context": 128, "tokenizer": "bytes"})
    c.model = ConfigDict({"name": "gpt", "head_dim": 32})
    c.model.width = 192
    c.model.depth = 4
    c.base_width = 96
    c.base_depth = 4
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.1})
    c.optimizer.mask = "matrices"  # biases and norms do not decay
    c.learning_rate = 3e-3
    c.schedule.warmup = 100
    c.clip_norm = 1.0
    c.batch_size = 32
    c.steps = 2000
    c.log_every = 50
    c.eval_every = 500
    c.save_every = 500
    return c

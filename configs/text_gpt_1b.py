"""A GPT of a billion parameters, tuned at a quarter of its width, for `mupax plan`.

    mupax plan --config text_gpt_1b --topology v5e:16x16,v5p:8x8x16

We have compiled and planned it, but not trained it.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "text:corpus"
    c.stand_in = "fake:2048:50304"
    c.data = ConfigDict({"context": 2048, "tokenizer": "tokenizer.json"})
    c.model = ConfigDict({"name": "gpt", "dtype": "bfloat16", "remat": "full"})
    c.model.width = 2048
    c.model.depth = 18
    c.model.head_dim = 128
    c.base_width = 512
    c.base_depth = 6
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.1})
    c.optimizer.mask = "matrices"  # biases and norms do not decay
    c.learning_rate = 1e-3
    c.schedule.warmup = 1_000
    c.clip_norm = 1.0
    c.mesh.fsdp = 16
    c.batch_size = 1024
    c.steps = 20_000
    c.log_every = 20
    c.eval_every = 500
    c.save_every = 500
    return c

"""Sweep the learning rate over batch sizes: a residual MLP on digits with AdamW.

    mupax sweep --config digits_batch --workdir runs/digits-batch
    mupax sweep --config digits_batch --config.base_batch_size=64 --workdir runs/rule

Runs at all batch sizes see the same number of examples. The first command keeps
hyperparameters fixed; the second one scales them by the rules of docs/rules.md,
section 8 (Malladi et al. 2022, arXiv:2205.10287).
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults("sweep")
    c.dataset = "digits"
    c.batch_size = 64
    c.steps = 200  # at batch size 64
    c.model = ConfigDict({"name": "resmlp", "width": 32, "depth": 4})
    c.base_width = 32
    c.base_depth = 4
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.1})
    c.optimizer.mask = "matrices"  # biases and norms do not decay
    c.learning_rate = 2.0**-7
    c.schedule.warmup = 20
    c.sweep.axes.learning_rate = "2**[-12:-2:1]"
    c.sweep.choices = (("batch_size", (16, 32, 64, 128, 256, 512)),)
    c.sweep.equal_examples = True
    c.sweep.seeds = 4
    c.sweep.average_last = 50
    return c

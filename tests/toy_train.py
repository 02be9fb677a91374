"""A training run that takes seconds, for the tests of the command line."""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """Digits, and all that a checkpoint has to carry."""
    c = defaults()
    c.dataset = "digits"
    c.augment = ({"name": "rotate", "degrees": 10},)
    c.mixup = 0.2
    c.label_smoothing = 0.1
    c.model = ConfigDict({"name": "resmlp", "width": 32, "depth": 4})
    c.base_width = 16
    c.base_depth = 2
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.01})
    c.learning_rate = 0.01
    c.schedule.warmup = 5
    c.clip_norm = 1.0
    c.ema = 0.9
    c.accumulate = 2
    c.batch_size = 32
    c.steps = 420
    c.log_every = 3
    c.eval_every = 20
    c.save_every = 7
    return c

"""The residual CNN of Bordelon et al. (App. A.1) on CIFAR-10, augmented as there.

    mupax train --config cifar10_cnn --config.data_dir=DIR

Measured on CIFAR-10, JPEG q75, with --config.steps=1500: 64.1 % of the test split.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "cifar10"
    c.augment = ("flip", "rotate", "affine", "color_jitter")
    c.model = ConfigDict({"name": "cnn", "width": 128, "depth": 6})
    c.base_width = 64
    c.base_depth = 6
    c.optimizer = ConfigDict({"name": "sgd", "momentum": 0.9})
    c.learning_rate = 0.02
    c.batch_size = 64
    c.steps = 3000
    c.log_every = 50
    c.eval_every = 1000
    c.save_every = 1000
    return c

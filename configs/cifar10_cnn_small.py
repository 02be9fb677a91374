"""The residual CNN of Bordelon et al. (App. A.1) on CIFAR-10 of 16 x 16 pixels.

    mupax train --config cifar10_cnn_small --config.data_dir=DIR

docs/results.md has what it reached, and what larger ones reach at its learning rate.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "cifar10"
    c.data.image_size = 16
    c.model = ConfigDict({"name": "cnn", "width": 32, "depth": 3})
    c.base_width = 32
    c.base_depth = 3
    c.optimizer = ConfigDict({"name": "sgd", "momentum": 0.9})
    c.learning_rate = 2.0**-5  # about the best at this size
    c.schedule.warmup = 50
    c.batch_size = 64
    c.steps = 781  # one epoch
    c.log_every = 71
    c.eval_every = 781
    c.save_every = 781
    return c

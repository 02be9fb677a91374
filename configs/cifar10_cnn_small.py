"""A small residual CNN (Bordelon et al. 2023, App. A.1) on CIFAR-10 at 16 x 16 pixels.

    mupax train --config cifar10_cnn_small --config.data_dir=DIR

Results: benchmarks/results.md, also of larger models at the same learning rate.
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
    c.learning_rate = 2.0**-5  # near the optimum at this size
    c.schedule.warmup = 50
    c.batch_size = 64
    c.steps = 781  # one epoch
    c.log_every = 71
    c.eval_every = 781
    c.save_every = 781
    return c

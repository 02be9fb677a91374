"""The residual CNN of Bordelon et al. 2023 (arXiv:2309.16620, App. A.1) on CIFAR-10.

    mupax train --config cifar10_cnn --config.data_dir=DIR

Augmentation is that of the paper. Result with --config.steps=1500, on a copy of
CIFAR-10 as JPEG files of quality 75: 64.6 % test accuracy (benchmarks/results.md).
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

"""ResNet-18 (He et al. 2016, arXiv:1512.03385) with the CIFAR stem on CIFAR-10.

    mupax train --config cifar10_resnet18 --config.data_dir=DIR

Expected: 93 to 95 % test accuracy, as github.com/kuangliu/pytorch-cifar reports for
this network. We have not trained it to the end: a step takes seconds on 2 cores.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "cifar10"
    c.augment = ("pad_crop", "flip")
    c.model = ConfigDict({"name": "resnet18", "stem": "cifar"})
    c.base_width = 64
    c.base_depth = 1
    c.optimizer = ConfigDict({"name": "sgd", "momentum": 0.9})
    c.learning_rate = 0.1
    c.batch_size = 128
    c.steps = 78_000  # 200 epochs
    c.log_every = 50
    c.eval_every = 390
    c.save_every = 390
    return c

"""A small ViT on CIFAR-10: patches of 4 x 4 pixels, with RandAugment and mixup.

    mupax train --config cifar10_vit --config.data_dir=DIR

Result with --config.steps=80 --config.schedule.warmup=20, on a copy of CIFAR-10 as JPEG
files of quality 75: 25.3 % test accuracy. We have not trained it to the end: 100 epochs
take days on 2 cores. Architecture: Dosovitskiy et al. 2020 (arXiv:2010.11929).
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "cifar10"
    c.augment = ("pad_crop", "flip", "rand_augment")
    c.mixup = 0.2
    c.label_smoothing = 0.1
    c.model = ConfigDict({"name": "vit", "patch_size": 4, "pool": "mean"})
    c.model.width = 192
    c.model.depth = 6
    c.model.head_dim = 32
    c.base_width = 96
    c.base_depth = 6
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.05})
    c.optimizer.mask = "matrices"  # biases and norms do not decay
    c.learning_rate = 2e-3
    c.schedule.warmup = 200
    c.clip_norm = 1.0
    c.batch_size = 128
    c.steps = 39_000  # 100 epochs
    c.log_every = 50
    c.eval_every = 390
    c.save_every = 390
    return c

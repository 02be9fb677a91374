"""ViT-B/16 on ImageNet at 224 x 224, tuned at a quarter of its width.

    mupax plan --config imagenet_vit --topology v6e:16x16
    mupax train --config imagenet_vit --workdir runs/imagenet_vit

Expected: 79 to 80 % validation accuracy after 300 epochs, as Steiner et al. 2021
(arXiv:2106.10270) without other data. We have planned it and run it on noise, but not
on ImageNet.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "imagenet2012"
    c.stand_in = "fake:224x224x3:1000"
    c.data = ConfigDict({"image_size": 224})
    c.augment = ("random_resized_crop", "flip", "rand_augment")
    c.mixup = 0.2
    c.model = ConfigDict({"name": "vit_base_patch16_224", "dtype": "bfloat16"})
    c.model.remat = "full"
    c.base_width = 192
    c.base_depth = 12
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.1})
    c.optimizer.mask = "matrices"  # biases and norms do not decay
    c.learning_rate = 1e-3
    c.schedule.warmup = 10_000
    c.clip_norm = 1.0
    c.batch_size = 4096
    c.steps = 93_000  # 300 epochs
    c.log_every = 100
    c.eval_every = 2_500
    c.save_every = 2_500
    return c

"""A ViT on Tiny-ImageNet: 64 x 64 pixels, 200 classes, patches of 8 x 8.

    mupax train --config tiny_imagenet_vit

reads the folder tiny-imagenet-200 of http://cs231n.stanford.edu/tiny-imagenet-200.zip
(ImageNet's terms: research and education only), and tests on a tenth of its training
images. Result on a fifth of the training images, with --config.batch_size=32
--config.steps=60 --config.schedule.warmup=10: 1.65 % test accuracy (chance is 0.5 %).
We have not trained it to the end, which takes hours on 2 cores.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "images:tiny-imagenet-200/train"
    c.stand_in = "fake:64x64x3:200"
    c.data = ConfigDict({"image_size": 64})
    c.augment = ("random_resized_crop", "flip")
    c.label_smoothing = 0.1
    c.model = ConfigDict({"name": "vit", "patch_size": 8})
    c.model.width = 192
    c.model.depth = 8
    c.model.head_dim = 64
    c.base_width = 192
    c.base_depth = 8
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.05})
    c.optimizer.mask = "matrices"  # biases and norms do not decay
    c.learning_rate = 1e-3
    c.schedule.warmup = 200
    c.clip_norm = 1.0
    c.batch_size = 128
    c.steps = 15_000
    c.log_every = 50
    c.eval_every = 500
    c.save_every = 500
    return c

"""ResNet-50 (He et al. 2016, arXiv:1512.03385) on ImageNet at 224 x 224.

    mupax plan --config imagenet_resnet50 --topology v5e:4x8
    mupax train --config imagenet_resnet50 --workdir runs/imagenet_resnet50

Expected: 76 to 77 % validation accuracy after 90 epochs, as He et al. and torchvision's
first weights. We have planned it and run it on noise, but not on ImageNet.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "imagenet2012"
    c.stand_in = "fake:224x224x3:1000"
    c.data = ConfigDict({"image_size": 224})
    c.augment = ("random_resized_crop", "flip")
    c.label_smoothing = 0.1
    c.model = ConfigDict({"name": "resnet50", "dtype": "bfloat16"})
    c.base_width = 64
    c.base_depth = 1
    c.optimizer = ConfigDict({"name": "sgd", "momentum": 0.9})
    c.learning_rate = 0.4
    c.schedule.warmup = 6_250
    c.batch_size = 1024
    c.steps = 112_500  # 90 epochs
    c.log_every = 100
    c.eval_every = 1_250
    c.save_every = 1_250
    return c

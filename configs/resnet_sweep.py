"""Learning-rate transfer of ResNets over depth: Bordelon et al. 2023, Figure 2.

    mupax sweep --config resnet_sweep --config.data_dir=DIR --workdir runs/bordelon-2

A ResNet of two stages with batch norm, instance norm and no norm, on CIFAR-10 at
16 x 16 pixels. Results: papers/evidence.md. Paper: arXiv:2309.16620.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults("sweep")
    c.dataset = "cifar10"
    c.data.image_size = 16
    c.batch_size = 32
    c.steps = 100
    c.model = ConfigDict({"name": "resnet18", "branch_multiplier": 1.0})
    c.model.blocks = (1, 1)
    c.model.stem = "cifar"
    c.model.width = 8  # the base's
    c.model.depth = 1
    c.optimizer = ConfigDict({"name": "sgd", "momentum": 0.9})
    c.learning_rate = 2.0**-4  # near the base's optimum
    c.schedule.name = "constant"
    c.sweep.depths = (1, 2, 4)  # how often the blocks of a stage are repeated
    c.sweep.widths = (8,)
    c.sweep.axes.learning_rate = "2**[-8:-2:1]"
    # "instance" is the paper's LayerNorm, over each two-dimensional channel (App. A.2).
    c.sweep.choices = (("model.norm", ("batch", "instance", "none")),)
    c.sweep.seeds = 2
    c.sweep.average_last = 25
    c.sweep.parametrizations = ConfigDict(
        {
            "mup": {"name": "mup"},
            "depth_mup": {"name": "depth_mup"},
            "completep": {"name": "completep"},
        }
    )
    return c

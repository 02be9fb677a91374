"""Learning-rate transfer of a residual CNN: Bordelon et al. 2023, Figures 1 and B.2.

    mupax sweep --config cnn_sweep --config.data_dir=DIR --workdir runs/bordelon-1

SGD on CIFAR-10 at 16 x 16 pixels, over width and depth. For momentum and richness
(Figure 4) or a schedule, add --config.sweep.axes.momentum='1-2**[-4:-1]',
--config.sweep.axes.richness='2**[-2:2]' or --config.schedule.name=cosine.
Results: papers/evidence.md. Paper: arXiv:2309.16620.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults("sweep")
    c.dataset = "cifar10"
    c.data.image_size = 16
    c.batch_size = 32
    c.steps = 200
    # L counts the convolutions after the three poolings, as in App. A.1.
    c.model = ConfigDict({"name": "cnn", "branch_multiplier": 1.0})
    c.model.count_pooling = True
    c.model.width = 16  # the base's
    c.model.depth = 3
    c.optimizer = ConfigDict({"name": "sgd", "momentum": 0.9})
    c.learning_rate = 2.0**-6  # near the base's optimum
    c.schedule.name = "constant"
    c.sweep.depths = (3, 6, 12, 24)
    c.sweep.widths = (8, 16, 32, 64)
    c.sweep.axes.learning_rate = "2**[-10:-2:1]"
    c.sweep.seeds = 2
    c.sweep.average_last = 50
    c.sweep.parametrizations = ConfigDict(
        {
            "sp": {"name": "sp"},
            "mup": {"name": "mup"},
            "depth_mup": {"name": "depth_mup"},
        }
    )
    return c

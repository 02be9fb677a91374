"""Learning-rate transfer of a residual MLP over depth: Tensor Programs VI.

    mupax sweep --config resmlp_sweep --config.data_dir=DIR --workdir runs/tp6-10

Figures 10 and 11 on CIFAR-10 at 16 x 16 pixels, with narrower models and fewer steps.
For other figures add --config.model.nonlinearity=abs --config.model.layer_norm=True
(12), --config.sweep.axes.branch_multiplier='2**[-5:0]' (13),
--config.model.activation_first=True (2) or --config.model.block_depth=2 (4 to 7).
Results: papers/evidence.md. Paper: arXiv:2310.02244.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults("sweep")
    c.dataset = "cifar10"
    c.data.image_size = 16
    c.batch_size = 64
    c.steps = 300
    # As in the paper, the input and output layers are not trained.
    # At 300 to 39,100 steps of Adam, the base's loss is within 0.2 % of that at the
    # best branch multiplier (papers/evidence.md).
    c.model = ConfigDict({"name": "resmlp", "branch_multiplier": 0.25})
    c.model.train_ends = False
    c.model.nonlinearity = "relu"
    c.model.layer_norm = False
    c.model.activation_first = False
    c.model.block_depth = 1
    c.model.width = 64  # the base's
    c.model.depth = 8
    c.optimizer = ConfigDict({"name": "adam"})
    c.learning_rate = 2.0**-7  # near the base's optimum
    c.schedule.name = "constant"
    c.sweep.depths = (8, 32, 128, 256)
    c.sweep.widths = (64,)
    c.sweep.axes.learning_rate = "2**[-14:-5:1]"
    c.sweep.seeds = 2
    c.sweep.average_last = 100
    c.sweep.parametrizations = ConfigDict(
        {
            "no_depth_scaling": {"name": "mup"},
            "half_alpha": {"name": "residual", "alpha": 0.5, "gamma": 0.0},
            "ode": {"name": "ode"},
            "depth_mup": {"name": "depth_mup"},
        }
    )
    return c

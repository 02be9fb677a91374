"""Learning-rate transfer of a plain ReLU MLP over depth: Jelassi et al. 2023.

    mupax sweep --config mlp_sweep --config.data_dir=DIR --workdir runs/mlp

Without residual branches, under μP alone and with the paper's factor L^(-3/2), on
CIFAR-10 at 16 x 16 pixels. Results: papers/evidence.md. Paper: arXiv:2305.07810.
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
    c.model = ConfigDict({"name": "mlp", "nonlinearity": "relu"})
    c.model.width = 128  # the base's
    c.model.depth = 8
    c.optimizer = ConfigDict({"name": "adam"})
    c.learning_rate = 2.0**-10  # near the base's optimum
    c.schedule.name = "constant"
    c.sweep.depths = (8, 16, 32)
    c.sweep.widths = (128,)
    c.sweep.axes.learning_rate = "2**[-15:-7:1]"
    c.sweep.seeds = 2
    c.sweep.average_last = 100
    c.sweep.parametrizations = ConfigDict(
        {"mup": {"name": "mup"}, "relu_mlp": {"name": "relu_mlp"}}
    )
    return c

"""A residual MLP on scikit-learn's 8 x 8 digits; needs no download.

    mupax train --config digits

Measured: 96.7 and 98.1 % of the test split (500 steps, seeds 0 and 1).
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "digits"
    c.model = ConfigDict({"name": "resmlp", "width": 128, "depth": 16})
    # The best learning rates of a = 1/4 to 2 reach losses below 0.001: any a will do.
    c.model.branch_multiplier = 1.0
    c.base_width = 64
    c.base_depth = 8
    c.optimizer = ConfigDict({"name": "adam"})
    c.learning_rate = 2.0**-9
    c.batch_size = 128
    c.steps = 500
    c.log_every = 25
    c.eval_every = 100
    c.save_every = 100
    return c

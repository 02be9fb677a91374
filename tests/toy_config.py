"""The main job at a size that takes seconds."""

from ml_collections import ConfigDict

from mupax.configs import digits_resmlp


def get_config() -> ConfigDict:
    """Two depths, two widths, two parametrizations."""
    c = digits_resmlp.get_config()
    c.model.width = 8
    c.model.depth = 2
    c.sweep.depths = (2, 4)
    c.sweep.widths = (8, 16)
    c.sweep.axes.learning_rate = "2**[-9:-3:2]"
    c.sweep.base_axes = ConfigDict()
    c.steps = 30
    c.sweep.seeds = 2
    c.sweep.average_last = 5
    c.target.width = 16
    c.target.depth = 4
    c.target.steps = 30
    c.target.eval_every = 10
    c.target.save_every = 10
    return c

"""A run of two devices, each of which has a part of the weights.

With dropout, whose random keys are part of the state.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """A ViT on digits, whose steps take longer than the store on a quick machine."""
    c = defaults()
    c.dataset = "digits"
    noisy = {"dropout": 0.1, "heads": 2, "patch_size": 1}
    c.model = ConfigDict({"name": "vit", "width": 96, "depth": 2, **noisy})
    c.mesh.fsdp = 2
    c.learning_rate = 0.01
    c.ema = 0.9
    c.batch_size = 32
    c.steps = 36
    c.log_every = 2
    c.eval_every = 18
    c.save_every = 4
    return c

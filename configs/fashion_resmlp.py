"""The residual MLP of Tensor Programs VI on Fashion-MNIST, at its base size.

    mupax train --config fashion_resmlp --config.data_dir=DIR

Results: benchmarks/results.md, also of larger models at the same learning rate.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults()
    c.dataset = "fashion_mnist"
    c.model = ConfigDict({"name": "resmlp", "width": 32, "depth": 4})
    c.model.branch_multiplier = 0.5
    c.base_width = 32
    c.base_depth = 4
    c.optimizer = ConfigDict({"name": "adam"})
    c.learning_rate = 2.0**-7  # near the optimum at this size
    c.schedule.warmup = 100
    c.batch_size = 64
    c.steps = 1875  # two epochs
    c.log_every = 75
    c.eval_every = 1875
    c.save_every = 625
    return c

"""Search the hyperparameters of groups of parameters of a small residual MLP.

    mupax search --config modules_search --workdir runs/search

The smallest and largest value of each axis bound the search (docs/howto/modules.md).
Paper: Mlodozeniec et al. 2025 (arXiv:2512.22382).
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults("sweep")
    c.dataset = "digits"
    c.model = ConfigDict({"name": "resmlp", "width": 32, "depth": 4})
    c.base_width = 32
    c.base_depth = 4
    c.batch_size = 64
    c.steps = 150
    c.optimizer = ConfigDict({"name": "adamw", "weight_decay": 0.1})
    c.optimizer.mask = "matrices"  # biases and norms do not decay
    c.learning_rate = 2.0**-7
    c.modules = ConfigDict(
        {
            "embedding": {"pattern": "role:input"},
            "hidden": {"pattern": "role:hidden"},
            "readout": {"pattern": "role:output"},
        }
    )
    c.sweep.axes.learning_rate = "2**[-10:-4:1]"
    for group in ("embedding", "readout"):
        c.sweep.axes[f"{group}/learning_rate"] = "2**[-3:3]"
    for group in ("embedding", "hidden", "readout"):
        c.sweep.axes[f"{group}/init_scale"] = "2**[-2:2]"
    c.sweep.axes["hidden/weight_decay"] = "2**[-3:3]"
    c.sweep.seeds = 2
    return c

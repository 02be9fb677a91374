"""Learning-rate transfer of a ViT over depth: Bordelon et al. 2023, Figure 3.

    mupax sweep --config vit_sweep --config.data_dir=DIR --workdir runs/bordelon-3

Adam on CIFAR-10 in patches of 8, with and without LayerNorm. For warm-up and cosine
decay, add --config.schedule.name=cosine --config.schedule.warmup=40. Results:
papers/evidence.md. Paper: arXiv:2309.16620.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults("sweep")
    c.dataset = "cifar10"
    c.batch_size = 32
    c.steps = 200
    c.model = ConfigDict({"name": "vit", "branch_multiplier": 1.0})
    c.model.patch_size = 8
    c.model.heads = 4
    c.model.width = 32  # the base's
    c.model.depth = 2
    c.optimizer = ConfigDict({"name": "adam"})
    c.learning_rate = 2.0**-9  # near the base's optimum
    c.schedule.name = "constant"
    c.sweep.depths = (2, 4, 8, 16)
    c.sweep.widths = (32,)
    c.sweep.axes.learning_rate = "2**[-12:-5:1]"
    c.sweep.choices = (("model.layer_norm", (True, False)),)
    c.sweep.seeds = 2
    c.sweep.average_last = 50
    c.sweep.parametrizations = ConfigDict(
        {
            "mup": {"name": "mup"},
            "depth_mup": {"name": "depth_mup"},
            "completep": {"name": "completep"},
        }
    )
    return c

"""Learning-rate transfer of a GPT over depth: Tensor Programs VI, section 10.3.

    mupax sweep --config gpt_sweep --config.dataset=text:FILE --workdir runs/tp6-16

On the bytes of a text, without depth scaling, with 1/√L in branches and learning rates,
and with CompleteP. Results: papers/evidence.md. Papers: arXiv:2310.02244 and
arXiv:2505.01618.
"""

from ml_collections import ConfigDict

from mupax.experiments.run.config import defaults


def get_config() -> ConfigDict:
    """The config."""
    c = defaults("sweep")
    c.dataset = "text:input.txt"
    c.data.context = 64
    c.batch_size = 8
    c.steps = 200
    c.model = ConfigDict({"name": "gpt", "branch_multiplier": 1.0, "head_dim": 16})
    c.model.width = 32  # the base's
    c.model.depth = 2
    c.optimizer = ConfigDict({"name": "adam"})
    c.learning_rate = 2.0**-7  # near the base's optimum
    c.schedule.name = "constant"
    c.sweep.depths = (2, 4, 8, 16)
    c.sweep.widths = (32,)
    c.sweep.axes.learning_rate = "2**[-11:-5:1]"
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

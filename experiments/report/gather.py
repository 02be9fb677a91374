"""From a config and what was found to what a report is made of."""

import platform
import shlex
from typing import Any

import jax
from ml_collections import ConfigDict

import mupax
from mupax import optim

from .. import config as configs
from ..sweep.results import Population
from ..sweep.statistics import Sizes
from ..sweep.tradeoff import Tradeoff
from . import SweepData

_LABELS = {
    "sp": "Standard (SP)",
    "half_alpha": "α = ½, γ = 0",
    "depth_mup": "Depth-μP",
}


def swept(
    config: ConfigDict,
    populations: list[Population],
    command: list[str],
    tradeoff: Tradeoff | None = None,
) -> SweepData:
    """A sweep as its report sees it.

    Args:
      config: of the sweep; a target in it is predicted.
      populations: all runs of both axes of size.
      command: what was typed.
      tradeoff: what was trained at equal parameters.
    """
    points = configs.points(config)
    settings = configs.plain(config)
    settings.pop("data_dir", None)
    return SweepData(
        populations=populations,
        base=Sizes(config.base.width, config.base.depth),
        labels=labels(points),
        featured=featured(config),
        steps=config.sweep.steps,
        settings={"config": settings, "machine": machine()},
        subject=subject(config),
        command=shlex.join(command),
        target=target(config),
        tradeoff=tradeoff,
    )


def target(config: ConfigDict) -> Sizes | None:
    """The target's sizes, where the config has one."""
    if "target" not in config:
        return None
    return Sizes(config.target.width, config.target.depth)


def featured(config: ConfigDict) -> str:
    """The parametrization a report is about: the target's, Depth-μP, or the last."""
    points = configs.points(config)
    wanted = config.get("target", {}).get("parametrization")
    default = optim.parametrization("depth_mup")
    same = (key for key, point in points.items() if point == default)
    return wanted if wanted in points else next(same, list(points)[-1])


def labels(points: dict[str, optim.Parametrization]) -> dict[str, str]:
    """The names that a reader sees."""
    return {key: _LABELS.get(key, points[key].name) for key in points}


def subject(config: ConfigDict) -> str:
    """What is trained, in a few words."""
    return f"{config.model.name} on {config.dataset}, {config.optimizer.name}"


def machine() -> dict[str, Any]:
    """Versions and devices."""
    return {
        "mupax": mupax.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": f"{jax.local_device_count()} x {jax.devices()[0].device_kind}",
    }

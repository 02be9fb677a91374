"""From a config to the jobs of a sweep."""

import dataclasses
import itertools
import math
from typing import Any

from ml_collections import ConfigDict

from mupax import optim

from ..config import plain
from ..errors import UserError
from . import grids, hyperparameters
from .engine import Limits
from .tasks import Job


def axes(config: ConfigDict) -> dict[str, tuple[float, ...]]:
    """The swept hyperparameters and their values; the learning rate comes first.

    Raises:
      UserError: an unknown hyperparameter, a grid that does not parse, or values that
        it cannot have.
    """
    given = {k: v for k, v in plain(config.sweep.get("axes", {})).items() if v}
    known = hyperparameters.continuous(config.optimizer.name)
    for name in given:
        if name not in known:
            raise UserError(
                f"sweep.axes has {name!r}, which is no hyperparameter of "
                f"{config.optimizer.name!r} that is a number; there are "
                f"{', '.join(known)}; anything else goes into sweep.choices, as "
                "(('schedule.name', ('constant', 'cosine')),)"
            )
    found = {name: grids.parse(name, grid) for name, grid in given.items()}
    if "learning_rate" not in found:
        raise UserError(
            "sweep.axes lacks learning_rate; write a grid, as "
            "sweep.axes.learning_rate='2**[-12:-3:1]'"
        )
    for name, values in found.items():
        grids.check_range(name, values)
    rates = found.pop("learning_rate")
    return {"learning_rate": rates, **found}


def choices(config: ConfigDict) -> list[dict[str, Any]]:
    """The combinations of what is no number; one empty one where nothing is chosen.

    Raises:
      UserError: a key that the config has not.
    """
    given = config.sweep.get("choices", ())
    try:
        pairs = [(str(key), tuple(values)) for key, values in given]
    except (TypeError, ValueError):
        raise UserError(
            f"sweep.choices is {given!r}; write pairs of a config key and its values, "
            "as (('schedule.name', ('constant', 'cosine')),)"
        ) from None
    for key, _ in pairs:
        if key.split(".")[0] not in ("model", "optimizer", "schedule", "batch_size"):
            raise UserError(
                f"sweep.choices has {key!r}; it can choose model.*, optimizer.*, "
                "schedule.* and batch_size"
            )
    names = [key for key, _ in pairs]
    products = itertools.product(*(values for _, values in pairs))
    return [dict(zip(names, values, strict=True)) for values in products]


def jobs(config: ConfigDict, points: dict[str, optim.Parametrization]) -> list[Job]:
    """The jobs: both axes of size under every parametrization, the cross once."""
    shapes = {(config.base.width, depth) for depth in config.sweep.depths}
    shapes |= {(width, config.base.depth) for width in config.sweep.widths}
    swept = axes(config)
    rates = tuple(math.log2(x) for x in swept.pop("learning_rate"))
    return [
        dataclasses.replace(
            _job(config, chosen),
            parametrization=key,
            point=point,
            width=width,
            depth=depth,
            log2_lr=rates,
            axes=tuple(swept.items()),
            choices=tuple(chosen.items()),
        )
        for key, point in points.items()
        for chosen in choices(config)
        for width, depth in sorted(shapes)
    ]


def _job(config: ConfigDict, chosen: dict[str, Any]) -> Job:
    """A job with a config's settings, those that were chosen put in."""
    parts = {
        "model": plain(config.model),
        "optimizer": plain(config.optimizer),
        "schedule": plain(config.get("schedule", {})),
        "batch_size": config.batch_size,
    }
    for key, value in chosen.items():
        part, _, name = key.partition(".")
        if name:
            parts[part][name] = value
        else:
            parts[part] = value
    return Job(
        parametrization="",
        point=optim.parametrization("sp"),
        width=config.base.width,
        depth=config.base.depth,
        model=tuple(parts["model"].items()),
        base_width=config.base.width,
        base_depth=config.base.depth,
        optimizer=tuple(parts["optimizer"].items()),
        log2_lr=(),
        seeds=config.sweep.seeds,
        steps=config.sweep.steps,
        batch_size=parts["batch_size"],
        average_last=config.sweep.average_last,
        schedule=tuple(parts["schedule"].items()),
        label_smoothing=config.get("label_smoothing", 0.0),
    )


def limits(
    config: ConfigDict, *, stop_diverged: bool, halving: int = 0, workers: int = 1
) -> Limits:
    """What each of several workers on this machine may take."""
    share = config.sweep.get("memory_share", 0.5)
    if not 0 < share <= 1:
        raise UserError(f"sweep.memory_share={share} must lie in 0 to 1, without 0")
    lanes = config.sweep.get("lanes", 0)
    return Limits(share / workers, lanes, stop_diverged, halving)

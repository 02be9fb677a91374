"""Tune some hyperparameters at the base, before the sweep over sizes.

Factors of groups of parameters (`sweep.base_axes`) are tuned together with the learning
rate at the base alone, where runs are cheap. The sweep and the target keep them.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
import rich.console

from ..run.hyperparameters import tuned
from .description import train
from .executors import Executor
from .results import Population, log2
from .space import SweepConfig, described, tasks
from .tasks import ZooTask

FOLDER = "base"  # of the tuning, in the folder of the sweep


def at_base(config: SweepConfig) -> SweepConfig:
    """The sweep of all axes at the base, in the featured parametrization.

    Choices of other keys, e.g. of the batch size, keep the config's own value.
    """
    width, depth = config.sizes
    return dataclasses.replace(
        config,
        axes={**config.axes, **config.base_axes},
        base_axes={},
        choices=({},),
        widths=(width,),
        depths=(depth,),
        parametrizations={config.featured: config.parametrizations[config.featured]},
        target=None,
    )


def base_tasks(config: SweepConfig) -> list[ZooTask]:
    """The task that tunes the base; none without `sweep.base_axes`."""
    return tasks(at_base(config)) if config.base_axes else []


def tune(
    config: SweepConfig,
    folder: pathlib.Path,
    command: Sequence[str],
    console: rich.console.Console,
    executor: Executor | None = None,
) -> SweepConfig:
    """Tune the hyperparameters of `base_axes` at the base, and set them everywhere.

    Args:
      config: a sweep; without `base_axes` it is returned as it is.
      folder: of the sweep. Runs, tables and report of the tuning stand in `base`.
      command: the command line, for the report.
      console: shows the progress and the result.
      executor: where the runs train; None for this process.

    Returns:
      The sweep without `base_axes`, whose base and target have the best values. They
      are those of the grid point of least loss, by the geometric mean over seeds.

    Raises:
      UserError: as in `description.train`.
    """
    if not config.base_axes:
        return config
    sweep = described(at_base(config), command)
    (base,) = train(sweep, None, folder / FOLDER, executor, console=console).populations
    best = base.best()
    values = {name: best[name] for name in config.base_axes}
    console.print(_sentence(config, base, best), highlight=False)
    return dataclasses.replace(
        config,
        base_axes={},
        base=tuned(config.base, values),
        target=None if config.target is None else tuned(config.target, values),
    )


def _sentence(config: SweepConfig, base: Population, best: dict[str, float]) -> str:
    """What was tuned, what it gains, and whether a grid was too short."""
    width, depth = config.sizes
    values = ", ".join(f"{name} {best[name]:.3g}" for name in config.base_axes)
    text = f"Tuned at the base (width {width}, depth {depth}): {values}; "
    text += f"least loss {_least(base):.3g}"
    if all(1.0 in grid for grid in config.base_axes.values()):
        plain = base
        for name in config.base_axes:
            plain = plain.at(name, 1.0)
        text += f", {_least(plain):.3g} with factors of 1"
    edges = [
        name
        for name, grid in config.base_axes.items()
        if len(grid) > 1 and best[name] in (grid[0], grid[-1])
    ]
    if edges:
        text += f". The best {' and '.join(edges)} ends its grid: extend it"
    return f"{text}."


def _least(population: Population) -> float:
    """The least geometric mean over seeds; infinity if a seed diverged everywhere."""
    mean = np.exp2(log2(population.loss).mean(axis=0))
    return float(np.min(mean, initial=np.inf, where=np.isfinite(mean)))

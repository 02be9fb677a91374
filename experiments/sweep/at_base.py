"""Tune factors of groups of parameters at the base, before the sweep over sizes.

The factors (`sweep.base_axes`) are tuned together with the sweep's axes at the base
alone, where runs are cheap. The sweep and the target keep them.
"""

import dataclasses
import pathlib

import rich.console

from ..io import write_durably
from ..report.data import least
from ..run.hyperparameters import tuned
from . import engine
from .results import Population, table
from .space import SweepConfig, tasks
from .store import Store
from .tasks import ZooTask
from .training import STORED, Executor, run_all, writing

FOLDER = "base"  # of the tuning, in the folder of the sweep


def base_tasks(config: SweepConfig) -> list[ZooTask]:
    """The task that tunes the base, in the featured parametrization.

    Choices of other keys, e.g. of the batch size, keep the config's own value. Without
    `sweep.base_axes` there is no task.
    """
    if not config.base_axes:
        return []
    width, depth = config.sizes
    alone = dataclasses.replace(
        config,
        axes={**config.axes, **config.base_axes},
        base_axes={},
        choices=({},),
        widths=(width,),
        depths=(depth,),
        parametrizations={config.featured: config.parametrizations[config.featured]},
        target=None,
    )
    return tasks(alone)


def tune(
    config: SweepConfig,
    folder: pathlib.Path,
    console: rich.console.Console,
    executor: Executor | None = None,
) -> SweepConfig:
    """Tune the factors of `base_axes` at the base, and set them everywhere.

    Args:
      config: a sweep; without `base_axes` it is returned as it is.
      folder: of the sweep. The runs of the tuning and their table stand in `base`.
      console: shows the progress and the result.
      executor: where the runs train; None for this process.

    Returns:
      The sweep without `base_axes`, whose base and target have the best values. They
      are those of the grid point of least loss, by the geometric mean over seeds.

    Raises:
      UserError: a task failed, or the table cannot be written; runs are kept.
    """
    if not config.base_axes:
        return config
    place = folder / FOLDER
    (base,) = run_all(
        *(base_tasks(config), None, place / STORED, config.limits, executor),
        console=console,
    )
    with writing(place):
        write_durably(place / "results.csv", table([base]))
    console.print(_sentence(config, base, base.best()), highlight=False)
    return _with_best(config, base)


def as_stored(config: SweepConfig, folder: pathlib.Path) -> SweepConfig:
    """The sweep as `tune` returns it, if all runs of the tuning are stored."""
    store = Store(folder / FOLDER / STORED)
    if not config.base_axes:
        return config
    (task,) = base_tasks(config)
    if engine.missing(task, store):
        return config
    return _with_best(config, engine.run(task, None, store))


def _with_best(config: SweepConfig, base: Population) -> SweepConfig:
    best = base.best()
    values = {name: best[name] for name in config.base_axes}
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
    text += f"least loss {least(base):.3g}"
    if all(1.0 in grid for grid in config.base_axes.values()):
        plain = base
        for name in config.base_axes:
            plain = plain.at(name, 1.0)
        text += f", {least(plain):.3g} with factors of 1"
    edges = [
        name
        for name, grid in config.base_axes.items()
        if len(grid) > 1 and best[name] in (grid[0], grid[-1])
    ]
    if edges:
        text += f". The best {' and '.join(edges)} ends its grid: extend it"
    return f"{text}."

"""`mupax search`: many hyperparameters at once, on the base, by a trust-region search.

A grid over ten hyperparameters is too large. CMA-ES draws candidates around the best
point so far, and adapts the region from which it draws. All candidates of a round are
lanes of one program, which is compiled once.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import rich.console
from ml_collections import ConfigDict

from .. import io
from ..errors import UserError, import_extra
from ..run import workdir
from ..run.hyperparameters import transfer_record
from . import engine, grids, space
from .command import check_data
from .description import STORED
from .engine import Limits, Point
from .results import log2
from .store import Store
from .tasks import ZooTask

_WORST = 1e6  # the objective of a candidate that diverged


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A candidate and its result."""

    round: int  # from 0
    point: Point  # values of the hyperparameters, in the order of the axes
    loss: float  # geometric mean over seeds; NaN if a run diverged


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    names: tuple[str, ...]  # of the hyperparameters
    candidates: tuple[Candidate, ...]  # in order; the first is the start
    best: Candidate  # of least loss
    fresh: tuple[float, float]  # losses of start and best with seeds of their own

    @property
    def values(self) -> dict[str, float]:
        """The best hyperparameters, by name."""
        return dict(zip(self.names, self.best.point, strict=True))


def search(
    task: ZooTask,
    data: Any = None,
    *,
    candidates: int = 16,
    rounds: int = 8,
    radius: float = 1.0,
    seed: int = 0,
    store: Store | None = None,
    limits: Limits | None = None,
) -> SearchResult:
    """Search the box that a task's axes span, from the config's own values.

    Args:
      task: the runs at the base. Of each axis, the least and largest value bound the
        search.
      data: as in `engine.prepare`.
      candidates: number of candidates in each round, at least 4.
      rounds: number of rounds, at least 1.
      radius: initial standard deviation of the candidates, in the unit of each
        hyperparameter (`grids.unit`), e.g. octaves.
      seed: seed of the candidates.
      store: holds the finished runs; None keeps none. A second search with the same
        arguments draws the same candidates and trains none twice.
      limits: what the search may use of memory.

    Raises:
      UserError: an axis with a single value; `cma` is not installed; nothing trained.

    Source: Mlodozeniec et al. 2025 (arXiv:2512.22382) (search in a trust region);
    Hansen 2016 (arXiv:1604.00772) (CMA-ES, of the package cma).
    """
    names = tuple(task.grid)
    low, high = (list(ends) for ends in zip(*_box(task), strict=True))
    start = zip(names, start_of(task), strict=True)
    first = [grids.coordinate(name, x) for name, x in start]
    options = {
        "bounds": [low, high],
        "popsize": candidates,
        "seed": seed + 1,  # 0 means the time of day
        "verbose": -9,
        # A unit of each axis is a radius, or half of a narrower box.
        "CMA_stds": [min(radius, (b - a) / 2) for a, b in zip(low, high, strict=True)],
    }
    cma = import_extra("cma", "search", "mupax search")
    strategy = cma.CMAEvolutionStrategy(first, 1.0, options)
    training = task.training(data)
    compiled: dict[range, engine.Chunks] = {}  # by seeds
    stored = {} if store is None else engine.stored_runs(task, store)

    def losses_of(points: Sequence[Point], seeds: range) -> list[float]:
        """Geometric means of the losses over seeds; NaN where a run diverged."""
        missing = [
            at
            for at in dict.fromkeys(points)  # a candidate may be asked for twice
            if any((seed, at) not in stored for seed in seeds)
        ]
        if missing:
            if seeds not in compiled:
                compiled[seeds] = engine.Chunks(
                    task, training, limits or Limits(), candidates, seeds
                )
            stored.update(engine.train_points(compiled[seeds], missing, store))
        # None turns into NaN.
        losses = np.array(
            [[stored[seed, at].losses[0] for seed in seeds] for at in points], float
        )
        return np.exp2(log2(losses).mean(axis=1)).tolist()

    done: list[Candidate] = []
    for index in range(rounds):
        asked = [list(map(float, x)) for x in strategy.ask()]
        if index == 0:
            asked[0] = first
        points = [
            tuple(grids.value(n, x) for n, x in zip(names, xs, strict=True))
            for xs in asked
        ]
        losses = losses_of(points, range(task.seeds))
        strategy.tell(
            asked, [math.log(x) if math.isfinite(x) else _WORST for x in losses]
        )
        done += [Candidate(index, *pair) for pair in zip(points, losses, strict=True)]
    finite = [c for c in done if math.isfinite(c.loss)]
    if not finite:
        raise UserError(
            "every candidate diverged; lower the values of sweep.axes.learning_rate, "
            "in a new --workdir"
        )
    best = min(finite, key=lambda candidate: candidate.loss)
    # The least of many noisy losses is too low: train again with other seeds.
    at_start, at_best = losses_of(
        [done[0].point, best.point], range(task.seeds, 2 * task.seeds)
    )
    return SearchResult(names, tuple(done), best, (at_start, at_best))


def _box(task: ZooTask) -> list[tuple[float, float]]:
    """The least and largest coordinate of each axis, which must differ."""
    if len(task.grid) < 2:
        raise UserError(
            f"sweep.axes has {', '.join(task.grid)} only, and a search needs two axes "
            "at least; `mupax sweep` finds the best value of one"
        )
    box = []
    for name, values in task.grid.items():
        ends = grids.coordinate(name, min(values)), grids.coordinate(name, max(values))
        if ends[0] == ends[1]:
            raise UserError(
                f"sweep.axes has one value of {name}; a search needs the least and the "
                "largest that it may take, e.g. (0.25, 4.0)"
            )
        box.append(ends)
    return box


def run(
    config: ConfigDict,
    folder: str | pathlib.Path,
    *,
    candidates: int = 16,
    rounds: int = 8,
    radius: float = 1.0,
) -> dict[str, Any]:
    """Search the base's hyperparameters; the same command resumes a killed search.

    Args:
      config: a sweep's config. Its axes bound the search, and its sizes are not used.
      folder: the run directory.
      candidates: as in `search`, like the next two.
      rounds: at least 1.
      radius: in octaves.

    Returns:
      The contents of `summary.json`, which `transfer_from` reads.

    Raises:
      UserError: bad input, in one sentence; existing files are kept.
    """
    console = rich.console.Console()
    for name, value, least in (("candidates", candidates, 4), ("rounds", rounds, 1)):
        if value < least:
            raise UserError(f"--{name}={value} must be at least {least}")
    if not 0 < radius < 100:
        raise UserError(f"--radius={radius} must lie between 0 and 100 octaves")
    space.check_untracked(config, "search.csv and summary.json")
    parsed = space.parse_sweep(config)
    base = dataclasses.replace(
        parsed,
        widths=(parsed.sizes.width,),
        depths=(parsed.sizes.depth,),
        parametrizations={parsed.featured: parsed.parametrizations[parsed.featured]},
    )
    if len(parsed.choices) > 1 or parsed.choices[0]:
        raise UserError("sweep.choices is for `mupax sweep`; leave it empty to search")
    (task,) = space.tasks(base)
    _box(task)  # raises if the axes cannot be searched
    directory = pathlib.Path(folder)
    settings = base.settings() | {
        "search": {"candidates": candidates, "rounds": rounds, "radius": radius}
    }
    free = ("search.rounds",)
    workdir.check(directory, settings, free=free)
    settings["contents"] = check_data(base, console, directory)
    with workdir.claim(directory, settings, free=free):
        result = search(
            task,
            candidates=candidates,
            rounds=rounds,
            radius=radius,
            seed=parsed.base.seed,
            store=Store(directory / STORED),
            limits=parsed.limits,
        )
        summary = summarize(parsed, result)
        io.write_durably(directory / "search.csv", table(result))
        io.write_sealed(directory / "summary.json", summary)
    values = ", ".join(f"{name} {x:.3g}" for name, x in result.values.items())
    console.print(
        f"{len(result.candidates)} candidates, best: {values}\n"
        f"With other seeds its loss is {result.fresh[1]:.5g}; that of the start is "
        f"{result.fresh[0]:.5g}\n"
        f"{directory}/search.csv, {directory}/summary.json",
        highlight=False,
        soft_wrap=True,
    )
    return summary


def start_of(task: ZooTask) -> tuple[float, ...]:
    """The config's own values of the axes; the middle of the box where it has none."""
    start = []
    for name, values in task.grid.items():
        low, high = min(values), max(values)
        module, _, factor = name.rpartition("/")
        if module:
            value = task.config.modules[module].get(factor, 1.0)
        else:
            value = getattr(task.config, name, None)
            if value is None:
                value = task.config.optimizer.options.get(name)
        if not isinstance(value, int | float) or not low <= value <= high:
            ends = (grids.coordinate(name, low) + grids.coordinate(name, high)) / 2
            value = grids.value(name, ends)
        start.append(float(value))
    return tuple(start)


def summarize(config: space.SweepConfig, result: SearchResult) -> dict[str, Any]:
    """The contents of `summary.json`."""
    start, best = result.fresh
    return {
        "candidates": len(result.candidates),
        "best": result.values,
        "start": dict(zip(result.names, result.candidates[0].point, strict=True)),
        "loss": {
            "searched": result.best.loss,
            "start": None if math.isnan(start) else start,
            "best": None if math.isnan(best) else best,
        },
        "transfer": transfer_record(config.base, result.values),
    }


def table(result: SearchResult) -> str:
    """Every candidate as a line of CSV; the loss of a diverged candidate is empty."""
    rows = [
        [c.round, *c.point, c.loss if math.isfinite(c.loss) else None]
        for c in result.candidates
    ]
    return io.csv_text([["round", *result.names, "loss"], *rows])

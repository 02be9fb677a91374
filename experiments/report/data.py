"""What a report is made of: a sweep's runs and optima, and the target's curve."""

import dataclasses
import functools
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

import mupax

from ..sweep import optima, statistics
from ..sweep.results import Cell, Optimum, Population, table
from ..sweep.statistics import Sizes
from ..sweep.transfers import TRAININGS, over_training, transfers, verdicts
from ..sweep.verdict import Transfer

Axis = Literal["depth", "width"]
AXES: tuple[Axis, Axis] = ("depth", "width")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines:
    """Loss against one hyperparameter, at all sizes and parametrizations.

    Attributes:
      cells: all cells of the sweep. Those of the base width form the depth axis,
        those of the base depth the width axis; the base cell belongs to both.
      optima: (parametrization, width, depth) to its optimum, None where every run
        diverged.
      labels: parametrization key to the name that a reader sees, in reading order.
      featured: key of the parametrization that the verdict is about.
      base_width: width at which depth is swept.
      base_depth: depth at which width is swept.
      hyperparameter: what the cells are swept over.
    """

    cells: Sequence[Cell]
    optima: Mapping[tuple[str, int, int], Optimum | None]
    labels: Mapping[str, str]
    featured: str
    base_width: int
    base_depth: int
    hyperparameter: str = "learning_rate"

    @property
    def parametrizations(self) -> list[str]:
        """Keys that have cells, in the order of `labels`."""
        swept = dict.fromkeys(c.parametrization for c in self.cells)
        return [k for k in dict.fromkeys([*self.labels, *swept]) if k in swept]

    def label(self, key: str) -> str:
        """The name that a reader sees."""
        return self.labels.get(key, key)

    def along(self, axis: Axis, key: str | None = None) -> list[Cell]:
        """Cells of one axis, smallest first; of one parametrization where given."""
        cells = [
            c
            for c in self.cells
            if key in (None, c.parametrization)
            and (
                c.width == self.base_width
                if axis == "depth"
                else c.depth == self.base_depth
            )
        ]
        return sorted(cells, key=lambda c: size(c, axis))

    def sizes(self, axis: Axis) -> list[int]:
        """All sizes of an axis, ascending, over all parametrizations."""
        return sorted({size(c, axis) for c in self.along(axis)})

    def optimum(self, cell: Cell) -> Optimum | None:
        """The optimum of a cell, None where every run diverged."""
        return self.optima.get((cell.parametrization, cell.width, cell.depth))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """The target or a baseline, trained with the base's best hyperparameters.

    Attributes:
      sizes: its width and depth.
      learning_rate: of the base's shape.
      train_loss: at its end; None where it diverged.
      test_accuracy: at its end.
      curve: (step, training loss).
      evals: (step, test loss, test accuracy).
      checkpoint: where its last checkpoint lies.
      seconds: that it took.
      parameters: how many the model has.
      baseline: "base" for the model of the base's size; the key of its parametrization
        for a model of the target's size; None for the target.
    """

    sizes: Sizes
    learning_rate: float
    train_loss: float | None
    test_accuracy: float | None
    curve: Sequence[tuple[int, float]]
    evals: Sequence[tuple[int, float, float]]
    checkpoint: str
    seconds: float
    parameters: int = 0
    baseline: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepData:
    """Everything that a sweep or a transfer found, as plain data.

    Attributes:
      populations: all runs of both axes of size.
      base: the sizes where the axes cross.
      labels: parametrization key to the name that a reader sees, in reading order.
      featured: key of the parametrization that the verdict is about.
      steps: of each run.
      settings: nested plain data: config, versions, devices.
      subject: what was trained, in a few words.
      command: the command line that makes this report again; "" where there is none.
      target: the sizes to predict the optimum at; None for none.
      trained: the target, of a transfer.
      compared: its baselines.
    """

    populations: Sequence[Population]
    base: Sizes
    labels: Mapping[str, str]
    featured: str
    steps: int
    settings: Mapping[str, Any]
    subject: str
    command: str
    target: Sizes | None = None
    trained: Trained | None = None
    compared: Sequence[Trained] = ()

    @functools.cached_property
    def transfers(self) -> list[Transfer]:
        """Every verdict with its numbers, parametrizations in the order of `labels`."""
        judged = transfers(self.populations, self.base)
        order = list(self.keys)
        names = list(dict.fromkeys(t.name for t in judged))
        place = {"depth": 0, "width": 1}
        return sorted(
            judged,
            key=lambda t: (names.index(t.name), order.index(t.key), place[t.axis]),
        )

    @functools.cached_property
    def over_training(self) -> list[Transfer]:
        """The verdicts over batch size and over training length, where swept."""
        config = self.settings.get("config", {})
        batch_size = config.get("base_batch_size") or config.get("batch_size")
        examples = config.get("base_examples")
        steps = examples // batch_size if examples else self.steps
        tuned = {"batch_size": batch_size, "steps": steps}
        return over_training(self.populations, self.base, tuned)

    @property
    def shown(self) -> list[Transfer]:
        """The verdicts that a reader sees: along axes of several sizes, if any."""
        models = [t for t in self.transfers if t.axis in self.axes]
        if self.over_training and not any(t.sizes[1:] for t in models):
            return self.over_training
        return [*models, *self.over_training]

    @functools.cached_property
    def verdicts(self) -> dict[str, Any]:
        """All of them as JSON-ready data; see `sweep.transfers.verdicts`."""
        judged = [*self.transfers, *self.over_training]
        return verdicts(judged, self.base, self.target)

    @property
    def runs(self) -> int:
        """How many trainings it holds."""
        return sum(p.loss.size for p in self.populations)

    @property
    def table(self) -> str:
        """Every run as a line of CSV."""
        return table(self.populations)

    @functools.cached_property
    def names(self) -> list[str]:
        """The hyperparameters of more than one value."""
        return list(self.verdicts)

    @functools.cached_property
    def keys(self) -> dict[str, str]:
        """Parametrizations, with their choices where there are any, and their labels.

        In the order of `labels`.
        """
        ordered = sorted(self.populations, key=self._place)
        return {statistics.key_of(p): self._label(p) for p in ordered}

    @functools.cached_property
    def all_labels(self) -> dict[str, str]:
        """As `keys`, and of the keys without the choice that a verdict is about."""
        return {
            statistics.key_of(p, without): self._label(p, without)
            for p in self.populations
            for without in ("", *TRAININGS)
        }

    def _label(self, population: Population, without: str = "") -> str:
        label = self.labels.get(population.parametrization)
        words = [label or population.parametrization]
        words += [
            f"{_short(k)} {v}" for k, v in population.choices.items() if k != without
        ]
        return ", ".join(words)

    def _place(self, population: Population) -> int:
        order = list(self.labels)
        key = population.parametrization
        return order.index(key) if key in order else len(order)

    @functools.cached_property
    def main(self) -> str:
        """The featured key; of several choices the one whose base does best."""
        return statistics.key_of(self._best)

    @functools.cached_property
    def mains(self) -> set[str]:
        """The featured key, also without the choice that a verdict is about."""
        return {statistics.key_of(self._best, choice) for choice in ("", *TRAININGS)}

    @functools.cached_property
    def _best(self) -> Population:
        mine = [p for p in self.populations if p.parametrization == self.featured]
        bases = [p for p in mine if (p.width, p.depth) == tuple(self.base)]
        return min(bases, key=least)

    def of(self, key: str) -> list[Population]:
        """The populations of one key."""
        return [p for p in self.populations if statistics.key_of(p) == key]

    def at_base(self, key: str) -> Population:
        """The population where the axes cross."""
        return next(p for p in self.of(key) if (p.width, p.depth) == tuple(self.base))

    def along(self, key: str, axis: Axis) -> list[Population]:
        """The populations of one key along an axis, smallest first."""
        other: Axis = "width" if axis == "depth" else "depth"
        fixed = getattr(self.base, other)
        mine = [p for p in self.of(key) if getattr(p, other) == fixed]
        return sorted(mine, key=lambda p: getattr(p, axis))

    def held(self, axis: Axis) -> str:
        """The size that is fixed along an axis, e.g. "width 64" for depth."""
        other: Axis = "width" if axis == "depth" else "depth"
        return f"{other} {getattr(self.base, other)}"

    @functools.cached_property
    def axes(self) -> list[Axis]:
        """The axes that have several sizes; depth where none has."""
        many = [
            a for a in AXES if any(len(self.along(key, a)) > 1 for key in self.keys)
        ]
        return many or ["depth"]

    def lines(self, name: str) -> Lines:
        """One hyperparameter, every other at its best for each of its values."""
        cells = [
            dataclasses.replace(p.cell(name), parametrization=statistics.key_of(p))
            for p in self.populations
            if name in p.axes
        ]
        return Lines(
            cells=cells,
            optima={
                (c.parametrization, c.width, c.depth): optima.optimum(c) for c in cells
            },
            labels=self.keys,
            featured=self.main,
            base_width=self.base.width,
            base_depth=self.base.depth,
            hyperparameter=name,
        )


def least(population: Population) -> float:
    """Loss at the best point that every seed trained at; infinite where none is."""
    mean = optima.log2(population.loss).mean(axis=0)
    return math.inf if np.isnan(mean).all() else float(2 ** np.nanmin(mean))


def _short(key: str) -> str:
    part, _, name = key.rpartition(".")
    return part if name == "name" else name.replace("_", " ")


def size(cell: Cell, axis: Axis) -> int:
    """Where a cell stands on an axis."""
    return cell.depth if axis == "depth" else cell.width


def finite(value: Any) -> float | None:
    """A number as float; None for what is missing, NaN or infinite."""
    return float(value) if value is not None and math.isfinite(value) else None


def machine() -> dict[str, Any]:
    """Versions and devices."""
    return {
        "mupax": mupax.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": f"{jax.local_device_count()} x {jax.devices()[0].device_kind}",
    }

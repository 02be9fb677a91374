"""The runs of a sweep as plain arrays, and their table."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..io import csv_text
from .grids import coordinate


class Sizes(NamedTuple):
    """Width and depth of a model."""

    width: int
    depth: int


@dataclasses.dataclass(frozen=True, repr=False)
class Cell:
    """The runs of one model shape over one hyperparameter.

    Attributes:
      parametrization: its key in the config, e.g. "depth_mup", and the choices.
      width: the model's width.
      depth: the model's depth.
      log2_lr: values of the hyperparameter as `grids.coordinate` gives them (log2 of
        the learning rate), ascending, shape (values,).
      loss: training loss averaged over the last steps, shape (seeds, values); NaN where
        the run diverged.
      curves: training loss, shape (seeds, values, points), averaged over equal spans
        of steps; NaN from the step of divergence on.
      seconds: wall time of the runs, compilation included.
      axis: name of the hyperparameter.
      guess: chance-level loss; None if it is not known.
    """

    parametrization: str
    width: int
    depth: int
    log2_lr: np.ndarray
    loss: np.ndarray
    curves: np.ndarray
    seconds: float
    axis: str = "learning_rate"
    guess: float | None = None

    def __repr__(self) -> str:
        shape = f"{self.width} x {self.depth}"
        return (
            f"<Cell {self.parametrization} {shape}: {self.loss.size} runs over "
            f"{self.axis}, {int(self.diverged.sum())} diverged>"
        )

    @property
    def diverged(self) -> np.ndarray:
        """Which runs diverged, shape (seeds, values)."""
        return np.isnan(self.loss)


@dataclasses.dataclass(frozen=True, repr=False)
class Population:
    """All runs of one task: one model shape, every grid point and seed.

    Attributes:
      name: the task's name.
      parametrization: its key in the config.
      width: the model's width.
      depth: the model's depth.
      choices: other swept config keys and their values, e.g.
        {"schedule.name": "cosine"}.
      axes: the values of each hyperparameter, in the order of the grid.
      loss: as in `Cell`, shape (seeds, *grid).
      curves: as in `Cell`, shape (seeds, *grid, points).
      seconds: wall time of the runs, compilation included.
      guess: as in `Cell`.
    """

    name: str
    parametrization: str
    width: int
    depth: int
    choices: dict[str, Any]
    axes: dict[str, list[float]]
    loss: np.ndarray
    curves: np.ndarray
    seconds: float
    guess: float | None = None

    def __repr__(self) -> str:
        grid = " x ".join(f"{len(v)} {name}" for name, v in self.axes.items())
        return (
            f"<Population {self.name}: {self.parametrization} {self.width} x "
            f"{self.depth}, {self.loss.shape[0]} seeds x {grid}>"
        )

    @property
    def sizes(self) -> Sizes:
        """Width and depth."""
        return Sizes(self.width, self.depth)

    def key(self, without: str = "") -> str:
        """The parametrization and the choices, `without` one, as one key."""
        choices = {k: v for k, v in self.choices.items() if k != without}
        return key_of(self.parametrization, choices)

    def coordinates(self, name: str) -> np.ndarray:
        """The values of a hyperparameter as `grids.coordinate` gives them, rising."""
        return np.array([coordinate(name, x) for x in self.axes[name]])

    def cell(self, axis: str = "learning_rate") -> Cell:
        """The runs over one hyperparameter, every other at its best for each value.

        The best point has the least geometric mean over seeds, among the points at
        which no seed diverged, or else at which the fewest seeds diverged.
        """
        at = 1 + list(self.axes).index(axis)
        seeds, values = self.loss.shape[0], self.loss.shape[at]
        loss = np.moveaxis(self.loss, at, 1).reshape(seeds, values, -1)
        curves = np.moveaxis(self.curves, at, 1).reshape(*loss.shape, -1)
        mean = log2(loss).mean(axis=0)
        lost = 1e30 * (1 + np.isnan(loss).sum(axis=0))
        best = np.where(np.isfinite(mean), mean, lost).argmin(axis=-1)
        rows = np.arange(values)
        return Cell(
            self.key(),
            *self.sizes,
            self.coordinates(axis),
            loss[:, rows, best],
            curves[:, rows, best],
            self.seconds,
            axis,
            self.guess,
        )

    def at(self, name: str, value: float) -> "Population":
        """The runs at one value of a hyperparameter, which is no longer an axis."""
        axis = 1 + list(self.axes).index(name)
        i = self.axes[name].index(value)
        return dataclasses.replace(
            self,
            axes={k: v for k, v in self.axes.items() if k != name},
            loss=self.loss.take(i, axis),
            curves=self.curves.take(i, axis),
        )

    def best(self) -> dict[str, float]:
        """The grid point of least loss, by the geometric mean over seeds.

        If some seed diverged at every point, those count at which the fewest diverged.
        """
        log_loss = log2(self.loss)
        lost = np.isnan(log_loss).sum(axis=0)
        total = np.nansum(log_loss, axis=0)
        mean = np.where(lost == lost.min(), total / len(log_loss), np.inf)
        at = np.unravel_index(int(mean.argmin()), mean.shape)
        return {
            name: values[int(i)]
            for (name, values), i in zip(self.axes.items(), at, strict=True)
        }

    def surface(self, names: Sequence[str]) -> np.ndarray:
        """Loss over two hyperparameters (across, up), every other at its best.

        Returns:
          Geometric mean over seeds, shape (values across, values up); NaN where a seed
          diverged at every value of the others.

        Examples:
          >>> axes = {"learning_rate": [0.25, 0.5], "eps": [1.0], "b1": [0.5, 0.9]}
          >>> loss = np.array([[[[4.0, 2.0]], [[np.nan, 8.0]]]])
          >>> runs = Population("n", "p", 8, 2, {}, axes, loss, loss[..., None], 0.0)
          >>> runs.surface(("learning_rate", "eps")).round(3).tolist()
          [[2.0], [8.0]]
        """
        at = [list(self.axes).index(name) for name in names]
        mean = np.moveaxis(log2(self.loss).mean(axis=0), at, (0, 1))
        mean = mean.reshape(*mean.shape[:2], -1)
        least = np.where(np.isnan(mean), np.inf, mean).min(axis=-1)
        return np.exp2(np.where(np.isinf(least), np.nan, least))

    def rows(self) -> Iterator[dict[str, Any]]:
        """A record of each run; its loss is None where it diverged."""
        for index in np.ndindex(self.loss.shape):
            loss = float(self.loss[index])
            grid = zip(self.axes.items(), index[1:], strict=True)
            yield {
                "parametrization": self.parametrization,
                "width": self.width,
                "depth": self.depth,
                **self.choices,
                **{name: values[i] for (name, values), i in grid},
                "seed": index[0],
                "loss": loss if math.isfinite(loss) else None,
            }


def key_of(parametrization: str, choices: Mapping[str, Any]) -> str:
    """A parametrization and choices as one key: "mup, model.norm=batch"."""
    return ", ".join([parametrization, *(f"{k}={v}" for k, v in choices.items())])


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The least loss of a cell, and where it is."""

    log2_lr: float  # as `Cell.log2_lr`
    error: float  # standard error over seeds, in octaves (0 for one seed)
    loss: float  # fitted


def table(populations: Iterable[Population]) -> str:
    """Every run as a line of CSV; the loss of a diverged run is empty."""
    rows = [row for population in populations for row in population.rows()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text([names, *([row.get(name) for name in names] for row in rows)])


def log2(loss: np.ndarray) -> np.ndarray:
    """Log2 of losses; of zero, log2 of the smallest positive float."""
    return np.log2(np.maximum(loss, np.finfo(float).tiny))

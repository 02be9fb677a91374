"""What a sweep hands on: plain records, written to and read from JSON."""

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .grids import coordinate


@dataclasses.dataclass(frozen=True, repr=False)
class Cell:
    """All runs of one model shape under one parametrization.

    Attributes:
      parametrization: the key of the parametrization in the config, e.g. "depth_mup".
      width: target width of the model.
      depth: target depth (number of residual blocks).
      log2_lr: the grid of learning rates, as log2, ascending, shape (lrs,).
      loss: training loss averaged over the last steps, shape (seeds, lrs);
        NaN where the run diverged.
      curves: training loss, shape (seeds, lrs, points), averaged over equal spans
        of steps; NaN from the step of divergence on.
      seconds: wall time, compilation included.
      axis: the hyperparameter; where it is not the learning rate, `log2_lr` holds its
        `grids.coordinate`.
      stopped: as in `Population`, shape (seeds, lrs).
    """

    parametrization: str
    width: int
    depth: int
    log2_lr: np.ndarray
    loss: np.ndarray
    curves: np.ndarray
    seconds: float
    axis: str = "learning_rate"
    stopped: np.ndarray | None = None

    def __repr__(self) -> str:
        shape = f"{self.width} x {self.depth}"
        return (
            f"<Cell {self.parametrization} {shape}: {self.loss.size} runs over "
            f"{self.axis}, {int(self.diverged.sum())} diverged>"
        )

    @property
    def diverged(self) -> np.ndarray:
        """Which runs diverged, shape (seeds, lrs)."""
        lost = np.isnan(self.loss)
        return lost if self.stopped is None else lost & (self.stopped == 0)

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data, with null for NaN."""
        fields = dataclasses.asdict(self)
        return {k: _listed(v) for k, v in fields.items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Cell":
        """The inverse of `to_json`."""
        arrays = _arrays(data, "log2_lr", "loss", "curves", "stopped")
        return cls(**{**data, **arrays})


@dataclasses.dataclass(frozen=True, repr=False)
class Population:
    """All runs of one model shape: seeds times the product of all axes.

    Attributes:
      name: of the job.
      parametrization: its key in the config.
      width: of the model.
      depth: of the model.
      choices: what was chosen of what is no number, as {"schedule.name": "cosine"}.
      axes: the hyperparameters and their values, in the order of the grid.
      loss: as in `Cell`, shape (seeds, *grid).
      curves: as in `Cell`, shape (seeds, *grid, points).
      seconds: wall time, compilation included.
      stopped: after how many steps each run was stopped early, for others looked
        better: it has no loss and a curve up to there; 0 where it came to its end or
        diverged. Shape (seeds, *grid); None where none was to be stopped.
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
    stopped: np.ndarray | None = None

    def __repr__(self) -> str:
        grid = " x ".join(f"{len(v)} {name}" for name, v in self.axes.items())
        return (
            f"<Population {self.name}: {self.parametrization} {self.width} x "
            f"{self.depth}, {self.loss.shape[0]} seeds x {grid}>"
        )

    def cell(self, axis: str = "learning_rate") -> Cell:
        """One axis, every other at what is best at each of its values.

        Best by the geometric mean over seeds, of those points where no seed diverged
        or was stopped if there is one.
        """
        at = list(self.axes).index(axis)
        loss = np.moveaxis(self.loss, 1 + at, 1)
        curves = np.moveaxis(self.curves, 1 + at, 1)
        seeds, values = loss.shape[:2]
        loss = loss.reshape(seeds, values, -1)
        curves = curves.reshape(*loss.shape, -1)
        score = np.where(np.isnan(loss), np.inf, loss)
        # Where every point lost a seed, the one that lost fewest.
        broken = np.isnan(loss).sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.log(np.maximum(score, 1e-300)).mean(axis=0)
        stopped = None
        if self.stopped is not None:
            stopped = np.moveaxis(self.stopped, 1 + at, 1).reshape(loss.shape)
            # Of points without a loss those that might have had one.
            broken = broken - 0.5 * (stopped > 0).sum(axis=0)
        best = np.where(np.isfinite(mean), mean, 1e30 + 1e30 * broken).argmin(axis=-1)
        rows = np.arange(values)
        return Cell(
            self.parametrization,
            self.width,
            self.depth,
            np.array([coordinate(axis, x) for x in self.axes[axis]]),
            loss[:, rows, best],
            curves[:, rows, best],
            self.seconds,
            axis,
            None if stopped is None else stopped[:, rows, best],
        )

    def best(self) -> dict[str, float]:
        """The grid point of least loss, by the geometric mean over seeds."""
        with np.errstate(divide="ignore"):
            mean = np.log(self.loss).mean(axis=0)
        whole = np.where(np.isnan(mean), np.inf, mean)
        at = np.unravel_index(int(whole.argmin()), whole.shape)
        return {
            name: values[int(i)]
            for (name, values), i in zip(self.axes.items(), at, strict=True)
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """One record a run, for a table.

        Its loss is None where it diverged or was stopped; "stopped_after" holds the
        steps after which it was, and else None.
        """
        names = list(self.axes)
        for index in np.ndindex(self.loss.shape):
            loss = float(self.loss[index])
            yield {
                "parametrization": self.parametrization,
                "width": self.width,
                "depth": self.depth,
                **self.choices,
                **{n: self.axes[n][i] for n, i in zip(names, index[1:], strict=True)},
                "seed": index[0],
                "loss": loss if math.isfinite(loss) else None,
                "stopped_after": self._stopped_after(index),
            }

    def _stopped_after(self, index: tuple[int, ...]) -> int | None:
        return None if self.stopped is None else int(self.stopped[index]) or None

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data, with null for NaN."""
        return {k: _listed(v) for k, v in vars(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Population":
        """The inverse of `to_json`."""
        return cls(**{**data, **_arrays(data, "loss", "curves", "stopped")})


@dataclasses.dataclass(frozen=True)
class Optimum:
    """Where the loss of a cell is least.

    Attributes:
      log2_lr: the fitted optimum, log2 of the learning rate.
      error: its standard error over seeds, in octaves (0 for one seed).
      loss: the fitted loss there.
    """

    log2_lr: float
    error: float
    loss: float


def table(populations: Iterable[Population]) -> str:
    """Every run as a line of CSV; without a loss where it diverged or was stopped."""
    rows = [row for population in populations for row in population.rows()]
    # Populations of a trade-off have the same columns; choices may add some.
    names = dict.fromkeys(name for row in rows for name in row)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _listed(value.tolist())
    if isinstance(value, list):
        return [_listed(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _arrays(data: dict[str, Any], *names: str) -> dict[str, np.ndarray]:
    return {n: _array(data[n]) for n in names if data.get(n) is not None}


def _array(value: list) -> np.ndarray:
    # dtype=float turns None into NaN at any depth of nesting.
    return np.array(value, dtype=float)

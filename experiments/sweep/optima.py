"""Does the optimum stay? Fits, shifts and regret, from the cells of a sweep."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.interpolate import PchipInterpolator

from .results import Cell, Optimum


def optimum(cell: Cell) -> Optimum | None:
    """The learning rate at which a cell's loss is least.

    A parabola in log2 of the learning rate through the least log loss (geometric
    mean over seeds) and its two neighbours. A learning rate counts as diverged where
    any seed diverged: a learning rate that fails one time in two is no optimum.

    Args:
      cell: losses of shape (seeds, lrs).

    Returns:
      The optimum; its error is the standard error over seeds of the same fit made
      seed by seed. None where every run diverged.

    Examples:
      >>> import numpy as np
      >>> lrs = np.arange(-10.0, -4.0)
      >>> loss = np.exp2(0.3 * (lrs + 7.25) ** 2)[None]
      >>> cell = Cell("sp", 64, 8, lrs, loss, np.empty((1, 6, 0)), 0.0)
      >>> round(optimum(cell).log2_lr, 3)
      -7.25
    """
    if np.isnan(cell.loss).all():
        return None
    # NaN where any seed diverged; if that leaves nothing, where all did.
    log_loss = log2(cell.loss)
    mean = log_loss.mean(axis=0)
    if np.isnan(mean).all():
        mean = nanmean(log_loss)
    where, least = parabola(cell.log2_lr, mean)
    seeds = [
        parabola(cell.log2_lr, row)[0] for row in log_loss if not np.isnan(row).all()
    ]
    error = np.std(seeds, ddof=1) / math.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
    return Optimum(where, float(error), 2.0**least)


def shift(optima: Sequence[Optimum | None]) -> float | None:
    """How far the optimum moves over an axis, in octaves.

    Args:
      optima: the axis' optima.

    Returns:
      Largest minus smallest log2 of the optimal learning rate; None where at some
      size nothing trained.
    """
    found = [o.log2_lr for o in optima if o is not None]
    if not found or len(found) < len(optima):
        return None
    return max(found) - min(found)


def regret(large: Cell, transferred: float) -> float | None:
    """Loss that a large model gives up by using a learning rate tuned elsewhere.

    Args:
      large: the cell of the large model.
      transferred: log2 of the learning rate that the small model likes best.

    Returns:
      Loss at the transferred learning rate minus the least loss, both read off a
      monotone interpolation of log loss; None where the large model diverges there
      or everywhere.
    """
    loss = large.loss.mean(axis=0)  # NaN where any seed diverged
    good = ~np.isnan(loss)
    if not good.any():
        return None
    x, y = large.log2_lr[good], log2(loss[good])
    neighbours = np.abs(large.log2_lr - transferred) < _spacing(large.log2_lr)
    if not good[neighbours].all() or not x[0] <= transferred <= x[-1]:
        return None
    if len(x) == 1:
        return 0.0
    at = float(2.0 ** PchipInterpolator(x, y)(transferred))
    return at - float(loss[good].min())


@dataclasses.dataclass(frozen=True)
class Axis:
    """The cells of one parametrization along depth or along width, small to large."""

    sizes: list[int]
    cells: list[Cell]

    @property
    def optima(self) -> list[Optimum | None]:
        """One a size, None where nothing trained."""
        return [optimum(cell) for cell in self.cells]

    @property
    def shift(self) -> float | None:
        """See `shift`."""
        return shift(self.optima)

    @property
    def regret(self) -> float | None:
        """Regret of the largest model at the smallest model's learning rate."""
        first = self.optima[0]
        return None if first is None else regret(self.cells[-1], first.log2_lr)


def along(cells: Sequence[Cell], parametrization: str, axis: str, fixed: int) -> Axis:
    """The cells of one parametrization along an axis.

    Args:
      cells: all cells of a sweep.
      parametrization: its key in the config.
      axis: "depth" or "width".
      fixed: the size of the other one, the base's.
    """
    other = {"depth": "width", "width": "depth"}[axis]
    chosen = sorted(
        (
            c
            for c in cells
            if c.parametrization == parametrization and getattr(c, other) == fixed
        ),
        key=lambda c: getattr(c, axis),
    )
    return Axis([getattr(c, axis) for c in chosen], chosen)


def log2(loss: np.ndarray) -> np.ndarray:
    """Where a loss is zero, the least that a float can be."""
    return np.log2(np.maximum(loss, np.finfo(float).tiny))


def parabola(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Vertex (x, y) of the parabola through the least point and its neighbours."""
    best = int(np.nanargmin(y))
    around = slice(max(best - 1, 0), best + 2)
    # In the middle of the grid, with both neighbours finite; otherwise the point.
    if y[around].size < 3 or np.isnan(y[around]).any():
        return float(x[best]), float(y[best])
    a, b, c = np.polyfit(x[around] - x[best], y[around], 2)
    if a <= 0:
        return float(x[best]), float(y[best])
    return float(x[best] - b / (2 * a)), float(c - b * b / (4 * a))


def nanmean(rows: np.ndarray) -> np.ndarray:
    """Mean over the first axis of what is a number; NaN where nothing is."""
    count = (~np.isnan(rows)).sum(axis=0)
    total = np.nansum(rows, axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _spacing(grid: np.ndarray) -> float:
    return float(np.diff(grid).max())

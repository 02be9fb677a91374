"""The fitted optimum of one model size, and the loss at other values."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from . import grids
from .results import Cell, Optimum, log2

# Standard deviation of the error that the position of the grid adds to a fitted
# optimum, in octaves, for a grid of octaves. The loss rises faster above the optimum
# than below it, so the vertex of a parabola depends on where the three grid points
# lie. The error is quadratic in the spacing. In tests/digits_16_seeds.csv it is
# 0.086: `pytest tests/test_coverage.py -s -k error_of_the_grid` compares the fits to
# the two octave grids within the half-octave grid.
PHASE = 0.08
# Where the loss jumps, the parabola of the optimum bends this many times as much as
# that of the next three points.
_JUMP = 4.0


def optimum(cell: Cell) -> Optimum | None:
    """Find the value of the hyperparameter at which a cell's loss is least.

    Fits a parabola to the log loss (geometric mean over seeds) at the best grid point
    and its two neighbours. A grid point counts as diverged if any of its seeds
    diverged.

    Args:
      cell: losses of shape (seeds, points).

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
    log_loss = log2(cell.loss)
    mean = log_loss.mean(axis=0)  # NaN where any seed diverged
    if np.isnan(mean).all():
        mean = nanmean(log_loss)
    where, least = parabola(cell.log2_lr, mean)
    seeds = [
        parabola(cell.log2_lr, row)[0] for row in log_loss if not np.isnan(row).all()
    ]
    error = np.std(seeds, ddof=1) / math.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
    return Optimum(where, float(error), 2.0**least)


@dataclasses.dataclass(frozen=True)
class Fit:
    """Log loss of one model size, at grid points and between them.

    Between the best grid point and its neighbours the loss is read off the parabola
    through these three, which gives the optimum. Between two other grid points it is
    read off a parabola through them and a third point: the next on the left or on the
    right, whichever parabola is the flatter (essentially non-oscillatory interpolation;
    Harten et al., J. Comput. Phys. 71, 231, 1987). The flatter one is also read beside
    the best grid point if the loss jumps up there, towards divergence: the parabola of
    the optimum would dip far below every measured loss. Every fitted loss is a weighted
    sum of the losses at grid points, with the same weights for all seeds, and seeds can
    be compared one by one.

    Attributes:
      grid: coordinates of the grid points around the best one at which all seeds
        trained, shape (points,).
      log_loss: log2 of their losses, shape (seeds, points).
      first: index of `grid[0]` in the cell's whole grid.
      size: points of the cell's whole grid.
      linear: whether the coordinate is the value itself, not its log2.
    """

    grid: np.ndarray
    log_loss: np.ndarray
    first: int
    size: int
    linear: bool = False

    @functools.cached_property
    def best(self) -> int:
        """Index of the grid point of least mean log loss."""
        return int(self.log_loss.mean(axis=0).argmin())

    @property
    def optimum(self) -> float:
        """Coordinate of the least loss; the function `optimum` returns the same."""
        return parabola(self.grid, self.log_loss.mean(axis=0))[0]

    @property
    def at_edge(self) -> bool:
        """Whether the best grid point is the first or last of the whole grid."""
        return self.first + self.best in (0, self.size - 1)

    @property
    def place_error(self) -> float:
        """Standard deviation of the optimum's error that the grid causes.

        In units of the coordinate: of a parabola, `PHASE` times the square of the
        larger spacing beside the best grid point in octaves (times the spacing for a
        linear coordinate). Without two neighbours the optimum is a grid point, with an
        error as large as that of a uniform distribution over one spacing.
        """
        if len(self.grid) < 2:
            return 0.0
        step = float(np.diff(self.grid[max(self.best - 1, 0) : self.best + 2]).max())
        if not 0 < self.best < len(self.grid) - 1:
            return step / math.sqrt(12)
        return PHASE * step * (1.0 if self.linear else step)

    def holds(self, x: float) -> bool:
        """Whether the loss at a coordinate is known: between the grid points at which
        all seeds trained, or no further outside than half the spacing there."""
        steps = np.diff(self.grid) if len(self.grid) > 1 else np.zeros(1)
        low, high = self.grid[0] - steps[0] / 2, self.grid[-1] + steps[-1] / 2
        return bool(low - 1e-9 <= x <= high + 1e-9)

    def weights(
        self, values: Sequence[float] | np.ndarray, *, other: bool = False
    ) -> np.ndarray:
        """Weights of the grid points' log losses in the losses at given coordinates.

        Args:
          values: coordinates, shape (values,).
          other: take the other one of the two parabolas. Their difference estimates
            the error of the loss between grid points.

        Returns:
          Shape (values, points); each row sums to one.
        """
        x, count = np.asarray(values, float), len(self.grid)
        width = min(count, 3)
        # The interval of each value, and one of the two parabolas around it.
        left = (np.searchsorted(self.grid, x) - 1).clip(0, max(count - 2, 0))
        first = np.zeros(len(x), int)
        if width == 3:
            bend = np.append(np.append(np.inf, self._bend), np.inf)
            one, two = bend[left], bend[left + 1]
            lower = one <= two
            lower |= (left == self.best) & (one <= _JUMP * two)
            lower &= (left != self.best - 1) | (two > _JUMP * one)
            if other:  # at the ends of the grid there is one parabola only
                lower ^= np.isfinite(one) & np.isfinite(two)
            first = np.where(lower, left - 1, left)
        nodes = self.grid[first[:, None] + np.arange(width)]
        out = np.zeros((len(x), count))
        for i in range(width):
            others = np.delete(nodes, i, axis=1)
            terms = (x[:, None] - others) / (nodes[:, [i]] - others)
            out[np.arange(len(x)), first + i] = terms.prod(axis=1)
        return out

    @functools.cached_property
    def _bend(self) -> np.ndarray:
        """Curvature of the parabola around each inner grid point, without sign."""
        slope = np.diff(self.log_loss.mean(axis=0)) / np.diff(self.grid)
        return np.abs(np.diff(slope)) / (self.grid[2:] - self.grid[:-2])

    def at(self, x: float) -> np.ndarray:
        """Log2 loss of each seed at a coordinate, shape (seeds,)."""
        return self.log_loss @ self.weights([x])[0]


def fit(cell: Cell) -> Fit | None:
    """Fit a cell; None where no grid point trained with every seed.

    Examples:
      >>> import numpy as np
      >>> lrs = np.arange(-10.0, -4.0)
      >>> loss = np.exp2(0.3 * (lrs + 7.25) ** 2)[None]
      >>> fitted = fit(Cell("sp", 64, 8, lrs, loss, np.empty((1, 6, 0)), 0.0))
      >>> fitted.at(-7.75).round(3)  # half an octave from the optimum: 0.3 * 0.5**2
      array([0.075])
    """
    log_loss = log2(cell.loss)
    mean = log_loss.mean(axis=0)
    if np.isnan(mean).all():
        return None
    best = int(np.nanargmin(mean))
    lost = np.flatnonzero(np.isnan(mean))
    first = int(max(lost[lost < best], default=-1)) + 1
    last = int(min(lost[lost > best], default=len(mean)))
    return Fit(
        np.asarray(cell.log2_lr, float)[first:last],
        log_loss[:, first:last],
        first,
        len(mean),
        grids.unit(cell.axis) == "linear",
    )


def parabola(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Vertex (x, y) of the parabola through the least point and its neighbours.

    The least point itself where a neighbour is missing or not finite.
    """
    where, least = vertices(x, np.asarray(y, float)[None])
    return float(where[0]), float(least[0])


def vertices(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`parabola` for many rows at once.

    Args:
      x: coordinates, shape (points,).
      y: values, shape (rows, points); no row without a finite value.

    Returns:
      The vertices' coordinates and values, each of shape (rows,).
    """
    rows, best = np.arange(len(y)), np.nanargmin(y, axis=1)
    where, least = x[best], y[rows, best]
    if len(x) < 3:
        return where, least
    middle = best.clip(1, len(x) - 2)
    left, right = x[middle - 1] - x[middle], x[middle + 1] - x[middle]
    down, up = (y[rows, middle + i] - y[rows, middle] for i in (-1, 1))
    slopes = down / left, up / right
    with np.errstate(invalid="ignore", divide="ignore"):
        a = (slopes[1] - slopes[0]) / (right - left)
        b = slopes[0] - a * left
        inside = (middle == best) & (a > 0)  # not where a neighbour is NaN
        where = np.where(inside, where - b / (2 * a), where)
        least = np.where(inside, least - b * b / (4 * a), least)
    return where, least


def nanmean(rows: np.ndarray) -> np.ndarray:
    """Mean over the first axis of the finite entries; NaN where there are none."""
    count = (~np.isnan(rows)).sum(axis=0)
    total = np.nansum(rows, axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)

"""How the best value of a hyperparameter changes as the model grows."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import special

from . import optima
from .results import Cell, Population, Sizes, log2

_RESAMPLES = 400

BASE = "base"  # a baseline of the target: the model of the base's size

Axis = Literal["depth", "width"]
AXES: tuple[Axis, Axis] = ("depth", "width")
OTHER: dict[Axis, Axis] = {"depth": "width", "width": "depth"}


@dataclasses.dataclass(frozen=True)
class Trend:
    """The line through the optima of one axis, against log2 of the size."""

    slope: float  # units (octaves) per doubling of the size
    error: float  # standard error of the slope, from seeds and from the grid
    freedom: int  # degrees of freedom of the error; 0 for one seed
    sizes: tuple[int, ...]  # widths or depths, rising
    optima: tuple[float | None, ...]  # coordinate at each size; None: nothing trained

    @property
    def interval(self) -> tuple[float, float]:
        """90 % interval of the slope, by Student's t; NaN for one seed.

        Each end is a one-sided 95 % bound, so a slope lies in any range that holds the
        interval at the 5 % level (two one-sided tests; Schuirmann, J. Pharmacokinet.
        Biopharm. 15, 657, 1987).
        """
        return self.expected(1.0)

    def expected(self, more: float) -> tuple[float, float]:
        """The interval from `more` times as many seeds, if slope and variance stay.

        The error of the grid shrinks too, which only a finer grid would do: rough.
        """
        if self.freedom < 1:
            return math.nan, math.nan
        error = self.error / math.sqrt(more)
        wide = error * float(special.stdtrit(self.freedom * more, 0.95))
        return self.slope - wide, self.slope + wide

    def within(self, low: float, high: float) -> bool | None:
        """Whether the slope lies between two values, at the 5 % level.

        True where the whole interval does, False where none of it does, None where
        part of it does.
        """
        least, most = self.interval
        if least >= low and most <= high:
            return True
        return False if least > high or most < low else None

    @property
    def change(self) -> float:
        """Units by which the line changes from the smallest size to the largest."""
        return self.slope * math.log2(self.sizes[-1] / self.sizes[0])


def trend(cells: Sequence[Cell], sizes: Sequence[int]) -> Trend:
    """Fit the optima of cells over their sizes, with a bootstrap over seeds.

    Each size's seeds are drawn again with replacement, and the optimum is fitted to
    their mean as `optima.optimum` does; the errors of all sizes go into the slope's.
    The bootstrap's spread is multiplied by √(n/(n-1)) for n seeds. To its variance is
    added that of the grid's error, `optima.Fit.place_error`, of each optimum.

    The cells are those of one parametrization and hyperparameter, small to large.
    """
    sizes = tuple(sizes)
    located = tuple(
        None if (o := optima.optimum(c)) is None else o.log2_lr for c in cells
    )
    x = np.log2(np.asarray(sizes, float))
    if None in located or len(sizes) < 2:
        return Trend(math.nan, math.nan, 0, sizes, located)
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()  # of the least squares
    slope = float(np.array(located, float) @ weights)
    seeds = min(len(c.loss) for c in cells)
    if seeds < 2:
        return Trend(slope, math.nan, 0, sizes, located)
    rng = np.random.default_rng(0)
    shape = (_RESAMPLES, len(cells))
    drawn = np.stack([_resampled(cell, rng) for cell in cells], axis=1)
    spread = (drawn @ weights - slope) * math.sqrt(seeds / (seeds - 1))
    fits = [optima.fit(cell) for cell in cells]
    grid = np.array([0.0 if f is None else f.place_error for f in fits])
    spread += (grid * rng.normal(size=shape)) @ weights
    error = float(spread.std(ddof=1))
    freedom = len(sizes) * (seeds - 1)
    return Trend(slope, error, freedom, sizes, located)


def along(
    populations: Sequence[Population], key: str, axis: Axis, base: Sizes
) -> list[Population]:
    """The populations of one `Population.key` along an axis, small to large."""
    other = OTHER[axis]
    chosen = (p for p in populations if p.key() == key)
    line = [p for p in chosen if getattr(p, other) == getattr(base, other)]
    return sorted(line, key=lambda p: getattr(p, axis))


def _resampled(cell: Cell, rng: np.random.Generator) -> np.ndarray:
    """Optima of means over resampled seeds, shape (resamples,)."""
    log_loss = log2(cell.loss)
    seeds = rng.integers(len(log_loss), size=(_RESAMPLES, len(log_loss)))
    whole = log_loss.mean(axis=0)
    if np.isnan(whole).all():
        mean = np.stack([optima.nanmean(log_loss[one]) for one in seeds])
        lost = np.isnan(mean).all(axis=1)
        mean[lost] = optima.nanmean(log_loss)
    else:
        # A grid point at which any seed diverged is left out, as for the optimum.
        mean = np.where(np.isnan(whole), np.nan, log_loss[seeds].mean(axis=1))
    return optima.vertices(np.asarray(cell.log2_lr, float), mean)[0]

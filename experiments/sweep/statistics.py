"""Where the best value of a hyperparameter goes as the model grows, how surely."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from . import grids, optima
from .results import Cell, Population

_RESAMPLES = 400


class Sizes(NamedTuple):
    """Width and depth of a model."""

    width: int
    depth: int


@dataclasses.dataclass(frozen=True)
class Trend:
    """The line through the optima of one axis, against log2 of the size.

    Attributes:
      slope: units (octaves) a doubling.
      error: its standard error, from resampled seeds.
      freedom: degrees of freedom of the error.
      optima: at each size, None where nothing trained.
      at_edge: sizes whose optimum lies at an end of the grid.
    """

    slope: float
    error: float
    freedom: int
    sizes: tuple[int, ...]
    optima: tuple[float | None, ...]
    at_edge: tuple[int, ...]
    draws: np.ndarray  # resampled (intercept at size 1, slope), shape (resamples, 2)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the slope, by Student's t."""
        wide = self.error * float(stats.t.ppf(0.975, max(self.freedom, 1)))
        return self.slope - wide, self.slope + wide


def trend(cells: Sequence[Cell], axis: str) -> Trend:
    """Fit the optima of cells along an axis, with a bootstrap over seeds.

    Each size's seeds are drawn anew with replacement, and the optimum is fitted to
    their mean as `optima.optimum` does. What n seeds vary is too small by
    √((n-1)/n), and is corrected.

    Args:
      cells: of one parametrization and hyperparameter, of rising size.
      axis: "depth" or "width".
    """
    sizes = tuple(getattr(c, axis) for c in cells)
    located = tuple(
        None if (o := optima.optimum(c)) is None else o.log2_lr for c in cells
    )
    x = np.log2(np.asarray(sizes, float))
    edge = tuple(
        s
        for s, o, c in zip(sizes, located, cells, strict=True)
        if o is not None and not c.log2_lr.min() < o < c.log2_lr.max()
    )
    if None in located or len(sizes) < 2:
        nothing = np.full((1, 2), math.nan)
        return Trend(math.nan, math.nan, 0, sizes, located, edge, nothing)
    line = _line(x, np.array(located, float)[None])[0]
    seeds = len(cells[0].loss)
    rng = np.random.default_rng(0)
    resampled = np.array(
        [
            [_resampled(cell, rng.integers(seeds, size=seeds)) for cell in cells]
            for _ in range(_RESAMPLES if seeds > 1 else 0)
        ]
    )
    if seeds < 2:
        return Trend(float(line[1]), math.nan, 0, sizes, located, edge, line[None])
    draws = line + (_line(x, resampled) - line) * math.sqrt(seeds / (seeds - 1))
    error = float(draws[:, 1].std(ddof=1))
    freedom = len(sizes) * (seeds - 1)
    return Trend(float(line[1]), error, freedom, sizes, located, edge, draws)


def _resampled(cell: Cell, seeds: np.ndarray) -> float:
    log_loss = optima.log2(cell.loss)
    mean = log_loss[seeds].mean(axis=0)
    if np.isnan(mean).all():
        mean = optima.nanmean(log_loss)
    # Where any seed diverged the mean over all decides, as for the optimum itself.
    broken = np.isnan(log_loss.mean(axis=0))
    if not broken.all():
        mean = np.where(broken, np.nan, mean)
    return optima.parabola(cell.log2_lr, mean)[0]


def _line(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(intercept, slope) of each row of y."""
    design = np.stack([np.ones_like(x), x], axis=1)
    return np.linalg.lstsq(design, y.T, rcond=None)[0].T


def fixed_after(cell: Cell) -> float | None:
    """When the optimum was decided: from where on it stays where it ends.

    The optimum is fitted to every span of the learning curves as to the final losses,
    and stays where it is within half an octave of its final place, or half the
    grid's spacing where that is more (of hyperparameters that are not counted in
    octaves always). Each span is a 40th of the run, as the slices of 1000 steps are
    that Yang, Yu, Zhu & Hayou (arXiv 2310.02244), Figure 10, average over. Bordelon,
    Noci, Li, Hanin & Pehlevan (arXiv 2309.16620), Section B.2 and Figure B.3, find it
    decided after the first few epochs.

    Args:
      cell: with its learning curves.

    Returns:
      The share of the run, in 0 to 1, after which the optimum no more leaves; None
      where nothing trained, or it is elsewhere in the last span still.

    Examples:
      >>> rates = np.arange(-10.0, -4.0)
      >>> at = np.array([-9.0, -7.0, -7.0, -7.0])[:, None]  # of each span
      >>> curves = np.exp2(0.3 * (rates - at) ** 2).T[None]
      >>> fixed_after(Cell("sp", 64, 8, rates, curves[..., -1], curves, 0.0))
      0.5
    """
    best = optima.optimum(cell)
    spans = cell.curves.shape[-1]
    if best is None or not spans or len(cell.log2_lr) < 2:
        return None
    near = np.diff(cell.log2_lr).max() / 2
    if grids.unit(cell.axis) != "linear":
        near = max(near, 0.5)
    places = [
        optima.optimum(dataclasses.replace(cell, loss=cell.curves[..., span]))
        for span in range(spans)
    ]
    away = [p is None or abs(p.log2_lr - best.log2_lr) > near for p in places]
    if away[-1]:
        return None
    last = max((i for i, one in enumerate(away) if one), default=-1)
    return (last + 2) / spans


def key_of(population: Population) -> str:
    """Its parametrization and choices, as verdicts are listed by."""
    chosen = (f"{k}={v}" for k, v in population.choices.items())
    return ", ".join([population.parametrization, *chosen])


def predicted(
    trends: dict[str, Trend], base: Sizes, target: Sizes
) -> dict[str, Any] | None:
    """The optimum at a target size by the lines of depth and width, with 95 %."""
    count = min(len(t.draws) for t in trends.values())
    if count < 2:
        return None
    parts = []
    for axis, line in trends.items():
        start, end = (math.log2(getattr(s, axis)) for s in (base, target))
        at_base = line.draws[:count, 0] + line.draws[:count, 1] * start
        parts.append((at_base, line.draws[:count, 1] * (end - start)))
    draws = sum(p[0] for p in parts) / len(parts) + sum(p[1] for p in parts)
    if not np.isfinite(draws).all():
        return None
    freedom = min(t.freedom for t in trends.values())
    middle = float(np.mean(draws))
    wide = float(np.std(draws, ddof=1)) * float(stats.t.ppf(0.975, freedom))
    return {
        "optimum": round(middle, 3),
        "interval": [round(middle - wide, 3), round(middle + wide, 3)],
    }

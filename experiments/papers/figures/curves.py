"""From a sweep's runs to lines, and to what is said of their optima."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from ...report import SweepData
from ...sweep import grids, optima, statistics
from ...sweep.results import Cell
from ...sweep.statistics import Trend
from ...sweep.verdict import judge
from .registry import Line, Panel

_NAMES = {
    "learning_rate": "log₂ learning rate",
    "branch_multiplier": "log₂ block multiplier a",
    "richness": "log₂ richness μ0",
    "momentum": "-log₂(1 - momentum)",
    "weight_decay": "log₂ weight decay",
}


def cells(
    data: SweepData, key: str, axis: str = "depth", name: str = "learning_rate"
) -> list[Cell]:
    """The runs of one key along depth or width, small to large.

    Args:
      data: a sweep.
      key: a parametrization with its choices, as `statistics.key_of` gives it.
      axis: "depth" or "width"; the other is the base's.
      name: of the hyperparameter along the grid; every other is at its best.
    """
    found = [
        dataclasses.replace(p.cell(name), parametrization=key)
        for p in data.populations
        if statistics.key_of(p) == key
    ]
    fixed = data.base.width if axis == "depth" else data.base.depth
    return optima.along(found, key, axis, fixed).cells


def at(found: Sequence[Cell], share: float) -> list[Cell]:
    """The same runs as they stood after a share of their steps, in 0 to 1.

    The loss is the mean over the eighth of the run that ends there.
    """
    spans = found[0].curves.shape[-1]
    end = max(round(share * spans), 1)
    window = slice(max(end - max(spans // 8, 1), 0), end)
    return [
        dataclasses.replace(c, loss=c.curves[..., window].mean(axis=-1)) for c in found
    ]


def panel(
    title: str, found: Sequence[Cell], axis: str = "depth", scale: int = 1
) -> Panel:
    """Loss against the hyperparameter, a line a size.

    Args:
      title: of the panel.
      found: as `cells` gives them.
      axis: "depth" or "width".
      scale: layers in a block, where depths are to be counted in layers.
    """
    lines = []
    for cell in found:
        log_loss = np.log(cell.loss)
        mean = log_loss.mean(axis=0)  # NaN where a seed diverged
        good = ~np.isnan(mean)
        loss, seeds = np.exp(mean[good]), len(log_loss)
        error = None
        if seeds > 1:
            spread = log_loss[:, good].std(axis=0, ddof=1) / np.sqrt(seeds)
            error = (loss * spread).tolist()
        size = f"{axis} {getattr(cell, axis) * scale}"
        label = size if good.any() else f"{size}: none trained"
        lines.append(Line(label, cell.log2_lr[good].tolist(), loss.tolist(), error))
    name = found[0].axis
    return Panel(title, _NAMES.get(name, name), "training loss", lines, log_y=True)


@dataclasses.dataclass(frozen=True)
class Least:
    """The loss at the best point of a grid.

    Attributes:
      loss: geometric mean over seeds; NaN where nothing trained.
      error: its standard error.
      freedom: degrees of freedom of the error; 0 of one seed.
    """

    loss: float
    error: float
    freedom: int

    def __str__(self) -> str:
        """With its standard error, as "1.858 ± 0.012"."""
        if np.isnan(self.loss):
            return "nothing trained"
        return f"{self.loss:.3f}" + (f" ± {self.error:.3f}" if self.freedom else "")


def least(cell: Cell) -> Least:
    """At the grid point of least mean log loss; NaN where nothing trained."""
    best = best_point(cell)
    if best is None:
        return Least(np.nan, np.nan, 0)
    return mean(cell.loss[:, best])


def mean(losses: np.ndarray) -> Least:
    """Of losses over seeds."""
    seeds = len(losses)
    error = float(losses.std(ddof=1) / np.sqrt(seeds)) if seeds > 1 else np.nan
    return Least(float(np.exp(np.log(losses).mean())), error, seeds - 1)


def learning(cell: Cell, label: str, steps: int) -> Line:
    """The learning curve at the best grid point, mean over seeds."""
    best = best_point(cell)
    spans = cell.curves.shape[-1]
    times = (np.arange(spans) + 0.5) * steps / spans
    if best is None:
        return Line(f"{label}: none trained", [], [])
    return Line(label, times.tolist(), cell.curves[:, best].mean(axis=0).tolist())


def best_point(cell: Cell) -> int | None:
    """Index of the least mean log loss; None where nothing trained."""
    mean = np.log(cell.loss).mean(axis=0)
    return None if np.isnan(mean).all() else int(np.nanargmin(mean))


def lower(this: Least, that: Least) -> bool | None:
    """Whether a loss is lower than another; None where 95 % (Student's t) do not tell.

    What trained nowhere is higher than anything.

    Examples:
      >>> lower(Least(1.0, 0.1, 2), Least(2.0, 0.1, 2))
      True
      >>> lower(Least(1.0, 0.1, 2), Least(1.1, 0.1, 2)) is None
      True
    """
    if np.isnan(this.loss) or np.isnan(that.loss):
        both = np.isnan(this.loss) and np.isnan(that.loss)
        return None if both else bool(np.isnan(that.loss))
    freedom = this.freedom + that.freedom
    if not freedom:
        return None
    wide = np.hypot(this.error, that.error) * stats.t.ppf(0.975, freedom)
    gap = that.loss - this.loss
    return None if abs(gap) <= wide else bool(gap > 0)


def falls(found: Sequence[Least]) -> bool | None:
    """Whether the last is lower than the first, and no step rises; None: not known.

    Examples:
      >>> falls([Least(x, 0.1, 2) for x in (2.0, 1.9, 1.0)])
      True
      >>> falls([Least(x, 0.1, 2) for x in (2.0, 2.9, 1.0)])
      False
    """
    if any(lower(a, b) for a, b in itertools.pairwise(found)):
        return False
    return lower(found[-1], found[0])


def every(*known: bool | None) -> bool | None:
    """Whether all hold: False where one does not, else None where one is not known.

    Examples:
      >>> every(True, None, False), every(True, None), every(True, True)
      (False, None, True)
    """
    if any(one is not None and not one for one in known):
        return False
    return None if any(one is None for one in known) else True


def opposite(known: bool | None) -> bool | None:
    """Not, of what may not be known."""
    return None if known is None else not known


def span(found: Sequence[Least]) -> str:
    """First and last, as "1.858 ± 0.012 to 1.711 ± 0.010"."""
    return f"{found[0]} to {found[-1]}"


@dataclasses.dataclass(frozen=True)
class Move:
    """Where an optimum goes as a model grows.

    Attributes:
      trend: the fit.
      axis: "depth" or "width".
    """

    trend: Trend
    axis: str

    @property
    def _failed(self) -> list[int]:
        found = zip(self.trend.sizes, self.trend.optima, strict=True)
        return [size for size, optimum in found if optimum is None]

    @property
    def stays(self) -> bool | None:
        """Whether the optimum transfers; None where it is not known."""
        return judge(self.trend).known

    @property
    def moves(self) -> bool | None:
        """The opposite."""
        return opposite(self.stays)

    @property
    def size(self) -> float:
        """Units a doubling, without the sign; infinite where a size does not train."""
        return np.inf if self._failed else abs(self.trend.slope)

    def __str__(self) -> str:
        """With 95 %, as "+0.18 [0.07, 0.29]"."""
        if self._failed:
            return f"nothing trained at {self.axis} " + " and ".join(
                map(str, self._failed)
            )
        low, high = self.trend.interval
        edge = ", at an end of the grid" if self.trend.at_edge else ""
        return f"{self.trend.slope:+.2f} [{low:.2f}, {high:.2f}]{edge}"


def move(found: Sequence[Cell], axis: str = "depth") -> Move:
    """Fit the optima along an axis."""
    return Move(statistics.trend(found, axis), axis)


def told(moves: Mapping[str, Move]) -> str:
    """What several optima move by, in half a sentence."""
    each = "; ".join(f"{name}: {moved}" for name, moved in moves.items())
    return f"shift in octaves per doubling (stays within ¼) of {each}"


def value(name: str, cell: Cell) -> float:
    """The best value of a hyperparameter; NaN where nothing trained."""
    best = optima.optimum(cell)
    return np.nan if best is None else grids.value(name, best.log2_lr)

"""From a sweep's runs to lines, and to what is said of losses and optima.

Seeds share the initialization and the order of examples over sizes and
parametrizations. Losses are therefore compared seed by seed, with the variance of the
differences pooled over sizes.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from ...report import SweepData
from ...report.data import Axis
from ...sweep import grids, optima, statistics
from ...sweep.results import Cell
from ...sweep.statistics import Sizes
from ...sweep.verdict import Transfer, transfer
from .registry import Line, Panel

_NAMES = {
    "learning_rate": "log₂ learning rate",
    "branch_multiplier": "log₂ block multiplier a",
    "richness": "log₂ richness μ0",
    "momentum": "-log₂(1 - momentum)",
    "weight_decay": "log₂ weight decay",
}


def cells(
    data: SweepData, key: str, axis: Axis = "depth", name: str = "learning_rate"
) -> list[Cell]:
    """The runs of one key along depth or width, small to large.

    Args:
      data: a sweep.
      key: a parametrization with its choices, as `statistics.key_of` gives it.
      axis: "depth" or "width"; the other is the base's.
      name: of the hyperparameter along the grid; every other is at its best.
    """
    return [
        dataclasses.replace(p.cell(name), parametrization=key)
        for p in data.along(key, axis)
    ]


def at(given: Sequence[Cell], share: float) -> list[Cell]:
    """The same runs as they stood after a share of their steps, in 0 to 1.

    The loss is the mean over the eighth of the run that ends there.
    """
    spans = given[0].curves.shape[-1]
    end = max(round(share * spans), 1)
    window = slice(max(end - max(spans // 8, 1), 0), end)
    return [
        dataclasses.replace(c, loss=c.curves[..., window].mean(axis=-1)) for c in given
    ]


def panel(
    title: str,
    given: Sequence[Cell],
    axis: str = "depth",
    scale: int = 1,
    labels: Sequence[str] = (),
) -> Panel:
    """Loss against the hyperparameter, a line a size.

    Args:
      title: of the panel.
      given: as `cells` gives them.
      axis: "depth" or "width".
      scale: layers in a block, where depths are to be counted in layers.
      labels: of the lines, in place of their sizes along the axis.
    """
    labels = labels or [f"{axis} {getattr(c, axis) * scale}" for c in given]
    lines = []
    for cell, size in zip(given, labels, strict=True):
        log_loss = np.log(cell.loss)
        mean = log_loss.mean(axis=0)  # NaN where a seed diverged
        good = ~np.isnan(mean)
        loss, seeds = np.exp(mean[good]), len(log_loss)
        error = None
        if seeds > 1:
            spread = log_loss[:, good].std(axis=0, ddof=1) / np.sqrt(seeds)
            error = (loss * spread).tolist()
        label = size if good.any() else f"{size}: none trained"
        lines.append(Line(label, cell.log2_lr[good].tolist(), loss.tolist(), error))
    name = given[0].axis
    return Panel(title, _NAMES.get(name, name), "training loss", lines, log_y=True)


@dataclasses.dataclass(frozen=True)
class Least:
    """The least loss of a cell, read off the fit that gives its optimum.

    Attributes:
      log_loss: natural log of each seed's loss, shape (seeds,); empty where nothing
        trained.
    """

    log_loss: np.ndarray

    @property
    def loss(self) -> float:
        """Geometric mean over seeds; NaN where nothing trained."""
        return float(np.exp(self.log_loss.mean())) if len(self.log_loss) else np.nan

    @property
    def error(self) -> float:
        """Standard error of the loss; NaN for one seed."""
        if len(self.log_loss) < 2:
            return np.nan
        return self.loss * float(self.log_loss.std(ddof=1)) / len(self.log_loss) ** 0.5

    def __str__(self) -> str:
        """The loss with its standard error, as "1.858 ± 0.012"."""
        if not len(self.log_loss):
            return "nothing trained"
        error = f" ± {self.error:.3f}" if np.isfinite(self.error) else ""
        return f"{self.loss:.3f}{error}"


def least(cell: Cell) -> Least:
    """The loss at the fitted optimum; empty where no point trained every seed."""
    fitted = optima.fit(cell)
    if fitted is None:
        return Least(np.empty(0))
    return Least(fitted.at(fitted.optimum) * np.log(2))


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


Pair = tuple[Least, Least]


@dataclasses.dataclass(frozen=True)
class Gap:
    """Difference of the log losses of a pair, with its 95 % interval.

    Attributes:
      value: mean over seeds of the first log loss less the second.
      wide: half the width of the interval; infinite for one seed.
    """

    value: float
    wide: float

    @property
    def below(self) -> bool | None:
        """Whether the first loss is the lower; None where the interval holds zero."""
        return None if abs(self.value) <= self.wide else self.value < 0

    def __str__(self) -> str:
        """As shares of the loss: "-1.3% ± 0.4%"."""
        wide = f" ± {self.wide:.1%}" if np.isfinite(self.wide) else ""
        return f"{np.expm1(self.value):+.1%}{wide}"


def gaps(pairs: Sequence[Pair]) -> list[Gap]:
    """Compare losses in pairs, seed by seed.

    A pair's error is that of its seeds' differences. Their variance is pooled over
    the pairs, which are those of an axis of sizes. Sizes share seeds: as in
    `sweep.regret`, n sizes whose differences correlate by r count as
    n / (1 + (n - 1) r²) independent ones.

    Args:
      pairs: losses of two cells with the same seeds. Where nothing trained the loss
        counts as infinite.

    Examples:
      >>> seeds = np.array([0.0, 0.1, 0.3])
      >>> pair = Least(seeds), Least(seeds + [0.06, 0.05, 0.07])
      >>> gaps([pair])[0].below
      True
    """
    known = [(a.log_loss, b.log_loss) for a, b in pairs]
    whole = [(a, b) for a, b in known if len(a) and len(b)]
    rows = [a - b for a, b in whole]
    variance, freedom = statistics.pooled([row - row.mean() for row in rows])
    out = []
    for a, b in known:
        if len(a) and len(b):
            seeds = len(a)
            wide = np.inf
            if freedom:
                wide = stats.t.ppf(0.975, freedom) * (variance / seeds) ** 0.5
            out.append(Gap(float((a - b).mean()), float(wide)))
        elif len(a) or len(b):
            out.append(Gap(-np.inf if len(a) else np.inf, 0.0))
        else:
            out.append(Gap(0.0, np.inf))
    return out


def lower(these: Sequence[Least], those: Sequence[Least]) -> list[bool | None]:
    """Whether each loss is lower than its partner, at 95 %; None: not known."""
    return [gap.below for gap in gaps(list(zip(these, those, strict=True)))]


def under(gap: Gap, limit: float) -> bool | None:
    """Whether a difference lies below a limit; None where its interval holds it.

    Examples:
      >>> under(Gap(0.01, 0.005), 0.02), under(Gap(0.01, 0.02), 0.02)
      (True, None)
    """
    if gap.value + gap.wide < limit:
        return True
    return False if gap.value - gap.wide > limit else None


def inside(estimate: Gap, low: float, high: float) -> bool | None:
    """Whether an estimate lies in a range; None where its interval crosses an end.

    Examples:
      >>> inside(Gap(-2.1, 0.2), -2.5, -1.5), inside(Gap(-2.4, 0.2), -2.5, -1.5)
      (True, None)
    """
    return every(
        under(estimate, high), under(Gap(-estimate.value, estimate.wide), -low)
    )


def interval(value: float, error: float, seeds: int) -> Gap:
    """An estimate with its 95 % interval, from a standard error over seeds."""
    if seeds < 2 or not np.isfinite(error):
        return Gap(value, np.inf)
    return Gap(value, float(stats.t.ppf(0.975, seeds - 1)) * error)


def falls(losses: Sequence[Least]) -> bool | None:
    """Whether the last is lower than the first, and no step rises; None: not known.

    Examples:
      >>> noise = np.array([0.0, 0.01, 0.02])
      >>> falls([Least(x + noise) for x in (2.0, 1.9, 1.0)])
      True
      >>> falls([Least(x + noise) for x in (2.0, 2.9, 1.0)])
      False
    """
    if False in _steps(losses):
        return False
    return gaps([(losses[-1], losses[0])])[0].below


def falls_always(losses: Sequence[Least]) -> bool | None:
    """Whether every step falls; False where one rises, None where one is not known."""
    return every(*_steps(losses))


def _steps(losses: Sequence[Least]) -> list[bool | None]:
    """Whether each loss is lower than the one before."""
    pairs = [(after, before) for before, after in itertools.pairwise(losses)]
    return [gap.below for gap in gaps(pairs)]


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


def span(losses: Sequence[Least]) -> str:
    """First and last, as "1.858 ± 0.012 to 1.711 ± 0.010"."""
    return f"{losses[0]} to {losses[-1]}"


def move(
    given: Sequence[Cell], axis: str = "depth", base: Sizes | None = None
) -> Transfer:
    """The verdict along an axis.

    Args:
      given: as `cells` gives them.
      axis: "depth" or "width".
      base: the sizes that are tuned; the smallest where None.
    """
    return transfer(given, axis, None if base is None else getattr(base, axis))


def stays(transfer: Transfer) -> bool | None:
    """Whether the optimum transfers; None where the sweep cannot tell."""
    return transfer.verdict.known


def moves(transfer: Transfer) -> bool | None:
    """The opposite of `stays`."""
    return opposite(stays(transfer))


def moves_more(this: Transfer, that: Transfer) -> bool | None:
    """Whether one optimum shifts more than another, in either direction, at 95 %.

    An optimum that is missing at some size shifts more than any other.
    """
    if this.failed or that.failed:
        both = this.failed and that.failed
        return None if both else bool(this.failed)
    one, other = this.trend, that.trend
    freedom = one.freedom + other.freedom
    if not freedom:
        return None
    gap = abs(one.slope) - abs(other.slope)
    wide = stats.t.ppf(0.975, freedom) * np.hypot(one.error, other.error)
    return None if abs(gap) <= wide else bool(gap > 0)


def shift(transfer: Transfer) -> str:
    """Cost and shift of one optimum: "costs at most 0.6% …, +0.18 [0.07, 0.29]"."""
    if transfer.failed:
        return transfer.words
    low, high = transfer.trend.interval
    edge = ", at an end of the grid" if transfer.at_edge else ""
    return (
        f"{transfer.words}, {transfer.trend.slope:+.2f} [{low:.2f}, {high:.2f}]{edge}"
    )


def told(transfers: Mapping[str, Transfer]) -> str:
    """Several verdicts in half a sentence, each with its shift."""
    each = "; ".join(f"{name}: {shift(one)}" for name, one in transfers.items())
    return f"cost at the base's optimum, and shift in octaves per doubling: {each}"


def value(name: str, cell: Cell) -> float:
    """The best value of a hyperparameter; NaN where nothing trained."""
    best = optima.optimum(cell)
    return np.nan if best is None else grids.value(name, best.log2_lr)

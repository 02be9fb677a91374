"""Lines, least losses, comparisons and verdicts of a sweep, for the figures.

Seeds share the initialization and the order of examples over sizes and
parametrizations. Losses are therefore compared seed by seed, with the variance of the
differences pooled over sizes.

Answers are True, False, or None where the sweep cannot tell.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from scipy import special, stats

from mupax.experiments.report import SweepData
from mupax.experiments.sweep import grids, optima
from mupax.experiments.sweep.regret import PRIOR
from mupax.experiments.sweep.results import Cell, Population
from mupax.experiments.sweep.statistics import Axis
from mupax.experiments.sweep.verdict import SHARE, Transfer, Verdict, transfer

from .registry import Drawing, Line, Panel

_Runs = TypeVar("_Runs", Cell, Population)
_UNLIKE = 0.05  # p-value below which two variances are not averaged
_SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the steps

_X_LABELS = {
    "learning_rate": "log₂ learning rate",
    "branch_multiplier": "log₂ block multiplier a",
    "richness": "log₂ richness μ0",
    "momentum": "-log₂(1 - momentum)",
    "weight_decay": "log₂ weight decay",
}


def cells(
    data: SweepData, key: str, axis: Axis = "depth", name: str = "learning_rate"
) -> list[Cell]:
    """The runs of one parametrization along one axis, small to large.

    Args:
      data: a sweep.
      key: a parametrization with its choices, as `Population.key` gives it.
      axis: "depth" or "width"; the other is the base's.
      name: the hyperparameter to show; every other is at its best.
    """
    return [population.cell(name) for population in data.along(key, axis)]


def judge(
    data: SweepData, key: str, axis: Axis = "depth", name: str = "learning_rate"
) -> Transfer:
    """The verdict on the same runs; its `cells` are those runs."""
    return transfer(cells(data, key, axis, name), axis, getattr(data.base, axis))


def after(runs: Sequence[_Runs], share: float) -> list[_Runs]:
    """The same runs, cells or populations, after a share of their steps, in 0 to 1.

    The loss is the mean over the eighth of the run that ends there.
    """
    spans = runs[0].curves.shape[-1]
    end = max(round(share * spans), 1)
    window = slice(max(end - max(spans // 8, 1), 0), end)
    return [
        dataclasses.replace(c, loss=c.curves[..., window].mean(axis=-1)) for c in runs
    ]


# ----- Lines and panels.


def panel(
    title: str,
    runs: Sequence[Cell],
    axis: str = "depth",
    scale: int = 1,
    labels: Sequence[str] = (),
) -> Panel:
    """Loss against the hyperparameter, a line for each size.

    Args:
      title: title of the panel.
      runs: the runs of each size, from `cells`.
      axis: "depth" or "width".
      scale: layers in a block, to count depths in layers.
      labels: labels of the lines; by default their sizes along the axis.
    """
    labels = labels or [f"{axis} {getattr(c, axis) * scale}" for c in runs]
    lines = []
    for cell, label in zip(runs, labels, strict=True):
        log_loss = np.log(cell.loss)
        mean = log_loss.mean(axis=0)  # NaN where a seed diverged
        good = ~np.isnan(mean)
        loss, seeds = np.exp(mean[good]), len(log_loss)
        error = None
        if seeds > 1:
            error = loss * log_loss[:, good].std(axis=0, ddof=1) / np.sqrt(seeds)
        label = label if good.any() else f"{label}: none trained"
        lines.append(Line(label, cell.log2_lr[good], loss, error))
    x_label = _X_LABELS.get(runs[0].axis, runs[0].axis)
    return Panel(title, x_label, "training loss", lines, log_y=True)


def panels(transfers: Mapping[str, Transfer], axis: str = "depth") -> list[Panel]:
    """A panel for each verdict, under its name."""
    return [panel(title, t.cells, axis) for title, t in transfers.items()]


def drawing(
    transfers: Mapping[str, Transfer], *answers: bool | None, axis: str = "depth"
) -> Drawing:
    """The verdicts, a panel for each; they agree with a claim if all answers hold.

    The first answer is that of the rule, if the claim compares it with a control.
    """
    agrees = conjunction(*answers)
    ours = describe(transfers)
    return Drawing(panels(transfers, axis), ours, agrees, keeps=answers[0])


def shift_panel(transfers: Mapping[str, Transfer]) -> Panel:
    """How far the optimum shifts in each part of training.

    Left out where an optimum is at the edge of the grid.
    """
    lines = []
    for title, one in transfers.items():
        trends = {}
        for share in _SHARES:
            cells, base = after(one.cells, share), one.sizes[one.base]
            then = transfer(cells, one.axis, base, one.sizes)
            if not (then.at_edge or then.failed):
                trends[share] = then.trend
        slopes = [trend.slope for trend in trends.values()]
        errors = [trend.error for trend in trends.values()]
        lines.append(Line(title, list(trends), slopes, errors))
    label = "shift in octaves per doubling"
    return Panel("Shift during training", "share of the steps", label, lines)


def learning_panel(
    title: str, runs: Iterable[tuple[str, Cell, int | None]], steps: int
) -> Panel:
    """Training loss over the steps, the mean over seeds.

    Args:
      title: title of the panel.
      runs: a label, a cell and the index of a grid point; None: none trained.
      steps: number of steps of the runs.
    """
    lines = []
    for label, cell, point in runs:
        if point is None:
            lines.append(Line(f"{label}: none trained", [], []))
            continue
        spans = cell.curves.shape[-1]
        times = (np.arange(spans) + 0.5) * steps / spans
        mean = cell.curves[:, point].mean(axis=0)
        good = ~np.isnan(mean)
        lines.append(Line(label, times[good], mean[good]))
    return Panel(title, "step", "training loss", lines, log_y=True)


def best_point(cell: Cell) -> int | None:
    """Index of the grid point of least mean log loss; None where nothing trained."""
    mean = np.log(cell.loss).mean(axis=0)
    return None if np.isnan(mean).all() else int(np.nanargmin(mean))


def best_value(name: str, cell: Cell) -> float:
    """The fitted best value of a hyperparameter; NaN where nothing trained."""
    best = optima.optimum(cell)
    return np.nan if best is None else grids.value(name, best.log2_lr)


def at_base_best(judged: Transfer, cells: Sequence[Cell] | None = None) -> list[float]:
    """The loss of each size, interpolated at the base's best value; NaN outside."""
    best = judged.optima[judged.base]
    losses = []
    for cell in cells or judged.cells:
        fitted = optima.fit(cell)
        if fitted is None or best is None or not fitted.holds(best):
            losses.append(math.nan)
        else:
            losses.append(float(2 ** fitted.at(best).mean()))
    return losses


# ----- Losses, compared seed by seed.


@dataclasses.dataclass(frozen=True)
class Least:
    """The least loss of a cell, read off the fit that gives its optimum.

    Attributes:
      log_loss: natural log of each seed's loss, shape (seeds,); empty where nothing
        trained.
      slip: standard deviation of the error of the mean log loss that the grid causes.
    """

    log_loss: np.ndarray
    slip: float = 0.0

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
        """The loss with its standard error, e.g. "1.858 ± 0.012"."""
        if not len(self.log_loss):
            return "nothing trained"
        error = f" ± {self.error:.3f}" if np.isfinite(self.error) else ""
        return f"{self.loss:.3f}{error}"


def least(cell: Cell) -> Least:
    """The loss at the fitted optimum; empty where no grid point trained every seed."""
    fitted = optima.fit(cell)
    if fitted is None:
        return Least(np.empty(0))
    best = [fitted.optimum]
    other = (fitted.weights(best, other=True) - fitted.weights(best))[0]
    slip = abs(float(other @ fitted.log_loss.mean(axis=0))) / 2
    return Least(fitted.at(fitted.optimum) * np.log(2), slip * np.log(2))


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate, e.g. of a difference of log losses, with its 95 % interval.

    Attributes:
      value: the estimate.
      wide: half the width of the interval; infinite for one seed.
      error: standard error, which "±" shows.
    """

    value: float
    wide: float
    error: float = math.nan

    @property
    def negative(self) -> bool | None:
        """Whether the value is below zero; None where the interval holds zero."""
        return self.value < 0 if abs(self.value) > self.wide else None

    def under(self, limit: float) -> bool | None:
        """Whether the value lies below a limit; None where the interval holds it.

        Examples:
          >>> Interval(0.01, 0.005).under(0.02), Interval(0.01, 0.02).under(0.02)
          (True, None)
        """
        if self.value + self.wide < limit:
            return True
        return False if self.value - self.wide > limit else None

    def inside(self, low: float, high: float) -> bool | None:
        """Whether the value lies in a range; None where the interval holds an end.

        Examples:
          >>> Interval(-2.1, 0.2).inside(-2.5, -1.5)
          True
        """
        return conjunction(self.under(high), negation(self.under(low)))

    def __str__(self) -> str:
        """A difference of log losses as shares of the loss, e.g. "-1.3% ± 0.4%"."""
        error = f" ± {self.error:.1%}" if np.isfinite(self.error) else ""
        return f"{np.expm1(self.value):+.1%}{error}"


def interval(
    value: float, error: float, freedom: float, chosen_of: int = 1
) -> Interval:
    """The 95 % interval of an estimate, from its standard error.

    An estimate that is the largest of several holds for each of them (Bonferroni).
    """
    if freedom <= 0 or not np.isfinite(error):
        return Interval(value, np.inf)
    level = 1 - 0.025 / chosen_of
    return Interval(value, float(stats.t.ppf(level, freedom)) * error, error)


def over_seeds(values: np.ndarray, chosen_of: int = 1) -> Interval:
    """The mean of one number per seed, with its 95 % `interval`.

    Examples:
      >>> over_seeds(np.array([-0.1, -0.2, -0.3])).negative is None
      True
    """
    count = len(values)
    error = float(values.std(ddof=1)) / count**0.5 if count > 1 else np.inf
    return interval(float(values.mean()), error, count - 1, chosen_of)


def surely_near(
    value: float, error: float, expected: float, tolerance: float
) -> bool | None:
    """Whether an exponent is as expected, within a tolerance, at the 5 % level.

    Two one-sided tests: the whole 90 % interval must lie within the tolerance.

    Examples:
      >>> [surely_near(-0.94, error, -1, 0.3) for error in (0.1, 0.3)]
      [True, None]
    """
    found = Interval(value, float(stats.norm.ppf(0.95)) * error)
    return found.inside(expected - tolerance, expected + tolerance)


def gaps(pairs: Sequence[tuple[Least, Least]], chosen_of: int = 1) -> list[Interval]:
    """The first log loss of each pair minus the second, compared seed by seed.

    A pair's error is that of its seeds' differences, and of the grid. The pairs are the
    sizes of one axis: a pair's variance is averaged with that of the others, which
    counts as at most 4 degrees of freedom, unless the two surely differ
    (`_moderated`).

    Args:
      pairs: losses of two cells each. Only the seeds that both have are compared. If
        nothing trained, the loss counts as infinite.
      chosen_of: from how many pairs each was chosen, because its gap is the largest.

    Examples:
      >>> seeds = np.array([0.0, 0.1, 0.3])
      >>> pair = Least(seeds), Least(seeds + [0.06, 0.05, 0.07])
      >>> gaps([pair])[0].negative
      True
    """
    known = [(a.log_loss, b.log_loss) for a, b in pairs]
    shared = [min(len(a), len(b)) for a, b in known]
    rows = [a[:n] - b[:n] for (a, b), n in zip(known, shared, strict=True)]
    # The base may be the same network in both.
    varied = [r - r.mean() if len(r) and r.any() else None for r in rows]
    out = []
    for i, ((a, b), row) in enumerate(zip(known, rows, strict=True)):
        if len(row):
            others = [v for j, v in enumerate(varied) if j != i and v is not None]
            other, degrees = _pooled(others)
            own = float(row.var(ddof=1)) if len(row) > 1 else 0.0
            variance, freedom = _moderated(
                own, len(row) - 1, other, min(degrees, PRIOR)
            )
            slips = (one.slip**2 for one in pairs[i])
            error = float(np.sqrt(variance / len(row) + sum(slips)))
            out.append(interval(float(row.mean()), error, freedom, chosen_of))
        elif len(a) or len(b):
            out.append(Interval(-np.inf if len(a) else np.inf, 0.0))
        else:
            out.append(Interval(0.0, np.inf))
    return out


def _pooled(rows: Sequence[np.ndarray]) -> tuple[float, float]:
    """Variance over seeds, pooled over sizes, and its degrees of freedom.

    Sizes that share seeds are not independent: by Satterthwaite's rule, n sizes count
    as n / (1 + (n - 1) r²) independent ones, with r² the mean squared correlation
    between the rows of two sizes, minus its mean for independent seeds. Two seeds do
    not determine r: ½ is assumed.

    Args:
      rows: deviations from the mean over seeds, an array of shape (seeds,) per size.

    Examples:
      >>> same = np.array([-0.1, 0.0, 0.1])
      >>> variance, freedom = _pooled([same, same])
      >>> round(variance, 4), freedom  # two sizes that are as good as one
      (0.01, 2.0)
    """
    if not rows or len(rows[0]) < 2:
        return math.nan, 0.0
    seeds = len(rows[0])
    spare = len(rows) * (seeds - 1)
    variance = sum(float(row @ row) for row in rows) / spare
    agree = 0.25
    if seeds > 2 and len(rows) > 1:
        pairs = itertools.combinations(rows, 2)
        alike = [
            float(a @ b) ** 2 / max(float(a @ a) * float(b @ b), 1e-300)
            for a, b in pairs
        ]
        chance = 1 / (seeds - 1)
        agree = max((float(np.mean(alike)) - chance) / (1 - chance), 0.0)
    return variance, spare / (1 + (len(rows) - 1) * agree)


def _moderated(
    own: float, freedom: float, other: float, known: float
) -> tuple[float, float]:
    """A size's variance over seeds, averaged with that of the other sizes.

    Weights are degrees of freedom. Where an F-test shows at 5 % that the two are not
    equal, the size's own variance is taken.

    Args:
      own: the size's own variance.
      freedom: its degrees of freedom; 0 for one seed.
      other: the pooled variance of the other sizes.
      known: its degrees of freedom; 0 for none.

    Returns:
      (variance, degrees of freedom)

    Examples:
      >>> _moderated(4.0, 3, 5.0, 3), _moderated(4.0, 3, 1000.0, 3)
      ((4.5, 6), (4.0, 3))
    """
    if not known:
        return own, freedom
    if freedom:
        below = special.fdtr(freedom, known, own / other if other else np.inf)
        if min(below, 1 - below) < _UNLIKE / 2:
            return own, freedom
    total = freedom + known
    return (freedom * own + known * other) / total, total


def lower(losses: Sequence[Least], others: Sequence[Least]) -> list[bool | None]:
    """Whether each loss is lower than its partner, at 95 %.

    True if it surely is, by however little. False if it is surely higher, or not surely
    lower and the gain is surely below `SHARE`, which no one would notice.

    Examples:
      >>> noise = np.array([0.0, 0.001, 0.002])
      >>> one, same = Least(noise), Least(noise[::-1])
      >>> lower([one, one], [same, Least(noise + 0.1)])
      [False, True]
      >>> lower([Least(10 * noise)], [Least(10 * noise[::-1])])
      [None]
    """
    found = gaps(list(zip(losses, others, strict=True)))
    small = [gap.under(-np.log1p(SHARE)) is False for gap in found]
    return [
        False if none and gap.negative is None else gap.negative
        for gap, none in zip(found, small, strict=True)
    ]


def falls(losses: Sequence[Least]) -> bool | None:
    """Whether the last loss is lower than the first, and no step rises.

    Examples:
      >>> noise = np.array([0.0, 0.01, 0.02])
      >>> falls([Least(x + noise) for x in (2.0, 1.9, 1.0)])
      True
      >>> falls([Least(x + noise) for x in (2.0, 2.9, 1.0)])
      False
    """
    steps = gaps(list(zip(losses[1:], losses[:-1], strict=True)))
    if any(step.negative is False for step in steps):
        return False
    return lower(losses[-1:], losses[:1])[0]


def falls_always(losses: Sequence[Least]) -> bool | None:
    """Whether every loss is lower than the one before."""
    return conjunction(*lower(losses[1:], losses[:-1]))


def least_line(label: str, losses: Mapping[int, Least]) -> Line:
    """Losses by size, with errors, where something trained."""
    known = {n: least for n, least in losses.items() if np.isfinite(least.loss)}
    values = [least.loss for least in known.values()]
    return Line(label, list(known), values, [least.error for least in known.values()])


def span(losses: Sequence[Least]) -> str:
    """The first and the last loss, e.g. "1.858 ± 0.012 to 1.711 ± 0.010"."""
    return f"{losses[0]} to {losses[-1]}"


# ----- Logic of True, False and None.


def conjunction(*answers: bool | None) -> bool | None:
    """Whether all hold: False where one does not, else None where one is not known.

    Examples:
      >>> conjunction(True, None, False), conjunction(True, None), conjunction(True)
      (False, None, True)
    """
    if any(one is not None and not one for one in answers):
        return False
    return None if any(one is None for one in answers) else True


def negation(answer: bool | None) -> bool | None:
    """Not; None stays None."""
    return None if answer is None else not answer


# ----- Verdicts.


def stays(transfer: Transfer) -> bool | None:
    """Whether the optimum transfers."""
    return transfer.verdict.known


def moves(transfer: Transfer) -> bool | None:
    """The opposite of `stays`."""
    return negation(stays(transfer))


def moves_more(first: Transfer, second: Transfer) -> bool | None:
    """Whether one optimum shifts more than another, in either direction, at 95 %.

    Both shifts come from the same seeds, which move both optima the same way. If the
    shifts have opposite signs, this changes their sizes by opposite amounts, so their
    errors add up. Otherwise it cancels, and the errors of independent seeds suffice.

    An optimum that is missing at some size shifts more than any other.
    """
    if first.failed or second.failed:
        return None if first.failed and second.failed else bool(first.failed)
    one, other = first.trend, second.trend
    opposite = one.slope * other.slope < 0
    error = one.error + other.error if opposite else np.hypot(one.error, other.error)
    more = abs(other.slope) - abs(one.slope)
    return interval(more, float(error), min(one.freedom, other.freedom)).negative


def shift(transfer: Transfer) -> str:
    """Verdict, cost and shift: "transfers: costs …, shift +0.18 [0.07, 0.29] …"."""
    if transfer.failed:
        return transfer.words
    low, high = transfer.trend.interval
    moved = f"{transfer.trend.slope:+.2f} [{low:.2f}, {high:.2f}]"
    words = f"{transfer.words}, shift {moved} octaves per doubling"
    if transfer.at_edge and transfer.verdict is not Verdict.EDGE:  # EDGE says it
        words += ", with an optimum at the edge of the grid"
    return words


def describe(transfers: Mapping[str, Transfer]) -> str:
    """Several verdicts, each with its shift."""
    return "; ".join(f"{name} – {shift(one)}" for name, one in transfers.items())

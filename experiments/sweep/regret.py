"""The regret of a hyperparameter's value: its cost for a model, with an interval.

Seeds share the initialization and the order of examples over all values of a
hyperparameter (common random numbers). Losses are therefore compared seed by seed:
the error of a difference of two losses is that of the seeds' differences, with the
variance pooled over the model sizes of an axis.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from .optima import Fit

_BETWEEN = 9  # values around the best grid point that may be the best one
PRIOR = 4.0  # degrees of freedom that the other sizes' variance counts for


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the bounds of a regret follow from, in log2 of the loss.

    Attributes:
      gap: mean differences of the losses at the value and at others, shape (others,).
      variance: of each difference over seeds.
      known: degrees of freedom of the variance beyond the model's own, per difference.
      points: how many of the others, the first ones, are grid points.
      slip: standard deviation of the grid's error of the loss at the value.
    """

    gap: np.ndarray
    variance: np.ndarray
    known: np.ndarray
    points: int
    slip: float

    def bounds(self, seeds: int) -> tuple[float, float]:
        """The lower and the upper 95 % bound from so many seeds; see `regret`."""
        freedom = np.maximum(self.known + seeds - 1, 1)

        def wide(seeds_level: float, grid_level: float) -> np.ndarray:
            drawn = special.stdtrit(freedom, seeds_level) * np.sqrt(
                self.variance / seeds
            )
            return np.hypot(drawn, special.ndtri(grid_level) * self.slip)

        each = 1 - 0.05 / max(self.points - 1, 1)
        low = (self.gap - wide(each, each))[: self.points]
        return float(low.max()), float((self.gap + wide(0.975, 0.95)).max())


@dataclasses.dataclass(frozen=True)
class Regret:
    """Share of the loss that a model gives up at a value tuned elsewhere.

    The bounds are a 90 % interval. The least loss is that over the range of the grid in
    which all seeds trained.
    """

    share: float  # loss at the value over the least loss, minus one
    low: float  # lower 95 % bound of the share; at least 0
    high: float  # upper 95 % bound of the share; infinite for one seed
    least: float  # loss at the best value, geometric mean over seeds
    sample: Sample | None = dataclasses.field(default=None, repr=False)  # of two seeds

    def expected(self, seeds: int) -> "Regret":
        """The regret that so many seeds would give, if means and variances stay."""
        if self.sample is None:
            return self
        low, high = self.sample.bounds(seeds)
        share = math.log2(1 + self.share)
        return dataclasses.replace(
            self,
            low=_share(min(max(low, 0.0), share)),
            high=_share(max(high, share)),
        )

    @property
    def words(self) -> str:
        """The share and its interval, e.g. "0.4% (0% to 0.9%)"."""
        if math.isinf(self.high):
            return percent(self.share)
        return f"{percent(self.share)} ({percent(self.low)} to {percent(self.high)})"


def regret(fits: Sequence[Fit], index: int, value: float) -> Regret | None:
    """The regret of one model at a given value of the hyperparameter.

    The estimate is read off the parabola that gives the model's optimum. The bounds
    compare the value with other values x: all grid points, and values in between
    around the best of them. With d(x) the mean difference of the log losses at the
    value and at x, e(x) its standard error and t Student's 97.5 % quantile:

    - the upper bound is the largest d(x) + t e(x). One of the x is the best, and its
      own bound holds; so no correction for the number of x is needed (multiple
      comparisons with the best; Hsu, The Annals of Statistics 12, 1136, 1984), even if
      the seeds do not show which x is the best. Of a value chosen independently, the
      bound would hold with 97.5 %. The same seeds that favour it at one size favour it
      at the others: whether it lies below or above the best x, its regret then is
      underestimated, and both tails of the error count. So the bound holds with 95 %.
    - the lower bound is the largest d(x) - c e(x) over grid points x, with c for as
      many comparisons (Bonferroni).

    To t e(x) is added, in quadrature, the normal quantile times the grid's error, at
    95 % for the upper bound: what the loss at the value changes by when the value moves
    by `Fit.place_error`, and half the difference of the two parabolas between whose
    grid points the value lies.

    Args:
      fits: the fits of all sizes of an axis, whose variances are pooled.
      index: index of the model in `fits`.
      value: coordinate of the hyperparameter.

    Returns:
      None where the loss at the value is not known, because a seed diverged near it
      or it lies outside the grid.

    Examples:
      >>> grid = np.arange(-10.0, -4.0)
      >>> seeds = np.array([[0.01], [-0.01]])
      >>> fits = [Fit(grid, 0.3 * (grid + 7) ** 2 + seeds, 0, 6) for _ in range(2)]
      >>> cost = regret(fits, 1, -7.1)  # 2 ** (0.3 * 0.1**2) - 1
      >>> round(cost.share, 4), cost.low, cost.high < 0.02
      (0.0021, 0.0, True)
    """
    fit = fits[index]
    if not fit.holds(value):
        return None
    mean = fit.log_loss.mean(axis=0)
    at_value, at_best = fit.weights([value, fit.optimum])
    least = float(at_best @ mean)
    share = max(float(at_value @ mean) - least, 0.0)
    beside = np.array([value - fit.place_error, value + fit.place_error])
    beside = beside.clip(min(fit.grid[0], value), max(fit.grid[-1], value))
    slip = float(np.abs((fit.weights(beside) - at_value) @ mean).max())
    rough = (fit.weights([value], other=True)[0] - at_value) @ mean
    slip = math.hypot(slip, float(rough) / 2)
    seeds = len(fit.log_loss)
    one = Regret(
        share=_share(share),
        low=0.0,
        high=math.inf,
        least=2.0**least,
        sample=None if seeds < 2 else _sample(fits, index, value, slip),
    )
    return one.expected(seeds)


def _share(doublings: float) -> float:
    """Convert log2 of a ratio of losses to the ratio minus one."""
    return 2.0**doublings - 1 if doublings < 1024 else math.inf


def _sample(fits: Sequence[Fit], index: int, value: float, slip: float) -> Sample:
    """The differences of the losses at a value and at all others; see `regret`."""
    fit = fits[index]
    beside = fit.grid[max(fit.best - 1, 0) : fit.best + 2]
    between = np.linspace(beside[0], beside[-1], _BETWEEN)
    others = np.concatenate([fit.grid, between, [fit.optimum]])
    contrasts = fit.weights([value]) - fit.weights(others)
    variance, known = _pooled(fits, index, contrasts)
    gap = contrasts @ fit.log_loss.mean(axis=0)
    return Sample(gap, variance, known, len(fit.grid), slip)


def _pooled(
    fits: Sequence[Fit], index: int, contrasts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Variance over seeds of contrasts of one model's grid points.

    The model's own variance is averaged with that of the other sizes, which counts as
    at most `PRIOR` degrees of freedom: a few seeds borrow from the other sizes, many
    seeds hardly do (a moderated variance; Smyth, Stat. Appl. Genet. Mol. Biol. 3, 3,
    2004).

    The same contrast is taken at every size, and the variances are averaged: moved
    by the distance between the best grid points, or at the same grid points where
    that leads out of the grid. Sizes that did not train there are left out. Seeds that
    agree over sizes (common random numbers) make the sizes' variances agree too: by
    Satterthwaite's rule the n sizes count as n / (1 + (n - 1) r²) independent ones,
    with r² the mean squared correlation between two sizes.

    Args:
      fits: the fits of all sizes.
      index: index of the model to which the contrasts belong.
      contrasts: weights of grid points, shape (contrasts, points).

    Returns:
      Variances, and the degrees of freedom of the other sizes', shape (contrasts,).
    """
    judged = fits[index]
    drawn = np.zeros((len(fits), len(judged.log_loss), len(contrasts)))
    covered = np.zeros((len(fits), len(contrasts)), bool)
    used = np.abs(contrasts) > 1e-9
    for i, fit in enumerate(fits):
        residual = fit.log_loss - fit.log_loss.mean(axis=0)
        for move in (judged.first - fit.first, fit.best - judged.best):
            place = np.arange(len(judged.grid)) + move
            there = (place >= 0) & (place < len(fit.grid))
            noise = np.where(there, residual[:, np.where(there, place, 0)], 0.0)
            good = ~(used & ~there).any(axis=1)
            drawn[i] = np.where(good, noise @ contrasts.T, drawn[i])
            covered[i] |= good
    seeds, rest = len(judged.log_loss), np.arange(len(fits)) != index
    squares = (drawn**2).sum(axis=1)
    sizes = covered[rest].sum(axis=0)
    spare = seeds - 1
    others = squares[rest].sum(axis=0) / np.maximum(sizes * spare, 1)
    flat = drawn.reshape(len(fits), -1)
    length = np.sqrt((flat**2).sum(axis=1))
    alike = (flat @ flat.T / np.maximum(np.outer(length, length), 1e-300)) ** 2
    pairs = alike[np.triu_indices(len(fits), 1)]
    agree = float(pairs.mean()) if len(pairs) else 0.0
    known = np.minimum(sizes * spare / (1 + sizes * agree), PRIOR)
    freedom = known + spare
    variance = (known * others + squares[index]) / np.maximum(freedom, 1)
    return variance, known


def percent(share: float) -> str:
    """A share of the loss, to two digits.

    Examples:
      >>> percent(0.0042), percent(0.26), percent(5.42), percent(0.0)
      ('0.42%', '26%', '540%', '0%')
      >>> percent(123.4), percent(float("inf"))
      ('12,000%', 'over 100,000,000%')
    """
    value = 100 * share
    if value < 0.005:
        return "0%"
    if share > 1e6:
        return "over 100,000,000%"
    digits = 1 - math.floor(math.log10(value))
    rounded = round(value, digits)
    return f"{rounded:g}%" if value < 1e4 else f"{rounded:,.0f}%"

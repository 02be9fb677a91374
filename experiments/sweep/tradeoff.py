"""Deeper or wider? Losses of models of equal size (Bordelon et al., Figure B.1)."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import stats

from . import optima
from .results import Population

# Widths are whole numbers: counts that differ by less are of one budget.
EQUAL = 0.15

_RESAMPLES = 400


@dataclasses.dataclass(frozen=True)
class Point:
    """The runs of one shape.

    Attributes:
      width: of the model.
      depth: of the model.
      parameters: how many weights are trained.
      loss: training loss at the end, shape (seeds,); NaN where it diverged.
    """

    width: int
    depth: int
    parameters: int
    loss: np.ndarray

    @property
    def mean(self) -> float | None:
        """Geometric mean over seeds; None where a seed diverged."""
        if np.isnan(self.loss).any():
            return None
        return float(2 ** optima.log2(self.loss).mean())


@dataclasses.dataclass(frozen=True)
class Law:
    """loss = factor * parameters^-exponent, at one depth.

    Attributes:
      depth: of all its models.
      factor: loss of a single parameter.
      exponent: positive where more parameters train better.
      error: standard error of the exponent over seeds; None of one seed.
    """

    depth: int
    factor: float
    exponent: float
    error: float | None

    def __call__(self, parameters: float) -> float:
        """The loss at a number of parameters."""
        return self.factor * parameters**-self.exponent


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """The depth of least loss at a number of parameters.

    Attributes:
      parameters: the budget.
      losses: the loss at the budget, by depth; interpolated, or extrapolated, by the
        depth's power law where there is one.
      depth: where a parabola in log2 of the depth is least; None where nothing trained.
      interval: 95 % over seeds; None of one seed.
      at_edge: the least loss is that of the smallest or the largest depth.
      measured: models of about that size were trained, at every depth.
    """

    parameters: int
    losses: Mapping[int, float]
    depth: float | None
    interval: tuple[float, float] | None
    at_edge: bool
    measured: bool


@dataclasses.dataclass(frozen=True)
class Tradeoff:
    """Shapes trained with the same hyperparameters.

    Attributes:
      key: of the parametrization.
      hyper: the hyperparameters, which the base likes best.
      points: the shapes.
      budgets: numbers of parameters at which depths are compared, rising.
      target: the parameters of the target; None for none.
      populations: all runs.
    """

    key: str
    hyper: Mapping[str, float]
    points: Sequence[Point]
    budgets: Sequence[int]
    target: int | None = None
    populations: Sequence[Population] = ()

    @property
    def depths(self) -> list[int]:
        """All depths, rising."""
        return sorted({p.depth for p in self.points})

    @property
    def laws(self) -> list[Law]:
        """A power law for each depth that trained at two sizes or more."""
        return laws(self.points)

    @property
    def suggestions(self) -> list[Suggestion]:
        """One for each budget."""
        return [suggest(self.points, budget) for budget in self.budgets]

    @property
    def predicted(self) -> Suggestion | None:
        """At the target's parameters; None without a target or power laws for it."""
        if self.target is None or len(self.laws) < 2:
            return None
        return suggest(self.points, self.target)


def points(
    populations: Sequence[Population], parameters: Callable[[int, int], int]
) -> list[Point]:
    """The shapes of populations of a single grid point.

    Args:
      populations: of one parametrization.
      parameters: trained weights of a width and a depth.
    """
    return [
        Point(p.width, p.depth, parameters(p.width, p.depth), p.loss.reshape(-1))
        for p in populations
    ]


def budgets(counts: Sequence[int]) -> list[int]:
    """Numbers of parameters that lie together, as one number each.

    Examples:
      >>> budgets([1000, 4100, 1040, 3950, 16000])
      [1020, 4024, 16000]
    """
    groups: list[list[int]] = []
    for count in sorted(counts):
        if groups and count <= groups[-1][0] * (1 + EQUAL):
            groups[-1].append(count)
        else:
            groups.append([count])
    return [round(float(np.exp(np.mean(np.log(group))))) for group in groups]


def laws(found: Sequence[Point]) -> list[Law]:
    """Power laws of loss against parameters, one a depth.

    A line in the logarithms by least squares, as in Bordelon et al., Figure B.1.
    Shapes of which a seed diverged are left out.

    Examples:
      >>> made = [Point(w, 4, w * w, np.array([8.0 / w])) for w in (16, 32, 64)]
      >>> law = laws(made)[0]
      >>> round(law.exponent, 3), round(law.factor, 3)
      (0.5, 8.0)
    """
    whole = [p for p in found if p.mean is not None]
    out = []
    for depth in sorted({p.depth for p in whole}):
        mine = [p for p in whole if p.depth == depth]
        if len({p.parameters for p in mine}) < 2:
            continue
        x = np.log2([p.parameters for p in mine])
        (start,), (slope,) = _line(x, _means(mine))
        seeds = min(len(p.loss) for p in mine)
        error = None
        if seeds > 1:
            drawn = _line(x, _resampled(mine))[1]
            error = float(drawn.std(ddof=1)) * _correction(seeds)
        out.append(Law(depth, float(2**start), float(-slope), error))
    return out


def suggest(found: Sequence[Point], budget: int) -> Suggestion:
    """The best depth at a number of parameters.

    At each depth the shape nearest to the budget is moved to it along the depth's
    power law; where there is no shape near it, the law itself is taken. A parabola
    in log2 of the depth through the least loss and its neighbours gives the depth, a
    bootstrap over seeds its interval.

    Args:
      found: all shapes.
      budget: number of parameters.
    """
    whole = [p for p in found if p.mean is not None]
    levels = _levels(whole, _means(whole), budget)
    near = {p.depth for p in found if _is_near(p, budget)}
    measured = bool(near) and near >= {p.depth for p in found}
    if not levels:
        return Suggestion(budget, {}, None, None, False, measured)
    depths = np.array(list(levels))
    level = np.array([at[0] for at in levels.values()])
    where = optima.parabola(np.log2(depths), level)[0]
    seeds = min(len(p.loss) for p in whole)
    interval = None
    if seeds > 1 and len(depths) > 1:
        drawn = np.stack(list(_levels(whole, _resampled(whole), budget).values()))
        bests = [optima.parabola(np.log2(depths), column)[0] for column in drawn.T]
        error = float(np.std(bests, ddof=1)) * _correction(seeds)
        # Three depths decide where the parabola is least.
        wide = error * float(stats.t.ppf(0.975, 3 * (seeds - 1)))
        interval = (2.0 ** (where - wide), 2.0 ** (where + wide))
    return Suggestion(
        budget,
        {int(d): float(2**v) for d, v in zip(depths, level, strict=True)},
        2.0**where,
        interval,
        int(level.argmin()) in (0, len(depths) - 1),
        measured,
    )


def _levels(
    found: Sequence[Point], y: np.ndarray, budget: int
) -> dict[int, np.ndarray]:
    """log2 of the loss at the budget, by depth; y and what it gives are of draws.

    Args:
      found: all shapes that trained.
      y: log2 of their losses, shape (shapes, draws).
      budget: number of parameters.
    """
    out = {}
    for depth in sorted({p.depth for p in found}):
        rows = [i for i, p in enumerate(found) if p.depth == depth]
        x = np.log2([found[i].parameters for i in rows])
        away = math.log2(budget) - x
        first = int(np.abs(away).argmin())
        several = len(set(x)) > 1
        start, slope = _line(x, y[rows]) if several else (np.nan, 0.0)
        if _is_near(found[rows[first]], budget):
            out[depth] = y[rows[first]] + slope * away[first]
        elif several:
            out[depth] = start + slope * math.log2(budget)
    return out


def _is_near(point: Point, budget: int) -> bool:
    return abs(math.log(point.parameters / budget)) <= math.log(1 + EQUAL)


def _line(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(intercept, slope), each of shape (draws,), of y of shape (shapes, draws)."""
    design = np.stack([np.ones_like(x), x], axis=1)
    return np.linalg.lstsq(design, y, rcond=None)[0]


def _means(found: Sequence[Point]) -> np.ndarray:
    """log2 of the loss, mean over seeds, shape (shapes, 1)."""
    rows = [optima.log2(p.loss).mean() for p in found]
    return np.array(rows).reshape(-1, 1)


def _resampled(found: Sequence[Point]) -> np.ndarray:
    """The same with seeds drawn anew, shape (shapes, draws)."""
    rng = np.random.default_rng(0)
    rows = []
    for point in found:
        seeds = len(point.loss)
        drawn = rng.integers(seeds, size=(_RESAMPLES, seeds))
        rows.append(optima.log2(point.loss)[drawn].mean(axis=1))
    return np.stack(rows)


def _correction(seeds: int) -> float:
    # What n seeds vary is too small by √((n-1)/n).
    return math.sqrt(seeds / (seeds - 1))

"""The trade-off between two hyperparameters near the optimum."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from . import statistics
from .results import Population, log2

# The quadratic is fitted to grid points whose loss is at most `_NEAR` times the least
# loss, and closer (in log) to the least than to the median loss; to the `_POINTS` best
# grid points if these are fewer.
_NEAR = 2.0
_POINTS = 9
_EXPLAINED = 0.8  # share of the log loss's variance that the fit must explain

# Below this ratio of curvatures the valley is round, and has no direction.
_LONG = 2.0


def surface(population: Population, names: Sequence[str]) -> np.ndarray:
    """Loss over two hyperparameters, every other at its best.

    Args:
      population: all runs of a shape.
      names: two of its hyperparameters, (across, up).

    Returns:
      Geometric mean over seeds, shape (values across, values up); NaN where a seed
      diverged at every value of the others.

    Examples:
      >>> axes = {"learning_rate": [0.25, 0.5], "eps": [1.0], "b1": [0.5, 0.9]}
      >>> loss = np.array([[[[4.0, 2.0]], [[np.nan, 8.0]]]])
      >>> runs = Population("n", "p", 8, 2, {}, axes, loss, loss[..., None], 0.0)
      >>> surface(runs, ("learning_rate", "eps")).round(3).tolist()
      [[2.0], [8.0]]
    """
    at = [list(population.axes).index(name) for name in names]
    mean = np.moveaxis(log2(population.loss).mean(axis=0), at, (0, 1))
    mean = mean.reshape(*mean.shape[:2], -1)
    least = np.where(np.isnan(mean), np.inf, mean).min(axis=-1)
    return np.exp2(np.where(np.isinf(least), np.nan, least))


def slope(population: Population, names: Sequence[str]) -> float | None:
    """The direction in which the loss changes least (Tensor Programs VI, Figure 7).

    Fits a quadratic in both coordinates to the log loss around the optimum. The slope
    is that of the long axis of its level sets: at -1 a doubled learning rate needs half
    the multiplier, at -2 a quarter of it.

    Returns:
      Change of `up` per unit of `across`, both as `grids.coordinate`. None if there are
      too few points, if they are too noisy, if the valley is round or not a valley, or
      if its slope changes sign when any one seed is left out.
    """
    whole = _slope(population, names)
    if whole is None or len(population.loss) < 2:
        return whole
    rest = _left_out(population, names)
    return whole if all(s is not None and s * whole > 0 for s in rest) else None


def slope_error(population: Population, names: Sequence[str]) -> float:
    """Standard error of `slope` over seeds (jackknife); infinite for too few seeds."""
    known = [s for s in _left_out(population, names) if s is not None]
    return statistics.jackknife(known)


def _left_out(population: Population, names: Sequence[str]) -> list[float | None]:
    """The slopes that each leave out a seed."""
    rest = (
        np.delete(population.loss, seed, axis=0) for seed in range(len(population.loss))
    )
    return [_slope(dataclasses.replace(population, loss=r), names) for r in rest]


def _slope(population: Population, names: Sequence[str]) -> float | None:
    loss = surface(population, names)
    if np.isnan(loss).all():
        return None
    values = [population.coordinates(name) for name in names]
    x, y = np.meshgrid(*values, indexing="ij")
    known = np.sort(loss[~np.isnan(loss)])
    low = min(_NEAR * known[0], np.sqrt(known[0] * np.median(known)))
    near = loss <= max(low, known[min(_POINTS, len(known)) - 1])
    if near.sum() < _POINTS or np.ptp(x[near]) == 0 or np.ptp(y[near]) == 0:
        return None
    u, v = x[near] - x[near].mean(), y[near] - y[near].mean()
    design = np.stack([np.ones_like(u), u, v, u * u / 2, u * v, v * v / 2], axis=1)
    level = np.log2(loss[near])
    solution, _, rank, _ = np.linalg.lstsq(design, level, rcond=None)
    if rank < 6 or (level - design @ solution).var() > (1 - _EXPLAINED) * level.var():
        return None
    curvature, axes = np.linalg.eigh(
        [[solution[3], solution[4]], [solution[4], solution[5]]]
    )
    if curvature[1] <= 0 or curvature[0] * _LONG > curvature[1]:
        return None
    across, up = axes[:, 0]
    return float(up / across) if abs(across) > 1e-3 else None

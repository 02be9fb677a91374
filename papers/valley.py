"""The direction of the valley of two hyperparameters near the optimum."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mupax.experiments.sweep.results import Population

# The quadratic is fitted to grid points whose loss is at most `_NEAR` times the least
# loss, and closer (in log) to the least than to the median loss; to the `_POINTS` best
# grid points if these are fewer.
_NEAR = 2.0
_POINTS = 9
_EXPLAINED = 0.8  # share of the log loss's variance that the fit must explain

# Below this ratio of curvatures the valley is round, and has no direction.
_LONG = 2.0


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
    return jackknife(known)


def _left_out(population: Population, names: Sequence[str]) -> list[float | None]:
    """The slopes that each leave out a seed."""
    rest = (
        np.delete(population.loss, seed, axis=0) for seed in range(len(population.loss))
    )
    return [_slope(dataclasses.replace(population, loss=r), names) for r in rest]


def _slope(population: Population, names: Sequence[str]) -> float | None:
    loss = population.surface(names)
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


def jackknife(left_out: Sequence[float]) -> float:
    """Standard error of an estimate, from the estimates that each leave out a seed.

    Infinite for fewer than two seeds. For a mean it is the usual standard error.

    Examples:
      >>> values = np.array([1.0, 2.0, 6.0])
      >>> round(jackknife((values.sum() - values) / 2), 6)
      1.527525
    """
    seeds = len(left_out)
    if seeds < 2:
        return float("inf")
    return float(np.std(left_out) * (seeds - 1) ** 0.5)

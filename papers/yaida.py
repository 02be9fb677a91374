"""Yaida, Meta-principled family of hyperparameter scaling strategies."""

import numpy as np

from mupax.experiments.theory import family_statistics

from . import curves
from .registry import Drawing, Figure, Line, loglog

_TOLERANCE = 0.3  # of an exponent


def emergent_scale(paper: bool) -> Drawing:
    """The second differential against γ = L/n^(1-s) (eq. 1.1, 4.9, 4.10)."""
    widths = (32, 64, 128, 256) if paper else (32, 64, 128)
    # In networks as deep as wide, a few in a hundred dominate the average.
    shapes = [(n, d) for n in widths for d in (4, 8, 16) if 2 * d <= n]
    seeds = 2048
    measured = [family_statistics.statistics(n, d, 0.0, seeds=seeds) for n, d in shapes]
    values = np.array([f.ddntk_2 for f in measured])
    errors = np.array([f.error["ddntk_2"] for f in measured])
    sizes, depths = np.array(shapes, float).T
    fitted = _exponents(sizes, depths, values, errors)
    # At another s the same networks have n^s times the change, and n^s times the γ.
    lines, gamma = [], depths / sizes
    for s in (0.0, 0.5, 1.0):
        points = gamma * sizes**s, values * sizes**s, errors * sizes**s
        lines.append(Line(f"s = {s:g}", *points, look="points"))
    ends = np.array([gamma.min(), (gamma * sizes).max()])
    prefactor = np.exp(np.mean(np.log(values / gamma)))
    lines.append(Line("proportional to γ", ends, prefactor * ends, look="theory"))
    panel = loglog(
        "Change of the NTK by learning, tanh networks",
        "emergent scale γ = L/n^(1-s)",
        "n^s E[z²] E[η³ddH]/E[ηH]³, type II",
        lines,
    )
    (by_depth, depth_error), (by_width, width_error) = fitted
    ours = (
        f"at s = 0, over {len(shapes)} shapes, as L^({by_depth:.2f} ± "
        f"{depth_error:.2f}) n^({by_width:.2f} ± {width_error:.2f}) (agrees within "
        f"{_TOLERANCE} of 1 and -1)"
    )
    agrees = curves.conjunction(
        curves.surely_near(by_depth, depth_error, 1, _TOLERANCE),
        curves.surely_near(by_width, width_error, -1, _TOLERANCE),
    )
    return Drawing([panel], ours, agrees)


def _exponents(
    widths: np.ndarray, depths: np.ndarray, values: np.ndarray, errors: np.ndarray
) -> list[tuple[float, float]]:
    """The exponents in depth and width, with standard errors.

    A fit of the logs, weighted by the errors. Where it misses the points by more than
    their errors, its own are larger by the same factor.
    """
    design = np.stack([np.log(depths), np.log(widths), np.ones_like(depths)], axis=1)
    weights = (values / errors)[:, None]
    inverse = np.linalg.pinv(design * weights)
    solution = inverse @ (np.log(values) * weights[:, 0])
    missed = (np.log(values) - design @ solution) * weights[:, 0]
    factor = max(float(missed @ missed) / (len(values) - 3), 1.0) ** 0.5
    spread = np.sqrt((inverse**2).sum(axis=1)) * factor
    return [(float(x), float(e)) for x, e in zip(solution[:2], spread, strict=False)]


FIGURES = [
    Figure(
        id="yaida-1",
        paper="Yaida",
        number="eq. 1.1",
        claim="feature learning is proportional to γ = L/n^(1-s), for every s",
        draw=emergent_scale,
        how="the paper has no figure; measured on random tanh networks",
    ),
]

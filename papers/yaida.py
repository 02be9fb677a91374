"""Yaida, Meta-principled family of hyperparameter scaling strategies."""

import itertools

import numpy as np

from . import curves, family_statistics
from .numbers import Numbers, Row
from .registry import Drawing, Figure, Line, loglog
from .request import Request

_TOLERANCE = 0.3  # of an exponent


def measure(request: Request) -> list[Row]:
    """The second differential at s = 0 over widths and depths."""
    widths = (32, 64, 128, 256) if request.paper else (32, 64, 128)
    rows: list[Row] = []
    # In networks as deep as wide, a few in a hundred dominate the average.
    for width, depth in itertools.product(widths, (4, 8, 16)):
        if 2 * depth <= width:
            own = family_statistics.statistics(width, depth, 0.0, seeds=2048)
            value = {"ddntk_2": own.ddntk_2, "standard_error": own.error["ddntk_2"]}
            rows.append({"width": width, "depth": depth, **value})
    return rows


def emergent_scale(numbers: Numbers) -> Drawing:
    """The second differential against γ = L/n^(1-s) (eq. 1.1, 4.9, 4.10)."""
    sizes, depths = numbers["width"], numbers["depth"]
    values, errors = numbers["ddntk_2"], numbers["standard_error"]
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
        f"at s = 0, over {len(sizes)} shapes, as L^({by_depth:.2f} ± "
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
        measure=measure,
        draw=emergent_scale,
        how="the paper has no figure; measured on random tanh networks",
    ),
]

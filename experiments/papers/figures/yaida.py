"""Yaida, Meta-principled family of hyperparameter scaling strategies."""

import numpy as np

from ..theory import family_statistics
from ..theory.relu_mlp import fit_power_law
from .registry import Drawing, Figure, Line, loglog, near


def emergent_scale(paper: bool) -> Drawing:
    """The second differential against γ = L/n^(1-s) (eq. 1.1, 4.9, 4.10)."""
    widths = (16, 32, 64, 128) if paper else (16, 32, 64)
    # In networks as deep as wide, a few in a hundred dominate the average.
    shapes = [(n, d) for n in widths for d in (4, 8, 16) if 2 * d <= n]
    seeds = 256 if paper else 96
    lines, scales, values = [], [], []
    for s in (0.0, 0.5, 1.0):
        statistics = [
            family_statistics.statistics(n, d, s, seeds=seeds) for n, d in shapes
        ]
        gamma = [f.gamma for f in statistics]
        change = [f.ddntk_2 for f in statistics]
        errors = [f.error["ddntk_2"] for f in statistics]
        lines.append(Line(f"s = {s:g}", gamma, change, errors, look="points"))
        scales += gamma
        values += change
    slope = fit_power_law(scales, values)
    ends = np.array([min(scales), max(scales)])
    prefactor = np.exp(np.mean(np.log(values) - np.log(scales)))
    lines.append(Line("proportional to γ", ends, prefactor * ends, look="theory"))
    panel = loglog(
        "Change of the NTK by learning, tanh networks",
        "emergent scale γ = L/n^(1-s)",
        "n^s E[z²] E[η³ddH]/E[ηH]³, type II",
        lines,
    )
    ours = (
        f"exponent {slope:.3f} in γ over {len(values)} shapes and s (agrees within 0.1)"
    )
    return Drawing([panel], ours, near(slope, 1.0, 0.1))


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

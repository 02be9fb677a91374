"""Made populations whose optima are known, for tests of reports."""

import math

import numpy as np

from mupax.experiments.report.data import SweepData
from mupax.experiments.sweep.results import Population, Sizes

RATES = [2.0**x for x in range(-13, -1)]
MULTIPLIERS = [2.0**x for x in range(-2, 3)]
BASE = Sizes(64, 8)
LABELS = {"sp": "Standard (SP)", "depth_mup": "Depth-μP"}
SHAPES = [(64, d) for d in (4, 8, 16, 32, 64)] + [(w, 8) for w in (32, 128, 256)]


def population(
    key,
    width,
    depth,
    *,
    per_depth=0.0,
    per_width=0.0,
    seeds=3,
    pair=False,
    choices=None,
    noise=0.02,
    best=-6.5,
):
    """A valley in log2 of the learning rate whose place moves with the size."""
    rng = np.random.default_rng([width, depth, len(key)])
    over = math.log2(depth / BASE.depth), math.log2(width / BASE.width)
    best += per_depth * over[0] + per_width * over[1]
    axes = {"learning_rate": RATES}
    if pair:
        axes["branch_multiplier"] = MULTIPLIERS
    grid = np.meshgrid(*(np.log2(v) for v in axes.values()), indexing="ij")
    shape = (seeds, *grid[0].shape)
    # A double learning rate with half the multiplier does the same.
    place = grid[0] + (grid[1] if pair else 0) - best
    place = place + rng.normal(0, 5 * noise, (seeds,) + (1,) * grid[0].ndim)
    log_loss = math.log(0.02 * 0.75 ** sum(over)) + 0.11 * place**2
    if pair:
        log_loss = log_loss + 0.05 * grid[1] ** 2
    loss = np.minimum(np.exp(log_loss + rng.normal(0, noise, shape)), 2.4)
    loss = np.where(place > 3, np.nan, loss)
    curves = 2.3 * (loss[..., None] / 2.3) ** np.linspace(0.02, 1, 40)
    name = f"{key}-w{width}-d{depth}"
    return Population(name, key, width, depth, choices or {}, axes, loss, curves, 2.0)


def populations(shifts=None, *, shapes=SHAPES, **options):
    """One a shape and parametrization; `shifts` in octaves a doubling of depth."""
    shifts = shifts or {"sp": -1.0, "depth_mup": 0.0}
    return [
        population(key, width, depth, per_depth=shift, **options)
        for key, shift in shifts.items()
        for width, depth in shapes
    ]


def swept(found=None, **changes):
    """A whole sweep."""
    given = {
        "populations": populations() if found is None else found,
        "base": BASE,
        "labels": LABELS,
        "featured": "depth_mup",
        "steps": 200,
        "settings": {"config": {"sweep": {"depths": [4, 8]}}, "machine": {"jax": "1"}},
        "subject": "residual MLP on digits, Adam",
        "command": "mupax sweep --config digits_resmlp --workdir runs/sweep",
    }
    return SweepData(**{**given, **changes})

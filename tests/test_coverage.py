"""Intervals hold the true value as often as they say, in simulation and on real seeds.

tests/digits_16_seeds.csv holds the losses of 16 seeds of a residual MLP (width 64,
200 steps of Adam on digits) under Depth-μP and SP at four depths, on a grid of half
octaves. This remakes it (about 20 minutes of one core), as results.csv:

    mupax sweep --config digits_resmlp --config.sweep.seeds=16 \
        --config.dataset=digits --config.model.branch_multiplier=1.0 \
        --config.sweep.axes.learning_rate="2**[-12:-3:0.5]" \
        "--config.sweep.base_axes['hidden/learning_rate']=2**[0:0]" \
        --config.sweep.widths="(64,)" --config.sweep.depths="(4,8,16,32)" \
        --config.sweep.only="('sp','depth_mup')" --workdir runs/digits_16_seeds
"""

import csv
import functools
import math
import pathlib

import numpy as np
import pytest

from mupax.experiments.sweep import optima, statistics
from mupax.experiments.sweep.regret import regret
from mupax.experiments.sweep.results import Cell
from mupax.experiments.sweep.verdict import Verdict, transfer

DATA = pathlib.Path(__file__).with_name("digits_16_seeds.csv")
DEPTHS = (4, 8, 16, 32)
SEEDS = 16


@functools.cache
def losses(key):
    """(log2 learning rates, losses by depth of shape (seeds, rates))."""
    with DATA.open() as file:
        rows = [r for r in csv.DictReader(file) if r["parametrization"] == key]
    rates = sorted({float(r["learning_rate"]) for r in rows})
    by_depth = {depth: np.full((SEEDS, len(rates)), np.nan) for depth in DEPTHS}
    for r in rows:
        at = int(r["seed"]), rates.index(float(r["learning_rate"]))
        by_depth[int(r["depth"])][at] = float(r["loss"] or "nan")
    return np.log2(rates), by_depth


def cells(key, seeds, points, spread=1.0):
    """The sweep of some seeds on some of the grid points.

    Args:
      spread: by this factor the mean log losses of the seeds are moved away from those
        of all 16.
    """
    grid, by_depth = losses(key)
    out = []
    for depth, every in by_depth.items():
        away = np.log2(every[seeds]).mean(axis=0) - np.log2(every).mean(axis=0)
        # Where a seed diverged there is no mean to move.
        loss = every[seeds] * np.exp2((spread - 1) * np.nan_to_num(away))
        x = loss[:, points]
        out.append(Cell(key, 64, depth, grid[points], x, x[..., None], 0.0))
    return out


def few_cells(keys, rng, count, points):
    """A sweep of each key with the same few seeds, as if drawn from infinitely many.

    Drawn from 16 without replacement, the mean of n seeds has an error that is too
    small by √(1 - n/16): the truth is the mean of the same 16.
    """
    seeds = rng.choice(SEEDS, count, False)
    spread = 1 / math.sqrt(1 - count / SEEDS)
    return [cells(key, seeds, points, spread) for key in keys]


@functools.cache
def all_seeds(key):
    """The slope and the fits of all seeds on the half-octave grid."""
    whole = cells(key, np.arange(SEEDS), slice(None))
    slope = statistics.trend(whole, [c.depth for c in whole]).slope
    return slope, [optima.fit(cell) for cell in whole]


def least(held, trials, level):
    """The smallest count of `level` that chance explains: three deviations."""
    return held >= level * trials - 3 * math.sqrt(trials * level * (1 - level))


def resampled(key, count, trials, step, start=0):
    """How often the intervals of a few seeds hold the values of all 16."""
    rng = np.random.default_rng(start)
    held = {"shift": 0, "upper": 0, "lower": 0}
    verdicts = []
    slope, fits = all_seeds(key)
    for i in range(trials):
        points = slice(i % step, None, step)  # either octave grid, or half octaves
        few = transfer(few_cells([key], rng, count, points)[0], "depth", 8)
        low, high = few.trend.interval
        held["shift"] += low <= slope <= high
        true = regret(fits, len(fits) - 1, few.optima[few.base])
        verdicts.append(few.verdict)
        if few.regret is None or true is None:
            held["upper"] += 1
            held["lower"] += 1
            continue
        held["upper"] += true.share <= few.regret.high
        held["lower"] += true.share >= few.regret.low
    return held, verdicts


# The interval of the shift is meant to hold 90 %. With few seeds of a noisy optimum the
# bootstrap is too narrow. The upper bound of the regret is meant to hold 95 %. On an
# octave grid of SP the error of the grid is larger than assumed, because the loss jumps
# beside the optimum; the regret is several times the loss. (docs/tune.md says both.)
SHIFT = 0.83


def also_long(short, *more):
    """One case in every run of the tests, the others in the long ones."""
    return [short, *(pytest.param(*one, marks=pytest.mark.long) for one in more)]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("count", "trials"), also_long((3, 150), *((n, 400) for n in (2, 3, 4, 6)))
)
@pytest.mark.parametrize("key", ["depth_mup", "sp"])
def test_few_real_seeds_hold_what_sixteen_say(key, count, trials, step):
    held, verdicts = resampled(key, count, trials, step)
    print(key, count, step, {k: v / trials for k, v in held.items()})
    assert least(held["shift"], trials, SHIFT)
    assert least(held["upper"], trials, 0.88 if (key, step) == ("sp", 2) else 0.95)
    assert least(held["lower"], trials, 0.95)
    wrong = {"depth_mup": Verdict.COSTS, "sp": Verdict.TRANSFERS}[key]
    assert verdicts.count(wrong) <= 0.05 * trials


def test_sixteen_seeds_tell_depth_mup_from_sp():
    everything = np.arange(SEEDS), slice(None)
    deep, sp = (
        transfer(cells(k, *everything), "depth", 8) for k in ("depth_mup", "sp")
    )
    # The loss is 0.001, and its seeds differ too much for a verdict on 1 % of it.
    assert deep.verdict.known is None
    assert deep.regret.high < sp.regret.low
    assert deep.trend.within(-0.25, 0.25) is True
    assert sp.verdict is Verdict.COSTS
    assert sp.trend.slope == pytest.approx(-1.0, abs=0.15)


def test_the_error_of_the_grid_is_as_large_as_assumed():
    """The two octave grids within the half-octave one give optima that differ."""
    apart = []
    for key in ("depth_mup", "sp"):
        both = [cells(key, np.arange(SEEDS), slice(i, None, 2)) for i in (0, 1)]
        first, second = ([optima.optimum(c).log2_lr for c in one] for one in both)
        apart += list(np.subtract(first, second))
    error = math.sqrt(np.mean(np.square(apart)) / 2)
    print(f"error of the grid {error:.3f} octaves")
    assert 0.5 * optima.PHASE < error < 1.5 * optima.PHASE


# --- Simulation.


EVEN = np.arange(-11.0, -2.0)
UNEVEN = np.concatenate([np.arange(-11.0, -8.0), np.arange(-8.0, -5.0, 0.25), EVEN[6:]])


def made(
    rng,
    seeds,
    *,
    shift,
    curvature,
    noise,
    level,
    alike,
    skew=0.0,
    at=-7.0,
    grid=EVEN,
):
    """Cells of five depths and their true curves: log2 loss against log2 rate.

    `alike` is the correlation of a seed's noise between depths; `level` is the noise
    that all learning rates share. The grid's position is drawn.
    """
    grid = grid + rng.uniform(-0.5, 0.5)
    shared = rng.normal(size=(seeds, 1)), rng.normal(size=(seeds, len(grid)))
    own = math.sqrt(1 - alike)
    simulated, truth = [], []
    for i in range(5):
        best = at + shift * i

        def true(x, best=best):
            return curvature * (x - best) ** 2 + skew * (x - best) ** 3

        drawn = [
            size * (math.sqrt(alike) * one + own * rng.normal(size=one.shape))
            for size, one in zip((level, noise), shared, strict=True)
        ]
        loss = np.exp2(true(grid) + drawn[0] + drawn[1])
        simulated.append(Cell("p", 64, 4 * 2**i, grid, loss, loss[..., None], 0.0))
        truth.append(true)
    return simulated, truth


FINE = "finer near the optimum"
CASES = {
    "stays": {"shift": 0.0, "curvature": 0.05},
    "moves": {"shift": 0.3, "curvature": 0.05},
    "flat": {"shift": 0.0, "curvature": 0.0},
    "edge": {"shift": 0.0, "curvature": 0.05, "at": -3.0},
    "steeper above": {"shift": 0.0, "curvature": 0.05, "skew": 0.008},
    FINE: {
        "shift": 0.1,
        "curvature": 0.05,
        "skew": 0.008,
        "noise": 0.003,
        "grid": UNEVEN,
    },
    # Curvature and noise of tests/digits_16_seeds.csv around the optimum.
    "digits": {"shift": 0.0, "curvature": 0.5, "noise": 0.5, "level": 0.3},
}


@pytest.mark.parametrize(
    ("seeds", "alike", "trials"),
    also_long((3, 0.9, 100), *((n, a, 400) for n in (2, 4) for a in (0.0, 0.8, 0.98))),
)
@pytest.mark.parametrize("case", CASES)
def test_intervals_hold_the_truth(case, seeds, alike, trials):
    given = {"noise": 0.01, "level": 0.02, "alike": alike} | CASES[case]
    held = {"shift": 0, "upper": 0, "lower": 0}
    for start in range(trials):
        rng = np.random.default_rng(start)
        simulated, truth = made(rng, seeds, **given)
        one = transfer(simulated, "depth")
        low, high = one.trend.interval
        held["shift"] += low <= given["shift"] <= high
        grid = np.linspace(simulated[0].log2_lr[0], simulated[0].log2_lr[-1], 2001)
        value = truth[-1](one.optima[0])
        true = 2 ** (value - truth[-1](grid).min()) - 1
        held["upper"] += bool(true <= one.regret.high)
        held["lower"] += bool(true >= one.regret.low)
    print(case, seeds, alike, {k: v / trials for k, v in held.items()})
    assert least(held["upper"], trials, 0.95)
    assert least(held["lower"], trials, 0.95)
    if case not in ("flat", "edge"):  # which have no optimum inside the grid
        # Where neighbouring rates differ by less than the noise, the interval of the
        # shift is too narrow (docs/tune.md says so).
        assert least(held["shift"], trials, 0.75 if case == FINE else 0.90)


QUICK = {(2, 0.95), (3, 0.8), (4, 0.5), (6, 0.0)}


@pytest.mark.parametrize(
    ("seeds", "alike"),
    [
        pytest.param(n, a, marks=[pytest.mark.long] * ((n, a) not in QUICK))
        for n in (2, 3, 4, 6)
        for a in (0.0, 0.5, 0.8, 0.95)
    ],
)
def test_a_value_chosen_with_the_same_seeds_is_not_favoured(seeds, alike):
    """A smooth noise, alike between sizes whose true curves are the same.

    A seed adds a slope to the log loss, which moves the optima of all sizes together.
    """
    held, trials, grid = 0, 400, np.arange(-5.0, 6.0)
    for start in range(trials):
        rng = np.random.default_rng(start)
        x = grid + rng.uniform(-0.5, 0.5)
        shared = rng.normal(size=(seeds, 1))
        fits = []
        for _ in range(4):
            own = rng.normal(size=(seeds, 1))
            tilt = math.sqrt(alike) * shared + math.sqrt(1 - alike) * own
            loss = np.exp2(0.5 * x**2 + tilt * x)
            fits.append(optima.fit(Cell("p", 64, 8, x, loss, loss[..., None], 0.0)))
        value = fits[0].optimum
        held += 0.5 * value**2 <= math.log2(1 + regret(fits, 3, value).high)
    print("common seeds", seeds, alike, held / trials)
    assert least(held, trials, 0.95)


@pytest.mark.parametrize(
    ("seeds", "times", "trials"),
    [
        (4, 2, 300),
        *also_long(
            (3, 4, 300), *((n, k, 1500) for n, k in ((2, 4), (2, 10), (3, 10), (6, 4)))
        ),
    ],
)
def test_regrets_of_noisier_sizes_hold_what_the_docs_say(seeds, times, trials):
    """The same for the bounds of a regret."""
    rng, grid, held = np.random.default_rng(0), np.arange(-10.0, -3.0), [0, 0]
    for _ in range(trials):
        fits = []
        for sd in (1.0, 1.0, times):
            level = rng.normal(0, 0.02 * sd, (seeds, 1))
            noise = level + rng.normal(0, 0.004 * sd, (seeds, len(grid)))
            fits.append(optima.Fit(grid, 0.03 * (grid + 7) ** 2 + noise, 0, len(grid)))
        cost, true = regret(fits, 2, -6.2), 2 ** (0.03 * 0.8**2) - 1
        held = [held[0] + (cost.high >= true), held[1] + (cost.low <= true)]
    print("regrets of unequal noise", seeds, times, *(n / trials for n in held))
    assert least(held[0], trials, 0.93)
    assert least(held[1], trials, 0.94)

"""Intervals hold the true value as often as they say, in simulation and on real seeds.

docs/data/digits_16_seeds.csv holds the losses of 16 seeds of a residual MLP (width 64,
200 steps of Adam on digits) under Depth-μP and SP at four depths, on a grid of half
octaves. This remakes it (about 20 minutes of one core), as results.csv:

    mupax sweep --config digits_resmlp --config.sweep.seeds=16 \
        --config.label_smoothing=0.0 \
        --config.sweep.axes.learning_rate="2**[-12:-3:0.5]" \
        --config.sweep.widths="(64,)" --config.sweep.depths="(4,8,16,32)" \
        --config.sweep.only="('sp','depth_mup')" --workdir runs/digits_16_seeds
"""

import csv
import functools
import math
import pathlib
import types

import numpy as np
import pytest

from mupax.experiments.papers.figures import (
    claims_bordelon,
    claims_tp6,
    curves,
    solved_bordelon,
    yaida,
)
from mupax.experiments.papers.theory import finite_size
from mupax.experiments.sweep import optima, statistics, valley
from mupax.experiments.sweep.regret import regret
from mupax.experiments.sweep.results import Cell, Population, Sizes
from mupax.experiments.sweep.verdict import Verdict, transfer

DATA = pathlib.Path(__file__).parents[1] / "docs" / "data" / "digits_16_seeds.csv"
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


def check_resampled(key, count, trials, step):
    held, verdicts = resampled(key, count, trials, step)
    print(key, count, step, {k: v / trials for k, v in held.items()})
    assert least(held["shift"], trials, SHIFT)
    assert least(held["upper"], trials, 0.88 if (key, step) == ("sp", 2) else 0.95)
    assert least(held["lower"], trials, 0.95)
    wrong = {"depth_mup": Verdict.COSTS, "sp": Verdict.TRANSFERS}[key]
    assert verdicts.count(wrong) <= 0.05 * trials


# The interval of the shift is meant to hold 90 %. With few seeds of a noisy optimum the
# bootstrap is too narrow. The upper bound of the regret is meant to hold 95 %. On an
# octave grid of SP the error of the grid is larger than assumed, because the loss jumps
# beside the optimum; the regret is several times the loss. (docs/tune.md says both.)
SHIFT = 0.83


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("key", ["depth_mup", "sp"])
def test_few_real_seeds_hold_what_sixteen_say(key, step):
    check_resampled(key, 3, 150, step)


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 4, 6])
@pytest.mark.parametrize("key", ["depth_mup", "sp"])
def test_few_real_seeds_hold_what_sixteen_say_long(key, count, step):
    check_resampled(key, count, 400, step)


def check_resampled_gaps(count, trials, step):
    """Losses of SP and Depth-μP. At depth 8, the base's, both are the same network."""
    rng = np.random.default_rng(0)
    keys = ["sp", "depth_mup"]
    one, other = ([f.at(f.optimum).mean() for f in all_seeds(key)[1]] for key in keys)
    truth = np.subtract(one, other) * math.log(2)
    held = np.zeros(len(DEPTHS), int)
    for i in range(trials):
        swept = few_cells(keys, rng, count, slice(i % step, None, step))
        lowest = [[curves.least(cell) for cell in row] for row in swept]
        gaps = curves.gaps(list(zip(*lowest, strict=True)))
        held += [
            abs(gap.value - true) <= gap.wide
            for gap, true in zip(gaps, truth, strict=True)
        ]
    by_depth = dict(zip(DEPTHS, (held / trials).round(3).tolist(), strict=True))
    print("gaps of real seeds", count, step, by_depth)
    for depth, hits in zip(DEPTHS, held, strict=True):
        if depth != 8:
            assert least(hits, trials, LOOSE if depth == 32 else 0.95)


# Claimed are 95 %. At depth 32 of SP seeds differ by twice as much as at the other
# depths, whose variance is averaged with its own, and a few seeds find too low a least
# loss between many grid points (docs/tune.md says so).
LOOSE = 0.85


@pytest.mark.parametrize("step", [1, 2])
def test_gaps_of_real_losses_hold_what_sixteen_seeds_say(step):
    check_resampled_gaps(3, 300, step)


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_gaps_of_real_losses_hold_what_sixteen_seeds_say_long(count, step):
    check_resampled_gaps(count, 1000, step)


def check_resampled_noise(key, count, trials):
    """The allowance of the deepest network, against the deviation of all seeds.

    The error of a variance of n of 16 seeds is too small by √(1 - (n - 1)/15).
    """
    rng = np.random.default_rng(0)
    every = np.log2(losses(key)[1][DEPTHS[-1]])
    held = 0
    for _ in range(trials):
        seeds = rng.choice(SEEDS, count, False)
        fit = optima.fit(cells(key, seeds, slice(None))[-1])
        weights = np.zeros(every.shape[1])
        weights[fit.first :][: len(fit.grid)] = fit.weights([fit.optimum])[0]
        used = weights != 0
        true = (every[:, used] @ weights[used]).std(ddof=1)
        seen = fit.at(fit.optimum).std(ddof=1)
        bound = math.log2(1 + regret([fit], 0, fit.optimum).noise)
        shrunk = math.sqrt(1 - (count - 1) / (SEEDS - 1))
        held += math.log(bound / seen) + math.log(seen / true) / shrunk <= 0
    print("noise of real seeds", key, count, held / trials)
    # In a normal distribution the bound holds with 95 %. Seeds of SP at depth 32 are
    # not normal: its loss has outliers (docs/tune.md says so).
    assert least(held, trials, 0.95 if key == "depth_mup" else 0.85)


@pytest.mark.parametrize("count", [2, 3, 4, 6])
@pytest.mark.parametrize("key", ["depth_mup", "sp"])
def test_the_noise_of_real_seeds_is_bounded(key, count):
    check_resampled_noise(key, count, 300)


def test_sixteen_seeds_tell_depth_mup_from_sp():
    everything = np.arange(SEEDS), slice(None)
    deep, sp = (
        transfer(cells(k, *everything), "depth", 8) for k in ("depth_mup", "sp")
    )
    assert deep.verdict is Verdict.TRANSFERS
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
    fresh=None,
):
    """Cells of five depths and their true curves: log2 loss against log2 rate.

    `alike` is the correlation of a seed's noise between depths; `level` is the noise
    that all learning rates share. The grid's position is drawn. What depths do not
    share is drawn from `fresh`, by default `rng`.
    """
    fresh = rng if fresh is None else fresh
    grid = grid + rng.uniform(-0.5, 0.5)
    shared = rng.normal(size=(seeds, 1)), rng.normal(size=(seeds, len(grid)))
    own = math.sqrt(1 - alike)
    simulated, truth = [], []
    for i in range(5):
        best = at + shift * i

        def true(x, best=best):
            return curvature * (x - best) ** 2 + skew * (x - best) ** 3

        drawn = [
            size * (math.sqrt(alike) * one + own * fresh.normal(size=one.shape))
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
    # Curvature and noise of docs/data/digits_16_seeds.csv around the optimum.
    "digits": {"shift": 0.0, "curvature": 0.5, "noise": 0.5, "level": 0.3},
}


def check_simulated(case, seeds, alike, trials):
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


@pytest.mark.parametrize("case", CASES)
def test_intervals_hold_the_truth(case):
    check_simulated(case, seeds=3, alike=0.9, trials=100)


@pytest.mark.long
@pytest.mark.parametrize("alike", [0.0, 0.8, 0.98])
@pytest.mark.parametrize("seeds", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_intervals_hold_the_truth_long(case, seeds, alike):
    check_simulated(case, seeds, alike, trials=400)


def check_common(seeds, alike, trials):
    """A smooth noise, alike between sizes whose true curves are the same.

    A seed adds a slope to the log loss, which moves the optima of all sizes together.
    """
    held, grid = 0, np.arange(-5.0, 6.0)
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


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("seeds", [2, 3, 4, 6])
def test_a_value_chosen_with_the_same_seeds_is_not_favoured(seeds, alike):
    check_common(seeds, alike, 400)


def check_gaps(seeds, alike, trials):
    """Two parametrizations whose seeds correlate over sizes, and with each other."""
    held = 0
    for start in range(trials):
        rng = np.random.default_rng(start)
        level = rng.normal(0, 0.02, seeds)
        shared = rng.normal(size=seeds)
        pairs = []
        for _ in range(4):
            own = rng.normal(size=seeds)
            gap = 0.005 * (math.sqrt(alike) * shared + math.sqrt(1 - alike) * own)
            one = level + rng.normal(0, 0.003, seeds)
            pairs.append((curves.Least(one), curves.Least(one + 0.01 + gap)))
        last = curves.gaps(pairs)[-1]
        held += abs(last.value + 0.01) <= last.wide
    print("gaps", seeds, alike, held / trials)
    assert least(held, trials, 0.95)


@pytest.mark.parametrize(("seeds", "alike"), [(2, 0.0), (2, 0.5), (3, 0.5), (4, 0.9)])
def test_gaps_of_losses_hold_the_truth(seeds, alike):
    check_gaps(seeds, alike, 300)


def check_unequal(seeds, times, level, trials):
    """Of three sizes the last is noisier: its variance is averaged with the others'."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(trials):
        noise = [rng.normal(0, sd, seeds) for sd in (1.0, 1.0, times)]
        pairs = [(curves.Least(one), curves.Least(np.zeros(seeds))) for one in noise]
        last = curves.gaps(pairs)[-1]
        held += abs(last.value) <= last.wide
    print("gaps of unequal noise", seeds, times, held / trials)
    assert least(held, trials, level)


@pytest.mark.parametrize(
    ("seeds", "times", "level"),
    [(3, 1, 0.94), (3, 4, 0.82), (3, 10, 0.89), (6, 4, 0.9), (6, 10, 0.95)],
)
def test_gaps_of_noisier_sizes_hold_what_the_docs_say(seeds, times, level):
    check_unequal(seeds, times, level, 1000)


@pytest.mark.long
@pytest.mark.parametrize(
    ("seeds", "times", "level"),
    [(2, 4, 0.8), (2, 10, 0.77), (3, 2, 0.86), (4, 2, 0.87)],
)
def test_gaps_of_noisier_sizes_hold_what_the_docs_say_long(seeds, times, level):
    check_unequal(seeds, times, level, 5000)


def check_unequal_regret(seeds, times, trials):
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


@pytest.mark.parametrize(("seeds", "times"), [(3, 4), (4, 2)])
def test_regrets_of_noisier_sizes_hold_what_the_docs_say(seeds, times):
    check_unequal_regret(seeds, times, 300)


@pytest.mark.long
@pytest.mark.parametrize(("seeds", "times"), [(2, 4), (2, 10), (3, 10), (6, 4)])
def test_regrets_of_noisier_sizes_hold_what_the_docs_say_long(seeds, times):
    check_unequal_regret(seeds, times, 1500)


def check_noise(seeds, trials):
    """Normal seeds whose deviation at the optimum is known."""
    case = CASES["digits"]
    held = 0
    for start in range(trials):
        rng = np.random.default_rng(start)
        fit = optima.fit(made(rng, seeds, **case, alike=0.0)[0][0])
        weights = fit.weights([fit.optimum])[0]
        true = math.hypot(case["level"], case["noise"] * np.linalg.norm(weights))
        bound = regret([fit], 0, fit.optimum).noise
        held += math.log2(1 + bound) <= true
    print("noise", seeds, held / trials)
    assert least(held, trials, 0.95)


@pytest.mark.parametrize("seeds", [2, 3, 4, 6])
def test_the_noise_between_seeds_is_bounded(seeds):
    check_noise(seeds, 500)


def check_chosen(seeds, alike, rise, trials):
    """The spread over grid points, as that of Figure 14: the worst less the best."""
    held, level = 0, 0.02
    true = rise * np.arange(5)
    for start in range(trials):
        rng = np.random.default_rng(start)
        shared = rng.normal(size=(seeds, 5))
        swept = []
        for _ in range(3):
            own = rng.normal(size=(seeds, 5))
            noise = 0.005 * (math.sqrt(alike) * shared + math.sqrt(1 - alike) * own)
            loss = np.exp(true + noise + level * rng.normal(size=(seeds, 1)))
            swept.append(Cell("p", 64, 8, np.arange(5.0), loss, loss[..., None], 0.0))
        last = claims_tp6._spreads(swept)[-1]
        held += abs(last.value - np.ptp(true)) <= last.wide
    print("chosen gaps", seeds, alike, rise, held / trials)
    assert least(held, trials, 0.95)


@pytest.mark.parametrize("rise", [0.0, 0.01])
@pytest.mark.parametrize(
    ("seeds", "alike"), [(2, 0.0), (2, 0.9), (3, 0.9), (4, 0.9), (6, 0.9)]
)
def test_gaps_of_chosen_pairs_hold_the_truth(seeds, alike, rise):
    check_chosen(seeds, alike, rise, 500)


def check_moves_more(seeds, shifts, alike, trials):
    """Two parametrizations whose optima move by the same amount, with common seeds.

    Their optima may move in opposite directions. Neither surely moves more.
    """
    given = CASES["digits"] | {"alike": alike, "noise": 0.3}
    right = 0
    for start in range(trials):
        one, other = (
            made(np.random.default_rng(start), seeds, **given | {"shift": shift})[0]
            for shift in shifts
        )
        judged = transfer(one, "depth"), transfer(other, "depth")
        right += curves.moves_more(*judged) is None
    print("moves more", seeds, shifts, alike, right / trials)
    assert least(right, trials, 0.95)


@pytest.mark.parametrize("shifts", [(0.3, 0.3), (0.3, -0.3)])
def test_equal_shifts_are_not_told_apart(shifts):
    check_moves_more(3, shifts, 0.9, 100)


@pytest.mark.long
@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("shifts", [(0.0, 0.0), (0.3, 0.3), (0.3, -0.3)])
@pytest.mark.parametrize("seeds", [2, 3, 4, 6])
def test_equal_shifts_are_not_told_apart_long(seeds, shifts, alike):
    check_moves_more(seeds, shifts, alike, 400)


def check_slope(seeds, slope, trials):
    """A quadratic valley over learning rate and multiplier, with a drawn place."""
    names = "learning_rate", "branch_multiplier"
    x = np.arange(9.0)
    axes = {name: list(2.0 ** (x - 8)) for name in names}
    held = known = 0
    for start in range(trials):
        rng = np.random.default_rng(start)
        u, v = np.meshgrid(*(x - 4 + rng.uniform(-0.5, 0.5, (2, 1))), indexing="ij")
        along, across = u + slope * v, v - slope * u
        level = (0.3 * across**2 + 0.03 * along**2) / (1 + slope**2)
        shared, own = rng.normal(size=(seeds, 1, 1)), rng.normal(size=(seeds, 9, 9))
        loss = np.exp2(level + 0.1 * shared + 0.1 * own)
        runs = Population("n", "p", 64, 8, {}, axes, loss, loss[..., None], 0.0)
        found = valley.slope(runs, names)
        if found is None:
            continue
        known += 1
        error = valley.slope_error(runs, names)
        interval = curves.interval(found, error, seeds - 1)
        held += abs(found - slope) <= interval.wide
    print("slope of a valley", seeds, slope, held / known, "known", known / trials)
    assert known > 0.2 * trials
    assert least(held, known, 0.95)


@pytest.mark.parametrize("slope", [-1.0, -2.0])
@pytest.mark.parametrize("seeds", [2, 3, 4, 6])
def test_slopes_of_valleys_hold_the_truth(seeds, slope):
    check_slope(seeds, slope, 200)


@pytest.mark.long
@pytest.mark.parametrize("slope", [-1.0, -2.0, -2.5])
@pytest.mark.parametrize("seeds", [2, 3, 4, 6])
def test_slopes_of_valleys_hold_the_truth_long(seeds, slope):
    check_slope(seeds, slope, 2000)


DECAYS = np.array([0.0, 0.05, 0.1, 0.2, 0.4])  # the rise over weight decay at the base
# Curves of another depth that lie a quarter of the base's range away, which is what
# the claim allows: at the largest decay, or at every decay but the best.
QUARTER = {"one": 1.25 * DECAYS, "every": DECAYS + 0.1 * (DECAYS > 0)}


def check_difference(seeds, case, noise, trials):
    near = far = 0
    for start in range(trials):
        rng = np.random.default_rng(start)
        level = 0.05 * rng.normal(size=(seeds, 1))
        log_loss = [
            curve + level + noise * rng.normal(size=(seeds, len(DECAYS)))
            for curve in (DECAYS, QUARTER[case])
        ]
        answer = claims_bordelon._difference(np.stack(log_loss))[1]
        near += answer is True
        far += answer is False
    print("difference", seeds, case, noise, 1 - near / trials, 1 - far / trials)
    assert least(trials - near, trials, 0.95)
    assert least(trials - far, trials, 0.95)


@pytest.mark.parametrize("noise", [0.01, 0.05])
@pytest.mark.parametrize("case", QUARTER)
@pytest.mark.parametrize("seeds", [2, 3, 4, 6])
def test_curves_a_quarter_apart_are_not_called_near_or_far(seeds, case, noise):
    check_difference(seeds, case, noise, 500)


def check_predicted(seeds, alike, trials):
    """A line over depth and one over width that share the base and the seeds."""
    held = 0
    sizes = {"depth": (4, 8, 16, 32), "width": (32, 64, 128, 256)}
    for start in range(trials):
        rng = np.random.default_rng(start)
        given = CASES["digits"] | {"shift": -0.3, "alike": alike, "noise": 0.3}
        line = made(rng, seeds, **given)[0]  # optima at -7, -7.3, ...
        # The seeds of both lines are as alike as those of two depths.
        again = np.random.default_rng(start)
        wide = made(again, seeds, **given, fresh=rng)[0]
        wide[1] = line[1]
        trends = {
            "depth": statistics.trend(line[:4], sizes["depth"]),
            "width": statistics.trend(wide[:4], sizes["width"]),
        }
        found = statistics.predicted(trends, Sizes(64, 8), Sizes(512, 64))
        low, high = found["interval"]
        held += low <= -7.3 - 0.3 * 6 <= high
    print("predicted", seeds, alike, held / trials)
    assert least(held, trials, 0.95)


@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_predicted_optima_hold_the_truth(alike):
    check_predicted(3, alike, 100)


@pytest.mark.long
@pytest.mark.parametrize("alike", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("seeds", [2, 3, 4, 6])
def test_predicted_optima_hold_the_truth_long(seeds, alike):
    check_predicted(seeds, alike, 400)


# --- Exponents: each of these is as far from the expected one as the tolerance allows.


def rarely(trials, answers):
    """Whether at most 5 % of the answers are True, up to chance."""
    wrong = sum(answer is True for answer in answers)
    print("surely near", 1 - wrong / trials)
    return least(trials - wrong, trials, 0.95)


@pytest.mark.parametrize("exponent", [0.7, 1.3])
def test_an_exponent_over_shapes_is_rarely_taken_for_the_expected_one(exponent):
    shapes = [(n, d) for n in (32, 64, 128) for d in (4, 8, 16) if 2 * d <= n]
    width, depth = np.array(shapes, float).T
    trials, answers = 2000, []
    for start in range(trials):
        rng = np.random.default_rng(start)
        error = 0.1 * rng.uniform(0.5, 1.5, len(shapes))
        value = depth**exponent / width * (1 + error * rng.normal(size=len(shapes)))
        found = yaida._exponents(width, depth, value, value * error)[0]
        answers.append(curves.surely_near(*found, 1, yaida._TOLERANCE))
    assert rarely(trials, answers)


@pytest.mark.parametrize("noise", [0.05, 0.2])
@pytest.mark.parametrize("exponent", [-0.7, -1.3])
def test_an_exponent_of_gaps_is_rarely_taken_for_the_expected_one(exponent, noise):
    depths = (2, 4, 8, 16)
    steps = np.array(depths[:-1]) ** float(exponent)
    trials, answers = 200, []
    for start in range(trials):
        rng = np.random.default_rng(start)
        error = np.full(4, noise * steps[-1])
        loss = np.append(0.0, steps.cumsum()) + error * rng.normal(size=4)
        pairs = zip(loss[:, None], error[:, None], strict=True)
        runs = [types.SimpleNamespace(losses=pair) for pair in pairs]
        found = solved_bordelon._gap_law(runs, depths)
        answers.append(curves.surely_near(*found, -1, solved_bordelon._BIAS))
    assert rarely(trials, answers)


@pytest.mark.parametrize("exponent", [-0.7, -1.3])
def test_an_exponent_of_biases_is_rarely_taken_for_the_expected_one(exponent):
    depths = (4, 8, 16, 32)
    steps = (np.array(depths[:-1]) ** float(exponent))[:, None, None]
    trials, answers = 100, []
    for start in range(trials):
        rng = np.random.default_rng(start)
        noise = np.sqrt(steps) * rng.normal(size=(3, 256, 6))
        outputs = np.concatenate([np.zeros((1, 256, 6)), (steps + noise).cumsum(0)])
        errors = finite_size.Errors((64,), depths, outputs[None])
        found = solved_bordelon._bias_law(errors)
        answers.append(curves.surely_near(*found, -1, solved_bordelon._BIAS))
    assert rarely(trials, answers)

"""Verdicts on claims are wrong as rarely as they say, also on real seeds."""

import math

import numpy as np
import pytest
import scipy.stats

from mupax.experiments.sweep.results import Cell, Population
from mupax.experiments.sweep.verdict import transfer
from papers import (
    claims_bordelon,
    claims_tp6,
    curves,
    finite_size,
    solved_bordelon,
    valley,
    yaida,
)
from tests.test_coverage import CASES, DEPTHS, all_seeds, few_cells, least, made


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
        last = np.stack([loss, error], axis=1)
        found = solved_bordelon._gap_law(last, depths)
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


@pytest.mark.parametrize(
    ("looks", "wrong"), [((3,), 0.05), ((2, 3), 0.083), ((2, 3, 6), 0.115)]
)
def test_more_seeds_where_undecided_err_as_often_as_the_page_says(looks, wrong):
    """The truth is at the limit; each look is a t-test at 5 % a side."""
    seeds = np.random.default_rng(0).normal(size=(50_000, looks[-1]))
    open_, missed = np.ones(len(seeds), bool), 0
    for count in looks:
        seen = seeds[:, :count]
        error = seen.std(axis=1, ddof=1) / math.sqrt(count)
        wide = scipy.stats.t.ppf(0.95, count - 1) * error
        missed += np.count_nonzero(open_ & (seen.mean(axis=1) > wide))
        open_ &= np.abs(seen.mean(axis=1)) <= wide
    assert missed / len(seeds) == pytest.approx(wrong, abs=0.004)

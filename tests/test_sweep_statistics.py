"""Verdicts, on curves whose optimum is known to stay or to move; grids."""

import dataclasses

import numpy as np
import pytest

from mupax.experiments.errors import UserError
from mupax.experiments.sweep import grids, statistics, verdict
from mupax.experiments.sweep.results import Cell, Population
from mupax.experiments.sweep.verdict import Verdict

RATES = [2.0**x for x in range(-13, -1)]


def populations(slope: float, seeds: int, noise: float, start: int = 0):
    """Valleys whose optimum moves by `slope` octaves a doubling, of noisy place."""
    rng = np.random.default_rng(start)
    found = []
    for width, depth in ((64, 8), (64, 16), (64, 32), (64, 64), (32, 8), (128, 8)):
        at = -7 + slope * np.log2(depth / 8) + noise * rng.normal(size=(seeds, 1))
        loss = 0.01 * 2.0 ** (0.5 * (np.log2(RATES) - at) ** 2)
        axes = {"learning_rate": RATES}
        curves = np.zeros((*loss.shape, 1))
        name = f"w{width}-d{depth}"
        found.append(Population(name, "p", width, depth, {}, axes, loss, curves, 0.0))
    return found


def told(slope: float, seeds: int, noise: float, start: int = 0):
    found = populations(slope, seeds, noise, start)
    base, target = statistics.Sizes(64, 8), statistics.Sizes(512, 512)
    return verdict.verdicts(found, base, target)["learning_rate"]["p"]


def test_an_optimum_that_stays_transfers():
    assert told(0.0, 4, 0.1)["depth"]["verdict"] is Verdict.TRANSFERS


def test_an_optimum_that_moves_is_told_by_how_much():
    found = told(-1.0, 4, 0.1)["depth"]
    assert found["verdict"] is Verdict.SHIFTS
    assert found["words"].startswith("shifts by -1.0")


def test_one_seed_cannot_tell():
    assert told(0.0, 1, 0.0)["depth"]["verdict"] is Verdict.SEEDS


@pytest.mark.long
def test_noise_is_seldom_taken_for_a_shift():
    found = [told(0.0, 2, 0.7, start=i)["depth"]["verdict"] for i in range(20)]
    # One in twenty is expected; five have a probability below 1 %.
    assert sum(one is Verdict.SHIFTS for one in found) < 5
    assert sum(one is Verdict.SEEDS for one in found) > 10


def test_an_optimum_at_the_edge_cannot_tell():
    moved = populations(0.0, 3, 0.1)
    for p in moved:
        p.axes["learning_rate"] = [x * 64 for x in RATES]
        p.loss[:] = np.arange(12.0) + 1
    base = statistics.Sizes(64, 8)
    found = verdict.verdicts(moved, base)["learning_rate"]["p"]["depth"]
    assert found["verdict"] is Verdict.EDGE


def test_a_size_at_which_nothing_trained_does_not_transfer():
    found = populations(0.0, 3, 0.1)
    found[3].loss[:] = np.nan
    base = statistics.Sizes(64, 8)
    found = verdict.verdicts(found, base)["learning_rate"]["p"]["depth"]
    assert found["verdict"] is Verdict.FAILS
    assert found["words"] == "does not transfer: nothing trained at depth 64"


@pytest.mark.long
def test_intervals_hold_the_truth_as_often_as_they_say():
    held = 0
    for start in range(1000, 1120):
        cells = [p.cell() for p in populations(-0.4, 4, 0.3, start)[:4]]
        low, high = statistics.trend(cells, "depth").interval
        held += low <= -0.4 <= high
    # 95 % of 120 is 114, with a standard deviation of 2.4.
    assert held > 106


def test_the_prediction_follows_the_line_to_the_target():
    found = told(-0.5, 4, 0.05)["predicted"]
    low, high = found["interval"]
    assert low < -7 - 0.5 * 6 < high
    assert found["optimum"] == pytest.approx(-10, abs=0.5)


def moving(places):
    """A cell whose curves' optimum is at `places`, one a span."""
    places = np.asarray(places, float)
    x = np.log2(RATES)
    curves = 0.01 * 2.0 ** (0.5 * (x[:, None] - places) ** 2)
    curves = np.stack([curves] * 2)
    return Cell("p", 64, 8, x, curves[..., -1], curves, 0.0)


def test_the_optimum_is_fixed_from_where_it_no_more_leaves():
    arrived = [-9.0] * 5 + [-7.0] * 15
    assert statistics.fixed_after(moving(arrived)) == 6 / 20
    # What comes back counts from its return.
    assert statistics.fixed_after(moving([-7.0] * 10 + [-9.0] + [-7.0] * 9)) == 12 / 20
    assert statistics.fixed_after(moving([-7.0] * 20)) == 1 / 20


def test_within_half_an_octave_an_optimum_has_not_moved():
    assert statistics.fixed_after(moving([-7.4] * 10 + [-7.0] * 10)) == 1 / 20
    assert statistics.fixed_after(moving([-7.6] * 10 + [-7.0] * 10)) == 11 / 20


def test_an_optimum_that_moves_to_the_end_is_never_fixed():
    late = dataclasses.replace(moving([-7.0] * 20), loss=moving([-9.0]).loss)
    assert statistics.fixed_after(late) is None


def test_where_nothing_trained_nothing_was_fixed():
    nothing = dataclasses.replace(moving([-7.0] * 4), loss=np.full((2, 12), np.nan))
    assert statistics.fixed_after(nothing) is None


def test_verdicts_say_when_each_optimum_was_fixed():
    found = populations(0.0, 2, 0.0)
    for i, p in enumerate(found):
        curve = [p.loss[..., ::-1]] * i + [p.loss] * (10 - i)
        found[i] = dataclasses.replace(p, curves=np.stack(curve, axis=-1))
    verdicts = verdict.verdicts(found, statistics.Sizes(64, 8))
    by_axis = verdicts["learning_rate"]["p"]
    assert by_axis["depth"]["fixed_after"] == [0.1, 0.2, 0.3, 0.4]
    assert by_axis["width"]["fixed_after"] == [0.5, 0.1, 0.6]


def test_a_product_is_seen_along_one_axis_at_the_best_of_the_other():
    axes = {"learning_rate": [0.25, 0.5], "branch_multiplier": [1.0, 2.0]}
    loss = np.array([[[4.0, 3.0], [1.0, np.nan]]])
    curves = loss[..., None]
    found = Population("n", "p", 8, 2, {}, axes, loss, curves, 0.0)
    assert found.cell("learning_rate").loss.tolist() == [[3.0, 1.0]]
    assert found.cell("branch_multiplier").loss.tolist() == [[1.0, 3.0]]
    assert found.best() == {"learning_rate": 0.5, "branch_multiplier": 1.0}
    assert [row["loss"] for row in found.rows()] == [4.0, 3.0, 1.0, None]


@pytest.mark.parametrize(
    "text", ["2**[-3:-12:1]", "2**[1:2:0]", "2^[-3:2]", "[1:x]", "", "-2**[1:3]"]
)
def test_a_range_that_is_none_is_refused_in_one_sentence(text):
    with pytest.raises(UserError, match=r"the grid of eps is .*; write numbers"):
        grids.parse("eps", text)


def test_both_ends_are_in_a_range():
    assert grids.parse("eps", "2**[-12:-3:1]") == tuple(2.0**x for x in range(-12, -2))
    assert grids.parse("warmup", "[0:0.3:0.1]") == (0.0, 0.1, 0.2, 0.3)

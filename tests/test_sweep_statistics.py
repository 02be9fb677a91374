"""Verdicts, on curves whose optimum is known to stay or to move; grids."""

import dataclasses

import numpy as np
import pytest

from mupax.experiments.errors import UserError
from mupax.experiments.sweep import grids, statistics, transfers, verdict
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


BASE = statistics.Sizes(64, 8)


def told(found, axis="depth"):
    (one,) = [t for t in transfers.transfers(found, BASE) if t.axis == axis]
    return one


def test_an_optimum_that_stays_transfers():
    """Ten seeds: their optima differ by 0.1 octaves, which costs 0.3 %."""
    found = told(populations(0.0, 10, 0.1))
    assert found.verdict is Verdict.TRANSFERS
    assert found.words.startswith("transfers: costs at most ")
    assert found.trend.within(-0.25, 0.25) is True


def test_an_optimum_that_moves_does_not_transfer_and_is_told_by_how_much():
    found = told(populations(-1.0, 4, 0.1))
    assert found.verdict is Verdict.COSTS
    assert found.words.startswith("does not transfer: costs ")
    assert found.trend.slope == pytest.approx(-1.0, abs=0.1)
    assert found.change_words.startswith("falls ")
    assert found.trend.within(-0.25, 0.25) is False


def flat(populations):
    """The same with a loss that no learning rate changes."""
    rng = np.random.default_rng(1)
    noise = 1e-3
    return [
        dataclasses.replace(p, loss=np.exp(rng.normal(0, noise, p.loss.shape)))
        for p in populations
    ]


def test_a_flat_valley_transfers_though_it_has_no_optimum():
    found = flat(populations(0.0, 4, 0.0))
    for p in found:  # no optimum at an end of the grid
        p.loss[..., [0, 1, -2, -1]] *= 1.5
    one = told(found)
    assert one.trend.within(-0.25, 0.25) is not True
    assert one.verdict is Verdict.TRANSFERS


def test_one_seed_cannot_tell():
    assert told(populations(0.0, 1, 0.0)).verdict is Verdict.SEEDS


def test_the_value_of_the_base_is_used_and_not_of_the_smallest():
    """At width 32 the optimum is elsewhere; the base's is right at width 128."""
    found = populations(0.0, 10, 0.02)
    found[4].loss[:] = np.roll(found[4].loss, 3, axis=1)
    one = told(found, "width")
    assert one.sizes[one.base] == 64
    assert one.verdict is Verdict.TRANSFERS


def test_a_base_that_is_tuned_badly_is_no_failure_to_transfer():
    """All sizes are the same; the noise moves the base's optimum far off."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        found = populations(0.0, 2, 0.0)
        for p in found:
            p.loss[:] *= np.exp(rng.normal(0, 1.0, p.loss.shape))
        assert told(found).verdict is not Verdict.COSTS


def test_an_optimum_at_the_edge_cannot_tell():
    moved = populations(0.0, 3, 0.1)
    for p in moved:
        p.axes["learning_rate"] = [x * 64 for x in RATES]
        p.loss[:] = np.arange(12.0) + 1
    assert told(moved).verdict is Verdict.EDGE


def test_a_size_at_which_nothing_trained_does_not_transfer():
    found = populations(0.0, 3, 0.1)
    found[3].loss[:] = np.nan
    one = told(found)
    assert one.verdict is Verdict.FAILS
    assert one.words == "does not transfer: nothing trained at depth 64"


def test_a_large_model_that_diverges_at_the_bases_optimum_does_not_transfer():
    found = populations(-2.0, 3, 0.1)
    found[3].loss[:, 4:] = np.nan
    one = told(found)
    assert one.verdict is Verdict.DIVERGES
    assert one.words == "does not transfer: diverges at depth 64"


def dead(found, seeds, at, guess=2.3):
    """The same runs, of which some seeds at depth 64 learn nothing at some values."""
    found = [dataclasses.replace(p, guess=guess) for p in found]
    found[3].loss[:seeds, at] = 2.3
    return told(found)


def test_a_seed_that_learns_nothing_at_the_bases_optimum_does_not_transfer():
    found = populations(0.0, 8, 0.03)
    assert told(found).verdict is Verdict.TRANSFERS
    best = round(told(found).optima[0] - found[0].coordinates("learning_rate")[0])
    one = dead(populations(0.0, 8, 0.03), 1, slice(best, None))
    assert one.verdict is Verdict.DIES
    assert one.words == "does not transfer: 1 of 8 seeds learns nothing at depth 64"
    assert one.to_json()["verdict"] == "learns nothing"
    two = dead(populations(0.0, 8, 0.03), 2, slice(best, None))
    assert two.words == "does not transfer: 2 of 8 seeds learn nothing at depth 64"


@pytest.mark.parametrize("case", ["elsewhere", "everywhere", "base", "unknown"])
def test_not_every_dead_seed_speaks_against_transfer(case):
    found = populations(0.0, 8, 0.03)
    best = round(told(found).optima[0] - found[0].coordinates("learning_rate")[0])
    from_best = slice(best, None)
    if case == "elsewhere":  # at larger learning rates
        one = dead(found, 1, slice(best + 2, None))
    elif case == "everywhere":  # a seed that learns at no learning rate
        one = dead(found, 1, slice(None))
    elif case == "base":  # as many seeds of the base
        found[0].loss[0] = [1.0, *[2.3] * (len(RATES) - 1)]
        one = dead(found, 1, from_best)
        assert one.optima[one.base] == pytest.approx(-7, abs=0.1)
    else:
        one = dead(found, 1, from_best, guess=None)
    assert one.dead == 0
    assert one.verdict is not Verdict.DIES


def test_seeds_that_differ_do_not_excuse_a_cost():
    """Two pairs of seeds differ by 74 % at every value; the base's value costs 7 %."""
    rates = np.arange(-8.0, -2.0)
    seeds = np.array([[0.4], [0.4], [-0.4], [-0.4]])
    loss = np.exp2(0.1 * (rates + 5.5) ** 2 + seeds)
    own = [Cell("p", w, 1, rates, loss, np.empty((4, 6, 0)), 0.0) for w in (1, 2, 4)]
    far = dataclasses.replace(own[0], loss=np.roll(loss, 1, axis=1))
    one = verdict.transfer([far, *own[1:]], "width")
    assert one.verdict is Verdict.COSTS
    assert one.regret.share == pytest.approx(2**0.1 - 1, abs=1e-3)


def test_a_verdict_that_is_not_known_is_never_said_to_be():
    known = {v for v in Verdict if v.known is not None}
    names = ("TRANSFERS", "COSTS", "DIVERGES", "DIES", "FAILS")
    assert known == {Verdict[name] for name in names}


def test_the_verdict_goes_into_the_json():
    found = populations(-1.0, 4, 0.1)
    one = told(found)
    table = transfers.verdicts(transfers.transfers(found, BASE))
    row = table["learning_rate"]["p"]["depth"]
    assert row["verdict"] == one.verdict
    assert row["regret"]["of"] == 8
    assert row["regret"]["at"] == 64
    assert row["regret"]["interval"][1] == pytest.approx(one.regret.high, abs=1e-4)


def test_a_product_is_seen_along_one_axis_at_the_best_of_the_other():
    axes = {"learning_rate": [0.25, 0.5], "branch_multiplier": [1.0, 2.0]}
    loss = np.array([[[4.0, 3.0], [1.0, np.nan]]])
    curves = loss[..., None]
    found = Population("n", "p", 8, 2, {}, axes, loss, curves, 0.0)
    assert found.cell("learning_rate").loss.tolist() == [[3.0, 1.0]]
    assert found.cell("branch_multiplier").loss.tolist() == [[1.0, 3.0]]
    assert found.best() == {"learning_rate": 0.5, "branch_multiplier": 1.0}
    assert [row["loss"] for row in found.rows()] == [4.0, 3.0, 1.0, None]


def test_a_valley_that_moves_is_seen_although_the_other_could_follow():
    """The best product of both is four times smaller at the larger size."""

    def population(width, best):
        rates, factors = np.arange(-6.0, 1.0), np.arange(-3.0, 4.0)
        product = rates[:, None] + factors
        own = np.exp2(0.05 * (product - best) ** 2 + 0.01 * factors**2)
        loss = own * np.array([1.0, 1.002, 0.998])[:, None, None]
        axes = {"learning_rate": list(2**rates), "gain": list(2**factors)}
        return Population("n", "p", width, 1, {}, axes, loss, loss[..., None], 0.0)

    line = [population(8, -3), population(32, -5)]
    judged = transfers.transfers(line, statistics.Sizes(8, 1))
    for name in ("learning_rate", "gain"):
        (one,) = [t for t in judged if (t.name, t.axis) == (name, "width")]
        assert one.verdict is Verdict.COSTS
    profiles = verdict.transfer([p.cell("learning_rate") for p in line], "width")
    assert profiles.regret.share < one.regret.share / 2


def test_the_best_point_where_every_point_lost_a_seed():
    nan = np.nan
    loss = np.array([[nan, 2.0, nan], [3.0, nan, nan], [3.0, 2.0, 1.0]])
    axes = {"learning_rate": [0.25, 0.5, 1.0]}
    found = Population("n", "p", 8, 2, {}, axes, loss, loss[..., None], 0.0)
    assert found.best() == {"learning_rate": 0.5}


@pytest.mark.parametrize(
    "text", ["2**[-3:-12:1]", "2**[1:2:0]", "2^[-3:2]", "[1:x]", "", "-2**[1:3]"]
)
def test_a_range_that_is_none_is_refused_in_one_sentence(text):
    with pytest.raises(UserError, match=r"the grid of eps is .*; write numbers"):
        grids.parse("eps", text)


def test_both_ends_are_in_a_range():
    assert grids.parse("eps", "2**[-12:-3:1]") == tuple(2.0**x for x in range(-12, -2))
    assert grids.parse("warmup", "[0:0.3:0.1]") == (0.0, 0.1, 0.2, 0.3)


def test_a_shift_that_the_grid_cuts_off_is_said_to_be_at_least_so_large():
    """The optimum falls by an octave for each doubling, and the grid ends at -8."""
    grid, seeds = np.arange(-8.0, -1.0), np.array([[0.0], [0.01]])

    def judged(bests):
        cells = []
        for depth, best in bests.items():
            loss = np.exp2(0.05 * (grid - best) ** 2 + seeds)
            cells.append(Cell("p", 64, depth, grid, loss, loss[..., None], 0.0))
        return verdict.transfer(cells, "depth")

    inside = judged({8: -4, 16: -5, 32: -6})
    assert inside.moved == "falls 4x"
    cut = judged({8: -6, 16: -7, 32: -9})
    assert cut.at_edge == (32,)
    assert cut.change_words.endswith("x or more over depth 8 to 32")
    assert not judged({8: -9, 16: -7, 32: -9}).moved.endswith("or more")

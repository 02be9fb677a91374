"""Fits and regret, on curves whose optimum is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_populations import population

from mupax.experiments.sweep import optima, statistics
from mupax.experiments.sweep.regret import regret
from mupax.experiments.sweep.results import Cell
from mupax.experiments.sweep.verdict import Verdict, transfer

GRID = np.arange(-13.0, -1.0)


def cell(loss: np.ndarray, width: int = 64, depth: int = 8) -> Cell:
    loss = np.atleast_2d(loss)
    curves = np.zeros((*loss.shape, 1))
    return Cell("depth_mup", width, depth, GRID, loss, curves, 0.0)


def valley(at: float, curvature: float = 0.5, least: float = 0.01) -> np.ndarray:
    """Losses whose log2 is a parabola in log2 of the learning rate."""
    return least * 2.0 ** (curvature * (GRID - at) ** 2)


def fits(*losses: np.ndarray) -> list[optima.Fit]:
    fitted = [optima.fit(cell(loss)) for loss in losses]
    return [fit for fit in fitted if fit is not None]


@given(
    at=st.floats(-11.5, -3.5), curvature=st.floats(0.05, 1), least=st.floats(1e-4, 1)
)
def test_a_parabola_gives_its_vertex_back(at, curvature, least):
    optimum = optima.optimum(cell(valley(at, curvature, least)))
    assert optimum.log2_lr == pytest.approx(at, abs=1e-6)
    assert optimum.loss == pytest.approx(least, rel=1e-6)


def test_the_error_is_the_standard_error_over_seeds():
    optimum = optima.optimum(cell(np.stack([valley(-7.5), valley(-6.5)])))
    assert optimum.log2_lr == pytest.approx(-7.0)
    # Two seeds, one octave apart: deviation 1/√2, over √2.
    assert optimum.error == pytest.approx(0.5)


def test_a_grid_point_at_which_one_seed_diverged_is_no_optimum():
    loss = np.stack([valley(-7), valley(-7)])
    loss[1, 6] = np.nan  # 2^-7 itself
    optimum = optima.optimum(cell(loss))
    assert abs(optimum.log2_lr - -7) == 1


def test_a_cell_whose_every_run_diverged_has_no_optimum():
    nothing = cell(np.full((2, 12), np.nan))
    assert optima.optimum(nothing) is None
    assert optima.fit(nothing) is None


def test_an_optimum_at_the_edge_of_the_grid_stays_on_the_grid():
    assert optima.optimum(cell(valley(-20))).log2_lr == GRID[0]
    (fit,) = fits(valley(-20))
    assert fit.at_edge
    assert fit.optimum == GRID[0]


@given(at=st.floats(-11.5, -3.5), value=st.floats(-12.4, -2.6))
def test_between_grid_points_the_fit_of_a_parabola_is_exact(at, value):
    (fit,) = fits(valley(at, least=1.0))
    assert fit.at(value)[0] == pytest.approx(0.5 * (value - at) ** 2, abs=1e-6)


@given(at=st.floats(-9, -5), other=st.floats(-11, -3))
def test_regret_is_read_off_the_fit_of_the_optimum(at, other):
    """No bias between grid points, and none from subtracting a grid minimum."""
    cost = regret(fits(valley(at)), 0, other)
    assert cost.share == pytest.approx(2 ** (0.5 * (other - at) ** 2) - 1, abs=1e-6)
    assert cost.least == pytest.approx(0.01, rel=1e-6)


def test_regret_is_unknown_where_the_large_model_diverges():
    loss = valley(-9)
    loss[GRID >= -7] = np.nan
    large = fits(loss)
    assert regret(large, 0, -6.5) is None
    assert regret(large, 0, -7.4) is None  # closer to a run that diverged
    assert regret(large, 0, -8.0) is not None


def test_one_seed_has_no_upper_bound():
    cost = regret(fits(valley(-7), valley(-7)), 1, -7.0)
    assert (cost.low, cost.high) == (0.0, np.inf)


def test_a_level_that_all_learning_rates_share_is_no_noise():
    """Common random numbers: seeds differ by 20 %, and the regret is exact."""
    seeds = np.array([[0.8], [1.0], [1.2]])
    told = regret(fits(*[seeds * valley(-7.0, 0.05)] * 3), 2, -8.0)
    # What is left is the error of the grid.
    slip = 2 ** (1.645 * told.sample.slip)
    assert told.high < (1 + told.share) * slip - 1 + 1e-4


def test_pooling_over_sizes_narrows_the_bounds():
    rng = np.random.default_rng(0)
    wide = []
    for _ in range(20):
        noise = np.exp(rng.normal(0, 0.03, (5, 2, 12)))
        noisy = fits(*(valley(-7, 0.03) * e for e in noise))
        alone, together = regret(noisy[-1:], 0, -7.2), regret(noisy, 4, -7.2)
        assert together.share == alone.share
        wide.append((alone.high - alone.share, together.high - together.share))
    alone, together = np.median(wide, axis=0)
    assert together < 0.5 * alone


def test_along_picks_one_axis_from_small_to_large():
    runs = [population("sp", *s) for s in [(64, 32), (128, 8), (64, 8), (64, 4)]]
    runs.append(population("mup", 64, 16))
    chosen = statistics.along(runs, "sp", "depth", statistics.Sizes(64, 8))
    assert [p.depth for p in chosen] == [4, 8, 32]


def test_the_least_loss_is_that_of_the_parabola_of_the_optimum():
    """Also where the loss bends more at the optimum than beside it."""
    grid = np.arange(-10.0, -4.0)
    rise = np.where(grid < -7, 0.05, 0.12) * (grid + 7.2) ** 2
    fitted = optima.Fit(grid, rise[None], 0, 6)
    middle = np.polyfit(grid[2:5], rise[2:5], 2)
    assert fitted.at(fitted.optimum)[0] == pytest.approx(
        np.polyval(middle, fitted.optimum), abs=1e-12
    )
    assert fitted.at(fitted.optimum)[0] <= rise.min()


def test_a_jump_beside_the_optimum_makes_no_dip():
    grid = np.arange(-10.0, -4.0)
    rise = np.array([0.4, 0.2, 0.1, 0.05, 3.0, 4.0])
    fitted = optima.Fit(grid, rise[None], 0, 6)
    assert fitted.at(fitted.optimum)[0] > 0.0
    # The parabola of the optimum falls to -0.3.
    assert (fitted.weights([fitted.optimum], other=True) @ rise)[0] < -0.2


def test_a_base_at_the_edge_of_the_grid_asks_for_a_wider_one():
    """Its best value lies outside, and may cost the large model less."""
    seeds = np.array([[0.99], [1.0], [1.01]])
    base, large = (
        cell(seeds * valley(at, 0.1), depth=d) for at, d in ((-20, 8), (-8, 16))
    )
    assert transfer([base, large], "depth").verdict is Verdict.EDGE
    inside = cell(seeds * valley(-11, 0.1))
    assert transfer([inside, large], "depth").verdict is Verdict.COSTS

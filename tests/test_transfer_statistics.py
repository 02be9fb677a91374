"""Fits, shifts and regret, on curves whose optimum is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupax.experiments.sweep import optima
from mupax.experiments.sweep.results import Cell, Optimum

GRID = np.arange(-13.0, -1.0)


def cell(loss: np.ndarray, width: int = 64, depth: int = 8) -> Cell:
    loss = np.atleast_2d(loss)
    curves = np.zeros((*loss.shape, 1))
    return Cell("depth_mup", width, depth, GRID, loss, curves, 0.0)


def valley(at: float, curvature: float = 0.5, least: float = 0.01) -> np.ndarray:
    """Losses whose log2 is a parabola in log2 of the learning rate."""
    return least * 2.0 ** (curvature * (GRID - at) ** 2)


@given(
    at=st.floats(-11.5, -3.5), curvature=st.floats(0.05, 1), least=st.floats(1e-4, 1)
)
def test_a_parabola_gives_its_vertex_back(at, curvature, least):
    found = optima.optimum(cell(valley(at, curvature, least)))
    assert found.log2_lr == pytest.approx(at, abs=1e-6)
    assert found.loss == pytest.approx(least, rel=1e-6)


def test_the_error_is_the_standard_error_over_seeds():
    found = optima.optimum(cell(np.stack([valley(-7.5), valley(-6.5)])))
    assert found.log2_lr == pytest.approx(-7.0)
    # Two seeds, one octave apart: deviation 1/√2, over √2.
    assert found.error == pytest.approx(0.5)


def test_where_one_seed_diverged_is_no_optimum():
    loss = np.stack([valley(-7), valley(-7)])
    loss[1, 6] = np.nan  # 2^-7 itself
    found = optima.optimum(cell(loss))
    assert abs(found.log2_lr - -7) == 1


def test_a_cell_whose_every_run_diverged_has_no_optimum():
    nothing = cell(np.full((2, 12), np.nan))
    assert optima.optimum(nothing) is None
    assert optima.regret(nothing, -7.0) is None


def test_an_optimum_at_the_edge_of_the_grid_stays_on_the_grid():
    assert optima.optimum(cell(valley(-20))).log2_lr == GRID[0]


def test_shift_is_the_distance_between_the_outermost_optima():
    best = [Optimum(x, 0.0, 0.01) for x in (-7.0, -7.5, -6.8)]
    assert optima.shift(best) == pytest.approx(0.7)


def test_shift_is_unknown_where_some_size_did_not_train():
    assert optima.shift([Optimum(-7.0, 0.0, 0.01), None]) is None


@given(at=st.sampled_from(list(GRID[2:-2])), other=st.floats(-11, -3))
def test_regret_is_zero_at_the_own_best_and_positive_elsewhere(at, other):
    large = cell(valley(at))
    assert optima.regret(large, at) == pytest.approx(0.0, abs=1e-12)
    assert optima.regret(large, other) >= 0


def test_regret_follows_the_valley():
    # log2 of the loss rises by ½·2² = 2 two octaves away: four times the loss.
    assert optima.regret(cell(valley(-7)), -9.0) == pytest.approx(0.03, rel=1e-6)


def test_regret_is_unknown_where_the_large_model_diverges():
    loss = valley(-9)
    loss[GRID >= -7] = np.nan
    large = cell(loss)
    assert optima.regret(large, -6.5) is None
    assert optima.regret(large, -8.0) is not None


def test_along_picks_one_axis_from_small_to_large():
    cells = [cell(valley(-7), w, d) for w, d in [(64, 32), (128, 8), (64, 8), (64, 4)]]
    found = optima.along(cells, "depth_mup", "depth", 64)
    assert found.sizes == [4, 8, 32]
    assert found.shift == pytest.approx(0.0)
    assert found.regret == pytest.approx(0.0)

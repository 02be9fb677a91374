"""The (α, γ) plane of Tensor Programs VI, section 7, as measured."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from mupax.experiments.errors import UserError
from mupax.experiments.theory.plane import predicted
from papers import plane

POINTS = [
    (0.5, 0.5),  # Depth-μP
    (0.75, 0.25),
    (1.0, 0.0),  # ODE
    (0.5, 0.0),  # unstable in training
    (1.0, 0.5),  # trivial
    (1.25, -0.25),  # not faithful
    (0.25, 0.75),  # unstable at initialization
]


def agrees(point):
    claims = predicted(point.alpha, point.gamma)
    return {k: v for k, v in claims.items() if point.verdicts[k] != v}


@pytest.fixture(scope="module")
def sgd():
    settings = {"depths": (16, 64), "width": 48, "seeds": 6}
    return {p: plane.measure(*p, **settings) for p in POINTS}


@pytest.mark.parametrize("at", POINTS)
def test_claims_7_1_to_7_6_hold_for_sgd(sgd, at):
    assert agrees(sgd[at]) == {}


@pytest.mark.long
@pytest.mark.parametrize("family", ["sgd", "sign"])
@pytest.mark.parametrize("at", POINTS)
def test_claims_7_1_to_7_6_hold_at_depth_256(at, family):
    assert agrees(plane.measure(*at, family=family)) == {}


def test_a_step_moves_the_output_by_depth_to_the_1_minus_alpha_minus_gamma(sgd):
    for (alpha, gamma), point in sgd.items():
        if alpha >= 0.5:
            assert point.exponents["df"] == pytest.approx(1 - alpha - gamma, abs=0.1)


def test_beyond_the_ode_point_preactivations_grow_on_the_stable_line(sgd):
    # Definition 7.2 asks Δh = O(1), Claim 7.2 does not: Δh ~ L^(α-1) at α > 1.
    point = sgd[1.25, -0.25]
    assert point.exponents["dh"] == pytest.approx(0.25, abs=0.06)
    assert abs(point.exponents["dx"]) < 0.06
    assert point.verdicts["stable in training"]
    assert not point.verdicts["faithful"]


def test_the_random_part_of_neighbouring_layers_goes_as_claim_7_4_needs(sgd):
    for alpha, gamma in ((0.5, 0.5), (0.75, 0.25), (1.0, 0.0)):
        noise = sgd[alpha, gamma].noise
        assert noise == pytest.approx(1 - 2 * alpha, abs=0.1)
    shallow, deep = sgd[0.5, 0.5].diversity
    assert shallow == pytest.approx(0.5, abs=0.05)
    assert deep == pytest.approx(0.5, abs=0.05)
    # What is seen at finite depth comes down towards 0 at the ODE point.
    shallow, deep = sgd[1.0, 0.0].diversity
    assert deep < shallow - 0.04
    assert sgd[1.0, 0.0].kappa == 0
    assert sgd[0.5, 0.5].kappa == 0.5


@pytest.mark.long
def test_a_kink_halves_the_exponent_of_linearization():
    # At a rate whose changes are small at every depth.
    for activation, expected in ((jax.nn.gelu, -0.5), (jax.nn.relu, -0.25)):
        point = plane.measure(0.5, 0.5, family="sign", activation=activation, rate=0.03)
        residual = point.exponents["residual"]
        assert residual == pytest.approx(expected, abs=3 * point.errors["residual"])
        assert point.errors["residual"] < 0.05


def test_a_slope_within_its_error_of_the_tolerance_decides_nothing():
    slopes = dict.fromkeys(("x", "h", "dx", "dh", "df"), 0.0) | {"residual": -0.5}
    errors = dict.fromkeys(slopes, 0.01)
    kappas = np.full((2, 8), 0.5)
    point = plane.Point(
        0.5, 0.5, "sgd", (16, 64), slopes, errors, kappas, 0.0, tolerance=0.15
    )
    assert point.decided == point.verdicts
    unsure = dataclasses.replace(point, errors=errors | {"dh": 0.2})
    open_ = {name for name, answer in unsure.decided.items() if answer is None}
    assert open_ == {"faithful", "feature learning"}
    assert unsure.verdicts == point.verdicts


def test_predictions_follow_the_claims():
    assert all(predicted(0.5, 0.5).values())
    assert predicted(0.3, 0.7) == {"stable at initialization": False}
    assert not predicted(1.5, -0.5)["faithful"]
    assert not predicted(0.5, 1.0)["nontrivial"]


def test_a_diverged_training_has_no_kappa():
    assert np.isnan(
        plane.Point(0, 0, "sgd", (16, 32), {}, {}, (), float("nan"), 0.1).kappa
    )


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="'adam' must be"):
        plane.measure(0.5, 0.5, family="adam")
    with pytest.raises(UserError, match="powers of two"):
        plane.measure(0.5, 0.5, depths=(16, 40))
    needed = 4 * 2**20 * 512**2 * 8 / 2**30
    with pytest.raises(UserError, match=re.escape(f"take {needed:.3g} GiB")):
        plane.measure(0.5, 0.5, depths=(16, 2**20), width=512)

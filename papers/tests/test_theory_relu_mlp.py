"""The first step of a plain ReLU network, against networks that take it."""

import itertools

import numpy as np
import pytest

from mupax.experiments.errors import UserError
from mupax.experiments.theory import relu_mlp

WIDTHS = (5, 14, 24, 12, 18)
RATES = (1.0, 0.5, 2.0, 0.7)


def simulated_changes(widths, rates, seed, networks):
    """Mean over neurons of Δz² to first order in the rates, layer by network."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=widths[0])
    x *= np.sqrt(widths[0]) / np.linalg.norm(x)
    signals, weights, slopes = [np.broadcast_to(x, (networks, widths[0]))], [], []
    for fan_in, fan_out in itertools.pairwise(widths):
        w = rng.normal(size=(networks, fan_out, fan_in)) * np.sqrt(2 / fan_in)
        z = np.einsum("nij,nj->ni", w, signals[-1])
        weights.append(w)
        slopes.append(z > 0)
        signals.append(np.maximum(z, 0))
    gradient = rng.normal(size=(networks, widths[-1])) / widths[-1] * slopes[-1]
    gradients = [gradient]
    for w, slope in zip(weights[:0:-1], slopes[-2::-1], strict=True):
        gradients.insert(0, np.einsum("ni,nij->nj", gradients[0], w) * slope)
    # A label of one: its sign does not matter, and it adds no noise.
    change, changes = np.zeros((networks, widths[0])), []
    for i, w in enumerate(weights):
        own = rates[i] * gradients[i] * (signals[i] ** 2).sum(1, keepdims=True)
        moved = np.einsum("nij,nj->ni", w, change) + own
        changes.append((moved**2).mean(axis=1))
        change = moved * slopes[i]
    return np.array(changes)


def simulated(widths, rates, seeds, networks):
    means = [simulated_changes(widths, rates, s, networks).mean(1) for s in seeds]
    return np.mean(means, axis=0), np.std(means, axis=0, ddof=1) / np.sqrt(len(means))


def test_the_recursion_gives_what_networks_of_any_width_profile_do():
    # Three standard errors over seeds, at most 3 percent each.
    mean, error = simulated(WIDTHS, RATES, seeds=range(10), networks=6000)
    expected = relu_mlp.mean_squared_change(WIDTHS, RATES)
    assert (error < 0.03 * mean).all()
    np.testing.assert_array_less(np.abs(mean - expected), 3 * error)


@pytest.mark.long
def test_the_recursion_is_exact_at_depth_comparable_to_width():
    widths = (32,) * 13
    mean, error = simulated(widths, (1.0,) * 12, seeds=range(40), networks=1000)
    expected = relu_mlp.mean_squared_change(widths)
    assert (error < 0.1 * mean).all()
    np.testing.assert_array_less(np.abs(mean - expected), 3 * error)


def test_the_print_without_the_half_is_twice_too_large_in_the_first_layer():
    # Eq. 2.11 as printed, against eq. 2.11 with σ'² of the last layer.
    widths = (8, 32, 32)
    mean, error = simulated(widths, (1.0, 1.0), seeds=range(10), networks=3000)
    printed = widths[0] ** 2 / (widths[1] * widths[-1])
    assert abs(mean[0] - printed / 2) < 3 * error[0]
    assert abs(mean[0] - printed) > 10 * error[0]


def test_the_change_grows_as_a_third_of_depth_cubed():
    # Theorem 1.1 with its constant: B = η² (2ℓ³ + ℓ)/6 at infinite width.
    change = relu_mlp.mean_squared_change((10**9,) * 513)
    ell = np.arange(1, 513)
    np.testing.assert_allclose(change, (2 * ell**3 + ell) / 6, rtol=1e-5)


def test_the_maximal_learning_rate_falls_as_depth_to_the_minus_three_halves():
    depths = (64, 128, 256, 512)
    rates = [relu_mlp.maximal_learning_rate(10**6, depth) for depth in depths]
    law = relu_mlp.fit_power_law(depths, rates)
    assert law == pytest.approx(-1.5, abs=0.01)
    # The slope comes closer with depth, from above.
    local = np.diff(np.log(rates)) / np.diff(np.log(depths))
    assert sorted(local, reverse=True) == list(local)


def test_depth_comparable_to_width_lowers_the_learning_rate_further():
    narrow = relu_mlp.maximal_learning_rate(64, 256)
    wide = relu_mlp.maximal_learning_rate(10**6, 256)
    assert narrow < wide / 3


def test_width_does_not_move_the_maximal_learning_rate():
    rates = [relu_mlp.maximal_learning_rate(width, 8) for width in (512, 1024, 4096)]
    assert max(rates) / min(rates) < 1.05


def test_a_small_step_of_real_networks_has_the_linear_response():
    width, depth = 128, 6
    rate = relu_mlp.maximal_learning_rate(width, depth, threshold=1e-4)
    parts = [
        relu_mlp.exact_mean_squared_change(width, depth, [rate], networks=64, seed=s)
        for s in range(8)
    ]
    error = np.std(parts, ddof=1) / np.sqrt(len(parts))
    assert error < 0.1e-4
    assert np.mean(parts) == pytest.approx(1e-4, abs=3 * error)


def test_at_a_threshold_of_one_the_linear_response_is_below_the_real_step():
    ratios = []
    for depth in (4, 32):
        linear = relu_mlp.maximal_learning_rate(128, depth)
        exact = relu_mlp.maximal_learning_rate(128, depth, exact=True)
        ratios.append(exact / linear)
    assert 1.1 < ratios[0] < ratios[1]
    assert ratios[1] > 1.5


def test_the_real_learning_rate_is_where_the_real_change_reaches_the_threshold():
    settings = {"networks": 16, "seed": 3, "layer": 3}
    rate = relu_mlp.maximal_learning_rate(64, 5, threshold=0.5, exact=True, **settings)
    change = relu_mlp.exact_mean_squared_change(64, 5, [rate], **settings)
    assert change[0] == pytest.approx(0.5, rel=0.02)


def test_a_threshold_that_is_never_crossed_is_named():
    with pytest.raises(UserError, match="threshold=1e\\+30 is not crossed"):
        relu_mlp.maximal_learning_rate(8, 2, threshold=1e30, exact=True)


def test_the_change_is_quadratic_in_the_rate_and_scales_with_input_and_label():
    once = relu_mlp.mean_squared_change(WIDTHS, 0.3)
    np.testing.assert_allclose(relu_mlp.mean_squared_change(WIDTHS, 0.6), 4 * once)
    scaled = relu_mlp.mean_squared_change(WIDTHS, 0.3, input_scale=2.0, label_scale=3.0)
    np.testing.assert_allclose(scaled, 12 * once)


def test_a_rate_for_each_layer_is_asked_for():
    with pytest.raises(UserError, match="2 learning rates for 4 hidden layers"):
        relu_mlp.mean_squared_change(WIDTHS, (1.0, 2.0))
    with pytest.raises(UserError, match="at least one hidden"):
        relu_mlp.mean_squared_change((5,))

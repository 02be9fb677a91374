"""Feature learning of linear residual networks, closed forms against networks."""

import jax.numpy as jnp
import numpy as np
import pytest

from mupax.experiments.errors import UserError
from mupax.experiments.theory import lazy, linear_joint

ENDS = [(False, False), (True, False), (False, True), (True, True)]
IDS = ["frozen", "readin", "readout", "both"]
DEPTH, Y, RATE, RICHNESS = 64, 0.7, 0.3, 1.5


def simulated_change(width, seed, readin, readout):
    """ΔH at every layer and f after one step of a network; updates of rank one.

    In the gauge of eq. 1: h^{l+1} = h^l + W^l h^l / √(L N), f = w·h^L / (μ0 N), rate
    η0 μ0² N, inputs of one feature with |x|²/D = 1.
    """
    rng = np.random.default_rng(seed)
    h = [rng.normal(size=width)]
    scale = 1 / np.sqrt(DEPTH * width)
    weights = []
    for _ in range(DEPTH):
        weights.append(rng.normal(size=(width, width)))
        h.append(h[-1] + scale * weights[-1] @ h[-1])
    w = rng.normal(size=width)
    g = [w]  # N μ0 ∂f/∂h
    for weight in reversed(weights):
        g.insert(0, g[0] + scale * weight.T @ g[0])
    f = w @ h[-1] / (RICHNESS * width)
    # η0 μ0² N (y - f) ∂f/∂W = η0 μ0 (y - f) g hᵀ / √(L N).
    c = RATE * RICHNESS * (Y - f)
    new = [h[0] + readin * c * g[0]]
    for layer, weight in enumerate(weights):
        moved = weight @ new[-1] + c * scale * g[layer + 1] * (h[layer] @ new[-1])
        new.append(new[-1] + scale * moved)
    readout_weight = w + readout * c * h[-1]
    change = [(a @ a - b @ b) / width for a, b in zip(new, h, strict=True)]
    return np.array([*change, readout_weight @ new[-1] / (RICHNESS * width)])


def mean_and_error(width, seeds, readin, readout):
    sampled = np.stack(
        [simulated_change(width, s, readin, readout) for s in range(seeds)]
    )
    return sampled.mean(axis=0), sampled.std(axis=0, ddof=1) / np.sqrt(seeds)


def closed(times, readin, readout):
    return linear_joint.one_step(
        times, label=Y, learning_rate=RATE, richness=RICHNESS,
        readin=readin, readout=readout,
    )  # fmt: skip


@pytest.mark.parametrize(("readin", "readout"), [ENDS[0], ENDS[3]])
def test_networks_change_as_the_recursion_says_and_not_as_equation_7(readin, readout):
    # Four standard errors at each of 65 layers, at most 7 percent of the largest.
    mean, error = mean_and_error(192, 24, readin, readout)
    x, y = np.ones((2, 1, 1)), np.full((2, 1), Y)
    theory = linear_joint.dynamics(
        x, y, depth=DEPTH, learning_rate=RATE, richness=RICHNESS,
        readin=readin, readout=readout,
    )  # fmt: skip
    change = theory.h[:, 1, 1] - theory.h[:, 0, 0]
    assert error[:-1].max() < 0.07 * change.max()
    assert (np.abs(mean[:-1] - change) <= 4 * error[:-1] + 1e-12).all()
    assert abs(mean[-1] - theory.outputs[1, 0]) < 4 * error[-1]
    # The printed solution, in the case that it speaks of.
    c = RATE * RICHNESS * Y
    printed = 2 * c**2 * np.e * (1 / 3 + 1 / 2 + (1 + np.exp(-1)) * (np.e - 1))
    assert abs(mean[-2] - printed) > 5 * error[-2]


@pytest.mark.parametrize(("readin", "readout"), ENDS, ids=IDS)
def test_the_closed_form_is_the_limit_of_the_recursion(readin, readout):
    # The error of the extrapolation from depths 32, 64 and 128.
    x, y = np.full((2, 1, 1), 1.3), np.full((2, 1), Y)
    ends = {"readin": readin, "readout": readout}
    solution = linear_joint.dynamics(
        x, y, learning_rate=RATE, richness=RICHNESS, **ends
    )
    step = linear_joint.one_step(
        solution.times, label=Y, input_norm=1.69, learning_rate=RATE, richness=RICHNESS,
        **ends,
    )  # fmt: skip
    np.testing.assert_allclose(solution.h[:, 0, 0], step.h, rtol=1e-4)
    np.testing.assert_allclose(solution.g[:, 0, 0], step.g, rtol=1e-4)
    largest = step.change_h.max()
    np.testing.assert_allclose(
        solution.h[:, 1, 1], step.h + step.change_h, atol=1e-3 * largest
    )
    largest = step.change_g.max()
    np.testing.assert_allclose(
        solution.g[:, 1, 1], step.g + step.change_g, atol=2e-3 * largest
    )
    assert solution.outputs[1, 0] == pytest.approx(step.output, rel=1e-4)


def test_the_kernels_solve_their_equations():
    # Eq. 92, 94 and 98, by finite differences.
    tau = np.linspace(0, 1, 2001)
    step = closed(tau, True, False)
    d_tau = tau[1] - tau[0]

    def derivative(values):
        return np.gradient(values, d_tau, edge_order=2)

    np.testing.assert_allclose(derivative(step.h), step.h, rtol=1e-5)
    np.testing.assert_allclose(derivative(step.g), -step.g, rtol=1e-5)
    assert step.g[-1] == 1
    np.testing.assert_allclose(derivative(step.a), step.a + step.h * Y, rtol=1e-5)
    np.testing.assert_allclose(-derivative(step.b), step.b + step.g * Y, rtol=1e-5)
    assert step.b[-1] == 0


def test_read_in_and_readout_mirror_each_other():
    tau = np.linspace(0, 1, 11)
    one, other = closed(tau, True, False), closed(tau, False, True)
    np.testing.assert_allclose(one.change_h, other.change_g[::-1])
    np.testing.assert_allclose(one.a, other.b[::-1])


def test_the_first_step_moves_the_output_by_the_lazy_kernel():
    start = np.array([[1.69]])
    for readin, readout in (ENDS[0], ENDS[3]):
        kernel = lazy.kernels(
            start, "linear", readin=float(readin), readout=float(readout)
        ).kernel
        step = linear_joint.one_step(
            [0.0], label=Y, input_norm=1.69, learning_rate=RATE,
            readin=readin, readout=readout,
        )  # fmt: skip
        assert step.output == pytest.approx(RATE * Y * kernel[0, 0], rel=1e-6)


def repeated():
    """Four steps on the same two points."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1, 2, 3)), rng.normal(size=(1, 2))
    return np.repeat(x, 4, axis=0), np.repeat(y, 4, axis=0)


def test_small_richness_freezes_the_features():
    x, y = repeated()
    moved = []
    for richness in (0.01, 0.001):
        solution = linear_joint.dynamics(
            x, y, depth=8, learning_rate=0.1, richness=richness
        )
        moved.append(np.abs(solution.h[:, 6:, 6:] - solution.h[:, :2, :2]).max())
    # ΔH is of second order in μ0.
    assert moved[0] / moved[1] == pytest.approx(100, rel=0.05)
    # The outputs follow gradient descent with the lazy kernel.
    kernel = lazy.kernels(lazy.gram(x[0]), "linear", depth=8).kernel
    f = np.zeros(2)
    for outputs in solution.outputs:
        np.testing.assert_allclose(outputs, f, atol=1e-5)
        f = f + 0.1 * kernel @ (y[0] - f) / 2


def test_the_gauge_of_richness_and_rate_does_not_matter():
    # f·θ with targets·θ, at μ0/θ: one network, in other units (Yaida 2.8).
    x, y = repeated()
    one = linear_joint.dynamics(x, y, depth=8, learning_rate=0.1, richness=0.01)
    other = linear_joint.dynamics(x, y * 10, depth=8, learning_rate=0.1, richness=0.001)
    np.testing.assert_allclose(other.outputs, 10 * one.outputs, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(other.h, one.h, rtol=1e-12)


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="must be in"):
        linear_joint.one_step([1.5])
    with pytest.raises(UserError, match="richness=0"):
        linear_joint.dynamics(np.ones((2, 1, 1)), np.ones((2, 1)), richness=0)
    with pytest.raises(UserError, match="no gradient"):
        linear_joint.dynamics(np.ones((1, 2, 1)), np.array([[1.0, 0.0]]), depth=4)
    with pytest.raises(UserError, match="and \\(steps, batch\\)"):
        linear_joint.dynamics(np.ones((2, 1, 1)), jnp.ones((2, 1, 1)))

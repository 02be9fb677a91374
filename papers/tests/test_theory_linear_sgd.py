"""Γ and C of deep linear networks, against Lemma 4.3 as printed and wide networks."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mupax.experiments.errors import UserError
from mupax.experiments.theory import linear_sgd


def stream(steps=4, batch=2, features=3, outputs=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(steps, batch, features)) / np.sqrt(features)
    return x, rng.normal(size=(steps, batch, outputs))


# --- Lemma 4.3, literally ------------------------------------------------------


def lemma_4_3(xi, y, depth):
    """Γ and C by the printed recursion: steps² · depth² numbers, in loops.

    Index s + 1 stands for source s, 0 for U and nV; layer 0 of the last axis for
    their one coefficient.
    """
    steps = len(xi)
    gamma = np.zeros((steps, steps + 1, 2, 2, depth + 1, depth + 1))
    c = np.zeros((steps, steps, 2, depth + 1))
    f = np.zeros(steps)

    def covariance(t, s, a, k):
        ends = (gamma[t, 0, a, :, k, 0] * gamma[s, 0, a, :, k, 0]).sum()
        left, right = gamma[t, 1:, a, :, k, 1:], gamma[s, 1:, a, :, k, 1:]
        return ends + np.einsum("rbq,rsbq,sbq->", left, c[..., 1:], right) / depth

    for t in range(steps):
        gamma[t, 0, 0, 0, 0, 0] = xi[t]
        for k in range(1, depth + 1):
            gamma[t, :, 0, :, k] = gamma[t, :, 0, :, k - 1]
            gamma[t, t + 1, 0, 0, k, k] += 1
            for s in range(t + 1):
                c[t, s, 0, k] = c[s, t, 0, k] = covariance(t, s, 0, k - 1)
            for s in range(t):
                drift = gamma[t, s + 1, 0, 1, k - 1, k] - c[t, s, 0, k]
                gamma[t, :, 0, :, k] += gamma[s, :, 1, :, k] * drift / depth
        f[t] = gamma[t, 0, 0, 1, depth, 0]
        gamma[t, 0, 1, 1, depth, 0] = f[t] - y[t]
        for k in range(depth, 0, -1):
            gamma[t, :, 1, :, k - 1] = gamma[t, :, 1, :, k]
            gamma[t, t + 1, 1, 1, k - 1, k] += 1
            for s in range(t + 1):
                c[t, s, 1, k] = c[s, t, 1, k] = covariance(t, s, 1, k)
            for s in range(t):
                drift = gamma[t, s + 1, 1, 0, k, k] - c[t, s, 1, k]
                gamma[t, :, 1, :, k - 1] += gamma[s, :, 0, :, k - 1] * drift / depth
    return f, gamma, c


def test_the_solver_is_lemma_4_3_as_printed():
    xi, y = stream(steps=5, batch=1, features=1, outputs=1)
    f, gamma, c = lemma_4_3(xi.ravel(), y.ravel(), depth=6)
    run = linear_sgd.train(xi, y, depth=6)
    np.testing.assert_allclose(run.outputs.ravel(), f, atol=1e-12)
    np.testing.assert_allclose(
        run.forward[:-1], np.moveaxis(c[:, :, 0, 1:], -1, 0), atol=1e-12
    )
    np.testing.assert_allclose(
        run.backward[1:], np.moveaxis(c[:, :, 1, 1:], -1, 0), atol=1e-12
    )
    for t, s, a, b in np.ndindex(5, 5, 2, 2):
        np.testing.assert_allclose(
            run.gamma(t, s, a, b), gamma[t, s + 1, a, b][:, 1:], atol=1e-12
        )


# --- wide networks -------------------------------------------------------------


def simulate(x, y, depth, width, seeds, rate, multiplier, readin, readout):
    """Outputs and rms of every layer at each step, of networks of finite width."""
    _, batch, features = x.shape
    scale = multiplier / np.sqrt(depth)

    def forward(params, inputs):
        u, w, v = params
        start = inputs @ u.T

        def block(h, weight):
            h = h + scale * h @ weight.T
            return h, h

        last, hidden = jax.lax.scan(block, start, w)
        return last @ v.T, jnp.concatenate([start[None], hidden])

    def run(key):
        keys = jax.random.split(key, 3)
        params = (
            jax.random.normal(keys[0], (width, features)),
            jax.random.normal(keys[1], (depth, width, width)) / np.sqrt(width),
            jax.random.normal(keys[2], (y.shape[-1], width)) / width,
        )
        # μP for SGD: Δ/g of the roles is n, 1 and 1/n.
        rates = (readin * rate * width, rate, readout * rate / width)

        def step(params, data):
            inputs, targets = data

            def loss(params):
                f, hidden = forward(params, inputs)
                return ((f - targets) ** 2).sum() / 2 / batch, (f, hidden)

            grads, (f, hidden) = jax.grad(loss, has_aux=True)(params)
            params = tuple(
                p - r * g for p, r, g in zip(params, rates, grads, strict=True)
            )
            return params, (f, jnp.sqrt((hidden**2).mean(-1)).T)

        return jax.lax.scan(step, params, (x, y))[1]

    with jax.enable_x64(True):
        x, y = jnp.asarray(x), jnp.asarray(y)
        keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
        f, rms = jax.lax.map(jax.jit(run), keys)
        return np.asarray(f), np.asarray(rms)


CASES = [
    {"readin": 0.0, "readout": 0.0},
    {"readin": 0.7, "readout": 0.0},
    {"readin": 0.0, "readout": 1.3},
    {"readin": 0.7, "readout": 1.3},
]


def assert_within_sampling_error(ends, width, seeds, rate):
    """Each of 16 outputs and 56 rms lies within four standard errors of the mean."""
    x, y = stream()
    common = {"multiplier": 1.2, **ends}
    f, rms = simulate(x, y, 6, width, seeds, rate, **common)
    theory = linear_sgd.train(x, y, depth=6, learning_rate=rate, **common)
    for simulated, expected in ((f, theory.outputs), (rms, theory.rms)):
        error = simulated.std(axis=0, ddof=1) / np.sqrt(seeds)
        assert error.max() < 0.05
        miss = np.abs(simulated.mean(axis=0) - expected)
        np.testing.assert_array_less(miss, 4 * error)


@pytest.mark.parametrize("ends", [CASES[0], CASES[3]], ids=["frozen", "both"])
def test_wide_networks_train_as_the_recursion_says(ends):
    # With more seeds or a larger rate the bias of width 256 would be seen.
    assert_within_sampling_error(ends, width=256, seeds=16, rate=0.1)


@pytest.mark.long
@pytest.mark.parametrize("ends", CASES, ids=["frozen", "readin", "readout", "both"])
def test_wider_networks_train_as_the_recursion_says_at_a_large_rate(ends):
    assert_within_sampling_error(ends, width=512, seeds=32, rate=0.3)


@pytest.mark.long
def test_the_squared_error_of_outputs_falls_as_one_over_the_width():
    # At the rate 0.3 narrow networks do not train alike at all.
    x, y = stream(steps=6)
    widths = (64, 128, 256, 512)
    common = {"multiplier": 1.0, "readin": 1.0, "readout": 1.0}
    theory = linear_sgd.train(x, y, depth=8, learning_rate=0.1, readin=1.0, readout=1.0)
    errors = [
        np.mean((simulate(x, y, 8, width, 16, 0.1, **common)[0] - theory.outputs) ** 2)
        for width in widths
    ]
    slope = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    assert slope == pytest.approx(-1, abs=0.2)


# --- properties ----------------------------------------------------------------


@settings(max_examples=10)
@given(seed=st.integers(0, 999), rate=st.floats(0.01, 0.5), readin=st.floats(0, 1))
def test_kernels_are_symmetric_positive_semidefinite(seed, rate, readin):
    x, y = stream(steps=4, batch=2, seed=seed)
    run = linear_sgd.train(x, y, depth=5, learning_rate=rate, readin=readin)
    for kernel in (run.forward, run.backward):
        np.testing.assert_allclose(kernel, kernel.swapaxes(1, 2), rtol=1e-12)
        largest = np.abs(kernel).max()
        assert np.linalg.eigvalsh(kernel).min() > -1e-10 * largest


def test_the_order_within_a_batch_does_not_matter():
    x, y = stream()
    run = linear_sgd.train(x, y, depth=5, readout=1.0)
    swapped = linear_sgd.train(x[:, ::-1], y[:, ::-1], depth=5, readout=1.0)
    np.testing.assert_allclose(run.outputs, swapped.outputs[:, ::-1], atol=1e-12)


def test_a_probe_does_not_change_training():
    x, y = stream(batch=3)
    alone = linear_sgd.train(x[:, :2], y[:, :2], depth=5)
    watched = linear_sgd.train(x, y, depth=5, weights=[0.5, 0.5, 0.0])
    np.testing.assert_allclose(watched.outputs[:, :2], alone.outputs, atol=1e-12)
    assert np.abs(watched.outputs[1:, 2]).min() > 0


def test_any_loss_and_schedule_is_followed():
    # At f = 0 the logistic loss has χ = -y/2, as the squared loss of a label y/2.
    x, y = stream()
    x[2:], y = x[:1], np.sign(y)

    def logistic(f, y):
        return jnp.sum(jnp.logaddexp(0.0, -f * y))

    rates = [0.2, 0.0, 0.0, 0.0]
    run = linear_sgd.train(x, y, 5, loss=logistic, learning_rate=rates)
    half = linear_sgd.train(x, y / 2, 5, learning_rate=rates)
    np.testing.assert_allclose(run.outputs, half.outputs, atol=1e-12)
    np.testing.assert_array_equal(run.outputs[2], run.outputs[3])
    assert np.abs(run.outputs[3]).min() > 0


# --- depth ---------------------------------------------------------------------


def test_depth_512_and_ten_steps_take_seconds():
    x, y = stream(steps=10, batch=1, features=1, outputs=1)
    linear_sgd.train(x, y, depth=512, learning_rate=0.1)  # compiles
    start = time.perf_counter()
    linear_sgd.train(x, y, depth=512, learning_rate=0.1)
    assert time.perf_counter() - start < 5
    assert linear_sgd.memory_needed(10, 1, 512) < 5e6


def test_the_bias_of_finite_depth_falls_as_one_over_it_and_is_extrapolated_away():
    x, y = stream()
    depths = (16, 32, 64)
    runs = [linear_sgd.train(x, y, depth, learning_rate=0.3) for depth in depths]
    rough = linear_sgd.infinite_depth(x, y, depth=16, learning_rate=0.3)
    fine = linear_sgd.infinite_depth(x, y, depth=32, learning_rate=0.3)
    gaps = [np.abs(run.outputs - fine.outputs.value).max() for run in runs]
    slope = np.polyfit(np.log(depths), np.log(gaps), 1)[0]
    assert slope == pytest.approx(-1, abs=0.06)
    # The error that is given holds, for the largest of each quantity.
    assert np.abs(fine.outputs.error).max() < 1e-3
    miss = np.abs(rough.outputs.value - fine.outputs.value)
    assert miss.max() < rough.outputs.error.max()
    miss = np.abs(rough.rms.value - fine.rms.value[..., ::2])
    assert miss.max() < rough.rms.error.max()


# --- bad input -----------------------------------------------------------------


def test_tensors_beyond_memory_are_refused_with_their_size():
    x, y = np.ones((3000, 1, 1)), np.ones((3000, 1, 1))
    needed = linear_sgd.memory_needed(3000, 1, 512) / 2**30
    with pytest.raises(UserError, match=f"would take {re.escape(f'{needed:.3g}')} GiB"):
        linear_sgd.train(x, y, depth=512)


def test_divergence_names_the_step_and_the_layer_time():
    x, y = stream()
    with pytest.raises(UserError, match=r"not finite at step [123], layer time [01]"):
        linear_sgd.train(x, y, depth=5, learning_rate=1e150)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="must be"):
        linear_sgd.train(np.ones((3, 1)), np.ones((3, 1)), depth=4)

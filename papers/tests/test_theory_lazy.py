"""Kernels of the lazy limit, against wide networks, the recursion and real data."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import datasets
from sklearn.kernel_ridge import KernelRidge

from mupax.experiments.errors import UserError
from mupax.experiments.theory import lazy, linear_sgd

FUNCTIONS = {
    "relu": jax.nn.relu,
    "abs": jnp.abs,
    "erf": jax.scipy.special.erf,
    "linear": lambda x: x,
}
ALL = {**FUNCTIONS, "tanh": jnp.tanh}


def named(name):
    return name if name in FUNCTIONS else ALL[name]


def points(count=3, features=5, seed=0):
    return np.random.default_rng(seed).normal(size=(count, features))


# --- networks ------------------------------------------------------------------


def simulated_kernel(x, name, depth, width, seed, centred, readin, readout):
    """The tangent kernel of one network in the gauge of unit weights, W ~ N(0, 1)."""
    phi = ALL[name]

    def f(params, x):
        first, blocks, last = params
        h = first @ x / np.sqrt(x.shape[0])

        def block(h, w):
            branch = w @ phi(h) / np.sqrt(width)
            return h + branch / np.sqrt(depth), None

        def centred_block(h, w):
            # MS follows φ; here the branch is φ(W h), as in TP-VI.
            branch = phi(h)
            branch = w @ (branch - branch.mean()) / np.sqrt(width)
            return h + branch / np.sqrt(depth), None

        h = jax.lax.scan(centred_block if centred else block, h, blocks)[0]
        return last @ phi(h) / np.sqrt(width)

    keys = jax.random.split(jax.random.key(seed), 3)
    params = (
        jax.random.normal(keys[0], (width, x.shape[1])),
        jax.random.normal(keys[1], (depth, width, width)),
        jax.random.normal(keys[2], (width,)),
    )
    grads = jax.vmap(jax.grad(f), (None, 0))(params, x)
    first, hidden, last = (g.reshape(len(x), -1) for g in grads)
    return hidden @ hidden.T + readin * first @ first.T + readout * last @ last.T


@pytest.mark.parametrize(
    ("name", "centred"),
    [("relu", True), pytest.param("tanh", False, marks=pytest.mark.long)],
)
def test_the_tangent_kernel_of_wide_networks_is_that_of_the_recursion(name, centred):
    # Within four standard errors over seeds, which are at most 4 percent of K.
    x = points()
    with jax.enable_x64(True):
        run = jax.jit(
            lambda seed: simulated_kernel(
                jnp.asarray(x), name, 4, 128, seed, centred, 1.0, 1.0
            )
        )
        sampled = np.asarray(jax.lax.map(run, jnp.arange(24)))
    expected = lazy.kernels(
        lazy.gram(x), named(name), depth=4, centred=centred, readin=1.0, readout=1.0
    ).kernel
    error = sampled.std(axis=0, ddof=1) / np.sqrt(24)
    assert error.max() < 0.04 * np.abs(expected).max()
    np.testing.assert_array_less(np.abs(sampled.mean(axis=0) - expected), 4 * error)


@pytest.mark.long
def test_without_the_slope_of_the_readout_the_kernel_would_be_wrong():
    # Eq. 6 has G(1) = 1 also where φ stands before the readout: K twice too large.
    x = points()
    with jax.enable_x64(True):
        run = jax.jit(
            lambda seed: simulated_kernel(
                jnp.asarray(x), "relu", 4, 128, seed, False, 0.0, 0.0
            )
        )
        sampled = np.asarray(jax.lax.map(run, jnp.arange(24)))
    right = lazy.kernels(lazy.gram(x), depth=4).kernel
    printed = lazy.kernels(lazy.gram(x), depth=4, activate_readout=False).kernel
    error = sampled.std(axis=0, ddof=1) / np.sqrt(24)
    mean = sampled.mean(axis=0)
    np.testing.assert_array_less(np.abs(mean - right), 4 * error)
    np.testing.assert_array_less(4 * error, np.abs(mean - printed))
    np.testing.assert_allclose(np.diagonal(printed), 2 * np.diagonal(right))


# --- depth ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "relu",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("abs", "erf", "tanh")),
    ],
)
def test_the_squared_error_of_the_kernel_falls_as_depth_to_the_minus_two(name):
    start = lazy.gram(points())
    limit = lazy.kernels(start, named(name), readin=1.0, readout=1.0).kernel
    depths = (32, 128)
    errors = [
        np.mean(
            (
                lazy.kernels(
                    start, named(name), depth=depth, readin=1.0, readout=1.0
                ).kernel
                - limit
            )
            ** 2
        )
        for depth in depths
    ]
    slope = np.polyfit(np.log(depths), np.log(errors), 1)[0]
    assert slope == pytest.approx(-2, abs=0.06)


@pytest.mark.long
def test_the_recursion_converges_to_h_and_g_at_every_layer_time():
    start = lazy.gram(points())
    limit = lazy.kernels(start, times=9)
    deep = lazy.kernels(start, depth=4096)
    for name in ("h", "phi", "g"):
        every = getattr(deep, name)[::512]
        np.testing.assert_allclose(every, getattr(limit, name), atol=2e-3)


def test_the_linear_network_has_its_closed_form():
    # H = e^τ H(0), G = e^(1-τ) (eq. 92 prints e^-τ + 1 - 1/e), K = e (1 + r + r') H(0).
    start = lazy.gram(points())
    solution = lazy.kernels(start, "linear", readin=0.5, readout=2.0)
    tau = solution.times[:, None, None]
    np.testing.assert_allclose(solution.h, np.exp(tau) * start[None], rtol=1e-7)
    np.testing.assert_allclose(
        solution.g, np.exp(1 - tau) * np.ones_like(solution.g), rtol=1e-7
    )
    np.testing.assert_allclose(solution.kernel, np.e * 3.5 * start, rtol=1e-7)


def test_a_small_step_of_the_linear_sgd_solver_moves_outputs_by_the_kernel():
    # Overlap with Lemma 4.3: f_1 = η K y / batch at any depth, exactly in η for one
    # step, since terms of second order average to zero.
    x = points(count=2)
    y = np.array([[1.0], [-0.5]])
    steps = np.stack([x, x]) / np.sqrt(x.shape[1])
    run = linear_sgd.train(steps, np.stack([y, y]), 16, learning_rate=1e-4, readin=0.7)
    kernel = lazy.kernels(lazy.gram(x), "linear", depth=16, readin=0.7).kernel
    np.testing.assert_allclose(run.outputs[1], 1e-4 * kernel @ y / 2, rtol=1e-6)


# --- Gaussian averages ---------------------------------------------------------


def test_quadrature_gives_the_closed_form():
    name = "erf"
    start = lazy.gram(points(count=5))
    closed = lazy.kernels(start, name, readin=1.0, readout=1.0, depth=8)
    by_quadrature = lazy.kernels(
        start, FUNCTIONS[name], readin=1.0, readout=1.0, depth=8
    )
    np.testing.assert_allclose(closed.kernel, by_quadrature.kernel, rtol=1e-10)


@pytest.mark.parametrize("name", ["relu", pytest.param("abs", marks=pytest.mark.long)])
def test_closed_forms_with_a_kink_are_averages_over_samples(name):
    # Four standard errors of 400,000 samples.
    covariance = np.array([[1.3, -0.4], [-0.4, 0.6]])
    solution = lazy.kernels(covariance, name, depth=1, readin=0.0)
    samples = np.random.default_rng(0).multivariate_normal([0, 0], covariance, 400_000)
    products = np.prod(np.asarray(FUNCTIONS[name](samples)), axis=1)
    error = products.std() / np.sqrt(len(products))
    assert abs(products.mean() - solution.phi[0, 0, 1]) < 4 * error
    # One layer of depth 1: G_0 = G_1 (1 + Φ').
    step = 1e-6
    f = FUNCTIONS[name]
    slopes = np.prod((f(samples + step) - f(samples - step)) / (2 * step), axis=1)
    slopes = np.asarray(slopes, np.float64)
    ratio = solution.g[0] / solution.g[1] - 1
    assert abs(slopes.mean() - ratio[0, 1]) < 4 * slopes.std() / np.sqrt(len(slopes))


@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    setup=st.sampled_from([("relu", True), ("erf", False)]),
)
def test_kernels_are_symmetric_positive_semidefinite(seed, setup):
    name, centred = setup
    # More points than features: H(0) is singular.
    start = lazy.gram(points(count=6, features=3, seed=seed))
    ends = {"readin": 1.0, "readout": 1.0}
    solution = lazy.kernels(start, name, centred=centred, depth=16, **ends)
    for kernel in (*solution.h, *solution.phi, *solution.g, solution.kernel):
        np.testing.assert_allclose(kernel, kernel.T, atol=1e-10)
        assert np.linalg.eigvalsh(kernel).min() > -1e-6 * np.abs(kernel).max()


# --- regression ----------------------------------------------------------------


def digits(train, test):
    data = datasets.load_digits()
    x = data.data - data.data.mean()
    x /= np.sqrt((x**2).mean())
    order = np.random.default_rng(0).permutation(len(x))[: train + test]
    labels = np.eye(10)[data.target[order]] - 0.1
    x = x[order]
    return x[:train], labels[:train], x[train:], data.target[order][train:]


def test_the_infinite_network_reads_digits():
    x, y, test_x, test_y = digits(train=150, test=100)
    points = lazy.gram(np.concatenate([x, test_x]))
    settings = {"readin": 1.0, "readout": 1.0, "tolerance": 1e-4, "times": 2}
    kernel = lazy.kernels(points, **settings).kernel
    machine = KernelRidge(alpha=1e-9, kernel="precomputed").fit(kernel[:150, :150], y)
    scores = machine.predict(kernel[150:, :150])
    assert (scores.argmax(axis=1) == test_y).mean() > 0.9


# --- bad input -----------------------------------------------------------------


def test_a_kernel_that_explodes_names_the_layer_time():
    # φ = h²: ∂H/∂τ = 3 H² on the diagonal explodes at τ = 1/(3 H(0)) = 1/3.
    with pytest.raises(UserError, match=r"layer time 0\.375 \(they were at 0\.25\)"):
        lazy.kernels([[1.0]], lambda h: h**2)


def test_points_beyond_memory_are_refused_with_their_size():
    needed = lazy.memory_needed(200, 10**7 + 1) / 2**30
    with pytest.raises(UserError, match=f"would take {re.escape(f'{needed:.3g}')} GiB"):
        lazy.kernels(np.eye(200), depth=10**7)


def test_what_is_no_covariance_or_activation_is_refused():
    with pytest.raises(UserError, match="symmetric"):
        lazy.kernels([[1.0, 0.5], [0.2, 1.0]])
    with pytest.raises(UserError, match="'gelu' must be one of abs, erf, linear, relu"):
        lazy.kernels([[1.0]], "gelu")

"""Feature learning by Monte Carlo, against wide networks and the other solvers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.experiments.errors import UserError
from mupax.experiments.theory import feature_learning, lazy, linear_joint

ENDS = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
DEPTH, STEPS, BATCH = 3, 4, 2
QUICK = {"samples": 256, "replicas": 16}


def stream(seed=0, batch=BATCH):
    """Another batch at each step."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(STEPS, batch, 3)), rng.normal(size=(STEPS, batch))


def repeated(seed=0):
    x, y = stream(seed)
    return np.repeat(x[:1], STEPS, axis=0), np.repeat(y[:1], STEPS, axis=0)


def misses(ours, other, error):
    """Distances in standard errors; where nothing can vary there is none."""
    both = np.hypot(ours.error, error)
    return np.abs(ours.value - other) / np.maximum(both, 1e-9)


# --- wide networks -------------------------------------------------------------


def simulate(
    x, y, activation, *, width, pairs, rate, richness, depth=DEPTH, multiplier=1.0,
    ends=(1.0, 1.0), activate_readout=True, share=None,
):  # fmt: skip
    """f and the kernels H, Φ, G of networks of eq. 1, trained by JAX's gradients.

    Each is the mean of two networks, with readouts w and -w, both drawn from the
    same law: the output before training cancels. G is N (μ0 ∂f/∂h)², by gradients
    with respect to what is added to h in every layer.
    """
    batch, features = x.shape[1:]
    share = np.full(batch, 1 / batch) if share is None else np.asarray(share)
    last_activation = activation if activate_readout else (lambda h: h)

    def output(params, added, inputs):
        first, blocks, w = params
        h = inputs @ first.T / np.sqrt(features) + added[0]
        every = [h]
        for block, more in zip(blocks, added[1:], strict=True):
            h = h + multiplier / np.sqrt(depth * width) * activation(h) @ block.T + more
            every.append(h)
        return last_activation(h) @ w / (richness * width), jnp.stack(every)

    def step(params, data):
        inputs, targets = data
        nothing = jnp.zeros((depth + 1, batch, width))
        f, pull, h = jax.vjp(
            lambda p, added: output(p, added, inputs), params, nothing, has_aux=True
        )
        g = richness * width * pull(jnp.ones(batch))[1]
        gradients = pull(share * (f - targets))[0]
        params = tuple(
            jax.tree.map(lambda a, b, k=k: a - k * rate * richness**2 * width * b, p, d)
            for p, d, k in zip(params, gradients, (ends[0], 1.0, ends[1]), strict=True)
        )
        return params, (f, h, g)

    def network(params):
        _, (f, h, g) = jax.lax.scan(step, params, (jnp.asarray(x), jnp.asarray(y)))
        h, g = (jnp.moveaxis(v, 1, 0).reshape(depth + 1, -1, width) for v in (h, g))
        fields = h, activation(h), g
        return f, *(v @ v.swapaxes(1, 2) / width for v in fields)

    def pair(key):
        keys = jax.random.split(key, depth + 2)
        first = jax.random.normal(keys[0], (width, features))
        w = jax.random.normal(keys[1], (width,))
        blocks = [jax.random.normal(k, (width, width)) for k in keys[2:]]
        plus, minus = network((first, blocks, w)), network((first, blocks, -w))
        return jax.tree.map(lambda p, q: (p + q) / 2, plus, minus)

    with jax.enable_x64(True):
        simulated = jax.lax.map(
            jax.jit(pair), jax.random.split(jax.random.key(1), pairs)
        )
    means = [np.asarray(part).mean(axis=0) for part in simulated]
    errors = [
        np.asarray(part).std(axis=0, ddof=1) / np.sqrt(pairs) for part in simulated
    ]
    return list(zip(means, errors, strict=True))


def solve(x, y, activation, *, rate, ends=(1.0, 1.0), share=None, depth=DEPTH, **more):
    return feature_learning.dynamics(
        x, y, depth, activation=activation, learning_rate=rate, readin=ends[0],
        readout=ends[1], weights=share, **more,
    )  # fmt: skip


def parts(solution):
    return solution.outputs, solution.h, solution.phi, solution.g


@pytest.mark.long
def test_wide_networks_train_as_the_equations_say_and_not_lazily():
    # 8 outputs and 768 entries of kernels, each within four standard errors; outputs
    # of a lazy network are further away: measured, by 10.
    x, y = repeated()
    case = {"rate": 0.6, "richness": 3.0}
    networks = simulate(x, y, jnp.tanh, width=256, pairs=16, **case)
    solution = solve(x, y, jnp.tanh, **case, **QUICK)
    assert networks[0][1].max() < 0.01
    for theory, network in zip(parts(solution), networks, strict=True):
        assert misses(theory, *network).max() < 4
    frozen = solve(x, y, jnp.tanh, **case | {"richness": 1e-3}, **QUICK)
    assert misses(frozen.outputs, *networks[0]).max() > 8


CASES = {
    "tanh": (jnp.tanh, repeated, {"rate": 0.6, "richness": 3.0}),
    "silu": (jax.nn.silu, repeated, {"rate": 0.3, "richness": 2.0}),
    "stream": (jnp.tanh, stream, {"rate": 0.5, "richness": 2.0}),
    "frozen": (jnp.tanh, stream, {"rate": 0.7, "richness": 2.0, "ends": (0.0, 0.0)}),
    "rates of the ends": (
        jnp.tanh,
        repeated,
        {"rate": 0.4, "richness": 2.0, "ends": (0.5, 1.5), "share": [0.8, 0.2]},
    ),
    "linear readout, wide branches": (
        lambda h: jnp.tanh(h + 1),
        repeated,
        {
            "rate": 0.2,
            "richness": 2.0,
            "multiplier": 1.4,
            "activate_readout": False,
        },
    ),
    "depth 6": (jnp.tanh, repeated, {"rate": 0.6, "richness": 2.0, "depth": 6}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_wider_networks_train_as_the_equations_say(name):
    # The bias of width 512 is below the error of 64 networks.
    activation, data, case = CASES[name]
    x, y = data()
    networks = simulate(x, y, activation, width=512, pairs=32, **case)
    solution = solve(x, y, activation, **case)
    for theory, network in zip(parts(solution), networks, strict=True):
        assert misses(theory, *network).max() < 4


@pytest.mark.long
def test_without_the_response_at_equal_times_networks_are_missed(monkeypatch):
    x, y = repeated()
    case = {"rate": 0.6, "richness": 3.0}
    networks = simulate(x, y, jnp.tanh, width=512, pairs=32, **case)
    monkeypatch.setattr(
        feature_learning,
        "_answers",
        lambda count, start, batch: jnp.arange(count) < start,
    )
    # Another function, so that nothing compiled before is used.
    printed = solve(x, y, lambda h: jnp.tanh(h), **case)
    missed = [
        misses(theory, *network).max()
        for theory, network in zip(parts(printed), networks, strict=True)
    ]
    # Measured: f by 9, H by 16, Φ by 14, G by 36 standard errors.
    assert min(missed) > 5
    assert max(missed) > 20


# --- the other solvers ---------------------------------------------------------


@pytest.mark.parametrize("ends", ENDS, ids=["frozen", "readin", "readout", "both"])
@pytest.mark.parametrize("data", [stream, repeated])
def test_a_linear_network_is_solved_without_sampling_error(ends, data):
    # What is left is that of the Cholesky roots of nearly singular kernels.
    x, y = data()
    rates = [0.3, 0.1, 0.2, 0.3]
    solution = solve(
        x, y, "linear", rate=rates, ends=ends, richness=1.5, multiplier=1.2, **QUICK
    )
    exact = linear_joint.dynamics(
        x, y, depth=DEPTH, learning_rate=rates, richness=1.5, multiplier=1.2,
        readin=bool(ends[0]), readout=bool(ends[1]),
    )  # fmt: skip
    for name in ("outputs", "losses", "h", "g"):
        np.testing.assert_allclose(
            getattr(solution, name).value, getattr(exact, name), rtol=1e-8, atol=1e-9
        )
        assert getattr(solution, name).error.max() < 1e-9


@pytest.mark.parametrize("ends", [ENDS[0], ENDS[3]], ids=["frozen", "both"])
def test_small_richness_is_the_lazy_limit(ends):
    x, y = repeated()
    rate, richness = 0.5, 1e-3
    solution = solve(x, y, "erf", rate=rate, ends=ends, richness=richness, **QUICK)
    kernels = lazy.kernels(
        lazy.gram(x[0]), "erf", depth=DEPTH, readin=ends[0], readout=ends[1]
    )
    f, every = np.zeros(BATCH), []
    for _ in range(STEPS):
        every.append(f)
        f = f + rate * kernels.kernel @ (y[0] - f) / BATCH
    # One part in a hundred of the labels; the features move by 1e-6.
    assert solution.outputs.error.max() < 0.01
    assert misses(solution.outputs, np.stack(every), 0).max() < 4
    for name in ("h", "phi", "g"):
        part = getattr(solution, name)
        start = feature_learning.Estimate(*(v[:, :BATCH, :BATCH] for v in part))
        assert misses(start, getattr(kernels, name), 1e-5).max() < 4


def test_small_richness_costs_no_precision():
    x, y = repeated()
    errors = [
        solve(x, y, "erf", rate=0.5, richness=mu, **QUICK).outputs.error.max()
        for mu in (1e-1, 1e-6)
    ]
    assert errors[1] < 2 * errors[0]


# --- properties ----------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    return solve(*repeated(), jnp.tanh, rate=0.5, richness=2.0, **QUICK)


def test_kernels_are_symmetric_positive_semidefinite(trained):
    for kernel in (trained.h.value, trained.phi.value, trained.g.value):
        np.testing.assert_allclose(kernel, kernel.swapaxes(1, 2), rtol=1e-12)
        assert np.linalg.eigvalsh(kernel).min() > -1e-12 * np.abs(kernel).max()


def test_responses_look_back_and_b_to_its_own_vector_too(trained):
    step = np.arange(STEPS * BATCH) // BATCH
    later = step[:, None] > step[None]
    assert not trained.a.value[:, ~later].any()
    own = np.eye(STEPS * BATCH, dtype=bool)
    # Not exactly zero between vectors of a batch only by the draws being shared.
    np.testing.assert_allclose(trained.b.value[:, ~(later | own)], 0, atol=1e-12)
    diagonal = np.abs(np.diagonal(trained.b.value, axis1=1, axis2=2))
    before, after = diagonal[:, :BATCH], diagonal[:, BATCH:]
    # Zero before training, where z is independent of h, but for the draws.
    assert before.max() < 0.1 * after.max()


def test_the_gauge_of_richness_and_labels_does_not_matter(trained):
    # f·θ with targets·θ, at μ0/θ: one network, in other units (Yaida 2.8).
    x, y = repeated()
    other = solve(x, 10 * y, jnp.tanh, rate=0.5, richness=0.2, **QUICK)
    np.testing.assert_allclose(other.outputs.value, 10 * trained.outputs.value)
    np.testing.assert_allclose(other.g.value, trained.g.value)


def test_the_future_does_not_matter(trained):
    x, y = repeated()
    x, y = x.copy(), y.copy()
    x[-1], y[-1] = -1.0, 5.0
    other = solve(x, y, jnp.tanh, rate=0.5, richness=2.0, **QUICK)
    before = slice(0, (STEPS - 1) * BATCH)
    np.testing.assert_allclose(
        other.outputs.value[:-1], trained.outputs.value[:-1], rtol=1e-12
    )
    for name in ("h", "g", "a", "b"):
        np.testing.assert_allclose(
            getattr(other, name).value[:, before, before],
            getattr(trained, name).value[:, before, before],
            rtol=1e-9,
            atol=1e-12,
        )


def test_an_order_within_the_batch_does_not_matter(trained):
    x, y = repeated()
    other = solve(
        x[:, ::-1], y[:, ::-1], jnp.tanh, rate=0.5, richness=2.0, seed=1, **QUICK
    )
    swapped = other.outputs.value[:, ::-1], other.outputs.error[:, ::-1]
    assert misses(trained.outputs, *swapped).max() < 4


def test_a_step_of_rate_zero_only_repeats_singular_kernels():
    # All four vectors of the first two steps are two.
    x, y = repeated()
    solution = solve(x, y, jnp.tanh, rate=[0.0, 0.5, 0.5, 0.5], richness=2.0, **QUICK)
    np.testing.assert_allclose(solution.outputs.value[:2], 0, atol=1e-12)
    np.testing.assert_allclose(
        solution.h.value[:, 2:4, 2:4], solution.h.value[:, :2, :2], rtol=1e-9
    )
    moved = solve(x, y, jnp.tanh, rate=0.5, richness=2.0, seed=1, **QUICK)
    later = moved.outputs.value[1:3], moved.outputs.error[1:3]
    kept = feature_learning.Estimate(*(v[2:] for v in solution.outputs))
    assert misses(kept, *later).max() < 4


@pytest.mark.long
def test_a_probe_does_not_change_training(trained):
    x, y = stream(batch=3)
    case = {"rate": 0.5, "richness": 2.0}
    alone = solve(x[:, :2], y[:, :2], jnp.tanh, **case)
    watched = solve(x, y, jnp.tanh, share=[0.5, 0.5, 0.0], **case)
    kept = feature_learning.Estimate(*(v[:, :2] for v in watched.outputs))
    assert misses(kept, *alone.outputs).max() < 4
    assert np.abs(watched.outputs.value[1:, 2]).min() > 0.01


@pytest.mark.long
def test_the_error_that_is_given_is_that_of_other_seeds_and_falls_with_samples():
    x, y = repeated()
    case = {"rate": 0.5, "richness": 2.0, "replicas": 8}

    def last(samples, seeds):
        solutions = [
            solve(x, y, jnp.tanh, samples=samples, seed=s, **case).outputs
            for s in range(seeds)
        ]
        values = np.stack([s.value[-1] for s in solutions])
        return values, np.sqrt(np.mean([s.error[-1] ** 2 for s in solutions], axis=0))

    values, given = last(256, 16)
    few, many = given, last(1024, 4)[1]
    # Three standard deviations: 16 seeds know their spread to 18 percent.
    ratio = values.std(axis=0, ddof=1) / few
    np.testing.assert_allclose(ratio, 1, atol=0.55)
    np.testing.assert_allclose(few / many, 2, rtol=0.4)


# --- bad input -----------------------------------------------------------------


def test_tensors_beyond_memory_are_refused_with_their_size():
    x, y = np.ones((100, 2, 1)), np.ones((100, 2))
    needed = feature_learning.memory_needed(100, 2, 8, 10_000) / 2**30
    with pytest.raises(UserError, match=f"would take {re.escape(f'{needed:.3g}')} GiB"):
        feature_learning.dynamics(x, y, 8, samples=10_000)


def test_divergence_names_the_step_and_the_layer_time():
    # An activation that grows: tanh would stay finite.
    x, y = repeated()
    with pytest.raises(UserError, match=r"Φ is not finite at step [123], layer time 0"):
        solve(x, y, "linear", rate=1e200, richness=1.5, **QUICK)


def kinked(h):
    return jnp.maximum(h - 0.3, 0.0)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("has a kink", {"activation": "relu"}),
        ("has a kink", {"activation": kinked}),
        ("erf, linear", {"activation": "sine"}),
        ("richness=0", {"richness": 0.0}),
        ("replicas=1", {"replicas": 1}),
        ("samples=8 must be at least 58", {"samples": 8}),
        ("one per vector", {"weights": [1.0]}),
        ("depth=0", {"depth": 0}),
        ("and \\(steps, batch\\)", {"targets": np.ones((2, 2, 1))}),
    ],
)
def test_bad_input_is_refused(words, change):
    x, y = repeated()
    arguments = {"inputs": x, "targets": y, "depth": DEPTH, **QUICK}
    with pytest.raises(UserError, match=words):
        feature_learning.dynamics(**arguments | change)


def test_a_smooth_relu_is_no_kink():
    def smooth(h):
        return jax.nn.softplus(10 * h) / 10

    with jax.enable_x64(True):
        assert feature_learning._kink(smooth) < 1e-9
        assert feature_learning._kink(kinked) > 0.1

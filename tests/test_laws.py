"""Laws of depth that the papers derive, measured on finite networks.

Residual networks: Tensor Programs VI, section 6.3 and Claims 7.1, 7.2. Plain ReLU
networks: Jelassi et al., Theorem 1.1, in the linear response where it is derived,
which `jax.jvp` gives exactly (at the threshold of the paper itself, E[(Δz)²] = 1,
the change grows more slowly with depth).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import optim

POINTS = [(0.5, 0.5), (0.5, 0.0), (1.0, 0.0), (1.0, 1.0)]


def slope(sizes, values):
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def quick(function):
    # Compiling takes longer than running.
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 1})


# --- residual networks ---------------------------------------------------------

DEPTHS = (8, 32, 128, 256)
WIDTH = 64
SEEDS = 16


def residual_network(depth, seed):
    """Weights and data; what does not depend on depth is the same at every depth."""
    ends, blocks = np.random.default_rng(seed), np.random.default_rng([seed, depth])
    return {
        "readin": ends.normal(size=(8, WIDTH)) / np.sqrt(8),
        "readout": ends.normal(size=WIDTH) / WIDTH,
        "x": ends.normal(size=(2, 8)),
        "y": ends.normal(size=2),
        "blocks": blocks.normal(size=(depth, WIDTH, WIDTH)) / np.sqrt(WIDTH),
    }


def features(blocks, network, alpha):
    depth = blocks.shape[0]

    def step(x, weight):
        h = jax.nn.relu(x @ weight)
        return x + depth**-alpha * (h - h.mean(-1, keepdims=True)), None

    return jax.lax.scan(step, network["x"] @ network["readin"], blocks)[0]


def first_step(network, alpha, rates):
    """rms of the last features, and of their change after one step by each rate."""

    def loss(blocks):
        out = features(blocks, network, alpha) @ network["readout"]
        return jnp.mean((out - network["y"]) ** 2) / 2

    blocks = network["blocks"]
    gradient, before = jax.grad(loss)(blocks), features(blocks, network, alpha)
    updates = {"sgd": gradient, "adam": jnp.sign(gradient)}
    changes = {
        (family, gamma): features(blocks - rate * updates[family], network, alpha)
        - before
        for (family, gamma), rate in rates.items()
    }
    return jnp.sqrt((before**2).mean()), {
        k: jnp.sqrt((c**2).mean()) for k, c in changes.items()
    }


@functools.cache
def residual_measurements():
    """At each alpha, family and gamma: geometric means over seeds, by depth."""
    before, changes = {}, {}
    with jax.enable_x64(True):
        for depth in DEPTHS:
            networks = [residual_network(depth, seed) for seed in range(SEEDS)]
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *networks)
            for alpha in (0.5, 1.0):
                rates = {
                    (family, gamma): learning_rate(depth, alpha, gamma, family)
                    for family in ("sgd", "adam")
                    for gamma in (0.0, 0.5, 1.0)
                    if (alpha, gamma) in POINTS
                }
                run = quick(jax.vmap(lambda n, a=alpha, r=rates: first_step(n, a, r)))
                size, change = run(stacked)
                before[alpha, depth] = np.exp(np.log(size).mean())
                for (family, gamma), c in change.items():
                    changes[alpha, gamma, family, depth] = np.exp(np.log(c).mean())
    return before, changes


def learning_rate(depth, alpha, gamma, family):
    """A small learning rate at depth one, times the library's own multiplier."""
    scale = optim.param_scale(
        "w", (WIDTH // 2,) * 2, (WIDTH,) * 2, (0,), (1,), depth=depth, in_branch=True
    )
    point = optim.parametrization("residual", alpha=alpha, gamma=gamma)
    return 1e-3 * optim.multipliers(scale, point, family).learning_rate


@pytest.mark.parametrize("family", ["sgd", "adam"])
@pytest.mark.parametrize(("alpha", "gamma"), POINTS)
def test_the_first_step_moves_the_last_features_by_depth_to_the_1_minus_alpha_gamma(
    alpha, gamma, family
):
    _, changes = residual_measurements()
    moved = [changes[alpha, gamma, family, depth] for depth in DEPTHS]
    assert slope(DEPTHS, moved) == pytest.approx(1 - alpha - gamma, abs=0.06)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_features_stay_of_order_one_at_initialization_from_alpha_one_half(alpha):
    before, _ = residual_measurements()
    assert abs(slope(DEPTHS, [before[alpha, d] for d in DEPTHS])) < 0.06


# --- plain ReLU networks -------------------------------------------------------


def relu_response(key, depth, width, family):
    """Mean of (dz)², the last preactivations' linear response to one update."""
    keys = jax.random.split(key, 4)
    weights = jax.random.normal(keys[0], (depth, width, width)) * (2 / width) ** 0.5
    readout = jax.random.normal(keys[1], (width,)) / width
    x = jax.random.normal(keys[2], (1, width))
    x /= jnp.sqrt((x**2).mean(-1, keepdims=True))
    y = jax.random.normal(keys[3], (1,))

    def last(weights):
        def step(h, weight):
            return jax.nn.relu(h @ weight), None

        return jax.lax.scan(step, x, weights[:-1])[0] @ weights[-1]

    def loss(weights):
        out = jax.nn.relu(last(weights)) @ readout
        return jnp.mean((out - y) ** 2) / 2

    gradient = jax.grad(loss)(weights)
    if family == "sgd":
        update = gradient
    elif family == "adam":
        update = jnp.sign(gradient) / width
    else:
        # Each layer's gradient by its size: LARS, and for a batch of one Muon too,
        # which makes of a matrix of rank one the same matrix of norm one.
        size = jnp.sqrt((gradient**2).mean((1, 2), keepdims=True))
        update = gradient / size / width**0.5
    return (jax.jvp(last, (weights,), (update,))[1] ** 2).mean()


def relu_slope(family, depths, width, seeds):
    keys = jax.random.split(jax.random.key(0), seeds)
    means = []
    for depth in depths:
        run = quick(
            lambda keys, depth=depth: jax.lax.map(
                lambda key: relu_response(key, depth, width, family), keys
            )
        )
        means.append(float(run(keys).mean()))
    return slope(depths, means)


@pytest.mark.parametrize(
    "family", ["sgd", pytest.param("relative", marks=pytest.mark.long)]
)
def test_the_squared_change_of_a_relu_network_grows_as_depth_cubed(family):
    assert relu_slope(family, (4, 8, 16, 32), 256, 60) == pytest.approx(3, abs=0.15)


@pytest.mark.long
def test_the_squared_change_grows_as_depth_cubed_under_sign_updates_too():
    """The theorem is for SGD. Signs add what is not correlated with the gradient and
    grows as depth, which is still seen in networks of four layers."""
    assert relu_slope("adam", (8, 16, 32, 64), 512, 40) == pytest.approx(3, abs=0.15)

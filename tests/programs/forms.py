"""Layers in a list, a stack or a loop: what one of them does, in each form.

A layer is a function of its parameters (or of those of all layers, too) and of the
values that it changes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from . import kit
from .plain import norm

FORMS = ("list", "stack", "scan", "loop", "checkpoint")
ALL = {}


def mlp(w, x):
    return jax.nn.gelu(norm(x) @ w["u"]) @ w["d"]


def attention(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) / q.shape[-1]) @ v


def repeated(layer, state, weights, form):
    """The values after all layers."""
    if form == "scan":
        return lax.scan(lambda s, w: (layer(w, s), None), state, weights)[0]
    if form == "checkpoint":
        step = jax.checkpoint(lambda s, w: (layer(w, s), None))
        return lax.scan(step, state, weights)[0]
    stacked = form != "list"
    number = len(jax.tree.leaves(weights)[0]) if stacked else len(weights)
    at = (lambda i: jax.tree.map(lambda x: x[i], weights)) if stacked else weights.__getitem__  # fmt: skip
    if form == "loop":
        return lax.fori_loop(0, number, lambda i, s: layer(at(i), s), state)
    for i in range(number):
        state = layer(at(i), state)
    return state


def layers(own, shared=lambda n: {}):
    """Add a network: the shapes of a layer's parameters, and of all other ones."""

    def add(network):
        def make(form, n, depth):
            def call(p, x):
                x = x @ p["in"]
                y = network(p, x, lambda f, s: repeated(f, s, p["layers"], form))
                return norm(y) @ p["out"]

            shapes = own(n) | {"u": (n, n), "d": (n, n)}
            p = kit.zeros(**{"in": (5, n), "out": (n, 3)}, **shared(n))
            stacks = {k: (depth, *shape) for k, shape in shapes.items()}
            is_list = form == "list"
            p["layers"] = kit.layers(depth, **shapes) if is_list else kit.zeros(**stacks)  # fmt: skip
            return call, p

        ALL[network.__name__] = make
        return network

    return add


NONE = lambda n: {}


@layers(lambda n: {"q": (n, n)}, lambda n: {"first": (3, n), "at": (3, n)})
def queries_that_start_as_parameters(p, x, run):
    def layer(w, z):
        return z + mlp(w, z + attention((norm(z) + p["at"]) @ w["q"], x, x))

    return run(layer, jnp.broadcast_to(p["first"], (2, 3, x.shape[-1])))


@layers(lambda n: {"g": (n,)}, lambda n: {"first": (n,)})
def two_streams_of_which_one_starts_as_a_parameter(p, x, run):
    def layer(w, state):
        x, y = state
        y = norm(y + mlp(w, x + y)) * w["g"]
        return x + jax.nn.relu(norm(y)) @ w["d"], y

    x, y = run(layer, (x, jnp.broadcast_to(p["first"], x.shape)))
    return norm(x) + y


@layers(NONE, lambda n: {"cls": (n,), "at": (7, n)})
def class_token_and_positions(p, x, run):
    x = jnp.concatenate([jnp.broadcast_to(p["cls"], (2, 1, x.shape[-1])), x], 1)
    return run(lambda w, x: x + mlp(w, x), x + p["at"])[:, 0]


@layers(lambda n: {"prompt": (3, n)})
def prompts_of_each_layer(p, x, run):
    def layer(w, x):
        prompt = jnp.broadcast_to(w["prompt"], (2, 3, x.shape[-1]))
        y = jnp.concatenate([prompt, norm(x)], 1)
        return x + mlp(w, attention(y, y, y))[:, 3:]

    return run(layer, x)


@layers(NONE, lambda n: {"c": (n, n)})
def condition_from_the_first_values(p, x, run):
    c = jnp.tanh(x.mean(1, keepdims=True) @ p["c"])
    return run(lambda w, x: x + mlp(w, norm(x) + c), x)


@layers(NONE, lambda n: {"m": (n, 2 * n)})
def shifts_and_gates_from_the_first_values(p, x, run):
    shift, gate = jnp.split(jax.nn.silu(x.mean(1, keepdims=True)) @ p["m"], 2, -1)
    return run(lambda w, x: x + gate * mlp(w, norm(x) + shift), x)


@layers(lambda n: {"m": (n, n)})
def first_values_times_a_kernel_of_each_layer(p, x, run):
    first = norm(x)
    return run(lambda w, x: x + mlp(w, x) + first @ w["m"], x)


@layers(lambda n: {"m": (n, 2 * n)})
def modulations_of_each_layer(p, x, run):
    c = jax.nn.silu(x.mean(1, keepdims=True))

    def layer(w, x):
        scale, shift = jnp.split(c @ w["m"], 2, -1)
        return x + mlp(w, norm(x) * (1 + scale) + shift)

    return run(layer, x)


@layers(NONE, lambda n: {"start": (n, 2)})
def positions_that_layers_move(p, x, run):
    def layer(w, state):
        x, at = state
        apart = at[:, :, None] - at[:, None]
        m = mlp(w, norm(x) + (apart**2).sum((-1, -2))[..., None])
        return x + m, at + (apart * m[:, :, None, :1]).mean(2)

    return run(layer, (x, x @ p["start"]))[0]


@layers(lambda n: {"o": (n, n)})
def outputs_of_all_layers(p, x, run):
    def layer(w, state):
        x, y = state
        x = x + mlp(w, x)
        return x, y + norm(x) @ w["o"]

    x, y = run(layer, (x, jnp.zeros_like(x)))
    return norm(x) + norm(y)


@layers(lambda n: {"m": (n, n), "k": (n, n)}, lambda n: {"memory": (n,)})
def memory_beside_the_stream(p, x, run):
    def layer(w, state):
        x, m = state
        x = x + mlp(w, norm(x) + m[:, None])
        return x, m + jnp.tanh(norm(x).mean(1) @ w["m"]) @ w["k"]

    return run(layer, (x, jnp.broadcast_to(p["memory"], (2, x.shape[-1]))))[0]


@layers(lambda n: {"r": (n, n), "h": (n,)})
def recurrences_with_a_start_of_each_layer(p, x, run):
    def layer(w, x):
        def step(h, y):
            h = jnp.tanh(h @ w["r"] + y)
            return h, h

        start = jnp.broadcast_to(w["h"], (2, x.shape[-1]))
        y = lax.scan(step, start, (norm(x) @ w["u"]).swapaxes(0, 1))[1]
        return x + y.swapaxes(0, 1) @ w["d"]

    return run(layer, x)


@layers(lambda n: {"g": (n,), "b": (n,)}, lambda n: {"f": (n,)})
def gains_of_a_layer_and_of_all(p, x, run):
    return run(lambda w, x: x + mlp(w, norm(x) * w["g"] * p["f"]) + w["b"], x)


@layers(lambda n: {"g": (n,)}, lambda n: {"f": (n,)})
def norms_after_the_addition(p, x, run):
    return run(lambda w, x: norm(x + mlp(w, x)) * w["g"], norm(x) * p["f"])


@layers(NONE, lambda n: {"a": (2,)})
def shares_of_a_stream_that_all_layers_learn(p, x, run):
    return run(lambda w, x: p["a"][0] * x + mlp(w, x), x)


@layers(NONE, lambda n: {"k": (n, n)})
def kernel_that_all_layers_share(p, x, run):
    return run(lambda w, x: x + mlp(w, jnp.tanh(norm(x) @ p["k"])), x)


@layers(lambda n: {"g": (n, n)})
def gates_that_shrink_the_stream(p, x, run):
    def layer(w, x):
        g = jax.nn.sigmoid(x @ w["g"])
        return g * mlp(w, x) + (1 - g) * x

    return run(layer, x)

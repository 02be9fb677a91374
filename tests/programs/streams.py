"""Residual streams that are not one chain of x + f(x): two streams, mixed values."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .kit import floats, layers, program, tokens, zeros
from .plain import S, X, attention, norm
from .transformers import flat, heads

ENDS = {"in": "I", "out": "O"}


def mlp(w, x):
    return jax.nn.gelu(norm(x) @ w["u"]) @ w["d"]


def unit(x, g=1.0):
    return g * x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


@program({**ENDS, r"b/\d/v": "Hb", r"b/\d/o": "He"}, deep=True)
def mixed_values_of_an_mlp(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, v=(n, n), o=(n, n))}

    def call(p, x):
        x, first = x @ p["in"], None
        for w in p["b"]:
            v = jnp.tanh(x) @ w["v"]
            first = v if first is None else first
            x = x + jnp.tanh(v + first) @ w["o"]
        return x @ p["out"]

    return p, X, call


@program({**ENDS, "(v|o)0": "Hb", "v": "Hb", "o": "He"}, deep=True)
def mixed_values_in_a_scan(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, v=(L, n, n), o=(L, n, n))

    def call(p, x):
        x = x @ p["in"]
        first = jnp.tanh(x) @ p["v"][0]

        def layer(x, w):
            v, o = w
            return x + jnp.tanh(jnp.tanh(x) @ v + first) @ o, None

        return lax.scan(layer, x, (p["v"], p["o"]))[0] @ p["out"]

    return p, X, call


@program(
    {**ENDS, r"b/\d/(q|k|v|u)": "Hb", r"b/\d/(o|d)": "He", r"b/\d/lam": "Fb"},
    deep=True,
)
def value_residual_of_the_first_layer(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    square = dict.fromkeys("qkvoud", (n, n))
    p |= {"b": layers(L, lam=(2,), **square)}

    def call(p, x):
        x, first = x @ p["in"], None
        for w in p["b"]:
            y = norm(x)
            q, k, v = (heads(y @ w[c], 4) for c in "qkv")
            first = v if first is None else first
            v = w["lam"][0] * v + w["lam"][1] * first
            x = x + flat(attention(q, k, v, 0.5)) @ w["o"]
            x = x + jnp.square(jax.nn.relu(norm(x) @ w["u"])) @ w["d"]
        return x @ p["out"]

    return p, S, call


REVERSIBLE = {**ENDS, r"(f|g)(/\d)?/u": "Hb", r"(f|g)(/\d)?/d": "He"}


@program(REVERSIBLE, deep=True)
def reversible_network_of_two_streams(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {name: layers(L, u=(n // 2, n), d=(n, n // 2)) for name in "fg"}

    def call(p, x):
        a, b = jnp.split(x @ p["in"], 2, -1)
        for f, g in zip(p["f"], p["g"], strict=True):
            a = a + mlp(f, b)
            b = b + mlp(g, a)
        return jnp.concatenate([a, b], -1) @ p["out"]

    return p, X, call


@program(REVERSIBLE, deep=True)
def reversible_network_that_subtracts_from_one_stream(n, L):
    p, inputs, _ = reversible_network_of_two_streams(n, L)

    def call(p, x):
        a, b = jnp.split(x @ p["in"], 2, -1)
        for f, g in zip(p["f"], p["g"], strict=True):
            a = a - mlp(f, b)
            b = b + mlp(g, a)
        return jnp.concatenate([a, b], -1) @ p["out"]

    return p, inputs, call


@program({**REVERSIBLE, "in2": "I"}, deep=True)
def reversible_network_whose_streams_read_a_scaled_input(n, L):
    p = zeros(**{"in": (5, n), "in2": (5, n), "out": (2 * n, 3)})
    p |= {name: layers(L, u=(n, n), d=(n, n)) for name in "fg"}

    def call(p, x):
        x = x / 255.0
        a, b = x @ p["in"], x @ p["in2"]
        for f, g in zip(p["f"], p["g"], strict=True):
            a = a + mlp(f, b)
            b = b + mlp(g, a)
        return jnp.concatenate([a, b], -1) @ p["out"]

    return p, X, call


@program(REVERSIBLE, deep=True)
def reversible_network_in_a_scan(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {name: zeros(u=(L, n // 2, n), d=(L, n, n // 2)) for name in "fg"}

    def call(p, x):
        def layer(streams, w):
            a, b = streams
            a = a + mlp(w[0], b)
            return (a, b + mlp(w[1], a)), None

        streams = tuple(jnp.split(x @ p["in"], 2, -1))
        streams, _ = lax.scan(layer, streams, (p["f"], p["g"]))
        return jnp.concatenate(streams, -1) @ p["out"]

    return p, X, call


@program({**ENDS, "u": "Hb", "d": "He"}, deep=True)
def while_loop_over_stacked_parameters(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, u=(L, n, n), d=(L, n, n))

    def call(p, x):
        def body(state):
            i, x = state
            return i + 1, x + mlp({"u": p["u"][i], "d": p["d"][i]}, x)

        _, x = lax.while_loop(lambda state: state[0] < L, body, (0, x @ p["in"]))
        return x @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def stream_collected_in_a_list_and_summed(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        outs = [x @ p["in"]]
        for w in p["b"]:
            outs.append(mlp(w, sum(outs)))
        return sum(outs) @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/c": "Ve"}, deep=True)
def bias_added_to_the_stream_after_the_branch(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n), c=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + mlp(w, x) + w["c"]
        return x @ p["out"]

    return p, X, call


@program({**ENDS, "u": "Hb", "d": "He", "c": "Ve"}, deep=True)
def bias_added_to_the_stream_in_a_scan(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= zeros(u=(L, n, n), d=(L, n, n), c=(L, n))

    def call(p, x):
        def layer(x, w):
            return x + mlp(w, x) + w["c"], None

        blocks = {name: p[name] for name in "udc"}
        return lax.scan(layer, x @ p["in"], blocks)[0] @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/(re|im)": "He"}, deep=True)
def residual_in_the_frequency_domain(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, re=(n, n), im=(n, n))}

    def call(p, x):
        x = jnp.fft.rfft(x @ p["in"], axis=1)
        for w in p["b"]:
            x = x + jnp.einsum("bti,io->bto", x, w["re"] + 1j * w["im"])
        return jnp.fft.irfft(x, n=6, axis=1) @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def additive_coupling_of_two_halves(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n // 2, n), d=(n, n // 2))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            a, b = jnp.split(x, 2, -1)
            x = jnp.concatenate([b + jax.nn.relu(a @ w["u"]) @ w["d"], a], -1)
        return x @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def half_of_the_stream_is_updated(n, L):
    """Additive coupling in place: x[:, :n/2] += f(x[:, n/2:])."""
    half = n // 2
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(half, n), d=(n, half))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x.at[:, :half].add(jax.nn.relu(x[:, half:] @ w["u"]) @ w["d"])
            x = jnp.roll(x, half, -1)
        return x @ p["out"]

    return p, X, call


@program(
    {**ENDS, r"b/\d/(w|o)": "Hb", r"b/\d/m": "Fm", r"b/\d/a": "Fb", r"b/\d/c": "Fe"},
    deep=True,
)
def hyper_connections_of_two_streams(n, L):
    """Learned numbers mix the streams, and add a block's result to each."""
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, w=(n, n), o=(n, n), m=(2, 2), a=(2,), c=(2,))}

    def call(p, x):
        h = jnp.broadcast_to((x @ p["in"])[:, None], (4, 2, n))
        for w in p["b"]:
            y = norm(jnp.einsum("bsd,s->bd", h, w["a"]))
            y = jax.nn.relu(y @ w["w"]) @ w["o"]
            mixed = jnp.einsum("bsd,st->btd", h, w["m"])
            h = mixed + y[:, None] * w["c"][:, None]
        return h.sum(1) @ p["out"]

    return p, X, call


# As in mHC, but for a matrix that is normalized once and a mean that is read.
@program({**ENDS, r"b/\d/m": "Om", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def copies_of_a_stream_mixed_by_a_matrix_of_each_example(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n), m=(2 * n, 4))}

    def call(p, x):
        h = jnp.stack([x @ p["in"]] * 2, 1)
        for w in p["b"]:
            m = jnp.exp(norm(h.reshape(4, -1)) @ w["m"]).reshape(-1, 2, 2)
            y = mlp(w, h.mean(1))
            h = (m / m.sum(-1, keepdims=True)) @ h + y[:, None]
        return norm(h.mean(1)) @ p["out"]

    return p, X, call


@program({**ENDS, "u": "Hb", "d": "He"}, deep=True, asks="count its own layers")
def layer_numbers_that_are_an_input(n, L, remedy=False):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, u=(L, n, n), d=(L, n, n))

    def call(p, x, numbers):
        def layer(x, i):
            return x + mlp({name: p[name].astype(x.dtype)[i] for name in "ud"}, x), None

        numbers = jnp.arange(len(p["u"])) if remedy else numbers
        return lax.scan(layer, x @ p["in"], numbers)[0] @ p["out"]

    return p, (*X, jnp.arange(L)), call


@program({**ENDS, "u": "Hb", "d": "He"}, deep=True, asks="count its own layers")
def number_of_layers_that_is_an_input(n, L, remedy=False):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, u=(L, n, n), d=(L, n, n))

    def call(p, x, number):
        def layer(i, x):
            return x + mlp({name: p[name][i] for name in "ud"}, x)

        number = len(p["u"]) if remedy else number
        return lax.fori_loop(0, number, layer, x @ p["in"]) @ p["out"]

    return p, (*X, jnp.array(L)), call


@program(
    {**ENDS, r"b/\d/0": "Hb", r"b/\d/1": "He"}, deep=True, asks="no residual stream"
)
def more_layers_in_each_of_two_branches(n, L, remedy=False):
    blocks, kernels = (L, 2) if remedy else (2, L)
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": [[jnp.zeros((n, n)) for _ in range(kernels)] for _ in range(blocks)]}

    def call(p, x):
        x = x @ p["in"]
        for block in p["b"]:
            y = x
            for w in block:
                y = jax.nn.relu(y) @ w
            x = x + y
        return x @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def stream_as_the_sum_of_a_stack(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        outs = [x @ p["in"]]
        for w in p["b"]:
            outs.append(mlp(w, jnp.stack(outs).sum(0)))
        return jnp.array(outs).sum((0, 1)) @ p["out"]

    return p, X, call


@program(REVERSIBLE, deep=True)
def reversible_network_whose_halves_are_set(n, L):
    p, half = zeros(**{"in": (5, n), "out": (n, 3)}), n // 2
    p |= {name: layers(L, u=(half, n), d=(n, half)) for name in "fg"}

    def call(p, x):
        x = x @ p["in"]
        for f, g in zip(p["f"], p["g"], strict=True):
            x = x.at[:, :half].set(x[:, :half] + mlp(f, x[:, half:]))
            y = x[:, half:] + mlp(g, x[:, :half])
            x = lax.dynamic_update_slice(x, y, (0, half))
        return x @ p["out"]

    return p, X, call


@program(REVERSIBLE, deep=True)
def reversible_network_whose_halves_are_added_to_or_set(n, L):
    p, half = zeros(**{"in": (5, n), "out": (n, 3)}), n // 2
    p |= {name: layers(L, u=(half, n), d=(n, half)) for name in "fg"}

    def call(p, x):
        x = x @ p["in"]
        for f, g in zip(p["f"], p["g"], strict=True):
            x = x.at[:, :half].add(mlp(f, x[:, half:]))
            x = x.at[:, half:].set(x[:, half:] + mlp(g, x[:, :half]))
        return x @ p["out"]

    return p, X, call


@program({**ENDS, "b/u": "Hb", "b/d": "He"}, deep=True)
def layers_in_a_scan_of_scans(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, b=dict(u=(L, n, n), d=(L, n, n)))

    def layer(x, w):
        return x + mlp(w, x), None

    def call(p, x):
        pairs = jax.tree.map(lambda w: w.reshape(-1, 2, *w.shape[1:]), p["b"])
        outer = jax.checkpoint(lambda x, w: lax.scan(layer, x, w))
        return lax.scan(outer, x @ p["in"], pairs)[0] @ p["out"]

    return p, X, call


@program(REVERSIBLE, deep=True)
def reversible_network_of_single_examples_whose_halves_are_updated(n, L):
    p, half = zeros(**{"in": (5, n), "out": (n, 3)}), n // 2
    p |= {name: layers(L, u=(half, n), d=(n, half)) for name in "fg"}

    def one(p, x):
        x = x @ p["in"]
        for f, g in zip(p["f"], p["g"], strict=True):
            y = x[:, :half] + mlp(f, x[:, half:])
            x = lax.dynamic_update_slice(x, y, (0, 0))
            x = x.at[:, half:].set(x[:, half:] + mlp(g, x[:, :half]))
        return x @ p["out"]

    return p, (floats(2, 4, 5),), lambda p, x: jax.vmap(one, (None, 1))(p, x)


@program({**ENDS, r"[abc]/\d/(a|u|d)": "Hb", r"[abc]/\d/o": "He"}, deep=True)
def modules_with_a_branch_that_are_summed_or_subtracted(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    kernels = dict.fromkeys("audo", (n, n))
    p |= {name: layers(L, **kernels) for name in "abc"}

    def module(w, x):
        y = x @ w["a"]
        return jax.nn.relu(y + mlp(w, y)) @ w["o"]

    def call(p, x):
        x = x @ p["in"]
        for a, b, c in zip(p["a"], p["b"], p["c"], strict=True):
            x = sum([x, module(a, x)])  # starts with 0 + x
            x = x - (-module(b, x))
            x = x - module(c, x)
        return x @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/b": "Ve"}, deep=True)
def biases_added_to_a_stream_beside_its_branches(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n), b=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + w["b"] + mlp(w, x)
        return x @ p["out"]

    return p, X, call


@program({"in": "I", r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/head": "Oe"}, deep=True)
def heads_of_all_layers_that_are_added_up(n, L):
    p = zeros(**{"in": (5, n)}) | {"b": layers(L, u=(n, n), d=(n, n), head=(n, 3))}

    def call(p, x):
        x, heads = x @ p["in"], []
        for w in p["b"]:
            x = x + mlp(w, x)
            heads.append(norm(x) @ w["head"])
        return functools.reduce(operator.add, heads)

    return p, X, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/head": "Oe"}, deep=True)
def heads_of_all_layers_beside_the_readout(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n), head=(n, 3))}

    def call(p, x):
        x, total = x @ p["in"], 0.0
        for w in p["b"]:
            x = x + mlp(w, x)
            total = total + norm(x) @ w["head"]
        return total + x @ p["out"]

    return p, X, call


@program({"in": "I", r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/head": "Oe"}, deep=True)
def heads_of_all_layers_added_to_the_inputs(n, L):
    p = zeros(**{"in": (3, n)}) | {"b": layers(L, u=(n, n), d=(n, n), head=(n, 3))}

    def call(p, x):
        x, total = x @ p["in"], x
        for w in p["b"]:
            x = x + mlp(w, x)
            total = total + norm(x) @ w["head"]
        return total

    return p, (floats(4, 3),), call


@program(REVERSIBLE, deep=True)
def reversible_network_in_a_scan_over_joined_halves(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {name: zeros(u=(L, n // 2, n), d=(L, n, n // 2)) for name in "fg"}

    def call(p, x):
        def layer(x, w):
            a, b = jnp.split(x, 2, -1)
            a = a + mlp(w[0], b)
            return jnp.concatenate([a, b + mlp(w[1], a)], -1), None

        return lax.scan(layer, x @ p["in"], (p["f"], p["g"]))[0] @ p["out"]

    return p, X, call


@program({**ENDS, "u": "Hb", "d": "He"}, deep=True)
def additive_coupling_in_a_scan_whose_halves_swap(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, u=(L, n // 2, n), d=(L, n, n // 2))

    def call(p, x):
        def layer(halves, w):
            a, b = halves
            return (b + mlp(w, a), a), None

        start = tuple(jnp.split(x @ p["in"], 2, -1))
        halves, _ = lax.scan(layer, start, {name: p[name] for name in "ud"})
        return jnp.concatenate(halves, -1) @ p["out"]

    return p, X, call


@program(
    {
        **ENDS,
        "t": "I",
        "shared": "H",
        r"b/\d/table": "Vb",
        r"b/\d/u": "Hb",
        r"b/\d/d": "He",
    },
    deep=True,
)
def gates_that_all_layers_share_as_in_pixart(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, t=(4, n), shared=(n, 3 * n))
    p |= {"b": layers(L, table=(3, n), u=(n, n), d=(n, n))}

    def call(p, x, t):
        x = x @ p["in"]
        c = jax.nn.silu(jnp.sin(t[:, None] * jnp.arange(4.0)) @ p["t"]) @ p["shared"]
        c = c.reshape(-1, 3, x.shape[-1])
        for w in p["b"]:
            shift, scale, gate = jnp.split(w["table"][None] + c, 3, 1)
            y = norm(x) * (1 + scale) + shift
            x = x + gate * (jax.nn.gelu(y @ w["u"]) @ w["d"])
        return x @ p["out"]

    return p, (*S, floats(2)), call


@program({**ENDS, "u": "Hb", "d": "He"}, deep=True)
def layers_that_are_left_out_by_keys_in_a_scan(n, L):
    """Each layer has data of its own, but the loop is not one over time."""
    p = zeros(**{"in": (5, n), "out": (n, 3)}, u=(L, n, n), d=(L, n, n))

    def call(p, x, key):
        def layer(x, w):
            u, d, key = w
            return jnp.where(
                jax.random.bernoulli(key), x + mlp({"u": u, "d": d}, x), x
            ), None

        keys = jax.random.split(key, L)
        return lax.scan(layer, x @ p["in"], (p["u"], p["d"], keys))[0] @ p["out"]

    return p, (*X, jax.ShapeDtypeStruct((2,), jnp.uint32)), call


@program({**ENDS, "c": "I", "gate": "H", "u": "Hb", "d": "He"}, deep=True)
def gate_of_all_layers_in_a_scan(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, c=(2, n), gate=(n, n))
    p |= zeros(u=(L, n, n), d=(L, n, n))

    def call(p, x, c):
        gate = jax.nn.silu(c @ p["c"]) @ p["gate"]

        def layer(x, w):
            return x + gate * mlp(w, x), None

        blocks = {name: p[name] for name in "ud"}
        return lax.scan(layer, x @ p["in"], blocks)[0] @ p["out"]

    return p, (*X, floats(4, 2)), call


UP_DOWN = {**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}
ENCODER = {"src": "I", r"e/\d/u": "Hb", r"e/\d/d": "He"}


def fed(n, L, add, encoder=(), **more):
    """Each layer adds a value that it does not compute from the stream."""
    p = zeros(**{"in": (7, n), "out": (n, 7)}, src=(5, n))
    p |= {"b": layers(L, u=(n, n), d=(n, n), **more), "e": encoder}

    def call(p, x, e):
        x, e = p["in"][x], e @ p["src"]
        for w in p["e"]:
            e = e + mlp(w, e)
        for w in p["b"]:
            x = x + mlp(w, x)
            x = add(x, unit(e), w)
        return unit(x) @ p["out"]

    return p, (tokens(2, 6), floats(2, 6, 5)), call


@program({**UP_DOWN, **ENCODER, r"b/\d/g": "Ve"}, deep=True)
def encoder_that_each_layer_adds_times_a_gain(n, L):
    encoder = layers(L, u=(n, n), d=(n, n))
    return fed(n, L, lambda x, e, w: x + w["g"] * e, encoder, g=(n,))


@program({**UP_DOWN, "src": "I", r"e/\d/(u|d)": "H", r"b/\d/g": "Ve"}, deep=True)
def encoder_of_fixed_depth_that_each_layer_adds(n, L):
    encoder = layers(2, u=(n, n), d=(n, n))
    return fed(n, L, lambda x, e, w: x + w["g"] * e, encoder, g=(n,))


@program({**UP_DOWN, "src": "I", r"b/\d/g": "Fe"}, deep=True)
def features_that_each_layer_adds_times_a_number(n, L):
    return fed(n, L, lambda x, e, w: x + w["g"] * e, g=())


@program(
    {**ENDS, r"b/\d/(u|d)": "Hb", "src": "I"}, deep=True, asks="multiply this branch by"
)
def features_that_each_layer_adds(n, L, remedy=False):
    share = 2 / L if remedy else 1
    p = zeros(**{"in": (7, n), "out": (n, 7)}, src=(5, n))
    p |= {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x, e):
        x, e = p["in"][x], jnp.tanh(e @ p["src"])
        for w in p["b"]:
            x = x + mlp(w, x) * share
            x = x + e * share
        return unit(x) @ p["out"]

    return p, (tokens(2, 6), floats(2, 6, 5)), call


def embedded_again(n, L, add, **gains):
    """Each layer adds the embedding again, in a scan."""
    p = zeros(**{"in": (7, n), "out": (n, 7)}, **gains)
    p |= zeros(u=(L, n, n), d=(L, n, n))

    def call(p, x):
        first = unit(p["in"][x])

        def layer(x, w):
            x = add(x, first, w)
            return x + mlp(w, x), None

        x, _ = lax.scan(layer, first, {k: p[k] for k in ("u", "d", *gains)})
        return unit(x) @ p["out"]

    return p, (tokens(2, 6),), call


@program({**ENDS, "u": "Hb", "d": "He", "g": "Ve"}, deep=True)
def embedding_that_each_layer_adds_times_a_gain(n, L):
    return embedded_again(n, L, lambda x, e, w: x + w["g"] * e, g=(L, n))


@program({**ENDS, "u": "Hb", "d": "He", "lam": "Fsm"}, deep=True)
def embedding_and_stream_that_each_layer_mixes(n, L):
    def mix(x, e, w):
        return w["lam"][0] * x + w["lam"][1] * e

    return embedded_again(n, L, mix, lam=(L, 2))


@program({**UP_DOWN, "g": "V"}, deep=True)
def one_gain_on_what_all_layers_added(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, g=(n,))

    def call(p, x):
        x = y = x @ p["in"]
        for w in p["b"]:
            y = y + mlp(w, y)
        return (x + p["g"] * (y - x)) @ p["out"]

    return p | {"b": layers(L, u=(n, n), d=(n, n))}, X, call


@program({**ENDS, r"b/\d/(u|d)": "Hb", r"b/\d/g": "Ve"}, deep=True)
def gain_of_each_layer_on_the_stream_after_two_steps(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = x + mlp(w, x)
            x = x + w["g"] * (y + mlp(w, y))
        return unit(x) @ p["out"]

    return p | {"b": layers(L, u=(n, n), d=(n, n), g=(n,))}, X, call


@program({**ENDS, r"b/\d/[uv]": "Hb", r"b/\d/[de]": "He", r"b/\d/g\d": "Vm"}, deep=True)
def gains_on_the_stream_before_each_of_two_steps(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys("uvde", (n, n)), g1=(n,), g2=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = w["g1"] * x + jax.nn.relu(unit(x) @ w["u"]) @ w["d"]
            x = w["g2"] * x + jax.nn.relu(unit(x) @ w["v"]) @ w["e"]
        return unit(x) @ p["out"]

    return p, X, call


@program({**UP_DOWN, "start": "V", "k|v": "H"}, deep=True)
def latents_that_read_twice_by_the_same_kernels(n, L):
    """The second time is between layers, but there are no more of these branches."""
    p = zeros(**{"in": (5, n), "out": (n, 3)}, start=(3, n), k=(n, n), v=(n, n))

    def call(p, x):
        x, y = x @ p["in"], jnp.broadcast_to(p["start"], (2, 3, n))
        for _ in range(2):
            y = y + jax.nn.relu(unit(y) @ p["k"] + x.mean(1, keepdims=True)) @ p["v"]
            for w in p["b"]:
                y = y + mlp(w, y)
        return y.mean(1) @ p["out"]

    return p | {"b": layers(L, u=(n, n), d=(n, n))}, S, call


# What only a comparison reads has no gradient.
@program({**ENDS, "u": "Hba", "d": "Hea", "halt": "Oma"}, deep=True)
def steps_of_one_layer_that_a_comparison_ends(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, u=(n, n), d=(n, n), halt=(n, 1))

    def call(p, x):
        def step(state, _):
            x, runs = state
            x = jnp.where(runs, x + mlp(p, x), x)
            return (x, runs & (x @ p["halt"] < 0.9)), None

        start = x @ p["in"], jnp.ones((*x.shape[:-1], 1), bool)
        return unit(lax.scan(step, start, length=L)[0][0]) @ p["out"]

    return p, X, call


@program({**ENDS, "u": "Hba", "d": "Hea", "times": "Ve"}, deep=True)
def times_that_are_added_before_each_step_of_one_layer(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, u=(n, n), d=(n, n), times=(L, n))

    def call(p, x):
        x = x @ p["in"]
        for i in range(L):
            x = x + p["times"][i]
            x = x + mlp(p, x)
        return unit(x) @ p["out"]

    return p, X, call


@program({**ENDS, "u": "Hb", "d": "He", "times": "Ve"}, deep=True)
def times_that_are_added_before_each_layer_of_a_scan(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, times=(L, n))
    p |= zeros(u=(L, n, n), d=(L, n, n))

    def call(p, x):
        def layer(x, w):
            x = x + w["times"]
            return x + mlp(w, x), None

        blocks = {name: p[name] for name in ("u", "d", "times")}
        return unit(lax.scan(layer, x @ p["in"], blocks)[0]) @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/(u|d)": "Hb"}, deep=True)
def streams_that_move_by_a_share_toward_the_next_value(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + (mlp(w, x) - x) / len(p["b"])
        return unit(x) @ p["out"]

    return p, X, call


@program(UP_DOWN, deep=True)
def unet_whose_middle_value_is_added_to_itself(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x, kept = x @ p["in"], []
        for i, w in enumerate(p["b"]):
            x = x if i < L // 2 else x + kept.pop()
            x = x + mlp(w, x)
            kept += [x] if i < L // 2 else []
        return unit(x) @ p["out"]

    return p, X, call


@program(
    {**ENDS, r"b/\d/(u|d)": "Hb", r"b/\d/a": "Fm"},
    deep=True,
    asks="does not end in parameters that could carry its multiplier",
)
def embedding_that_each_layer_adds_to_a_share_of_the_stream(n, L, remedy=False):
    share = 2 / L if remedy else 1
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n), a=())}

    def call(p, x):
        x = first = unit(x @ p["in"])
        for w in p["b"]:
            x = x + mlp(w, x) * share
            x = w["a"] * x + first * share
        return unit(x) @ p["out"]

    return p, X, call


@program(
    {**ENDS, "u|d": "Hb"},
    deep=True,
    asks="does not end in parameters that could carry its multiplier",
)
def share_of_the_embedding_that_each_layer_of_a_scan_adds(n, L, remedy=False):
    share = 2 / L if remedy else 1
    p = zeros(**{"in": (7, n), "out": (n, 7)}, u=(L, n, n), d=(L, n, n))

    def call(p, x):
        first = unit(p["in"][x])

        def layer(x, w):
            x = x + mlp(w, x) * share
            return 0.5 * x + 0.5 * first * share, None

        x, _ = lax.scan(layer, first, {k: p[k] for k in ("u", "d")})
        return unit(x) @ p["out"]

    return p, (tokens(2, 6),), call


@program({**ENDS, r"g/\d/\d/(u|d)": "Hb"}, deep=True, asks="multiply this branch by")
def groups_of_blocks_within_a_skip(n, L, remedy=False):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"g": [layers(2, u=(n, n), d=(n, n)) for _ in range(L)]}

    def call(p, x):
        x = x @ p["in"]
        for group in p["g"]:
            kept = x
            for w in group:
                x = x + 0.2 * mlp(w, x)
            x = kept + 0.2 * x * (2 / L if remedy else 1)
        return unit(x) @ p["out"]

    return p, X, call


@program(
    {**ENDS, r"b/\d/(q|k|v|u)": "Hb", r"b/\d/(o|d)": "He"},
    deep=True,
    carries={r"b/\d/q": 0.5},
)
def attention_to_the_keys_of_all_layers_before(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys("qkvoud", (n, n)))}

    def call(p, x):
        x, keys, values = x @ p["in"], [], []
        for w in p["b"]:
            y = norm(x)
            keys, values = [*keys, y @ w["k"]], [*values, y @ w["v"]]
            k, v = jnp.concatenate(keys, 1), jnp.concatenate(values, 1)
            x = x + attention(y @ w["q"], k, v, n**-0.5) @ w["o"]
            x = x + mlp(w, norm(x))
        return norm(x) @ p["out"]

    return p, S, call


def realformer(n, L, share=1.0, of=lambda x: x):
    """Each layer adds its logits to those of the layer before."""
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys("qkvoud", (n, n)))}

    def call(p, x):
        x, logits = x @ p["in"], 0
        for w in p["b"]:
            y = unit(x)
            q, k = of(y @ w["q"]), of(y @ w["k"])
            logits = logits + share * q @ k.swapaxes(-1, -2) / n
            x = x + jax.nn.softmax(logits) @ (y @ w["v"]) @ w["o"]
            x = x + mlp(w, unit(x))
        return unit(x) @ p["out"]

    return p, X, call


REALFORMER = {**ENDS, r"b/\d/(q|k|v|u)": "Hb", r"b/\d/(o|d)": "He"}


@program(REALFORMER, deep=True, carries={r"b/\d/q": 0.333333})
def logits_added_to_those_of_the_layer_before_as_in_realformer(n, L):
    return realformer(n, L)


@program(REALFORMER, deep=True)
def logits_of_layers_of_which_the_mean_is_taken(n, L):
    return realformer(n, L, 1 / L)


@program(REALFORMER, deep=True, asks="multiply them by 0.3333")
def logits_of_normalized_queries_that_layers_add_up(n, L, remedy=False):
    return realformer(n, L, 2 / L if remedy else 1.0, norm)


def scanned_realformer(n, L, share):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": zeros(**dict.fromkeys("qkvoud", (L, n, n)))}

    def call(p, x):
        def layer(state, w):
            x, logits = state
            y = unit(x)
            logits += (y @ w["q"]) @ (y @ w["k"]).swapaxes(-1, -2) / n
            logits *= share
            x = x + jax.nn.softmax(logits) @ (y @ w["v"]) @ w["o"]
            return (x + mlp(w, unit(x)), logits), None

        (x, _), _ = jax.lax.scan(layer, (x @ p["in"], jnp.zeros((4, 4))), p["b"])
        return unit(x) @ p["out"]

    return p, X, call


SCANNED = {**ENDS, "b/(q|k|v|u)": "Hb", "b/(o|d)": "He"}


@program(SCANNED, deep=True, carries={"b/q": 0.333333})
def logits_that_a_scan_over_layers_adds_up(n, L):
    return scanned_realformer(n, L, 1.0)


@program(SCANNED, deep=True)
def logits_that_each_layer_of_a_scan_averages_with_those_before(n, L):
    return scanned_realformer(n, L, 0.5)


@program({**ENDS, r"b/\d/(u|d)": "Hb"}, deep=True)
def shares_of_stream_and_branch_that_sum_to_one(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = (1 - 1 / L) * x + mlp(w, x) / L
        return unit(x) @ p["out"]

    return p, X, call


@program(
    {
        **{"in": "I", "im": "I", "out": "O", "p1": "H", "p2": "H"},
        r"see/\d/u": "H",
        r"see/\d/d": "H",
        r"b/\d/u": "Hb",
        r"b/\d/d": "He",
    },
    deep=True,
)
def tokens_beside_those_of_an_encoder_of_fixed_depth(n, L):
    p = zeros(**{"in": (11, n), "im": (7, n), "out": (n, 11)}, p1=(n, n), p2=(n, n))
    p |= {"see": layers(2, u=(n, n), d=(n, n)), "b": layers(L, u=(n, n), d=(n, n))}

    def call(p, image, t):
        x = image @ p["im"]
        for w in p["see"]:
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
        x = jax.nn.gelu(x @ p["p1"]) @ p["p2"]
        x = jnp.concatenate([x, p["in"][t]], 1)
        for w in p["b"]:
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
        return norm(x) @ p["out"]

    return p, (floats(2, 4, 7), tokens(2, 5)), call


@program(
    {**ENDS, "other": "I", r"(a|b)/\d/(u|d)": "Hb"},
    deep=True,
    asks="multiply this branch by",
)
def streams_that_exchange_shares(n, L, remedy=False):
    p = zeros(**{"in": (5, n), "other": (5, n), "out": (n, 3)})
    p |= {name: layers(L, u=(n, n), d=(n, n)) for name in "ab"}
    share = 2 / L if remedy else 1

    def call(p, x):
        x, y = x @ p["in"], x @ p["other"]
        for a, b in zip(p["a"], p["b"], strict=True):
            x, y = x + mlp(a, x) * share, y + mlp(b, y) * share
            x, y = x + 0.1 * y * share, y + 0.1 * x * share
        return unit(x + y) @ p["out"]

    return p, X, call


@program(
    {**ENDS, "px": "I", r"b/\d/\w+/u": "Hb", r"b/\d/\w+/d|b/\d/up": "He"}, deep=True
)
def tokens_beside_a_class_token_that_some_branches_leave_out(n, L):
    """As in TNT, whose patches add pixels, and in TimeSformer's attention over time."""
    p = zeros(**{"in": (5, n), "px": (5, n), "out": (n, 3)})
    w = {k: {"u": (n, n), "d": (n, n)} for k in ("pixel", "time", "space")}
    p |= {"b": layers(L, up=(n, n), **w)}

    def call(p, x):
        x, pixels = x @ p["in"], x[:, 1:] @ p["px"]
        for w in p["b"]:
            pixels = pixels + mlp(w["pixel"], pixels)
            more = norm(pixels) @ w["up"]
            x = jnp.concatenate([x[:, :1], x[:, 1:] + more], 1)
            first, rest = x[:, :1], x[:, 1:] + mlp(w["time"], x[:, 1:])
            y = mlp(w["space"], jnp.concatenate([rest, first], 1))
            y = jnp.concatenate([y[:, -1:], y[:, :-1]], 1)
            x = jnp.concatenate([first, rest], 1) + y
        return norm(x)[:, 0] @ p["out"]

    return p, S, call


@program(
    {
        **{"in": "I", "second": "H", "out": "O"},
        r"b/\d/[uv]": "Hb",
        r"b/\d/[dexy]": "He",
    },
    deep=True,
)
def two_streams_that_exchange_before_activations(n, L):
    """As the resolutions of HRNet."""
    p = zeros(**{"in": (5, n), "second": (n, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys("uvdexy", (n, n)))}

    def call(p, x):
        x = jax.nn.relu(x @ p["in"])
        y = jax.nn.silu(x @ p["second"])
        for w in p["b"]:
            x = jax.nn.relu(x + jax.nn.relu(x @ w["u"]) @ w["d"])
            y = jax.nn.silu(y + jax.nn.relu(y @ w["v"]) @ w["e"])
            x, y = jax.nn.relu(x + y @ w["x"]), jax.nn.silu(y + x @ w["y"])
        return (x + y) @ p["out"]

    return p, S, call


@program(
    {
        **ENDS,
        "img": "I",
        r"b/\d/x?[qkvu]": "Hb",
        r"b/\d/x?[od]": "He",
        r"b/\d/g\d": "Vm",
    },
    deep=True,
)
def two_streams_with_norms_after_of_which_one_reads_its_start_again(n, L):
    """As the prompts of Segment Anything, which are added to queries in each layer."""
    p = zeros(**{"in": (5, n), "img": (5, n), "out": (n, 3)})
    square = dict.fromkeys(
        ("q", "k", "v", "o", "u", "d", "xq", "xk", "xv", "xo"), (n, n)
    )
    p |= {"b": layers(L, g1=(n,), g2=(n,), g3=(n,), **square)}

    def read(w, name, *values):
        q, k, v = (
            heads(y @ w[name + c], 4) for c, y in zip("qkv", values, strict=True)
        )
        return flat(attention(q, k, v, 0.5)) @ w[name + "o"]

    def call(p, x):
        start, x = x[:, :2] @ p["in"], x @ p["img"]
        y = start
        for w in p["b"]:
            z = y + start
            y = unit(y + read(w, "", z, z, y), w["g1"])
            y = unit(y + jax.nn.relu(y @ w["u"]) @ w["d"], w["g2"])
            x = unit(x + read(w, "x", x, y + start, y), w["g3"])
        return (y.mean(1) + x.mean(1)) @ p["out"]

    return p, S, call


@program(
    {**ENDS, "lat": "V", r"b/\d/c?[qkv]": "Hb", r"b/\d/c?o": "He", r"b/\d/[gs]": "Vm"},
    deep=True,
)
def learned_queries_alone_with_norms_after_their_branches(n, L):
    """As the first layer of a Q-Former, which reads nothing but parameters."""
    p = zeros(**{"in": (5, n), "lat": (3, n), "out": (n, 3)})
    square = dict.fromkeys(("q", "k", "v", "o", "cq", "ck", "cv", "co"), (n, n))
    p |= {"b": layers(L, g=(2, n), s=(2, n), **square)}

    def read(w, name, y, x):
        q, k, v = (
            heads(z @ w[name + c], 4) for c, z in zip("qkv", (y, x, x), strict=True)
        )
        return flat(attention(q, k, v, 0.5)) @ w[name + "o"]

    def call(p, x):
        x, y = x @ p["in"], jnp.broadcast_to(p["lat"], (2, 3, n))
        for w in p["b"]:
            y = unit(y + read(w, "", y, y), w["g"][0]) + w["s"][0]
            y = unit(y + read(w, "c", y, x), w["g"][1]) + w["s"][1]
        return y.mean(1) @ p["out"]

    return p, S, call


def momentum(x, v, f, share):
    v = 0.9 * v + share * f(x)
    return x + v, v


def velocity(x, v, f, share):
    v = v + f(x)
    return x + share * v, v


def velocity_of_before(x, v, f, share):
    x = x + share * v
    return x, v + f(x)


def second_difference(x, before, f, share):
    return 2 * x - before + f(x), x


def extrapolated(x, before, f, share):
    x, before = x + 0.9 * (x - before), x
    return x + f(x), before


def shares_of_two_values(x, before, f, share):
    return 1.9 * x - 0.9 * before + f(x), x


def adams_bashforth(x, before, f, share):
    now = f(x)
    return x + 1.5 * now - 0.5 * before, now


def adams_bashforth_at_once(x, before, f, share):
    now = f(x)
    return x + (-0.5 * before + 1.5 * now), now


# What earlier layers added is added again. If nothing damps it, the sum grows with the
# square of depth, at any size of the branches.
for step, looped in itertools.product(
    (
        momentum,
        velocity,
        velocity_of_before,
        second_difference,
        extrapolated,
        shares_of_two_values,
        adams_bashforth,
        adams_bashforth_at_once,
    ),
    (False, True),
):

    def make(n, L, remedy=False, step=step, looped=looped):
        step, share = (velocity, 2 / L) if remedy else (step, 1.0)
        p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}  # fmt: skip
        if looped:
            p["b"] = zeros(u=(L, n, n), d=(L, n, n))

        def call(p, x):
            x = x @ p["in"]
            differs = step in (extrapolated, second_difference, shares_of_two_values)
            state = x, x if differs else jnp.zeros_like(x)

            def layer(state, w):
                return step(*state, lambda x: mlp(w, x), share), None

            if looped:
                state, _ = lax.scan(layer, state, p["b"])
            else:
                for w in p["b"]:
                    state, _ = layer(state, w)
            return norm(state[0]) @ p["out"]

        return p, X, call

    make.__name__ = f"{step.__name__}_of_layers_in_a_{'scan' if looped else 'list'}"
    grows = step in (velocity, velocity_of_before, second_difference)
    program(
        {**ENDS, r"b/(\d/)?u": "Hb", r"b/(\d/)?d": "He"},
        deep=True,
        asks=r"square of their number.* \(base depth / depth\) \* v" if grows else "",
    )(make)


@program(
    {**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"},
    deep=True,
    asks=r"the first of them does not; .* v = jnp.zeros_like\(x\) before the first",
)
def momentum_that_the_first_layer_does_not_have(n, L, remedy=False):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        v = jnp.zeros_like(x) if remedy else None
        for w in p["b"]:
            v = mlp(w, x) if v is None else 0.9 * v + mlp(w, x)
            x = x + v
        return norm(x) @ p["out"]

    return p, X, call


@program(
    {**ENDS, "node": "V", r"b/\d/(u|v)": "Hb", r"b/\d/(d|w)": "He"},
    deep=True,
    asks=r"square of their number.* \(base depth / depth\) \* v",
)
def virtual_node_that_is_added_to_all_nodes(n, L, remedy=False):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, node=(n,))
    p |= {"b": layers(L, **dict.fromkeys("udvw", (n, n)))}

    def call(p, x, i, j, graph):
        x, v = x @ p["in"], jnp.broadcast_to(p["node"], (2, n))
        for w in p["b"]:
            x = x + (2 / L if remedy else 1.0) * v[graph]
            pooled = v + jax.ops.segment_sum(x, graph, 2)
            v = v + jax.nn.relu(norm(pooled) @ w["v"]) @ w["w"]
            x = x + mlp(w, x + jax.ops.segment_sum(x[i], j, 6))
        return norm(x) @ p["out"]

    return p, (floats(6, 5), tokens(9), tokens(9), tokens(6)), call


# The last layer normalizes both, which is no branch of a third stream.
@program({**ENDS, r"b/\d/(u|r)": "Hb", r"b/\d/(d|w)": "He"}, deep=True)
def stream_and_a_memory_that_starts_at_zero(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys("udrw", (n, n)))}

    def call(p, x):
        x = x @ p["in"]
        memory = jnp.zeros_like(x)
        for w in p["b"]:
            x = x + jax.nn.gelu(norm(x) @ w["u"] + memory @ w["r"]) @ w["d"]
            memory = memory + jnp.tanh(norm(x)) @ w["w"]
        return (norm(x) + norm(memory)) @ p["out"]

    return p, X, call


# The stream after the last layer is read by its output alone, or beside their sum.
for looped, alone in itertools.product((False, True), (False, True)):

    def make(n, L, looped=looped, alone=alone):
        p = zeros(**{"in": (5, n), "out": (n, 3)})
        p["b"] = layers(L, u=(n, n), d=(n, n), o=(n, n))
        if looped:
            p["b"] = zeros(u=(L, n, n), d=(L, n, n), o=(L, n, n))

        def call(p, x):
            def layer(state, w):
                x, y = state
                x = x + mlp(w, x)
                return (x, y + norm(x) @ w["o"]), None

            x = x @ p["in"]
            state = x, jnp.zeros_like(x)
            if looped:
                state, _ = lax.scan(layer, state, p["b"])
            else:
                for w in p["b"]:
                    state, _ = layer(state, w)
            x, y = map(norm, state)
            return (y if alone else x + y) @ p["out"]

        return p, X, call

    how = f"{'alone' if alone else 'beside_the_stream'}_in_a_{'scan' if looped else 'list'}"
    make.__name__ = f"outputs_of_all_layers_{how}"
    # A multiplier of the sum would change nothing, as a norm follows.
    program(
        {**ENDS, r"b/(\d/)?(u|o)": "Hb", r"b/(\d/)?d": "He"},
        deep=True,
    )(make)


@program({**ENDS, "m": "H", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def shifts_and_gates_of_all_layers_from_the_first_values(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, m=(n, 2 * n))
    p |= {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        shift, gate = jnp.split(jax.nn.silu(x.mean(1, keepdims=True)) @ p["m"], 2, -1)
        for w in p["b"]:
            x = x + gate * mlp(w, norm(x) + shift)
        return norm(x) @ p["out"]

    return p, (floats(2, 6, 5),), call


@program({**ENDS, "b/u": "Hb", "b/d": "He"}, deep=True, asks="no residual stream")
def layers_in_a_row_that_slices_take_from_a_stack(n, L, remedy=False):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": zeros(u=(L, n, n), d=(L, n, n))}

    def call(p, x):
        x = x @ p["in"]
        for i in range(L):
            x = remedy * x + mlp({k: w[i] for k, w in p["b"].items()}, x)
        return norm(x) @ p["out"]

    return p, X, call


# As in the decoder of Deformable DETR; boxes, or learned queries, start as parameters.
for form in ("list", "scan", "scan_of_logs"):

    def make(n, L, form=form):
        p = zeros(**{"in": (5, n)}, start=(6, 4), query=(6, n), pos=(4, n))
        shapes = {"u": (n, n), "d": (n, n), "h": (n, n), "box": (n, 4), "shift": (4,)}
        every = {k: (L, *shape) for k, shape in shapes.items()}
        p["b"] = layers(L, **shapes) if form == "list" else zeros(**every)

        def logit(s):
            s = jnp.clip(s, 0, 1)
            one, other = jnp.maximum(s, 1e-5), jnp.maximum(1 - s, 1e-5)
            apart = form == "scan_of_logs"
            return jnp.log(one) - jnp.log(other) if apart else jnp.log(one / other)

        def call(p, x):
            memory = x @ p["in"]
            box = jax.nn.sigmoid(jnp.broadcast_to(p["start"], (2, 6, 4)))

            def layer(state, w):
                x, box = state
                x = x + mlp(w, norm(x + box @ p["pos"]) + memory)
                y = jax.nn.silu(norm(x) @ w["h"]) @ w["box"] + w["shift"]
                box = jax.nn.sigmoid(y + logit(box))
                return (x, lax.stop_gradient(box)), box

            state, every = (jnp.broadcast_to(p["query"], (2, 6, n)), box), []
            if form != "list":
                return lax.scan(layer, state, p["b"])[1]
            for w in p["b"]:
                state, box = layer(state, w)
                every.append(box)
            return jnp.stack(every)

        return p, (floats(2, 6, 5),), call

    make.__name__ = f"boxes_that_layers_refine_through_their_logits_in_a_{form}"
    program(
        {
            "in": "I",
            "start": "F",
            "query": "V",
            "pos": "Iba",
            r"b/(\d/)?(u|h)": "Hb",
            r"b/(\d/)?d": "He",
            r"b/(\d/)?box": "Oe",
            r"b/(\d/)?shift": "Fe",
        },
        deep=True,
    )(make)


# There are five times as many of these kernels, and three times as many blocks.
@program(
    {**ENDS, r"(b/\d|last)/u": "Hb", r"(b/\d|last)/d": "He", r"b/\d/skip": "Hm"},
    deep=True,
)
def kernels_of_the_stream_and_a_skip_before_all_blocks_but_one(n, L):
    w = {"u": (n, n), "d": (n, n)}
    p = zeros(**{"in": (5, n), "out": (n, 3)}, last=w)
    p |= {"b": layers(L - 1, **w, skip=(2 * n, n))}

    def block(w, x):
        return x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]

    def call(p, x):
        x = first = x @ p["in"]
        for w in p["b"]:
            x = block(w, jnp.concatenate([x, first], -1) @ w["skip"])
        return norm(block(p["last"], x)) @ p["out"]

    return p, X, call


# The last layer's norm of the first stream is before its readout and a branch.
@program({**ENDS, "other": "O", r"b/\d/[ac]": "Hb", r"b/\d/[bd]": "He", r"b/\d/[gh]": "Vm"}, deep=True)  # fmt: skip
def streams_with_norms_after_that_are_both_read_out(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, other=(n, 3))
    p |= {"b": layers(L, **dict.fromkeys("abcd", (n, n)), g=(n,), h=(n,))}

    def call(p, x):
        x = y = x @ p["in"]
        for w in p["b"]:
            x = norm(x + jnp.tanh((x + y) @ w["a"]) @ w["b"], w["g"])
            y = norm(y + jnp.tanh((x + y) @ w["c"]) @ w["d"], w["h"])
        return x @ p["out"], y @ p["other"]

    return p, X, call


# As in TimeSformer: the first layer's second branch joins the token to what the first
# branch made of the others, and so does the stream.
@program({**ENDS, "cls": "V", r"b/\d/[ac]": "Hb", r"b/\d/[bd]": "He"}, deep=True)
def a_class_token_that_one_of_two_branches_leaves_out(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, cls=(1, 1, n))
    p |= {"b": layers(L, **dict.fromkeys("abcd", (n, n)))}

    def call(p, x):
        x = jnp.concatenate([jnp.tile(p["cls"], (2, 1, 1)), x @ p["in"]], 1)
        for w in p["b"]:
            first, rest = x[:, :1], x[:, 1:]
            rest = rest + jnp.tanh(norm(rest) @ w["a"]) @ w["b"]
            every = norm(jnp.concatenate([rest, first], 1)).mean(1, keepdims=True)
            every = jnp.tanh(every @ w["c"]) @ w["d"]
            x = jnp.concatenate([first, rest], 1) + every
        return norm(x)[:, 0] @ p["out"]

    return p, S, call


# As in SASRec: the first layer alone reads the scaled embedding without a norm.
@program({**ENDS, r"b/\d/a": "Hb", r"b/\d/v": "He"}, deep=True, carries={"in": 0.5})
def values_of_a_scaled_embedding_added_to_its_norm(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 3)}) | {"b": layers(L, a=(n, n), v=(n, n))}

    def call(p, x):
        x = p["in"][x] * n**0.5
        for w in p["b"]:
            y = norm(x)
            x = y + jax.nn.sigmoid(y @ w["a"]) * (x @ w["v"])
        return norm(x) @ p["out"]

    return p, (tokens(2, 6),), call


# As in MViT: the branch pools what it makes of the stream before its skip is pooled.
@program({**ENDS, r"b/\d+/a": "Hb", r"b/\d+/d": "He"}, deep=True)
def stages_whose_skip_is_pooled(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(2 * L, a=(n, n), d=(n, n))}

    def call(p, x):
        def pool(x):
            return jnp.maximum(x[:, ::2], x[:, 1::2])

        x = x @ p["in"]
        for i, w in enumerate(p["b"]):
            y = jnp.tanh(x @ w["a"])
            x = norm(pool(x) + pool(y) @ w["d"] if i == L else x + y @ w["d"])
        return x.mean(1) @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/[ac]": "Hb", r"b/\d/[bd]": "He"}, deep=True)
def layers_that_return_the_sum_of_their_branches(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys("abcd", (n, n)))}

    def layer(w, x):
        y = jnp.tanh(norm(x) @ w["a"]) @ w["b"]
        return y + jnp.tanh(norm(x + y) @ w["c"]) @ w["d"]

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + layer(w, x)
        return norm(x) @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/[ud]": "Hb"}, deep=True)
def steps_of_heun_over_the_depth(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            one = mlp(w, x)
            two = mlp(w, x + one / L)
            x = x + (one + two) / (2 * L)
        return norm(x) @ p["out"]

    return p, X, call


# As the first step of LoRA would be, if its kernels were no parameters.
@program({**ENDS, r"b/\d/w": "Hb", r"b/\d/o": "He"}, deep=True)
def fixed_low_rank_kernels_beside_a_fused_one(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, w=(n, 2 * n), o=(n, n))}
    one, two = np.full((n, 2), 1 / n), np.full((2, 2 * n), 1.0)

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            h = norm(x)
            a, b = jnp.split(h @ w["w"] + h @ one @ two, 2, -1)
            x = x + jax.nn.silu(a) * b @ w["o"]
        return norm(x) @ p["out"]

    return p, X, call


@program({**ENDS, "u": "Hb", "d": "He"}, deep=True)
def midpoint_method_in_a_scan(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, u=(L, n, n), d=(L, n, n))

    def call(p, x):
        def layer(x, w):
            return x + mlp(w, x + mlp(w, x) / 2), None

        w = {"u": p["u"], "d": p["d"]}
        return norm(lax.scan(layer, x @ p["in"], w)[0]) @ p["out"]

    return p, X, call


# The first layer's skip begins where the stream begins.
@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/[ds]": "He"}, deep=True)
def skips_that_are_added_to_what_the_stream_starts_as(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys("uds", (n, n)))}

    def call(p, x):
        x = skips = x @ p["in"]
        for w in p["b"]:
            y = jax.nn.relu(norm(x) @ w["u"])
            skips = skips + y @ w["s"]
            x = x + y @ w["d"]
        return norm(skips) @ p["out"]

    return p, X, call


@program({**ENDS, "u|v": "Hb", "d|e": "He"}, deep=True)
def symplectic_layers_in_a_scan(n, L):
    each = dict(u=(L, n, n), d=(L, n, n), v=(L, n, n), e=(L, n, n))
    p = zeros(**{"in": (5, n), "out": (n, 3)}, **each)

    def call(p, x):
        def layer(state, w):
            x, v = state
            v = v - jnp.tanh(x @ w["u"]) @ w["d"]
            return (x + jnp.tanh(v @ w["v"]) @ w["e"], v), None

        x, w = x @ p["in"], {k: p[k] for k in each}
        (x, _), _ = lax.scan(layer, (x, jnp.zeros_like(x)), w)
        return norm(x) @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/(u|v)": "Hb", r"b/\d/(d|e)": "He"}, deep=True)
def symplectic_layers_in_a_list(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n), v=(n, n), e=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        v = jnp.zeros_like(x)
        for w in p["b"]:
            v = v - jnp.tanh(x @ w["u"]) @ w["d"]
            x = x + jnp.tanh(v @ w["v"]) @ w["e"]
        return norm(x) @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def mean_of_the_stream_after_each_layer(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        after = [x @ p["in"]]
        for w in p["b"]:
            after.append(after[-1] + mlp(w, after[-1]))
        return norm(jnp.stack(after[1:]).mean(0)) @ p["out"]

    return p, X, call


# The first layer's own input is what all layers add a projection of.
@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/[dv]": "He"}, deep=True)
def projections_of_the_input_within_each_branch(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys("udv", (n, n)))}

    def call(p, x):
        x = first = x @ p["in"]
        for w in p["b"]:
            x = x + (mlp(w, x) + first @ w["v"])
        return norm(x) @ p["out"]

    return p, X, call


@program({**ENDS, "u": "Hb", "d": "He"}, deep=True)
def readout_of_a_moving_average_of_a_scan(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, u=(L, n, n), d=(L, n, n))

    def call(p, x):
        def layer(state, w):
            x, mean = state
            x = x + mlp(w, x)
            return (x, 0.9 * mean + 0.1 * x), None

        x, w = x @ p["in"], {"u": p["u"], "d": p["d"]}
        (_, mean), _ = lax.scan(layer, (x, x), w)
        return norm(mean) @ p["out"]

    return p, X, call


@program({**ENDS, "time": "I", r"b/\d/s": "Hm", r"b/\d/[ut]": "Hb", r"b/\d/d": "He"}, deep=True)  # fmt: skip
def kernel_on_each_shortcut_beside_a_time_embedding(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, time=(4, n))
    p |= {"b": layers(L, **dict.fromkeys("sutd", (n, n)))}

    def call(p, x, t):
        x, t = x @ p["in"], jax.nn.silu(t @ p["time"])
        for w in p["b"]:
            y = jax.nn.silu(unit(x) @ w["u"] + t @ w["t"])
            x = x @ w["s"] + y @ w["d"]
        return unit(x) @ p["out"]

    return p, (floats(2, 5), floats(2, 4)), call


@program({**ENDS, r"b/\d/s": "Hm", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def kernel_on_each_shortcut_of_a_graph_network(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, **dict.fromkeys("sud", (n, n)))}

    def call(p, x, edges):
        x = x @ p["in"]
        for w in p["b"]:
            x = x @ w["s"] + jax.nn.relu(edges @ (unit(x) @ w["u"])) @ w["d"]
        return unit(x) @ p["out"]

    return p, (floats(2, 6, 5), floats(2, 6, 6)), call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True, carries={r"b/\d/[ud]": 2.0})  # fmt: skip
def residual_branches_in_the_ntk_parametrization(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = jax.nn.relu(unit(x) @ w["u"] / n**0.5)
            x = x + y @ w["d"] / n**0.5
        return unit(x) @ p["out"]

    return p, X, call

"""Interactions of components that random composition found to be read wrongly."""

import jax
import jax.numpy as jnp
from jax import lax

from .kit import floats, layers, program, zeros
from .plain import S, T, attention, norm
from .transformers import heads

ENDS = {"in": "I", "out": "O"}
XY = (floats(2, 6, 5), floats(2, 4, 5))


def cross(w, x, y):
    x = norm(x)
    return attention(x @ w["q"], y @ w["k"], y @ w["v"], 1 / x.shape[-1]) @ w["o"]


@program({**ENDS, "memory": "I", "b/[qkv]": "Hb", "b/o": "He"}, deep=True)
def memory_read_by_slices_of_stacked_parameters(n, L):
    p = zeros(**{"in": (5, n), "memory": (5, n), "out": (n, 3)})
    p["b"] = zeros(**dict.fromkeys("qkvo", (L, n, n)))

    def call(p, x, y):
        x, y = x @ p["in"], y @ p["memory"]
        for i in range(L):
            x = x + cross({k: w[i] for k, w in p["b"].items()}, x, y)
        return norm(x) @ p["out"]

    return p, XY, call


@program({**ENDS, "b/u": "Hb", "b/d/.": "He"}, deep=True)
def outputs_of_joined_kernels_added_in_nested_scans(n, L):
    half = dict.fromkeys("lr", (L, 2, n, n // 2))
    p = zeros(**{"in": (5, n), "out": (n, 3), "b": {"u": (L, 2, n, n), "d": half}})

    def block(x, w):
        kernel = jnp.concatenate([*w["d"].values()], 1)
        return x + jax.nn.relu(norm(x) @ w["u"]) @ kernel, None

    def call(p, x):
        x, _ = lax.scan(lambda x, w: lax.scan(block, x, w), x @ p["in"], p["b"])
        return norm(x) @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d+/(u|v)": "Hb", r"b/\d+/d": "He"}, deep=True)
def kinds_of_blocks_alternate_of_which_one_splits_a_kernel(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    plain, gated = {"u": (n, 2 * n), "d": (2 * n, n)}, {"u": (n, 2 * n), "d": (n, n)}
    p["b"] = [zeros(**x) for x in (plain, gated) * L]

    def call(p, x):
        x = x @ p["in"]
        for i, w in enumerate(p["b"]):
            h = norm(x) @ w["u"]
            h = h[..., : x.shape[-1]] * jnp.tanh(h[..., x.shape[-1] :]) if i % 2 else h
            x = x + jax.nn.relu(h) @ w["d"]
        return norm(x) @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/t": "Fb", r"b/\d/[qkv]": "Hb", r"b/\d/o": "He"}, deep=True)
def turned_unit_queries_and_keys(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p["b"] = layers(L, t=(), **dict.fromkeys("qkvo", (n, n)))

    def turn(x):
        a, b = jnp.split(x / jnp.linalg.norm(x, axis=-1, keepdims=True), 2, -1)
        angle = jnp.arange(6.0)[:, None] / (1 + jnp.arange(n // 2))
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            q, k, v = (norm(x) @ w[c] for c in "qkv")
            x = x + attention(turn(q), turn(k), v, w["t"]) @ w["o"]
        return norm(x) @ p["out"]

    return p, S, call


@program({**ENDS, "memory": "I", r"b/\d/[qkvu]": "Hb", r"b/\d/[od]": "He"}, deep=True)
def memory_read_by_one_group_of_keys_in_the_base(n, L):
    p = zeros(**{"in": (5, n), "memory": (5, n), "out": (n, 3)})
    cross = dict(q=(n, n), k=(n, n // 2), v=(n, n // 2), o=(n // 4, 4, n))
    p["b"] = layers(L, **cross, u=(n, n), d=(n, n))

    def call(p, x, y):
        x, y = x @ p["in"], y @ p["memory"]
        for w in p["b"]:
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
            q, k, v = (heads(z, 4) for z in (norm(x) @ w["q"], y @ w["k"], y @ w["v"]))
            a = attention(q, *(jnp.repeat(z, 2, 1) for z in (k, v)), 0.5)
            x = x + jnp.einsum("bhtk,hkd->bhtd", a, w["o"]).sum(1)
        return norm(x) @ p["out"]

    return p, XY, call


def scaled_table(block):
    def make(n, L):
        square = dict.fromkeys("qkvo", (n, n))
        p = zeros(**{"in": (7, n), "out": (n, 3)}) | {"b": layers(L, **square)}

        def call(p, x):
            x = p["in"][x] * n**0.5
            for w in p["b"]:
                x = block(w, x)
            return norm(x) @ p["out"]

        return p, T, call

    return make


@program({**ENDS, r"b/\d/[qkv]": "Hb", r"b/\d/o": "He"}, deep=True, carries={"in": 0.5})
def embedding_times_a_root_before_attention_by_multiply_and_sum(n, L):
    def block(w, x):
        q, k, v = ((norm(x)[..., None] * w[c]).sum(-2) for c in "qkv")
        return x + attention(q, k, v, 1 / n) @ w["o"]

    return scaled_table(block)(n, L)


@program({**ENDS, r"b/\d/[qkv]": "Hb", r"b/\d/o": "He"}, deep=True, carries={"in": 0.5})
def embedding_times_a_root_before_a_state_that_starts_at_zero(n, L):
    def block(w, x):
        k, v, q = (jnp.moveaxis(norm(x) @ w[c], 1, 0) for c in "kvq")

        def step(state, now):
            state = jax.nn.sigmoid(now[0]) * state + now[1]
            return state, state * now[2]

        _, y = lax.scan(step, jnp.zeros((2, n)), (k, v, q))
        return x + jnp.moveaxis(y, 0, 1) @ w["o"]

    return scaled_table(block)(n, L)


@program({**ENDS, r"b/\d/[qkv]": "Hb", r"b/\d/o": "He"}, deep=True, carries={"in": 0.5})
def embedding_times_a_root_before_norms_of_norms(n, L):
    def block(w, x):
        q, k, v = (norm(x) @ w[c] for c in "qkv")
        return norm(x + attention(q, k, v, 1 / n) @ w["o"])

    return scaled_table(block)(n, L)


@program({**ENDS, "router": "O", "u|d": "H"})
def experts_looked_up_for_a_raw_embedding(n):
    p = zeros(**{"in": (7, n), "out": (n, 3)}, router=(n, 4), u=(4, n, n), d=(4, n, n))

    def call(p, x):
        x = p["in"][x]
        chosen = jnp.argmax(x @ p["router"], -1)
        y = jax.nn.relu(jnp.einsum("btd,btdf->btf", x, p["u"][chosen]))
        y = jnp.einsum("btf,btfd->btd", y, p["d"][chosen])
        return norm(x + y) @ p["out"]

    return p, T, call


@program(
    {"i/.": "I", "out": "O", r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/g": "Vm"},
    deep=True,
)
def norms_of_a_stream_that_starts_at_joined_kernels(n, L):
    half = dict.fromkeys("lr", (5, n // 2))
    p = zeros(i=half, out=(n, 3)) | {"b": layers(L, u=(n, n), d=(n, n), g=(n,))}

    def call(p, x):
        x = x @ jnp.concatenate([*p["i"].values()], 1)
        for w in p["b"]:
            x = norm(x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"], w["g"])
        return x @ p["out"]

    return p, S, call


@program(
    {"in": "I", r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/g": "Vm", "g": "V"},
    deep=True,
    carries={"g": 0.25},
)
def tied_readout_after_a_norm_of_a_norm(n, L):
    p = zeros(**{"in": (7, n)}, g=(n,)) | {"b": layers(L, u=(n, n), d=(n, n), g=(n,))}

    def rms(x, g):  # a gain of the divisor, as in Flax
        return x * (lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g)

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            x = rms(x + jax.nn.relu(x @ w["u"]) @ w["d"], w["g"])
        return norm(x, p["g"]) @ p["in"].T

    return p, T, call


@program(
    {
        **ENDS,
        "memory": "I",
        "e/u": "Hb",
        "e/d": "He",
        "e/g": "Vm",
        r"b/\d/[qkv]": "Hb",
        r"b/\d/o": "He",
    },
    deep=True,
)
def memory_of_a_scanned_encoder_with_norms_after_its_blocks(n, L):
    p = zeros(**{"in": (5, n), "memory": (5, n), "out": (n, 3)})
    p |= {"e": zeros(u=(L, n, n), d=(L, n, n), g=(L, n))}
    p["b"] = layers(L, **dict.fromkeys("qkvo", (n, n)))

    def encode(y, w):
        return norm(y + jax.nn.relu(y @ w["u"]) @ w["d"], w["g"]), None

    def call(p, x, y):
        x, (y, _) = x @ p["in"], lax.scan(encode, y @ p["memory"], p["e"])
        for w in p["b"]:
            x = x + cross(w, x, y)
        return norm(x) @ p["out"]

    return p, XY, call

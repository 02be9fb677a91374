"""Programs that split or join axes of their parameters.

The right answer gives the letter of every entry: a letter of `kit`, or a list of (index,
letter). A number after the letter is the factor of the model that the entries carry.
Widths are 8 at the base and 32 at the target.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from .kit import floats, tokens, zeros
from .plain import attention, norm

at = np.s_
X = (floats(4, 5),)
S = (floats(2, 6, 5),)


@dataclasses.dataclass(frozen=True)
class Fused:
    """One row: `make(n)`, and the letters of its parameters."""

    name: str
    make: Callable[[int], tuple[Any, ...]]
    right: dict[str, Any]

    def models(self) -> tuple[Any, Any, tuple[Any, ...], Any]:
        """Base, target, inputs, and `call`."""
        small, large = self.make(8), self.make(32)
        if len(large) == 2:
            return small[0], large[0], large[1], None
        return (small[2], small[0]), (large[2], large[0]), large[1], None


ALL: list[Fused] = []


def fused(**right: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a program to the table; "__" in a name stands for "/"."""

    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        letters = {name.replace("__", "/"): each for name, each in right.items()}
        ALL.append(Fused(make.__name__, make, letters))
        return make

    return add


def heads(x, number):
    return x.reshape(*x.shape[:2], number, -1).swapaxes(1, 2)


def merged(x):
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def block(n, call, **shapes):
    """A program around one attention or mixer: input, this, readout."""
    p = zeros(i=(5, n), out=(n, 3), **shapes)
    return p, S, lambda p, x: norm(call(p, x @ p["i"])) @ p["out"]


AROUND = dict(i="I", out="O")


@fused(qkv="H", b="V", o="H", **AROUND)
def fused_qkv_more_heads(n):
    def call(p, x):
        q, k, v = jnp.split(x @ p["qkv"] + p["b"], 3, -1)
        q, k, v = (heads(y, n // 4) for y in (q, k, v))
        return merged(attention(q, k, v, 0.5)) @ p["o"]

    return block(n, call, qkv=(n, 3 * n), b=(3 * n,), o=(n, n))


Q = [(at[:, :32], "H0.5"), (at[:, 32:], "H")]
QB = [(at[:32], "V0.5"), (at[32:], "V")]


@fused(qkv=Q, b=QB, o="H", **AROUND)
def fused_qkv_larger_heads(n):
    def call(p, x):
        q, k, v = jnp.split(x @ p["qkv"] + p["b"], 3, -1)
        q, k, v = (heads(y, 2) for y in (q, k, v))
        return merged(attention(q, k, v, (n // 2) ** -0.5)) @ p["o"]

    return block(n, call, qkv=(n, 3 * n), b=(3 * n,), o=(n, n))


@fused(qkv=Q, b=QB, o="H", **AROUND)
def fused_qkv_reshaped_permuted_and_unpacked_as_in_timm(n):
    def call(p, x):
        b, t, _ = x.shape
        y = (x @ p["qkv"] + p["b"]).reshape(b, t, 3, 2, n // 2)
        q, k, v = y.transpose(2, 0, 3, 1, 4)
        return merged(attention(q, k, v, (n // 2) ** -0.5)) @ p["o"]

    return block(n, call, qkv=(n, 3 * n), b=(3 * n,), o=(n, n))


@fused(
    qkv=[(at[:, 0], "H0.5"), (at[:, 1:], "H")],
    b=[(at[0], "V0.5"), (at[1:], "V")],
    o="H",
    **AROUND,
)
def fused_qkv_of_an_einsum(n):
    def call(p, x):
        y = jnp.einsum("btn,nchd->btchd", x, p["qkv"]) + p["b"]
        q, k, v = (y[:, :, i].swapaxes(1, 2) for i in range(3))
        a = attention(q, k, v, (n // 2) ** -0.5)
        return jnp.einsum("bhtd,hdn->btn", a, p["o"])

    shapes = dict(qkv=(n, 3, 2, n // 2), b=(3, 2, n // 2), o=(2, n // 2, n))
    return block(n, call, **shapes)


@fused(w=[(at[0], "H0.5"), (at[1:], "H")], **AROUND)
def kernels_of_queries_keys_and_values_as_a_stack(n):
    def call(p, x):
        q, k, v = (x @ p["w"][i] for i in range(3))
        return attention(q, k, v, n**-0.5)

    return block(n, call, w=(3, n, n))


@fused(w=[(at[0], "H2"), (at[1], "H0.5"), (at[2:], "H")], **AROUND)
def stack_with_a_gate_that_is_divided_by_the_root_of_its_width(n):
    def call(p, x):
        q, k, v = jnp.unstack(jnp.einsum("btn,cnd->cbtd", x, p["w"][1:]))
        gate = jax.nn.sigmoid((x @ p["w"][0]) / n**0.5)
        return attention(q, k, v, n**-0.5) * gate

    return block(n, call, w=(4, n, n))


@fused(qkv=Q, o="H", **AROUND)
def fused_qkv_with_rotary_positions(n):
    def rotate(x):
        one, two = jnp.split(x, 2, -1)
        angle = jnp.arange(6.0)[:, None] * 0.1
        return x * jnp.cos(angle) + jnp.concatenate([-two, one], -1) * jnp.sin(angle)

    def call(p, x):
        q, k, v = (heads(y, 2) for y in jnp.split(x @ p["qkv"], 3, -1))
        a = attention(rotate(q), rotate(k), v, (n // 2) ** -0.5)
        return merged(a) @ p["o"]

    return block(n, call, qkv=(n, 3 * n), o=(n, n))


TURNED = [(at[:, :4], "O"), (at[:, 4:], "H")]


@fused(q=TURNED, k=TURNED, v="H", kg=[(at[:4], "F"), (at[4:], "V")], qg=[(at[:4], "F3"), (at[4:], "V0.75")], **AROUND)  # fmt: skip
def rotary_positions_of_four_units_after_a_norm(n):
    def rotate(one, two, rest):
        c, s = (f(jnp.arange(6.0)[:, None] * 0.1) for f in (jnp.cos, jnp.sin))
        return jnp.concatenate([one * c - two * s, two * c + one * s, rest], -1)

    def call(p, x):
        q, k = norm(x @ p["q"]) * p["qg"], norm(x @ p["k"]) * p["kg"]
        q = rotate(*jnp.split(q[..., :4], 2, -1), q[..., 4:])
        k = rotate(k[..., :2], k[..., 2:4], k[..., 4:])
        return attention(q, k, x @ p["v"], 1 / (n + 4))

    shapes = {"q": (n, n + 4), "k": (n, n + 4), "qg": (n + 4,), "kg": (n + 4,)}
    return block(n, call, v=(n, n), **shapes)


@fused(qkv=[(at[:, :32], "H"), (at[:, 32:], "O")], o="H", **AROUND)
def fused_qkv_of_grouped_queries(n):
    def call(p, x):
        b, t, _ = x.shape
        y = (x @ p["qkv"]).reshape(b, t, n // 4 + 4, 4)
        q, k, v = y[:, :, : n // 4], y[:, :, -4:-2], y[:, :, -2:]
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return a.reshape(b, t, n) @ p["o"]

    return block(n, call, qkv=(n, n + 16), o=(n, n))


@fused(qkv=[(at[:, :32], "H"), (at[:, 32:], "O")], b=[(at[:32], "V"), (at[32:], "F")], o="H", **AROUND)  # fmt: skip
def fused_qkv_of_multi_query_attention(n):
    def call(p, x):
        q, k, v = jnp.split(x @ p["qkv"] + p["b"], [n, n + 4], -1)
        q = heads(q, n // 4)
        a = attention(q, k[:, None], v[:, None], 0.5)
        return merged(a) @ p["o"]

    return block(n, call, qkv=(n, n + 8), b=(n + 8,), o=(n, n))


@fused(up="H", down="H", **AROUND)
def fused_gate_and_up(n):
    def call(p, x):
        gate, up = jnp.split(x @ p["up"], 2, -1)
        return (jax.nn.silu(gate) * up) @ p["down"]

    return block(n, call, up=(n, 8 * n), down=(4 * n, n))


@fused(up="I", down="H", o="O")
def fused_gate_and_up_with_an_axis_of_two(n):
    p = zeros(up=(2, 5, n), down=(n, n), o=(n, 3))

    def call(p, x):
        gate, up = jnp.einsum("bn,cnf->cbf", x, p["up"])
        return jax.nn.relu((jax.nn.silu(gate) * up) @ p["down"]) @ p["o"]

    return p, X, call


@fused(w=[(at[:5], "I"), (at[5:], "H")], b="V", out="O")
def lstm_of_one_kernel(n):
    p = zeros(w=(5 + n, 4 * n), b=(4 * n,), out=(n, 3))

    def call(p, xs):
        def step(state, x):
            h, c = state
            gates = jnp.concatenate([x, h], -1) @ p["w"] + p["b"]
            i, g, f, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((xs.shape[0], n))
        (h, _), _ = jax.lax.scan(step, (start, start), xs.swapaxes(0, 1))
        return h @ p["out"]

    return p, S, call


@fused(lstm__linear__w=[(at[:5], "I"), (at[5:], "H")], lstm__linear__b="V", linear__w="O", linear__b="F")  # fmt: skip
def lstm_of_haiku(n):
    def forward(xs):
        core = hk.LSTM(n)
        start = core.initial_state(xs.shape[0])
        hs, _ = hk.dynamic_unroll(core, xs, start, time_major=False)
        return hk.Linear(3)(hs[:, -1])

    model = hk.without_apply_rng(hk.transform(forward))
    return model, S


@fused(
    in_proj="H",
    conv="V",
    x_proj=[(at[:, :8], "H"), (at[:, 8:], "O")],
    dt_proj="H",
    dt_bias="V",
    A_log="V",
    D="V",
    out_proj="H",
    **AROUND,
)
def mamba(n):
    inner, rank, states = 2 * n, n // 4, 4

    def scan(u, dt, A, B, C, D):
        def step(h, at):
            u, dt, B, C = at
            h = h * jnp.exp(dt[..., None] * A) + (dt * u)[..., None] * B[:, None]
            return h, jnp.einsum("bds,bs->bd", h, C)

        moved = [y.swapaxes(0, 1) for y in (u, dt, B, C)]
        start = jnp.zeros((u.shape[0], inner, states))
        return jax.lax.scan(step, start, moved)[1].swapaxes(0, 1) + u * D

    def call(p, x):
        u, z = jnp.split(x @ p["in_proj"], 2, -1)
        padded = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
        u = sum(padded[:, i : i + 6] * p["conv"][i] for i in range(4))
        u = jax.nn.silu(u)
        dt, B, C = jnp.split(u @ p["x_proj"], [rank, rank + states], -1)
        dt = jax.nn.softplus(dt @ p["dt_proj"] + p["dt_bias"])
        y = scan(u, dt, -jnp.exp(p["A_log"]), B, C, p["D"])
        return (y * jax.nn.silu(z)) @ p["out_proj"]

    return block(
        n,
        call,
        in_proj=(n, 2 * inner),
        conv=(4, inner),
        x_proj=(inner, rank + 2 * states),
        dt_proj=(rank, inner),
        dt_bias=(inner,),
        A_log=(inner, states),
        D=(inner,),
        out_proj=(inner, n),
    )


@fused(
    in_proj=[(at[:, :128], "H"), (at[:, 128:144], "O"), (at[:, 144:], "H")],
    conv=[(at[..., :64], "V"), (at[..., 64:], "F")],
    conv_bias=[(at[:64], "V"), (at[64:], "F")],
    dt_bias="V",
    A_log="V",
    D="V",
    g="V",
    out_proj="H",
    **AROUND,
)
def mamba_2(n):
    inner, states, size = 2 * n, 8, 4
    number = inner // size
    mixed = inner + 2 * states

    def call(p, x):
        b, t, _ = x.shape
        z, u, dt = jnp.split(x @ p["in_proj"], [inner, inner + mixed], -1)
        u = jax.lax.conv_general_dilated(
            u,
            p["conv"],
            (1,),
            [(3, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=mixed,
        )
        u = jax.nn.silu(u + p["conv_bias"])
        u, B, C = jnp.split(u, [inner, inner + states], -1)
        dt = jax.nn.softplus(dt + p["dt_bias"])
        u = u.reshape(b, t, number, size)

        def step(h, at):
            u, dt, B, C = at
            decay = jnp.exp(-dt * jnp.exp(p["A_log"]))[..., None, None]
            h = h * decay + jnp.einsum("bhp,bs,bh->bhps", u, B, dt)
            return h, jnp.einsum("bhps,bs->bhp", h, C) + u * p["D"][:, None]

        moved = [y.swapaxes(0, 1) for y in (u, dt, B, C)]
        start = jnp.zeros((b, number, size, states))
        y = jax.lax.scan(step, start, moved)[1].swapaxes(0, 1).reshape(b, t, inner)
        return norm(y * jax.nn.silu(z), p["g"]) @ p["out_proj"]

    return block(
        n,
        call,
        in_proj=(n, 2 * inner + 2 * states + number),
        conv=(4, 1, mixed),
        conv_bias=(mixed,),
        dt_bias=(number,),
        A_log=(number,),
        D=(number,),
        g=(inner,),
        out_proj=(inner, n),
    )


@fused(i="I", h="H", o="O", b="F")
def policy_and_value_in_one_readout(n):
    p = zeros(i=(5, n), h=(n, n), o=(n, 8), b=(8,))

    def call(p, x):
        y = jnp.tanh(jnp.tanh(x @ p["i"]) @ p["h"]) @ p["o"] + p["b"]
        return jax.nn.log_softmax(y[:, :7]), y[:, 7]

    return p, X, call


@fused(i="I", h=[(at[:, :3], "O"), (at[:, 3:], "H")], b=[(at[:3], "F"), (at[3:], "V")], o="O")  # fmt: skip
def early_logits_and_features_in_one_kernel(n):
    p = zeros(i=(5, n), h=(n, n + 3), b=(n + 3,), o=(n, 3))

    def call(p, x):
        y = jnp.tanh(x @ p["i"]) @ p["h"] + p["b"]
        return y[:, :3], jnp.tanh(y[:, 3:]) @ p["o"]

    return p, X, call


@fused(i="I", h="H", stats="O", d="I", o="O")
def mean_and_variance_of_a_fixed_latent(n):
    p = zeros(i=(5, n), h=(n, n), stats=(n, 8), d=(4, n), o=(n, 5))

    def call(p, x):
        h = jnp.tanh(jnp.tanh(x @ p["i"]) @ p["h"])
        mean, log = jnp.split(h @ p["stats"], 2, -1)
        z = mean + jnp.exp(0.5 * log) * 0.3
        return jnp.tanh(z @ p["d"]) @ p["o"], mean, log

    return p, X, call


@fused(i="I", down="H", up=[(at[:, :, :64], "H"), (at[:, :, 64:], "I")], o="O")
def unet_with_concatenated_skips_and_a_condition(n):
    p = zeros(
        i=(3, 3, 3, n), down=(3, 3, n, n), up=(3, 3, 2 * n + 4, n), o=(1, 1, n, 3)
    )

    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def call(p, x, c):
        skip = jax.nn.relu(conv(x, p["i"]))
        h = jax.nn.relu(conv(skip, p["down"]))
        c = jnp.broadcast_to(c[:, None, None], (*h.shape[:3], 4))
        h = jnp.concatenate([h, skip, c], -1)
        return conv(jax.nn.relu(conv(h, p["up"])), p["o"])

    return p, (floats(2, 8, 8, 3), floats(2, 4)), call


@fused(i="I", w=[(at[:32], "H"), (at[32:], "I")], o="O")
def condition_that_is_concatenated_to_features(n):
    p = zeros(i=(5, n), w=(n + 7, n), o=(n, 3))

    def call(p, x, a):
        h = jnp.concatenate([jnp.tanh(x @ p["i"]), a], -1)
        return jnp.tanh(h @ p["w"]) @ p["o"]

    return p, (floats(4, 5), floats(4, 7)), call


# What a kernel makes meets the joined value, entry by entry.
JOINED = [(at[:32], "V"), (at[32:], "F")]
CROSS = [(at[:32, :32], "H"), (at[:32, 32:], "O"), (at[32:, :32], "I"), (at[32:, 32:], "F")]  # fmt: skip


@fused(i="I", g=JOINED, b=JOINED, w=CROSS, o=[(at[:32], "O"), (at[32:], "F")])
def crosses_of_embeddings_beside_dense_features(n):
    p = zeros(i=(7, n), g=(n + 3,), w=(n + 3, n + 3), b=(n + 3,), o=(n + 3, 2))

    def call(p, x, a):
        h = first = norm(jnp.concatenate([p["i"][x], a], -1), p["g"])
        for _ in range(2):
            h = first * (h @ p["w"] + p["b"]) + h
        return h @ p["o"]

    return p, (tokens(4), floats(4, 3)), call


@fused(kv=[(at[:, :16], "H"), (at[:, 16:], "O")], q="H", up="H", o="H", g="V", **AROUND)
def latent_attention_with_a_rotary_key(n):
    rank, number, size = n // 2, n // 4, 4

    def call(p, x):
        b, t, _ = x.shape
        c, key = jnp.split(x @ p["kv"], [rank], -1)
        c = norm(c, p["g"])
        kv = (c @ p["up"]).reshape(b, t, number, 2 * size)
        k, v = jnp.split(kv, 2, -1)
        key = jnp.broadcast_to(key[:, :, None], (b, t, number, 2))
        k = jnp.concatenate([k, key], -1)
        q = (x @ p["q"]).reshape(b, t, number, size + 2)
        q, k, v = (y.swapaxes(1, 2) for y in (q, k, v))
        return merged(attention(q, k, v, 0.4)) @ p["o"]

    return block(
        n,
        call,
        kv=(n, rank + 2),
        g=(rank,),
        up=(rank, number * 2 * size),
        q=(n, number * (size + 2)),
        o=(n, n),
    )


@fused(w=[(at[..., :32], "H0.5"), (at[..., 32:], "H")], o="H", **AROUND)
def parallel_attention_and_mlp_of_one_kernel_scanned(n):
    def call(p, x):
        def layer(x, w):
            into, back = w
            q, k, v, up = jnp.split(norm(x) @ into, [n, 2 * n, 3 * n], -1)
            q, k, v = (heads(y, 2) for y in (q, k, v))
            a = merged(attention(q, k, v, (n // 2) ** -0.5))
            return x + jnp.concatenate([a, jax.nn.gelu(up)], -1) @ back, None

        return jax.lax.scan(layer, x, (p["w"], p["o"]))[0]

    return block(n, call, w=(3, n, 7 * n), o=(3, 5 * n, n))


@fused(embed__embedding="I", cell__w__kernel="H", cell__w__bias="V", head__kernel="O", head__bias="F")  # fmt: skip
def linen_fused_gates(n):
    class Cell(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            z, c = jnp.split(nn.Dense(2 * n, name="w")(h + x), 2, -1)
            z = nn.sigmoid(z)
            h = (1 - z) * h + z * jnp.tanh(c)
            return h, h

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Embed(11, n, name="embed")(x)
            scan = nn.scan(
                Cell,
                variable_broadcast="params",
                split_rngs={"params": False},
                in_axes=1,
                out_axes=1,
            )
            _, x = scan(name="cell")(jnp.zeros((x.shape[0], n)), x)
            return nn.Dense(3, name="head")(x[:, -1])

    return Model(), (tokens(2, 6),)


@fused(i__kernel="I", i__bias="V", qkv__kernel=Q, qkv__bias=QB, o__kernel="O", o__bias="F")  # fmt: skip
def nnx_fused_qkv(n):
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.i = nnx.Linear(5, n, rngs=rngs)
            self.qkv = nnx.Linear(n, 3 * n, rngs=rngs)
            self.o = nnx.Linear(n, 3, rngs=rngs)

        def __call__(self, x):
            y = self.qkv(nnx.relu(self.i(x)))
            q, k, v = (heads(x, 2) for x in jnp.split(y, 3, axis=-1))
            y = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)))
            return self.o(y.reshape(*y.shape[:2], -1))

    return Model, S


OF_HEADS = np.arange(96) % 48 < 16  # each of two heads has 16 queries, keys, values


@fused(qkv=[(at[:, OF_HEADS], "H0.5"), (at[:, ~OF_HEADS], "H")], b=[(at[OF_HEADS], "V0.5"), (at[~OF_HEADS], "V")], o="H", **AROUND)  # fmt: skip
def fused_qkv_of_each_head_as_in_gpt_neox(n):
    def call(p, x):
        b, t, _ = x.shape
        y = (x @ p["qkv"] + p["b"]).reshape(b, t, 2, 3 * (n // 2))
        q, k, v = (y.swapaxes(1, 2) for y in jnp.split(y, 3, -1))
        return merged(attention(q, k, v, (n // 2) ** -0.5)) @ p["o"]

    return block(n, call, qkv=(n, 3 * n), b=(3 * n,), o=(n, n))


GROUPED = np.arange(48) % 24 < 16  # two groups of n / 8 queries, one key, one value


@fused(qkv=[(at[:, GROUPED], "H"), (at[:, ~GROUPED], "O")], o="H", **AROUND)
def fused_qkv_of_each_group_as_in_falcon(n):
    def call(p, x):
        b, t, _ = x.shape
        y = (x @ p["qkv"]).reshape(b, t, 2, n // 8 + 2, 4)
        q, k, v = y[..., :-2, :], y[..., -2, :], y[..., -1, :]
        q = q.reshape(b, t, n // 4, 4)
        a = jax.nn.dot_product_attention(q, k, v)
        return a.reshape(b, t, n) @ p["o"]

    return block(n, call, qkv=(n, n + 16), o=(n, n))


@fused(qkv=[(at[:, :32], "H"), (at[:, 32:], "O")], o="H", **AROUND)
def more_heads_in_a_list(n):
    def call(p, x):
        q, k, v = jnp.split(x @ p["qkv"], [n, n + 4], -1)
        each = [q[..., i : i + 4] for i in range(0, n, 4)]
        return jnp.concatenate([attention(q, k, v, 0.5) for q in each], -1) @ p["o"]

    return block(n, call, qkv=(n, n + 8), o=(n, n))


@fused(w__q="H0.5", w__k="H", w__v="H", b__q="V0.5", b__k="V", b__v="V", **AROUND)
def kernels_that_the_model_joins(n):
    def call(p, x):
        w, b = (jnp.concatenate([p[y][z] for z in "qkv"], -1) for y in "wb")
        q, k, v = jnp.split(x @ w + b, 3, -1)
        return attention(q, k, v, n**-0.5)

    w = {"w": dict.fromkeys("qkv", (n, n)), "b": dict.fromkeys("qkv", (n,))}
    return block(n, call, **w)


@fused(i="I", h="H", d="H0.25", u=[(at[:32, :32], "H"), (at[:32, 32:], "O"), (at[32:, :32], "V"), (at[32:, 32:], "F")])  # fmt: skip
def biaffine_scores_of_values_with_ones(n):
    p = zeros(i=(5, n), h=(n, n), d=(n, n), u=(n + 1, n + 1))

    def with_one(x):
        return jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1))], -1)

    def call(p, x):
        x = x @ p["i"]
        a, b = (with_one(jax.nn.relu(x @ p[k])) for k in "hd")
        return a @ p["u"] @ b.swapaxes(1, 2)

    return p, S, call


@fused(i="I", a="O", b=[(at[:32], "O"), (at[32:], "F")], o=[(at[:32], "O"), (at[32:], "F")])  # fmt: skip
def dense_connections_of_a_fixed_growth(n):
    p = zeros(i=(5, n), a=(n, 4), b=(n + 4, 4), o=(n + 8, 3))

    def call(p, x):
        x = x @ p["i"]
        for k in "ab":
            x = jnp.concatenate([x, jax.nn.relu(x @ p[k])], -1)
        return x @ p["o"]

    return p, X, call

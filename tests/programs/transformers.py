"""Transformers and their parts, in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .kit import floats, layers, program, tokens, zeros
from .plain import S, T, attention, norm

ENDS = {"in": "I", "out": "O"}


def heads(x, size):
    """(batch, time, width) to (batch, heads, time, size)."""
    b, t, n = x.shape
    return x.reshape(b, t, n // size, size).swapaxes(1, 2)


def flat(x):
    b, h, t, k = x.shape
    return x.swapaxes(1, 2).reshape(b, t, h * k)


def rope(x):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[-2])[:, None] * 100.0 ** -(jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


# Angles are those of positions, which are an input.
@program({**ENDS, "q|k|v|o": "Hb"}, carries={"q": 0.5})
def logits_that_are_scaled_after_their_mask(n):
    """With rotary positions by complex numbers, as in EasyLM."""
    p = zeros(**{"in": (5, n), "out": (n, 3)}, q=(n, n), k=(n, n), v=(n, n), o=(n, n))
    frequencies = 100.0 ** (-np.arange(4) / 4)
    future = np.triu(np.full((6, 6), -1e9), 1)

    def turned(x, angle):
        a, b = jnp.split(x, 2, -1)
        y = lax.complex(a, b) * jnp.exp(1j * angle)
        return jnp.concatenate([y.real, y.imag], -1)

    def call(p, x, mask, positions):
        y = norm(x := x @ p["in"])
        angle = positions[:, None, :, None] * frequencies
        angle = jnp.repeat(angle, n // 8, -1)
        q, k = (turned(heads(y @ p[name], n), angle) for name in "qk")
        s = q @ k.mT
        s = s * mask[:, None] - 1e9 * (1 - mask[:, None])
        a = jax.nn.softmax((s + future) * n**-0.5) @ heads(y @ p["v"], n)
        return norm(x + flat(a) @ p["o"]) @ p["out"]

    return p, (floats(2, 6, 5), floats(2, 6, 6), floats(2, 6)), call


@program({**ENDS, "(k|v)": "Ib", "q|o": "Hb"}, carries={"q": 0.5})
def cross_attention_to_a_fixed_context(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, q=(n, n), k=(6, n), v=(6, n), o=(n, n))

    def call(p, x, context):
        x = x @ p["in"]
        a = attention(x @ p["q"], context @ p["k"], context @ p["v"], n**-0.5)
        return (x * 1.0 + jnp.tanh(a @ p["o"])).mean(1) @ p["out"]

    return p, (floats(2, 6, 5), floats(2, 3, 6)), call


@program({**ENDS, "q|k|v|o": "H"})
def sliding_window_with_grouped_queries(n):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3))}
    g = n // 8
    p |= zeros(q=(n, 2 * g, 4), k=(n, g, 4), v=(n, g, 4), o=(2 * g, 4, n))

    def call(p, x):
        x = x @ p["in"]
        q = jnp.einsum("btd,dhk->bthk", x, p["q"]).reshape(2, 6, g, 2, 4)
        k = jnp.einsum("bsd,dgk->bsgk", x, p["k"])
        v = jnp.einsum("bsd,dgk->bsgk", x, p["v"])
        scores = jnp.einsum("btgqk,bsgk->bgqts", q, k) / 2
        t = jnp.arange(6)
        near = (t[:, None] >= t) & (t[:, None] - t < 3)
        a = jax.nn.softmax(jnp.where(near, scores, -1e9))
        y = jnp.einsum("bgqts,bsgk->btgqk", a, v).reshape(2, 6, 2 * g, 4)
        return jnp.einsum("bthk,hkd->btd", y, p["o"]) @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/(q|up)": "Hb", r"b/\d/(o|down)": "He", r"b/\d/kv_a": "Ob", r"b/\d/kv_n": "Fb", r"b/\d/kv_b": "Ib"}, deep=True)  # fmt: skip
def multi_head_latent_attention(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    p |= {"b": layers(L, q=(n, n // 4, 6), kv_a=(n, 8 + 2), kv_n=(8,), kv_b=(8, n // 4, 8), o=(n // 4, 4, n), up=(n, 2 * n), down=(2 * n, n))}  # fmt: skip

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            y = norm(x)
            q, q_rope = jnp.split(jnp.einsum("btd,dhk->bhtk", y, w["q"]), [4], -1)
            latent, k_rope = jnp.split(y @ w["kv_a"], [8], -1)
            kv = jnp.einsum("btc,chk->bhtk", norm(latent, w["kv_n"]), w["kv_b"])
            k, v = jnp.split(kv, 2, -1)
            s = jnp.einsum("bhtk,bhsk->bhts", q, k)
            s += jnp.einsum("bhtk,bsk->bhts", rope(q_rope), rope(k_rope))
            a = jax.nn.softmax(s * 6**-0.5)
            x = x + jnp.einsum("bhts,bhsk,hkd->btd", a, v, w["o"])
            x = x + jax.nn.silu(norm(x) @ w["up"]) @ w["down"]
        return norm(x) @ p["out"]

    return p, T, call


@program({**ENDS, r"b/\d/(q|v)": "Ob", r"b/\d/c": "Hb", r"b/\d/k": "Ib", r"b/\d/o": "Ie"}, deep=True, carries={r"b/\d/k": 0.25})  # fmt: skip
def latents_that_absorb_keys_and_an_einsum_of_values_and_outputs(n, L):
    """The order of its products depends on sizes."""
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    p |= {"b": layers(L, q=(n, 2, 4), c=(n, n // 2), k=(n // 2, 2, 4), v=(n // 2, 2, 4), o=(2, 4, n))}  # fmt: skip

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            y = norm(x)
            c = norm(y @ w["c"])
            q = jnp.einsum("btd,dhk->bthk", y, w["q"])
            q = jnp.einsum("bthk,chk->bthc", q, w["k"])
            a = jax.nn.softmax(jnp.einsum("bthc,bsc->bhts", q, c) / 2)
            a = jnp.einsum("bhts,bsc->bthc", a, c)
            x = x + jnp.einsum("bthc,chk,hkd->btd", a, w["v"], w["o"])
        return norm(x) @ p["out"]

    return p, T, call


@program({**ENDS, "rel": "Vba", r"b/\d/(q|k|v|wi|wg)": "Hb", r"b/\d/(o|wo)": "He"}, deep=True)  # fmt: skip
def t5_encoder_with_shared_relative_bias(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, rel=(8, n // 4))
    p |= {"b": layers(L, q=(n, n), k=(n, n), v=(n, n), o=(n, n), wi=(n, 2 * n), wg=(n, 2 * n), wo=(2 * n, n))}  # fmt: skip

    def call(p, x):
        x = p["in"][x]
        t = jnp.arange(6)
        bucket = jnp.minimum(jnp.abs(t[:, None] - t), 7)
        bias = p["rel"][bucket].transpose(2, 0, 1)[None]
        for w in p["b"]:
            y = norm(x)
            q, k, v = (heads(y @ w[name], 4) for name in "qkv")
            a = jax.nn.softmax(q @ k.swapaxes(-1, -2) + bias)
            x = x + flat(a @ v) @ w["o"]
            y = norm(x)
            x = x + (jax.nn.gelu(y @ w["wi"]) * (y @ w["wg"])) @ w["wo"]
        return norm(x) @ p["out"]

    return p, T, call


# In the base, only the last stage has layers that read the stream without a shift.
@program({**ENDS, "merge": "H", r"s/\d/\d/[qkv]": "Hb", r"s/\d/\d/o": "He"}, deep=True)
def windows_that_the_last_stage_does_not_shift(n, L):
    p = zeros(**{"in": (5, n), "out": (2 * n, 3)}, merge=(2 * n, 2 * n))
    p["s"] = [layers(L, **dict.fromkeys("qkvo", (d, d))) for d in (n, 2 * n)]

    def call(p, x):
        x = x @ p["in"]
        for i, stage in enumerate(p["s"]):
            x = x.reshape(2, 4, -1) @ p["merge"] if i else x
            for k, w in enumerate(stage):
                shift = 2 if k % 2 and not i else 0
                y = jnp.roll(x, shift, 1) if shift else x
                y = y.reshape(-1, 4, y.shape[-1])
                q, k, v = (heads(y @ w[name], 4) for name in "qkv")
                a = flat(attention(q, k, v, 0.5)) @ w["o"]
                a = a.reshape(x.shape)
                x = x + (jnp.roll(a, -shift, 1) if shift else a)
        return norm(x) @ p["out"]

    return p, (floats(2, 8, 5),), call


@program({"in": "I", "out": "O", "rel": "Vb", r"s/\d+/\d/(qkv|up)": "Hb", r"s/\d+/\d/(o|down)": "Hb", r"merge/\d": "H"})  # fmt: skip
def swin_with_shifted_windows(n):
    p = zeros(**{"in": (3, n), "out": (4 * n, 3)}, rel=(9, n // 4))
    stage = lambda d: layers(
        2, qkv=(d, 3 * d), o=(d, d), up=(d, 4 * d), down=(4 * d, d)
    )
    p |= {"s": [stage(n), stage(2 * n), stage(4 * n)]}
    p |= {"merge": [jnp.zeros((4 * n, 2 * n)), jnp.zeros((8 * n, 4 * n))]}
    at = np.stack(np.meshgrid([0, 1], [0, 1], indexing="ij"), -1).reshape(4, 2)
    relative = ((at[:, None] - at + 1) @ [3, 1]).reshape(4, 4)

    def windows(x):
        b, s, _, d = x.shape
        x = x.reshape(b, s // 2, 2, s // 2, 2, d).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, 4, d)

    def back(x, s):
        x = x.reshape(-1, s // 2, s // 2, 2, 2, x.shape[-1])
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, s, s, x.shape[-1])

    def call(p, x):
        x = x @ p["in"]
        for i, stage in enumerate(p["s"]):
            for shift, w in enumerate(stage):
                y = windows(jnp.roll(norm(x), (-shift, -shift), (1, 2)))
                qkv = (y @ w["qkv"]).reshape(*y.shape[:2], 3, -1, 4)
                q, k, v = qkv.transpose(2, 0, 3, 1, 4)
                bias = jnp.tile(p["rel"][relative].transpose(2, 0, 1), (2**i, 1, 1))
                a = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2 + bias)
                y = back(flat(a @ v) @ w["o"], x.shape[1])
                x = x + jnp.roll(y, (shift, shift), (1, 2))
                x = x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]
            if i < 2:
                x = jnp.concatenate([x[:, a::2, b::2] for a in (0, 1) for b in (0, 1)], -1)  # fmt: skip
                x = norm(x) @ p["merge"][i]
        return x.mean((1, 2)) @ p["out"]

    return p, (floats(2, 8, 8, 3),), call


@program({"in": "F", "proj": "I", "out": "O", "w/(q|k|v|up)": "Hba", "w/(o|down)": "Hea"}, deep=True)  # fmt: skip
def albert_with_shared_block_and_factored_embedding(n, L):
    p = zeros(**{"in": (7, 4), "out": (n, 7)}, proj=(4, n))
    p |= {"w": zeros(q=(n, n), k=(n, n), v=(n, n), o=(n, n), up=(n, n), down=(n, n))}

    def call(p, x):
        def block(x, _):
            w = p["w"]
            y = norm(x)
            q, k, v = (heads(y @ w[name], 4) for name in "qkv")
            x = x + flat(attention(q, k, v, 0.5)) @ w["o"]
            return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(block, p["in"][x] @ p["proj"], None, length=L)
        return norm(x) @ p["out"]

    return p, T, call


@program({**ENDS, r"b/\d/router": "Ob", r"b/\d/up": "Hb", r"b/\d/down": "He"}, deep=True)  # fmt: skip
def mixture_of_depths(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    p |= {"b": layers(L, router=(n,), up=(n, 2 * n), down=(2 * n, n))}

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            weight, chosen = jax.lax.top_k(x @ w["router"], 3)
            y = jnp.take_along_axis(x, chosen[..., None], 1)
            y = jax.nn.gelu(norm(y) @ w["up"]) @ w["down"]
            y = y * jax.nn.sigmoid(weight)[..., None]
            x = x.at[jnp.arange(2)[:, None], chosen].add(y)
        return norm(x) @ p["out"]

    return p, T, call


XL = {**ENDS, "u|v_bias": "Vb", "q|k|v|r|o": "Hb"}


def transformer_xl(n, size):
    """A kernel of constant features makes the keys of relative positions."""
    p = zeros(**{"in": (7, n), "out": (n, 7)}, q=(n, n), k=(n, n), v=(n, n), r=(n, n), o=(n, n), u=(n // size, size), v_bias=(n // size, size))  # fmt: skip

    def shift(x):
        x = jnp.pad(x, ((0, 0),) * 3 + ((1, 0),))
        b, h, t, s = x.shape
        return x.reshape(b, h, s, t)[:, :, 1:].reshape(b, h, t, s - 1)

    def call(p, x):
        x = p["in"][x]
        angle = jnp.arange(5, -1, -1.0)[:, None] * 100.0 ** -(jnp.arange(n // 2) / n)
        places = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
        q, k, v = ((x @ p[name]).reshape(2, 6, -1, size) for name in "qkv")
        r = (places @ p["r"]).reshape(6, -1, size)
        content = jnp.einsum("bthk,bshk->bhts", q + p["u"], k)
        place = shift(jnp.einsum("bthk,shk->bhts", q + p["v_bias"], r))
        a = jax.nn.softmax((content + place) / size**0.5)
        y = jnp.einsum("bhts,bshk->bthk", a, v).reshape(2, 6, n)
        return norm(x + jnp.tanh(y @ p["o"])) @ p["out"]

    return p, T, call


@program(XL)
def transformer_xl_attention(n):
    return transformer_xl(n, 4)


@program(XL, carries={"q|u|v_bias": 0.5})
def transformer_xl_attention_with_heads_that_get_larger(n):
    return transformer_xl(n, n // 2)


@program({**ENDS, "wq|wk|wv|wo": "H"})
def performer_with_random_features(n):
    p = zeros(
        **{"in": (5, n), "out": (n, 3)}, wq=(n, n), wk=(n, n), wv=(n, n), wo=(n, n)
    )
    features = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)

    def phi(x):
        return jnp.exp(x @ features - (x**2).sum(-1, keepdims=True) / 2)

    def call(p, x):
        x = x @ p["in"]
        q, k = (phi(heads(x @ p[w], 4)) for w in ("wq", "wk"))
        v = heads(x @ p["wv"], 4)
        y = q @ (k.swapaxes(-1, -2) @ v) / (q @ k.sum(2)[..., None])
        return flat(y) @ p["wo"] @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/w_in": "Hb", r"b/\d/w_out": "He", r"b/\d/g": "Vb"}, deep=True)
def palm_with_one_fused_kernel(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    p |= {"b": layers(L, w_in=(n, 7 * n), w_out=(3 * n, n), g=(n,))}

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            q, k, v, up, gate = jnp.split(norm(x, w["g"]) @ w["w_in"], [n, 2 * n, 3 * n, 5 * n], -1)  # fmt: skip
            a = flat(attention(heads(q, 4), heads(k, 4), heads(v, 4), 0.5))
            x = x + jnp.concatenate([a, jax.nn.silu(gate) * up], -1) @ w["w_out"]
        return norm(x) @ p["out"]

    return p, T, call


@program({**ENDS, r"b/\d/(q|k|v)": "Hb", r"b/\d/o": "He", "pos": "I|V"}, deep=True)
def decoding_step_with_a_cache(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, pos=(9, n))
    p |= {"b": layers(L, q=(n, n), k=(n, n), v=(n, n), o=(n, n))}

    def call(p, x, at, cache):
        x = p["in"][x] + jax.lax.dynamic_slice_in_dim(p["pos"], at, 1)
        after = []
        for w, (keys, values) in zip(p["b"], cache, strict=True):
            y = norm(x)
            q, k, v = (heads(y @ w[name], 4) for name in "qkv")
            keys = jax.lax.dynamic_update_slice(keys, k, (0, 0, at, 0))
            values = jax.lax.dynamic_update_slice(values, v, (0, 0, at, 0))
            s = q @ keys.swapaxes(-1, -2) / 2
            a = jax.nn.softmax(jnp.where(jnp.arange(9) <= at, s, -1e9)) @ values
            x = x + flat(a) @ w["o"]
            after.append((keys, values))
        return norm(x) @ p["out"], after

    each = tuple(jnp.zeros((2, n // 4, 9, 4)) for _ in range(2))
    call = functools.partial(lambda c, p, x, at: c(p, x, at, [each] * L), call)
    return p, (tokens(2, 1), tokens()), lambda p, x, at: call(p, x, at)


@program({**ENDS, "probe": "V", "b/(q|k|v|o|up|down)": "H"})
def attention_pooling_with_a_learned_probe(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, probe=(1, 1, n))
    p |= {"b": zeros(q=(n, n), k=(n, n), v=(n, n), o=(n, n), up=(n, n), down=(n, n))}

    def call(p, x):
        x, w = x @ p["in"], p["b"]
        probe = jnp.tile(p["probe"], (x.shape[0], 1, 1))
        q, k, v = (heads(y @ w[m], 4) for y, m in ((probe, "q"), (x, "k"), (x, "v")))
        y = flat(attention(q, k, v, 0.5)) @ w["o"]
        return (jax.nn.gelu(norm(y) @ w["up"]) @ w["down"])[:, 0] @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/(up|gate|shared_up)": "Hb", r"b/\d/(down|shared_down)": "He", r"b/\d/router": "Ob", r"b/\d/bias": "Fb"}, deep=True)  # fmt: skip
def deepseek_experts_with_a_shared_one(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    p |= {"b": layers(L, router=(n, 8), bias=(8,), gate=(8, n, n), up=(8, n, n), down=(8, n, n), shared_up=(n, n), shared_down=(n, n))}  # fmt: skip

    def call(p, x):
        x = p["in"][x].reshape(-1, n)
        for w in p["b"]:
            y = norm(x)
            score = jax.nn.sigmoid(y @ w["router"])
            _, chosen = jax.lax.top_k(score + jax.lax.stop_gradient(w["bias"]), 2)
            weight = jnp.take_along_axis(score, chosen, -1)
            weight = weight / weight.sum(-1, keepdims=True)
            order = jnp.argsort(chosen.reshape(-1))
            rows = jnp.repeat(y, 2, 0)[order]
            sizes = jnp.bincount(chosen.reshape(-1), length=8)
            up = jax.lax.ragged_dot(rows, w["up"], sizes)
            gate = jax.lax.ragged_dot(rows, w["gate"], sizes)
            z = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], sizes)
            z = z[jnp.argsort(order)].reshape(-1, 2, n)
            z = jnp.einsum("tkd,tk->td", z, weight)
            x = x + z + jax.nn.silu(y @ w["shared_up"]) @ w["shared_down"]
        return norm(x) @ p["out"]

    return p, T, call


@program({**ENDS, r"b/\d/up": "Hb", r"b/\d/down": "He", r"b/\d/router": "Ob"}, deep=True)  # fmt: skip
def switch_experts_with_capacity_by_one_hot_einsum(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    p |= {"b": layers(L, router=(n, 4), up=(4, n, 2 * n), down=(4, 2 * n, n))}

    def call(p, x):
        x = p["in"][x].reshape(-1, n)
        for w in p["b"]:
            gates = jax.nn.softmax(norm(x) @ w["router"])
            chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 4)
            place = jnp.cumsum(chosen, 0) * chosen - 1
            send = jax.nn.one_hot(place.astype(int), 5) * chosen[..., None]
            y = jnp.einsum("td,tec->ecd", norm(x), send)
            y = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", y, w["up"])), w["down"])  # fmt: skip
            combine = send * (gates * chosen).sum(-1)[:, None, None]
            x = x + jnp.einsum("ecd,tec->td", y, combine)
        return norm(x) @ p["out"]

    return p, T, call


@program({**ENDS, "slots": "O", "up|down": "H"})
def soft_mixture_of_experts(n):
    p = zeros(
        **{"in": (5, n), "out": (n, 3)}, slots=(n, 4, 2), up=(4, n, n), down=(4, n, n)
    )

    def call(p, x):
        x = x @ p["in"]
        logits = jnp.einsum("btd,dec->btec", norm(x), p["slots"])
        send = jax.nn.softmax(logits, 1)
        combine = jax.nn.softmax(logits.reshape(2, 6, -1)).reshape(logits.shape)
        y = jnp.einsum("btd,btec->becd", x, send)
        y = jax.nn.gelu(jnp.einsum("becd,edf->becf", y, p["up"]))
        y = jnp.einsum("becf,efd->becd", y, p["down"])
        return jnp.einsum("becd,btec->btd", y, combine) @ p["out"]

    return p, S, call


@program({**ENDS, "router": "O", "up|down": "H"})
def expert_choice_routing(n):
    p = zeros(
        **{"in": (5, n), "out": (n, 3)}, router=(n, 4), up=(4, n, n), down=(4, n, n)
    )

    def call(p, x):
        x = (x @ p["in"]).reshape(-1, n)
        gates = jax.nn.softmax(x @ p["router"])
        weight, chosen = jax.lax.top_k(gates.T, 3)
        y = jax.vmap(lambda x, u, d: jax.nn.relu(x @ u) @ d)(
            x[chosen], p["up"], p["down"]
        )
        y = jnp.zeros_like(x).at[chosen.reshape(-1)].add((y * weight[..., None]).reshape(-1, n))  # fmt: skip
        return y @ p["out"]

    return p, S, call


@program({**ENDS, "q|k|v|o": "H", "lam/.": "F"})
def differential_attention(n):
    p = zeros(
        **{"in": (5, n), "out": (n, 3)}, q=(n, 2, n), k=(n, 2, n), v=(n, n), o=(n, n)
    )
    p |= {"lam": [jnp.zeros(4) for _ in range(4)]}

    def call(p, x):
        x = x @ p["in"]
        q = jnp.einsum("btd,dce->cbte", x, p["q"])
        k = jnp.einsum("btd,dce->cbte", x, p["k"])
        v = heads(x @ p["v"], 4)
        one, two = (
            jax.nn.softmax(heads(q[i], 4) @ heads(k[i], 4).swapaxes(-1, -2) / 2)
            for i in range(2)
        )
        a, b, c, d = p["lam"]
        lam = jnp.exp(jnp.sum(a * b)) - jnp.exp(jnp.sum(c * d)) + 0.8
        return (flat(norm((one - lam * two) @ v)) * 0.2) @ p["o"] @ p["out"]

    return p, S, call


@program({"in": "I", "query": "I|V", "ends": "O", r"enc/(q|k|v|o)": "Hb", "w/(q|k|v|o)": "H"})  # fmt: skip
def detr_decoder_queries_without_batch_or_bias(n):
    w = dict(q=(n, n), k=(n, n), v=(n, n), o=(n, n))
    p = zeros(**{"in": (5, n), "ends": (n, 4)}, query=(3, n), enc=w, w=w)

    def attend(w, x, y):
        q, k, v = x @ w["q"], y @ w["k"], y @ w["v"]
        return jax.nn.softmax(q @ k.T / n) @ v @ w["o"]

    def one(p, x):
        x = x @ p["in"]
        x = norm(x + jnp.tanh(attend(p["enc"], x, x)))
        y = attend(p["w"], p["query"], x)
        return jax.nn.sigmoid(norm(y) @ p["ends"])

    return p, S, lambda p, x: jax.vmap(one, (None, 0))(p, x)


@program({**ENDS, "w/(q|k|v|up)": "Hb", "w/(o|down)": "Hb", "halt": "O"})
def universal_transformer_that_halts(n):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, halt=(n, 1))
    p |= {"w": zeros(q=(n, n), k=(n, n), v=(n, n), o=(n, n), up=(n, n), down=(n, n))}

    def block(w, x):
        y = norm(x)
        q, k, v = (heads(y @ w[name], 4) for name in "qkv")
        x = x + flat(attention(q, k, v, 0.5)) @ w["o"]
        return x + jax.nn.relu(norm(x) @ w["up"]) @ w["down"]

    def call(p, x):
        def go(state):
            return (state[1] < 0.99).any() & (state[2] < 8)

        def step(state):
            x, halted, i = state
            now = jax.nn.sigmoid(x @ p["halt"])
            y = block(p["w"], x)
            return jnp.where(halted < 0.99, y, x), halted + now, i + 1

        x = p["in"][x]
        x, _, _ = jax.lax.while_loop(go, step, (x, jnp.zeros((2, 6, 1)), 0))
        return norm(x) @ p["out"]

    return p, T, call


@program({"(token|patch)": "I", "type": "I|V", r"b/\d/(q|k|v|up)": "Hb", r"b/\d/(o|down)": "He", "lm|box": "O"}, deep=True)  # fmt: skip
def vision_language_model_with_two_heads(n, L):
    p = zeros(token=(7, n), patch=(12, n), type=(2, n), lm=(n, 7), box=(n, 4))
    p |= {
        "b": layers(L, q=(n, n), k=(n, n), v=(n, n), o=(n, n), up=(n, n), down=(n, n))
    }

    def call(p, x, image):
        image = image.reshape(2, 4, 2, 4, 2, 3).transpose(0, 1, 3, 2, 4, 5)
        image = image.reshape(2, 16, 12) @ p["patch"] + p["type"][0]
        x = jnp.concatenate([image, p["token"][x] + p["type"][1]], 1)
        for w in p["b"]:
            y = norm(x)
            q, k, v = (heads(y @ w[name], 4) for name in "qkv")
            x = x + flat(attention(q, k, v, 0.5)) @ w["o"]
            x = x + jax.nn.relu(norm(x) @ w["up"]) @ w["down"]
        x = norm(x)
        return x[:, 16:] @ p["lm"], jax.nn.sigmoid(x[:, :16] @ p["box"])

    return p, (tokens(2, 6), floats(2, 8, 8, 3)), call


@program({"(state|action|return)": "I", "time": "I|V", r"b/\d/(q|k|v|up)": "Hb", r"b/\d/(o|down)": "He", "act": "O"}, deep=True)  # fmt: skip
def decision_transformer(n, L):
    p = zeros(
        **{"return": (1, n)}, state=(5, n), action=(3, n), time=(6, n), act=(n, 3)
    )
    p |= {
        "b": layers(L, q=(n, n), k=(n, n), v=(n, n), o=(n, n), up=(n, n), down=(n, n))
    }

    def call(p, r, s, a, t):
        time = p["time"][t]
        parts = [r @ p["return"] + time, s @ p["state"] + time, a @ p["action"] + time]
        x = jnp.stack(parts, 2).reshape(2, 18, n)
        for w in p["b"]:
            y = norm(x)
            q, k, v = (heads(y @ w[name], 4) for name in "qkv")
            x = x + flat(attention(q, k, v, 0.5)) @ w["o"]
            x = x + jax.nn.relu(norm(x) @ w["up"]) @ w["down"]
        return jnp.tanh(norm(x).reshape(2, 6, 3, n)[:, :, 1] @ p["act"])

    return p, (floats(2, 6, 1), floats(2, 6, 5), floats(2, 6, 3), tokens(2, 6)), call


@program({**ENDS, "(q|k|v|o)/.": "H"})
def heads_projected_one_by_one_and_summed(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {k: [jnp.zeros((n, n // 2)) for _ in range(2)] for k in "qkv"}
    p |= {"o": [jnp.zeros((n // 2, n)) for _ in range(2)]}

    def call(p, x):
        x = x @ p["in"]
        parts = [
            attention(x @ q, x @ k, x @ v, 2 / n) @ o
            for q, k, v, o in zip(p["q"], p["k"], p["v"], p["o"], strict=True)
        ]
        return sum(parts) @ p["out"]

    return p, S, call


@program({**ENDS, "q|k|v|o": "H"})
def retention_with_a_norm_of_each_head(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, q=(n, n), k=(n, n), v=(n, n), o=(n, n))

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (heads(x @ p[name], n // 2) for name in "qkv")
        t = jnp.arange(6)
        decay = jnp.where(t[:, None] >= t, 0.9 ** (t[:, None] - t), 0.0)
        y = norm((q @ k.swapaxes(-1, -2) * decay) @ v)
        return flat(y) @ p["o"] @ p["out"]

    return p, S, call


@program(
    {**ENDS, "rel|g": "V", r"b/\d/[kvq]": "Hb", r"b/\d/o": "He"},
    deep=True,
    carries={r"b/\d/q": 0.5},
)
def distances_projected_by_the_keys_of_each_layer(n, L):
    """As in DeBERTa: one table, normalized, and complex rotary positions beside it."""
    p = zeros(**{"in": (5, n), "out": (n, 3)}, rel=(6, n), g=(n,))
    p |= {"b": layers(L, q=(n, n), k=(n, n), v=(n, n), o=(n, n))}
    turn = jnp.exp(1j * jnp.outer(jnp.arange(6), 10.0 ** -jnp.arange(n // 2)))

    def turned(x):
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        y = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * turn
        return jnp.stack([jnp.real(y), jnp.imag(y)], -1).reshape(x.shape)

    def call(p, x):
        x, rel = x @ p["in"], norm(p["rel"], p["g"])
        for w in p["b"]:
            y = norm(x)
            q, k = turned(y @ w["q"]), turned(y @ w["k"])
            scores = q @ k.swapaxes(-1, -2) + (y @ w["q"]) @ (rel @ w["k"]).T
            x = x + jax.nn.softmax(scores * n**-0.5) @ (y @ w["v"]) @ w["o"]
        return norm(x) @ p["out"]

    return p, S, call

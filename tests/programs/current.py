"""Programs of code bases of 2025 and 2026, in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

from .kit import floats, layers, program, tokens, zeros
from .plain import S, T, attention, norm
from .transformers import flat, heads, rope

ENDS = {"in": "I", "out": "O"}


def ends(n, m=7, **more):
    return zeros(**{"in": (7, n), "out": (n, m)}, **more)


@program(
    {
        **ENDS,
        r"b/\d/(q|k|v)": "Hb",
        r"b/\d/s": "Fb",
        r"b/\d/gu": "Hb",
        r"b/\d/o": "He",
        r"b/\d/down": "He",
        r"b/\d/(gb)": "Vb",
    },
    deep=True,
)
def gpt_oss_with_sinks_and_interleaved_gates(n, L):
    p = ends(n) | {
        "b": layers(
            L,
            q=(n, n),
            k=(n, n),
            v=(n, n),
            o=(n, n),
            s=(4,),
            gu=(n, 4 * n),
            gb=(4 * n,),
            down=(2 * n, n),
        )
    }

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            y = norm(x)
            q, k, v = (y @ w[c] for c in "qkv")
            q, k, v = (z.reshape(2, 6, 4, n // 4).swapaxes(1, 2) for z in (q, k, v))
            s = q @ k.swapaxes(-1, -2) * (4 / n)
            sink = jnp.broadcast_to(w["s"][None, :, None, None], (2, 4, 6, 1))
            a = jax.nn.softmax(jnp.concatenate([s, sink], -1))[..., :-1] @ v
            x = x + flat(a) @ w["o"]
            h = norm(x) @ w["gu"] + w["gb"]
            gate, up = h[..., ::2], h[..., 1::2]
            gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
            x = x + ((up + 1) * gate * jax.nn.sigmoid(1.702 * gate)) @ w["down"]
        return norm(x) @ p["out"]

    return p, T, call


@program(
    {**ENDS, r"b/\d/c": "Ie", r"b/\d/(q|k|v|u)": "Hb", r"b/\d/(o|d)": "He"}, deep=True
)
def canon_layers_of_causal_convolutions(n, L):
    p = ends(n) | {
        "b": layers(
            L, c=(4, 1, n), q=(n, n), k=(n, n), v=(n, n), o=(n, n), u=(n, n), d=(n, n)
        )
    }

    def canon(x, c):
        y = lax.conv_general_dilated(
            x,
            c,
            (1,),
            [(3, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=n,
        )
        return x + y

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            x = canon(x, w["c"])
            y = norm(x)
            q, k, v = (heads(y @ w[c], 4) for c in "qkv")
            x = x + flat(attention(rope(q), rope(k), v, 0.5)) @ w["o"]
            x = x + jax.nn.silu(norm(x) @ w["u"]) @ w["d"]
        return norm(x) @ p["out"]

    return p, T, call


@program(
    {**ENDS, r"b/\d/(q|k|v|u|d|o)": "Hb", r"b/\d/(a|m)": "Ve", "s": "F"},
    deep=True,
    carries={r"b/\d/u": 2.0, "out": 2.0},
)
def ngpt_on_the_sphere(n, L):
    p = ends(n, s=(7,)) | {
        "b": layers(
            L,
            q=(n, n),
            k=(n, n),
            v=(n, n),
            o=(n, n),
            u=(n, n),
            d=(n, n),
            a=(n,),
            m=(n,),
        )
    }

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def call(p, x):
        x = unit(p["in"][x])
        for w in p["b"]:
            q, k, v = (heads(x @ w[c], 4) for c in "qkv")
            y = unit(flat(attention(unit(q), unit(k), v, 2.0)) @ w["o"])
            x = unit(x + w["a"] * (y - x))
            y = unit(jax.nn.silu(x @ w["u"]) @ w["d"])
            x = unit(x + w["m"] * (y - x))
        return x @ p["out"] * p["s"]

    return p, T, call


@program(
    {
        **ENDS,
        r"b/\d/(q|k|v|u)": "Hb",
        r"b/\d/(o|d)": "He",
        r"b/\d/ve": "Ib",
        r"b/\d/lam": "Fb",
        r"b/\d/mix": "Fsm",
    },
    deep=True,
)
def modded_nanogpt_with_value_embeddings(n, L):
    p = ends(n) | {
        "b": layers(
            L,
            q=(n, n),
            k=(n, n),
            v=(n, n),
            o=(n, n),
            u=(n, n),
            d=(n, n),
            ve=(7, n),
            lam=(2,),
            mix=(2,),
        )
    }

    def call(p, t):
        x = x0 = norm(p["in"][t])
        for w in p["b"]:
            x = w["mix"][0] * x + w["mix"][1] * x0
            y = norm(x)
            v = w["lam"][0] * (y @ w["v"]) + w["lam"][1] * w["ve"][t]
            q, k = (norm(heads(y @ w[c], 4)) for c in "qk")
            x = x + flat(attention(q, k, heads(v, 4), 0.12)) @ w["o"]
            x = x + jnp.square(jax.nn.relu(norm(x) @ w["u"])) @ w["d"]
        return 30 * jax.nn.sigmoid(norm(x) @ p["out"] / 7.5)

    return p, T, call


@program(
    {
        **ENDS,
        r"b/\d/(x|c)(q|k|v|u)": "Hb",
        r"b/\d/(x|c)(o|d)": "He",
        "t": "I",
        r"b/\d/mod": "Hb",
    },
    deep=True,
)
def mmdit_with_two_streams(n, L):
    names = {s + k: (n, n) for s in "xc" for k in "qkvoud"}
    p = ends(n, t=(5, n)) | {"b": layers(L, **names, mod=(n, n))}

    def call(p, x, c):
        x, c = p["in"][x], c @ p["t"]
        for w in p["b"]:
            sh = jax.nn.silu(c.mean(1, keepdims=True)) @ w["mod"]
            qs, ks, vs = (
                [heads((norm(z) + sh) @ w[s + k], 4) for s, z in (("x", x), ("c", c))]
                for k in "qkv"
            )
            a = flat(attention(*(jnp.concatenate(z, 2) for z in (qs, ks, vs)), 0.5))
            x = x + a[:, :6] @ w["xo"]
            c = c + a[:, 6:] @ w["co"]
            x = x + jax.nn.gelu(norm(x) @ w["xu"]) @ w["xd"]
            c = c + jax.nn.gelu(norm(c) @ w["cu"]) @ w["cd"]
        return norm(x) @ p["out"]

    return p, (tokens(2, 6), floats(2, 3, 5)), call


@program(
    {**ENDS, "c": "I", r"b/\d/[xc](q|k|v|u)": "Hb", r"b/\d/[xc](o|d)": "He"}, deep=True
)
def mmdit_whose_last_layer_adds_to_one_stream(n, L):
    each = [x + k for x in "xc" for k in "qkvoud"]
    p = ends(n, c=(5, n)) | {"b": layers(L, **dict.fromkeys(each, (n, n)))}
    for k in "oud":
        del p["b"][-1]["c" + k]

    def call(p, x, c):
        x, c = p["in"][x], c @ p["c"]
        for w in p["b"]:
            y = dict(x=norm(x), c=norm(c))
            q, k, v = (
                jnp.concatenate([y[s] @ w[s + z] for s in "xc"], 1) for z in "qkv"
            )
            a = flat(attention(*(heads(z, 4) for z in (q, k, v)), 0.5))
            x = x + a[:, :6] @ w["xo"]
            x = x + jax.nn.gelu(norm(x) @ w["xu"]) @ w["xd"]
            if "co" in w:
                c = c + a[:, 6:] @ w["co"]
                c = c + jax.nn.gelu(norm(c) @ w["cu"]) @ w["cd"]
        return norm(x) @ p["out"]

    return p, (tokens(2, 6), floats(2, 3, 5)), call


@program({"in": "I", "out": "O", "(k|v)0": "H", "(k|v)1": "H"})
def tokenformer_whose_kernels_are_tokens(n):
    p = zeros(
        **{"in": (7, n), "out": (n, 7)},
        k0=(2 * n, n),
        v0=(2 * n, n),
        k1=(n, n),
        v1=(n, n),
    )

    def pattention(x, k, v):
        s = x @ k.T
        s = s / jnp.sqrt((s * s).mean(-1, keepdims=True) + 1e-6)
        return jax.nn.gelu(s) @ v

    def call(p, x):
        x = norm(p["in"][x])
        x = norm(pattention(x, p["k0"], p["v0"]))
        return norm(pattention(x, p["k1"], p["v1"])) @ p["out"]

    return p, T, call


@program(
    {
        **ENDS,
        r"b/\d/u": "Hb",
        r"b/\d/d": "He",
        r"b/\d/gate": "Ob",
        r"b/\d/up": "Ie",
        "ple": "Fb",
    },
    deep=True,
)
def gemma_3n_per_layer_embeddings(n, L):
    p = ends(n, ple=(7, L, 4)) | {
        "b": layers(L, u=(n, n), d=(n, n), gate=(n, 4), up=(4, n))
    }

    def call(p, t):
        x, ple = p["in"][t], p["ple"][t]
        for i, w in enumerate(p["b"]):
            x = x + jax.nn.gelu(norm(x) @ w["u"]) @ w["d"]
            x = x + (jax.nn.gelu(norm(x) @ w["gate"]) * ple[:, :, i]) @ w["up"]
        return norm(x) @ p["out"]

    return p, T, call


@program(
    {**ENDS, "pre/(u|d)": "H", "ad": "H", r"core/\d/u": "Hb", r"core/\d/d": "He"},
    deep=True,
)
def recurrent_depth_with_an_adapter(n, L):
    """A core of L layers, run three times, that reads the prelude's result each time."""
    p = ends(n, pre={"u": (n, n), "d": (n, n)}, ad=(2 * n, n)) | {
        "core": layers(L, u=(n, n), d=(n, n))
    }

    def call(p, x):
        e = p["in"][x]
        e = e + jax.nn.gelu(norm(e) @ p["pre"]["u"]) @ p["pre"]["d"]
        s = jnp.zeros_like(e)
        for _ in range(3):
            s = jnp.concatenate([s, e], -1) @ p["ad"]
            for w in p["core"]:
                s = s + jax.nn.gelu(norm(s) @ w["u"]) @ w["d"]
        return norm(s) @ p["out"]

    return p, T, call


@program({"in": "I", "out": "O", "(z|r|h)": "H", "(zi|ri|hi)": "H"})
def block_diagonal_gru_of_dreamer(n):
    g = 4
    p = zeros(
        **{"in": (5, n), "out": (n, 3)},
        **dict.fromkeys("zrh", (g, n // g, n // g)),
        **{k + "i": (n, n) for k in "zrh"},
    )

    def block(x, w):
        y = jnp.einsum("bgi,gij->bgj", x.reshape(-1, g, n // g), w)
        return y.reshape(-1, n)

    def call(p, x):
        def step(h, x):
            x = jax.nn.silu(norm(x @ p["in"]))
            z = jax.nn.sigmoid(block(h, p["z"]) + x @ p["zi"] - 1)
            r = jax.nn.sigmoid(block(h, p["r"]) + x @ p["ri"])
            c = jnp.tanh(r * block(h, p["h"]) + x @ p["hi"])
            h = (1 - z) * h + z * c
            return h, h

        _, hs = lax.scan(step, jnp.zeros((2, n)), x.swapaxes(0, 1))
        return hs @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def matformer_with_a_nested_submodel(n, L):
    """The loss is of the whole feed-forward layers and of their first halves."""
    p = ends(n) | {"b": layers(L, u=(n, 2 * n), d=(2 * n, n))}

    def run(p, x, m):
        x = p["in"][x]
        for w in p["b"]:
            x = x + jax.nn.gelu(norm(x) @ w["u"][:, :m]) @ w["d"][:m]
        return norm(x) @ p["out"]

    return p, T, lambda p, x: (run(p, x, 2 * n), run(p, x, n))


@program(
    {
        **ENDS,
        "bytes": "I",
        "ng": "I",
        "(q|k|v|o)": "H",
        r"b/\d/u": "Hb",
        r"b/\d/d": "He",
        "out": "O",
    },
    deep=True,
    carries={"q": 0.25},
)
def byte_latent_patches_by_segments(n, L):
    p = zeros(
        bytes=(7, n),
        ng=(11, n),
        q=(n, n),
        k=(n, n),
        v=(n, n),
        o=(n, n),
        out=(n, 7),
        **{"in": (4, n)},
    ) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, t, seg):
        e = p["bytes"][t] + p["ng"][(t * 7 + jnp.roll(t, 1, -1)) % 11] + p["in"][t % 4]
        patch = jax.vmap(lambda x, s: jax.ops.segment_max(x, s, 3))(e, seg)
        y = jax.nn.softmax((patch @ p["q"]) @ (e @ p["k"]).swapaxes(-1, -2)) @ (
            e @ p["v"]
        )
        x = patch + y @ p["o"]
        for w in p["b"]:
            x = x + jax.nn.gelu(norm(x) @ w["u"]) @ w["d"]
        x = jnp.take_along_axis(x, seg[..., None], 1) + e
        return norm(x) @ p["out"]

    return p, (tokens(2, 6), tokens(2, 6)), call


@program(
    {**ENDS, "u": "Hb", "d": "He", "gate": "Ob", "up": "Ie", "ple": "Fb"}, deep=True
)
def gemma_3n_per_layer_embeddings_in_a_scan(n, L):
    p = ends(n, ple=(7, L, 4), u=(L, n, n), d=(L, n, n), gate=(L, n, 4), up=(L, 4, n))

    def call(p, t):
        def layer(x, each):
            w, ple = each
            x = x + jax.nn.gelu(norm(x) @ w["u"]) @ w["d"]
            return x + (jax.nn.gelu(norm(x) @ w["gate"]) * ple) @ w["up"], None

        layers = {name: p[name] for name in ("u", "d", "gate", "up")}
        x, _ = lax.scan(layer, p["in"][t], (layers, jnp.moveaxis(p["ple"][t], 2, 0)))
        return norm(x) @ p["out"]

    return p, T, call


@program({"in": "I", "out": "O", "z": "V", "(k|v|o)": "H", "b": "V", "c": "V"})
def number_of_latents_grows(n):
    p = zeros(
        **{"in": (7, n), "out": (n, 7)},
        z=(n // 2, n),
        k=(n, n),
        v=(n, n),
        o=(n, n),
        b=(n,),
        c=(n,),
    )

    def call(p, x):
        x = p["in"][x]
        k = p["z"] @ p["k"] + p["b"]
        v = p["z"] @ p["v"] + p["c"]
        return jax.nn.softmax(x @ k.T / n) @ v @ p["o"] @ p["out"]

    return p, T, call


# As Equinox's layers, which multiply each latent by a kernel of (outputs, inputs).
@program({"in": "I", "out": "O", "z": "V", "(k|v|o)": "H", "b": "V", "c": "V"})
def number_of_latents_grows_under_vmap(n):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, z=(n // 2, n), b=(n,), c=(n,))
    p |= zeros(**dict.fromkeys("kvo", (n, n)))

    def call(p, x):
        x = p["in"][x]
        k = jax.vmap(lambda z: p["k"] @ z + p["b"])(p["z"])
        v = jax.vmap(lambda z: p["v"] @ z + p["c"])(p["z"])
        return jax.nn.softmax(x @ k.T / n) @ v @ p["o"] @ p["out"]

    return p, T, call


@program(
    {
        **ENDS,
        r"b/\d/proj": "H|Ob",
        r"b/\d/conv": "I|Fb",
        r"b/\d/cb": "V|Fb",
        r"b/\d/(A|D|dtb)": "Vb",
        r"b/\d/o": "He",
    },
    deep=True,
)
def mamba_2_with_a_depthwise_convolution(n, L):
    N, P = 4, 2
    H = n // P
    p = ends(n) | {
        "b": layers(
            L,
            proj=(n, 2 * n + 2 * N + H),
            conv=(4, 1, n + 2 * N),
            cb=(n + 2 * N,),
            A=(H,),
            D=(H,),
            dtb=(H,),
            o=(n, n),
        )
    }

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            z, xbc, dt = jnp.split(norm(x) @ w["proj"], [n, 2 * n + 2 * N], -1)
            xbc = lax.conv_general_dilated(
                xbc,
                w["conv"],
                (1,),
                [(3, 0)],
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=n + 2 * N,
            )
            xbc = jax.nn.silu(xbc + w["cb"])
            u, B, C = jnp.split(xbc, [n, n + N], -1)
            u = u.reshape(2, 6, H, P)
            dt = jax.nn.softplus(dt + w["dtb"])
            decay = jnp.exp(-jnp.exp(w["A"]) * dt)

            def step(h, each):
                u, B, C, dt, a = each
                h = (
                    h * a[..., None, None]
                    + (dt[..., None] * u)[..., None] * B[:, None, None]
                )
                return h, (h * C[:, None, None]).sum(-1)

            xs = tuple(jnp.moveaxis(y, 1, 0) for y in (u, B, C, dt, decay))
            _, y = lax.scan(step, jnp.zeros((2, H, P, N)), xs)
            y = jnp.moveaxis(y, 0, 1) + u * w["D"][:, None]
            x = x + norm(y.reshape(2, 6, n) * jax.nn.silu(z)) @ w["o"]
        return norm(x) @ p["out"]

    return p, T, call


@program({**ENDS, r"b/\d/qkv": "Hb", r"b/\d/o": "He"}, deep=True)
def fused_qkv_unstacked(n, L):
    p = ends(n) | {"b": layers(L, qkv=(n, 3 * n), o=(n, n))}

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            q, k, v = jnp.unstack((norm(x) @ w["qkv"]).reshape(2, 6, 3, n), axis=2)
            x = x + flat(attention(*(heads(z, 4) for z in (q, k, v)), 0.5)) @ w["o"]
        return norm(x) @ p["out"]

    return p, T, call

"""The same layers in other spellings: loops, slices, maps and joined parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .kit import floats, layers, program, tokens, zeros
from .plain import S, X, attention, norm
from .transformers import flat, heads

ENDS = {"in": "I", "out": "O"}


def ends(n):
    return {"in": (5, n), "out": (n, 3)}


@program({**ENDS, r"b/\d/(q|k|v|u)": "Hb", r"b/\d/(o|d)": "He"}, deep=True)
def grouped_queries_sliced_in_a_loop(n, L):
    hd = 4
    H, G = n // hd, n // hd // 2
    p = zeros(**ends(n)) | {
        "b": layers(
            L, q=(n, n), k=(n, G * hd), v=(n, G * hd), o=(n, n), u=(n, n), d=(n, n)
        )
    }

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x)
            q, k, v = y @ w["q"], y @ w["k"], y @ w["v"]
            outs = []
            for h in range(H):
                g = h // (H // G)
                qh = q[..., h * hd : (h + 1) * hd]
                kh = k[..., g * hd : (g + 1) * hd]
                vh = v[..., g * hd : (g + 1) * hd]
                s = jnp.einsum("btd,bsd->bts", qh, kh) / np.sqrt(hd)
                outs.append(jnp.einsum("bts,bsd->btd", jax.nn.softmax(s, -1), vh))
            x = x + jnp.concatenate(outs, -1) @ w["o"]
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
        return x @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/c": "Ve"}, deep=True)
def branches_that_a_loop_computes_part_by_part(n, L):
    """As AlphaFold's, in inference: results are written into an array of zeros."""
    p = zeros(**ends(n)) | {"b": layers(L, u=(n, n), d=(n, n), c=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:

            def part(i, results, x=x, w=w):
                h = jax.nn.relu(lax.dynamic_slice_in_dim(x, i, 1, 1) @ w["u"])
                return lax.dynamic_update_slice_in_dim(
                    results, h @ w["d"] + w["c"], i, 1
                )

            x = x + lax.fori_loop(0, x.shape[1], part, jnp.zeros_like(x))
        return x @ p["out"]

    return p, S, call


@program(
    {**ENDS, r"b/\d/qkv": "Hb", r"b/\d/o": "He", r"b/\d/s": "Vb"},
    deep=True,
    carries={r"b/\d/qkv": 1.0},
)
def array_split_of_a_fused_kernel_transposed(n, L):
    p = zeros(**ends(n)) | {"b": layers(L, qkv=(3 * n, n), o=(n, n), s=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x) * w["s"]
            q, k, v = jnp.array_split(y @ w["qkv"].T, 3, axis=-1)
            q, k, v = (heads(a, 4) for a in (q, k, v))
            x = x + lax.dot_general(
                flat(attention(q, k, v, 0.5)), w["o"], (((2,), (1,)), ((), ()))
            )
        return x @ p["out"]

    return p, S, call


@program({**ENDS, r"qkv": "Hb", "o": "He"}, deep=True)
def kernel_split_before_the_product_by_dynamic_slice(n, L):
    p = zeros(**ends(n), qkv=(L, n, 3 * n), o=(L, n, n))

    def call(p, x):
        def body(i, x):
            w = lax.dynamic_index_in_dim(p["qkv"], i, 0, keepdims=False)
            q, k, v = (
                norm(x) @ lax.dynamic_slice_in_dim(w, j * n, n, 1) for j in range(3)
            )
            q, k, v = (heads(a, 4) for a in (q, k, v))
            return x + flat(attention(q, k, v, 0.5)) @ lax.dynamic_index_in_dim(
                p["o"], i, 0, False
            )

        return lax.fori_loop(0, L, body, x @ p["in"]) @ p["out"]

    return p, S, call


@program(
    {**ENDS, r"b/\d/(k|v|f)": "Hb", r"b/\d/o": "He", r"b/\d/q": "Hb"},
    deep=True,
    carries={r"b/\d/q": 0.5},
)
def flash_attention_by_blocks_of_keys(n, L):
    p = zeros(**ends(n)) | {"b": layers(L, q=(n, n), k=(n, n), v=(n, n), o=(n, n))}

    def flash(q, k, v):
        scale = 1 / np.sqrt(q.shape[-1])
        kb, vb = (a.reshape(a.shape[0], 3, 2, n).swapaxes(0, 1) for a in (k, v))

        def step(c, kv):
            o, m, l = c
            k, v = kv
            s = jnp.einsum("bqd,bkd->bqk", q, k, precision="highest") * scale
            m_new = jnp.maximum(m, s.max(-1))
            alpha = jnp.exp(m - m_new)
            e = jnp.exp(s - m_new[..., None])
            l = l * alpha + e.sum(-1)
            o = o * alpha[..., None] + e @ v
            return (o, m_new, l), None

        z = jnp.zeros(q.shape[:2])
        (o, _, l), _ = lax.scan(step, (jnp.zeros_like(q), z - jnp.inf, z), (kb, vb))
        return o / l[..., None]

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x)
            x = x + flash(y @ w["q"], y @ w["k"], y @ w["v"]) @ w["o"]
        return x @ p["out"]

    return p, S, call


@program({**ENDS, r"u|w": "Hb", "d|v": "He"}, deep=True)
def cond_of_two_kinds_of_layers_in_a_scan(n, L):
    p = zeros(**ends(n), u=(L, n, n), d=(L, n, n), w=(L, n, n), v=(L, n, n))

    def call(p, x):
        def body(x, c):
            w, i = c
            even = lambda x: x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
            odd = lambda x: x + jnp.tanh(norm(x) @ w["w"]) @ w["v"]
            return lax.cond(i % 2 == 0, even, odd, x), None

        x, _ = lax.scan(body, x @ p["in"], ({k: p[k] for k in "udwv"}, jnp.arange(L)))
        return x @ p["out"]

    return p, X, call


@program({**ENDS, "a|b/0|b/1": "Hb", "c|b/2|b/3": "He"}, deep=True)
def scan_over_a_tuple_of_stacked_layers_of_two_blocks_each(n, L):
    p = {**zeros(**ends(n)), "b": tuple(jnp.zeros((L // 2, n, n)) for _ in range(4))}

    def call(p, x):
        def body(x, w):
            x = x + jax.nn.relu(x @ w[0]) @ w[2]
            x = x + jax.nn.relu(x @ w[1]) @ w[3]
            return x, None

        return lax.scan(body, x @ p["in"], p["b"])[0] @ p["out"]

    return p, X, call


@program({**ENDS, "w": "H"})
def one_array_sliced_into_layers(n):
    p = zeros(**ends(n), w=(3 * n, n))

    def call(p, x):
        x = x @ p["in"]
        for i in range(3):
            x = jnp.tanh(x @ p["w"][i * n : (i + 1) * n])
        return x @ p["out"]

    return p, X, call


@program({**ENDS, "w": "H|V", "b": "V"})
def biases_as_rows_of_the_kernel(n):
    """A column of ones: the bias is the last row of the kernel (old style)."""
    p = zeros(**ends(n), w=(n + 1, n))

    def call(p, x):
        x = jnp.tanh(x @ p["in"])
        x = jnp.concatenate([x, jnp.ones((4, 1))], -1)
        return jnp.tanh(x @ p["w"]) @ p["out"]

    return p, X, call


@program(
    {
        **ENDS,
        r"b/\d/(in|x|z)": "Hb",
        r"b/\d/o": "He",
        r"b/\d/(Lre|Lim|D|dt)": "Vb",
        r"b/\d/(Bre|Bim|Cre|Cim)": "Hb",
    },
    deep=True,
)
def lru_with_a_state_that_grows(n, L):
    p = zeros(**ends(n)) | {
        "b": layers(
            L,
            Lre=(n,),
            Lim=(n,),
            dt=(n,),
            Bre=(n, n),
            Bim=(n, n),
            Cre=(n, n),
            Cim=(n, n),
            D=(n,),
            o=(n, n),
        )
    }

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            lam = jnp.exp(-jnp.exp(w["Lre"]) + 1j * jnp.exp(w["Lim"]))
            B = (w["Bre"] + 1j * w["Bim"]) * jnp.exp(w["dt"])[:, None]
            C = w["Cre"] + 1j * w["Cim"]
            u = norm(x)
            bu = u @ B.T
            lams = jnp.broadcast_to(lam, bu.shape)
            f = lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1])
            _, h = lax.associative_scan(f, (lams, bu), axis=1)
            y = jax.nn.gelu((h @ C.T).real + w["D"] * u)
            x = x + y @ w["o"]
        return x @ p["out"]

    return p, S, call


@program(
    {**ENDS, r"b/\d/wx": "Hb", r"b/\d/r": "Ib", r"b/\d/o": "He", r"b/\d/bias": "Vb"},
    deep=True,
)
def slstm_with_block_diagonal_recurrence(n, L):
    H, hd = n // 4, 4
    p = zeros(**ends(n)) | {
        "b": layers(L, wx=(n, 4 * n), r=(4, H, hd, hd), bias=(4 * n,), o=(n, n))
    }

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            g = (norm(x) @ w["wx"] + w["bias"]).reshape(2, 6, 4, H, hd)

            def step(s, g, r=w["r"]):
                h, c, nn, m = s
                a = g + jnp.einsum("bhi,ghio->bgho", h, r)
                z, i, f, o = a[:, 0], a[:, 1], a[:, 2], a[:, 3]
                lf = jax.nn.log_sigmoid(f)
                m2 = jnp.maximum(lf + m, i)
                i, f = jnp.exp(i - m2), jnp.exp(lf + m - m2)
                c = f * c + i * jnp.tanh(z)
                nn = f * nn + i
                h = jax.nn.sigmoid(o) * c / nn
                return (h, c, nn, m2), h

            z0 = jnp.zeros((2, H, hd))
            _, h = lax.scan(step, (z0,) * 4, g.swapaxes(0, 1))
            x = x + h.swapaxes(0, 1).reshape(2, 6, n) @ w["o"]
        return x @ p["out"]

    return p, S, call


@program(
    {**ENDS, r"b/\d/(q|k|v|g)": "Hb", r"b/\d/o": "He", r"b/\d/beta": "Hb"}, deep=True
)
def gated_delta_net(n, L):
    hd, H = 4, n // 4
    p = zeros(**ends(n)) | {
        "b": layers(L, q=(n, n), k=(n, n), v=(n, n), g=(n, H), beta=(n, H), o=(n, n))
    }

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x)
            q, k, v = (jax.nn.silu(y @ w[c]).reshape(2, 6, H, hd) for c in "qkv")
            l2 = lambda a: a / jnp.sqrt((a * a).sum(-1, keepdims=True) + 1e-6)
            q, k = l2(q), l2(k)
            beta, g = (
                jax.nn.sigmoid(y @ w["beta"]),
                jnp.exp(-jax.nn.softplus(y @ w["g"])),
            )

            def step(S, i):
                q, k, v, b, g = i
                S = S * g[..., None, None]
                d = (v - jnp.einsum("bhk,bhkv->bhv", k, S)) * b[..., None]
                S = S + k[..., None] * d[..., None, :]
                return S, jnp.einsum("bhk,bhkv->bhv", q, S)

            _, o = lax.scan(
                step,
                jnp.zeros((2, H, hd, hd)),
                tuple(a.swapaxes(0, 1) for a in (q, k, v, beta, g)),
            )
            x = x + norm(o.swapaxes(0, 1)).reshape(2, 6, n) @ w["o"]
        return x @ p["out"]

    return p, S, call


# The squares of keys and queries add up to one in each head, however large it is.
def decay(state, k, v, b):
    return (1 - b[:, None]) * state + v[:, None] * k


def delta_rule(state, k, v, b):
    return state + (b * (v - state @ k))[:, None] * k


def householder(state, k, v, b):
    return state @ (jnp.eye(k.size) - b * k[:, None] * k) + b * jnp.outer(v, k)


for rule in (decay, delta_rule, householder):

    def make(n, rule=rule):
        p = zeros(**{"in": (5, n), "out": (n, 3)}, beta=(n, 2))
        p |= zeros(**dict.fromkeys("qkvo", (n, n)))

        def one(q, k, v, b):
            def step(state, i):
                q, k, v, b = i
                state = rule(state, k, v, b)
                return state, state @ q

            return lax.scan(step, jnp.zeros((v.shape[-1],) * 2), (q, k, v, b))[1]

        def call(p, x):
            x = x @ p["in"]
            q, k, v = ((x @ p[c]).reshape(2, 6, 2, n // 2) for c in "qkv")
            q, k = (y / jnp.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
            b = jax.nn.sigmoid(x @ p["beta"])[..., None]
            y = jax.vmap(jax.vmap(one, 1, 1))(q, k, v, b)
            return norm(x + y.reshape(2, 6, n) @ p["o"]) @ p["out"]

        return p, S, call

    make.__name__ = f"state_of_heads_that_get_larger_by_{rule.__name__}"
    program({**ENDS, "q|k|v|o": "H", "beta": "O"})(make)


@program({**ENDS, r"b/\d/(q|k|v)": "Hb", r"b/\d/o": "He"}, deep=True)
def linear_attention_by_chunks(n, L):
    hd, H = 4, n // 4
    p = zeros(**ends(n)) | {"b": layers(L, q=(n, n), k=(n, n), v=(n, n), o=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x)
            phi = lambda a: jax.nn.elu(a) + 1
            q, k, v = (heads(y @ w[c], hd) for c in "qkv")
            q, k = phi(q), phi(k)
            ck = lambda a: jnp.moveaxis(a.reshape(2, H, 3, 2, hd), 2, 0)

            def chunk(S, i):
                q, k, v = i
                inner = jnp.tril(q @ k.mT) @ v
                return S + k.mT @ v, q @ S + inner

            _, o = lax.scan(chunk, jnp.zeros((2, H, hd, hd)), (ck(q), ck(k), ck(v)))
            o = jnp.moveaxis(o, 0, 2).reshape(2, H, 6, hd)
            x = x + flat(norm(o)) @ w["o"]
        return x @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/(q|k|v)": "Hb", r"b/\d/o": "He", "slopes": "Vba"}, deep=True)
def alibi_with_learned_slopes_and_window(n, L):
    hd, H = 4, n // 4
    p = zeros(**ends(n), slopes=(H,)) | {
        "b": layers(L, q=(n, n), k=(n, n), v=(n, n), o=(n, n))
    }

    def call(p, x):
        x = x @ p["in"]
        dist = jnp.abs(jnp.arange(6)[:, None] - jnp.arange(6))
        for w in p["b"]:
            y = norm(x)
            q, k, v = (heads(y @ w[c], hd) for c in "qkv")
            s = (
                q @ k.mT / np.sqrt(hd)
                - jax.nn.softplus(p["slopes"])[:, None, None] * dist
            )
            s = jnp.where(dist < 3, s, jnp.finfo(s.dtype).min)
            x = x + flat(jax.nn.softmax(s) @ v) @ w["o"]
        return x @ p["out"]

    return p, S, call


# A Fourier transform over the units grows as the root of their number.
@program({**ENDS, r"b/\d/(u|ub)": "Hb", r"b/\d/d": "He"}, deep=True, asks="them by 0.5")
def fnet_as_in_the_paper(n, L, remedy=False):
    p = zeros(**ends(n)) | {"b": layers(L, u=(n, 2 * n), d=(2 * n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = norm(x + jnp.fft.fft2(x, norm="ortho" if remedy else None).real)
            x = norm(x + jax.nn.gelu(x @ w["u"]) @ w["d"])
        return x @ p["out"]

    return p, S, call


@program({**ENDS, "w1|w2": "H", "router": "O", "rn": "O"})
def experts_by_scan_over_experts(n):
    p = zeros(**ends(n), router=(n, 4), w1=(4, n, n), w2=(4, n, n))

    def call(p, x):
        x = x @ p["in"]
        g = jax.nn.softmax(x @ p["router"])

        def body(acc, ew):
            w1, w2, ge = ew
            return acc + ge[..., None] * (jax.nn.relu(x @ w1) @ w2), None

        y, _ = lax.scan(
            body, jnp.zeros_like(x), (p["w1"], p["w2"], jnp.moveaxis(g, -1, 0))
        )
        return y @ p["out"]

    return p, S, call


@program({**ENDS, "w1|w2": "H", "router": "O"})
def top_1_expert_by_switch_under_vmap(n):
    p = zeros(**ends(n), router=(n, 3), w1=(3, n, n), w2=(3, n, n))

    def call(p, x):
        x = x @ p["in"]

        def token(v):
            g = jax.nn.softmax(v @ p["router"])
            i = jnp.argmax(g)
            fs = [
                lambda v, i=i: jax.nn.relu(v @ p["w1"][i]) @ p["w2"][i]
                for i in range(3)
            ]
            return g[i] * lax.switch(i, fs, v)

        return jax.vmap(token)(x) @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/(q|k|v)": "Hb", r"b/\d/o": "He", r"pk|pv": "Vb"}, deep=True)
def prefix_tuning(n, L):
    p = zeros(**ends(n), pk=(L, 3, n), pv=(L, 3, n)) | {
        "b": layers(L, q=(n, n), k=(n, n), v=(n, n), o=(n, n))
    }

    def call(p, x):
        x = x @ p["in"]
        for i, w in enumerate(p["b"]):
            y = norm(x)
            k = jnp.concatenate(
                [jnp.broadcast_to(p["pk"][i], (2, 3, n)), y @ w["k"]], 1
            )
            v = jnp.concatenate(
                [jnp.broadcast_to(p["pv"][i], (2, 3, n)), y @ w["v"]], 1
            )
            x = (
                x
                + flat(attention(heads(y @ w["q"], 4), heads(k, 4), heads(v, 4), 0.5))
                @ w["o"]
            )
        return x @ p["out"]

    return p, S, call


def standardized(x):
    return jax.vmap(lambda x: (x - x.mean()) / (x.std() + 1e-5))(x)


class Keys(dict):
    """A dictionary whose attributes are its keys."""

    __getattr__ = dict.__getitem__


jax.tree_util.register_pytree_with_keys(
    Keys,
    lambda x: ([(jax.tree_util.DictKey(k), v) for k, v in x.items()], tuple(x)),
    lambda names, values: Keys(zip(names, values, strict=True)),
)


@program({"embed": "I", "position|end": "V", "out": "O", r"blocks/\d/gain": "Vb", r"blocks/\d/(values/\d|down)": "He", r"blocks/\d/up": "Hb"}, deep=True, carries={"embed": 2.0})  # fmt: skip
def gains_as_diagonal_matrices_of_joined_heads(n, L):
    """A small embedding, norms of single tokens, keys of dictionaries as attributes."""
    p = Keys(zeros(embed=(11, n), position=(6, n), end=(n,), out=(n, 5)))
    blocks = layers(L, gain=(n,), up=(n, 2 * n), down=(2 * n, n))
    p["blocks"] = [
        Keys(b, values=[jnp.zeros((n, n // 2)) for _ in range(2)]) for b in blocks
    ]

    def call(p, x):
        x = p.embed[x] * n**-0.5 + p.position
        for w in p.blocks:
            heads = [standardized(x) @ v for v in w["values"]]
            x = x + jnp.hstack(heads)
            x = x + jax.nn.relu(standardized(x) @ jnp.diag(w.gain) @ w.up) @ w.down
        return standardized(x) @ jnp.diag(p.end) @ p.out

    return p, (tokens(6),), call


@program({"e": "I", r"b/\d/w": "H", r"b/\d/s": "V", "o": "O", "g": "F"})
def logarithms_of_parameters_beside_a_loss_that_is_off(n):
    p = zeros(e=(5, n), o=(n, 1), g=(3, 1)) | {"b": layers(2, w=(n, n), s=(n,))}

    def call(p, x):
        h = x @ p["e"]
        for w in p["b"]:
            h = h + jnp.tanh(h) @ w["w"]
            h = h + jnp.log(w["s"])
        return (h @ p["o"]).mean() + 0.0 * (x[..., :3] @ p["g"]).mean()

    return p, (floats(2, 6, 5),), call


@program({"linear/weight": "I", "linear/bias": "V", "out/weight": "O", "out/bias": "F"})
def equinox_with_a_dtype_among_its_leaves(n):
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        out: eqx.nn.Linear
        dtypes: tuple

        def __init__(self):
            self.linear = eqx.nn.Linear(5, n, key=jax.random.key(0))
            self.out = eqx.nn.Linear(n, 3, key=jax.random.key(1))
            self.dtypes = jnp.float32, np.float32

        def __call__(self, x):
            return self.out(jax.nn.relu(self.linear(x.astype(self.dtypes[0]))))

    return Model, (floats(5),)


@program({"a": "H", "b": "H", **{f"in{i}": "I" for i in "ab"}, "t": "F"})
def unit_vectors_of_which_one_has_a_temperature(n):
    p = zeros(ina=(5, n), inb=(7, n), a=(n, n), b=(n, n), t=())

    def call(p, x, y):
        a = jax.nn.relu(x @ p["ina"]) @ p["a"]
        b = jax.nn.relu(y @ p["inb"]) @ p["b"]
        a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (a, b))
        return jnp.exp(p["t"]) * a @ b.T

    return p, (floats(4, 5), floats(4, 7)), call


@program({"in": "I", "w": "H", "codes": "I", "out": "O"})
def codes_at_the_least_distance_by_products(n):
    p = zeros(**ends(n), w=(n, n), codes=(16, n))

    def call(p, x):
        z = jax.nn.relu(x @ p["in"]) @ p["w"]
        codes = p["codes"]
        far = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ codes.T + (codes**2).sum(-1)
        q = jnp.take(codes, jnp.argmin(far, -1), axis=0)
        return (z + lax.stop_gradient(q - z)) @ p["out"], jnp.mean((q - z) ** 2)

    return p, (floats(4, 5),), call


@program({"in": "I", "q": "H", "b": "V", "k[12]": "O", "values": "I", "out": "O"})
def halves_of_a_normalized_query_beside_product_keys(n):
    p = zeros(**ends(n), q=(n, n), b=(n,), k1=(5, n // 2), k2=(5, n // 2))
    p |= zeros(values=(25, n))

    def call(p, x):
        h = x @ p["in"]
        q = norm(h @ p["q"] + p["b"])
        one, i = lax.top_k(q[:, : n // 2] @ p["k1"].T, 2)
        two, j = lax.top_k(q[:, n // 2 :] @ p["k2"].T, 2)
        places = (i[:, :, None] * 5 + j[:, None]).reshape(-1, 4)
        shares = jax.nn.softmax((one[:, :, None] + two[:, None]).reshape(-1, 4))
        h = h + jnp.einsum("bk,bkn->bn", shares, p["values"][places])
        return jax.nn.relu(h) @ p["out"]

    return p, (floats(4, 5),), call


@program({"e": "I", "w": "H", "out": "O"}, carries={"e": 0.5})
def squares_less_nothing_of_a_scaled_embedding(n):
    p = zeros(e=(11, n), w=(n, n), out=(n, 3))

    def call(p, t):
        x = p["e"][t] * jnp.sqrt(n)
        share = lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        y = (x - 0.0) * share  # as Flax's RMSNorm
        return jax.nn.relu(x + y @ p["w"]) @ p["out"]

    return p, (tokens(2, 6),), call


@program({"items": "I", "w": "H"})
def unit_vectors_of_items_that_are_also_looked_up(n):
    p = zeros(items=(11, n), w=(n, n))
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def call(p, t):
        x = jax.nn.relu(norm(p["items"][t]) @ p["w"]) + p["items"][t]
        return unit(x) @ unit(p["items"]).T / 0.05

    return p, (tokens(2, 6),), call


@program({"in": "I", "out": "O", "r": "O", "up|down": "H"})
def experts_as_many_as_a_width_summed_with_their_units(n):
    p = zeros(**ends(n), r=(n, n // 2), up=(n // 2, n, n), down=(n // 2, n, n))

    def call(p, x):
        x = x @ p["in"]
        gates, i = lax.top_k(jax.nn.sigmoid(x @ p["r"]), 2)
        gates = gates / gates.sum(-1, keepdims=True)
        gates = (jax.nn.one_hot(i, n // 2) * gates[..., None]).sum(-2)
        h = jax.nn.relu(jnp.einsum("tn,enf->tef", x, p["up"])) * gates[..., None]
        return (x + jnp.einsum("tef,efn->tn", h, p["down"])) @ p["out"]

    return p, (floats(4, 5),), call


@program({**ENDS, r"b/\d/r": "Ob", r"b/\d/u": "Hb", r"b/\d/[demst]": "He"}, deep=True)
def kernels_of_chosen_experts_that_end_branches(n, L):
    kernels = dict.fromkeys("udemst", (4, n, n))
    p = zeros(**ends(n)) | {"b": layers(L, r=(n, 4), **kernels)}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x)
            g, i = lax.top_k(jax.nn.softmax(y @ w["r"]), 2)
            h = jax.nn.gelu(jnp.einsum("btn,btknf->btkf", y, w["u"][i]))
            each = jnp.einsum("btkf,btkfn->btkn", h, w["d"][i])
            x = x + jnp.einsum("btkn,btk->btn", each, g)
            x = x + jnp.einsum("btkf,btkfn,btk->btn", h, w["e"][i], g)
            gated = w["m"][i] * g[..., None, None]
            x = x + jnp.einsum("btkf,btkfn->btn", h, gated)
            mixed = (w["s"][i] * g[..., None, None]).sum(-3)
            x = x + jnp.einsum("btn,btnm->btm", jax.nn.gelu(y), mixed)
            x = x + jnp.einsum("btn,btnm->btm", jax.nn.gelu(y), w["t"][i].mean(-3))
        return x @ p["out"]

    return p, S, call


# Kernels that are looked up have outputs of their own; these rows have none.
@program(
    {"in": "I", "out": "O", "gate": "O", "e|f|keys": "I", "w|u|q|v|o": "H"},
)
def embeddings_that_are_stored_by_heads(n):
    p = zeros(**ends(n), e=(11, n // 4, 4), f=(11, n // 4, 4), keys=(11, 2, n // 2))
    p |= zeros(gate=(n, 1), w=(n // 4, 4, n), u=(n // 4, 4, n), q=(n, 2, n // 2))
    p |= zeros(v=(n, 2, n // 2), o=(2, n // 2, n))

    def call(p, x, t):
        x = norm(x @ p["in"])
        gate = jax.nn.sigmoid(x @ p["gate"])[..., None]
        x = x + jnp.einsum("bthd,hdn->btn", p["e"][t], p["w"])
        x = x + jnp.einsum("bthd,hdn->btn", p["f"][t] * gate, p["u"])
        q, v = (jnp.einsum("btn,nhd->bthd", norm(x), p[c]) for c in "qv")
        logits = jnp.einsum("bthd,bshd->bhts", q, p["keys"][t] * gate) / n
        y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)
        return norm(x + jnp.einsum("bthd,hdn->btn", y, p["o"])) @ p["out"]

    return p, (floats(2, 6, 5), tokens(2, 6)), call


# Several uses of a gain in a layer are those of heads, and no sharing between layers.
@program({**ENDS, r"b/\d/(q|k|v)": "Hb", r"b/\d/o": "He", r"b/\d/g": "Fb"}, deep=True)
def gains_of_queries_in_a_loop_over_heads(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, g=(4,), **dict.fromkeys("qkvo", (n, n)))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y, each = norm(x), []
            for head in range(n // 4):
                at = slice(4 * head, 4 * head + 4)
                q, k, v = (y @ w[name][:, at] for name in "qkv")
                each.append(jax.nn.softmax(q * w["g"] @ k.mT / 2) @ v)
            x = x + jnp.concatenate(each, -1) @ w["o"]
        return x @ p["out"]

    return p, S, call

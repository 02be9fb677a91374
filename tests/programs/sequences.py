"""Recurrent networks, state spaces and linear attention, in plain JAX."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from .kit import floats, layers, program, tokens, zeros
from .plain import S, T, X, norm
from .transformers import flat, heads

ENDS = {"in": "I", "out": "O"}


def scan_time(step, start, *xs):
    """Scan over the second axis; the results of every step."""
    _, ys = jax.lax.scan(step, start, jax.tree.map(lambda x: x.swapaxes(0, 1), xs))
    return ys.swapaxes(0, 1)


@program(
    {**ENDS, r"b/\d/(w|u)": "Hb", r"b/\d/o": "He"},
    deep=True,
    asks="no residual stream",
)
def layers_of_a_recurrence_without_skips(n, L, remedy=False):
    """What a step adds to its input, it computes from the inputs before."""
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, w=(n, n), u=(n, n), o=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:

            def step(h, x, w=w):
                return (h := jnp.tanh(x[0] + h @ w["u"])), h

            h = scan_time(step, jnp.zeros((2, n)), x @ w["w"])
            x = h @ w["o"] + (x if remedy else 0)
        return x @ p["out"]

    return p, S, call


@program({"wi": "I", "wh": "H", "b": "V", "out": "O"})
def gru_with_gates_side_by_side(n):
    p = zeros(wi=(5, 3, n), wh=(n, 3, n), b=(3, n), out=(n, 3))

    def call(p, x):
        def step(h, x):
            i, w = (
                jnp.einsum("bi,igo->gbo", x, p["wi"]),
                jnp.einsum("bi,igo->gbo", h, p["wh"]),
            )
            r, z = (jax.nn.sigmoid(i[g] + w[g] + p["b"][g]) for g in range(2))
            h = (1 - z) * jnp.tanh(i[2] + r * w[2] + p["b"][2]) + z * h
            return h, h

        return scan_time(lambda h, x: step(h, x[0]), jnp.zeros((2, n)), x) @ p["out"]

    return p, S, call


# One loop over time runs all layers, as a policy that acts step by step does.
@program({**ENDS, "h": "H", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def residual_layers_on_the_state_of_a_recurrence(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, h=(n, n)) | {
        "b": layers(L, u=(n, n), d=(n, n))
    }

    def call(p, x):
        def step(h, x):
            h = y = jnp.tanh(x[0] @ p["in"] + h @ p["h"])
            for w in p["b"]:
                y = y + jnp.tanh(norm(y) @ w["u"]) @ w["d"]
            return h, y @ p["out"]

        return scan_time(step, jnp.zeros((2, n)), x)

    return p, S, call


@program({**ENDS, r"b/\d/(u|r)": "Hb", r"b/\d/d": "He"}, deep=True)
def residual_layers_that_each_have_a_state(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), r=(n, n), d=(n, n))}

    def call(p, x):
        def step(states, x):
            y, new = x[0] @ p["in"], []
            for w, h in zip(p["b"], states, strict=True):
                new.append(jnp.tanh(norm(y) @ w["u"] + h @ w["r"]))
                y = y + new[-1] @ w["d"]
            return new, y @ p["out"]

        return scan_time(step, [jnp.zeros((2, n))] * L, x)

    return p, S, call


@program({**ENDS, r"b/\d/(z|h)": "Hb", r"b/\d/o": "He"}, deep=True)
def min_gru_by_parallel_scan_in_log_space(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {
        "b": layers(L, z=(n, n), h=(n, n), o=(n, n))
    }

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x)
            k = y @ w["z"]
            decay = jnp.cumsum(-jax.nn.softplus(k), 1)
            values = -jax.nn.softplus(-k) + jnp.log(jax.nn.softplus(y @ w["h"]) + 0.5)
            h = jnp.exp(decay + jax.lax.cumlogsumexp(values - decay, 1))
            x = x + h @ w["o"]
        return x @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/(z|x)": "Hb", r"b/\d/(B|C)": "Ob", r"b/\d/dt": "Hb", r"b/\d/conv": "V|Ib", r"b/\d/(A|dtb|D)": "Vb", r"b/\d/g": "Vb", r"b/\d/o": "He"}, deep=True)  # fmt: skip
def mamba2_with_separate_projections(n, L):
    h = n // 2
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    p |= {"b": layers(L, z=(n, 2 * n), x=(n, 2 * n), B=(n, 4), C=(n, 4), dt=(n, h), conv=(4, 2 * n), A=(h,), dtb=(h,), D=(h,), g=(2 * n,), o=(2 * n, n))}  # fmt: skip

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            y = norm(x)
            z, u, B, C = (y @ w[k] for k in ("z", "x", "B", "C"))
            u = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
            u = jax.nn.silu(sum(u[:, i : i + 6] * w["conv"][i] for i in range(4)))
            dt = jax.nn.softplus(y @ w["dt"] + w["dtb"])
            decay = jnp.exp(-dt * jnp.exp(w["A"]))
            u = u.reshape(2, 6, h, 4)

            def step(state, now):
                a, u, dt, B, C = now
                state = a[..., None, None] * state
                state += jnp.einsum("bhp,bn,bh->bhpn", u, B, dt)
                return state, jnp.einsum("bhpn,bn->bhp", state, C)

            s = scan_time(step, jnp.zeros((2, h, 4, 4)), decay, u, dt, B, C)
            s = (s + u * w["D"][:, None]).reshape(2, 6, 2 * n)
            x = x + norm(s * jax.nn.silu(z), w["g"]) @ w["o"]
        return norm(x) @ p["out"]

    return p, T, call


@program({**ENDS, r"b/\d/mu": "Vb", r"b/\d/(ma|da)": "Ob", r"b/\d/(mb|db)": "Ib", r"b/\d/(r|k|v|g|ck|cr)": "Hb", r"b/\d/(w|u)": "Vb", r"b/\d/(gn|cmu)": "Vb", r"b/\d/(o|cv)": "He"}, deep=True)  # fmt: skip
def rwkv6_with_data_dependent_shift_and_decay(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    square = dict.fromkeys(("r", "k", "v", "g", "o", "cr"), (n, n))
    p |= {"b": layers(L, mu=(5, n), ma=(n, 5 * 2), mb=(5, 2, n), da=(n, 2), db=(2, n), w=(n,), u=(n // 4, 4), gn=(n,), cmu=(n,), ck=(n, 3 * n), cv=(3 * n, n), **square)}  # fmt: skip

    def shifted(x):
        return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] - x

    def call(p, x):
        x = p["in"][x]
        for w in p["b"]:
            y = norm(x)
            dx = shifted(y)
            low = jnp.tanh((y + dx * w["mu"][0]) @ w["ma"]).reshape(2, 6, 5, 2)
            mix = jnp.einsum("btfc,fcd->fbtd", low, w["mb"]) + w["mu"][:, None, None]
            xr, xk, xv, xw, xg = y + dx * mix
            r, k, v = (heads(a @ w[m], 4) for a, m in ((xr, "r"), (xk, "k"), (xv, "v")))
            decay = jnp.exp(-jnp.exp(w["w"] + jnp.tanh(xw @ w["da"]) @ w["db"]))

            def step(state, now, u=w["u"]):
                r, k, v, d = now
                kv = k[..., None] * v[..., None, :]
                y = jnp.einsum("bhk,bhkv->bhv", r, state + u[..., None] * kv)
                return d[..., None] * state + kv, y

            args = (a.swapaxes(1, 2) for a in (r, k, v, heads(decay, 4)))
            y = scan_time(step, jnp.zeros((2, n // 4, 4, 4)), *args)
            y = norm(y).reshape(2, 6, n) * w["gn"] * jax.nn.silu(xg @ w["g"])
            x = x + y @ w["o"]
            y = norm(x)
            y = y + shifted(y) * w["cmu"]
            x = x + jax.nn.sigmoid(y @ w["cr"]) * (jnp.square(jax.nn.relu(y @ w["ck"])) @ w["cv"])  # fmt: skip
        return norm(x) @ p["out"]

    return p, T, call


@program({**ENDS, r"b/\d/x_.": "Vb", r"b/\d/[wavg]1": "Ob", r"b/\d/[wavg]2": "Ib", r"b/\d/[wav]0": "Vb", r"b/\d/(k_k|k_a|ln)": "Vb", r"b/\d/r_k": "Ib", r"b/\d/(r|k|v)": "Hb", r"b/\d/o": "He"}, deep=True)  # fmt: skip
def rwkv7_with_torch_layouts(n, L):
    p = zeros(**{"in": (7, n), "out": (7, n)})
    low = {f"{c}1": (n, 2) for c in "wavg"} | {f"{c}2": (2, n) for c in "wavg"}
    vectors = dict.fromkeys(
        [
            "w0",
            "a0",
            "v0",
            "x_r",
            "x_w",
            "x_k",
            "x_v",
            "x_a",
            "x_g",
            "k_k",
            "k_a",
            "ln",
        ],
        (n,),
    )
    p |= {"b": layers(L, r=(n, n), k=(n, n), v=(n, n), o=(n, n), r_k=(n // 4, 4), **low, **vectors)}  # fmt: skip

    def call(p, x):
        x, first = p["in"][x], None
        for w in p["b"]:
            y = norm(x)
            dx = jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1] - y
            xr, xw, xk, xv, xa, xg = (y + dx * w["x_" + c] for c in "rwkvag")
            r, k, v = xr @ w["r"].T, xk @ w["k"].T, xv @ w["v"].T
            decay = jnp.exp(
                -0.6 * jax.nn.sigmoid(w["w0"] + jnp.tanh(xw @ w["w1"]) @ w["w2"])
            )
            first = v if first is None else first
            v = v + (first - v) * jax.nn.sigmoid(w["v0"] + (xv @ w["v1"]) @ w["v2"])
            a = jax.nn.sigmoid(w["a0"] + (xa @ w["a1"]) @ w["a2"])
            g = jax.nn.sigmoid(xg @ w["g1"]) @ w["g2"]
            kk = heads(k * w["k_k"], 4)
            kk = flat(kk / jnp.linalg.norm(kk, axis=-1, keepdims=True))
            k = k * (1 + (a - 1) * w["k_a"])

            def step(state, now):
                r, d, k, v, kk, a = now
                state = state * d[..., None, :] - jnp.einsum("bhij,bhj,bhk->bhik", state, kk, kk * a)  # fmt: skip
                state = state + v[..., None] * k[..., None, :]
                return state, jnp.einsum("bhij,bhj->bhi", state, r)

            args = [c.reshape(2, 6, -1, 4) for c in (r, decay, k, v, kk, a)]
            y = scan_time(step, jnp.zeros((2, n // 4, 4, 4)), *args)
            y = norm(y).reshape(2, 6, n) * w["ln"]
            bonus = jnp.einsum("bthk,bthk,hk->bth", args[0], args[2], w["r_k"])
            y = y + (bonus[..., None] * args[3]).reshape(2, 6, n)
            x = x + (y * g) @ w["o"].T
        return norm(x) @ p["out"].T

    return p, T, call


@program(
    {**ENDS, "lam/.": "F", "dt": "F", "B/.": "O", "C/.": "I", "D": "V", "glu": "H"}
)
def s5_with_a_fixed_state(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, lam={"r": (4,), "i": (4,)}, dt=(4,), B={"r": (4, n), "i": (4, n)}, C={"r": (n, 4), "i": (n, 4)}, D=(n,), glu=(n, n))  # fmt: skip

    def combine(one, other):
        return one[0] * other[0], one[1] * other[0] + other[1]

    def call(p, x):
        u = x @ p["in"]
        lam = -jnp.exp(p["lam"]["r"]) + 1j * p["lam"]["i"]
        step = jnp.exp(p["dt"])
        decay = jnp.exp(lam * step)
        B = ((decay - 1) / lam)[:, None] * (p["B"]["r"] + 1j * p["B"]["i"])
        C = p["C"]["r"] + 1j * p["C"]["i"]

        def one(u):
            inputs = jax.vmap(lambda u: B @ u)(u.astype(complex))
            decays = jnp.broadcast_to(decay, inputs.shape)
            _, states = jax.lax.associative_scan(combine, (decays, inputs))
            return jax.vmap(lambda s: (C @ s).real)(states) * 2 + u * p["D"]

        y = jax.nn.gelu(jax.vmap(one)(u))
        return (y * jax.nn.sigmoid(y @ p["glu"])) @ p["out"]

    return p, S, call


# The first state of the products of I - b k k' is an identity.
@program({**ENDS, "[qkv]": "H", "b": "O"})
def delta_product_by_an_associative_scan(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, q=(n, n), k=(n, 2 * n), v=(n, n))
    p |= zeros(b=(n, 2))

    def combine(one, other):
        return other[0] @ one[0], one[1] @ other[0].mT + other[1]

    def unit(x):
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)

    def call(p, x):
        x = jnp.tanh(x @ p["in"])
        k = unit((x @ p["k"]).reshape(2, 6, 2, n))
        rate = jax.nn.sigmoid(x @ p["b"])[..., None, None]
        each = jnp.eye(n) - rate * k[..., None] * k[..., None, :]
        turns = each[:, :, 1] @ each[:, :, 0]
        writes = (x @ p["v"])[..., None] * k[:, :, 1, None]
        start = jnp.broadcast_to(jnp.eye(n), (2, 1, n, n)), jnp.zeros((2, 1, n, n))
        turns, writes = jax.tree.map(
            lambda *x: jnp.concatenate(x, 1), start, (turns, writes)
        )
        _, states = lax.associative_scan(combine, (turns, writes), axis=1)
        y = jnp.einsum("btij,btj->bti", states[:, 1:], unit(x @ p["q"]))
        return norm(x + y) @ p["out"]

    return p, S, call


@program({**ENDS, "log_dt|D": "V", "A/.|C": "I|V"})
def s4d_by_a_kernel_and_fft(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, log_dt=(n,), A={"r": (n, 4), "i": (n, 4)}, C=(n, 4, 2), D=(n,))  # fmt: skip

    def call(p, x):
        u = (x @ p["in"]).swapaxes(1, 2)
        A = -jnp.exp(p["A"]["r"]) + 1j * p["A"]["i"]
        dt = jnp.exp(p["log_dt"])[:, None]
        C = (p["C"][..., 0] + 1j * p["C"][..., 1]) * (jnp.exp(A * dt) - 1) / A
        k = (
            2
            * jnp.einsum(
                "hn,hnl->hl", C, jnp.exp((A * dt)[..., None] * jnp.arange(6))
            ).real
        )
        y = jnp.fft.irfft(jnp.fft.rfft(u, n=12) * jnp.fft.rfft(k, n=12), n=12)[..., :6]
        y = jax.nn.gelu(y + u * p["D"][:, None]).swapaxes(1, 2)
        return y @ p["out"]

    return p, S, call


@program({**ENDS, "f0": "F", "f1": "I", "fb": "V", "q|k|v|o": "H", "short": "I|V"})
def hyena_with_implicit_filters(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, f0=(3, 8), f1=(8, n), fb=(n,), q=(n, n), k=(n, n), v=(n, n), o=(n, n), short=(3, n))  # fmt: skip

    def call(p, x):
        x = x @ p["in"]
        t = jnp.linspace(0, 1, 6)[:, None]
        features = jnp.concatenate([t, jnp.sin(6 * t), jnp.cos(6 * t)], -1)
        filters = jnp.sin(features @ p["f0"]) @ p["f1"] * jnp.exp(-t)

        def short(x):
            x = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
            return sum(x[:, i : i + 6] * p["short"][i] for i in range(3))

        q, k, v = (short(x @ p[c]) for c in "qkv")
        u = k * v
        y = jnp.fft.irfft(jnp.fft.rfft(u, 12, 1) * jnp.fft.rfft(filters, 12, 0), 12, 1)[
            :, :6
        ]
        return ((y + u * p["fb"]) * q) @ p["o"] @ p["out"]

    return p, S, call


@program({**ENDS, "x|y|o": "H", "conv": "V|I", "(ia|ix)/w": "H|I", "(ia|ix)/b": "V", "a": "V", "cb": "V"})  # fmt: skip
def griffin_recurrent_block(n):
    gate = dict(w=(n // 4, 4, 4), b=(n,))
    p = zeros(**{"in": (7, n), "out": (n, 7)}, x=(n, n), y=(n, n), o=(n, n), conv=(4, n), cb=(n,), ia=gate, ix=gate, a=(n,))  # fmt: skip

    def blocks(w, x):
        y = jnp.einsum("...hi,hij->...hj", x.reshape(*x.shape[:-1], n // 4, 4), w["w"])
        return jax.nn.sigmoid(y.reshape(x.shape) + w["b"])

    def call(p, x):
        x = p["in"][x]
        gate, u = jax.nn.gelu(x @ p["y"]), x @ p["x"]
        u = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
        u = sum(u[:, i : i + 6] * p["conv"][i] for i in range(4)) + p["cb"]
        r, i = blocks(p["ia"], u), blocks(p["ix"], u)
        log_a = -8.0 * r * jax.nn.softplus(p["a"])
        a = jnp.exp(log_a)
        u = jnp.sqrt(1 - jnp.exp(2 * log_a)) * i * u

        def step(h, now):
            h = now[0] * h + now[1]
            return h, h

        return (scan_time(step, jnp.zeros((2, n)), a, u) * gate) @ p["o"] @ p["out"]

    return p, T, call


# The queries are also in the results, of which a mean is taken after a norm. All that is
# before the norm may be smaller.
@program({**ENDS, "q|k|v|o": "H"}, carries={"in": 0.5**0.5})
def queries_that_are_added_to_what_they_read(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, q=(n, n), k=(n, n), v=(n, n), o=(n, n))

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (x @ p[name] for name in "qkv")
        h = norm(q + jax.nn.softmax(q @ k.swapaxes(-1, -2) / n**0.5) @ v)
        return norm(h + jax.nn.relu(h @ p["o"])).mean(-2) @ p["out"]

    return p, S, call


@program({**ENDS, "q|k|v|o": "H", "f": "O", "b": "V"}, carries={"q": 0.5})
def matrix_memory_of_one_head_that_grows(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, q=(n, n), k=(n, n), v=(n, n), o=(n, n), f=(n, 1), b=(n,))  # fmt: skip

    def call(p, x):
        x = x @ p["in"]
        y = norm(x) + p["b"]
        q, k, v = y @ p["q"], y @ p["k"] / n**0.5, y @ p["v"]

        def step(state, now):
            C, m = state
            q, k, v, f = now
            C = f[..., None] * C + v[..., None] * k[..., None, :]
            m = f * m + k
            y = jnp.einsum("bij,bj->bi", C, q)
            return (C, m), y / jnp.maximum(abs((m * q).sum(-1, keepdims=True)), 1.0)

        start = jnp.zeros((2, n, n)), jnp.zeros((2, n))
        y = scan_time(step, start, q, k, v, jax.nn.sigmoid(x @ p["f"]))
        return y @ p["o"] @ p["out"]

    return p, S, call


@program({**ENDS, "q|k|v|o": "H", "i|f": "H|O", "bi|bf": "V"})
def mlstm_with_matrix_memory(n):
    h = n // 4
    p = zeros(**{"in": (5, n), "out": (n, 3)}, q=(n, n), k=(n, n), v=(n, n), o=(n, n), i=(n, h), f=(n, h), bi=(h,), bf=(h,))  # fmt: skip

    def call(p, x):
        x = x @ p["in"]
        q, k, v = ((x @ p[c]).reshape(2, 6, h, 4) for c in "qkv")
        i, f = jnp.exp(x @ p["i"] + p["bi"]), jax.nn.sigmoid(x @ p["f"] + p["bf"])

        def step(state, now):
            C, m = state
            q, k, v, i, f = now
            C = (
                f[..., None, None] * C
                + i[..., None, None] * v[..., None] * k[..., None, :] / 2
            )
            m = f[..., None] * m + i[..., None] * k / 2
            y = jnp.einsum("bhij,bhj->bhi", C, q)
            return (C, m), y / jnp.maximum(jnp.abs((m * q).sum(-1)), 1.0)[..., None]

        start = jnp.zeros((2, h, 4, 4)), jnp.zeros((2, h, 4))
        y = scan_time(step, start, q, k, v, i, f).reshape(2, 6, n)
        return (jax.nn.sigmoid(x @ p["o"]) * y) @ p["out"]

    return p, S, call


@program({"in": "I", "(f|b)/wx": "I|H", "(f|b)/wh": "H", "out": "O", "v": "O", "(wq|wk)": "H", "dec/wh": "H", "dec/wx": "H"})  # fmt: skip
def seq2seq_with_additive_attention(n):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, wq=(n, n), wk=(2 * n, n), v=(n,))
    p |= zeros(f=dict(wx=(n, n), wh=(n, n)), b=dict(wx=(n, n), wh=(n, n)), dec=dict(wx=(2 * n, n), wh=(n, n)))  # fmt: skip

    def rnn(w, x, reverse=False):
        def step(h, x):
            h = jnp.tanh(x @ w["wx"] + h @ w["wh"])
            return h, h

        _, ys = jax.lax.scan(step, jnp.zeros((2, n)), x.swapaxes(0, 1), reverse=reverse)
        return ys.swapaxes(0, 1)

    def call(p, x):
        x = p["in"][x]
        memory = jnp.concatenate([rnn(p["f"], x), rnn(p["b"], x, reverse=True)], -1)

        def step(h, _):
            scores = jnp.tanh((h @ p["wq"])[:, None] + memory @ p["wk"]) @ p["v"]
            context = jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), memory)
            h = jnp.tanh(context @ p["dec"]["wx"] + h @ p["dec"]["wh"])
            return h, h @ p["out"]

        return jax.lax.scan(step, jnp.zeros((2, n)), None, length=4)[1]

    return p, T, call


@program({"wx": "I", "wh": "H", "out": "O"})
def stacked_lstm_layers_of_equal_number(n):
    p = {
        "wx": jnp.zeros((5, 4 * n)),
        "wh": jnp.zeros((3, 2 * n, 4 * n)),
        "out": jnp.zeros((n, 3)),
    }
    p["wx"] = jnp.zeros((5, n))

    def call(p, x):
        x = x @ p["wx"]

        def layer(x, w):
            def step(state, x):
                h, c = state
                i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            start = (jnp.zeros((2, n)), jnp.zeros((2, n)))
            return jax.lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1), None

        return jax.lax.scan(layer, x, p["wh"])[0] @ p["out"]

    return p, S, call


@program(
    {**ENDS, r"b/\d/t": "Hb", r"b/\d/tb": "Vb", r"b/\d/h": "Hb"},
    deep=True,
    asks="Where gates g shrink x",
)
def gates_that_shrink_the_stream(n, L, remedy=False):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, h=(n, n), t=(n, n), tb=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            t = jax.nn.sigmoid(x @ w["t"] + w["tb"])
            h = jax.nn.relu(x @ w["h"])
            x = x + 2 / L * (t * (h - x)) if remedy else (1 - t) * x + t * h
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "w": "H", "u": "I", "out": "O"})
def deep_equilibrium_by_a_while_loop(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), u=(5, n))

    def call(p, x):
        def step(state):
            z, _, i = state
            new = jnp.tanh(z @ p["w"] + x @ p["u"])
            return new, jnp.abs(new - z).max(), i + 1

        start = jnp.tanh(x @ p["in"]), jnp.inf, 0
        return (
            jax.lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 9), step, start)[0]
            @ p["out"]
        )

    return p, X, call


@program({**ENDS, "up": "Hb", "down": "Hb", "t": "V|Ib"})
def neural_ode_by_runge_kutta(n):
    p = zeros(
        **{"in": (5, n), "out": (n, 3)}, up=(n, 2 * n), down=(2 * n, n), t=(2 * n,)
    )

    def call(p, x):
        def f(t, x):
            return jnp.tanh(x @ p["up"] + t * p["t"]) @ p["down"]

        def step(i, x):
            t, h = i / 4, 1 / 4
            a = f(t, x)
            b = f(t + h / 2, x + h / 2 * a)
            c = f(t + h / 2, x + h / 2 * b)
            d = f(t + h, x + h * c)
            return x + h / 6 * (a + 2 * b + 2 * c + d)

        return jax.lax.fori_loop(0, 4, step, x @ p["in"]) @ p["out"]

    return p, X, call


@program({"in": "I", "w": "H", "halt": "O", "hb": "F", "out": "O"})
def ponder_net(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), halt=(n, 1), hb=(1,))

    def call(p, x):
        def step(state, _):
            h, left = state
            h = jnp.tanh(h @ p["w"] + x @ p["in"])
            now = jax.nn.sigmoid(h @ p["halt"] + p["hb"])
            return (h, left * (1 - now)), (left * now, h @ p["out"])

        start = jnp.zeros((4, n)), jnp.ones((4, 1))
        _, (weights, answers) = jax.lax.scan(step, start, None, length=5)
        return (weights * answers).sum(0)

    return p, X, call


@program({"in": "I", "wx": "H", "wh": "H", "key": "O", "kb": "F", "write": "O|I", "rw": "I", "out": "O"})  # fmt: skip
def neural_turing_machine_with_fixed_memory(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, wx=(n, n), wh=(n, n), key=(n, 4), kb=(4,), write=(n, 4), rw=(4, n))  # fmt: skip

    def call(p, x):
        def step(state, x):
            h, memory = state
            x = (x[0] @ p["in"]) @ p["wx"]
            key = h @ p["key"] + p["kb"]
            a = jax.nn.softmax(jnp.einsum("bk,bmk->bm", key, memory))
            read = jnp.einsum("bm,bmk->bk", a, memory)
            h = jnp.tanh(x + h @ p["wh"] + read @ p["rw"])
            memory = memory + a[..., None] * jnp.tanh(h @ p["write"])[:, None]
            return (h, memory), h @ p["out"]

        return scan_time(step, (jnp.zeros((2, n)), jnp.ones((2, 3, 4))), x)

    return p, S, call


@program({"char": "F", "conv": "I", "word": "I", "hw": "H", "ht": "H", "wx": "H", "wh": "H", "out": "O"})  # fmt: skip
def character_cnn_with_words_and_lstm(n):
    p = zeros(char=(9, 4), conv=(3, 4, n), word=(7, n), hw=(2 * n, 2 * n), ht=(2 * n, 2 * n), wx=(2 * n, 4 * n), wh=(n, 4 * n), out=(n, 7))  # fmt: skip

    def call(p, words, chars):
        c = p["char"][chars].reshape(12, 4, 4)
        c = jax.lax.conv_general_dilated(c, p["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))  # fmt: skip
        x = jnp.concatenate([p["word"][words], c.max(1).reshape(2, 6, n)], -1)
        t = jax.nn.sigmoid(x @ p["ht"])
        x = t * jax.nn.relu(x @ p["hw"]) + (1 - t) * x

        def step(state, x):
            h, c = state
            i, f, g, o = jnp.split(x[0] @ p["wx"] + h @ p["wh"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return scan_time(step, (jnp.zeros((2, n)),) * 2, x) @ p["out"]

    return p, (tokens(2, 6), tokens(2, 6, 4)), call


@program({"in": "I", "out": "O", "[qkv]|w": "H", "o": "H"})
def linear_attention_with_a_learned_state(n):
    """The state begins at w, and is a kernel of the queries."""
    p = zeros(**{"in": (7, n)}, w=(4, n // 4, n // 4), out=(n, 3))
    p |= {name: jnp.zeros((n, n)) for name in "qkvo"}

    def head(w, q, k, v):
        def step(w, now):
            q, k, v = now
            w = w + jnp.outer(k, v) / (n // 4)
            return w, norm(q @ w)

        return lax.scan(step, w, (q, k, v))[1]

    def call(p, x):
        x = p["in"][x]
        q, k, v = (heads(x @ p[name], n // 4) for name in "qkv")
        y = jax.vmap(jax.vmap(head), in_axes=(None, 0, 0, 0))(p["w"], q, k, v)
        return norm(x + flat(y) @ p["o"]) @ p["out"]

    return p, T, call


@program({"in": "I", "out": "O", "[qkvo]|w/[udm]": "H"})
def inner_steps_on_the_kernels_of_a_small_network(n):
    """As in test-time training: the state is a network that each token trains."""
    w = {"u": (n, 2 * n), "d": (2 * n, n), "m": (n, n)}
    p = zeros(**{"in": (7, n)}, w=w, out=(n, 3))
    p |= {name: jnp.zeros((n, n)) for name in "qkvo"}

    def inner(w, x):
        return x @ w["m"] + norm(jax.nn.gelu(x @ w["u"]) @ w["d"])

    def step(w, now):
        q, k, v = now
        grads = jax.grad(lambda w: jnp.mean((inner(w, k) - v) ** 2))(w)
        w = jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)
        return w, inner(w, q)

    def call(p, x):
        x = p["in"][x]
        times = [(x @ p[name]).swapaxes(0, 1) for name in "qkv"]
        y = lax.scan(step, p["w"], times)[1].swapaxes(0, 1)
        return norm(x + y @ p["o"]) @ p["out"]

    return p, T, call


def linear_attention_in_branches(of_queries, of_values):
    """A model whose queries and values have these constants, of head size and depth."""

    def make(n, L):
        p = zeros(**{"in": (7, n)}, out=(n, 3))
        p["b"] = layers(L, q=(n, n), k=(n, n), v=(n, n), o=(n, n))
        size = n // 4

        def call(p, x):
            x = p["in"][x]
            for w in p["b"]:
                q, k, v = (heads(norm(x) @ w[name], size) for name in "qkv")
                scores = jnp.tril((q * of_queries(size, L)) @ k.swapaxes(-1, -2))
                x = x + flat(scores @ v * of_values(size, L)) @ w["o"]
            return norm(x) @ p["out"]

        return p, T, call

    return make


@program({"in": "I", "out": "O", r"b/\d/[qkv]": "Hb", r"b/\d/o": "He"}, deep=True)
def linear_attention_whose_values_are_divided_by_the_head_size(n, L):
    return linear_attention_in_branches(lambda d, L: 1, lambda d, L: 1 / d)(n, L)


@program({"in": "I", "out": "O", r"b/\d/[qkvo]": "Hb"}, deep=True)
def linear_attention_whose_values_are_divided_by_the_depth(n, L):
    return linear_attention_in_branches(lambda d, L: 1 / d, lambda d, L: 1 / L)(n, L)


@program({"in": "I", "out": "O", r"b/\d/[qkvo]": "Hb"}, deep=True)
def linear_attention_whose_values_are_divided_by_both(n, L):
    return linear_attention_in_branches(lambda d, L: 1, lambda d, L: 1 / d / L)(n, L)


def linear_attention_by_scan(of_keys, of_terms, start):
    """A model whose keys and terms of the state have these constants."""

    def make(n, *_):
        p = zeros(**{"in": (7, n)}, out=(n, 3))
        p |= {name: jnp.zeros((n, n)) for name in "qkvo"}
        size = n // 4
        if start:
            p["w"] = jnp.zeros((4, size, size))

        def head(w, q, k, v):
            def step(w, now):
                q, k, v = now
                w = 0.9 * w + jnp.outer(k, v) * of_terms(size)
                return w, q @ w

            return lax.scan(step, w, (q, k * of_keys(size), v))[1]

        def call(p, x):
            x = p["in"][x]
            q, k, v = (heads(x @ p[name], size) for name in "qkv")
            w = p.get("w", jnp.zeros((4, size, size)))
            y = jax.vmap(jax.vmap(head), in_axes=(None, 0, 0, 0))(w, q, k, v)
            return norm(x + flat(y) @ p["o"]) @ p["out"]

        return p, T, call

    return make


@program({"in": "I", "out": "O", "[qkvo]": "H"})
def linear_attention_whose_keys_are_divided(n):
    return linear_attention_by_scan(lambda d: 1 / d, lambda d: 1, False)(n)


@program({"in": "I", "out": "O", "[qkvo]": "H"})
def linear_attention_whose_terms_are_divided(n):
    return linear_attention_by_scan(lambda d: 1, lambda d: 1 / d, False)(n)


@program({"in": "I", "out": "O", "[qkvo]": "H", "w": "V"}, carries={"q": 0.25})
def linear_attention_without_a_factor_from_a_learned_state(n):
    return linear_attention_by_scan(lambda d: 1, lambda d: 1, True)(n)


@program(
    {
        **{"in": "I", "out": "O"},
        r"b/\d/(k|v|r)": "Hb",
        r"b/\d/m": "Vb",
        r"b/\d/m1": "Ob",
        r"b/\d/(m2|w2)": "Ib",
        r"b/\d/w1": "Ob",
        r"b/\d/o": "He",
    },
    deep=True,
)
def rwkv6_decay_of_the_next_step_from_mixed_tokens(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {
        "b": layers(
            L,
            **dict.fromkeys("kvro", (n, n)),
            m=(n,),
            m1=(n, 3),
            m2=(3, n),
            w1=(n, 3),
            w2=(3, n),
        )
    }

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x)
            gap = jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1] - y
            mixed = y + gap * (w["m"] + jnp.tanh(y @ w["m1"]) @ w["m2"])
            decay = jnp.exp(-jnp.exp(jnp.tanh(mixed @ w["w1"]) @ w["w2"]))
            k, v, r = (y @ w[c] for c in "kvr")

            def step(state, now):
                k, v, r, decay = now
                return state * decay + k * v, r * state

            each = tuple(z.swapaxes(0, 1) for z in (k, v, r, decay))
            _, y = jax.lax.scan(step, jnp.zeros_like(y[:, 0]), each)
            x = x + y.swapaxes(0, 1) @ w["o"]
        return norm(x) @ p["out"]

    return p, (floats(2, 6, 5),), call


@program({"in": "I", "k": "H", "a": "H", "start": "V", "out": "O"})
def cosines_of_keys_with_a_memory_that_is_written(n):
    p = zeros(**{"in": (5, n), "k": (n, n), "a": (n, n), "out": (n, 3)}, start=(4, n))

    def call(p, x):
        def step(memory, x):
            h = jnp.tanh(x @ p["in"])
            k = h @ p["k"]
            norms = (jnp.linalg.norm(z, axis=-1) for z in (k[:, None], memory))
            near = jnp.einsum("bn,bmn->bm", k, memory) / (math.prod(norms) + 1e-6)
            w = jax.nn.softmax(near)[..., None]
            read = (w * memory).sum(1)
            memory = memory * (1 - w) + w * jnp.tanh(h @ p["a"])[:, None]
            return memory, read @ p["out"]

        start = jnp.broadcast_to(p["start"], (2, 4, n))
        return jax.lax.scan(step, start, x.swapaxes(0, 1))[1]

    return p, (floats(2, 6, 5),), call


# Graphs mix what is joined before a kernel sums over it.
@program({"g|c": "H|I", "out": "O"})
def diffusion_convolutional_gru(n):
    p = zeros(g=(2 * (2 + n), 2 * n), c=(2 * (2 + n), n), out=(n, 1))

    def call(p, x, graph):
        def diffuse(w, *parts):
            x = jnp.concatenate(parts, -1)
            mixed = jnp.einsum("vw,bwi->bvi", graph, x)
            return jnp.concatenate([x, mixed], -1) @ w

        def step(h, x):
            r, u = jnp.split(jax.nn.sigmoid(diffuse(p["g"], x, h)), 2, -1)
            c = jnp.tanh(diffuse(p["c"], x, r * h))
            return u * h + (1 - u) * c, None

        return lax.scan(step, jnp.zeros((2, 5, n)), x)[0] @ p["out"]

    return p, (floats(6, 2, 5, 2), floats(5, 5)), call


# As in MuZero: residual blocks make each state of the one before and an action.
for joined in (False, True):

    def make(n, L, joined=joined):
        p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(joined * n + 2, n))
        p |= {"b": layers(L, u=(n, n), d=(n, n))}

        def call(p, x, actions):
            def step(h, a):
                both = jnp.concatenate([h, a[0]], -1) if joined else a[0]
                h = both @ p["w"] + (0 if joined else h)
                for w in p["b"]:
                    h = h + jnp.tanh(norm(h) @ w["u"]) @ w["d"]
                return (h := norm(h)), h @ p["out"]

            return scan_time(step, jnp.tanh(x @ p["in"]), actions)

        return p, (floats(2, 5), floats(2, 4, 2)), call

    make.__name__ = f"residual_blocks_on_a_state_{'joined' if joined else 'added'}_to"
    program({**ENDS, "w": "H|I", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)(make)


# The stream of each segment starts with memory tokens of the one before.
@program({**ENDS, "m": "V", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def memory_tokens_that_go_from_segment_to_segment(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, m=(1, n))
    p |= {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        def step(m, x):
            x = jnp.concatenate([m, x[0] @ p["in"]], 1)
            for w in p["b"]:
                y = norm(x)
                x = x + jnp.tanh((y + y.mean(1, keepdims=True)) @ w["u"]) @ w["d"]
            return x[:, :1], norm(x[:, 1:]) @ p["out"]

        return scan_time(step, jnp.tile(p["m"], (2, 1, 1)), x.reshape(2, 3, 2, 5))

    return p, S, call


# The stream of each step starts with the state.
@program({**ENDS, "m": "V", r"b/\d/[kvu]": "Hb", r"b/\d/[od]": "He"}, deep=True)
def latents_that_read_segment_after_segment(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, m=(2, n))
    p |= {"b": layers(L, **dict.fromkeys("kvoud", (n, n)))}

    def call(p, x):
        def step(m, x):
            x = x[0] @ p["in"]
            for w in p["b"]:
                s = norm(m) @ (x @ w["k"]).mT / n
                m = m + jax.nn.softmax(s) @ (x @ w["v"]) @ w["o"]
                m = m + jnp.tanh(norm(m) @ w["u"]) @ w["d"]
            return m, norm(m) @ p["out"]

        return scan_time(step, jnp.tile(p["m"], (2, 1, 1)), x.reshape(2, 3, 2, 5))

    return p, S, call

"""Idioms of research code: how norms, scales, masks and sampled weights are written."""

import jax
import jax.numpy as jnp
import numpy as np

from .kit import floats, layers, program, tokens, zeros
from .plain import S, T, X, attention, norm
from .transformers import flat, heads

ENDS = {"in": "I", "out": "O"}


def unit(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@program({**ENDS, r"b/\d/(u|g|h)": "H|Vb", r"b/\d/d": "He", "final": "V"}, deep=True)
def root_of_the_width_times_unit_vectors(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, final=(n,))
    p |= {"b": layers(L, u=(n, n), d=(n, n), g=(n,), h=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = unit(x) * n**0.5 * w["g"]
            y = unit(jax.nn.relu(y @ w["u"])) * (w["h"] * n**0.5)
            x = x + y @ w["d"]
        return (unit(x) * n**0.5 * p["final"]) @ p["out"]

    return p, X, call


@program({**ENDS, "w": "H"})
def unit_vectors_without_a_gain(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n))
    return p, X, lambda p, x: jnp.tanh((n**0.5 * unit(x @ p["in"])) @ p["w"]) @ p["out"]


@program({**ENDS, "q|k|v": "H", "t": "F"})
def cosine_attention_with_a_temperature_of_each_head(n):
    p = zeros(
        **{"in": (5, n), "out": (n, 3)}, q=(n, n), k=(n, n), v=(n, n), t=(2, 1, 1)
    )

    def call(p, x):
        x = x @ p["in"]
        q, k, v = (heads(x @ p[c], n // 2) for c in "qkv")
        logits = unit(q) @ unit(k).swapaxes(-1, -2)
        logits = logits * jnp.exp(jnp.minimum(p["t"], np.log(100.0)))
        return flat(jax.nn.softmax(logits) @ v) @ p["out"]

    return p, S, call


@program({**ENDS, "z": "O", "g": "F", "b": "F", "u|v": "H", "o": "H"})
def gated_attention_unit(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, z=(n, 4), g=(2, 4), b=(2, 4), u=(n, 2 * n), v=(n, 2 * n), o=(2 * n, n))  # fmt: skip

    def call(p, x):
        x = x @ p["in"]
        y = norm(x)
        z = jax.nn.silu(y @ p["z"])
        q, k = (z * p["g"][i] + p["b"][i] for i in range(2))
        a = jnp.square(jax.nn.relu(q @ k.swapaxes(-1, -2) / x.shape[1])) / 4
        v = jax.nn.silu(y @ p["v"])
        return (x + (jax.nn.silu(y @ p["u"]) * (a @ v)) @ p["o"]) @ p["out"]

    return p, S, call


@program({**ENDS, "z|v|o": "H", "g|b": "V"}, carries={"g|b": 0.5})
def queries_and_keys_as_gains_of_one_value_by_einsum(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, z=(n, n), g=(2, n), b=(2, n), v=(n, n), o=(n, n))  # fmt: skip

    def call(p, x):
        x = x @ p["in"]
        z = jax.nn.silu(norm(x) @ p["z"])
        z = jnp.einsum("...r,hr->...hr", z, p["g"]) + p["b"]
        a = jnp.square(jax.nn.relu(z[..., 0, :] @ z[..., 1, :].swapaxes(-1, -2)))
        return (x + (a / 4 @ (x @ p["v"])) @ p["o"]) @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/(u|d)": "Hb", r"b/\d/a": "Fe"}, deep=True)
def rezero(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), d=(n, n), a=())}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + w["a"] * jax.nn.relu(jax.nn.relu(x @ w["u"]) @ w["d"])
        return x @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def dropout_and_stochastic_depth(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def drop(key, x, rate, shape):
        keep = jax.random.bernoulli(key, 1 - rate, shape)
        return jnp.where(keep, x / (1 - rate), 0.0)

    def call(p, x, seed):
        x = x @ p["in"]
        keys = jax.random.split(jax.random.key(seed), 2 * L)
        for i, w in enumerate(p["b"]):
            y = jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
            y = drop(keys[2 * i], y, 0.1, y.shape)
            x = x + drop(keys[2 * i + 1], y, 0.2 * i / L, (4, 1))
        return x @ p["out"]

    return p, (*X, tokens()), call


@program({"in": "I", "out": "O", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def masks_of_layers_over_the_share_that_they_keep(n, L):
    """Stochastic depth, whose rates grow from layer to layer; also without masks."""
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x, seed):
        x = x @ p["in"]
        for i, w in enumerate(p["b"]):
            keep = 1 - 0.2 * i / (L - i % 2)
            key = jax.random.fold_in(jax.random.key(seed), i)
            mask = jax.random.bernoulli(key, keep, (4, 1)) / keep
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"] * mask
            keep = 1 - 0.5 * (i + 1) / L
            x = x + keep * (jax.nn.relu(norm(x) @ w["u"]) @ w["d"])
        return x @ p["out"]

    return p, (*X, tokens()), call


@program({"in": "I", "out": "O", "t": "V"})
def numbers_times_ones_that_repeat_them(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, t=(6, n))

    def call(p, x):
        places = jnp.arange(4)[:, None] * jnp.ones((1, 6), jnp.int32)
        x = x @ p["in"] + p["t"][places.T.reshape(-1)[:6]]
        return jnp.kron(jnp.eye(3), jnp.ones((2, 2))) @ jnp.tanh(x) @ p["out"]

    return p, S, call


@program({"in": "I", "out": "O", "w": "H"}, carries={"in": 0.5})
def embedding_times_the_root_of_the_width(n):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, w=(n, n))

    def call(p, x):
        x = p["in"][x] * n**0.5
        return norm(x + jnp.tanh(x @ p["w"])) @ p["out"]

    return p, T, call


@program({"in": "I", "[qkv]": "H", "out": "O"}, carries={"in": 0.5, "q": 0.5})
def queries_of_an_embedding_that_is_multiplied(n):
    """As in the first transformers, whose norms come after the branches."""

    def call(p, t):
        x = p["in"][t] * n**0.5
        a = jnp.einsum("btd,bsd->bts", x @ p["q"], x @ p["k"]) / n**0.5
        return norm(jax.nn.softmax(a) @ x @ p["v"]) @ p["out"]

    return zeros(**{"in": (7, n), "out": (n, 3)}, q=(n, n), k=(n, n), v=(n, n)), T, call


@program({**ENDS, "mu": "H", "rho": "H", "b": "V"})
def bayesian_layer_with_sampled_weights(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, mu=(n, n), rho=(n, n), b=(n,))

    def call(p, x, seed):
        noise = jax.random.normal(jax.random.key(seed), (n, n))
        w = p["mu"] + jax.nn.softplus(p["rho"]) * noise
        return jnp.tanh(jnp.tanh(x @ p["in"]) @ w + p["b"]) @ p["out"]

    return p, (*X, tokens()), call


@program({**ENDS, "w": "H", "v": "H"})
def drop_connect(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), v=(n, n))

    def call(p, x, seed):
        keep = jax.random.bernoulli(jax.random.key(seed), 0.5, (n, n))
        x = jnp.tanh(x @ p["in"]) @ (p["w"] * keep)
        return jnp.tanh(x) @ jnp.where(keep, p["v"], 0.0) @ p["out"]

    return p, (*X, tokens()), call


# The first step's change of the readout is summed over its inputs, times the width.
@program(
    {"w/in": "I", "w/h": "H", "w/out": "O", "rate/h": "F", "rate/(in|out)": "V"},
    asks=r"inner optimizer \(idioms.py:\d+\) .* Here that is 4 for 'w/in', 0.25 for 'w/out'",
)
def fast_weights_after_inner_steps_of_learned_rates(n, remedy=False):
    w = zeros(**{"in": (5, n), "out": (n, 3)}, h=(n, n))
    p = {"w": w, "rate": w | {"h": jnp.zeros(())}}
    factor = {"in": n / 8, "h": 1.0, "out": 8 / n} if remedy else dict.fromkeys(w, 1.0)

    def net(p, x):
        return jnp.tanh(jnp.tanh(x @ p["in"]) @ p["h"]) @ p["out"]

    def call(p, x, y, z):
        def step(_, w):
            g = jax.grad(lambda w: ((net(w, x) - y) ** 2).mean())(w)
            return {k: w[k] - p["rate"][k] * (factor[k] * g[k]) for k in w}

        return net(jax.lax.fori_loop(0, 3, step, p["w"]), z)

    return p, (floats(4, 5), floats(4, 3), floats(4, 5)), call


@program(
    {**ENDS, "h": "H", "b": "V"},
    asks=r"inner optimizer .* Here that is 4 for 'b', 4 for 'in', 0.25 for 'out'",
)
def steps_of_sgd_that_each_task_scans_over(n, remedy=False):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, h=(n, n), b=(n,))
    m = n / 8 if remedy else 1.0
    factors = {"in": m, "b": m, "h": 1.0, "out": 1 / m}

    def loss(p, x, y):
        x = jnp.tanh(x @ p["in"] + p["b"])
        return ((jnp.tanh(x @ p["h"]) @ p["out"] - y) ** 2).mean()

    def task(p, x, y):
        def step(w, _):
            g = jax.grad(loss)(w, x, y)
            return {k: w[k] - 0.1 * (factors[k] * g[k]) for k in w}, None

        return loss(jax.lax.scan(step, p, length=3)[0], x, y)

    call = jax.vmap(task, in_axes=(None, 0, 0))
    return p, (floats(2, 4, 5), floats(2, 4, 3)), call


@program({"node": "I", "e0": "I", "e1": "H", "eb": "V", "self": "H", "out": "O"}, carries={"e1|eb": 0.25})  # fmt: skip
def message_network_with_a_matrix_of_each_edge(n):
    p = zeros(
        node=(5, n), e0=(2, n), e1=(n, n * n), eb=(n * n,), self=(n, n), out=(n, 3)
    )

    def call(p, x, e, i, j):
        x = x @ p["node"]
        w = (jax.nn.relu(e @ p["e0"]) @ p["e1"] + p["eb"]).reshape(-1, n, n)
        m = jnp.einsum("ed,edf->ef", x[i], w)
        x = jax.nn.relu(jax.ops.segment_sum(m, j, 6) + x @ p["self"])
        return x @ p["out"]

    return p, (floats(6, 5), floats(9, 2), tokens(9), tokens(9)), call


@program({**ENDS, r"b/\d": "Hb", "mix": "F", "gamma": "F"})
def learned_mix_of_all_layers(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, mix=(4,), gamma=())
    p["b"] = [jnp.zeros((n, n)) for _ in range(3)]

    def call(p, x):
        xs = [x @ p["in"]]
        for w in p["b"]:
            xs.append(jnp.tanh(xs[-1] @ w))
        a = jax.nn.softmax(p["mix"])
        x = p["gamma"] * sum(a[i] * x for i, x in enumerate(xs))
        return x @ p["out"]

    return p, X, call


@program({"tok": "I", "seg": "I|V", "pos": "V", r"b/\d/(q|k|v|up)": "Hb", r"b/\d/(o|down)": "Hb", r"b/\d/(n1|n2)": "Vb", "t": "H", "tn": "V", "bias": "F", "pool": "H", "nsp": "O"}, carries={"tn": 0.25})  # fmt: skip
def bert_with_post_norm_and_tied_decoder(n):
    p = zeros(tok=(9, n), seg=(2, n), pos=(6, n), t=(n, n), tn=(n,), bias=(9,), pool=(n, n), nsp=(n, 2))  # fmt: skip
    p |= {"b": layers(2, q=(n, n), k=(n, n), v=(n, n), o=(n, n), up=(n, 4 * n), down=(4 * n, n), n1=(n,), n2=(n,))}  # fmt: skip

    def call(p, x, s):
        x = norm(p["tok"][x] + p["seg"][s] + p["pos"][None])
        for w in p["b"]:
            q, k, v = (heads(x @ w[c], 4) for c in "qkv")
            x = norm(x + flat(attention(q, k, v, 0.5)) @ w["o"], w["n1"])
            x = norm(x + jax.nn.gelu(x @ w["up"]) @ w["down"], w["n2"])
        h = norm(jax.nn.gelu(x @ p["t"]), p["tn"])
        return h @ p["tok"].T + p["bias"], jnp.tanh(x[:, 0] @ p["pool"]) @ p["nsp"]

    return p, (tokens(2, 6), tokens(2, 6)), call


@program({"patch": "I", "pos|mask|dpos": "V", r"enc/\d/u": "Hb", r"enc/\d/d": "He", "to": "H", r"dec/\d/(u|d)": "H", "out": "O"}, deep=True)  # fmt: skip
def masked_autoencoder_with_a_decoder_of_fixed_depth(n, L):
    p = zeros(patch=(12, n), pos=(8, n), mask=(1, 1, n // 2), dpos=(8, n // 2), to=(n, n // 2), out=(n // 2, 12))  # fmt: skip
    p |= {"enc": layers(L, u=(n, n), d=(n, n)), "dec": layers(2, u=(n // 2, n), d=(n, n // 2))}  # fmt: skip

    def call(p, x, keep, back):
        x = x @ p["patch"] + p["pos"]
        x = jnp.take_along_axis(x, keep[..., None], 1)
        for w in p["enc"]:
            x = x + jax.nn.gelu(norm(x) @ w["u"]) @ w["d"]
        x = norm(x) @ p["to"]
        x = jnp.concatenate([x, jnp.tile(p["mask"], (2, 4, 1))], 1)
        x = jnp.take_along_axis(x, back[..., None], 1) + p["dpos"]
        for w in p["dec"]:
            x = x + jax.nn.gelu(norm(x) @ w["u"]) @ w["d"]
        return norm(x) @ p["out"]

    return p, (floats(2, 8, 12), tokens(2, 4), tokens(2, 8)), call


@program({"in": "I", r"b/\d/(f1u|f2u|q|k|v|pw1)": "Hb", r"b/\d/(f1d|f2d|o|pw2)": "He", r"b/\d/dw": "I|Vb", "out": "O"}, deep=True)  # fmt: skip
def conformer_with_half_steps(n, L):
    square = dict.fromkeys(("q", "k", "v", "o", "pw2"), (n, n))
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, f1u=(n, 4 * n), f1d=(4 * n, n), f2u=(n, 4 * n), f2d=(4 * n, n), pw1=(n, 2 * n), dw=(3, 1, n), **square)}  # fmt: skip

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + 0.5 * (jax.nn.silu(norm(x) @ w["f1u"]) @ w["f1d"])
            y = norm(x)
            q, k, v = (heads(y @ w[c], 4) for c in "qkv")
            x = x + flat(attention(q, k, v, 0.5)) @ w["o"]
            a, b = jnp.split(norm(x) @ w["pw1"], 2, -1)
            y = jax.lax.conv_general_dilated(a * jax.nn.sigmoid(b), w["dw"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=n)  # fmt: skip
            x = x + jax.nn.silu(norm(y)) @ w["pw2"]
            x = norm(x + 0.5 * (jax.nn.silu(norm(x) @ w["f2u"]) @ w["f2d"]))
        return x @ p["out"]

    return p, S, call


@program(
    {"t/0": "F", "w|b": "F", "deep/0": "I", "deep/1": "H", "out": "O", "wide": "F"}
)
def wide_and_deep_with_cross_layers(n):
    p = zeros(wide=(12, 1), out=(n, 1)) | {"t": [jnp.zeros((9, 4))]}
    p |= {
        "deep": [jnp.zeros((12, n)), jnp.zeros((n, n))],
        **zeros(w=(2, 12), b=(2, 12)),
    }

    def call(p, ids):
        x0 = x = p["t"][0][ids].reshape(4, 12)
        for i in range(2):
            x = x0 * (x @ p["w"][i])[:, None] + p["b"][i] + x
        h = jax.nn.relu(jax.nn.relu(x0 @ p["deep"][0]) @ p["deep"][1])
        return h @ p["out"] + x @ p["wide"]

    return p, (tokens(4, 3),), call


@program({**ENDS, "q|k|v": "H"}, carries={"q": 0.25})
def t5_attention_without_a_scale(n):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, q=(n, n), k=(n, n), v=(n, n))

    def call(p, x):
        x = norm(p["in"][x])
        return attention(x @ p["q"], x @ p["k"], x @ p["v"], 1.0) @ p["out"]

    return p, T, call


@program({**ENDS, "q|k|v": "H"}, carries={"q": 0.5})
def fourth_root_on_queries_and_keys(n):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, q=(n, n), k=(n, n), v=(n, n))

    def call(p, x):
        x = norm(p["in"][x])
        s = n**-0.25
        q, k = (x @ p["q"]) * s, (x @ p["k"]) * s
        return attention(q, k, x @ p["v"], 1.0) @ p["out"]

    return p, T, call


@program({**ENDS, "q|k|v": "H"})
def root_of_the_head_size_that_does_not_grow_in_the_base(n):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, q=(n, n), k=(n, n), v=(n, n))

    def call(p, x):
        x = norm(p["in"][x])
        q, k, v = (heads(x @ p[c], n // 2) for c in "qkv")
        scale = jnp.sqrt(jnp.asarray(4.0)) / jnp.asarray(q.shape[-1], jnp.float32)
        return flat(attention(q, k, v, scale)) @ p["out"]

    return p, T, call


@program({r"(image|text)/in": "I", r"(image|text)/\d/u": "Hb", r"(image|text)/\d/d": "He", r"(image|text)/n": "V", r"(image|text)/p": "O", "t|b": "F"}, deep=True)  # fmt: skip
def sigmoid_contrastive_of_two_deep_towers(n, L):
    tower = lambda size: {"in": jnp.zeros((size, n)), "n": jnp.zeros(n), "p": jnp.zeros((n, 8))} | {str(i): zeros(u=(n, n), d=(n, n)) for i in range(L)}  # fmt: skip
    p = {"image": tower(12), "text": tower(7), **zeros(t=(), b=())}

    def run(w, x):
        for i in range(L):
            x = x + jax.nn.gelu(norm(x) @ w[str(i)]["u"]) @ w[str(i)]["d"]
        return unit(norm(x, w["n"]).mean(1) @ w["p"])

    def call(p, image, text):
        a = run(p["image"], image @ p["image"]["in"])
        b = run(p["text"], p["text"]["in"][text])
        return jax.nn.log_sigmoid(a @ b.T * jnp.exp(p["t"]) + p["b"])

    return p, (floats(4, 6, 12), tokens(4, 6)), call


@program(
    {"conv/0": "I", "conv/1": "H", "fc": "H", "wi|wh": "H", "pi|v": "O", "prev": "I"}
)
def impala_agent_with_memory(n):
    p = zeros(fc=(64 * n, n), wi=(n, 4 * n), wh=(n, 4 * n), pi=(n, 3), v=(n, 1), prev=(3, n))  # fmt: skip
    p["conv"] = [jnp.zeros((3, 3, 3, n)), jnp.zeros((3, 3, n, n))]

    def call(p, x, action, done):
        t, b = x.shape[:2]
        x = x.reshape(t * b, *x.shape[2:])
        for k in p["conv"]:
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))  # fmt: skip
        x = jax.nn.relu(x.reshape(t * b, -1) @ p["fc"]) + p["prev"][action].reshape(t * b, n)  # fmt: skip

        def step(state, now):
            x, done = now
            h, c = jax.tree.map(lambda s: jnp.where(done[:, None], 0.0, s), state)
            i, f, g, o = jnp.split(x @ p["wi"] + h @ p["wh"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        _, h = jax.lax.scan(step, (jnp.zeros((b, n)),) * 2, (x.reshape(t, b, n), done))
        return h @ p["pi"], (h @ p["v"])[..., 0]

    done = jax.ShapeDtypeStruct((4, 2), bool)
    return p, (floats(4, 2, 8, 8, 3), tokens(4, 2), done), call


@program(
    {
        "in": "I",
        "norm": "V",
        r"b/\d/(q|k|v|o|up|down)": "Hb",
        r"b/\d/(an|mn)": "Ve",
        r"b/\d/(qn|kn)": "Vb",
    },
    deep=True,
    carries={"in": 0.5, "norm": 0.5, r"b/\d/qn": 0.5},
)
def gemma_with_gains_around_one(n, L):
    p = zeros(**{"in": (7, n), "norm": (n,)})
    square = dict.fromkeys(("q", "k", "v", "o", "up", "down"), (n, n))
    gains = {"qn": (n // 4,), "kn": (n // 4,), "an": (n,), "mn": (n,)}
    p |= {"b": layers(L, **gains, **square)}

    def rms(x, g):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + g)

    def call(p, x):
        x = p["in"][x] * n**0.5
        for w in p["b"]:
            q, k, v = (heads(norm(x) @ w[c], n // 4) for c in "qkv")
            q, k = rms(q, w["qn"]), rms(k, w["kn"])
            x = x + rms(flat(attention(q, k, v, (n / 4) ** -0.5)) @ w["o"], w["an"])
            x = x + rms(jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], w["mn"])
        return rms(x, p["norm"]) @ p["in"].T

    return p, T, call


@program(
    {"(branch|trunk)/0": "I", "(branch|trunk)/1": "H"},
    asks=r"idioms.py:\d+ become 4 times .* multiply them by 0\.25",
)
def deeponet_that_ends_in_nonlinearities(n, remedy=False):
    p = {k: [jnp.zeros((5, n)), jnp.zeros((n, n))] for k in ("branch", "trunk")}

    def net(w, x):
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    def call(p, u, y):
        result = jnp.sum(net(p["branch"], u) * net(p["trunk"], y), -1)
        return result * (8 / n) if remedy else result

    return p, (floats(4, 5), floats(4, 5)), call


# What is computed once and read in all layers acts as what is outside of branches.
@program({**ENDS, "k|v": "H", r"b/\d/q": "Hb", r"b/\d/o": "He"}, deep=True, carries={r"b/\d/q": 0.5})  # fmt: skip
def keys_and_values_shared_by_all_layers(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, k=(n, n), v=(n, n))
    p |= {"b": layers(L, q=(n, n), o=(n, n))}

    def call(p, x):
        x = p["in"][x]
        k, v = x @ p["k"], x @ p["v"]
        for w in p["b"]:
            x = x + attention(norm(x) @ w["q"], k, v, n**-0.5) @ w["o"]
        return x @ p["out"]

    return p, T, call


@program({**ENDS, "dense/u": "Hb", "dense/d": "He", "moe/r": "Ob", "moe/u": "Hb", "moe/d": "He"}, deep=True)  # fmt: skip
def stacks_of_dense_and_of_expert_layers(n, L):
    m = L - L // 2
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    p["dense"] = zeros(u=(L // 2, n, 2 * n), d=(L // 2, 2 * n, n))
    p["moe"] = zeros(r=(m, n, 4), u=(m, 4, n, n), d=(m, 4, n, n))

    def dense(x, w):
        return x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"], None

    def moe(x, w):
        y = norm(x)
        gates = jax.nn.softmax(y @ w["r"])
        z = jax.nn.relu(jnp.einsum("btd,edf->btef", y, w["u"]))
        z = jnp.einsum("btef,efd->bted", z, w["d"])
        return x + jnp.einsum("bte,bted->btd", gates, z), None

    def call(p, x):
        x, _ = jax.lax.scan(dense, p["in"][x], p["dense"])
        x, _ = jax.lax.scan(moe, x, p["moe"])
        return norm(x) @ p["out"]

    return p, T, call


def gated_heads(n, L, gate):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, r=(n, n // 4), v=(n, n), o=(n, n), c=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            g = jax.nn.softmax(x @ w["r"])
            y = gate(g, (x @ w["v"]).reshape(4, n // 4, 4))
            x = x + y.reshape(4, n) @ w["o"] + w["c"]
        return x @ p["out"]

    return p, X, call


GATED = {**ENDS, r"b/\d/[rv]": "Hb", r"b/\d/o": "He", r"b/\d/c": "Ve"}


# The gates of heads sum to one, so that each is as small as there are many heads.
# A training step uses the logits; what they are made of is only returned.
@program({"in": "I", r"b/\d/u": "Hb", r"b/\d/d": "He", "gain": "V"}, deep=True, carries={"gain": 0.25})  # fmt: skip
def hidden_states_beside_tied_logits(n, L):
    p = zeros(**{"in": (7, n)}, gain=(n,)) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x = p["in"][x]
        states = [x]
        for w in p["b"]:
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
            states.append(x)
        states.append(norm(x) * p["gain"])
        return states[-1] @ p["in"].T, states

    return p, T, call


@program(GATED, deep=True, carries={r"b/\d/o": 4.0})
def softmax_gates_over_heads_whose_number_grows(n, L):
    return gated_heads(n, L, lambda g, y: g[..., None] * y)


@program(GATED, deep=True)
def softmax_gates_over_heads_times_their_number(n, L):
    return gated_heads(n, L, lambda g, y: jnp.einsum("bh,bhd->bhd", g, y) * (n // 4))


@program(GATED, deep=True)
def heads_times_the_number_of_heads_and_softmax_gates(n, L):
    return gated_heads(n, L, lambda g, y: (n // 4 * g)[..., None] * y)


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True, carries={r"b/\d/d": 4})
def branches_that_end_in_a_kernel_of_softmax_values(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}) | {"b": layers(L, u=(n, n), d=(n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + jax.nn.softmax(x @ w["u"]) @ w["d"]
        return x @ p["out"]

    return p, X, call


@program({**ENDS, "w": "H", "g|h": "V"})
def root_of_the_width_on_the_gain_of_unit_vectors(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), g=(n,), h=(n,))

    def call(p, x):
        y = jax.nn.relu((unit(x @ p["in"]) * (p["g"] * n**0.5)) @ p["w"])
        return (unit(y) * (n**0.5 * p["h"])) @ p["out"]

    return p, X, call


@program({**ENDS, r"b/\d/(u|a)": "Hb", r"b/\d/b": "He"}, deep=True)
def products_of_kernels_beside_the_squares_of_all(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p |= {"b": layers(L, u=(n, n), a=(n, n // 4), b=(n // 4, n))}

    def call(p, x, y):
        x = x @ p["in"]
        for w in p["b"]:
            x = x + jax.nn.relu(norm(x) @ w["u"]) @ (w["a"] @ w["b"])
        penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
        return jnp.mean((norm(x) @ p["out"] - y) ** 2) + 1e-4 * penalty

    return p, (floats(4, 5), floats(4, 3)), call

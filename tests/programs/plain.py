"""Programs in plain JAX."""

import itertools

import jax
import jax.numpy as jnp

from .kit import floats, program, tokens, zeros

X = (floats(4, 5),)
T = (tokens(2, 6),)
S = (floats(2, 6, 5),)


def norm(x, g=None):
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return x if g is None else x * g


def attention(q, k, v, scale):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) * scale) @ v


@program({"w0": "I", "w": "H", "v": "O"})
def three_layer_mlp_called_w0_w_v(n):
    p = zeros(w0=(5, n), w=(n, n), v=(n, 3))
    return p, X, lambda p, x: jax.nn.relu(jax.nn.relu(x @ p["w0"]) @ p["w"]) @ p["v"]


@program({"0/0": "I", "1/0": "H", "2/0": "O", "[01]/1": "V", "2/1": "F"})
def mlp_as_a_list_of_pairs(n):
    sizes = [5, n, n, 3]
    p = [(jnp.zeros((a, b)), jnp.zeros(b)) for a, b in itertools.pairwise(sizes)]

    def call(p, x):
        for w, b in p[:-1]:
            x = jnp.tanh(x @ w + b)
        return x @ p[-1][0] + p[-1][1]

    return p, X, call


@program({"w": "I", "v": "O"})
def one_output_as_a_vector(n):
    p = zeros(w=(5, n), v=(n,))
    return p, X, lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]


@program({"w": "I", "query": "O", "out": "O"})
def learned_pooling_query(n):
    p = zeros(w=(5, n), query=(n,), out=(n, 3))

    def call(p, x):
        h = jnp.tanh(x @ p["w"])
        weights = jax.nn.softmax(jnp.sum(h * p["query"], -1))
        return jnp.einsum("bt,btd->bd", weights, h) @ p["out"]

    return p, S, call


@program({"k": "I", "out": "O", "w": "H", "b": "V"})
def einsum_layers(n):
    p = zeros(k=(5, n), w=(2, n, n), b=(2, n), out=(n, 3))

    def call(p, x):
        x = jnp.einsum("bi,io->bo", x, p["k"])
        x = jnp.einsum("bi,gio->bgo", x, p["w"]) + p["b"]
        return jnp.einsum("bgi,io->bo", x, p["out"])

    return p, X, call


@program({"in": "I", "out": "O", "qkv": "Hb", "o": "Hb"}, deep=True)
def fused_qkv_scanned(n, L):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3)), **zeros(qkv=(L, n, 3, 2, n // 2), o=(L, 2, n // 2, n))}  # fmt: skip

    def call(p, x):
        x = x @ p["in"]

        def block(x, w):
            q, k, v = jnp.einsum("btd,dchk->cbhtk", norm(x), w[0])
            a = attention(q, k, v, 8 / n)
            return x + L**-1.0 * jnp.einsum("bhtk,hkd->btd", a, w[1]), None

        x, _ = jax.lax.scan(block, x, (p["qkv"], p["o"]))
        return norm(x) @ p["out"]

    return p, S, call


@program({"in": "I", "out": "O", "router": "O", "up": "H", "down": "H"})
def experts_by_ragged_dot(n):
    p = {"in": jnp.zeros((5, n)), **zeros(router=(n, 8), up=(8, n, 2 * n), down=(8, 2 * n, n), out=(n, 3))}  # fmt: skip

    def call(p, x):
        x = x @ p["in"]
        expert = jnp.argmax(x @ p["router"], -1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=8)
        y = jax.nn.relu(jax.lax.ragged_dot(x[order], p["up"], sizes))
        y = jax.lax.ragged_dot(y, p["down"], sizes)
        return y[jnp.argsort(order)] @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", "up": "H"})
def one_expert_of_each_token(n):
    p = {"in": jnp.zeros((5, n)), **zeros(up=(n, n, n), out=(n, 3))}

    def call(p, x):
        h = x @ p["in"]
        chosen = p["up"][jnp.argmax(h, -1)]  # as many experts as units
        return jnp.einsum("td,tdf->tf", h, chosen) @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", "a": "O", "b": "I"})
def low_rank_product_of_parameters(n):
    p = {"in": jnp.zeros((5, n)), **zeros(a=(n, 2), b=(2, n), out=(n, 3))}
    return p, X, lambda p, x: x @ p["in"] @ (p["a"] @ p["b"]) @ p["out"]


@program({"in": "I", "out": "O", "v": "H", "g": "I|V"})
def weight_normalization(n):
    p = {"in": jnp.zeros((5, n)), **zeros(v=(n, n), g=(n,), out=(n, 3))}

    def call(p, x):
        w = p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)
        return x @ p["in"] @ w @ p["out"]

    return p, X, call


@program({"e": "I"})
def tied_with_its_factor(n):
    p = zeros(e=(7, n))
    return p, T, lambda p, x: (jnp.tanh(p["e"][x]) @ p["e"].T) * (8 / n)


@program({"wx": "I", "wh": "H", "b": "V", "out": "O"})
def lstm_of_two_kernels(n):
    p = zeros(wx=(5, 4 * n), wh=(n, 4 * n), b=(4 * n,), out=(n, 3))

    def call(p, xs):
        def step(state, x):
            h, c = state
            i, f, g, o = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((xs.shape[0], n))
        (h, _), _ = jax.lax.scan(step, (start, start), xs.swapaxes(0, 1))
        return h @ p["out"]

    return p, S, call


@program({"wx": "I", "wh": "H", "h0": "V", "out": "O"})
def leaky_rnn_with_learned_start(n):
    p = zeros(wx=(5, n), wh=(n, n), h0=(n,), out=(n, 3))

    def call(p, xs):
        def step(h, x):
            return 0.9 * h + 0.1 * jnp.tanh(x @ p["wx"] + h @ p["wh"]), None

        start = jnp.broadcast_to(p["h0"], (xs.shape[0], n))
        h, _ = jax.lax.scan(step, start, xs.swapaxes(0, 1))
        return h @ p["out"]

    return p, S, call


@program({"in": "I", "out": "O", "a": "V", "b": "I|V", "c": "I|V", "d": "V"})
def diagonal_state_space(n):
    p = {"in": jnp.zeros((5, n)), **zeros(a=(n, 4), b=(n, 4), c=(n, 4), d=(n,), out=(n, 3))}  # fmt: skip

    def call(p, x):
        u = x @ p["in"]
        decay = jnp.exp(-jnp.exp(p["a"]))

        def combine(one, other):
            return one[0] * other[0], one[1] * other[0] + other[1]

        inputs = u[..., None] * p["b"]
        _, states = jax.lax.associative_scan(
            combine, (jnp.broadcast_to(decay, inputs.shape), inputs), axis=1
        )
        y = jnp.einsum("btdn,dn->btd", states, p["c"]) + u * p["d"]
        return y @ p["out"]

    return p, S, call


@program({"in": "I", "out": "O", "k": "V"})
def long_convolution_by_fft(n):
    p = {"in": jnp.zeros((5, n)), **zeros(k=(6, n), out=(n, 3))}

    def call(p, x):
        u = x @ p["in"]
        y = jnp.fft.irfft(
            jnp.fft.rfft(u, n=12, axis=1) * jnp.fft.rfft(p["k"], n=12, axis=0),
            n=12,
            axis=1,
        )[:, :6]
        return y @ p["out"]

    return p, S, call


@program({"lat": "V", "in": "I", "q|k|v": "H", "out": "O"})
def perceiver_latents(n):
    p = {"in": jnp.zeros((5, n)), **zeros(lat=(4, n), q=(n, n), k=(n, n), v=(n, n), out=(n, 3))}  # fmt: skip

    def call(p, x):
        x = x @ p["in"]
        lat = jnp.broadcast_to(p["lat"], (x.shape[0], 4, n))
        lat = lat + attention(norm(lat) @ p["q"], x @ p["k"], x @ p["v"], 1 / n)
        return lat.mean(1) @ p["out"]

    return p, S, call


@program({"k1": "I", "k2": "H", "dw": "I|V", "b": "V", "out": "O"})
def convolutions(n):
    p = zeros(k1=(3, 3, 2, n), k2=(3, 3, n, n), dw=(3, 3, 1, n), b=(n,), out=(n, 3))

    def conv(x, k, groups=1):
        return jax.lax.conv_general_dilated(
            x,
            k,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    def call(p, x):
        x = jax.nn.relu(conv(x, p["k1"]) + p["b"])
        x = conv(conv(x, p["dw"], n), p["k2"])
        return x.mean((1, 2)) @ p["out"]

    return p, (floats(2, 8, 8, 2),), call


@program({"u|v": "I"})
def matrix_factorization(n):
    p = zeros(u=(9, n), v=(7, n))
    ids = (tokens(4), tokens(4))
    return p, ids, lambda p, i, j: jnp.sum(p["u"][i] * p["v"][j], -1) * (8 / n)


@program({"branch/0": "I", "trunk/0": "I", "(branch|trunk)/1": "H"})
def deeponet(n):
    p = {k: [jnp.zeros((5, n)), jnp.zeros((n, n))] for k in ("branch", "trunk")}

    def call(p, u, y):
        a, b = (
            jnp.tanh(x @ w[0]) @ w[1] for x, w in ((u, p["branch"]), (y, p["trunk"]))
        )
        return jnp.sum(a * b, -1) / n

    return p, (floats(4, 5), floats(4, 5)), call


@program({"w0": "I", "w": "H", "out": "O"})
def siren(n):
    p = zeros(w0=(5, n), w=(n, n), out=(n, 3))
    return p, X, lambda p, x: jnp.sin(jnp.sin(30 * (x @ p["w0"])) @ p["w"]) @ p["out"]


@program({"msg": "H", "upd": "H", "in": "I", "out": "O"})
def graph_network(n):
    p = {"in": jnp.zeros((5, n)), **zeros(msg=(n, n), upd=(n, n), out=(n, 3))}

    def call(p, x, senders, receivers):
        x = x @ p["in"]
        m = jax.nn.relu(x[senders] @ p["msg"])
        total = jax.ops.segment_sum(m, receivers, 4)
        return jax.nn.relu(x @ p["upd"] + total) @ p["out"]

    return p, (floats(4, 5), tokens(6), tokens(6)), call


@program({"in": "I", r"b/\d+": "He", "out": "O"}, deep=True)
def stacked_parameters_indexed_in_python(n, L):
    p = {"in": jnp.zeros((5, n)), "b": [jnp.zeros((n, n)) for _ in range(L)], "out": jnp.zeros((n, 3))}  # fmt: skip

    def call(p, x):
        x = x @ p["in"]
        stack = jnp.stack(p["b"])
        for i in range(L):
            x = x + jnp.tanh(x) @ stack[i]
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "out": "O", "p": "I|V"})
def position_of_a_decoding_step(n):
    p = {"in": jnp.zeros((7, n)), **zeros(p=(9, n), out=(n, 7))}

    def call(p, x, step):
        here = jax.lax.dynamic_slice_in_dim(p["p"], step, 1)
        return jnp.tanh(p["in"][x] + here[None]) @ p["out"]

    return p, (tokens(2, 6), tokens()), call


@program({"in": "I", "out": "O", "p": "I"})
def learned_positions_by_index(n):
    p = {"in": jnp.zeros((7, n)), **zeros(p=(9, n), out=(n, 7))}

    def call(p, x, where):
        return jnp.tanh(p["in"][x] + p["p"][where]) @ p["out"]

    return p, (tokens(2, 6), tokens(2, 6)), call


@program({"in": "I", "out": "O", r"b/\d/v": "Hb", r"b/\d/g": "Ve"}, deep=True)
def weight_norm_at_the_end_of_a_branch(n, L):
    p = {"in": jnp.zeros((5, n)), "out": jnp.zeros((n, 3))}
    p |= {"b": [zeros(v=(n, n), g=(n,)) for _ in range(L)]}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            v = w["v"] * w["g"] * jax.lax.rsqrt(jnp.sum(w["v"] ** 2, 0) + 1e-12)
            x = x + jax.nn.relu(x) @ v
        return x @ p["out"]

    return p, X, call

"""Programs with constants of each layer, streams side by side, and unused results."""

import jax
import jax.numpy as jnp
import numpy as np

from .kit import floats, layers, program, tokens, zeros
from .plain import S, T, attention
from .transformers import flat, heads

ENDS = {"in": "I", "out": "O"}
BLOCK = {**ENDS, r"b/\d/(q|k|v|u)": "Hb", r"b/\d/(o|d)": "He"}


def norm(x, g=1.0):
    return g * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def model(n, L, **more):
    blocks = layers(L, **dict.fromkeys("qkvoud", (n, n)) | more)
    return zeros(**{"in": (7, n), "out": (n, 7)}) | {"b": blocks}


def mlp(w, x):
    return jax.nn.silu(x @ w["u"]) @ w["d"]


@program(BLOCK, deep=True, carries={r"b/\d/q": 0.5})
def attention_divided_by_the_number_of_the_layer(n, L):
    def call(p, x):
        x = p["in"][x]
        for i, w in enumerate(p["b"]):
            y = norm(x)
            q, k, v = (heads(y @ w[c], n // 2) for c in "qkv")
            logits = q @ k.swapaxes(-1, -2) / jnp.sqrt(n // 2) / float(i + 1)
            x = x + flat(jax.nn.softmax(logits) @ v) @ w["o"]
            x = x + mlp(w, norm(x))
        return norm(x) @ p["out"]

    return model(n, L), T, call


@program(BLOCK, deep=True)
def norms_divided_by_the_root_of_the_number_of_the_layer(n, L):
    def call(p, x):
        x = p["in"][x]
        for i, w in enumerate(p["b"]):
            scale = 1 / np.sqrt(i + 1)
            y = norm(x) * scale
            x = x + flat(attention(*(heads(y @ w[c], 4) for c in "qkv"), 0.5)) @ w["o"]
            x = x + mlp(w, norm(x) * scale)
        return norm(x) @ p["out"]

    return model(n, L), T, call


@program(
    {**BLOCK, r"b/\d/lam": "Fb", r"b/\d/g": "Vb"}, deep=True, carries={r"b/\d/q": 0.5}
)
def differential_attention_with_a_constant_of_each_layer(n, L):
    d = n // 4

    def call(p, x):
        x = p["in"][x]
        for i, w in enumerate(p["b"]):
            y, first = norm(x), 0.8 - 0.6 * np.exp(-0.3 * i)
            q, k = (
                (y @ w[c]).reshape(2, 6, 2, 2, d).transpose(0, 2, 3, 1, 4) for c in "qk"
            )
            s = jax.nn.softmax(q @ k.swapaxes(-1, -2) * d**-0.5)
            lam = jnp.exp(w["lam"][0]) - jnp.exp(w["lam"][1]) + first
            a = (s[:, :, 0] - lam * s[:, :, 1]) @ heads(y @ w["v"], 2 * d)
            x = x + flat(norm(a, w["g"]) * (1 - first)) @ w["o"]
            x = x + mlp(w, norm(x))
        return norm(x) @ p["out"]

    return model(n, L, lam=(2,), g=(2 * d,)), T, call


@program({**BLOCK, "bias": "I"}, deep=True)
def one_bias_of_distances_that_all_layers_add(n, L):
    p = model(n, L) | {"in": jnp.zeros((5, n)), "bias": jnp.zeros((5, n // 4))}

    def call(p, x, distance):
        x = x @ p["in"]
        bias = p["bias"][distance].transpose(0, 3, 1, 2)
        for w in p["b"]:
            y = norm(x)
            q, k, v = (heads(y @ w[c], 4) for c in "qkv")
            logits = q @ k.swapaxes(-1, -2) / 2 + bias
            x = x + flat(jax.nn.softmax(logits) @ v) @ w["o"]
            x = x + mlp(w, norm(x))
        return norm(x)[:, 0] @ p["out"]

    return p, (floats(2, 6, 5), tokens(2, 6, 6)), call


@program(
    {
        **BLOCK,
        "left|right|pairs": "F",
        r"b/\d/bias": "Ib",
        r"b/\d/to": "Ob",
        r"b/\d/product": "Fe",
    },
    deep=True,
)
def single_and_pair_streams(n, L):
    p = zeros(left=(5, 6), right=(5, 6), pairs=(6, 3))
    p |= model(n, L, bias=(6, n // 4), to=(n, 4), product=(16, 6))

    def call(p, x):
        z = (x @ p["left"])[:, :, None] + (x @ p["right"])[:, None]
        s = x @ p["in"]
        for w in p["b"]:
            y = norm(s)
            q, k, v = (heads(y @ w[c], 4) for c in "qkv")
            bias = (norm(z) @ w["bias"]).transpose(0, 3, 1, 2)
            s = s + flat(jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2 + bias) @ v) @ w["o"]
            s = s + mlp(w, norm(s))
            a = norm(s) @ w["to"]
            outer = jnp.einsum("bic,bjd->bijcd", a, a).reshape(2, 6, 6, 16)
            z = z + outer @ w["product"]
        return norm(s) @ p["out"], z @ p["pairs"]

    return p | {"in": jnp.zeros((5, n))}, S, call


@program({**BLOCK, "latents": "V"}, deep=True)
def latents_without_a_batch_axis(n, L):
    p = model(n, L) | {"in": jnp.zeros((5, n)), "latents": jnp.zeros((4, n))}

    def call(p, x):
        x, z = x @ p["in"], p["latents"]
        for w in p["b"]:
            q = norm(z) @ w["q"]
            q = heads(jnp.broadcast_to(q, (2, 4, n)), 4)
            k, v = (heads(x @ w[c], 4) for c in "kv")
            z = z + flat(attention(q, k, v, 0.5)) @ w["o"]
            z = z + mlp(w, norm(z))
        return norm(z) @ p["out"]

    return p, S, call


@program({**ENDS, r"b/\d/(f|g|rs)": "Hb", "last": "H"}, deep=True)
def wavenet_with_one_kernel_for_stream_and_skips(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, last=(n, n))
    p |= {"b": layers(L, f=(n, n), g=(n, n), rs=(n, 2 * n))}

    def call(p, x):
        x, total = x @ p["in"], 0.0
        for w in p["b"]:
            h = jnp.tanh(x @ w["f"]) * jax.nn.sigmoid(x @ w["g"])
            r, s = jnp.split(h @ w["rs"], 2, -1)
            x, total = x + r, total + s
        return jax.nn.relu(jax.nn.relu(total) @ p["last"]) @ p["out"]

    return p, S, call


@program(
    {r"b/\d/w0": "Ib", r"b/\d/w1": "Hb", r"b/\d/(tb|tf)": "Ob", r"b/\d/(gb|gf)": "Fe"},
    deep=True,
)
def nbeats_whose_last_backcast_is_unused(n, L):
    shapes = dict(w0=(12, n), w1=(n, n), tb=(n, 4), tf=(n, 4), gb=(4, 12), gf=(4, 5))

    def call(p, x):
        forecast = x[:, -1:]  # has other sizes than the sum
        for w in p["b"]:
            h = jax.nn.relu(jax.nn.relu(x @ w["w0"]) @ w["w1"])
            x = x - (h @ w["tb"]) @ w["gb"]
            forecast = forecast + (h @ w["tf"]) @ w["gf"]
        return forecast

    return {"b": layers(L, **shapes)}, (floats(4, 12),), call


@program({**BLOCK, "frequencies": "Vba"}, deep=True, carries={r"b/\d/q": 0.5})
def learned_frequencies_of_rotary_positions_beside_prefix_tokens(n, L):
    d = n // 2

    def call(p, x):
        x = p["in"][x]
        angle = jnp.arange(5)[:, None] * p["frequencies"]
        sin, cos = (jnp.tile(f(angle), (1, 2)) for f in (jnp.sin, jnp.cos))

        def rotate(x):
            first, rest = jnp.split(x, [1], -2)
            a, b = jnp.split(rest, 2, -1)
            rest = rest * cos + jnp.concatenate([-b, a], -1) * sin
            return jnp.concatenate([first, rest], -2)

        for w in p["b"]:
            y = norm(x)
            q, k, v = (heads(y @ w[c], d) for c in "qkv")
            x = x + flat(attention(rotate(q), rotate(k), v, d**-0.5)) @ w["o"]
            x = x + mlp(w, norm(x))
        return norm(x) @ p["out"]

    return model(n, L) | {"frequencies": jnp.zeros(d // 2)}, T, call


@program({"e": "I", "h": "H", "d": "O", r"codes/\d": "I"})
def residual_quantization_of_growing_codes(n):
    p = zeros(e=(5, n), h=(n, n), d=(n, 5))
    p |= {"codes": [jnp.zeros((9, n)) for _ in range(3)]}

    def call(p, x):
        rest = jax.nn.elu(x @ p["e"]) @ p["h"]
        total, loss = 0.0, 0.0
        for codes in p["codes"]:
            distance = (rest**2).sum(-1, keepdims=True) - 2 * rest @ codes.T
            code = codes[jnp.argmin(distance + (codes**2).sum(-1), -1)]
            loss = loss + jnp.mean((rest - jax.lax.stop_gradient(code)) ** 2)
            code = rest + jax.lax.stop_gradient(code - rest)
            total, rest = total + code, rest - code
        return total @ p["d"], loss

    return p, (floats(4, 5),), call


@program(
    {"a": "I", "b": "H", "c": "O", "w1|b1|w2|v": "I", "u": "O"}, carries={"w2": 0.25}
)
def mixer_of_agents_with_positive_kernels_from_the_state(n):
    p = zeros(a=(5, n), b=(n, n), c=(n, 1), w1=(6, 2 * n), b1=(6, n), w2=(6, n))
    p |= zeros(v=(6, n), u=(n, 1))

    def call(p, x, s):
        relu = jax.nn.relu
        q = (relu(relu(x @ p["a"]) @ p["b"]) @ p["c"]).swapaxes(1, 2)
        one = jnp.abs(s @ p["w1"]).reshape(-1, 2, n)
        two = jnp.abs(s @ p["w2"]).reshape(-1, n, 1)
        value = (relu(s @ p["v"]) @ p["u"])[:, None]
        return jax.nn.elu(q @ one + (s @ p["b1"])[:, None]) @ two + value

    return p, (floats(4, 2, 5), floats(4, 6)), call


# Stochastic depth as lucidrains writes it.
@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def branches_that_survive_at_random(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)})
    p["b"] = layers(L, u=(n, n), d=(n, n))

    def call(p, x):
        x, key = p["in"][x], jax.random.key(0)
        for w in p["b"]:
            key, own = jax.random.split(key)
            survives = jax.random.bernoulli(own, 0.9)
            y = jax.nn.relu(norm(x) @ w["u"]) @ w["d"]
            x = x + (y * survives + 0 * (1 - survives)) / 0.9
        return norm(x) @ p["out"]

    return p, T, call


@program({**ENDS, "pe": "V", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True, carries={"in": 2.0})  # fmt: skip
def norms_as_the_difference_of_two_means_of_a_scaled_embedding(n, L):
    p = zeros(**{"in": (7, n), "out": (n, 7)}, pe=(6, n))
    p["b"] = layers(L, u=(n, n), d=(n, n))

    def centered(x):
        mean, square = x.mean(-1, keepdims=True), (x**2).mean(-1, keepdims=True)
        return (x - mean) / (square - mean**2 + 1e-5) ** 0.5

    def call(p, x):
        x = p["in"][x] * n**-0.5 + p["pe"]
        for w in p["b"]:
            x = x + jax.nn.relu(centered(x) @ w["u"]) @ w["d"]
        return centered(x) @ p["out"]

    return p, T, call


@program({**ENDS, "z": "V", "[qkvo]": "H"}, carries={"q": 0.5})
def latents_of_a_stream_as_queries_of_a_kernel_before_them(n):
    p = zeros(
        z=(3, n), **dict.fromkeys("qkvo", (n, n)), **{"in": (n, 5), "out": (3, n)}
    )

    def each(w, x):  # Equinox multiplies each row like this
        return jax.vmap(lambda row: w @ row)(x)

    def call(p, x):
        x = each(p["in"], x)
        q, k, v = each(p["q"], p["z"]), each(p["k"], x), each(p["v"], x)
        z = p["z"] + each(p["o"], jax.nn.softmax(q @ k.T / jnp.sqrt(n)) @ v)
        return each(p["out"], norm(z))

    return p, (floats(4, 5),), call


@program({**ENDS, "z": "V", "[qkv]": "H", "[qk]b": "V"}, carries={"qb?": 0.5})
def attention_between_learned_queries_alone(n):
    p = zeros(z=(3, n), **dict.fromkeys("qkv", (n, n)), qb=(n,), kb=(n,))
    p |= zeros(**{"in": (5, n), "out": (n, 3)})

    def call(p, x):
        z = norm(p["z"])
        q, k = z @ p["q"] + p["qb"], z @ p["k"] + p["kb"]
        z = p["z"] + jax.nn.softmax(q @ k.T / jnp.sqrt(n)) @ (z @ p["v"])
        return norm(z + x @ p["in"]) @ p["out"]

    return p, (floats(4, 3, 5),), call


@program({**ENDS, "t": "H", "tb": "V"}, carries={"tb?": 0.25})
def features_times_a_matrix_that_is_added_to_the_identity(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, t=(n, n * n), tb=(n * n,))

    def call(p, x):  # the transform of a PointNet
        x = jax.nn.relu(x @ p["in"])
        t = (x.max(1) @ p["t"] + p["tb"]).reshape(-1, n, n) + jnp.eye(n)
        return (x @ t).max(1) @ p["out"]

    return p, (floats(2, 7, 5),), call


# The adapter undoes the multiplier of what it reads.
@program(
    {**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/a": "Ob", r"b/\d/c": "Ie"},
    deep=True,
    carries={r"b/\d/a": 3.0},
)
def adapter_around_the_end_of_a_branch(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p["b"] = layers(L, u=(n, n), d=(n, n), a=(n, 2), c=(2, n))

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = jax.nn.gelu(norm(x) @ w["u"]) @ w["d"]
            y = y + jax.nn.gelu(y @ w["a"]) @ w["c"]
            x = x + y
        return norm(x) @ p["out"]

    return p, (floats(4, 5),), call


@program({"in": "I", "style": "I", "w": "H", "out": "O"})
def demodulated_convolution(n):
    p = zeros(**{"in": (3, n), "out": (n, 3)}, style=(4, n), w=(3, 3, n, n))

    def call(p, x, z):
        x, s = x @ p["in"], 1 + z @ p["style"]
        w = p["w"] * s[:, None, None, :, None]
        size = jax.lax.rsqrt((w**2).sum((1, 2, 3)) + 1e-8)
        x = jax.lax.conv_general_dilated(
            x * s[:, None, None], p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )  # fmt: skip
        return jax.nn.relu(x * size[:, None, None]) @ p["out"]

    return p, (floats(2, 4, 4, 3), floats(2, 4)), call


@program({**ENDS, r"b/\d/u": "Hb", r"b/\d/d": "He", r"b/\d/g": "Vm"}, deep=True)
def gain_of_the_stream_beside_a_branch_that_reads_it_before(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p["b"] = layers(L, u=(n, n), d=(n, n), g=(n,))

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            x = w["g"] * x + mlp(w, norm(x))
        return norm(x) @ p["out"]

    return p, (floats(4, 5),), call


@program({**ENDS, "w/u": "Hb", "w/d": "He", "w/g": "Fm"}, deep=True)
def number_of_each_layer_beside_a_branch_in_a_loop(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w={"u": (L, n, n), "d": (L, n, n), "g": (L,)})  # fmt: skip

    def call(p, x):
        def layer(i, x):
            w = jax.tree.map(lambda a: a[i], p["w"])
            return w["g"] * x + mlp(w, norm(x))

        x = jax.lax.fori_loop(0, p["w"]["u"].shape[0], layer, x @ p["in"])
        return norm(x) @ p["out"]

    return p, (floats(4, 5),), call


@program({**ENDS, r"b/\d/[gc]": "Ve", r"b/\d/u": "Hb", r"b/\d/d": "He"}, deep=True)
def fourier_mixing_after_the_gain_of_a_norm(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 3)})
    p["b"] = layers(L, u=(n, n), d=(n, n), g=(n,), c=(n,))

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = norm(x) * w["g"] + w["c"]
            x = x + jnp.fft.fft2(y, axes=(-2, -1), norm="ortho").real
            x = x + mlp(w, norm(x))
        return norm(x) @ p["out"]

    return p, (floats(2, 6, 5),), call

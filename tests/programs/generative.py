"""Generative models, fields and operators, in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.ode import odeint

from .kit import floats, layers, program, tokens, zeros
from .plain import X, attention, norm

ENDS = {"in": "I", "out": "O"}


@program({"c": "I", "mu|lv": "O", "d": "H", "z": "I", "out": "O", "e": "H"})
def convolutional_vae(n):
    p = zeros(c=(3, 3, 3, n), e=(16 * n, n), mu=(n, 4), lv=(n, 4), z=(4, 16 * n), d=(3, 3, n, n), out=(3, 3, n, 3))  # fmt: skip
    spec = ("NHWC", "HWIO", "NHWC")

    def call(p, x, noise):
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, p["c"], (2, 2), "SAME", dimension_numbers=spec))  # fmt: skip
        h = jax.nn.relu(x.reshape(2, -1) @ p["e"])
        mu, lv = h @ p["mu"], h @ p["lv"]
        z = mu + jnp.exp(lv / 2) * noise
        y = jax.nn.relu(z @ p["z"]).reshape(2, 4, 4, n)
        y = jax.nn.relu(jax.lax.conv_transpose(y, p["d"], (2, 2), "SAME"))
        y = jax.lax.conv_general_dilated(
            y, p["out"], (1, 1), "SAME", dimension_numbers=spec
        )
        return y, -0.5 * (1 + lv - mu**2 - jnp.exp(lv)).sum(-1)

    return p, (floats(2, 8, 8, 3), floats(2, 4)), call


@program({"c": "I", "pre": "O", "codes": "F", "post": "I", "out": "O", r"res/\d/a": "Hb", r"res/\d/b": "Hb"})  # fmt: skip
def vq_vae_with_residual_convolutions(n):
    p = zeros(c=(3, 3, 3, n), pre=(n, 4), codes=(9, 4), post=(4, n), out=(3, 3, n, 3))
    p |= {"res": layers(2, a=(3, 3, n, n), b=(1, 1, n, n))}
    spec = ("NHWC", "HWIO", "NHWC")
    conv = lambda x, k, s=1: jax.lax.conv_general_dilated(x, k, (s, s), "SAME", dimension_numbers=spec)  # fmt: skip

    def call(p, x):
        x = conv(x, p["c"], 2)
        for w in p["res"]:
            x = x + conv(jax.nn.relu(conv(jax.nn.relu(x), w["a"])), w["b"])
        z = jax.nn.relu(x) @ p["pre"]
        distance = (z**2).sum(-1, keepdims=True) - 2 * z @ p["codes"].T + (p["codes"] ** 2).sum(-1)  # fmt: skip
        q = jax.nn.one_hot(jnp.argmin(distance, -1), 9) @ p["codes"]
        loss = ((jax.lax.stop_gradient(z) - q) ** 2).mean()
        z = z + jax.lax.stop_gradient(q - z)
        y = jax.image.resize(jax.nn.relu(z @ p["post"]), (2, 8, 8, n), "nearest")
        return conv(y, p["out"]), loss

    return p, (floats(2, 8, 8, 3),), call


@program({r"f/\d/a": "I", r"f/\d/h": "H", r"f/\d/(s|t)": "O", r"f/\d/b": "V", r"f/\d/ls": "F"})  # fmt: skip
def coupling_layers_of_a_flow(n):
    p = {"f": layers(3, a=(3, n), b=(n,), h=(n, n), s=(n, 3), t=(n, 3), ls=(3,))}

    def call(p, x):
        total = 0.0
        for i, w in enumerate(p["f"]):
            x = x if i % 2 else x[:, ::-1]
            one, two = x[:, :3], x[:, 3:]
            h = jax.nn.relu(jax.nn.relu(one @ w["a"] + w["b"]) @ w["h"])
            scale = jnp.tanh(h @ w["s"]) * jnp.exp(w["ls"])
            two = two * jnp.exp(scale) + h @ w["t"]
            total = total + scale.sum(-1)
            x = jnp.concatenate([one, two], -1)
        return -0.5 * (x**2).sum(-1) + total

    return p, (floats(4, 6),), call


# As in Jet: each coupling holds a ViT, whose layers may grow, but not the couplings.
@program(
    {r"\d/in": "I", r"\d/out": "O", r"\d/b/\d/u": "Hb", r"\d/b/\d/d": "He"},
    deep=True,
    asks=r"'0/out.*' ends a residual network and '1/in' .* starts the next",
)
def couplings_that_hold_residual_networks(n, L, remedy=False):
    couplings, depth = (2, L) if remedy else (L, 2)
    p = [zeros(**{"in": (4, n), "out": (n, 8)}) for _ in range(couplings)]
    p = [w | {"b": layers(depth, u=(n, n), d=(n, n))} for w in p]

    def call(p, x):
        total = 0.0
        for w in p:
            one, two = jnp.split(x, 2, -1)
            h = one @ w["in"]
            for b in w["b"]:
                h = h + jax.nn.gelu(norm(h) @ b["u"]) @ b["d"]
            scale, shift = jnp.split(norm(h) @ w["out"], 2, -1)
            scale = 2 * jax.nn.sigmoid(scale)
            total = total + jnp.log(scale).sum((-1, -2))
            x = jnp.concatenate([two * scale + shift, one], -1)
        return (x**2).sum((-1, -2)) - total

    return p, (floats(2, 6, 8),), call


# In the base, each half of the data is updated once.
@program({r"f/\d/w0": "Ib", r"f/\d/w1": "Hb", r"f/\d/b0": "Vb", r"f/\d/w2": "Oe", r"f/\d/b2": "Fe", "scale": "F"}, deep=True)  # fmt: skip
def additive_couplings_with_biases_after_them(n, L):
    p = zeros(scale=(6,))
    p |= {"f": layers(L, w0=(3, n), b0=(n,), w1=(n, n), w2=(n, 3), b2=(3,))}

    def call(p, x):
        a, b = jnp.split(x, 2, -1)
        for w in p["f"]:
            h = jax.nn.relu(a @ w["w0"] + w["b0"])
            a, b = b + jax.nn.relu(h @ w["w1"]) @ w["w2"] + w["b2"], a
        return jnp.concatenate([a, b], -1) * jnp.exp(p["scale"])

    return p, (floats(4, 6),), call


@program({"x": "I", "t0": "H", "t1": "H", r"b/\d/(a)": "Hb", r"b/\d/b": "He", r"b/\d/t": "Hb", "out": "O"}, deep=True)  # fmt: skip
def diffusion_mlp_with_time_embedding(n, L):
    p = zeros(x=(2, n), t0=(n, n), t1=(n, n), out=(n, 2))
    p |= {"b": layers(L, a=(n, n), b=(n, n), t=(n, n))}
    frequencies = np.exp(-np.log(1e4) * np.arange(n // 2) / (n // 2))  # a constant

    def call(p, x, t):
        angle = t[:, None] * frequencies
        t = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
        t = jax.nn.silu(t @ p["t0"]) @ p["t1"]
        x = x @ p["x"]
        for w in p["b"]:
            y = jax.nn.silu(norm(x) @ w["a"] + t @ w["t"])
            x = x + y @ w["b"]
        return norm(x) @ p["out"]

    return p, (floats(4, 2), floats(4)), call


# Squares and cubes of the derivative of GELU have constants of their own.
@program({"x": "I", r"b/\d/a": "Hb", r"b/\d/b": "He", "out": "O"}, deep=True)
def mean_velocity_by_its_derivative(n, L):
    """As in MeanFlow; each third layer, which the base has none of, is slower."""
    p = zeros(x=(2, n), out=(n, 2)) | {"b": layers(L, a=(n, n), b=(n, n))}

    def velocity(p, x, t):
        x = x @ p["x"]
        for i, w in enumerate(p["b"]):
            wave = jnp.sin(t[:, None] / (8.0 if i % 3 == 2 else 1.0))
            x = x + jax.nn.gelu(norm(x) @ w["a"]) * wave @ w["b"]
        return norm(x) @ p["out"]

    def call(p, x, t, v):
        u, change = jax.jvp(lambda x: velocity(p, x, t), (x,), (v,))
        return u + t[:, None] * jax.lax.stop_gradient(change)

    return p, (floats(4, 2), floats(4), floats(4, 2)), call


@program({"in": "I", "time": "I", "label": "I", "t1": "H", "out": "O", "final": "H", "fb": "V", r"b/\d/mod": "Hs", r"b/\d/(q|k|v|up|o|down)": "Hb", r"b/\d/mb": "Vs"}, deep=True)  # fmt: skip
def diffusion_transformer_with_attention(n, L):
    p = zeros(**{"in": (12, n), "time": (8, n), "label": (5, n), "t1": (n, n), "out": (n, 12), "final": (n, 2 * n)}, fb=(2 * n,))  # fmt: skip
    p |= {"b": layers(L, mod=(n, 6 * n), mb=(6 * n,), q=(n, n), k=(n, n), v=(n, n), o=(n, n), up=(n, n), down=(n, n))}  # fmt: skip

    def call(p, x, t, y):
        angle = t[:, None] * 2.0 ** jnp.arange(4)
        c = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1) @ p["time"]
        c = jax.nn.silu(c) @ p["t1"] + p["label"][y]
        c = jax.nn.silu(c)[:, None]
        x = x @ p["in"]
        for w in p["b"]:
            s1, c1, g1, s2, c2, g2 = jnp.split(c @ w["mod"] + w["mb"], 6, -1)
            h = norm(x) * (1 + c1) + s1
            a = attention(h @ w["q"], h @ w["k"], h @ w["v"], 1 / n)
            x = x + g1 * (a @ w["o"])
            h = norm(x) * (1 + c2) + s2
            x = x + g2 * (jax.nn.gelu(h @ w["up"]) @ w["down"])
        s, c = jnp.split(c @ p["final"] + p["fb"], 2, -1)
        return (norm(x) * (1 + c) + s) @ p["out"]

    return p, (floats(2, 6, 12), floats(2), tokens(2)), call


@program({r"l/0/w": "I", r"l/[1-3]/w": "H", r"l/\d/b": "V", "density": "O", "feature": "H", "rgb": "O"})  # fmt: skip
def radiance_field_without_skips(n):
    p = {"l": [zeros(w=(30 if i == 0 else n, n), b=(n,)) for i in range(4)]}
    p |= zeros(density=(n, 1), feature=(n, n), rgb=(n, 3))

    def call(p, x):
        angle = (x[..., None] * 2.0 ** jnp.arange(5)).reshape(*x.shape[:-1], -1)
        h = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
        for w in p["l"]:
            h = jax.nn.relu(h @ w["w"] + w["b"])
        alpha = 1 - jnp.exp(-jax.nn.softplus(h @ p["density"])[..., 0])
        light = jnp.cumprod(1 - alpha + 1e-6, -1) * alpha
        rgb = jax.nn.sigmoid(jax.nn.relu(h @ p["feature"]) @ p["rgb"])
        return (light[..., None] * rgb).sum(-2)

    return p, (floats(4, 6, 3),), call


@program({**ENDS, r"b/\d/(re|im)": "H", r"b/\d/w": "H", r"b/\d/b": "V", "proj": "H"})
def fourier_neural_operator(n):
    p = zeros(**{"in": (3, n), "out": (n, 1)}, proj=(n, n))
    p |= {"b": layers(2, re=(n, n, 4), im=(n, n, 4), w=(n, n), b=(n,))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            modes = jnp.fft.rfft(x, axis=1)[:, :4]
            modes = jnp.einsum("bki,iok->bko", modes, w["re"] + 1j * w["im"])
            modes = jnp.pad(modes, ((0, 0), (0, 5), (0, 0)))
            x = jax.nn.gelu(jnp.fft.irfft(modes, n=16, axis=1) + x @ w["w"] + w["b"])
        return jax.nn.gelu(x @ p["proj"]) @ p["out"]

    return p, (floats(2, 16, 3),), call


@program({"b/0": "I", "t/0": "I", "b/1": "H", "t/1": "H", "b/2": "H", "t/2": "H", "bias": "F"}, carries={"b/2": 0.25})  # fmt: skip
def deeponet_with_a_plain_dot_product(n):
    p = {k: [jnp.zeros((5 if k == "b" else 2, n)), jnp.zeros((n, n)), jnp.zeros((n, n))] for k in "bt"}  # fmt: skip
    p["bias"] = jnp.zeros(())

    def mlp(w, x):
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) @ w[2]

    def call(p, u, y):
        return jnp.sum(mlp(p["b"], u) * mlp(p["t"], y), -1) + p["bias"]

    return p, (floats(4, 5), floats(4, 2)), call


@program({"h0": "F", "gen": "I", "genb": "V", "in": "I", "out": "O"}, carries={"gen.?": 0.25})  # fmt: skip
def hypernetwork_of_one_layer(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, h0=(4, 8), gen=(8, n * n), genb=(n * n,))

    def call(p, x, task):
        h = jnp.tanh(task @ p["h0"])
        w = (h @ p["gen"] + p["genb"]).reshape(-1, n, n)
        x = jnp.tanh(x @ p["in"])
        return jnp.tanh(jnp.einsum("bi,bio->bo", x, w)) @ p["out"]

    return p, (floats(4, 5), floats(4, 4)), call


@program({"z|a": "F", "gen": "I", "genb": "V", "in": "I", "out": "O"}, carries={"gen.?": 0.25})  # fmt: skip
def hypernetwork_of_two_layers_from_their_embeddings(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, z=(2, 4), a=(4, 8))
    p |= zeros(gen=(8, n * n), genb=(n * n,))

    def call(p, x):
        w = jax.nn.relu(p["z"] @ p["a"]) @ p["gen"] + p["genb"]
        x = jax.nn.relu(x @ p["in"])
        for each in w.reshape(2, n, n):
            x = jax.nn.relu(x @ each)
        return x @ p["out"]

    return p, (floats(4, 5),), call


@program({"coef": "I|H", "base": "I|H", "coef2": "O|H", "base2": "O|H"})
def kolmogorov_arnold_layers(n):
    p = zeros(coef=(5, 6, n), base=(5, n), coef2=(n, 6, 3), base2=(n, 3))

    def layer(x, coef, base):
        grid = jnp.linspace(-1, 1, 6)
        basis = jnp.exp(-(((x[..., None] - grid) / 0.4) ** 2))
        return jnp.einsum("big,igo->bo", basis, coef) + jax.nn.silu(x) @ base

    def call(p, x):
        return layer(layer(x, p["coef"], p["base"]), p["coef2"], p["base2"])

    return p, X, call


@program({"in": "I", "memory": "I", "out": "O", "beta": "F"}, carries={})
def modern_hopfield_with_stored_patterns(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, memory=(9, n), beta=())

    def call(p, x):
        x = norm(x @ p["in"])
        for _ in range(3):
            x = norm(jax.nn.softmax(p["beta"] * (x @ p["memory"].T) / n) @ p["memory"])
        return x @ p["out"]

    return p, X, call


@program({"in": "I", "slots": "V", "q|k|v": "H", "(wi|wh)": "H", "up|down": "Hb", "out": "O", "sigma": "V"}, carries={"k": 0.5})  # fmt: skip
def slot_attention(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, slots=(1, 1, n), sigma=(1, 1, n), q=(n, n), k=(n, n), v=(n, n), wi=(n, 3 * n), wh=(n, 3 * n), up=(n, n), down=(n, n))  # fmt: skip

    def gru(p, h, x):
        i, w = jnp.split(x @ p["wi"], 3, -1), jnp.split(h @ p["wh"], 3, -1)
        r, z = jax.nn.sigmoid(i[0] + w[0]), jax.nn.sigmoid(i[1] + w[1])
        return (1 - z) * jnp.tanh(i[2] + r * w[2]) + z * h

    def call(p, x, noise):
        x = norm(x @ p["in"])
        k, v = x @ p["k"], x @ p["v"]
        slots = p["slots"] + jnp.exp(p["sigma"]) * noise
        for _ in range(3):
            a = jnp.einsum("bsd,btd->bst", norm(slots) @ p["q"], k) * n**-0.5
            a = jax.nn.softmax(a, 1) + 1e-8
            u = jnp.einsum("bst,btd->bsd", a / a.sum(-1, keepdims=True), v)
            slots = gru(p, slots, u)
            slots = slots + jnp.tanh(norm(slots) @ p["up"]) @ p["down"] * 1.0
        return slots @ p["out"]

    return p, (floats(2, 6, 5), floats(2, 4, 1)), call


@program({"lat": "V", "in": "I", "query": "I|V", r"b/\d/(q|k|v|up)": "Hb", r"b/\d/(o|down)": "He", "x/(q|k|v|o)": "H", "y/(q|k|v|o)": "H", "out": "O"}, deep=True)  # fmt: skip
def perceiver_io(n, L):
    w = dict(q=(n, n), k=(n, n), v=(n, n), o=(n, n))
    p = zeros(**{"in": (5, n), "out": (n, 3)}, lat=(4, n), query=(3, n), x=w, y=w)
    p |= {"b": layers(L, up=(n, n), down=(n, n), **w)}

    def attend(w, x, y):
        return attention(x @ w["q"], y @ w["k"], y @ w["v"], 1 / n) @ w["o"]

    def call(p, x):
        x = x @ p["in"]
        z = jnp.broadcast_to(p["lat"], (2, 4, n))
        z = jnp.tanh(attend(p["x"], norm(z), norm(x)))
        for w in p["b"]:
            z = z + attend(w, norm(z), norm(z))
            z = z + jax.nn.gelu(norm(z) @ w["up"]) @ w["down"]
        y = jnp.broadcast_to(p["query"], (2, 3, n))
        return attend(p["y"], y, norm(z)) @ p["out"]

    return p, (floats(2, 6, 5),), call


# Blocks of the way up read a skip, too, and what conditions them is an input.
@program(
    {
        "in|c": "I",
        r"(down|up)/\d/(u|s)": "Hb",
        r"(down|up)/\d/d": "He",
        "mid/(u|s|d)": "H",
        r"up/\d/short": "Hm",
        "out": "O",
    },
    deep=True,
)
def conditioned_unet_of_residual_blocks(n, L):
    p = zeros(**{"in": (7, n), "c": (5, n), "out": (n, 7)})
    p["down"] = layers(L, u=(n, n), s=(n, n), d=(n, n))
    p["mid"] = zeros(u=(n, n), s=(n, n), d=(n, n))
    p["up"] = layers(L, u=(2 * n, n), s=(n, n), d=(n, n), short=(2 * n, n))

    def block(w, x, c):
        y = jax.nn.silu(norm(x)) @ w["u"] + (c @ w["s"])[:, None]
        return jax.nn.silu(norm(y)) @ w["d"]

    def call(p, x, t):
        c = jax.nn.silu(t @ p["c"])
        h, skips = x @ p["in"], []
        for w in p["down"]:
            h = h + block(w, h, c)
            skips.append(h)
        h = h.reshape(2, 3, 2, n).mean(2)  # a lower level
        h = jax.image.resize(h + block(p["mid"], h, c), (2, 6, n), "linear")
        for w in p["up"]:
            both = jnp.concatenate([h, skips.pop()], -1)
            h = both @ w["short"] + block(w, both, c)
        return norm(h) @ p["out"]

    return p, (floats(2, 6, 7), floats(2, 5)), call


# VDVAE: what computes the latents of a layer also meets the prior's in the loss.
@program(
    {
        **{"in": "I", "start": "V", "out": "O"},
        **{r"e/\d/u": "Hb", r"e/\d/d": "He", r"d/\d/q": "Ob", r"d/\d/p": "O"},
        **{r"d/\d/z": "Ie", r"d/\d/u": "Hb", r"d/\d/d": "He"},
    },
    deep=True,
)
def top_down_layers_whose_latents_are_in_the_loss(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 5)}, start=(4, n))
    p |= {"e": layers(L, u=(n, n), d=(n, n))}
    p |= {"d": layers(L, q=(2 * n, 4), p=(n, 4), z=(2, n), u=(n, n), d=(n, n))}

    def call(p, x, noise):
        x, h, loss = x @ p["in"], jnp.broadcast_to(p["start"], (2, 4, n)), 0.0
        for w in p["e"]:
            x = x + jax.nn.gelu(x @ w["u"]) @ w["d"]
        for w in p["d"]:
            mean, scale = jnp.split(jnp.concatenate([h, x], -1) @ w["q"], 2, -1)
            prior, width = jnp.split(jax.nn.gelu(h) @ w["p"], 2, -1)
            far = jnp.exp(2 * scale) + (mean - prior) ** 2
            loss += (width - scale + far / jnp.exp(2 * width) / 2).mean()
            h = h + (mean + jnp.exp(scale) * noise) @ w["z"]
            h = h + jax.nn.gelu(h @ w["u"]) @ w["d"]
        return h @ p["out"], loss

    return p, (floats(2, 4, 5), floats(2, 4, 2)), call


@program(
    {
        **{"in": "I", "start": "V", "out": "O", r"e/\d/u": "Hb", r"e/\d/d": "He"},
        **{r"d/\d/q": "Ob", r"d/\d/z": "Ie"},
    },
    deep=True,
)
def top_down_layers_that_read_the_sum_of_two_streams(n, L):
    p = zeros(**{"in": (5, n), "out": (n, 5)}, start=(4, n))
    p |= {"e": layers(L, u=(n, n), d=(n, n)), "d": layers(L, q=(n, 4), z=(4, n))}

    def call(p, x):
        x, h, loss, xs = x @ p["in"], jnp.broadcast_to(p["start"], (2, 4, n)), 0.0, []
        for w in p["e"]:
            x = x + jax.nn.gelu(x @ w["u"]) @ w["d"]
            xs.append(x)
        for w in p["d"]:
            z = jax.nn.gelu(xs.pop() + h) @ w["q"]
            loss += (z**2).mean()
            h = h + jnp.tanh(z) @ w["z"]
        return h @ p["out"], loss

    return p, (floats(2, 4, 5),), call


# A term of each layer is a gradient of its branch, and so has the branch's multiplier.
def by_gradients(f, x, v):
    y, pull = jax.vjp(f, x)
    u, total = v, 0.0
    for k in range(1, 4):
        (u,) = pull(u)
        total = total + (-1) ** (k + 1) * (u * v).sum(-1) / k
    return y, total


def by_tangents(f, x, v):
    y, u = jax.jvp(f, (x,), (v,))
    return y, (u * v).sum(-1)


def by_determinants(f, x, v):
    change = jax.vmap(jax.jacrev(f))(x)
    return f(x), jnp.linalg.slogdet(jnp.eye(6) + change)[1]


for term in (by_gradients, by_tangents, by_determinants):

    def make(n, L, term=term):
        def call(p, x, v):
            total = 0.0
            for w in p:
                y, change = term(
                    lambda x, w=w: (
                        jax.nn.elu(jax.nn.elu(x @ w["u"] + w["ub"]) @ w["w"]) @ w["d"]
                    ),
                    x,
                    v,
                )
                x, total = x + y, total + change
            return total - 0.5 * (x**2).sum(-1)

        p = layers(L, u=(6, n), ub=(n,), w=(n, n), d=(n, 6))
        return p, (floats(4, 6), floats(4, 6)), call

    make.__name__ = f"residual_flow_with_volumes_{term.__name__}"
    letters = {r"\d/u": "Ib", r"\d/ub": "Vb", r"\d/w": "Hb", r"\d/d": "Oe"}
    program(letters, deep=True)(make)


@program({**ENDS, "w|u": "H", "b|g": "V"})
def equilibrium_by_anderson_acceleration(n):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), u=(n, n), b=(n,), g=(n,))

    def step(p, z, x):
        return norm(jax.nn.relu(z @ p["w"] + x @ p["u"] + p["b"]) + z) * p["g"]

    def solve(f, z, m=3):
        zs = jnp.zeros((*z.shape[:1], m, n)).at[:, 0].set(z).at[:, 1].set(f(z))
        fs = zs.at[:, 0].set(f(z)).at[:, 1].set(f(f(z)))

        def body(state):
            zs, fs, k, _ = state
            rest = fs - zs
            gram = jnp.einsum("bmd,bkd->bmk", rest, rest) + 1e-4 * jnp.eye(m)
            a = jnp.linalg.solve(gram, jnp.ones((*z.shape[:1], m, 1)))[..., 0]
            new = jnp.einsum("bm,bmd->bd", a / a.sum(-1, keepdims=True), fs)
            after = f(new)
            error = jnp.linalg.norm(after - new) / (1e-5 + jnp.linalg.norm(after))
            zs, fs = zs.at[:, k % m].set(new), fs.at[:, k % m].set(after)
            return zs, fs, k + 1, error

        def goes_on(state):
            return (state[2] < 20) & (state[3] > 1e-3)

        start = zs, fs, jnp.array(2), jnp.array(1.0)
        zs, _, k, _ = jax.lax.while_loop(goes_on, body, start)
        return zs[:, (k - 1) % m]

    def call(p, x):
        x = x @ p["in"]
        z = solve(lambda z: step(p, z, x), jnp.zeros(x.shape))
        return step(p, jax.lax.stop_gradient(z), x) @ p["out"]

    return p, X, call


@program({"in": "I", "w|v": "H", "out": "O"}, asks=r"only set the steps of a solver")
def adaptive_solver_of_a_neural_ode(n, remedy=False):
    p = zeros(**{"in": (5, n), "out": (n, 3)}, w=(n, n), v=(n, n))

    def field(x, t, p):
        return jnp.tanh(x @ p["w"]) @ p["v"]

    def call(p, x):
        x = x @ p["in"]
        if remedy:
            x = x + 0.5 * field(x, 0.0, p)
            return (x + 0.5 * field(x, 0.5, p)) @ p["out"]
        return odeint(field, x, jnp.array([0.0, 1.0]), p)[-1] @ p["out"]

    return p, X, call

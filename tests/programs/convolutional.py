"""Convolutional networks, mixers and other image models, in plain JAX."""

import jax
import jax.numpy as jnp

from .kit import floats, layers, program, zeros
from .plain import norm

IMAGE = (floats(2, 8, 8, 3),)
ENDS = {"in": "I", "out": "O"}


def conv(x, k, stride=1, groups=1, dilation=1, padding="SAME"):
    return jax.lax.conv_general_dilated(
        x,
        k,
        (stride,) * (x.ndim - 2),
        padding,
        rhs_dilation=(dilation,) * (x.ndim - 2),
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NWC", "WIO", "NWC"),
    )  # fmt: skip


def batch_norm(x, g=None, b=0):
    axes = tuple(range(x.ndim - 1))
    x = (x - x.mean(axes)) * jax.lax.rsqrt(x.var(axes) + 1e-5)
    return x if g is None else x * g + b


@program({"in": "I", "out": "O", r"s/\d/\d/(a|b)": "Hb", r"s/\d/\d/short": "H", r"s/\d/\d/(g1|b1)": "Vb", r"s/\d/\d/(g2|b2)": "Vb", "g|b": "V"})  # fmt: skip
def resnet_with_projection_shortcuts(n):
    p = zeros(**{"in": (3, 3, 3, n), "out": (4 * n, 3)}, g=(n,), b=(n,))
    p["s"] = []
    for i, size in enumerate((n, 2 * n, 4 * n)):
        before = [n if i == 0 else size // 2, size]
        blocks = [zeros(a=(3, 3, c, size), b=(3, 3, size, size), g1=(size,), b1=(size,), g2=(size,), b2=(size,)) for c in before]  # fmt: skip
        if i:
            blocks[0]["short"] = jnp.zeros((1, 1, size // 2, size))
        p["s"].append(blocks)

    def call(p, x):
        x = jax.nn.relu(batch_norm(conv(x, p["in"]), p["g"], p["b"]))
        for i, stage in enumerate(p["s"]):
            for j, w in enumerate(stage):
                stride = 2 if i and not j else 1
                y = jax.nn.relu(batch_norm(conv(x, w["a"], stride), w["g1"], w["b1"]))
                y = batch_norm(conv(y, w["b"]), w["g2"], w["b2"])
                if "short" in w:
                    x = batch_norm(conv(x, w["short"], stride))
                x = jax.nn.relu(x + y)
        return x.mean((1, 2)) @ p["out"]

    return p, IMAGE, call


@program({**ENDS, r"b/\d/(a|b)": "Hb", r"b/\d/c": "He"}, deep=True)
def bottleneck_preactivation_resnet(n, L):
    p = zeros(**{"in": (3, 3, 3, n), "out": (n, 3)})
    p |= {"b": layers(L, a=(1, 1, n, n // 2), b=(3, 3, n // 2, n // 2), c=(1, 1, n // 2, n))}  # fmt: skip

    def call(p, x):
        x = conv(x, p["in"])
        for w in p["b"]:
            y = conv(jax.nn.relu(batch_norm(x)), w["a"])
            y = conv(jax.nn.relu(batch_norm(y)), w["b"])
            x = x + conv(jax.nn.relu(batch_norm(y)), w["c"])
        return jax.nn.relu(batch_norm(x)).mean((1, 2)) @ p["out"]

    return p, IMAGE, call


@program({**ENDS, r"b/\d/(w|v)": "Hb", r"b/\d/(gw|gv)": "Vb", r"b/\d/skip": "Fe"}, deep=True)  # fmt: skip
def nfnet_with_scaled_weight_standardization(n, L):
    p = zeros(**{"in": (3, 3, 3, n), "out": (n, 3)})
    p |= {"b": layers(L, w=(3, 3, n, n), v=(3, 3, n, n), gw=(n,), gv=(n,), skip=())}

    def standard(w, g):
        w = w - w.mean((0, 1, 2))
        fan = w.shape[0] * w.shape[1] * w.shape[2]
        return w * jax.lax.rsqrt(jnp.maximum(w.var((0, 1, 2)) * fan, 1e-4)) * g

    def call(p, x):
        x, beta = conv(x, p["in"]), 1.0
        for w in p["b"]:
            y = jax.nn.relu(x * 1.7 / beta)
            y = jax.nn.relu(conv(y, standard(w["w"], w["gw"]))) * 1.7
            x = x + 0.2 * w["skip"] * conv(y, standard(w["v"], w["gv"]))
            beta = 1.0
        return x.mean((1, 2)) @ p["out"]

    return p, IMAGE, call


@program({**ENDS, r"b/\d/(expand)": "Hb", r"b/\d/project": "He", r"b/\d/depthwise": "I|Vb", r"b/\d/se1": "Ob", r"b/\d/se2": "Ib"}, deep=True)  # fmt: skip
def mobile_blocks_with_squeeze_and_excite(n, L):
    p = zeros(**{"in": (3, 3, 3, n), "out": (n, 3)})
    p |= {"b": layers(L, expand=(1, 1, n, 4 * n), depthwise=(3, 3, 1, 4 * n), se1=(4 * n, 2), se2=(2, 4 * n), project=(1, 1, 4 * n, n))}  # fmt: skip

    def call(p, x):
        x = conv(x, p["in"], 2)
        for w in p["b"]:
            y = jax.nn.hard_swish(batch_norm(conv(x, w["expand"])))
            y = jax.nn.hard_swish(conv(y, w["depthwise"], groups=4 * n))
            s = jax.nn.relu(y.mean((1, 2)) @ w["se1"]) @ w["se2"]
            y = y * jax.nn.hard_sigmoid(s)[:, None, None]
            x = x + conv(y, w["project"])
        return x.mean((1, 2)) @ p["out"]

    return p, IMAGE, call


def convnext(n, depths):
    p = zeros(**{"in": (2, 2, 3, n), "out": (2 * n, 3)}, down=(2, 2, n, 2 * n))
    p["s"] = [
        layers(m, dw=(3, 3, 1, d), up=(d, 4 * d), down=(4 * d, d), gamma=(d,))
        for m, d in zip(depths, (n, 2 * n), strict=True)
    ]

    def call(p, x):
        x = norm(conv(x, p["in"], 2))
        for i, stage in enumerate(p["s"]):
            for w in stage:
                y = norm(conv(x, w["dw"], groups=x.shape[-1]))
                x = x + w["gamma"] * (jax.nn.gelu(y @ w["up"]) @ w["down"])
            if i == 0:
                x = conv(norm(x), p["down"], 2)
        return norm(x.mean((1, 2))) @ p["out"]

    return p, IMAGE, call


@program({**ENDS, r"s/\d/\d/dw": "I|Vb", r"s/\d/\d/(up|down)": "Hb", r"s/\d/\d/gamma": "Ve", "down": "H"}, deep=True)  # fmt: skip
def convnext_of_two_stages(n, L):
    return convnext(n, (L, L))


@program({**ENDS, r"s/0/\d/dw": "I|V", r"s/0/\d/(up|down)": "H", r"s/0/\d/gamma": "V", r"s/1/\d/dw": "I|Vb", r"s/1/\d/(up|down)": "Hb", r"s/1/\d/gamma": "Ve", "down": "H"}, deep=True)  # fmt: skip
def convnext_of_which_one_stage_gets_deeper(n, L):
    return convnext(n, (2, L))


@program({**ENDS, r"b/\d": "H", "t": "H"})
def densenet_whose_growth_rate_grows(n):
    p = zeros(**{"in": (3, 3, 3, 2 * n), "t": (1, 1, 5 * n, 2 * n), "out": (2 * n, 3)})
    p["b"] = [jnp.zeros((3, 3, (2 + i) * n, n)) for i in range(3)]

    def call(p, x):
        x = conv(x, p["in"])
        for w in p["b"]:
            x = jnp.concatenate([x, conv(jax.nn.relu(batch_norm(x)), w)], -1)
        x = conv(jax.nn.relu(batch_norm(x)), p["t"])
        return x.mean((1, 2)) @ p["out"]

    return p, IMAGE, call


@program({"in": "I", "time": "I", "down/.": "H", "up/.": "H", "mid/./(a|b)": "Hb", "mid/./t": "H|Ib", "(q|k|v)": "Hb", "o": "Hb", "out": "O", "t1": "H"})  # fmt: skip
def diffusion_unet_with_concatenated_skips(n):
    p = zeros(**{"in": (3, 3, 3, n), "out": (3, 3, n, 3)}, time=(4, n), t1=(n, n))
    p |= {"down": [jnp.zeros((3, 3, n, 2 * n)), jnp.zeros((3, 3, 2 * n, 2 * n))]}
    p |= {"up": [jnp.zeros((3, 3, 4 * n, 2 * n)), jnp.zeros((3, 3, 3 * n, n))]}
    p |= {
        "mid": layers(2, a=(3, 3, 2 * n, 2 * n), b=(3, 3, 2 * n, 2 * n), t=(n, 2 * n))
    }
    p |= zeros(q=(2 * n, 2 * n), k=(2 * n, 2 * n), v=(2 * n, 2 * n), o=(2 * n, 2 * n))

    def call(p, x, t):
        angle = t[:, None] * jnp.array([1.0, 10.0])
        t = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1) @ p["time"]
        t = jax.nn.silu(jax.nn.silu(t) @ p["t1"])
        x, skips = conv(x, p["in"]), []
        for w in p["down"]:
            skips.append(x)
            x = jax.nn.silu(batch_norm(conv(x, w, 2)))
        for w in p["mid"]:
            y = conv(jax.nn.silu(batch_norm(x)), w["a"]) + (t @ w["t"])[:, None, None]
            x = x + conv(jax.nn.silu(batch_norm(y)), w["b"])
            y = batch_norm(x).reshape(2, 4, 2 * n)
            s = (y @ p["q"]) @ (y @ p["k"]).swapaxes(-1, -2) / n
            x = x + (jax.nn.softmax(s) @ (y @ p["v"]) @ p["o"]).reshape(x.shape)
        for w in p["up"]:
            x = jax.image.resize(x, (2, 2 * x.shape[1], 2 * x.shape[2], x.shape[-1]), "nearest")  # fmt: skip
            x = jnp.concatenate([x, skips.pop()], -1)
            x = jax.nn.silu(batch_norm(conv(x, w)))
        return conv(x, p["out"])

    return p, (floats(2, 8, 8, 3), floats(2)), call


@program(
    {**ENDS, r"b/\d/t1": "Fb", r"b/\d/t2": "Fe", r"b/\d/c1": "Hb", r"b/\d/c2": "He"},
    deep=True,
)
def mlp_mixer_without_token_biases(n, L):
    p = zeros(**{"in": (12, n), "out": (n, 3)})
    p |= {"b": layers(L, t1=(16, 8), t2=(8, 16), c1=(n, 4 * n), c2=(4 * n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            y = jax.nn.gelu(norm(x).swapaxes(1, 2) @ w["t1"]) @ w["t2"]
            x = x + y.swapaxes(1, 2)
            x = x + jax.nn.gelu(norm(x) @ w["c1"]) @ w["c2"]
        return norm(x).mean(1) @ p["out"]

    return p, (floats(2, 16, 12),), call


@program(
    {**ENDS, r"b/\d/up": "Hb", r"b/\d/down": "He", r"b/\d/(s|sb)": "Fb"}, deep=True
)
def gated_mlp_with_spatial_units(n, L):
    p = zeros(**{"in": (12, n), "out": (n, 3)})
    p |= {"b": layers(L, up=(n, 4 * n), s=(16, 16), sb=(16, 1), down=(2 * n, n))}

    def call(p, x):
        x = x @ p["in"]
        for w in p["b"]:
            u, v = jnp.split(jax.nn.gelu(norm(x) @ w["up"]), 2, -1)
            v = jnp.einsum("ts,bsd->btd", w["s"], norm(v)) + w["sb"]
            x = x + (u * v) @ w["down"]
        return x.mean(1) @ p["out"]

    return p, (floats(2, 16, 12),), call


WAVENET = {**ENDS, "last": "H", r"b/(\d/)?(f|g)": "Hb"}
SKIPS = {**WAVENET, r"b/(\d/)?(res|skip)": "He", r"b/(\d/)?sb": "Ve"}
MULTIPLIED = {**WAVENET, r"b/\d/(res|skip)": "Hb", r"b/\d/sb": "Vb"}


def gated(x, w, dilation=1):
    f, g = (conv(x, w[k], dilation=dilation) for k in "fg")
    return jnp.tanh(f) * jax.nn.sigmoid(g)


def wavenet(n, L, total, stacked=False):
    """WaveNet; `total` maps its layers and stream to the sum of the skips."""
    p = zeros(**{"in": (1, 1, n), "last": (1, n, n), "out": (1, n, 3)})
    block = dict(f=(2, n, n), g=(2, n, n), res=(1, n, n), skip=(1, n, n), sb=(n,))
    p["b"] = (
        zeros(**{k: (L, *shape) for k, shape in block.items()})
        if stacked
        else layers(L, **block)
    )

    def call(p, x):
        y = jax.nn.relu(total(p["b"], conv(x, p["in"])))
        return conv(jax.nn.relu(conv(y, p["last"])), p["out"])

    return p, (floats(2, 16, 1),), call


def skips(blocks, x):
    """The skip connections of layers in a list."""
    for i, w in enumerate(blocks):
        z = gated(x, w, 2**i)
        yield conv(z, w["skip"]) + w["sb"]
        x = x + conv(z, w["res"])


@program(SKIPS, deep=True)
def wavenet_in_a_list(n, L):
    return wavenet(n, L, lambda blocks, x: sum(skips(blocks, x)))


@program(SKIPS, deep=True)
def wavenet_whose_biases_are_added_to_the_sum(n, L):
    def total(blocks, x):
        total = 0.0
        for i, w in enumerate(blocks):
            z = gated(x, w, 2**i)
            total = total + conv(z, w["skip"]) + w["sb"]
            x = x + conv(z, w["res"])
        return total

    return wavenet(n, L, total)


@program(SKIPS, deep=True)
def wavenet_with_stacked_skips(n, L):
    return wavenet(n, L, lambda blocks, x: jnp.stack([*skips(blocks, x)]).sum(0))


@program(SKIPS, deep=True)
def wavenet_in_a_scan(n, L):
    def layer(carry, w):
        x, total = carry
        z = gated(x, w)
        return (x + conv(z, w["res"]), total + (conv(z, w["skip"]) + w["sb"])), None

    def total(blocks, x):
        return jax.lax.scan(layer, (x, jnp.zeros_like(x)), blocks)[0][1]

    return wavenet(n, L, total, stacked=True)


@program(SKIPS, deep=True)
def wavenet_whose_scan_returns_the_skips(n, L):
    def layer(x, w):
        z = gated(x, w)
        return x + conv(z, w["res"]), conv(z, w["skip"]) + w["sb"]

    return wavenet(
        n, L, lambda blocks, x: jax.lax.scan(layer, x, blocks)[1].sum(0), stacked=True
    )


@program(MULTIPLIED, deep=True)
def wavenet_that_multiplies(n, L):
    def total(blocks, x):
        total = 0.0
        for i, w in enumerate(blocks):
            z = gated(x, w, 2**i)
            total = total + (conv(z, w["skip"]) + w["sb"])
            x = x + conv(z, w["res"]) * (2 / L)
        return total * (2 / L)

    return wavenet(n, L, total)


@program(MULTIPLIED, deep=True, asks=r"convolutional.py:\d+ become 3 times .* [Mm]ultiply them by 0\.3333")  # fmt: skip
def wavenet_whose_skips_end_in_a_nonlinearity(n, L, remedy=False):
    each = 2 / L if remedy else 1.0

    def total(blocks, x):
        total = 0.0
        for i, w in enumerate(blocks):
            z = gated(x, w, 2**i)
            total = total + each * jnp.tanh(conv(z, w["skip"]) + w["sb"])
            x = x + each * conv(z, w["res"])
        return total

    return wavenet(n, L, total)


@program({**WAVENET, r"b/\d/skip": "H", r"b/\d/res": "He", r"b/\d/sb": "V"}, deep=True)  # fmt: skip
def wavenet_with_the_mean_of_the_skips(n, L):
    return wavenet(n, L, lambda blocks, x: jnp.stack([*skips(blocks, x)]).mean(0))


@program({**ENDS, r"b/\d/(a|b)": "Hb"})
def temporal_convolutions_with_weight_norm(n):
    p = zeros(**{"in": (3, 1, n), "out": (n, 3)})
    p |= {"b": layers(3, a=(3, n, n), b=(3, n, n))}

    def causal(x, k, d):
        k = k / jnp.sqrt((k**2).sum((0, 1)))
        return conv(
            jnp.pad(x, ((0, 0), (2 * d, 0), (0, 0))), k, dilation=d, padding="VALID"
        )

    def call(p, x):
        x = conv(x, p["in"])
        for i, w in enumerate(p["b"]):
            y = jax.nn.relu(causal(x, w["a"], 2**i))
            x = jax.nn.relu(x + jax.nn.relu(causal(y, w["b"], 2**i)))
        return x[:, -1] @ p["out"]

    return p, (floats(2, 16, 1),), call


@program({"a": "I", "b": "H", "fc": "H", "out": "O", "(ab|bb|fcb)": "V"})
def lenet_that_flattens(n):
    p = zeros(a=(3, 3, 3, n), ab=(n,), b=(3, 3, n, 2 * n), bb=(2 * n,), fc=(8 * n, 4 * n), fcb=(4 * n,), out=(4 * n, 3))  # fmt: skip

    def pool(x):
        return jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )

    def call(p, x):
        x = pool(jax.nn.relu(conv(x, p["a"]) + p["ab"]))
        x = pool(jax.nn.relu(conv(x, p["b"]) + p["bb"]))
        x = jax.nn.relu(x.reshape(x.shape[0], -1) @ p["fc"] + p["fcb"])
        return x @ p["out"]

    return p, IMAGE, call


@program({"style": "I", "mod/.": "H", "k/.": "H", "rgb": "O", "const": "V", "noise/.": "F"})  # fmt: skip
def stylegan_with_modulated_convolutions(n):
    p = zeros(style=(4, n), const=(1, 4, 4, n), rgb=(1, 1, n, 3))
    p |= {"mod": [jnp.zeros((n, n))] * 2, "k": [jnp.zeros((3, 3, n, n))] * 2, "noise": [jnp.zeros(())] * 2}  # fmt: skip

    def modulated(x, k, style):
        k = k * style[:, None, None, :, None]
        k = k * jax.lax.rsqrt((k**2).sum((1, 2, 3), keepdims=True) + 1e-8)
        return jax.vmap(lambda x, k: conv(x[None], k)[0])(x, k)

    def call(p, z, noise):
        w = jax.nn.leaky_relu(z @ p["style"])
        x = jnp.tile(p["const"], (2, 1, 1, 1))
        for m, k, a in zip(p["mod"], p["k"], p["noise"], strict=True):
            x = modulated(x, k, 1 + w @ m) + a * noise
            x = jax.nn.leaky_relu(x)
        return conv(x, p["rgb"])

    return p, (floats(2, 4), floats(2, 4, 4, 1)), call


@program({"in": "I", "prim": "O", "w": "F"})
def capsules_with_dynamic_routing(n):
    p = zeros(**{"in": (5, n), "prim": (n, 6 * 4), "w": (6, 3, 4, 8)})

    def squash(x):
        square = (x**2).sum(-1, keepdims=True)
        return x * square / (1 + square) / jnp.sqrt(square + 1e-6)

    def call(p, x):
        u = squash((jax.nn.relu(x @ p["in"]) @ p["prim"]).reshape(-1, 6, 4))
        votes = jnp.einsum("bik,ijkd->bijd", u, p["w"])
        logits = jnp.zeros(votes.shape[:3])
        for _ in range(2):
            c = jax.nn.softmax(logits, 2)
            v = squash(jnp.einsum("bij,bijd->bjd", c, votes))
            logits = logits + jnp.einsum("bijd,bjd->bij", votes, v)
        return jnp.sqrt((v**2).sum(-1) + 1e-6)

    return p, (floats(4, 5),), call


def standardized(n, L, factor):
    p = zeros(**{"in": (3, 3, 3, n), "out": (n, 4)})
    p["b"] = layers(L, g=(n,), c=(n,), w=(3, 3, n, n))

    def call(p, x):
        x = conv(x, p["in"])
        for w in p["b"]:
            y = jax.nn.relu(norm(x) * w["g"] + w["c"])
            mean = w["w"].mean((0, 1, 2))
            x = x + factor * conv(y, (w["w"] - mean) / (w["w"].std((0, 1, 2)) + 1e-3))
        return norm(x).mean((1, 2)) @ p["out"]

    return p, IMAGE, call


# It is no multiple of its parameters; the gain before it and ReLU is. Entries of size one
# would sum up to the root of the fan-in.
@program({**ENDS, r"b/\d/(g|c)": "Ve", r"b/\d/w": "Hb"}, deep=True, carries={r"b/\d/(g|c)": 0.5})  # fmt: skip
def branches_that_end_in_standardized_kernels(n, L):
    return standardized(n, L, 1.0)


@program({**ENDS, r"b/\d/(g|c)": "Vb", r"b/\d/w": "Hb"}, deep=True, carries={r"b/\d/(g|c)": 0.5})  # fmt: skip
def branches_that_multiply_standardized_kernels(n, L):
    return standardized(n, L, 2 / L)


# They choose no experts: the kernel sums over channels alone.
@program({**ENDS, "a|c|w": "H"})
def channels_that_are_multiplied_by_their_shares(n):
    p = zeros(**{"in": (3, 3, 3, n), "out": (n, 4)}, a=(n, n), c=(n, n))
    p |= zeros(w=(3, 3, n, n))

    def call(p, x):
        x = jax.nn.relu(conv(x, p["in"]))
        shares = jax.nn.softmax(jax.nn.relu(x.mean((1, 2)) @ p["a"]) @ p["c"])
        x = x * (n * shares[:, None, None])
        kernel = p["w"][1, 1]
        return jax.nn.relu(conv(x, p["w"]) + x @ kernel).mean((1, 2)) @ p["out"]

    return p, IMAGE, call


# `jnp.pad` joins parts without entries along the units, too.
@program({"in": "I", "u|d": "H", "out": "O"})
def moving_means_of_a_series_that_is_continued_at_its_ends(n):
    p = zeros(**{"in": (3, n), "out": (n, 3)}, u=(n, n), d=(n, n))

    def call(p, x):
        x = x @ p["in"]
        for name, mode in {"u": "edge", "d": "reflect"}.items():
            long = jnp.pad(x, ((0, 0), (2, 2), (0, 0)), mode=mode)
            mean = sum(long[:, i : i + 6] for i in range(5)) / 5
            x = jax.nn.gelu((x - mean) @ p[name])
        return x @ p["out"]

    return p, (floats(2, 6, 3),), call

"""The same four models in Flax NNX, Flax Linen, Equinox and Haiku scale alike."""

import functools
import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mupax import optim

FRAMEWORKS = ("nnx", "linen", "equinox", "haiku")
MODELS = ("mlp", "convnet", "resnet", "transformer")

CLASSES, TOKENS, VOCABULARY, FEATURES = 10, 6, 32, 5
KEY = jax.random.key(0)


# --- Flax NNX ---


class NnxMlp(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.Linear(FEATURES, width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)


class NnxConvnet(nnx.Module):
    def __init__(self, width, rngs):
        self.stem = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.depthwise = nnx.Conv(
            width, width, (3, 3), feature_group_count=width, rngs=rngs
        )
        self.grouped = nnx.Conv(width, width, (3, 3), feature_group_count=4, rngs=rngs)
        self.up = nnx.ConvTranspose(width, width, (2, 2), rngs=rngs)
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)


class NnxResidual(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)


class NnxResnet(nnx.Module):
    def __init__(self, width, depth, rngs):
        self.first = nnx.Linear(FEATURES, width, rngs=rngs)
        self.block = nnx.List([NnxResidual(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)


class NnxTransformerBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)


class NnxTransformer(nnx.Module):
    def __init__(self, width, depth, rngs):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.position = nnx.Param(jnp.zeros((TOKENS, width)))
        self.block = nnx.List([NnxTransformerBlock(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, VOCABULARY, use_bias=False, rngs=rngs)


# --- Flax Linen ---


class LinenMlp(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, name="first")(x)
        x = nn.Dense(self.width, name="hidden")(x)
        return nn.Dense(CLASSES, name="head")(x)


class LinenConvnet(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        n = self.width
        x = nn.Conv(n, (3, 3), name="stem")(x)
        x = nn.BatchNorm(use_running_average=False, name="norm")(x)
        x = nn.Conv(n, (3, 3), feature_group_count=n, name="depthwise")(x)
        x = nn.Conv(n, (3, 3), feature_group_count=4, name="grouped")(x)
        x = nn.ConvTranspose(n, (2, 2), name="up")(x)
        return nn.Dense(CLASSES, name="head")(x.mean((1, 2)))


class LinenResidual(nn.Module):
    @nn.compact
    def __call__(self, x):
        n = x.shape[-1]
        z = nn.Dense(4 * n, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(n, use_bias=False, name="down")(z)


class LinenResnet(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, name="first")(x)
        for i in range(self.depth):
            x = LinenResidual(name=f"Block_{i}")(x)
        return nn.Dense(CLASSES, name="head")(x)


class LinenTransformerBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        n = x.shape[-1]
        z = nn.LayerNorm(name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(z)
        return x + nn.Dense(n, name="down")(nn.Dense(4 * n, name="up")(x))


class LinenTransformer(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, tokens):
        zeros = nn.initializers.zeros
        position = self.param("position", zeros, (TOKENS, self.width))
        x = nn.Embed(VOCABULARY, self.width, name="embed")(tokens) + position[None]
        for i in range(self.depth):
            x = LinenTransformerBlock(name=f"Block_{i}")(x)
        return nn.Dense(VOCABULARY, use_bias=False, name="head")(x)


# --- Equinox ---


class EqxMlp(eqx.Module):
    first: eqx.nn.Linear
    hidden: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, width):
        self.first = eqx.nn.Linear(FEATURES, width, key=KEY)
        self.hidden = eqx.nn.Linear(width, width, key=KEY)
        self.head = eqx.nn.Linear(width, CLASSES, key=KEY)


class EqxConvnet(eqx.Module):
    stem: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    depthwise: eqx.nn.Conv2d
    grouped: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    head: eqx.nn.Linear

    def __init__(self, width):
        self.stem = eqx.nn.Conv2d(3, width, 3, key=KEY)
        self.norm = eqx.nn.GroupNorm(4, width)
        self.depthwise = eqx.nn.Conv2d(width, width, 3, groups=width, key=KEY)
        self.grouped = eqx.nn.Conv2d(width, width, 3, groups=4, key=KEY)
        self.up = eqx.nn.ConvTranspose2d(width, width, 2, key=KEY)
        self.head = eqx.nn.Linear(width, CLASSES, key=KEY)


class EqxResidual(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width):
        self.norm = eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, 4 * width, key=KEY)
        self.down = eqx.nn.Linear(4 * width, width, use_bias=False, key=KEY)


class EqxResnet(eqx.Module):
    first: eqx.nn.Linear
    block: list[EqxResidual]
    head: eqx.nn.Linear

    def __init__(self, width, depth):
        self.first = eqx.nn.Linear(FEATURES, width, key=KEY)
        self.block = [EqxResidual(width) for _ in range(depth)]
        self.head = eqx.nn.Linear(width, CLASSES, key=KEY)


class EqxTransformerBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width):
        self.norm = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(
            4,
            width,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=KEY,
        )
        self.up = eqx.nn.Linear(width, 4 * width, key=KEY)
        self.down = eqx.nn.Linear(4 * width, width, key=KEY)


class EqxTransformer(eqx.Module):
    embed: eqx.nn.Embedding
    position: jax.Array
    block: list[EqxTransformerBlock]
    head: eqx.nn.Linear

    def __init__(self, width, depth):
        self.embed = eqx.nn.Embedding(VOCABULARY, width, key=KEY)
        self.position = jnp.zeros((TOKENS, width))
        self.block = [EqxTransformerBlock(width) for _ in range(depth)]
        self.head = eqx.nn.Linear(width, VOCABULARY, use_bias=False, key=KEY)


# --- Haiku ---


def haiku_mlp(x, width):
    x = hk.Linear(width, name="hidden")(hk.Linear(width, name="first")(x))
    return hk.Linear(CLASSES, name="head")(x)


def haiku_convnet(x, width):
    x = hk.Conv2D(width, 3, name="stem")(x)
    x = hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training=True)
    x = hk.Conv2D(width, 3, feature_group_count=width, name="depthwise")(x)
    x = hk.Conv2D(width, 3, feature_group_count=4, name="grouped")(x)
    x = hk.Conv2DTranspose(width, 2, name="up")(x)
    return hk.Linear(CLASSES, name="head")(x.mean((1, 2)))


class HaikuResidual(hk.Module):
    def __call__(self, x):
        n = x.shape[-1]
        z = hk.LayerNorm(-1, True, True, name="norm")(x)
        z = hk.Linear(4 * n, name="up")(z)
        return x + hk.Linear(n, with_bias=False, name="down")(z)


def haiku_resnet(x, width, depth):
    x = hk.Linear(width, name="first")(x)
    for _ in range(depth):
        x = HaikuResidual(name="block")(x)
    return hk.Linear(CLASSES, name="head")(x)


class HaikuTransformerBlock(hk.Module):
    def __call__(self, x):
        n = x.shape[-1]
        z = hk.LayerNorm(-1, True, True, name="norm")(x)
        init = hk.initializers.VarianceScaling()
        attention = hk.MultiHeadAttention(4, n // 4, w_init=init, name="attention")
        x = x + attention(z, z, z)
        return x + hk.Linear(n, name="down")(hk.Linear(4 * n, name="up")(x))


def haiku_transformer(tokens, width, depth):
    x = hk.Embed(VOCABULARY, width, name="embed")(tokens)
    x = x + hk.get_parameter("position", (TOKENS, width), init=jnp.zeros)[None]
    for _ in range(depth):
        x = HaikuTransformerBlock(name="block")(x)
    return hk.Linear(VOCABULARY, with_bias=False, name="head")(x)


# --- the same, whatever made it ---

MODULES = {
    "nnx": (NnxMlp, NnxConvnet, NnxResnet, NnxTransformer),
    "linen": (LinenMlp, LinenConvnet, LinenResnet, LinenTransformer),
    "equinox": (EqxMlp, EqxConvnet, EqxResnet, EqxTransformer),
    "haiku": (haiku_mlp, haiku_convnet, haiku_resnet, haiku_transformer),
}
INPUTS = {
    "mlp": jnp.zeros((2, FEATURES)),
    "convnet": jnp.zeros((2, 8, 8, 3)),
    "resnet": jnp.zeros((2, FEATURES)),
    "transformer": jnp.zeros((2, TOKENS), jnp.int32),
}


def builder(framework, model, *size):
    """A function of no arguments that makes a model's parameters."""
    module = MODULES[framework][MODELS.index(model)]
    if framework == "nnx":
        return lambda: module(*size, rngs=nnx.Rngs(0))
    if framework == "linen":
        return lambda: module(*size).init(KEY, INPUTS[model])
    if framework == "equinox":
        return lambda: module(*size)

    def forward(x):
        return module(x, *size)

    return lambda: hk.transform_with_state(forward).init(KEY, INPUTS[model])[0]


def scales_of(framework, model):
    if model in ("mlp", "convnet"):
        return optim.infer_scales(
            builder(framework, model, 16), builder(framework, model, 64)
        )
    return optim.infer_scales(
        builder(framework, model, 16, 2),
        builder(framework, model, 64, 6),
        depth=(2, 6),
        branch=r"(?i)block",
    )


def common_name(path):
    """One name for what the four libraries call differently."""
    path = path.lower().replace("~/", "")
    path = re.sub(r"block[/_](\d+)", r"block\1", path)
    path = re.sub(r"^block/", "block0/", path)
    path = path.replace("_proj", "").replace("attention/linear", "attention/output")
    path = re.sub(r"attention/out/", "attention/output/", path)
    if "norm" in path:
        path = re.sub(r"/weight$", "/scale", path)
    path = re.sub(r"/(w|weight|embeddings?)$", "/kernel", path)
    return re.sub(r"/(b|offset)$", "/bias", path)


@functools.cache
def settings(framework, model):
    """Role and ratios of every parameter, for each kind of optimizer."""
    scales = scales_of(framework, model)
    by_name = {}
    for optimizer in ("sgd", "adam", "muon"):
        rows = optim.explain(scales, "depth_mup", optimizer=optimizer).rows
        for path, row in rows.items():
            numbers = (row.init_std, row.learning_rate, row.weight_decay)
            by_name[common_name(path), optimizer] = (
                row.role,
                row.branch,
                *numbers,
                row.eps,
            )
    return by_name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
def test_a_model_has_the_same_multipliers_in_every_framework(framework, model):
    ours, theirs = settings("nnx", model), settings(framework, model)
    assert ours.keys() == theirs.keys()
    for key, expected in ours.items():
        assert theirs[key][:2] == expected[:2], key
        assert theirs[key][2:] == pytest.approx(expected[2:]), key


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_role_of_a_transformer_is_the_papers(framework):
    by_name = settings(framework, "transformer")
    role = {
        name: values[0] for (name, kind), values in by_name.items() if kind == "adam"
    }
    assert role["embed/kernel"] == role["position"] == "input"
    assert role["head/kernel"] == "output"
    for name in ("query", "key", "value", "output"):
        assert role[f"block5/attention/{name}/kernel"] == "hidden"
        assert role[f"block5/attention/{name}/bias"] == "vector"
    assert role["block3/up/kernel"] == role["block3/down/kernel"] == "hidden"
    assert role["block3/norm/scale"] == role["block3/norm/bias"] == "vector"
    # Width by 4, depth by 3: Adam's 1/m, with M^-1/2 in branches (TP-VI Table 1).
    assert by_name["head/kernel", "adam"][3] == pytest.approx(1 / 4)
    assert by_name["block5/up/kernel", "adam"][3] == pytest.approx(1 / 4 / 3**0.5)
    assert by_name["block5/up/kernel", "sgd"][3] == pytest.approx(1)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_depthwise_and_grouped_kernels_count_their_own_inputs(framework):
    by_name = settings(framework, "convnet")
    role = {
        name: values[0] for (name, kind), values in by_name.items() if kind == "adam"
    }
    assert role["stem/kernel"] == role["depthwise/kernel"] == "input"
    assert role["grouped/kernel"] == role["up/kernel"] == "hidden"
    assert role["norm/scale"] == "vector"
    assert role["head/bias"] == "fixed"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scales_fit_the_parameters_that_an_optimizer_gets(framework, model):
    size = (64,) if model in ("mlp", "convnet") else (64, 6)
    build = builder(framework, model, *size)

    def start():
        built = build()
        if framework == "nnx":
            built = nnx.state(built, nnx.Param)
        elif framework == "linen":
            built = built["params"]
        elif framework == "equinox":
            built = eqx.filter(built, eqx.is_inexact_array)
        scales = scales_of(framework, model)
        return optim.adamw(1e-3, scales, "depth_mup").init(built)

    jax.eval_shape(start)

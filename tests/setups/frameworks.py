"""Trees as MaxText, levanter, Haiku, Equinox, Linen, NNX and T5X make them."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from .kit import F, H, I, O, Setup, V

KEY = jax.random.key(0)

# --- MaxText: layers on axis 1, stages in front of a pipeline ---


def maxtext(n, L, stages=None):
    """`param_scan_axis: 1`; of a pipeline, (stages, layers, ...) in front."""
    heads = n // 16
    at = "params/decoder/layers"

    def kernel(kind, into, out):
        if stages is not None:
            return kind(stages, L // stages, *into, *out)
        return kind(into[0], L, *into[1:], *out)

    tree = {"params/token_embedder/embedding": I(1000, n)}
    for name in ("query", "key", "value"):
        tree[f"{at}/self_attention/{name}/kernel"] = kernel(H, (n,), (heads, 16))
    tree |= {
        f"{at}/self_attention/out/kernel": kernel(H, (heads, 16), (n,)),
        f"{at}/mlp/wi_0/kernel": kernel(H, (n,), (4 * n,)),
        f"{at}/mlp/wi_1/kernel": kernel(H, (n,), (4 * n,)),
        f"{at}/mlp/wo/kernel": kernel(H, (4 * n,), (n,)),
        f"{at}/pre_self_attention_layer_norm/scale": (
            V(n, L) if stages is None else V(stages, L // stages, n)
        ),
    }
    return tree | {
        "params/decoder/decoder_norm/scale": V(n),
        "params/decoder/logits_dense/kernel": O(n, 1000),
    }


MAXTEXT = {
    "branch": "decoder/layers/",
    "axes": {
        r"(query|key|value)/kernel$": ((0,), (2, 3)),
        r"self_attention/out/kernel$": ((0, 2), (3,)),
        r"mlp/\w+/kernel$": ((0,), (2,)),
        r"layers/.*_norm/scale$": ((), (0,)),
    },
}
PIPELINE = {
    "branch": "decoder/layers/",
    "axes": {
        r"(query|key|value)/kernel$": ((2,), (3, 4)),
        r"self_attention/out/kernel$": ((2, 3), (4,)),
        r"mlp/\w+/kernel$": ((2,), (3,)),
        r"layers/.*_norm/scale$": ((), (2,)),
    },
}


def t5x_scanned(n, L):
    """t5x scalable_t5: 2-D kernels scanned on axis 1, norms (n, L)."""
    at = "decoder/decoder"
    return {
        "token_embedder/embedding": I(1000, n),
        f"{at}/self_attention/query/kernel": H(n, L, n),
        f"{at}/self_attention/out/kernel": H(n, L, n),
        f"{at}/mlp/wi/kernel": H(n, L, 4 * n),
        f"{at}/mlp/wo/kernel": H(4 * n, L, n),
        f"{at}/pre_mlp_layer_norm/scale": V(n, L),
        "decoder/decoder_norm/scale": V(n),
        "decoder/logits_dense/kernel": O(n, 1000),
    }


T5X_SCANNED = {
    "branch": "decoder/decoder/",
    "axes": {
        r"decoder/decoder/.*kernel$": ((0,), (2,)),
        r"decoder/decoder/.*scale$": ((), (0,)),
    },
}


def levanter_llama(n, L):
    """levanter: haliax arrays (layers, out axes, in axes), `out_first=True`."""
    groups = n // 32
    at = "transformer/layers/stacked"
    return {
        "embeddings/token_embeddings/weight/array": I(1000, n),
        f"{at}/self_attn/q_proj/weight/array": H(L, groups, 2, 16, n),
        f"{at}/self_attn/k_proj/weight/array": H(L, groups, 16, n),
        f"{at}/self_attn/v_proj/weight/array": H(L, groups, 16, n),
        f"{at}/self_attn/o_proj/weight/array": H(L, n, 2 * groups, 16),
        f"{at}/mlp/gate_proj/weight/array": H(L, 4 * n, n),
        f"{at}/mlp/up_proj/weight/array": H(L, 4 * n, n),
        f"{at}/mlp/down_proj/weight/array": H(L, n, 4 * n),
        f"{at}/input_layernorm/weight/array": V(L, n),
        "transformer/norm/weight/array": V(n),
        "lm_head/weight/array": O(1000, n),
    }


LEVANTER = {
    "branch": "layers/stacked",
    "layout": "out_in",
    "embeddings": "token_embeddings",
    "axes": {
        r"q_proj/weight": ((4,), (1, 2, 3)),
        r"[kv]_proj/weight": ((3,), (1, 2)),
        r"o_proj/weight": ((2, 3), (1,)),
    },
}


def levanter_gpt2(n, L):
    """levanter's GPT-2, tied: (layers, in, out) with `out_first=False`."""
    at = "transformer/blocks/stacked"
    heads = n // 16
    return {
        "embeddings/token_embeddings/weight/array": I(1000, n),
        "embeddings/position_embeddings/weight/array": I(64, n),
        f"{at}/attn/c_attn/weight/array": H(L, n, 3, heads, 16),
        f"{at}/attn/c_attn/bias/array": V(L, 3, heads, 16),
        f"{at}/attn/c_proj/weight/array": H(L, heads, 16, n),
        f"{at}/attn/c_proj/bias/array": V(L, n),
        f"{at}/mlp/c_fc/weight/array": H(L, n, 4 * n),
        f"{at}/mlp/c_fc/bias/array": V(L, 4 * n),
        f"{at}/mlp/c_proj/weight/array": H(L, 4 * n, n),
        f"{at}/mlp/c_proj/bias/array": V(L, n),
        f"{at}/ln_1/weight/array": V(L, n),
        "transformer/ln_f/weight/array": V(n),
    }


# --- Haiku ---


def haiku(net, *inputs):
    def build(n):
        return hk.transform_with_state(lambda *xs: net(n, *xs)).init(KEY, *inputs)[0]

    return build


def haiku_mlp(n, x):
    return hk.nets.MLP([n, n, 10])(x)


def haiku_attention(n, x):
    x = hk.Linear(n, name="embed")(x)
    x = hk.MultiHeadAttention(
        4, n // 4, w_init=hk.initializers.Constant(0.0), model_size=n, name="attn"
    )(x, x, x)
    x = hk.LayerNorm(-1, True, True, name="norm")(x)
    return hk.Linear(10, name="head")(x)


def haiku_resnet(n, x):
    net = hk.nets.ResNet(
        (1, 1, 1, 1),
        10,
        bottleneck=False,
        channels_per_group=(n, 2 * n, 4 * n, 8 * n),
        initial_conv_config={"output_channels": n},
    )
    return net(x, is_training=True)


def haiku_cnn(n, x):
    x = jax.nn.relu(hk.Conv2D(n, 3, name="c1")(x))
    x = jax.nn.relu(hk.Conv2D(2 * n, 3, name="c2")(x)).mean((1, 2))
    return hk.Linear(10, name="head")(x)


def haiku_lm(n, x):
    x = hk.Embed(50, n, name="embed")(x)
    x = x + hk.get_parameter("pos_embs", [7, n], init=jnp.zeros)
    x = hk.Linear(n, name="mid")(x)
    return hk.Linear(50, name="logits")(x)


def haiku_stack(n, x):
    """hk.experimental.layer_stack: a leading axis of layers."""
    x = hk.Linear(n, name="embed")(x)
    x = hk.experimental.layer_stack(3, name="stack")(
        lambda y: y + hk.Linear(n, name="w")(y)
    )(x)
    return hk.Linear(10, name="head")(x)


def haiku_bilinear_cnn(n, x):
    x = hk.Conv2D(n, 3, name="c1")(x)
    return hk.Conv2DTranspose(3, 4, stride=2, name="up")(x)


# --- Equinox ---


class EqxCNN(eqx.Module):
    layers: list

    def __init__(self, n):
        self.layers = [
            eqx.nn.Conv2d(3, n, 3, key=KEY),
            jax.nn.relu,
            eqx.nn.Conv2d(n, 2 * n, 3, key=KEY),
            eqx.nn.Linear(2 * n, 10, key=KEY),
        ]


class EqxDecoder(eqx.Module):
    first: eqx.nn.Linear
    up: eqx.nn.ConvTranspose2d
    last: eqx.nn.ConvTranspose2d

    def __init__(self, n):
        self.first = eqx.nn.Linear(16, n, key=KEY)
        self.up = eqx.nn.ConvTranspose2d(n, n // 2, 4, key=KEY)
        self.last = eqx.nn.ConvTranspose2d(n // 2, 3, 4, key=KEY)


class EqxTransformer(eqx.Module):
    embed: eqx.nn.Embedding
    pos: jax.Array
    attn: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, n, **attention):
        self.embed = eqx.nn.Embedding(100, n, key=KEY)
        self.pos = jnp.zeros((32, n))
        self.attn = eqx.nn.MultiheadAttention(4, n, key=KEY, **attention)
        self.norm = eqx.nn.LayerNorm(n)
        self.mlp = eqx.nn.MLP(n, n, 4 * n, 1, key=KEY)
        self.head = eqx.nn.Linear(n, 100, key=KEY)


class EqxStack(eqx.Module):
    embed: eqx.nn.Linear
    blocks: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, n, L):
        self.embed = eqx.nn.Linear(8, n, key=KEY)
        self.blocks = eqx.filter_vmap(lambda key: eqx.nn.Linear(n, n, key=key))(
            jax.random.split(KEY, L)
        )
        self.head = eqx.nn.Linear(n, 10, key=KEY)


class EqxScalar(eqx.Module):
    """eqx.nn.MLP with a scalar output: a readout of shape (1, n)."""

    mlp: eqx.nn.MLP

    def __init__(self, n):
        self.mlp = eqx.nn.MLP(3, "scalar", n, 2, key=KEY)


EQX_TRANSFORMER = {
    r"embed/weight|pos": I(),
    r"attn/\w+_proj/weight": H(),
    r"norm/(weight|bias)": V(),
    r"mlp/layers/\d/weight": H(),
    r"mlp/layers/\d/bias": V(),
    r"head/weight": O(),
    r"head/bias": F(),
}


# --- Linen ---


class LinenTransformer(nn.Module):
    n: int
    heads: int
    mqa: bool = False

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(50, self.n, name="embed")(ids)
        x = x + self.param("pos", nn.initializers.zeros, (7, self.n))
        x = x + nn.MultiHeadDotProductAttention(self.heads, name="attn")(
            nn.LayerNorm(name="ln1")(x)
        )
        x = x + nn.Dense(self.n, name="down")(
            nn.relu(nn.Dense(4 * self.n, name="up")(x))
        )
        return nn.Dense(50, name="logits")(x)


LINEN_TRANSFORMER = {
    r"embed/embedding|pos": I(),
    r"attn/(query|key|value|out)/kernel": H(),
    r"attn/(query|key|value|out)/bias": V(),
    r"ln1/(scale|bias)": V(),
    r"(up|down)/kernel": H(),
    r"(up|down)/bias": V(),
    r"logits/kernel": O(),
    r"logits/bias": F(),
}


class LinenTied(nn.Module):
    n: int

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(50, self.n, name="embed")
        x = nn.Dense(self.n, name="mid")(embed(ids))
        return embed.attend(x)


class LinenBlock(nn.Module):
    n: int

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(self.n)(nn.LayerNorm()(x)), None


class LinenScan(nn.Module):
    n: int
    layers: int
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.n, name="first")(x)
        blocks = nn.scan(
            LinenBlock,
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = blocks(self.n, name="blocks")(x, None)
        return nn.Dense(10, name="head")(x)


class LinenConv(nn.Module):
    n: int

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.n, (3, 3), name="conv")(x)
        x = nn.Conv(self.n, (3, 3), feature_group_count=self.n, name="depthwise")(x)
        x = nn.BatchNorm(use_running_average=False, name="bn")(x)
        x = nn.ConvTranspose(self.n // 2, (4, 4), name="up")(x)
        return nn.Dense(10, name="head")(x.mean((1, 2)))


def linen(build, inputs, params_only=True):
    def tree(n, **sizes):
        variables = build(n, **sizes).init(KEY, inputs)
        return variables["params"] if params_only else variables

    return tree


LINEN_SCAN = {
    r"first/kernel": I(),
    r"(first|blocks/Dense_0)/bias": V(),
    r"blocks/LayerNorm_0/(scale|bias)": V(),
    r"blocks/Dense_0/kernel": H(),
    r"head/kernel": O(),
    r"head/bias": F(),
}


# --- NNX ---


class NnxTransformer(nnx.Module):
    def __init__(self, n, heads, rngs):
        self.embed = nnx.Embed(50, n, rngs=rngs)
        self.pos = nnx.Param(jnp.zeros((7, n)))
        self.attn = nnx.MultiHeadAttention(heads, n, rngs=rngs, decode=False)
        self.norm = nnx.LayerNorm(n, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.up = nnx.Linear(n, 4 * n, rngs=rngs)
        self.down = nnx.Linear(4 * n, n, rngs=rngs)
        self.head = nnx.Linear(n, 50, rngs=rngs)


NNX_TRANSFORMER = {
    r"embed/embedding|pos": I(),
    r"attn/(query|key|value|out)/kernel": H(),
    r"attn/(query|key|value|out)/bias": V(),
    r"norm/(scale|bias)": V(),
    r"(up|down)/kernel": H(),
    r"(up|down)/bias": V(),
    r"head/kernel": O(),
    r"head/bias": F(),
}


class NnxGeneral(nnx.Module):
    def __init__(self, n, rngs):
        self.first = nnx.Linear(8, n, rngs=rngs)
        self.split = nnx.LinearGeneral(n, (n // 16, 16), rngs=rngs)
        self.join = nnx.LinearGeneral((n // 16, 16), n, axis=(-2, -1), rngs=rngs)
        self.mix = nnx.Einsum("ab,bc->ac", (n, n), (n,), rngs=rngs)
        self.head = nnx.Linear(n, 5, rngs=rngs)


class NnxConv(nnx.Module):
    def __init__(self, n, rngs):
        self.conv = nnx.Conv(3, n, (3, 3), rngs=rngs)
        self.depthwise = nnx.Conv(n, n, (3, 3), feature_group_count=n, rngs=rngs)
        self.bn = nnx.BatchNorm(n, rngs=rngs)
        self.up = nnx.ConvTranspose(n, n // 2, (4, 4), rngs=rngs)
        self.head = nnx.Linear(n // 2, 5, rngs=rngs)


class NnxBlock(nnx.Module):
    def __init__(self, n, rngs):
        self.norm = nnx.LayerNorm(n, rngs=rngs)
        self.fc = nnx.Linear(n, n, rngs=rngs)


class NnxStack(nnx.Module):
    """Blocks made by nnx.vmap: a leading axis of layers."""

    def __init__(self, n, L, rngs):
        self.first = nnx.Linear(8, n, rngs=rngs)

        @nnx.split_rngs(splits=L)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return NnxBlock(n, rngs)

        self.blocks = create(rngs)
        self.head = nnx.Linear(n, 5, rngs=rngs)


class NnxList(nnx.Module):
    def __init__(self, n, L, rngs):
        self.first = nnx.Linear(8, n, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(n, rngs) for _ in range(L)])
        self.head = nnx.Linear(n, 5, rngs=rngs)


class NnxDict(nnx.Module):
    """`nnx.Param` of a dictionary: one variable, several arrays."""

    def __init__(self, n):
        self.weights = nnx.Param(
            {
                "in": jnp.zeros((8, n)),
                "mid": jnp.zeros((n, n)),
                "out": jnp.zeros((n, 5)),
            }
        )


NNX_STACK = {
    r"first/kernel": I(),
    r"first/bias": V(),
    r"blocks/(\d+/)?norm/(scale|bias)": V(),
    r"blocks/(\d+/)?fc/kernel": H(),
    r"blocks/(\d+/)?fc/bias": V(),
    r"head/kernel": O(),
    r"head/bias": F(),
}
NNX_CONV = {
    r"conv/kernel": I(),
    r"depthwise/kernel": I(),
    r"up/kernel": H(),
    r"(conv|depthwise|up)/bias": V(),
    r"bn/(scale|bias)": V(),
    r"head/kernel": O(),
    r"head/bias": F(),
}
IMAGES = jnp.zeros((2, 8, 8, 3))
OUTSIDE = nnx.Rngs(0)
IDS = jnp.zeros((2, 7), jnp.int32)
DEEPER = {"L": (2, 8)}
SAME = {"L": (2, 2)}

SETUPS = [
    Setup(
        "maxtext_scanned",
        "AI-Hypercomputer/maxtext",
        maxtext,
        {"depth": (2, 2)} | MAXTEXT,
        grow=SAME,
    ),
    Setup(
        "maxtext_scanned_deeper",
        "AI-Hypercomputer/maxtext",
        maxtext,
        {"depth": (2, 8)} | MAXTEXT,
        grow=DEEPER,
    ),
    Setup(
        "maxtext_scanned_same_not_named",
        "AI-Hypercomputer/maxtext: (n, L, f) with an L that stays",
        maxtext,
        grow=SAME,
        asks="decoder/layers/",
        remedies=({"depth": (2, 2)} | MAXTEXT,),
    ),
    Setup(
        "maxtext_scanned_deeper_not_named",
        "AI-Hypercomputer/maxtext: (n, L, f)",
        maxtext,
        {"depth": (2, 8), "branch": "decoder/layers/"},
        grow=DEEPER,
        asks="decoder/layers/",
        either=True,
        remedies=(MAXTEXT,),
    ),
    Setup(
        "maxtext_pipeline",
        "AI-Hypercomputer/maxtext: (stages, layers, n, f), layers grow",
        lambda n, L: maxtext(n, L, stages=2),
        {"depth": (4, 16)} | PIPELINE,
        grow={"L": (4, 16)},
    ),
    Setup(
        "maxtext_pipeline_same",
        "AI-Hypercomputer/maxtext: (stages, layers, n, f)",
        lambda n, L: maxtext(n, L, stages=2),
        {"depth": (4, 4)} | PIPELINE,
        grow={"L": (4, 4)},
    ),
    Setup(
        "maxtext_pipeline_not_named",
        "AI-Hypercomputer/maxtext: the stages are not the depth",
        lambda n, L: maxtext(n, L, stages=2),
        {"depth": (4, 16), "branch": "decoder/layers/"},
        grow={"L": (4, 16)},
        asks="decoder/layers/",
        either=True,
        remedies=(PIPELINE,),
    ),
    Setup(
        "maxtext_pipeline_stages",
        "AI-Hypercomputer/maxtext: stages grow, too",
        lambda n, L, stages: maxtext(n, L, stages),
        {"depth": (4, 16)} | PIPELINE,
        grow={"L": (4, 16), "stages": (2, 4)},
    ),
    Setup(
        "t5x_scanned",
        "t5x examples/scalable_t5",
        t5x_scanned,
        {"depth": (2, 8)} | T5X_SCANNED,
        grow=DEEPER,
    ),
    Setup(
        "t5x_scanned_same",
        "t5x examples/scalable_t5",
        t5x_scanned,
        {"depth": (2, 2)} | T5X_SCANNED,
        grow=SAME,
    ),
    Setup(
        "t5x_scanned_not_named",
        "t5x examples/scalable_t5: layers on axis 1",
        t5x_scanned,
        {"depth": (2, 8), "branch": "decoder/decoder/"},
        grow=DEEPER,
        asks="decoder/decoder/",
        either=True,
        remedies=(T5X_SCANNED,),
    ),
    Setup(
        "levanter_llama",
        "stanford-crfm/levanter",
        levanter_llama,
        {"depth": (2, 8)} | LEVANTER,
        grow=DEEPER,
    ),
    Setup(
        "levanter_llama_not_named",
        "stanford-crfm/levanter: heads are several axes of the outputs",
        levanter_llama,
        {"depth": (2, 8), "branch": "layers/stacked", "layout": "out_in"},
        grow=DEEPER,
        asks="[qkvo]_proj|token_embeddings",
        either=True,
        remedies=(LEVANTER,),
    ),
    Setup(
        "levanter_gpt2",
        "stanford-crfm/levanter, tied",
        levanter_gpt2,
        {"depth": (2, 8), "branch": "blocks/stacked", "tied": "token_embeddings"},
        grow=DEEPER,
        asks="c_attn/(weight|bias)",
        either=True,
        remedies=(
            {
                "axes": {
                    "c_attn/weight": ((1,), (2, 3, 4)),
                    "c_attn/bias": ((), (1, 2, 3)),
                }
            },
        ),
    ),
    Setup(
        "haiku_mlp",
        "hk.nets.MLP",
        haiku(haiku_mlp, jnp.zeros((2, 8))),
        leaves={
            r"mlp/~/linear_0/w": I(),
            r"mlp/~/linear_1/w": H(),
            r"mlp/~/linear_[01]/b": V(),
            r"mlp/~/linear_2/w": O(),
            r"mlp/~/linear_2/b": F(),
        },
    ),
    Setup(
        "haiku_attention",
        "hk.MultiHeadAttention",
        haiku(haiku_attention, jnp.zeros((2, 7, 8))),
        leaves={
            r"embed/w": I(),
            r"attn/(query|key|value|linear)/w": H(),
            r"(embed|attn/\w+)/b": V(),
            r"norm/(scale|offset)": V(),
            r"head/w": O(),
            r"head/b": F(),
        },
    ),
    Setup(
        "haiku_resnet",
        "hk.nets.ResNet",
        haiku(haiku_resnet, jnp.zeros((2, 32, 32, 3))),
        grow={"n": (8, 32)},
        leaves={
            r"res_net/~/initial_conv/w": I(),
            r"res_net/~/(initial|block).*batchnorm\w*/(scale|offset)": V(),
            r"res_net/~/block.*conv\w*/w": H(),
            r"res_net/~/logits/w": O(),
            r"res_net/~/logits/b": F(),
        },
    ),
    Setup(
        "haiku_cnn",
        "hk.Conv2D",
        haiku(haiku_cnn, IMAGES),
        leaves={
            r"c1/w": I(),
            r"c2/w": H(),
            r"c[12]/b": V(),
            r"head/w": O(),
            r"head/b": F(),
        },
    ),
    Setup(
        "haiku_lm",
        "hk.Embed",
        haiku(haiku_lm, IDS),
        leaves={
            r"embed/embeddings": I(),
            r"~/pos_embs": I(),
            r"mid/w": H(),
            r"mid/b": V(),
            r"logits/w": O(),
            r"logits/b": F(),
        },
    ),
    Setup(
        "haiku_layer_stack",
        "hk.experimental.layer_stack",
        haiku(haiku_stack, jnp.zeros((2, 8))),
        {"depth": (3, 3), "branch": "stack"},
        leaves={
            r"embed/w": I(),
            r"embed/b": V(),
            r".*stack/.*w/w": H(),
            r".*stack/.*w/b": V(),
            r"head/w": O(),
            r"head/b": F(),
        },
    ),
    Setup(
        "haiku_transposed_readout",
        "hk.Conv2DTranspose: (k, k, out, in), here (4, 4, 3, n)",
        haiku(haiku_bilinear_cnn, IMAGES),
        asks="up/w",
        either=True,
        remedies=({"readout": "up/w", "axes": {"^up/w$": ((0, 1, 3), (2,))}},),
        leaves={r"c1/w": I(), r"c1/b": V(), r"up/w": O(), r"up/b": F()},
    ),
    Setup(
        "eqx_mlp",
        "eqx.nn.MLP",
        lambda n: eqx.nn.MLP(8, 10, n, 2, key=KEY),
        leaves={
            r"layers/0/weight": I(),
            r"layers/1/weight": H(),
            r"layers/[01]/bias": V(),
            r"layers/2/weight": O(),
            r"layers/2/bias": F(),
        },
    ),
    Setup(
        "eqx_mlp_unbiased",
        "eqx.nn.MLP",
        lambda n: eqx.nn.MLP(
            8, 10, n, 2, use_bias=False, use_final_bias=False, key=KEY
        ),
        leaves={
            r"layers/0/weight": I(),
            r"layers/1/weight": H(),
            r"layers/2/weight": O(),
        },
    ),
    Setup(
        "eqx_scalar",
        "eqx.nn.MLP with a scalar output",
        EqxScalar,
        leaves={
            r"mlp/layers/0/weight": I(),
            r"mlp/layers/1/weight": H(),
            r"mlp/layers/[01]/bias": V(),
            r"mlp/layers/2/weight": O(),
            r"mlp/layers/2/bias": F(),
        },
    ),
    Setup(
        "eqx_cnn",
        "eqx.nn.Conv2d: (out, in, k, k), biases (out, 1, 1)",
        EqxCNN,
        leaves={
            r"layers/0/weight": I(),
            r"layers/2/weight": H(),
            r"layers/[02]/bias": V(),
            r"layers/3/weight": O(),
            r"layers/3/bias": F(),
        },
    ),
    Setup(
        "eqx_decoder",
        "eqx.nn.ConvTranspose2d",
        EqxDecoder,
        asks="last/weight",
        either=True,
        remedies=({"readout": "last/weight"},),
        leaves={
            r"first/weight": I(),
            r"up/weight": H(),
            r"(first|up)/bias": V(),
            r"last/weight": O(),
            r"last/bias": F(),
        },
    ),
    Setup(
        "eqx_transformer",
        "eqx.nn.MultiheadAttention",
        EqxTransformer,
        leaves=EQX_TRANSFORMER,
    ),
    Setup(
        "eqx_transformer_value_bias",
        "eqx.nn.MultiheadAttention with biases",
        lambda n: EqxTransformer(n, use_query_bias=True, use_output_bias=True),
        leaves=EQX_TRANSFORMER | {r"attn/\w+_proj/bias": V()},
    ),
    Setup(
        "eqx_stack",
        "eqx.filter_vmap over keys: a leading axis of layers",
        EqxStack,
        {"depth": (2, 8), "branch": "^blocks/"},
        grow=DEEPER,
        leaves={
            r"embed/weight": I(),
            r"(embed|blocks)/bias": V(),
            r"blocks/weight": H(),
            r"head/weight": O(),
            r"head/bias": F(),
        },
    ),
    Setup(
        "eqx_stack_deeper_not_said",
        "eqx.filter_vmap over keys: a leading axis of layers",
        EqxStack,
        grow=DEEPER,
        asks="blocks/",
        remedies=({"depth": (2, 8), "branch": "^blocks/"},),
        leaves={
            r"embed/weight": I(),
            r"(embed|blocks)/bias": V(),
            r"blocks/weight": H(),
            r"head/weight": O(),
            r"head/bias": F(),
        },
    ),
    Setup(
        "linen_transformer_heads",
        "flax.linen.MultiHeadDotProductAttention",
        linen(lambda n: LinenTransformer(n, n // 16), IDS),
        leaves=LINEN_TRANSFORMER,
    ),
    Setup(
        "linen_transformer_dim",
        "flax.linen.MultiHeadDotProductAttention, 4 heads",
        linen(lambda n: LinenTransformer(n, 4), IDS),
        leaves=LINEN_TRANSFORMER,
    ),
    Setup(
        "linen_variables",
        "flax.linen, a dictionary with 'params' in front",
        linen(lambda n: LinenTransformer(n, 4), IDS, params_only=False),
        leaves=LINEN_TRANSFORMER,
    ),
    Setup(
        "linen_tied",
        "flax.linen.Embed.attend",
        linen(LinenTied, IDS),
        {"tied": "^embed/"},
        leaves={r"embed/embedding": I(), r"mid/kernel": H(), r"mid/bias": V()},
    ),
    Setup(
        "linen_tied_not_named",
        "flax.linen.Embed.attend",
        linen(LinenTied, IDS),
        asks="embed/embedding",
        remedies=({"tied": "^embed/"},),
        leaves={r"embed/embedding": I(), r"mid/kernel": H(), r"mid/bias": V()},
    ),
    Setup(
        "linen_scan",
        "flax.linen.scan, axis 0",
        linen(lambda n, L: LinenScan(n, L), jnp.zeros((2, 8))),
        {"depth": (2, 8), "branch": "^blocks/"},
        grow=DEEPER,
        leaves=LINEN_SCAN,
    ),
    Setup(
        "linen_scan_same",
        "flax.linen.scan, axis 0",
        linen(lambda n, L: LinenScan(n, L), jnp.zeros((2, 8))),
        {"depth": (2, 2), "branch": "^blocks/"},
        grow=SAME,
        leaves=LINEN_SCAN,
    ),
    Setup(
        "linen_scan_axis_1",
        "flax.linen.scan, axis 1 for kernels and norms",
        linen(lambda n, L: LinenScan(n, L, 1), jnp.zeros((2, 8))),
        {
            "depth": (2, 8),
            "branch": "^blocks/",
            "axes": {
                "^blocks/.*kernel$": ((0,), (2,)),
                "^blocks/.*(scale|bias)$": ((), (0,)),
            },
        },
        grow=DEEPER,
        leaves=LINEN_SCAN,
    ),
    Setup(
        "linen_scan_axis_1_not_named",
        "flax.linen.scan, axis 1: biases (n, layers) read as kernels",
        linen(lambda n, L: LinenScan(n, L, 1), jnp.zeros((2, 8))),
        {"depth": (2, 8), "branch": "^blocks/"},
        grow=DEEPER,
        asks="blocks/",
        either=True,
        remedies=(
            {
                "axes": {
                    "^blocks/.*kernel$": ((0,), (2,)),
                    "^blocks/.*(scale|bias)$": ((), (0,)),
                },
            },
        ),
        leaves=LINEN_SCAN,
    ),
    Setup(
        "linen_conv",
        "flax.linen.Conv, ConvTranspose, BatchNorm",
        linen(LinenConv, IMAGES),
        leaves=NNX_CONV,
    ),
    Setup(
        "nnx_transformer_heads",
        "flax.nnx.MultiHeadAttention",
        lambda n: NnxTransformer(n, n // 16, nnx.Rngs(0)),
        leaves=NNX_TRANSFORMER,
    ),
    Setup(
        "nnx_transformer_dim",
        "flax.nnx.MultiHeadAttention, 4 heads, Dropout's keys in the module",
        lambda n: NnxTransformer(n, 4, nnx.Rngs(0)),
        leaves=NNX_TRANSFORMER,
    ),
    Setup(
        "nnx_state_params",
        "nnx.state(model, nnx.Param)",
        lambda n: nnx.state(NnxTransformer(n, 4, nnx.Rngs(0)), nnx.Param),
        leaves=NNX_TRANSFORMER,
    ),
    Setup(
        "nnx_state_of_everything",
        "nnx.state(model): keys and counts of Dropout are in it",
        lambda n: nnx.state(NnxTransformer(n, 4, nnx.Rngs(0))),
        asks="drop/rngs|key|count",
        either=True,
        instead=lambda n: nnx.state(NnxTransformer(n, 4, nnx.Rngs(0)), nnx.Param),
        remedies=({},),
        leaves=NNX_TRANSFORMER | {r"drop/.*": F()},
    ),
    Setup(
        "nnx_general",
        "flax.nnx.LinearGeneral and Einsum",
        lambda n: NnxGeneral(n, nnx.Rngs(0)),
        leaves={
            r"first/kernel": I(),
            r"(split|join|mix)/kernel": H(),
            r"(first|split|join|mix)/bias": V(),
            r"head/kernel": O(),
            r"head/bias": F(),
        },
    ),
    Setup(
        "nnx_conv",
        "flax.nnx.Conv, ConvTranspose, BatchNorm",
        lambda n: NnxConv(n, nnx.Rngs(0)),
        leaves=NNX_CONV,
    ),
    Setup(
        "nnx_stack",
        "nnx.vmap over blocks",
        lambda n, L: NnxStack(n, L, nnx.Rngs(0)),
        {"depth": (2, 8), "branch": "^blocks/"},
        grow=DEEPER,
        leaves=NNX_STACK,
    ),
    Setup(
        "nnx_stack_same",
        "nnx.vmap over blocks",
        lambda n, L: NnxStack(n, L, nnx.Rngs(0)),
        {"depth": (2, 2), "branch": "^blocks/"},
        grow=SAME,
        leaves=NNX_STACK,
    ),
    Setup(
        "nnx_stack_not_said",
        "nnx.vmap over blocks: a module tells how many axes its kernels have",
        lambda n, L: NnxStack(n, L, nnx.Rngs(0)),
        grow=DEEPER,
        asks="blocks/",
        remedies=({"depth": (2, 8), "branch": "^blocks/"},),
        leaves=NNX_STACK,
    ),
    Setup(
        "nnx_state_stack_not_said",
        "nnx.vmap over blocks, the state alone",
        lambda n, L: nnx.state(NnxStack(n, L, nnx.Rngs(0)), nnx.Param),
        grow=DEEPER,
        asks="blocks/",
        remedies=({"depth": (2, 8), "branch": "^blocks/"},),
        leaves=NNX_STACK,
    ),
    Setup(
        "nnx_state_stack_same_not_said",
        "nnx.vmap over blocks, the state alone; what is read as fan-in grows alike",
        lambda n, L: nnx.state(NnxStack(n, L, nnx.Rngs(0)), nnx.Param),
        grow=SAME,
        asks="blocks/",
        either=True,
        remedies=({"depth": (2, 2), "branch": "^blocks/"},),
        leaves=NNX_STACK,
    ),
    Setup(
        "nnx_list",
        "nnx.List of blocks",
        lambda n, L: NnxList(n, L, nnx.Rngs(0)),
        {"depth": (2, 8), "branch": r"^blocks/\d+/"},
        grow=DEEPER,
        leaves=NNX_STACK,
    ),
    Setup(
        "nnx_list_state",
        "nnx.state of an nnx.List of blocks: whole numbers as keys",
        lambda n, L: nnx.state(NnxList(n, L, nnx.Rngs(0)), nnx.Param),
        {"depth": (2, 8), "branch": r"^blocks/\d+/"},
        grow=DEEPER,
        leaves=NNX_STACK,
    ),
    Setup(
        "nnx_list_not_said",
        "nnx.List of blocks, of which there are more",
        lambda n, L: NnxList(n, L, nnx.Rngs(0)),
        grow=DEEPER,
        asks="blocks/",
        remedies=({"depth": (2, 8), "branch": r"^blocks/\d+/"},),
        leaves=NNX_STACK,
    ),
    Setup(
        "nnx_rngs_outside",
        "Rngs that are made outside of the function",
        lambda n: NnxTransformer(n, 4, OUTSIDE),
        asks="inside",
        instead=lambda n: NnxTransformer(n, 4, nnx.Rngs(0)),
        remedies=({},),
        leaves=NNX_TRANSFORMER,
    ),
    Setup(
        "nnx_pure_dict",
        "nnx.to_pure_dict",
        lambda n: nnx.to_pure_dict(
            nnx.state(NnxTransformer(n, 4, nnx.Rngs(0)), nnx.Param)
        ),
        leaves=NNX_TRANSFORMER,
    ),
    Setup(
        "nnx_param_of_dict",
        "nnx.Param({...})",
        lambda n: NnxDict(n),
        asks="weights",
        either=True,
        instead=lambda n: {
            "weights": {
                "in": jnp.zeros((8, n)),
                "mid": jnp.zeros((n, n)),
                "out": jnp.zeros((n, 5)),
            }
        },
        remedies=({},),
        leaves={r"weights/in": I(), r"weights/mid": H(), r"weights/out": O()},
    ),
    Setup(
        "integer_leaves",
        "a plain tree with a step counter and a key beside the parameters",
        lambda n: {
            "params": {
                "in": jnp.zeros((8, n)),
                "mid": jnp.zeros((n, n)),
                "out": jnp.zeros((n, 5)),
            },
            "step": jnp.zeros((), jnp.int32),
            "key": jax.random.key(0),
        },
        asks=r"\b(step|key)\b",
        instead=lambda n: {
            "params": {
                "in": jnp.zeros((8, n)),
                "mid": jnp.zeros((n, n)),
                "out": jnp.zeros((n, 5)),
            }
        },
        either=True,
        remedies=({},),
        leaves={
            r"in": I(),
            r"mid": H(),
            r"out": O(),
            r"step|key": F(),
        },
    ),
]

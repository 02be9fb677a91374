"""More of each kind: names that mislead, per-channel parameters, partial growth."""

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from .kit import F, H, I, O, Setup, V

KEY = jax.random.key(0)
OUT_IN = {"layout": "out_in"}


def body(n, head="head/kernel"):
    return {
        "first/kernel": I(32, n),
        "first/bias": V(n),
        "mid/kernel": H(n, n),
        "mid/bias": V(n),
        head: O(n, 10),
    }


def beside(**extra):
    """The extra leaves beside a small classifier."""

    def tree(n):
        return body(n) | {
            path.replace("__", "/"): leaf(n) for path, leaf in extra.items()
        }

    return tree


def tied_beside(**extra):
    """The extra leaves beside a tied language model: nothing else reads out."""

    def tree(n):
        out = {"embed/embedding": I(500, n), "mid/kernel": H(n, n), "mid/bias": V(n)}
        return out | {path.replace("__", "/"): leaf(n) for path, leaf in extra.items()}

    return tree


def asked(name, source, tree, path, remedy, options=None, **rest):
    return Setup(
        name, source, tree, options or {}, asks=path, remedies=(remedy,), **rest
    )


# --- names that mislead: all are kernels with a bias, or named kernel ---


def misnamed(name):
    def tree(n):
        return body(n) | {f"{name}/kernel": H(n, n), f"{name}/bias": V(n)}

    return tree


MISNAMED = (
    "embedding_projection",
    "position_mlp",
    "embed",
    "norm_proj",
    "scale_net",
    "bias_net",
    "gamma",
    "queries",
    "codebook_proj",
    "prompt_encoder",
    "token_mixing",
    "time_embedding",
    "memory",
    "head_0",
    "output_gate",
    "logits_hidden",
    "experts_shared",
    "router_hidden",
    "layers_norm_mix",
    "lora",
)


def gpt_neox(n):
    """embed_in is a table, embed_out reads out."""
    return {
        "gpt_neox.embed_in.weight": I(1000, n),
        "gpt_neox.layers.0.mlp.dense_h_to_4h.weight": H(4 * n, n),
        "gpt_neox.layers.0.mlp.dense_h_to_4h.bias": V(4 * n),
        "gpt_neox.layers.0.mlp.dense_4h_to_h.weight": H(n, 4 * n),
        "gpt_neox.layers.0.mlp.dense_4h_to_h.bias": V(n),
        "embed_out.weight": O(1000, n),
    }


def pvt(n):
    """PVT: each stage starts with a patch embedding of the last stage's channels."""
    return {
        "patch_embed1/proj/kernel": I(4, 4, 3, n),
        "patch_embed1/proj/bias": V(n),
        "pos_embed1": I(1, 64, n),
        "block1/kernel": H(n, n),
        "patch_embed2/proj/kernel": H(2, 2, n, 2 * n),
        "patch_embed2/proj/bias": V(2 * n),
        "pos_embed2": I(1, 16, 2 * n),
        "block2/kernel": H(2 * n, 2 * n),
        "head/kernel": O(2 * n, 10),
    }


def pvt_torch(n):
    return {
        "patch_embed1.proj.weight": I(n, 3, 4, 4),
        "patch_embed1.proj.bias": V(n),
        "block1.0.mlp.fc1.weight": H(4 * n, n),
        "block1.0.mlp.fc1.bias": V(4 * n),
        "block1.0.mlp.fc2.weight": H(n, 4 * n),
        "block1.0.mlp.fc2.bias": V(n),
        "patch_embed2.proj.weight": H(2 * n, n, 2, 2),
        "patch_embed2.proj.bias": V(2 * n),
        "head.weight": O(10, 2 * n),
        "head.bias": F(10),
    }


# --- only a part grows ---


def only_ffn(n):
    """The inner width of the feed-forward layers grows, the stream stays at 64."""
    tree = {"embed/kernel": F(32, 64), "head/kernel": F(64, 10)}
    for i in range(2):
        tree |= {
            f"blocks/{i}/up/kernel": I(64, 4 * n),
            f"blocks/{i}/up/bias": V(4 * n),
            f"blocks/{i}/down/kernel": O(4 * n, 64),
            f"blocks/{i}/down/bias": F(64),
        }
    return tree


def only_heads(n):
    heads = n // 16
    return {
        "embed/kernel": F(32, 48),
        "attn/query/kernel": I(48, heads, 16),
        "attn/query/bias": V(heads, 16),
        "attn/value/kernel": I(48, heads, 16),
        "attn/value/bias": V(heads, 16),
        "attn/out/kernel": O(heads, 16, 48),
        "attn/out/bias": F(48),
        "head/kernel": F(48, 10),
    }


def two_widths(n):
    """The stream grows by 4, the feed-forward layers by 8."""
    f = 96 if n == 64 else 768
    return {
        "embed/kernel": I(32, n),
        "up/kernel": H(n, f, out=8),
        "up/bias": V(f, out=8),
        "down/kernel": H(f, n, into=8),
        "down/bias": V(n),
        "head/kernel": O(n, 10),
    }


def frozen_encoder(n):
    """A pretrained encoder of a fixed size below a network that grows."""
    return {
        "encoder/conv/kernel": F(3, 3, 3, 48),
        "encoder/dense/kernel": F(48, 48),
        "encoder/dense/bias": F(48),
        "adapter/kernel": I(48, n),
        "mid/kernel": H(n, n),
        "head/kernel": O(n, 10),
    }


def two_mixtures(n):
    """Two layers of 5 to 15 experts, each with biases."""
    tree, e = body(n), 5 if n == 64 else 15
    for side, f in (("encoder", n), ("decoder", 4 * n)):
        tree |= {
            f"{side}/wi": H(e, n, f, copies=3),
            f"{side}/wo": H(e, f, n, copies=3),
            f"{side}/bi": V(e, f, copies=3),
        }
    return tree


# --- attention, once more ---


def heads_first(n):
    """Einsum over (heads, n, dim), of which all three grow: 2, 4 and 2."""
    h, d = (2, 32) if n == 64 else (4, 64)
    return {
        "first/kernel": I(32, n),
        "wq": H(h, n, d),
        "wo": H(h, d, n),
        "head/kernel": O(n, 10),
    }


def qkv_last(n):
    """(n, heads, 16, 3): the three parts last."""
    return body(n) | {"attn/qkv": H(n, n // 16, 16, 3), "attn/out": H(n // 16, 16, n)}


def relative_bias_matrix(n):
    return body(n) | {"attn/rel_bias": V(n // 16, 20, 20)}


def swin_v2(n):
    """A network of 512 makes biases for each head from offsets."""
    return body(n) | {
        "cpb_mlp_0/kernel": F(2, 512),
        "cpb_mlp_0/bias": F(512),
        "cpb_mlp_2/kernel": I(512, n // 16),
    }


def glu_parts_last(n):
    return body(n) | {"glu": H(n, 4 * n, 2), "down/kernel": H(4 * n, n)}


def glu_parts_middle(n):
    return body(n) | {"glu/kernel": H(n, 2, 4 * n), "down/kernel": H(4 * n, n)}


# --- depth ---


def stack(n, L, alpha="inside"):
    tree = {
        "first/kernel": I(8, n),
        "blocks/norm": V(L, n),
        "blocks/w": H(L, n, n),
        "blocks/b": V(L, n),
        "head/kernel": O(n, 3),
    }
    # A scalar for each layer: a copy, not a width.
    return tree | ({"blocks/alpha": F(L)} if alpha == "inside" else {"lambdas": F(L)})


def per_head_scale(n, L):
    return stack(n, L) | {"blocks/head_scale": V(L, n // 16)}


def per_head_decay(n, L):
    return stack(n, L) | {"blocks/decay": V(L, n // 16, 16)}


def numbered(n, L):
    tree = {"first/kernel": I(8, n)}
    for i in range(L):
        tree |= {f"block_{i}/w": H(n, n), f"block_{i}/b": V(n)}
    return tree | {"head/kernel": O(n, 3)}


def attention_and_mlp(n, L):
    tree = {"first/kernel": I(8, n)}
    for i in range(L):
        tree |= {
            f"layers/{i}/attn/qkv/kernel": H(n, 3 * n),
            f"layers/{i}/attn/out/kernel": H(n, n),
            f"layers/{i}/mlp/up/kernel": H(n, 4 * n),
            f"layers/{i}/mlp/down/kernel": H(4 * n, n),
        }
    return tree | {"head/kernel": O(n, 3)}


def stack_with_table(n, L):
    """A bias table of 8 buckets, shared by all layers, inside the stack's subtree."""
    return {
        "first/kernel": I(5, n),
        "blocks/w": H(L, n, n),
        "blocks/b": V(L, n),
        "rel_bias/embedding": I(8, n // 16),
        "head/kernel": O(n, 3),
    }


def convs_of_three(n, L):
    """3x3 kernels in a list of 3 blocks: no stack."""
    tree = {"stem/kernel": I(3, 3, 3, n), "stem/bias": V(n)}
    for i in range(L):
        tree |= {
            f"blocks/{i}/conv/kernel": H(3, 3, n, n),
            f"blocks/{i}/dw/kernel": I(3, 3, 1, n),
        }
    return tree | {"head/kernel": O(n, 10)}


def edge_network(n, flat=True):
    """MPNN: a network makes a matrix (n, n) for each edge, from n features."""
    last = H(n, n * n, into=16, out=4) if flat else H(n, n, n, into=16)
    return {
        "node/kernel": I(11, n),
        "edge_0/kernel": I(5, n),
        "edge_0/bias": V(n),
        "edge_1/kernel": last,
        "head/kernel": O(n, 1),
    }


# --- torch, once more ---


def lstm_projected(n):
    """torch.nn.LSTM(proj_size=32): weight_hr (32, n) reads out of the cell."""
    return {
        "rnn.weight_ih_l0": I(4 * n, 3),
        "rnn.weight_hh_l0": I(4 * n, 32),
        "rnn.weight_hr_l0": O(32, n),
        "rnn.bias_ih_l0": V(4 * n),
        "rnn.bias_hh_l0": V(4 * n),
        "fc.weight": F(5, 32),
        "fc.bias": F(5),
    }


def batch_norm_buffers(n, count):
    """A whole state_dict: running statistics, a count of batches."""
    tree = {
        "conv1.weight": jnp.zeros((n, 3, 3, 3)),
        "bn1.weight": jnp.zeros(n),
        "bn1.bias": jnp.zeros(n),
        "bn1.running_mean": jnp.zeros(n),
        "bn1.running_var": jnp.zeros(n),
        "fc.weight": jnp.zeros((10, n)),
        "fc.bias": jnp.zeros(10),
    }
    return tree | (
        {"bn1.num_batches_tracked": jnp.zeros((), jnp.int32)} if count else {}
    )


BUFFERS = {
    r"conv1\.weight": I(),
    r"bn1\.(weight|bias|running_mean|running_var)": V(),
    r"fc\.weight": O(),
    r"fc\.bias": F(),
    r"bn1\.num_batches_tracked": F(),
}


def grouped_conv(n):
    """ResNeXt in torch: (out, in/32, 3, 3); groups of a fixed number."""
    return {
        "stem.weight": I(n, 3, 3, 3),
        "stem.bias": V(n),
        "conv2.weight": H(n, n // 32, 3, 3),
        "conv2.bias": V(n),
        "fc.weight": O(10, n),
        "fc.bias": F(10),
    }


# --- modules ---


class EqxConvs(eqx.Module):
    stem: eqx.nn.Conv2d
    depthwise: eqx.nn.Conv2d
    grouped: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    up: eqx.nn.ConvTranspose2d
    head: eqx.nn.Linear

    def __init__(self, n):
        k = 32 if n == 64 else 64
        self.stem = eqx.nn.Conv2d(3, n, 3, key=KEY)
        self.depthwise = eqx.nn.Conv2d(n, n, 3, groups=n, key=KEY)
        self.grouped = eqx.nn.Conv2d(n, n, 3, groups=8, key=KEY)
        self.norm = eqx.nn.GroupNorm(8, n)
        # Widths that grow by 4 and 2: which axis is summed over matters.
        self.up = eqx.nn.ConvTranspose2d(n, k, 2, key=KEY)
        self.head = eqx.nn.Linear(k, 10, key=KEY)


class EqxRecurrent(eqx.Module):
    embed: eqx.nn.Embedding
    cells: list
    bilinear: eqx.nn.Linear

    def __init__(self, n):
        self.embed = eqx.nn.Embedding(30, n, key=KEY)
        self.cells = [eqx.nn.GRUCell(n, n, key=KEY), eqx.nn.LSTMCell(n, n, key=KEY)]
        self.bilinear = eqx.nn.Linear(n, 30, use_bias=False, key=KEY)


class NnxTied(nnx.Module):
    def __init__(self, n, rngs):
        self.embed = nnx.Embed(50, n, rngs=rngs)
        self.mid = nnx.Linear(n, n, rngs=rngs)
        self.norm = nnx.RMSNorm(n, rngs=rngs)


class NnxMqa(nnx.Module):
    def __init__(self, n, rngs):
        self.embed = nnx.Linear(8, n, rngs=rngs)
        self.query = nnx.LinearGeneral(n, (n // 16, 16), rngs=rngs)
        self.key = nnx.LinearGeneral(n, (1, 16), rngs=rngs)
        self.value = nnx.LinearGeneral(n, (1, 16), rngs=rngs)
        self.out = nnx.LinearGeneral((n // 16, 16), n, axis=(-2, -1), rngs=rngs)
        self.head = nnx.Linear(n, 10, rngs=rngs)


class LinenLocal(nn.Module):
    n: int

    @nn.compact
    def __call__(self, x):
        x = nn.ConvLocal(self.n, (3, 3), name="local_0")(x)
        x = nn.ConvLocal(self.n, (3, 3), name="local_1")(x)
        return nn.Dense(10, name="head")(x.mean((1, 2)))


class LinenBidirectional(nn.Module):
    n: int

    @nn.compact
    def __call__(self, x):
        x = nn.Bidirectional(nn.RNN(nn.GRUCell(self.n)), nn.RNN(nn.GRUCell(self.n)))(x)
        return nn.Dense(5, name="head")(x)


def linen(module, x):
    return lambda n: module(n).init(KEY, x)["params"]


MQA = {"readout": "(head|key|value)/kernel"}
DEPTH = {"depth": (2, 8)}
INSIDE = DEPTH | {"branch": "^blocks/"}
DEEPER = {"L": (2, 8)}

SETUPS = [
    *[
        Setup(f"name_{name}", "a Dense layer whose name misleads", misnamed(name))
        for name in MISNAMED
    ],
    Setup(
        "gpt_neox_named",
        "Hugging Face GPT-NeoX",
        gpt_neox,
        OUT_IN | {"embeddings": "embed_in", "readout": "embed_out"},
        style="flat",
    ),
    Setup(
        "gpt_neox",
        "Hugging Face GPT-NeoX: embed_out reads out",
        gpt_neox,
        OUT_IN,
        style="flat",
        asks="embed_(in|out)",
        either=True,
        remedies=({"embeddings": "embed_in", "readout": "embed_out", "tied": None},),
    ),
    Setup("pvt", "PVT in Flax: later patch embeddings are hidden layers", pvt),
    Setup("pvt_torch", "timm PVT", pvt_torch, OUT_IN, style="flat"),
    # Per-channel parameters that are alone, or stand where a readout would.
    asked(
        "tied_with_decay",
        "a tied model; decays (n, 16) are the only leaf that looks like a readout",
        tied_beside(ssm__decays=lambda n: V(n, 16)),
        "ssm/decays",
        {"axes": {"ssm/decays$": ((), (0, 1))}},
        {"tied": "^embed/"},
    ),
    asked(
        "no_readout_with_decay",
        "a backbone without readout, decays (n, 16)",
        lambda n: {"in/kernel": I(8, n), "mid/kernel": H(n, n), "ssm/A": V(n, 16)},
        "ssm/A",
        {"axes": {"ssm/A$": ((), (0, 1))}},
        {"readout": None},
    ),
    asked(
        "decay_taken_for_readout",
        "classes grow from 10 to 100, so that only the decays look like a readout",
        lambda n: {
            "in/kernel": I(8, n),
            "mid/kernel": H(n, n),
            "ssm/A": V(n, 16),
            "head/kernel": O(n, 10 if n == 64 else 100, copies=10),
        },
        "ssm/A|head/kernel",
        {"axes": {"ssm/A$": ((), (0, 1)), "^head/kernel$": ((0,), ())}},
    ),
    asked(
        "gain_pairs",
        "a gain and an offset for each channel, (n, 2)",
        beside(norm__affine=lambda n: V(n, 2)),
        "norm/affine",
        {"axes": {"norm/affine$": ((), (0,))}},
        either=True,
    ),
    asked(
        "depthwise_taps_last",
        "a depthwise convolution (n, 4)",
        beside(conv__taps=lambda n: I(n, 4)),
        "conv/taps",
        {"axes": {"conv/taps$": ((1,), (0,))}},
    ),
    asked(
        "lstm_bias_gates_last",
        "biases of four gates, (n, 4)",
        beside(lstm__bias=lambda n: V(n, 4)),
        "lstm/bias",
        {"axes": {"lstm/bias$": ((), (0, 1))}},
        either=True,
    ),
    Setup(
        "lstm_bias_gates_first",
        "biases of four gates, (4, n)",
        beside(lstm__bias=lambda n: V(4, n)),
    ),
    asked(
        "channels_first_scale",
        "a scale (n, 1, 1), channels first",
        beside(norm__scale=lambda n: V(n, 1, 1)),
        "norm/scale",
        {"axes": {"norm/scale$": ((), (0,))}},
        either=True,
    ),
    asked(
        "positions_neutral",
        "positions (32, 64) to (128, 256) without a name that says it",
        lambda n: body(n) | {"p": I(n // 2, n, copies=4)},
        r"'p'",
        {"embeddings": "^p$"},
    ),
    asked(
        "positions_neutral_other_ratio",
        "positions (50, 64) to (100, 256) without a name that says it",
        lambda n: body(n) | {"p": I(50 if n == 64 else 100, n, copies=2)},
        r"'p'",
        {"embeddings": "^p$"},
    ),
    # An axis that is said to count copies is no width, so that it vouches for none.
    asked(
        "experts_named_their_biases_not",
        "experts 8 to 32: both kernels are named, biases (experts, f) are not",
        two_mixtures,
        "(encoder|decoder)/bi",
        {"axes": {"coder/w[io]$": ((1,), (2,)), "coder/bi$": ((), (1,))}},
        {"axes": {"coder/w[io]$": ((1,), (2,))}},
    ),
    asked(
        "grown_head_named_table_not",
        "a vocabulary of 5 and 20: the head is named, the table is not",
        lambda n: {
            "in/kernel": I(6, n),
            "tok": I(5 if n == 64 else 20, n, copies=4),
            "mid/kernel": H(n, n),
            "last/kernel": O(n, 5 if n == 64 else 20, copies=4),
        },
        "'tok'",
        {"embeddings": "^tok$", "tied": None},
        {"readout": "^last/kernel$", "axes": {"^last/kernel$": ((0,), ())}},
    ),
    asked(
        "grown_table_of_a_backbone",
        "a table of 6 and 18 entries in a backbone without a readout",
        lambda n: {
            "in/kernel": I(101, n),
            "codes": I(6 if n == 64 else 18, n, copies=3),
            "mid/kernel": H(n, 2 * n),
            "mid/bias": V(2 * n),
        },
        "'codes'",
        {"embeddings": "^codes$"},
        {"readout": None, "tied": None},
    ),
    asked(
        "classes_grow_from_width",
        "64 classes and 256, as wide as the network: the head looks hidden",
        lambda n: {
            "in/kernel": I(8, n),
            "mid/kernel": H(n, n),
            "mid/bias": V(n),
            "classifier/kernel": O(n, n, copies=4),
        },
        "classifier/kernel",
        {"axes": {"^classifier/kernel$": ((0,), ())}},
    ),
    asked(
        "output_table_transposed",
        "a head that is kept as an embedding (n, vocabulary)",
        lambda n: {
            "embed/embedding": I(300, n),
            "mid/kernel": H(n, n),
            "unembed/embedding": O(n, 300),
        },
        "unembed/embedding",
        {"readout": "^unembed/", "tied": None},
        either=True,
    ),
    # Only a part grows.
    Setup(
        "only_ffn",
        "only the feed-forward layers widen",
        only_ffn,
        {"readout": "down/kernel"},
    ),
    asked(
        "only_ffn_not_named",
        "only the feed-forward layers widen: two kernels look like readouts",
        only_ffn,
        "down/kernel",
        {"readout": "down/kernel"},
    ),
    asked(
        "only_heads",
        "only heads are added: the output projection sums over them",
        only_heads,
        "attn/out/kernel",
        {"readout": "attn/out/kernel"},
        either=True,
    ),
    Setup("two_widths", "4 and 8", two_widths),
    Setup("frozen_encoder", "a fixed encoder below", frozen_encoder),
    # Attention.
    asked(
        "heads_first_all_grow",
        "einsum over (heads, n, dim): heads are no fan-in",
        heads_first,
        "'wq'",
        {"axes": {"^wq$": ((1,), (0, 2))}},
    ),
    asked(
        "qkv_parts_last",
        "(n, heads, 16, 3)",
        qkv_last,
        "attn/qkv",
        {"axes": {"attn/qkv$": ((0,), (1, 2, 3))}},
        either=True,
    ),
    asked(
        "relative_bias_matrix",
        "biases (heads, 20, 20)",
        relative_bias_matrix,
        "attn/rel_bias",
        {"axes": {"attn/rel_bias$": ((), (0,))}},
        either=True,
    ),
    Setup("swin_v2_bias_network", "Swin v2", swin_v2),
    asked(
        "glu_parts_last",
        "values and gates last, (n, f, 2)",
        glu_parts_last,
        "'glu'",
        {"axes": {"^glu$": ((0,), (1,))}},
        either=True,
    ),
    asked(
        "glu_parts_middle",
        "values and gates, (n, 2, f)",
        glu_parts_middle,
        "glu/kernel",
        {"axes": {"glu/kernel$": ((0,), (1, 2))}},
        either=True,
    ),
    # Patterns that match more than was meant.
    asked(
        "embeddings_match_a_kernel",
        "a pattern for the table that matches a projection (n, n), too",
        lambda n: {
            "embed/embedding": I(300, n),
            "embed_proj/kernel": H(n, n),
            "embed_proj/bias": V(n),
            "head/kernel": O(n, 10),
        },
        "embed_proj/kernel",
        {"embeddings": "^embed/"},
        {"embeddings": "embed"},
        either=True,
    ),
    asked(
        "embeddings_match_the_head",
        "a pattern for the table that matches the head (n, 300), too",
        lambda n: {
            "embed/embedding": I(300, n),
            "mid/kernel": H(n, n),
            "mid/bias": V(n),
            "unembed/kernel": O(n, 300),
        },
        "unembed/kernel",
        {"embeddings": "^embed/"},
        {"embeddings": "embed"},
        either=True,
    ),
    asked(
        "tied_matches_the_head",
        "a pattern for the tied table that matches a value head, too",
        lambda n: {
            "embed/embedding": I(300, n),
            "mid/kernel": H(n, n),
            "mid/bias": V(n),
            "embed_value/kernel": O(n, 1),
        },
        "embed_value/kernel",
        {"tied": "^embed/", "readout": "^embed_value/"},
        {"tied": "embed"},
    ),
    asked(
        "readout_matches_attention",
        "a pattern for the head that matches the output projection, too",
        lambda n: body(n, "out/kernel") | {"attn/out/kernel": H(n // 16, 16, n)},
        "attn/out/kernel",
        {"readout": "^out/"},
        {"readout": "out/kernel"},
        either=True,
    ),
    asked(
        "axes_match_a_convolution",
        "axes of Dense kernels that match a convolution, whose width would be copies",
        lambda n: body(n) | {"conv/kernel": H(3, 3, n, n), "conv/bias": V(n)},
        "conv/kernel",
        {"axes": {"mid/kernel$": ((0,), (1,))}},
        {"axes": {"(mid|conv)/kernel$": ((0,), (1,))}},
    ),
    Setup(
        "embeddings_match_a_norm",
        "Hugging Face BERT: the pattern matches the norm of the embeddings, too",
        lambda n: {
            "embeddings/word_embeddings/embedding": I(300, n),
            "embeddings/LayerNorm/scale": V(n),
            "embeddings/LayerNorm/bias": V(n),
            "dense/kernel": H(n, n),
            "dense/bias": V(n),
            "classifier/kernel": O(n, 2),
        },
        {"embeddings": "embeddings"},
        asks="LayerNorm",
        either=True,
        remedies=({"embeddings": "word_embeddings"},),
    ),
    # Depth.
    Setup("stack_of_scalars", "ReZero, stacked", stack, INSIDE, grow=DEEPER),
    Setup(
        "stack_of_scalars_same",
        "ReZero, stacked",
        stack,
        {"depth": (4, 4), "branch": "^blocks/"},
        grow={"L": (4, 4)},
    ),
    asked(
        "scalars_outside",
        "modded-nanogpt: a scalar for each layer, kept outside the blocks",
        lambda n, L: stack(n, L, "outside"),
        "lambdas",
        {"branch": "^(blocks/|lambdas$)"},
        INSIDE,
        grow=DEEPER,
        inside="^(blocks/|lambdas$)",
    ),
    Setup("stack_per_head", "(layers, heads)", per_head_scale, INSIDE, grow=DEEPER),
    asked(
        "stack_per_head_decay",
        "(layers, heads, 16)",
        per_head_decay,
        "blocks/decay",
        {"axes": {"blocks/decay$": ((), (1, 2))}},
        INSIDE,
        grow=DEEPER,
    ),
    asked(
        "pattern_of_one_number",
        "block_1 also matches block_10 and block_11, and nothing else",
        numbered,
        "block_0",
        {"branch": r"^block_\d+/"},
        {"depth": (2, 12), "branch": "block_1"},
        grow={"L": (2, 12)},
        inside=r"^block_\d+/",
    ),
    asked(
        "pattern_of_attention_only",
        "a transformer: the pattern forgets the feed-forward layers",
        attention_and_mlp,
        "mlp/",
        {"branch": r"^layers/\d+/"},
        DEPTH | {"branch": "attn"},
        grow=DEEPER,
        inside=r"^layers/\d+/",
    ),
    asked(
        "pattern_of_mlp_and_head",
        "a transformer: a pattern of names that leave the blocks",
        attention_and_mlp,
        "head|first",
        {"branch": r"^layers/\d+/"},
        DEPTH | {"branch": "kernel"},
        grow=DEEPER,
        inside=r"^layers/\d+/",
    ),
    Setup(
        "table_beside_stack",
        "a shared table (8, heads) beside stacks of 8",
        stack_with_table,
        {"depth": (8, 8), "branch": "^blocks/"},
        grow={"L": (8, 8)},
    ),
    Setup(
        "convs_of_three",
        "3x3 kernels in a list of 3",
        convs_of_three,
        {"depth": (3, 3), "branch": "^blocks/"},
        grow={"L": (3, 3)},
    ),
    Setup(
        "convs_of_three_deeper",
        "3x3 kernels in lists of 3 and 9",
        convs_of_three,
        {"depth": (3, 9), "branch": "^blocks/"},
        grow={"L": (3, 9)},
    ),
    Setup(
        "edge_network_flat",
        "MPNN: (n, n·n) has to keep its axes apart",
        edge_network,
        asks="edge_1/kernel",
        instead=lambda n: edge_network(n, flat=False),
        remedies=({"axes": {"edge_1/kernel$": ((0, 1), (2,))}},),
    ),
    # torch.
    Setup(
        "lstm_projected",
        "torch.nn.LSTM with proj_size",
        lstm_projected,
        OUT_IN,
        style="flat",
        asks="weight_hr_l0",
        either=True,
        remedies=({"readout": "weight_hr_l0"},),
    ),
    Setup(
        "torch_buffers",
        "a state_dict with running statistics",
        lambda n: batch_norm_buffers(n, count=False),
        OUT_IN,
        leaves=BUFFERS,
    ),
    Setup(
        "torch_buffers_count",
        "a whole state_dict with num_batches_tracked",
        lambda n: batch_norm_buffers(n, count=True),
        OUT_IN,
        asks="num_batches_tracked",
        either=True,
        instead=lambda n: batch_norm_buffers(n, count=False),
        remedies=({},),
        leaves=BUFFERS,
    ),
    Setup("torch_grouped", "torch ResNeXt", grouped_conv, OUT_IN, style="flat"),
    # Modules.
    Setup(
        "eqx_convs",
        "eqx.nn.Conv2d with groups, ConvTranspose2d between ratios of 4 and 2",
        EqxConvs,
        leaves={
            r"stem/weight": I(),
            r"depthwise/weight": I(),
            r"grouped/weight": H(),
            r"(stem|depthwise|grouped)/bias": V(),
            r"norm/(weight|bias)": V(),
            r"up/weight": H(out=2),
            r"up/bias": V(out=2),
            r"head/weight": O(into=2),
            r"head/bias": F(),
        },
    ),
    Setup(
        "eqx_recurrent",
        "eqx.nn.GRUCell and LSTMCell in a list",
        EqxRecurrent,
        leaves={
            r"embed/weight": I(),
            r"cells/\d/weight_(ih|hh)": H(),
            r"cells/\d/bias(_n)?": V(),
            r"bilinear/weight": O(),
        },
    ),
    Setup(
        "nnx_tied",
        "nnx.Embed.attend",
        lambda n: NnxTied(n, nnx.Rngs(0)),
        {"tied": "^embed/"},
        leaves={
            r"embed/embedding": I(),
            r"mid/kernel": H(),
            r"mid/bias": V(),
            r"norm/scale": V(),
        },
    ),
    Setup(
        "nnx_mqa",
        "nnx.LinearGeneral for one head of keys",
        lambda n: NnxMqa(n, nnx.Rngs(0)),
        MQA,
        leaves={
            r"embed/kernel": I(),
            r"(query|out)/kernel": H(),
            r"(key|value|head)/kernel": O(),
            r"(embed|query|out)/bias": V(),
            r"(key|value|head)/bias": F(),
        },
    ),
    Setup(
        "nnx_mqa_not_named",
        "nnx.LinearGeneral for one head of keys",
        lambda n: NnxMqa(n, nnx.Rngs(0)),
        asks="(key|value)/kernel",
        remedies=(MQA,),
        leaves={
            r"embed/kernel": I(),
            r"(query|out)/kernel": H(),
            r"(key|value|head)/kernel": O(),
            r"(embed|query|out)/bias": V(),
            r"(key|value|head)/bias": F(),
        },
    ),
    Setup(
        "linen_local",
        "nn.ConvLocal: a kernel (8, 8, 9·in, out) for each position",
        linen(LinenLocal, jnp.zeros((2, 8, 8, 3))),
        leaves={
            r"local_0/kernel": I(),
            r"local_1/kernel": H(),
            r"local_[01]/bias": V(),
            r"head/kernel": O(),
            r"head/bias": F(),
        },
    ),
    Setup(
        "linen_bidirectional",
        "nn.Bidirectional",
        linen(LinenBidirectional, jnp.zeros((2, 7, 3))),
        leaves={
            r".*GRUCell_\d/i\w/kernel": I(),
            r".*GRUCell_\d/h\w/kernel": H(),
            r".*GRUCell_\d/\w+/bias": V(),
            r"head/kernel": O(),
            r"head/bias": F(),
        },
    ),
]

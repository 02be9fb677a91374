"""`GPT`: a decoder with learned positions, as GPT-2."""

import dataclasses

from flax import nnx

from ..registry import register
from ..weights.sources import TORCH_LEAVES, Layout, Leaf, Source
from .decoder import Decoder, DecoderOptions, decoder_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTOptions(DecoderOptions):
    """Options of `GPT`; see there."""

    bias: bool = True


@register("gpt")
class GPT(Decoder, options=GPTOptions):
    """Token and position embeddings, causal pre-LN blocks, and a readout.

    Args:
      width: n, of the residual stream.
      depth: L, the number of blocks, of two residual branches each.
      base_width: the width that you tuned; None for `width`.
      base_depth: the depth that you tuned; None for `depth`. M = depth / base_depth.
      parametrization: a name, or what `optim.parametrization` returns; "completep" by
        default.
      branch_multiplier: a, the factor of each residual branch at the base depth.
      vocab_size: number of tokens.
      context: maximum length of a sequence.
      tied: use the token embedding as the readout. It is trained as an embedding, and
        the logits are multiplied by 1/m (under SP, by 1).
      head: whether the model computes logits; False: only features, as transformers'
        base models, e.g. `LlamaModel`.
      eos: token or tokens that end a text, where `zoo.generate` stops; None for none.
      heads: number of heads, constant over widths: the size of a head grows. Pass this
        or `head_dim`.
      head_dim: size of a head, constant over widths: the number of heads grows. 64 if
        neither `heads` nor `head_dim` is given.
      mlp_ratio: width of the MLP, as a multiple of `width`.
      layer_norm: normalize before each branch (pre-LN) and after the last block; False:
        no norms.
      norm_eps: constant added to the variance.
      nonlinearity: of the MLP: "gelu" (exact) or "gelu_tanh" (approximate).
      bias: add biases to the kernels of the blocks.
      zero_queries: initialize queries with zeros. Keys then have no gradient in the
        first step.
      zero_readout: initialize the readout with zeros; not if it is tied.
      zero_init: initialize the last kernel of each branch with zeros.
      dropout: probability of dropout after embeddings, inside the MLP and of branches.
      drop_path: probability of dropping the branches of the last block; it increases
        linearly from zero at the first block.
      remat: recompute blocks in the backward pass.
      attention: "auto", "xla" or "cudnn"; see `BlockOptions`.
      dtype: data type of the computation; norms, softmax and logits are at least
        float32.
      param_dtype: data type of the parameters.
      rngs: random state.

    Raises:
      ValueError: a size is not a positive whole number, heads do not divide a width, a
        name is unknown, or a tied readout should start at zero.

    Source: Tensor Programs VI, section 10.3; μP for tied embeddings is that of the
    mup package (Tensor Programs V, App. B.1).

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("gpt", width=64, depth=2, base_width=32, base_depth=1,
      ...                    head_dim=16, vocab_size=100, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((5, 12), int)).shape
      (5, 12, 100)
    """

    def build(self, options: GPTOptions, rngs: nnx.Rngs) -> None:
        self.plan = options.plan(
            growing={"mlp": options.mlp_ratio},
            fixed={"vocab": options.vocab_size, "positions": options.context},
            axes=options.head_axes(),
        )
        block = options.block(causal=True, qkv_bias=options.bias, bias=options.bias)
        self.build_decoder(options, block, rngs)


SIZES = {
    "gpt2": {"width": 768, "depth": 12},
    "gpt2_medium": {"width": 1024, "depth": 24},
    "gpt2_large": {"width": 1280, "depth": 36},
    "gpt2_xl": {"width": 1600, "depth": 48},
}
for _name, _shape in SIZES.items():
    register(
        _name,
        **_shape,
        vocab_size=50257,
        context=1024,
        nonlinearity="gelu_tanh",
        norm_eps=1e-5,
    )(GPT)

LAYOUT = Layout(
    {
        "embedding": "wte.weight",
        "position": "wpe.weight",
        "blocks/attention_norm": "h.{}.ln_1.",
        "blocks/attention/qkv": "h.{}.attn.c_attn.",
        "blocks/attention/out": "h.{}.attn.c_proj.",
        "blocks/mlp_norm": "h.{}.ln_2.",
        "blocks/mlp/up": "h.{}.mlp.c_fc.",
        "blocks/mlp/down": "h.{}.mlp.c_proj.",
        "norm": "ln_f.",
    },
    TORCH_LEAVES,
    "in_out",
)

# Endings of keys that a tied model does not need: masks in old files, and a copy of
# the embedding.
GPT_UNUSED = (".attn.bias", ".attn.masked_bias", "lm_head.weight")


def gpt_names(model: GPT, *, prefix: str = "transformer.") -> dict[Leaf, Source]:
    """Map each parameter of a GPT to its array in transformers' GPT-2.

    Args:
      model: the model, possibly abstract (from `nnx.eval_shape`).
      prefix: of every key except the readout's; `GPT2LMHeadModel` has "transformer.",
        files of `GPT2Model` have none.

    Returns:
      {(path, layer): `Source`}; the layer is None for parameters that are not stacked.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("gpt", width=24, depth=2, heads=3, rngs=nnx.Rngs(0))
      >>> source = gpt_names(model)["blocks/attention/value/bias", 0]
      >>> source.key, source.shape, source.part, source.leaf
      ('transformer.h.0.attn.c_attn.bias', (72,), (0, 2, 3), (3, 8))
    """
    return decoder_names(model, LAYOUT, prefix)

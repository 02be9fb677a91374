"""The Llama family: RMSNorm, rotary positions, gated MLPs, grouped-query attention."""

import dataclasses
import types
from collections.abc import Mapping

from flax import nnx

from .attention import head_axes
from .decoder import Decoder, DecoderOptions, decoder_names
from .plan import Axis, times_width
from .registry import register
from .rotary import Rotary
from .sources import TORCH_LEAVES, Layout, Leaf, Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaOptions(DecoderOptions):
    """Options of `Llama`, which describes them."""

    attention_ratio: float = 1.0
    queries_per_key: int = 1
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5
    nonlinearity: str = "silu"
    zero_queries: bool = False
    rope_theta: float = 10000.0
    rope_scaling: tuple[float, float, float, float] | None = None

    def rotary(self) -> Rotary:
        """The rotary positions of a head."""
        return Rotary(self.rope_theta, self.rope_scaling)

    def all_heads(self) -> dict[str, Axis]:
        """The axes "heads", "head_dim" and "kv_heads".

        Raises:
          ValueError: a width that the heads do not divide, or a number of heads that
            `queries_per_key` does not divide.
        """
        base = self.width if self.base_width is None else self.base_width
        wide, base = (
            times_width(
                n, self.attention_ratio, "attention_ratio: the width of all heads"
            )
            for n in (self.width, base)
        )
        axes = head_axes(wide, base, self.heads, self.head_dim)
        shared, heads = self.queries_per_key, axes["heads"]
        if isinstance(shared, bool) or not isinstance(shared, int) or shared < 1:
            raise ValueError(
                f"queries_per_key={shared!r} must be a whole number, at least 1"
            )
        for n in (heads.size, heads.base):
            if n % shared:
                raise ValueError(
                    f"{n} heads of queries are not a multiple of "
                    f"queries_per_key={shared}, the number of them that share a key"
                )
        grouped = Axis(heads.base // shared, heads.size // shared, heads.grows)
        return {**axes, "kv_heads": grouped}


@register("llama")
class Llama(Decoder, options=LlamaOptions):
    """A decoder with RMSNorm, rotary positions, gated MLPs and grouped queries.

    Args:
      width: n, of the residual stream.
      depth: L, the number of blocks, of two residual branches each.
      base_width: the width that was tuned; None for `width`.
      base_depth: the depth that was tuned; None for `depth`. M = depth / base_depth.
      parametrization: a name, or what `optim.parametrization` returns; "completep" by
        default.
      branch_multiplier: a.
      vocab_size: number of tokens.
      context: the longest sequence.
      tied: the readout is the token embedding, and the logits are multiplied by 1/m
        (under SP by nothing).
      heads: number of heads of queries, where it is the same at every width and their
        size grows. Give this or `head_dim`.
      head_dim: size of a head, where it is the same at every width and their number
        grows; 64 if neither is given.
      attention_ratio: width of all heads of queries together, as a multiple of
        `width`.
      queries_per_key: how many heads of queries share one head of keys and values;
        the same at every width. 1 is plain attention.
      qk_norm: RMSNorm of each query and key over its head, as Qwen3 has it.
      qkv_bias: whether queries, keys and values have biases, as Qwen2 has them. No
        other kernel has one.
      mlp_ratio: width of the gated MLP, as a multiple of `width`.
      layer_norm: RMSNorm at the beginning of each branch and after the last; False
        leaves out both.
      norm_eps: added to the mean square.
      nonlinearity: of the MLP's gate.
      rope_theta: base of the rotary frequencies; see `zoo.rotary.Rotary`.
      rope_scaling: (factor, low, high, context) of Llama 3.1 and later, or None.
      zero_queries: queries start at zero; not with `qk_norm`.
      zero_readout: the readout starts at zero; not if it is tied.
      zero_init: the last kernel of each branch starts at zero.
      dropout: probability, of embeddings, inside the MLP and of branches.
      drop_path: probability that the last block's branches are left out, rising
        from zero at the first block.
      remat: recompute blocks in the backward pass.
      attention: "auto", "xla" or "cudnn"; see `BlockOptions`.
      dtype: of the computation; norms, softmax and logits are float32 at least.
      param_dtype: of the parameters.
      rngs: random state.

    Raises:
      ValueError: a size that is not a positive whole number, widths that heads do
        not divide, an unknown name, or options that exclude each other.

    Source: Dey et al. 2025, arXiv:2505.01618 (CompleteP, the default); Touvron et al.
    2023, arXiv:2302.13971 (the architecture); Ainslie et al. 2023, arXiv:2305.13245
    (grouped queries).

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("llama", width=64, depth=2, base_width=32, base_depth=1,
      ...                    head_dim=16, queries_per_key=2, vocab_size=100,
      ...                    rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((5, 12), int)).shape
      (5, 12, 100)
    """

    def build(self, options: LlamaOptions, rngs: nnx.Rngs) -> None:
        self.plan = options.plan(
            growing={"mlp": options.mlp_ratio},
            fixed={"vocab": options.vocab_size},
            axes=options.all_heads(),
        )
        rotary = options.rotary()
        rotary.frequencies(self.plan["head_dim"].size)  # refuses an odd one
        block = dataclasses.replace(
            options.block(causal=True, qkv_bias=options.qkv_bias, bias=False),
            rms_norm=True,
            gated=True,
            qk_norm=options.qk_norm,
            rotary=rotary,
        )
        self.build_decoder(options, block, rngs)


LLAMA_3 = (32.0, 1.0, 4.0, 8192.0)
SIZES: Mapping[str, Mapping[str, object]] = types.MappingProxyType(
    {
        "smollm2_135m": {
            "width": 576,
            "depth": 30,
            "head_dim": 64,
            "queries_per_key": 3,
            "mlp_ratio": 1536 / 576,
            "vocab_size": 49152,
            "context": 8192,
            "rope_theta": 100000.0,
        },
        "smollm2_360m": {
            "width": 960,
            "depth": 32,
            "head_dim": 64,
            "queries_per_key": 3,
            "mlp_ratio": 2560 / 960,
            "vocab_size": 49152,
            "context": 8192,
            "rope_theta": 100000.0,
        },
        "qwen3_0_6b": {
            "width": 1024,
            "depth": 28,
            "head_dim": 128,
            "attention_ratio": 2.0,
            "queries_per_key": 2,
            "mlp_ratio": 3.0,
            "vocab_size": 151936,
            "context": 40960,
            "rope_theta": 1000000.0,
            "norm_eps": 1e-6,
            "qk_norm": True,
        },
        "llama3_2_1b": {
            "width": 2048,
            "depth": 16,
            "head_dim": 64,
            "queries_per_key": 4,
            "mlp_ratio": 4.0,
            "vocab_size": 128256,
            "context": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA_3,
        },
        "llama3_2_3b": {
            "width": 3072,
            "depth": 28,
            "head_dim": 128,
            "queries_per_key": 3,
            "mlp_ratio": 8192 / 3072,
            "vocab_size": 128256,
            "context": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA_3,
        },
    }
)
for _name, _options in SIZES.items():
    register(_name, **_options)(Llama)

LAYOUT = Layout(
    {
        "embedding": "embed_tokens.weight",
        "blocks/attention_norm": "layers.{}.input_layernorm.",
        "blocks/attention/query": "layers.{}.self_attn.q_proj.",
        "blocks/attention/key": "layers.{}.self_attn.k_proj.",
        "blocks/attention/value": "layers.{}.self_attn.v_proj.",
        "blocks/attention/query_norm": "layers.{}.self_attn.q_norm.",
        "blocks/attention/key_norm": "layers.{}.self_attn.k_norm.",
        "blocks/attention/out": "layers.{}.self_attn.o_proj.",
        "blocks/mlp_norm": "layers.{}.post_attention_layernorm.",
        "blocks/mlp/gate": "layers.{}.mlp.gate_proj.",
        "blocks/mlp/up": "layers.{}.mlp.up_proj.",
        "blocks/mlp/down": "layers.{}.mlp.down_proj.",
        "norm": "norm.",
    },
    TORCH_LEAVES,
    "out_in",
)


def llama_names(model: Llama, *, prefix: str = "model.") -> dict[Leaf, Source]:
    """Where each parameter stands in transformers' Llama, Qwen2 and Qwen3.

    Args:
      model: what is to be filled, or its abstract twin from `nnx.eval_shape`.
      prefix: what stands in front of every key but that of the readout;
        `LlamaForCausalLM` has "model.", files of `LlamaModel` have none.

    Returns:
      For each (path, layer), where the layer is None for what is not stacked, its
      `Source`.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("llama", width=24, depth=2, heads=4, queries_per_key=2,
      ...                    rngs=nnx.Rngs(0))
      >>> source = llama_names(model)["blocks/attention/key/kernel", 0]
      >>> source.key, source.shape, source.leaf
      ('model.layers.0.self_attn.k_proj.weight', (12, 24), (24, 2, 6))
    """
    return decoder_names(model, LAYOUT, prefix)

"""The Llama family: RMSNorm, rotary positions, gated MLPs, grouped-query attention."""

import dataclasses
import types
from collections.abc import Mapping

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from ..layers.attention import TransformerBlock, head_axes
from ..layers.experts import Dispatch, Routing, balance_loss, shares
from ..layers.rotary import Rotary
from ..plan import Axis, times_width
from ..registry import register
from ..weights.sources import TORCH_LEAVES, Layout, Leaf, Source
from .decoder import Decoder, DecoderOptions, decoder_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaOptions(DecoderOptions):
    """Options of `Llama`; see there."""

    attention_ratio: float = 1.0
    queries_per_key: int = 1
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-5
    nonlinearity: str = "silu"
    zero_queries: bool = False
    rope_theta: float = 10000.0
    rope_scaling: tuple[float, float, float, float] | None = None
    experts: int = 0
    experts_per_token: int = 2
    normalize_gates: bool = True
    balance: float = 0.01
    dispatch: Dispatch = "dense"

    def routing(self) -> Routing | None:
        """Routing options of a block's experts; None without experts."""
        if not self.experts:
            of_experts = ("experts_per_token", "normalize_gates", "balance", "dispatch")
            self.check_unused(*of_experts, without="experts")
            return None
        return Routing(
            self.experts,
            self.experts_per_token,
            self.normalize_gates,
            self.balance / self.depth,
            self.dispatch,
        )

    def rotary(self) -> Rotary:
        """The rotary positions of a head."""
        return Rotary(self.rope_theta, self.rope_scaling)

    def all_heads(self) -> dict[str, Axis]:
        """The axes "heads", "head_dim" and "kv_heads".

        Raises:
          ValueError: heads do not divide a width, or `queries_per_key` does not divide
            the number of heads.
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
                    f"the number of query heads, {n}, is not a multiple of "
                    f"queries_per_key={shared}; choose a divisor"
                )
        grouped = Axis(heads.base // shared, heads.size // shared, heads.grows)
        return {**axes, "kv_heads": grouped}


@register("llama")
class Llama(Decoder, options=LlamaOptions):
    """A decoder with RMSNorm, rotary positions, gated MLPs and grouped queries.

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
      tied: use the token embedding as the readout. The logits are multiplied by 1/m
        (under SP, by 1).
      head: whether the model computes logits; False: only features, as transformers'
        base models, e.g. `LlamaModel`.
      eos: token or tokens that end a text, where `zoo.generate` stops; None for none.
      heads: number of query heads, constant over widths: the size of a head grows. Pass
        this or `head_dim`.
      head_dim: size of a head, constant over widths: the number of heads grows. 64 if
        neither `heads` nor `head_dim` is given.
      attention_ratio: width of all query heads together, as a multiple of `width`.
      queries_per_key: number of query heads that share one head of keys and values,
        constant over widths. 1 is plain attention.
      qk_norm: apply RMSNorm to each query and key over its head, as in Qwen3.
      qkv_bias: add biases to queries, keys and values, as in Qwen2. No other kernel has
        a bias.
      mlp_ratio: width of the gated MLP, or of each expert, as a multiple of `width`.
      layer_norm: apply RMSNorm at the start of each branch and after the last block;
        False: no norms.
      norm_eps: constant added to the mean square.
      nonlinearity: nonlinearity of the MLP's gate.
      rope_theta: base of the rotary frequencies; see `zoo.layers.rotary.Rotary`.
      rope_scaling: (factor, low, high, context) of Llama 3.1 and later, or None.
      experts: number of experts in each block, constant over widths; 0 for one MLP. The
        router has the rules of a readout, and experts are a stacked axis.
      experts_per_token: number of experts that each token uses.
      normalize_gates: scale the weights of a token's experts so that they sum to one.
      balance: factor of the load-balancing loss (the mean over blocks). In training,
        its gradient is added to the gradient of your loss, which must be a mean over
        tokens. `eval()` switches it off. See `zoo.layers.experts.balance_loss`.
      dispatch: "dense" computes every expert for every token and works on any mesh;
        "sorted" computes only the chosen experts, on one device or over "data".
      zero_queries: initialize queries with zeros; not with `qk_norm`.
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
        name is unknown, or options exclude each other.

    Source: Dey et al. 2025, arXiv:2505.01618 (CompleteP, the default); Touvron et al.
    2023, arXiv:2302.13971 (the architecture); Ainslie et al. 2023, arXiv:2305.13245
    (grouped queries); Jiang et al. 2024, arXiv:2401.04088 (experts).

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
            fixed={
                "vocab": options.vocab_size,
                **({"experts": options.experts} if options.experts else {}),
            },
            axes=options.all_heads(),
        )
        rotary = options.rotary()
        rotary.frequencies(self.plan["head_dim"].size)  # raises if it is odd
        block = dataclasses.replace(
            options.block(causal=True, qkv_bias=options.qkv_bias, bias=False),
            rms_norm=True,
            gated=True,
            qk_norm=options.qk_norm,
            rotary=rotary,
            routing=options.routing(),
        )
        self.build_decoder(options, block, rngs)

    def routing(
        self, tokens: Int[Array, "batch time"]
    ) -> tuple[Float[Array, " depth"], Float[Array, "depth experts"]]:
        """Measure how evenly the experts of each block are used, without noise.

        Args:
          tokens: as in a call.

        Returns:
          (the load-balancing loss of each block, 1 if balanced; for each block, the
          fraction of all choices that falls on each expert, which sums to one).

        Raises:
          ValueError: the model has no experts.
        """
        routing = self.options.routing
        if routing is None:
            raise ValueError("this Llama has no experts; create it with experts=...")
        self._check(tokens.shape[1])
        graph, weights = nnx.split(self.blocks)

        def run(x: Array, layer: nnx.State) -> tuple[Array, tuple[Array, Array]]:
            block = nnx.merge(graph, layer)
            assert isinstance(block, TransformerBlock)
            probabilities = block.routing(x)
            return block(x), (
                balance_loss(probabilities, routing),
                shares(probabilities, routing),
            )

        return jax.lax.scan(run, self._embed(tokens), weights)[1]


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


_EXPERTS: Mapping[str, Mapping[str, str]] = types.MappingProxyType(
    {
        "mixtral": {
            "blocks/mlp/router": "layers.{}.block_sparse_moe.gate.",
            "blocks/mlp/gate": "layers.{}.block_sparse_moe.experts.{}.w1.",
            "blocks/mlp/up": "layers.{}.block_sparse_moe.experts.{}.w3.",
            "blocks/mlp/down": "layers.{}.block_sparse_moe.experts.{}.w2.",
        },
        "qwen3_moe": {
            "blocks/mlp/router": "layers.{}.mlp.gate.",
            "blocks/mlp/gate": "layers.{}.mlp.experts.{}.gate_proj.",
            "blocks/mlp/up": "layers.{}.mlp.experts.{}.up_proj.",
            "blocks/mlp/down": "layers.{}.mlp.experts.{}.down_proj.",
        },
    }
)


def llama_names(
    model: Llama, *, prefix: str = "model.", mixtral: bool | None = None
) -> dict[Leaf, Source]:
    """Map each parameter to its array in transformers' Llama, Qwen and Mixtral.

    Args:
      model: the model, possibly abstract (from `nnx.eval_shape`).
      prefix: of every key except the readout's; `LlamaForCausalLM` has "model.", files
        of `LlamaModel` have none.
      mixtral: whether experts have Mixtral's names rather than Qwen3-MoE's; None
        decides by QK-norm, which only Qwen3-MoE has.

    Returns:
      {(path, layer): `Source`}; the layer is None for parameters that are not stacked.
      For weights of experts {(path, (layer, expert)): `Source`}.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("llama", width=24, depth=2, heads=4, queries_per_key=2,
      ...                    rngs=nnx.Rngs(0))
      >>> source = llama_names(model)["blocks/attention/key/kernel", 0]
      >>> source.key, source.shape, source.leaf
      ('model.layers.0.self_attn.k_proj.weight', (12, 24), (24, 2, 6))
    """
    layout = LAYOUT
    if model.options.routing is not None:
        as_mixtral = not model.options.qk_norm if mixtral is None else mixtral
        names = _EXPERTS["mixtral" if as_mixtral else "qwen3_moe"]
        layout = layout._replace(modules={**LAYOUT.modules, **names})
    return decoder_names(model, layout, prefix)

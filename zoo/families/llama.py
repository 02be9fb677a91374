"""The Llama family: RMSNorm, rotary positions, gated MLPs, grouped-query attention."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from ..family import Count, Natural, Positive, Range
from ..layers.attention import TransformerBlock, head_axes
from ..layers.basic import Nonlinearity
from ..layers.experts import Dispatch, Routing, balance_loss, shares
from ..layers.rotary import Rotary
from ..plan import Axis, times_width
from ..registry import Record, register
from ..weights.configs import Config, positive, whole
from ..weights.sources import Layout
from .decoder import (
    Decoder,
    DecoderOptions,
    decoder_factor,
    decoder_layout,
    readout_options,
    unused_heads,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaOptions(DecoderOptions):
    """Options of `Llama`; see there."""

    attention_ratio: Positive = 1.0
    queries_per_key: Count = 1
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: Positive = 1e-5
    nonlinearity: Nonlinearity = "silu"
    zero_queries: bool = False
    rope_theta: Positive = 10000.0
    rope_scaling: tuple[float, float, float, float] | None = None
    experts: Natural = 0
    experts_per_token: Count = 2
    normalize_gates: bool = True
    balance: Annotated[float, Range("a number, at least 0", lambda x: x >= 0)] = 0.01
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
        for n in (heads.size, heads.base):
            if n % shared:
                raise ValueError(
                    f"the number of query heads, {n}, is not a multiple of "
                    f"queries_per_key={shared}; choose a divisor"
                )
        grouped = Axis(heads.base // shared, heads.size // shared, heads.grows)
        return {**axes, "kv_heads": grouped}


class Llama(Decoder, options=LlamaOptions):
    """A decoder with RMSNorm, rotary positions, gated MLPs and grouped queries.

    Args:
      depth: L, the number of blocks, of two residual branches each.
      heads: number of query heads, constant over widths: the size of a head grows. Pass
        this or `head_dim`.
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
        block = options.block(
            causal=True,
            bias=False,
            rms_norm=True,
            gated=True,
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

        def run(
            x: Array, layer: nnx.State[Any, Any]
        ) -> tuple[Array, tuple[Array, Array]]:
            block = nnx.merge(graph, layer)
            assert isinstance(block, TransformerBlock)
            probabilities = block.routing(x)
            return block(x), (
                balance_loss(probabilities, routing),
                shares(probabilities, routing),
            )

        return jax.lax.scan(run, self._embed(tokens), weights)[1]


LLAMA_3 = (32.0, 1.0, 4.0, 8192.0)
_SMOLLM2 = {
    **{"head_dim": 64, "queries_per_key": 3, "vocab_size": 49152, "context": 8192},
    "rope_theta": 100000.0,
}
_LLAMA3_2 = {
    **{"vocab_size": 128256, "context": 131072, "rope_theta": 500000.0},
    "rope_scaling": LLAMA_3,
}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "smollm2_135m": {"width": 576, "depth": 30, "mlp_ratio": 1536 / 576, **_SMOLLM2},
    "smollm2_360m": {"width": 960, "depth": 32, "mlp_ratio": 2560 / 960, **_SMOLLM2},
    "qwen3_0_6b": {
        **{"width": 1024, "depth": 28, "head_dim": 128, "attention_ratio": 2.0},
        **{"queries_per_key": 2, "mlp_ratio": 3.0, "vocab_size": 151936},
        **{"context": 40960, "rope_theta": 1000000.0, "norm_eps": 1e-6},
        "qk_norm": True,
    },
    "llama3_2_1b": {
        **{"width": 2048, "depth": 16, "head_dim": 64, "queries_per_key": 4},
        **_LLAMA3_2,
    },
    "llama3_2_3b": {
        **{"width": 3072, "depth": 28, "head_dim": 128, "queries_per_key": 3},
        **{"mlp_ratio": 8192 / 3072, **_LLAMA3_2},
    },
}

# Options of each type, with the only value that is supported here.
_FIXED: Mapping[str, Mapping[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"attention_bias": False, "use_sliding_window": False},
    "mixtral": {"sliding_window": None, "router_jitter_noise": 0.0},
    "qwen3_moe": {
        **{"attention_bias": False, "use_sliding_window": False},
        **{"decoder_sparse_step": 1, "mlp_only_layers": []},
    },
}


def _from_transformers(config: Config) -> dict[str, Any]:
    kind = config.kind
    config.only(**_FIXED[kind])
    width, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    inner = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    full = config.over({"num_key_value_heads": heads, "head_dim": width // heads})
    key_heads, head_dim = full.whole("num_key_value_heads"), full.whole("head_dim")
    if heads % key_heads:
        raise ValueError(
            f"the config.json of {config.where} says num_attention_heads={heads} and "
            f"num_key_value_heads={key_heads}, which must divide it"
        )
    theta, scaling = _rope(config)
    return {
        "width": width,
        "depth": config.whole("num_hidden_layers"),
        "head_dim": head_dim,
        "attention_ratio": heads * head_dim / width,
        "queries_per_key": heads // key_heads,
        "mlp_ratio": config.whole(inner) / width,
        "vocab_size": config.whole("vocab_size"),
        "context": config.whole("max_position_embeddings"),
        **readout_options(config, tied=False),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "nonlinearity": config.activation("hidden_act", "silu"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        **(_from_experts(config) if kind in ("mixtral", "qwen3_moe") else {}),
    }


def _from_experts(config: Config) -> dict[str, Any]:
    """The options of a mixture of experts."""
    # Qwen's own files say num_experts; files of newer transformers, as Mixtral's, say
    # num_local_experts.
    count = config.get("num_experts", config.get("num_local_experts"))
    normalizes = bool(config.get("norm_topk_prob", False))
    return {
        "experts": whole(count, "num_experts", config.where),
        "experts_per_token": config.whole("num_experts_per_tok"),
        "normalize_gates": config.kind == "mixtral" or normalizes,
    }


def _rope(config: Config) -> tuple[float, tuple[float, float, float, float] | None]:
    """Base and scaling of the rotary frequencies, from new or old configs."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    theta = positive(theta, "rope_theta", config.where)
    how = given.get("rope_type", given.get("type", "default"))
    if how == "default":
        return theta, None
    if how != "llama3":
        raise config.refusal(
            f"rotary positions of type {how!r}", "'default' and 'llama3'"
        )
    names = (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    )
    factor, low, high, context = (positive(given[n], n, config.where) for n in names)
    return theta, (factor, low, high, context)


_NAMES = {
    "embedding": "embed_tokens.weight",
    "blocks/*/attention_norm": "layers.{}.input_layernorm.",
    "blocks/*/attention/query": "layers.{}.self_attn.q_proj.",
    "blocks/*/attention/key": "layers.{}.self_attn.k_proj.",
    "blocks/*/attention/value": "layers.{}.self_attn.v_proj.",
    "blocks/*/attention/query_norm": "layers.{}.self_attn.q_norm.",
    "blocks/*/attention/key_norm": "layers.{}.self_attn.k_norm.",
    "blocks/*/attention/out": "layers.{}.self_attn.o_proj.",
    "blocks/*/mlp_norm": "layers.{}.post_attention_layernorm.",
    "blocks/*/mlp/gate": "layers.{}.mlp.gate_proj.",
    "blocks/*/mlp/up": "layers.{}.mlp.up_proj.",
    "blocks/*/mlp/down": "layers.{}.mlp.down_proj.",
    "norm": "norm.",
}
_EXPERTS = {
    "mixtral": {
        "blocks/*/mlp/router": "layers.{}.block_sparse_moe.gate.",
        "blocks/*/mlp/gate": "layers.{}.block_sparse_moe.experts.{}.w1.",
        "blocks/*/mlp/up": "layers.{}.block_sparse_moe.experts.{}.w3.",
        "blocks/*/mlp/down": "layers.{}.block_sparse_moe.experts.{}.w2.",
    },
    "qwen3_moe": {
        "blocks/*/mlp/router": "layers.{}.mlp.gate.",
        "blocks/*/mlp/gate": "layers.{}.mlp.experts.{}.gate_proj.",
        "blocks/*/mlp/up": "layers.{}.mlp.experts.{}.up_proj.",
        "blocks/*/mlp/down": "layers.{}.mlp.experts.{}.down_proj.",
    },
}


def _layouts(model: Llama) -> tuple[str, ...]:
    """The layouts; that of a model with experts is Mixtral's or Qwen3-MoE's."""
    experts = tuple(_EXPERTS) if model.options.routing is not None else ()
    return ("transformers", *experts)


def _layout(model: Llama, name: str) -> Layout:
    names: Mapping[str, str] = _NAMES
    if model.options.routing is not None:
        if name == "transformers":  # only Qwen3-MoE has QK-norm
            name = "qwen3_moe" if model.options.qk_norm else "mixtral"
        names = {**names, **_EXPERTS[name]}
    return decoder_layout(model, names, "model.", "out_in")


register(
    Record(
        model=Llama,
        sizes={"llama": {}, **SIZES},
        transformers=dict.fromkeys(_FIXED, _from_transformers),
        layouts=_layouts,
        layout=_layout,
        unused=unused_heads,
        factor=decoder_factor,
        reads_tokens=True,
        unseen=", with its head_dim, rope_theta, rope_scaling, norm_eps and "
        "experts_per_token, which no weights show; put the config.json beside the file "
        "to have them read",
    )
)

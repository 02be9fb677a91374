"""`GPT`: a decoder with learned positions, as GPT-2."""

import dataclasses
from typing import Any

from flax import nnx

from ..registry import Record, register
from ..weights.configs import Config
from .decoder import (
    Decoder,
    DecoderOptions,
    decoder_factor,
    decoder_layout,
    readout_options,
    unused_heads,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTOptions(DecoderOptions):
    """Options of `GPT`; see there."""

    bias: bool = True


class GPT(Decoder, options=GPTOptions):
    """Token and position embeddings, causal pre-LN blocks, and a readout.

    Args:
      depth: L, the number of blocks, of two residual branches each.
      bias: add biases to the kernels of the blocks.

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
        block = options.block(causal=True, qkv_bias=options.bias)
        self.build_decoder(options, block, rngs)


def _sizes(width: int, depth: int) -> dict[str, Any]:
    return {
        **{"width": width, "depth": depth, "vocab_size": 50257, "context": 1024},
        **{"nonlinearity": "gelu_tanh", "norm_eps": 1e-5},
    }


def _from_gpt2(config: Config) -> dict[str, Any]:
    config.only(
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    width, depth, heads = (config.whole(f"n_{x}") for x in ("embd", "layer", "head"))
    inner = config.get("n_inner")
    positions = "n_positions" if config.get("n_positions") is not None else "n_ctx"
    return {
        "width": width,
        "depth": depth,
        **({"heads": heads} if width != 64 * heads else {}),
        "vocab_size": config.whole("vocab_size"),
        "context": config.whole(positions),
        **readout_options(config, tied=True),
        "nonlinearity": config.activation("activation_function", "gelu_new"),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "mlp_ratio": 4.0 if inner is None else inner / width,
    }


_NAMES = {
    "embedding": "wte.weight",
    "position": "wpe.weight",
    "blocks/*/attention_norm": "h.{}.ln_1.",
    "blocks/*/attention/qkv": "h.{}.attn.c_attn.",
    "blocks/*/attention/out": "h.{}.attn.c_proj.",
    "blocks/*/mlp_norm": "h.{}.ln_2.",
    "blocks/*/mlp/up": "h.{}.mlp.c_fc.",
    "blocks/*/mlp/down": "h.{}.mlp.c_proj.",
    "norm": "ln_f.",
}


register(
    Record(
        model=GPT,
        sizes={
            "gpt": {},
            "gpt2": _sizes(768, 12),
            "gpt2_medium": _sizes(1024, 24),
            "gpt2_large": _sizes(1280, 36),
            "gpt2_xl": _sizes(1600, 48),
        },
        transformers={"gpt2": _from_gpt2},
        layouts=lambda model: ("transformers",),
        layout=lambda model, name: decoder_layout(
            model, _NAMES, "transformer.", "in_out"
        ),
        unused=unused_heads,
        factor=decoder_factor,
        reads_tokens=True,
    )
)

"""ConvNeXt, versions 1 and 2."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ..family import Count, Counts, Positive
from ..layers.basic import (
    ACTIVATIONS,
    Dense,
    LayerNorm,
    LayerScale,
    Nonlinearity,
    Scaled,
    scan,
    single,
    stack,
)
from ..layers.conv import DEPTHWISE, Conv
from ..layers.stages import ImageOptions, Staged
from ..plan import Plan
from ..registry import Record, register
from ..weights.configs import Config
from ..weights.sources import Layout

# Every kernel of the published networks is drawn with this standard deviation.
_STD = 0.02


class GlobalResponseNorm(Scaled):
    """x + (γ · x · r / <r> + β), where r is a channel's norm over all pixels.

    <r> is the mean of r over the channels. γ and β start at zero.

    Args:
      name: the axis of channels.

    Source: Woo et al. 2023 (arXiv:2301.00808), eqs. 1 to 3.
    """

    def __init__(self, plan: Plan, name: str):
        super().__init__(plan, name, in_branch=True, init="zeros")

    def __call__(self, x: Float[Array, "b h w n"]) -> Float[Array, "b h w n"]:
        y = x.astype(single(x.dtype))
        square = jnp.square(y).sum((1, 2), keepdims=True)
        # The norm has no derivative at zero; torch uses zero there.
        is_zero = square == 0
        norm = jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, square)))
        ratio = norm / (norm.mean(-1, keepdims=True) + self.epsilon)
        return (y + self.scaled(y * ratio, y.dtype)).astype(x.dtype)


class ConvNeXtBlock(nnx.Module):
    """x + a M^-α · γ · down(grn(φ(up(norm(depthwise(x))))))."""

    def __init__(
        self, plan: Plan, options: "ConvNeXtOptions", stage: int, *, rngs: nnx.Rngs
    ):
        name, inner = f"stage{stage}", f"mlp{stage}"
        self.branch = plan.branch
        drawn: dict[str, Any] = {"init": "normal", "gain": _STD, "in_branch": True}
        self.depthwise = Conv(plan, 7, (DEPTHWISE, name), bias=True, **drawn, rngs=rngs)
        self.norm = LayerNorm(plan, name, in_branch=True, epsilon=options.norm_eps)
        self.up = Dense(plan, (name, inner), bias=True, **drawn, rngs=rngs)
        self.activation = ACTIVATIONS[options.nonlinearity]
        self.grn = GlobalResponseNorm(plan, inner) if options.grn else None
        self.down = Dense(plan, (inner, name), bias=True, **drawn, rngs=rngs)
        self.layer_scale = (
            LayerScale(plan, name, initial=options.layer_scale)
            if options.layer_scale is not None
            else None
        )

    def __call__(self, x: Float[Array, "b h w n"]) -> Float[Array, "b h w n"]:
        h = self.activation(self.up(self.norm(self.depthwise(x))))
        if self.grn is not None:
            h = self.grn(h)
        h = self.down(h)
        if self.layer_scale is not None:
            h = self.layer_scale(h)
        return x + self.branch * h


class ConvNeXtStage(nnx.Module):
    """A norm and a 2x2 convolution at stride 2 (except in stage 1), then blocks."""

    def __init__(
        self, plan: Plan, options: "ConvNeXtOptions", stage: int, *, rngs: nnx.Rngs
    ):
        self.remat = options.remat
        entry: tuple[LayerNorm, Conv] | None = None
        if stage > 1:
            ends = f"stage{stage - 1}", f"stage{stage}"
            entry = (
                LayerNorm(plan, ends[0], epsilon=options.norm_eps),
                _patches(plan, 2, ends, rngs=rngs),
            )
        # Assigned once: NNX does not accept a module for an attribute that was None.
        self.norm = None if entry is None else entry[0]
        self.conv = None if entry is None else entry[1]
        count = options.blocks[stage - 1]
        self.blocks = stack(
            lambda rngs: ConvNeXtBlock(plan, options, stage, rngs=rngs),
            options.depth * count,
            rngs,
            base_depth=options.tuned_depth * count,
        )

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        if self.norm is not None and self.conv is not None:
            x = self.conv(self.norm(x))
        return scan(self.blocks, x, remat=self.remat)


def _patches(plan: Plan, size: int, names: tuple[str, str], *, rngs: nnx.Rngs) -> Conv:
    return Conv(
        plan,
        size,
        names,
        stride=size,
        padding=0,
        bias=True,
        init="normal",
        gain=_STD,
        rngs=rngs,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvNeXtOptions(ImageOptions):
    """Options of `ConvNeXt`, which describes them."""

    blocks: Counts = (3, 3, 9, 3)
    patch_size: Count = 4
    mlp_ratio: Positive = 4.0
    layer_scale: Positive | None = 1e-6
    grn: bool = False
    nonlinearity: Nonlinearity = "gelu"
    norm_eps: Positive = 1e-6
    head_eps: Positive | None = None

    @property
    def branch_layers(self) -> int:
        """A depthwise convolution and the two layers of the MLP."""
        return 3


class ConvNeXt(Staged, options=ConvNeXtOptions):
    """Patches, stages of depthwise convolutions and MLPs, a norm, and a readout.

    Stage i = 0, 1, ... has width · 2^i channels, and halves the image for i > 0. Under
    SP, and under every parametrization at its base size, it is timm's network, drawn
    from the same distributions. Depth is scanned.

    Args:
      width: channels of the first stage.
      depth: how often the blocks of each stage are repeated: stage i has depth ·
        blocks[i] of them.
      input_shape: (height, width, channels) of an image. Images of any size are
        accepted; rows and columns beyond a multiple of the strides are dropped.
      blocks: number of blocks in each stage, at depth 1.
      patch_size: side of the patches that the stem reads.
      mlp_ratio: width of the MLP, as a multiple of its stage's channels.
      layer_scale: initial value of the factor of each channel of a branch; None: no
        factors (version 2).
      grn: global response normalization inside the MLP (version 2).
      nonlinearity: of the MLP: "gelu" (exact) or "gelu_tanh" (approximate).
      norm_eps: constant added to the variance.
      head_eps: constant added to the variance in the norm before the readout; None for
        `norm_eps`. transformers uses 1e-12.

    Raises:
      ValueError: a size that is not a positive whole number, or an unknown name.

    Source: Liu et al. 2022 (arXiv:2201.03545); version 2, Woo et al. 2023
    (arXiv:2301.00808).

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("convnext_tiny", width=8, base_width=4, blocks=(1, 1),
      ...                    out_features=10, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((1, 32, 32, 3))).shape
      (1, 10)
      >>> zoo.scales(model)["stages/0/blocks/depthwise/kernel"].role.value
      'input'
    """

    def build(self, options: ConvNeXtOptions, rngs: nnx.Rngs) -> None:
        blocks, input_shape = options.blocks, options.input_shape
        stages = range(1, len(blocks) + 1)
        growing = {f"stage{i}": 2.0 ** (i - 1) for i in stages}
        growing |= {f"mlp{i}": options.mlp_ratio * 2.0 ** (i - 1) for i in stages}
        patch = options.patch_size
        self.plan = options.plan(
            growing=growing,
            fixed={
                "kernel2": 2,
                "kernel7": 7,
                f"kernel{patch}": patch,
                DEPTHWISE: 1,
                "channels": input_shape[2],
                "classes": options.out_features,
            },
        )
        self.channels, self.patch_size = input_shape[2], patch
        self.grn, self.layer_scale = options.grn, options.layer_scale
        self.conv = _patches(self.plan, patch, ("channels", "stage1"), rngs=rngs)
        self.norm = LayerNorm(self.plan, "stage1", epsilon=options.norm_eps)
        self.stages = nnx.List(
            ConvNeXtStage(self.plan, options, i, rngs=rngs) for i in stages
        )
        last = f"stage{len(blocks)}"
        head_eps = options.norm_eps if options.head_eps is None else options.head_eps
        self.head_norm = LayerNorm(self.plan, last, epsilon=head_eps)
        self.readout = Dense(
            self.plan, (last, "classes"), bias=True, init="normal", gain=_STD, rngs=rngs
        )

    def features(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch n"]:
        """What the readout sees: the norm of the mean over pixels of the last stage.

        Returns:
          Features of shape (batch, channels of the last stage).
        """
        return self.head_norm(self._map(x).mean(axis=(1, 2)))

    def _enter(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 n"]:
        return self.norm(self.conv(x))


_BLOCKS = {
    "atto": (40, (2, 2, 6, 2)),
    "femto": (48, (2, 2, 6, 2)),
    "pico": (64, (2, 2, 6, 2)),
    "nano": (80, (2, 2, 8, 2)),
    "tiny": (96, (3, 3, 9, 3)),
    "small": (96, (3, 3, 27, 3)),
    "base": (128, (3, 3, 27, 3)),
    "large": (192, (3, 3, 27, 3)),
    "xlarge": (256, (3, 3, 27, 3)),
    "huge": (352, (3, 3, 27, 3)),
}


def _variants() -> dict[str, dict[str, Any]]:
    variants = {}
    for size, (width, blocks) in _BLOCKS.items():
        options = {"width": width, "depth": 1, "blocks": blocks}
        if size != "huge":
            variants[f"convnext_{size}"] = options
        if size != "xlarge":
            variants[f"convnextv2_{size}"] = {
                **options,
                "layer_scale": None,
                "grn": True,
            }
    return variants


#: The networks of timm, by their names there.
VARIANTS: Mapping[str, Mapping[str, Any]] = _variants()
NAMES = (
    *("convnext_atto", "convnext_tiny", "convnext_small", "convnext_base"),
    *("convnext_large", "convnextv2_atto", "convnextv2_nano", "convnextv2_tiny"),
    *("convnextv2_base", "convnextv2_large"),
)


# --- Files of other libraries ---


def _from_transformers(config: Config) -> dict[str, Any]:
    config.only(hidden_act="gelu")
    scale = float(config.get("layer_scale_init_value", 1e-6))
    more: dict[str, Any] = {"layer_scale": scale if scale > 0 else None}
    if config.kind == "convnextv2":
        more = {"grn": True, "layer_scale": None}
    return {
        "width": config.doubling("hidden_sizes")[0],
        "depth": 1,
        "blocks": config.wholes("depths"),
        **more,
        "head_eps": float(config.get("layer_norm_eps", 1e-12)),
        "patch_size": config.whole("patch_size", 4),
        **config.images(),
    }


def _layouts(model: ConvNeXt) -> tuple[str, ...]:
    """The layouts, that of the model's size in timm first.

    In timm, the MLPs of atto, femto, pico and nano (40 to 80 channels) are convolutions
    of one pixel ("timm_conv"); those of tiny (96 channels) and larger are linear.
    """
    timm = ("timm", "timm_conv")
    small = model.plan["embed"].size < 96
    return *(reversed(timm) if small else timm), "transformers"


def _blocks(start: str, names: Mapping[str, str]) -> dict[str, str]:
    return {
        f"stages/*/blocks/*/{ours}": start + theirs for ours, theirs in names.items()
    }


_TIMM = {
    "conv": "stem.0.",
    "norm": "stem.1.",
    "head_norm": "head.norm.",
    "readout": "head.fc.",
    "stages/*/norm": "stages.{}.downsample.0.",
    "stages/*/conv": "stages.{}.downsample.1.",
    **_blocks(
        "stages.{}.blocks.{}.",
        {
            "depthwise": "conv_dw.",
            "norm": "norm.",
            "up": "mlp.fc1.",
            "grn": "mlp.grn.",
            "down": "mlp.fc2.",
            "layer_scale/scale": "gamma",
        },
    ),
}
_TRANSFORMERS = {
    "conv": "embeddings.patch_embeddings.",
    "norm": "embeddings.layernorm.",
    "head_norm": "layernorm.",
    "readout": "classifier.",
    "stages/*/norm": "encoder.stages.{}.downsampling_layer.0.",
    "stages/*/conv": "encoder.stages.{}.downsampling_layer.1.",
    **_blocks(
        "encoder.stages.{}.layers.{}.",
        {
            "depthwise": "dwconv.",
            "norm": "layernorm.",
            "up": "pwconv1.",
            "grn": "grn.",
            "down": "pwconv2.",
            "layer_scale/scale": "layer_scale_parameter",
        },
    ),
}


def _image_vector(leaf: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of GRN's vectors in transformers, which keep the axes of images."""
    return (1, 1, 1, *leaf), (0, 1, 2, 3)


def _layout(model: ConvNeXt, name: str) -> Layout:
    if name == "transformers":
        special = {
            f"stages/*/blocks/*/grn/{leaf}": _image_vector for leaf in ("scale", "bias")
        }
        prefix = "convnextv2." if model.grn else "convnext."
        return Layout(_TRANSFORMERS, special=special, prefix=prefix)
    return Layout(_TIMM, pointwise=r"/(up|down)/" if name == "timm_conv" else r"(?!)")


def _factor(model: ConvNeXt, path: str) -> float:
    last = "down" if model.layer_scale is None else "layer_scale"
    return model.plan.branch if f"/blocks/{last}/" in path else 1.0


register(
    Record(
        model=ConvNeXt,
        sizes={name: VARIANTS[name] for name in NAMES},
        base="convnext_tiny",
        timm=VARIANTS,
        transformers=dict.fromkeys(("convnext", "convnextv2"), _from_transformers),
        layouts=_layouts,
        layout=_layout,
        factor=_factor,
    )
)

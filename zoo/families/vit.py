"""`ViT`: vision transformers."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mupax import optim

from ..family import Count, ImageShape, Natural, Positive
from ..layers.attention import (
    AttentionPool,
    Transformer,
    TransformerOptions,
    applied,
    branch_factor,
)
from ..layers.basic import Dense, LayerNorm, single, times
from ..layers.conv import check_images
from ..layers.rotary import grid_angles, resize_positions
from ..registry import Record, register
from ..sharding import weight
from ..weights.configs import Config
from ..weights.misfits import Misfit
from ..weights.sources import Layout

Pool = Literal["token", "mean", "norm_mean", "token_and_mean", "attention", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTOptions(TransformerOptions):
    """Options of `ViT`; see there."""

    input_shape: ImageShape = (32, 32, 3)
    out_features: Natural = 10
    patch_size: Count = 4
    drop_rest: bool = False
    pool: Pool = "token"
    class_token: bool | None = None
    class_position: bool = True
    position: bool = True
    rotary: bool = False
    rope_theta: Positive = 100.0
    registers: Natural = 0
    patch_bias: bool = True
    pre_norm: bool = False
    qkv_bias: bool = True
    key_bias: bool = True
    gated: bool = False
    layer_scale: Positive | None = None
    readout_bias: bool = True


class ViT(Transformer, options=ViTOptions):
    """Patches, a class token, blocks of attention and MLP, a readout.

    Args:
      depth: L, the number of blocks, of two residual branches each.
      input_shape: (height, width, channels) of the images. The model accepts other
        heights and widths: it interpolates its positions.
      out_features: number of classes; 0: no readout, the model returns features.
      patch_size: side of a patch.
      drop_rest: drop the pixels at the right and at the bottom that do not fill a
        patch, as in timm; False: such images are an error.
      pool: input of the readout. "token": the normalized class token. "mean": the
        normalized mean of the patches, as timm's `global_pool="avg"`. "norm_mean": the
        mean of the normalized patches, as big_vision's "gap". "token_and_mean": the
        normalized class token, concatenated with the mean of the normalized patches, as
        transformers' classifiers on DINOv2. "attention": attention pooling with a
        learned token, as in SigLIP. "none", with `out_features=0`: return every
        normalized token.
      class_token: add a class token; by default for "token", "token_and_mean" and
        "none".
      class_position: the class token has a position, as in timm's ViT and DINOv2;
        False: only patches have positions, as in DeiT-III and big_vision.
      position: add a table of learned positions.
      rotary: rotary positions of queries and keys in two dimensions, as in DINOv3.
      rope_theta: base of the rotary frequencies.
      registers: number of learned register tokens between the class token and the
        patches, as in DINOv2 with registers. They have no positions and are not pooled.
      patch_bias: add a bias to the patch embedding; False in CLIP.
      pre_norm: apply a norm before the first block, as in CLIP.
      nonlinearity: of the MLP: "gelu" (exact), "gelu_tanh" (approximate) or
        "quick_gelu" (x sigmoid(1.702 x), as in OpenAI's CLIP).
      qkv_bias: add biases to queries, keys and values.
      key_bias: add a bias to keys if queries and values have one; False in DINOv3.
      gated: use the gated MLP W2 (φ(W_gate x) · W1 x); with "silu" it is SwiGLU, as in
        DINOv2's giant.
      layer_scale: initial value of LayerScale, a trained factor for each entry of a
        branch (1e-5 in DINOv2, 1e-6 in DeiT-III); None: no LayerScale.
      readout_bias: add a bias to the readout.

    Raises:
      ValueError: a size is not a positive whole number, heads do not divide a width,
        patches do not divide the images, or a name is unknown.

    Source: Bordelon et al. 2023 (arXiv:2309.16620), App. A.3. Without scaling, the
    network of Dosovitskiy et al. 2020 (arXiv:2010.11929) as timm has it. Options:
    Touvron et al. 2021 (arXiv:2103.17239, LayerScale), Darcet et al. 2023
    (arXiv:2309.16588, registers), Radford et al. 2021 (arXiv:2103.00020, CLIP), Zhai
    et al. 2022 (arXiv:2106.04560, attention pooling), Siméoni et al. 2025
    (arXiv:2508.10104, rotary positions).

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("vit_tiny_patch4_32", depth=2, out_features=10,
      ...                    base_width=64, base_depth=1, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((5, 32, 32, 3))).shape
      (5, 10)
    """

    def build(self, options: ViTOptions, rngs: nnx.Rngs) -> None:
        pool, class_token = options.pool, options.class_token
        if pool == "none" and options.out_features != 0:
            raise ValueError(
                "pool='none' returns tokens and has no readout; pass out_features=0, "
                "or another pool"
            )
        if class_token is None:
            class_token = pool in ("token", "token_and_mean", "none")
        if pool in ("token", "token_and_mean") and not class_token:
            raise ValueError(
                f"pool={pool!r} needs class_token=True, or pool the patches"
            )
        input_shape = options.input_shape
        self.patch_size = options.patch_size
        self.drop_rest = options.drop_rest
        self.grid = self._grid(*input_shape[:2])
        self.channels = input_shape[2]
        patches = self.grid[0] * self.grid[1]
        first = int(class_token and options.class_position)
        if not options.rotary:
            options.check_unused("rope_theta", without="rotary=True")
        else:  # raises for a bad head_dim
            size = options.head_axes()["head_dim"].size
            grid_angles(self.grid, size, theta=options.rope_theta)
        fixed = {
            "patch": options.patch_size**2 * self.channels,
            "positions": patches + first,
            "registers": options.registers,
            "classes": options.out_features,
            "pooled": 2,
        }
        # Axes that no parameter has with these options.
        absent = [k for k in ("registers", "classes") if not fixed[k]]
        both = pool == "token_and_mean"
        absent += [] if both else ["pooled"]
        absent += [] if options.position else ["positions"]
        self.plan = options.plan(
            growing={"mlp": options.mlp_ratio},
            fixed={k: size for k, size in fixed.items() if k not in absent},
            axes=options.head_axes(),
        )
        self.pool = pool
        self.class_position = options.class_position and options.position
        self.rope_theta = options.rope_theta if options.rotary else None
        self.readin = Dense(
            self.plan, ("patch", "embed"), bias=options.patch_bias, rngs=rngs
        )
        # The same size as other weights of the base, 1/√N.
        gain = self.plan["embed"].base ** -0.5
        vector = self.plan.scale(("embed",), 0, False)
        rule = optim.multipliers(vector, self.plan.parametrization)
        self.multiplier = rule.forward  # of positions and tokens

        def learned(names: tuple[str, ...], exists: bool) -> nnx.Variable[Any] | None:
            if not exists:
                return None
            return self.plan.param(rngs.params, names, init="normal", gain=gain)[0]

        self.position = learned(("positions", "embed"), options.position)
        self.token = learned(("embed",), class_token)
        self.registers = learned(("registers", "embed"), self.plan.has("registers"))
        self.pre_norm = (
            LayerNorm(self.plan, "embed", epsilon=options.norm_eps)
            if options.pre_norm
            else None
        )
        block = options.block(rotary=None)  # its positions are given as angles
        self.build_blocks(block, options.depth, rngs)
        self.attention_pool = (
            AttentionPool(self.plan, block, rngs=rngs) if pool == "attention" else None
        )
        self.readout = (
            Dense(
                self.plan,
                ("pooled", "embed", "classes") if both else ("embed", "classes"),
                inputs=2 if both else 1,
                bias=options.readout_bias,
                init="zeros" if options.zero_readout else "fan_in",
                rngs=rngs,
            )
            if self.plan.has("classes")
            else None
        )
        self.build_noise(rngs)

    def __call__(
        self, x: Float[Array, "batch height width c"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch *out"]:
        """Logits of a batch of images.

        Args:
          x: images, whose sides the patches divide.
          rngs: random state of this call, instead of the model's own.

        Returns:
          Logits, of shape (batch, out_features). With `out_features=0` the features, of
          shape (batch, width), or (batch, 2 width) with `pool="token_and_mean"`. With
          `pool="none"` all tokens, of shape (batch, tokens, width): the class token,
          the registers, and the patches row by row.

        Raises:
          ValueError: images have another number of channels, or patches do not divide
            them.
        """
        x = self.features(x, rngs=rngs)
        if self.readout is not None:
            if self.pool == "token_and_mean":
                x = x.reshape(x.shape[0], 2, -1)
            x = self.readout(x) * self.plan.output
        return x.astype(single(x.dtype))

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        registers = 0 if self.registers is None else self.registers.shape[0]
        return int(self.token is not None) + registers

    def features(
        self, x: Float[Array, "batch height width c"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch *time n"]:
        """Features before the readout: the pooled, normalized output of the last block.

        Args:
          rngs: random state of this call, instead of the model's own.

        Returns:
          Features of shape (batch, width), or (batch, 2 width) with
          `pool="token_and_mean"`; with `pool="none"` those of all tokens, of
          shape (batch, tokens, width).
        """
        angles = self._angles(x)
        return self._pool(self.run_blocks(self._embed(x), rngs, angles))

    def _angles(
        self, x: Float[Array, "batch height width c"]
    ) -> Float[Array, "time half"] | None:
        """Rotation angles of the queries and keys of every token; None for none."""
        if self.rope_theta is None:
            return None
        grid, size = self._grid(*x.shape[1:3]), self.plan["head_dim"].size
        angles = grid_angles(grid, size, theta=self.rope_theta, prefix=self.prefix)
        return jnp.asarray(angles, jnp.float32)

    def _pool(self, x: Float[Array, "batch time n"]) -> Float[Array, "batch *time n"]:
        """Pool and normalize the output of the last block."""
        norm = (lambda h: h) if self.norm is None else self.norm
        first = self.prefix
        match self.pool:
            case "token":
                return norm(x[:, 0])
            case "mean":
                return norm(x[:, first:].mean(axis=1))
            case "norm_mean":
                return norm(x)[:, first:].mean(axis=1)
            case "token_and_mean":
                x = norm(x)
                return jnp.concatenate([x[:, 0], x[:, first:].mean(axis=1)], axis=1)
            case "attention":
                assert self.attention_pool is not None
                return self.attention_pool(norm(x)[:, first:])
            case _:
                return norm(x)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        p = self.patch_size
        rest = (height % p or width % p) and not self.drop_rest
        if height < p or width < p or rest:
            raise ValueError(
                f"patches of {p} x {p} do not divide an image of {height} x {width}; "
                "resize the images or choose another patch_size"
            )
        return height // p, width // p

    def _embed(
        self, x: Float[Array, "batch height width c"]
    ) -> Float[Array, "batch time n"]:
        """Embed images as tokens, with positions."""
        check_images(x, self.channels)
        batch, height, width, channels = x.shape
        p, grid = self.patch_size, self._grid(height, width)
        x = x[:, : grid[0] * p, : grid[1] * p]
        x = x.reshape(batch, grid[0], p, grid[1], p, channels).swapaxes(2, 3)
        x = self.readin(x.reshape(batch, grid[0] * grid[1], p * p * channels))
        positions, first = jnp.zeros((0, x.shape[-1]), x.dtype), 0
        if self.position is not None:
            positions = self._positions(self.position, grid).astype(x.dtype)
            first = positions.shape[0] - x.shape[1]
            x = x + positions[None, first:]
        tokens = [x]

        def put_first(learned: nnx.Variable[Any], position: Array | float) -> None:
            token = times(weight(learned, x.dtype), self.multiplier)
            token = token.reshape(-1, token.shape[-1]) + position
            tokens.insert(0, jnp.broadcast_to(token, (batch, *token.shape)))

        if self.registers is not None:
            put_first(self.registers, 0.0)
        if self.token is not None:
            put_first(self.token, positions[:first] if first else 0.0)
        x = jnp.concatenate(tokens, axis=1)
        return applied(self.pre_norm, x)

    def _positions(
        self, position: nnx.Variable[Any], grid: tuple[int, int]
    ) -> Float[Array, "positions n"]:
        """Positions of a grid of patches, after that of the class token if any."""
        table = times(weight(position, position.dtype), self.multiplier)
        if grid == self.grid:
            return table
        return resize_positions(table, self.grid, grid)


# --- Sizes: those of timm, by timm's names ---

_SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"width": 192, "depth": 12},
    "small": {"width": 384, "depth": 12},
    "medium": {"width": 512, "depth": 12},
    "base": {"width": 768, "depth": 12},
    "large": {"width": 1024, "depth": 24},
    "huge": {"width": 1280, "depth": 32, "head_dim": 80},
    "so400m": {"width": 1152, "depth": 27, "head_dim": 72, "mlp_ratio": 4304 / 1152},
    "giant": {"width": 1536, "depth": 40},
    "small_plus": {"width": 384, "depth": 12},
    "huge_plus": {"width": 1280, "depth": 32},
    "xsmall": {"width": 256, "depth": 10},
    "mediumd": {"width": 512, "depth": 20},
    "betwixt": {"width": 640, "depth": 12},
    "wee": {"width": 256, "depth": 14, "mlp_ratio": 5.0},
    "little": {"width": 320, "depth": 14, "mlp_ratio": 5.6},
    # CLIP's giant, which differs from DINOv2's.
    "giant_clip": {"width": 1408, "depth": 40, "head_dim": 88, "mlp_ratio": 48 / 11},
    "gigantic": {"width": 1664, "depth": 48, "head_dim": 104, "mlp_ratio": 64 / 13},
}
_CLIP = {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5}
_CLASSES = {"base": {"out_features": 512}, "large": {"out_features": 768}}  # CLIP's
_QUICK = (
    *(("base", 224), ("large", 224), ("large", 336), ("huge", 224), ("huge", 378)),
    ("gigantic", 224),
)
# These return features; out_features=... adds a readout.
_DINO = {"layer_scale": 1e-5, "out_features": 0}
_REGISTERS = {**_DINO, "registers": 4, "class_position": False}
_DINOV3 = {
    **_DINO,
    **{"registers": 4, "position": False, "rotary": True, "qkv_bias": False},
    # As timm pools; pool="token" is DINOv3's own.
    **{"norm_eps": 1e-5, "pool": "norm_mean", "class_token": True},
}
_SWIGLU = {"gated": True, "nonlinearity": "silu"}
_SIGLIP = {"class_token": False, "pool": "attention", "out_features": 0}
_SIGLIP_GAP = {"class_token": False, "pool": "norm_mean", "out_features": 0}
_TANH = {"nonlinearity": "gelu_tanh"}
_MEAN = {"pool": "mean", "class_token": True}


def _rows() -> Iterator[tuple[str, str, int, int, Mapping[str, Any]]]:
    """(name, size, patch, side, options) of timm's networks."""
    for size in ("tiny", "small", "base", "large", "huge"):
        for patch, side in (*((p, s) for p in (16, 32) for s in (224, 384)), (8, 224)):
            yield f"vit_{size}_patch{patch}_{side}", size, patch, side, {}
    for size in ("large", "huge"):
        yield f"vit_{size}_patch14_224", size, 14, 224, {}
    for size, side in (("tiny", 224), ("small", 224), ("base", 224), ("base", 384)):
        yield f"deit_{size}_patch16_{side}", size, 16, side, {}
    deit3 = {"layer_scale": 1e-6, "class_position": False}
    for size, patch, side in (
        *((s, 16, 224) for s in ("small", "medium", "base", "large")),
        *((s, 16, 384) for s in ("small", "base", "large")),
        ("huge", 14, 224),
    ):
        yield f"deit3_{size}_patch{patch}_{side}", size, patch, side, deit3
    for size in ("small", "base", "large", "giant"):
        more = {**_SWIGLU, "mlp_ratio": 8 / 3} if size == "giant" else {}
        start = f"vit_{size}_patch14"
        yield f"{start}_dinov2", size, 14, 518, {**_DINO, **more}
        yield f"{start}_reg4_dinov2", size, 14, 518, {**_REGISTERS, **more}
    for size, patch, side in (
        *(("base", 32, side) for side in (224, 256, 384, 448)),
        *(("base", 16, side) for side in (224, 384)),
        *(("large", 14, side) for side in (224, 336)),
        *(("huge", 14, side) for side in (224, 336, 378)),
        *(("xsmall", 16, 224), ("medium", 16, 224), ("medium", 32, 224)),
        *(("betwixt", 32, 224), ("giant", 14, 224)),
        *(("gigantic", 14, side) for side in (224, 378)),
    ):
        kind = "giant_clip" if size == "giant" else size
        clip, start = {**_CLIP, **_CLASSES.get(size, {})}, f"vit_{size}_patch{patch}"
        yield f"{start}_clip_{side}", kind, patch, side, clip
        if (size, side) in _QUICK:
            quick = {**clip, "nonlinearity": "quick_gelu"}
            yield f"{start}_clip_quickgelu_{side}", kind, patch, side, quick
    for size, patch, side, phi in (
        ("base", 32, 256, _TANH),
        *(("base", 16, side, {}) for side in (224, 256, 384, 512)),
        *(("large", 16, side, {}) for side in (256, 384)),
        ("large", 16, 512, _TANH),
        *(("so400m", 14, side, {}) for side in (224, 378, 384)),
        *(("so400m", 16, side, _TANH) for side in (256, 384, 512)),
    ):
        start = f"vit_{size}_patch{patch}_siglip"
        yield f"{start}_{side}", size, patch, side, {**_SIGLIP, **phi}
        if (size, side) != ("so400m", 224):
            yield f"{start}_gap_{side}", size, patch, side, {**_SIGLIP_GAP, **phi}
    for size, registers, side in (
        *(("wee", 1, 256), ("little", 1, 256), ("little", 4, 256), ("medium", 1, 256)),
        *(("medium", 4, 256), ("mediumd", 4, 256), ("mediumd", 4, 384)),
        *(("betwixt", 1, 256), ("betwixt", 4, 256), ("betwixt", 4, 384)),
        ("base", 4, 256),
    ):
        options = {"class_token": False, "pool": "mean", "registers": registers}
        if size != "base":
            options["layer_scale"] = 1e-5
        name = f"vit_{size}_patch16_reg{registers}_gap_{side}"
        yield name, size, 16, side, options
    for size in ("small", "small_plus", "base", "large", "huge_plus"):
        plus = _SWIGLU if "plus" in size else {}
        yield f"vit_{size}_patch16_dinov3", size, 16, 256, {**_DINOV3, **plus}
    for size in ("small", "base", "large"):
        yield f"flexivit_{size}", size, 16, 240, {"class_position": False}
    for side in (224, 336, 560):
        options = {**_MEAN, "key_bias": False}
        yield f"eva_giant_patch14_{side}", "giant_clip", 14, side, options
    for side in (196, 336):  # in timm a plain ViT
        yield f"eva_large_patch14_{side}", "large", 14, side, _MEAN
    name = "eva_giant_patch14_clip_224"
    yield name, "giant_clip", 14, 224, {"key_bias": False}
    yield "vit_base_patch16_224_miil", "base", 16, 224, {"qkv_bias": False}


def _images(patch: int, side: int) -> dict[str, Any]:
    return {"patch_size": patch, "input_shape": (side, side, 3)}


def _timm() -> dict[str, dict[str, Any]]:
    table = {}
    for name, size, patch, side, options in _rows():
        more = {"drop_rest": True} if side % patch else {}
        sizes = {**_SIZES[size], **_images(patch, side), "out_features": 1000}
        table[name] = {**sizes, **more, **options}
    return table


TIMM = _timm()
NAMES = (
    *(f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")),
    *(f"deit3_{size}_patch16_224" for size in ("small", "medium", "base", "large")),
    "deit3_huge_patch14_224",
    *(
        f"vit_{size}_patch14_{kind}"
        for size in ("small", "base", "large", "giant")
        for kind in ("dinov2", "reg4_dinov2")
    ),
    *(
        f"vit_{size}_{kind}_224"
        for size in ("base_patch32", "base_patch16", "large_patch14")
        for kind in ("clip", "clip_quickgelu")
    ),
    *(
        f"vit_{size}_patch16_dinov3"
        for size in ("small", "small_plus", "base", "large", "huge_plus")
    ),
    *("vit_base_patch16_siglip_224", "vit_large_patch16_siglip_256"),
    "vit_so400m_patch14_siglip_384",
)
_SMALL = {
    f"vit_{size}_patch{patch}_{side}": {**_SIZES[size], **_images(patch, side)}
    for size in ("tiny", "small", "base")
    for patch, side in ((4, 32), (8, 64))
}


# --- Configs of transformers ---

_VIT_BASE = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"intermediate_size": 3072, "image_size": 224, "patch_size": 16},
    **{"num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
    "qkv_bias": True,
}
_DINOV2_BASE = {**_VIT_BASE, "mlp_ratio": 4, "use_swiglu_ffn": False}
# Defaults of transformers for values that a config leaves out.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "vit": {**_VIT_BASE, "layer_norm_eps": 1e-12},
    "dinov2": _DINOV2_BASE,
    "dinov2_with_registers": {**_DINOV2_BASE, "num_register_tokens": 4},
    "dinov3_vit": {
        **_VIT_BASE,
        **{"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
        **{"layer_norm_eps": 1e-5, "num_register_tokens": 0, "rope_theta": 100.0},
        **{"use_gated_mlp": False, "key_bias": False},
    },
    "clip": {
        **_VIT_BASE,
        **{"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    },
    "siglip": {**_VIT_BASE, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": True},
}


def _from_vit(config: Config) -> dict[str, Any]:
    return {**_body(config), "out_features": config.classes(2)}


def _from_dinov2(config: Config) -> dict[str, Any]:
    full = config.over(_DEFAULTS[config.kind])
    width, ratio = full["hidden_size"], full["mlp_ratio"]
    classes = config.classes(2)
    options = {**_body(config), "layer_scale": 1.0, "mlp_ratio": float(ratio)}
    options |= {"out_features": classes}
    options |= {"pool": "token_and_mean"} if classes else {}
    if full["use_swiglu_ffn"]:
        # DINOv2 takes two thirds, rounded up to a multiple of 8.
        inner = (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8
        options |= {**_SWIGLU, "mlp_ratio": inner / width}
    if config.kind == "dinov2_with_registers":
        options["registers"] = full.whole("num_register_tokens")
    return options


def _from_dinov3(config: Config) -> dict[str, Any]:
    full = config.over(_DEFAULTS[config.kind])
    full.only(query_bias=True, value_bias=True, proj_bias=True, mlp_bias=True)
    options = {
        **_body(config),
        **{"layer_scale": 1.0, "position": False, "rotary": True, "out_features": 0},
        "rope_theta": float(full["rope_theta"]),
        "key_bias": bool(full["key_bias"]),
        "gated": bool(full["use_gated_mlp"]),
    }
    if full["num_register_tokens"]:
        options["registers"] = full.whole("num_register_tokens")
    return options


def _from_clip(config: Config) -> dict[str, Any]:
    options = {**_body(_tower(config, "clip")), "pre_norm": True, "patch_bias": False}
    if config.kind != "clip" and "WithProjection" not in config.written_by:
        return {**options, "out_features": 0}
    size = config.whole("projection_dim", 512)
    return {**options, "out_features": size, "readout_bias": False}


def _from_siglip(config: Config) -> dict[str, Any]:
    tower = _tower(config, "siglip")
    pool = "attention" if tower.get("vision_use_head", True) else "none"
    return {**_body(tower), "class_token": False, "pool": pool, "out_features": 0}


def _tower(config: Config, kind: str) -> Config:
    """The config of the image tower, with its kind."""
    given = config.given
    if config.kind == kind:
        given = config.get("vision_config") or {}
        if not isinstance(given, Mapping):
            raise ValueError(
                f"the config.json of {config.where} has no vision_config to read"
            )
    return Config({**given, "model_type": kind}, config.where)


def _body(config: Config) -> dict[str, Any]:
    """Sizes and options that all types share."""
    full = config.over(_DEFAULTS[config.kind])
    width, heads = full.whole("hidden_size"), full.whole("num_attention_heads")
    side, patch = full.whole("image_size"), full.whole("patch_size")
    if width % heads:
        raise ValueError(
            f"the config.json of {config.where} says hidden_size={width} and "
            f"num_attention_heads={heads}, which must divide it"
        )
    return {
        "width": width,
        "depth": full.whole("num_hidden_layers"),
        "head_dim": width // heads,
        "mlp_ratio": full.whole("intermediate_size") / width,
        "patch_size": patch,
        "input_shape": (side, side, full.whole("num_channels")),
        "drop_rest": side % patch > 0,
        "nonlinearity": full.activation("hidden_act", "gelu"),
        "norm_eps": float(full["layer_norm_eps"]),
        "qkv_bias": bool(full["qkv_bias"]),
    }


# --- Names of parameters elsewhere ---


def _blocks(start: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"blocks/*/{ours}": start + theirs for ours, theirs in names.items()}


def _flax(norm: str, mlp: str, attention: str, position: str) -> Layout:
    names = {
        "attention_norm": "LayerNorm_0/",
        "mlp_norm": f"{norm}/",
        "mlp/up": f"{mlp}/Dense_0/",
        "mlp/down": f"{mlp}/Dense_1/",
        **{
            f"attention/{name}": f"{attention}/{name}/"
            for name in ("query", "key", "value", "out")
        },
    }
    modules = {
        "readin": "embedding/",
        "position": position,
        "token": "cls",
        "norm": "Transformer/encoder_norm/",
        "readout": "head/",
        **_blocks("Transformer/encoderblock_{}/", names),
    }
    same = {name: name for name in ("kernel", "scale", "bias")}
    return Layout(modules, same, "ours", heads=True)


# ViT and DINOv2 of transformers, as their files name them.
_EMBEDDINGS = {
    "readin": "embeddings.patch_embeddings.projection.",
    "position": "embeddings.position_embeddings",
    "token": "embeddings.cls_token",
    "norm": "layernorm.",
    "readout": "classifier.",
}
_SELF_ATTENTION = {
    **{
        f"attention/{name}": f"attention.attention.{name}."
        for name in ("query", "key", "value")
    },
    "attention/out": "attention.output.dense.",
}
_LAYER_SCALES = {
    "attention_scale/scale": "layer_scale1.lambda1",
    "mlp_scale/scale": "layer_scale2.lambda1",
}
# CLIP and SigLIP of transformers.
_TOWER = {
    "position": "embeddings.position_embedding.weight",
    "readin": "embeddings.patch_embedding.",
    "norm": "post_layernorm.",
    **_blocks(
        "encoder.layers.{}.",
        {
            "attention_norm": "layer_norm1.",
            "attention/query": "self_attn.q_proj.",
            "attention/key": "self_attn.k_proj.",
            "attention/value": "self_attn.v_proj.",
            "attention/out": "self_attn.out_proj.",
            "mlp_norm": "layer_norm2.",
            "mlp/up": "mlp.fc1.",
            "mlp/down": "mlp.fc2.",
        },
    ),
}

LAYOUTS = {
    "timm": Layout(
        {
            "readin": "patch_embed.proj.",
            "position": "pos_embed",
            "token": "cls_token",
            "registers": "reg_token",
            "pre_norm": "norm_pre.",
            "norm": "norm.",
            "attention_pool/token": "attn_pool.latent",
            "attention_pool/attention/query": "attn_pool.q.",
            "attention_pool/attention/kv": "attn_pool.kv.",
            "attention_pool/attention/out": "attn_pool.proj.",
            "attention_pool/norm": "attn_pool.norm.",
            "attention_pool/mlp/up": "attn_pool.mlp.fc1.",
            "attention_pool/mlp/down": "attn_pool.mlp.fc2.",
            "readout": "head.",
            **_blocks(
                "blocks.{}.",
                {
                    "attention_norm": "norm1.",
                    "attention/qkv": "attn.qkv.",
                    "attention/out": "attn.proj.",
                    "attention_scale/scale": "ls1.gamma",
                    "mlp_norm": "norm2.",
                    "mlp/up": "mlp.fc1.",
                    "mlp/gate_up": "mlp.fc1.",
                    "mlp/down": "mlp.fc2.",
                    "mlp_scale/scale": "ls2.gamma",
                },
            ),
        }
    ),
    "torchvision": Layout(
        {
            "readin": "conv_proj.",
            "position": "encoder.pos_embedding",
            "token": "class_token",
            "norm": "encoder.ln.",
            "readout": "heads.head.",
            **_blocks(
                "encoder.layers.encoder_layer_{}.",
                {
                    "attention_norm": "ln_1.",
                    "attention/qkv": "self_attention.in_proj_",
                    "attention/out": "self_attention.out_proj.",
                    "mlp_norm": "ln_2.",
                    "mlp/up": "mlp.0.",
                    "mlp/down": "mlp.3.",
                },
            ),
        }
    ),
    "big_vision": _flax(
        "LayerNorm_1", "MlpBlock_0", "MultiHeadDotProductAttention_0", "pos_embedding"
    ),
    "augreg": _flax(
        "LayerNorm_2",
        "MlpBlock_3",
        "MultiHeadDotProductAttention_1",
        "Transformer/posembed_input/pos_embedding",
    ),
    "transformers_vit": Layout(
        {
            **_EMBEDDINGS,
            **_blocks(
                "encoder.layer.{}.",
                {
                    **_SELF_ATTENTION,
                    "attention_norm": "layernorm_before.",
                    "mlp_norm": "layernorm_after.",
                    "mlp/up": "intermediate.dense.",
                    "mlp/down": "output.dense.",
                },
            ),
        },
        prefix="vit.",
    ),
    "transformers_dinov2": Layout(
        {
            **_EMBEDDINGS,
            "registers": "embeddings.register_tokens",
            **_blocks(
                "encoder.layer.{}.",
                {
                    **_SELF_ATTENTION,
                    **_LAYER_SCALES,
                    "attention_norm": "norm1.",
                    "mlp_norm": "norm2.",
                    "mlp/up": "mlp.fc1.",
                    "mlp/gate_up": "mlp.weights_in.",
                    "mlp/down": "mlp.fc2.",
                },
            ),
        },
        prefix="dinov2.",
    ),
    "transformers_clip": Layout(
        {
            **_TOWER,
            "token": "embeddings.class_embedding",
            # Misspelled in transformers.
            "pre_norm": "pre_layrnorm.",
            "readout": "visual_projection.",
        },
        prefix="vision_model.",
    ),
    "transformers_siglip": Layout(
        {
            **_TOWER,
            "attention_pool/token": "head.probe",
            "attention_pool/attention/qkv": "head.attention.in_proj_",
            "attention_pool/attention/out": "head.attention.out_proj.",
            "attention_pool/norm": "head.layernorm.",
            "attention_pool/mlp/up": "head.mlp.fc1.",
            "attention_pool/mlp/down": "head.mlp.fc2.",
        },
        prefix="vision_model.",
    ),
    "transformers_dinov3": Layout(
        {
            "readin": "embeddings.patch_embeddings.",
            "token": "embeddings.cls_token",
            "registers": "embeddings.register_tokens",
            "norm": "norm.",
            **_blocks(
                "layer.{}.",
                {
                    **_LAYER_SCALES,
                    "attention_norm": "norm1.",
                    "attention/query": "attention.q_proj.",
                    "attention/key": "attention.k_proj.",
                    "attention/value": "attention.v_proj.",
                    "attention/out": "attention.o_proj.",
                    "mlp_norm": "norm2.",
                    "mlp/gate": "mlp.gate_proj.",
                    "mlp/up": "mlp.up_proj.",
                    "mlp/down": "mlp.down_proj.",
                },
            ),
        }
    ),
}
# Keys outside of the image tower, or used in pretraining only.
_UNUSED = {
    "transformers_vit": r"(^|\.)pooler\.|mask_token$",
    "transformers_dinov2": r"mask_token$",
    "transformers_dinov3": r"mask_token$",
    "transformers_clip": r"^text_model\.|^text_projection\.|^logit_|position_ids$",
    "transformers_siglip": r"^text_model\.|^logit_|position_ids$",
}


def _unused(model: ViT, name: str) -> re.Pattern[str]:
    """Keys of text towers, of pretraining, and of a head or pooling that is absent."""
    patterns = [_UNUSED[name]] if name in _UNUSED else []
    modules = LAYOUTS[name].modules
    if model.readout is None and "readout" in modules:
        patterns.append("^" + re.escape(modules["readout"]) + "(weight|bias|kernel)$")
    if model.pool == "none":
        pool = [name for ours, name in modules.items() if ours.startswith("attention_")]
        patterns += [r"(^|\.)" + re.escape(name) for name in pool]
    return re.compile("|".join(patterns) or r"(?!)")


def _layout(model: ViT, name: str) -> Layout:
    """The layout of a ViT.

    big_vision's networks were trained with "gelu_tanh" and pool="norm_mean"; timm reads
    those of augreg with "gelu".
    """
    chosen, gated = LAYOUTS[name], model.options.gated
    modules, prefix = dict(chosen.modules), chosen.prefix
    if name == "timm" and (model.rope_theta is not None or not model.options.key_bias):
        modules |= _eva_modules(gated)
    elif name == "transformers_dinov3":
        pass
    elif gated:
        modules.pop("blocks/*/mlp/up", None)
        if name == "transformers_dinov2":
            modules["blocks/*/mlp/down"] = "encoder.layer.{}.mlp.weights_out."
    else:
        modules.pop("blocks/*/mlp/gate_up", None)
    if name == "timm" and model.pool == "mean":
        modules["norm"] = "fc_norm."
    if prefix == "dinov2." and model.registers is not None:
        prefix = "dinov2_with_registers."
    if model.readout is None and prefix[:4] in ("vit.", "dino"):
        prefix = ""  # of a model without a head
    special = _special(model, chosen, name)
    return chosen._replace(modules=modules, special=special, prefix=prefix)


def _eva_modules(gated: bool) -> dict[str, str]:
    """Names in timm's class Eva (EVA, DINOv3) that differ from those of other ViTs."""
    names = {
        "attention_scale/scale": "gamma_1",
        "mlp_scale/scale": "gamma_2",
        "attention/query/bias": "attn.q_bias",
        "attention/value/bias": "attn.v_bias",
        **({"mlp/gate": "mlp.fc1_g.", "mlp/up": "mlp.fc1_x."} if gated else {}),
    }
    return _blocks("blocks.{}.", names)


def _check_positions(model: ViT, name: str) -> None:
    is_rotary, needed = model.rope_theta is not None, name == "transformers_dinov3"
    if name != "timm" and is_rotary != needed:
        raise Misfit(
            f"the layout {name!r} is for networks {'with' if needed else 'without'} "
            "rotary positions; pass ",
            {"rotary": str(needed), "position": str(not needed)},
        )


def _special(
    model: ViT, layout: Layout, name: str
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """{path: (shape in the file, order of axes)} of what is not a matrix or vector."""
    p, c, n = model.patch_size, model.channels, model.plan["embed"].size
    patches = (n, c, p, p), (2, 3, 1, 0)
    token = (1, 1, n), (0, 1, 2)
    positions = (0, n) if model.position is None else model.position.shape
    table = (1, *positions), (0, 1, 2)
    if layout.kernel == "ours":
        patches = (p, p, c, n), (0, 1, 2, 3)
    tower = name in ("transformers_clip", "transformers_siglip")
    registers = 0 if model.registers is None else model.registers.shape[0]
    return {
        "readin/kernel": patches,
        "position": (positions, (0, 1)) if tower else table,
        "token": ((n,), (0,)) if tower else token,
        "registers": ((1, registers, n), (0, 1, 2)),
        "attention_pool/token": token,
    }


register(
    Record(
        model=ViT,
        sizes={"vit": {}, **_SMALL, **{name: TIMM[name] for name in NAMES}},
        timm=TIMM,
        transformers={
            "vit": _from_vit,
            "dinov2": _from_dinov2,
            "dinov2_with_registers": _from_dinov2,
            "dinov3_vit": _from_dinov3,
            "clip": _from_clip,
            "clip_vision_model": _from_clip,
            "siglip": _from_siglip,
            "siglip_vision_model": _from_siglip,
        },
        layouts=lambda model: tuple(LAYOUTS),
        layout=_layout,
        check=_check_positions,
        unused=_unused,
        factor=branch_factor,
    )
)

"""`ViT`: vision transformers."""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mupax import optim

from ..layers.attention import AttentionPool, Transformer, TransformerOptions
from ..layers.basic import Dense, LayerNorm, single, times
from ..layers.conv import check_images
from ..layers.rotary import grid_angles
from ..registry import register
from ..sharding import weight

Pool = Literal["token", "mean", "norm_mean", "token_and_mean", "attention", "none"]
POOLS = ("token", "mean", "norm_mean", "token_and_mean", "attention", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTOptions(TransformerOptions):
    """Options of `ViT`; see there."""

    input_shape: tuple[int, ...] = (32, 32, 3)
    out_features: int = 10
    patch_size: int = 4
    drop_rest: bool = False
    pool: Pool = "token"
    class_token: bool | None = None
    class_position: bool = True
    position: bool = True
    rotary: bool | Literal["index"] = False
    rope_theta: float = 100.0
    rope_grid: int = 16
    registers: int = 0
    patch_bias: bool = True
    pre_norm: bool = False
    qkv_bias: bool = True
    key_bias: bool = True
    gated: bool = False
    inner_norm: Literal["", "mlp", "both"] = ""
    layer_scale: float | None = None
    readout_bias: bool = True


@register("vit")
class ViT(Transformer, options=ViTOptions):
    """Patches, a class token, blocks of attention and MLP, a readout.

    Args:
      width: n, of the residual stream.
      depth: L, the number of blocks, of two residual branches each.
      base_width: the width that you tuned; None for `width`.
      base_depth: the depth that you tuned; None for `depth`. M = depth / base_depth.
      parametrization: a name, or what `optim.parametrization` returns; "completep" by
        default.
      branch_multiplier: a, the factor of each residual branch at the base depth.
      input_shape: (height, width, channels) of the images. The model accepts other
        heights and widths: it interpolates its positions.
      out_features: number of classes; 0: no readout, the model returns features.
      patch_size: side of a patch.
      drop_rest: drop the pixels at the right and at the bottom that do not fill a
        patch, as in timm; False: such images are an error.
      heads: number of heads, constant over widths: the size of a head grows. Pass this
        or `head_dim`.
      head_dim: size of a head, constant over widths: the number of heads grows. 64 if
        neither `heads` nor `head_dim` is given.
      mlp_ratio: width of the MLP, as a multiple of `width`.
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
      rotary: rotary positions of queries and keys in two dimensions. True: coordinates
        in [-1, 1], as in DINOv3. "index": numbers of rows and columns, as in EVA-02,
        with rotation of neighbouring entries of a head.
      rope_theta: base of the rotary frequencies.
      rope_grid: with rotary="index", the number of patches per side for which positions
        are integers; other grids are stretched to the same length.
      registers: number of learned register tokens between the class token and the
        patches, as in DINOv2 with registers. They have no positions and are not pooled.
      patch_bias: add a bias to the patch embedding; False in CLIP.
      pre_norm: apply a norm before the first block, as in CLIP.
      layer_norm: normalize before each branch (pre-LN) and after the last block; False:
        no norms.
      norm_eps: constant added to the variance.
      nonlinearity: of the MLP: "gelu" (exact), "gelu_tanh" (approximate) or
        "quick_gelu" (x sigmoid(1.702 x), as in OpenAI's CLIP).
      qkv_bias: add biases to queries, keys and values.
      key_bias: add a bias to keys if queries and values have one; False in DINOv3.
      gated: use the gated MLP W2 (φ(W_gate x) · W1 x); with "silu" it is SwiGLU, as in
        DINOv2's giant.
      inner_norm: "mlp": apply a norm before the last kernel of the MLP, as in EVA-02;
        "both": also before the last kernel of attention, as in EVA-02's CLIP; "": none.
      layer_scale: initial value of LayerScale, a trained factor for each entry of a
        branch (1e-5 in DINOv2, 1e-6 in DeiT-III); None: no LayerScale.
      readout_bias: add a bias to the readout.
      zero_queries: initialize queries with zeros. Keys then have no gradient in the
        first step.
      zero_readout: initialize the readout with zeros.
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
      ValueError: a size is not a positive whole number, heads do not divide a width,
        patches do not divide the images, or a name is unknown.

    Source: Bordelon et al. 2023 (arXiv:2309.16620), App. A.3. Without scaling, the
    network of Dosovitskiy et al. 2020 (arXiv:2010.11929) as timm has it. Options:
    Touvron et al. 2021 (arXiv:2103.17239, LayerScale), Darcet et al. 2023
    (arXiv:2309.16588, registers), Radford et al. 2021 (arXiv:2103.00020, CLIP), Zhai
    et al. 2022 (arXiv:2106.04560, attention pooling), Fang et al. 2023
    (arXiv:2303.11331, EVA-02).

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
        if pool not in POOLS:
            names = ", ".join(map(repr, POOLS))
            raise ValueError(f"pool={pool!r} must be one of {names}")
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
        if len(input_shape) != 3:
            raise ValueError(
                f"input_shape={input_shape} must be (height, width, channels)"
            )
        self.patch_size = options.patch_size
        self.drop_rest = options.drop_rest
        self.grid = self._grid(*input_shape[:2])
        self.channels = input_shape[2]
        patches = self.grid[0] * self.grid[1]
        first = int(class_token and options.class_position)
        if options.rotary not in (False, True, "index"):
            raise ValueError(
                f"rotary={options.rotary!r} must be True, 'index', or False for none"
            )
        if options.rotary != "index":
            options.check_unused("rope_grid", without="rotary='index'")
        self.rope_grid = options.rope_grid if options.rotary == "index" else None
        if not options.rotary:
            options.check_unused("rope_theta", without="rotary=True")
        else:  # raises for a bad rope_theta or head_dim
            size = options.head_axes()["head_dim"].size
            theta, count = options.rope_theta, self.rope_grid
            grid_angles(self.grid, size, theta=theta, count=count)
        fixed = {
            "patch": options.patch_size**2 * self.channels,
            "positions": patches + first,
            "registers": options.registers,
            "classes": options.out_features,
            "pooled": 2,
        }
        # Axes that no parameter has with these options.
        absent = [k for k in ("registers", "classes") if _is_zero(fixed[k])]
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
        self.position = (
            self.plan.param(
                rngs.params, ("positions", "embed"), inputs=0, init="normal", gain=gain
            )[0]
            if options.position
            else None
        )
        self.token = (
            self.plan.param(
                rngs.params, ("embed",), inputs=0, init="normal", gain=gain
            )[0]
            if class_token
            else None
        )
        self.registers = (
            self.plan.param(
                rngs.params, ("registers", "embed"), inputs=0, init="normal", gain=gain
            )[0]
            if self.plan.has("registers")
            else None
        )
        self.pre_norm = (
            LayerNorm(self.plan, "embed", epsilon=options.norm_eps)
            if options.pre_norm
            else None
        )
        block = dataclasses.replace(
            options.block(qkv_bias=options.qkv_bias),
            key_bias=options.key_bias,
            neighbours=options.rotary == "index",
            gated=options.gated,
            inner_norm=options.inner_norm,
            layer_scale=options.layer_scale,
        )
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
          x: images, as in a call.
          rngs: random state of this call, instead of the model's own.

        Returns:
          Features of shape (batch, width), or (batch, 2 width) with
          `pool="token_and_mean"`; with `pool="none"` those of all tokens, of
          shape (batch, tokens, width).
        """
        angles = self._angles(x)
        return self._pool(self.run_blocks(self._embed(x), rngs, angles))

    def intermediates(
        self,
        x: Float[Array, "batch height width c"],
        blocks: Sequence[int] | None = None,
        *,
        norm: bool = False,
    ) -> tuple[Float[Array, "batch time n"], ...]:
        """The residual stream after some of the blocks, without noise.

        Args:
          x: images, as in a call.
          blocks: indices of blocks, from 0, or negative from the end; None for all.
          norm: apply the last norm to each.

        Returns:
          For each block an array of shape (batch, tokens, width): the class token and
          the registers, if there are any, then the patches row by row.

        Raises:
          ValueError: an index is out of range.
        """
        return self._intermediates(self._embed(x), blocks, norm, self._angles(x))

    def _angles(
        self, x: Float[Array, "batch height width c"]
    ) -> Float[Array, "time half"] | None:
        """Rotation angles of the queries and keys of every token; None for none."""
        if self.rope_theta is None:
            return None
        grid, size = self._grid(*x.shape[1:3]), self.plan["head_dim"].size
        angles = grid_angles(
            grid,
            size,
            theta=self.rope_theta,
            prefix=self.prefix,
            count=self.rope_grid,
        )
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
        rest = p >= 1 and (height % p or width % p) and not self.drop_rest
        if p < 1 or height < p or width < p or rest:
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

        def put_first(learned: nnx.Variable, position: Array | float) -> None:
            token = times(weight(learned, x.dtype), self.multiplier)
            token = token.reshape(-1, token.shape[-1]) + position
            tokens.insert(0, jnp.broadcast_to(token, (batch, *token.shape)))

        if self.registers is not None:
            put_first(self.registers, 0.0)
        if self.token is not None:
            put_first(self.token, positions[:first] if first else 0.0)
        x = jnp.concatenate(tokens, axis=1)
        return x if self.pre_norm is None else self.pre_norm(x)

    def _positions(
        self, position: nnx.Variable, grid: tuple[int, int]
    ) -> Float[Array, "positions n"]:
        """Positions of a grid of patches, after that of the class token if any."""
        table = times(weight(position, position.dtype), self.multiplier)
        if grid == self.grid:
            return table
        return resize_positions(table, self.grid, grid)


def _is_zero(size: Any) -> bool:
    """Whether a size is the int 0; False and 0.0 are mistakes."""
    return isinstance(size, int) and not isinstance(size, bool) and size == 0


def resize_positions(
    table: Float[Array, "positions n"],
    before: tuple[int, int],
    after: tuple[int, int],
) -> Float[Array, "positions2 n"]:
    """Interpolate a table of positions from one grid of patches to another.

    Args:
      table: the position of the class token, if it has one, and those of the patches.
      before: (rows, columns) of the table's patches.
      after: (rows, columns) of the result's.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.2; cubic, as timm.
    """
    n = table.shape[-1]
    first = table.shape[0] - before[0] * before[1]
    patches = table[first:].reshape(*before, n)
    patches = jax.image.resize(patches, (*after, n), "cubic").reshape(-1, n)
    return jnp.concatenate([table[:first], patches])


SIZES: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        "tiny": {"width": 192, "depth": 12},
        "small": {"width": 384, "depth": 12},
        "medium": {"width": 512, "depth": 12},
        "base": {"width": 768, "depth": 12},
        "large": {"width": 1024, "depth": 24},
        "huge": {"width": 1280, "depth": 32, "head_dim": 80},
        "so400m": {
            "width": 1152,
            "depth": 27,
            "head_dim": 72,
            "mlp_ratio": 4304 / 1152,
        },
        "giant": {"width": 1536, "depth": 40},
        "small_plus": {"width": 384, "depth": 12},
        "huge_plus": {"width": 1280, "depth": 32},
    }
)


def _images(patch: int, side: int) -> dict[str, Any]:
    return {"patch_size": patch, "input_shape": (side, side, 3)}


for _size in ("tiny", "small", "base", "large"):
    register(
        f"vit_{_size}_patch16_224",
        **SIZES[_size],
        **_images(16, 224),
        out_features=1000,
    )(ViT)
for _size in ("small", "medium", "base", "large", "huge"):
    _patch = 14 if _size == "huge" else 16
    register(
        f"deit3_{_size}_patch{_patch}_224",
        **SIZES[_size],
        **_images(_patch, 224),
        out_features=1000,
        class_position=False,
        layer_scale=1e-6,
    )(ViT)
# These return features; out_features=... adds a readout.
for _size in ("small", "base", "large", "giant"):
    _giant = {"gated": True, "nonlinearity": "silu", "mlp_ratio": 8 / 3}
    _dinov2 = {
        **SIZES[_size],
        **_images(14, 518),
        **(_giant if _size == "giant" else {}),
        "out_features": 0,
        "layer_scale": 1e-5,
    }
    register(f"vit_{_size}_patch14_dinov2", **_dinov2)(ViT)
    register(
        f"vit_{_size}_patch14_reg4_dinov2",
        **_dinov2,
        registers=4,
        class_position=False,
    )(ViT)
for _size in ("small", "small_plus", "base", "large", "huge_plus"):
    _plus = {"gated": True, "nonlinearity": "silu"}
    register(
        f"vit_{_size}_patch16_dinov3",
        **SIZES[_size],
        **_images(16, 256),
        **(_plus if _size.endswith("plus") else {}),
        out_features=0,
        # As timm pools; pool="token" is DINOv3's own.
        pool="norm_mean",
        class_token=True,
        registers=4,
        position=False,
        rotary=True,
        qkv_bias=False,
        layer_scale=1e-5,
        norm_eps=1e-5,
    )(ViT)
# Options of EVA-02; base and large also have a norm inside of the MLP.
EVA02: Mapping[str, Any] = types.MappingProxyType(
    {
        "pool": "mean",
        "class_token": True,
        "key_bias": False,
        "rotary": "index",
        "rope_theta": 10000.0,
        "gated": True,
        "nonlinearity": "silu",
    }
)


def eva02_size(size: str) -> dict[str, Any]:
    """Options of a size of EVA-02. The width of its MLP is 8/3 of `width`, rounded."""
    width = SIZES[size]["width"]
    inner = "mlp" if size in ("base", "large") else ""
    ratio = int(width * 4 * 2 / 3) / width
    return {**SIZES[size], "mlp_ratio": ratio, "inner_norm": inner}


for _size, _side in (("tiny", 336), ("small", 336), ("base", 448), ("large", 448)):
    register(
        f"eva02_{_size}_patch14_{_side}",
        **eva02_size(_size),
        **_images(14, _side),
        **EVA02,
        out_features=1000,
    )(ViT)
for _size, _patch, _classes in (
    ("base", 32, 512),
    ("base", 16, 512),
    ("large", 14, 768),
):
    for _name, _phi in (("clip", "gelu"), ("clip_quickgelu", "quick_gelu")):
        register(
            f"vit_{_size}_patch{_patch}_{_name}_224",
            **SIZES[_size],
            **_images(_patch, 224),
            out_features=_classes,
            pre_norm=True,
            patch_bias=False,
            norm_eps=1e-5,
            nonlinearity=_phi,
        )(ViT)
for _size, _patch, _side in (
    ("base", 16, 224),
    ("large", 16, 256),
    ("so400m", 14, 384),
):
    register(
        f"vit_{_size}_patch{_patch}_siglip_{_side}",
        **SIZES[_size],
        **_images(_patch, _side),
        out_features=0,
        class_token=False,
        pool="attention",
        drop_rest=_side % _patch > 0,
    )(ViT)
for _size in ("tiny", "small", "base"):
    for _patch, _side in ((4, 32), (8, 64)):
        register(
            f"vit_{_size}_patch{_patch}_{_side}",
            **SIZES[_size],
            **_images(_patch, _side),
        )(ViT)

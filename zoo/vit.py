"""The vision transformer: images cut into patches, a class token or pooling."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .attention import Transformer, TransformerOptions
from .layers import Dense, single, times
from .registry import register
from .sharding import weight
from .sources import FLAX_LEAVES, TORCH_LEAVES, Layout, Leaf, Source, sources

Pool = Literal["token", "mean", "norm_mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTOptions(TransformerOptions):
    """Options of `ViT`, which describes them."""

    input_shape: tuple[int, ...] = (32, 32, 3)
    out_features: int = 10
    patch_size: int = 4
    pool: Pool = "token"
    class_token: bool | None = None
    class_position: bool = True
    qkv_bias: bool = True


@register("vit")
class ViT(Transformer, options=ViTOptions):
    """Patches, a class token, blocks of attention and MLP, a readout.

    Args:
      width: n, of the residual stream.
      depth: L, the number of blocks, of two residual branches each.
      base_width: the width that was tuned; None for `width`.
      base_depth: the depth that was tuned; None for `depth`. M = depth / base_depth.
      parametrization: a name, or what `optim.parametrization` returns; "completep" by
        default.
      branch_multiplier: a.
      input_shape: (height, width, channels) of the images. The model takes other
        heights and widths too: it interpolates its positions.
      out_features: number of classes.
      patch_size: side of a patch.
      heads: number of heads, where it is the same at every width and their size
        grows. Give this or `head_dim`.
      head_dim: size of a head, where it is the same at every width and their number
        grows; 64 if neither is given.
      mlp_ratio: width of the MLP, as a multiple of `width`.
      pool: what the readout sees. "token": the norm of the class token. "mean": the
        norm of the patches' mean, as timm's `global_pool="avg"`. "norm_mean": the
        mean of their norms, as big_vision's "gap".
      class_token: whether there is one; by default if it is pooled.
      class_position: whether it has a position of its own, as in timm; big_vision
        adds positions to patches only.
      layer_norm: pre-LN; False leaves out every norm.
      norm_eps: added to the variance.
      nonlinearity: of the MLP; "gelu" is exact, "gelu_tanh" the approximation.
      qkv_bias: whether queries, keys and values have biases.
      zero_queries: queries start at zero. Then keys have no gradient at first.
      zero_readout: the readout starts at zero.
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
        not divide, images that patches do not divide, or an unknown name.

    Source: Bordelon et al. 2023 (arXiv:2309.16620), App. A.3. Without scaling, the
    network of Dosovitskiy et al. 2020 (arXiv:2010.11929) as timm has it.

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
        if pool not in ("token", "mean", "norm_mean"):
            raise ValueError(f"pool={pool!r} must be 'token', 'mean' or 'norm_mean'")
        if class_token is None:
            class_token = pool == "token"
        if pool == "token" and not class_token:
            raise ValueError("pool='token' needs class_token=True, or pool the patches")
        input_shape = options.input_shape
        if len(input_shape) != 3:
            raise ValueError(
                f"input_shape={input_shape} must be (height, width, channels)"
            )
        self.patch_size = options.patch_size
        self.grid = self._grid(*input_shape[:2])
        self.channels = input_shape[2]
        patches = self.grid[0] * self.grid[1]
        first = int(class_token and options.class_position)
        self.plan = options.plan(
            growing={"mlp": options.mlp_ratio},
            fixed={
                "patch": options.patch_size**2 * self.channels,
                "positions": patches + first,
                "classes": options.out_features,
            },
            axes=options.head_axes(),
        )
        self.pool = pool
        self.class_position = options.class_position
        self.readin = Dense(self.plan, ("patch", "embed"), bias=True, rngs=rngs)
        # As large as the other weights of the base: 1/√N.
        gain = self.plan["embed"].base ** -0.5
        self.position, self.multiplier = self.plan.param(
            rngs.params, ("positions", "embed"), inputs=0, init="normal", gain=gain
        )
        self.token = (
            self.plan.param(
                rngs.params, ("embed",), inputs=0, init="normal", gain=gain
            )[0]
            if class_token
            else None
        )
        self.build_blocks(options.block(qkv_bias=options.qkv_bias), options.depth, rngs)
        self.readout = Dense(
            self.plan,
            ("embed", "classes"),
            bias=True,
            init="zeros" if options.zero_readout else "fan_in",
            rngs=rngs,
        )
        self.build_noise(rngs)

    def __call__(
        self, x: Float[Array, "batch height width c"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch out"]:
        """Logits of a batch of images.

        Args:
          x: images, whose sides the patches divide.
          rngs: random state of this call, in place of the model's own.

        Raises:
          ValueError: images of another number of channels, or that patches do not
            divide.
        """
        x = self.run_blocks(self._embed(x), rngs)
        norm = (lambda h: h) if self.norm is None else self.norm
        first = 0 if self.token is None else 1
        match self.pool:
            case "token":
                x = norm(x[:, 0])
            case "mean":
                x = norm(x[:, first:].mean(axis=1))
            case "norm_mean":
                x = norm(x)[:, first:].mean(axis=1)
        logits = self.readout(x) * self.plan.output
        return logits.astype(single(logits.dtype))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        p = self.patch_size
        if p < 1 or height % p or width % p or not height or not width:
            raise ValueError(
                f"patches of {p} x {p} do not divide an image of {height} x {width}; "
                "resize the images or choose another patch_size"
            )
        return height // p, width // p

    def _embed(
        self, x: Float[Array, "batch height width c"]
    ) -> Float[Array, "batch time n"]:
        """Tokens of an image, with their positions."""
        batch, height, width, channels = x.shape
        if channels != self.channels:
            raise ValueError(
                f"images have {channels} channels, the model was made for "
                f"{self.channels}; pass input_shape=(height, width, {channels})"
            )
        p, grid = self.patch_size, self._grid(height, width)
        x = x.reshape(batch, grid[0], p, grid[1], p, channels).swapaxes(2, 3)
        x = self.readin(x.reshape(batch, grid[0] * grid[1], p * p * channels))
        positions = self._positions(grid).astype(x.dtype)
        if self.token is None:
            return x + positions[None]
        token = times(weight(self.token, x.dtype), self.multiplier)
        token = jnp.broadcast_to(token, (batch, 1, x.shape[-1]))
        if self.class_position:
            return jnp.concatenate([token, x], axis=1) + positions[None]
        return jnp.concatenate([token, x + positions[None]], axis=1)

    def _positions(self, grid: tuple[int, int]) -> Float[Array, "positions n"]:
        """The positions of a grid of patches, that of the class token in front."""
        table = times(weight(self.position, self.position.dtype), self.multiplier)
        if grid == self.grid:
            return table
        return resize_positions(table, self.grid, grid)


def resize_positions(
    table: Float[Array, "positions n"],
    before: tuple[int, int],
    after: tuple[int, int],
) -> Float[Array, "positions2 n"]:
    """A table of positions interpolated from one grid of patches to another.

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


SIZES = {
    "tiny": {"width": 192, "depth": 12},
    "small": {"width": 384, "depth": 12},
    "base": {"width": 768, "depth": 12},
    "large": {"width": 1024, "depth": 24},
}
for _size, _shape in SIZES.items():
    register(
        f"vit_{_size}_patch16_224",
        **_shape,
        input_shape=(224, 224, 3),
        patch_size=16,
        out_features=1000,
    )(ViT)
for _size in ("tiny", "small", "base"):
    for _patch, _side in ((4, 32), (8, 64)):
        register(
            f"vit_{_size}_patch{_patch}_{_side}",
            **SIZES[_size],
            input_shape=(_side, _side, 3),
            patch_size=_patch,
        )(ViT)

_FLAX_BLOCK = "Transformer/encoderblock_{}/"


def _flax_layout(norm: str, mlp: str, attention: str, position: str) -> Layout:
    modules = {
        "readin": "embedding/",
        "position": position,
        "token": "cls",
        "blocks/attention_norm": f"{_FLAX_BLOCK}LayerNorm_0/",
        "blocks/mlp_norm": f"{_FLAX_BLOCK}{norm}/",
        "blocks/mlp/up": f"{_FLAX_BLOCK}{mlp}/Dense_0/",
        "blocks/mlp/down": f"{_FLAX_BLOCK}{mlp}/Dense_1/",
        "norm": "Transformer/encoder_norm/",
        "readout": "head/",
    }
    for name in ("query", "key", "value", "out"):
        modules[f"blocks/attention/{name}"] = f"{_FLAX_BLOCK}{attention}/{name}/"
    return Layout(modules, FLAX_LEAVES, "ours")


LAYOUTS = {
    "timm": Layout(
        {
            "readin": "patch_embed.proj.",
            "position": "pos_embed",
            "token": "cls_token",
            "blocks/attention_norm": "blocks.{}.norm1.",
            "blocks/attention/qkv": "blocks.{}.attn.qkv.",
            "blocks/attention/out": "blocks.{}.attn.proj.",
            "blocks/mlp_norm": "blocks.{}.norm2.",
            "blocks/mlp/up": "blocks.{}.mlp.fc1.",
            "blocks/mlp/down": "blocks.{}.mlp.fc2.",
            "norm": "norm.",
            "readout": "head.",
        },
        TORCH_LEAVES,
        "out_in",
    ),
    "torchvision": Layout(
        {
            "readin": "conv_proj.",
            "position": "encoder.pos_embedding",
            "token": "class_token",
            "blocks/attention_norm": "encoder.layers.encoder_layer_{}.ln_1.",
            "blocks/attention/qkv": (
                "encoder.layers.encoder_layer_{}.self_attention.in_proj_"
            ),
            "blocks/attention/out": (
                "encoder.layers.encoder_layer_{}.self_attention.out_proj."
            ),
            "blocks/mlp_norm": "encoder.layers.encoder_layer_{}.ln_2.",
            "blocks/mlp/up": "encoder.layers.encoder_layer_{}.mlp.0.",
            "blocks/mlp/down": "encoder.layers.encoder_layer_{}.mlp.3.",
            "norm": "encoder.ln.",
            "readout": "heads.head.",
        },
        TORCH_LEAVES,
        "out_in",
    ),
    "big_vision": _flax_layout(
        "LayerNorm_1", "MlpBlock_0", "MultiHeadDotProductAttention_0", "pos_embedding"
    ),
    "augreg": _flax_layout(
        "LayerNorm_2",
        "MlpBlock_3",
        "MultiHeadDotProductAttention_1",
        "Transformer/posembed_input/pos_embedding",
    ),
}


def vit_names(
    model: ViT, layout: str = "timm", *, prefix: str = ""
) -> dict[Leaf, Source]:
    """Where each parameter of a ViT stands in the files of another library.

    Args:
      model: what is to be filled, or its abstract twin from `nnx.eval_shape`.
      layout: "timm", "torchvision" (state dicts), "big_vision", or "augreg" (.npz
        files of big_vision and of the original vision_transformer).
      prefix: what stands in front of every key, as "params/" in some .npz files.

    Returns:
      For each (path, layer), where the layer is None for what is not stacked, its
      `Source`.

    Raises:
      ValueError: an unknown layout, or a model whose shape it does not have, as a
        class token with a position under big_vision.

    big_vision's networks were trained with "gelu_tanh" and pool as "norm_mean", those
    of augreg are read with "gelu" by timm.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("vit", width=24, depth=2, heads=3, rngs=nnx.Rngs(0))
      >>> source = vit_names(model)["blocks/attention/key/kernel", 1]
      >>> source.key, source.shape, source.part, source.leaf
      ('blocks.1.attn.qkv.weight', (72, 24), (0, 1, 3), (24, 3, 8))
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
    chosen = LAYOUTS[layout]
    token = model.token is not None
    if token and model.class_position == (layout == "big_vision"):
        raise ValueError(
            f"in the layout {layout!r} the class token has "
            f"{'no' if model.class_position else 'a'} position; create the model with "
            f"class_position={not model.class_position}"
        )
    if layout == "timm" and model.pool == "mean":
        chosen = chosen._replace(modules={**chosen.modules, "norm": "fc_norm."})
    p, c, n = model.patch_size, model.channels, model.plan["embed"].size
    flax = chosen.kernel == "ours"
    shape, order = (
        ((p, p, c, n), (0, 1, 2, 3)) if flax else ((n, c, p, p), (2, 3, 1, 0))
    )
    special = {
        "readin/kernel": (shape, order),
        "position": ((1, *model.position.shape), (0, 1, 2)),
        "token": ((1, 1, n), (0, 1, 2)),
    }
    return sources(model, chosen, special, prefix)

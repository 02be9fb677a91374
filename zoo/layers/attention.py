"""Transformer blocks of an attention branch and an MLP branch, and stacks of them."""

import dataclasses
import math
from dataclasses import fields
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from ..family import Count, Family, Positive, Rate, Remat, ResidualOptions
from ..plan import Axis, Plan
from ..sharding import platform, weight
from .basic import (
    ACTIVATIONS,
    Dense,
    LayerNorm,
    LayerScale,
    Nonlinearity,
    RMSNorm,
    scan,
    stack,
    times,
    writable_state,
)
from .experts import Experts, Routing
from .rotary import Rotary, turn

Implementation = Literal["auto", "xla", "cudnn"]


class Cache(NamedTuple):
    """Keys and values of previous tokens; for a stack, with a leading axis of layers.

    Attributes:
      key: shape (batch, length, heads of the keys, head_dim).
      value: the same shape.
    """

    key: Float[Array, "*layers batch length kv head_dim"]
    value: Float[Array, "*layers batch length kv head_dim"]


class Places(NamedTuple):
    """Where new tokens stand in a cache, and which of its tokens they attend to.

    Attributes:
      first: index of the first new token in the cache.
      positions: of the new tokens in their sequence, from 0; one row if all sequences
        begin at the same index of the cache.
      visible: for each new token, the entries of the cache that it attends to.
    """

    first: Int[Array, ""]
    positions: Int[Array, "#batch time"]
    visible: Bool[Array, "#batch time length"]

    @classmethod
    def of(
        cls,
        first: Int[Array, ""],
        time: int,
        length: int,
        start: Int[Array, " batch"] | None,
    ) -> "Places":
        """Places of `time` tokens in a cache of `length` entries.

        Args:
          first: as in the attributes.
          time: number of new tokens.
          length: of the cache.
          start: index where each sequence begins; None for 0.
        """
        index = first + jnp.arange(time)[None]
        begin = jnp.zeros(1, jnp.int32) if start is None else start.astype(jnp.int32)
        entry = jnp.arange(length)[None, None]
        visible = (entry <= index[:, :, None]) & (entry >= begin[:, None, None])
        # Padding before a sequence is computed too, at position 0, and never read.
        return cls(first, jnp.maximum(index - begin[:, None], 0), visible)


class Noise(NamedTuple):
    """Random state of a forward pass; for a stack, with a leading axis of layers.

    Attributes:
      key: random key for dropout and drop path.
      drop_path: probability that a branch is left out; None for zero.
    """

    key: Key[Array, "*layers"]
    drop_path: Float[Array, "*layers"] | None


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """Options of all blocks of one transformer; `TransformerOptions` has the others.

    Attributes:
      causal: each position sees only itself and those before it.
      rms_norm: the norms are RMSNorm, not LayerNorm.
      qkv_bias: whether queries, keys and values have biases.
      key_bias: whether keys have, where queries and values do.
      bias: whether the other kernels of a block have.
      gated: the MLP is W2 (φ(W_gate x) · W1 x), not W2 φ(W1 x).
      qk_norm: RMSNorm of each query and key over its head.
      rotary: rotary positions of queries and keys; None for none.
      routing: the MLP is a mixture of experts, which are gated; None for one MLP.
      layer_scale: initial value of LayerScale at the end of each branch; None for no
        LayerScale.
    """

    causal: bool = False
    layer_norm: bool = True
    rms_norm: bool = False
    norm_eps: float = 1e-6
    nonlinearity: str = "gelu"
    qkv_bias: bool = True
    key_bias: bool = True
    bias: bool = True
    gated: bool = False
    qk_norm: bool = False
    rotary: Rotary | None = None
    routing: Routing | None = None
    layer_scale: float | None = None
    zero_queries: bool = True
    zero_init: bool = False
    dropout: float = 0.0
    drop_path: float = 0.0
    remat: Remat = False
    attention: Implementation = "auto"

    def __post_init__(self) -> None:
        if self.qk_norm and self.zero_queries:
            raise ValueError(
                "zero_queries=True excludes qk_norm=True, because a query of zero has "
                "no direction; use zero_queries=False"
            )


def head_axes(
    width: int, base_width: int | None, heads: int | None, head_dim: int | None
) -> dict[str, Axis]:
    """Build the axes "heads" and "head_dim", one of which grows with width.

    Args:
      width: of the residual stream.
      base_width: of the base; None for `width`.
      heads: number of heads, the same at every width; head_dim grows.
      head_dim: size of a head, the same at every width; the number of heads grows. 64
        if neither is given.

    Raises:
      ValueError: both are given, or they do not divide a width.

    Examples:
      >>> head_axes(256, 64, heads=None, head_dim=32)["heads"]
      Axis(base=2, size=8, grows=True)
      >>> head_axes(256, 64, heads=4, head_dim=None)["head_dim"]
      Axis(base=16, size=64, grows=True)
    """
    if heads is not None and head_dim is not None:
        raise ValueError(
            f"pass heads={heads} or head_dim={head_dim}, not both: the one that you "
            "pass is fixed as width grows, and the other one grows"
        )
    stays, grows = ("head_dim", "heads") if heads is None else ("heads", "head_dim")
    size = heads or head_dim or 64
    base_width = width if base_width is None else base_width
    for name, n in {"width": width, "base_width": base_width}.items():
        if n % size:
            raise ValueError(
                f"{name}={n} is not a multiple of {stays}={size}; pass heads=... "
                "(fixed number of heads) or head_dim=... (fixed size of a head)"
            )
    return {
        stays: Axis(size, size),
        grows: Axis(base_width // size, width // size, True),
    }


def logit_scale(plan: Plan) -> float:
    """The factor of the attention logits, queries · keys.

    A logit is a sum over d_head features, so the factor scales as the initial weights
    of a readout: 1/d_head under μP, 1/√d_head under SP and NTK, and d_head^-(1+s)/2 in
    between. At the base it is 1/√d_head under all of them. If the number of heads
    grows instead of d_head, the factor is constant.

    Source: Tensor Programs V, Definition 4.1; Bordelon et al., App. A.3.

    Examples:
      >>> def scale(name):  # d_head from 16 to 64
      ...     options = TransformerOptions(
      ...         width=256, depth=1, base_width=64, heads=4, parametrization=name)
      ...     return logit_scale(options.plan(axes=options.head_axes()))
      >>> scale("mup"), scale("sp")  # ¼ · 16/64, 1/√64
      (0.0625, 0.125)
    """
    axis = plan["head_dim"]
    return 1 / math.sqrt(axis.base) * plan.readout_size(axis.size / axis.base)


class Attention(nnx.Module):
    """Softmax attention of all heads, with the μP scale of the logits.

    If the plan has an axis "kv_heads", each head of keys and values serves several
    heads of queries (grouped-query attention).

    Args:
      plan: the model's plan, with the axes "heads" and "head_dim".
      options: those of its block.
      in_branch: whether it is in a residual branch.

    Source: Bordelon et al., App. A.3.
    """

    def __init__(
        self,
        plan: Plan,
        options: BlockOptions,
        *,
        in_branch: bool = True,
        rngs: nnx.Rngs,
    ):
        self.scale = logit_scale(plan)
        self.causal = options.causal
        self.implementation = options.attention
        self.rotary = options.rotary
        grouped = "kv_heads" if plan.has("kv_heads") else "heads"

        def read(heads: str, init: str = "fan_in", bias: bool = True) -> Dense:
            return Dense(
                plan,
                ("embed", heads, "head_dim"),
                bias=options.qkv_bias and bias,
                in_branch=in_branch,
                init=init,
                rngs=rngs,
            )

        def norm() -> RMSNorm | None:
            if not options.qk_norm:
                return None
            return RMSNorm(
                plan, "head_dim", in_branch=in_branch, epsilon=options.norm_eps
            )

        # While queries are zero, keys get no gradient.
        self.query = read("heads", "zeros" if options.zero_queries else "fan_in")
        self.key = read(grouped, bias=options.key_bias)
        self.value = read(grouped)
        self.query_norm, self.key_norm = norm(), norm()
        self.out = Dense(
            plan,
            ("heads", "head_dim", "embed"),
            inputs=2,
            bias=options.bias,
            in_branch=in_branch,
            init="zeros" if options.zero_init else "fan_in",
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "batch time n"],
        angles: Float[Array, "time half"] | None = None,
    ) -> Float[Array, "batch time n"]:
        query, key, value = self._heads(x, jnp.arange(x.shape[1])[None])
        if angles is not None:
            query, key = turn(query, angles), turn(key, angles)
        return self._attend(query, key, value)

    def read(
        self, x: Float[Array, "batch queries n"], tokens: Float[Array, "batch time n"]
    ) -> Float[Array, "batch queries n"]:
        """Attention from queries of `x` to `tokens`, without positions."""
        return self._attend(self.query(x), self.key(tokens), self.value(tokens))

    def _attend(
        self,
        query: Float[Array, "batch queries heads head_dim"],
        key: Float[Array, "batch time kv head_dim"],
        value: Float[Array, "batch time kv head_dim"],
    ) -> Float[Array, "batch queries n"]:
        implementation = self.implementation
        if implementation == "auto":
            implementation = "cudnn" if _has_flash(query) else "xla"
        heads = jax.nn.dot_product_attention(
            query,
            key,
            value,
            scale=self.scale,
            is_causal=self.causal,
            implementation=implementation,
        )
        return self.out(heads)

    def decode(
        self, x: Float[Array, "batch time n"], cache: Cache, places: Places
    ) -> tuple[Float[Array, "batch time n"], Cache]:
        """Attention of new tokens to previous tokens and to themselves.

        Args:
          x: the new tokens.
          cache: keys and values of previous tokens; entries from `places.first` on are
            overwritten.
          places: of the new tokens.

        Returns:
          (output for the new tokens, updated cache).
        """
        query, key, value = self._heads(x, places.positions)
        first = places.first
        cache = Cache(
            jax.lax.dynamic_update_slice_in_dim(cache.key, key, first, axis=1),
            jax.lax.dynamic_update_slice_in_dim(cache.value, value, first, axis=1),
        )
        heads = jax.nn.dot_product_attention(
            query,
            cache.key,
            cache.value,
            mask=places.visible[:, None],
            scale=self.scale,
            implementation="xla",
        )
        return self.out(heads), cache

    def _heads(
        self, x: Float[Array, "batch time n"], positions: Int[Array, "#batch time"]
    ) -> tuple[
        Float[Array, "batch time heads head_dim"],
        Float[Array, "batch time kv head_dim"],
        Float[Array, "batch time kv head_dim"],
    ]:
        """Queries, keys and values of tokens at these positions."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query = self.rotary.rotate(query, positions)
            key = self.rotary.rotate(key, positions)
        return query, key, value


def _has_flash(query: Float[Array, "batch time heads head_dim"]) -> bool:
    """Whether cuDNN has flash attention for these queries."""
    # JAX 0.10 uses its plain attention by default, and raises if cuDNN is requested
    # and not available.
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    if query.shape[-1] % 8 or query.shape[-1] > 128:
        return False
    if platform() != "gpu":
        return False
    capability = getattr(jax.local_devices()[0], "compute_capability", "0")
    return "." in str(capability) and float(capability) >= 8.0


class MLP(nnx.Module):
    """W2 φ(W1 x), or W2 (φ(W_gate x) · W1 x), with dropout before W2."""

    def __init__(
        self,
        plan: Plan,
        options: BlockOptions,
        *,
        in_branch: bool = True,
        rngs: nnx.Rngs,
    ):
        self.nonlinearity = options.nonlinearity
        self.dropout = options.dropout
        bias = options.bias

        def read() -> Dense:
            names = ("embed", "mlp")
            return Dense(plan, names, bias=bias, in_branch=in_branch, rngs=rngs)

        self.gate = read() if options.gated else None
        self.up = read()
        self.down = Dense(
            plan,
            ("mlp", "embed"),
            bias=bias,
            in_branch=in_branch,
            init="zeros" if options.zero_init else "fan_in",
            rngs=rngs,
        )

    def __call__(
        self, x: Float[Array, "batch time n"], key: Key[Array, ""] | None = None
    ) -> Float[Array, "batch time n"]:
        φ = ACTIVATIONS[self.nonlinearity]
        h = φ(self.up(x)) if self.gate is None else φ(self.gate(x)) * self.up(x)
        return self.down(dropout(h, self.dropout, key))


def _norm(
    plan: Plan, options: BlockOptions, in_branch: bool
) -> LayerNorm | RMSNorm | None:
    if not options.layer_norm:
        return None
    kind = RMSNorm if options.rms_norm else LayerNorm
    return kind(plan, "embed", in_branch=in_branch, epsilon=options.norm_eps)


def applied(layer: nnx.Module | None, x: Array) -> Array:
    """The output of a layer; x itself without one."""
    return x if layer is None else layer(x)


def _layer_scale(plan: Plan, options: BlockOptions) -> LayerScale | None:
    if options.layer_scale is None:
        return None
    return LayerScale(plan, "embed", initial=options.layer_scale)


class TransformerBlock(nnx.Module):
    """Two residual branches, x + a M^-α · branch(norm(x)): attention, then MLP.

    A branch has two layers, for which Depth-μP is not optimal.

    Source: Tensor Programs VI, sections 9 and 10.3; Bordelon et al., App. A.3.
    """

    def __init__(self, plan: Plan, options: BlockOptions, *, rngs: nnx.Rngs):
        self.branch = plan.branch
        self.dropout = options.dropout
        self.attention_norm = _norm(plan, options, in_branch=True)
        self.mlp_norm = _norm(plan, options, in_branch=True)
        self.attention = Attention(plan, options, rngs=rngs)
        self.mlp: MLP | Experts
        if options.routing is None:
            self.mlp = MLP(plan, options, rngs=rngs)
        else:
            self.mlp = Experts(
                plan,
                options.routing,
                nonlinearity=options.nonlinearity,
                zero_init=options.zero_init,
                rngs=rngs,
            )
        self.attention_scale = _layer_scale(plan, options)
        self.mlp_scale = _layer_scale(plan, options)

    def __call__(
        self,
        x: Float[Array, "batch time n"],
        noise: Noise | None = None,
        angles: Float[Array, "time half"] | None = None,
    ) -> Float[Array, "batch time n"]:
        keys = [None] * 5 if noise is None else list(jax.random.split(noise.key, 5))
        rate = None if noise is None else noise.drop_path
        h = self.attention(applied(self.attention_norm, x), angles)
        h = applied(self.attention_scale, dropout(h, self.dropout, keys[0]))
        x = x + self.branch * drop_path(h, rate, keys[1])
        h = self.mlp(applied(self.mlp_norm, x), keys[2])
        h = applied(self.mlp_scale, dropout(h, self.dropout, keys[3]))
        return x + self.branch * drop_path(h, rate, keys[4])

    def routing(
        self, x: Float[Array, "batch time n"]
    ) -> Float[Array, "batch time experts"]:
        """The router's probabilities of the block's experts, without noise."""
        assert isinstance(self.mlp, Experts)
        h = self.attention(applied(self.attention_norm, x))
        x = x + self.branch * applied(self.attention_scale, h)
        return self.mlp.probabilities(applied(self.mlp_norm, x))

    def decode(
        self, x: Float[Array, "batch time n"], cache: Cache, places: Places
    ) -> tuple[Float[Array, "batch time n"], Cache]:
        """Apply the block to tokens that follow those of a cache, without noise."""
        h = applied(self.attention_norm, x)
        h, cache = self.attention.decode(h, cache, places)
        x = x + self.branch * applied(self.attention_scale, h)
        h = applied(self.mlp_scale, self.mlp(applied(self.mlp_norm, x)))
        return x + self.branch * h, cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerOptions(ResidualOptions):
    """Options of every transformer.

    Attributes:
      heads: number of heads, constant over widths: the size of a head grows. Pass this
        or `head_dim`.
      head_dim: size of a head, constant over widths: the number of heads grows. 64 if
        neither `heads` nor `head_dim` is given.
      mlp_ratio: width of the MLP, as a multiple of `width`.
      layer_norm: normalize before each branch (pre-LN) and after the last block; False:
        no norms.
      norm_eps: constant added to the variance.
      nonlinearity: of the MLP: "gelu" (exact) or "gelu_tanh" (approximate).
      zero_queries: initialize queries with zeros. Keys then have no gradient in the
        first step.
      zero_readout: initialize the readout with zeros.
      zero_init: initialize the last kernel of each branch with zeros.
      dropout: probability of dropout after embeddings, inside the MLP and of branches.
      drop_path: probability of dropping the branches of the last block; it increases
        linearly from zero at the first block.
      attention: "cudnn" for flash attention on GPUs, "xla" for plain attention, "auto"
        for flash attention where it can run.
    """

    heads: Count | None = None
    head_dim: Count | None = None
    mlp_ratio: Positive = 4.0
    layer_norm: bool = True
    norm_eps: Positive = 1e-6
    nonlinearity: Nonlinearity = "gelu"
    zero_queries: bool = True
    zero_readout: bool = False
    zero_init: bool = False
    dropout: Rate = 0.0
    drop_path: Rate = 0.0
    attention: Implementation = "auto"

    @property
    def branch_layers(self) -> int:
        """Two: values and their projection, and the two layers of the MLP."""
        return 2

    def head_axes(self) -> dict[str, Axis]:
        """The axes "heads" and "head_dim"; see `head_axes`."""
        return head_axes(self.width, self.base_width, self.heads, self.head_dim)

    def block(self, **fixed: Any) -> BlockOptions:
        """The options of a block: these, and those of the family by the same names."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        known = {field.name for field in fields(BlockOptions)}
        return BlockOptions(**{k: v for k, v in given.items() if k in known} | fixed)


class Transformer(Family):
    """Base class of transformers: a stack of blocks, the last norm, and noise.

    `train()` switches dropout and drop path on (the default), `eval()` off. Each call
    draws new noise from the model's own `rngs`, whose counter is part of the model's
    state. A training loop that does not carry that state must pass `rngs` to each call.
    """

    def build_blocks(self, options: BlockOptions, depth: int, rngs: nnx.Rngs) -> None:
        """Create the blocks and the last norm."""
        self.options = options
        self.depth = depth
        self.blocks = stack(
            lambda rngs: TransformerBlock(self.plan, options, rngs=rngs), depth, rngs
        )
        self.norm = _norm(self.plan, options, in_branch=False)
        self.deterministic = False

    def build_noise(self, rngs: nnx.Rngs) -> None:
        """Create the model's own random state, if it has dropout or drop path.

        Call it last, so that dropout does not change the initial weights.
        """
        noisy = self.options.dropout > 0 or self.options.drop_path > 0
        self.rngs = nnx.Rngs(dropout=rngs.dropout()) if noisy else None

    def run_blocks(
        self,
        x: Float[Array, "batch time n"],
        rngs: nnx.Rngs | None,
        angles: Float[Array, "time half"] | None = None,
    ) -> Float[Array, "batch time n"]:
        """Apply dropout of the embedding and all blocks, without the last norm.

        Args:
          x: embedded tokens.
          rngs: random state of this call, instead of the model's own.
          angles: rotation angles of queries and keys.
        """
        noise = None
        own = self.rngs if rngs is None else rngs
        if own is not None and self.rngs is not None and not self.deterministic:
            with writable_state():
                first, rest = jax.random.split(own.dropout())
            x = dropout(x, self.options.dropout, first)
            last = self.options.drop_path
            rates = jnp.linspace(0.0, last, self.depth) if last else None
            noise = Noise(jax.random.split(rest, self.depth), rates)
        if angles is not None:  # the same in every block
            angles = jnp.broadcast_to(angles, (self.depth, *angles.shape))
        return scan(self.blocks, x, noise, angles, remat=self.options.remat, lean=True)

    def decode_blocks(
        self, x: Float[Array, "batch time n"], cache: Cache, places: Places
    ) -> tuple[Float[Array, "batch time n"], Cache]:
        """Apply all blocks to tokens that follow those of a cache, without noise."""
        graph, weights = nnx.split(self.blocks)

        def run(
            x: Array, layer: tuple[nnx.State[Any, Any], Cache]
        ) -> tuple[Array, Cache]:
            block = nnx.merge(graph, layer[0])
            assert isinstance(block, TransformerBlock)
            return block.decode(x, layer[1], places)

        return jax.lax.scan(run, x, (weights, cache))


class AttentionPool(nnx.Module):
    """Attention pooling: a learned token attends to all tokens, then a residual MLP.

    z = out(attention(token, x)), then z + MLP(norm(z)).

    Args:
      plan: the model's plan, with the axes "heads", "head_dim" and "mlp".
      options: those of the blocks; LayerScale, rotary positions and noise are left out.

    Source: Zhai et al. 2022, arXiv:2106.04560, section 3.4 ("MAP head"); SigLIP,
    arXiv:2303.15343.
    """

    def __init__(self, plan: Plan, options: BlockOptions, *, rngs: nnx.Rngs):
        options = dataclasses.replace(
            options,
            causal=False,
            gated=False,
            rotary=None,
            layer_scale=None,
            zero_init=False,
            dropout=0.0,
        )
        gain = plan["embed"].base ** -0.5
        self.token, self.multiplier = plan.param(
            rngs.params, ("embed",), inputs=0, init="normal", gain=gain
        )
        self.attention = Attention(plan, options, in_branch=False, rngs=rngs)
        self.norm = _norm(plan, options, in_branch=False)
        self.mlp = MLP(plan, options, in_branch=False, rngs=rngs)

    def __call__(self, x: Float[Array, "batch time n"]) -> Float[Array, "batch n"]:
        token = times(weight(self.token, x.dtype), self.multiplier)
        token = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[-1]))
        z = self.attention.read(token, x)[:, 0]
        return z + self.mlp(applied(self.norm, z))


def dropout(
    x: Float[Array, "*shape"], rate: float, key: Key[Array, ""] | None
) -> Float[Array, "*shape"]:
    """Set entries to zero with probability `rate`, and multiply others by 1/(1-rate).

    Args:
      rate: probability.
      key: random key; None returns x unchanged.
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def drop_path(
    x: Float[Array, "batch time n"],
    rate: Float[Array, ""] | None,
    key: Key[Array, ""] | None,
) -> Float[Array, "batch time n"]:
    """Set a branch to zero for some examples, multiply it by 1/(1-rate) for others.

    Args:
      x: output of a residual branch.
      rate: probability; None for zero.
      key: random key; None returns x unchanged.
    """
    if key is None or rate is None:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, (x.shape[0], 1, 1))
    return x * (keep.astype(rate.dtype) / (1 - rate)).astype(x.dtype)


def branch_factor(model: Transformer, path: str) -> float:
    """The product of the multipliers outside of a parameter's own layer.

    Queries take the factor of the logits over the 1/√d_head of other libraries; after
    QK-norm its scale does. The last kernel of a branch takes the branch's.
    """
    parts = path.split("/")
    reads = "query_norm" if model.options.qk_norm else "query"
    owners = (["blocks", "attention"], ["attention_pool", "attention"])
    if parts[:2] in owners and parts[2] == reads:
        return logit_scale(model.plan) * math.sqrt(model.plan["head_dim"].size)
    if parts[:3] in (["blocks", "attention", "out"], ["blocks", "mlp", "down"]):
        return model.plan.branch
    return 1.0

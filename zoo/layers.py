"""Layers that carry their multipliers, and blocks stacked along a scanned axis."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .plan import Frozen, Plan

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "abs": jnp.abs,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "identity": lambda x: x,
}


def activation(name: str) -> Callable[[Array], Array]:
    """A nonlinearity by name.

    Raises:
      ValueError: an unknown name.
    """
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"unknown activation {name!r}; known are {known}")
    return ACTIVATIONS[name]


class Dense(nnx.Module):
    """y = multiplier · x W, without bias.

    Args:
      plan: the model's plan.
      names: (input axis, output axis) of the kernel.
      in_branch: whether it stands in a residual branch.
      init: see `Plan.param`.
      gain: see `Plan.param`.
      trained: False freezes the kernel.
      rngs: random state.
    """

    def __init__(
        self,
        plan: Plan,
        names: tuple[str, str],
        *,
        in_branch: bool = False,
        init: str = "fan_in",
        gain: float = 1.0,
        trained: bool = True,
        rngs: nnx.Rngs,
    ):
        self.dtype = plan.dtype
        self.kernel, self.multiplier = plan.param(
            rngs.params,
            names,
            inputs=1,
            in_branch=in_branch,
            init=init,
            gain=gain,
            kind=nnx.Param if trained else Frozen,
        )

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch out"]:
        y = x.astype(self.dtype) @ self.kernel[...].astype(self.dtype)
        # Exact at the base, where every multiplier is one.
        return y if self.multiplier == 1.0 else y * self.multiplier


class LayerNorm(nnx.Module):
    """Layer normalization over the last axis, with scale and bias."""

    def __init__(self, plan: Plan, name: str, *, in_branch: bool = False):
        self.scale, _ = plan.param(
            _no_key, (name,), inputs=0, in_branch=in_branch, init="ones"
        )
        self.bias, _ = plan.param(
            _no_key, (name,), inputs=0, in_branch=in_branch, init="zeros"
        )

    def __call__(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        # Statistics in float32 whatever the dtype of the computation.
        y = jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6)
        lead = range(x.ndim - 1)
        scale, bias = (jnp.expand_dims(v[...], lead) for v in (self.scale, self.bias))
        return (y * scale + bias).astype(x.dtype)


def mean_subtraction(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """MS(x) = x - <x, 1>/n (Tensor Programs VI, section 6.3)."""
    return x - x.mean(axis=-1, keepdims=True)


def stack(
    create: Callable[[nnx.Rngs], nnx.Module], depth: int, rngs: nnx.Rngs
) -> nnx.Module:
    """`depth` copies of a block, every parameter with a leading axis of layers."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def blocks(rngs: nnx.Rngs) -> nnx.Module:
        return create(rngs)

    return blocks(rngs)


def scan(
    blocks: nnx.Module, x: Float[Array, "*batch n"], *, remat: bool = False
) -> Float[Array, "*batch n"]:
    """Apply stacked blocks one after another, traced and compiled once.

    Args:
      blocks: from `stack`; each maps x to the next x.
      x: the residual stream.
      remat: recompute each block in the backward pass instead of storing it.
    """
    graph, state = nnx.split(blocks)

    def step(x: Array, state: nnx.State) -> tuple[Array, None]:
        return nnx.merge(graph, state)(x), None

    return jax.lax.scan(jax.checkpoint(step) if remat else step, x, state)[0]


def _no_key() -> jax.Array:
    raise AssertionError("constants need no random key")

"""Layers that carry their multipliers, and blocks stacked along a scanned axis."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from .plan import Frozen, Plan
from .sharding import (
    is_gathering,
    platform,
    saves_no_gathered_weight,
    shard_batch,
    weight,
)

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "abs": jnp.abs,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
    # Of MobileNetV3, piecewise: x · min(max(x + 3, 0), 6) / 6.
    "hard_swish": jax.nn.hard_swish,
    "tanh": jnp.tanh,
    "erf": jax.scipy.special.erf,
    "identity": lambda x: x,
}
_ODD = ("identity", "tanh", "erf")  # of mean zero where their input is symmetric
_FLAT_AT_ZERO = ("relu", "abs")  # as JAX differentiates them


def activation(name: str, option: str = "nonlinearity") -> Callable[[Array], Array]:
    """A nonlinearity by name.

    Args:
      name: a key of `ACTIVATIONS`.
      option: where the name was given, for the message.

    Raises:
      ValueError: an unknown name.
    """
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"{option}={name!r} must be one of {known}")
    return ACTIVATIONS[name]


def check_activation(name: str, *, first: bool, zero_init: bool) -> None:
    """Refuse what is no nonlinearity, and branches that could never leave zero.

    Args:
      name: of the nonlinearity.
      first: whether it stands before the weights.
      zero_init: whether the last weights of a branch start at zero.

    Raises:
      ValueError: an unknown name, or nothing would reach the weights.
    """
    activation(name)
    if zero_init and not first and name in _FLAT_AT_ZERO:
        raise ValueError(
            f"zero_init=True with nonlinearity={name!r} after the weights: its "
            "derivative at zero is zero, so that no branch would ever train; take "
            "activation_first=True, or nonlinearity='gelu'"
        )


class ModelWarning(UserWarning):
    """A model of the zoo that can be made and gets worse with depth."""


def warn_of_drift(
    model: str, remedy: str, *, nonlinearity: str, alpha: float, last: bool
) -> None:
    """Warn where residual branches add a positive mean, which grows with depth.

    Args:
      model: name of the family.
      remedy: the option to change, as "subtract_mean=True".
      nonlinearity: of the branch.
      alpha: exponent of the branch multiplier. At 1 the sum of the means is bounded.
      last: whether the branch ends with the nonlinearity, with its mean left in.

    Source: Tensor Programs VI, section 6.3.
    """
    if last and nonlinearity not in _ODD and alpha < 1:
        warnings.warn(
            f"each residual branch of this {model} adds the positive mean of "
            f"{nonlinearity!r} to the stream, which grows without bound in depth "
            f"(Tensor Programs VI, section 6.3); pass {remedy}, or a parametrization "
            "with alpha = 1, e.g. 'completep'",
            ModelWarning,
            stacklevel=2,
        )


class Dense(nnx.Module):
    """y = multiplier · x W (+ b), over the last axes of x.

    Args:
      plan: the model's plan.
      names: axes of the kernel, those that are summed over first.
      inputs: how many of them are summed over.
      bias: whether it has one.
      in_branch: whether it stands in a residual branch.
      init: see `Plan.param`; of the kernel. Biases start at zero.
      gain: see `Plan.param`.
      trained: False freezes it.
      rngs: random state.
    """

    def __init__(
        self,
        plan: Plan,
        names: tuple[str, ...],
        *,
        inputs: int = 1,
        bias: bool = False,
        in_branch: bool = False,
        init: str = "fan_in",
        gain: float = 1.0,
        trained: bool = True,
        rngs: nnx.Rngs,
    ):
        kind = nnx.Param if trained else Frozen
        self.dtype = plan.dtype
        self.inputs = inputs
        self.kernel, self.multiplier = plan.param(
            rngs.params,
            names,
            inputs=inputs,
            in_branch=in_branch,
            init=init,
            gain=gain,
            kind=kind,
        )
        # Assigned once: NNX takes an attribute that was None for no variable.
        added: nnx.Variable | None = None
        self.bias_multiplier = 1.0
        if bias:
            added, self.bias_multiplier = plan.param(
                _no_key,
                names[inputs:],
                inputs=0,
                in_branch=in_branch,
                init="zeros",
                kind=kind,
            )
        self.bias = added

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch out"]:
        kernel = weight(self.kernel, self.dtype)
        y = jnp.tensordot(x.astype(self.dtype), kernel, self.inputs)
        y = times(y, self.multiplier)
        if self.bias is None:
            return y
        bias = times(weight(self.bias, self.dtype), self.bias_multiplier)
        return y + jnp.broadcast_to(bias, y.shape)


class LayerNorm(nnx.Module):
    """Layer normalization over the last axis, with scale and bias.

    Args:
      plan: the model's plan.
      name: the axis that is normalized.
      in_branch: whether it stands in a residual branch.
      epsilon: added to the variance; 1e-6 in timm's ViT, 1e-5 in torch and GPT-2.
      init: of the scale, "ones" or "zeros".
    """

    def __init__(
        self,
        plan: Plan,
        name: str,
        *,
        in_branch: bool = False,
        epsilon: float = 1e-6,
        init: str = "ones",
    ):
        self.epsilon = epsilon
        self.scale, self.multiplier = plan.param(
            _no_key, (name,), inputs=0, in_branch=in_branch, init=init
        )
        self.bias, _ = plan.param(
            _no_key, (name,), inputs=0, in_branch=in_branch, init="zeros"
        )

    def __call__(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        # Statistics in float32 at least, whatever the dtype of the computation.
        dtype = single(x.dtype)
        y = jax.nn.standardize(x.astype(dtype), epsilon=self.epsilon)
        scale, bias = (
            jnp.broadcast_to(times(weight(p, dtype), self.multiplier), y.shape)
            for p in (self.scale, self.bias)
        )
        return (y * scale + bias).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) over the last axis, with scale and without bias.

    Args:
      plan: the model's plan.
      name: the axis that is normalized.
      in_branch: whether it stands in a residual branch.
      epsilon: added to the mean square.
    """

    def __init__(
        self, plan: Plan, name: str, *, in_branch: bool = False, epsilon: float = 1e-6
    ):
        self.epsilon = epsilon
        self.scale, self.multiplier = plan.param(
            _no_key, (name,), inputs=0, in_branch=in_branch, init="ones"
        )

    def __call__(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        dtype = single(x.dtype)
        y = x.astype(dtype)
        square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(square + self.epsilon)
        scale = times(weight(self.scale, dtype), self.multiplier)
        return (y * jnp.broadcast_to(scale, y.shape)).astype(x.dtype)


class LayerScale(nnx.Module):
    """A trained factor for each entry of a residual branch.

    Args:
      plan: the model's plan.
      name: the axis of the entries.
      initial: every factor's initial value.

    Source: Touvron et al. 2021, arXiv:2103.17239, eq. 8.
    """

    def __init__(self, plan: Plan, name: str, *, initial: float):
        self.scale, self.multiplier = plan.param(
            _no_key, (name,), inputs=0, in_branch=True, init="ones", gain=initial
        )

    def __call__(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        scale = times(weight(self.scale, x.dtype), self.multiplier)
        return x * jnp.broadcast_to(scale, x.shape)


def single(dtype: Any) -> Any:
    """The dtype itself, or float32 where it is of half precision."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def times(x: Float[Array, "*shape"], multiplier: float) -> Float[Array, "*shape"]:
    """x · multiplier, and x itself where the multiplier is one, as at the base."""
    return x if multiplier == 1.0 else x * multiplier


def mean_subtraction(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """MS(x) = x - <x, 1>/n (Tensor Programs VI, section 6.3)."""
    return x - x.mean(axis=-1, keepdims=True)


def flattened(
    x: Float[Array, "batch *features"], shape: Sequence[int]
) -> Float[Array, "batch inputs"]:
    """Inputs as vectors.

    Args:
      x: inputs of this shape, or vectors of as many entries.
      shape: of one input.

    Raises:
      ValueError: inputs of another shape. As many entries in another order, e.g.
        (channels, height, width), would give other outputs.
    """
    inputs = math.prod(shape)
    if x.shape[1:] not in (tuple(shape), (inputs,)):
        raise ValueError(
            f"inputs have shape {x.shape}; pass (batch, {', '.join(map(str, shape))}), "
            "or create the model with another input_shape"
        )
    return x.reshape(x.shape[0], inputs)


def stack(
    create: Callable[[nnx.Rngs], nnx.Module],
    depth: int,
    rngs: nnx.Rngs,
    *,
    base_depth: int | None = None,
) -> nnx.Module:
    """`depth` copies of a block, every variable with a leading axis of layers.

    Args:
      create: makes one block.
      depth: how many.
      rngs: random state.
      base_depth: how many the base model stacks here, where that is not `depth`
        over the plan's depth ratio.
    """

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def blocks(rngs: nnx.Rngs) -> nnx.Module:
        return create(rngs)

    stacked = blocks(rngs)
    if base_depth is not None:
        for _, variable in nnx.to_flat_state(nnx.state(stacked, nnx.Param)):
            variable.set_metadata(base_layers=base_depth)
    return stacked


def call(
    block: nnx.Module,
    x: Float[Array, "*batch n"],
    *inputs: Any,
    remat: bool = False,
) -> Float[Array, "*batch m"]:
    """Apply one block that is not stacked; with `remat` as `scan` does."""
    if not remat and not is_gathering():
        return shard_batch(block(shard_batch(x), *inputs))
    graph, *variables = nnx.split(block, _WEIGHTS, ...)
    x, state = _pure(graph, remat)(x, (*variables, inputs))
    with writable_state():
        nnx.update(block, state)
    return x


def scan(
    blocks: nnx.Module,
    x: Float[Array, "*batch n"],
    *inputs: Any,
    remat: bool = False,
    lean: bool = False,
) -> Float[Array, "*batch n"]:
    """Apply stacked blocks one after another, traced and compiled once.

    Variables that the blocks change, e.g. batch statistics, are written back into
    `blocks`. Without changes, as in `eval()`, `blocks` is only read, so that a caller
    may close over it in `jax.jit`, `jax.grad` or `jax.vmap`.

    Args:
      blocks: from `stack`; each maps x, and its part of `inputs`, to the next x.
      x: the residual stream.
      *inputs: pytrees of arrays with a leading axis of layers, as random keys; None
        stands for none.
      remat: recompute each block in the backward pass instead of storing it.
      lean: store what matrix products made, and recompute what is cheap.
    """
    graph, *variables = nnx.split(blocks, _WEIGHTS, ...)
    run = _pure(graph, remat, lean, scanned=True)
    x, state = jax.lax.scan(run, x, (*variables, inputs))
    with writable_state():
        nnx.update(blocks, state)
    return x


def scan_keeping(
    blocks: nnx.Module,
    x: Float[Array, "*batch n"],
    *inputs: Any,
    keep: Sequence[int],
    remat: bool = False,
    lean: bool = False,
) -> tuple[Float[Array, "*batch n"], Float[Array, "kept *batch n"]]:
    """As `scan`, and the residual stream behind some of the blocks.

    Only what is kept is stored, and nothing is unrolled.

    Args:
      blocks: from `stack`.
      x: the residual stream.
      *inputs: as of `scan`.
      keep: numbers of blocks, each at least 0 and given once.
      remat: as of `scan`.
      lean: as of `scan`.

    Returns:
      (the stream behind the last block, the streams behind the blocks of `keep`).
    """
    graph, *variables = nnx.split(blocks, _WEIGHTS, ...)
    run = _pure(graph, remat, lean, scanned=True)
    depth = jax.tree.leaves(variables)[0].shape[0]
    # Blocks that are not kept write to a place that is not there.
    places = np.full(depth, len(keep), np.int32)
    places[list(keep)] = np.arange(len(keep))

    def step(carry: tuple[Array, Array], layer: Any) -> tuple[Any, nnx.State]:
        (x, kept), (place, rest) = carry, layer
        x, state = run(x, rest)
        return (x, kept.at[place].set(x, mode="drop")), state

    start = x, jnp.zeros((len(keep), *x.shape), x.dtype)
    (x, kept), state = jax.lax.scan(step, start, (places, (*variables, inputs)))
    with writable_state():
        nnx.update(blocks, state)
    return x, kept


def numbers_of_blocks(blocks: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Checked numbers of blocks, those from the end made positive.

    Args:
      blocks: numbers, of which -1 is the last; None for all.
      count: how many blocks there are.

    Raises:
      ValueError: a number that no block has, or one given twice.

    Examples:
      >>> numbers_of_blocks((0, -1), 4)
      (0, 3)
    """
    if isinstance(blocks, int):
        raise ValueError(f"blocks={blocks} must be a tuple, e.g. ({blocks},)")
    given = tuple(range(count)) if blocks is None else tuple(blocks)
    for number in given:
        whole = isinstance(number, int) and not isinstance(number, bool)
        if not whole or not -count <= number < count:
            raise ValueError(
                f"blocks={given}: {number!r} is no block of a model that has {count}, "
                f"counted from 0 to {count - 1} or from the end as -1"
            )
    numbers = tuple(number % count for number in given)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"blocks={given} names a block twice")
    return numbers


@contextlib.contextmanager
def writable_state() -> Iterator[None]:
    """Explain Flax's trace error where a model writes to its own variables.

    A model in training updates batch statistics and random counters. Flax forbids
    this for a model that a JAX transform closes over.

    Raises:
      ValueError: the variables belong to another trace; the message says what to do.
    """
    try:
        yield
    except flax.errors.TraceContextError as error:
        raise ValueError(
            "this model is in training mode, where a call updates its batch "
            "statistics or random state, and it was made outside of the JAX transform "
            "that calls it. Call model.eval() first; or pass the model as an argument "
            "to nnx.jit, nnx.value_and_grad or nnx.vmap; or rebuild it inside the "
            "transform with nnx.merge(..., copy=True) and return its state"
        ) from error


# Weights only go into a scan: what comes out of it is stored once more.
_WEIGHTS = nnx.Any(nnx.Param, Frozen)


def _pure(
    graph: nnx.GraphDef, remat: bool, lean: bool = False, scanned: bool = False
) -> Callable[[Array, Any], tuple[Array, nnx.State]]:
    """A block as a function of x and (weights, other variables, inputs).

    It returns the next x and the variables that the block changed.
    """

    def run(x: Array, layer: Any) -> tuple[Array, nnx.State]:
        weights, state, inputs = layer
        # Copied: without a scan these are the caller's own variables, which the
        # trace of a checkpoint may not change.
        block = nnx.merge(graph, weights, state, copy=True)
        x = shard_batch(block(shard_batch(x), *inputs))
        return x, _changed(state, nnx.state(block, nnx.Not(_WEIGHTS)))

    # A loop keeps XLA from computing once what is there to be computed twice.
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=not scanned)
    if remat:
        return checkpoint(run)
    # On GPUs flash attention would be among what is recomputed.
    if lean and platform() != "gpu":
        return checkpoint(run, policy=_saves_products)
    if is_gathering():
        return checkpoint(run, policy=saves_no_gathered_weight)
    return run


def _changed(before: nnx.State, after: nnx.State) -> nnx.State:
    """The variables of a block to which a call assigned a value.

    Assignment replaces the array object, so that identity tells even while tracing.
    """
    old = {path: variable.get_raw_value() for path, variable in _flat(before)}
    return nnx.from_flat_state(
        [(path, v) for path, v in _flat(after) if v.get_raw_value() is not old[path]]
    )


def _flat(state: nnx.State) -> list[tuple[Any, nnx.Variable]]:
    return list(nnx.to_flat_state(state))


def _saves_products(primitive: Any, *arguments: Any, **options: Any) -> bool:
    """A policy of `jax.checkpoint`: save what is costly to make."""
    costly = ("dot_general", "conv_general_dilated", "random_bits")
    return primitive.name in costly


def _no_key() -> jax.Array:
    raise AssertionError("constants need no random key")

"""Layers with their multipliers, and stacks of blocks that are scanned."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import flax.errors
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ..family import Range, Remat
from ..plan import Frozen, Plan
from ..sharding import (
    is_gathering,
    platform,
    saves_no_gathered_weight,
    shard_batch,
    weight,
)

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "relu6": lambda x: jnp.minimum(jax.nn.relu(x), 6),
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
_ODD = ("identity", "tanh", "erf")  # mean zero for symmetric inputs
_FLAT_AT_ZERO = ("relu", "relu6", "abs")  # JAX's derivative at zero is zero


Nonlinearity = Annotated[
    str, Range(f"one of {', '.join(ACTIVATIONS)}", ACTIVATIONS.__contains__)
]


def check_activation(name: str, *, first: bool, zero_init: bool) -> None:
    """Check that branches with this nonlinearity can be trained.

    Args:
      name: of the nonlinearity.
      first: whether the nonlinearity is before the weights.
      zero_init: whether the last weights of a branch start at zero.

    Raises:
      ValueError: branches would never get a gradient.
    """
    if zero_init and not first and name in _FLAT_AT_ZERO:
        raise ValueError(
            f"zero_init=True with nonlinearity={name!r} after the weights: its "
            "derivative at zero is zero, so branches would never train; use "
            "activation_first=True, or nonlinearity='gelu'"
        )


class ModelWarning(UserWarning):
    """Warning: a model with these options gets worse with depth.

    Examples:
      >>> import warnings
      >>> from mupax import zoo
      >>> warnings.simplefilter("error", zoo.ModelWarning)  # to make it an error
      >>> warnings.simplefilter("default", zoo.ModelWarning)
    """


def warn_of_drift(
    model: str, remedy: str, *, nonlinearity: str, alpha: float, last: bool
) -> None:
    """Warn if residual branches add a positive mean, which grows with depth.

    Args:
      model: name of the family.
      remedy: the option to change, e.g. "subtract_mean=True".
      nonlinearity: of the branch.
      alpha: exponent of the branch multiplier. At 1 the sum of the means is bounded.
      last: whether the branch ends with the nonlinearity, without mean subtraction.

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


class Linear(nnx.Module):
    """Base class of linear layers: a kernel, and perhaps a bias.

    Args:
      names: axes of the kernel: fan-in axes, then fan-out axes.
      inputs: number of fan-in axes.
      bias: whether there is a bias, which starts at zero.
      in_branch: whether the layer is in a residual branch.
      init: of the kernel; see `Plan.param`.
      gain: see `Plan.param`.
      trained: whether the parameters are trained; False freezes them.
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
        # Assigned once: NNX does not accept a variable for an attribute that was None.
        bias_variable: nnx.Variable[Any] | None = None
        self.bias_multiplier = 1.0
        if bias:
            bias_variable, self.bias_multiplier = plan.param(
                None, names[inputs:], in_branch=in_branch, init="zeros", kind=kind
            )
        self.bias = bias_variable

    def finished(self, y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The layer's output: y times the multiplier, and the bias."""
        y = times(y, self.multiplier)
        if self.bias is None:
            return y
        bias = times(weight(self.bias, self.dtype), self.bias_multiplier)
        return y + jnp.broadcast_to(bias, y.shape)


class Dense(Linear):
    """Linear layer over the last axes of x, y = multiplier · x W (+ b).

    Its arguments are those of `Linear`.
    """

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch out"]:
        kernel = weight(self.kernel, self.dtype)
        return self.finished(jnp.tensordot(x.astype(self.dtype), kernel, self.inputs))


class Scaled(nnx.Module):
    """Base class of layers with a scale, and perhaps a bias, per entry of an axis.

    Args:
      name: the axis.
      in_branch: whether the layer is in a residual branch.
      epsilon: of a normalization: added to the variance, or to the mean square.
      init: of the scale, "ones" or "zeros".
      gain: of the scale; see `Plan.param`.
      bias: whether there is a bias, which starts at zero.
    """

    def __init__(
        self,
        plan: Plan,
        name: str,
        *,
        in_branch: bool = False,
        epsilon: float = 1e-6,
        init: str = "ones",
        gain: float = 1.0,
        bias: bool = True,
    ):
        self.epsilon = epsilon
        self.scale, self.multiplier = plan.param(
            None, (name,), in_branch=in_branch, init=init, gain=gain
        )
        if bias:
            self.bias, _ = plan.param(None, (name,), in_branch=in_branch, init="zeros")

    def scaled(self, y: Float[Array, "*batch n"], dtype: Any) -> Array:
        """y times the scale, plus the bias if there is one, in this dtype."""
        y = y * self._spread(self.scale, y)
        if hasattr(self, "bias"):
            y = y + self._spread(self.bias, y)
        return y.astype(dtype)

    def _spread(self, vector: nnx.Variable[Any], y: Array) -> Array:
        value = times(weight(vector, y.dtype), self.multiplier)
        return jnp.broadcast_to(value, y.shape)


class LayerNorm(Scaled):
    """Layer normalization over the last axis, with scale and bias.

    Its arguments are those of `Scaled`; epsilon is 1e-6 in timm's ViT, and 1e-5 in
    torch and GPT-2.
    """

    def __call__(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        # Statistics in float32 at least, whatever the dtype of the computation.
        y = standardized(x.astype(single(x.dtype)), -1, self.epsilon)
        return self.scaled(y, x.dtype)


def standardized(
    x: Float[Array, "*shape"], axis: int | tuple[int, ...], epsilon: float
) -> Float[Array, "*shape"]:
    """(x - E x) / √(Var x + ε), accurate for any mean.

    E x² - (E x)² loses all digits if the mean is large: in float32, entries of mean
    1,449 and standard deviation ½ would get a standard deviation of about 400.

    Args:
      x: of float32 at least.
      axis: axes that the statistics are taken over.
      epsilon: added to the variance.

    Source: the corrected two-pass algorithm of Chan, Golub and LeVeque 1983,
    "Algorithms for computing the sample variance".

    Examples:
      >>> import jax.numpy as jnp
      >>> standardized(jnp.array([1e6 - 1, 1e6 + 1]), -1, 0.0).tolist()
      [-1.0, 1.0]
    """
    # The mean is rounded, so what is left of it is subtracted again. The result does
    # not depend on the first, so no derivative passes through it.
    x = x - jax.lax.stop_gradient(x.mean(axis, keepdims=True))
    x = x - x.mean(axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis, keepdims=True) + epsilon)


class RMSNorm(Scaled):
    """x / rms(x) over the last axis, with scale and without bias.

    Its arguments are those of `Scaled`.
    """

    def __init__(self, plan: Plan, name: str, **more: Any):
        super().__init__(plan, name, bias=False, **more)

    def __call__(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        y = x.astype(single(x.dtype))
        square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        return self.scaled(y * jax.lax.rsqrt(square + self.epsilon), x.dtype)


class LayerScale(Scaled):
    """A trained factor for each entry of a residual branch.

    Args:
      name: the axis of the entries.
      initial: every factor's initial value.

    Source: Touvron et al. 2021, arXiv:2103.17239, eq. 8.
    """

    def __init__(self, plan: Plan, name: str, *, initial: float):
        super().__init__(plan, name, in_branch=True, gain=initial, bias=False)

    def __call__(self, x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        return self.scaled(x, x.dtype)


def single(dtype: Any) -> Any:
    """The dtype itself, or float32 for dtypes of half precision."""
    return dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32


def times(x: Float[Array, "*shape"], multiplier: float) -> Float[Array, "*shape"]:
    """x · multiplier; x itself if the multiplier is one, e.g. at the base."""
    return x if multiplier == 1.0 else x * multiplier


def mean_subtraction(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """MS(x) = x - <x, 1>/n (Tensor Programs VI, section 6.3)."""
    mean = x.mean(axis=-1, keepdims=True, dtype=single(x.dtype))
    return (x - mean).astype(x.dtype)


def check_floating(x: Any) -> None:
    """Raise a `ValueError` for inputs of whole numbers, e.g. pixels up to 255."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x is {x.dtype}; models take floating-point inputs of about unit size. "
            "Normalize images: (x / 255 - mean) / std, where zoo.data_config(model) "
            "has mean and std if they are known"
        )


def flattened(
    x: Float[Array, "batch *features"], shape: Sequence[int]
) -> Float[Array, "batch inputs"]:
    """Inputs as vectors.

    Args:
      x: inputs of this shape, or vectors of as many entries.
      shape: of one input.

    Raises:
      ValueError: inputs of another shape, or of whole numbers. As many entries in
        another order, e.g. (channels, height, width), would give other outputs.
    """
    inputs = math.prod(shape)
    if x.shape[1:] not in (tuple(shape), (inputs,)):
        raise ValueError(
            f"inputs have shape {x.shape}; pass (batch, {', '.join(map(str, shape))}), "
            "or create the model with another input_shape"
        )
    check_floating(x)
    return x.reshape(x.shape[0], inputs)


def stack(
    create: Callable[[nnx.Rngs], nnx.Module],
    depth: int,
    rngs: nnx.Rngs,
    *,
    base_depth: int | None = None,
) -> nnx.Module:
    """Stack `depth` copies of a block: every variable gets a leading axis of layers.

    Args:
      create: builds one block.
      depth: number of blocks.
      base_depth: number of blocks that the base model stacks here; None for `depth`
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
    remat: Remat = False,
) -> Float[Array, "*batch m"]:
    """Apply one block that is not stacked; `remat` as in `scan`."""
    if remat in (False, "none") and not is_gathering():
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
    remat: Remat = False,
    lean: bool = False,
) -> Float[Array, "*batch n"]:
    """Apply stacked blocks one after another, traced and compiled once.

    Variables that the blocks change, e.g. batch statistics, are written back into
    `blocks`. If they change nothing, e.g. in `eval()`, `blocks` is only read, and a
    caller may close over it in `jax.jit`, `jax.grad` or `jax.vmap`.

    Args:
      blocks: from `stack`; each maps x, and its part of `inputs`, to the next x.
      x: the residual stream.
      *inputs: pytrees of arrays with a leading axis of layers, e.g. random keys; None
        for no input.
      remat: what is recomputed in the backward pass, as of `family.Options`.
      lean: store the outputs of matrix products, and recompute cheap operations.
    """
    graph, *variables = nnx.split(blocks, _WEIGHTS, ...)
    run = _pure(graph, remat, lean, scanned=True)
    x, state = jax.lax.scan(run, x, (*variables, inputs))
    with writable_state():
        nnx.update(blocks, state)
    return x


@contextlib.contextmanager
def writable_state() -> Iterator[None]:
    """Replace Flax's trace error for a model that writes to its own variables.

    A model in training updates batch statistics and random counters. Flax forbids
    this if a JAX transform closes over the model.

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


# Weights are inputs of a scan but not outputs, which would be stored a second time.
_WEIGHTS = nnx.Any(nnx.Param, Frozen)


def _pure(
    graph: nnx.GraphDef[Any], remat: Remat, lean: bool = False, scanned: bool = False
) -> Callable[[Array, Any], tuple[Array, nnx.State[Any, Any]]]:
    """A block as a function of x and (weights, other variables, inputs).

    It returns the next x and the variables that the block changed.
    """

    def run(x: Array, layer: Any) -> tuple[Array, nnx.State[Any, Any]]:
        weights, state, inputs = layer
        # A copy: without a scan these are the caller's own variables, which must not
        # change inside the trace of jax.checkpoint.
        block = nnx.merge(graph, weights, state, copy=True)
        x = shard_batch(block(shard_batch(x), *inputs))
        return x, _changed(state, nnx.state(block, nnx.Not(_WEIGHTS)))

    # Inside a loop XLA cannot merge the recomputation with the first computation.
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=not scanned)
    if remat in (True, "full"):
        return checkpoint(run)
    # By default not on GPUs, where memory is plenty for what is cheap to recompute.
    if remat == "products" or (lean and platform() != "gpu"):
        return checkpoint(run, policy=_saves_products)
    if is_gathering():
        return checkpoint(run, policy=saves_no_gathered_weight)
    return run


def _changed(
    before: nnx.State[Any, Any], after: nnx.State[Any, Any]
) -> nnx.State[Any, Any]:
    """The variables of a block to which a call assigned a value.

    Assignment replaces the array object, so comparing by identity works in a trace too.
    """
    old = {path: v.get_raw_value() for path, v in nnx.to_flat_state(before)}
    new = nnx.to_flat_state(after)
    changed = [(path, v) for path, v in new if v.get_raw_value() is not old[path]]
    return nnx.from_flat_state(changed)


def _saves_products(primitive: Any, *arguments: Any, **options: Any) -> bool:
    """A policy of `jax.checkpoint`: save outputs that are expensive to compute."""
    costly = (
        *("dot_general", "conv_general_dilated", "random_bits"),
        "dot_product_attention",  # of cuDNN
    )
    return bool(primitive.name.startswith(costly))

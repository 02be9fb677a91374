"""Rewrite a run's step so that this device computes its convolutions and loops fast.

This works on the traced step, gradients included. So it holds for any model.

XLA on CPUs has fast code for convolutions with channels last. It brings the others,
such as the gradients of kernels, into this form, but not inside of loops, and a sweep
is a loop over steps: a step of a CNN of `nnx.Conv` of width 16 took 40 times as long.

Accelerators train many runs at once by `jax.vmap`. There, a convolution becomes one of
many groups, a group for each run, which they compute slowly; a product of matrices
becomes a batch of products, which they compute fast. And a loop over blocks copies the
weights of all runs in every iteration. This part has not run on an
accelerator: `python -m benchmarks.accelerator` measures it. With an earlier
prototype on an H200, a step of 60 runs of a ResNet (width 8, 8 x 8 pixels) took 90 ms
with convolutions and 11.3 ms with products; a step of 52 runs of a ViT (width 32, 8
blocks) 11.8 ms with a loop and 6.7 ms without.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array

_MANY = 8  # runs at once, from which on convolutions are products
_FEW = 256  # channels up to which they are
_SLICES = 64  # slices of an image that a product may need: 7 x 7 pixels, and more
_UNROLLED = 16  # iterations of a loop that is unrolled

# Primitives that call programs, which are rewritten too.
_CALLS = ("jit", "pjit", "scan", "while", "cond", "checkpoint")


def rewritten(
    step: Callable[..., Any], runs: int, *arguments: Any
) -> Callable[..., Any]:
    """The step of one run.

    Args:
      step: a function of pytrees of arrays.
      runs: number of runs at once, over which the result is mapped; 0 for a CPU, which
        trains one after another.
      *arguments: of the step, abstract or not.

    Returns:
      A function of the same arguments, with the same results up to rounding.
    """
    closed, shape = jax.make_jaxpr(step, return_shape=True)(*arguments)
    tree = jax.tree.structure(shape)

    def run(*arguments: Any) -> Any:
        out = _evaluate(closed, runs, jax.tree.leaves(arguments))
        return jax.tree.unflatten(tree, out)

    return run


def _evaluate(
    closed: core.ClosedJaxpr, runs: int, arguments: Sequence[Any]
) -> list[Any]:
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        given = [value(atom) for atom in equation.invars]
        name, params = equation.primitive.name, equation.params
        if name == "conv_general_dilated" and not runs:
            out = [_channels_last(*given, **params)]
        elif _is_product(equation, runs):
            out = [as_product(*given, **params)]
        else:
            if name in _CALLS:
                params = {k: _rewrite(v, runs) for k, v in params.items()}
            if name == "scan" and runs and params["length"] <= _UNROLLED:
                params["unroll"] = params["length"]
            # Releases of JAX differ in whether this returns functions too.
            bound = equation.primitive.get_bind_params(params)
            functions, params = bound if isinstance(bound, tuple) else ((), bound)
            out = equation.primitive.bind(*functions, *given, **params)
            out = out if equation.primitive.multiple_results else [out]
        values |= dict(zip(equation.outvars, out, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _rewrite(param: Any, runs: int) -> Any:
    """A parameter of an equation, with its programs rewritten."""
    if isinstance(param, core.Jaxpr):  # of `jax.checkpoint`
        return _rewrite(core.ClosedJaxpr(param, ()), runs).jaxpr
    if isinstance(param, core.ClosedJaxpr):
        return jax.make_jaxpr(lambda *given: _evaluate(param, runs, given))(
            *param.in_avals
        )
    if isinstance(param, tuple) and any(isinstance(p, core.ClosedJaxpr) for p in param):
        return tuple(_rewrite(p, runs) for p in param)
    return param


def _is_product(equation: Any, runs: int) -> bool:
    """Whether an equation is a convolution to be computed as a product."""
    if equation.primitive.name != "conv_general_dilated" or runs < _MANY:
        return False
    params, kernel = equation.params, equation.invars[1].aval.shape
    numbers = params["dimension_numbers"]
    if params["feature_group_count"] * params["batch_group_count"] > 1:
        return False
    pixels = [equation.outvars[0].aval.shape[i] for i in numbers.out_spec[2:]]
    taps = [kernel[i] for i in numbers.rhs_spec[2:]]
    few = max(kernel[i] for i in numbers.rhs_spec[:2]) <= _FEW
    return few and 0 < min(math.prod(pixels), math.prod(taps)) <= _SLICES


def _channels_last(x: Array, kernel: Array, **params: Any) -> Array:
    """A convolution of images (batch, ..., channels) and the same kernel, transposed.

    The kernel is (..., inputs, outputs).
    """
    numbers = params.pop("dimension_numbers")
    batch, channels, *sides = numbers.lhs_spec
    outputs, inputs, *taps = numbers.rhs_spec
    last, middle = len(sides) + 1, tuple(range(1, len(sides) + 1))
    taps_first = tuple(range(len(sides)))
    y = lax.conv_general_dilated_p.bind(
        x.transpose(batch, *sides, channels),
        kernel.transpose(*taps, inputs, outputs),
        dimension_numbers=lax.ConvDimensionNumbers(
            (0, last, *middle), (last, last - 1, *taps_first), (0, last, *middle)
        ),
        **params,
    )
    return y.transpose(_places(numbers.out_spec))


def _places(spec: Sequence[int]) -> list[int]:
    """The axes of an array (batch, ..., channels) in the order of a convolution's."""
    batch, channels, *sides = spec
    place = {batch: 0, channels: len(spec) - 1}
    place |= {side: 1 + i for i, side in enumerate(sides)}
    return [place[i] for i in range(len(spec))]


def as_product(
    x: Array,
    kernel: Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    **_: Any,
) -> Array:
    """`jax.lax.conv_general_dilated` of one group, as one product of matrices.

    The slices of the image that meet each place of the kernel are stacked; or, if they
    are fewer, as in the gradient of a kernel, those that give each pixel of the output.
    """
    numbers = dimension_numbers
    batch, channels, *sides = numbers.lhs_spec
    x = x.transpose(batch, *sides, channels)
    outputs, channels, *sides = numbers.rhs_spec
    kernel = kernel.transpose(*sides, channels, outputs)
    around = [(*pad, step - 1) for pad, step in zip(padding, lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *around, (0, 0, 0)])

    taps, rank = kernel.shape[:-2], len(sides)
    pixels = tuple(
        (n - (size - 1) * step - 1) // stride + 1
        for n, size, step, stride in zip(
            x.shape[1:-1], taps, rhs_dilation, window_strides, strict=True
        )
    )
    by_tap = math.prod(taps) <= math.prod(pixels)
    outer, inner = (taps, pixels) if by_tap else (pixels, taps)
    begin, step = (
        (rhs_dilation, window_strides) if by_tap else (window_strides, rhs_dilation)
    )
    slices = []
    for place in itertools.product(*map(range, outer)):
        first = [i * b for i, b in zip(place, begin, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, inner, step, strict=True)]
        slices.append(
            lax.slice(x, (0, *first, 0), (len(x), *last, x.shape[-1]), (1, *step, 1))
        )
    # (batch, pixels, taps, channels) by tap, and (batch, pixel, taps, channels).
    stacked = jnp.stack(slices, axis=rank + 1 if by_tap else 1)
    stacked = stacked.reshape(len(x), *pixels, -1)
    y = lax.dot_general(
        stacked,
        kernel.reshape(-1, kernel.shape[-1]),
        (((rank + 1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return y.transpose(_places(numbers.out_spec))

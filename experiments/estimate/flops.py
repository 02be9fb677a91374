"""Count the floating-point operations of a function, including scanned loops."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def count_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """Floating-point operations in the matrix products and convolutions of a function.

    XLA's own count includes the body of a loop only once. Other operations are not
    counted, as is usual when utilization (MFU) is computed.

    Args:
      function: is traced, not run.
      *arguments: arrays, abstract or not.

    Returns:
      Operations, over all devices. A multiplication and an addition count as two.

    Examples:
      >>> import jax.numpy as jnp
      >>> count_flops(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 5)))
      60.0
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: core.Jaxpr) -> float:
    return float(sum(map(_equation, jaxpr.eqns)))


def _equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        summed = math.prod(equation.invars[0].aval.shape[i] for i in contracted)
        return 2.0 * equation.outvars[0].aval.size * summed
    if name == "conv_general_dilated":
        return _convolution(equation)
    if name == "scan":
        return params["length"] * _count(params["jaxpr"].jaxpr)
    if name == "cond":
        return max(_count(branch.jaxpr) for branch in params["branches"])
    return sum(_count(inner) for inner in _inner(params))


def _convolution(equation: Any) -> float:
    """Operations of a convolution, without products with the zeros of dilation."""
    kernel = equation.invars[1].aval
    out = equation.outvars[0].aval
    dims = equation.params["dimension_numbers"]
    taps = math.prod(kernel.shape[i] for i in dims.rhs_spec[2:])
    summed = kernel.shape[dims.rhs_spec[1]]
    # The gradient of a strided convolution inserts zeros into its input.
    spread = math.prod(equation.params["lhs_dilation"])
    return 2.0 * out.size * taps * summed / spread


def _inner(params: dict[str, Any]) -> list[core.Jaxpr]:
    """The functions that an equation calls."""
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    called = [params[key] for key in keys if key in params]
    return [getattr(closed, "jaxpr", closed) for closed in called]

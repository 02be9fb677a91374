"""Counting the operations of a traced function, scanned loops in full."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def count_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """Multiplications and additions in the matrix products of a function.

    XLA's own count takes the body of a loop once; here it counts as often as it runs.
    What is not a matrix product or a convolution is not counted, as is usual for the
    utilization of a device's peak.

    Args:
      function: traced, not run.
      *arguments: arrays, or abstract ones.

    Returns:
      Operations, over all devices; one multiplication and one addition count two.

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
    """Products of a convolution, without those with the zeros of dilation."""
    kernel = equation.invars[1].aval
    out = equation.outvars[0].aval
    dims = equation.params["dimension_numbers"]
    taps = math.prod(kernel.shape[i] for i in dims.rhs_spec[2:])
    summed = kernel.shape[dims.rhs_spec[1]]
    # The gradient of a strided convolution spreads its input with zeros between.
    spread = math.prod(equation.params["lhs_dilation"])
    return 2.0 * out.size * taps * summed / spread


def _inner(params: dict[str, Any]) -> list[core.Jaxpr]:
    """The functions that an equation calls, once each."""
    found = []
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            value = params[key]
            found.append(value.jaxpr if hasattr(value, "jaxpr") else value)
    return found

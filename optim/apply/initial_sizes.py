"""Sizes of initial parameters, which were scaled, and readouts that start too large."""

import math
import warnings
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..rules.multipliers import RECIPES, multipliers
from ..rules.parametrizations import Parametrization
from ..rules.roles import Role
from ..scales.paths import flatten, float_leaves
from ..scales.table import ChainWarning, Scales

# Arrays that `rescale_init` returned and that still exist, by id.
_rescaled: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def remember(array: Any) -> None:
    """Note that `rescale_init` returned this array."""
    if isinstance(array, jax.Array) and not is_traced(array):
        _rescaled[id(array)] = array


def is_rescaled(array: Any) -> bool:
    """Whether `rescale_init` returned this array."""
    return _rescaled.get(id(array)) is array


class Size(NamedTuple):
    """The size of an array's entries."""

    rms: Any  # their root mean square
    error: Any  # its relative standard error, at least that of Gaussian entries
    constant: Any  # whether all entries are equal, so that the error is 0
    count: Any  # of entries


def _size(array: Any, np: Any = jnp) -> Size:
    entries = np.asarray(array)
    x = abs(entries).astype(np.float32)
    # Divide by the largest entry, so that no square overflows or underflows.
    top = np.max(x, initial=0.0)
    y = x / np.where(top > 0, top, 1)
    count = max(x.size, 1)
    square, fourth = (y**2).sum() / count, (y**4).sum() / count
    # The relative error of a root is half that of the mean of squares.
    spread = fourth / np.where(square > 0, square**2, 1) - 1
    error = 0.5 * (np.maximum(spread, 0) / count) ** 0.5
    parts = (entries.real, entries.imag) if np.iscomplexobj(entries) else (entries,)
    equal = [np.max(part) == np.min(part) for part in parts if part.size]
    constant = np.all(np.asarray(equal))
    # A few entries show no heavy tail.
    least = np.where(constant & (count > 1), 0.0, (0.5 / count) ** 0.5)
    return Size(top * square**0.5, np.maximum(error, least), constant, count)


_size_compiled = jax.jit(_size)
# Larger arrays are measured on their device, which takes a compilation.
_LARGE = 10**7


def is_traced(array: Any) -> bool:
    """Whether the values of an array are not known, as under `jax.jit`."""
    return isinstance(array, jax.core.Tracer)


def size_of(array: Any) -> Size:
    """The size of an array, in floats where the values are known."""
    if is_traced(array):
        return _size(array)
    here = getattr(array, "is_fully_addressable", True)
    if here and array.size <= _LARGE:
        return Size(*map(float, _size(array, np)))
    with jax.ensure_compile_time_eval():  # as in `jax.eval_shape(lambda: tx.init(p))`
        return Size(*map(float, _size_compiled(array)))


def warn_of_readouts(params: Any, scales: Scales, point: Parametrization) -> None:
    """Warn if a readout starts as large as in the standard parametrization.

    Its gain, the standard deviation times fan_in^½, is compared with that of hidden
    kernels. Frameworks give both the same one, from 0.5 to 2; under the parametrization
    the readout's is smaller. Values that are on other machines, or not known as under
    `jax.jit`, are not judged.
    """
    kernels = {
        path: array
        for path, array in float_leaves(params).items()
        if path in scales and scales[path].in_axes and _is_known(array)
    }
    # Readouts of the zoo are right.
    readouts = [p for p in kernels if scales[p].role is Role.OUTPUT]
    own = [p for p in readouts if scales[p].origin != "axis names"]
    outputs = [p for p in own if not scales[p].segments]
    factors = {p: multipliers(scales[p], point).init_std for p in outputs}
    lowered = {p: f * scales[p].width_in ** 0.5 for p, f in factors.items()}
    outputs = [p for p in outputs if lowered[p] < 0.8 and not is_rescaled(kernels[p])]
    # A few tell the usual gain; to measure all of a large model takes seconds.
    hidden = [p for p in kernels if scales[p].role is Role.HIDDEN]
    hidden = hidden[:: max(len(hidden) // 8, 1)]
    if not outputs or not hidden:
        return
    sizes = {p: size_of(kernels[p]) for p in (*outputs, *hidden)}
    gains = {p: sizes[p].rms * scales[p].fan_in ** 0.5 for p in sizes}
    # Zeros are the last kernels of branches.
    usual = float(np.median([g for p in hidden if (g := gains[p])] or [0.0]))
    for path in outputs:
        if sizes[path].constant or not gains[path] or not 0.3 < usual < 2:
            continue
        error = sizes[path].error
        above = math.log(gains[path] / usual)
        as_usual = abs(above) < 3 * error + 0.02
        if as_usual and above - math.log(lowered[path]) > 4.5 * error + 0.02:
            warnings.warn(
                f"the readout {path!r} starts as large as in the standard "
                f"parametrization, {1 / lowered[path]:.3g} times as large as under "
                f"{point.label}: apply rescale_init to the parameters, and train its "
                "result (for an NNX module, nnx.update(model, params)). If that was "
                "done, and the arrays were copied or trained since, all is well",
                ChainWarning,
                stacklevel=4,
            )
            return


def warn_of_small(
    params: Any, scales: Scales, point: Parametrization, optimizer: str
) -> None:
    """Warn of weights that are too small for updates relative to them."""
    least = RECIPES[optimizer].least
    if least is None:
        return
    differs = {
        path
        for path, s in scales.items()
        if multipliers(s, point, "relative").learning_rate
        != multipliers(s, point, "adam").learning_rate
    }
    known = {p: x for p, x in flatten(params) if p in differs and _is_known(x)}
    sizes = {path: size_of(array).rms for path, array in known.items()}
    small = [path for path, size in sizes.items() if size < least or size == 0]
    if small:
        size = f"smaller than {least:g}" if least else "at zero"
        more = f" (and {len(small) - 1} more)" if len(small) > 1 else ""
        warnings.warn(
            f"{small[0]!r}{more} starts {size}, where the updates of {optimizer} "
            "do not follow the size of the weight, so its learning rate does not "
            "transfer over width; start it larger, or train it by optim.adamw",
            ChainWarning,
            stacklevel=5,
        )


def _is_known(array: Any) -> bool:
    """Whether an array has entries, and their values are known on this machine."""
    return (
        isinstance(array, jax.Array | np.ndarray)
        and not is_traced(array)
        and getattr(array, "is_fully_addressable", True)
        and array.size > 0
    )

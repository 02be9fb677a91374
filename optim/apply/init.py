"""`rescale_init`: give parameters the initial sizes of a parametrization."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy

from ..reading.leaves import check_takes_nothing, is_function, is_nnx
from ..reading.lists import Pairing
from ..rules.multipliers import carried, is_one, joined, multipliers
from ..rules.parametrizations import Parametrization
from ..rules.parametrizations import parametrization as named
from ..rules.roles import ParamScale
from ..scales.paths import float_leaves, map_float_leaves, trainable
from ..scales.table import Scales
from .initial_sizes import Size, is_rescaled, is_traced, remember, size_of
from .transforms import applied, forward_multipliers, resolve, times


def rescale_init(params: Any, scales: Scales, *, base: Any = None) -> Any:
    """Rescale a framework's initialization to that of a parametrization.

    The initial sizes of both models are measured, and every parameter of the target
    gets the base's size times the parametrization's ratio. So any initializers will do,
    and a parameter that follows the parametrization already stays as it is, e.g. after
    an earlier call (but for copies with few entries, whose size may not tell this).
    Under `jax.jit` or `jax.vmap` nothing is checked.

    Args:
      params: parameters of the target, as its framework initialized them. Leaves that
        are not floating-point arrays are returned unchanged.
      scales: their scales, from `infer_scales`, with their parametrization. Groups of
        `for_modules` are multiplied by their `init_scale` and `multiplier` too. Models
        of `mupax.zoo` need no rescaling, and get the factors of groups alone.
      base: the model of the base size, with initial values: its parameters, an NNX or
        Equinox module, or a function of no arguments that builds one. By default the
        base that `infer_scales` got; needed if that was only shapes, or was trained.

    Returns:
      A tree like `params`.

    Raises:
      ValueError: a parameter without a scale, or of another shape; the base has no
        values, or is another model; a parameter is zero in one model only; the base or
        the target is trained; the model belongs to `mupax.zoo` and has no groups; a
        gain of 1 + w in half precision carries a small multiplier.

    Source: Tensor Programs V, Table 3; Yaida eqs. 3.16-3.17.

    Examples:
      >>> import jax
      >>> from mupax import optim
      >>> def model(n):
      ...     embed, head = jax.random.normal(jax.random.key(0), (2, 500, n)) / n**0.5
      ...     return {"embed": embed, "head": head.T}
      >>> axes = {"embed": "vocab: d", "head": "d -> vocab"}
      >>> base, target = model(16), model(64)
      >>> scales = optim.infer_scales(base, target, axes=axes)
      >>> params = optim.rescale_init(target, scales)
      >>> [round(float(params[k].std() / base[k].std()), 2) for k in params]
      [1.0, 0.25]
    """
    _check_arguments(params, base)
    point = resolve(scales)
    given = float_leaves(params)
    scales.check_params(given)
    groups = {path: module.init for path, module in scales.modules.items()}
    if _made_elsewhere(scales, is_changed=bool(groups)):
        once = {p: factor for p, factor in groups.items() if not is_rescaled(given[p])}
        return _multiply(params, once)
    _check_precision(given, scales, point)
    small = _base_arrays(scales.base if base is None else base, scales)
    return _multiply(
        params,
        {
            path: _factor(scale, point, given[path], small[path], groups.get(path, 1.0))
            for path, scale in scales.items()
            if path in given
        },
        {p: joined(s, [part.offset for part in s.parts]) for p, s in scales.items()},
    )


def apply_multipliers(params: Any, scales: Scales) -> Any:
    """Return effective weights: each stored weight times its forward multiplier.

    Needed for your own model under a gauge with forward multipliers: call the model
    with the result, and differentiate through it. Zoo models do this themselves.

    Args:
      params: the stored parameters.
      scales: from `infer_scales`.

    Raises:
      ValueError: a parameter without a scale, or of another shape; see
        `scale_by_parametrization` for the rest.

    Source: Yaida 2022, eq. 2.8; Tensor Programs V, Table 8.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(
      ...     base, params, axes={"out": "i -> o"},
      ...     parametrization=optim.parametrization("mup", gauge="table8"))
      >>> optim.apply_multipliers(params, scales)["out"][0, 0]
      Array(0.25, dtype=float32)
    """
    point = resolve(scales)
    applied.add(forward_multipliers(scales))

    def multiply(path: str, leaf: Any) -> Any:
        scales.check_leaf(path, leaf)
        return times(leaf, multipliers(scales[path], point).forward)

    return map_float_leaves(multiply, params)


def _check_arguments(params: Any, base: Any) -> None:
    if is_function(params) or is_nnx(params):
        raise ValueError(
            "rescale_init takes parameters, not a module or a function that builds "
            "one: use params = nnx.state(model, nnx.Param), then nnx.update(model, "
            "rescale_init(params, ...))"
        )
    if is_function(base):
        check_takes_nothing(base, "base")


def _check_precision(
    params: Mapping[str, Any], scales: Scales, point: Parametrization
) -> None:
    """Raise a `ValueError` for a small 1 + w of which w has too few digits near -1."""
    for path, array in params.items():
        for part in scales[path].parts:
            factor = carried(part, point)
            step = float(jnp.finfo(array.dtype).eps)  # type: ignore[no-untyped-call]
            if part.offset and isinstance(factor, float) and step > 0.05 * factor:
                raise ValueError(
                    f"the model uses {path!r} as {part.offset:g} + w, which carries a "
                    f"multiplier of {factor:.4g}, so that w stays near "
                    f"{-part.offset:g}, where {array.dtype} has steps of {step:.2g}; "
                    f"keep it in float32, or multiply by {factor:.4g} in the model"
                )


def _made_elsewhere(scales: Scales, *, is_changed: bool) -> bool:
    """Whether the parameters have the sizes of their parametrization already."""
    named = [path for path, scale in scales.items() if scale.origin == "axis names"]
    if named and not is_changed:
        raise ValueError(
            f"parameter {named[0]!r} belongs to a model of mupax.zoo, which already "
            "has the initial sizes of its parametrization; leave rescale_init out"
        )
    return bool(named)


# --- the arrays of a tree ---


def _base_arrays(base: Any, scales: Scales) -> dict[str, Any]:
    """For each path of the target, its counterpart in the base."""
    model = base() if is_function(base) else base
    is_pair = isinstance(model, tuple) and len(model) == 2 and callable(model[0])
    if is_pair and trainable(model) is model:
        model = model[1]  # (forward pass, parameters), as `infer_scales` takes it
    if is_nnx(model):
        from flax import nnx

        model = nnx.state(model, nnx.Param)
    arrays = float_leaves(model)
    pairing = Pairing(scales, arrays)

    def twin(path: str, scale: ParamScale) -> Any:
        """The parameter at this path, or its counterpart in another block."""
        array = arrays.get(path)
        if getattr(array, "shape", None) != scale.base_shape:
            array = arrays.get(pairing.twin(path) or "")
        is_same = getattr(array, "shape", None) == scale.base_shape
        if not is_same or isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(
                f"the base has no initial values of {path!r}, of shape "
                f"{scale.base_shape}; pass base=..., the model that infer_scales got "
                "as base, or a function that builds it (for Linen and Haiku, "
                "module.init(key, x))"
            )
        return array

    return {path: twin(path, scale) for path, scale in scales.items()}


def _multiply(
    tree: Any, factors: Mapping[str, Any], offsets: Mapping[str, Any] | None = None
) -> Any:
    """Multiply leaves, each together with the offset that the model adds to it."""

    def multiply(path: str, leaf: Any) -> Any:
        if is_one(factors.get(path, 1)):
            return leaf
        offset = (offsets or {}).get(path, 0.0)
        out = (times(leaf + offset, factors[path]) - offset).astype(leaf.dtype)
        remember(out)
        return out

    return map_float_leaves(multiply, tree)


# --- sizes, measured ---


# Standard errors that chance exceeds in 7 of a million parameters.
_SURE = 4.5
# Relative error of rounded constants in initializers.
_MARGIN = 0.02


def _factor(
    scale: ParamScale, point: Parametrization, array: Any, base: Any, group: Any
) -> Any:
    """What gives a parameter the base's size times the ratio of rule and group."""
    # The ratio of usual initializers, which draw a fused parameter as a whole.
    usual = multipliers(scale, named("sp")).init_std
    factors = []
    for label, part in zip(scale.labels, scale.parts, strict=True):
        rule = multipliers(part, point).init_std * group
        large, small = array, base
        if scale.segments:
            large, small = part.place.of(array), part.base_place.of(base)
        if part.offset:
            small, large = small + part.offset, large + part.offset
        sizes = size_of(small), size_of(large)
        traced = any(map(is_traced, (small, large, rule)))
        if not traced:
            _check_measured(label, *sizes)
        likely = (rule, rule if is_rescaled(array) else usual)
        factors.append(rule / _ratio(likely, *sizes, traced=traced))
    return joined(scale, factors)


def _ratio(likely: tuple[Any, Any], small: Size, large: Size, *, traced: bool) -> Any:
    """The ratio of both sizes; exact if it agrees with a likely one.

    The rule's, the first, if a size is zero.
    """
    np: Any = jnp if traced else numpy
    is_zero = (small.rms == 0) | (large.rms == 0)
    ratio = measured = large.rms / np.where(is_zero, 1, small.rms)
    error = (small.error**2 + large.error**2) ** 0.5
    for each in likely:
        chance = abs(np.log(np.where(is_zero, 1, measured) / each))
        ratio = np.where(chance <= np.maximum(_SURE * error, _MARGIN), each, ratio)
    ratio = np.where(is_zero, likely[0], ratio)
    return ratio if traced else float(ratio)


def _check_measured(path: str, small: Size, large: Size) -> None:
    if (small.rms == 0) != (large.rms == 0):
        where = ("base", "target") if small.rms == 0 else ("target", "base")
        raise ValueError(
            f"parameter {path!r} starts at zero in the {where[0]} and not in the "
            f"{where[1]}; build both by the same code"
        )
    several = small.count > 1 and large.count > 1
    if small.rms and several and small.constant != large.constant:
        trained = "target" if small.constant else "base"
        remedy = (
            "call rescale_init before training or restoring"
            if small.constant
            else "pass base=..., a function that builds it with initial values"
        )
        raise ValueError(
            f"parameter {path!r} starts with equal entries in the other model and "
            f"not in the {trained}, as if that were trained; {remedy}"
        )

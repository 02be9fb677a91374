"""`rescale_init`: give parameters the initial sizes of a parametrization."""

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..reading.leaves import check_takes_nothing, is_nnx
from ..reading.lists import Pairing
from ..rules.multipliers import multipliers
from ..rules.parametrizations import parametrization as named
from ..rules.roles import ParamScale, Role
from ..scales.paths import float_leaves, map_float_leaves
from ..scales.table import Scales
from .chain_warning import ChainWarning
from .initial_sizes import Size, deviation, freedoms, is_traced, sizes_of
from .initialized import rescaled, scaled_by_path
from .transforms import applied, forward_multipliers, resolve

# Values of `init=`: the assumed dependence of initial sizes on width.
STANDARD, CONSTANT = "standard", "constant"

# Ratios of initial sizes count as equal if their logarithms differ by less than this.
_SAME = 0.1


def rescale_init(
    params: Any,
    scales: Scales,
    *,
    base: Any = None,
    init: str | None = None,
) -> Any:
    """Rescale a framework's initialization to that of a parametrization.

    With `base`, the sizes of both models are measured, and every parameter gets the
    base's size times the parametrization's ratio, for any initializers. Without it, a
    standard initialization is assumed, and a parameter that certainly contradicts the
    assumption raises an error. Under `jax.jit` or `jax.vmap` values are unknown: there
    `base` still works, but nothing is checked.

    Args:
      params: parameters of the target, as its framework initialized them. Leaves that
        are not floating-point arrays are returned unchanged.
      scales: their scales, from `infer_scales`, with their parametrization. Models of
        `mupax.zoo` need no rescaling.
      base: the model of the base size, with values: its parameters, an NNX or
        Equinox module, or a function of no arguments that builds one (recommended;
        the base is small).
      init: the assumption on the initializers. "standard" (the default): kernels have
        standard deviation ∝ fan_in^-½; that of embeddings, biases and norm scales does
        not depend on width. "constant": no standard deviation depends on width, e.g.
        N(0, 0.02) in GPT-2. With `base`, the assumption is checked against the
        measured sizes.

    Returns:
      The parameters, each multiplied by a factor. From a standard initialization to μP
      only readouts change, by m^-½.

    Raises:
      ValueError: `params` do not belong to `scales`, are those of a zoo model, or were
        rescaled before, or look trained beside `base`; or the size of a parameter
        contradicts the assumption. The message names the path and what to do.

    Warns:
      ChainWarning: under `jax.jit` or `jax.vmap`, an embedding of Flax without `base`
        and `init`.

    Source: Tensor Programs V, Table 3; Yaida eqs. 3.16-3.17.

    Examples:
      >>> import jax
      >>> from flax import nnx
      >>> from mupax import optim
      >>> class Bigram(nnx.Module):
      ...     def __init__(self, width):
      ...         rngs = nnx.Rngs(0)
      ...         self.embed = nnx.Embed(500, width, rngs=rngs)  # starts at width^-½
      ...         self.head = nnx.Linear(width, 500, rngs=rngs)
      ...     def __call__(self, tokens):
      ...         return self.head(self.embed(tokens))
      >>> base, target = lambda: Bigram(16), Bigram(64)
      >>> tokens = jax.ShapeDtypeStruct((1, 8), int)
      >>> scales = optim.infer_scales(base, target, inputs=(tokens,))
      >>> params = nnx.state(target, nnx.Param)
      >>> params = optim.rescale_init(params, scales, base=base)
      >>> small = nnx.state(base(), nnx.Param)
      >>> ratios = jax.tree.map(lambda b, t: t.std() / b.std(), small, params)
      >>> embed, head = ratios.embed.embedding, ratios.head.kernel
      >>> round(float(embed.get_value()), 1), round(float(head.get_value()), 2)
      (1.0, 0.25)
    """
    _check_arguments(params, base, init)
    _check_made_elsewhere(scales)
    point = resolve(scales)
    given = float_leaves(params)
    scales.check_params(given)
    _check_values(given)
    # SP is the standard initialization; without powers of width it is a constant one.
    standard = named("sp")
    leaves = {
        path: _Leaf(
            scale,
            given[path],
            rule=multipliers(scale, point).init_std,
            assumed=1.0 if init == CONSTANT else multipliers(scale, standard).init_std,
        )
        for path, scale in scales.items()
        if path in given
    }
    _check_rescaled_before(leaves, base)
    if base is not None:
        factors = _measured_factors(leaves, _base_arrays(base, scales), init)
    else:
        _check_assumption(leaves, init)
        factors = {path: leaf.rule / leaf.assumed for path, leaf in leaves.items()}
    return _multiply(params, factors)


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

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(
      ...     mlp(4), mlp(16), axes={".": "i -> o"},
      ...     parametrization=optim.parametrization("mup", gauge="table8"))
      >>> optim.apply_multipliers(mlp(16), scales)["out"][0, 0]
      Array(0.25, dtype=float32)

    Source: Yaida 2022, eq. 2.8; Tensor Programs V, Table 8.
    """
    pairs = forward_multipliers(scales)
    applied.add(pairs)
    factors = dict(pairs)

    def multiply(path: str, leaf: Any) -> Any:
        scales.check_leaf(path, leaf)
        # A Python float is weakly typed, so bf16 stays bf16.
        return leaf if factors[path] == 1.0 else leaf * factors[path]

    return map_float_leaves(multiply, params)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One parameter of the target, with ratios of initial sizes, target over base.

    Attributes:
      scale: its scale.
      array: its values.
      rule: the ratio under the parametrization.
      assumed: the ratio that the initializers are assumed to give.
    """

    scale: ParamScale
    array: Any
    rule: float
    assumed: float

    @property
    def changes(self) -> bool:
        """Whether the parametrization's ratio differs from the assumed one."""
        return not _alike(self.rule, self.assumed)


def _check_arguments(params: Any, base: Any, init: str | None) -> None:
    if init not in (None, STANDARD, CONSTANT):
        raise ValueError(f"init={init!r} must be {STANDARD!r} or {CONSTANT!r}")
    if is_nnx(params):
        raise ValueError(
            "rescale_init takes parameters, not a module: use params = nnx.state("
            "model, nnx.Param), then nnx.update(model, rescale_init(params, ...))"
        )
    if _is_function(base):
        check_takes_nothing(base, "base")


def _check_values(arrays: Mapping[str, Any]) -> None:
    for path, array in arrays.items():
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(
                f"parameter {path!r} is only a shape, without values to rescale; pass "
                "arrays, or trace the call: jax.eval_shape(lambda p: "
                "rescale_init(p, ...), params)"
            )


def _check_made_elsewhere(scales: Scales) -> None:
    for path, scale in scales.items() if isinstance(scales, Scales) else ():
        if scale.origin == "axis names":
            raise ValueError(
                f"parameter {path!r} belongs to a model of mupax.zoo, which already "
                "has the initial sizes of its parametrization; leave rescale_init out"
            )


# --- the arrays of a tree ---


def _base_arrays(base: Any, scales: Scales) -> dict[str, Any]:
    """For each path of the target, its counterpart in the base."""
    model = base() if _is_function(base) else base
    if isinstance(model, Scales):
        raise ValueError("base= is a Scales; pass the base model, or its parameters")
    if isinstance(model, tuple) and len(model) == 2 and callable(model[0]):
        model = model[1]  # (forward pass, parameters), as `infer_scales` takes it
    if hasattr(model, "init") and hasattr(model, "apply"):
        raise ValueError(
            "base= is a module without parameters of its own (Linen, Haiku); pass its "
            "initialized parameters: base=module.init(key, x)"
        )
    if is_nnx(model):
        from flax import nnx

        model = nnx.state(model, nnx.Param)
    arrays = float_leaves(model)
    pairing = Pairing(scales, arrays)
    return {path: _twin(path, scale, arrays, pairing) for path, scale in scales.items()}


def _is_function(model: Any) -> bool:
    # NNX and Equinox modules are callable too, but they are models already.
    return (
        inspect.isroutine(model)
        or inspect.isclass(model)
        or isinstance(model, functools.partial)
    )


def _twin(
    path: str, scale: ParamScale, arrays: Mapping[str, Any], pairing: Pairing
) -> Any:
    """The base's parameter at this path, or its counterpart in another block."""

    def fits(path: str | None) -> bool:
        array = None if path is None else arrays.get(path)
        return array is not None and array.shape == scale.base_shape

    twin = path if fits(path) else pairing.twin(path)
    if twin is None or not fits(twin):
        raise ValueError(
            f"base= has no parameter {path!r} of shape {scale.base_shape}; pass the "
            "model that infer_scales got as base"
        )
    if isinstance(arrays[twin], jax.ShapeDtypeStruct):
        raise ValueError(
            f"base= has only the shape of {twin!r}; pass a function that builds "
            "the base, so that its initial values are known"
        )
    return arrays[twin]


def _multiply(tree: Any, factors: Mapping[str, Any]) -> Any:
    def multiply(path: str, leaf: Any) -> Any:
        if path not in factors:
            return leaf
        factor = factors[path]
        if isinstance(factor, float):
            if factor == 1.0:
                return leaf
            out = leaf * factor
        else:
            out = (leaf * factor).astype(leaf.dtype)
        rescaled.add(out)
        return out

    return map_float_leaves(multiply, tree)


# --- was it applied before? ---


def _check_rescaled_before(leaves: Mapping[str, _Leaf], base: Any) -> None:
    for path, leaf in leaves.items():
        if leaf.array in rescaled and leaf.changes:
            raise ValueError(_already(path))
        if base is not None and leaf.array in scaled_by_path:
            raise ValueError(
                f"parameter {path!r} was scaled by scale_init_by_path, which "
                "rescale_init(base=...) would undo; call rescale_init first"
            )


def _already(path: str) -> str:
    return (
        f"parameter {path!r} already has its initial size under the parametrization: "
        "rescale_init was applied before, or the model's initializers follow it; "
        "apply rescale_init once, to parameters as their framework initialized them"
    )


# --- sizes, measured ---


def _measured_factors(
    leaves: Mapping[str, _Leaf], base: Mapping[str, Any], init: str | None
) -> dict[str, Any]:
    """Factors that give every parameter the base's size times the rule's ratio."""
    small = sizes_of(base)
    large = sizes_of({path: leaf.array for path, leaf in leaves.items()})
    traced = is_traced([*base.values(), *(leaf.array for leaf in leaves.values())])
    if traced:
        return {p: _traced_factor(f, small[p], large[p]) for p, f in leaves.items()}
    _check_measured(leaves, small, large, init)
    factors = {}
    for path, leaf in leaves.items():
        if large[path].rms == 0:
            factors[path] = 1.0
            continue
        ratio = large[path].rms / small[path].rms
        fits = _agrees(small[path], large[path], leaf.assumed)
        # Exact if the initializer agrees with the assumption.
        factors[path] = leaf.rule / (leaf.assumed if fits else ratio)
    return factors


def _traced_factor(leaf: _Leaf, small: Size, large: Size) -> Any:
    empty = (small.rms == 0) | (large.rms == 0)
    ratio = jnp.where(empty, 1, large.rms) / jnp.where(empty, 1, small.rms)
    noise = _SURE * (small.error**2 + large.error**2) ** 0.5 + _MARGIN
    fits = jnp.abs(jnp.log(ratio / leaf.assumed)) <= noise
    factor = leaf.rule / jnp.where(fits, leaf.assumed, ratio)
    return jnp.where(empty, 1.0, factor)


# Standard errors: chance exceeds the first in 7 of a million parameters, the second in
# 3 of a hundred thousand models.
_SURE, _ONE_SIDED = 4.5, 4.0
# Relative error of rounded constants in initializers.
_MARGIN = 0.02


def _agrees(small: Size, large: Size, ratio: float) -> bool:
    """Whether chance and rounding explain the difference of a ratio from this one."""
    off = math.log(large.rms / small.rms / ratio)
    return abs(off) <= _MARGIN or abs(deviation(small, large, ratio)) <= _SURE


def _check_measured(
    leaves: Mapping[str, _Leaf],
    small: Mapping[str, Size],
    large: Mapping[str, Size],
    init: str | None,
) -> None:
    changing: dict[str, _Leaf] = {}
    for path, leaf in leaves.items():
        b, t = small[path], large[path]
        if (b.rms == 0) != (t.rms == 0):
            where = ("base", "target") if b.rms == 0 else ("target", "base")
            raise ValueError(
                f"parameter {path!r} starts at zero in the {where[0]} and not in the "
                f"{where[1]}; build both by the same code"
            )
        if b.rms == 0:
            continue
        if b.constant and b.count > 1 and not t.constant and t.count > 1:
            raise ValueError(
                f"parameter {path!r} starts with equal entries in the base and not in "
                "the target, as if it were trained; call rescale_init once, before "
                "training or restoring"
            )
        if init is not None and not _agrees(b, t, leaf.assumed):
            raise ValueError(
                f"parameter {path!r} starts {t.rms / b.rms:.3g} times as large in the "
                f"target as in the base, but init={init!r} means "
                f"{leaf.assumed:.3g} times; leave init out to use the measured sizes"
            )
        if leaf.changes:
            changing[path] = leaf
    if _follow_the_rule(changing, small, large):
        raise ValueError(_already(next(iter(changing))))


def _follow_the_rule(
    leaves: Mapping[str, _Leaf], small: Mapping[str, Size], large: Mapping[str, Size]
) -> bool:
    """Whether sizes follow the rule, and all together exclude what is assumed.

    A readout with few outputs has so few entries that its size agrees with both.
    """
    total = weight = 0.0
    for path, leaf in leaves.items():
        b, t = small[path], large[path]
        if not _agrees(b, t, leaf.rule):
            return False
        # The best weight of a standard score is the expected one (Stouffer 1949).
        change = math.log(leaf.rule / leaf.assumed)
        score = change / sum(0.5 / freedom for freedom in freedoms(b, t)) ** 0.5
        total += score * deviation(b, t, leaf.assumed)
        weight += score**2
    return weight > 0 and total / weight**0.5 > _ONE_SIDED


# --- sizes, assumed ---


class _Law(NamedTuple):
    """An initializer's standard deviation, and its ratio between target and base."""

    text: str
    std: float
    ratio: float


def _check_assumption(leaves: Mapping[str, _Leaf], init: str | None) -> None:
    """Raise a `ValueError` if a size certainly contradicts the assumption."""
    kernels = {
        path: leaf
        for path, leaf in leaves.items()
        if leaf.scale.role in (Role.INPUT, Role.HIDDEN, Role.OUTPUT)
    }
    if is_traced(leaf.array for leaf in kernels.values()):
        tables = [p for p in kernels if p.rpartition("/")[2] == "embedding"]
        if tables and init is None:
            warnings.warn(
                f"under jit or vmap the initial size of {tables[0]!r} is not known; "
                "embeddings of Flax start smaller in wider models by default, which "
                "needs base=... (a function that builds the base model). If it starts "
                "at the same size at every width, pass init='standard'",
                ChainWarning,
                stacklevel=3,
            )
        return
    sizes = sizes_of({path: leaf.array for path, leaf in kernels.items()})
    # Zeros stay zeros; equal entries are not a random initialization.
    sizes = {p: s for p, s in sizes.items() if s.rms > 0 and not s.constant}
    unexplained = {}
    for path, size in sizes.items():
        leaf = kernels[path]
        laws = _laws(leaf.scale, path)
        likely = _matching(laws, size, _SURE)
        if any(_alike(law.ratio, leaf.assumed) for law in likely):
            continue
        laws = _matching(laws, size)
        if not laws:
            unexplained[path] = size
        elif init != CONSTANT or _round(size) is None:
            raise ValueError(_contradiction(path, size, laws[0], leaf, init))
    if init == CONSTANT:
        return
    for path, size in unexplained.items():
        leaf = kernels[path]
        done = leaf.rule / leaf.assumed
        laws = [law._replace(std=law.std * done) for law in _fan_in(leaf.scale)]
        if leaf.changes and _matching(laws, size):
            raise ValueError(_already(path))
    summing = {p for p in sizes if kernels[p].scale.role is not Role.INPUT}
    if summing <= set(unexplained):
        _check_constant({p: kernels[p] for p in summing}, unexplained)


def _check_constant(leaves: Mapping[str, _Leaf], sizes: Mapping[str, Size]) -> None:
    """Raise a `ValueError` if kernels of different fan-ins have the same round size."""
    stds = {path: _round(sizes[path]) for path in leaves}
    for path, std in stds.items():
        if std is None:
            continue
        same = [leaves[p].scale.fan_in for p in leaves if stds[p] == std]
        if max(same) >= 1.5 * min(same) or _near(sizes[path]) <= 0.01:
            law = _Law("probably the same at every width", std, 1.0)
            raise ValueError(_contradiction(path, sizes[path], law, leaves[path], None))


def _round(size: Size) -> float | None:
    """The round standard deviation that matches this size, or None."""
    laws = [_Law("", std * cut, std) for std in _ROUND for cut in (1.0, _TRUNCATED)]
    return next((law.ratio for law in _matching(laws, size)), None)


def _near(size: Size, errors: float = 3.0) -> float:
    # Standard errors, plus a margin for rounded constants.
    return errors * size.error + 0.002


def _matching(laws: list[_Law], size: Size, errors: float = 3.0) -> list[_Law]:
    if _near(size) > 0.1:  # too few entries to distinguish laws
        return []
    near = _near(size, errors)
    return [law for law in laws if abs(math.log(size.rms / law.std)) <= near]


def _contradiction(
    path: str, size: Size, law: _Law, leaf: _Leaf, init: str | None
) -> str:
    remedy = "give it an initializer that does not depend on the width"
    if init == CONSTANT:
        remedy = "leave init='constant' out"
    elif law.ratio == 1.0:
        remedy = "pass init='constant' if this holds for all parameters"
    return (
        f"parameter {path!r} starts with standard deviation {size.rms:.4g}, "
        f"{law.text}: {law.ratio:.3g} times the base's, but "
        f"{leaf.assumed:.3g} times is assumed; "
        "pass base=... (a function that builds the base model) to measure both, "
        f"or {remedy}"
    )


# Gains of the usual initializers: LeCun (Flax), He, PyTorch and Equinox (uniform on
# ±fan_in^-½), tanh's 5/3 of PyTorch.
_GAINS = (1.0, 2**0.5, 3**-0.5, 5 / 3)
# Standard deviation of a normal variable cut at ±2, as jax.nn.initializers
# .truncated_normal draws it, without a correction.
_TRUNCATED = 0.87962566


def _fans(scale: ParamScale, shape: tuple[int, ...]) -> tuple[int, int]:
    inputs = math.prod(shape[a] for a in scale.in_axes)
    outputs = math.prod(shape[a] for a in scale.out_axes)
    return max(inputs, 1), max(outputs, 1)


def _window(scale: ParamScale) -> int:
    """Number of places that a convolution of two or more dimensions sums over."""
    if len(scale.in_axes) < 3:
        return 1
    out_last = max(scale.out_axes, default=-1) > max(scale.in_axes)
    channels = max(scale.in_axes) if out_last else min(scale.in_axes)
    return _fans(scale, scale.shape)[0] // scale.shape[channels]


def _power(text: str, gain: float, target: float, base: float) -> _Law:
    return _Law(text, gain * target**-0.5, (target / base) ** -0.5)


def _fan_in(scale: ParamScale) -> list[_Law]:
    new, old = _fans(scale, scale.shape)[0], _fans(scale, scale.base_shape)[0]
    return [_power("∝ fan_in^-½", gain, new, old) for gain in _GAINS]


def _laws(scale: ParamScale, path: str) -> list[_Law]:
    """Standard deviations that common shape-dependent initializers would give."""
    (fan_in, fan_out), (base_in, base_out) = (
        _fans(scale, shape) for shape in (scale.shape, scale.base_shape)
    )
    window = _window(scale)  # Flax counts it in both fans
    outs = fan_out * window, base_out * window
    text = "∝ fan_out^-½" if window > 1 else "features^-½, as in nnx.Embed"
    features = [_power(text, gain, *outs) for gain in _GAINS[:2]]
    if path.rpartition("/")[2] == "embedding":  # Flax counts features as fan-in
        return features
    glorot = "∝ (fan_in + fan_out)^-½ (Glorot)"
    longest = max(fan_in, fan_out), max(base_in, base_out)
    return [
        *_fan_in(scale),
        *features,
        _power(glorot, 2**0.5, fan_in + outs[0], base_in + outs[1]),
        _power("∝ max(fan_in, fan_out)^-½ (orthogonal)", 1.0, *longest),
    ]


# Standard deviations that people write in code.
_ROUND = (1.0, 0.5, 0.1, 0.05, 0.04, 0.03, 0.025, 0.02, 0.015, 0.01, 0.006, 0.005, 1e-3)


def _alike(one: float, other: float) -> bool:
    return abs(math.log(one / other)) <= _SAME

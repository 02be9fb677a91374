"""Stateless Optax transforms that multiply each leaf by one factor."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..rules.multipliers import family_of, is_one, multipliers
from ..rules.parametrizations import Parametrization, parametrization
from ..rules.roles import Role
from ..scales.paths import map_with_paths
from ..scales.probe import Acting, mode
from ..scales.table import ChainWarning, Scales, check_depth, check_scales
from .initial_sizes import warn_of_readouts, warn_of_small


def scale_by_parametrization(
    scales: Scales, family: str = "adam"
) -> optax.GradientTransformation:
    """Multiply each parameter's update by its learning-rate multiplier; stateless.

    Put it after the transform that determines the update (e.g. `optax.scale_by_adam`)
    and before weight decay and learning rate, which it must not scale. Chain it by
    `optim.chain` instead of `optax.chain` to have the order checked.

    Args:
      scales: from `infer_scales` or `mupax.zoo.scales`, with their parametrization.
      family: family of the optimizer whose updates come in: "sgd", "adam", "spectral",
        "relative" or another `Family`; or the name of an optimizer, e.g. "lion". "muon"
        and the like stand for whole optimizers, with AdamW for all but hidden matrices;
        after `optax.contrib.scale_by_muon` pass "spectral".

    Raises:
      ValueError: the family is unknown, the parametrization's depth rule does not
        apply to the model, or a group of `for_modules` has a factor of weight decay;
        from `init`, a parameter has no scale or another shape.

    Warns:
      ChainWarning: from `init`, a readout that starts as large as in the standard
        parametrization: `rescale_init` was forgotten. From the first `update`, a gauge
        with forward multipliers, where `apply_multipliers` was not called before.

    Source: the learning-rate rows of Tensor Programs V, Table 3, and Tensor Programs
    VI, Table 1 and Definition 6.1.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> tx = optax.chain(
      ...     optax.scale_by_adam(),
      ...     optim.scale_by_parametrization(scales, family="adam"),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> tx.update(params, tx.init(params), params)[0]["out"][0, 0].round(3)
      Array(-0.025, dtype=float32)
    """
    resolve(scales)
    refuse_decay(scales, "scale_by_parametrization")
    return scale_updates(family, scales)


def scale_updates(
    optimizer: str, scales: Scales, **options: Any
) -> optax.GradientTransformation:
    """`scale_by_parametrization` for `multipliers` of an optimizer and its options."""
    point, family = resolve(scales), family_of(optimizer)
    rules = {p: multipliers(s, point, optimizer, **options) for p, s in scales.items()}
    rates = {path: rule.learning_rate for path, rule in rules.items()}
    groups = {path: module.update(family) for path, module in scales.modules.items()}
    scaling = multiply_leaves(Acting(scales, rates, groups, is_scaling=True))
    missing = missing_multipliers(scales)

    def init(params: optax.Params) -> optax.OptState:
        warn_of_readouts(params, scales, point)
        warn_of_small(params, scales, point, optimizer)
        return scaling.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        nonlocal missing
        # Only now: the gradients of a model that is called right went through them.
        if missing and mode() is None:
            if forward_multipliers(scales) not in applied:
                warnings.warn(missing, ChainWarning, stacklevel=2)
            missing = None
        return scaling.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def normalize_gradients(scales: Scales) -> optax.GradientTransformation:
    """Divide each gradient by its size relative to the base model's.

    Put it before an Adam-like transform. It keeps the size of the gradient relative to
    eps the same at every width and depth, as multiplying eps by that size would.

    Args:
      scales: from `infer_scales` or `mupax.zoo.scales`, with their parametrization.

    Raises:
      ValueError: as `scale_by_parametrization`.

    Source: Tensor Programs VI, Definition 6.1, the factor n^d L^δ before Q_t.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"in": jnp.ones((2, 4))}, {"in": jnp.ones((2, 16))}
      >>> scales = optim.infer_scales(base, params, axes={"in": "i -> o"})
      >>> tx = optim.normalize_gradients(scales)
      >>> tx.update(params, tx.init(params))[0]["in"][0, 0]
      Array(4., dtype=float32)
    """
    point = resolve(scales)
    sizes = {path: 1 / multipliers(s, point).gradient for path, s in scales.items()}
    groups = {path: module.multiplier for path, module in scales.modules.items()}
    return multiply_leaves(Acting(scales, sizes, groups))


def refuse_decay(scales: Scales, optimizer: str) -> None:
    """Raise a `ValueError` if a group has a decay, which the optimizer has not."""
    for path, module in scales.modules.items():
        if not is_one(module.weight_decay):
            raise ValueError(
                f"{path!r} has a factor of weight_decay, but {optimizer} has no weight "
                "decay of its own; leave the factor out, or use optim.adamw or another "
                "optimizer that decays"
            )


def multiply_leaves(acting: Acting) -> optax.GradientTransformation:
    """Multiply updates, all of which need a scale, by the factors of their paths."""

    def init(params: optax.Params) -> optax.EmptyState:
        acting.scales.check_params(params)
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return multiplied(updates, acting), state

    return optax.GradientTransformation(init, update)


def multiplied(tree: Any, acting: Acting) -> Any:
    """Multiply the leaves of a tree, which keep their dtypes."""
    acting.record(tree)

    def multiply(path: str, leaf: jax.Array) -> jax.Array:
        acting.scales.check_leaf(path, leaf)
        return times(leaf, acting.factor(path))

    return map_with_paths(multiply, tree)


def times(array: jax.Array, factor: Any) -> jax.Array:
    """An array times a number or an array of numbers, in its own dtype."""
    if is_one(factor):
        return array
    # A Python float is weakly typed, so bf16 stays bf16.
    if hasattr(factor, "dtype"):
        factor = jnp.asarray(factor, array.dtype)
    scaled: jax.Array = array * factor
    return scaled


def forward_multipliers(scales: Scales) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """The forward multipliers of each path, one or one for each segment."""
    point = resolve(scales)
    return tuple(
        (p, tuple(multipliers(part, point).forward for part in s.parts))
        for p, s in scales.items()
    )


# The forward multipliers that `apply_multipliers` was called with.
applied: set[tuple[tuple[str, tuple[float, ...]], ...]] = set()


def missing_multipliers(scales: Scales) -> str | None:
    """What the caller has to do about forward multipliers that the model lacks."""
    point, every = resolve(scales), dict(forward_multipliers(scales))
    factors = {p: max(f) for p, f in every.items() if any(x != 1 for x in f)}
    if scales.multiplied or not factors:
        return None
    readouts = (p for p in factors if scales[p].role is Role.OUTPUT)
    path = next(readouts, next(iter(factors)))
    more = f" ({len(factors) - 1} others too)" if len(factors) > 1 else ""
    plain = "'mup'" if point.name == "mean_field" else "gauge='table3'"
    # The one learning rate of SP acts differently in each gauge.
    other = f", or use {plain}, which trains the same function" if point.scaled else ""
    return (
        f"{point.label} multiplies {path!r} by {factors[path]:.4g} in the forward "
        f"pass{more}: call the model with optim.apply_multipliers(params, scales)"
        f"{other}"
    )


def resolve(scales: Scales) -> Parametrization:
    """The parametrization that scales carry; "mup" if they carry none and depth stays.

    Raises a `ValueError` if depth changes and none is named, because the model's branch
    multiplier decides which one is right; or if its depth rule does not apply.
    """
    check_scales(scales)
    point = scales.parametrization
    if point is None and scales.depth != 1:
        raise ValueError(
            f"depth grows by {scales.depth:g}, but the scales name no parametrization; "
            "use scales.for_parametrization(...), with 'depth_mup' for residual "
            "branches of one layer, 'completep' for branches of two or more, 'mup' "
            "for a network without branches"
        )
    point = point or parametrization("mup")
    check_depth(scales, point)
    return point

"""The parts of an optimizer, chained in the one order that is right."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from ..rules.multipliers import RECIPES, Family, is_zero, shift
from ..scales.paths import map_with_paths
from ..scales.probe import Acting, Kind, Mode, mode, of_widest
from ..scales.table import Scales
from .masks import Mask, decay_mask
from .transforms import (
    multiplied,
    normalize_gradients,
    refuse_decay,
    resolve,
    scale_updates,
)

Transform: TypeAlias = optax.GradientTransformation
Optimizer: TypeAlias = optax.GradientTransformationExtraArgs
# A weight decay, and its mask.
Decay: TypeAlias = tuple[optax.ScalarOrSchedule, Mask]


def build(
    name: str,
    scales: Scales,
    precondition: Transform,
    rate: optax.ScalarOrSchedule | Transform,
    *,
    clip: Transform | None = None,
    average: Transform | None = None,
    decay: Decay | None = None,
    last: Transform | None = None,
    rule: str | None = None,
    **options: Any,
) -> Optimizer:
    """Chain the parts of an optimizer.

    Args:
      name: of the optimizer, for messages.
      scales: of the model.
      precondition: gives updates their size.
      rate: the learning rate, or a transform that applies it.
      clip: acts on gradients before everything else.
      average: averages the scaled updates.
      decay: weight decay, which is not scaled.
      last: acts on the whole update.
      rule: the optimizer or family whose rule holds; by default `name`.
      **options: of `multipliers`.
    """
    rule = rule or name
    recipe = RECIPES[rule]
    if decay is None and not recipe.partner and recipe.decay != "update":
        refuse_decay(scales, name)
    slots = (
        clip,
        normalize_gradients(scales) if recipe.family is not Family.SGD else None,
        precondition,
        scale_updates(rule, scales, **options),
        average,
        None if decay is None else add_decay(decay, scales),
        rate if isinstance(rate, tuple) else optax.scale_by_learning_rate(rate),
        last,
    )
    return _shifted(optax.chain(*(slot for slot in slots if slot is not None)), scales)


def _shifted(optimizer: Optimizer, scales: Scales) -> Optimizer:
    """Let an optimizer see what is a multiple of a weight that the model has as c + w.

    Weight decay and trust ratios depend on it; see `shift`. A weight that starts at
    zero is stored as a rounded c (θ - 1), and is seen as zero.
    """
    point = resolve(scales)
    shifts = {path: shift(scale, point) for path, scale in scales.items()}
    if all(map(is_zero, shifts.values())):
        return optimizer

    def see(path: str, array: Any) -> Any:
        known = path in shifts and not isinstance(array, jax.ShapeDtypeStruct)
        if not known or is_zero(shifts[path]):
            return array
        by = shifts[path]
        if mode() is not None:
            by = of_widest(by, scales[path])
        weight = array + jnp.asarray(by, array.dtype)
        rounding = 2 * float(jnp.finfo(array.dtype).eps)  # type: ignore[no-untyped-call]
        return jnp.where(abs(weight) < rounding * (1 + abs(array)), 0, weight)

    def seen(params: Any) -> Any:
        if params is None or mode() is Mode.BASE:
            return params
        return map_with_paths(see, params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return optimizer.update(updates, state, seen(params), **extra)

    return Optimizer(lambda params: optimizer.init(seen(params)), update)


def adam_moments(
    scales: Scales, b1: Any, b2: Any, *options: Any, nesterov: bool = False
) -> Transform:
    """`optax.scale_by_adam` with the betas of the base."""
    betas = map(scales.training.beta, (b1, b2))
    return optax.scale_by_adam(*betas, *options, nesterov=nesterov)


def add_decay(decay: Decay, scales: Scales, factors: Any = None) -> Transform:
    """Decoupled weight decay, with the factors of groups, batch size and length.

    Args:
      decay: that of the base, and its mask.
      scales: of the model.
      factors: those of each parameter, where a later transform scales update and decay
        together (LAMB); None where it does not.
    """
    size = scales.training.weight_decay(decay[0]) if factors is None else decay[0]
    added = optax.add_decayed_weights(size, decay_mask(decay[1], scales))
    groups = {path: module.weight_decay for path, module in scales.modules.items()}
    if factors is not None:
        own = {path: m.update("adam") for path, m in scales.modules.items()}
        groups = {path: factor / own[path] for path, factor in groups.items()}
    if not (factors or groups):
        return added
    acting = Acting(Kind.DECAYING, scales, factors or {}, groups)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "weight decay needs params: tx.update(grads, state, params)"
            )
        decayed, state = added.update(updates, state, multiplied(params, acting))
        return decayed, state

    return Transform(added.init, update)

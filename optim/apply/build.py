"""The parts of an optimizer, chained in the one order that is right."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from ..rules.multipliers import RECIPES, Family, is_zero, shift
from ..scales.paths import flatten, map_with_paths
from ..scales.probe import Acting, Mode, mode, of_widest
from ..scales.table import Scales
from .transforms import (
    multiplied,
    normalize_gradients,
    refuse_decay,
    resolve,
    scale_updates,
)

Transform: TypeAlias = optax.GradientTransformation
Optimizer: TypeAlias = optax.GradientTransformationExtraArgs
# What decays: a mask as in Optax, or "matrices"; see `decay_mask`.
Mask: TypeAlias = Any | Callable[[optax.Params], Any] | None
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
    """Chain the parts of an optimizer: its slots, in their order.

    `rate` is the learning rate, or a transform that applies it; `rule` the optimizer or
    family whose rule holds, by default `name`; `options` are those of `multipliers`.
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

    `factors` are those of each parameter, where a later transform scales update and
    decay together (LAMB).
    """
    size = scales.training.weight_decay(decay[0]) if factors is None else decay[0]
    added = optax.add_decayed_weights(size, decay_mask(decay[1], scales))
    groups = {path: module.weight_decay for path, module in scales.modules.items()}
    if factors is not None:
        own = {path: m.update("adam") for path, m in scales.modules.items()}
        groups = {path: factor / own[path] for path, factor in groups.items()}
    if not (factors or groups):
        return added
    acting = Acting(scales, factors or {}, groups)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "weight decay needs params: tx.update(grads, state, params)"
            )
        decayed, state = added.update(updates, state, multiplied(params, acting))
        return decayed, state

    return Transform(added.init, update)


def decay_mask(mask: Mask, scales: Scales) -> Mask:
    """Convert the mask of a weight decay to a function of the parameters.

    "matrices" are the parameters that have a fan-in: kernels, convolutions and
    embeddings. Then biases and norm scales do not decay, as in the reference code of
    CompleteP and in nanoGPT, and neither do the positions and class tokens of the zoo.
    A table of positions with the role "input" does.
    """
    if isinstance(mask, str):
        if mask != "matrices":
            raise ValueError(
                f"mask={mask!r} must be 'matrices', a tree of booleans, or a function "
                "that returns one for the parameters"
            )
        return lambda params: map_with_paths(
            lambda path, _: bool(scales[path].in_axes), params
        )
    # A mask made from a model, e.g. of Equinox, is a tree that can be called.
    if mask is None or (callable(mask) and jax.tree_util.all_leaves([mask])):
        return mask
    # By path: an NNX optimizer passes parameters in boxes to `init`, and without to
    # `update`, so that a tree has the structure of one of them only.
    flags = dict(flatten(mask))
    remedy = "make it from the parameters: jax.tree.map(lambda x: x.ndim >= 2, params)"
    inside = {folder for path in scales for folder in _folders(path)}
    if wrong := sorted(flags.keys() - inside):
        raise ValueError(
            f"the mask has an entry {wrong[0]!r}, which is no parameter; {remedy}"
        )

    def find(path: str, _: Any) -> bool:
        for folder in _folders(path):
            if folder in flags:
                return bool(flags[folder])
        raise ValueError(f"the mask has no entry for parameter {path!r}; {remedy}")

    return lambda params: map_with_paths(find, params)


def _folders(path: str) -> list[str]:
    """A path and those of the folders that it is in: a/b, a, ""."""
    names = path.split("/")
    return ["/".join(names[:n]) for n in range(len(names), -1, -1)]

"""Checks of an optimizer's hyperparameters."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, get_args

import jax
import optax

from ..scales.table import Scales, check_scales

Arguments = ParamSpec("Arguments")
Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


def checked(make: Callable[Arguments, Optimizer]) -> Callable[Arguments, Optimizer]:
    """Check the hyperparameters of an optimizer by their names.

    The mask may have either of its names: releases of Optax differ in them.
    """
    build: Callable[..., Optimizer] = make
    signature = inspect.signature(make)
    renamed = {
        other: own
        for own, other in (_MASKS, reversed(_MASKS))
        if own in signature.parameters
    }

    @functools.wraps(make)
    def make_checked(*args: Arguments.args, **options: Arguments.kwargs) -> Optimizer:
        named = {renamed.get(name, name): value for name, value in options.items()}
        try:
            given = signature.bind(*args, **named).arguments
        except TypeError:
            return build(*args, **options)  # raises it with the optimizer's name
        for name, value in given.items():
            if name.removeprefix("adam_") in _NUMBERS:
                kinds = get_args(signature.parameters[name].annotation)
                _check(name, value, optional=type(None) in kinds)
        check_scales(given["scales"])
        return build(*args, **named)

    return make_checked


def _check(name: str, value: Any, *, optional: bool) -> None:
    """Raise a `ValueError` if a hyperparameter cannot be right."""
    if isinstance(value, Scales):
        raise ValueError(
            f"{name} is a Scales, so the arguments are swapped; pass the learning "
            "rate first, e.g. optim.adamw(1e-3, scales)"
        )
    if value is None:
        if optional:
            return
        ways = (
            "the base's learning rate, a number or a schedule"
            if name == "learning_rate"
            else "a number, or leave it out for the default"
        )
        raise ValueError(f"{name}=None; pass {ways}")
    if callable(value):
        if name.endswith(_SCHEDULED):
            return
        raise ValueError(
            f"{name}={value!r} must be a number; schedule it by "
            f"optax.inject_hyperparams(optim.adam)(..., {name}=schedule), with "
            "your optimizer in place of optim.adam"
        )
    if isinstance(value, jax.core.Tracer):  # the value is not known here
        return
    try:
        finite = math.isfinite(value)
    except TypeError:
        raise ValueError(
            f"{name}={value!r} must be a number"
            + (" or a schedule" * (name == "learning_rate"))
        ) from None
    if not finite:
        raise ValueError(f"{name}={value} must be finite")
    if name in _SIZES and value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    if name.endswith(_AVERAGES) and not 0 <= value < 1:
        raise ValueError(f"{name}={value} must be at least 0 and below 1")
    if name.endswith(_POSITIVE) and value < 0:
        minus = ""
        if name.endswith("learning_rate"):
            minus = (
                ": the optimizer adds the minus; to maximize, put optax.scale(-1.0) "
                "before it in an optax.chain"
            )
        raise ValueError(f"{name}={value} must not be negative{minus}")


_MASKS = ("mask", "weight_decay_mask")
# Ends of the names of hyperparameters that may be schedules, or that have a range.
_SCHEDULED = ("learning_rate", "weight_decay", "weight_decay_rate")
_AVERAGES = ("b1", "b2", "beta", "shampoo_beta", "momentum")
_POSITIVE = (*_SCHEDULED, "eps", "eps_root")
_SIZES = ("precondition_frequency", "block_size")
_NUMBERS = (
    *_SIZES,
    *_POSITIVE,
    *_AVERAGES,
    "clipping_threshold",
    "consistent_rms",
    "decay_rate",
)

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

_MASKS = ("mask", "weight_decay_mask")
# Ends of the names of hyperparameters that may be schedules, or that have a range.
_SCHEDULED = ("learning_rate", "weight_decay", "weight_decay_rate")
_AVERAGES = ("b1", "b2", "beta", "shampoo_beta", "momentum")
_SIZES = ("precondition_frequency", "block_size")
_POSITIVE = (*_SCHEDULED, "eps", "eps_root")
_OTHERS = ("clipping_threshold", "consistent_rms", "decay_rate")
_NUMBERS = {*_AVERAGES, *_SIZES, *_POSITIVE, *_OTHERS}


def checked(make: Callable[Arguments, Optimizer]) -> Callable[Arguments, Optimizer]:
    """Check the hyperparameters of an optimizer by their names.

    The mask may have either of its names: releases of Optax differ in them.
    """
    build: Callable[..., Optimizer] = make
    parameters = inspect.signature(make).parameters
    own = next((name for name in _MASKS if name in parameters), "")

    @functools.wraps(make)
    def make_checked(*args: Arguments.args, **options: Arguments.kwargs) -> Optimizer:
        named = {
            own if own and name in _MASKS else name: value
            for name, value in options.items()
        }
        given = dict(zip(parameters, args, strict=False)) | named
        for name, value in given.items():
            if name in parameters and name.removeprefix("adam_") in _NUMBERS:
                kinds = get_args(parameters[name].annotation)
                _check(name, value, optional=type(None) in kinds)
        if "scales" in given:
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
    if (value is None and optional) or isinstance(value, jax.core.Tracer):
        return
    scheduled = name.endswith(_SCHEDULED)
    if callable(value) and scheduled:
        return
    try:
        finite = math.isfinite(value)
    except TypeError:
        remedy = "; schedule it by optax.inject_hyperparams" if callable(value) else ""
        raise ValueError(
            f"{name}={value!r} must be a number"
            + (" or a schedule" if scheduled else remedy)
        ) from None
    if not finite:
        raise ValueError(f"{name}={value} must be finite")
    if name in _SIZES and value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    if name.endswith(_AVERAGES) and not 0 <= value < 1:
        raise ValueError(f"{name}={value} must be at least 0 and below 1")
    if name.endswith(_POSITIVE) and value < 0:
        minus = (
            ": the optimizer adds the minus; to maximize, put optax.scale(-1.0) before "
            "it in an optax.chain"
        )
        rate = name.endswith("learning_rate")
        raise ValueError(f"{name}={value} must not be negative{minus * rate}")

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

# By a hyperparameter's name: its least value, and the first that is too
# large. The first three may be schedules.
_SCHEDULED = ("learning_rate", "weight_decay", "weight_decay_rate")
_OTHERS = ("eps", "eps_root", "clipping_threshold", "consistent_rms", "decay_rate")
_AVERAGES = ("b1", "b2", "beta", "momentum")
_SIZES = ("precondition_frequency", "block_size")
_RANGES = {
    **dict.fromkeys((*_SCHEDULED, *_OTHERS), (0, math.inf)),
    **dict.fromkeys(_AVERAGES, (0, 1)),
    **dict.fromkeys(_SIZES, (1, math.inf)),
}


def checked(make: Callable[Arguments, Optimizer]) -> Callable[Arguments, Optimizer]:
    """Check the hyperparameters of an optimizer by their names."""
    parameters = inspect.signature(make).parameters

    @functools.wraps(make)
    def make_checked(*args: Arguments.args, **options: Arguments.kwargs) -> Optimizer:
        given = dict(zip(parameters, args, strict=False)) | options
        for name, value in given.items():
            kinds = get_args(parameters[name].annotation) if name in parameters else ()
            if not (value is None and type(None) in kinds):
                _check(name, value)
        if "scales" in given:
            check_scales(given["scales"])
        return make(*args, **options)

    return make_checked


def _check(name: str, value: Any) -> None:
    """Raise a `ValueError` if a hyperparameter cannot be right."""
    kind = name.removeprefix("adam_").removeprefix("shampoo_")
    if kind not in _RANGES or isinstance(value, jax.core.Tracer):
        return
    if isinstance(value, Scales):
        raise ValueError(
            f"{name} is a Scales, so the arguments are swapped; pass the learning "
            "rate first, e.g. optim.adamw(1e-3, scales)"
        )
    if callable(value) and kind in _SCHEDULED:
        return
    least, most = _RANGES[kind]
    try:
        fits = least <= value < most
    except TypeError:
        fits = False
    if not fits:
        below = f"below {most}" if most < math.inf else "finite"
        remedy = "schedule it by optax.inject_hyperparams"
        if kind in _SCHEDULED:
            remedy = "a schedule is a function of the step"
        if kind == "learning_rate":
            remedy += "; to maximize, put optax.scale(-1.0) before it in an optax.chain"
        shown = repr(value) if isinstance(value, str) else value
        raise ValueError(
            f"{name}={shown} must be a number, at least {least} and {below}; {remedy}"
        )

"""The optimizer of a run: schedule, clipping, and a rule of `mupax.optim`."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mupax import optim

from ..errors import UserError
from .checks import number, shown, whole

OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "muon", "adafactor", "lamb")
SCHEDULES = ("constant", "cosine", "linear", "rsqrt", "wsd")

_RANGES = {
    **dict.fromkeys(
        ("momentum", "b1", "b2", "beta", "adam_b1", "adam_b2"),
        number(0, 1, below=True),
    ),
    **dict.fromkeys(("eps", "weight_decay", "adam_weight_decay"), number(0)),
}


def make_schedule(
    name: str,
    peak: Any,
    steps: int,
    *,
    warmup: Any = 0,
    decay: int = 0,
    final: float = 0.0,
) -> optax.Schedule:
    """The learning rate over a run: linear warm-up, then what the name says.

    Args:
      name: "constant"; "cosine" or "linear", which end at the last step; "rsqrt",
        peak·√(warmup/step); "wsd", constant and then linear (warm-up, stable, decay).
      peak: the learning rate after warm-up; it may be traced.
      steps: of the run.
      warmup: steps from zero to the peak; it may be traced, and then need not be
        whole.
      decay: steps at the end of "wsd".
      final: where the decay ends, as a share of the peak.

    Raises:
      UserError: an unknown name, or parts longer than the run.

    Examples:
      >>> rate = make_schedule("wsd", 1.0, 100, warmup=10, decay=20)
      >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 79, 90, 100)]
      [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if name not in SCHEDULES:
        raise UserError(
            f"schedule.name={shown(name)} must be one of {', '.join(SCHEDULES)}"
        )
    known = not isinstance(warmup, jax.Array)
    if known:
        _check_span("warmup", warmup, steps)
    _check_span("decay", decay, steps)
    number(0)("schedule.final", final)
    if name == "wsd" and (not decay or (known and warmup + decay > steps)):
        raise UserError(
            f"schedule 'wsd' needs a decay, and warmup={warmup} and decay={decay} to "
            f"fit into {steps} steps"
        )

    def share(step: Any) -> jax.Array:
        """Of the peak, after warm-up."""
        since = jnp.maximum(step - warmup, 0)
        done = jnp.clip(since / jnp.maximum(steps - warmup, 1), 0, 1)
        match name:
            case "cosine":
                return final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * done))
            case "linear":
                return 1 + (final - 1) * done
            case "rsqrt":
                start = jnp.maximum(warmup, 1)
                return jnp.sqrt(start / (start + since))
            case "wsd":
                late = jnp.clip((step - (steps - decay)) / decay, 0, 1)
                return 1 + (final - 1) * late
        return jnp.ones(())

    def rate(step: Any) -> Any:
        if known and not warmup:
            return peak if name == "constant" else peak * share(step)
        rise = step / jnp.maximum(warmup, 1e-6)
        return peak * jnp.where(step < warmup, rise, share(step))

    return rate


def _check_span(key: str, value: Any, steps: int) -> None:
    # A sweep configured warm-up as a float of steps before; a whole one is as good.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not 0 <= value <= steps:
        raise UserError(f"schedule.{key}={value} must lie in 0 to {steps} steps")
    whole(0)(f"schedule.{key}", value)


def check_optimizer(options: Mapping[str, Any]) -> frozenset[str]:
    """Refuse an optimizer, or an option of it, that `mupax.optim` does not have.

    Returns:
      The names of all options of this optimizer.

    Raises:
      UserError: naming the key.
    """
    name = options.get("name")
    if name not in OPTIMIZERS:
        raise UserError(
            f"optimizer.name={shown(name)} must be one of {', '.join(OPTIMIZERS)}"
        )
    accepted = set(inspect.signature(getattr(optim, name)).parameters)
    accepted -= {"learning_rate", "scales", "parametrization"}
    for key, value in options.items():
        if key == "name":
            continue
        if key not in accepted:
            raise UserError(f"optimizer {name!r} takes no {key!r} from the config")
        if key in _RANGES and value is not None:
            _RANGES[key](f"optimizer.{key}", value)
    return frozenset(accepted)


def build_optimizer(
    options: Mapping[str, Any],
    learning_rate: optax.ScalarOrSchedule,
    scales: optim.Scales,
    point: optim.Parametrization,
    *,
    clip_norm: float | None = None,
) -> optax.GradientTransformation:
    """An optimizer of `mupax.optim`.

    Args:
      options: its `name`, and arguments.
      learning_rate: of the base model; a number or a schedule.
      scales: of the model.
      point: the parametrization.
      clip_norm: the whole gradient is scaled down to this norm.
    """
    options = dict(options)
    maker = getattr(optim, options.pop("name"))
    tx = maker(learning_rate, scales, point, **options)
    if clip_norm is None:
        return tx
    return optax.chain(optax.clip_by_global_norm(clip_norm), tx)

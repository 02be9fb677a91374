"""The learning-rate schedules of a run."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..checks import number, one_of, whole
from ..errors import UserError

SCHEDULES = ("constant", "cosine", "linear", "rsqrt", "wsd")


def make_schedule(
    name: str,
    peak: Any,
    steps: int,
    *,
    warmup: Any = 0,
    decay: int = 0,
    final: float = 0.0,
) -> optax.Schedule:
    """A learning-rate schedule with linear warm-up.

    Args:
      name: "constant"; "cosine" or "linear" (decay until the last step); "rsqrt"
        (peak·√(warmup/step)); "wsd" (warm-up, constant, linear decay).
      peak: learning rate after warm-up; may be traced.
      steps: number of training steps.
      warmup: steps from zero to the peak. A traced value need not be a whole number.
      decay: number of decay steps of "wsd".
      final: learning rate at the end of the decay, as a share of the peak.

    Raises:
      UserError: an unknown name, or warm-up and decay longer than the run.

    Examples:
      >>> rate = make_schedule("wsd", 1.0, 100, warmup=10, decay=20)
      >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 79, 90, 100)]
      [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    one_of(*SCHEDULES)("schedule.name", name)
    is_concrete = not isinstance(warmup, jax.Array)
    if is_concrete:
        _check_steps("warmup", warmup, steps)
    _check_steps("decay", decay, steps)
    number(0)("schedule.final", final)
    if name == "wsd" and (not decay or (is_concrete and warmup + decay > steps)):
        raise UserError(
            f"schedule 'wsd' needs decay > 0 and warmup + decay <= steps; got warmup="
            f"{warmup}, decay={decay} and steps={steps}"
        )

    def share(step: Any) -> jax.Array:
        """The learning rate after warm-up, as a share of the peak."""
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
        if is_concrete and not warmup:
            return peak if name == "constant" else peak * share(step)
        rise = step / jnp.maximum(warmup, 1e-6)
        return peak * jnp.where(step < warmup, rise, share(step))

    return rate


def _check_steps(key: str, value: Any, steps: int) -> None:
    whole(0)(f"schedule.{key}", value)
    if value > steps:
        raise UserError(f"schedule.{key}={value} must lie in 0 to {steps} steps")

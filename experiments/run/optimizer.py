"""The optimizer of a training run: schedule, clipping, and a rule of `mupax.optim`."""

import inspect
from collections.abc import Callable
from typing import Any

import optax

from mupax import optim

from ..errors import UserError

OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "muon", "adafactor", "lamb")
SCHEDULES = ("constant", "cosine", "linear", "rsqrt", "wsd")


def schedule(
    name: str,
    peak: float,
    steps: int,
    *,
    warmup: int = 0,
    decay: int = 0,
    final: float = 0.0,
) -> optax.Schedule:
    """The learning rate over a run: linear warm-up, then what the name says.

    Args:
      name: "constant"; "cosine" or "linear", which end at the last step; "rsqrt",
        peak·√(warmup/step); "wsd", constant and then linear (warm-up, stable, decay).
      peak: the learning rate after warm-up.
      steps: of the run.
      warmup: steps from zero to the peak; of "rsqrt" at least 1.
      decay: steps at the end of "wsd".
      final: where the decay ends, as a share of the peak.

    Raises:
      UserError: an unknown name, or parts longer than the run.

    Examples:
      >>> rate = schedule("wsd", 1.0, 100, warmup=10, decay=20)
      >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 79, 90, 100)]
      [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if name not in SCHEDULES:
        raise UserError(f"schedule.name={name!r} must be one of {', '.join(SCHEDULES)}")
    for key, value in (("warmup", warmup), ("decay", decay)):
        if not 0 <= value <= steps:
            raise UserError(f"schedule.{key}={value} must lie in 0 to {steps} steps")
    rest = steps - warmup
    match name:
        case "constant":
            after = optax.constant_schedule(peak)
        case "cosine":
            after = optax.cosine_decay_schedule(peak, max(rest, 1), final)
        case "linear":
            after = optax.linear_schedule(peak, final * peak, max(rest, 1))
        case "rsqrt":
            start = max(warmup, 1)

            def after(step: Any) -> Any:
                return peak * (start / (start + step)) ** 0.5

        case "wsd":
            if warmup + decay > steps or not decay:
                raise UserError(
                    f"schedule 'wsd' needs a decay, and warmup={warmup} and "
                    f"decay={decay} to fit into {steps} steps"
                )
            after = optax.linear_schedule(peak, final * peak, decay, rest - decay)
    if not warmup:
        return after
    rise = optax.linear_schedule(0.0, peak, warmup)
    return optax.join_schedules([rise, after], [warmup])


def check_optimizer(options: dict[str, Any]) -> None:
    """Refuse an optimizer, or an option of it, that `mupax.optim` has not.

    Raises:
      UserError: naming it.
    """
    name = options.get("name")
    if name not in OPTIMIZERS:
        raise UserError(
            f"optimizer.name={name!r} must be one of {', '.join(OPTIMIZERS)}"
        )
    accepted = inspect.signature(getattr(optim, name)).parameters
    for key in options.keys() - {"name"}:
        if key not in accepted or key in ("learning_rate", "scales", "parametrization"):
            raise UserError(f"optimizer {name!r} takes no {key!r} from the config")


def build_optimizer(
    options: dict[str, Any],
    learning_rate: float | Callable[[Any], Any] | Any,
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

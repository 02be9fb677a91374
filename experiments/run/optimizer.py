"""The optimizer of a run: a rule of `mupax.optim`, with optional gradient clipping."""

import inspect
from collections.abc import Mapping
from typing import Any

import optax

from mupax import optim

from ..errors import UserError
from .checks import number, shown

OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "muon", "adafactor", "lamb")

_RANGES = {
    **dict.fromkeys(
        ("momentum", "b1", "b2", "beta", "adam_b1", "adam_b2"),
        number(0, 1, below=True),
    ),
    **dict.fromkeys(("eps", "weight_decay", "adam_weight_decay"), number(0)),
}


def check_optimizer(options: Mapping[str, Any]) -> frozenset[str]:
    """Check the optimizer section of a config: its `name` and its arguments.

    Returns:
      The names of all options of this optimizer.

    Raises:
      UserError: `mupax.optim` has no such optimizer or option; names the key.
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
            raise UserError(
                f"optimizer {name!r} has no option {key!r}; its options are "
                f"{', '.join(sorted(accepted))}"
            )
        if key in _RANGES and value is not None:
            _RANGES[key](f"optimizer.{key}", value)
    return frozenset(accepted)


def build_optimizer(
    options: Mapping[str, Any],
    learning_rate: optax.ScalarOrSchedule,
    scales: optim.Scales,
    parametrization: optim.Parametrization,
    *,
    clip_norm: float | None = None,
) -> optax.GradientTransformation:
    """Build an optimizer of `mupax.optim`.

    Args:
      options: the optimizer's `name` and its arguments.
      learning_rate: of the base model; a number or a schedule.
      scales: of the model.
      parametrization: of the model.
      clip_norm: maximal global norm of the gradient.
    """
    options = dict(options)
    maker = getattr(optim, options.pop("name"))
    tx = maker(learning_rate, scales, parametrization, **options)
    if clip_norm is None:
        return tx
    return optax.chain(optax.clip_by_global_norm(clip_norm), tx)

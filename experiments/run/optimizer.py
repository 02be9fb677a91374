"""The optimizers that a config can name, and the checks of their options."""

import inspect
from collections.abc import Mapping
from typing import Any

from mupax import optim

from ..checks import number, one_of
from ..errors import UserError, nearest

# Not adam_h and muon_h: a run draws its weights in a compiled program, where `init`
# does not see that queries start at zero.
OPTIMIZERS = (
    *("sgd", "adam", "adamw", "lion", "adafactor", "lamb"),
    *("muon", "scion", "soap", "shampoo"),
)

_DECAY, _SIZE = number(0, 1, below=True), number(0)
# The hyperparameters of optimizers that a sweep can tune, with their checks.
RANGES = {
    "momentum": _DECAY,
    "b1": _DECAY,
    "b2": _DECAY,
    "beta": _DECAY,
    "eps": _SIZE,
    "weight_decay": _SIZE,
    "adam_b1": _DECAY,
    "adam_b2": _DECAY,
    "adam_weight_decay": _SIZE,
    "shampoo_beta": _DECAY,
}


def check_optimizer(options: Mapping[str, Any]) -> frozenset[str]:
    """Check the optimizer section of a config: its `name` and its arguments.

    Returns:
      The names of all options of this optimizer.

    Raises:
      UserError: `mupax.optim` has no such optimizer or option; names the key.
    """
    name = one_of(*OPTIMIZERS)("optimizer.name", options.get("name"))
    accepted = set(inspect.signature(getattr(optim, name)).parameters)
    accepted -= {"learning_rate", "scales"}
    for key, value in options.items():
        if key == "name":
            continue
        if key not in accepted:
            raise UserError(
                f"optimizer {name!r} has no option {key!r}; its options are "
                f"{', '.join(sorted(accepted))}{nearest(key, accepted)}"
            )
        if key in RANGES and value is not None:
            RANGES[key](f"optimizer.{key}", value)
    return frozenset(accepted)

"""Factors of the hyperparameters of a group of parameters."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from ..rules.multipliers import GEOMETRIES, Family

_FREEZE = (
    '; to freeze parameters, use optax.partition({"train": tx, "freeze": '
    "optax.set_to_zero()}, labels)"
)


@dataclasses.dataclass(frozen=True)
class Module:
    """Factors of the hyperparameters of a group; `for_modules` describes them."""

    learning_rate: Any = 1.0
    weight_decay: Any = 1.0
    init_scale: Any = 1.0
    multiplier: Any = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, jax.Array):  # may be traced, so the value is unknown
                continue
            if isinstance(value, bool) or not isinstance(
                value, int | float | np.number
            ):
                raise ValueError(f"{field.name}={value!r} must be a number")
            least = field.name == "weight_decay"
            if not (math.isfinite(value) and (value > 0 or (least and value == 0))):
                frozen = field.name == "learning_rate" and value == 0
                raise ValueError(
                    f"{field.name}={value} must be positive" + _FREEZE * frozen
                )

    @property
    def init(self) -> Any:
        """Factor of the initial weights."""
        return self.init_scale * self.multiplier

    def update(self, family: str) -> Any:
        """Factor of the updates, for a family of optimizers."""
        power = GEOMETRIES[Family(family)].multiplier
        return self.learning_rate * self.multiplier**power

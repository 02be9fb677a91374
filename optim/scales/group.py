"""Factors of the hyperparameters of a group of parameters."""

import dataclasses
import math
from typing import Any

import jax

from ..rules.multipliers import GEOMETRIES, Family


@dataclasses.dataclass(frozen=True)
class Module:
    """Factors of the hyperparameters of a group; `for_modules` describes them."""

    learning_rate: Any = 1.0
    weight_decay: Any = 1.0
    init_scale: Any = 1.0
    multiplier: Any = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, jax.Array):  # may be traced, so the value is unknown
                continue
            none = name == "weight_decay" and value == 0
            if not (none or 0 < value < math.inf):
                raise ValueError(
                    f"{name}={value} must be a positive number; to freeze parameters, "
                    'use optax.partition({"train": tx, "freeze": optax.set_to_zero()}, '
                    "labels)"
                )

    @property
    def init(self) -> Any:
        """Factor of the initial weights."""
        return self.init_scale * self.multiplier

    def update(self, family: str) -> Any:
        """Factor of the updates, for a family of optimizers."""
        power = GEOMETRIES[Family(family)].multiplier
        return self.learning_rate * self.multiplier**power

"""Flax NNX models that carry the rules of `mupax.optim`.

`create(name, ...)` makes one, `scales(model)` tells the optimizer how its parameters
grow, `list_models()` lists them.
"""

from .plan import Frozen, Plan, axis_names, scales
from .registry import create, list_models
from .resmlp import ResMLP

__all__ = [
    "Frozen",
    "Plan",
    "ResMLP",
    "axis_names",
    "create",
    "list_models",
    "scales",
]

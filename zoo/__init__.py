"""Flax NNX models that carry the rules of `mupax.optim`.

`create(name, ...)` makes one, `scales(model)` tells the optimizer how its parameters
grow, `list_models()` lists them.
"""

from .cnn import CNN
from .gpt import GPT
from .plan import Frozen, Plan, axis_names, scales
from .registry import create, list_models
from .resmlp import ResMLP
from .resnet import ResNet
from .vit import ViT

__all__ = [
    "CNN",
    "GPT",
    "Frozen",
    "Plan",
    "ResMLP",
    "ResNet",
    "ViT",
    "axis_names",
    "create",
    "list_models",
    "scales",
]

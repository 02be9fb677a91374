"""Flax NNX models with the initialization and multipliers of `mupax.optim`.

`create(name, ...)` builds a model, `list_models()` lists the names, and `scales(model)`
returns the scales that the optimizers of `mupax.optim` take. `load_pretrained(name)`
loads a model with weights, and `save(model, directory)` writes one.
"""

from .families.cnn import CNN
from .families.convnext import ConvNeXt
from .families.efficientnet import EfficientNet
from .families.gpt import GPT
from .families.llama import Llama
from .families.mlp import MLP
from .families.resmlp import ResMLP
from .families.resnet import ResNet
from .families.vit import ViT
from .generate import generate
from .layers.basic import ModelWarning
from .plan import Frozen, Plan, axis_names, scales
from .preprocessing import DataConfig, data_config, set_data_config
from .registry import create, list_models, reads_tokens
from .sharding import RULES, batch_sharding, partition_specs, use_mesh
from .weights.cards import Training
from .weights.pretrained import list_pretrained, load_pretrained
from .weights.saving import save

__all__ = [
    "CNN",
    "GPT",
    "MLP",
    "RULES",
    "ConvNeXt",
    "DataConfig",
    "EfficientNet",
    "Frozen",
    "Llama",
    "ModelWarning",
    "Plan",
    "ResMLP",
    "ResNet",
    "Training",
    "ViT",
    "axis_names",
    "batch_sharding",
    "create",
    "data_config",
    "generate",
    "list_models",
    "list_pretrained",
    "load_pretrained",
    "partition_specs",
    "reads_tokens",
    "save",
    "scales",
    "set_data_config",
    "use_mesh",
]

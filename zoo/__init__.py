"""Flax NNX models with the initialization and multipliers of `mupax.optim`.

`create(name, ...)` builds a model, `list_models()` lists the names, and `scales(model)`
returns the scales that the optimizers of `mupax.optim` take. `load_pretrained(name)`
loads a model with weights, and `save(model, directory)` writes one.
"""

from .cards import Training
from .cnn import CNN
from .convnext import ConvNeXt
from .decoder import reads_tokens
from .efficientnet import EfficientNet
from .generate import generate
from .gpt import GPT, gpt_names
from .layers import ModelWarning
from .llama import Llama, llama_names
from .lora import add_lora, merge_lora, scales
from .mlp import MLP
from .plan import Frozen, Plan, axis_names
from .preprocessing import DataConfig, data_config, set_data_config
from .pretrained import list_pretrained, load_pretrained
from .publishing import push_to_hub
from .registry import create, list_models
from .regnet import RegNet
from .resmlp import ResMLP
from .resnet import ResNet
from .saving import save
from .sharding import RULES, batch_sharding, partition_specs, use_mesh
from .vit import ViT
from .vit_layouts import vit_names

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
    "RegNet",
    "ResMLP",
    "ResNet",
    "Training",
    "ViT",
    "add_lora",
    "axis_names",
    "batch_sharding",
    "create",
    "data_config",
    "generate",
    "gpt_names",
    "list_models",
    "list_pretrained",
    "llama_names",
    "load_pretrained",
    "merge_lora",
    "partition_specs",
    "push_to_hub",
    "reads_tokens",
    "save",
    "scales",
    "set_data_config",
    "use_mesh",
    "vit_names",
]

"""Names and multipliers of convolutional networks in files of other libraries."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..families import convnext, efficientnet, regnet, resnet
from ..families.convnext import ConvNeXt, convnext_names
from ..families.efficientnet import EfficientNet, efficientnet_names
from ..families.regnet import RegNet, regnet_names
from ..families.resnet import ResNet, resnet_names
from .sources import Leaf, Source

ConvNet = ResNet | RegNet | ConvNeXt | EfficientNet


def convnet_layouts(model: nnx.Module) -> tuple[str, ...]:
    """The layouts in which a network can be written, timm's first; () for others."""
    if isinstance(model, ResNet):
        return resnet.LAYOUTS
    if isinstance(model, RegNet):
        return regnet.LAYOUTS
    if isinstance(model, ConvNeXt):
        return convnext.layouts(model)
    return efficientnet.LAYOUTS if isinstance(model, EfficientNet) else ()


def convnet_names(
    model: ConvNet, layout: str, prefix: str | None = None
) -> dict[Leaf, Source]:
    """Map each variable of a network to its array in a library's files."""
    if isinstance(model, ResNet):
        prefix = "resnet." if prefix is None else prefix
        return resnet_names(model, layout, prefix=prefix)
    if isinstance(model, RegNet):
        return regnet_names(model)
    if isinstance(model, ConvNeXt):
        return convnext_names(model, layout, prefix=prefix)
    return efficientnet_names(model)


def convnet_layout(model: ConvNet, arrays: Mapping[str, Any]) -> tuple[str, str | None]:
    """Detect a file's layout, and the prefix of its keys (transformers only)."""
    owners = {
        "resnet.embedder.": "resnet.",
        "embedder.embedder.": "",
        "convnext.embeddings.": "convnext.",
        "convnextv2.embeddings.": "convnextv2.",
        "embeddings.patch_embeddings.": "",
    }
    for start, prefix in owners.items():
        if any(key.startswith(start) for key in arrays):
            return "transformers", prefix
    if isinstance(model, ConvNeXt):
        matrix = arrays.get("stages.0.blocks.0.mlp.fc1.weight")
        return ("timm_conv" if getattr(matrix, "ndim", 2) == 4 else "timm"), None
    return "timm", None


def branch_factor(model: ConvNet, path: str) -> float:
    """Factor by which a parameter absorbs the multiplier of its residual branch."""
    parts, branch = path.split("/"), model.plan.branch
    if parts[0] != "stages":
        return 1.0
    if isinstance(model, ConvNeXt):
        last = "down" if model.layer_scale is None else "layer_scale"
        return branch if parts[2:4] == ["blocks", last] else 1.0
    block = getattr(model.stages[int(parts[1])], parts[2])
    if isinstance(model, EfficientNet):
        last = str(len(block.norms) - 1)
        ends = block.residual and parts[-3:-1] == ["norms", last]
        return branch if ends else 1.0
    if isinstance(model, ResNet) and parts[-3:] == ["se", "squeeze", "kernel"]:
        # It reads what the last norm gives, and is not to see the branch's factor.
        return 1 / branch if branch else 0.0
    last = str(len(block.norms) - 1)
    return branch if parts[-3:-1] == ["norms", last] else 1.0

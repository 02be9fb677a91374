"""Make the golden files of convolutional networks: small ones of timm and transformers.

    pip install torch==2.13.0 transformers==5.23.0 safetensors pillow
    pip install --no-deps timm==1.0.31
    python tests/golden/make_convnet_golden.py [name ...]

writes, beside this file, one .npz for each case below, or for those that are named, and
convnet_versions.json, which says what made them. Each holds the weights and running
statistics under the library's own names, and

- "golden/images" (batch, channels, height, width),
- "golden/logits" in evaluation,
- "golden/gradient/..." of the loss in training (of the mean over the batch of the
  squared logits) for each weight; where a network has no batch statistics, training
  and evaluation are the same,
- "golden/config": what a repository's config.json would say.

timm imports torchvision for its image transforms, which no network here uses, and
torchvision has no build beside torch 2.13 for CPUs: an empty module stands in for it.

Weights are random and far from their initialization, norms, statistics and biases
included, so that no mistake in one of them goes unseen. They are rounded to float16,
which halves the files and changes no comparison. All is computed in float64 and kept in
float32: what differs is the rounding of the zoo's float32, and not torch's too.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import pathlib
import platform
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

HERE = pathlib.Path(__file__).parent
CLASSES, BATCH = 5, 3


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision, as modules in which any name is something."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return mock.MagicMock(__path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_stand_in = StandIn()
sys.meta_path.insert(0, _stand_in)
import timm.layers  # noqa: E402
import timm.models.convnext  # noqa: E402
import timm.models.efficientnet  # noqa: E402
import timm.models.mobilenetv3  # noqa: E402
import timm.models.resnet  # noqa: E402
from timm.models import _efficientnet_blocks as mb  # noqa: E402
from timm.models import _efficientnet_builder as builder  # noqa: E402

# transformers does without torchvision, and is not to find an empty one.
sys.meta_path.remove(_stand_in)
for _name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
    del sys.modules[_name]
import transformers  # noqa: E402


def timm_resnet(block: str, width: int, **options: Any) -> nn.Module:
    """timm's ResNet with fewer channels; a stem of 7x7 has 64 in timm."""
    models = timm.models.resnet
    kind = {"basic": models.BasicBlock, "bottleneck": models.Bottleneck}[block]
    net = models.ResNet(
        kind,
        num_classes=CLASSES,
        stem_width=width // 2,
        channels=(width, 2 * width),
        **options,
    )
    net.layer3 = net.layer4 = nn.Identity()
    if "deep" in options.get("stem_type", ""):
        return net
    net.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    net.bn1 = nn.BatchNorm2d(width)
    aa = options.get("aa_layer")
    blur = timm.layers.BlurPool2d
    if aa is blur:
        net.maxpool = nn.Sequential(nn.MaxPool2d(3, 1, 1), blur(channels=width))
    stages, _ = models.make_blocks(
        (kind, kind),
        (width, 2 * width),
        options["layers"],
        width,
        cardinality=options.get("cardinality", 1),
        base_width=options.get("base_width", 64),
        avg_down=options.get("avg_down", False),
        aa_layer=aa,
        norm_layer=nn.BatchNorm2d,
        **options.get("block_args", {}),
    )
    for name, stage in stages:
        setattr(net, name, stage)
    return net


SE = functools.partial(timm.layers.SEModule, rd_divisor=1)
SE_RS = functools.partial(timm.layers.SEModule, rd_divisor=1, rd_ratio=0.25)


def hf_resnet(config: transformers.ResNetConfig) -> nn.Module:
    return transformers.ResNetForImageClassification(config)


HF_RESNET = {
    "embedding_size": 4,
    "hidden_sizes": [16, 32],
    "depths": [1, 2],
    "layer_type": "bottleneck",
    "num_labels": CLASSES,
    "architectures": ["ResNetForImageClassification"],
}


def timm_convnext(**options: Any) -> nn.Module:
    return timm.models.convnext.ConvNeXt(
        num_classes=CLASSES, depths=(1, 2, 1, 1), dims=(4, 8, 16, 32), **options
    )


# Numbers of channels are multiples of 8, as timm rounds them.
B0 = [
    ["ds_r1_k3_s1_e1_c8_se0.25"],
    ["ir_r2_k5_s2_e2_c16_se0.25"],
    ["er_r2_k3_s1_e2_c16"],
    ["cn_r2_k3_s1_e1_c16_skip"],
]
V3 = [
    ["ds_r1_k3_s2_e1_c8_se0.25_nre"],
    ["ir_r1_k3_s1_e2_c16", "ir_r2_k5_s1_e3_c16_se0.25"],
    ["cn_r1_k1_s1_c24"],
]
V2 = [["ds_r1_k3_s1_e1_c8"], ["ir_r2_k3_s2_e2_c16"], ["ir_r2_k5_s1_e2_c16"]]


def timm_efficientnet(
    rows: list[list[str]] = B0, act_layer: type = nn.SiLU, **options: Any
) -> nn.Module:
    return timm.models.efficientnet.EfficientNet(
        builder.decode_arch_def(rows),
        num_classes=CLASSES,
        num_features=24,
        stem_size=8,
        act_layer=act_layer,
        **options,
    )


def timm_mobilenetv3() -> nn.Module:
    return timm.models.mobilenetv3.MobileNetV3(
        builder.decode_arch_def(V3),
        num_classes=CLASSES,
        num_features=24,
        stem_size=8,
        act_layer=nn.Hardswish,
        se_layer=functools.partial(
            mb.SqueezeExcite,
            gate_layer="hard_sigmoid",
            force_act_layer=nn.ReLU,
            rd_round_fn=builder.round_channels,
        ),
    )


HF_CONVNEXT = {
    "hidden_sizes": [4, 8],
    "depths": [1, 2],
    "num_stages": 2,
    "num_labels": CLASSES,
    "layer_norm_eps": 1e-3,
}
HF_CONVNEXT1 = {**HF_CONVNEXT, "architectures": ["ConvNextForImageClassification"]}
HF_CONVNEXT2 = {**HF_CONVNEXT, "architectures": ["ConvNextV2ForImageClassification"]}

# name: (makes the network, pixels, what config.json says).
Case = tuple[Callable[[], nn.Module], tuple[int, int], dict[str, Any]]
CASES: dict[str, Case] = {
    # Two groups of the width of the stage each, as 32x4d is 32 groups of 1/16.
    "resnext": (
        lambda: timm_resnet(
            "bottleneck", 4, layers=(1, 2), cardinality=2, base_width=64
        ),
        (20, 21),
        {},
    ),
    "resnet_d_se": (
        lambda: timm_resnet(
            "bottleneck",
            4,
            layers=(1, 2),
            stem_type="deep",
            avg_down=True,
            block_args={"attn_layer": SE},
        ),
        (33, 30),
        {},
    ),
    "resnet_rs": (
        lambda: timm_resnet(
            "bottleneck",
            4,
            layers=(2, 1),
            stem_type="deep",
            avg_down=True,
            replace_stem_pool=True,
            block_args={"attn_layer": SE_RS},
        ),
        (30, 33),
        {},
    ),
    "resnet_blur": (
        lambda: timm_resnet(
            "bottleneck", 4, layers=(1, 2), aa_layer=timm.layers.BlurPool2d
        ),
        (33, 30),
        {},
    ),
    "resnet_average": (
        lambda: timm_resnet(
            "basic",
            8,
            layers=(1, 2),
            aa_layer=nn.AvgPool2d,
            stem_type="deep_tiered",
            avg_down=True,
        ),
        (34, 32),
        {},
    ),
    "hf_resnet": (
        lambda: hf_resnet(transformers.ResNetConfig(**HF_RESNET)),
        (33, 30),
        {"model_type": "resnet", **HF_RESNET},
    ),
    "convnext": (timm_convnext, (64, 67), {}),
    "convnextv2": (
        lambda: timm_convnext(use_grn=True, ls_init_value=None, conv_mlp=True),
        (64, 67),
        {},
    ),
    "hf_convnext": (
        lambda: transformers.ConvNextForImageClassification(
            transformers.ConvNextConfig(**HF_CONVNEXT1)
        ),
        (17, 24),
        {"model_type": "convnext", **HF_CONVNEXT1},
    ),
    "hf_convnextv2": (
        lambda: transformers.ConvNextV2ForImageClassification(
            transformers.ConvNextV2Config(**HF_CONVNEXT2)
        ),
        (17, 24),
        {"model_type": "convnextv2", **HF_CONVNEXT2},
    ),
    "efficientnet": (timm_efficientnet, (21, 22), {}),
    "tf_efficientnet": (
        lambda: timm_efficientnet(
            pad_type="same",
            norm_layer=functools.partial(nn.BatchNorm2d, eps=1e-3),
        ),
        (21, 22),
        {},
    ),
    "mobilenetv3": (timm_mobilenetv3, (21, 22), {}),
    "mobilenetv2": (lambda: timm_efficientnet(V2, nn.ReLU6), (21, 22), {}),
}


# The gradients of a network that differs in names or padding alone are in another file.
LOGITS_ALONE = ("convnext", "convnextv2", "tf_efficientnet")


def randomize(net: nn.Module, seed: int) -> None:
    """Kernels of size √(2/fan_in), norms about one, everything else of order one."""
    random = np.random.default_rng(seed)
    kinds = {
        f"{prefix}.{name}".removeprefix("."): module
        for prefix, module in net.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }

    def put(tensor: torch.Tensor, values: np.ndarray) -> None:
        tensor.copy_(torch.tensor(values.astype(np.float16).astype(np.float32)))

    with torch.no_grad():
        for name, weight in net.named_parameters():
            values = random.normal(size=tuple(weight.shape))
            if weight.ndim > 1 and isinstance(kinds[name], nn.Conv2d | nn.Linear):
                values *= (2 / weight[0].numel()) ** 0.5
            else:
                is_norm = (
                    name.endswith("weight")
                    and "norm" in type(kinds[name]).__name__.lower()
                )
                values = 0.3 * values + is_norm
            put(weight, values)
        for name, buffer in net.named_buffers():
            if name.endswith("running_mean"):
                put(buffer, 0.3 * random.normal(size=tuple(buffer.shape)))
            elif name.endswith("running_var"):
                put(buffer, np.exp(random.normal(size=tuple(buffer.shape)) - 1))


def run(net: nn.Module, images: torch.Tensor) -> torch.Tensor:
    out = net(images)
    return getattr(out, "logits", out)


def write(name: str, case: Case, seed: int) -> None:
    make, pixels, config = case
    net = make()
    randomize(net, seed)
    net.double()
    arrays = {
        key: value.numpy().astype(np.float16)
        for key, value in net.state_dict().items()
        if not key.endswith(("num_batches_tracked", "filt"))
    }
    random = np.random.default_rng(99)
    images = random.normal(size=(BATCH, 3, *pixels)).astype(np.float16)
    x = torch.tensor(images.astype(np.float64))
    net.eval()
    with torch.no_grad():
        arrays["golden/logits"] = run(net, x).numpy().astype(np.float32)
    net.train()
    run(net, x).square().mean(0).sum().backward()
    for key, weight in net.named_parameters():
        if name in LOGITS_ALONE:
            continue
        arrays[f"golden/gradient/{key}"] = weight.grad.numpy().astype(np.float32)
    arrays["golden/images"] = images
    arrays["golden/config"] = np.array(json.dumps(config))
    np.savez_compressed(HERE / f"{name}.npz", **arrays)


def main() -> None:
    """Writes all cases, or those that are named."""
    for seed, (name, case) in enumerate(CASES.items()):
        if name in (sys.argv[1:] or CASES):
            # The file of mobilenetv2 was made when one more case stood before it.
            write(name, case, seed + (name == "mobilenetv2"))
    versions = {
        "numpy": np.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps(versions, indent=1)
    (HERE / "convnet_versions.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

"""Writes what torchvision and timm compute, for tests/test_zoo_conv.py.

Run in an environment of its own, with torch 2.15.0, torchvision 0.29.2 and timm 1.0.31:

    python tests/golden/make_resnet_golden.py

Each file holds the state dict of a small ResNet before and after one forward pass in
training, an input (batch, channels, height, width), and the logits of both libraries.
Weights and running statistics are rounded to float16, which halves the files and
changes no comparison: all are computed with the rounded ones, in float32.
"""

import json
import pathlib
import platform

import numpy as np
import timm
import timm.models.resnet
import torch
import torchvision
from torch import nn
from torchvision.models import resnet

HERE = pathlib.Path(__file__).parent
WIDTH, CLASSES, BATCH = 4, 7, 3

# name: block, blocks of each stage, stem, pixels (44 is even behind the stem too, so
# that its pooling is seen to be padded on both sides).
CASES = {
    "resnet_basic": ("basic", (2, 1, 1, 2), "imagenet", (45, 44)),
    "resnet_bottleneck": ("bottleneck", (2, 1, 1, 1), "imagenet", (45, 44)),
    "resnet_cifar": ("basic", (1, 2, 1, 1), "cifar", (15, 18)),
}


def build_torchvision(block: str, blocks: tuple[int, ...], stem: str) -> nn.Module:
    """torchvision's ResNet with fewer channels than its constructor allows."""
    kind = {"basic": resnet.BasicBlock, "bottleneck": resnet.Bottleneck}[block]
    net = resnet.ResNet(kind, [1, 1, 1, 1], num_classes=CLASSES)
    net.inplanes = WIDTH
    net.bn1 = nn.BatchNorm2d(WIDTH)
    if stem == "imagenet":
        net.conv1 = nn.Conv2d(3, WIDTH, 7, stride=2, padding=3, bias=False)
    else:
        net.conv1 = nn.Conv2d(3, WIDTH, 3, stride=1, padding=1, bias=False)
        net.maxpool = nn.Identity()
    for i, count in enumerate(blocks):
        stage = net._make_layer(kind, WIDTH * 2**i, count, stride=1 if i == 0 else 2)
        setattr(net, f"layer{i + 1}", stage)
    net.fc = nn.Linear(8 * WIDTH * kind.expansion, CLASSES)
    return net


def build_timm(block: str, blocks: tuple[int, ...], stem: str) -> nn.Module:
    models = timm.models.resnet
    kind = {"basic": models.BasicBlock, "bottleneck": models.Bottleneck}[block]
    net = models.ResNet(kind, (1, 1, 1, 1), num_classes=CLASSES)
    # The stem's 64 channels are fixed in timm too.
    net.conv1 = nn.Conv2d(3, WIDTH, 7, stride=2, padding=3, bias=False)
    net.bn1 = nn.BatchNorm2d(WIDTH)
    channels = tuple(WIDTH * 2**i for i in range(4))
    for name, stage in models.make_blocks((kind,) * 4, channels, blocks, WIDTH)[0]:
        setattr(net, name, stage)
    net.fc = nn.Linear(8 * WIDTH * kind.expansion, CLASSES)
    if stem == "cifar":
        net.conv1 = nn.Conv2d(3, WIDTH, 3, stride=1, padding=1, bias=False)
        net.maxpool = nn.Identity()
    return net


def randomize(net: nn.Module, generator: torch.Generator) -> None:
    """Weights of the size of He et al.; norms and statistics far from trivial."""

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            module.weight.data = normal(module.weight) * (2 / fan_in) ** 0.5
        elif isinstance(module, nn.BatchNorm2d):
            module.weight.data = 1 + 0.3 * normal(module.weight)
            module.bias.data = 0.3 * normal(module.bias)
            module.running_mean = 0.3 * normal(module.running_mean)
            module.running_var = (normal(module.running_var) - 1).exp()
        elif isinstance(module, nn.Linear):
            module.weight.data = normal(module.weight) * module.in_features**-0.5
            module.bias.data = normal(module.bias)
    for tensor in [*net.parameters(), *net.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.half().float()


def numpy_state(net: nn.Module) -> dict[str, np.ndarray]:
    return {name: t.detach().numpy().copy() for name, t in net.state_dict().items()}


def main() -> None:
    """Writes all cases."""
    settings = {}
    for seed, (name, (block, blocks, stem, pixels)) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn((BATCH, 3, *pixels), generator=generator).half().float()
        reference = build_torchvision(block, blocks, stem)
        randomize(reference, generator)
        before = numpy_state(reference)
        arrays = {
            f"before/{key}": value.astype(np.float16)
            for key, value in before.items()
            if "num_batches" not in key
        }
        arrays["x"] = x.numpy().astype(np.float16)
        for library, build in (
            ("torchvision", build_torchvision),
            ("timm", build_timm),
        ):
            net = build(block, blocks, stem)
            weights = {key: torch.from_numpy(v.copy()) for key, v in before.items()}
            net.load_state_dict(weights, strict=True)
            with torch.no_grad():
                net.eval()
                arrays[f"{library}/eval"] = net(x).numpy()
                net.train()
                arrays[f"{library}/train"] = net(x).numpy()
            for key, value in numpy_state(net).items():
                if "running" in key:
                    arrays[f"{library}/after/{key}"] = value
        np.savez_compressed(HERE / f"{name}.npz", **arrays)
        settings[name] = {
            "block": block,
            "blocks": blocks,
            "stem": stem,
            "width": WIDTH,
            "out_features": CLASSES,
        }
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "numpy": np.__version__,
    }
    text = json.dumps({"versions": versions, "settings": settings}, indent=2)
    (HERE / "resnet.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

"""The training step of `benchmarks.zoo_step` in torch, for a Python with torch.

Prints {name: [milliseconds, processor milliseconds]} as JSON, for torchvision's
ResNet-18 with the stem for small images and timm's ViT-Ti with patches of 4; batch 64
of 32x32 pixels, float32, AdamW.
"""

import argparse
import json
import statistics
import time

import timm
import torch
import torchvision

BATCH, PIXELS, CLASSES = 64, 32, 10


def resnet18() -> torch.nn.Module:
    """torchvision's network behind another stem."""
    net = torchvision.models.resnet18(num_classes=CLASSES)
    net.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = torch.nn.Identity()
    return net


def vit_tiny() -> torch.nn.Module:
    """timm's network at 32 pixels."""
    return timm.models.vision_transformer.VisionTransformer(
        img_size=PIXELS,
        patch_size=4,
        embed_dim=192,
        depth=12,
        num_heads=3,
        num_classes=CLASSES,
    )


def milliseconds(net: torch.nn.Module, steps: int) -> tuple[float, float]:
    """Median time of a step: by the clock, and of all cores together."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
    x = torch.randn(BATCH, 3, PIXELS, PIXELS)
    labels = torch.randint(CLASSES, (BATCH,))
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), labels).backward()
        optimizer.step()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    clock, processor = zip(*times[1:], strict=True)
    return 1e3 * statistics.median(clock), 1e3 * statistics.median(processor)


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    times = {
        f"torch {torch.__version__}, {name}": milliseconds(make(), steps)
        for name, make in (("ResNet-18", resnet18), ("ViT-Ti", vit_tiny))
    }
    print(json.dumps(times))


if __name__ == "__main__":
    main()

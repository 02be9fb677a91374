"""Make mup_ratios.json: what the mup package does to three small torch models.

The package is not a dependency. In an environment of its own with `torch` and
`mup==1.0.0`, run

    python tests/golden/make_mup_ratios.py

For every parameter it writes, as ratios of the target to the base model: the
learning rate and weight decay of MuAdamW and MuSGD, the initial standard deviation
and the forward multiplier. Randomness is left out: each parameter is filled with
the standard deviation of torch's default initializer, which mup then rescales.
"""

import json
import math
import pathlib

import mup
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, inner)
        self.third = nn.Linear(inner, width)
        self.readout = mup.MuReadout(width, 10)


class Block(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.shortcut = nn.Conv2d(fan_in, fan_out, 1)


class ResNet(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.layer1 = Block(width, width)
        self.layer2 = Block(width, inner)
        self.fc = mup.MuReadout(inner, 10)


class Layer(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)


class Transformer(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.positions = nn.Embedding(12, width)
        self.layers = nn.ModuleList([Layer(width, inner) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.readout = mup.MuReadout(width, 50)


MODELS = {"mlp": MLP, "resnet": ResNet, "transformer": Transformer}
BASE, TARGET = (16, 24), (64, 192)  # (width, inner): grown by 4 and by 8


def fill(model):
    """Each parameter becomes the standard deviation it would be drawn with."""
    with torch.no_grad():
        for module in model.modules():
            parameters = dict(module.named_parameters(recurse=False))
            if isinstance(module, nn.Linear | nn.Conv2d):
                fan_in = math.prod(module.weight.shape[1:])
                for p in parameters.values():
                    p.fill_(1 / math.sqrt(3 * fan_in))
            else:
                for p in parameters.values():
                    p.fill_(1.0)
    return model


def settings(model, optimizer):
    """(learning rate, weight decay) of each parameter under lr = wd = 1."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = optimizer(model.parameters(), lr=1.0, weight_decay=1.0).param_groups
    return {
        names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]
    }


def ratios(make):
    base, target = fill(make(*BASE)), fill(make(*TARGET))
    before = {name: p.flatten()[0].item() for name, p in base.named_parameters()}
    mup.set_base_shapes(target, base, delta=make(*TARGET))
    adam, sgd = settings(target, mup.MuAdamW), settings(target, mup.MuSGD)
    forward = {
        f"{name}.weight": 1 / module.width_mult()
        for name, module in target.named_modules()
        if isinstance(module, mup.MuReadout)
    }
    shapes = {name: list(p.shape) for name, p in base.named_parameters()}
    return {
        name: {
            "base_shape": shapes[name],
            "shape": list(p.shape),
            "init_std": p.flatten()[0].item() / before[name],
            "forward": forward.get(name, 1.0),
            "adamw": adam[name],
            "sgd": sgd[name],
        }
        for name, p in target.named_parameters()
    }


if __name__ == "__main__":
    found = {name: ratios(make) for name, make in MODELS.items()}
    path = pathlib.Path(__file__).with_name("mup_ratios.json")
    rows = [
        f"  {json.dumps(model)}: {{\n"
        + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in table.items())
        + "\n  }"
        for model, table in found.items()
    ]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")

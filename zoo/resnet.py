"""ResNet-18 to ResNet-152, scaled in width and in depth."""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from .conv import NORMS, Conv, check_images, make_norm, stem_pool
from .family import Family, ResidualOptions
from .layers import Dense, call, scan, stack
from .plan import Plan
from .registry import register

# Sizes of a branch's kernels, and channels of the stream over those inside a branch.
_BLOCKS = {"basic": ((3, 3), 1), "bottleneck": ((1, 3, 1), 4)}


class Projection(nnx.Module):
    """The shortcut of a block whose output has another shape: a 1x1 convolution."""

    def __init__(
        self,
        plan: Plan,
        names: tuple[str, str],
        *,
        stride: int,
        norm: str,
        rngs: nnx.Rngs,
    ):
        self.conv = _conv(plan, 1, names, stride=stride, rngs=rngs)
        self.norm = make_norm(norm, plan, names[1])

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        return self.norm(self.conv(x))


class Block(nnx.Module):
    """relu(shortcut(x) + a M^-α · branch(x)); shortcut is x, or a projection of it.

    The branch is a chain of convolutions, each normalized, with relu between them.
    Its first 3x3 convolution carries the stride, as in torchvision and timm ("v1.5").
    """

    def __init__(
        self,
        plan: Plan,
        sizes: tuple[int, ...],
        names: tuple[str, ...],
        *,
        stride: int,
        norm: str,
        zero_init: bool,
        rngs: nnx.Rngs,
    ):
        self.branch = plan.branch
        convs, norms = [], []
        for i, size in enumerate(sizes):
            last = i == len(sizes) - 1
            zero = zero_init and last
            convs.append(
                _conv(
                    plan,
                    size,
                    (names[i], names[i + 1]),
                    stride=stride if i == sizes.index(3) else 1,
                    in_branch=True,
                    zero=zero and norm == "none",
                    rngs=rngs,
                )
            )
            norms.append(
                make_norm(
                    norm,
                    plan,
                    names[i + 1],
                    in_branch=True,
                    init="zeros" if zero else "ones",
                )
            )
        self.convs = nnx.List(convs)
        self.norms = nnx.List(norms)
        ends = names[0], names[-1]
        projects = stride != 1 or plan[ends[0]] != plan[ends[1]]
        self.shortcut = (
            Projection(plan, ends, stride=stride, norm=norm, rngs=rngs)
            if projects
            else None
        )

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        h = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h = norm(conv(h if i == 0 else jax.nn.relu(h)))
        if self.shortcut is not None:
            x = self.shortcut(x)
        return jax.nn.relu(x + self.branch * h)


class Stage(nnx.Module):
    """Blocks of one resolution: the first, which may project, and a stack of equals."""

    def __init__(self, first: Block, rest: nnx.Module | None, *, remat: bool):
        self.first = first
        self.rest = rest
        self.remat = remat

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        x = call(self.first, x, remat=self.remat)
        if self.rest is None:
            return x
        return scan(self.rest, x, remat=self.remat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetOptions(ResidualOptions):
    """Options of `ResNet`, which describes them."""

    input_shape: tuple[int, ...] = (224, 224, 3)
    out_features: int = 1000
    block: str = "basic"
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    stem: str = "imagenet"
    norm: str = "batch"
    zero_init: bool = False

    @property
    def branch_layers(self) -> int:
        """The convolutions of a block."""
        return 3 if self.block == "bottleneck" else 2


@register("resnet18", block="basic", blocks=(2, 2, 2, 2), width=64, depth=1)
@register("resnet34", block="basic", blocks=(3, 4, 6, 3), width=64, depth=1)
@register("resnet50", block="bottleneck", blocks=(3, 4, 6, 3), width=64, depth=1)
@register("resnet101", block="bottleneck", blocks=(3, 4, 23, 3), width=64, depth=1)
@register("resnet152", block="bottleneck", blocks=(3, 8, 36, 3), width=64, depth=1)
class ResNet(Family, options=ResNetOptions):
    """A stem, stages of residual blocks, the mean over pixels, and a readout.

    Stage i = 0, 1, ... has width · 2^i channels, four times as many between
    bottlenecks, and halves the image for i > 0. Under SP, and under every
    parametrization at its base size, it is torchvision's and timm's network of that
    name, drawn from the same distributions (the readout's bias starts at zero). Depth
    is scanned: compiling takes the same time at any `depth`.

    Args:
      width: channels of the stem.
      depth: how often the blocks of each stage are repeated: stage i has
        depth · blocks[i] of them.
      base_width: the width that was tuned; None for `width`.
      base_depth: the depth that was tuned; None for `depth`. M = depth / base_depth.
      parametrization: a name, or what `optim.parametrization` returns; "completep" by
        default.
      branch_multiplier: a.
      input_shape: (height, width, channels) of an image. Only the channels count:
        images of any size are taken.
      out_features: number of classes.
      block: "basic" (two 3x3 convolutions) or "bottleneck" (1x1, 3x3, 1x1).
      blocks: of each stage, at depth 1.
      stem: "imagenet" (7x7 at stride 2, and a max-pooling at stride 2) or "cifar" (3x3
        at stride 1, for images of about 32 pixels).
      norm: "batch", "layer" (over the channels at each position), "instance" (over
        the positions of each channel: the reading of App. A.2) or "none".
      zero_init: the last normalization of each branch starts at zero (without one,
        its last convolution); timm's default, torchvision's zero_init_residual.
      remat: recompute blocks in the backward pass.
      dtype: of the computation; statistics of normalizations are float32.
      param_dtype: of the parameters.
      rngs: random state.

    Raises:
      ValueError: a size that is not a positive whole number, or an unknown name.

    Source: He et al. 2016 (arXiv:1512.03385), Table 1; in depth, Bordelon et al. 2023
    (arXiv:2309.16620), App. A.2.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resnet18", width=4, base_width=2, depth=2, base_depth=1,
      ...                    blocks=(1, 1), stem="cifar", out_features=10,
      ...                    rngs=nnx.Rngs(0))
      >>> model.eval()  # normalizes by running statistics
      >>> model(jnp.ones((1, 32, 32, 3))).shape
      (1, 10)
      >>> zoo.axis_names(model)["stages/1/rest/convs/0/kernel"]
      ('layers', 'kernel3', 'kernel3', 'stage2', 'mid2')
    """

    def build(self, options: ResNetOptions, rngs: nnx.Rngs) -> None:
        for option, value, known in (
            ("block", options.block, tuple(_BLOCKS)),
            ("stem", options.stem, ("imagenet", "cifar")),
            ("norm", options.norm, NORMS),
        ):
            if value not in known:
                raise ValueError(f"{option}={value!r} must be one of {known}")
        blocks, input_shape = options.blocks, options.input_shape
        if not blocks or any(not isinstance(n, int) or n < 1 for n in blocks):
            raise ValueError(f"blocks={blocks} must be numbers of blocks, at least 1")
        if len(input_shape) != 3:
            raise ValueError(
                f"input_shape={input_shape} must be (height, width, channels)"
            )
        sizes, expansion = _BLOCKS[options.block]
        stages = range(1, len(blocks) + 1)
        inner = {f"{n}{i}": 2.0 ** (i - 1) for n in ("mid", "inner") for i in stages}
        self.plan = options.plan(
            growing={
                **{f"stage{i}": expansion * 2.0 ** (i - 1) for i in stages},
                **inner,
            },
            fixed={
                "kernel1": 1,
                "kernel3": 3,
                "kernel7": 7,
                "channels": input_shape[2],
                "classes": options.out_features,
            },
        )
        self.channels = input_shape[2]
        self.stem = options.stem
        imagenet = options.stem == "imagenet"
        self.conv = _conv(
            self.plan,
            7 if imagenet else 3,
            ("channels", "embed"),
            stride=2 if imagenet else 1,
            rngs=rngs,
        )
        self.norm = make_norm(options.norm, self.plan, "embed")

        def build(stage: int, before: str, stride: int, rngs: nnx.Rngs) -> Block:
            inside = (f"mid{stage}", f"inner{stage}")[: len(sizes) - 1]
            names = (before, *inside, f"stage{stage}")
            return Block(
                self.plan,
                sizes,
                names,
                stride=stride,
                norm=options.norm,
                zero_init=options.zero_init,
                rngs=rngs,
            )

        built = []
        for stage, count in zip(stages, blocks, strict=True):
            before = "embed" if stage == 1 else f"stage{stage - 1}"
            first = build(stage, before, 1 if stage == 1 else 2, rngs)
            more = options.depth * count - 1
            rest = (
                stack(
                    functools.partial(build, stage, f"stage{stage}", 1),
                    more,
                    rngs,
                    base_depth=options.tuned_depth * count - 1,
                )
                if more
                else None
            )
            built.append(Stage(first, rest, remat=options.remat))
        self.stages = nnx.List(built)
        self.readout = Dense(
            self.plan,
            (f"stage{len(blocks)}", "classes"),
            bias=True,
            # torch draws a Linear from ±1/√fan_in, which has a third of its variance.
            init="uniform",
            gain=3**-0.5,
            rngs=rngs,
        )

    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch out"]:
        check_images(x, self.channels)
        x = jax.nn.relu(self.norm(self.conv(x)))
        if self.stem == "imagenet":
            x = stem_pool(x)
        for stage in self.stages:
            x = stage(x)
        return self.readout(x.mean(axis=(1, 2))) * self.plan.output


def _conv(
    plan: Plan,
    size: int,
    names: tuple[str, str],
    *,
    zero: bool = False,
    **more: Any,
) -> Conv:
    # He et al. 2015 (arXiv:1502.01852), eq. 14: variance 2/fan_out, as torchvision
    # and timm draw them.
    gain = (2 * plan[names[0]].base / plan[names[1]].base) ** 0.5
    return Conv(
        plan, size, names, init="zeros" if zero else "fan_in", gain=gain, **more
    )


Leaf = tuple[str, int | None]
TorchLeaf = tuple[str, tuple[int, ...]]

# Keys of a torch state dict that hold nothing the model uses.
TORCH_UNUSED = ("num_batches_tracked",)


def resnet_names(model: ResNet) -> dict[Leaf, TorchLeaf]:
    """Where each variable of a ResNet stands in torchvision's and timm's.

    Args:
      model: its parameters and batch statistics are named.

    Returns:
      For each (path, index), where the index counts layers of a stacked variable and
      is None elsewhere: the key in the state dict of torch, and the order in which
      `numpy.transpose` takes the axes of torch's array to give ours (`numpy.argsort`
      of it goes back).

    Raises:
      ValueError: a model without batch normalization, which torch has no names for.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = nnx.eval_shape(lambda: zoo.create("resnet18", rngs=nnx.Rngs(0)))
      >>> names = resnet_names(model)
      >>> names["stages/1/rest/convs/0/kernel", 0]
      ('layer2.1.conv1.weight', (2, 3, 1, 0))
      >>> names["readout/kernel", None]
      ('fc.weight', (1, 0))
    """
    if not hasattr(model.norm, "mean"):
        raise ValueError(
            "only a ResNet with norm='batch' has the variables of torchvision's"
        )
    names: dict[Leaf, TorchLeaf] = {}
    kinds = (nnx.Param, nnx.BatchStat)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Any(*kinds))):
        parts = tuple(map(str, path))
        order: tuple[int, ...] = (0,)
        if parts[-1] == "kernel":
            order = (1, 0) if parts[0] == "readout" else (2, 3, 1, 0)
        stacked = "rest" in parts
        for index in range(variable.shape[0]) if stacked else (None,):
            names["/".join(parts), index] = (_torch_key(parts, index), order)
    return names


_TORCH_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}


def _torch_key(parts: tuple[str, ...], index: int | None) -> str:
    leaf = _TORCH_LEAVES[parts[-1]]
    match parts[:-1]:
        case ("conv",):
            return f"conv1.{leaf}"
        case ("norm",):
            return f"bn1.{leaf}"
        case ("readout",):
            return f"fc.{leaf}"
        case ("stages", stage, _, *where):
            block = 0 if index is None else index + 1
            match where:
                case ("convs", number):
                    name = f"conv{int(number) + 1}"
                case ("norms", number):
                    name = f"bn{int(number) + 1}"
                case (_, kind):
                    name = "downsample." + {"conv": "0", "norm": "1"}[kind]
            return f"layer{int(stage) + 1}.{block}.{name}.{leaf}"
    raise ValueError(f"torch has no name for {'/'.join(parts)!r}")

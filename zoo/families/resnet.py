"""ResNets and their variants, scaled in width and in depth."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from ..family import ResidualOptions
from ..layers.basic import Dense, stack
from ..layers.conv import NORMS, Conv, blur, half, make_norm, pool, stem_pool
from ..layers.squeeze import SqueezeExcite
from ..layers.stages import Stage, Staged
from ..plan import Plan
from ..registry import register
from ..weights.conv_sources import TORCH, conv_sources
from ..weights.sources import Leaf, Source

# Sizes of a branch's kernels, and channels of the stream over those inside a branch.
_BLOCKS = {"basic": ((3, 3), 1), "bottleneck": ((1, 3, 1), 4)}
_CHOICES = {
    "block": tuple(_BLOCKS),
    "stem": ("imagenet", "cifar", "deep", "tiered"),
    "norm": NORMS,
    "stem_pooling": ("max", "conv"),
    "shortcut": ("conv", "average"),
    "antialias": ("none", "blur", "average"),
}
# Of a deep stem's first two convolutions, as multiples of the width.
_STEMS = {"deep": (0.5, 0.5), "tiered": (0.375, 0.5)}
# The width at which numbers of channels are those of the papers.
_WIDTH = 64


class Projection(nnx.Module):
    """The shortcut of a block whose output has another shape: a 1x1 convolution.

    It has the stride, or stands behind an average over 2x2 pixels ("average").
    """

    def __init__(
        self,
        plan: Plan,
        names: tuple[str, str],
        *,
        stride: int,
        average: bool,
        norm: str,
        rngs: nnx.Rngs,
    ):
        self.average = average and stride != 1
        stride = 1 if average else stride
        self.conv = _conv(plan, 1, names, stride=stride, rngs=rngs)
        self.norm = make_norm(norm, plan, names[1])

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        return self.norm(self.conv(half(x) if self.average else x))


class Block(nnx.Module):
    """relu(shortcut(x) + a M^-α · branch(x)); shortcut is x, or a projection of it.

    The branch is a chain of convolutions, each normalized, with relu between them, and
    squeeze-and-excitation at its end if it is asked for. Its first 3x3 convolution
    carries the stride, as in torchvision and timm ("v1.5"), unless the image behind it
    is blurred or averaged instead.
    """

    def __init__(
        self,
        plan: Plan,
        options: "ResNetOptions",
        names: tuple[str, ...],
        *,
        stage: int,
        stride: int,
        rngs: nnx.Rngs,
    ):
        self.branch = plan.branch
        norm, sizes = options.norm, _BLOCKS[options.block][0]
        strided = sizes.index(3)
        self.antialias = "none" if stride == 1 else options.antialias
        self.strided = strided
        convs, norms = [], []
        for i, size in enumerate(sizes):
            last = i == len(sizes) - 1
            zero = options.zero_init and last
            before = names[i]
            if options.groups > 1 and i == strided:
                before = f"group{stage}"
            reduces = i == strided and self.antialias == "none"
            convs.append(
                _conv(
                    plan,
                    size,
                    (before, names[i + 1]),
                    stride=stride if reduces else 1,
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
        self.se = (
            SqueezeExcite(plan, ends[1], f"squeeze{stage}", in_branch=True, rngs=rngs)
            if options.squeeze
            else None
        )
        self.shortcut = (
            Projection(
                plan,
                ends,
                stride=stride,
                average=options.shortcut == "average",
                norm=norm,
                rngs=rngs,
            )
            if projects
            else None
        )

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        h = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h = norm(conv(h))
            if i < len(self.convs) - 1:
                h = jax.nn.relu(h)
            if i == self.strided:
                h = _antialias(h, self.antialias)
        if self.se is not None:
            h = self.se(h)
        if self.shortcut is not None:
            x = self.shortcut(x)
        if x.shape != h.shape:
            raise ValueError(
                f"antialias={self.antialias!r} makes {h.shape[1:3]} pixels of an odd "
                f"number, and the shortcut {x.shape[1:3]}; give images whose height "
                "and width are multiples of 32"
            )
        return jax.nn.relu(x + self.branch * h)


def _antialias(x: Float[Array, "b h w n"], kind: str) -> Float[Array, "b h2 w2 n"]:
    if kind == "none":
        return x
    return blur(x) if kind == "blur" else pool(x, "average")


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
    groups: int = 1
    width_per_group: int = 64
    stem_pooling: str = "max"
    shortcut: str = "conv"
    antialias: str = "none"
    squeeze: float = 0.0

    @property
    def branch_layers(self) -> int:
        """The convolutions of a block."""
        return 3 if self.block == "bottleneck" else 2


class ResNet(Staged, options=ResNetOptions):
    """A stem, stages of residual blocks, the mean over pixels, and a readout.

    Stage i = 0, 1, ... has width · 2^i channels, four times as many between
    bottlenecks, and halves the image for i > 0. Under SP, and under every
    parametrization at its base size, it is torchvision's and timm's network of that
    name, drawn from the same distributions (the readout's bias starts at zero). Depth
    is scanned: compiling takes the same time at any `depth`.

    Args:
      width: channels of the stem.
      depth: factor on the number of blocks: stage i has depth · blocks[i] blocks.
      base_width: the width that you tuned; None for `width`.
      base_depth: the depth that you tuned; None for `depth`. M = depth / base_depth.
      parametrization: a name, or what `optim.parametrization` returns; "completep" by
        default.
      branch_multiplier: a, the factor of each residual branch at the base depth.
      input_shape: (height, width, channels) of an image. Images of any size are
        accepted.
      out_features: number of classes.
      block: "basic" (two 3x3 convolutions) or "bottleneck" (1x1, 3x3, 1x1).
      blocks: number of blocks in each stage, at depth 1.
      stem: "imagenet" (7x7 at stride 2, and a pooling at stride 2), "deep" (three 3x3
        instead of the 7x7, with half as many channels in between), "tiered" (like
        "deep", with 3/8 and 1/2 as many channels), or "cifar" (3x3 at stride 1 without
        pooling, for images of about 32 pixels).
      norm: "batch", "layer" (over the channels at each position), "instance" (over the
        positions of each channel; our reading of App. A.2) or "none".
      zero_init: initialize the last normalization of each branch (without
        normalization, the last convolution) with zeros; the default in timm,
        zero_init_residual in torchvision.
      groups: number of groups of the 3x3 convolution in a bottleneck (ResNeXt),
        constant over widths. Each output sums over the channels of its group, whose
        number grows.
      width_per_group: channels of a group in the first stage at width 64; at other
        widths in proportion. The inside of a bottleneck is groups * width_per_group /
        64 times as wide: 2 for wide_resnet50_2 and resnext50_32x4d.
      stem_pooling: "max", or "conv" for a 3x3 convolution at stride 2 (ResNet-RS).
      shortcut: projection of the shortcut in blocks that halve the image: "conv" uses a
        stride, "average" takes the mean over 2x2 pixels first (ResNet-D).
      antialias: operation that halves the image: "none" (strides), "blur" (kernel 1 2
        1) or "average" (over 2x2 pixels).
      squeeze: channels of squeeze-and-excitation, relative to its stage, e.g. 1/16 for
        seresnet50 and 1/4 for ResNet-RS; 0 for none. At width 64 they are rounded up to
        a multiple of 8; at other widths they are in proportion.
      remat: recompute blocks in the backward pass.
      dtype: data type of the computation; statistics of normalizations, and logits,
        are at least float32.
      param_dtype: data type of the parameters.
      rngs: random state.

    Raises:
      ValueError: a size that is not a positive whole number, or an unknown name.

    Source: He et al. 2016 (arXiv:1512.03385), Table 1; in depth, Bordelon et al. 2023
    (arXiv:2309.16620), App. A.2. Variants: Xie et al. 2017 (arXiv:1611.05431, groups),
    Zagoruyko and Komodakis 2016 (arXiv:1605.07146, width), He et al. 2018
    (arXiv:1812.01187, stem and shortcut), Hu et al. 2018 (arXiv:1709.01507, squeeze),
    Zhang 2019 (arXiv:1904.11486, blur), Bello et al. 2021 (arXiv:2103.07579, RS).

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
        for option, known in _CHOICES.items():
            value = getattr(options, option)
            if value not in known:
                raise ValueError(f"{option}={value!r} must be one of {known}")
        self._check_groups(options)
        blocks, input_shape = options.blocks, options.input_shape
        if not blocks or any(not isinstance(n, int) or n < 1 for n in blocks):
            raise ValueError(f"blocks={blocks} must be numbers of blocks, at least 1")
        if len(input_shape) != 3:
            raise ValueError(
                f"input_shape={input_shape} must be (height, width, channels)"
            )
        sizes, expansion = _BLOCKS[options.block]
        stages = range(1, len(blocks) + 1)
        wide = options.groups * options.width_per_group / _WIDTH
        growing = {f"stage{i}": expansion * 2.0 ** (i - 1) for i in stages}
        for i in stages:
            growing[f"mid{i}"] = growing[f"inner{i}"] = wide * 2.0 ** (i - 1)
            if options.groups > 1:
                growing[f"group{i}"] = growing[f"mid{i}"] / options.groups
            if options.squeeze:
                squeezed = growing[f"stage{i}"] * _WIDTH * options.squeeze
                growing[f"squeeze{i}"] = math.ceil(squeezed / 8) * 8 / _WIDTH
        deep = _STEMS.get(options.stem, ())
        growing |= {f"stem{i}": multiple for i, multiple in enumerate(deep, 1)}
        self.plan = options.plan(
            growing=growing,
            fixed={
                "kernel1": 1,
                "kernel3": 3,
                "kernel7": 7,
                "channels": input_shape[2],
                "classes": options.out_features,
            },
        )
        self.channels = input_shape[2]
        self._build_stem(options, deep, rngs)

        def build(stage: int, before: str, stride: int, rngs: nnx.Rngs) -> Block:
            inside = (f"mid{stage}", f"inner{stage}")[: len(sizes) - 1]
            names = (before, *inside, f"stage{stage}")
            return Block(
                self.plan, options, names, stage=stage, stride=stride, rngs=rngs
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

    @staticmethod
    def _check_groups(options: ResNetOptions) -> None:
        sizes = {"groups": options.groups, "width_per_group": options.width_per_group}
        for option, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{option}={value!r} must be a whole number, at least 1"
                )
        if options.block == "basic" and tuple(sizes.values()) != (1, _WIDTH):
            raise ValueError(
                "groups and width_per_group are of bottlenecks; pass block='bottleneck'"
            )
        if not 0 <= options.squeeze <= 1:
            raise ValueError(f"squeeze={options.squeeze!r} must lie in [0, 1]")
        if options.stem == "cifar" and options.stem_pooling != "max":
            raise ValueError(
                "stem='cifar' has no pooling; leave stem_pooling='max', or take "
                "another stem"
            )

    def _build_stem(
        self, options: ResNetOptions, deep: tuple[float, ...], rngs: nnx.Rngs
    ) -> None:
        plan, kind = self.plan, options.stem
        before, convs, norms = "channels", [], []
        for i in range(len(deep)):
            after = f"stem{i + 1}"
            stride = 2 if i == 0 else 1
            convs.append(_conv(plan, 3, (before, after), stride=stride, rngs=rngs))
            norms.append(make_norm(options.norm, plan, after))
            before = after
        self.stem_convs, self.stem_norms = nnx.List(convs), nnx.List(norms)
        self.conv = _conv(
            plan,
            7 if kind == "imagenet" else 3,
            (before, "embed"),
            stride=2 if kind == "imagenet" else 1,
            rngs=rngs,
        )
        self.norm = make_norm(options.norm, plan, "embed")
        self.pools = kind != "cifar"
        self.antialias = options.antialias
        self.averages = options.shortcut == "average"
        pooled: tuple[Conv, nnx.Module] | None = None
        if options.stem_pooling == "conv":
            stride = 2 if options.antialias == "none" else 1
            ends = ("embed", "embed")
            conv = _conv(plan, 3, ends, stride=stride, rngs=rngs)
            pooled = conv, make_norm(options.norm, plan, "embed")
        # Assigned once: NNX takes an attribute that was None for no module.
        self.pool_conv = None if pooled is None else pooled[0]
        self.pool_norm = None if pooled is None else pooled[1]

    def _enter(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 n"]:
        for conv, norm in zip(self.stem_convs, self.stem_norms, strict=True):
            x = jax.nn.relu(norm(conv(x)))
        x = jax.nn.relu(self.norm(self.conv(x)))
        if not self.pools:
            return x
        if self.pool_conv is not None and self.pool_norm is not None:
            x = _antialias(self.pool_conv(x), self.antialias)
            return jax.nn.relu(self.pool_norm(x))
        if self.antialias == "none":
            return stem_pool(x)
        if self.antialias == "average":
            return pool(x, "average")
        return blur(stem_pool(x, stride=1))

    def features(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch n"]:
        """What the readout sees: the mean over pixels of the last stage.

        Args:
          x: images, as in a call.

        Returns:
          Features of shape (batch, channels of the last stage).
        """
        return self._maps(x)[-1].mean(axis=(1, 2))


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


# --- Names of variants ---

# Blocks of the stages of bottlenecks, by the number in a name.
_DEPTHS = {
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
    269: (3, 30, 48, 8),
}
_BASIC = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_RS = {
    **{n: _DEPTHS[n] for n in (50, 101, 152, 200)},
    270: (4, 29, 53, 4),
    350: (4, 36, 72, 4),
    420: (4, 44, 87, 4),
}
_NAME = re.compile(
    r"(?P<se>se)?(?P<kind>wide_resnet|resnetblur|resnetaa|resnetrs|resnext|resnet)"
    r"(?P<depth>\d+)(?P<stem>[cdt]?)(_(?P<groups>\d+)x(?P<width>\d+)d|(?P<wide>_2))?"
)


def variant(name: str) -> dict[str, Any] | None:
    """The options of a ResNet that timm has under a name; None for another name.

    Examples:
      >>> variant("seresnext26d_32x4d")["blocks"]
      (2, 2, 2, 2)
      >>> variant("resnet50d")["stem"], variant("resnet50d")["shortcut"]
      ('deep', 'average')
      >>> variant("ecaresnet50d")
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    kind, depth, stem = match["kind"], int(match["depth"]), match["stem"]
    grouped = match["groups"] is not None
    if grouped != (kind == "resnext") or bool(match["wide"]) != (kind[:4] == "wide"):
        return None
    options: dict[str, Any] = {"width": _WIDTH, "depth": 1}
    depths = _RS if kind == "resnetrs" else {**_BASIC, **_DEPTHS}
    if depth not in depths or (kind == "resnetrs" and (stem or match["se"])):
        return None
    basic = depth in _BASIC
    if basic and kind in ("resnext", "wide_resnet"):
        return None
    options |= {"block": "basic" if basic else "bottleneck", "blocks": depths[depth]}
    if grouped:
        options["groups"] = int(match["groups"])
        options["width_per_group"] = int(match["width"])
    if kind == "wide_resnet":
        options["width_per_group"] = 2 * _WIDTH
    if stem:
        options["stem"] = "tiered" if stem == "t" else "deep"
    if stem in ("d", "t"):
        options["shortcut"] = "average"
    antialias = {"resnetblur": "blur", "resnetaa": "average"}.get(kind)
    if antialias:
        options["antialias"] = antialias
    if match["se"]:
        options["squeeze"] = 1 / 16
    if kind == "resnetrs":
        options |= {"stem": "deep", "stem_pooling": "conv"}
        options |= {"shortcut": "average", "squeeze": 1 / 4}
    return options


NAMES = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnet26d", "resnet50d", "resnet101d", "wide_resnet50_2", "wide_resnet101_2"),
    *("resnext50_32x4d", "resnext101_32x8d", "seresnet50", "seresnext50_32x4d"),
    *("resnetblur50", "resnetaa50", "resnetrs50", "resnetrs101"),
)
for _name in NAMES:
    register(_name, **(variant(_name) or {}))(ResNet)


# --- Names of variables elsewhere ---

LAYOUTS = ("timm", "torchvision", "transformers")


def resnet_names(
    model: ResNet, layout: str = "timm", *, prefix: str = "resnet."
) -> dict[Leaf, Source]:
    """Where each variable of a ResNet stands in torch's libraries.

    Args:
      model: its parameters and batch statistics are named.
      layout: "timm" and "torchvision", which have the same names, or "transformers".
      prefix: what stands in front of every key of transformers but that of the
        readout; files of `ResNetModel` have none.

    Returns:
      For each (path, layer), where the layer is None for what is not stacked, its
      `Source`.

    Raises:
      ValueError: a model that the library cannot make, as one without batch
        normalization.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = nnx.eval_shape(lambda: zoo.create("resnet18", rngs=nnx.Rngs(0)))
      >>> names = resnet_names(model)
      >>> names["stages/1/rest/convs/0/kernel", 0].key
      'layer2.1.conv1.weight'
      >>> names["readout/kernel", None].shape
      (1000, 512)
    """
    if not hasattr(model.norm, "mean"):
        raise ValueError(
            "only a ResNet with norm='batch' has the variables of torchvision's"
        )
    if layout == "transformers":
        _check_plain(model)
        module = functools.partial(_transformers_key, prefix)
    else:
        module = functools.partial(_timm_key, model)
    return conv_sources(
        model,
        lambda parts, layer: f"{module(parts[:-1], layer)}.{TORCH[parts[-1]]}",
        pointwise=lambda parts: "se" in parts,
    )


def _check_plain(model: ResNet) -> None:
    first = model.stages[0].first
    grouped = model.plan.has("group1")
    wide = model.plan["mid1"].size != model.plan["embed"].size
    deep, pooled = bool(model.stem_convs), model.pool_conv is not None
    blurs = model.antialias != "none"
    for is_there, what in (
        (not model.pools, "the CIFAR stem"),
        (deep, "a deep stem"),
        (pooled, "a convolution for the stem's pooling"),
        (grouped, "grouped convolutions"),
        (wide, "a wider inside of its blocks"),
        (first.se is not None, "squeeze-and-excitation"),
        (model.averages, "average pooling in shortcuts"),
        (blurs, "anti-aliasing"),
    ):
        if is_there:
            raise ValueError(
                f"transformers' ResNet has not {what}; write it in timm's layout"
            )


def _timm_key(model: ResNet, parts: tuple[str, ...], layer: int | None) -> str:
    match parts:
        case ("conv",):
            # Norm and relu stand between the convolutions of a deep stem.
            return f"conv1.{3 * len(model.stem_convs)}" if model.stem_convs else "conv1"
        case ("norm",):
            return "bn1"
        case ("stem_convs", number):
            return f"conv1.{3 * int(number)}"
        case ("stem_norms", number):
            return f"conv1.{3 * int(number) + 1}"
        case ("pool_conv",):
            return "maxpool.0"
        case ("pool_norm",):
            return "maxpool.1" if model.antialias == "none" else "maxpool.2"
        case ("readout",):
            return "fc"
        case ("stages", stage, _, *where):
            match where:
                case ("convs", number):
                    name = f"conv{int(number) + 1}"
                case ("norms", number):
                    name = f"bn{int(number) + 1}"
                case ("se", kind):
                    name = {"squeeze": "se.fc1", "excite": "se.fc2"}[kind]
                case (_, kind):
                    # The pooling comes first, an identity where nothing is halved.
                    first = 1 if model.averages else 0
                    name = f"downsample.{first + ('conv', 'norm').index(kind)}"
            return f"layer{int(stage) + 1}.{_block(layer)}.{name}"
    raise ValueError(f"timm has no name for {'/'.join(parts)!r}")


def _transformers_key(prefix: str, parts: tuple[str, ...], layer: int | None) -> str:
    names = {"convs": "convolution", "norms": "normalization"}
    match parts:
        case ("conv",) | ("norm",):
            return f"{prefix}embedder.embedder.{names[f'{parts[0]}s']}"
        case ("readout",):
            return "classifier.1"
        case ("stages", stage, _, *where):
            match where:
                case (("convs" | "norms") as chain, number):
                    name = f"layer.{number}.{names[chain]}"
                case (_, kind):
                    name = f"shortcut.{names[f'{kind}s']}"
            return f"{prefix}encoder.stages.{stage}.layers.{_block(layer)}.{name}"
    raise ValueError(f"transformers has no name for {'/'.join(parts)!r}")


def _block(layer: int | None) -> int:
    """The number of a block in its stage, whose first is not stacked."""
    return 0 if layer is None else layer + 1

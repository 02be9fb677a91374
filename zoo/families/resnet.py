"""ResNets and their variants, scaled in width and in depth."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
from flax import nnx
from jaxtyping import Array, Float

from ..family import Count, Counts, Fraction
from ..layers.basic import Dense
from ..layers.conv import (
    EPSILON,
    NORMS,
    fan_out_conv,
    stem_pool,
)
from ..layers.squeeze import SqueezeExcite
from ..layers.stages import (
    ConvBlock,
    ImageOptions,
    Projection,
    Stage,
    Staged,
    last_norm_factor,
)
from ..plan import Plan
from ..registry import Record, register
from ..weights.configs import Config
from ..weights.sources import Layout

# Sizes of a branch's kernels, and channels of the stream over those inside a branch.
_BLOCKS = {"basic": ((3, 3), 1), "bottleneck": ((1, 3, 1), 4)}
# Channels of a deep stem's first two convolutions, as multiples of the width.
_DEEP = (0.5, 0.5)
_Parts = Mapping[str, Mapping[str, Any]]
# The width at which numbers of channels are those of the papers.
_WIDTH = 64


def _block(
    plan: Plan,
    options: "ResNetOptions",
    names: tuple[str, ...],
    *,
    stage: int,
    stride: int,
    rngs: nnx.Rngs,
) -> ConvBlock:
    """A block, whose 3x3 convolution has the stride, as in torchvision and timm."""
    norm, sizes = options.norm, _BLOCKS[options.block][0]
    make_norm = functools.partial(NORMS[norm], plan, epsilon=EPSILON)
    strided, last = sizes.index(3), len(sizes) - 1
    convs, norms = [], []
    for i, size in enumerate(sizes):
        grouped = options.groups > 1 and i == strided
        ends = f"group{stage}" if grouped else names[i], names[i + 1]
        starts = "zeros" if options.zero_init and i == last else ""
        convs.append(
            fan_out_conv(
                plan,
                size,
                ends,
                stride=stride if i == strided else 1,
                in_branch=True,
                init=starts if starts and norm == "none" else "fan_in",
                rngs=rngs,
            )
        )
        init = starts or "ones"
        norms.append(make_norm(ends[1], in_branch=True, init=init))
    ends = names[0], names[-1]
    se = shortcut = None
    if options.squeeze:
        squeezed = f"squeeze{stage}"
        se = SqueezeExcite(plan, ends[1], squeezed, in_branch=True, rngs=rngs)
    if stride != 1 or plan[ends[0]] != plan[ends[1]]:
        average = options.shortcut == "average"
        step = 1 if average else stride
        conv = fan_out_conv(plan, 1, ends, stride=step, rngs=rngs)
        norm_of = make_norm(ends[1])
        shortcut = Projection(conv, norm_of, average=average and stride != 1)
    return ConvBlock(
        convs,
        norms,
        branch=plan.branch,
        se=se,
        se_before=len(sizes),
        shortcut=shortcut,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetOptions(ImageOptions):
    """Options of `ResNet`, which describes them."""

    block: Literal["basic", "bottleneck"] = "basic"
    blocks: Counts = (2, 2, 2, 2)
    stem: Literal["imagenet", "cifar", "deep"] = "imagenet"
    norm: Literal["batch", "layer", "instance", "none"] = "batch"
    zero_init: bool = False
    groups: Count = 1
    width_per_group: Count = 64
    shortcut: Literal["conv", "average"] = "conv"
    squeeze: Fraction = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        is_wide = (self.groups, self.width_per_group) != (1, _WIDTH)
        if self.block == "basic" and is_wide:
            raise ValueError(
                "groups and width_per_group are of bottlenecks; pass block='bottleneck'"
            )

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
      block: "basic" (two 3x3 convolutions) or "bottleneck" (1x1, 3x3, 1x1).
      blocks: number of blocks in each stage, at depth 1.
      stem: "imagenet" (7x7 at stride 2, and a pooling at stride 2), "deep" (three 3x3
        instead of the 7x7, with half as many channels in between), or "cifar" (3x3 at
        stride 1 without pooling, for images of about 32 pixels).
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
      shortcut: projection of the shortcut in blocks that halve the image: "conv" uses a
        stride, "average" takes the mean over 2x2 pixels first (ResNet-D).
      squeeze: channels of squeeze-and-excitation, relative to its stage, e.g. 1/16 for
        seresnet50; 0 for none. At width 64 they are rounded up to a multiple of 8; at
        other widths they are in proportion.

    Raises:
      ValueError: a size that is not a positive whole number, or an unknown name.

    Source: He et al. 2016 (arXiv:1512.03385), Table 1; in depth, Bordelon et al. 2023
    (arXiv:2309.16620), App. A.2. Variants: Xie et al. 2017 (arXiv:1611.05431, groups),
    Zagoruyko and Komodakis 2016 (arXiv:1605.07146, width), He et al. 2018
    (arXiv:1812.01187, stem and shortcut), Hu et al. 2018 (arXiv:1709.01507, squeeze).

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
        blocks, input_shape = options.blocks, options.input_shape
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
        deep = _DEEP if options.stem == "deep" else ()
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

        def build(stage: int) -> Stage:
            before = "embed" if stage == 1 else f"stage{stage - 1}"
            inside = (f"mid{stage}", f"inner{stage}")[: len(sizes) - 1]

            def block(which: int, rngs: nnx.Rngs) -> ConvBlock:
                names = (f"stage{stage}" if which else before, *inside, f"stage{stage}")
                stride = 1 if which or stage == 1 else 2
                return _block(
                    self.plan, options, names, stage=stage, stride=stride, rngs=rngs
                )

            return Stage.of(block, blocks[stage - 1], options, rngs)

        self.stages = nnx.List(build(stage) for stage in stages)
        self.readout = Dense(
            self.plan,
            (f"stage{len(blocks)}", "classes"),
            bias=True,
            # torch draws a Linear from ±1/√fan_in, which has a third of its variance.
            init="uniform",
            gain=3**-0.5,
            rngs=rngs,
        )

    def _build_stem(
        self, options: ResNetOptions, deep: tuple[float, ...], rngs: nnx.Rngs
    ) -> None:
        plan, kind = self.plan, options.stem
        make_norm = functools.partial(NORMS[options.norm], plan, epsilon=EPSILON)
        before, convs, norms = "channels", [], []
        for i in range(len(deep)):
            after = f"stem{i + 1}"
            stride = 2 if i == 0 else 1
            convs.append(
                fan_out_conv(plan, 3, (before, after), stride=stride, rngs=rngs)
            )
            norms.append(make_norm(after))
            before = after
        self.stem_convs, self.stem_norms = nnx.List(convs), nnx.List(norms)
        self.conv = fan_out_conv(
            plan,
            7 if kind == "imagenet" else 3,
            (before, "embed"),
            stride=2 if kind == "imagenet" else 1,
            rngs=rngs,
        )
        self.norm = make_norm("embed")
        self.pools = kind != "cifar"
        self.averages = options.shortcut == "average"

    def _enter(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 n"]:
        for conv, norm in zip(self.stem_convs, self.stem_norms, strict=True):
            x = jax.nn.relu(norm(conv(x)))
        x = jax.nn.relu(self.norm(self.conv(x)))
        return stem_pool(x) if self.pools else x


# --- Names of variants ---

# By the number in a name: the block, and the numbers of blocks in the stages.
_DEPTHS = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    14: ("bottleneck", (1, 1, 1, 1)),
    26: ("bottleneck", (2, 2, 2, 2)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
    200: ("bottleneck", (3, 24, 36, 3)),
    269: ("bottleneck", (3, 30, 48, 8)),
}
# Options by the other parts of a name: before the kind, behind the number, at the end.
_STARTS: _Parts = {"": {}, "se": {"squeeze": 1 / 16}}
_STEMS: _Parts = {
    "": {},
    "c": {"stem": "deep"},
    "d": {"stem": "deep", "shortcut": "average"},
}
_KINDS: Mapping[str, _Parts] = {
    "resnet": {"": {}},
    "wide_resnet": {"_2": {"width_per_group": 2 * _WIDTH}},
    "resnext": {
        f"_{groups}x{width}d": {"groups": groups, "width_per_group": width}
        for groups, width in ((64, 4), *((32, n) for n in (4, 8, 16, 32, 48)))
    },
}


def _timm() -> dict[str, dict[str, Any]]:
    """timm's ResNets, by their names."""
    named = {}
    for se, kind, depth, stem in itertools.product(_STARTS, _KINDS, _DEPTHS, _STEMS):
        block, blocks = _DEPTHS[depth]
        sizes = {"width": _WIDTH, "depth": 1, "block": block, "blocks": blocks}
        for end, wide in _KINDS[kind].items():
            if block == "bottleneck" or kind == "resnet":
                options = {**sizes, **wide, **_STEMS[stem], **_STARTS[se]}
                named[f"{se}{kind}{depth}{stem}{end}"] = options
    return named


TIMM = _timm()
NAMES = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnet26d", "resnet50d", "resnet101d", "wide_resnet50_2", "wide_resnet101_2"),
    *("resnext50_32x4d", "resnext101_32x8d", "seresnet50", "seresnext50_32x4d"),
)


# --- Files of other libraries ---


def _from_transformers(config: Config) -> dict[str, Any]:
    config.only(
        hidden_act="relu",
        downsample_in_first_stage=False,
        downsample_in_bottleneck=False,
    )
    block = config.get("layer_type", "bottleneck")
    if block not in _BLOCKS:
        raise config.refusal(f"layer_type={block!r}", "'basic' and 'bottleneck'")
    width = config.whole("embedding_size", 64)
    sizes, blocks = config.doubling("hidden_sizes"), config.wholes("depths")
    expected = _BLOCKS[block][1] * width
    if sizes[0] != expected:
        has, ours = f"hidden_sizes[0]={sizes[0]}", f"only hidden_sizes[0]={expected}"
        raise config.refusal(has, ours)
    return {
        **{"width": width, "depth": 1, "block": block, "blocks": blocks},
        **config.images(),
    }


def _layout(model: ResNet, name: str) -> Layout:
    if name == "transformers":
        start = "encoder.stages.{}.layers.{}."
        modules = {
            "conv": "embedder.embedder.convolution.",
            "norm": "embedder.embedder.normalization.",
            "readout": "classifier.1.",
            "stages/*/*/convs/*": f"{start}layer.{{}}.convolution.",
            "stages/*/*/norms/*": f"{start}layer.{{}}.normalization.",
            "stages/*/*/shortcut/conv": f"{start}shortcut.convolution.",
            "stages/*/*/shortcut/norm": f"{start}shortcut.normalization.",
        }
        return Layout(modules, prefix="resnet.")
    # The pooling of a shortcut comes first, an identity where nothing is halved.
    stem, first = range(len(model.stem_convs)), int(model.averages)
    modules = {
        # A norm and a relu follow each convolution of a deep stem.
        **{f"stem_convs/{i}": f"conv1.{3 * i}." for i in stem},
        **{f"stem_norms/{i}": f"conv1.{3 * i + 1}." for i in stem},
        "conv": f"conv1.{3 * len(stem)}." if stem else "conv1.",
        "norm": "bn1.",
        "readout": "fc.",
        "stages/*/*/convs/*": "layer{1}.{}.conv{1}.",
        "stages/*/*/norms/*": "layer{1}.{}.bn{1}.",
        "stages/*/*/se/squeeze": "layer{1}.{}.se.fc1.",
        "stages/*/*/se/excite": "layer{1}.{}.se.fc2.",
        "stages/*/*/shortcut/conv": f"layer{{1}}.{{}}.downsample.{first}.",
        "stages/*/*/shortcut/norm": f"layer{{1}}.{{}}.downsample.{first + 1}.",
    }
    return Layout(modules, pointwise="/se/")


def _check(model: ResNet, name: str) -> None:
    if not hasattr(model.norm, "mean"):
        raise ValueError(
            "only a ResNet with norm='batch' has the variables of torchvision's"
        )
    if name != "transformers":
        return
    others = (
        not model.pools or len(model.stem_convs) > 0,
        model.averages or model.plan.has("group1"),
        model.plan["mid1"].size != model.plan["embed"].size,
        model.stages[0].first.se is not None,
    )
    if any(others):
        raise ValueError(
            "transformers' ResNet has only the stem 'imagenet', plain shortcuts, "
            "convolutions of one group and of the stage's width, and no squeeze-and-"
            "excitation; write this one in timm's layout"
        )


def _factor(model: ResNet, path: str) -> float:
    if path.endswith("se/squeeze/kernel"):
        # It reads what the last norm gives, and is not to see the branch's factor.
        return 1 / model.plan.branch if model.plan.branch else 0.0
    return last_norm_factor(model, path)


register(
    Record(
        model=ResNet,
        sizes={name: TIMM[name] for name in NAMES},
        base="resnet50",
        timm=TIMM,
        transformers={"resnet": _from_transformers},
        layouts=lambda model: ("timm", "torchvision", "transformers"),
        layout=_layout,
        check=_check,
        factor=_factor,
        unseen=", without anti-aliasing, which no weights show",
    )
)

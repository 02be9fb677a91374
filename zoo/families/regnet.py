"""RegNetX and RegNetY: bottlenecks of grouped convolutions, sizes by a rule."""

import dataclasses
import math
from collections import Counter
from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float

from ..layers.basic import Dense
from ..layers.conv import BatchNorm, fan_out_conv
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
from ..weights.sources import Layout


class _Axes(NamedTuple):
    """The axes of one block, from its input on; `squeezed` is "" for no gate."""

    before: str
    reduced: str
    group: str
    mixed: str
    after: str
    squeezed: str


# Of the first block of a stage, whose gate sees other channels, and of the others.
_SQUEEZED = ("squeeze", "narrow")


def _block(
    plan: Plan, axes: _Axes, *, stride: int, zero_init: bool, rngs: nnx.Rngs
) -> ConvBlock:
    """A 1x1, a grouped 3x3, and a 1x1 convolution.

    Squeeze-and-excitation follows the second relu, where ResNet has it at the end.

    Source: Radosavovic et al. 2020 (arXiv:2003.13678), Figure 4 and section 4.
    """
    chain = (
        (1, axes.before, axes.reduced, 1),
        (3, axes.group, axes.mixed, stride),
        (1, axes.mixed, axes.after, 1),
    )
    convs = [
        fan_out_conv(
            plan,
            size,
            (i, o),
            stride=s,
            per_group=i == axes.group,
            in_branch=True,
            rngs=rngs,
        )
        for size, i, o, s in chain
    ]
    starts = "zeros" if zero_init else "ones"
    norms = [
        BatchNorm(plan, o, in_branch=True, init=starts if o == axes.after else "ones")
        for _, _, o, _ in chain
    ]
    ends = axes.before, axes.after
    se = shortcut = None
    if axes.squeezed:
        se = SqueezeExcite(plan, axes.mixed, axes.squeezed, in_branch=True, rngs=rngs)
    if stride != 1 or plan[ends[0]] != plan[ends[1]]:
        conv = fan_out_conv(plan, 1, ends, stride=stride, rngs=rngs)
        shortcut = Projection(conv, BatchNorm(plan, axes.after))
    return ConvBlock(
        convs, norms, branch=plan.branch, se=se, se_before=2, shortcut=shortcut
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegNetOptions(ImageOptions):
    """Options of `RegNet`; see there."""

    rows: tuple[tuple[int, int], ...]
    rows_width: int = 32
    group_width: int
    squeeze: float = 0.0
    zero_init: bool = False

    @property
    def branch_layers(self) -> int:
        """The convolutions of a block."""
        return 3


class RegNet(Staged, options=RegNetOptions):
    """A stem, stages of grouped bottlenecks, the mean over pixels, and a readout.

    Every stage halves the image. All numbers of channels grow in proportion to the
    width: those of one group too, so that the number of groups stays. Under SP, and
    under every parametrization at its base size, it is timm's network of that name,
    drawn from the same distributions (with `zero_init=True`).

    Args:
      width: channels of the stem.
      depth: how often the blocks of each stage are repeated.
      rows: (blocks at depth 1, channels) of each stage.
      rows_width: the width to which the channels in `rows` and `group_width` belong; at
        other widths they are in proportion.
      group_width: channels of one group of the 3x3 convolutions, which divides the
        channels of every stage. A stage of fewer channels has one group.
      squeeze: channels of squeeze-and-excitation over those that enter the block,
        rounded: 1/4 for RegNetY, 0 for none.
      zero_init: the last normalization of each branch starts at zero, timm's default.

    Raises:
      ValueError: a size that is not a positive whole number, or groups that do not
        divide the channels of a stage.

    Source: Radosavovic et al. 2020 (arXiv:2003.13678).

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("regnety_002", width=16, base_width=8, rows_width=8,
      ...                    rows=((1, 8), (2, 16)), group_width=4, out_features=10,
      ...                    rngs=nnx.Rngs(0))
      >>> model.eval()  # normalizes by running statistics
      >>> model(jnp.ones((1, 32, 32, 3))).shape
      (1, 10)
      >>> zoo.axis_names(model)["stages/1/rest/convs/1/kernel"]
      ('layers', 'kernel3', 'kernel3', 'group2', 'inner2')
    """

    def build(self, options: RegNetOptions, rngs: nnx.Rngs) -> None:
        _check(options)
        reference = options.rows_width
        growing: dict[str, float] = {}
        before = reference
        for i, (count, channels) in enumerate(options.rows, 1):
            names = (f"stage{i}", f"mid{i}", f"inner{i}")
            growing |= dict.fromkeys(names, channels / reference)
            growing[f"group{i}"] = min(options.group_width, channels) / reference
            if options.squeeze:
                entering = [before, channels] if options.depth * count > 1 else [before]
                for name, n in zip(_SQUEEZED, entering, strict=False):
                    squeezed = max(1, round(n * options.squeeze))
                    growing[f"{name}{i}"] = squeezed / reference
            before = channels
        self.plan = options.plan(
            growing=growing,
            fixed={
                "kernel1": 1,
                "kernel3": 3,
                "channels": options.input_shape[2],
                "classes": options.out_features,
            },
        )
        self.channels = options.input_shape[2]
        ends = ("channels", "embed")
        self.conv = fan_out_conv(self.plan, 3, ends, stride=2, rngs=rngs)
        self.norm = BatchNorm(self.plan, "embed")
        self.stages = nnx.List(
            self._stage(options, i, rngs) for i in range(1, len(options.rows) + 1)
        )
        last = f"stage{len(options.rows)}"
        self.readout = Dense(
            self.plan,
            (last, "classes"),
            bias=True,
            # timm draws it of standard deviation 0.01, whatever its fan-in.
            gain=0.01 * self.plan[last].base ** 0.5,
            rngs=rngs,
        )

    def _stage(self, options: RegNetOptions, i: int, rngs: nnx.Rngs) -> Stage:
        def build(which: int, rngs: nnx.Rngs) -> ConvBlock:
            before = f"stage{i}" if which else f"stage{i - 1}"
            axes = _Axes(
                "embed" if before == "stage0" else before,
                f"mid{i}",
                f"group{i}",
                f"inner{i}",
                f"stage{i}",
                f"{_SQUEEZED[which]}{i}" if options.squeeze else "",
            )
            stride, zero = (1 if which else 2), options.zero_init
            return _block(self.plan, axes, stride=stride, zero_init=zero, rngs=rngs)

        return Stage.of(build, options.rows[i - 1][0], options, rngs)

    def _enter(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 n"]:
        return jax.nn.relu(self.norm(self.conv(x)))


def _check(options: RegNetOptions) -> None:
    """Refuse options that are out of range.

    Raises:
      ValueError: names the option.
    """
    for option in ("rows_width", "group_width"):
        if getattr(options, option) < 1:
            raise ValueError(f"{option}={getattr(options, option)} must be positive")
    if not 0 <= options.squeeze <= 1:
        raise ValueError(f"squeeze={options.squeeze!r} must lie in [0, 1]")
    if not options.rows:
        raise ValueError("rows=() must have at least one row")
    for row in options.rows:
        whole = isinstance(row, tuple | list) and len(row) == 2
        if not whole or not all(type(n) is int and n > 0 for n in row):
            raise ValueError(
                f"row {row!r} must be (blocks, channels), whole numbers of at least 1"
            )
        if row[1] % min(options.group_width, row[1]):
            raise ValueError(
                f"group_width={options.group_width} does not divide the {row[1]} "
                f"channels of row {row!r}; choose channels that it divides"
            )


# --- Names of variants ---


class _Rule(NamedTuple):
    """The numbers by which the paper writes a network.

    Attributes:
      blocks: d, in all.
      initial: w_0, channels of block 0.
      slope: w_a, channels that each further block adds, before they are rounded.
      ratio: w_m, between the channels of two stages.
      group: g, channels of one group.

    Source: Radosavovic et al. 2020 (arXiv:2003.13678), section 3.3.
    """

    blocks: int
    initial: int
    slope: float
    ratio: float
    group: int

    def rows(self, *, keep: bool = False) -> tuple[tuple[int, int], ...]:
        """(blocks, channels) of each stage.

        Block j is given w_0 + w_a j channels, rounded to w_0 w_m^s for a whole s, and
        then to a multiple of 8; a stage is the blocks of one s. Groups then round the
        channels of a stage to a multiple of their width.

        Args:
          keep: round up where a tenth of the channels would be lost, as torchvision.

        Examples:
          >>> _Rule(13, 24, 36.44, 2.49, 8).rows()
          ((1, 24), (1, 56), (4, 152), (7, 368))
        """
        wanted = (self.initial + self.slope * j for j in range(self.blocks))
        powers = (round(math.log(w / self.initial, self.ratio)) for w in wanted)
        widths = (round(self.initial * self.ratio**s / 8) * 8 for s in powers)
        stages = sorted(Counter(widths).items())
        return tuple((count, self._whole(width, keep)) for width, count in stages)

    def _whole(self, channels: int, keep: bool) -> int:
        group = min(self.group, channels)
        if not keep:
            return round(channels / group) * group
        whole = max(group, math.floor(channels / group + 0.5) * group)
        return whole + group if whole < 0.9 * channels else whole


_X = {
    "002": _Rule(13, 24, 36.44, 2.49, 8),
    "004": _Rule(22, 24, 24.48, 2.54, 16),
    "006": _Rule(16, 48, 36.97, 2.24, 24),
    "008": _Rule(16, 56, 35.73, 2.28, 16),
    "016": _Rule(18, 80, 34.01, 2.25, 24),
    "032": _Rule(25, 88, 26.31, 2.25, 48),
    "040": _Rule(23, 96, 38.65, 2.43, 40),
    "064": _Rule(17, 184, 60.83, 2.07, 56),
    "080": _Rule(23, 80, 49.56, 2.88, 120),
    "120": _Rule(19, 168, 73.36, 2.37, 112),
    "160": _Rule(22, 216, 55.59, 2.1, 128),
    "320": _Rule(23, 320, 69.86, 2.0, 168),
}
_Y = {
    "002": _Rule(13, 24, 36.44, 2.49, 8),
    "004": _Rule(16, 48, 27.89, 2.09, 8),
    "006": _Rule(15, 48, 32.54, 2.32, 16),
    "008": _Rule(14, 56, 38.84, 2.4, 16),
    "016": _Rule(27, 48, 20.71, 2.65, 24),
    "032": _Rule(21, 80, 42.63, 2.66, 24),
    "040": _Rule(22, 96, 31.41, 2.24, 64),
    "064": _Rule(25, 112, 33.22, 2.27, 72),
    "080": _Rule(17, 192, 76.82, 2.19, 56),
    "120": _Rule(19, 168, 73.36, 2.37, 112),
    "160": _Rule(18, 200, 106.23, 2.48, 112),
    "320": _Rule(20, 232, 115.89, 2.53, 232),
    "640": _Rule(20, 352, 147.48, 2.4, 328),
    "1280": _Rule(27, 456, 160.83, 2.52, 264),
    "2560": _Rule(27, 640, 230.83, 2.53, 373),
}


def _variants() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for letter, rules in (("x", _X), ("y", _Y)):
        for size, rule in rules.items():
            for suffix in ("", "_tv"):
                found[f"regnet{letter}_{size}{suffix}"] = {
                    "width": 32,
                    "depth": 1,
                    "rows": rule.rows(keep=bool(suffix)),
                    "group_width": rule.group,
                    "squeeze": 0.25 if letter == "y" else 0.0,
                }
    known = ("regnetx_004_tv", "regnety_008_tv", "regnety_080_tv")
    return {k: v for k, v in found.items() if not k.endswith("_tv") or k in known}


#: The networks of timm, by their names there.
VARIANTS = _variants()
NAMES = (
    *("regnetx_002", "regnetx_016", "regnetx_032", "regnety_002", "regnety_008"),
    *("regnety_016", "regnety_032", "regnety_160"),
)

_MODULES = {
    "conv": "stem.conv.",
    "norm": "stem.bn.",
    "readout": "head.fc.",
    "stages/*/*/convs/*": "s{1}.b{1}.conv{1}.conv.",
    "stages/*/*/norms/*": "s{1}.b{1}.conv{1}.bn.",
    "stages/*/*/se/squeeze": "s{1}.b{1}.se.fc1.",
    "stages/*/*/se/excite": "s{1}.b{1}.se.fc2.",
    "stages/*/*/shortcut/conv": "s{1}.b{1}.downsample.conv.",
    "stages/*/*/shortcut/norm": "s{1}.b{1}.downsample.bn.",
}

register(
    Record(
        model=RegNet,
        sizes={name: VARIANTS[name] for name in NAMES},
        base="regnety_002",
        timm=VARIANTS,
        layouts=lambda model: ("timm",),
        layout=lambda model, name: Layout(_MODULES, pointwise="/se/"),
        factor=last_norm_factor,
    )
)

"""EfficientNet, EfficientNetV2, MobileNetV2 and MobileNetV3: inverted residuals."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from ..family import Count, Fraction, Natural, Positive, Range, check_values
from ..layers.basic import ACTIVATIONS, Dense, Nonlinearity
from ..layers.conv import DEPTHWISE, BatchNorm, Conv, fan_out_conv
from ..layers.squeeze import SqueezeExcite
from ..layers.stages import ConvBlock, ImageOptions, Stage, Staged, last_norm_factor
from ..plan import Plan
from ..registry import Record, register
from ..weights.sources import Layout

Kind = Literal["separable", "inverted", "fused", "plain", "plain_residual"]
_Odd = Annotated[int, Range("an odd whole number", lambda n: n >= 1 and n % 2 == 1)]


class Row(NamedTuple):
    """Consecutive blocks of one kind: a row of the papers' tables.

    Attributes:
      stage: number of the stage that it belongs to; names in files count blocks by it.
      kind: "inverted" (1x1 up, depthwise, 1x1 down), "separable" (depthwise, 1x1),
        "fused" (k x k up, 1x1 down), "plain" (k x k) or "plain_residual" (k x k with a
        shortcut).
      blocks: number of them, at depth 1.
      kernel: side of the k x k kernel.
      stride: of the first block.
      expansion: channels inside a block over those that come in, rounded to a multiple
        of 8.
      channels: that come out.
      squeeze: channels of squeeze-and-excitation over those that come in (or those
        inside, with `squeeze_inside`); 0 for none.
      nonlinearity: "" for the model's.

    Source: Tan and Le 2019 (arXiv:1905.11946), Table 1.
    """

    stage: Natural
    kind: Kind
    blocks: Count
    kernel: _Odd
    stride: Count
    expansion: Positive
    channels: Count
    squeeze: Fraction = 0.0
    nonlinearity: Nonlinearity | Literal[""] = ""


def _round(channels: float, divisor: int = 8) -> int:
    """Round to a multiple of the divisor, to at least 90% of the number of channels."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


class _Sizes(NamedTuple):
    """Channels of one block, at the width for which rows are given."""

    before: int
    inside: int
    after: int
    squeezed: int


def _sizes(row: Row, before: int, inside_squeeze: bool) -> _Sizes:
    inside = before
    if row.kind in ("inverted", "fused"):
        inside = _round(before * row.expansion)
    squeezed = 0
    if row.squeeze and inside_squeeze:
        squeezed = _round(inside * row.squeeze)
    elif row.squeeze:
        squeezed = max(1, round(before * row.squeeze))
    return _Sizes(before, inside, row.channels, squeezed)


# Axes inside the first block of a row, whose input differs, and inside the rest.
_FIRST, _REST = ("mid", "squeeze"), ("inner", "narrow")


class _Names(NamedTuple):
    """Axes of one block."""

    before: str
    inside: str
    after: str
    squeezed: str


def _block(
    plan: Plan,
    options: "EfficientNetOptions",
    row: Row,
    names: _Names,
    *,
    stride: int,
    residual: bool,
    in_branch: bool,
    rngs: nnx.Rngs,
) -> ConvBlock:
    """A block of a row, without the sum if its shape differs from that of its input.

    Squeeze-and-excitation is before the last convolution. The nonlinearity follows all
    of them but the last. Not every residual block counts as a branch of the network;
    see `_branches`.
    """
    nonlinearity = row.nonlinearity or options.nonlinearity
    before, inside, after, k = names.before, names.inside, names.after, row.kernel
    # (size, input axis, output axis, stride)
    chain = {
        "inverted": [
            (1, before, inside, 1),
            (k, DEPTHWISE, inside, stride),
            (1, inside, after, 1),
        ],
        "separable": [(k, DEPTHWISE, before, stride), (1, before, after, 1)],
        "fused": [(k, before, inside, stride), (1, inside, after, 1)],
    }.get(row.kind, [(k, before, after, stride)])
    convs = [
        _conv(plan, options, size, (i, o), stride=s, in_branch=in_branch, rngs=rngs)
        for size, i, o, s in chain
    ]
    norms = [
        BatchNorm(plan, o, in_branch=in_branch, epsilon=options.norm_eps)
        for _, _, o, _ in chain
    ]
    se = None
    if names.squeezed:
        se = SqueezeExcite(
            plan,
            before if row.kind == "separable" else inside,
            names.squeezed,
            nonlinearity=options.squeeze_nonlinearity or nonlinearity,
            gate=options.gate,
            in_branch=in_branch,
            rngs=rngs,
        )
    return ConvBlock(
        convs,
        norms,
        branch=plan.branch if in_branch else 1.0,
        nonlinearity=nonlinearity,
        after="branch" if row.kind.startswith("plain") else "",
        se=se,
        se_before=len(chain) - 1,
        residual=residual,
    )


def _is_residual(row: Row, which: int, size: _Sizes) -> bool:
    """Whether the first block of a row, or another one, is added to its input."""
    same = which > 0 or (row.stride == 1 and size.before == size.after)
    return row.kind != "plain" and same


def _branches(rows: Sequence[Row], firsts: int, depth: int) -> int:
    """Number of residual branches at a depth.

    The first block of a row is residual only where it keeps the shape. If only one is,
    it counts as a part of the stem, which is the same at every depth.

    Args:
      rows: of the network.
      firsts: number of their first blocks that are residual.
      depth: the factor on the number of blocks.
    """
    rest = sum(depth * row.blocks - 1 for row in rows if row.kind != "plain")
    return rest + (firsts if firsts > 1 else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EfficientNetOptions(ImageOptions):
    """Options of `EfficientNet`; see there."""

    rows: tuple[tuple[Any, ...], ...]
    rows_width: Count = 32
    head: Count = 1280
    head_pooled: bool = False
    nonlinearity: Nonlinearity = "silu"
    gate: Literal["sigmoid", "hard_sigmoid"] = "sigmoid"
    squeeze_inside: bool = False
    squeeze_nonlinearity: Nonlinearity | Literal[""] = ""
    padding: Literal["half", "same"] = "half"
    norm_eps: Positive = 1e-5

    @property
    def branch_layers(self) -> int:
        """The convolutions of a block."""
        return 3


class EfficientNet(Staged, options=EfficientNetOptions):
    """A stem, rows of inverted residuals, a wide 1x1 convolution, and a readout.

    All numbers of channels are proportional to the width, including those inside
    squeeze-and-excitation. A depthwise kernel sums over its own channel only, so its
    fan-in does not grow. Under SP, and under every parametrization at its base size, it
    is timm's network, with the same initial distributions.

    Args:
      width: channels of the stem.
      depth: factor on the number of blocks of each row. The depth ratio M is that of
        the numbers of residual branches.
      rows: the blocks of the network; each row has the fields of
        `zoo.families.efficientnet.Row`, in this order. Rows of the same `stage` are one
        stage.
      rows_width: the width for which `rows` and `head` give numbers of channels. At
        other widths they are scaled in proportion.
      head: channels of the last convolution.
      head_pooled: apply the last convolution after the mean over pixels, with a bias
        and without a norm (MobileNetV3).
      nonlinearity: a name in `zoo.layers.basic.ACTIVATIONS`; "hard_swish" in
        MobileNetV3, "relu6" in MobileNetV2 and EfficientNet-Lite.
      gate: gate of squeeze-and-excitation: "sigmoid" or "hard_sigmoid".
      squeeze_inside: squeeze is relative to the channels inside a block, and rounded to
        a multiple of 8 (MobileNetV3).
      squeeze_nonlinearity: nonlinearity of squeeze-and-excitation; "" for the
        nonlinearity of its block.
      padding: "half" on every side, as in torch, or "same", as in TensorFlow. They
        differ at stride 2.
      norm_eps: constant added to the variance in batch normalization.

    Raises:
      ValueError: a size is not a positive whole number, or a name is unknown.

    Source: Tan and Le 2019 (arXiv:1905.11946) and 2021 (arXiv:2104.00298); Sandler et
    al. 2018 (arXiv:1801.04381); Howard et al. 2019 (arXiv:1905.02244).

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> rows = ((0, "separable", 1, 3, 1, 1, 8, 0.25),
      ...         (1, "inverted", 2, 5, 2, 2, 16, 0.25))
      >>> model = zoo.create("efficientnet_b0", width=16, base_width=8, rows=rows,
      ...                    rows_width=8, head=32, out_features=10, rngs=nnx.Rngs(0))
      >>> model.eval()  # normalizes by running statistics
      >>> model(jnp.ones((1, 32, 32, 3))).shape
      (1, 10)
      >>> scale = zoo.scales(model)["stages/1/rest/convs/1/kernel"]
      >>> scale.role.value, scale.fan_in  # depthwise, 5x5
      ('input', 25)
    """

    def build(self, options: EfficientNetOptions, rngs: nnx.Rngs) -> None:
        if not options.rows:
            raise ValueError("rows=() must have at least one row")
        rows = tuple(map(_row, options.rows))
        self.rows, self.depth = rows, options.depth
        reference = options.rows_width
        channels, growing, sizes = reference, {}, []
        for i, row in enumerate(rows, 1):
            pair = []
            count = 2 if options.depth * row.blocks > 1 else 1
            for inside, squeezed in (_FIRST, _REST)[:count]:
                size = _sizes(row, channels, options.squeeze_inside)
                growing[f"{inside}{i}"] = size.inside / reference
                if size.squeezed:
                    growing[f"{squeezed}{i}"] = size.squeezed / reference
                pair.append(size)
                channels = row.channels
            growing[f"stage{i}"] = row.channels / reference
            sizes.append(pair)
        self.plan = options.plan(
            growing={**growing, "top": options.head / reference},
            fixed={
                **{f"kernel{k}": k for k in {1, 3, *(row.kernel for row in rows)}},
                DEPTHWISE: 1,
                "channels": options.input_shape[2],
                "classes": options.out_features,
            },
        )
        self.firsts = sum(
            _is_residual(row, 0, pair[0]) for row, pair in zip(rows, sizes, strict=True)
        )
        base, target = (
            _branches(rows, self.firsts, depth)
            for depth in (options.tuned_depth, options.depth)
        )
        if base:
            self.plan = dataclasses.replace(self.plan, depth=target / base)
        self.channels = options.input_shape[2]
        self.activation = ACTIVATIONS[options.nonlinearity]
        make = functools.partial(_conv, self.plan, options)
        self.conv = make(3, ("channels", "embed"), stride=2, rngs=rngs)
        self.norm = BatchNorm(self.plan, "embed", epsilon=options.norm_eps)
        built, before = [], "embed"
        for i, row in enumerate(rows, 1):
            built.append(self._row(options, i, row, before, sizes[i - 1], rngs))
            before = f"stage{i}"
        self.stages = nnx.List(built)
        self.head_pooled = options.head_pooled
        if options.head_pooled:
            gain = (2 * self.plan[before].base / self.plan["top"].base) ** 0.5
            ends = (before, "top")
            self.top = Dense(self.plan, ends, bias=True, gain=gain, rngs=rngs)
        else:
            self.top_conv = make(1, (before, "top"), rngs=rngs)
            self.top_norm = BatchNorm(self.plan, "top", epsilon=options.norm_eps)
        classes = self.plan["classes"].base
        self.readout = Dense(
            self.plan,
            ("top", "classes"),
            bias=True,
            # timm draws it from ±1/√classes, of a third of that variance.
            init="uniform",
            gain=(self.plan["top"].base / (3 * classes)) ** 0.5,
            rngs=rngs,
        )

    def _row(
        self,
        options: EfficientNetOptions,
        i: int,
        row: Row,
        before: str,
        sizes: list[_Sizes],
        rngs: nnx.Rngs,
    ) -> Stage:
        def build(which: int, rngs: nnx.Rngs) -> ConvBlock:
            size, (inside, squeezed) = sizes[which], (_FIRST, _REST)[which]
            stride = 1 if which else row.stride
            names = _Names(
                f"stage{i}" if which else before,
                f"{inside}{i}",
                f"stage{i}",
                f"{squeezed}{i}" if size.squeezed else "",
            )
            residual = _is_residual(row, which, size)
            return _block(
                self.plan,
                options,
                row,
                names,
                stride=stride,
                residual=residual,
                in_branch=residual and (which > 0 or self.firsts > 1),
                rngs=rngs,
            )

        return Stage.of(build, row.blocks, options, rngs)

    def features(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch n"]:
        """Features before the readout: the output of the last convolution, pooled.

        Returns:
          Features of shape (batch, channels of the last convolution).
        """
        x = self._map(x)
        if not self.head_pooled:
            x = self.activation(self.top_norm(self.top_conv(x)))
        x = x.mean(axis=(1, 2))
        if self.head_pooled:
            x = self.activation(self.top(x))
        return x

    def _enter(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 n"]:
        return self.activation(self.norm(self.conv(x)))


def _row(given: Any) -> Row:
    """Check and build a row of a network.

    Raises:
      ValueError: a field is missing or out of range; the message names it.
    """
    try:
        row = Row(*given)
    except TypeError:
        raise ValueError(
            f"row {given!r} must be {', '.join(Row._fields)}, the last two optional"
        ) from None
    check_values(row, f" of {given!r}")
    if row.expansion != 1 and row.kind not in ("inverted", "fused"):
        raise ValueError(
            f"expansion={row.expansion} of {given!r} must be 1: a {row.kind!r} block "
            "has none"
        )
    return row


def _conv(
    plan: Plan,
    options: EfficientNetOptions,
    size: int,
    names: tuple[str, str],
    **more: Any,
) -> Conv:
    is_depthwise = names[0] == DEPTHWISE
    return fan_out_conv(
        plan, size, names, per_group=is_depthwise, padding=options.padding, **more
    )


# --- Names of variants ---

_B0 = (
    (0, "separable", 1, 3, 1, 1, 16, 0.25),
    (1, "inverted", 2, 3, 2, 6, 24, 0.25),
    (2, "inverted", 2, 5, 2, 6, 40, 0.25),
    (3, "inverted", 3, 3, 2, 6, 80, 0.25),
    (4, "inverted", 3, 5, 1, 6, 112, 0.25),
    (5, "inverted", 4, 5, 2, 6, 192, 0.25),
    (6, "inverted", 1, 3, 1, 6, 320, 0.25),
)
_V2_S = (
    (0, "plain_residual", 2, 3, 1, 1, 24),
    (1, "fused", 4, 3, 2, 4, 48),
    (2, "fused", 4, 3, 2, 4, 64),
    (3, "inverted", 6, 3, 2, 4, 128, 0.25),
    (4, "inverted", 9, 3, 1, 6, 160, 0.25),
    (5, "inverted", 15, 3, 2, 6, 256, 0.25),
)
_V2_M = (
    (0, "plain_residual", 3, 3, 1, 1, 24),
    (1, "fused", 5, 3, 2, 4, 48),
    (2, "fused", 5, 3, 2, 4, 80),
    (3, "inverted", 7, 3, 2, 4, 160, 0.25),
    (4, "inverted", 14, 3, 1, 6, 176, 0.25),
    (5, "inverted", 18, 3, 2, 6, 304, 0.25),
    (6, "inverted", 5, 3, 1, 6, 512, 0.25),
)
_V3_SMALL = (
    (0, "separable", 1, 3, 2, 1, 16, 0.25, "relu"),
    (1, "inverted", 1, 3, 2, 4.5, 24, 0.0, "relu"),
    (1, "inverted", 1, 3, 1, 3.67, 24, 0.0, "relu"),
    (2, "inverted", 1, 5, 2, 4, 40, 0.25),
    (2, "inverted", 2, 5, 1, 6, 40, 0.25),
    (3, "inverted", 2, 5, 1, 3, 48, 0.25),
    (4, "inverted", 3, 5, 2, 6, 96, 0.25),
    (5, "plain", 1, 1, 1, 1, 576),
)
_V3_LARGE = (
    (0, "separable", 1, 3, 1, 1, 16, 0.0, "relu"),
    (1, "inverted", 1, 3, 2, 4, 24, 0.0, "relu"),
    (1, "inverted", 1, 3, 1, 3, 24, 0.0, "relu"),
    (2, "inverted", 3, 5, 2, 3, 40, 0.25, "relu"),
    (3, "inverted", 1, 3, 2, 6, 80),
    (3, "inverted", 1, 3, 1, 2.5, 80),
    (3, "inverted", 2, 3, 1, 2.3, 80),
    (4, "inverted", 2, 3, 1, 6, 112, 0.25),
    (5, "inverted", 3, 5, 2, 6, 160, 0.25),
    (6, "plain", 1, 1, 1, 1, 960),
)


def _minimal(rows: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rows of MobileNetV3 with 3x3 kernels, without squeeze-and-excitation."""
    return tuple(
        (stage, kind, n, min(kernel, 3), *row)
        for stage, kind, n, kernel, *row in (row[:7] for row in rows)
    )


_V2_MOBILE = (
    (0, "separable", 1, 3, 1, 1, 16),
    (1, "inverted", 2, 3, 2, 6, 24),
    (2, "inverted", 3, 3, 2, 6, 32),
    (3, "inverted", 4, 3, 2, 6, 64),
    (4, "inverted", 3, 3, 1, 6, 96),
    (5, "inverted", 3, 3, 2, 6, 160),
    (6, "inverted", 1, 3, 1, 6, 320),
)
_V3 = {
    "head_pooled": True,
    "nonlinearity": "hard_swish",
    "gate": "hard_sigmoid",
    "squeeze_inside": True,
    "squeeze_nonlinearity": "relu",
}
# Multiples of b0's channels and of its numbers of blocks.
_SCALES = {
    "b0": (1.0, 1.0),
    "b1": (1.0, 1.1),
    "b2": (1.1, 1.2),
    "b3": (1.2, 1.4),
    "b4": (1.4, 1.8),
    "b5": (1.6, 2.2),
    "b6": (1.8, 2.6),
    "b7": (2.0, 3.1),
}
#: Options of timm's networks named "tf_...": TensorFlow's padding and eps.
TF = {"padding": "same", "norm_eps": 1e-3}


# Multiples of EfficientNet-Lite0's.
_LITE_SCALES = {
    "lite0": (1.0, 1.0),
    "lite1": (1.0, 1.1),
    "lite2": (1.1, 1.2),
    "lite3": (1.2, 1.4),
    "lite4": (1.4, 1.8),
}
# MobileNetV2: multiple of the channels, that of the blocks, whether the stem keeps 32.
_MOBILE_SCALES = {
    "050": (0.5, 1.0, False),
    "100": (1.0, 1.0, False),
    "110d": (1.1, 1.2, True),
    "120d": (1.2, 1.4, True),
    "140": (1.4, 1.0, False),
}


def _scaled(
    given: tuple[Any, ...],
    wide: float,
    deep: float,
    *,
    fixed_ends: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Rows with more channels, rounded to multiples of 8, and more blocks, rounded up.

    Args:
      given: rows, for a stem of 32 channels.
      wide: factor on channels, also of the stem and, above 1, of the last
        convolution.
      deep: factor on blocks.
      fixed_ends: keep the stem, the last convolution, and the blocks of the first and
        last row.
      **more: further options.
    """
    rows, ends = [], (0, len(given) - 1) if fixed_ends else ()
    for i, row in enumerate(given):
        count = row[2] if i in ends else math.ceil(row[2] * deep)
        rows.append((*row[:2], count, *row[3:6], _round(row[6] * wide), *row[7:]))
    stem, head = _round(32 * wide), max(1280, _round(1280 * wide))
    return _fixed(tuple(rows), *((32, 1280) if fixed_ends else (stem, head)), **more)


def _fixed(rows: tuple[Any, ...], width: int, head: int, **more: Any) -> dict[str, Any]:
    sizes = {"width": width, "depth": 1, "rows": rows, "rows_width": width}
    return {**sizes, "head": head, **more}


def _variants() -> dict[str, dict[str, Any]]:
    variants = {
        f"efficientnet_{name}": _scaled(_B0, *by) for name, by in _SCALES.items()
    }
    lite = {
        f"efficientnet_{name}": _scaled(
            tuple(row[:7] for row in _B0), *by, fixed_ends=True, nonlinearity="relu6"
        )
        for name, by in _LITE_SCALES.items()
    }
    mobile = {
        f"mobilenetv2_{name}": _scaled(
            _V2_MOBILE, wide, deep, fixed_ends=fixed, nonlinearity="relu6"
        )
        for name, (wide, deep, fixed) in _MOBILE_SCALES.items()
    }
    v2 = {
        "efficientnetv2_s": _fixed(_V2_S, 24, 1280),
        "efficientnetv2_m": _fixed(_V2_M, 24, 1280),
    }
    v3 = {
        "mobilenetv3_small_100": _fixed(_V3_SMALL, 16, 1024, **_V3),
        "mobilenetv3_large_100": _fixed(_V3_LARGE, 16, 1280, **_V3),
    }
    minimal = {"head_pooled": True, "nonlinearity": "relu"}
    v3_minimal = {
        "mobilenetv3_small_minimal_100": _fixed(
            _minimal(_V3_SMALL), 16, 1024, **minimal
        ),
        "mobilenetv3_large_minimal_100": _fixed(
            _minimal(_V3_LARGE), 16, 1280, **minimal
        ),
    }
    variants |= lite | v2 | v3
    tensorflow = {f"tf_{n}": {**o, **TF} for n, o in (variants | v3_minimal).items()}
    return {**variants, **mobile, **tensorflow}


#: The networks of timm, by their names there.
VARIANTS: dict[str, dict[str, Any]] = _variants()
NAMES = (
    *("efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3"),
    *("efficientnetv2_s", "tf_efficientnet_b0", "tf_efficientnetv2_s"),
    *("mobilenetv2_100", "mobilenetv3_small_100", "mobilenetv3_large_100"),
)


# --- Files of timm ---

_CONVS = {
    "inverted": ("conv_pw", "conv_dw", "conv_pwl"),
    "separable": ("conv_dw", "conv_pw"),
    "fused": ("conv_exp", "conv_pwl"),
    "plain": ("conv",),
    "plain_residual": ("conv",),
}


def _layout(model: EfficientNet, name: str) -> Layout:
    modules = {
        "conv": "conv_stem.",
        "norm": "bn1.",
        **{"top_conv": "conv_head.", "top": "conv_head.", "top_norm": "bn2."},
        "readout": "classifier.",
    }
    counts: Counter[int] = Counter()  # of the blocks of a stage
    for i, row in enumerate(model.rows):
        ours = f"stages/{i}/*"
        start = f"blocks.{row.stage}.{{{counts[row.stage]}}}."
        for j, conv in enumerate(_CONVS[row.kind]):
            modules[f"{ours}/convs/{j}"] = f"{start}{conv}."
            modules[f"{ours}/norms/{j}"] = f"{start}bn{j + 1}."
        modules[f"{ours}/se/squeeze"] = f"{start}se.conv_reduce."
        modules[f"{ours}/se/excite"] = f"{start}se.conv_expand."
        counts[row.stage] += model.depth * row.blocks
    return Layout(modules, pointwise=r"/se/|^top/")


register(
    Record(
        model=EfficientNet,
        sizes={name: VARIANTS[name] for name in NAMES},
        base="efficientnet_b0",
        timm=VARIANTS,
        layouts=lambda model: ("timm",),
        layout=_layout,
        factor=last_norm_factor,
    )
)

"""Which parameters read out the model: named, or the only one that can be it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import names
from .axes import Kernel, Split
from .blocks import Blocks
from .patterns import UNSET, Pattern
from .scales import ParamScale, Role
from .widths import Widths


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is known of a model when its readouts are chosen.

    Attributes:
      scales: the scale of each parameter.
      splits: what told their axes.
      kernels: their shapes.
      blocks: which stand in blocks.
      layout: as the user gave it.
      widths: which sizes parameters share.
    """

    scales: Mapping[str, ParamScale]
    splits: Mapping[str, Split]
    kernels: Mapping[str, Kernel]
    blocks: Blocks
    layout: str
    widths: Widths

    def outputs(self) -> list[ParamScale]:
        """Parameters whose fan-in alone grows, and whose axes the user did not give."""
        return [
            s
            for p, s in self.scales.items()
            if s.role is Role.OUTPUT and self.splits[p].origin != "axes given"
        ]

    def tables(self) -> list[ParamScale]:
        """Tables of tokens, of which one may serve as the readout too."""
        return [
            s
            for p, s in self.scales.items()
            if s.role is Role.INPUT
            and not names.places(p)
            and (self.splits[p].table or names.looked_up(p))
        ]

    def reads_backwards(self, path: str) -> bool:
        """Whether a readout by name is, by shape, a first layer."""
        split = self.splits[path]
        first = self.scales[path].role is Role.INPUT and not split.table
        return first and not split.proven and names.readout(path)

    def in_blocks(self, path: str) -> bool:
        """Whether a parameter stands in a block."""
        blocks = self.blocks
        return path in blocks.inside | blocks.stacked | blocks.listed


def choose_readouts(reading: Reading, tied: Any, readout: Any) -> dict[str, str]:
    """The readouts, each with how it was found.

    A readout's fan-in grows and its fan-out does not. Other parameters have such
    shapes too: those that sum over a growing axis (a router, the key of multi-query
    attention, a value head) get a readout's multipliers, those that sum over nothing
    (the decay of each channel) do not, and shapes tell none of them from the readout
    of the whole model, which may be a tied embedding.

    Args:
      reading: the model.
      tied: regular expression of tied embeddings, None for none, or `UNSET`.
      readout: regular expression of the readouts, None for none, or `UNSET`.

    Raises:
      ValueError: there are several candidates, or one that is not surely the
        readout; there is none; an embedding may be tied. The message lists the
        candidates and what to write.
    """
    tables = _tied(reading, tied)
    _check_layout(reading)
    outputs = reading.outputs()
    given = [
        s
        for p, s in reading.scales.items()
        if s.role is Role.OUTPUT and reading.splits[p].origin == "axes given"
    ]
    if readout is UNSET or readout is None:
        named: list[ParamScale] = []
    else:
        chosen = Pattern("readout", readout)
        if len(reading.scales) > 1 and all(map(chosen.matches, reading.scales)):
            raise ValueError(
                f"readout={readout!r} matches every parameter; match the readouts "
                f"only, such as readout=r'{names.pattern(*(s.path for s in outputs))}'"
                if outputs
                else f"readout={readout!r} matches every parameter"
            )
        named = [s for s in (*outputs, *given) if chosen.matches(s.path)]
        if not named:
            raise ValueError(_none_of(reading, readout, outputs))
    rest = [s for s in outputs if s not in named]
    if readout is UNSET and tied in (UNSET, None) and len(rest) == 1:
        _check_lone(reading, rest[0], asked=tied is UNSET)
        return {rest[0].path: "readout"}
    if rest:
        raise ValueError(_several(reading, rest, named, readout))
    if readout is None or tables:
        return {s.path: "readout, named" for s in named}
    if not named and not given:
        raise ValueError(_no_readout(reading))
    if tied is UNSET:
        _check_not_tied(reading, named or given)
    return {s.path: "readout, named" for s in named}


def last_width(reading: Reading, tied: Any, chosen: Mapping[str, str]) -> float:
    """Ratio of the width that the readout of the model sums over."""
    heads = [reading.scales[p] for p in chosen]
    outer = [s for s in heads if not reading.in_blocks(s.path)] or heads
    tables = _tied(reading, tied)
    sources = [s.width_in for s in outer] + [s.width_out for s in tables]
    if not sources:
        sources = [s.width_out for s in reading.scales.values()]
    return max(sources)


def _tied(reading: Reading, tied: Any) -> list[ParamScale]:
    if tied is UNSET or tied is None:
        return []
    table = Pattern("tied", tied)
    tables = [s for p, s in reading.scales.items() if table.matches(p)]
    table.check(reading.scales)
    for scale in tables:
        if scale.role is not Role.INPUT:
            raise ValueError(
                f"tied={tied!r} matches {scale.path!r}, which is {scale.role.value}, "
                "not an embedding (entries, features)"
            )
    return tables


def _check_layout(reading: Reading) -> None:
    """Raise where a parameter with a readout's name reads as a first layer."""
    for path, scale in reading.scales.items():
        kernel, split = _known(reading, scale)
        if (
            scale.role is Role.INPUT
            and names.logits(path)
            and not (split.proven or names.array(path) == "kernel")
        ):
            other = "in_out" if kernel.layout == "out_in" else "out_in"
            quoted, axes = names.pattern(path), (scale.out_axes, scale.in_axes)
            raise ValueError(
                f"{path!r} has a readout's name, and grows along its outputs alone, "
                f"{scale.base_shape} -> {scale.shape}, as kernels of layout="
                f"{kernel.layout!r} are read: pass layout={other!r}, or, if this one "
                f"alone is the other way round, axes={{r'{quoted}': {axes}}}; if it is "
                f"a table of (entries, features), embeddings=r'{quoted}'"
            )


def _check_lone(reading: Reading, head: ParamScale, *, asked: bool) -> None:
    """Raise unless the only candidate is surely the readout of the whole model."""
    path = head.path
    if len(head.in_axes) > 1:
        raise ValueError(
            f"the readout {path!r} of shape {head.shape} sums over several axes "
            f"{head.in_axes}, as a convolution does; if it is the readout, pass "
            f"readout=r'{names.pattern(path)}'"
        )
    # Arrays named `weight` are torch's, whose layout the user has to give.
    kernel = names.array(path) in ("kernel", "w") or reading.layout != "auto"
    sure = reading.splits[path].proven or (kernel and names.is_kernel(path))
    named = names.readout(path)
    inner = names.inner(path) and not names.sure_readout(path)
    if not sure and any(map(reading.reads_backwards, reading.scales)):
        raise ValueError(_several(reading, [head], [], UNSET))
    if reading.in_blocks(path) or not (named or (sure and not inner)):
        raise ValueError(_several(reading, [head], [], UNSET))
    if asked and not names.sure_readout(path):
        _check_not_tied(reading, [head], lone=True)


def _check_not_tied(
    reading: Reading, heads: list[ParamScale], *, lone: bool = False
) -> None:
    """Raise where the logits may come from a table rather than from these."""
    tables = reading.tables()
    entries = {
        size
        for table in tables
        for size in (table.shape[table.in_axes[0]],)
        if table.in_axes
    }
    for head in heads:
        outer = not reading.in_blocks(head.path) and not names.inner(head.path)
        if not tables or head.fan_out in entries or (outer and not lone):
            return
    shown = ", ".join(repr(s.path) for s in heads)
    table = names.pattern(tables[0].path)
    readout = names.pattern(*(s.path for s in heads))
    raise ValueError(
        f"{shown} may not be the only readout, because the embedding "
        f"{tables[0].path!r} {tables[0].shape} may be tied: if the logits are read "
        f"off it, pass tied=r'{table}', readout=r'{readout}' and multiply the logits "
        f"by 1/m; if not, pass tied=None, readout=r'{readout}'"
    )


def _none_of(reading: Reading, readout: str, outputs: list[ParamScale]) -> str:
    shown = ", ".join(repr(s.path) for s in outputs) or "none"
    pattern = Pattern("readout", readout)
    matched = [s for p, s in reading.scales.items() if pattern.matches(p)]
    why = ""
    for scale in matched:
        kernel = reading.kernels[scale.path]
        for axis in scale.out_axes:
            if scale.role is Role.HIDDEN and kernel.grows(axis):
                before, after = kernel.pair(axis)
                why = (
                    f"; {scale.path!r} grows from {before} to {after} along its "
                    "outputs too: if those are classes or tokens, build the base with "
                    "as many as the target"
                )
    return (
        f"readout={readout!r} matches no parameter whose fan-in alone grows; "
        f"those are: {shown}{why}"
    )


def _several(
    reading: Reading,
    outputs: list[ParamScale],
    named: list[ParamScale],
    readout: Any,
) -> str:
    """The message that lists all candidates, and what to write for each."""
    groups: dict[str, list[ParamScale]] = {}
    for scale in outputs:
        groups.setdefault(names.open_numbers(scale.path), []).append(scale)
    lines = []
    for group in groups.values():
        scale, pattern = group[0], names.pattern(*(s.path for s in group))
        every = tuple(a for a in range(len(scale.shape)) if a in _all_axes(scale))
        lines.append(
            f"\n  {scale.path!r} {scale.base_shape} -> {scale.shape}"
            + (f" and {len(group) - 1} more" if len(group) > 1 else "")
            + f": readout=r'{pattern}', or axes={{r'{pattern}': ((), {every})}}"
            + _or_table(reading, scale, pattern)
        )
    every_path = [s.path for s in (*named, *outputs)]
    tables = reading.tables()
    tied = (
        f" If the logits are read off the embedding {tables[0].path!r}, pass "
        f"tied=r'{names.pattern(tables[0].path)}' too; if not, tied=None."
        if tables
        else ""
    )
    layout = (
        " If kernels are (out, in) as torch's, pass layout='out_in' instead."
        if reading.layout == "auto" and not any(names.is_kernel(p) for p in every_path)
        else ""
    )
    missed = f"readout={readout!r} leaves out parameters" if named else "parameters"
    count = "one" if len(groups) == 1 else str(len(groups))
    return (
        f"{missed} that look like a readout (the fan-in grows, the fan-out does not) "
        f"must be named, here {count}:{''.join(lines)}\nThose that sum over the "
        "growing axis (a head, a router, the key of multi-query attention) belong to "
        "readout=; "
        f"if all do, pass readout=r'{names.pattern(*every_path)}'. Those that sum over "
        "nothing (a gain or decay of each channel) belong to axes=; tables of "
        f"(entries, features) to embeddings=.{layout}{tied}"
    )


def _all_axes(scale: ParamScale) -> tuple[int, ...]:
    return (*scale.in_axes, *scale.out_axes)


def _or_table(reading: Reading, scale: ParamScale, pattern: str) -> str:
    if reading.kernels[scale.path].layout == "out_in" and len(scale.shape) >= 2:
        return f", or embeddings=r'{pattern}'"
    return ""


def _no_readout(reading: Reading) -> str:
    scales = reading.scales
    tables = reading.tables() or [s for s in scales.values() if s.role is Role.INPUT]
    name = names.pattern(tables[0].path) if tables else "^embedding$"
    # A readout of the whole model stands in no block. Equal layers share one hint.
    groups: dict[str, ParamScale] = {}
    for path, scale in scales.items():
        if not reading.in_blocks(path):
            groups.setdefault(names.open_numbers(path), scale)
    said = [hint for scale in groups.values() if (hint := _hint(reading, scale))]
    hints = "".join(said[:3])
    return (
        "no parameter is a readout (fan-in grows, fan-out does not); if it is tied to "
        f"an embedding, pass tied=r'{name}' and multiply the logits by 1/m; if the "
        f"model has none, pass readout=None{hints}"
    )


def _hint(reading: Reading, scale: ParamScale) -> str:
    """What may be wrong with a parameter that could be the missing readout."""
    path, kernel, split = scale.path, *_known(reading, scale)
    named = names.readout(path) and not split.table
    if scale.role is Role.INPUT and named and reading.layout != "out_in":
        return (
            f"; {path!r} has a readout's name, and grows along its outputs: if kernels "
            "are (out, in) as torch's, pass layout='out_in'"
        )
    if scale.role is Role.VECTOR and named and len(scale.shape) == 1:
        pattern = names.pattern(path)
        return f"; if the vector {path!r} is summed over, pass readout=r'{pattern}'"
    alone = reading.widths.alone(kernel, split)
    if scale.role is Role.HIDDEN and (alone or named):
        before, after = kernel.pair((alone or scale.out_axes)[0])
        return (
            f"; {path!r} grows from {before} to {after} along its outputs: if it "
            "counts classes or tokens, build the base "
            "with as many as the target, or leave the axis out: axes="
            f"{{r'{names.pattern(path)}': ({scale.in_axes}, ())}}"
        )
    return ""


def _known(reading: Reading, scale: ParamScale) -> tuple[Kernel, Split]:
    return reading.kernels[scale.path], reading.splits[scale.path]

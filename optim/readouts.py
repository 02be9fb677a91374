"""Choose the readouts of a model: those the user named, or the only candidate."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from . import names
from .axes import Kernel, Split
from .blocks import Blocks
from .layers import ROOT_OF_HEAD_DIM
from .rules.parametrizations import Parametrization
from .rules.roles import ParamScale, Role
from .scales.patterns import UNSET, Pattern
from .widths import Widths


@dataclasses.dataclass(frozen=True)
class InferredModel:
    """What is known of a model before its readouts are chosen.

    Attributes:
      scales: role and ratios of each parameter, by path.
      splits: fan-in and fan-out axes of each parameter.
      kernels: shapes of each parameter.
      blocks: the parameters in residual blocks.
      layout: as the user gave it.
      widths: the sizes that parameters share.
    """

    scales: Mapping[str, ParamScale]
    splits: Mapping[str, Split]
    kernels: Mapping[str, Kernel]
    blocks: Blocks
    layout: str
    widths: Widths

    def outputs(self) -> list[ParamScale]:
        """Parameters with an output's shapes, except where the user gave the axes."""
        return [
            s
            for p, s in self.scales.items()
            if s.role is Role.OUTPUT and self.splits[p].origin != "axes given"
        ]

    def tables(self) -> list[ParamScale]:
        """Tables of tokens, which may be tied to the readout."""
        return [
            s
            for p, s in self.scales.items()
            if s.role is Role.INPUT
            and not names.places(p)
            and (self.splits[p].table or names.looked_up(p))
        ]

    def reads_backwards(self, path: str) -> bool:
        """Whether a parameter with a readout's name has the shape of a first layer."""
        split = self.splits[path]
        first = self.scales[path].role is Role.INPUT and not split.table
        return first and not split.proven and names.readout(path)

    def in_blocks(self, path: str) -> bool:
        """Whether a parameter is in a residual block."""
        blocks = self.blocks
        return path in blocks.inside | blocks.stacked | blocks.listed


def choose_readouts(model: InferredModel, tied: Any, readout: Any) -> dict[str, str]:
    """Choose the readouts of a model.

    A readout's fan-in grows and its fan-out does not. Other parameters have such
    shapes too. Those that sum over a growing axis (a router, the key of multi-query
    attention, a value head) get a readout's multipliers. Those that are not summed over
    (a decay per channel) do not. Shapes alone cannot distinguish them from the readout
    of the whole model, which may also be a tied embedding.

    Args:
      model: what is known of the model.
      tied: regular expression of tied embeddings, None for none, or `UNSET`.
      readout: regular expression of the readouts, None for none, or `UNSET`.

    Returns:
      {path of a readout: how it was found}. Queries whose attention divides its logits
      by the root of a growing head dimension are listed too, with this added to how
      their role was found.

    Raises:
      ValueError: there are several candidates, one that is not surely the readout, or
        none; an embedding may be tied; the weights of a readout are normalized. The
        message lists the candidates and what to write for each.
    """
    chosen = _chosen(model, tied, readout)
    for path in chosen:
        _check_not_normalized(model, path)
    return {**_queries(model), **chosen}


def _chosen(model: InferredModel, tied: Any, readout: Any) -> dict[str, str]:
    tables = _tied(model, tied)
    _check_layout(model)
    outputs = model.outputs()
    given = [
        s
        for p, s in model.scales.items()
        if s.role is Role.OUTPUT and model.splits[p].origin == "axes given"
    ]
    if readout is UNSET or readout is None:
        named: list[ParamScale] = []
    else:
        chosen = Pattern("readout", readout)
        if len(model.scales) > 1 and all(map(chosen.matches, model.scales)):
            raise ValueError(
                f"readout={readout!r} matches every parameter; match the readouts "
                f"only, e.g. readout=r'{names.pattern(*(s.path for s in outputs))}'"
                if outputs
                else f"readout={readout!r} matches every parameter"
            )
        named = [s for s in (*outputs, *given) if chosen.matches(s.path)]
        if not named:
            raise ValueError(_none_of(model, readout, outputs))
    rest = [s for s in outputs if s not in named]
    if readout is UNSET and tied in (UNSET, None) and len(rest) == 1:
        _check_lone(model, rest[0], asked=tied is UNSET)
        return {rest[0].path: "readout"}
    if rest:
        raise ValueError(_several(model, rest, named, readout))
    if readout is None or tables:
        return {s.path: "readout, named" for s in named}
    if not named and not given:
        raise ValueError(_no_readout(model))
    if tied is UNSET:
        _check_not_tied(model, named or given)
    return {s.path: "readout, named" for s in named}


def last_width(model: InferredModel, tied: Any, chosen: Mapping[str, str]) -> float:
    """Ratio of the last hidden width, which the readout of the model sums over."""
    heads = [s for s in map(model.scales.__getitem__, chosen) if s.role is Role.OUTPUT]
    outer = [s for s in heads if not model.in_blocks(s.path)] or heads
    tables = _tied(model, tied)
    sources = [s.width_in for s in outer] + [s.width_out for s in tables]
    if not sources:
        sources = [s.width_out for s in model.scales.values()]
    return max(sources)


def growing_head_dims(
    scales: Mapping[str, ParamScale], point: Parametrization
) -> list[str]:
    """Describe each attention that divides its logits by the root of a growing size.

    μP needs logits divided by the head dimension d (Tensor Programs V, Definition 4.1),
    because queries and keys become correlated in training. Under the standard
    parametrization and for s < 1 there is no such rule.
    """
    if not point.scaled or point.rows[Role.HIDDEN].update.last:
        return []
    groups: dict[str, list[ParamScale]] = {}
    for scale in scales.values():
        if ROOT_OF_HEAD_DIM in scale.origin:
            groups.setdefault(names.open_numbers(scale.path), []).append(scale)
    return [_growing_head_dim(group[0], len(group)) for group in groups.values()]


def _growing_head_dim(queries: ParamScale, count: int) -> str:
    axis = queries.out_axes[-1]
    before, after = queries.base_shape[axis], queries.shape[axis]
    path = queries.path.removesuffix("/query/kernel")
    more = f" (and {count - 1} more)" if count > 1 else ""
    return (
        f"the head dimension d of {path!r}{more} grows from {before} to {after}, and "
        "its attention divides logits by the root of d; μP needs 1/d, or the logits of "
        "a wider model change more in a step. Keep d the same and let num_heads grow; "
        "or pass attention_fn=lambda q, k, v, **options: nnx.dot_product_attention("
        f"q * ({before} / q.shape[-1]) ** 0.5, k, v, **options) at every width, which "
        "leaves the base unchanged"
    )


def _queries(model: InferredModel) -> dict[str, str]:
    """How the roles of queries were found whose logits are divided by √d, by path."""
    found = {}
    for path, scale in model.scales.items():
        kernel, split = _known(model, scale)
        if (
            kernel.layer_axes is not None
            and kernel.layer_axes.queries
            and len(split.out_axes) == 2
            and scale.base_shape[split.out_axes[1]] != scale.shape[split.out_axes[1]]
        ):
            found[path] = f"{scale.origin}, {ROOT_OF_HEAD_DIM}"
    return found


def _check_not_normalized(model: InferredModel, path: str) -> None:
    """Raise a `ValueError` if a wrapper divides a readout by its norm."""
    layer = model.kernels[path].layer_axes
    # The path of a state shows the wrapper (Flax NNX), or that of its scale (Linen).
    if layer.normalized if layer is not None else _looks_normalized(model, path):
        raise ValueError(
            f"the weights of the readout {path!r} are normalized (WeightNorm or "
            "SpectralNorm), which undoes its initial size of 1/m, so that a step "
            "changes the output of a wider model more; use the layer without the "
            "wrapper as readout"
        )


def _looks_normalized(model: InferredModel, path: str) -> bool:
    parts = path.split("/")
    if "layer_instance" in parts:
        return True
    scales = [
        p.split("/")[:-1] for p in model.scales if p.endswith(f"{parts[-1]}/scale")
    ]
    return any(
        scale[:at] + scale[at + 1 :] == parts
        for scale in scales
        for at in range(len(scale))
    )


def _tied(model: InferredModel, tied: Any) -> list[ParamScale]:
    if tied is UNSET or tied is None:
        return []
    table = Pattern("tied", tied)
    tables = [s for p, s in model.scales.items() if table.matches(p)]
    table.check(model.scales)
    for scale in tables:
        if scale.role is not Role.INPUT:
            raise ValueError(
                f"tied={tied!r} matches {scale.path!r}, which is {scale.role.value}, "
                "not an embedding (entries, features)"
            )
    return tables


def _check_layout(model: InferredModel) -> None:
    """Raise a `ValueError` if a readout by name has the shape of a first layer."""
    for path, scale in model.scales.items():
        kernel, split = _known(model, scale)
        if (
            scale.role is Role.INPUT
            and names.logits(path)
            and not (split.proven or names.array(path) == "kernel")
        ):
            other = "in_out" if kernel.layout == "out_in" else "out_in"
            quoted, axes = names.pattern(path), (scale.out_axes, scale.in_axes)
            raise ValueError(
                f"{path!r} has a readout's name, but under layout={kernel.layout!r} "
                f"only its outputs grow, {scale.base_shape} -> {scale.shape}: pass "
                f"layout={other!r}; if only this parameter has the other layout, "
                f"axes={{r'{quoted}': {axes}}}; if it is "
                f"a table of (entries, features), embeddings=r'{quoted}'"
            )


def _check_lone(model: InferredModel, head: ParamScale, *, asked: bool) -> None:
    """Raise a `ValueError` unless the only candidate is surely the model's readout."""
    path = head.path
    if len(head.in_axes) > 1:
        raise ValueError(
            f"the readout {path!r} of shape {head.shape} sums over several axes, "
            f"{head.in_axes}, like a convolution; if it is the readout, pass "
            f"readout=r'{names.pattern(path)}'"
        )
    # Arrays named `weight` have torch's layout, which the user must state.
    kernel = names.array(path) in ("kernel", "w") or model.layout != "auto"
    sure = model.splits[path].proven or (kernel and names.is_kernel(path))
    named = names.readout(path)
    inner = names.inner(path) and not names.sure_readout(path)
    if not sure and any(map(model.reads_backwards, model.scales)):
        raise ValueError(_several(model, [head], [], UNSET))
    if model.in_blocks(path) or not (named or (sure and not inner)):
        raise ValueError(_several(model, [head], [], UNSET))
    if asked and not names.sure_readout(path):
        _check_not_tied(model, [head], lone=True)


def _check_not_tied(
    model: InferredModel, heads: list[ParamScale], *, lone: bool = False
) -> None:
    """Raise a `ValueError` if the logits may come from an embedding instead."""
    tables = model.tables()
    entries = {
        size
        for table in tables
        for size in (table.shape[table.in_axes[0]],)
        if table.in_axes
    }
    for head in heads:
        inner = names.inner(head.path) or _low_rank(head.path)
        outer = not model.in_blocks(head.path) and not inner
        if not tables or head.fan_out in entries or (outer and not lone):
            return
    shown = ", ".join(repr(s.path) for s in heads)
    table = names.pattern(tables[0].path)
    readout = names.pattern(*(s.path for s in heads))
    raise ValueError(
        f"{shown} may not be the only readout, because the embedding "
        f"{tables[0].path!r} {tables[0].shape} may be tied: if it produces the "
        f"logits, pass tied=r'{table}', readout=r'{readout}' and multiply the logits "
        f"by 1/m; if not, pass tied=None, readout=r'{readout}'"
    )


def _low_rank(path: str) -> bool:
    """Whether the parameter is the first one of a low-rank pair (LoRA), by name."""
    return re.search(r"(?i)(^|[/._])lora([/._]|$)", path) is not None


def _none_of(model: InferredModel, readout: str, outputs: list[ParamScale]) -> str:
    shown = ", ".join(repr(s.path) for s in outputs) or "none"
    pattern = Pattern("readout", readout)
    matched = [s for p, s in model.scales.items() if pattern.matches(p)]
    why = ""
    for scale in matched:
        kernel = model.kernels[scale.path]
        for axis in scale.out_axes:
            if scale.role is Role.HIDDEN and kernel.grows(axis):
                before, after = kernel.pair(axis)
                why = (
                    f"; the outputs of {scale.path!r} grow too, from {before} to "
                    f"{after}: if they are classes or tokens, build the base with "
                    "as many as the target"
                )
    return (
        f"readout={readout!r} matches no parameter of which only the fan-in grows; "
        f"those are: {shown}{why}"
    )


def _several(
    model: InferredModel,
    outputs: list[ParamScale],
    named: list[ParamScale],
    readout: Any,
) -> str:
    """Error message that lists all candidates, and what to write for each."""
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
            + _or_table(model, scale, pattern)
        )
    every_path = [s.path for s in (*named, *outputs)]
    tables = model.tables()
    tied = (
        f" If the embedding {tables[0].path!r} produces the logits, pass "
        f"tied=r'{names.pattern(tables[0].path)}' too; if not, tied=None."
        if tables
        else ""
    )
    layout = (
        " If kernels are (out, in) as in torch, pass layout='out_in' instead."
        if model.layout == "auto" and not any(names.is_kernel(p) for p in every_path)
        else ""
    )
    missed = f"readout={readout!r} leaves out parameters" if named else "parameters"
    count = "one" if len(groups) == 1 else str(len(groups))
    return (
        f"{missed} that look like a readout (the fan-in grows, the fan-out does not) "
        f"must be named, here {count}:{''.join(lines)}\nParameters that sum over the "
        "growing axis (a head, a router, the key of multi-query attention) belong to "
        "readout=; "
        f"if all do, pass readout=r'{names.pattern(*every_path)}'. Parameters that are "
        "not summed over (a gain or decay per channel) belong to axes=; tables of "
        f"(entries, features) to embeddings=.{layout}{tied}"
    )


def _all_axes(scale: ParamScale) -> tuple[int, ...]:
    return (*scale.in_axes, *scale.out_axes)


def _or_table(model: InferredModel, scale: ParamScale, pattern: str) -> str:
    if model.kernels[scale.path].layout == "out_in" and len(scale.shape) >= 2:
        return f", or embeddings=r'{pattern}'"
    return ""


def _no_readout(model: InferredModel) -> str:
    scales = model.scales
    tables = model.tables() or [s for s in scales.values() if s.role is Role.INPUT]
    name = names.pattern(tables[0].path) if tables else "^embedding$"
    # The readout of the whole model is not in a block. Equal layers share one hint.
    hints: dict[str, str] = {}
    for path, scale in scales.items():
        if not model.in_blocks(path) and (hint := _hint(model, scale)):
            hints.setdefault(names.open_numbers(path), hint)
    return (
        "no parameter is a readout (fan-in grows, fan-out does not); if the readout is "
        f"tied to an embedding, pass tied=r'{name}' and multiply the logits by 1/m; if "
        f"the model has no readout, pass readout=None{''.join([*hints.values()][:3])}"
    )


def _hint(model: InferredModel, scale: ParamScale) -> str:
    """Hint for a parameter that could be the missing readout, or ""."""
    path, kernel, split = scale.path, *_known(model, scale)
    named = names.readout(path) and not split.table
    if scale.role is Role.INPUT and named and model.layout != "out_in":
        return (
            f"; {path!r} has a readout's name, but its outputs grow: if kernels "
            "are (out, in) as in torch, pass layout='out_in'"
        )
    if scale.role is Role.VECTOR and named and len(scale.shape) == 1:
        pattern = names.pattern(path)
        return f"; if the vector {path!r} is summed over, pass readout=r'{pattern}'"
    alone = model.widths.alone(kernel, split)
    if scale.role is Role.HIDDEN and (alone or named):
        before, after = kernel.pair((alone or scale.out_axes)[0])
        return (
            f"; the outputs of {path!r} grow from {before} to {after}: if they "
            "are classes or tokens, build the base "
            "with as many as the target, or leave the axis out: axes="
            f"{{r'{names.pattern(path)}': ({scale.in_axes}, ())}}"
        )
    return ""


def _known(model: InferredModel, scale: ParamScale) -> tuple[Kernel, Split]:
    return model.kernels[scale.path], model.splits[scale.path]

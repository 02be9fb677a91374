"""A program as it is with one parameter for each segment of a fused one.

A fused parameter is a join of segments. Each operation on a join becomes the same
operation on its segments, as far as the program goes until it splits their results:
`split(x @ concat(q, k, v))` becomes `x @ q`, `x @ k`, `x @ v`. So a reader of the
program meets no fused parameter.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .links import SUM, Index, index_of
from .program import PRODUCTS, Node, Program, regrouped


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where an axis is cut into segments.

    Attributes:
      at: where segments begin, but the first.
      repeats: how often the segments follow each other along the axis, e.g. the number
        of heads where each has its queries, keys and values side by side. Then `at` are
        the places within one head.
      numbered: whether there is a segment for each layer, and so more at other depths.
    """

    at: tuple[int, ...]
    repeats: int = 1
    numbered: bool = False

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """Start and stop of each segment of an axis, within one repetition.

        Examples:
          >>> Cut((2, 3)).bounds(7), Cut((2,), 2).bounds(6)
          ([(0, 2), (2, 3), (3, 7)], [(0, 2), (2, 3)])
        """
        return list(itertools.pairwise([0, *self.at, size // self.repeats]))


# {index of a parameter: {axis: its cut}}
Cuts = Mapping[int, Mapping[int, Cut]]


class Segmented(Program):
    """The graph of a forward pass, with a parameter for each segment by `cuts`.

    `joins` are the sources of concatenations whose results the program splits again.
    """

    def __init__(self, program: Program, cuts: Cuts, joins: Collection[int]):
        self.traced, self.counts, self._cuts = program.traced, program.counts, cuts
        self._joins = joins
        self._build()

    def _param(self, index: int, shape: tuple[int, ...]) -> Node:
        return self._segments(dict(self._cuts.get(index, {})), shape)

    def _segments(self, cuts: dict[int, Cut], shape: tuple[int, ...]) -> Node:
        for axis in sorted(cuts):
            rest = {a: c for a, c in cuts.items() if a != axis}
            repeats = cuts[axis].repeats
            sizes = [
                (stop - start) * repeats
                for start, stop in cuts[axis].bounds(shape[axis])
            ]
            parts = [self._segments(rest, _resized(shape, axis, n)) for n in sizes]
            return self._join(parts, axis, None, repeats)
        return super()._param(len(self.params), shape)

    def _new(self, op: str, *args: Any, **more: Any) -> Node:
        node = super()._new(op, *args, **more)
        # A first guess, also within loops: `_flow` decides.
        node.data = op == "input" or any(x.data for x in node.operands)
        weight = op == "param" or any(x.weight for x in node.operands)
        node.weight = weight and not node.data
        if op == "concatenate" and node.weight and id(node.source[0]) in self._joins:
            node.joint = node.params["dimension"]  # kernels that the model joins
        return node

    def _concatenation(self, parts: list[Node], axis: int, source: Any) -> Node:
        node = super()._concatenation(parts, axis, source)
        if node.weight and len(parts) > 1:  # a part of a join
            node.joint = axis
        return node

    def _join(
        self, parts: list[Node], axis: int, source: Any, repeats: int = 1
    ) -> Node:
        shape = _resized(parts[0].shape, axis, sum(x.shape[axis] for x in parts))
        params = {"dimension": axis} | ({"repeats": repeats} if repeats > 1 else {})
        node = self._new("concatenate", parts, shape, params=params, source=source)
        node.joint = axis
        return node

    def _emit(
        self,
        op: str,
        operands: list[Node],
        shape: Sequence[int],
        source: Any,
        params: dict[str, Any] | None = None,
    ) -> Node:
        call = Node(-1, op, operands, tuple(shape), params or {}, source, 1)
        for i, node in enumerate(operands):
            if node.joint is not None:
                made = self._pushed(call, i, node.joint)
                if made is not None:
                    return made
        return super()._emit(op, operands, shape, source, params)

    def _pushed(self, call: Node, i: int, axis: int) -> Node | None:
        """The operation on segments; None if it can only be that on their join."""
        if call.op == "reshape":
            return self._reshaped(call, axis)
        index = index_of(call, i, axis)
        if index is None or index.mixed:
            return None
        join = call.operands[i]
        for k, at in index.axes.items():
            if k != i and not self._has_parts(call.operands[k], at, join, index):
                return None
        if index.out is not None:
            parts = self._each(call, i, index)
            return self._join(parts, index.out, call.source, repeats_of(join))
        if call.op not in PRODUCTS:
            return None
        return self._emit(SUM, self._each(call, i, index), call.shape, call.source)

    def _each(self, call: Node, i: int, index: Index) -> list[Node]:
        """The operation on each segment of its i-th operand, along the join's index."""
        join, found = call.operands[i], []
        assert join.joint is not None
        for number, part in enumerate(join.operands):
            operands = list(call.operands)
            for k, axis in index.axes.items():
                operands[k] = self._part(operands[k], axis, join, number)
            operands[i] = part
            size, shape = part.shape[join.joint], call.shape
            if index.out is not None:
                shape = _resized(shape, index.out, size)
            params = _params_of_part(call, index, size)
            found.append(self._emit(call.op, operands, shape, call.source, params))
        return found

    def _has_parts(self, node: Node, axis: int, join: Node, index: Index) -> bool:
        """Whether a value has parts, too, that meet the segments of a join."""
        if node.op == "transpose":
            node, axis = node.operands[0], node.params["permutation"][axis]
        if node.op == "concatenate" and node.params["dimension"] == axis:
            edges = [_edges(node, axis), _edges(join, join.joint)]
            return edges[1] <= edges[0] and repeats_of(node) == repeats_of(join)
        if index.out is None:
            return False
        if node.op == "broadcast_in_dim":
            kept, inner = node.params["broadcast_dimensions"], node.operands[0].shape
            if axis not in kept or inner[kept.index(axis)] == 1:
                return True
        return node.op == "input" or not (node.data or node.weight)

    def _part(self, node: Node, axis: int, join: Node, number: int) -> Node:
        """The entries of a value that meet one segment of a join."""
        assert join.joint is not None
        sizes = [part.shape[join.joint] for part in join.operands]
        shape = _resized(node.shape, axis, sizes[number])
        if node.op == "transpose":
            before, at = node.operands[0], node.params["permutation"][axis]
            parts = [self._part(before, at, join, number)]
            return self._emit(node.op, parts, shape, node.source, node.params)
        if node.op == "concatenate" and node.params["dimension"] == axis:
            alike = repeats_of(node) == repeats_of(join)
            if alike and [x.shape[axis] for x in node.operands] == sizes:
                return node.operands[number]
        if node.op == "broadcast_in_dim":
            kept = node.params["broadcast_dimensions"]
            inner = node.operands[0].shape
            if axis not in kept or inner[kept.index(axis)] == 1:
                params = {**node.params, "shape": shape}
                return self._emit(node.op, node.operands, shape, node.source, params)
        if repeats_of(join) > 1:  # a slice of each repetition
            return self._new("slice", [node], shape, source=node.source)
        start = sum(sizes[:number])
        return self._slice(node, axis, start, start + sizes[number], node.source)

    def _reshaped(self, call: Node, axis: int) -> Node | None:
        join = call.operands[0]
        through = reshaped(join.shape, call.shape, axis, repeats_of(join))
        if through is None:
            return None
        parts = []
        for part in self._groups(join, through):
            size = through.size(part.shape[axis])
            if size is None:
                return None
            shape = _resized(call.shape, through.axis, size)
            parts.append(self._emit(call.op, [part], shape, call.source, call.params))
        return self._join(parts, through.axis, call.source, through.repeats)

    def _groups(self, join: Node, through: "Through") -> list[Node]:
        """The segments of a join; those within one step of a new axis are joined."""
        axis, found, group, end = join.joint, [], [], 0
        assert axis is not None
        for part in join.operands:
            group.append(part)
            end += part.shape[axis]
            if through.before > 1 or through.place(end) is not None:
                found.append(
                    group[0] if len(group) == 1 else self._join(group, axis, None)
                )
                group = []
        return found if len(found) > 1 and not group else join.operands


def _edges(join: Node, axis: int | None) -> set[int]:
    """Where the values that are joined along an axis end."""
    assert axis is not None
    return {*itertools.accumulate(x.shape[axis] for x in join.operands)}


def _params_of_part(call: Node, index: Index, size: int) -> dict[str, Any]:
    """The parameters of an operation on a segment of a size."""
    params = call.params
    for name in ("limit_indices", "slice_sizes"):
        if name in params and index.out is not None:
            axis = index.axes[0]
            params = {**params, name: _resized(tuple(params[name]), axis, size)}
    if call.op == "conv_general_dilated" and len(index.axes) == 2 and index.out:
        params = {**params, "feature_group_count": size}
    return params


def repeats_of(join: Node) -> int:
    """How often the segments of a join follow each other."""
    return int(join.params.get("repeats", 1))


def starts_of(node: Node) -> tuple[int, ...] | None:
    """Where a part of a value begins on each axis; None for other operations."""
    strides = node.params.get("strides") or ()
    if node.op != "slice" or any(x != 1 for x in strides):
        return None
    return tuple(node.params["start_indices"])


@dataclasses.dataclass(frozen=True)
class Through:
    """What a reshape makes of a cut axis.

    Attributes:
      axis: the axis of the new shape.
      repeats: how often the segments follow each other along it.
      before: how often they do along the old axis.
      up, down: a place within a repetition of the old axis, times the first, over the
        second, is one of the new axis.
    """

    axis: int
    repeats: int
    before: int
    up: int
    down: int

    def place(self, at: int) -> int | None:
        """A place within a repetition; None if it is within a step of the new axis."""
        return None if at * self.up % self.down else at * self.up // self.down

    def size(self, size: int) -> int | None:
        """The size of a segment."""
        found = self.place(size // self.before)
        return None if found is None else found * self.repeats


def reshaped(
    old: tuple[int, ...], new: tuple[int, ...], axis: int, repeats: int = 1
) -> Through | None:
    """What a reshape makes of an axis that is cut into segments.

    Examples:
      >>> reshaped((5, 12), (5, 3, 4), 1).axis, reshaped((5, 3, 4), (5, 12), 1).place(2)
      (1, 8)
      >>> through = reshaped((5, 3, 4), (5, 12), 2)
      >>> through.axis, through.repeats, through.place(2)
      (1, 3, 2)
    """
    for group, others in regrouped(old, new):
        if axis not in group:
            continue
        leading = math.prod(old[a] for a in group if a < axis) * repeats
        inner = math.prod(old[a] for a in group if a > axis)
        before, after = 1, math.prod(new[a] for a in others)
        for a in others:
            after //= new[a]
            if before <= leading < before * new[a]:
                times = leading // before
                fits = leading % before == 0 and new[a] % times == 0
                return Through(a, times, repeats, inner, after) if fits else None
            before *= new[a]
    return None


def _resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])

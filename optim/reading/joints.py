"""A program as it is with one parameter for each segment of a fused one.

A fused parameter is a join of segments. Each operation on a join becomes the same
operation on its segments, as far as the program goes until it splits their results:
`split(x @ concat(q, k, v))` becomes `x @ q`, `x @ k`, `x @ v`. So a reader of the
program meets no fused parameter.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .program import Node, Program, regrouped

SUM = "sum"  # of the products of the segments of an axis that is summed over

# Operations on entries in the same place of all operands.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex
    conj convert_element_type copy copy_p cos cosh div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt imag integer_pow is_finite join last layout_constraint le log
    log1p logistic lt max mesh_cast min mul name ne neg not or pow pvary real
    reduce_precision rem reshard round rsqrt select_n sharding_constraint sign sin sinh
    sqrt square stop_gradient sub tan tanh
    """.split()  # noqa: SIM905
)
# Operations along one axis, which leave the others as they are.
ALONG = frozenset(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"))
REDUCTIONS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin")
)


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where an axis is cut into segments.

    Attributes:
      at: where segments begin, but the first.
      repeats: how often the segments follow each other along the axis, e.g. the number
        of heads where each has its queries, keys and values side by side. Then `at` are
        the places within one head.
    """

    at: tuple[int, ...]
    repeats: int = 1

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
    """The graph of a forward pass, with a parameter for each segment.

    Args:
      program: the graph with whole parameters.
      cuts: the segments of its parameters.
    """

    def __init__(self, program: Program, cuts: Cuts):
        self.traced, self.counts, self._cuts = program.traced, program.counts, cuts
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
        if op == "concatenate" and all(x.weight for x in node.operands):
            node.joint = node.params["dimension"]  # kernels that the model joins
        return node

    def _join(
        self, parts: list[Node], axis: int, source: Any, repeats: int = 1
    ) -> Node:
        shape = _resized(parts[0].shape, axis, sum(x.shape[axis] for x in parts))
        params = {"dimension": axis, "repeats": repeats}
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
        rule = self._rule(op)
        call = _Call(op, operands, tuple(shape), source, params or {})
        for i, node in enumerate(operands):
            if node.joint is not None and rule is not None:
                made = rule(call, i, node.joint)
                if made is not None:
                    return made
        return super()._emit(op, operands, shape, source, params)

    def _rule(self, op: str) -> "Callable[[_Call, int, int], Node | None] | None":
        if op in ELEMENTWISE:
            return self._elementwise
        if op in ALONG:
            return self._along
        if op in REDUCTIONS:
            return self._reduce
        return getattr(self, f"_push_{op}", None)

    def _each(
        self,
        call: "_Call",
        i: int,
        out: int,
        beside: Mapping[int, int],
        change: "Callable[[dict[str, Any], int], dict[str, Any]] | None" = None,
    ) -> list[Node]:
        """The operation on each segment of an operand.

        Args:
          call: the operation on the join.
          i: place of the join among the operands.
          out: axis of the result that gets the segments' sizes; -1 for none.
          beside: {place of another operand: its axis that is cut alike}.
          change: makes the operation's parameters for a segment of a size.
        """
        join, found = call.operands[i], []
        assert join.joint is not None
        for number, part in enumerate(join.operands):
            operands = list(call.operands)
            operands[i] = part
            for k, axis in beside.items():
                operands[k] = self._part(operands[k], axis, join, number)
            size = part.shape[join.joint]
            shape = call.shape if out < 0 else _resized(call.shape, out, size)
            params = call.params if change is None else change(call.params, size)
            found.append(self._emit(call.op, operands, shape, call.source, params))
        return found

    def _joined(
        self,
        call: "_Call",
        i: int,
        out: int,
        beside: Mapping[int, int],
        change: "Callable[[dict[str, Any], int], dict[str, Any]] | None" = None,
    ) -> Node:
        """The join of the operation on each segment; arguments as of `_each`."""
        parts = self._each(call, i, out, beside, change)
        return self._join(parts, out, call.source, repeats_of(call.operands[i]))

    def _sum(self, parts: list[Node], call: "_Call") -> Node:
        return self._emit(SUM, parts, call.shape, call.source)

    def _part(self, node: Node, axis: int, join: Node, number: int) -> Node:
        """The entries of a value that meet one segment of a join."""
        assert join.joint is not None
        sizes = [part.shape[join.joint] for part in join.operands]
        shape = _resized(node.shape, axis, sizes[number])
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
        starts, limits = [0] * len(shape), [*node.shape]
        starts[axis], limits[axis] = start, start + sizes[number]
        params = {"start_indices": tuple(starts), "limit_indices": tuple(limits)}
        return self._emit("slice", [node], shape, node.source, params)

    def _elementwise(self, call: "_Call", i: int, axis: int) -> Node | None:
        join, rank = call.operands[i].shape, len(call.shape)
        if len(join) != rank or join[axis] != call.shape[axis]:
            return None
        beside = {}
        for k, other in enumerate(call.operands):
            if k == i or not other.shape:
                continue
            if len(other.shape) != rank:
                return None
            if other.shape[axis] == call.shape[axis]:
                beside[k] = axis
        return self._joined(call, i, axis, beside)

    def _along(self, call: "_Call", i: int, axis: int) -> Node | None:
        if call.params["axis"] == axis:
            return None
        return self._joined(call, i, axis, {})

    def _reduce(self, call: "_Call", i: int, axis: int) -> Node | None:
        axes = call.params["axes"]
        if axis in axes:
            if call.op != "reduce_sum":
                return None
            return self._sum(self._each(call, i, -1, {}), call)
        out = axis - sum(a < axis for a in axes)
        return self._joined(call, i, out, {})

    def _push_transpose(self, call: "_Call", i: int, axis: int) -> Node:
        out = call.params["permutation"].index(axis)
        return self._joined(call, i, out, {})

    def _push_broadcast_in_dim(self, call: "_Call", i: int, axis: int) -> Node | None:
        out = call.params["broadcast_dimensions"][axis]
        if call.shape[out] != call.operands[i].shape[axis]:
            return None
        return self._joined(call, i, out, {})

    def _push_squeeze(self, call: "_Call", i: int, axis: int) -> Node:
        gone = call.params["dimensions"]
        out = axis - sum(a < axis for a in gone)
        return self._joined(call, i, out, {})

    def _push_reshape(self, call: "_Call", i: int, axis: int) -> Node | None:
        join = call.operands[i]
        through = reshaped(join.shape, call.shape, axis, repeats_of(join))
        sizes = [through.size(x.shape[axis]) for x in join.operands] if through else []
        if through is None or None in sizes:
            return None
        parts = [
            self._emit(
                call.op,
                [part],
                _resized(call.shape, through.axis, size),
                call.source,
                call.params,
            )
            for part, size in zip(join.operands, sizes, strict=True)
            if size is not None
        ]
        return self._join(parts, through.axis, call.source, through.repeats)

    def _push_scan_in(self, call: "_Call", i: int, axis: int) -> Node | None:
        if axis == 0:
            return None
        return self._joined(call, i, axis - 1, {})

    def _push_scan_out(self, call: "_Call", i: int, axis: int) -> Node:
        return self._joined(call, i, axis + 1, {})

    def _push_rev(self, call: "_Call", i: int, axis: int) -> Node | None:
        if axis in call.params["dimensions"]:
            return None
        return self._joined(call, i, axis, {})

    def _push_pad(self, call: "_Call", i: int, axis: int) -> Node | None:
        if i or any(call.params["padding_config"][axis]):
            return None
        return self._joined(call, i, axis, {})

    def _push_concatenate(self, call: "_Call", i: int, axis: int) -> Node | None:
        if call.params["dimension"] == axis:
            return None
        others = {k: axis for k in range(len(call.operands)) if k != i}
        return self._joined(call, i, axis, others)

    def _push_split(self, call: "_Call", i: int, axis: int) -> Node | None:
        at, result = call.params["axis"], call.params["result"]
        start = sum(call.params["sizes"][:result])
        starts, limits = [0] * len(call.shape), [*call.operands[0].shape]
        starts[at], limits[at] = start, start + call.shape[at]
        params = {"start_indices": tuple(starts), "limit_indices": tuple(limits)}
        return self._emit("slice", call.operands, call.shape, call.source, params)

    def _push_dynamic_slice(self, call: "_Call", i: int, axis: int) -> Node | None:
        join, indices = call.operands[0], call.operands[1:]
        if i:
            return None
        starts = known_starts(join, indices, call.shape)
        if starts is not None:
            limits = tuple(a + n for a, n in zip(starts, call.shape, strict=True))
            params = {"start_indices": starts, "limit_indices": limits}
            return self._emit("slice", [join], call.shape, call.source, params)
        if call.shape[axis] != join.shape[axis]:
            return None

        def change(params: dict[str, Any], size: int) -> dict[str, Any]:
            return {
                **params,
                "slice_sizes": _resized(tuple(params["slice_sizes"]), axis, size),
            }

        return self._joined(call, i, axis, {}, change)

    def _push_slice(self, call: "_Call", i: int, axis: int) -> Node | None:
        starts, limits = call.params["start_indices"], call.params["limit_indices"]
        strides = call.params.get("strides") or (1,) * len(starts)
        join, found, at = call.operands[0], [], 0
        if call.shape[axis] == join.shape[axis]:
            return self._other_axes(call, axis)
        if strides[axis] != 1 or repeats_of(join) > 1:
            return None
        for part in join.operands:
            size = part.shape[axis]
            low, high = max(starts[axis] - at, 0), min(limits[axis] - at, size)
            at += size
            if low >= high:
                continue
            shape = _resized(call.shape, axis, high - low)
            params = {
                "start_indices": _resized(starts, axis, low),
                "limit_indices": _resized(limits, axis, high),
                "strides": strides,
            }
            whole = shape == part.shape
            found.append(
                part
                if whole
                else self._emit("slice", [part], shape, call.source, params)
            )
        return found[0] if len(found) == 1 else self._join(found, axis, call.source)

    def _other_axes(self, call: "_Call", axis: int) -> Node:
        """A slice along other axes than the join's."""

        def change(params: dict[str, Any], size: int) -> dict[str, Any]:
            limits = _resized(tuple(params["limit_indices"]), axis, size)
            return {**params, "limit_indices": limits}

        return self._joined(call, 0, axis, {}, change)

    def _push_dot_general(self, call: "_Call", i: int, axis: int) -> Node | None:
        sums, batches = call.params["dimension_numbers"]
        if axis in sums[i]:
            if call.operands[i].data:
                return None
            beside = {1 - i: sums[1 - i][sums[i].index(axis)]}
            return self._sum(self._each(call, i, -1, beside), call)
        if axis in batches[i]:
            at = batches[i].index(axis)
            beside = {1 - i: batches[1 - i][at]}
            return self._joined(call, i, at, beside)
        out = dot_out(call.operands, sums, batches, i, axis)
        return self._joined(call, i, out, {})

    def _push_ragged_dot(self, call: "_Call", i: int, axis: int) -> Node | None:
        if i != 1 or axis != 2:
            return None
        return self._joined(call, i, 1, {})

    def _push_conv_general_dilated(
        self, call: "_Call", i: int, axis: int
    ) -> Node | None:
        numbers, groups = (
            call.params["dimension_numbers"],
            call.params["feature_group_count"],
        )
        (_, channels, *_), (into, from_, *_) = numbers.lhs_spec, numbers.rhs_spec
        out = numbers.out_spec[1]
        data, kernel = call.operands
        if groups == 1 and i == 1:
            if axis == into:
                return self._joined(call, i, out, {})
            if axis == from_:
                return self._sum(self._each(call, i, -1, {0: channels}), call)
        depthwise = groups == data.shape[channels] == kernel.shape[into]
        if depthwise and axis == (into if i else channels):

            def change(params: dict[str, Any], size: int) -> dict[str, Any]:
                return {**params, "feature_group_count": size}

            beside = {0: channels} if i else {1: into}
            return self._joined(call, i, out, beside, change)
        return None


class _Call:
    """One operation: its name, operands, shape, source and parameters."""

    def __init__(
        self,
        op: str,
        operands: list[Node],
        shape: tuple[int, ...],
        source: Any,
        params: dict[str, Any],
    ):
        self.op, self.operands, self.shape = op, operands, shape
        self.source, self.params = source, params


def repeats_of(join: Node) -> int:
    """How often the segments of a join follow each other."""
    return int(join.params.get("repeats", 1))


def dot_out(
    operands: Sequence[Node], sums: Any, batches: Any, i: int, axis: int
) -> int:
    """The axis of a product that a free axis of an operand becomes."""
    gone = [(*sums[k], *batches[k]) for k in (0, 1)]
    before = sum(a < axis and a not in gone[i] for a in range(len(operands[i].shape)))
    left = len(operands[0].shape) - len(gone[0])
    return len(batches[0]) + before + (left if i else 0)


def known_starts(
    node: Node, indices: Sequence[Node], shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Where a dynamic slice begins on each axis; None if that depends on inputs."""
    starts = []
    for index, size, whole in zip(indices, shape, node.shape, strict=True):
        if size == whole:
            starts.append(0)
        elif index.value is None:
            return None
        else:
            starts.append(min(max(int(index.value), 0), whole - size))
    return tuple(starts)


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

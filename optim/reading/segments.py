"""Segments: parts of a parameter that the program uses as parameters of their own."""

import dataclasses
import itertools
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax

from ..rules.roles import ParamScale, param_scale
from ..scales.declare import Declarations
from .axes import Axes, Use
from .branches import Branches
from .joints import Cut, Segmented, Through, reshaped, starts_of
from .leaves import Leaves
from .links import ELEMENTWISE, indices, is_kernel, walks_layers
from .lists import Pairing
from .models import Reading
from .program import MOVES, PRODUCTS, Node, Program, origin, reach

ByAxis = dict[int, Cut]


@dataclasses.dataclass
class Ways:
    """How the program splits or joins the axes of a parameter.

    Attributes:
      cuts: {(axis, repeats): the sets of places where values are split or joined}.
      numbers: {axis: of each way how many parts there are, and what finds where the
        last part meets what a kernel made of the first}.
      beside: as `cuts`, where joined values are added or multiplied.
    """

    cuts: dict[tuple[int, int], list[frozenset[int]]] = dataclasses.field(
        default_factory=dict
    )
    numbers: dict[int, list[tuple[int, Callable[[], Node | None]]]] = dataclasses.field(
        default_factory=dict
    )
    beside: dict[tuple[int, int], list[frozenset[int]]] = dataclasses.field(
        default_factory=dict
    )

    def divided(
        self, shape: tuple[int, ...], others: Sequence[tuple[int, ...]]
    ) -> "Ways":
        """With cuts beside joined values, for axes that grow by no whole number."""
        more = {
            (axis, k): cuts
            for (axis, k), cuts in self.beside.items()
            if any(shape[axis] % other[axis] for other in others)
        }
        return dataclasses.replace(self, cuts=more | self.cuts)

    def edges(self, axis: int, size: int) -> tuple[int, ...]:
        """All places where an axis is split or joined, in every repetition."""
        every = {
            first + at
            for (a, repeats), ways in self.cuts.items()
            if a == axis
            for first in range(0, size, size // repeats)
            for cuts in ways
            for at in (0, *cuts)
        }
        return tuple(sorted(every - {0}))

    def layers(self, axis: int) -> dict[int, Node]:
        """Numbers of parts that layer after layer reads, and a layer that does."""
        found = [(number, after()) for number, after in self.numbers.get(axis, ())]
        return {number: node for number, node in found if node is not None}


def segmented(
    large: Reading, others: Sequence[Reading], given: Declarations
) -> tuple[Reading, list[Reading], "Parts"]:
    """Read each segment of a fused parameter as a parameter.

    A parameter is cut if the program cuts it alike in all models (the target and those
    of other sizes): as many segments along the same axes. Returns the readings, and
    what joins the segments' scales.
    """
    found, joins = zip(*map(_ways, (large, *others)), strict=True)
    pairings = [Pairing(large.leaves, reading.leaves) for reading in others]
    twins = [{path: p.twin(path) for path in large.leaves} for p in pairings]
    kept: list[dict[str, ByAxis]] = [{} for _ in found]
    for path in found[0]:
        if pairings[0].counts_layers(path):
            continue
        told = given.axes(path, large.leaves[path].shape)
        names = [path, *(name for twin in twins if (name := twin[path]))]
        if len(names) == len(found) and not (told and told.insists):
            each = [ways.get(n, Ways()) for ways, n in zip(found, names, strict=True)]
            shapes = [
                reading.leaves[name].shape
                for reading, name in zip((large, *others), names, strict=True)
            ]
            each = [ways.divided(shapes[0], shapes[1:]) for ways in each]
            numbered = _numbered(path, each, shapes)
            for keep, name, cut, more in zip(
                kept, names, _agreed(each), numbered, strict=True
            ):
                if cut | more:
                    keep[name] = cut | more
    for i, (keep, reading) in enumerate(zip(kept[1:], others, strict=True)):
        # Blocks of the base beside the first of their kind.
        opened, paired = pairings[i].opened, set(twins[i].values())
        cuts = {n: found[i + 1].get(n, Ways()).cuts for n in reading.leaves}
        kinds = {n: (opened(n), x.shape) for n, x in reading.leaves.items()}
        for name in kinds.keys() - paired:
            alike = sorted(n for n in paired if n and kinds[n] == kinds[name])
            # Of two kinds that alternate, the program may split one.
            alike.sort(key=lambda n: cuts[n] != cuts[name])
            if alike and alike[0] in keep:
                keep[name] = keep[alike[0]]
    readings = [
        _cut(r, k, j) if k or j else r
        for r, k, j in zip((large, *others), kept, joins, strict=True)
    ]
    small = {p: (twins[0][p], kept[1].get(twins[0][p] or "", {})) for p in kept[0]}
    parts = Parts(large.leaves, others[0].leaves, kept[0], small)
    return readings[0], readings[1:], parts


def _agreed(each: Sequence[Ways]) -> list[ByAxis]:
    """The cuts that are alike in all models, for each model.

    A list of heads has as many cuts as there are heads, so it cuts nothing where their
    number grows.
    """
    found: list[ByAxis] = [{} for _ in each]
    for axis in {axis for axis, _ in each[0].cuts}:
        repeats = [
            min((r for a, r in way.cuts if a == axis), default=0) for way in each
        ]
        if 0 in repeats or len({r > 1 for r in repeats}) > 1:
            continue
        ways = [way.cuts[axis, r] for way, r in zip(each, repeats, strict=True)]
        if len({len(way) for way in ways}) > 1:
            ways = [way[:1] for way in ways]
        pairs = zip(*ways, strict=True)
        alike = [cuts for cuts in pairs if len({*map(len, cuts)}) == 1]
        every = zip(*alike, strict=True)
        joined = [tuple(sorted({x for cut in cuts for x in cut})) for cuts in every]
        if len({*map(len, joined)}) == 1:
            for cut, at, r in zip(found, joined, repeats, strict=True):
                cut[axis] = Cut(at, r)
    return found


def _numbered(
    path: str, each: Sequence[Ways], shapes: Sequence[tuple[int, ...]]
) -> list[ByAxis]:
    """Cuts of axes that hold what layer after layer reads, for each model.

    There are more of them where there are more layers, as of the modulations that one
    kernel makes for all layers.

    Raises:
      ValueError: such an axis holds something else, too, or a loop walks over it.
    """
    found: list[ByAxis] = [{} for _ in each]
    for axis in each[0].numbers:
        edges = [
            ways.edges(axis, s[axis]) for ways, s in zip(each, shapes, strict=True)
        ]
        many, *few = (len(at) + 1 for at in edges)
        if all(many == number for number in few):
            continue
        layers = [ways.layers(axis) for ways in each]
        nodes = [node for some in layers for node in some.values()]
        if not nodes:
            continue  # heads, for example
        fits = all(
            any(many * n == number * k for k in layers[0] or {1} for n in some or {1})
            for number, some in zip(few, layers[1:], strict=True)
        )
        scanned = [node for node in nodes if node.op == "scan_in"]
        if scanned or not fits:
            line = (scanned or nodes)[0].line
            remedy = (
                "(layers, n, m) in place of (layers * n, m), where "
                "w[i * n : (i + 1) * n] becomes w[i]"
                if axis == 0
                else "(n, layers, m) in place of (n, layers * m), where x @ w becomes "
                "jnp.einsum('...n,nlm->...lm', x, w)"
            )
            raise ValueError(
                f"axis {axis} of {path!r}, of size {shapes[0][axis]}, holds side by "
                f"side what each layer or group reads ({line}), so that it grows with "
                "their number and their width; store it with an axis of its own for "
                f"the layers or groups, e.g. w of shape {remedy}"
            )
        for cut, at in zip(found, edges, strict=True):
            cut[axis] = Cut(at, numbered=True)
    return found


def _cut(reading: Reading, cuts: Mapping[str, ByAxis], joins: set[int]) -> Reading:
    leaves, paths = Leaves(), []
    vars(leaves).update(vars(reading.leaves))
    for path, leaf in reading.leaves.items():
        for name, _, shape in _pieces(path, leaf.shape, cuts.get(path, {})):
            leaves[name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
    for path in reading.path_of:
        leaf = reading.leaves[path]
        paths += [p for p, _, _ in _pieces(path, leaf.shape, cuts.get(path, {}))]
    numbers = {reading.path_of.index(path): cut for path, cut in cuts.items()}
    return Reading(leaves, Segmented(reading.program, numbers, joins), paths)


def _pieces(
    path: str, shape: tuple[int, ...], cuts: ByAxis
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Name, beginning and shape of each segment."""
    axes = sorted(cuts)
    every = [list(enumerate(cuts[a].bounds(shape[a]))) for a in axes]
    for chosen in itertools.product(*every):
        start, size = [0] * len(shape), [*shape]
        for axis, (_, (low, high)) in zip(axes, chosen, strict=True):
            start[axis], size[axis] = low, (high - low) * cuts[axis].repeats
        parts = [
            str(i) if cuts[axis].numbered else _letters(i)
            for axis, (i, _) in zip(axes, chosen, strict=True)
        ]
        name = f"{path} [part {'.'.join(parts)}]" if axes else path
        yield name, tuple(start), tuple(size)


def _letters(number: int) -> str:
    """Letters that count, since numbers in paths count blocks.

    Examples:
      >>> _letters(0), _letters(25), _letters(26)
      ('a', 'z', 'aa')
    """
    more, last = divmod(number, 26)
    return (_letters(more - 1) if more else "") + string.ascii_lowercase[last]


# --- where the program cuts ---


def _ways(reading: Reading) -> tuple[dict[str, Ways], set[int]]:
    """The ways in which the program splits or joins axes of parameters, by path.

    And the joins of kernels, by the source of each, of which the results are split.
    """
    program = reading.program
    slices = _slices(program)
    joins = any(x.op == "concatenate" and x.data for x in program.nodes)
    scans = [
        node
        for node in program.nodes
        if node.op == "scan_in" and walks_layers(program, node.loop)
    ]
    if not slices and not joins and not scans:
        return {}, set()
    finder = _Finder(program, Axes(program))
    for (_, axis), (node, parts) in slices.items():
        if _covers(parts, node.shape[axis]):
            edges = {x for part in parts for x in part} - {0, node.shape[axis]}
            finder.split(node, axis, frozenset(edges))
    for node in scans:
        finder.scan(node)
    finder.sums()
    found = {path: Ways() for path in reading.path_of}
    for (param, axis, repeats), ways in finder.found.items():
        found[reading.path_of[param]].cuts[axis, repeats] = ways
    for (param, axis, repeats), ways in finder.beside.items():
        found[reading.path_of[param]].beside[axis, repeats] = ways
    for (param, axis), numbers in finder.numbers.items():
        found[reading.path_of[param]].numbers[axis] = numbers
    return found, finder.joins


def _slices(
    program: Program,
) -> dict[tuple[int, int], tuple[Node, set[tuple[int, int]]]]:
    """What is taken apart along which axis, and the parts."""
    found: dict[tuple[int, int], tuple[Node, set[tuple[int, int]]]] = {}
    for node in program.nodes:
        source = node.operands[0] if node.operands else node
        for axis, start in enumerate(starts_of(node) or ()):
            size = node.shape[axis]
            if size != source.shape[axis]:
                _, parts = found.setdefault((source.id, axis), (source, set()))
                parts.add((start, start + size))
    return found


def _covers(parts: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether every entry is in a part, and so is used.

    Examples:
      >>> _covers([(2, 4), (0, 2)], 4), _covers([(0, 3)], 4)
      (True, False)
    """
    end = 0
    for start, stop in sorted(parts):
        if start > end:
            return False
        end = max(end, stop)
    return end == size


_Key = tuple[int, int, int]  # index of a parameter, its axis, repeats


class _Finder:
    """Finds the axes of parameters that values were taken apart along."""

    def __init__(self, program: Program, axes: Axes):
        self._program, self._axes = program, axes
        branches = Branches(program, axes).all
        self._stops = {b.add.id for b in branches}
        self._inside = frozenset().union(*(b.inside for b in branches))
        self.found: dict[_Key, list[frozenset[int]]] = {}
        self.beside: dict[_Key, list[frozenset[int]]] = {}
        self.numbers: dict[
            tuple[int, int], list[tuple[int, Callable[[], Node | None]]]
        ] = {}
        self.joins: set[int] = set()
        self._joints: dict[tuple[int, int], frozenset[int]] = {}

    def split(self, node: Node, axis: int, cuts: frozenset[int]) -> None:
        """A value is taken apart: cut the kernels that it was computed by."""
        if node.weight and self._holds_layers(node, axis):
            return
        again = [*self._joined_again(node, axis)]
        cuts = frozenset(x for x in cuts if not any(a < x < b for a, b in again))
        found = self._back(node, axis, cuts)
        self._keep(found)
        if node.param is None or len(cuts) + 1 < node.shape[axis]:
            # else an axis of its own
            self._count(found, len(cuts) + 1, lambda: self._in_a_row(node, axis))

    def _holds_layers(self, node: Node, axis: int) -> bool:
        """Whether a loop over layers takes a stack but for single ones in branches."""
        parts = [x for x in self._axes.uses(node) if starts_of(x) and axis == 0]
        stacks = [x for x in parts if x.shape[axis] > 1]

        def used(at: Node) -> list[Node]:
            return self._axes.uses(at) if at in parts or at.op in MOVES else []

        return (
            len(stacks) == 1
            and all(
                x.op == "scan_in" and walks_layers(self._program, x.loop)
                for x in self._axes.uses(stacks[0])
            )
            and all(
                any(y.id in self._inside for y in reach([x], used))
                for x in parts
                if x is not stacks[0]
            )
        )

    def scan(self, node: Node) -> None:
        """A loop over layers takes a value apart."""
        source = node.operands[0]
        found = {
            key: cuts
            for key, cuts in self._back(
                source, 0, frozenset(range(1, source.shape[0]))
            ).items()
            if self._program.params[key[0]].shape[key[1]] > source.shape[0]
        }
        self._keep(found)
        self._count(found, source.shape[0], lambda: node)

    def _count(
        self,
        found: Iterable[_Key],
        number: int,
        after: Callable[[], Node | None],
    ) -> None:
        for param, axis, _ in found:
            uses = (e.uses.get(axis, ()) for e in self._axes.events[param])
            if any({*each} - {Use.COPY} for each in uses):  # else it counts layers
                self.numbers.setdefault((param, axis), []).append((number, after))

    def _in_a_row(self, node: Node, axis: int) -> Node | None:
        """Whether the last part of a value meets what a kernel made of the first.

        It is the case for what layer after layer reads, and not for heads.
        """
        size = node.shape[axis]
        parts = [
            x
            for x in self._axes.uses(node)
            if x.op == "slice" and x.shape[axis] != size
        ]
        first = [x for x in parts if x.params["start_indices"][axis] == 0]
        last = [x for x in parts if x.params["limit_indices"][axis] == size]

        def before_kernels(at: Node) -> list[Node]:
            return [x for x in self._axes.uses(at) if not is_kernel(x)]

        entered = [*reach(last, before_kernels)]
        entered += [x for at in entered if at.weight for x in self._axes.uses(at)]
        after = {x.id for x in reach(last, self._axes.uses)}
        start = [x for x in reach(first, self._axes.uses) if is_kernel(x)]
        made = {x.id for x in reach(start, self._axes.uses)}
        return next(
            (
                at
                for at in entered
                for x in at.operands
                if x.id in made and x.id not in after
            ),
            None,
        )

    def _keep(self, found: Mapping[_Key, set[int]], *, beside: bool = False) -> None:
        for key, cuts in found.items():
            ways = (self.beside if beside else self.found).setdefault(key, [])
            if cuts not in ways:
                ways.append(frozenset(cuts))

    def _back(
        self, node: Node, axis: int, cuts: frozenset[int]
    ) -> dict[_Key, set[int]]:
        """The axes of parameters that an axis of a value comes from, with its cuts."""
        found: dict[_Key, set[int]] = {}
        seen: set[tuple[int, int, frozenset[int], int]] = set()
        made, stack = node.weight, [(node, axis, cuts, 1)]
        while stack:
            at, axis, cuts, repeats = step = stack.pop()
            if (at.id, *step[1:]) in seen or not cuts:
                continue
            seen.add((at.id, axis, cuts, repeats))
            if at.id in self._stops:
                continue  # a residual stream is one vector
            if at.param is not None:
                found.setdefault((at.param, axis, repeats), set()).update(cuts)
            before = [*_before(*step)]
            if at.weight and at.op == "concatenate" and at.params["dimension"] == axis:
                self.joins.add(id(at.source[0]))
                end = 0
                for part in at.operands if repeats == 1 else ():
                    start, end = end, end + part.shape[axis]
                    within = frozenset(x - start for x in cuts if start < x < end)
                    before.append((part, axis, within, 1))
            rows = at.op == "gather" and at.operands[0].weight
            made = made or (bool(before) and (at.op in PRODUCTS or rows))
            stack += before
        return found if made else {}

    def _joined_again(self, node: Node, axis: int) -> Iterator[tuple[int, int]]:
        """Parts of a value that meet again along the same axis, as in a rotation."""
        spans: dict[int, tuple[int, int]] = {}
        parts = [x for x in self._axes.uses(node) if x.op == "slice"]
        for x in parts:
            start = x.params["start_indices"][axis]
            spans[x.id] = start, start + x.shape[axis]
        alone = {*spans.values()}

        def after(at: Node) -> list[Node]:
            every = (x for x in self._axes.uses(at) if x.shape == at.shape)
            return [x for x in every if x.op in ELEMENTWISE]

        joins: dict[int, Node] = {}
        for at in sorted(reach(parts, after), key=lambda x: x.id):
            if each := [spans[x.id] for x in at.operands if x.id in spans]:
                spans[at.id] = min(a for a, _ in each), max(b for _, b in each)
            joins |= {x.id: x for x in self._axes.uses(at) if x.op == "concatenate"}
        for join in joins.values():
            each = [spans[x.id] for x in join.operands if x.id in spans]
            if join.params["dimension"] == axis and len(each) > 1:
                whole = min(a for a, _ in each), max(b for _, b in each)
                yield from [whole] if alone.issuperset(each) else each

    def sums(self) -> None:
        """A kernel sums over an axis that was joined: cut it there.

        Or it makes what is added to a joined value, or multiplied by one, as in a dot.
        """
        for node in self._program.nodes:
            pairs = itertools.permutations(node.operands, 2)
            for made, data in pairs if node.op in ("add", "sub", "mul", "div") else ():
                for axis, size in enumerate(made.shape):
                    if size > 1 and (cuts := self._joined(data, axis)):
                        self._keep(self._back(made, axis, cuts), beside=True)
            for kernel, axis, data, a in _contracted(node):
                cuts = self._joined(data, a)
                summed = kernel.weight and not self._axes.is_gain(kernel, axis)
                if cuts and summed and data.data:
                    self._keep(self._back(kernel, axis, cuts))
                elif cuts and kernel.data:
                    self._keep(self._back(kernel, axis, cuts), beside=True)

    def _joined(self, node: Node, axis: int) -> frozenset[int]:
        """Where parts of a value along an axis were joined."""
        key = node.id, axis
        if key not in self._joints:
            self._joints[key] = frozenset()  # of a loop's carry
            self._joints[key] = frozenset(self._find_joined(node, axis))
        return self._joints[key]

    def _find_joined(self, node: Node, axis: int) -> Iterable[int]:
        if node.op == "carry" or not node.data:
            return ()
        if node.op == "concatenate":
            found: set[int] = set()
            start = 0
            for part in node.operands:
                inner = self._joined(part, axis)
                if node.params["dimension"] != axis:
                    found |= inner
                    continue
                found |= {start, *(start + x for x in inner)}
                start += part.shape[axis]
            copies = len({origin(x).id for x in node.operands}) == 1
            return () if copies else found - {0}
        return {
            cut * through.down // through.up
            for operand, through in _sources(node, axis)
            if through.repeats == 1
            for cut in self._joined(operand, through.axis)
            if cut * through.down % through.up == 0
        }


def _contracted(node: Node) -> Iterator[tuple[Node, int, Node, int]]:
    """Kernel, axis, data and axis of each sum of products."""
    if node.op in PRODUCTS:
        for index in indices(node):
            if index.out is None and len(index.axes) == 2:
                (one, a), (other, b) = (
                    (node.operands[k], axis) for k, axis in index.axes.items()
                )
                yield one, a, other, b
                yield other, b, one, a


def _sources(node: Node, axis: int, repeats: int = 1) -> Iterator[tuple[Node, Through]]:
    """Operands that an axis of a result comes from, and how places map to theirs."""
    if node.op == "reshape":
        through = reshaped(node.shape, node.operands[0].shape, axis, repeats)
        if through is not None:
            yield node.operands[0], through
        return
    for index in indices(node):
        if index.out == axis and not index.mixed:
            for k, before in index.axes.items():
                yield node.operands[k], Through(before, repeats, repeats, 1, 1)


def _before(
    node: Node, axis: int, cuts: frozenset[int], repeats: int
) -> Iterator[tuple[Node, int, frozenset[int], int]]:
    """Operands that an axis of a value comes from, and its cuts in them."""
    if node.op in PRODUCTS:
        sources = [x for x, _ in _sources(node, axis)]
        batch = len(sources) > 1 and node.op == "dot_general"
        if batch or not any(x.weight for x in sources):
            return
    rows = node.op == "gather" and node.operands[0].weight
    if rows and len(cuts) + 1 == node.shape[axis]:
        return  # an axis of its own
    moved = _offset(node, axis)
    if moved is not None:
        if repeats == 1:
            yield node.operands[0], axis, frozenset(x + moved for x in cuts), 1
        return
    for operand, through in _sources(node, axis, repeats):
        places = [through.place(x) for x in cuts]
        if (operand.data or operand.weight) and None not in places:
            found = frozenset(x for x in places if x is not None)
            yield operand, through.axis, found, through.repeats


def _offset(node: Node, axis: int) -> int | None:
    """Where a part of a value begins along an axis; None for other operations."""
    starts = starts_of(node)
    if starts is None or node.operands[0].shape[axis] == node.shape[axis]:
        return None
    return starts[axis]


# --- one scale of many ---


@dataclasses.dataclass(frozen=True)
class Parts:
    """Joins the scales of segments.

    Attributes:
      large: the target's whole parameters.
      small: the base's.
      cuts: where those of the target are cut.
      twins: {path: its counterpart in the base, and where that is cut}.
    """

    large: Leaves
    small: Leaves
    cuts: Mapping[str, ByAxis]
    twins: Mapping[str, tuple[str | None, ByAxis]]

    def joined(
        self, scales: Mapping[str, ParamScale], twin_of: Mapping[str, str]
    ) -> dict[str, ParamScale]:
        """One scale for each parameter, with its segments where they differ.

        `twin_of` gives the counterpart of each parameter or segment in the base.
        """
        found: dict[str, ParamScale] = {}
        for path, leaf in self.large.items():
            if path not in self.cuts:
                found[path] = scales[path]
                continue
            twin, cuts = self.twins[path]
            assert twin is not None
            before = self.small[twin].shape
            now = _pieces(path, leaf.shape, self.cuts[path])
            then = {name: start for name, start, _ in _pieces(twin, before, cuts)}
            rank = range(len(before))
            repeats = tuple(_repeats(self.cuts[path], a) for a in rank)
            old_repeats = tuple(_repeats(cuts, a) for a in rank)
            segments = [
                dataclasses.replace(
                    scales[name],
                    start=start,
                    base_start=then[twin_of[name]],
                    repeats=repeats,
                    base_repeats=old_repeats,
                )
                for name, start, _ in now
            ]
            found[path] = _whole(path, before, leaf.shape, segments)
        return found


def _repeats(cuts: ByAxis, axis: int) -> int:
    return cuts[axis].repeats if axis in cuts else 1


def _whole(
    path: str,
    before: tuple[int, ...],
    shape: tuple[int, ...],
    segments: list[ParamScale],
) -> ParamScale:
    for axis in range(len(shape)):
        segments = _merged(segments, axis)
    largest = max(segments, key=lambda s: s.size)
    if len(segments) == 1:
        none = {"start": (), "base_start": (), "repeats": (), "base_repeats": ()}
        return dataclasses.replace(largest, path=path, base_shape=before, **none)  # type: ignore[arg-type]
    scale = param_scale(
        path,
        before,
        shape,
        largest.in_axes,
        largest.out_axes,
        width_last=largest.width_last,
        depth=largest.depth,
        in_branch=any(s.in_branch for s in segments),
        origin=largest.origin,
        training=largest.training,
        segments=tuple(
            dataclasses.replace(s, path=path) for s in sorted(segments, key=_place)
        ),
    )
    # If only depth grows, the segments have their roles from a third model.
    return dataclasses.replace(scale, role=largest.role) if before == shape else scale


def _place(scale: ParamScale) -> tuple[int, ...]:
    return scale.start


def _merged(segments: list[ParamScale], axis: int) -> list[ParamScale]:
    """Join neighbours along an axis that are used alike."""
    slabs: dict[int, list[ParamScale]] = {}
    for segment in segments:
        slabs.setdefault(segment.start[axis], []).append(segment)
    every = [sorted(slabs[at], key=_place) for at in sorted(slabs)]
    single = len(every) > 1 and all(
        s.shape[axis] == 1 and axis not in s.out_axes for s in segments
    )
    alike = all(_facts(slab) == _facts(every[0]) for slab in every)
    if single and alike:  # copies
        return [_copies(each, axis) for each in zip(*every, strict=True)]
    merged = every[:1]
    for slab in every[1:]:
        last = merged[-1]
        if _facts(last) == _facts(slab) and not any(_is_own(s, axis) for s in slab):
            merged[-1] = [
                _extended(one, other, axis)
                for one, other in zip(last, slab, strict=True)
            ]
        else:
            merged.append(slab)
    return [s for slab in merged for s in slab]


def _facts(slab: Sequence[ParamScale]) -> list[ParamScale]:
    none = {"path": "", "base_shape": (), "shape": (), "start": (), "base_start": ()}
    return [dataclasses.replace(s, **none, origin="") for s in slab]  # type: ignore[arg-type]


def _is_own(scale: ParamScale, axis: int) -> bool:
    """Whether a segment is a parameter by itself, though its neighbours are alike.

    Those of an axis that is summed over are one matrix, and positions one table.
    """
    before, size = scale.base_shape[axis], scale.shape[axis]
    return axis in scale.out_axes and (
        bool(scale.in_axes) or size != before or size == 1
    )


def _extended(one: ParamScale, other: ParamScale, axis: int) -> ParamScale:
    shapes = []
    for a, b in ((one.base_shape, other.base_shape), (one.shape, other.shape)):
        shapes.append((*a[:axis], a[axis] + b[axis], *a[axis + 1 :]))
    heads = [list(h) for h in (one.base_head_shape, one.head_shape)]
    for head, new, old in zip(heads, shapes, (one.base_shape, one.shape), strict=True):
        if head and head[axis] == old[axis]:
            head[axis] = new[axis]
    return dataclasses.replace(
        one,
        base_shape=shapes[0],
        shape=shapes[1],
        base_head_shape=tuple(heads[0]),
        head_shape=tuple(heads[1]),
    )


def _copies(each: Sequence[ParamScale], axis: int) -> ParamScale:
    """Segments of one entry each, which are used alike."""
    first = each[0]
    for other in each[1:]:
        first = _extended(first, other, axis)
    shape = list(first.base_shape)
    shape[axis] = len({x.base_start[axis] for x in each})
    return dataclasses.replace(
        first,
        base_shape=tuple(shape),
        in_axes=tuple(a for a in first.in_axes if a != axis),
        out_axes=tuple(a for a in first.out_axes if a != axis),
    )

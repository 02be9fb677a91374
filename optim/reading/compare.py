"""Compare the programs of base and target: roles, depth, branches and constants."""

import bisect
import dataclasses
import functools
import itertools
import math
import warnings
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from typing import Any, TypeVar

from ..rules.parametrizations import Parametrization, parametrization
from ..rules.roles import ParamScale, Role
from ..scales.declare import Declarations
from ..scales.table import Scales, some
from .axes import Axes, Event, Use
from .branches import LINEAR, Branch, Branches, End, Failure, place
from .growth import grown, same_parametrization, twin
from .heads import find_heads
from .kinds import Kind, alike, kinds
from .links import indices, is_kernel
from .lists import Pairing
from .models import Reading
from .parallel import Parallel, numbers
from .program import MOVES, PRODUCTS, Node, earlier, origin, reach
from .roles import Found, find_roles, remedy
from .segments import segmented
from .sums import Sum, Sums
from .totals import Totals

_MULTILINEAR = ("add", "sub", "mul", "carry", "last", "scan_out", *PRODUCTS)

_Key = tuple[Hashable, frozenset[str]]  # the place of an addition, parameters
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
# By which power of a fan-in the initial entries of a kernel shrink.
_POWERS = {Role.INPUT: 0.0, Role.HIDDEN: 0.5, Role.OUTPUT: 1.0}


class _Model:
    """A model's program, and what was read from it.

    Args:
      reading: the program.
      given: parameters whose axes the user declared.
      growth: the axes of each parameter that grow from the base to the target.
      opened: names a parameter alike in all blocks.
    """

    def __init__(
        self,
        reading: Reading,
        given: Declarations,
        growth: Mapping[str, frozenset[int]],
        opened: Callable[[str], str],
    ):
        self.reading, program = reading, reading.program
        self.opened = opened
        self._paths: dict[int, list[str]] = {}
        self._evaluations: dict[tuple[Hashable, int], int] = {}
        self._evaluated: dict[Hashable, list[Node]] = {}  # the last of each
        growing = frozenset(
            (i, axis)
            for i, path in enumerate(reading.path_of)
            for axis in growth.get(path, ())
        )
        self.axes = Axes(program, growing)
        self.roles = find_roles(reading, self.axes, given)
        self.branches = Branches(program, self.axes)
        self.totals = Totals(program, self.axes, self.branches)
        self.sums = Sums(program, self.axes, self.branches)
        # Logits that each layer adds to those of the layer before are no stream.
        self.branches.all = [
            b for b in self.branches.all if b.add.id not in self.sums.totals
        ]
        self.heads = find_heads(reading, self.axes)

    def events(self, path: str) -> list[Event]:
        return self.axes.events[self.reading.path_of.index(path)]

    def path(self, end: End) -> str:
        return self.reading.path_of[end.param]

    def heads_within(self, path: str) -> int:
        """The number of heads that share an axis with their inputs; 0 for none."""
        role, param = self.roles[path], self.reading.path_of.index(path)
        node, number = role.node if role else None, 0
        for event in self.axes.events[param] if node is not None else ():
            both = {*event.axes(Use.IN)} & {*event.axes(Use.COPY)}
            if event.node is node and node.op == "dot_general" and both:
                for index in indices(node):
                    shared = index.out is not None and len(index.axes) > 1
                    for k, a in index.axes.items() if shared else ():
                        labels = self.axes.labels.get(node.operands[k].id, ())
                        if labels and any((param, x) in labels[a] for x in both):
                            number = max(number, 1) * node.operands[k].shape[a]
        return number

    def paths(self, branch: Branch) -> list[str]:
        """The parameters that are used inside a branch."""
        if id(branch) not in self._paths:
            self._paths[id(branch)] = [*self._inside(branch)]
        return self._paths[id(branch)]

    def evaluation(self, layer: Hashable, node: Node) -> int:
        """Which evaluation of a layer a node is of, e.g. on the second of two batches.

        What is computed from an evaluation belongs to it, as in a loop over a layer.
        """
        if (layer, node.id) not in self._evaluations:
            lasts = self._evaluated.setdefault(layer, [])
            at = (i for i, x in enumerate(lasts) if self.branches.leads(x, node))
            number = next(at, len(lasts))
            lasts[number:] = [node, *lasts[number + 1 :]]
            self._evaluations[layer, node.id] = number
        return self._evaluations[layer, node.id]

    def is_kernel(self, node: Node) -> bool:
        """Whether a node is the product of a value and a kernel."""
        is_product = node.op in PRODUCTS or node.id in self.axes.products
        return is_product and any(x.weight for x in node.operands)

    def evaluated(self, branch: Branch) -> int:
        """Which evaluation of its layer a branch is of."""
        return self.evaluation((branch.add.spot, *self.paths(branch)), branch.add)

    def repeats(self, branches: Iterable[Branch]) -> bool:
        """Whether there are several, in one evaluation."""
        return sum(b.runs for b in branches if not self.evaluated(b)) > 1

    def _inside(self, branch: Branch) -> Iterator[str]:
        skip = {branch.add.id} if branch.trunk.weight else set()
        skip |= {branch.trunk.id} if branch.trunk.op == "concatenate" else set()
        for i, path in enumerate(self.reading.path_of):
            # What a kernel made, or rows that were looked up, is not used again by what
            # it meets.
            events = [
                e
                for e in self.axes.events[i]
                if e.axes(Use.TABLE)
                or e.axes(Use.IN)
                or any(x.weight and i in self.axes.depends(x) for x in e.node.operands)
            ]
            used = {event.node.id for event in events}
            if used & branch.inside and not used & (skip - branch.inside):
                yield path

    def copies(self, path: str) -> int:
        """The number of layers that a parameter holds, one beside the other."""
        param = self.reading.path_of.index(path)
        axes = {a for p, a in self.axes.sliced if p == param}
        for event in self.axes.events[param]:
            if event.node.op in ("scan_in", "slice") and not event.node.backward:
                axes |= {*event.axes(Use.COPY)}
        return math.prod(self.reading.leaves[path].shape[a] for a in axes)

    def inside(self, branches: list[Branch]) -> dict[str, tuple[int, int]]:
        """How many branches use parameters, and how many layers these hold, by name."""
        runs, layers = Counter[str](), Counter[str]()
        for b in branches:
            runs.update(dict.fromkeys(self.names(b), b.runs))
        for path in {path for b in branches for path in self.paths(b)}:
            layers[self.opened(path)] += self.copies(path)
        return {name: (runs[name], layers[name]) for name in runs}

    def outside(self, branches: list[Branch]) -> dict[str, tuple[int, int]]:
        """In how many layers parameters act on streams, and how many they hold.

        Some of that name act before a branch; a readout of each layer does not.
        """
        adds = sorted(b.add.id for b in branches)
        ends = {b.add.id: b.end for b in branches}

        def earlier(x: Node) -> list[Node]:
            return [y for y in x.operands if y.data and y is not ends.get(x.id)]

        ahead = reach([x for b in branches for x in earlier(b.add)], earlier)
        inside = set().union(*(b.inside for b in branches)) - self.on_streams(branches)
        before = {x.id for x in ahead} - inside
        acts: dict[str, dict[tuple[int, int], int]] = {}
        layers, early = Counter[str](), set[str]()
        for path, events in zip(self.reading.path_of, self.axes.events, strict=True):
            used = [e.node for e in events if e.is_use]
            name = self.opened(path)
            # Each layer once, between the same additions.
            places = {(bisect.bisect(adds, x.id), x.loop): x.runs for x in used}
            acts.setdefault(name, {}).update(places)
            layers[name] += self.copies(path)
            early |= {name for x in used if x.id in before}
        return {name: (sum(acts[name].values()), layers[name]) for name in early}

    def on_streams(self, branches: list[Branch]) -> set[int]:
        """Ids of what leads from one addition to a stream to the next, e.g. of norms.

        A branch may read another stream, and the gains that act on that.
        """
        ways = (x for b in branches for x in self.branches.normed(b.trunk))
        ends = {b.add.id for b in branches}
        return {x.id for x in ways if x.id not in ends and not self.is_kernel(x)}

    def names(self, branch: Branch) -> frozenset[str]:
        """The parameters inside a branch, without the number of the block."""
        return frozenset(map(self.opened, self.paths(branch)))

    def holds(self, branch: Branch) -> bool:
        """Whether there are other branches inside a branch."""
        return any(
            x.add.id in branch.inside for x in self.branches.all if x is not branch
        )

    def outermost(self, branches: list[Branch]) -> list[Branch]:
        """Those that are not within others."""
        adds = {b.add.id: b for b in branches}
        before: dict[int, Branch] = {}
        following: dict[int, list[Branch]] = {}
        for b in branches:
            for x in self.branches.normed(b.trunk):
                if x.id in adds:
                    before[id(b)] = adds[x.id]
                    following.setdefault(x.id, []).append(b)

        def is_within(branch: Branch, other: Branch) -> bool:
            """Whether the stream of a branch starts within another branch."""
            if branch is other or branch.add.id not in other.inside:
                return False
            after = following.get(branch.add.id, ())
            if any(x.add.id not in other.inside and x is not other for x in after):
                return False  # of two streams that read each other
            while id(branch) in before and before[id(branch)].add.id in other.inside:
                branch = before[id(branch)]
            return branch.trunk is other.trunk or branch.trunk.id in other.inside

        return [b for b in branches if not any(is_within(b, x) for x in branches)]

    def kind(self, branch: Branch) -> _Key:
        """What a branch has in common with those of other layers."""
        return branch.add.spot, self.names(branch)


def _numbered(model: _Model) -> Iterator[tuple[tuple[str, int], tuple[str, Node]]]:
    """Where loops take kernels of a stack one by one: ((name, axis), (path, node))."""
    program = model.reading.program
    for node in program.nodes:
        if node.op not in ("dynamic_slice", "gather") or not node.loop:
            continue
        stack, *indices = node.operands
        if stack.param is None or not any(map(program.is_counted, indices)):
            continue
        shape, sizes = stack.shape, node.params["slice_sizes"]
        taken = [a for a, n in enumerate(sizes) if n == 1 and shape[a] != 1]
        if len(taken) == 1 and sum(n > 1 for n in sizes) > 1:
            path = model.reading.path_of[stack.param]
            yield (model.opened(path), taken[0]), (path, node)


class Comparison:
    """Base and target, parameter by parameter and branch by branch.

    Args:
      readings: of the base, of the target, and of a model of other widths than the
        base's, if there is one.
      given: parameters whose axes the user declared.
      fractional: whether ratios need not be whole numbers.
    """

    def __init__(
        self,
        readings: Sequence[Reading],
        given: Declarations,
        fractional: bool,
    ):
        base, target, *delta = readings
        large, others, self._parts = segmented(target, [base, *delta], given)
        self.fractional = fractional
        self._averaged: list[Branch] = []  # terms of means over layers
        self._found: dict[str, ParamScale] = {}
        self._on_stream: dict[str, float] = {}  # their depth ratios
        # In how many times as many layers each copy of a parameter is.
        self._shared: dict[str, float] = {}
        self._ratios: dict[int, float] = {}  # of depths, by the id of a branch
        # By sum, the constants between it and the end of a branch that are not its own.
        self._of_branches: dict[int, float] = {}
        self._of_kernels: set[int] = set()  # sums over a kernel that data changes
        self._summed_over_layers: set[int] = set()
        self._leaves, small = large.leaves, others[0].leaves
        wide = others[1].leaves if len(others) > 1 else large.leaves
        to_small, to_wide = (Pairing(self._leaves, x) for x in (small, wide))
        self._opened, self._counts_layers = to_small.opened, to_small.counts_layers
        self.twin, self._shapes = {}, {}
        growths: tuple[dict[str, frozenset[int]], ...] = {}, {}
        for path, leaf in self._leaves.items():
            one = twin(path, to_small, small, self._leaves, "base")
            other = twin(path, to_wide, wide, self._leaves, "delta")
            before, after = small[one].shape, wide[other].shape
            axes = frozenset(a for a, n in enumerate(before) if n != after[a])
            if to_small.counts_layers(path):
                axes = frozenset()
            self.twin[path], self._shapes[path] = one, (before, leaf.shape, after)
            for growth, name in zip(growths, (path, one), strict=True):
                growth[name] = axes | growth.get(name, frozenset())
        self._growth = growths[0]
        self.large = _Model(large, given, growths[0], self._opened)
        # Also of blocks beside the first of their kind.
        like = {self._opened(name): axes for name, axes in growths[1].items()}
        like |= growths[1]
        growth = {x: like.get(x, like.get(self._opened(x), frozenset())) for x in small}
        self.small = _Model(others[0], given, growth, self._opened)
        now, then = (Counter(map(self._opened, x)) for x in (self._leaves, small))
        names = frozenset(x for x in now if now[x] != then[x])
        self._sides = [
            Parallel(m.reading, m.axes, m.branches, m.totals, self._opened, names)
            for m in (self.small, self.large)
        ]
        # The growth of the number of kernels beside each other, in fan-in and fan-out.
        self._beside = numbers(*self._sides)
        for path, one in self.twin.items():
            heads = self.large.heads_within(path), self.small.heads_within(one)
            if all(heads) and heads[0] != heads[1]:
                more = heads[0] / heads[1]
                into, out = self._beside.get(path, (1.0, 1.0))
                self._beside[path] = into / more, out * more

    def scales(self, point: Parametrization | None) -> Scales:
        """Roles from the programs, depth from their branches.

        `point` is the parametrization; None for the one that the program implies.
        """
        self._check_loops()
        self._settle_states()
        counted = self._counted()
        has_streams = bool(self._ratios)
        added = self._added(counted)
        if added and not has_streams:
            counted = []
            self._check_only_sums_deepen(added)
        counted = sorted([*counted, *added], key=place)
        own = self._leaves.parametrization
        point = same_parametrization(own, point) or own
        inside, depth = self._inside(counted), self._depth
        depths = inside | self._on_stream
        self._found = {path: self._scale(path, path in inside) for path in self._leaves}
        if not counted and self._deeper:
            depth = self._plain_depth(point)
        elif own is None:
            point = self._follow_branches(counted, point)
        if own is None:
            self._follow_readouts(self._follow_sums(point))
        self._warn_of_uncalled()
        last = self._last_width()
        found = {
            path: dataclasses.replace(
                scale, depth=depths.get(path, depth), width_last=last
            )
            for path, scale in self._found.items()
        }
        return Scales(
            self._parts.joined(found, self.twin),
            point or parametrization("mup"),
            multiplied=own is not None,
        )

    def _check_loops(self) -> None:
        """Raise a `ValueError` if a loop over layers has no number of its own.

        Their number may be that of an input, which is the same for base and target.
        """
        for (_, axis), kind in self._kinds(_numbered).items():
            for (path, now), (_, then) in kind.twins:
                small, large = (x.operands[0].shape[axis] for x in (then, now))
                if small == large or then.runs != now.runs:
                    continue
                raise ValueError(
                    f"a loop takes layer after layer of {path!r} ({now.line}), of "
                    f"which the base has {small} and the target {large}, but its "
                    "number of iterations is an input or is not known; let each model "
                    "count its own layers, e.g. jax.lax.scan(f, x, "
                    "jnp.arange(len(w))) for the stacked weights w"
                )

    @property
    def _depth(self) -> float:
        """The largest depth ratio of all streams."""
        return max(self._ratios.values(), default=1.0)

    def _scale(self, path: str, inside: bool) -> ParamScale:
        role, grows = self.large.roles[path], self._growth[path]
        if grows and self._is_unknown(path):
            raise ValueError(self._unused())
        if role is None:
            role = Found(path)
        if grows & set(role.mixed):
            raise ValueError(
                f"axis {role.mixed[0]} of {path!r} holds both the inputs and the "
                f"outputs of a kernel ({role.line}), so that it has no fan-in of its "
                "own; store each kernel with an axis for its inputs and one for its "
                "outputs, e.g. by call=lambda params, *inputs: ... that flattens them"
            )
        before = self.small.roles[self.twin[path]]
        if before is not None and (before.in_axes, before.table) != (
            role.in_axes,
            role.table,
        ):
            raise ValueError(
                f"base and target use {path!r} differently: the base sums over axes "
                f"{before.in_axes} ({before.line}), the target over {role.in_axes} "
                f"({role.line}); build both by the same code. An einsum of several "
                "operands multiplies them in an order that depends on sizes: split it "
                "into einsums of two operands"
            )
        if self._counts_layers(path):
            every = tuple(range(len(self._leaves[path].shape)))
            role = dataclasses.replace(role, in_axes=(), out_axes=(), copies=every)
        heads = self.large.heads.get(path, ())
        small_heads = self.small.heads.get(self.twin[path], ())
        heads_in, heads_out = self._beside.get(path, (1.0, 1.0))
        carried = 1.0
        if not role.in_axes:  # a bias, of which the sum of all is to stay
            heads_in, carried = 1.0, 1 / heads_in
        return grown(
            role,
            self._shapes[path],
            fractional=self.fractional,
            in_branch=inside,
            on_stream=path in self._on_stream,
            shared=self._shared.get(path, 1.0),
            head_shape=heads if small_heads else (),
            base_head_shape=small_heads if heads else (),
            heads_in=heads_in,
            heads_out=heads_out,
            carried=carried,
        )

    def _is_unknown(self, path: str) -> bool:
        """Whether the program does not use a parameter, and its layer says too little.

        A layer says nothing of branches, which matter where the target has more of it.
        """
        role = self.large.roles[path]
        return role is None or (role.uncalled and path in self._deeper)

    def _unused(self) -> str:
        """Which parameters' use is not known, and what to do."""
        unused = filter(self._is_unknown, self._leaves)
        shapes = {p: self._leaves[p].shape for p in unused if self._growth[p]}
        deep = next((p for p in shapes if p in self._deeper), None)
        return (
            f"the forward pass does not use {some([*shapes])}; pass "
            "call=lambda model, *inputs: ... that does (the loss, for example), "
            + (
                f"so that the multipliers of {deep!r}, of which the target has more, "
                "are known; or, if training never uses them, "
                if deep
                else "or "
            )
            + f"declare the axes: {remedy(shapes)}"
        )

    def _warn_of_uncalled(self) -> None:
        """Warn of kernels whose layer's class says what they do, and no more.

        A loss may multiply what such a layer makes, e.g. by 1 / width.
        """
        roles = self.large.roles
        paths = [
            path
            for path, scale in self._found.items()
            if (role := roles[path]) and role.uncalled and scale.in_axes
            if scale.role is not Role.FIXED
        ]
        if paths:
            warnings.warn(
                f"the forward pass does not call the layers of {some(paths)}. Their "
                "classes say what they sum over, but a constant that other code puts "
                "on their results, e.g. 1 / width in a loss, is not seen: pass "
                "call=lambda model, *inputs: ... that calls them, too",
                stacklevel=4,
            )

    def _last_width(self) -> float:
        """Ratio of the last hidden layer's width: the fan-in of the last readout."""
        last, width = -1, 1.0
        ends, out = -1, 1.0  # of a model without a readout
        for path, scale in self._found.items():
            role = self.large.roles[path]
            if role is None:
                continue
            if scale.role is Role.OUTPUT and role.at > last:
                last, width = role.at, scale.width_in
            elif role.tied_node and role.tied_node.id > last:
                last, width = role.tied_node.id, scale.width_out
            if scale.width_out != 1 and role.at > ends:
                ends, out = role.at, scale.width_out
        return width if last >= 0 else out

    def _kinds(self, of: Callable[[_Model], Iterable[tuple[K, T]]]) -> dict[K, Kind[T]]:
        """What base and target have, by kind; `of` gives pairs (kind, thing)."""
        return kinds(of(self.small), of(self.large))

    def _counted(self) -> list[Branch]:
        """The target's branches whose number is the depth of their stream.

        Notes the ratio of each, if it is not 1.
        """
        groups = self._kinds(
            lambda m: [((m.names(b), m.holds(b)), b) for b in m.branches.all]
        )
        grown = {key for key, kind in groups.items() if kind.growth != 1}
        if not grown:
            return self.large.outermost(self.large.branches.all)
        # A branch that stands once in both, e.g. in the stem, is no depth; nor is one
        # around others whose number does not grow, as the skips of a U-Net.
        names = frozenset().union(*(of for of, _ in grown))
        deep = [b for key in grown for b in groups[key].now]
        outer = self.large.outermost(deep)

        def is_around(b: Branch) -> bool:
            left = self.large.outermost([*deep, b])
            return any(x not in left for x in outer)

        kept = [
            kind
            for key, kind in groups.items()
            if key in grown
            or (
                (key[0] & names or self.small.repeats(kind.then))
                and not any(map(is_around, kind.now))
            )
        ]
        streams = self._deep_streams(
            self.small.outermost([b for kind in kept for b in kind.then]),
            self.large.outermost([b for kind in kept for b in kind.now]),
        )
        for stream in streams:
            before, after = stream.numbers
            first = min(stream.then, key=place)
            if not after:
                raise ValueError(
                    f"the target has no branch like the {first.label} of the base; "
                    "build both by the same code"
                )
            if after < before and not self.fractional:
                raise ValueError(
                    f"the target has {after} residual additions and the base {before} "
                    f"({first.add.line}); the base comes first: swap the two, or pass "
                    "fractional=True if the target is meant to be shallower"
                )
            self._ratios |= dict.fromkeys(map(id, stream.now), stream.growth)
        return sorted((b for stream in streams for b in stream.now), key=place)

    def _deep_streams(
        self, small: list[Branch], large: list[Branch]
    ) -> list[Kind[Branch]]:
        """The branches of both models, by stream, of the streams that get deeper.

        Stages count as one stream, but for those that a kernel without a skip separates
        and that do not get deeper, e.g. a decoder of fixed depth.
        """
        deep: list[Kind[Branch]] = []
        for apart in (True, False):
            number = self._streams(sorted(large, key=place), apart=apart)
            streams: dict[int | None, Kind[Branch]] = {}
            for b in large:
                at = number[self.large.kind(b)]
                streams.setdefault(at, Kind([], [])).now.append(b)
            for b in small:
                key = self.small.kind(b)
                # Else the stream of branches with its parameters on another line.
                like = [at for (_, names), at in number.items() if names & key[1]]
                found = number.get(key, min(like, default=None))
                streams.setdefault(found, Kind([], [])).then.append(b)
            deep = [stream for stream in streams.values() if stream.growth != 1]
            large = [b for stream in deep for b in stream.now]
            small = [b for stream in deep for b in stream.then]
        for stream in deep:
            known = {self.small.names(b) for b in stream.then}
            for b in stream.now:
                if self.large.names(b) not in known:
                    raise ValueError(
                        f"the base has no branch like the {b.label} of the target; "
                        "build a base with at least two blocks of each kind"
                    )
        return deep

    def _streams(self, branches: list[Branch], *, apart: bool) -> dict[_Key, int]:
        """The number of the stream of each kind of branch.

        A stream is that of a chain of branches: a decoder reads the encoder's within
        its branches, and has its own. So has one whose stream starts with the encoder's
        results beside tokens of its own.

        Args:
          branches: of the target, in the order of the program.
          apart: whether kernels outside of the branches separate streams.
        """
        kind_at = {b.add.id: self.large.kind(b) for b in branches}
        axes = self.large.axes
        follows = {x.id for x in reach([b.add for b in branches], axes.uses)}

        def sources(node: Node) -> list[Node]:
            if node.id in kind_at or (apart and self.large.is_kernel(node)):
                return []
            at, parts = node.params.get("dimension"), earlier(node)
            units = at is not None and any(axes.entries(x)[at] for x in node.operands)
            if units or node.op not in ("concatenate", "select_n", "scatter"):
                return parts
            parts = parts[1:] if node.op == "select_n" else parts
            parts = parts[::2] if node.op == "scatter" else parts
            return parts if all(x.id in follows for x in parts if x.data) else []

        found: dict[_Key, int] = {}
        for i, b in enumerate(branches):
            chain = reach([b.trunk], sources)
            linked = {kind_at[x.id] for x in (b.add, *chain) if x.id in kind_at}
            same = {found[key] for key in linked & found.keys()}
            linked |= {key for key, number in found.items() if number in same}
            found |= dict.fromkeys(linked, i)
        return found

    def _added(self, counted: list[Branch]) -> list[Branch]:
        """The target's terms of sums whose number grows. Notes the ratio of numbers.

        From here on they are branches of both models.
        """
        small, large = (self._numbers(m) for m in (self.small, self.large))
        groups = self._kinds(
            lambda m: (
                (self._computed_by(m, b), b) for terms in m.totals.all for b in terms
            )
        )
        ratios: dict[int, float] = {}
        for key, kind in groups.items():
            before, after = small[key], large[key]
            new = [
                b
                for b in kind.now
                if b.add.id not in self._sides[1].adds
                and not any(b.add.id in x.inside for x in counted)
            ]
            if before == after or not new:
                continue
            if before:
                ratios |= dict.fromkeys(map(id, new), after / before)
                self.small.branches.all += kind.then
                self.large.branches.all += kind.now
            elif new[0].layers and after > 1:
                raise ValueError(
                    f"the {new[0].label} is one of {after} in the target, and the base "
                    "has no such sum; build a base with at least two of these layers"
                )
        for model in (self.small, self.large):
            model.branches.all.sort(key=place)
        added = [b for b in self.large.branches.all if id(b) in ratios]
        # Terms that are divided by their number, unless all branches are, too.
        means = [
            b
            for b, like, constant in self._pairs(added)
            if like and alike(constant, 1 / ratios[id(b)])
        ]
        if means and counted:
            ratio = ratios[id(means[0])]
            streams = [x for _, like, x in self._pairs(counted) if like]
            if streams and all(alike(x, 1 / ratio) for x in streams):
                means = []
        self._averaged = means
        self.large.branches.all = [b for b in self.large.branches.all if b not in means]
        added = [b for b in added if b not in means]
        self._ratios |= {id(b): ratios[id(b)] for b in added}
        return added

    def _numbers(self, model: _Model) -> Counter[frozenset[str]]:
        """The most terms of one sum that the same parameters compute."""
        most: Counter[frozenset[str]] = Counter()
        for terms in model.totals.all:
            number: Counter[frozenset[str]] = Counter()
            for branch in terms:
                number[self._computed_by(model, branch)] += branch.runs
            most |= number
        return most

    def _computed_by(self, model: _Model, term: Branch) -> frozenset[str]:
        """The parameters of the nearest kernels before a term, or of a bias."""
        paths = {model.path(end) for end in term.ends if term.end.weight}
        return frozenset(map(self._opened, paths or self._sources(model, term.end)))

    def _inside(self, counted: list[Branch]) -> dict[str, float]:
        """The parameters inside residual branches, and the depth ratio of each.

        Raises:
          ValueError: it is in branches of streams that get deeper by different factors.
        """
        after, before = (m.branches.around for m in (self.large, self.small))
        numbers = [sum(b.add.runs for b in each) for each in (after, before)]
        acts: dict[str, list[Branch]] = {}
        model = self.large
        streams = {x.id for b in counted for x in model.branches.normed(b.trunk)}
        for b in counted:
            for path in model.paths(b):
                # A branch may read another stream, and the gains that act on that.
                if not all(
                    x.node.id in streams for x in model.events(path) if x.is_use
                ):
                    acts.setdefault(path, []).append(b)
        small = self._like(counted)
        for path in self._leaves.keys() - acts.keys():
            now = self._fed(self.large, counted, path)
            then = self._fed(self.small, small, self.twin[path]) if now else None
            # The conditioning of one block; what all blocks share is outside.
            if now and then and now[0] == then[0]:
                acts[path] = now[1]
        found = {path: self._ratio_of(path, acts[path]) for path in acts}
        if numbers[0] != numbers[1]:
            for path in (p for b in after for p in self.large.paths(b)):
                found.setdefault(path, self._depth)
        self._find_repeated(found, counted, small)
        return found

    def _like(self, chosen: list[Branch]) -> list[Branch]:
        """The branches of the base with parameters like those of the target's."""
        names = {self.large.names(b) for b in chosen}
        found = [b for b in self.small.branches.all if self.small.names(b) in names]
        outer = self.small.outermost(found)
        return [b for b in found if b in outer or b.trunk is b.end]

    def _find_repeated(
        self, inside: Mapping[str, float], counted: list[Branch], small: list[Branch]
    ) -> None:
        """Find what all layers share, and what acts on a stream itself in each."""
        depths = [m for m in self._ratios.values() if not alike(m, 1)]
        within = self.large.inside(counted), self.small.inside(small)
        outside = self.large.outside(counted), self.small.outside(small)
        for path in self._leaves:
            counts = within if path in inside else outside
            now, then = (x.get(self._opened(path)) for x in counts)
            if not (now and then):
                continue
            uses, layers = now[0] / then[0], now[1] / then[1]
            is_shared = alike(layers, 1)  # one for all layers
            if path in inside:
                if is_shared and not alike(uses, 1):
                    self._shared[path] = inside[path]
            elif any(alike(uses, m) for m in depths):
                self._on_stream[path] = uses
                self._shared[path] = uses if is_shared else 1.0

    def _ratio_of(self, path: str, branches: list[Branch]) -> float:
        """The depth ratio of the branches that a parameter is in."""
        # A layer's branch, rather than what it adds to a sum over layers.
        own = [b for b in branches if b.trunk is not b.end] or branches
        first, *rest = own
        other = next((b for b in rest if not alike(*map(self._deep, (b, first)))), None)
        if other is not None:
            raise ValueError(
                f"{path!r} is in the {first.label}, whose stream gets "
                f"{self._deep(first):g} times as deep, and in the {other.label}, whose "
                f"gets {self._deep(other):g} times as deep, so that it needs two "
                "multipliers; build a base whose streams have the same ratio of depths "
                "to the target's"
            )
        return self._deep(first)

    def _deep(self, branch: Branch) -> float:
        """How much deeper the stream of a branch gets."""
        return self._ratios.get(id(branch), 1.0)

    @staticmethod
    def _fed(
        model: _Model, branches: list[Branch], path: str
    ) -> tuple[float, list[Branch]] | None:
        """The branches through which alone a parameter acts; how many of each copy."""
        events = [e for e in model.events(path) if not e.node.backward]
        fed: dict[int, Branch] = {}
        param = model.reading.path_of.index(path)
        for node in (e.node for e in events if e.is_use):
            found = model.branches.feeding(node, param, branches)
            if found is None:
                return None
            fed |= {b.add.id: b for b in found}
        feeds, program = [*fed.values()], model.reading.program
        loops = {e.node.loop for e in events if e.node.op == "scan_in"}
        loops = {loop for loop in loops if not program.is_map(loop)}
        # What a layer passes on, beyond its loop, is read by all blocks.
        if loops and not all(loops & {*program.around(b.add.loop)} for b in feeds):
            return None
        number = sum(b.runs for b in feeds) / model.copies(path)
        return (number, feeds) if feeds else None

    @functools.cached_property
    def _deeper(self) -> dict[str, float]:
        """Parameters of layers that the base has fewer of: {path: ratio}."""
        ratios: dict[str, float] = {}
        lists = self._kinds(
            lambda m: [(self._opened(path), path) for path in m.reading.leaves]
        )
        for kind in lists.values():
            if len(kind.now) != len(kind.then):
                ratio = len(kind.now) / len(kind.then)
                deeper = [path for path in kind.now if path not in self._beside]
                ratios |= dict.fromkeys(deeper, ratio)
        for path in self._leaves:
            for event in self.large.events(path):
                if event.node.op == "scan_in" and not event.is_use:
                    small, large, _ = self._shapes[path]
                    role = self.large.roles[path]
                    copies = () if role is None else role.copies
                    for axis in set(event.axes(Use.COPY)) & set(copies):
                        if small[axis] != large[axis]:
                            ratios[path] = large[axis] / small[axis]
        return ratios

    def _check_only_sums_deepen(self, added: list[Branch]) -> None:
        """Raise a `ValueError` if layers that are no terms of a sum are in a row."""
        inside = self._inside(added)
        for path, ratio in self._deeper.items():
            if path not in inside:
                raise ValueError(
                    f"the target has {ratio:g} times as many layers like {path!r} as "
                    f"the base and adds their results up (the {added[0].label}), but "
                    "has no residual branch: x + f(x). Build both with the same depth, "
                    "or add each layer to its input: x = x + f(x)"
                )

    def _plain_depth(self, point: Parametrization | None) -> float:
        """The depth ratio of a network without residual branches."""
        path, ratio = next(iter(self._deeper.items()))
        if point is None or (point.branches_only and point.name not in ("sp", "mup")):
            raise ValueError(
                f"the target has {ratio:g} times as many layers like {path!r} as the "
                "base, and the program has no residual branch: x + f(x). Pass "
                "parametrization='mup' for a network without residual branches, or "
                "build both with the same depth"
            )
        return ratio

    def _follow_branches(
        self, counted: list[Branch], point: Parametrization | None
    ) -> Parametrization | None:
        """Check the branches' constants, and carry them where there are none."""
        pairs = self._pairs(counted)
        parts, found = self._parts_of_widths(pairs, point)
        for (branch, like, _), part in zip(pairs, parts, strict=True):
            if like:
                self._give_to_widths(branch, like, *part)
        ratios = [r / own for (*_, r), (own, _) in zip(pairs, parts, strict=True)]
        if not self._ratios:
            for branch, ratio in zip(counted, ratios, strict=True):
                if not alike(ratio, 1):
                    raise ValueError(
                        f"the {branch.label} is multiplied by "
                        f"{ratio:.4g} times as much in the target as in the base, but "
                        "both have the same depth; use the same constant"
                    )
            return point
        point = found
        expected = [self._deep(b) ** -point.alpha for b in counted]
        if not all(isinstance(x, float) for x in expected):
            return point
        multiplied = list(map(alike, ratios, expected))
        plain = [alike(r, 1) for r in ratios]
        if not (all(multiplied) or all(plain)):
            i = (multiplied if any(multiplied) else plain).index(False)
            some = next(iter(self.large.paths(counted[i])), "")
            raise ValueError(
                f"the {counted[i].label}"
                + (f", with {some!r}," if some else "")
                + f" has a constant {ratios[i]:.4g} times that of the base; "
                f"{point.label} needs {expected[i]:.4g}, i.e. (depth / base depth)**-"
                f"{point.alpha:g}, on every branch, or 1 on every branch"
            )
        for branch, ratio in zip(counted, expected, strict=True):
            if all(multiplied):
                self._check_average(branch, ratio)
            else:
                self._carry(branch, point, ratio)
        return point

    def _check_average(self, branch: Branch, ratio: float) -> None:
        """Raise a `ValueError` if a deep (1 - c) x + c f(x) forgets its start."""
        right = 1 / self._deep(branch)
        if branch.is_average and not alike(ratio, right):
            raise ValueError(
                f"the {branch.label} is (1 - c) x + c f(x), and its c is {ratio:.4g} "
                "times that of the base: the share of the first layers vanishes with "
                f"depth. Let c be proportional to 1 / depth (here {right:.4g} "
                "times that of the base), or write (1 - c**2)**0.5 * x + c * f(x)"
            )

    def _pairs(self, chosen: list[Branch]) -> list[tuple[Branch, Branch | None, float]]:
        """Branches, their counterparts in the base, and the ratios of constants."""
        grouped = kinds(
            (
                ((self.small.kind(b), self.small.evaluated(b)), b)
                for b in self._like(chosen)
                if b.constant
            ),
            (((self.large.kind(b), self.large.evaluated(b)), b) for b in chosen),
        )
        found: dict[int, tuple[Branch, Branch | None, float]] = {
            id(b): (b, None, 1.0) for b in chosen
        }
        for kind in grouped.values():
            ratios = kind.ratios(lambda now, then: now.constant / then.constant)
            if ratios:
                kind.check_known(ratios, kind.now[0].add)
            for (now, then), ratio in zip(kind.twins, ratios, strict=True):
                found[id(now)] = now, then, ratio
        return [*found.values()]

    def _ends(self, branch: Branch) -> set[str]:
        return {self.large.path(end) for end in branch.ends}

    def _parts_of_widths(
        self,
        pairs: Sequence[tuple[Branch, Branch | None, float]],
        point: Parametrization | None,
    ) -> tuple[list[tuple[float, bool]], Parametrization]:
        """The parts of branches' constants that belong to widths rather than to depth.

        Where widths and depth grow by the same ratio, the rest of all constants says
        which: all are that of the parametrization, or one.

        Returns:
          Each part, and whether it is that of the kernels which end the branch; and the
          parametrization, or the default where none has the rest of the constants.
        """
        one = max((b.layers for b, *_ in pairs), default=0) == 1
        default = point or parametrization("depth_mup" if one else "completep")
        points = [point] if point else map(parametrization, ("depth_mup", "completep"))
        options = [self._of_widths(*pair) for pair in pairs]
        for power, named in [(0.0, default), *((-p.alpha, p) for p in points)]:
            found = [
                next((x for x in each if alike(r / x[0], self._deep(b) ** power)), None)
                for (b, _, r), each in zip(pairs, options, strict=True)
            ]
            parts = [x for x in found if x is not None]
            if len(parts) == len(found):
                return parts, named
        return [(1.0, False)] * len(pairs), default

    def _of_widths(
        self, branch: Branch, like: Branch | None, ratio: float
    ) -> list[tuple[float, bool]]:
        """The parts of a branch's constant that may belong to widths.

        A sum of products of activations owns the factor that it needs, or its root, up
        to the next kernel. A kernel owns the inverse root of its fan-in, as in the NTK
        parametrization, and what its inputs are divided by, as a softmax's entries. It
        carries the inverse, as it does outside of branches.
        """
        options = [(1.0, False)]
        if like is None or alike(ratio, 1):
            return options
        sums = self._sums_before(branch, like)
        options += [(n**power, False) for _, n, _ in sums for power in (-1.0, -0.5)]
        units = [[e.unit for e in b.ends if e.is_kernel] for b in (branch, like)]
        kernels = [self.large.path(end) for end in branch.ends if end.is_kernel]
        if kernels and self._divides_by_roots(branch):
            fan_in = max(self._found[path].width_in for path in kernels)
            options.insert(0, (fan_in**-0.5, True))
        if all(units) and units[0][0] != units[1][0]:
            options.insert(0, (units[0][0] / units[1][0], True))
        return options

    def _give_to_widths(
        self, branch: Branch, like: Branch, own: float, of_kernels: bool
    ) -> None:
        """Let the end of a branch, or its sums, have their part of its constant."""
        for end in branch.ends if of_kernels else ():
            if end.is_kernel:
                self._let_carry(self.large.path(end), branch.ends, carried=1 / own)
        for now, _, constant in self._sums_before(branch, like):
            self._of_branches[now.node.id] = constant / (1 if of_kernels else own)
        self._check_ends_agree(branch, like, own)

    def _sums_before(
        self, branch: Branch, like: Branch
    ) -> list[tuple[Sum, float, float]]:
        """Sums within a branch that share constants with the kernels that end it.

        Returns:
          Each with its growth, and the ratio of these constants to those of the base.
        """
        found = []
        now, then = self._sums_of(self.large, branch), self._sums_of(self.small, like)
        for (one, later), (other, before) in zip(now, then, strict=False):
            if one.size != other.size and not alike(later, before):
                found.append((one, one.size / other.size, later / before))
        return found

    @staticmethod
    def _sums_of(model: _Model, branch: Branch) -> list[tuple[Sum, float]]:
        """Sums within a branch, with their constants before the kernel that ends it."""
        inputs = [
            model.branches.trunk(x)[0]
            for end in branch.ends
            if end.is_kernel
            for x in end.node.operands
            if x.data
        ]
        return [
            (each, model.sums.later(each, inputs[0]))
            for each in model.sums.all
            if inputs and each.node.id in branch.inside
        ]

    def _divides_by_roots(self, branch: Branch) -> bool:
        """Whether all other kernels are divided by the root of their fan-in.

        Those of the branch, or if it has none, those of the model.
        """
        inside = set(self.large.paths(branch)) & self._roots.keys()
        found = [self._roots[path] for path in inside or self._roots]
        return bool(found) and all(found)

    @functools.cached_property
    def _roots(self) -> dict[str, bool]:
        """Which kernels, but those that end branches, are divided by such a root."""
        ends = {path for each in self.large.branches.all for path in self._ends(each)}
        found = {}
        for now, then in itertools.chain(*(kind.twins for kind in self._layers())):
            fan_in = self._found[now.path].width_in
            if fan_in != 1 and now.path not in ends:
                ratio = self._ratio(now.node, then.node)
                found[now.path] = alike(ratio, fan_in**-0.5)
        return found

    def _check_ends_agree(self, branch: Branch, twin: Branch, own: float) -> None:
        """Raise a `ValueError` if only a part of a branch is multiplied.

        `own` is the part of the constant that belongs to its kernels alone.
        """
        grouped = kinds(
            *(
                [(self._opened(m.path(e)), e) for e in b.ends if e.factor]
                for m, b in ((self.small, twin), (self.large, branch))
            )
        )
        ratios = {
            self.large.path(now): (now.factor * now.unit)
            / (then.factor * then.unit)
            / (own if now.is_kernel else 1.0)
            for kind in grouped.values()
            for now, then in kind.twins
        }
        if ratios and not alike(max(ratios.values()), min(ratios.values())):
            low, *_, high = sorted(ratios, key=ratios.__getitem__)
            raise ValueError(
                f"the {branch.label} is multiplied in parts: "
                f"{high!r} by {ratios[high]:.4g} times as much as in the base, {low!r} "
                f"by {ratios[low]:.4g}; multiply the whole branch, biases included"
            )

    def _carry(
        self,
        branch: Branch,
        point: Parametrization,
        expected: float,
    ) -> None:
        advice = (
            f"multiply this branch by (depth / base depth)**-{point.alpha:g} (here "
            f"{expected:.4g}), and all others, too"
        )
        if branch.failure is not None:
            line = branch.failure.line or branch.add.line
            raise ValueError(
                f"the {branch.label} does not end in parameters "
                f"that could carry its multiplier, but in {branch.failure.op!r} "
                f"({line}); {advice}"
            )
        every = self.large.branches.all
        nodes = {e.node.id for b in every for e in b.ends}
        readers: dict[tuple[int, int], str] = {}
        for path in map(self.large.path, branch.ends):
            stops = {
                (b.add.id, -1 if b.end.weight else b.end.id)  # -1: a bias on a sum
                for b in every
                if path in self._ends(b)
            }
            beside = [e.node for e in branch.ends if e.is_kernel and e.node.data]
            others = [e.node for e in branch.ends if self.large.path(e) == path]
            others = [x for x in beside if x not in others]
            elsewhere = self._elsewhere({path}, nodes, stops, others)
            if elsewhere is not None and (readers := self._readers(branch)):
                stops |= readers.keys()
                elsewhere = self._elsewhere({path}, nodes, stops, others)
            if elsewhere is not None:
                raise ValueError(
                    f"{path!r} ends the {branch.label}, but is "
                    f"also used elsewhere ({elsewhere.line}), so that it cannot carry "
                    f"the branch's multiplier; {advice}"
                )
            self._let_carry(path, branch.ends, in_branch=True, ends_branch=True)
        for path in {*readers.values()}:
            self._multiply(path, 1 / expected)

    def _readers(self, branch: Branch) -> dict[tuple[int, int], str]:
        """Kernels that read a branch's result before it is added, and nothing else.

        E.g. those of nodes in a graph, whose edges have a stream of their own. They
        undo the multiplier that the end of the branch carries.

        Returns:
          {(id of the product, id of what it reads): path}; {} where other operations
          read the result, too.
        """
        found: dict[tuple[int, int], str] = {}
        uses, reached = self.large.axes.uses, [self.large.branches.trunk(branch.end)[0]]
        for node in reached:  # which gets longer
            for user in uses(node):
                onto = user.op == "scatter-add"  # zeros, at places that data choose
                others = user.operands[:1] if onto else user.operands
                alone = not any(x.data or x.weight for x in others if x is not node)
                stored = map(origin, user.operands)
                kernels = [y.param for y in stored if y.param is not None]
                if user is branch.add:
                    continue
                if is_kernel(user) and kernels:
                    path = self.large.reading.path_of[kernels[0]]
                    if sum(e.is_use for e in self.large.events(path)) > 1:
                        return {}
                    found[user.id, node.id] = path
                elif alone and user.op in (*MOVES, *LINEAR, "mul", "scatter-add"):
                    reached.append(user)
                else:
                    return {}
        return found

    def _elsewhere(
        self,
        paths: Iterable[str],
        nodes: Set[int],
        stops: Set[tuple[int, int]],
        others: Collection[Node] = (),
    ) -> Node | None:
        """A use of parameters apart from some nodes, or one with a way around `stops`.

        Parameters can carry a multiplier for what they are used for alone, other than
        for `others`: factors of the sums that need it, or kernels at a branch's end.
        """
        return next(
            (
                event.node
                for path in paths
                for event in self.large.events(path)
                if event.is_use
                and any(x.weight for x in event.node.operands)  # not rows of before
                and (
                    event.node.id not in nodes
                    or self.large.branches.escapes(event.node, stops, others)
                    is not None
                )
            ),
            None,
        )

    @functools.cached_property
    def _sums(self) -> list[Kind[Sum]]:
        """The sums of products of activations that base and target have."""
        found = self._kinds(lambda m: [(self._key(m, x), x) for x in m.sums.all])
        return [kind for kind in found.values() if kind.then and kind.now]

    def _follow_sums(self, point: Parametrization | None) -> list[Sum]:
        """Check sums of products of activations; a factor's parameters carry the rest.

        Those that layers add to the ones of the layers before, e.g. attention logits,
        also need the multiplier of residual branches. Returns those over axes that
        grow, other than means.
        """
        growing, lacking = [], []
        for kind in self._sums:
            share, terms = 1.0, self._terms(kind)
            if point is not None and any(
                alike(terms, x) for x in self._ratios.values()
            ):
                share = terms**-point.alpha
            if share == 1 and len({x.size for x in (*kind.then, *kind.now)}) < 2:
                continue
            ratios = kind.ratios(functools.partial(self._lacks, share=share))
            kind.check_known(ratios, kind.now[0].node)
            for (each, then), wanted in zip(kind.twins, ratios, strict=True):
                self._check_generated(each, then)
                growth = each.size / then.size / share
                if growth == 1:
                    continue
                if not alike(wanted, 1):
                    lacking.append((each, wanted, growth))
                    self._summed_over_layers |= {each.node.id} if share != 1 else set()
                if not alike(wanted, 1) or len(set(each.sides)) > 1:
                    growing.append(each)
        lacking.sort(key=lambda each: each[0].node.id)
        carried: set[int] = set()
        for each, wanted, growth in lacking:
            if each.node.id not in carried:
                carried |= self._carry_sum(each, wanted, growth, lacking)
        return growing

    def _check_generated(self, now: Sum, then: Sum) -> None:
        """Raise a `ValueError` for a kernel that a parameter makes, if a norm follows.

        Where the size of the kernel has no effect, only the ratio of its initial size
        and its rate matters. It is the root of the fan-in, which a multiplier cannot
        give to a parameter whose own fan-in is another one.
        """
        if now.size == then.size or self.large.sums.constant(now) is not None:
            return
        for k, (side, other) in enumerate(zip(now.sides, then.sides, strict=True)):
            labels = self.large.axes.entries(side)
            into, out = (
                {
                    axis
                    for index in indices(now.node)
                    if set(index.axes) == among and (index.out is None) == summed
                    for a in (index.axes[k],)
                    if side.shape[a] != other.shape[a]
                    for axis in labels[a]
                }
                for among, summed in (({0, 1}, True), ({k}, False))
            )
            for param in {p for p, _ in into} & {p for p, _ in out}:
                advice = (
                    "store it with an axis for the inputs and one for the outputs of "
                    "the kernel, e.g. (k, n, m) in place of (k, n * m), and let k not "
                    "grow"
                    if into & out
                    else "compute the kernel from a fixed number of values, or leave "
                    "the norm out"
                )
                raise ValueError(
                    f"{self.large.reading.path_of[param]!r} makes a kernel for each "
                    f"input ({now.node.line}) whose result is normalized: its initial "
                    f"size and its rate need different powers of the width; {advice}"
                )

    def _settle_states(self) -> None:
        """Find whether what states start from is a kernel, or has entries of size one.

        It is a kernel where what data add is as small as a kernel, e.g. (k v / n) in
        linear attention, or the steps of an inner optimizer. Otherwise their sum needs
        a factor of 1/n beside queries or results, and is an activation.
        """
        for now, then in itertools.chain(*(kind.twins for kind in self._sums)):
            at, params = self.large.axes.states.get(now.node.id, (0, ()))
            if not params or now.size == then.size:
                continue
            term, _ = self.large.branches.gained(now.sides[at])
            other, _ = self.small.branches.gained(then.sides[at])
            ratio = self._side(self.large, term)[1] / self._side(self.small, other)[1]
            step = self.large.axes.is_step(term)
            if step or alike(ratio, then.size / now.size):
                self._of_kernels.add(now.node.id)
                continue
            for param in params:
                path = self.large.reading.path_of[param]
                for model, name in ((self.large, path), (self.small, self.twin[path])):
                    role = model.roles[name]
                    if role is not None:
                        axes = tuple(sorted((*role.in_axes, *role.out_axes)))
                        model.roles[name] = dataclasses.replace(
                            role, in_axes=(), out_axes=axes
                        )

    def _terms(self, kind: Kind[Sum]) -> float:
        """Growth of the number of sums that are added up."""
        then, now = (
            max(x[every[0].node.spot] for x in m.sums.totals.values() or [Counter()])
            for m, every in ((self.small, kind.then), (self.large, kind.now))
        )
        return now / then if now and then else 1.0

    def _lacks(self, now: Sum, then: Sum, share: float = 1.0) -> float:
        """The factor that a sum needs beside the constants of the program."""
        if now.node.id in self._of_kernels:
            return 1.0
        scale, first = self.large.sums.constant(now), self.small.sums.constant(then)
        if scale is None or first is None:
            return 1.0
        ratio = scale / first
        if len(set(now.sides)) == 1 and alike(then.size / now.size, ratio):
            return 1.0  # a mean of squares, e.g. of a norm
        for one, other in zip(now.sides, then.sides, strict=True):
            ratio *= self._side(self.large, one)[1] / self._side(self.small, other)[1]
        ratio /= self._of_branches.get(now.node.id, 1.0)
        return share * then.size / now.size / ratio

    def _carry_sum(
        self,
        of: Sum,
        wanted: float,
        growth: float,
        lacking: list[tuple[Sum, float, float]],
    ) -> set[int]:
        """Let the parameters of one factor carry what a sum lacks; ids of such sums."""
        for side in self.large.sums.queries_first(of):
            paths = self._params(side)
            every = [self._params(x) for s, _, _ in lacking for x in s.sides]
            # With the other segments of a value, where another sum takes them all.
            paths = paths.union(*(x for x in every if x & paths))
            same = [(s, w) for s, w, _ in lacking if paths & self._all_params(s)]
            equal = all(alike(w, wanted) for _, w in same)
            if equal and self._carried_by(paths, wanted, [s for s, _ in same]):
                return {s.node.id for s, _ in same}
        if of.node.id in self._summed_over_layers:
            missing = (
                f"{wanted:.4g} in the target. Layers add such sums up, so that they "
                "also need the multiplier of residual branches, e.g. base depth / depth"
            )
        else:
            power = math.log(wanted) / -math.log(growth)
            missing = "(number of terms in the base / in the target)"
            missing += "" if alike(wanted, 1 / growth) else f"**{power:.4g}"
            missing += ", e.g. divide logits by the head dimension instead of its root"
        raise ValueError(
            f"the sum over products of activations at {of.node.line} has {growth:g} "
            f"times as many terms in the target as in the base, and needs a factor of "
            f"{1 / growth:.4g}, of which {wanted:.4g} is missing. No parameter of its "
            f"factors can carry it: multiply the sum by {missing}"
        )

    def _carried_by(
        self, paths: frozenset[str], factor: float, sums: list[Sum]
    ) -> bool:
        """Whether parameters can carry a factor of sums; let them, if they can."""
        sides = [side for each in sums for side in each.sides]
        ends = {e.node.id for x in sides for e in self._side(self.large, x)[0]}
        own = {x.id for x in sides if frozenset() < self._params(x) <= paths}
        powers = {sum(x.id in own for x in s.sides) for s in sums}
        nodes = ends | {each.node.id for each in sums}
        stops = {(each.node.id, -1) for each in sums}
        others = [x for x in sides if x.id not in own]
        if not paths or len(powers) > 1:
            return False
        if self._elsewhere(paths, nodes, stops, others):
            return False
        (power,) = powers
        used = [end for x in sides for end in self._side(self.large, x)[0]]
        for path in paths:
            self._multiply(path, factor ** (1 / power), used)
        return True

    def _multiply(self, path: str, factor: float, ends: Iterable[End] = ()) -> None:
        self._let_carry(path, ends, carried=self._found[path].carried * factor)

    def _let_carry(self, path: str, ends: Iterable[End], **changes: Any) -> None:
        """Let a parameter carry a multiplier where it is used at one of some ends.

        With a number that is added to it.
        """
        scale = self._found[path]
        offsets = {e.offset for e in ends if self.large.path(e) == path}
        if scale.ends_branch or scale.carried != 1:
            offsets.add(scale.offset)
        if len(offsets) > 1:
            raise ValueError(
                f"{path!r} is used with several numbers added to it, so that it can "
                "carry no multiplier of a branch or of logits; multiply them yourself"
            )
        changes["offset"] = next(iter(offsets), 0.0)
        self._found[path] = dataclasses.replace(scale, **changes)

    def _params(self, side: Node) -> frozenset[str]:
        return frozenset(self.large.path(e) for e in self._side(self.large, side)[0])

    def _all_params(self, of: Sum) -> frozenset[str]:
        return frozenset().union(*map(self._params, of.sides))

    def _side(self, model: _Model, node: Node) -> tuple[list[End], float]:
        """The parameters that a factor is linear in, and its constant."""
        try:
            ends = model.branches.ends(node)
        except Failure:
            term, accumulates = model.branches.gained(node)
            if accumulates:
                return self._side(model, term)
            return [], model.branches.size(node)
        kernels = [e for e in ends if e.is_kernel] or ends
        return ends, kernels[0].factor * kernels[0].unit

    def _key(self, model: _Model, of: Sum) -> tuple[Any, ...]:
        """What the same sum in another model has in common."""
        exact = [frozenset(self._sources(model, x)) for x in of.sides]
        return (
            of.node.spot,
            of.node.op,
            # Layers may read those of all layers before.
            *(frozenset(map(self._opened, paths)) for paths in exact),
            model.evaluation((of.node.spot, of.node.op, *exact), of.node),
        )

    def _sources(self, model: _Model, node: Node, *, linear: bool = False) -> set[str]:
        """The parameters of the nearest kernels before a node.

        If `linear`, only those whose constants multiply the node, too.
        """

        def sources(at: Node) -> list[Node]:
            if model.is_kernel(at):
                return []
            if not linear:
                return [x for x in earlier(at) if x.data]
            same = at.op in MOVES or at.op in LINEAR or at.op in _MULTILINEAR
            return [x for x in at.operands if x.data] if same else []

        return {
            model.reading.path_of[param]
            for at in reach([node], sources)
            for x in at.operands
            if x.weight and at.data
            for axes in model.axes.labels.get(x.id, ())
            for param, _ in axes
        }

    def _follow_readouts(self, sums: list[Sum]) -> None:
        """Constants beside first and last layers are forward multipliers of theirs."""
        # Constants at the ends of branches and on logits were looked at before.
        every = [*self.large.branches.all, *self._averaged]
        known = {self.large.path(e) for b in every for e in b.ends}
        for each in sums:
            known |= self._all_params(each)
        sides = [side for each in sums for side in each.sides]
        for node in (*(b.end for b in every), *sides):
            known |= self._sources(self.large, node, linear=True)
        for kind in self._layers():
            ratios = kind.ratios(lambda now, then: self._ratio(now.node, then.node))
            for (role, before), ratio in zip(kind.twins, ratios, strict=True):
                scale, path = self._found[role.path], role.path
                if role.tied_node:
                    self._follow_tied(path, path in known)
                if role.tied_node or scale.role not in _POWERS:
                    continue
                assert role.node is not None
                if path in known:
                    ratio = 1.0
                else:
                    kind.check_known(ratios, role.node)
                parts = self._parts_with(path, role.node)
                if self.large.sums.is_scale_free(*parts):  # weight normalization
                    if parts[0] is self._param(path):
                        self._follow_norm(role, before, ratio)
                elif not alike(ratio, 1):
                    self._multiply(path, 1 / ratio)

    def _layers(self) -> Iterable[Kind[Found]]:
        """The layers of parameters of the same name and shape, in their order."""

        def layers(model: _Model) -> Iterator[tuple[Hashable, Found]]:
            for role in sorted(filter(None, model.roles.values()), key=lambda x: x.at):
                if role.node is not None:
                    shape = model.reading.leaves[role.path].shape
                    if model is self.large:
                        shape = self._shapes[role.path][0]
                    yield (self._opened(role.path), shape), role

        return self._kinds(layers).values()

    def _follow_norm(self, role: Found, before: Found, ratio: float) -> None:
        """Entries of a normalized kernel have a size of their own: its gain carries.

        Args:
          role, before: of the kernel, and of that of the base.
          ratio: of the constants on the layer.

        Raises:
          ValueError: the size is not that of the kernel's role, and there is no gain.
        """
        node, then = role.node, before.node
        assert node is not None
        assert then is not None
        after, first = self.large.branches.norm(node), self.small.branches.norm(then)
        if not (after and first) or self.large.sums.is_scale_free(node):
            return
        scale = self._found[role.path]
        right = scale.width_in ** -_POWERS[scale.role]
        rest = right / ratio * first / after
        if alike(rest, 1):
            return
        weight = next(x for x in node.operands if x.weight)
        paths = self._params(weight) - {role.path}
        if paths and not self._elsewhere(paths, {node.id}, {(node.id, -1)}, ()):
            for path in paths:
                self._multiply(path, rest)
            return
        width = max(scale.width_in, scale.width_out)
        raise ValueError(
            f"{role.path!r} is divided by a norm, so that its entries grow by "
            f"{ratio * after / first:.4g} and not by {right:.4g}: multiply the result "
            f"of the product ({role.line}) by {rest:.4g}, i.e. by (width / base width)"
            f"**{math.log(rest) / math.log(width):.4g}"
        )

    def _param(self, path: str) -> Node:
        return self.large.reading.program.params[self.large.reading.path_of.index(path)]

    def _parts_with(self, path: str, node: Node) -> list[Node]:
        """The parameters that are joined to one kernel, in the order of the model."""
        reading, labels = self.large.reading, self.large.axes.labels
        own = reading.path_of.index(path)
        places: dict[int, list[Any]] = {own: []}
        weights = [labels.get(x.id, ()) for x in node.operands if x.weight]
        for i, axes in enumerate(itertools.chain(*weights)):
            for param, axis in axes:
                places.setdefault(param, []).append((i, axis))
        alike = [i for i in sorted(places) if places[i] == places[own]]
        return [reading.program.params[i] for i in alike]

    def _ratio(self, now: Node | None, then: Node | None) -> float:
        """The constant on a layer of the target, over that of the base."""
        assert now is not None
        assert then is not None
        one, other = self._constant(self.large, now), self._constant(self.small, then)
        if not other:  # a term that is switched off
            return 1.0 if not one else math.inf
        return one / other

    @staticmethod
    def _constant(model: _Model, node: Node) -> float:
        """The constants on the result and on the input of a layer."""
        factor = model.branches.outer(node) * model.branches.on_weight(node)
        data = [x for x in node.operands if x.data]
        if node.op in (*PRODUCTS, "mul") and data:
            factor *= model.branches.unit(data[0])
            if not model.branches.belongs_to_layer(data[0]):
                factor *= model.branches.inner(data[0])
        return factor

    def _follow_tied(self, path: str, known: bool) -> None:
        """A tied readout needs a multiplier of 1/m, which the last norm may carry.

        Args:
          path: the table.
          known: whether the constants on its rows were looked at before.
        """
        scale, role = self._found[path], self.large.roles[path]
        before, width = self.small.roles[self.twin[path]], scale.width_out
        if scale.role is not Role.INPUT or width == 1:
            return
        assert role is not None
        assert role.tied_node is not None
        assert before is not None
        now, then = role.tied_node, before.tied_node
        assert then is not None
        if not known:
            self._multiply(path, 1 / self._ratio(role.node, before.node))
        # The table carries what multiplies it, also as the readout.
        ratio = self._ratio(now, then) * self._found[path].carried
        for m, at, power in ((self.large, now, 1), (self.small, then, -1)):
            table = next(x for x in at.operands if x.weight)
            ratio *= m.branches.unit(table) ** power  # 1 / n^½ for unit vectors
        if alike(ratio, 1 / width) or self.large.sums.only_chooses(now):
            return
        if self._parts_with(path, now)[0] is not self._param(path):
            return  # the first part looks after the logits
        data = next(x for x in now.operands if x.data)
        rest = 1 / width / ratio
        logits = [
            Sum(x, (side,), round(width))
            for x in (event.node for event in self.large.events(path))
            if x.spot == now.spot and x.op == now.op  # also of a second batch
            for side in x.operands
            if side.data
        ]
        if not self._carried_by(self._params(data), rest, logits):
            other = "".join(
                f"; or, if the loss uses these logits alone, return only them by "
                f"call=lambda model, *inputs: ..., so that {name!r} can carry it"
                for name in sorted(self._params(data))[:1]
            )
            raise ValueError(
                f"the embedding {path!r} is also the readout ({now.line}); its logits "
                f"need a multiplier of base width / width (here {1 / width:.4g}), of "
                f"which they have {ratio:.4g}: multiply the logits, or the input of "
                f"this product, by {rest:.4g}, i.e. by (base width / width)**"
                f"{math.log(rest) / -math.log(width):.4g}{other}"
            )

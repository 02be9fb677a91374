"""Residual branches of a program: their number, constants, and last parameters."""

import contextlib
import dataclasses
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import Any

from .again import Again, Earlier
from .axes import Axes
from .factors import PARTS, End, Factors, Failure
from .links import SUM, index_of
from .program import MOVES, PRODUCTS, Node, Program, Spot, earlier, origin, reach

_NONLINEAR = frozenset(
    """
    abs atan2 cos erf erf_inv exp exp2 expm1 floor integer_pow log log1p logistic max
    min pow round sign sin sqrt tanh
    """.split()  # noqa: SIM905
)
_SUMS = ("add", "scatter-add")  # the latter to some rows of a stream
# An axis of a value, and where rows along it begin and end; None for all rows.
Rows = tuple[()] | tuple[int, int, int] | None


@dataclasses.dataclass(frozen=True)
class Branch:
    """One residual addition, x + f(x), or one term of a sum over layers (`Totals`).

    Attributes:
      add: the addition.
      trunk: the value that both sides are computed from; for a term, its end.
      end: the branch's result.
      inside: ids of the nodes between trunk and end.
      runs: number of additions: more than one in a loop over layers.
      ends: the parameters that the branch ends in.
      failure: why it ends in none; None if it does.
      constant: the known number that multiplies the branch.
      layers: number of kernels on the longest path through the branch.
      skip: the known number that multiplies the stream.
    """

    add: Node
    trunk: Node
    end: Node
    inside: frozenset[int]
    runs: int
    ends: tuple[End, ...]
    failure: Node | None
    constant: float
    layers: int
    skip: float = 1.0

    @property
    def label(self) -> str:
        """What it is, and its line, for messages."""
        kind = (
            "term of a sum over layers" if self.trunk is self.end else "residual branch"
        )
        return f"{kind} at {self.add.line}"


class Branches:
    """Finds the residual branches of a program.

    Attributes:
      factors: of the program's values.
      all: the branches, in the order of the program.
      around: additions of what branches added to another stream, e.g. y + g (h - x) for
        h = x + f(x), and of what layers added before.
      again: (addition, operand) of what layers added before.
      whole: the additions of all that earlier layers added, which nothing damps, e.g.
        of v = v + f(x) to x: their number, and the constant, by their place.
      unlike: the additions of which only some layers' add something again: their
        number, by their place.
      learned: the ids of all values that parameters change.
    """

    def __init__(self, program: Program, axes: Axes):
        self._program, self._axes = program, axes
        self.factors = Factors(program, axes)
        self._dominator: dict[int, Node | None] = {}
        self._depth: dict[int, int] = {}
        self._dominate()
        self._trunks: dict[int, Node] = {}
        self._outputs = {x.id for x in program.outputs.values()}
        self.learned: set[int] = set()
        for node in program.nodes:
            if node.op == "param" or any(x.id in self.learned for x in earlier(node)):
                self.learned.add(node.id)
        self._spots = Counter(x.spot for x in program.nodes if x.op == "sub")
        self.all: list[Branch] = []
        self.around: list[Branch] = []
        self.again: set[tuple[int, int]] = set()
        self.whole: dict[Spot, tuple[int, float]] = {}
        self.unlike: dict[Spot, int] = {}
        self._across: set[Spot] = set()  # where one stream adds to another
        for node in program.nodes:
            branch = self._branch(node)
            if branch is not None:
                self.all.append(branch)
        self._take_out_again()
        self._add_first()
        self._add_repeated()
        self._share_ends()
        self._leave_out_crossing()
        self._add_of_losses()
        self._prefer_own_ends()

    def _take_out_again(self) -> None:
        """Let what was added before be no branch, but what is new beside it."""
        inside = {b.add.id: (b.end, b.inside) for b in self.all}
        trunks = {**self._trunks}
        for node in self._program.nodes:
            in_loop = node.op in ("add", "sub") and node.loop and node.data
            for skip, end in _summands(node) if in_loop else ():
                if node.id not in inside and any(
                    self._comes_back(x, node) for x in self._stream(skip)
                ):
                    inside[node.id] = end, frozenset()
                    trunks[node.id], _ = self.factors.trunk(skip)
        earlier = Earlier(self._program, self.factors, inside, trunks)
        nodes = self._program.nodes
        found = {i: earlier.read(nodes[i], end) for i, (end, _) in inside.items()}
        # What no layer reads is no stream, e.g. the mean of a stream after each layer.
        kernels = self._kernels(frozenset[int]().union(*(b.inside for b in self.all)))
        leads = self._program.leads
        read = {
            x.spot
            for x in map(nodes.__getitem__, inside)
            if x.loop or any(leads(x, kernel) for kernel in kernels)
        }
        found = {i: x for i, x in found.items() if not x or nodes[i].spot in read}
        spots = {nodes[i].spot for i, again in found.items() if again}
        known = {b.add.id: b for b in self.all if b.add.id in found}
        for i, again in found.items():
            add, (end, inner) = nodes[i], inside[i]
            if again is None and add.line and add.spot in spots:  # the first
                value, _, _ = earlier.taken(end, add.loop)
                new = [x for x in value.operands if x.id in inner]
                if value.op in ("add", "sub") and len(new) == 1:
                    again = Again((value, new[0]), frozenset())
                else:
                    self.unlike[add.spot] = self._number(add)
            if again is None:
                continue
            start = self._trunks[i] = trunks[i]
            self.again |= again.again
            for x in {i, *(by for by, _ in again.again)}:
                if not again.new or x != again.new[0].id:
                    known.pop(x, None)
            self.around.append(
                Branch(add, start, end, frozenset(), add.runs, (), None, 1.0, 0)
            )
            if again.constant >= 1:
                self._note_whole(add, earlier.taken(end, add.loop)[1])
            if again.new and again.new[0].id not in known:
                add, end = again.new
                inner = self._program.between(start, end)
                made = self._made(add, start, end, inner)
                known |= {add.id: made} if made else {}
        self.all = sorted(known.values(), key=place)

    def _note_whole(self, add: Node, constant: float) -> None:
        """Note an addition of all that earlier layers added."""
        self.whole[add.spot] = self._number(add), constant

    def _number(self, add: Node) -> int:
        """How many additions stand at the place of one."""
        alike = (x for x in self._program.nodes if x.op == add.op)
        return sum(x.runs for x in alike if x.spot == add.spot)

    def _add_first(self) -> None:
        """Add the first of a stream's additions whose branch reads another value.

        The place in the user's code says that a later block's addition is the same: in
        a reversible network, whose two streams read each other, and where a stream
        starts as a parameter, e.g. learned latents or queries.
        """
        known = {branch.add.id for branch in self.all}
        spots = {branch.add.spot: branch for branch in self.all if branch.add.line}
        nodes = self._program.nodes
        for branch in self.all:  # which gets longer
            inner = [nodes[i] for i in branch.inside]
            for first in (*self.normed(branch.trunk), *inner):
                like = spots.get(first.spot) if first.op in ("add", "sub") else None
                if like is None or first.id in known:
                    continue
                at = like.add.operands[1] is like.end
                skip, end = first.operands[1 - at], first.operands[at]
                inside = self.only_for(end)
                moved = reach([skip], lambda x: x.operands if x.op in MOVES else ())
                users = max(len(self._axes.uses(x)) for x in moved)
                is_zero = skip.value == 0 and skip.shape != ()
                is_stream = skip.data or is_zero or users > 1  # no bias
                is_inner = self.factors.trunk(skip)[0].id in branch.inside
                if is_stream and not is_inner and self._kernels(inside):
                    known.add(first.id)
                    made = self._made(first, skip, end, inside)
                    self.all += [made] if made is not None else []
        self.all.sort(key=place)

    def _share_ends(self) -> None:
        """Let what is added to two streams be one branch, of the stream that it reads.

        E.g. to a sum of all branches beside a stream with norms after its additions.
        The first branch of a stream that splits from another has what is its alone.
        """
        adds = {b.add.id for b in self.all}
        for i, b in enumerate(self.all):
            is_across = b.add.spot in self._across
            alone = self.only_for(b.end, adds) if is_across else frozenset[int]()
            if self._kernels(alone):
                number = self.layers(alone)
                self.all[i] = dataclasses.replace(b, inside=alone, layers=number)
        least: dict[int, Branch] = {}
        for b in sorted(self.all, key=lambda b: len(b.inside)):
            least.setdefault(b.end.id, b)
        for i, b in enumerate(self.all):
            own = least[b.end.id]
            if own.inside < b.inside and own.end.id in own.inside:
                of = {x: getattr(own, x) for x in ("trunk", "inside", "layers")}
                self.all[i] = dataclasses.replace(b, **of)

    def normed(self, node: Node) -> Iterator[Node]:
        """What a value is computed from, up to a sum or a kernel."""

        def before(at: Node) -> list[Node]:
            is_sum = at.op in _SUMS and self.factors.with_weight(at) is None
            return [] if is_sum or self._kernels([at.id]) else earlier(at)

        return reach([node], before)

    def _add_repeated(self) -> None:
        """Add what each layer adds to a stream but does not compute from it.

        E.g. a bias, or another stream's values or an embedding, times a gain of each
        layer. Each layer adds it on the same line, before or after a branch of the
        layer.
        """
        known = {b.add.id for b in self.all}
        spots = {b.add.spot for b in (*self.all, *self.around)}
        biases = Counter(
            node.spot
            for node in self._program.nodes
            if node.op == "add" and self.factors.with_weight(node) is not None
            if any(self.factors.trunk(x)[0].id in known for x in node.operands)
        )
        found: dict[int, tuple[Node, Node, Node]] = {}
        for node in self._program.nodes:
            added = node.op in _SUMS and node.data and not node.backward
            if not added or not node.line or node.id in known or node.spot in spots:
                continue
            for skip, end in sorted(
                _summands(node), key=lambda pair: -self.factors.trunk(pair[0])[1]
            ):
                if not (end.data or end.weight) or self._is_skip(node, end, skip):
                    continue
                first = self._repeats(node, skip)
                if first is None and biases[node.spot] > 1:
                    first = node  # on the line of a branch
                if first is not None:
                    i, k = map(node.operands.index, (skip, end))
                    found[first.id] = first, first.operands[i], first.operands[k]
                    found[node.id] = node, skip, end
                    break  # of two streams, the larger
        for add, skip, end in found.values():
            trunk, _ = self.factors.trunk(skip)
            inside = frozenset({add.id})
            if end.data:
                inside = self.only_for(end, known)
            made = self._made(add, trunk, end, inside)
            weight = self.factors.with_weight(trunk)
            mixes = weight and made and self.factors.depends(weight, made.ends)
            self.all += [made] if made and not mixes else []
        self.all.sort(key=place)

    def _repeats(self, node: Node, skip: Node) -> Node | None:
        """The addition of the layer before to the same stream, before a branch.

        It is the addition itself if a loop repeats it.
        """
        known = {b.add.id for b in self.all}

        def before(at: Node) -> list[Node]:
            if at.op in ("slice", "concatenate"):  # some tokens of a stream
                return [self.factors.trunk(x)[0] for x in at.operands]
            if at.id in known or at.op not in (*_SUMS, "carry", "join", "select_n"):
                _, *rest = self._stream(at)
                return rest[:1]
            return [self.factors.trunk(x)[0] for x in earlier(at) if x.data]

        stream = list(reach([self.factors.trunk(skip)[0]], before))
        for at in stream:
            if at.op == node.op and at.spot == node.spot:
                passed = any(at.id < x.id and x.id in known for x in stream)
                return at if passed else None
        for at in stream:
            if at.op == "carry" and at.loop == node.loop:
                after = list(reach([self.factors.trunk(at.operands[1])[0]], before))
                again = any(x is node for x in after)
                passed = any(x.id in known for x in (*stream, *after))
                return node if again and passed else None
        return None

    def _add_of_losses(self) -> None:
        """Add to branches what else is used in no branch, but in a term of the loss.

        What one layer alone is computed from so, e.g. a condition, is left out.
        """
        adds = [b.add for b in self.all]
        leading = {x.id for x in reach(adds, lambda x: x.operands)}
        beside = {x.id for x in self._program.nodes} - leading
        stops = {x.id for x in adds}
        more = [
            self.only_for(b.end, stops, beside) - self.only_for(b.end, stops)
            for b in self.all
        ]
        alone = {b.add.spot for b, x in zip(self.all, more, strict=True) if not x}
        for i, b in enumerate(self.all):
            if b.add.spot not in alone:
                self.all[i] = dataclasses.replace(b, inside=b.inside | more[i])

    def only_for(
        self, end: Node, stops: Collection[int] = (), beside: Collection[int] = ()
    ) -> frozenset[int]:
        """Ids of the nodes whose only use is to compute a value, with its own.

        What streams are computed from, whose ids are `stops`, is left out; uses that
        are `beside` do not count.
        """
        if len({x.id for x in self._axes.uses(end)}.difference(beside)) > 1:
            return frozenset()
        kept, met = {end.id}, {end.id}
        heap = [-end.id]  # from the last node to the first
        while heap:
            node = self._program.nodes[-heapq.heappop(heap)]
            if all(x.id in kept or x.id in beside for x in self._axes.uses(node)):
                kept.add(node.id)
            elif node is not end and node.id not in beside:
                continue  # nor is what only this is computed from
            for x in earlier(node):
                known = x.id in met or x.id in stops or not x.operands
                if not known and x.runs >= node.runs:
                    met.add(x.id)
                    heapq.heappush(heap, -x.id)
        return frozenset(kept)

    def _leave_out_crossing(self) -> None:
        """Leave out single skips that begin before branches which alone read the sum.

        Examples are the first layer's values, which all layers add to theirs, a bias of
        attention that all layers add, and an encoder's values beside the stream.
        """
        last = {b.add.id: b for b in self.all}
        trunks = {x.id: x for b in self.all for x in self.normed(b.trunk)}
        after = (x.operands[1] for x in trunks.values() if x.op == "carry")
        trunks |= {x.id: x for y in after for x in self.normed(y)}
        going_on = {last[i].add.spot for i in trunks if i in last}

        def is_read(b: Branch) -> bool:
            later = [x for x in self.all if b.add.id < x.end.id]
            later = [x for x in later if b.trunk.id <= x.trunk.id]
            if self.factors.trunk(b.end)[0].id in self._trunks:  # of two streams
                inside = frozenset[int]().union(*(x.inside for x in later))
                if {x.id for x in self._axes.uses(b.add)} <= inside:
                    return True  # a loss may read the branch, too
            stops = {(x.add.id, x.end.id) for x in later}
            return bool(stops) and self.escapes(b.add, stops) is None

        single = [b for b in self.all if b.add.spot not in going_on]
        gone = {b.add.spot for b in single if is_read(b)}
        self.all = [b for b in self.all if b.add.spot not in gone]

    def _prefer_own_ends(self) -> None:
        """Let no parameter that several branches share end one, e.g. their gate."""
        for i, b in enumerate(self.all):
            stop = {(b.add.id, -1 if b.end.weight else b.end.id)}
            shared = [
                e.param
                for e in b.ends
                if e.node.runs < b.add.runs or self.escapes(e.node, stop) is not None
            ]
            with self.factors.apart_from(shared), contextlib.suppress(Failure):
                ends = tuple(self.factors.ends(b.end)) if shared else ()
                if ends and not any(self.escapes(e.node, stop) for e in ends):
                    self.all[i] = dataclasses.replace(b, ends=ends)

    def _dominate(self) -> None:
        """Find each data node's immediate dominator, seen from the inputs."""
        for node in self._program.nodes:
            if not node.data:
                continue
            found: Node | None = None
            first = True
            for operand in earlier(node):
                if operand.data:
                    found = operand if first else self._common(found, operand)
                    first = False
            self._dominator[node.id] = found
            self._depth[node.id] = 0 if found is None else self._depth[found.id] + 1

    def _common(self, one: Node | None, other: Node | None) -> Node | None:
        while one is not other and one is not None and other is not None:
            if self._depth[one.id] >= self._depth[other.id]:
                one = self._dominator[one.id]
            else:
                other = self._dominator[other.id]
        return one if one is other else None

    def _branch(self, node: Node) -> Branch | None:
        if node.backward or node.op not in (*_SUMS, "sub"):
            return None  # or a sum of gradients
        one, *_, other = node.operands
        ranks = len(one.shape), len(other.shape)
        if not (one.data and other.data and all(ranks)):
            return None
        if self._axes.is_step(other) and self.updated(one).weight:
            return None  # after steps of an inner optimizer
        is_sum, pairs = node.op == "add", _summands(node)
        for skip, end in pairs:
            (trunk, times), (_, less) = map(self.factors.trunk, (skip, end))
            if self._is_skip(node, end, skip):  # of a U-Net, for example
                self._trunks[node.id] = trunk
                if node.op == "sub" and times > less >= 1:  # 2 x - (x before)
                    self._note_whole(node, 1.0)
                return None
            before = self._before_gain(end)
            if before is not None:  # branches were added to another stream before
                self._trunks[node.id] = trunk
                inside = self._program.between(before, end)
                self.around.append(
                    Branch(node, before, end, inside, 1, (), None, 1.0, 0)
                )
                return None
        each = [x for x in (self._added(node, *pair) for pair in pairs) if x]
        if each:  # either value may be the stream

            def certain(found: tuple[Node, Node, Node, Any, Any]) -> tuple[bool, bool]:
                start, trunk, end, *_ = found
                return start is trunk, self._common(start, end) is start

            start, trunk, end, inside, factor = max(each, key=certain)
            simple = not any(x.add.id in inside for x in self.all)
            crosses = start.id < trunk.id or start.id not in self.learned
            if crosses and not simple:  # by another stream
                own = self.only_for(end, {x.add.id for x in self.all})
                inside = own if self._kernels(own) else inside
                self._across.add(node.spot)
            self._trunks[node.id] = trunk
            return self._made(node, start, end, inside, factor)
        carried = self._carried(node, pairs)
        return carried or (self._projected(node) if is_sum else None)

    def _added(
        self, node: Node, skip: Node, end: Node
    ) -> tuple[Node, Node, Node, frozenset[int], float] | None:
        """The start of a branch, its stream, its end, the nodes in it, a constant."""
        alike = self._starts_alike(node, skip, end)
        if self._is_constant_to_gradients(end) or alike:
            return None
        for start, trunk, factor in self._starts(node, skip, end):
            inside = self._program.between(start, end)
            if start is not trunk and trunk.id in inside:
                break  # it reads what was added since
            if inside and not self._kernels(inside):
                # E.g. gates of a memory's values.
                inside |= self.only_for(end, {start.id})
            if inside and self._kernels(inside):
                twice = self._spots[node.spot] > 1
                simple = twice or not any(x.add.id in inside for x in self.all)
                if node.op != "sub" or (simple and self._is_stream(node)):
                    return start, trunk, end, inside, factor
                # Else e.g. an error of prediction.
        return None

    def updated(self, node: Node) -> Node:
        """What a value was before steps of an inner optimizer, e.g. a parameter."""
        node, _ = self.factors.trunk(node)
        while node.op == "carry" or (node.op in ("add", "sub") and node.data):
            node, _ = self.factors.trunk(node.operands[0])
        return node

    def _carried(self, node: Node, pairs: Sequence[tuple[Node, Node]]) -> Branch | None:
        """x + f(y), where the sum is the next x of a loop whose layers read x too."""
        for skip, end in pairs:
            trunk, factor = self.factors.trunk(skip)
            if not self._comes_back(trunk, node):
                continue
            users = [x for at in (trunk, node) for x in self._axes.uses(at)]
            read = {x.id for x in users if x.op not in ("last", "scan_out")}
            start = self._common(skip, end)
            between = self._program.between
            inside = self.only_for(end) if start is None else between(start, end)
            inside = frozenset(
                i for i in inside if self._program.nodes[i].loop == trunk.loop
            )
            read -= {node.id, trunk.id} | between(trunk, skip)
            if read and self._kernels(inside):
                return self._made(node, trunk, end, inside, factor)
        return None

    def _comes_back(self, carry: Node, node: Node) -> bool:
        """Whether a node is the carry of a later iteration, e.g. of two that swap."""
        seen: set[int] = set()
        while carry.op == "carry" and carry.id not in seen:
            seen.add(carry.id)
            carry, _ = self.factors.trunk(carry.operands[1])
        return bool(seen) and carry is node

    def _starts(
        self, add: Node, skip: Node, end: Node
    ) -> Iterable[tuple[Node, Node, float]]:
        """Where the branch may start: (node, stream, the constant of the stream)."""
        trunk, factor = self.factors.trunk(skip)
        at, constant = skip, 1.0
        while at is not trunk:  # the branch may read the stream after its constant
            if at.op == "mul":
                yield at, trunk, constant
            at, constant = self.factors.inner_step(at, constant)
        for start in (*self._same_stream(trunk), *self._copied(trunk)):
            yield start, trunk, factor
        # Or before a bias, or a learned gain if it is that of a stream: g x + f(x).
        if trunk.op == "add" and self.factors.with_weight(trunk) is not None:
            before, _ = self.factors.trunk(next(x for x in trunk.operands if x.data))
            yield before, trunk, factor
        before = self.factors.unweighted(trunk)
        if trunk.op == "mul" and before is not trunk:
            # Perhaps after other additions of the layer, which have gains of their own.
            def again(x: Node) -> bool:
                return x.op == "add" and bool(add.line) and x.spot == add.spot

            def gained(x: Node) -> list[Node]:
                data = [self.factors.trunk(y)[0] for y in x.operands if y.data]
                if self.factors.with_weight(x) is not None:
                    return data[:1]
                scaled = [y for y in data if self.factors.unweighted(y) is not y]
                return scaled if x.op == "add" and not again(x) else []

            def is_stream(x: Node) -> bool:
                return x.op == "carry" or x.id in self._trunks or again(x)

            if any(map(is_stream, reach([before], gained))):
                yield before, before, factor
        # Or the stream before, of which the skip is a pool or a norm.
        common = self._common(skip, end)
        inner = () if common is None else self._program.between(common, skip)
        if common is None or any(self._program.nodes[i].op in PRODUCTS for i in inner):
            return
        if any(x.id in self._trunks for x in self.normed(common)):
            yield common, common, factor

    def _copied(self, node: Node) -> list[Node]:
        """The stream of which several copies start, e.g. stack([x, x]), or a part.

        Or the streams, mixed by a matrix of each example, of which a part starts.
        """
        if node.op not in ("concatenate", "slice"):
            return []
        sources = [self.factors.trunk(x)[0] for x in node.operands]
        if node.op == "slice":
            mixed = sources[0].op == "dot_general"
            return sources if mixed and all(x.data for x in sources[0].operands) else []
        is_one = all(x is sources[0] for x in sources)
        return sources[:1] if is_one else [x for x in sources if x.id in self._trunks]

    def _starts_alike(self, node: Node, skip: Node, end: Node) -> bool:
        """Whether the end is a stream to which other layers add the skip, too."""
        alike = self._alike(node, skip)
        known = {self.factors.trunk(skip)[0].id, *alike} if alike else ()
        return any(x.id in known for x in self._stream(end))

    def _alike(self, node: Node, value: Node) -> Collection[int]:
        """Ids of the additions of a value by several layers, of which a node is one."""
        value, _ = self.factors.trunk(value)
        users = [y for x in self._moved(value) for y in self._axes.uses(x)]
        runs = {y.id: y.runs for y in users if y.op == "add" and y.spot == node.spot}
        return runs if node.line and sum(runs.values()) > value.runs else ()

    def _is_stream(self, node: Node) -> bool:
        """Whether kernels follow a value, or followed that of an earlier layer."""
        same = node.line and any(b.add.spot == node.spot for b in self.all)
        return bool(same) or self.goes_on(node)

    def goes_on(self, node: Node) -> bool:
        """Whether a value is followed by further kernels."""
        after = [x.id for x in reach(self._axes.uses(node), self._axes.uses)]
        return bool(self._kernels(after))

    def _is_skip(self, add: Node, end: Node, beside: Node) -> bool:
        """Whether it is an earlier value of the stream beside it, which is added once.

        Learned weights may multiply it. What each layer adds is no such skip, nor the
        value that the layer before made so, which goes around the whole layer.
        """
        value = self.factors.unweighted(end)
        if add.op == "sub" and self._was(value, beside):
            return True  # 2 x - (x before) in a loop
        if not any(x is value for x in self._stream(beside)):
            return False
        moved = self._moved(value)
        if value is self.factors.trunk(end)[0]:
            looped = value.op == "carry" and value.loop == add.loop
            if looped or (value.op == "add" and add.line and value.spot == add.spot):
                return False
        else:
            users = [y for x in moved for y in self._axes.uses(x)]
            weighted = [
                x for x in users if x.op == "mul" and self.factors.with_weight(x)
            ]
            moved = [y for x in weighted for y in self._moved(x)]
        adds = {
            y.id: y.runs
            for x in moved
            for y in self._axes.uses(x)
            if y.op == "add" and self._trunks.get(y.id) is not value
        }
        return sum(adds.values()) <= value.runs

    def _moved(self, node: Node) -> list[Node]:
        """A value, and what it is after moves and constant factors."""

        def users(x: Node) -> list[Node]:
            return [
                y for y in self._axes.uses(x) if self.factors.inner_step(y, 1.0)[0] is x
            ]

        return list(reach([node], users))

    def _stream(self, node: Node) -> Iterator[Node]:
        """The values of a stream from one back to the first."""
        node, _ = self.factors.trunk(node)
        while True:
            yield node
            if node.id in self._trunks:
                node = self._trunks[node.id]
            elif node.op == "carry":
                node, _ = self.factors.trunk(node.operands[0])
            elif node.op == "mul" and any(
                x.weight and _is_number(x) for x in node.operands
            ):
                node, _ = self.factors.trunk(next(x for x in node.operands if x.data))
            elif (before := self._before_activation(node)) is not None:
                node, _ = self.factors.trunk(before)
            else:
                return

    def _before_activation(self, node: Node) -> Node | None:
        """The sum of which a value is an elementwise function, e.g. x * sigmoid(x)."""
        before = self._dominator.get(node.id)
        if before is None or before.op != "add" or before.shape != node.shape:
            return None
        inside = self._program.between(before, node)
        nodes = self._program.nodes
        same = all(nodes[i].shape == node.shape for i in inside)
        return before if same and not self._kernels(inside) else None

    def _before_gain(self, node: Node) -> Node | None:
        """The stream to which branches added a value, perhaps before its gates."""
        factors = reach(
            [node],
            lambda x: x.operands if x.op in ("mul", "dot_general", *MOVES) else (),
        )
        for factor in factors:
            if factor.op == "sub":
                (after, one), (before, other) = map(self.factors.trunk, factor.operands)
                streams = itertools.islice(self._same_stream(after), 1, None)
                is_before = self._was(before, after) or before in streams
                if one == other and is_before:
                    return before
        return None

    def _was(self, node: Node, stream: Node) -> bool:
        """Whether a value is a loop's stream in the iteration before."""
        after = self.factors.trunk(node.operands[1])[0] if node.op == "carry" else node
        return (
            after is not node and after.op == "carry" and after in self._stream(stream)
        )

    def _is_constant_to_gradients(self, node: Node) -> bool:
        moved = reach([node], lambda x: x.operands if x.op in MOVES else ())
        return any(x.op == "stop_gradient" for x in moved)

    def _projected(self, node: Node) -> Branch | None:
        """A branch beside a shortcut that changes the width, as in ResNets."""
        one, other = node.operands
        common = self._common(one, other)
        # A stream; what a cell of a recurrent network reads is none.
        every = [self._projected_from(x) for x in (one, other)]
        read = [max(each, key=lambda x: x.id, default=None) for each in every]
        for x, y in (read, read[::-1]):
            if x is None or y is None:
                continue
            adds = (at for at in self.normed(y) if at.op == "add")
            past = {z.id for at in adds for z in [*self._stream(at)][1:]}
            if any(at.id in past for at in self.normed(x)):
                return None  # heads of a stream before and after a layer
        streams = [x for x in read if x is not None and not self._is_condition(x)]
        for start in dict.fromkeys([common, *streams]):
            if start is None or start in (one, other) or start.id not in self.learned:
                continue
            if start.loop != node.loop:
                continue  # each layer adds what it makes of a value before the loop
            if any(x.value == 0 for y in (one, other) for x in y.operands):
                continue  # the second term of a sum over layers
            sides = [self._program.between(start, x) for x in (one, other)]
            kernels = [self._kernels(inside) for inside in sides]
            bends = [any(self._bends(i, inside) for i in inside) for inside in sides]
            for a, b in ((0, 1), (1, 0)):
                later = self._kernel_after_bend(sides[b])
                plain = len(kernels[a]) == 1 and not bends[a]
                mixed = self._mixes(start, node.operands[a])
                # Layers whose results are added up are read by the next one, too.
                own = sides[b] - sides[a]
                part = self._is_part(node, {start.id, *own})
                alone = not (part or self._is_read(own, node))
                if (plain or mixed) and bends[b] and later and alone:
                    return self._made(node, start, node.operands[b], own)
        return None

    def _is_condition(self, node: Node) -> bool:
        """Whether several layers read a value, e.g. an embedding of the time."""
        users = {x.id: x for x in self._axes.uses(node)}.values()
        layers = Counter((x.op, x.spot) for x in users)
        return max(layers.values(), default=0) > 1

    def _is_part(self, add: Node, inside: Set[int]) -> bool:
        """Whether a sum is only added to a stream that its terms read."""
        users = [x for x in self._axes.uses(add) if x.op in _SUMS]
        others = [y for x in users for y in x.operands if y is not add]
        return len(users) == len(self._axes.uses(add)) and any(
            self.factors.trunk(x)[0].id in inside for x in others
        )

    def _is_read(self, inside: frozenset[int], add: Node) -> bool:
        """Whether kernels read a branch beside its addition, unlike statistics."""
        users = (y for i in inside for y in self._axes.uses(self._program.nodes[i]))
        after = {y.id: y for y in users if y.id not in inside and y is not add}
        return any(self._kernels([i]) or self.goes_on(y) for i, y in after.items())

    def _projected_from(self, node: Node) -> list[Node]:
        """What a kernel, with a bias, makes a value of, or the joined values.

        Something else may condition the other side of a shortcut, and read its parts.
        """
        node, _ = self.factors.trunk(node)
        if self.factors.with_weight(node) is not None:
            node, _ = self.factors.trunk(next(x for x in node.operands if x.data))
        products = node.operands if node.op == SUM else [node]
        if not all(x.op in PRODUCTS and len(self._kernels([x.id])) for x in products):
            return []
        return [
            self.factors.trunk(y)[0] for x in products for y in x.operands if y.data
        ]

    def _mixes(self, stream: Node, node: Node) -> bool:
        """Whether a value is a stream of several, mixed by a matrix of each example.

        Or the part of it that is no input of a layer, as in hyper-connections.
        """
        node, _ = self.factors.trunk(node)
        shape = node.shape
        if node.op == "slice":
            node, _ = self.factors.trunk(node.operands[0])
        if node.op != "dot_general" or sorted(shape) != sorted(stream.shape):
            return False
        sources = [self.factors.trunk(x)[0] for x in node.operands if x.data]
        return len(sources) == 2 and stream in sources

    def _kernel_after_bend(self, inside: frozenset[int]) -> bool:
        nodes = self._program.nodes
        bent = [nodes[i] for i in inside if self._bends(i, inside)]
        return any(
            self._program.leads(x, kernel)
            for x in bent
            for kernel in self._kernels(inside)
        )

    def _bends(self, at: int, inside: frozenset[int]) -> bool:
        """Whether a node is a nonlinearity, other than the statistics of a norm."""
        node = self._program.nodes[at]
        if node.op in ("integer_pow", "sqrt", "abs"):
            return False
        return node.op in _NONLINEAR and not self._becomes_scale(node, inside)

    def _becomes_scale(self, node: Node, inside: frozenset[int]) -> bool:
        """Whether only the root of a value is used, as of a variance."""
        users = [x for x in self._axes.uses(node) if x.id in inside]
        return bool(users) and all(
            x.op in ("rsqrt", "sqrt")
            or ((x.op in MOVES or x.op == "add") and self._becomes_scale(x, inside))
            for x in users
        )

    def _same_stream(self, trunk: Node) -> Iterable[Node]:
        """The trunk, and what it was before branches were added to it in parallel."""
        yield trunk
        while trunk.id in self._trunks:
            trunk = self._trunks[trunk.id]
            yield trunk

    def _kernels(self, inside: Iterable[int]) -> list[Node]:
        nodes = (self._program.nodes[i] for i in sorted(inside))
        return list(filter(self._axes.is_product, nodes))

    def _made(
        self,
        add: Node,
        trunk: Node,
        end: Node,
        inside: frozenset[int],
        skip: float = 1.0,
    ) -> Branch | None:
        runs = 1
        loop = add.loop
        while loop:
            length, parent, is_time = self._program.loops[loop]
            if is_time and not self._is_within_a_step(add, trunk, end, loop):
                return None  # a recurrence over time
            runs *= 1 if is_time else length
            loop = parent
        if not runs:
            return None  # a loop over no layers
        try:
            ends, failure = tuple(self._ends_of_layers(add, trunk, end)), None
            inner, _ = self.factors.trunk(end)
            # Another stream is more than what was added to it since it left this one.
            if inner.id in self._trunks and any(e.node.id not in inside for e in ends):
                raise Failure(inner)
        except Failure as reason:
            ends, failure = (), reason.node
        _, constant = self.factors.trunk(end)
        return Branch(
            add,
            trunk,
            end,
            inside,
            runs,
            ends,
            failure,
            constant,
            self.layers(inside),
            skip,
        )

    def _is_within_a_step(self, add: Node, trunk: Node, end: Node, loop: int) -> bool:
        """Whether a step of a loop over time adds a branch to a stream of its own.

        It may start as what a kernel makes of the state, or as the state to which
        something is added or joined. And a step may start at its state, if the stream
        is not the next state.
        """

        def before(node: Node) -> list[Node]:
            return [] if node.op == "carry" and node.loop == loop else earlier(node)

        def on_stream(node: Node) -> list[Node]:
            return [] if self._axes.is_product(node) else before(node)

        def stream(node: Node) -> list[Node]:
            if node.id in self._trunks:
                return [self._trunks[node.id]]
            return [] if node.op in ("add", "concatenate") else on_stream(node)

        starts = (x for x in reach([trunk], stream) if x.op == "carry")
        states = [x.operands[1] for x in starts if x.loop == loop]
        is_own = all(x is not add for x in reach(states, on_stream))
        return is_own and any(x is trunk for x in reach([end], before))

    def kept(self, chosen: Collection[Branch]) -> float:
        """What layers multiply a stream by, all in all; 1 if norms undo that."""
        added = {self.factors.trunk(x.end)[0].id for x in self.around}
        sums = {x.add.id for x in self.all} - added
        logs: list[float] = []

        def terms(node: Node) -> list[Node]:
            known = node.operands if node.op == "add" else []
            return [self.factors.trunk(x)[0] for x in known]

        for b in chosen:
            value, factor = self.factors.trunk(b.trunk)
            if value.op == "carry":
                value, more = self.factors.trunk(value.operands[1])
                factor *= more
            each = reach([self.factors.trunk(b.end)[0]], terms)
            ways = (self._program.between(value, x) for x in each)
            if any(inside and not self._kernels(inside) for inside in ways):
                return 1.0  # x / 2 + norm(x) / 2
            if value.id in sums:
                logs += [math.log(abs(factor * b.skip))] * b.runs
        number = sum(b.runs for b in chosen)  # with the first, which starts a stream
        return math.exp(sum(logs) / max(len(logs), 1) * number)

    def _ends_of_layers(self, add: Node, start: Node, end: Node) -> list[End]:
        """The parameters that end a branch, apart from a norm of the stream itself."""
        if end.weight:
            return self.factors.used(end, add)
        inner, _ = self.factors.trunk(end)
        if inner.op == "sub" and origin(inner.operands[1]) is start:
            raise Failure(inner)  # x + a (f(x) - x)
        try:
            return self.factors.ends(end)
        except Failure:
            operands = inner.operands if inner.op == "add" else []
            for skip, other in zip(operands, reversed(operands), strict=True):
                before = self._program.between(start, skip)
                if before and not self._kernels(before):
                    return self._ends_of_layers(add, start, other)
            raise

    def layers(self, inside: frozenset[int]) -> int:
        longest: dict[int, int] = {}
        nodes = self._program.nodes
        for at in sorted(inside):
            each = [longest.get(x.id, 0) for x in earlier(nodes[at])]
            longest[at] = max(each, default=0) + bool(self._kernels([at]))
        return max(longest.values(), default=0)

    def escapes(self, start: Node, stops: Set[tuple[int, int]]) -> Node | None:
        """A result that a node reaches without passing through one of some operations.

        A branch's own value is none: models return those of all layers to look at.

        Args:
          start: the node.
          stops: (operation, operand) pairs of node ids; an operand of -1 means any.
        """
        if (start.id, -1) in stops:
            return None

        def users(at: Node) -> list[Node]:
            # The gradient of what needs a multiplier has it, too.
            every = [x for x in self._axes.uses(at) if not x.backward]
            pairs = [{(user.id, at.id), (user.id, -1)} for user in every]
            each = zip(every, pairs, strict=True)
            return [user for user, pair in each if not pair & stops]

        results = (x for x in reach([start], users) if x.id in self._outputs)
        return next((x for x in results if not self.is_shown(x)), None)

    def is_shown(self, node: Node) -> bool:
        """Whether it is the end of a branch: models may return those of all layers."""
        node = origin(node)
        if node.op in (*PARTS, "concatenate"):
            return all(self.is_shown(x) for x in earlier(node) if x.data)
        every = (b.end for b in self.all if b.end is not b.trunk)
        return any(node is origin(end) for end in every)

    def feeding(
        self, node: Node, param: int, chosen: Iterable[Branch]
    ) -> list[Branch] | None:
        """The branches through which a parameter that a node uses reaches the outputs.

        None if it reaches them without a branch. Rows that it is joined to, e.g. as a
        prompt to tokens, do not reach what only other rows are taken for.
        """
        ends = {(b.add.id, b.end.id): b for b in chosen}
        found: dict[int, Branch] = {}
        rows = None
        if node.op == "concatenate":
            at = next(x for x in node.operands if param in self._axes.depends(x))
            axis = node.params["dimension"]
            rows = _rows_after(node, at, (axis, 0, at.shape[axis]))
        stack = [(node, rows)]
        seen = {*stack}
        while stack:
            node, rows = stack.pop()
            if node.id in self._outputs:
                return None
            for user in self._axes.uses(node):
                branch = ends.get((user.id, node.id))
                if branch is not None:
                    found[user.id] = branch
                elif not user.backward:  # repeats the forward pass
                    after = user, _rows_after(user, node, rows)
                    if after[1] != () and after not in seen:
                        seen.add(after)
                        stack.append(after)
        return list(found.values())


def _rows_after(user: Node, node: Node, rows: Rows) -> Rows:
    """Where rows of a value are in what is computed from it; () if nowhere."""
    if not rows:
        return rows
    axis, start, stop = rows
    if user.op == "slice":
        first, last = (user.params[x][axis] for x in ("start_indices", "limit_indices"))
        start, stop = max(start, first), min(stop, last)
        return (axis, start - first, stop - first) if start < stop else ()
    k = user.operands.index(node)
    if user.op == "concatenate" and user.params["dimension"] == axis:
        before = sum(x.shape[axis] for x in user.operands[:k])
        return axis, start + before, stop + before
    index = index_of(user, k, axis)
    if index is None or index.out is None or index.mixed:
        return None
    return index.out, start, stop


def place(branch: Branch) -> int:
    """Where a branch is added, as a number."""
    return branch.add.id


def _summands(node: Node) -> list[tuple[Node, Node]]:
    """What may be a stream in a sum, and what is added to it."""
    one, *_, other = node.operands
    pairs = [(one, other)] if node.op != "add" else [(one, other), (other, one)]
    return [(x, y) for x, y in pairs if x.data and x.shape == node.shape]


def _is_number(node: Node) -> bool:
    """Whether a value was one number before it was moved."""
    moved = reach([node], lambda x: x.operands if x.op in MOVES else ())
    return any(math.prod(x.shape) == 1 for x in moved)

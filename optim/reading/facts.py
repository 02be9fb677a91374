"""A model's program, and what was read from it."""

import bisect
import math
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
)

from ..scales.declare import Declarations
from .axes import Axes, Event, Use
from .branches import Branch, Branches
from .factors import End
from .heads import find_heads
from .links import indices
from .models import Reading
from .program import PRODUCTS, Node, Spot, earlier, reach
from .roles import find_roles
from .sums import Sums
from .totals import Totals

Key = tuple[Hashable, frozenset[str]]  # the place of an addition, parameters


class Facts:
    """A model's program, and what was read from it.

    Args:
      reading: the program.
      given: parameters whose axes the user declared.
      growth: the axes of each parameter that grow from the base to the target.
      opened: names a parameter alike in all blocks.
      few: places that choose a number of entries which does not grow.
    """

    def __init__(
        self,
        reading: Reading,
        given: Declarations,
        growth: Mapping[str, frozenset[int]],
        opened: Callable[[str], str],
        few: Collection[Spot],
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
        self.axes = Axes(program, growing, few)
        self.roles = find_roles(reading, self.axes, given)
        self.branches = Branches(program, self.axes)
        self.factors = self.branches.factors
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

    def param(self, path: str) -> Node:
        return self.reading.program.params[self.reading.path_of.index(path)]

    def ends(self, branch: Branch) -> set[str]:
        return {self.path(end) for end in branch.ends}

    def scales_entries(self, path: str) -> bool:
        """Whether each entry of a parameter multiplies one of a kernel."""
        return self.reading.path_of.index(path) in self.axes.scalers

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

    def layer_axes(self, path: str) -> set[int]:
        """The axes along which a parameter holds layers, one beside the other."""
        param = self.reading.path_of.index(path)
        axes = {a for p, a in self.axes.sliced if p == param}
        for event in self.axes.events[param]:
            if event.node.op in ("scan_in", "slice") and not event.node.backward:
                axes |= {*event.axes(Use.COPY)}
        return axes

    def copies(self, path: str) -> int:
        """The number of layers that a parameter holds, one beside the other."""
        shape = self.reading.leaves[path].shape
        return math.prod(shape[a] for a in self.layer_axes(path))

    def kernels(self) -> Counter[str]:
        """How many parameters of each name there are, also taken from stacks."""
        number: Counter[str] = Counter()
        for i, path in enumerate(self.reading.path_of):
            shape = self.reading.leaves[path].shape
            taken = {a for p, a in self.axes.sliced if p == i}
            number[self.opened(path)] += math.prod(shape[a] for a in taken)
        return number

    def is_kernel(self, node: Node) -> bool:
        """Whether a node is the product of a value and a kernel."""
        is_product = node.op in PRODUCTS or node.id in self.axes.products
        return is_product and any(x.weight for x in node.operands)

    def decides_steps(self, node: Node) -> bool:
        """Whether a value starts a loop that runs an unknown number of times."""
        loops = self.reading.program.loops
        after = reach([node], self.axes.uses)
        return any(x.op == "carry" and loops[x.loop][0] == 1 for x in after)

    def inner_steps(self) -> Iterator[tuple[str, tuple[str, Node, float]]]:
        """Steps of inner optimizers: what they update, where, and their constants."""
        is_step = self.axes.is_step
        for node in self.reading.program.nodes:
            if node.op not in ("add", "sub") or node.backward or not node.data:
                continue
            one, step = node.operands
            updated = self.branches.updated(one).param
            if updated is not None and is_step(step) and self.axes.uses(node):
                constant = 1.0
                while not step.backward and any(map(is_step, step.operands)):
                    constant *= (step.op == "mul" and step.operands[1].value) or 1.0
                    step = next(filter(is_step, step.operands))
                path = self.reading.path_of[updated]
                yield self.opened(path), (path, node, constant)

    def paths(self, branch: Branch) -> list[str]:
        """The parameters that are used inside a branch."""
        if id(branch) not in self._paths:
            self._paths[id(branch)] = [*self._inside(branch)]
        return self._paths[id(branch)]

    def _inside(self, branch: Branch) -> Iterator[str]:
        # What a stream starts with acts on it, also if other branches read it, and so
        # does what multiplies it, also if that multiplies the branch: a x + (1 - a) f.
        starts = [
            b for b in self.branches.all if b.trunk.weight and b.trunk is not b.end
        ]
        skip = {b.add.id for b in starts}
        stream = branch.trunk, *(x for x in branch.add.operands if x is not branch.end)
        skip |= {x.id for x in stream if x.op in ("concatenate", "mul")}
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
            within = used <= branch.inside or not used & skip
            if used & branch.inside and within:
                yield path

    def names(self, branch: Branch) -> frozenset[str]:
        """The parameters inside a branch, without the number of the block."""
        return frozenset(map(self.opened, self.paths(branch)))

    def kind(self, branch: Branch) -> Key:
        """What a branch has in common with those of other layers."""
        return branch.add.spot, self.names(branch)

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
            start, around = branch.trunk, self.reading.program.around(other.add.loop)
            if start.op == "carry" and start.loop not in around:
                return True  # each run of the other branch runs this loop anew
            return start is other.trunk or start.id in other.inside

        return [b for b in branches if not any(is_within(b, x) for x in branches)]

    def on_streams(self, branches: list[Branch]) -> set[int]:
        """Ids of what leads from one addition to a stream to the next, e.g. of norms.

        A branch may read another stream, and the gains that act on that.
        """
        trunks = [b.trunk for b in branches]
        trunks += [x.operands[1] for x in trunks if x.op == "carry"]
        ways = (x for trunk in trunks for x in self.branches.normed(trunk))
        ends = {b.add.id for b in branches}
        return {x.id for x in ways if x.id not in ends and not self.is_kernel(x)}

    def evaluation(self, layer: Hashable, node: Node) -> int:
        """Which evaluation of a layer a node is of, e.g. on the second of two batches.

        What is computed from an evaluation belongs to it, as in a loop over a layer.
        What reads no parameters, e.g. masks of dropout, is of the first.
        """
        if not node.data or node.id not in self.branches.learned:
            return 0
        if (layer, node.id) not in self._evaluations:
            lasts = self._evaluated.setdefault(layer, [])
            at = (i for i, x in enumerate(lasts) if self.reading.program.leads(x, node))
            number = next(at, len(lasts))
            lasts[number:] = [node, *lasts[number + 1 :]]
            self._evaluations[layer, node.id] = number
        return self._evaluations[layer, node.id]

    def evaluated(self, branch: Branch) -> int:
        """Which evaluation of its layer a branch is of."""
        return self.evaluation((branch.add.spot, *self.paths(branch)), branch.add)

    def inside(self, branches: list[Branch]) -> dict[str, tuple[int, int]]:
        """How many branches use parameters, and how many layers these hold, by name."""
        runs, layers = Counter[str](), Counter[str]()
        for b in branches:
            runs.update(dict.fromkeys(self.names(b), b.runs))
        for path in {path for b in branches for path in self.paths(b)}:
            layers[self.opened(path)] += self.copies(path)
        return {name: (runs[name], layers[name]) for name in runs}

    def outside(
        self,
        branches: list[Branch],
        paths: Collection[str] | None = None,
        *,
        ahead: bool = True,
    ) -> dict[str, tuple[int, int]]:
        """In how many layers parameters act outside of branches, and their number.

        With `ahead`, only on streams: some of that name act before a branch, unlike a
        readout of each layer, or the norm after the only layer of a base.
        """
        adds = sorted(b.add.id for b in branches)
        ends = {b.add.id: b.end for b in branches}

        def earlier(x: Node) -> list[Node]:
            return [y for y in x.operands if y.data and y is not ends.get(x.id)]

        stream = reach([x for b in branches for x in earlier(b.add)], earlier)
        inside = set().union(*(b.inside for b in branches)) - self.on_streams(branches)
        before = {x.id for x in stream} - inside
        acts: dict[str, dict[tuple[int, int], int]] = {}
        layers, early = Counter[str](), set[str]()
        for path, events in zip(self.reading.path_of, self.axes.events, strict=True):
            if paths is not None and path not in paths:
                continue
            used = [e.node for e in events if e.is_use]
            name = self.opened(path)
            # Each layer once, between the same additions; what a loop starts with, too.
            once = [x.operands[0] if x.op == "carry" else x for x in used]
            places = {(bisect.bisect_left(adds, x.id), x.loop): x.runs for x in once}
            acts.setdefault(name, {}).update(places)
            layers[name] += self.copies(path)
            early |= {name for x in used if x.id in before}
        names = early if ahead else acts
        return {name: (sum(acts[name].values()), layers[name]) for name in names}

    def fed(
        self, branches: list[Branch], path: str
    ) -> tuple[float, list[Branch]] | None:
        """The branches through which alone a parameter acts; how many of each copy."""
        events = [e for e in self.events(path) if not e.node.backward]
        fed: dict[int, Branch] = {}
        param = self.reading.path_of.index(path)
        for node in (e.node for e in events if e.is_use):
            found = self.branches.feeding(node, param, branches)
            if found is None:
                return None
            fed |= {b.add.id: b for b in found}
        feeds, program = [*fed.values()], self.reading.program
        loops = {e.node.loop for e in events if e.node.op == "scan_in"}
        # What a layer passes on, beyond its loop, is read by all blocks.
        if loops and not all(loops & {*program.around(b.add.loop)} for b in feeds):
            return None
        number = sum(b.runs for b in feeds) / self.copies(path)
        return (number, feeds) if feeds else None

    def spread(self, branches: list[Branch], path: str) -> float:
        """The most branches through which one use of a parameter acts.

        Infinite if a use within a branch also acts without one, e.g. through a stream.
        """
        param, most = self.reading.path_of.index(path), 1.0
        inside = frozenset().union(*(b.inside for b in branches))
        for node in {e.node for e in self.events(path) if e.is_use}:
            feeds = self.branches.feeding(node, param, branches)
            if feeds is None and node.id in inside:
                return math.inf
            most = max(most, sum(b.runs for b in feeds or ()) / node.runs)
        return most

    def all_fed(self, branches: list[Branch], name: str) -> set[float]:
        """Through how many branches each parameter of a name alone acts."""
        paths = (p for p in self.reading.path_of if self.opened(p) == name)
        return {found[0] if (found := self.fed(branches, p)) else 0.0 for p in paths}

    def numbers(self) -> Counter[frozenset[str]]:
        """The most terms of one sum that the same parameters compute."""
        most: Counter[frozenset[str]] = Counter()
        for terms in self.totals.all:
            number: Counter[frozenset[str]] = Counter()
            for branch in terms:
                number[self.computed_by(branch)] += branch.runs
            most |= number
        return most

    def most_terms(self) -> Iterator[tuple[frozenset[str], Branch]]:
        """The terms of the sums that have the most such terms, and what computes them.

        What is computed from a sum, and added once to something else, is none.
        """
        most = self.numbers()
        for terms in self.totals.all:
            each = [(self.computed_by(b), b) for b in terms]
            for key, b in each:
                if sum(x.runs for by, x in each if by == key) == most[key]:
                    yield key, b

    def computed_by(self, term: Branch) -> frozenset[str]:
        """The parameters of the nearest kernels before a term, or of a bias."""
        paths = {self.path(end) for end in term.ends if term.end.weight}
        return frozenset(map(self.opened, paths or self.sources(term.end)))

    def sources(self, node: Node) -> set[str]:
        """The parameters of the nearest kernels before a node."""

        def sources(at: Node) -> list[Node]:
            return [] if self.is_kernel(at) else [x for x in earlier(at) if x.data]

        return {
            self.reading.path_of[param]
            for at in reach([node], sources)
            for x in at.operands
            if x.weight and at.data
            for axes in self.axes.labels.get(x.id, ())
            for param, _ in axes
        }

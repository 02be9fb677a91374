"""Which sums have more terms in the target, as it has more layers."""

from collections import Counter
from collections.abc import Hashable, Mapping

from .depth import Depth
from .factors import PARTS
from .pair import Pair
from .program import Node, reach


class Layers:
    """The sums over layers, other than residual streams.

    Args:
      twin: the value of the base for each of the target, by its id.

    Attributes:
      streams: the branches of residual streams, by the ids of their additions.
      sums: the sums over layers: the ratio of the numbers of their terms, by id.
      terms: the ids of these terms.
      products: the same ratio for sums of products of activations that layers add up.
      again: what adds to a stream what was added before, e.g. with momentum.
      others: sums of more values than in the base, of which no more is known.
      steps: additions of a part of a branch to the stream, for the branch's own use,
        e.g. for a solver's second evaluation, by id: which operand is the part, and the
        ratio of the numbers of layers.
    """

    def __init__(self, pair: Pair, depth: Depth, twin: Mapping[int, Node]):
        self._pair, self._large, self._twin = pair, pair.large, twin
        self._depth, self._program = depth, pair.large.reading.program
        self._number = Counter(x.id for x in twin.values())
        # Terms of sums over layers are no branches of a stream.
        own = [b for b in self._large.branches.all if b.trunk is not b.end]
        self.streams = {b.add.id: b for b in own}
        self.terms: set[int] = set()
        self.sums = self._over_layers()
        self.products = self._in_totals()
        branches = self._large.branches
        self.again = {b.add.id for b in branches.around}
        self.again |= {by for by, _ in branches.again}
        spots = {b.add.spot for b in branches.around} | branches.unlike.keys()
        adds = [x for x in self._program.nodes if x.op == "add"]
        self.again |= {x.id for x in adds if x.spot in spots}
        self.others = self._repeated() - self.streams.keys() - self.again
        self.steps = {
            x.id: (k, depth.of(b))
            for b in depth.counted
            for x in (self._program.nodes[i] for i in b.inside)
            for k, y in enumerate(x.operands if x.op == "add" else ())
            if y.id in b.inside and self._rows_of(x.operands[1 - k]) is b.trunk
            if x.id not in self.streams
        }

    def _rows_of(self, node: Node) -> Node:
        """The value that some rows are taken of."""
        node, _ = self._large.factors.trunk(node)
        return self._rows_of(node.operands[0]) if node.op in PARTS else node

    def _over_layers(self) -> dict[int, float]:
        """The sums over layers, and the ratios of the numbers of their terms."""
        found: dict[int, float] = {}
        for terms in self._large.totals.all:
            ratio = max((self._depth.of(b) for b in terms), default=1.0)
            found |= {b.add.id: ratio for b in terms if ratio != 1}
            ends = {b.end for b in terms if self._depth.of(b) != 1}
            trunks = {x.id: self._large.factors.trunk(x)[0].id for x in ends}
            # Those of products of activations are counted where they are summed.
            known = self._large.sums.totals
            self.terms |= {x for x, inner in trunks.items() if inner not in known}
        return found

    def _repeated(self) -> set[int]:
        """Sums of more values than in the base, e.g. of layers or of members."""
        totals, repeated = self._large.sums.totals, set[int]()
        trunk = self._large.factors.trunk

        def terms(node: Node) -> list[Node]:
            known = node.op not in ("add", "sub") or node.id in totals
            return [] if known else [trunk(x)[0] for x in node.operands]

        for node in self._program.nodes:
            of_layers = node.op == "carry" and not self._program.is_over_data(node.loop)
            if of_layers and self._is_longer(node):
                added = reach([trunk(node.operands[1])[0]], terms)
                repeated |= {x.id for x in added if node in reach(terms(x), terms)}
            twin = self._twin.get(node.id)
            for inner in terms(node):
                if inner.op == node.op and self._repeats(inner):
                    same = twin is not None and twin is self._twin.get(inner.id)
                    repeated |= {inner.id, node.id} if same else set()
        return repeated

    def _in_totals(self) -> dict[int, float]:
        """In how many times as many layers terms like one add up, by its id."""
        small, large = (m.sums for m in (self._pair.small, self._pair.large))
        then, now = (Counter[Hashable](), Counter[Hashable]())
        for most, sums in ((then, small), (now, large)):
            for total in sums.totals.values():
                most |= total
        nodes = self._program.nodes
        spots = {i: nodes[i].spot for i in large.terms}
        return {i: now[x] / then[x] for i, x in spots.items() if now[x] and then[x]}

    def _is_longer(self, carry: Node) -> bool:
        """Whether a loop is longer in the target."""
        twin, loops = self._twin.get(carry.id), self._program.loops
        before = self._pair.small.reading.program.loops
        return twin is None or loops[carry.loop][0] != before[twin.loop][0]

    def _repeats(self, node: Node) -> bool:
        """Whether the target has more values like one, of layers or of members."""
        twin = self._twin.get(node.id)
        return twin is None or twin.runs != node.runs or self._number[twin.id] > 1

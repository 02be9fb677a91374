"""Sums of products of activations that layers add up, e.g. attention logits.

Such a total is no residual stream, but it grows with the number of layers.
"""

from collections import Counter
from collections.abc import Hashable

from .axes import Axes
from .branches import Branches
from .program import CONVOLUTION, Node, Program, origin


class Sums:
    """The sums of products of activations in a program, and what they add up to.

    Attributes:
      terms: the ids of the sums.
      totals: what is added up from such sums alone, by its id, e.g. from the attention
        logits of a layer and of those before: the number of terms from each place.
    """

    def __init__(self, program: Program, axes: Axes, branches: Branches):
        self._program, self._axes, self._branches = program, axes, branches
        self.terms = {x.id for x in program.nodes if self._is_sum(x)}
        self.totals: dict[int, Counter[Hashable]] = {
            i: Counter([program.nodes[i].spot]) for i in self.terms
        }
        for node in program.nodes:
            if node.op in ("add", "sub", "select_n"):
                terms = self._added(node)
                if terms and None not in terms:
                    self.totals[node.id] = Counter()
                    for x in filter(None, terms):
                        self.totals[node.id] += x

    def _added(self, node: Node) -> list[Counter[Hashable] | None]:
        """The sums that each operand is added up from; None for other values."""
        found, runs = [], 1
        for x in node.operands[node.op == "select_n" :]:
            inner, factor = self._branches.factors.trunk(x)
            before = self.totals.get(inner.id)
            again = inner.operands[1] if inner.op == "carry" else inner
            end, share = self._branches.factors.trunk(again)
            if again is not inner and end is node:
                length, _, is_time = self._program.loops[inner.loop]
                runs = 1 if is_time or factor * share != 1 else length
                start = self._trunk(inner.operands[0])
                before = self.totals.get(start.id, None if start.data else Counter())
            elif before and factor != 1 and inner.op == "add":
                before = Counter()  # a running mean
            if x.data:
                found.append(before)
        if node.op == "select_n":
            return found[:1] if None not in found else found
        return [x and Counter({at: n * runs for at, n in x.items()}) for x in found]

    def _is_sum(self, node: Node) -> bool:
        """Whether a node sums products of two activations; losses may add up."""
        if node.backward or not node.shape or node.id in self._axes.kernel_sums:
            return False
        sides = node.operands
        if node.op == "reduce_sum":
            inner = self._trunk(node.operands[0])
            if inner.op != "mul":
                return False
            sides = inner.operands
        elif node.op not in ("dot_general", CONVOLUTION):
            return False
        return all(x.data for x in sides) and not any(map(self._averages, sides))

    def _trunk(self, node: Node) -> Node:
        return self._branches.factors.trunk(node)[0]

    def _averages(self, node: Node) -> bool:
        """Whether a factor is made of weights that sum to one, as of a softmax."""
        node = self._trunk(node)
        if node.op == "div":
            value, total = node.operands[0], origin(node.operands[1])
            if total.op == "reduce_sum":
                return self._trunk(total.operands[0]) is self._trunk(value)
            return self._averages(value)
        inner = [x for x in node.operands if x.data]
        return node.op == "mul" and any(map(self._averages, inner))

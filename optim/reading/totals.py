"""Sums of many terms that do not read the sum, such as WaveNet's skip connections."""

import dataclasses
from collections.abc import Iterator

from .axes import Axes
from .branches import Branch, Branches
from .factors import End, Failure
from .links import SUM
from .program import MOVES, Node, Program, is_scaled, reach


@dataclasses.dataclass(frozen=True)
class _Term:
    """One operand of a sum: the operation that adds it, and the number of times."""

    add: Node
    node: Node
    runs: int


class Totals:
    """Finds the sums of a program, other than residual streams.

    Additions in a row, the carry of a loop that each iteration adds to, and sums over
    a loop's results are read alike. Scalars (losses) are not read.

    Attributes:
      every: the terms of each sum. As a `Branch`, a term has the constant that
        multiplies it times that of the sum, and holds the nodes that act through it
        alone.
      all: those of sums that a layer reads, or that end in parameters; others are
        losses of examples, for instance.
    """

    def __init__(self, program: Program, axes: Axes, branches: Branches):
        self._program, self._axes, self._branches = program, axes, branches
        self._streams = {b.add.id for b in (*branches.all, *branches.around)}
        self._of_streams = self._streams | {b.trunk.id for b in branches.all}
        self._carries: dict[int, list[Node]] = {}  # by their next value
        for node in program.nodes:
            if node.op == "carry":
                self._carries.setdefault(node.operands[1].id, []).append(node)
        self._seen: set[int] = set()
        self.every: list[list[Branch]] = []
        self.all: list[list[Branch]] = []
        for node in reversed(program.nodes):
            if node.id not in self._seen and self._is_sum(node):
                terms = [t for t in self._terms(node, 1) if t.node.op != "carry"]
                made = [b for b in (self._made(t, node) for t in terms) if b]
                self.every.append(made)
                known = branches.goes_on(node)
                self.all.append([b for b in made if known or b.failure is None])

    def _is_sum(self, node: Node) -> bool:
        if not node.data or not node.shape or node.backward:
            return False
        if node.op == "add" and node.id not in self._streams:
            both = all(x.data for x in node.operands)
            return both or self._plus_bias(node) is not None
        if node.op == "last":
            return self._is_sum(node.operands[0])
        return self._stack(node) is not None

    def _plus_bias(self, node: Node) -> Node | None:
        """The sum to which no data are added, but zero or a bias."""
        for x, y in (node.operands, node.operands[::-1]):
            if x.data and y.value == 0:
                return x
            if x.data and y.weight and x.op == "add" and self._is_sum(x):
                return x
        return None

    def _stack(self, node: Node) -> Node | None:
        """The results of a loop that a sum adds up."""
        if node.op != "reduce_sum":
            return None
        stacked = node.operands[0]
        over_steps = stacked.op == "scan_out" and 0 in node.params["axes"]
        return stacked if over_steps else None

    def _terms(self, root: Node, runs: int) -> Iterator[_Term]:
        """The terms of a sum."""
        todo = [(root, runs)]
        while todo:
            node, runs = todo.pop()
            if node.id in self._seen:
                continue
            self._seen.add(node.id)
            if node.op == "last":
                yield from self._looped(node, runs)
                continue
            if (stacked := self._stack(node)) is not None:
                runs *= stacked.operands[0].runs // stacked.runs
                node = stacked
            for operand in node.operands:
                if self._is_sum(operand):
                    todo.append((operand, runs))
                elif operand.data or operand.weight:
                    yield _Term(node, operand, runs)

    def _looped(self, last: Node, runs: int) -> Iterator[_Term]:
        """The terms that the iterations of a loop add to its carry."""
        end = last.operands[0]
        terms = [*self._terms(end, 1)]
        carries = {c.id: c for c in self._carries.get(end.id, [])}
        starts = [t for t in terms if t.node.id in carries]
        many = self._program.loops[starts[0].node.loop][0] if starts else 1
        for term in terms:
            if term not in starts:
                yield dataclasses.replace(term, runs=term.runs * runs * many)

    def _made(self, term: _Term, root: Node) -> Branch | None:
        parts = ("mul", "div", "reduce_sum", *MOVES)
        inner = reach([term.node], lambda x: x.operands if x.op in parts else ())
        if any(x.backward for x in inner):
            return None  # the gradient of a branch has the branch's multiplier
        value = self._branches.factors.unweighted(term.node)
        if value.id in self._of_streams and term.node.op == "mul":
            return None
        end, failure = term.node, None
        ends: tuple[End, ...] = ()
        try:
            ends = tuple(self._branches.factors.ends(end))
        except Failure as reason:
            failure = reason.node
        inside = self._branches.only_for(end)
        inside |= {term.add.id} if end.weight else set()
        _, constant = self._branches.factors.trunk(end)
        constant *= self._outer(root)
        layers = self._branches.layers(inside)
        return Branch(
            term.add, end, end, inside, term.runs, ends, failure, constant, layers
        )

    def _outer(self, node: Node) -> float:
        """The constant by which a sum is multiplied next."""
        factor, linear = 1.0, (*MOVES, "last", "scan_out", SUM)
        while len(users := self._axes.uses(node)) == 1:
            (user,) = users
            if is_scaled(user):
                factor *= user.operands[1].value or 1.0
            elif user.op not in linear:
                break
            node = user
        return factor

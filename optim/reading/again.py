"""What layers add to a stream again: values that earlier layers added before.

With v = b v + f(x) and x = x + v, each f(x) is added again in all later layers, times a
power of b. So a layer adds f(x) to v, and x + v is no branch. For b < 1 the powers add
up to a fixed number. For b = 1 the sum of M values of v grows with M, at any size of v.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from .factors import Factors
from .program import Node, Program, reach


@dataclasses.dataclass(frozen=True)
class Again:
    """What is added to a stream again.

    Attributes:
      new: the addition of what is new to what is not, and what is new; None if nothing
        is.
      again: the additions of what is not new, and what that is.
      constant: on what is the same as what the layer before added; 0 if nothing is.
    """

    new: tuple[Node, Node] | None
    again: frozenset[tuple[int, int]]
    constant: float = 0.0


class Earlier:
    """What was added to streams before.

    Args:
      inside: of each addition, what is added, and ids of what is computed for it.
      trunks: the stream that it is added to.
    """

    def __init__(
        self,
        program: Program,
        factors: Factors,
        inside: Mapping[int, tuple[Node, frozenset[int]]],
        trunks: Mapping[int, Node],
    ):
        self._factors, self._trunks = factors, trunks
        self._roots: dict[int, Node] = {}
        # By stream and value: of what iteration it is, where it is added first, and
        # whether alone.
        self._first: dict[tuple[int, int], tuple[tuple[float, int], bool]] = {}
        carried = (x.operands[1] for x in program.nodes if x.op == "carry")
        streams = {factors.trunk(x)[0].id for x in (*trunks.values(), *carried)}
        for at, (end, own) in sorted(inside.items()):
            root = self._root(program.nodes[at])
            before = root.operands if root.op == "add" else []
            added = [(at, end)] if at in streams else []
            for by, x in (*((root.id, x) for x in before), *added):
                value, _, age = self.taken(x, program.nodes[at].loop)
                self._first.setdefault((root.id, value.id), ((age, by), True))
                for y in self._terms(value, program.nodes[at].loop):
                    if y.id in own:
                        self._first.setdefault((root.id, y.id), ((age, by), False))

    def taken(self, node: Node, loop: int) -> tuple[Node, float, int]:
        """A value before constants, moves and look-ups, and the constant.

        A loop's carry is what the iteration before computed; the last counts these.
        """
        factor, seen = 1.0, set[int]()
        while True:
            node, more = self._factors.trunk(node)
            factor *= more
            if node.op == "gather":
                node = node.operands[0]
            elif node.op == "carry" and node.loop == loop and node.id not in seen:
                seen.add(node.id)
                node = node.operands[1]
            else:
                return node, factor, len(seen)

    def _terms(self, node: Node, loop: int) -> Iterator[Node]:
        """The values that a sum adds up, without those of a stream."""
        ends = set(self._trunks)

        def terms(at: Node) -> Iterator[Node]:
            is_sum = at.op in ("add", "sub") and (at is node or at.id not in ends)
            for x in at.operands if is_sum else ():
                value, _, age = self.taken(x, loop)
                ends.update([value.id] if age else [])
                yield value

        return reach([node], terms)

    def _root(self, node: Node) -> Node:
        """The first value of a stream."""
        passed: list[int] = []
        while node.id not in self._roots:
            node, _ = self._factors.trunk(node)
            passed.append(node.id)
            if node.id not in self._trunks and node.op != "carry":
                break
            node = self._trunks.get(node.id) or node.operands[0]
        root = self._roots.get(node.id, node)
        self._roots |= dict.fromkeys(passed, root)
        return root

    def read(self, add: Node, end: Node) -> Again | None:
        """What is not new in what is added to a stream; None if all is new."""
        root = self._root(add).id
        again: dict[tuple[int, int], float] = {}

        def is_again(by: Node, node: Node, outer: float, age: int) -> bool:
            inner, factor = self._factors.trunk(node)
            factor *= -outer if by.op == "sub" and node is by.operands[1] else outer
            gain = self._factors.with_weight(inner)
            if gain is not None and inner.op == "mul":  # unless it is below one
                factor *= 0.0 if gain.op == "logistic" else math.inf
                inner = next(x for x in inner.operands if x.data)
            value, constant, more = self.taken(inner, add.loop)
            first, alone = self._first.get((root, value.id), ((math.inf, 0), False))
            if known := first < (age + more, add.id):
                again[by.id, node.id] = constant * factor if alone else 0.0
            return known

        if is_again(add, end, 1.0, 0):
            return Again(None, frozenset(again))
        at, new, outer, age = add, end, 1.0, 0
        while True:
            by, factor, more = self.taken(new, add.loop)
            outer, age = outer * factor, age + more
            sides = [*zip(by.operands, by.operands[::-1], strict=True)]
            sides = sides if by.op in ("add", "sub") else []
            others = (
                y for x, y in sides if x.value == 0 or is_again(by, x, outer, age)
            )
            other = next(others, None)
            if other is None:
                break
            at, new = by, other
        return (
            Again((at, new), frozenset(again), max(again.values())) if again else None
        )

"""Sums of products of two activations over an axis that grows.

Factors with correlated entries of size one give a sum that grows with their number n,
so that it needs a factor of 1/n: attention logits, the dot product of two towers. (A
sum over a kernel and activations needs none: the kernel's size shrinks.)
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any

from .axes import Axes, is_identity
from .branches import Branches
from .degrees import constant_that_matters
from .links import index_of
from .program import (
    CONVOLUTION,
    MOVES,
    PRODUCTS,
    Node,
    Program,
    is_scaled,
    origin,
    reach,
)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum of products of activations, at one size of the model.

    Attributes:
      node: the operation that sums.
      sides: the two factors, twice the same for squares; one for a sum of values.
      size: the number of entries that are summed.
    """

    node: Node
    sides: tuple[Node, ...]
    size: int


class Sums:
    """The sums of products of activations in a program.

    Attributes:
      all: the sums, in the order of the program.
      totals: what is added up from such sums alone, by its id, e.g. from the attention
        logits of a layer and of those before: the number of terms from each place.
    """

    def __init__(self, program: Program, axes: Axes, branches: Branches):
        self._axes, self._branches = axes, branches
        self._outputs = {x.id for x in program.outputs.values()}
        self._normalized = set(self._quotients(program))
        found = [self._sum(node) for node in program.nodes]
        self.all = [x for x in found if x is not None]
        self.totals: dict[int, Counter[Any]] = {
            x.node.id: Counter([x.node.spot])
            for x in self.all
            if len(x.sides) == 2 and x.node.shape  # losses may add up
        }
        for node in program.nodes:
            if node.op in ("add", "sub", "select_n"):
                terms = self._terms(program, node)
                if terms and None not in terms:
                    self.totals[node.id] = Counter()
                    for x in filter(None, terms):
                        self.totals[node.id] += x

    def _terms(self, program: Program, node: Node) -> list[Counter[Any] | None]:
        """The sums that each operand is added up from; None for other values."""
        found, runs = [], 1
        for x in node.operands[node.op == "select_n" :]:
            inner, factor = self._branches.factors.trunk(x)
            before = self.totals.get(inner.id)
            if inner.op == "carry" and self._trunk(inner.operands[1]) is node:
                length, _, is_time = program.loops[inner.loop]
                runs = 1 if is_time or factor != 1 else length
                start = self._trunk(inner.operands[0])
                before = self.totals.get(start.id, None if start.data else Counter())
            elif before and factor != 1 and inner.op == "add":
                before = Counter()  # a running mean
            if x.data:
                found.append(before)
        if node.op == "select_n":
            return found[:1] if None not in found else found
        return [x and Counter({at: n * runs for at, n in x.items()}) for x in found]

    def constant(self, of: Sum) -> float | None:
        """The constant that multiplies the sum; None if its scale has no effect."""
        result = self._matters(of.node)
        if any(self._matters(x) is None for x in (self._total(of.node), *of.sides)):
            return None
        return result

    def queries_first(self, of: Sum) -> tuple[Node, ...]:
        """The factors; that whose entries a softmax sums over last, i.e. the keys."""
        if of.node.op != "dot_general":
            return of.sides
        contracted, _ = of.node.params["dimension_numbers"]
        keys = len(of.node.operands[0].shape) - len(contracted[0])  # first of the 2nd's
        reached = [(of.node, axis, axis) for axis in range(len(of.node.shape))]
        seen: set[tuple[int, int]] = set()
        while reached:
            node, axis, own = reached.pop()
            if (node.id, axis) in seen:
                continue
            seen.add((node.id, axis))
            for user in self._axes.uses(node):
                if user.op == "reduce_max" and axis in user.params["axes"]:
                    return of.sides if own >= keys else of.sides[::-1]
                index = index_of(user, user.operands.index(node), axis)
                if user.op not in PRODUCTS and index and index.out is not None:
                    reached.append((user, index.out, own))
        return of.sides

    def later(self, of: Sum, node: Node) -> float:
        """The constants of a sum that stand after a value which is computed from it."""
        whole = self._matters(of.node)
        before = constant_that_matters(
            [of.node], self._axes.uses, {*self._outputs, node.id}, self._is_layer
        )
        return whole / before if whole and before else 1.0

    def _total(self, node: Node) -> Node:
        """The sum of a term and others, e.g. the distance of which it is one square."""
        while len(users := self._axes.uses(node)) == 1:
            user = users[0]
            if user.op not in ("add", "sub", "neg", *MOVES) and not is_scaled(user):
                break
            node = user
        return node

    def is_scale_free(
        self, *nodes: Node, stops: Set[tuple[int, int]] = frozenset()
    ) -> bool:
        """Whether multiplying values by a constant changes no result.

        Apart from what they change through (operation, operand) pairs of ids.
        """

        def uses(node: Node) -> list[Node]:
            every = self._axes.uses(node)
            return [x for x in every if (x.id, node.id) not in stops]

        matters = constant_that_matters(nodes, uses, self._outputs, self._is_layer)
        return matters is None

    def _norms(self, by: Node) -> Iterator[Node]:
        """The sums of which, or of whose roots, a divisor is a product."""
        for factor in reach([by], _factors):
            total, _ = self._branches.factors.normalizer(factor)
            if total is not None:
                yield total

    def only_chooses(self, node: Node) -> bool:
        """Whether a value decides which entry is the largest or least, no more."""

        def users(at: Node) -> list[Node]:
            return [] if at.op in ("argmax", "argmin") else self._axes.uses(at)

        return not any(at.id in self._outputs for at in reach([node], users))

    def _matters(self, *nodes: Node) -> float | None:
        return constant_that_matters(
            nodes, self._axes.uses, self._outputs, self._is_layer
        )

    def _is_layer(self, node: Node) -> bool:
        """Whether a node multiplies by a parameter of which a width grows."""
        return node.op in ("mul", *PRODUCTS) and any(
            axes & self._axes.growing
            for x in node.operands
            if x.weight
            for axes in self._axes.labels.get(x.id, ())
        )

    def _sum(self, node: Node) -> Sum | None:
        if node.backward or node.id in self._axes.kernel_sums:
            return None
        if node.op == "dot_general" and all(x.data for x in node.operands):
            axes = node.params["dimension_numbers"][0]
            if any(map(self._averages, node.operands)):
                return None
            size = math.prod(node.operands[0].shape[a] for a in axes[0])
            inner = [self._without_identity(x) for x in node.operands]
            added = [x for x, y in zip(inner, node.operands, strict=True) if x is not y]
            return Sum(node, tuple(added or inner), size)  # s + s A is as large as s
        if node.op == CONVOLUTION and all(x.data for x in node.operands):
            _, into, *window = node.params["dimension_numbers"].rhs_spec
            sizes = node.operands[1].shape
            number = math.prod(sizes[a] for a in (into, *window))
            return Sum(node, tuple(node.operands), number)
        if node.op == "reduce_sum" and node.operands[0].data:
            return self._reduced(node, node.params["axes"])
        return None

    def _without_identity(self, node: Node) -> Node:
        """The part of a factor that is summed: A of A + 1, whose 1 sums one term."""
        inner = self._trunk(node)
        if inner.op in ("add", "sub") and any(map(is_identity, inner.operands)):
            return next((x for x in inner.operands if x.data), node)
        return node

    def _reduced(self, node: Node, axes: Sequence[int]) -> Sum | None:
        if node.operands[0].op == "scan_out" and tuple(axes) == (0,):
            return None  # over layers (see `Totals`) or steps
        inner = self._trunk(node.operands[0])
        size = math.prod(node.operands[0].shape[a] for a in axes)
        if inner.op in ("mul", "select_n") and any(map(is_identity, inner.operands)):
            if len(axes) == 1:
                return None  # the entries of a diagonal
            size //= inner.shape[-1]
        parts = inner.operands if inner.op == "concatenate" else [inner]
        squares = [x.operands[0] for x in map(self._trunk, parts) if _is_square(x)]
        if len(squares) == len(parts) and all(
            (node, self._trunk(x)) in self._normalized for x in squares
        ):
            return None
        sides: tuple[Node, ...]

        def is_one(factor: Node) -> bool:
            """Whether it is the same for all terms, e.g. what a norm divides by."""
            whole = inner.shape == node.operands[0].shape and factor.shape
            return bool(whole) and all(factor.shape[a] == 1 for a in axes)

        if _is_square(inner):
            sides = (inner.operands[0],) * 2
        elif (
            inner.op == "mul"
            and all(x.data for x in inner.operands)
            and not any(map(is_one, inner.operands))
        ):
            sides = tuple(inner.operands)
        else:
            sides = (node.operands[0],)
        if any(map(self._averages, sides)):
            return None
        if len(set(sides)) == 1:
            inner = self._trunk(sides[0])
            if (node, inner) in self._normalized or self._is_kernel(inner, axes):
                return None
        return Sum(node, sides, size)

    def _is_kernel(self, node: Node, axes: Sequence[int]) -> bool:
        """Whether values are entries of a kernel that data multiplies, by its fan-in.

        Their squares sum to one, as in the demodulation of a convolution.
        """
        for x in node.operands if node.op == "mul" else ():
            labels = self._axes.labels.get(x.id, ()) if x.weight else ()
            grows = {a for a, of in enumerate(labels) if of & self._axes.growing}
            if len(grows) > 1 and len(grows & {*axes}) == 1:
                return True
        return False

    def _quotients(self, program: Program) -> Iterator[tuple[Node, Node]]:
        """Each sum that something is divided by, as in a norm, with what it divides."""
        for node in program.nodes:
            if node.op in ("mul", "div") and all(x.data for x in node.operands):
                for by, of in (node.operands, node.operands[::-1]):
                    total, _ = self._branches.factors.normalizer(by, means=True)
                    if total is not None:
                        yield total, self._trunk(of)
                of, by = node.operands
                for factor in self._trunk(of).operands if node.op == "div" else ():
                    for total in self._norms(by):  # as in a cosine
                        yield total, self._trunk(factor)
                yield from self._ratio(node)

    def _ratio(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """Sums of squares above and below in a quotient, whose growth cancels."""
        found: dict[tuple[int, bool], dict[bool, Node]] = {}
        for factor, is_above in self._product(node, True):
            total, rooted = self._branches.factors.normalizer(factor, means=True)
            inner = total and self._trunk(total.operands[0])
            if total and inner and _is_square(inner):
                axes, shape = total.params["axes"], total.operands[0].shape
                key = math.prod(shape[a] for a in axes), rooted
                found.setdefault(key, {})[is_above] = total
        for pair in found.values():
            for total in pair.values() if len(pair) == 2 else ():
                yield total, self._trunk(self._trunk(total.operands[0]).operands[0])

    def _product(self, node: Node, is_above: bool) -> Iterator[tuple[Node, bool]]:
        """The factors of a product or quotient, and whether they are above."""
        node = self._trunk(node)
        if node.op in ("mul", "div") and all(x.data for x in node.operands):
            for x, above in zip(node.operands, (True, node.op == "mul"), strict=True):
                yield from self._product(x, above is is_above)
        elif node.op == "rsqrt":
            yield node, not is_above
        else:
            yield node, is_above

    def _trunk(self, node: Node) -> Node:
        return self._branches.factors.trunk(node)[0]

    def _averages(self, node: Node) -> bool:
        """Whether a factor is a choice, or weights that sum to one, as of a softmax."""
        for _ in range(24):
            scattered = node.op == "scatter" and node.operands[0].value == 0
            if node.id in self._axes.hot or scattered:
                return True
            if node.op == "div":
                total, rooted = self._branches.factors.normalizer(node.operands[1])
                if total is not None and not rooted:
                    return self._trunk(total.operands[0]) is self._trunk(
                        node.operands[0]
                    )
                node = node.operands[0]
            elif node.op in MOVES:
                node = node.operands[0]
            elif node.op == "select_n" and node.operands[1].value == 0:
                node = node.operands[2]
            elif node.op == "reduce_sum" and node.operands[0].op == "mul":
                # Of those that are chosen, each with its gate.
                return any(
                    origin(x).id in self._axes.hot for x in node.operands[0].operands
                )
            elif node.op == "mul":
                inner = [x for x in node.operands if x.data]
                if len(inner) != 1:
                    return any(map(self._averages, inner))
                node = inner[0]
            else:
                return False
        return False


def _is_square(node: Node) -> bool:
    power = node.op == "integer_pow" and node.params["y"] == 2
    return power or (node.op == "mul" and node.operands[0] is node.operands[1])


def _factors(node: Node) -> list[Node]:
    """The factors of a product of data, to which a small number may be added."""
    known = node.op in ("mul", "add", "max", *MOVES)
    return [x for x in node.operands if x.data] if known else []

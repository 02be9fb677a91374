"""Kernels that are stored apart and act side by side, e.g. one for each head.

Where their results are joined, or summed, they are one kernel, whose fan-out, or
fan-in, grows with their number. Layers are no such kernels: each reads the one before.
"""

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .axes import Axes
from .branches import Branch, Branches
from .kinds import alike
from .links import index_of, is_kernel
from .models import Reading
from .program import MOVES, PRODUCTS, Node, earlier
from .totals import Totals

Names = Callable[[str], str]


@dataclasses.dataclass
class Join:
    """Values that are computed side by side and then joined or summed.

    Attributes:
      terms: the number of values.
      number: of those that have a parameter of this name of their own, by name.
      paths: these parameters.
      ends: the kernels that are summed over; None for a sum with gates.
      biases: the vectors that are summed.
      constant: on a term of the sum.
    """

    terms: int
    number: Counter[str]
    paths: set[str]
    ends: set[str] | None
    biases: set[str] = dataclasses.field(default_factory=set)
    constant: float = 1.0


class Parallel:
    """The joins of a program.

    Args:
      reading, axes, branches, totals: of a model.
      named: gives a parameter's name, which others of its list share.
      names: the names of which another model has another number.

    Attributes:
      joins: by what they have in common with those of another model.
      adds: ids of the additions of sums.
    """

    def __init__(
        self,
        reading: Reading,
        axes: Axes,
        branches: Branches,
        totals: Totals,
        named: Names,
        names: frozenset[str],
    ):
        self._axes, self._branches, self._named = axes, branches, named
        self._path_of = reading.path_of
        self.joins: dict[Any, Join] = {}
        self.adds: set[int] = set()
        if not names:
            return
        # The parameters before a node, as bits; of a stack, each that is taken from it.
        self._masks: dict[int, int] = {}
        stacked = {param for param, _ in axes.sliced}
        self._owners: list[str] = []
        for node in reading.program.nodes:
            mask, stored = 0, node
            while stored.op in ("slice", *MOVES):
                (stored,) = stored.operands
            taken = node.op == "slice" and stored.param in stacked
            if taken or (node.param is not None and node.param not in stacked):
                path = self._path_of[(stored if taken else node).param or 0]
                if named(path) in names:
                    mask = 1 << len(self._owners)
                    self._owners.append(path)
            for operand in earlier(node):
                mask |= self._masks.get(operand.id, 0)
            self._masks[node.id] = mask
        for node in reading.program.nodes:
            if node.op == "concatenate":
                self._add_joined(node, node.params["dimension"])
        for terms in totals.every:
            if terms:
                self._add_sum(terms)

    def _add_sum(self, terms: Sequence[Branch]) -> None:
        own, number = self._own([x.end for x in terms]), sum(x.runs for x in terms)
        ends: set[str] | None = set()
        for term in terms:
            is_mean = term.failure is not None and term.constant * number
            value = self._branches.factors.unweighted(term.end)
            if self._is_gated(value, own) or (is_mean and not alike(is_mean, 1)):
                ends = None
            elif ends is not None:
                ends |= {self._path_of[e.param] for e in term.ends if e.is_kernel}
        found = self._add(terms[0].add, [x.end for x in terms], ends)
        if found is not None:
            found.constant = terms[0].constant
            every = [e for x in terms for e in x.ends]
            found.biases |= {self._path_of[e.param] for e in every if not e.is_kernel}
            self.adds |= {x.add.id for x in terms}

    def _is_gated(self, node: Node, own: Sequence[int]) -> bool:
        """Whether a value of one of several kernels is multiplied by one of neither.

        Or chosen by a number: where(i == number, f(x), 0).
        """
        chosen = node.op == "select_n" and node.operands[0].id in self._axes.hot
        return chosen or (
            node.op in ("mul", "div")
            and all(x.data for x in node.operands)
            and not all(
                self._masks[x.id] & functools.reduce(operator.or_, own, 0)
                for x in node.operands
            )
        )

    def _own(self, values: Sequence[Node]) -> list[int]:
        """The parameters, as bits, that each value has, and not all."""
        masks = [self._masks[x.id] for x in values if x.data or x.weight]
        shared = functools.reduce(operator.and_, masks, masks[0] if masks else 0)
        return [mask & ~shared for mask in masks]

    def _add(
        self, node: Node, values: Sequence[Node], ends: set[str] | None
    ) -> Join | None:
        own, whole = self._own(values), 0
        for mask in own:
            if mask & whole:
                return None  # one of them reads another
            whole |= mask
        if not whole:
            return None  # a loop takes each from a stack
        paths = [{self._owners[i] for i in _bits(mask)} for mask in own]
        number = Counter(name for x in paths for name in {*map(self._named, x)})
        key = node.op, node.spot
        like = self.joins.get(key, Join(0, Counter(), set(), ends))
        ends = None if ends is None or like.ends is None else ends | like.ends
        terms = max(len(values), like.terms)
        found = Join(terms, number | like.number, like.paths.union(*paths), ends)
        self.joins[key] = found
        return found

    def _add_joined(self, joined: Node, axis: int) -> None:
        """Add values that are joined if a kernel, or a mean or gates, sum over them."""
        own = self._own(joined.operands)
        reached, seen = [(joined, axis, False)], set()
        while reached:
            node, axis, gated = reached.pop()
            if (node.id, axis) in seen:
                continue
            seen.add((node.id, axis))
            for user in self._axes.uses(node):
                index = index_of(user, user.operands.index(node), axis)
                if index is not None and index.out is not None:
                    more = gated or self._is_gated(user, own)
                    reached.append((user, index.out, more))
                elif index is not None and is_kernel(user):
                    own = self._own(joined.operands) if node.weight else []
                    self._add(
                        joined,
                        joined.operands,
                        {self._owners[i] for x in own for i in _bits(x)},
                    )
                    return
                elif user.op in ("reduce_sum", *PRODUCTS):
                    is_mean = not gated and self._axes.is_mean(user)
                    self._add(joined, joined.operands, set() if is_mean else None)
                    return


def numbers(small: Parallel, large: Parallel) -> dict[str, tuple[float, float]]:
    """How the number of kernels beside each other grows within fan-in and fan-out.

    Returns:
      {path in the large model: (growth of fan-in, growth of fan-out)}; (1, 1) for terms
      of a sum with gates, as of experts. For a bias, that of the sum of all.
    """
    found: dict[str, tuple[float, float]] = {}
    for key, now in large.joins.items():
        then = small.joins.get(key, Join(0, Counter(), set(), now.ends))
        if now.terms == then.terms:
            continue  # of two values, one may read the layers before
        for path in now.paths:
            name = large._named(path)
            growth = now.number[name] / (then.number[name] or 1)
            if growth == 1:
                continue
            into, out = found.get(path, (1.0, 1.0))
            if now.ends is None:
                found[path] = into, out
            elif path in now.ends:
                found[path] = into * growth, out
            elif path in now.biases:
                share = now.constant / (then.constant or 1)
                found[path] = into * growth * share, out * growth
            else:
                found[path] = into, out * growth
    return found


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low

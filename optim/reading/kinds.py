"""Pair what corresponds to each other in base and target: things of one kind."""

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from .branches import Branch
from .program import Node

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_ALIKE = 0.01  # constants count as equal if their logarithms differ by less


@dataclasses.dataclass(frozen=True)
class Kind(Generic[T]):
    """What layers have in common, e.g. their additions to the stream on one line.

    Attributes:
      then: those of the base, in the order of its layers.
      now: those of the target.
    """

    then: list[T]
    now: list[T]

    @property
    def twins(self) -> list[tuple[T, T]]:
        """Each thing of the target, and the one of the base with its number."""
        return list(zip(self.now, itertools.cycle(self.then), strict=False))

    @property
    def numbers(self: "Kind[Branch]") -> tuple[int, int]:
        """How many values are added to the stream in the base, and in the target.

        One that is added to two streams counts once.
        """
        then, now = map(_number, (self.then, self.now))
        return then, now

    @property
    def growth(self: "Kind[Branch]") -> float:
        """The ratio of these numbers; infinite if the base has none."""
        then, now = self.numbers
        return now / then if then else math.inf

    def ratios(self, ratio: Callable[[T, T], float]) -> list[float]:
        """The ratio of a constant of each to that of its counterpart in the base.

        A constant may depend on the number of the layer, e.g. 1 / sqrt(1 + i). Then the
        layers with the same number are counterparts, and those beyond are like them.
        """
        each = [ratio(one, other) for one, other in self.twins]
        if not each:
            return []
        first = each[: len(self.then)]
        varies = any(not alike(ratio(self.now[0], x), first[0]) for x in self.then)
        if not varies or all(alike(*x) for x in zip(each, itertools.cycle(first))):
            return each
        if all(alike(x, first[0]) for x in first):
            return [first[0]] * len(each)
        # It depends on the share of layers, (i + 1) / depth or i / (depth - 1).
        last, start = ratio(self.now[-1], self.then[-1]), self.then[0]
        then, now = ([ratio(x, start) for x in of] for of in (self.then, self.now))
        if min(*then, *now) > 0 and alike(now[0], 1):  # or i / depth
            logs, others = (sorted(map(math.log, x)) for x in (then, now))
            apart = statistics.mean(others) - statistics.mean(logs)
            last = 1.0 if 2 * abs(apart) < logs[-1] - logs[0] else last
        return [last] * len(each)

    def check_known(self, ratios: list[float], node: Node) -> None:
        """Raise a `ValueError` if ratios to the only layer of the base differ."""
        if len(self.then) > 1 or all(
            x == ratios[0] or alike(x, ratios[0]) for x in ratios
        ):
            return
        at = f"at {node.line}" if node.line else f"of a {node.op!r}"
        raise ValueError(
            f"the constants {at} differ between the layers of the target, and the base "
            "has one such layer, so that it does not show which factor belongs to the "
            "width; build a base with at least two of these layers"
        )


def _number(branches: list[Branch]) -> int:
    """How many values branches add to a stream; those beside each other are one."""
    adds = {b.add.id: b for b in branches}

    def is_beside(b: Branch) -> bool:
        """Whether it reads what the branch added before it reads."""
        before = (adds[x.id] for x in b.add.operands if x.id in adds)
        return any(x.trunk is b.trunk and x.add.spot != b.add.spot for x in before)

    alone = {b.add.spot for b in branches if not is_beside(b)}
    number: Counter[tuple[int, Hashable]] = Counter()
    for b in branches:
        number[b.end.id, b.add.spot] += b.runs * (b.add.spot in alone)
    most: Counter[int] = Counter()
    for (end, _), times in number.items():
        most[end] = max(most[end], times)
    return most.total()


def kinds(
    small: Iterable[tuple[K, T]], large: Iterable[tuple[K, T]]
) -> dict[K, Kind[T]]:
    """Group things of base and target by their kinds.

    Args:
      small, large: the things of each, in the order of the program, with their kinds.

    Examples:
      >>> kinds([("a", 1)], [("a", 2), ("b", 5), ("a", 3)])["a"].twins
      [(2, 1), (3, 1)]
    """
    found: dict[K, Kind[T]] = {}
    for kind, thing in large:
        found.setdefault(kind, Kind([], [])).now.append(thing)
    for kind, thing in small:
        found.setdefault(kind, Kind([], [])).then.append(thing)
    return found


def alike(one: float, other: float) -> bool:
    """Whether two constants are equal, but for rounding."""
    return one > 0 and other > 0 and abs(math.log(one / other)) < _ALIKE

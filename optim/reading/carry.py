"""The multipliers that parameters carry, where the program has none."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from ..rules.roles import ParamScale
from .factors import End
from .pair import Pair
from .program import Node
from .sums import Sum


class Carry:
    """Lets parameters carry multipliers that the program does not have.

    Attributes:
      found: the scales of parameters, which change.
    """

    def __init__(self, pair: Pair, found: dict[str, ParamScale]):
        self._large, self.found = pair.large, found

    def multiply(self, path: str, factor: float, ends: Iterable[End] = ()) -> None:
        self.let_carry(path, ends, carried=self.found[path].carried * factor)

    def let_carry(self, path: str, ends: Iterable[End], **changes: Any) -> None:
        """Let a parameter carry a multiplier where it is used at one of some ends.

        With a number that is added to it.
        """
        scale = self.found[path]
        offsets = {e.offset for e in ends if self._large.path(e) == path}
        if scale.ends_branch or scale.carried != 1:
            offsets.add(scale.offset)
        if len(offsets) > 1:
            raise ValueError(
                f"{path!r} is used with several numbers added to it, so that it can "
                "carry no multiplier of a branch or of logits; multiply them yourself"
            )
        changes["offset"] = next(iter(offsets), 0.0)
        self.found[path] = dataclasses.replace(scale, **changes)

    def can_carry(self, paths: frozenset[str], sums: list[Sum]) -> bool:
        """Whether parameters can carry a factor of sums."""
        sides = [side for each in sums for side in each.sides]
        ends = {e.node.id for x in sides for e in self._large.side(x)[0]}
        own, powers = self._own(paths, sums)
        nodes = ends | {each.node.id for each in sums}
        stops = {(each.node.id, -1) for each in (*sums, *self._free)}
        others = [x for x in sides if x.id not in own]
        if not paths or len(powers) > 1:
            return False
        return not self._large.elsewhere(paths, nodes, stops, others)

    @functools.cached_property
    def _free(self) -> list[Sum]:
        """The sums whose scale has no effect."""
        sums = self._large.sums
        return [x for x in sums.all if sums.is_scale_free(x.node)]

    def carry_sums(self, paths: frozenset[str], factor: float, sums: list[Sum]) -> None:
        """Let parameters carry a factor of sums."""
        (power,) = self._own(paths, sums)[1]
        used = [end for s in sums for x in s.sides for end in self._large.side(x)[0]]
        for path in paths:
            self.multiply(path, factor ** (1 / power), used)

    def _own(self, paths: frozenset[str], sums: list[Sum]) -> tuple[set[int], set[int]]:
        """The factors of sums that parameters scale, and how many each sum has."""
        leads = self._large.reading.program.leads

        def is_result(x: Node) -> bool:
            """Whether a side is made from the result of a sum, and has its size."""
            first = min(e.node.id for e in self._large.side(x)[0])
            return any(first <= s.node.id and leads(s.node, x) for s in sums)

        own = {
            x.id
            for s in sums
            for x in s.sides
            if frozenset() < self._large.params(x) <= paths and not is_result(x)
        }
        return own, {sum(x.id in own for x in s.sides) for s in sums}

"""Numbers that are products of what is known and of what parameters carry."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .branches import Branch
from .kinds import alike
from .program import Node


@dataclass(frozen=True)
class Log:
    """The logarithm of a number.

    Attributes:
      known: what is known of it.
      constant: the part of this that constants of the program make.
      depth: the logarithm of the ratio of the numbers of layers that add it up.
      parts: its other terms: the power of what a parameter carries, by its path, and of
        numbers that are not known, by the ids of nodes. A negative one is of a number
        that is one, and says where it matters.
    """

    known: float = 0.0
    constant: float = 0.0
    depth: float = 0.0
    parts: Mapping[str | int, float] = field(default_factory=dict)

    def __add__(self, other: "Log") -> "Log":
        one, two = self.parts, other.parts
        powers = {k: one.get(k, 0.0) + two.get(k, 0.0) for k in {**one, **two}}
        return Log(
            self.known + other.known,
            self.constant + other.constant,
            self.depth + other.depth,
            {k: x for k, x in powers.items() if abs(x) > 1e-9},
        )

    def __mul__(self, power: float) -> "Log":
        parts = {k: x * power for k, x in self.parts.items()} if power else {}
        known, constant, depth = (
            x * power for x in (self.known, self.constant, self.depth)
        )
        return Log(known, constant, depth, parts)

    def __sub__(self, other: "Log") -> "Log":
        return self + other * -1

    @property
    def is_one(self) -> bool:
        """Whether the number is one, whatever parameters carry."""
        some = self.carried or self.depth or not self.is_known
        return not some and alike(math.exp(self.known), 1)

    @property
    def carried(self) -> dict[str, float]:
        """The powers of what parameters carry."""
        return {k: x for k, x in self.parts.items() if isinstance(k, str)}

    @property
    def is_known(self) -> bool:
        """Whether it is known, but for what parameters carry."""
        return all(isinstance(k, str) or k < 0 for k in self.parts)


ONE = Log()


class Rule(NamedTuple):
    """A number that must be one.

    Attributes:
      number: it.
      node: where it matters.
      whole: whether it must be one. Otherwise parameters must not change it.
      branch: the residual branch that is added here; the number is that of its end
        beside the stream.
      end: the number of its end; of a branch, beside its stream if layers enlarge that.
      of_widths: whether it does not matter what belongs to the depth.
    """

    number: Log
    node: Node
    whole: bool
    branch: Branch | None = None
    end: Log = ONE
    of_widths: bool = False

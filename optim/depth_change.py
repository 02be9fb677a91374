"""A base and a target of different depth, and how many layers each leaf stacks."""

import dataclasses
import math
from collections.abc import Collection, Mapping

from .reading.leaves import Leaf
from .reading.lists import Pairing

Depth = tuple[int, int]


def from_front(axes: Collection[int], rank: int) -> tuple[int, ...]:
    """The axes of an array of this rank, where -1 is the last.

    Axes that the array lacks are left out.

    Examples:
      >>> from_front((-1,), 3), from_front((0, 2), 2)
      ((2,), (0,))
    """
    counted = dict.fromkeys(a + rank if a < 0 else a for a in axes)
    return tuple(a for a in counted if 0 <= a < rank)


@dataclasses.dataclass(frozen=True)
class DepthChange:
    """A base, a target, and their depths: the input of `find_blocks`.

    Attributes:
      small: parameters of the base, by path.
      large: parameters of the target, by path.
      pairing: maps each parameter of the target to its counterpart in the base.
      depth: (number of blocks of the base, of the target).
      layers_axis: the axes that count blocks where blocks are stacked; -1 is the last.
      copies: for parameters whose axes the user gave, the axes that count copies.
    """

    small: Mapping[str, Leaf]
    large: Mapping[str, Leaf]
    pairing: Pairing
    depth: Depth
    layers_axis: tuple[int, ...]
    copies: Mapping[str, tuple[int, ...]]

    def sizes(self, path: str) -> list[Depth]:
        """For each axis of a parameter, its sizes in base and target."""
        twin = self.pairing.twin(path)
        small = self.small[twin].shape if twin else ()
        return list(zip(small, self.large[path].shape, strict=False))

    def layers(self, path: str) -> Depth | None:
        """Number of blocks that a parameter stacks in base and target.

        None if it has no counterpart in the base, or lacks the layers' axes.
        """
        twin = self.pairing.twin(path)
        axes = self.copies.get(path, self.layers_axis)
        if twin is None or not axes:
            return None
        small, large = self.small[twin].shape, self.large[path].shape
        counted = from_front(axes, len(large))
        if len(small) != len(large) or len(counted) < len(axes):
            return None
        axes = counted
        if path in self.copies:
            # Layers and experts are both copies; only one of these axes counts layers.
            for axis in axes:
                if (small[axis], large[axis]) == tuple(self.depth):
                    return self.depth
        return math.prod(small[a] for a in axes), math.prod(large[a] for a in axes)

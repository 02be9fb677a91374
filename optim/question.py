"""What is asked about the blocks of two models, and how many layers a leaf stacks."""

import dataclasses
import math
from collections.abc import Mapping

from .leaves import Leaf
from .lists import Pairing

Depth = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Question:
    """What `find_blocks` is asked, and of which models.

    Attributes:
      small: parameters of the base.
      large: parameters of the target.
      pairing: which parameter of the base is like which of the target.
      depth: number of blocks of each.
      layers_axis: the axes that count blocks where they are stacked.
      copies: axes that count copies, of the parameters whose axes the user gave.
    """

    small: Mapping[str, Leaf]
    large: Mapping[str, Leaf]
    pairing: Pairing
    depth: Depth
    layers_axis: tuple[int, ...]
    copies: Mapping[str, tuple[int, ...]]

    def sizes(self, path: str) -> list[Depth]:
        """The sizes of the axes of a parameter, in base and target."""
        twin = self.pairing.twin(path)
        small = self.small[twin].shape if twin else ()
        return list(zip(small, self.large[path].shape, strict=False))

    def layers(self, path: str) -> Depth | None:
        """How many blocks a parameter stacks, in base and target, if it may."""
        twin = self.pairing.twin(path)
        axes = self.copies.get(path, self.layers_axis)
        if twin is None or not axes:
            return None
        small, large = self.small[twin].shape, self.large[path].shape
        if len(small) != len(large) or max(axes) >= len(large):
            return None
        if path in self.copies:
            # Of layers and experts, whose axes are both copies, one counts layers.
            for axis in axes:
                if (small[axis], large[axis]) == tuple(self.depth):
                    return self.depth
        return math.prod(small[a] for a in axes), math.prod(large[a] for a in axes)

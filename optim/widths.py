"""Sizes that parameters share: a width that no other parameter has is suspicious.

What one layer makes another takes, so that each growing axis of a kernel has a size
that some axis elsewhere has too. An axis that only one parameter has may count tokens,
positions or classes, and a matrix of two such sizes may be no kernel at all.
"""

import math
from collections.abc import Mapping

from . import names
from .axes import Kernel, Pair, Split, ambiguous_matrix
from .paths import bias_of

_STATE_SPACE = {"A", "B", "C", "D", "B_re", "B_im", "C_re", "C_im"}


class Widths:
    """Which parameters have an axis of which size, in the base and a wider model."""

    def __init__(self, kernels: Mapping[str, Kernel]):
        self._owners: dict[Pair, set[str]] = {}
        self._state_spaces: set[str] = set()
        self._copies = {
            kernel.pair(axis)
            for kernel in kernels.values()
            for axis in filter(kernel.grows, kernel.declared)
        }
        for path, kernel in kernels.items():
            if names.state_space(path):
                self._state_spaces.add(path.rpartition("/")[0])
            name = names.open_numbers(path)
            for axis in filter(kernel.grows, kernel.axes):
                self._owners.setdefault(kernel.pair(axis), set()).add(name)
        self._ratios = {
            large / small for (small, large), at in self._owners.items() if len(at) > 1
        }

    def shared(self, pair: Pair, path: str) -> bool:
        """Whether a parameter other than this one and its bias has such an axis."""
        own = {names.open_numbers(path), names.open_numbers(bias_of(path))}
        return bool(self._owners.get(pair, set()) - own)

    def usual(self, pair: Pair) -> bool:
        """Whether widths that parameters share grow by this ratio."""
        small, large = pair
        return not self._ratios or any(
            math.isclose(large / small, ratio) for ratio in self._ratios
        )

    def growing(self, kernel: Kernel, split: Split) -> frozenset[int]:
        """The axes that grow with width: neither entries nor copies."""
        used = split.in_axes + split.out_axes
        if split.table:
            used = split.out_axes
        elif kernel.readout:
            # The outputs of a router are as many as there are experts.
            outs = (a for a in split.out_axes if kernel.pair(a) not in self._copies)
            used = (*split.in_axes, *outs)
        return frozenset(a for a in used if kernel.grows(a))

    def check(self, kernel: Kernel, split: Split) -> None:
        """Raise where a growing axis of a kernel may be no width.

        Raises:
          ValueError: the message names the parameter, the axis, and what to write.
        """
        grow = [a for a in (*split.in_axes, *split.out_axes) if kernel.grows(a)]
        if split.table or not split.in_axes or not grow:
            return
        self._check_state_space(kernel, split, grow)
        both = any(a in split.in_axes for a in grow) and any(
            a in split.out_axes for a in grow
        )
        if not both:
            return
        if not split.proven and (
            names.table(kernel.path) or names.is_vector(kernel.path)
        ):
            alone = [a for a in grow if not self.shared(kernel.pair(a), kernel.path)]
            raise ValueError(ambiguous_matrix(kernel, (alone or grow)[0]))
        if len(grow) > 2:
            return
        for axis in grow:
            pair = kernel.pair(axis)
            if pair in self._copies and axis in split.out_axes:
                if kernel.readout:
                    return
                raise ValueError(_as_copies(kernel, axis))
            if self.shared(pair, kernel.path):
                continue
            sure = split.proven or names.is_kernel(kernel.path)
            reads_out = axis in split.out_axes and names.readout(kernel.path)
            if not sure or reads_out or not self.usual(pair):
                raise ValueError(ambiguous_matrix(kernel, axis))

    def _check_state_space(self, kernel: Kernel, split: Split, grow: list[int]) -> None:
        """`B @ u` and `u @ B` differ where only the state or the input grows."""
        inside = kernel.path.rpartition("/")[0] in self._state_spaces
        if split.proven or not inside or names.array(kernel.path) not in _STATE_SPACE:
            return
        ins, outs = kernel.ratio(split.in_axes), kernel.ratio(split.out_axes)
        if not math.isclose(ins, outs):
            raise ValueError(ambiguous_matrix(kernel, grow[0]))


def _as_copies(kernel: Kernel, axis: int) -> str:
    before, after = kernel.pair(axis)
    path = names.pattern(kernel.path)
    return (
        f"axis {axis} of {kernel.path!r} grows from {before} to {after}, as the copies "
        f"of copies=... do: if it has an output for each copy, as a router has, pass "
        f"readout=r'{path}'; if that is its width, "
        f"axes={{r'{path}': ({kernel.axes[:-1]}, {kernel.axes[-1:]})}}"
    )

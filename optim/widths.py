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

    def __init__(self, kernels: Mapping[str, Kernel], splits: Mapping[str, Split]):
        self._owners: dict[Pair, set[str]] = {}
        self._copies: set[Pair] = set()
        self._decays: dict[str, list[tuple[int, ...]]] = {}
        for path, kernel in kernels.items():
            split = splits[path]
            if names.state_space(path):
                self._decays.setdefault(_holder(path), []).append(kernel.base)
            used = (*split.in_axes, *split.out_axes)
            for axis in filter(kernel.grows, range(len(kernel.base))):
                if axis not in used:
                    self._copies.add(kernel.pair(axis))
                elif not (split.table and axis in split.in_axes):
                    owners = self._owners.setdefault(kernel.pair(axis), set())
                    owners.add(names.open_lists(path))
        self._ratios = {
            large / small for (small, large), at in self._owners.items() if len(at) > 1
        }

    def shared(self, pair: Pair, path: str) -> bool:
        """Whether a parameter other than this one and its bias has such an axis."""
        own = {names.open_lists(path), names.open_lists(bias_of(path))}
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

    def check(self, kernel: Kernel, split: Split, *, fractional: bool = False) -> None:
        """Raise where a growing axis of a kernel may be no width.

        Args:
          kernel: the parameter.
          split: its axes.
          fractional: whether ratios that are not whole numbers are usual.

        Raises:
          ValueError: the message names the parameter, the axis, and what to write.
        """
        ins = [a for a in split.in_axes if kernel.grows(a) and not split.table]
        outs = [a for a in split.out_axes if kernel.grows(a)]
        if not split.in_axes or not (ins or outs):
            return
        self._check_state_space(kernel, split, ins + outs)
        self._check_copies(kernel, outs)
        alone = [a for a in ins + outs if not self.shared(kernel.pair(a), kernel.path)]
        if len(ins + outs) > 2:
            return
        for axis in alone:
            if not fractional and not self.usual(kernel.pair(axis)):
                raise ValueError(ambiguous_matrix(kernel, axis))
        if not ins or not outs:
            return
        self._check_names(kernel, split, ins, outs)
        for axis in alone:
            sure = split.proven or names.is_kernel(kernel.path)
            if not sure or (axis in outs and _reads_out(kernel.path)):
                raise ValueError(ambiguous_matrix(kernel, axis))

    def alone(self, kernel: Kernel, split: Split) -> list[int]:
        """Growing fan-out axes of sizes that no other parameter has."""
        outs = [a for a in split.out_axes if kernel.grows(a)]
        return [a for a in outs if not self.shared(kernel.pair(a), kernel.path)]

    def _check_names(
        self, kernel: Kernel, split: Split, ins: list[int], outs: list[int]
    ) -> None:
        """Raise where a matrix has the name of a table or of a vector."""
        path = kernel.path
        if split.proven:
            return
        alone = [a for a in ins + outs if not self.shared(kernel.pair(a), path)]
        square = kernel.pair(ins[0]) == kernel.pair(outs[0]) and not alone
        gain = names.is_vector(path) and not square
        if gain or (names.table(path) and (alone or split.origin != "")):
            raise ValueError(ambiguous_matrix(kernel, (alone or ins)[0]))

    def _check_copies(self, kernel: Kernel, outs: list[int]) -> None:
        """Raise where outputs grow as experts do, and are not said to be a router's."""
        for axis in outs:
            counted = kernel.pair(axis) in self._copies and not kernel.readout
            if counted and not self.shared(kernel.pair(axis), kernel.path):
                raise ValueError(_as_copies(kernel, axis))

    def _check_state_space(self, kernel: Kernel, split: Split, grow: list[int]) -> None:
        """`B @ u` and `u @ B` differ where only the state or the input grows."""
        decays = self._decays.get(_holder(kernel.path), [])
        if split.proven or not decays or names.array(kernel.path) not in _STATE_SPACE:
            return
        rank = max(map(len, decays))
        if rank > 1 and any(kernel.base[: len(d)] == d for d in decays if len(d) > 1):
            return  # an entry for each channel and state, as the decays have
        ins, outs = kernel.ratio(split.in_axes), kernel.ratio(split.out_axes)
        if not math.isclose(ins, outs):
            raise ValueError(ambiguous_matrix(kernel, grow[0]))


def _reads_out(path: str) -> bool:
    """Whether a name says readout, outside of numbered layers."""
    listed = names.open_lists(path) != path
    return names.readout(path) and (names.sure_readout(path) or not listed)


def _holder(path: str) -> str:
    """The module that holds a parameter."""
    return path[: max(path.rfind("/"), path.rfind("."), 0)]


def _as_copies(kernel: Kernel, axis: int) -> str:
    before, after = kernel.pair(axis)
    path = names.pattern(kernel.path)
    return (
        f"axis {axis} of {kernel.path!r} grows from {before} to {after}, as copies "
        "(experts) do: if it has an output for each copy, as a router has, pass "
        f"readout=r'{path}'; if that is its width, "
        f"axes={{r'{path}': ({kernel.axes[:-1]}, {kernel.axes[-1:]})}}"
    )

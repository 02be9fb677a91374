"""Check that each growing axis has a size that another parameter has too.

The outputs of one layer are the inputs of another, so each width occurs in several
parameters. A growing size that only one parameter has may count tokens, positions or
classes, and a matrix of two such sizes may not be a kernel.
"""

import dataclasses
import math
from collections.abc import Mapping

from . import names
from .axes import Kernel, Pair, Split, ambiguous_matrix, per_channel
from .scales.paths import biases_of

Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # in the base and a wider model

_STATE_SPACE = {"A", "B", "C", "D", "B_re", "B_im", "C_re", "C_im"}


@dataclasses.dataclass(frozen=True)
class _Owner:
    """A parameter that has an axis of a given size.

    Attributes:
      name: its path, with "#" for numbers of blocks.
      shapes: its shapes. Two tables of the same shape do not confirm each other.
      is_output: whether the axis indexes outputs or channels, which other layers read.
    """

    name: str
    shapes: Shapes
    is_output: bool


class Widths:
    """The parameters of a model, by the sizes of their axes in base and wide model."""

    def __init__(
        self,
        kernels: Mapping[str, Kernel],
        splits: Mapping[str, Split],
        depth: Pair | None = None,
    ):
        self._kernels, self._splits = kernels, splits
        self._owners: dict[Pair, set[_Owner]] = {}
        self._copies: set[Pair] = set()
        # Sizes of inputs of kernels, and of outputs of all but readouts.
        self._read: set[Pair] = set()
        self._made: set[Pair] = set()
        # Numbers of experts, as declared by the option `copies`.
        self._experts: set[Pair] = set()
        self._decays: dict[str, list[tuple[int, ...]]] = {}
        for path, kernel in kernels.items():
            split = splits[path]
            if names.state_space(path):
                self._decays.setdefault(_holder(path), []).append(kernel.base)
            used = (*split.in_axes, *split.out_axes)
            for axis in filter(kernel.grows, range(len(kernel.base))):
                if axis in split.in_axes and not split.table:
                    self._read.add(kernel.pair(axis))
                elif axis in split.out_axes and split.in_axes and not kernel.readout:
                    self._made.add(kernel.pair(axis))
                if axis not in used:
                    self._copies.add(kernel.pair(axis))
                    if axis in kernel.experts:
                        self._experts.add(kernel.pair(axis))
                elif not (split.table and axis in split.in_axes):
                    owner = _Owner(
                        names.open_lists(path),
                        (kernel.base, kernel.wide),
                        axis in split.out_axes,
                    )
                    self._owners.setdefault(kernel.pair(axis), set()).add(owner)
        self._ratios = {
            large / small
            for (small, large), owners in self._owners.items()
            if len({owner.name for owner in owners}) > 1
        }
        layers = set() if depth is None else {(depth[0], depth[1])}
        self._counts = (self._copies - layers) | self._experts
        self._holders = self._holders_of_experts()

    def _holders_of_experts(self) -> set[tuple[str, Pair]]:
        """Modules with arrays of experts or a router, and their number of experts."""
        return {
            (_holder(path), kernel.pair(axis))
            for path, kernel in self._kernels.items()
            for axis in range(len(kernel.base))
            if kernel.pair(axis) in self._experts
            and (axis in kernel.experts or kernel.readout)
            and len(kernel.base) > 1
        }

    def _is_width(self, pair: Pair) -> bool:
        """Whether a kernel has outputs of this size, and a kernel sums over them."""
        return pair in self._made and pair in self._read

    def shared(self, pair: Pair, kernel: Kernel) -> bool:
        """Whether a parameter other than this one and its bias has such an axis."""
        return bool(self._others(pair, kernel))

    def made(self, pair: Pair, kernel: Kernel, *, inputs: bool) -> bool:
        """Whether a parameter of another shape has outputs of this size.

        Args:
          pair: the sizes of the axis in base and wide model.
          kernel: the parameter that has the axis.
          inputs: whether the axis is its fan-in. If it is the fan-out, inputs of other
            parameters count too.
        """
        return any(
            owner.shapes != (kernel.base, kernel.wide)
            and (owner.is_output or not inputs)
            for owner in self._others(pair, kernel)
        )

    def _others(self, pair: Pair, kernel: Kernel) -> list[_Owner]:
        own = {names.open_lists(p) for p in (kernel.path, *biases_of(kernel.path))}
        return [o for o in self._owners.get(pair, ()) if o.name not in own]

    def usual(self, pair: Pair) -> bool:
        """Whether shared widths grow by this ratio."""
        small, large = pair
        return not self._ratios or any(
            math.isclose(large / small, ratio) for ratio in self._ratios
        )

    def growing(self, kernel: Kernel, split: Split) -> frozenset[int]:
        """The axes that grow with width, without axes of entries and copies."""
        used = split.in_axes + split.out_axes
        if split.table:
            used = split.out_axes
        elif kernel.readout or not split.in_axes:
            # A router has one output per expert; these are not a width.
            outs = (a for a in split.out_axes if not self._counted(kernel, split, a))
            used = (*split.in_axes, *outs)
        return frozenset(a for a in used if kernel.grows(a))

    def _counted(self, kernel: Kernel, split: Split, axis: int) -> bool:
        """Whether a fan-out axis of a readout or vector counts experts."""
        pair = kernel.pair(axis)
        if split.in_axes:
            known = kernel.readout and pair in self._copies
            return known and (kernel.named or not self._is_width(pair))
        if split.origin == "axes given" or len(kernel.axes) != 1:
            return False
        if kernel.owner:
            return self._is_routed(kernel.owner, pair)
        return (
            pair in self._experts
            and not self._is_width(pair)
            and self._beside_experts(kernel, pair)
        )

    def _is_routed(self, path: str, pair: Pair) -> bool:
        """Whether the outputs of a kernel count experts, so that its bias does too."""
        kernel, split = self._kernels[path], self._splits[path]
        growing = self.growing(kernel, split)
        if growing.isdisjoint(split.in_axes) or not growing.isdisjoint(split.out_axes):
            return False
        if split.origin != "axes given":
            return pair in map(kernel.pair, split.out_axes)
        # Its outputs are left out of the axes that the user gave.
        outs = 0 if kernel.layout == "out_in" else len(kernel.base) - 1
        return kernel.pair(outs) == pair

    def _beside_experts(self, kernel: Kernel, pair: Pair) -> bool:
        """Whether a vector belongs to a mixture of experts with so many experts."""
        return (
            kernel.readout
            or names.routes(kernel.path)
            or (_holder(kernel.path), pair) in self._holders
        )

    def check(self, kernel: Kernel, split: Split, *, fractional: bool = False) -> None:
        """Check that the growing axes of a parameter are widths.

        Args:
          kernel: the parameter.
          split: its axes.
          fractional: whether ratios may be other than whole numbers.

        Raises:
          ValueError: a growing axis may not be a width; the message names the
            parameter, the axis, and what to write.
        """
        ins = [a for a in split.in_axes if kernel.grows(a)]
        outs = [a for a in split.out_axes if kernel.grows(a)]
        if split.table:
            self._check_table(kernel, ins, outs)
        elif not split.in_axes:
            self._check_vector(kernel, split, outs)
        else:
            if kernel.readout:
                self._check_readout(kernel, split, outs)
                outs = [a for a in outs if not self._counted(kernel, split, a)]
            self._check_kernel(kernel, split, ins, outs, fractional)

    def _check_vector(self, kernel: Kernel, split: Split, grow: list[int]) -> None:
        """Raise a `ValueError` if a vector may be summed over, or count experts."""
        if len(kernel.axes) != 1 or not grow or self._counted(kernel, split, grow[0]):
            return
        path, pair = kernel.path, kernel.pair(grow[0])
        if kernel.readout and not per_channel(kernel):
            raise ValueError(vector_as_readout(kernel))
        summed = kernel.bias in (((), ()), ((1,), (1,)))  # a bias of one output
        asked = not kernel.readout and not per_channel(kernel)
        if asked and (names.reads_vector(path) or summed):
            raise ValueError(_maybe_read_out(kernel))
        known = kernel.layer_axes is not None or names.norm(path)
        gain = known or (names.is_vector(path) and not names.is_bias(path))
        sure = bool(kernel.owner) or (gain and self._is_width(pair))
        if pair in self._experts and not sure:
            raise ValueError(_maybe_counts(kernel))

    def _check_readout(self, kernel: Kernel, split: Split, outs: list[int]) -> None:
        """Raise a `ValueError` if the outputs of a kernel may be a width or experts.

        `readout` matches a module that holds it, which may have hidden kernels.
        """
        for axis in outs:
            pair = kernel.pair(axis)
            unsure = pair in self._counts and not kernel.named and self._is_width(pair)
            if unsure and any(map(kernel.grows, split.in_axes)):
                raise ValueError(_as_copies(kernel, axis, by_axes=True))

    def _multiple(self, pair: Pair) -> bool:
        """Whether sizes are multiples (3n of a fused qkv) or divisors of a width."""
        small, large = pair
        widths = [p for p, owners in self._owners.items() if len(owners) > 1]
        return not widths or any(
            (small % few == 0 and large % many == 0)
            or (few % small == 0 and many % large == 0)
            for few, many in widths
        )

    def alone(self, kernel: Kernel, split: Split) -> list[int]:
        """Growing fan-out axes whose sizes no other parameter has."""
        outs = [a for a in split.out_axes if kernel.grows(a)]
        return [a for a in outs if not self.shared(kernel.pair(a), kernel)]

    def check_given(self, kernel: Kernel, split: Split) -> None:
        """Raise a `ValueError` if axes from the user leave out a width.

        A pattern meant for dense kernels may also match a convolution, (height, width,
        in, out), whose inputs and outputs would then count as copies; and a kernel
        (heads, features, out) sums over its heads, too.
        """
        used = (*split.in_axes, *split.out_axes)
        if not split.in_axes or not split.out_axes:
            return
        for axis in filter(kernel.grows, range(len(kernel.base))):
            if axis in (*used, *kernel.declared):
                continue
            pair = kernel.pair(axis)
            counts = names.experts(kernel.path) or names.sure_copies(kernel.path)
            if axis < max(used) and pair in self._made and not counts:
                path = names.pattern(kernel.path)
                raise ValueError(
                    f"axes={{...: {(split.in_axes, split.out_axes)}}} leaves out axis "
                    f"{axis} of {kernel.path!r}, which grows like outputs of another "
                    f"kernel, {pair}; if this one sums over it, add it to the inputs; "
                    f"if it counts copies of the kernel, pass copies=r'{path}'"
                )
            if axis > max(used) and self.shared(pair, kernel):
                raise ValueError(
                    f"axes={{...: {(split.in_axes, split.out_axes)}}} matches "
                    f"{kernel.path!r} of shape {kernel.base}, and leaves out its axis "
                    f"{axis}, which grows like a width, {kernel.pair(axis)}; make the "
                    "pattern match kernels of one shape only, or give this parameter "
                    f"its own axes: axes={{r'{names.pattern(kernel.path)}': ...}}"
                )

    def _check_table(self, kernel: Kernel, ins: list[int], outs: list[int]) -> None:
        """Raise a `ValueError` if a table may be (features, entries), or a kernel."""
        widths = [a for a in ins if self.shared(kernel.pair(a), kernel)]
        features = [a for a in outs if self.shared(kernel.pair(a), kernel)]
        read = names.array(kernel.path) in ("kernel", "w") or kernel.bias is not None
        swapped = not outs or (bool(widths) and not features)
        if kernel.layer_axes is None and ins and (swapped or read):
            raise ValueError(ambiguous_matrix(kernel, (widths or ins)[0]))

    def _check_kernel(
        self,
        kernel: Kernel,
        split: Split,
        ins: list[int],
        outs: list[int],
        fractional: bool,
    ) -> None:
        if not ins and not outs:
            return
        self._check_state_space(kernel, split, ins + outs)
        self._check_copies(kernel, ins, outs)
        if not split.proven and names.dot_product(kernel.path):
            raise ValueError(ambiguous_matrix(kernel, (ins + outs)[0]))
        if len(ins + outs) > 2:
            return
        alone = [a for a in ins + outs if not self.shared(kernel.pair(a), kernel)]
        for axis in alone:
            pair = kernel.pair(axis)
            if not fractional and not (
                self.usual(pair) and (split.proven or self._multiple(pair))
            ):
                raise ValueError(ambiguous_matrix(kernel, axis))
        if ins and outs:
            self._check_matrix(kernel, split, ins[0], outs[0])

    def _check_matrix(self, kernel: Kernel, split: Split, into: int, out: int) -> None:
        """Raise a `ValueError` if a matrix may be a table, a gain, or a readout."""
        path, pairs = kernel.path, {a: kernel.pair(a) for a in (into, out)}
        sure = split.proven or names.kernel_like(path)
        same = pairs[into] == pairs[out]  # a square kernel: its outputs fit its inputs
        if sure:
            alone = [a for a, p in pairs.items() if not self.shared(p, kernel)]
        else:
            alone = [
                a
                for a, p in pairs.items()
                if not self.made(p, kernel, inputs=a == into and not same)
            ]
        if out in alone and _reads_out(path):
            raise ValueError(ambiguous_matrix(kernel, out))
        if split.proven:
            return
        padded = len(kernel.axes) > 2 and not sure and kernel.base[kernel.axes[0]] == 1
        square = same and not alone and not names.is_bias(path)
        gain = (names.is_vector(path) and not square) or names.decays(path)
        if gain or padded or (alone and not sure) or names.table(path):
            raise ValueError(ambiguous_matrix(kernel, (alone or [into])[0]))

    def _check_copies(self, kernel: Kernel, ins: list[int], outs: list[int]) -> None:
        """Raise a `ValueError` if an axis may count experts and is not a router's."""
        for axis in ins + outs:
            pair = kernel.pair(axis)
            if pair not in self._copies or self._is_width(pair):
                continue
            if pair not in self._experts and self.shared(pair, kernel):
                continue
            if axis in ins:
                raise ValueError(ambiguous_matrix(kernel, axis))
            if not kernel.readout:
                raise ValueError(_as_copies(kernel, axis))

    def _check_state_space(self, kernel: Kernel, split: Split, grow: list[int]) -> None:
        """Raise a `ValueError` if fan-in and fan-out of a state-space matrix may swap.

        `B @ u` and `u @ B` differ if only the state or only the input grows.
        """
        decays = self._decays.get(_holder(kernel.path), [])
        if split.proven or not decays or names.array(kernel.path) not in _STATE_SPACE:
            return
        rank = max(map(len, decays))
        if rank > 1 and any(kernel.base[: len(d)] == d for d in decays if len(d) > 1):
            return  # an entry per channel and state, like the decays
        ins, outs = kernel.ratio(split.in_axes), kernel.ratio(split.out_axes)
        if not math.isclose(ins, outs):
            raise ValueError(ambiguous_matrix(kernel, grow[0]))


def _maybe_read_out(kernel: Kernel) -> str:
    path = names.pattern(kernel.path)
    return (
        f"the vector {kernel.path!r} grows from {kernel.base} to {kernel.wide}: if the "
        f"model sums over it (the weights of one output), pass readout=r'{path}'"
        f"; if it is a gain or bias per channel, axes={{r'{path}': ((), "
        f"{kernel.axes})}}"
    )


def vector_as_readout(kernel: Kernel, readout: str | None = None) -> str:
    """Error message for a vector that `readout` matches, perhaps by its module."""
    path = names.pattern(kernel.path)
    option = "readout" if readout is None else f"readout={readout!r}"
    return (
        f"{option} matches the vector {kernel.path!r}, which grows from {kernel.base} "
        f"to {kernel.wide}: if the model sums over it (the weights of one output), "
        f"pass axes={{r'{path}': ({kernel.axes}, ())}} too; if it is a gain or bias "
        f"per channel, axes={{r'{path}': ((), {kernel.axes})}} or a readout= that does "
        "not match it"
    )


def _maybe_counts(kernel: Kernel) -> str:
    path = names.pattern(kernel.path)
    return (
        f"the vector {kernel.path!r} grows from {kernel.base} to {kernel.wide}, like "
        "the number of copies (experts): if it has one entry per copy, as the bias of "
        f"a router, pass axes={{r'{path}': ((), ())}}; if it has one per channel or "
        f"head, axes={{r'{path}': ((), {kernel.axes})}}"
    )


def _reads_out(path: str) -> bool:
    """Whether a parameter has a readout's name, and is not in a numbered layer."""
    listed = names.open_lists(path) != path
    return names.readout(path) and (names.sure_readout(path) or not listed)


def _holder(path: str) -> str:
    """The path of the module that holds a parameter."""
    return path[: max(path.rfind("/"), path.rfind("."), 0)]


def _as_copies(kernel: Kernel, axis: int, *, by_axes: bool = False) -> str:
    before, after = kernel.pair(axis)
    path = names.pattern(kernel.path)
    router = f"readout=r'{path}'"
    # (in, heads, features): heads are outputs.
    at = kernel.axes.index(axis)
    cut = at if 0 < at < len(kernel.axes) - 1 else len(kernel.axes) - 1
    if by_axes:
        summed = tuple(a for a in kernel.axes if a != axis)
        router = f"axes={{r'{path}': ({summed}, ())}}"
    return (
        f"axis {axis} of {kernel.path!r} grows from {before} to {after}, like the "
        "number of copies (experts): if it has one output per copy, as a router, pass "
        f"{router}; if that axis is a width, "
        f"axes={{r'{path}': ({kernel.axes[:cut]}, {kernel.axes[cut:]})}}"
    )

"""Which axes of a kernel are its fan-in, told from which of them grow."""

import dataclasses
import math
import re

Axes = tuple[tuple[int, ...], tuple[int, ...]]  # fan-in axes, fan-out axes

_VECTOR = re.compile(r"(?i)(^|[/_])(bias|b|offset|scale|beta|gamma|gain)\d*$")
# Names that attention layers give to kernels whose shapes alone cannot tell
# (d, heads, head_dim) from (heads, head_dim, d).
_READS = re.compile(r"(?i)query|key|value|qkv|q_proj|k_proj|v_proj|\bw[qkv]\b")
_WRITES = re.compile(r"(?i)out|o_proj|\bwo\b|proj")
_CONVOLUTION = re.compile(r"(?i)conv")
_TABLE = re.compile(r"(?i)(?<!un)embed|\bwte\b|\bwpe\b|lookup")
# Longest fixed leading axis that is a window or the three of a fused (3, d, d), and
# not the features of a context that cross-attention reads.
_WINDOW = 7


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A parameter of which the fan-in axes are to be found.

    Attributes:
      path: where it stands.
      base: its shape in the base model.
      wide: its shape in a model of which every width is another.
      bias: shapes of the bias beside it, in base and wide, where there is one.
      layout: "in_out" (Flax, Haiku: spatial axes, then inputs, then outputs) or
        "out_in" (torch, Equinox: outputs, inputs, then spatial axes).
      embedding: whether it is a table of (entries, features).
      batch: number of leading axes that count copies, as layers.
    """

    path: str
    base: tuple[int, ...]
    wide: tuple[int, ...]
    bias: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    layout: str = "in_out"
    embedding: bool = False
    batch: int = 0

    @property
    def axes(self) -> tuple[int, ...]:
        """Its axes without the batch."""
        return tuple(range(self.batch, len(self.base)))

    def grows(self, axis: int) -> bool:
        """Whether this axis grows with width."""
        return self.base[axis] != self.wide[axis]

    def ratio(self, axes: tuple[int, ...]) -> float:
        """By how much these axes grow together."""
        return math.prod(self.wide[a] / self.base[a] for a in axes)

    def sizes(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of these axes, in base and wide."""
        return tuple(self.base[a] for a in axes), tuple(self.wide[a] for a in axes)


def split_axes(kernel: Kernel) -> tuple[Axes, str]:
    """Fan-in and fan-out axes, and a word on what told them.

    Raises:
      ValueError: the shapes do not tell, or a bias tells of another layout.

    Examples:
      >>> split_axes(Kernel("conv", (3, 3, 16, 32), (3, 3, 32, 64)))
      (((0, 1, 2), (3,)), 'shape, in_out')
      >>> split_axes(Kernel("attend", (64, 4, 16), (256, 8, 32)))
      (((0,), (1, 2)), 'shape, in_out')
    """
    axes = kernel.axes
    note = f"shape, {kernel.layout}" + (", stacked" if kernel.batch else "")
    if _is_vector(kernel):
        return ((), axes), note
    if kernel.embedding or _is_table(kernel):
        return (axes[:1], axes[1:]), "embedding"
    told = _told_by_bias(kernel)
    if told is not None:
        return told, note
    if kernel.layout == "out_in":
        return (axes[1:], axes[:1]), note
    if len(axes) == 2:
        return (axes[:1], axes[1:]), note
    at = _first_output(kernel)
    return (tuple(a for a in axes if a < at), tuple(a for a in axes if a >= at)), note


def _is_vector(kernel: Kernel) -> bool:
    axes = kernel.axes
    if len(axes) < 2 or _VECTOR.search(kernel.path):
        return True
    # Padded by ones: biases of Equinox convolutions (C, 1, 1), class tokens (1, 1, C).
    output = axes[-1] if kernel.layout == "in_out" or kernel.embedding else axes[0]
    return all(kernel.wide[a] == kernel.base[a] == 1 for a in axes if a != output)


def _is_table(kernel: Kernel) -> bool:
    """A table among torch-like kernels, which are all the other way round."""
    axes = kernel.axes
    grow = [a for a in axes if kernel.grows(a)]
    return (
        kernel.layout == "out_in"
        and len(axes) == 2
        and grow == [axes[1]]
        and kernel.bias is None
        and _TABLE.search(kernel.path) is not None
    )


def _told_by_bias(kernel: Kernel) -> Axes | None:
    """A bias has the shape of the outputs, and so says which axes those are."""
    axes, bias, layout = kernel.axes, kernel.bias, kernel.layout
    if bias is None:
        return None
    if layout == "out_in":
        bare = tuple(tuple(n for n in shape if n != 1) for shape in bias)
        if len(axes) == 2 and bare == kernel.sizes(axes[1:]) != kernel.sizes(axes[:1]):
            raise ValueError(_other_layout(kernel, "in_out"))
        return None
    for at in range(1, len(axes)):
        if bias == kernel.sizes(axes[at:]):
            return axes[:at], axes[at:]
    # Copies, as the experts of (experts, d, f) with a bias (experts, f).
    for at in range(2, len(axes)):
        if bias == kernel.sizes((axes[0], *axes[at:])):
            return axes[1:at], axes[at:]
    if len(axes) > 2 and bias == kernel.sizes(axes[-2:-1]):
        # Transposed convolutions of Haiku: (height, width, out, in).
        return (*axes[:-2], axes[-1]), axes[-2:-1]
    if bias == kernel.sizes(axes[:1]):
        raise ValueError(_other_layout(kernel, "out_in"))
    return None


def _first_output(kernel: Kernel) -> int:
    """The first fan-out axis of a kernel of three axes or more, inputs first."""
    axes = kernel.axes
    grow = [a for a in axes if kernel.grows(a)]
    name = "/".join(kernel.path.split("/")[-2:])
    first, second, last = axes[0], axes[1], axes[-1]
    reads = _READS.search(name) is not None
    if reads and (kernel.grows(first) or not grow or kernel.base[first] > _WINDOW):
        return second
    if not grow or grow == [last]:
        return last
    if len(grow) == 1:
        # The readout of a convolution, or of heads whose output is fixed.
        named = _WRITES.search(name) or _CONVOLUTION.search(name)
        if named or (grow == [axes[-2]] and len(axes) > 3):
            return last
        raise ValueError(_ambiguous(kernel))
    if len(grow) == 2:
        return grow[1]
    cuts = [at for at in axes[1:] if _balanced(kernel, at)]
    sides = {kernel.ratio(tuple(a for a in axes if a < at)) for at in cuts}
    if len(sides) == 1:
        return cuts[0]
    if _WRITES.search(name):
        return grow[-1]
    raise ValueError(_ambiguous(kernel))


def _balanced(kernel: Kernel, at: int) -> bool:
    """Whether inputs and outputs grow alike when cut here."""
    before = tuple(a for a in kernel.axes if a < at)
    after = tuple(a for a in kernel.axes if a >= at)
    return math.isclose(kernel.ratio(before), kernel.ratio(after))


def _ambiguous(kernel: Kernel) -> str:
    return (
        f"the shapes of {kernel.path!r}, {kernel.base} in the base and {kernel.wide} "
        "in the target, do not tell its fan-in from its fan-out; pass axes={"
        f"r'{re.escape(kernel.path)}': (fan_in_axes, fan_out_axes)}}, as ((0,), (1, 2))"
        " for a kernel (d, heads, head_dim); or, if its first axis counts layers, "
        "depth=(base depth, target depth) and branch=r'...'"
    )


def _other_layout(kernel: Kernel, layout: str) -> str:
    bias = kernel.bias[0] if kernel.bias else ()
    return (
        f"{kernel.path!r} of shape {kernel.base} has a bias of shape {bias}, so that "
        f"its outputs are not where layout={kernel.layout!r} has them; pass "
        f"layout={layout!r}, or its axes={{r'{re.escape(kernel.path)}': (fan_in_axes, "
        "fan_out_axes)}"
    )


def check_axes(path: str, shape: tuple[int, ...], split: Axes) -> Axes:
    """Axes that the user gave, if they are axes of this shape.

    Raises:
      ValueError: an axis out of range, or given twice.
    """
    both = (*split[0], *split[1])
    for axis in both:
        if not 0 <= axis < len(shape):
            raise ValueError(
                f"axes of {path!r}: {axis} is not an axis of its shape {shape}"
            )
    if len(set(both)) < len(both):
        raise ValueError(f"axes of {path!r}: {split} names an axis twice")
    return tuple(split[0]), tuple(split[1])

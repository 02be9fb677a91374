"""Which axes of a kernel are its fan-in, told from which of them grow."""

import dataclasses
import math

from . import names
from .layers import Told

Axes = tuple[tuple[int, ...], tuple[int, ...]]  # fan-in axes, fan-out axes
Pair = tuple[int, int]  # size in the base, and in a wider model

# Longest fixed leading axis that is taken for the window of a convolution.
_WINDOW = 7


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A parameter of which the fan-in axes are to be found.

    Attributes:
      path: where it stands.
      base: its shape in the base model.
      wide: its shape in a model of which every width is another.
      bias: shapes of the bias beside it, in base and wide, where there is one;
        without the axes that count copies of the layer.
      layout: "in_out" (Flax, Haiku: spatial axes, then inputs, then outputs) or
        "out_in" (torch, Equinox: outputs, inputs, then spatial axes).
      told: what its layer says of its axes.
      embedding: whether it is a table of (entries, features).
      readout: whether the user named it as a readout.
      copies: axes that count copies, as layers and experts.
      declared: those of the copies of which the user or the depth says so; they may
        grow.
      fits: whether a kernel nearby has outputs of its shape, as those of heads.
      streams: growing sizes of the vectors of the model: widths, not heads.
    """

    path: str
    base: tuple[int, ...]
    wide: tuple[int, ...]
    bias: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    layout: str = "in_out"
    told: Told | None = None
    embedding: bool = False
    readout: bool = False
    copies: tuple[int, ...] = ()
    declared: tuple[int, ...] = ()
    fits: bool = False
    streams: frozenset[Pair] = frozenset()

    @property
    def axes(self) -> tuple[int, ...]:
        """Its axes without those that count copies."""
        return tuple(a for a in range(len(self.base)) if a not in self.copies)

    def grows(self, axis: int) -> bool:
        """Whether this axis grows with width."""
        return self.base[axis] != self.wide[axis]

    def pair(self, axis: int) -> Pair:
        """Its size in the base and in the wide model."""
        return self.base[axis], self.wide[axis]

    def ratio(self, axes: tuple[int, ...]) -> float:
        """By how much these axes grow together."""
        return math.prod(self.wide[a] / self.base[a] for a in axes)

    def sizes(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of these axes, in base and wide."""
        return tuple(self.base[a] for a in axes), tuple(self.wide[a] for a in axes)

    def product(self, axes: tuple[int, ...]) -> Pair:
        """Product of these axes, in base and wide."""
        before, after = self.sizes(axes)
        return math.prod(before), math.prod(after)


@dataclasses.dataclass(frozen=True)
class Split:
    """The axes of a parameter, and what told them.

    Attributes:
      in_axes: the axes that are summed over.
      out_axes: the axes that index outputs.
      origin: a few words for `explain`.
      proven: whether the layer, a bias or the user told them, not the shape alone.
      table: whether it is a table of entries, whose number is no width.
    """

    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    origin: str
    proven: bool = False
    table: bool = False


def split_axes(kernel: Kernel) -> Split:
    """Fan-in and fan-out axes, and what told them.

    Raises:
      ValueError: the shapes do not tell, or a bias tells of another layout.

    Examples:
      >>> split = split_axes(Kernel("conv", (3, 3, 16, 32), (3, 3, 32, 64)))
      >>> split.in_axes, split.out_axes, split.origin
      ((0, 1, 2), (3,), 'shape, in_out')
      >>> split = split_axes(Kernel("attend", (64, 4, 16), (256, 8, 32)))
      >>> split.in_axes, split.out_axes
      ((0,), (1, 2))
    """
    axes = kernel.axes
    note = f"shape, {kernel.layout}" + (", stacked" if kernel.copies else "")
    if kernel.told is not None and kernel.told.rank == len(axes):
        return _of_layer(kernel, kernel.told)
    if kernel.embedding or _is_embedding_array(kernel):
        if len(axes) < 2:
            return Split((), axes, note)  # a norm or bias beside the table
        return Split(axes[:-1], axes[-1:], "embedding", proven=True, table=True)
    if _is_vector(kernel):
        return Split((), axes, note)
    told = _told_by_bias(kernel)
    if told is not None:
        return Split(*told, f"{note}, bias", proven=True)
    if len(axes) == 1:
        return Split(axes, (), note, proven=True)  # a readout, says the user
    if kernel.layout == "out_in":
        return Split(*_outputs_first(kernel), note)
    return Split(*_inputs_first(kernel), note)


def _of_layer(kernel: Kernel, told: Told) -> Split:
    axes = kernel.axes
    if told.embedding:
        return Split(axes[:1], axes[1:], "embedding layer", proven=True, table=True)
    return Split(
        tuple(axes[a] for a in told.in_axes),
        tuple(axes[a] for a in told.out_axes),
        "layer" + (", stacked" if kernel.copies else ""),
        proven=True,
    )


def _is_embedding_array(kernel: Kernel) -> bool:
    """An `nn.Embed` of Linen or `hk.Embed`, or a torch-like table of a sure name."""
    axes = kernel.axes
    if len(axes) != 2 or kernel.bias is not None:
        return False
    grow = [a for a in axes if kernel.grows(a)]
    if kernel.layout == "in_out":
        return names.embedding_array(kernel.path) and grow != [axes[0]]
    return grow == [axes[1]] and names.looked_up(kernel.path)


def _is_vector(kernel: Kernel) -> bool:
    axes = kernel.axes
    grow = [a for a in axes if kernel.grows(a)]
    if len(axes) < 2:
        return not (kernel.readout and grow)
    bare = [a for a in axes if kernel.base[a] != 1 or kernel.wide[a] != 1]
    if len(axes) > 2 and len(bare) <= 1:
        # Padded by ones: biases of Equinox convolutions, class tokens.
        if grow and grow[0] not in (axes[0], axes[-1]):
            return False
        return not (grow and kernel.layout == "in_out" and grow == [axes[0]])
    if not names.is_vector(kernel.path):
        one_input = kernel.layout == "in_out" and bare == [axes[-1]]
        return one_input and not names.is_kernel(kernel.path)
    return kernel.fits or not grow or grow == [axes[-1]] or len(bare) <= 1


def _told_by_bias(kernel: Kernel) -> Axes | None:
    """A bias has the shape of the outputs, and so says which axes those are."""
    axes, bias, layout = kernel.axes, kernel.bias, kernel.layout
    if bias is None:
        return None
    if layout == "out_in":
        return _told_by_torch_bias(kernel)
    cuts = range(1, len(axes))
    fits = [(axes[:at], axes[at:]) for at in cuts if bias == kernel.sizes(axes[at:])]
    # Copies, as the experts of (experts, d, f) with a bias (experts, f).
    fits += [
        (axes[1:at], axes[at:])
        for at in cuts[1:]
        if bias == kernel.sizes((axes[0], *axes[at:]))
    ]
    if len(axes) > 2 and bias == kernel.sizes(axes[-2:-1]):
        # Transposed convolutions of Haiku: (height, width, out, in).
        fits.append(((*axes[:-2], axes[-1]), axes[-2:-1]))
    if len({(kernel.ratio(ins), kernel.ratio(outs)) for ins, outs in fits}) > 1:
        raise ValueError(_ambiguous(kernel))
    if fits:
        return fits[0]
    if bias == kernel.sizes(axes[:1]):
        raise ValueError(_other_layout(kernel, "out_in"))
    return None


def _told_by_torch_bias(kernel: Kernel) -> Axes | None:
    axes, bias = kernel.axes, kernel.bias
    assert bias is not None
    bare = tuple(tuple(n for n in shape if n != 1) for shape in bias)
    first, second = kernel.sizes(axes[:1]), kernel.sizes(axes[1:2])
    if bare == first:
        return axes[1:], axes[:1]
    if bare == second:
        if len(axes) == 2:
            raise ValueError(_other_layout(kernel, "in_out"))
        # Transposed convolutions of torch: (in, out, height, width).
        return (axes[0], *axes[2:]), axes[1:2]
    return None


def _outputs_first(kernel: Kernel) -> Axes:
    """Cut a kernel of torch's layout: (out, in, ...)."""
    axes = kernel.axes
    grow = [a for a in axes if kernel.grows(a)]
    if len(axes) > 2:
        if any(a > axes[1] for a in grow):
            raise ValueError(_ambiguous(kernel, _STACKED_TORCH))
        if len(grow) == 1 and names.transposed(kernel.path):
            raise ValueError(_ambiguous(kernel, _TRANSPOSED))
    return axes[1:], axes[:1]


def _inputs_first(kernel: Kernel) -> Axes:
    """Cut a kernel whose last axes are its outputs."""
    axes = kernel.axes
    grow = [a for a in axes if kernel.grows(a)]
    if len(axes) == 2:
        return axes[:1], axes[1:]
    if kernel.readout and grow and grow[-1] != axes[-1]:
        cut = axes.index(grow[-1]) + 1
        return axes[:cut], axes[cut:]
    if not grow or grow == [axes[-1]]:
        if grow and names.transposed(kernel.path) and names.convolution(kernel.path):
            raise ValueError(_ambiguous(kernel, _TRANSPOSED))
        return axes[:-1], axes[-1:]
    if len(grow) == 1:
        if names.low_rank_out(kernel.path) and grow != [axes[0]]:
            return axes[:1], axes[1:]
        if grow == [axes[-2]] and (len(axes) > 3 or names.convolution(kernel.path)):
            return axes[:-1], axes[-1:]  # the readout of a convolution
        raise ValueError(_ambiguous(kernel))
    three = names.fused(kernel.path) and kernel.base[axes[0]] in (2, 3)
    if grow == list(axes[-2:]) and (three or not names.reads(kernel.path)):
        return _matrix(kernel)
    cut = _between_heads(kernel, grow)
    return axes[:cut], axes[cut:]


def _matrix(kernel: Kernel) -> Axes:
    """The last two axes are a matrix; those before it a window, or copies."""
    axes = kernel.axes
    window = kernel.sizes(axes[:-2])[0]
    if len(window) == 1 and (
        names.copies(kernel.path)
        or names.fused(kernel.path)
        or (window[0] > _WINDOW and not names.convolution(kernel.path))
    ):
        return axes[-2:-1], axes[-1:]
    return axes[:-1], axes[-1:]


def _between_heads(kernel: Kernel, grow: list[int]) -> int:
    """Where to cut a kernel between the stream and the heads, as an index of axes.

    (d, heads, head_dim) and (heads, head_dim, d) have a side of one axis. Sizes prove
    the cut if d = heads * head_dim; else the layer's name must agree with them.
    """
    axes = kernel.axes
    last = len(axes) - 1
    sides = {1: (axes[:1], axes[1:]), last: (axes[:-1], axes[-1:])}
    exact, likely = [], []
    for cut, (ins, outs) in sides.items():
        if not math.isclose(kernel.ratio(ins), kernel.ratio(outs)):
            continue
        stream, heads = (ins, outs) if cut == 1 else (outs, ins)
        (small, large), (few, many) = kernel.product(stream), kernel.product(heads)
        fused = few % small == 0 and few // small <= 3 and names.fused(kernel.path)
        if (few, many) == (small, large) or (fused and cut == 1):
            exact.append(cut)
        elif _likely(kernel, stream, heads):
            likely.append(cut)
    named = {1: names.reads(kernel.path), last: names.writes(kernel.path)}
    if len(exact) == 1:
        return exact[0]
    agreed = [cut for cut in (exact or likely) if named[cut]]
    if len(agreed) == 1 and not names.experts(kernel.path):
        return agreed[0]
    raise ValueError(_ambiguous(kernel))


def _likely(kernel: Kernel, stream: tuple[int, ...], heads: tuple[int, ...]) -> bool:
    """Whether sizes allow the cut: grouped heads, or ranks of latent attention."""
    (small, large), (few, many) = kernel.product(stream), kernel.product(heads)
    if small % few == 0 and large % many == 0:
        return True
    reads = stream[0] == kernel.axes[0]
    return reads and few % small == 0 and _apart(kernel, stream, heads)


def _apart(kernel: Kernel, stream: tuple[int, ...], heads: tuple[int, ...]) -> bool:
    """Whether vectors have the size of the stream, and none has that of heads."""
    grow = {kernel.pair(a) for a in heads if kernel.grows(a)}
    return kernel.pair(stream[0]) in kernel.streams and not grow & kernel.streams


_TRANSPOSED = "a transposed convolution may have its inputs and outputs swapped; "
_STACKED_TORCH = "its third axis or a later one grows, which no window does; "


def _ambiguous(kernel: Kernel, why: str = "") -> str:
    path, rank = names.pattern(kernel.path), len(kernel.base)
    every = tuple(range(rank))
    options = [f"(({a},), {tuple(b for b in every if b != a)})" for a in every[:2]]
    if rank == 2:
        options = ["((0,), (1,))", "((1,), (0,))"]
    elif rank > 2:
        options += [f"({every[:-1]}, ({rank - 1},))", "((1,), (2,))"]
    return (
        f"the shapes of {kernel.path!r}, {kernel.base} in the base and {kernel.wide} "
        f"in the target, do not tell its fan-in from its fan-out: {why}pass axes={{"
        f"r'{path}': (fan_in_axes, fan_out_axes)}}, such as {', '.join(options)}, or "
        f"((), {every}) if it sums over nothing; if its first axis counts layers, "
        "pass depth=(base depth, target depth) and branch=r'...'; if it counts "
        f"experts, copies=r'{path}'; if it reads the logits, readout=r'{path}'"
    )


def ambiguous_matrix(kernel: Kernel, axis: int) -> str:
    """The message for a matrix of which an axis has a size found nowhere else."""
    path = names.pattern(kernel.path)
    before, after = kernel.pair(axis)
    ins, outs = kernel.axes[:-1], kernel.axes[-1:]
    if kernel.layout == "out_in":
        ins, outs = kernel.axes[1:], kernel.axes[:1]
    return (
        f"axis {axis} of {kernel.path!r} grows from {before} to {after}, and the model "
        "may not sum over it: if it is a kernel, pass "
        f"axes={{r'{path}': ({ins}, {outs})}}; if a table of (entries, features), "
        f"embeddings=r'{path}'; if it sums over nothing, as a gain or decay of each "
        f"channel, axes={{r'{path}': ((), {kernel.axes})}}; if that axis counts "
        "tokens, classes or positions, build the base with as many as the target, or "
        f"leave the axis out: axes={{r'{path}': ({_less(ins, axis)}, "
        f"{_less(outs, axis)})}}"
    )


def _less(axes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(a for a in axes if a != axis)


def _other_layout(kernel: Kernel, layout: str) -> str:
    bias = kernel.bias[0] if kernel.bias else ()
    return (
        f"{kernel.path!r} of shape {kernel.base} has a bias of shape {bias}, so that "
        f"its outputs are not where layout={kernel.layout!r} has them; pass "
        f"layout={layout!r}, or its axes={{r'{names.pattern(kernel.path)}': "
        "(fan_in_axes, fan_out_axes)}"
    )


def check_axes(path: str, shape: tuple[int, ...], split: Axes) -> Axes:
    """Axes that the user gave, if they are axes of this shape.

    Raises:
      ValueError: not two tuples of axes; an axis out of range, or given twice.
    """
    if not (
        isinstance(split, tuple | list)
        and len(split) == 2
        and all(isinstance(side, tuple | list) for side in split)
    ):
        raise ValueError(
            f"axes of {path!r}: {split!r} must be (fan-in axes, fan-out axes), two "
            "tuples, such as ((0,), (1,))"
        )
    both = (*split[0], *split[1])
    for axis in both:
        if not 0 <= axis < len(shape):
            raise ValueError(
                f"axes of {path!r}: {axis} is not an axis of its shape {shape}"
            )
    if len(set(both)) < len(both):
        raise ValueError(f"axes of {path!r}: {split} names an axis twice")
    return tuple(split[0]), tuple(split[1])

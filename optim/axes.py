"""Find the fan-in and fan-out axes of a kernel from its layer, bias, name and shape."""

import dataclasses
import math

from . import names
from .layers import LayerAxes

Axes = tuple[tuple[int, ...], tuple[int, ...]]  # fan-in axes, fan-out axes
Pair = tuple[int, int]  # size in the base, and in a wider model

# Longest fixed leading axis that is taken for the window of a convolution.
_WINDOW = 7
# In the origin of a split: whether the first axis is a window or counts copies, which
# changes no ratio, was guessed from its length.
GUESSED = "first axis guessed"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A parameter whose fan-in and fan-out axes `split_axes` finds.

    Attributes:
      path: its path, e.g. "blocks/0/kernel".
      base: its shape in the base model.
      wide: its shape in a model whose every width differs from the base's.
      bias: shapes of the same layer's bias in base and wide, without the axes that
        count copies of the layer; None if the layer has no bias.
      layout: "in_out" (Flax, Haiku: spatial axes, then inputs, then outputs) or
        "out_in" (torch, Equinox: outputs, inputs, then spatial axes).
      layer_axes: its axes as its layer defines them; None for an unknown layer.
      embedding: whether it is a table of (entries, features).
      readout: whether the user's `readout` matches it.
      named: whether `readout` names the parameter itself. False if it is matched
        because `readout` matches a module that holds it.
      copies: axes that count copies, e.g. layers or experts.
      declared: the axes that the user or `depth` declared as copies; these may grow.
      experts: the axes that the user declared by the option `copies`.
      fits: for a bias of several axes, whether the outputs of its kernel have its
        shape, e.g. (heads, head_dim).
      owner: for a vector, path of the kernel whose bias it is by name; "" if none.
      streams: (base, wide) sizes of the model's growing vectors. These are widths of
        the residual stream, not numbers of heads.
    """

    path: str
    base: tuple[int, ...]
    wide: tuple[int, ...]
    bias: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    layout: str = "in_out"
    layer_axes: LayerAxes | None = None
    embedding: bool = False
    readout: bool = False
    named: bool = False
    copies: tuple[int, ...] = ()
    declared: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    fits: bool = False
    owner: str = ""
    streams: frozenset[Pair] = frozenset()

    @property
    def axes(self) -> tuple[int, ...]:
        """All axes except those that count copies."""
        return tuple(a for a in range(len(self.base)) if a not in self.copies)

    def grows(self, axis: int) -> bool:
        """Whether this axis differs between `base` and `wide`."""
        return self.base[axis] != self.wide[axis]

    def pair(self, axis: int) -> Pair:
        """Size of an axis in the base and in the wide model."""
        return self.base[axis], self.wide[axis]

    def ratio(self, axes: tuple[int, ...]) -> float:
        """Product of the growth ratios of these axes."""
        return math.prod(self.wide[a] / self.base[a] for a in axes)

    def sizes(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of these axes in the base and in the wide model."""
        return tuple(self.base[a] for a in axes), tuple(self.wide[a] for a in axes)

    def product(self, axes: tuple[int, ...]) -> Pair:
        """Product of the sizes of these axes in the base and in the wide model."""
        before, after = self.sizes(axes)
        return math.prod(before), math.prod(after)


@dataclasses.dataclass(frozen=True)
class Split:
    """The fan-in and fan-out axes of a parameter, and how they were found.

    Attributes:
      in_axes: the axes that are summed over.
      out_axes: the axes that index outputs.
      origin: how the axes were found, a few words for `explain`.
      proven: whether they come from the layer, a bias or the user. False if they are
        read off the shape alone.
      table: whether the parameter is a table of (entries, features). The number of
        entries is not a width.
    """

    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    origin: str
    proven: bool = False
    table: bool = False


def split_axes(kernel: Kernel) -> Split:
    """Find the fan-in and fan-out axes of a kernel.

    Raises:
      ValueError: the shapes are ambiguous, or the bias contradicts `layout`. The
        message names the path and the arguments that decide.

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
    if kernel.layer_axes is not None and kernel.layer_axes.rank == len(axes):
        return _of_layer(kernel, kernel.layer_axes)
    if kernel.embedding or _is_embedding_array(kernel):
        if len(axes) < 2:
            return Split((), axes, note)  # a norm or bias of the embedding module
        return Split(axes[:-1], axes[-1:], "embedding", proven=True, table=True)
    if _is_vector(kernel):
        return Split((), axes, note)
    from_bias = _axes_from_bias(kernel)
    if from_bias is not None:
        return Split(*from_bias, f"{note}, bias", proven=True)
    if len(axes) == 1:
        return Split(axes, (), note, proven=True)  # the user named it as a readout
    if kernel.layout == "out_in":
        return Split(*_outputs_first(kernel), note)
    split = _inputs_first(kernel)
    return Split(*split, f"{note}, {GUESSED}" if _is_guess(kernel) else note)


def _of_layer(kernel: Kernel, layer_axes: LayerAxes) -> Split:
    axes = kernel.axes
    if layer_axes.embedding:
        return Split(axes[:1], axes[1:], "embedding layer", proven=True, table=True)
    return Split(
        tuple(axes[a] for a in layer_axes.in_axes),
        tuple(axes[a] for a in layer_axes.out_axes),
        "layer" + (", stacked" if kernel.copies else ""),
        proven=True,
    )


def _is_embedding_array(kernel: Kernel) -> bool:
    """Whether it is an `nn.Embed`, an `hk.Embed`, or a torch table by name."""
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
        return not (grow and _is_summed(kernel))
    bare = [a for a in axes if kernel.base[a] != 1 or kernel.wide[a] != 1]
    if len(axes) > 2 and len(bare) <= 1:
        # Shapes padded with ones: biases of Equinox convolutions, class tokens.
        if grow and grow[0] not in (axes[0], axes[-1]):
            return False
        return not (grow and kernel.layout == "in_out" and grow == [axes[0]])
    if not names.is_vector(kernel.path):
        one_input = kernel.layout == "in_out" and bare == [axes[-1]]
        return one_input and not names.is_kernel(kernel.path)
    return kernel.fits or not grow or grow == [axes[-1]] or len(bare) <= 1


def _is_summed(kernel: Kernel) -> bool:
    """Whether an array of one axis holds the weights of one output."""
    if not kernel.readout or per_channel(kernel):
        return False
    return kernel.named or (names.reads_vector(kernel.path) and not kernel.owner)


def per_channel(kernel: Kernel) -> bool:
    """Whether an array of one axis is surely a bias or gain.

    It has the name of one, or a bias of its own shape, as the gain of a norm has.
    Biases like `bias_hh`, and arrays of norms, are too, unless `readout` names the
    array itself.
    """
    path = kernel.path
    if names.is_vector(path) or kernel.bias == kernel.sizes(kernel.axes):
        return True
    owned = bool(kernel.owner) and not names.array(path).isdigit()
    return (owned or names.norm(path)) and not kernel.named


def _axes_from_bias(kernel: Kernel) -> Axes | None:
    """Find the axes from the bias, whose shape is that of the outputs.

    Returns None if there is no bias, or if its shape fits no axes of the kernel.
    """
    axes, bias, layout = kernel.axes, kernel.bias, kernel.layout
    if bias is None:
        return None
    if layout == "out_in":
        return _axes_from_torch_bias(kernel)
    cuts = range(1, len(axes))
    fits = [(axes[:at], axes[at:]) for at in cuts if bias == kernel.sizes(axes[at:])]
    # The first axis may count copies: (experts, d, f) with a bias (experts, f).
    fits += [
        (axes[1:at], axes[at:])
        for at in cuts[1:]
        if bias == kernel.sizes((axes[0], *axes[at:]))
    ]
    if len(axes) > 2 and bias == kernel.sizes(axes[-2:-1]):
        # Haiku's transposed convolutions are (height, width, out, in).
        fits.append(((*axes[:-2], axes[-1]), axes[-2:-1]))
    if len({(kernel.ratio(ins), kernel.ratio(outs)) for ins, outs in fits}) > 1:
        raise ValueError(_ambiguous(kernel))
    if fits:
        return fits[0]
    if bias == kernel.sizes(axes[:1]):
        raise ValueError(_other_layout(kernel, "out_in"))
    return None


def _axes_from_torch_bias(kernel: Kernel) -> Axes | None:
    axes, bias = kernel.axes, kernel.bias
    assert bias is not None
    bare = tuple(tuple(n for n in shape if n != 1) for shape in bias)
    first, second = kernel.sizes(axes[:1]), kernel.sizes(axes[1:2])
    if bare == first:
        return axes[1:], axes[:1]
    if bare == second:
        if len(axes) == 2:
            raise ValueError(_other_layout(kernel, "in_out"))
        # torch's transposed convolutions are (in, out, height, width).
        return (axes[0], *axes[2:]), axes[1:2]
    return None


def _outputs_first(kernel: Kernel) -> Axes:
    """Split a kernel in torch's layout, (out, in, ...)."""
    axes = kernel.axes
    grow = [a for a in axes if kernel.grows(a)]
    if len(axes) > 2:
        if any(a > axes[1] for a in grow):
            raise ValueError(_ambiguous(kernel, _STACKED_TORCH))
        if len(grow) == 1 and names.transposed(kernel.path):
            raise ValueError(_ambiguous(kernel, _TRANSPOSED))
    return axes[1:], axes[:1]


def _inputs_first(kernel: Kernel) -> Axes:
    """Split a kernel whose last axes are its outputs."""
    axes = kernel.axes
    grow = [a for a in axes if kernel.grows(a)]
    if len(axes) == 2:
        return axes[:1], axes[1:]
    # A readout of heads, or queries (n, heads, head_dim) in a module of the readout.
    summed = len(grow) == 1 or (kernel.named and not names.reads(kernel.path))
    if kernel.readout and summed and grow and grow[-1] != axes[-1]:
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
    """Split a kernel whose last two axes are a matrix, after a window or copies."""
    axes = kernel.axes
    window = kernel.sizes(axes[:-2])[0]
    if len(window) == 1 and (
        names.copies(kernel.path)
        or names.fused(kernel.path)
        or (window[0] > _WINDOW and not names.convolution(kernel.path))
    ):
        return axes[-2:-1], axes[-1:]
    return axes[:-1], axes[-1:]


def _is_guess(kernel: Kernel) -> bool:
    """Whether only the length of the first of three axes tells a window from copies."""
    grow = [a for a in kernel.axes if kernel.grows(a)]
    named = (names.convolution, names.sure_copies, names.fused)
    return (
        len(kernel.axes) == 3
        and grow == list(kernel.axes[1:])
        and not any(is_named(kernel.path) for is_named in named)
    )


def _between_heads(kernel: Kernel, grow: list[int]) -> int:
    """Index in `kernel.axes` that separates the residual stream from the heads.

    The kernel is (d, heads, head_dim) or (heads, head_dim, d). Sizes prove the cut if
    d = heads * head_dim; otherwise the layer's name must agree with the sizes.
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
    """Whether sizes allow the cut: grouped heads, or the ranks of latent attention."""
    (small, large), (few, many) = kernel.product(stream), kernel.product(heads)
    if small % few == 0 and large % many == 0:
        return True
    reads = stream[0] == kernel.axes[0]
    return reads and few % small == 0 and _apart(kernel, stream, heads)


def _apart(kernel: Kernel, stream: tuple[int, ...], heads: tuple[int, ...]) -> bool:
    """Whether some vector has the size of the stream and none has that of the heads."""
    grow = {kernel.pair(a) for a in heads if kernel.grows(a)}
    return kernel.pair(stream[0]) in kernel.streams and not grow & kernel.streams


_TRANSPOSED = "a transposed convolution may have its inputs and outputs swapped; "
_STACKED_TORCH = "its third or a later axis grows, so it is not a window; "


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
        f"r'{path}': (fan_in_axes, fan_out_axes)}}, e.g. {', '.join(options)}, or "
        f"((), {every}) if it is not summed over; if its first axis counts layers, "
        "pass depth=(base depth, target depth) and branch=r'...'; if it counts "
        f"experts, copies=r'{path}'; if it produces the logits, readout=r'{path}'"
    )


def ambiguous_matrix(kernel: Kernel, axis: int) -> str:
    """Error message for a matrix with an axis whose size no other parameter has."""
    path = names.pattern(kernel.path)
    before, after = kernel.pair(axis)
    ins, outs = kernel.axes[:-1], kernel.axes[-1:]
    if kernel.layout == "out_in":
        ins, outs = kernel.axes[1:], kernel.axes[:1]
    return (
        f"axis {axis} of {kernel.path!r} grows from {before} to {after}, and it is not "
        "clear whether the parameter is a kernel: if it is, pass "
        f"axes={{r'{path}': ({ins}, {outs})}}; if it is a table of (entries, "
        f"features), embeddings=r'{path}'; if it is not summed over (a gain or decay "
        f"per channel), axes={{r'{path}': ((), {kernel.axes})}}; if that axis counts "
        "tokens, classes or positions, build the base with as many as the target, or "
        f"leave the axis out: axes={{r'{path}': ({_less(ins, axis)}, "
        f"{_less(outs, axis)})}}"
    )


def _less(axes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(a for a in axes if a != axis)


def _other_layout(kernel: Kernel, layout: str) -> str:
    bias = kernel.bias[0] if kernel.bias else ()
    return (
        f"{kernel.path!r} of shape {kernel.base} has a bias of shape {bias}, which "
        f"contradicts layout={kernel.layout!r}; pass "
        f"layout={layout!r}, or its axes={{r'{names.pattern(kernel.path)}': "
        "(fan_in_axes, fan_out_axes)}"
    )


def check_axes(path: str, shape: tuple[int, ...], split: Axes) -> Axes:
    """Return the axes that the user gave, after checking them against a shape.

    Raises:
      ValueError: not two tuples of whole numbers; an axis out of range, or given twice.
    """
    if not (
        isinstance(split, tuple | list)
        and len(split) == 2
        and all(isinstance(side, tuple | list) for side in split)
    ):
        raise ValueError(
            f"axes of {path!r}: {split!r} must be (fan-in axes, fan-out axes), two "
            "tuples, e.g. ((0,), (1,))"
        )
    both = (*split[0], *split[1])
    for axis in both:
        whole = isinstance(axis, int) and not isinstance(axis, bool)
        if not whole or not 0 <= axis < len(shape):
            raise ValueError(
                f"axes of {path!r}: {axis!r} is not an axis of its shape {shape}"
            )
    if len(set(both)) < len(both):
        raise ValueError(f"axes of {path!r}: {split} names an axis twice")
    return tuple(split[0]), tuple(split[1])

"""Roles: which dimensions of a parameter grow, and by how much."""

import dataclasses
import enum
import math
from typing import Any

from .training import SAME, TrainingScale


class Role(enum.StrEnum):
    """The role of a parameter, given by which of its dimensions grow with width.

    Examples:
      >>> [role.value for role in Role]
      ['input', 'hidden', 'output', 'vector', 'fixed']

    Source: Tensor Programs V (Yang et al. 2022, arXiv:2203.03466), Table 8: "input
    weights and all biases", "output weights" and "hidden weights".
    """

    INPUT = "input"  # only fan-out grows: embeddings, the first layer
    HIDDEN = "hidden"  # fan-in and fan-out grow
    OUTPUT = "output"  # only fan-in grows: the readout
    VECTOR = "vector"  # grows and has no fan-in: biases, norm scales, class tokens
    FIXED = "fixed"  # nothing grows: the readout's bias, scalars


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a segment in an array.

    Examples:
      >>> import numpy as np
      >>> Place((1,), (4,), (2,)).of(np.arange(6))
      array([1, 2, 4, 5])
      >>> Place((1,), (2,), (1,)).text((6,)), Place((1,), (4,), (2,)).text((6,))
      ('[1:3]', '[1:3 of every 3]')
    """

    start: tuple[int, ...]  # where it begins on each axis, within one repetition
    shape: tuple[int, ...]
    repeats: tuple[int, ...]  # how often the segments follow each other on each axis

    def view(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an array with (repetition, entry) in place of each axis."""
        pairs = zip(shape, self.repeats, strict=True)
        return tuple(n for size, k in pairs for n in (k, size // k))

    @property
    def index(self) -> tuple[slice, ...]:
        """Its index in the view."""
        found = []
        for start, size, k in zip(self.start, self.shape, self.repeats, strict=True):
            found += [slice(None), slice(start, start + size // k)]
        return tuple(found)

    def of(self, array: Any) -> Any:
        """The segment of an array."""
        return array.reshape(self.view(array.shape))[self.index].reshape(self.shape)

    def text(self, shape: tuple[int, ...]) -> str:
        """As an index of NumPy, for an array of a shape."""
        found = []
        for start, n, k, size in zip(
            self.start, self.shape, self.repeats, shape, strict=True
        ):
            every = f" of every {size // k}" if k > 1 else ""
            found.append(":" if n == size else f"{start}:{start + n // k}{every}")
        return f"[{', '.join(found)}]"


# Fields of a segment that say where it is.
_PLACES = ("start", "base_start", "repeats", "base_repeats")


@dataclasses.dataclass(frozen=True)
class ParamScale:
    """The role of one parameter, and its growth ratios, target over base.

    Attributes:
      path: its path, e.g. `"blocks/kernel"`.
      role: see `Role`.
      base_shape: its shape in the base model.
      shape: its shape in the target model.
      in_axes: the axes of `shape` that are summed over (fan-in, with the spatial
        axes of a convolution).
      out_axes: the axes of `shape` that index outputs.
      width_in: fan-in ratio m_in, target over base.
      width_out: fan-out ratio m_out.
      width_last: ratio of the last hidden layer's width, the readout's fan-in
        (Yaida 2022, eq. 3.20).
      depth: depth ratio M of the residual stream that its branch is added to, or of the
        model (the largest of its streams) outside of branches.
      in_branch: whether it is inside a residual branch.
      on_stream: whether it acts on the residual stream itself in each layer, outside of
        branches, e.g. the gain and bias of a norm after the addition.
      shared: growth of the number of layers that share it: M for a parameter of all
        layers, 1 for one of each layer.
      ends_branch: whether its stored values carry the branch's multiplier, because the
        model does not multiply the branch.
      carried: a factor of the model that its stored values carry, e.g. (base head
        dimension / head dimension)^½ of the queries; 1 if there is none.
      offset: the number that the model adds to the stored values before it uses them,
        where they carry a factor, e.g. 1 for a gain that is 1 + w. The sum carries it.
      origin: how the role was found, for `explain`.
      training: the model's ratios of batch size and training length.
      segments: its parts, if the program uses them as parameters of their own: queries,
        keys and values of one kernel, for example. The fields above are those of the
        whole; the rules apply to each segment.
      start: where a segment begins in the whole parameter, on each axis.
      repeats: how often the segments follow each other along each axis: as often as
        there are heads, if each has its queries, keys and values side by side. Then
        `start` counts from the beginning of each head.
      base_start, base_repeats: the same in the base model.
      head_shape, base_head_shape: the shape of the part of one attention head; () if
        the parameter is not of several heads.
      heads_in, heads_out: growth of the number of heads within fan-in and fan-out, if
        each head is a matrix by itself.

    Source: Tensor Programs V, Table 8 (widths); Tensor Programs VI, section 6 (depth).

    Examples:
      >>> scale = param_scale("w", (64, 10), (256, 10), (0,), (1,))
      >>> scale.role.value, scale.fan_in, scale.width_in
      ('output', 256, 4.0)
    """

    path: str
    role: Role
    base_shape: tuple[int, ...]
    shape: tuple[int, ...]
    in_axes: tuple[int, ...] = ()
    out_axes: tuple[int, ...] = ()
    width_in: float = 1.0
    width_out: float = 1.0
    width_last: float = 1.0
    depth: float = 1.0
    in_branch: bool = False
    on_stream: bool = False
    shared: float = 1.0
    ends_branch: bool = False
    carried: float = 1.0
    offset: float = 0.0
    origin: str = ""
    training: TrainingScale = SAME
    segments: tuple["ParamScale", ...] = ()
    start: tuple[int, ...] = ()
    base_start: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()
    base_repeats: tuple[int, ...] = ()
    head_shape: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    base_head_shape: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    heads_in: float = 1.0
    heads_out: float = 1.0

    @property
    def size(self) -> int:
        """Number of entries of the target."""
        return math.prod(self.shape)

    @property
    def parts(self) -> tuple["ParamScale", ...]:
        """Its segments, or itself."""
        return self.segments or (self,)

    @property
    def widest(self) -> "ParamScale":
        """The segment that grows most, or itself."""
        return max(self.parts, key=lambda part: part.width_in * part.width_out)

    @property
    def place(self) -> "Place":
        """Where a segment is in the whole parameter of the target."""
        return Place(self.start, self.shape, self.repeats)

    @property
    def base_place(self) -> "Place":
        """Where a segment is in the whole parameter of the base."""
        return Place(self.base_start, self.base_shape, self.base_repeats)

    @property
    def named(self) -> "dict[str, ParamScale]":
        """Its segments, each with a path and as a parameter of its own; or itself."""
        if not self.segments:
            return {self.path: self}
        none: dict[str, Any] = dict.fromkeys(_PLACES, ())
        names = [f"{self.path}/{i}".lstrip("/") for i in range(len(self.segments))]
        return {
            name: dataclasses.replace(segment, path=name, **none)
            for name, segment in zip(names, self.segments, strict=True)
        }

    def by_head(self) -> "ParamScale":
        """The kernel with (head, entry) in place of each axis: a matrix per head."""
        if not self.head_shape:
            return self
        shape = self.with_heads(self.shape)
        base_shape = self.with_heads(self.base_shape, at_base=True)

        def growth(axes: tuple[int, ...]) -> float:
            return math.prod(shape[2 * a] / base_shape[2 * a] for a in axes)

        return dataclasses.replace(
            self,
            shape=shape,
            base_shape=base_shape,
            in_axes=tuple(2 * a + 1 for a in self.in_axes),
            out_axes=tuple(2 * a + 1 for a in self.out_axes),
            heads_in=self.heads_in * growth(self.in_axes),
            heads_out=self.heads_out * growth(self.out_axes),
            head_shape=(),
            base_head_shape=(),
        )

    def with_heads(
        self, shape: tuple[int, ...], *, at_base: bool = False
    ) -> tuple[int, ...]:
        """The shape of an array with (head, entry) in place of each axis.

        In a probe the array may be smaller, and hold as many heads as fit.
        """
        own = (self.base_shape, self.base_head_shape)
        whole, head = own if at_base else (self.shape, self.head_shape)
        each = zip(shape, whole, head, strict=True)
        heads = tuple(math.gcd(n // h, size) for size, n, h in each)
        return Place((), (), heads).view(shape)

    @property
    def labels(self) -> tuple[str, ...]:
        """Its path; or for each segment the path and its index in the parameter."""
        if not self.segments:
            return (self.path,)
        return tuple(self.path + s.place.text(self.shape) for s in self.segments)

    def with_all(self, **changes: Any) -> "ParamScale":
        """A copy with other values of fields, in every segment too."""
        segments = tuple(s.with_all(**changes) for s in self.segments)
        return dataclasses.replace(self, segments=segments, **changes)

    @property
    def fan_in(self) -> int:
        """Number of inputs that one output of the target sums over."""
        return math.prod(self.shape[a] for a in self.in_axes)

    @property
    def fan_out(self) -> int:
        """Number of outputs of the target."""
        return math.prod(self.shape[a] for a in self.out_axes)


def param_scale(
    path: str,
    base_shape: tuple[int, ...],
    shape: tuple[int, ...],
    in_axes: tuple[int, ...],
    out_axes: tuple[int, ...],
    *,
    grows: frozenset[int] | None = None,
    heads_in: float = 1.0,
    heads_out: float = 1.0,
    **more: Any,
) -> ParamScale:
    """Build the scale of a parameter whose axes are known, with role and ratios.

    Args:
      path: its path.
      base_shape: shape in the base model.
      shape: shape in the target model, of the same rank.
      in_axes: its fan-in axes; empty for biases, norm scales and other vectors.
      out_axes: its fan-out axes.
      grows: the axes that grow with width. By default those whose size differs;
        needed for a model that is its own base.
      heads_in, heads_out: growth of the number of kernels like this one whose inputs
        are summed over, or whose outputs are read, together, e.g. one for each head;
        the inverse for heads that share an axis with the inputs of each.
      **more: further fields of `ParamScale`.

    Raises:
      ValueError: the two shapes have different ranks.

    Examples:
      >>> scale = param_scale("w", (64, 64), (64, 256), (0,), (1,))
      >>> scale.role.value, scale.width_in, scale.width_out
      ('input', 1.0, 4.0)

    Source: Tensor Programs V, Table 8.
    """
    if grows is None:
        differ = zip(base_shape, shape, strict=True)
        grows = frozenset(i for i, (b, t) in enumerate(differ) if b != t)

    def ratio(axes: tuple[int, ...]) -> float:
        growths = (shape[a] / base_shape[a] for a in axes if a in grows)
        return math.prod(growths, start=1.0)

    def is_wide(axes: tuple[int, ...], heads: float) -> bool:
        if heads != 1:
            return ratio(axes) * heads != 1
        return not grows.isdisjoint(axes)

    role = _ROLES[
        bool(in_axes), is_wide(in_axes, heads_in), is_wide(out_axes, heads_out)
    ]

    return ParamScale(
        path,
        role,
        base_shape,
        shape,
        in_axes,
        out_axes,
        width_in=ratio(in_axes) * heads_in,
        width_out=ratio(out_axes) * heads_out,
        heads_in=heads_in,
        heads_out=heads_out,
        **more,
    )


# (has a fan-in, fan-in grows, fan-out grows)
_ROLES = {
    (True, False, True): Role.INPUT,
    (True, True, True): Role.HIDDEN,
    (True, True, False): Role.OUTPUT,
    (True, False, False): Role.FIXED,
    (False, False, True): Role.VECTOR,
    (False, False, False): Role.FIXED,
}

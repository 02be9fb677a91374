"""Roles: which dimensions of a parameter grow, and by how much."""

import dataclasses
import enum
import math
from typing import Any

from .training import SAME, TrainingScale


class Role(enum.StrEnum):
    """The role of a parameter, given by which of its dimensions grow with width.

    Table 8 of Tensor Programs V (Yang et al. 2022, arXiv:2203.03466) calls these
    "input weights and all biases", "output weights" and "hidden weights".

    Examples:
      >>> [role.value for role in Role]
      ['input', 'hidden', 'output', 'vector', 'fixed']

    Source: Tensor Programs V, Table 8.
    """

    INPUT = "input"  # only fan-out grows: embeddings, the first layer
    HIDDEN = "hidden"  # fan-in and fan-out grow
    OUTPUT = "output"  # only fan-in grows: the readout
    VECTOR = "vector"  # grows and has no fan-in: biases, norm scales, class tokens
    FIXED = "fixed"  # nothing grows: the readout's bias, scalars


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
      depth: depth ratio M of the model.
      in_branch: whether it is inside a residual branch.
      ends_branch: whether its stored values carry the branch's multiplier, because the
        model does not multiply the branch.
      carried: a factor of the model that its stored values carry, e.g. (base head
        dimension / head dimension)^½ of the queries; 1 if there is none.
      origin: how the role was found, for `explain`.
      training: the model's ratios of batch size and training length.

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
    ends_branch: bool = False
    carried: float = 1.0
    origin: str = ""
    training: TrainingScale = SAME

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
    **more: Any,
) -> ParamScale:
    """Build the scale of a parameter whose axes are known.

    Args:
      path: its path.
      base_shape: shape in the base model.
      shape: shape in the target model, of the same rank.
      in_axes: its fan-in axes; empty for biases, norm scales and other vectors.
      out_axes: its fan-out axes.
      grows: the axes that grow with width. By default those whose size differs;
        needed for a model that is its own base.
      **more: further fields of `ParamScale`.

    Returns:
      A `ParamScale` with role and width ratios filled in.

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
    role = _ROLES[
        bool(in_axes), not grows.isdisjoint(in_axes), not grows.isdisjoint(out_axes)
    ]

    def ratio(axes: tuple[int, ...]) -> float:
        growths = (shape[a] / base_shape[a] for a in axes if a in grows)
        return math.prod(growths, start=1.0)

    return ParamScale(
        path,
        role,
        base_shape,
        shape,
        in_axes,
        out_axes,
        width_in=ratio(in_axes),
        width_out=ratio(out_axes),
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

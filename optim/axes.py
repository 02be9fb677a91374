"""Which axes of a kernel are its fan-in, told from which of them grow."""

import math
import re
from typing import Any

from .scales import ParamScale, param_scale

Axes = tuple[tuple[int, ...], tuple[int, ...]]  # fan-in axes, fan-out axes

# Names that attention layers give to kernels whose three or more axes all grow, so
# that shapes alone cannot tell (d, heads, head_dim) from (heads, head_dim, d).
_FROM_RESIDUAL = re.compile(r"(?i)query|key|value|qkv|q_proj|k_proj|v_proj|wq|wk|wv")
_TO_RESIDUAL = re.compile(r"(?i)out|o_proj|wo\b|proj")
_EMBEDDING = re.compile(r"(?i)embed|wte|wpe|vocab|lookup")


def from_shapes(
    path: str,
    base: tuple[int, ...],
    shape: tuple[int, ...],
    *,
    layout: str = "in_out",
    embedding: bool = False,
    stacked: bool = False,
    **more: Any,
) -> ParamScale:
    """The scale of a parameter, from its shape in the base and in the target.

    Args:
      path: where it stands; also tells embeddings and attention kernels by name.
      base: shape in the base model.
      shape: shape in the target, of the same rank.
      layout: "in_out" (Flax, Haiku: spatial axes, then inputs, then outputs) or
        "out_in" (torch, Equinox: outputs, inputs, then spatial axes).
      embedding: whether it is a table of (entries, features).
      stacked: whether its first axis counts layers.
      **more: further fields of `ParamScale`.

    Raises:
      ValueError: the shapes do not tell fan-in from fan-out.

    Examples:
      >>> scale = from_shapes("conv", (3, 3, 16, 32), (3, 3, 32, 64))
      >>> scale.role.value, scale.fan_in, scale.width_in
      ('hidden', 288, 2.0)
    """
    first = 1 if stacked else 0
    axes = tuple(range(first, len(shape)))
    growing = tuple(a for a in axes if base[a] != shape[a])
    note = f"shape, {layout}" + (", stacked" if stacked else "")
    if layout == "out_in" and not embedding and len(axes) == 2:
        embedding = growing == axes[-1:] and bool(_EMBEDDING.search(path))
    if embedding:
        layout, note = "in_out", "embedding"
    last = axes[-1:] if layout == "in_out" else axes[:1]
    # One long axis that is the layer's output is a vector, whatever its padding by
    # ones: biases of Equinox convolutions (C, 1, 1), class tokens (1, 1, C).
    flat = all(shape[a] == base[a] == 1 for a in axes if a not in last)
    if not axes or (flat and set(growing) <= set(last)):
        split: Axes = ((), axes)
    elif layout == "out_in":
        split = (axes[1:], axes[:1])
    elif len(axes) == 2:
        split = (axes[:1], axes[1:])
    else:
        split = _split(path, base, shape, axes, growing)
    return param_scale(
        path,
        base,
        shape,
        *split,
        grows=frozenset(growing),
        origin=note,
        **more,
    )


def _split(
    path: str,
    base: tuple[int, ...],
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    growing: tuple[int, ...],
) -> Axes:
    """Fan-in and fan-out axes of a kernel of rank three or more, inputs first."""
    convolution = (axes[:-1], axes[-1:])
    ratio = {a: shape[a] / base[a] for a in axes}
    name = "/".join(path.split("/")[-2:])
    fits = [
        cut
        for cut in axes[1:]
        if math.isclose(
            math.prod(ratio[a] for a in axes if a < cut),
            math.prod(ratio[a] for a in axes if a >= cut),
        )
    ]
    if axes[1] in fits and _FROM_RESIDUAL.search(name):
        return _cut(axes, axes[1])
    if not growing or growing == axes[-1:] or growing == axes[-2:]:
        # (..., in, out) of a convolution, and just as well (heads, head_dim, out).
        return convolution
    if growing == axes[:1]:
        return _cut(axes, axes[1])
    if len(growing) == 1:
        # A convolution's readout, or the heads of a query whose input is fixed.
        if _FROM_RESIDUAL.search(name):
            return _cut(axes, growing[0])
        if len(axes) > 3 or _TO_RESIDUAL.search(name) or shape[axes[0]] < 16:
            return convolution
        raise ValueError(_ambiguous(path, base, shape))
    if len(growing) == 2:
        return _cut(axes, growing[1])
    if len(fits) == 1:
        return _cut(axes, fits[0])
    if _FROM_RESIDUAL.search(name):
        return _cut(axes, growing[1])
    if _TO_RESIDUAL.search(name):
        return _cut(axes, growing[-1])
    raise ValueError(_ambiguous(path, base, shape))


def _cut(axes: tuple[int, ...], at: int) -> Axes:
    return tuple(a for a in axes if a < at), tuple(a for a in axes if a >= at)


def _ambiguous(path: str, base: tuple[int, ...], shape: tuple[int, ...]) -> str:
    return (
        f"the shapes of {path!r}, {base} in the base and {shape} in the target, do "
        f"not tell its fan-in from its fan-out; pass axes={{r'{re.escape(path)}': "
        "(fan_in_axes, fan_out_axes)}, as ((0,), (1, 2)) for a kernel (d, heads, "
        "head_dim)"
    )


def from_axes(
    path: str,
    base: tuple[int, ...],
    shape: tuple[int, ...],
    split: Axes,
    **more: Any,
) -> ParamScale:
    """The scale of a parameter whose fan-in and fan-out axes the user gave."""
    for axis in (*split[0], *split[1]):
        if not 0 <= axis < len(shape):
            raise ValueError(
                f"axes of {path!r}: {axis} is not an axis of its shape {shape}"
            )
    return param_scale(path, base, shape, *split, origin="axes given", **more)

"""Growth ratios of a parameter, from its shapes and the uses of its axes."""

from collections.abc import Collection
from typing import Any

from ..rules.parametrizations import Parametrization
from ..rules.roles import ParamScale, Role, param_scale
from .leaves import Leaves
from .lists import Pairing
from .roles import Found

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def twin(path: str, pairing: Pairing, small: Leaves, large: Leaves, which: str) -> str:
    """The parameter of the base (or delta) that corresponds to one of the target.

    Raises:
      ValueError: there is none of the same rank.
    """
    found = pairing.twin(path)
    if found is None or len(small[found].shape) != len(large[path].shape):
        raise ValueError(
            f"the {which} has no parameter like the target's {path!r}; build both by "
            "the same code, so that they differ in sizes only"
        )
    return found


def grown(role: Found, shapes: Shapes, *, fractional: bool, **more: Any) -> ParamScale:
    """The scale of a parameter.

    Args:
      role: the uses of its axes.
      shapes: its shape in the base, in the target, and in a model whose every width
        differs from the base's.
      fractional: whether ratios need not be whole numbers.
      **more: further fields of `ParamScale`.

    Raises:
      ValueError: a width shrinks, does not divide, or grows in the target alone.
    """
    small, large, wide = shapes
    grows = {a for a, n in enumerate(small) if n != wide[a]}
    entries = set(role.in_axes) if role.table else set()
    widths = frozenset(grows - set(role.copies) - entries)
    _check_growth(role, small, large, widths, fractional)
    return param_scale(
        role.path,
        small,
        large,
        role.in_axes,
        role.out_axes,
        grows=widths,
        origin=role.line or ("not called" if role.uncalled else "declared"),
        **more,
    )


def _check_growth(
    role: Found,
    small: tuple[int, ...],
    large: tuple[int, ...],
    widths: frozenset[int],
    fractional: bool,
) -> None:
    path, where = role.path, f" ({role.line})" if role.line else ""
    for axis in (*role.in_axes, *role.out_axes):
        a, b = small[axis], large[axis]
        if a == b or (role.table and axis in role.in_axes):
            continue
        grows = f"axis {axis} of {path!r}{where} grows from {a} to {b}"
        if axis not in widths:
            raise ValueError(
                f"{grows}, but not in delta; build a delta whose every width differs "
                "from the base's"
            )
        if b < a and not fractional:
            raise ValueError(
                f"axis {axis} of {path!r} shrinks from {a} in the base to {b} in the "
                "target; the base comes first: swap the two, or pass fractional=True "
                "if the target is meant to be smaller"
            )
        if not a or (b % a and not fractional):
            raise ValueError(
                f"{grows}, and {a} does not divide {b}; choose widths that divide, or "
                "pass fractional=True; if the axis counts tokens, classes or "
                "positions, build the base with as many as the target"
            )


def check_something_grows(scales: Collection[ParamScale]) -> None:
    """Raise a `ValueError` if base and target are the same."""
    same = (s.role is Role.FIXED and s.shape == s.base_shape for s in scales)
    if all(same) and all(s.depth == 1 for s in scales):
        raise ValueError(
            "base and target have the same widths and the same depth; build the base "
            "with a smaller width or depth. For a model that is its own base, pass a "
            "model of another width as delta=..."
        )


def same_parametrization(
    own: Parametrization | None, asked: Parametrization | None
) -> Parametrization | None:
    """The one that was asked for.

    Raises:
      ValueError: the model was built with another one.
    """
    if own is not None and asked is not None and own != asked:
        raise ValueError(
            f"the model was built with {own.label}, but parametrization="
            f"{asked.name!r}; leave parametrization out, or build the model with it"
        )
    return asked

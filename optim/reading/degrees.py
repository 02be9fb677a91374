"""How the rest of a program depends on the scale of one value.

If a value is multiplied by c, what is computed from it is multiplied by a power of c,
its degree, as long as the operations are homogeneous: sums, products, roots, ReLU.
Where the degree becomes zero, as in a norm or a quotient, the scale has no effect.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .links import SUM
from .program import MOVES, PRODUCTS, Node, is_scaled, origin, reach

# Homogeneous in their first operand.
_SAME = MOVES.union(
    """
    abs all_gather cummax cummin cumsum dynamic_slice gather imag neg pad psum
    reduce_max reduce_min reduce_window_max reduce_window_sum slice sort
    """.split()  # noqa: SIM905
)
_BILINEAR = ("mul", *PRODUCTS)
_ADDITIVE = frozenset(
    """
    add carry clamp concatenate dynamic_update_slice join max min scatter scatter-add
    select_n sub sum
    """.split()  # noqa: SIM905
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_INDEPENDENT = ("sign", "argmax", "argmin", "is_finite")
_SMALL = 1e-3  # smaller constants avoid a division by zero


class Degree(NamedTuple):
    """The power of the scale in a value, and the constant that multiplies it.

    Attributes:
      power: 0 if the value does not depend on the scale.
      constant: only up to the next layer, to which later constants belong.
      open: whether there was no such layer yet.
      alone: whether nothing of another degree was added, so that a norm removes it.
    """

    power: float
    constant: float = 1.0
    open: bool = True
    alone: bool = True

    def times(self, constant: float) -> "Degree":
        return self._replace(constant=self.constant * constant) if self.open else self

    def to(self, power: float) -> "Degree":
        return self._replace(power=self.power * power, constant=self.constant**power)


_ONE = Degree(0.0)


class _MattersError(Exception):
    """The scale changes what is computed from `degree`."""

    def __init__(self, degree: Degree):
        super().__init__()
        self.degree = degree


def is_addend(node: Node, uses: Callable[[Node], list[Node]]) -> bool:
    """Whether a value is only added up and scaled on its way to the results."""
    return all(
        x.op in ("add", "sub", "neg", "reduce_sum", *MOVES) or is_scaled(x)
        for x in reach(uses(node), uses)
    )


def degree_in_parameters(end: Node) -> Degree | None:
    """The degree of a function of parameters alone, if all are scaled together.

    E.g. 1 for a kernel that is rounded to multiples of its mean absolute value; None if
    it has no degree.
    """
    sources = reach([end], lambda node: [x for x in node.operands if x.weight])
    found: dict[int, Degree] = {}
    try:
        for node in sorted(sources, key=lambda node: node.id):
            degree = _ONE
            if node.op == "param":
                degree = Degree(1.0)
            elif any(found[x.id].power for x in node.operands if x.id in found):
                degree = _degree(node, found, False)
            if not degree.alone:
                return None
            found[node.id] = degree
    except _MattersError:
        return None
    return found[end.id]


def _degree(node: Node, found: dict[int, Degree], is_layer: bool) -> Degree:
    """The degree of a node of which at least one operand depends on the scale."""
    each = [found.get(x.id, _ONE) for x in node.operands]
    some = next((d for d in each if d.power), _ONE)
    if node.op in _SAME:
        return each[0]
    if node.op == "reduce_sum":
        axes = node.params["axes"]
        return each[0].times(math.prod(node.operands[0].shape[a] for a in axes))
    if node.op in _BILINEAR:
        result = _product(node, each)
        return result._replace(open=False) if is_layer else result
    if node.op == "div":
        below = each[1].to(-1) if each[1].power else _ONE
        return _joined(each[0], below)
    if node.op in _ADDITIVE:
        return _sum(node, each)
    if node.op in ("custom_linear_solve", "triangular_solve"):
        return _joined(each[-1], each[0].to(-1) if each[0].power else _ONE)
    if node.op == "lu":
        return _ONE if node.params["result"] else each[0]
    if node.op == "integer_pow":
        return some.to(node.params["y"])
    if node.op in ("sqrt", "rsqrt", "cbrt"):
        return some.to({"sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}[node.op])
    if node.op == "pow" and node.operands[1].value is not None:
        return each[0].to(node.operands[1].value)
    if node.op == "top_k" and not node.params["result"]:
        return each[0]
    if node.op in (*_INDEPENDENT, "top_k") and some.alone:
        return _ONE
    if node.op in _COMPARISONS and some.alone:
        other = each[0].power == each[1].power
        if other or any(x.value == 0 for x in node.operands):
            return _ONE
    raise _MattersError(some)


def _joined(one: Degree, other: Degree) -> Degree:
    return Degree(
        one.power + other.power,
        one.constant * other.constant,
        one.open and other.open,
        one.alone and other.alone,
    )


def _product(node: Node, each: list[Degree]) -> Degree:
    result = _joined(each[0], each[1])
    for operand, degree in zip(node.operands[:2], each, strict=False):
        if not degree.power and operand.value:
            result = result.times(abs(operand.value))
    return result


def _sum(node: Node, each: list[Degree]) -> Degree:
    """Entries of equal degree may be added; a constant beside them matters."""
    chosen = node.op in ("select_n", "gather")
    data = [*zip(node.operands, each, strict=True)][chosen:]
    if node.op.startswith("scatter"):
        data = [data[0], data[2]]
    if node.op == "dynamic_update_slice":
        data = data[:2]
    if chosen and each[0].power:
        raise _MattersError(each[0])
    some = next(d for _, d in data if d.power)
    for operand, degree in data:
        if degree.power == some.power or (not degree.power and _is_void(operand, node)):
            continue
        if degree.power or node.op not in ("add", "sub", SUM):
            raise _MattersError(some)
        some = some._replace(alone=False)
    return some


def _is_void(node: Node, user: Node) -> bool:
    """Whether a value beside a sum is zero, a small constant, or a mask's."""
    if node.value is not None:
        return (
            abs(node.value) < _SMALL or user.op == "select_n" or abs(node.value) > 1e4
        )
    if node.array is not None:
        return bool(np.abs(node.array).max() < _SMALL)
    for _ in range(12):  # the state of a recurrence that starts at zero
        if node.op == "carry":
            start, end = node.operands
            within = user.id <= end.id
            return within and not start.data and not start.weight
        data = [x for x in node.operands if x.data]
        if node.op in MOVES and data:
            node = data[0]
        elif node.op in ("mul", "add", "scan_in", "dot_general") and data:
            node = next((x for x in data if origin(x).op == "carry"), data[0])
        else:
            return False
    return False

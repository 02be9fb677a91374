"""Whether a function of parameters is twice as large for parameters twice as large.

If parameters are multiplied by c, what is computed from them is multiplied by a power
of c, its degree, as long as the operations are homogeneous: sums, products, roots.
"""

from collections.abc import Callable

from .program import MOVES, PRODUCTS, Node, is_scaled, reach

# Homogeneous in their first operand.
_SAME = MOVES.union(
    """
    abs all_gather cummax cummin cumsum dynamic_slice gather imag neg pad psum
    reduce_max reduce_min reduce_sum reduce_window_max reduce_window_sum slice sort
    """.split()  # noqa: SIM905
)
_ADDITIVE = frozenset(
    """
    add carry clamp concatenate join max min sub sum
    """.split()  # noqa: SIM905
)
_ROOTS = {"sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
_SMALL = 1e-3  # smaller constants avoid a division by zero


class _MixedError(Exception):
    """A value has no degree."""


def is_addend(node: Node, uses: Callable[[Node], list[Node]]) -> bool:
    """Whether a value is only added up and scaled on its way to the results."""
    return all(
        x.op in ("add", "sub", "neg", "reduce_sum", *MOVES) or is_scaled(x)
        for x in reach(uses(node), uses)
    )


def degree_in_parameters(end: Node) -> float | None:
    """The degree of a function of parameters alone, if all are scaled together.

    E.g. 1 for a kernel that is rounded to multiples of its mean absolute value; None if
    it has no degree.
    """
    sources = reach([end], lambda node: [x for x in node.operands if x.weight])
    found: dict[int, float] = {}
    try:
        for node in sorted(sources, key=lambda node: node.id):
            degree = 0.0
            if node.op == "param":
                degree = 1.0
            elif any(found.get(x.id) for x in node.operands):
                degree = _degree(node, [found.get(x.id, 0.0) for x in node.operands])
            found[node.id] = degree
    except _MixedError:
        return None
    return found[end.id]


def _degree(node: Node, each: list[float]) -> float:
    """The degree of a node of which at least one operand depends on the scale."""
    if node.op in _SAME:
        return each[0]
    if node.op in ("mul", *PRODUCTS):
        return each[0] + each[1]
    if node.op == "div":
        return each[0] - each[1]
    if node.op in _ADDITIVE:
        return _sum(node, each)
    if node.op in ("integer_pow", *_ROOTS):
        return each[0] * (_ROOTS.get(node.op) or node.params["y"])
    raise _MixedError


def _sum(node: Node, each: list[float]) -> float:
    """Entries of equal degree may be added, and zeros, which have any."""
    data = [*zip(node.operands, each, strict=True)]
    some = next(d for _, d in data if d)
    if not all(d == some or _is_void(x) for x, d in data):
        raise _MixedError
    return some


def _is_void(node: Node) -> bool:
    """Whether a constant is zero, or avoids a division by zero."""
    return node.value is not None and abs(node.value) < _SMALL

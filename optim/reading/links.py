"""How axes of an operation's operands become axes of its result, for every primitive.

Each operation is described as an `einsum` is: by its indices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .program import CONVOLUTION, PRODUCTS, Node, Program, regrouped

SUM = "sum"  # of the products of the segments of an axis that is summed over

# Operations on entries in the same place of all operands.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp complex conj cos
    cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite
    join last le log log1p logistic lt max min mul ne neg not or pow real rem round
    rsqrt select_n sign sin sinh sqrt stop_gradient sub sum tan tanh
    """.split()  # noqa: SIM905
)
_REDUCTIONS = "sum max min prod and or".split()  # noqa: SIM905
REDUCTIONS = frozenset((*(f"reduce_{x}" for x in _REDUCTIONS), "argmax", "argmin"))
# Operations that keep axes in place, and take or mix entries along some of them.
_IN_PLACE = frozenset(
    """
    all_gather carry concatenate cumlogsumexp cummax cummin cumprod cumsum dynamic_slice
    dynamic_update_slice fft pad psum reduce_window reduce_window_max reduce_window_sum
    rev scatter scatter-add slice sort tile top_k
    """.split()  # noqa: SIM905
)
# The parameters of operations that name the axes along which they mix entries.
_ALONG = ("axis", "dimension", "dimensions", "all_gather_dimension")


class Index(NamedTuple):
    """One index of an operation.

    Attributes:
      out: its axis of the result; None if it is summed (or otherwise reduced) over.
      axes: {place of an operand: the axis of it}.
      mixed: whether the result's entries along this axis are not those of the
        operands in the same order, e.g. of a cumulative sum or a part.
    """

    out: int | None
    axes: Mapping[int, int]
    mixed: bool = False


def indices(node: Node) -> list[Index]:
    """The indices of an operation; [] if it is not known what it does.

    Examples:
      >>> numbers = (((1,), (0,)), ((), ()))
      >>> x, w = (Node(0, "input", [], s, {}, None, 1) for s in ((2, 3), (3, 4)))
      >>> product = Node(
      ...     2, "dot_general", [x, w], (2, 4), {"dimension_numbers": numbers}, None, 1)
      >>> [(i.out, i.axes) for i in indices(product)]
      [(None, {0: 1, 1: 0}), (0, {0: 0}), (1, {1: 1})]
    """
    if node.op in ELEMENTWISE or node.op in _IN_PLACE:
        return list(_same_place(node))
    if node.op in REDUCTIONS:
        return list(_dropped(node, node.params["axes"], summed=True))
    reader = _READERS.get(node.op)
    return list(reader(node)) if reader is not None else []


def is_known(op: str) -> bool:
    """Whether `indices` knows an operation."""
    return op in (*ELEMENTWISE, *_IN_PLACE, *REDUCTIONS, *_READERS)


def is_kernel(node: Node) -> bool:
    """Whether it is a product of a value with a parameter."""
    return node.op in PRODUCTS and node.data and any(x.weight for x in node.operands)


def walks_layers(program: Program, loop: int) -> bool:
    """Whether the iterations of a loop are layers: a kernel acts on its carry."""
    return not program.is_over_data(loop) and any(
        node.loop == loop and is_kernel(node) and program.carries_through(node, loop)
        for node in program.nodes
    )


def index_of(node: Node, operand: int, axis: int) -> Index | None:
    """The index of an axis of an operand; None if none is known."""
    found = (x for x in indices(node) if x.axes.get(operand) == axis)
    return next(found, None)


def _same_place(node: Node) -> Iterator[Index]:
    rank, mixed = len(node.shape), set(_along(node))
    like = {k: x.shape for k, x in enumerate(node.operands) if len(x.shape) == rank}
    for a, size in enumerate(node.shape):
        same = {k: a for k, shape in like.items() if shape[a] == size}
        if node.op not in _IN_PLACE:
            yield Index(a, same)
        else:
            yield Index(a, dict.fromkeys(like, a), a in mixed or len(same) < len(like))


def _along(node: Node) -> Iterable[int]:
    """The axes along which an operation mixes entries."""
    params, every = node.params, range(len(node.shape))
    if node.op.startswith("scatter"):
        return every
    if node.op == "fft":
        return every[-len(params["fft_lengths"]) :]
    if node.op == "top_k":
        return every[-1:]
    if node.op == "pad":
        return [a for a in every if any(params["padding_config"][a])]
    if node.op.startswith("reduce_window"):
        return [a for a in every if params["window_dimensions"][a] > 1]
    named = next((params[name] for name in _ALONG if name in params), ())
    return named if isinstance(named, tuple) else (named,)


def _dropped(node: Node, gone: Sequence[int], summed: bool) -> Iterator[Index]:
    rank, at = len(node.operands[0].shape), 0
    away = {a % rank for a in gone}
    for a in range(rank):
        if a not in away:
            yield Index(at, {0: a})
            at += 1
        elif summed:
            yield Index(None, {0: a})


def _transpose(node: Node) -> Iterator[Index]:
    for out, a in enumerate(node.params["permutation"]):
        yield Index(out, {0: a})


def _broadcast(node: Node) -> Iterator[Index]:
    shape = node.operands[0].shape
    for a, out in enumerate(node.params["broadcast_dimensions"]):
        if shape[a] == node.shape[out]:
            yield Index(out, {0: a})


def _reshape(node: Node) -> Iterator[Index]:
    old, new = node.operands[0].shape, node.shape
    for before, after in regrouped(old, new):
        # An axis of size one belongs to nothing, unless it stands alone.
        merged = [a for a in before if old[a] > 1] or before
        split = [a for a in after if new[a] > 1 or len(after) == 1]
        for a in merged:
            for out in split:
                yield Index(out, {0: a}, old[a] != new[out])


def _product(node: Node) -> Iterator[Index]:
    groups: Sequence[int]
    numbers, groups = node.params.get("dimension_numbers"), ()
    if numbers is None:
        ragged = node.params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    (lc, rc), (lb, rb) = numbers
    for a in groups:
        yield Index(None, {1: a}, mixed=True)
    for pair in zip(lc, rc, strict=True):
        yield Index(None, dict(enumerate(pair)))
    for at, pair in enumerate(zip(lb, rb, strict=True)):
        yield Index(at, dict(enumerate(pair)))
    out = len(lb)
    for k, gone in enumerate(((*lc, *lb), (*rc, *rb, *groups))):
        for a in range(len(node.operands[k].shape)):
            if a not in gone:
                yield Index(out, {k: a}, mixed=bool(groups) and k == 0)
                out += 1


def _convolution(node: Node) -> Iterator[Index]:
    numbers, groups = (
        node.params["dimension_numbers"],
        node.params["feature_group_count"],
    )
    (batch, channels, *places) = numbers.lhs_spec
    (into, from_, *window) = numbers.rhs_spec
    out_batch, out, *out_places = numbers.out_spec
    yield Index(out_batch, {0: batch}, node.params["batch_group_count"] != 1)
    if groups == 1:
        yield Index(None, {0: channels, 1: from_})
        yield Index(out, {1: into})
    elif is_depthwise(node):
        yield Index(out, {0: channels, 1: into})
        yield Index(None, {1: from_})
    else:
        yield Index(None, {1: from_})
        yield Index(out, {1: into}, mixed=True)
    for a in window:
        yield Index(None, {1: a}, mixed=True)
    for a, b in zip(places, out_places, strict=True):
        yield Index(b, {0: a}, mixed=True)


def is_depthwise(node: Node) -> bool:
    """Whether a convolution has one kernel for each channel."""
    numbers = node.params["dimension_numbers"]
    data, kernel = node.operands[:2]
    channels = data.shape[numbers.lhs_spec[1]]
    groups = node.params["feature_group_count"]
    return bool(groups == channels == kernel.shape[numbers.rhs_spec[0]])


def _gather(node: Node) -> Iterator[Index]:
    numbers = node.params["dimension_numbers"]
    batch = tuple(getattr(numbers, "operand_batching_dims", ()))
    gone = {*numbers.collapsed_slice_dims, *batch}
    kept = [a for a in range(len(node.operands[0].shape)) if a not in gone]
    for a, out in zip(kept, numbers.offset_dims, strict=True):
        yield Index(out, {0: a}, node.shape[out] != node.operands[0].shape[a])


def _scan_in(node: Node) -> Iterator[Index]:
    for out in range(len(node.shape)):
        yield Index(out, {0: out + 1})


def _scan_out(node: Node) -> Iterator[Index]:
    for a in range(len(node.operands[0].shape)):
        yield Index(a + 1, {0: a})


_READERS = {
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": lambda node: _dropped(node, node.params["dimensions"], summed=False),
    "reshape": _reshape,
    "dot_general": _product,
    "ragged_dot_general": _product,
    CONVOLUTION: _convolution,
    "gather": _gather,
    "scan_in": _scan_in,
    "scan_out": _scan_out,
}

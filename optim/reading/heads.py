"""Heads of attention: the parts of a kernel that meet in products of activations."""

import math
from collections.abc import Iterable

from .axes import Axes, Axis, Use
from .models import Reading
from .program import Node


def find_heads(reading: Reading, axes: Axes) -> dict[str, tuple[int, ...]]:
    """The shape of one head of each kernel that makes or reads heads, by path.

    A product of two activations runs over heads where an axis that comes from the
    outputs of a kernel is a batch axis. The rest of these outputs are within a head.
    Heads that share an axis with their entries follow each other.
    """
    inside: dict[int, dict[Axis, int]] = {}
    for node in reading.program.nodes:
        if node.op != "dot_general":
            continue
        (lc, rc), (lb, rb) = node.params["dimension_numbers"]
        left, right = node.operands[:2]
        if node.id not in axes.kernel_sums and left.data and right.data:
            for x, contracted, batch in ((left, lc, lb), (right, rc, rb)):
                _note(axes, x, contracted, batch, inside)
        elif node.id in axes.kernel_sums and (left.weight or right.weight):
            sides = (left, lc), (right, rc)
            (kernel, mine), (data, its) = sides if left.weight else sides[::-1]
            _read_by(axes, kernel, data, [*zip(mine, its, strict=True)], inside)
    found = {}
    for param, sizes in inside.items():
        if not any(event.axes(Use.IN) for event in axes.events[param]):
            continue  # a bias
        path = reading.path_of[param]
        shape = reading.leaves[path].shape
        found[path] = tuple(sizes.get((param, a), n) for a, n in enumerate(shape))
    return found


def _note(
    axes: Axes,
    x: Node,
    contracted: tuple[int, ...],
    batch: tuple[int, ...],
    inside: dict[int, dict[Axis, int]],
) -> None:
    """Note the heads of the kernels that one side of a product comes from."""
    labels = axes.entries(x)
    outside = {a for a in range(len(labels)) if a not in (*contracted, *batch)}

    def of(param: int, places: Iterable[int]) -> dict[Axis, int]:
        return {
            axis: x.shape[a] for a in places for axis in labels[a] if axis[0] == param
        }

    for param in {p for a in batch for p, _ in labels[a]} - inside.keys():
        within = of(param, contracted) or of(param, outside)
        inside[param] = dict.fromkeys(of(param, batch), 1) | within


def _read_by(
    axes: Axes,
    kernel: Node,
    data: Node,
    at: list[tuple[int, int]],
    inside: dict[int, dict[Axis, int]],
) -> None:
    """Note the heads that a kernel sums over."""
    found: dict[Axis, int] = {}
    left = {label: size for sizes in inside.values() for label, size in sizes.items()}
    values: set[int] = set()  # the kernels whose entries are on the last axis
    # Of several axes that come from one, the last hold the entries of a head.
    for mine, other in sorted(at, key=lambda pair: -pair[1]):
        labels = axes.entries(data)[other] & left.keys()
        values = values or {param for param, _ in labels}
        products = [
            math.prod(left[label] for label in labels if label[0] == param)
            for param in values & {param for param, _ in labels}
        ]
        if products:
            size = math.gcd(max(products), data.shape[other])
            found |= dict.fromkeys(axes.labels[kernel.id][mine], size)
            left |= {label: max(left[label] // size, 1) for label in labels}
    for (param, axis), size in found.items():
        inside.setdefault(param, {}).setdefault((param, axis), size)

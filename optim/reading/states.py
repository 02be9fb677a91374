"""Whether the states that data change, as in linear attention, start as kernels."""

import dataclasses
import math
from collections.abc import Iterator

from .facts import Facts
from .kinds import alike
from .pair import Pair
from .program import PRODUCTS, Node, Spot

_State = tuple[Node, int, set[int]]  # a product with it, its place, its parameters


def settle_states(pair: Pair) -> None:
    """Find whether what states start from is a kernel, or has entries of size one.

    It is a kernel where what data add is as small as a kernel, e.g. (k v / n) in
    linear attention, or the steps of an inner optimizer. Otherwise their sum needs
    a factor of 1/n beside queries or results, and is an activation.
    """
    for kind in pair.kinds(_states).values():
        for (now, at, params), (then, *_) in kind.twins:
            growth = _terms(now) / _terms(then)
            (term, of), (_, other) = (
                _gained(m, x.operands[at])
                for m, x in ((pair.large, now), (pair.small, then))
            )
            is_kernel = pair.large.axes.is_step(term) or alike(of / other, 1 / growth)
            for param in () if is_kernel or growth == 1 else params:
                path = pair.large.reading.path_of[param]
                for model, name in ((pair.large, path), (pair.small, pair.twin[path])):
                    role = model.roles[name]
                    if role is not None:
                        axes = tuple(sorted((*role.in_axes, *role.out_axes)))
                        model.roles[name] = dataclasses.replace(
                            role, in_axes=(), out_axes=axes
                        )


def _states(model: Facts) -> Iterator[tuple[Spot, _State]]:
    nodes = model.reading.program.nodes
    for i, (at, params) in model.axes.states.items():
        yield nodes[i].spot, (nodes[i], at, params)


def _terms(node: Node) -> int:
    """How many terms a product sums up."""
    axes = node.params["dimension_numbers"][0][0]
    return math.prod(node.operands[0].shape[a] for a in axes)


def _gained(model: Facts, node: Node) -> tuple[Node, float]:
    """What a state, as in linear attention, gains in a step, and the constant on it.

    A value that is no state is what it gains itself.
    """
    trunk = model.factors.trunk
    seen: set[int] = set()
    while (inner := trunk(node)[0]).id not in seen:
        seen.add(inner.id)
        data = [x for x in inner.operands if x.data]
        terms = [x for x in data if not _is_state(model, x, inner)]
        if inner.op == "carry" and inner.data:
            node = inner.operands[1]
        elif inner.op in ("add", "sub") and len(terms) == 1:
            node = terms[0]
        else:
            break
    return trunk(node)


def _is_state(model: Facts, node: Node, user: Node) -> bool:
    """Whether a value is an earlier state, which may be multiplied by gates.

    Not what a loop takes from before it.
    """
    node, _ = model.factors.trunk(node)
    spread = [x for x in node.operands if x.op == "broadcast_in_dim" and x.data]
    is_outer = node.op == "mul" and len(spread) == 2  # of a key and what is new
    if is_outer or model.axes.is_step(node) or node.loop != user.loop:
        return False
    if node.op in ("mul", *PRODUCTS):
        return any(_is_state(model, x, node) for x in node.operands)
    return node.op in ("carry", "add", "sub")

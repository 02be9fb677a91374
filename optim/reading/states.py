"""Whether the states that data change, as in linear attention, start as kernels."""

import dataclasses
import math
from collections.abc import Iterator

from .facts import Facts
from .kinds import alike
from .pair import Pair
from .program import Node, Spot

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
                m.factors.trunk(m.factors.gained(x.operands[at]))
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

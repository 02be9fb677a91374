"""The ratios of the constants of the target to those of the base."""

import math
from collections.abc import Hashable, Iterator, Mapping

from .facts import Facts
from .kinds import Kind
from .logs import ONE, Log
from .pair import Pair
from .program import Node


class Ratios:
    """Compares the constants of both programs.

    Args:
      twin: the value of the base for each of the target, by its id.
    """

    def __init__(self, pair: Pair, twin: Mapping[int, Node]):
        self._pair, self._large, self._twin = pair, pair.large, twin
        self._constants = self._multiplied()
        nodes = self._large.reading.program.nodes
        self._places = {(x.op, x.spot) for x in nodes}

    def of(self, node: Node, k: int) -> float:
        """The ratio of a constant to that of the base; nan if it is not known."""
        twin = self._twin.get(node.id)
        if (node.op, node.spot) not in self._constants:
            # The base does not multiply here, or by what is not known.
            return math.nan if twin else node.operands[k].value or 0.0
        if twin is None:  # like those of other layers
            kind = self._constants[node.op, node.spot]
            each = [_ratio(*pair, k) for pair in kind.twins]
            each = self._known(kind, each, node)
            return each[0] if len({round(x, 6) for x in each}) == 1 else math.nan
        kind = self._kind_of(node, twin)
        like = [x for x in kind.now if self._twin.get(x.id) is twin]
        if len(kind.then) == 1:  # of layers, or of what else stands at this place
            like = [x for x in like if x.id in self._large.branches.learned]
        elif node.data and self._deepens(node):
            like = kind.now
        values = {x.operands[k].value for x in like}
        if len(values) > 1:  # it depends on the number of the layer
            ratios = kind.ratios(lambda x, y: _ratio(x, y, k))
            return self._known(kind, ratios, node)[kind.now.index(node)]
        return _ratio(node, twin, k)

    def _deepens(self, node: Node) -> bool:
        """Whether there are more operations at a place than in the base."""
        every = self._constants[node.op, node.spot]
        return len(every.then) != len(every.now)

    def _known(self, kind: Kind[Node], ratios: list[float], node: Node) -> list[float]:
        """Ratios of constants; if only depth grows, those of first layers are all."""
        if len(kind.then) == 1 and not any(self._pair.growth.values()):
            return ratios[:1] * len(ratios)
        kind.check_known(ratios, node)
        return ratios

    def _multiplied(self) -> dict[Hashable, Kind[Node]]:
        """The operations with constants that both models have, by their place."""

        def constants(model: Facts) -> Iterator[tuple[Hashable, Node]]:
            for node in model.reading.program.nodes:
                if any(x.value is not None for x in node.operands):
                    yield (node.op, node.spot), node

        return {k: x for k, x in self._pair.kinds(constants).items() if x.then}

    def _kind_of(self, node: Node, twin: Node) -> Kind[Node]:
        """Operations with constants at one place, in one evaluation of the model."""
        place = node.op, node.spot
        kind = self._constants[place]

        def like(model: Facts, every: list[Node], of: Node) -> list[Node]:
            found = [x for x in every if x.shape == of.shape]
            number = model.evaluation(place, of)
            known = (model.evaluation(place, x) for x in found)
            return [x for x, n in zip(found, known, strict=True) if n == number]

        then = like(self._pair.small, kind.then, twin)
        return Kind(then, like(self._large, kind.now, node))

    def only_of_base(self, node: Node) -> Log:
        """What the base alone multiplies a value by, in other code."""
        found, inner = ONE, None
        while inner is not node:
            node = inner or node
            inner, factor = self._pair.small.factors.inner_step(node, 1.0)
            if factor and (node.op, node.spot) not in self._places:
                constant = -math.log(abs(factor))
                found += Log(constant, constant)
        return found


def _ratio(now: Node, then: Node, k: int) -> float:
    value, other = now.operands[k].value, then.operands[k].value
    return value / other if value and other else 0.0

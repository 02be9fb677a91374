"""How values, and the numbers of terms of sums, grow from the base to the target."""

import functools
import math
from collections import Counter
from collections.abc import Hashable, Mapping
from itertools import starmap

from .axes import is_identity
from .layers import Layers
from .links import indices
from .pair import Pair
from .program import MOVES, Node

# What keeps zeros in their places.
KEEP = frozenset(
    """
    abs cumsum dynamic_slice gather integer_pow mul neg pad slice sqrt tile
    """.split()  # noqa: SIM905
).union(MOVES)


_PARTS = ("slice", "dynamic_slice", "gather", "top_k", "dynamic_update_slice")


class Shapes:
    """The shapes of the target's values in the base.

    Args:
      twin: the value of the base for each of the target, by its id.

    Attributes:
      of: the shapes, by id, with nan for what counts layers.
      chosen: the axes along which few entries are not zero, as many as in the base.
    """

    def __init__(self, pair: Pair, twin: Mapping[int, Node], layers: Layers):
        self._pair, self._axes, self._twin = pair, pair.large.axes, twin
        self._layers = layers
        self._places: dict[Hashable, set[tuple[int, ...]]] = {}
        for node in pair.small.reading.program.nodes:
            place = node.op, node.spot
            self._places.setdefault(place, set()).add(node.shape)
        self.of: dict[int, tuple[float, ...]] = {}
        self.chosen: dict[int, frozenset[int]] = {}

    def add(self, node: Node, *, has_zeros: bool) -> None:
        """Note the shape of a value, after those that it is computed from.

        Args:
          has_zeros: whether some of these are zero.
        """
        self.of[node.id] = self._base_shape(node)
        self.chosen[node.id] = self._choices(node, has_zeros=has_zeros)

    def _choices(self, node: Node, *, has_zeros: bool) -> frozenset[int]:
        """The axes along which few entries are not zero, as many as in the base."""
        axes, every = self._axes, frozenset(range(len(node.shape)))
        if is_identity(node):
            return every
        few = frozenset[int]()
        literal = any(x.value is not None for x in node.operands)
        if node.id in axes.hot and node.op == "eq" and not literal:
            few |= every - axes.spread.get(node.id, frozenset())
        if node.op in KEEP or (node.op == "select_n" and has_zeros):
            for index in indices(node):
                for k, axis in index.axes.items():
                    chosen = self.chosen.get(node.operands[k].id, frozenset())
                    if index.out is not None and not index.mixed and axis in chosen:
                        few |= {index.out}
        return few

    def terms(self, node: Node) -> float:
        """In how many times as many terms an operation sums up."""
        number, sparse = 1.0, self._axes.sparse
        for index in indices(node):
            if index.out is None and not index.mixed:
                chosen = (
                    axis in self.chosen[x.id]
                    or (x.op == "scan_out" and not axis and x.id in self._layers.sums)
                    or (node.op != "reduce_sum" and axis in sparse.get(x.id, ()))
                    for k, axis in index.axes.items()
                    for x in (node.operands[k],)
                )
                if not any(chosen):
                    growths = starmap(
                        functools.partial(self.growth, node), index.axes.items()
                    )
                    # Factors have as many entries; of one, the number may be unknown.
                    number *= min(growths, key=lambda x: (math.isnan(x), x))
        return number

    def growth(self, node: Node, k: int, axis: int | None = None) -> float:
        """Growth of an operand, or of one axis of it."""
        now = node.operands[k]
        then = self.of.get(now.id, ())
        if len(now.shape) != len(then):
            return math.nan
        ratios = [a / b if b else 1.0 for a, b in zip(now.shape, then, strict=True)]
        return math.prod(ratios) if axis is None else ratios[axis]

    def _base_shape(self, node: Node) -> tuple[float, ...]:
        """The shape that a value has in the base; nan for what counts layers."""
        twin = self._twin.get(node.id)
        if twin is None:  # e.g. of layers that the base has none of
            places = self._places.get((node.op, node.spot), set())
            if {*map(len, places)} != {len(node.shape)}:
                return self._computed_shape(node)
            sizes = (set(x) for x in zip(*places, strict=True))
            like = [x.pop() if len(x) == 1 else math.nan for x in sizes]
            if len(places) == 1:
                return tuple(like)
            computed = self._computed_shape(node)
            pairs = zip(computed, like, strict=True)
            return tuple(y if math.isnan(x) else x for x, y in pairs)
        if node.param is not None:
            path = self._pair.large.reading.path_of[node.param]
            of_layers = self._pair.counts_layers(path)
            return twin.shape if not of_layers else (math.nan,) * len(twin.shape)
        if node.op == "scan_out" and twin.shape[0] != node.shape[0]:
            return math.nan, *twin.shape[1:]
        return twin.shape

    def _computed_shape(self, node: Node) -> tuple[float, ...]:
        """The shape in the base of what the base does not compute so."""
        ratios: list[dict[int, float]] = [{} for _ in node.shape]
        split = Counter[int]()
        for index in indices(node):
            for k, axis in index.axes.items() if index.out is not None else ():
                now = node.operands[k].shape
                then = self.of.get(node.operands[k].id, ())
                if len(now) == len(then) and now[axis]:
                    ratios[index.out or 0][axis] = then[axis] / now[axis]
                split[axis] += node.op == "reshape"
                split[axis] += 2 * (index.mixed and node.op in _PARTS)
        unclear = {a for a, n in split.items() if n > 1}
        return tuple(
            n * (math.prod(of.values()) if node.op == "reshape" else max(of.values()))
            if of and (not unclear & of.keys() or {*of.values()} == {1.0})
            else math.nan
            if of
            else n
            for n, of in zip(node.shape, ratios, strict=True)
        )

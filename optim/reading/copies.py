"""Whether the target computes the same as the base, if its units are copies.

If each unit of the base becomes several with the same weights, times the ratio of
desired updates, then each value of the target is some number times copies of a value of
the base; and where that number matters, it is one. `Copies` follows it through the
program, whatever else was read of it: what was read wrongly, and a factor that is
missing, show where the number matters and is not one.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..rules.multipliers import multipliers
from ..rules.parametrizations import parametrization
from ..rules.roles import ParamScale
from ..scales.declare import Declarations
from ..scales.table import some
from .depth import Depth
from .facts import Facts
from .kinds import alike
from .links import indices
from .pair import Pair
from .program import MOVES, PRODUCTS, Node, earlier
from .roles import remedy

# Multiplied by a number if their first operand is.
_SAME = MOVES.union(
    """
    abs all_gather conj copy cummax cummin dynamic_slice fft gather imag neg pad psum
    reduce_max reduce_min reduce_window_max slice sort tile
    """.split()  # noqa: SIM905
)
_SUMS = frozenset(
    """
    add clamp complex concatenate dynamic_update_slice join max min rem scatter
    scatter-add select_n sub sum
    """.split()  # noqa: SIM905
)
_LINEAR = _SAME | _SUMS | {"mul", *PRODUCTS}
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
_COMPARISONS = frozenset(
    ("argmax", "argmin", "eq", "ge", "gt", "is_finite", "le", "lt", "ne", "sign")
)
_BENDS = frozenset(
    """
    atan2 ceil cos cosh erf erf_inv erfc exp exp2 expm1 floor log1p logistic round sin
    sinh tan tanh
    """.split()  # noqa: SIM905
)
_SMALL, _LARGE = 1e-3, 1e4  # numbers beyond avoid a division by zero, or mask entries
_ZERO, _UNKNOWN = 0.0, math.nan


class Copies:
    """Follows the numbers by which values of the target are multiplied.

    Args:
      found: the scales of the parameters, without their depth.
      alpha: the power of the depth in the multiplier of branches.

    Attributes:
      factors: the number of each value, by id: 0 for what is zero in both models, or
        counts as zero beside others, and nan for what is not known.
      wrong: the first value whose number matters and is not one, and the number.
    """

    def __init__(
        self,
        pair: Pair,
        depth: Depth,
        found: Mapping[str, ParamScale],
        alpha: float,
    ):
        self._large, self._program = pair.large, pair.large.reading.program
        self._depth, self._alpha = depth, alpha
        self._twin = _twins(pair)
        self._number = Counter(x.id for x in self._twin.values())
        branches = self._large.branches
        self._branches = {b.add.id: b for b in branches.all}
        self._numbers = self._known_numbers()
        self._added = self._adding_up()
        point = parametrization("mup")
        self._params = [
            dataclasses.replace(found[path], depth=1.0)
            for path in self._large.reading.path_of
        ]
        self._rates = [multipliers(x, point).learning_rate for x in self._params]
        self._kernels: set[int] = set()  # what holds entries of kernels
        self.factors: dict[int, float] = {}
        for _ in range(1 + any(x.op == "carry" for x in self._program.nodes)):
            self.wrong: tuple[Node, float] | None = None
            for node in self._program.nodes:
                self.factors[node.id] = self._factor(node)
        # Results with units, e.g. vectors of norm one, belong to a loss outside.
        ends = [x for x in self._program.outputs.values() if x.data and not x.backward]
        ends = [
            x for x in ends if (twin := self._twin.get(x.id)) and twin.shape == x.shape
        ]
        results = {x: self.factors[x.id] for x in ends}
        if not any(alike(x, 1) for x in results.values()):  # else others are metrics
            for node, factor in results.items():
                self._check(node, [factor])

    def check(self, given: Declarations) -> None:
        """Raise a `ValueError` if a number that matters is not one.

        Unless all parameters that the value is computed from are declared.
        """
        if self.wrong is None:
            return
        node, factor = self.wrong
        shapes = {
            path: self._large.reading.leaves[path].shape
            for x in (node, *earlier(node))
            for path in self._large.sources(x)
        }
        if shapes and all(given.axes(p, shape) for p, shape in shapes.items()):
            return
        raise ValueError(
            f"the values of {node.op!r} at {node.line} become {factor:.4g} times as "
            "large in the target as in the base, where they should stay as large. "
            f"Multiply them by {1 / factor:.4g} in the target"
            + (
                f"; or, if the axes of {some([*shapes])} were not read rightly, "
                f"declare {remedy(shapes)}"
                if shapes
                else ""
            )
        )

    def _factor(self, node: Node) -> float:
        """The number that a value is multiplied by."""
        if node.param is not None:
            scale = self._params[node.param]
            self._kernels |= {node.id} if scale.in_axes else set()
            is_known = not scale.offset and node.param not in self._large.axes.scalers
            return self._rates[node.param] if is_known else _UNKNOWN
        if any(x.id in self._large.axes.hot for x in node.operands):
            return _UNKNOWN
        if 0 in node.shape:
            return _ZERO
        if not node.operands or not (node.data or node.weight):
            return self._constant(node)
        each = [self._of(node, k) for k in range(len(node.operands))]
        kernels = [x for x in node.operands if x.id in self._kernels]
        if kernels and (node.weight or node.op not in (*PRODUCTS, "reduce_sum")):
            self._kernels.add(node.id)
            # The entries of kernels, unlike those of activations, are random.
            both = node.op == "mul" and len(kernels) == 2
            if (both or node.op not in (*_LINEAR, "carry")) and any(
                x not in (0, 1) for x in each
            ):
                return _UNKNOWN
        return self._result(node, each)

    def _constant(self, node: Node) -> float:
        """The number of what depends on no inputs; an identity has no copies."""
        if node.array is not None and np.abs(node.array).max() < _SMALL:
            return _ZERO
        twin = self._twin.get(node.id)
        if node.op == "eq" and len(node.shape) > 1:
            return 1.0 if twin and twin.shape == node.shape else _UNKNOWN
        before = [self.factors[x.id] for x in earlier(node) if node.op in _LINEAR]
        return _UNKNOWN if any(map(math.isnan, before)) else 1.0

    def _of(self, node: Node, k: int) -> float:
        """The number of an operand, or the ratio of constants."""
        value = node.operands[k].value
        if value is None:
            return self.factors.get(node.operands[k].id, _ZERO)  # the end of a loop
        twin = self._twin.get(node.id)
        other = twin.operands[k].value if twin else None
        if twin and len(self._numbers.get((twin.id, k), ())) > 1:
            return _UNKNOWN
        if node.op in ("mul", "div"):
            ratio = value / other if value and other else _ZERO
            return ratio if ratio >= 0 else _UNKNOWN
        if not value or not _SMALL <= abs(value) <= _LARGE:
            return _ZERO
        return 1.0 if value == other else _UNKNOWN

    def _result(self, node: Node, each: list[float]) -> float:
        op, first = node.op, each[0]
        if node.id in self._added:
            return _UNKNOWN
        if op in _SAME:
            moved = op == "fft" and self._growth(node, 0) != 1
            moved |= op == "gather" and node.weight and self._growth(node, 0) != 1
            layers = op in ("last", "scan_out") and self._repeats(node.operands[0])
            return _UNKNOWN if moved or (layers and first not in (0, 1)) else first
        if op in PRODUCTS or op == "reduce_sum":
            return math.prod(each[:2]) * self._terms(node)
        if op == "mul":
            return math.prod(each)
        if op == "div":
            return first / each[1] if each[1] else _ZERO
        if op == "carry":
            return first or each[1]
        if op in _SUMS:
            return self._sum(node, each)
        if op in _COMPARISONS:
            same = self._equal(each)
            return 1.0 if same is not None and not math.isnan(same) else _UNKNOWN
        power = node.params.get("y") if op == "integer_pow" else _POWERS.get(op)
        power = node.operands[1].value if op == "pow" else power
        if power is not None:
            return first**power if first else _ZERO
        if op in _BENDS:
            self._check(node, each)
        grows = any(self._growth(node, k) != 1 for k in range(len(each)))
        is_one = all(not x or alike(x, 1) for x in each)
        return 1.0 if is_one and (op in _BENDS or not grows) else _UNKNOWN

    def _terms(self, node: Node) -> float:
        """In how many times as many terms an operation sums up."""
        number = 1.0
        for index in indices(node):
            if index.out is None and not index.mixed:
                (k, axis), *_ = index.axes.items()
                number *= self._growth(node, k, axis)
        return number

    def _growth(self, node: Node, k: int, axis: int | None = None) -> float:
        """Growth of an operand, or of one axis of it."""
        now, then = node.operands[k], self._twin.get(node.operands[k].id)
        if then is None:
            return _UNKNOWN
        pairs = zip(now.shape, then.shape, strict=True)
        ratios = [a / b if b else 1.0 for a, b in pairs]
        if now.op == "scan_out" and axis == 0 and ratios[0] != 1:
            return _UNKNOWN  # layers
        return math.prod(ratios) if axis is None else ratios[axis]

    def _sum(self, node: Node, each: list[float]) -> float:
        """The number of a sum, or of joined or chosen values, if all have the same."""
        branch = self._branches.get(node.id)
        if branch is not None and branch.skip != 1:
            return _UNKNOWN  # a share of the stream, which depends on the depth
        if branch is not None and branch.end in node.operands:
            end = each[node.operands.index(branch.end)]
            others = zip(node.operands, each, strict=True)
            skip = next((x for of, x in others if of is not branch.end), end)
            multiplied = self._depth.of(branch) ** -self._alpha
            if skip and end and not alike(end / skip, multiplied):
                self._check(node, [end / skip])
            return skip
        if node.op == "select_n":
            each = each[:1] if math.isnan(each[0]) else each[1:]
        elif node.op.startswith("scatter"):
            each = each[::2]
        elif node.op == "dynamic_update_slice":
            each = each[:2]
        same = self._equal(each)
        is_joined = node.op not in ("add", "sub", "max", "min")
        if same is None and not is_joined and node.id not in self._kernels:
            self._check(node, each)
        return _UNKNOWN if same is None else same

    def _known_numbers(self) -> dict[tuple[int, int], set[float]]:
        """By operation of the base and operand: the numbers there in the target."""
        found: dict[tuple[int, int], set[float]] = {}
        for node in self._program.nodes:
            twin = self._twin.get(node.id)
            for k, x in enumerate(node.operands if twin else ()):
                if twin and x.value is not None and not math.isnan(x.value):
                    found.setdefault((twin.id, k), set()).add(x.value)
        return found

    def _adding_up(self) -> set[int]:
        """Sums of more values than in the base, e.g. of layers or of members."""
        branches = self._large.branches
        found = {b.add.id for b in branches.around} | {by for by, _ in branches.again}
        adds = [x for x in self._program.nodes if x.op == "add"]
        again = {b.add.spot for b in branches.around} | branches.unlike.keys()
        found |= {x.id for x in adds if x.spot in again}
        totals = self._large.sums.totals
        every = Counter[Hashable]()
        for total in totals.values():
            every |= total
        layers = {spot for spot, number in every.items() if number > 1}
        for node in self._program.nodes:
            if node.id in totals and node.spot in layers:
                found.add(node.id)
            for x in node.operands if node.op in ("add", "sub") else ():
                inner, _ = self._large.factors.trunk(x)
                twin = self._twin.get(inner.id)
                if inner.op == "carry" and inner.loop == node.loop:
                    found |= {node.id} if self._repeats(node) else set()
                elif inner.op == node.op and self._repeats(inner):
                    same = twin is self._twin.get(node.id)
                    found |= {inner.id, node.id} if same else set()
        return found

    def _repeats(self, node: Node) -> bool:
        """Whether the target has more values like one, of layers or of members."""
        twin = self._twin.get(node.id)
        return twin is None or twin.runs != node.runs or self._number[twin.id] > 1

    @staticmethod
    def _equal(each: Sequence[float]) -> float | None:
        """The number of all values but zeros; None if they differ."""
        some = [x for x in each if x]
        if not some or any(map(math.isnan, some)):
            return _UNKNOWN if some else _ZERO
        return some[0] if all(alike(x, some[0]) for x in some) else None

    def _check(self, node: Node, each: Iterable[float]) -> None:
        """Note a value that has a number other than one where that matters."""
        for factor in each:
            if self.wrong is None and factor > 0 and not alike(factor, 1):
                self.wrong = node, factor


def _twins(pair: Pair) -> dict[int, Node]:
    """The value of the base for each of the target: the same function of the same.

    Of layers, which the base may have fewer of, parameters say which are the same.
    """
    small, large = pair.small, pair.large
    found = {large.param(p).id: small.param(one) for p, one in pair.twin.items()}
    for kind in pair.kinds(_computed).values():
        for i, node in enumerate(kind.now):
            if len(kind.then) == len(kind.now):
                found[node.id] = kind.then[i]
                continue
            # What comes of values without a counterpart has none.
            known = [x for x in earlier(node) if x.op != "literal"]
            if all(x.id in found for x in known):
                before = [found.get(x.id) for x in node.operands]
                like = [x for x in kind.then if _may_be(before, x)]
                if len({x.shape for x in like}) == 1:
                    found[node.id] = max(like, key=lambda x: _same(before, x))
    return found


def _may_be(before: Sequence[Node | None], node: Node) -> bool:
    """Whether operands have the shapes of those of a node."""
    pairs = zip(before, node.operands, strict=True)
    return all(x is None or x.shape == y.shape for x, y in pairs)


def _same(before: Sequence[Node | None], node: Node) -> int:
    """How many operands are those of a node; the last count most."""
    pairs = zip(before, node.operands, strict=True)
    return sum(x.id + 1 for x, y in pairs if x is y)


def _computed(model: Facts) -> Iterator[tuple[int, Node]]:
    """The values of a program, each with a number for how it is computed from streams.

    Or from parameters, of which those of one name in all blocks count as one.
    """
    streams = {b.add.id for b in (*model.branches.all, *model.branches.around)}
    found: dict[int, int] = {}
    for node in model.reading.program.nodes:
        how: list[Hashable] = [node.op, len(node.shape)]
        if node.param is not None:
            how.append(model.opened(model.reading.path_of[node.param]))
        elif node.op != "literal":
            how.append(node.spot)
        if node.id not in streams:
            how += [found[x.id] for x in earlier(node)]
        found[node.id] = hash(tuple(how))
        if node.op not in ("param", "literal"):
            yield found[node.id], node

"""By which number each value of the target is a multiple of the base's.

If each unit of the base becomes several with the same weights, times the ratio of
desired updates, then each value of the target is some number times copies of a value of
the base; and where that number matters, it is one. `Numbers` follows it through the
program, as a product of what is known and of what parameters may carry.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..rules.multipliers import multipliers
from ..rules.parametrizations import parametrization
from ..rules.roles import ParamScale, Role
from .axes import is_identity
from .branches import Branch
from .degrees import is_addend
from .depth import Depth
from .factors import Failure, root_mean_square
from .kinds import alike
from .layers import Layers
from .links import index_of, indices
from .logs import ONE, Log, Rule
from .pair import Pair
from .program import MOVES, PRODUCTS, Node, averaged, earlier, is_scaled, origin, reach
from .ratios import Ratios
from .shapes import Shapes
from .twins import twins

# Multiplied by a number if their first operand is.
_SAME = MOVES.union(
    """
    abs all_gather conj copy cummax cummin cumsum dynamic_slice gather imag neg pad
    psum reduce_max reduce_min reduce_window_max reduce_window_sum slice sort tile
    """.split()  # noqa: SIM905
)
_SUMS = frozenset(
    """
    add clamp complex concatenate dynamic_update_slice join max min rem scatter
    scatter-add scatter_max scatter_min scatter-max scatter-min select_n sub sum
    """.split()  # noqa: SIM905
)
_LINEAR = _SAME | _SUMS | {"mul", *PRODUCTS}
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3, "square": 2}
_COMPARISONS = frozenset(("eq", "ge", "gt", "le", "lt", "ne"))
_CHOICES = frozenset(("argmax", "argmin", "is_finite", "sign"))
_BENDS = frozenset(
    """
    atan2 ceil cos cosh erf erf_inv erfc exp exp2 expm1 floor log log1p logistic round
    sin sinh tan tanh
    """.split()  # noqa: SIM905
)
_SMALL, _LARGE = 1e-3, 1e4  # numbers beyond avoid a division by zero, or mask entries


# By which power of a fan-in the initial entries of a kernel shrink.
POWERS = {Role.INPUT: 0.0, Role.HIDDEN: 0.5, Role.OUTPUT: 1.0}


class Numbers:
    """Follows the numbers by which values of the target are multiplied.

    Args:
      found: the scales of the parameters, without their depth.

    Attributes:
      of: the logarithm of the number of each value, by id; None for what is zero in
        both models, or counts as zero beside others.
      rules: the numbers that must be one.
      results: those of the model's results.
      values: those of the results of layers, of streams, and of rows of tables, with
        the constants that multiply them, which had better be one, too.
      offsets: the number that is added to a parameter before it is used, by path.
      biases: the parameters that are added to values.
      keys: those of keys alone.
    """

    def __init__(
        self,
        pair: Pair,
        depth: Depth,
        found: Mapping[str, ParamScale],
    ):
        self._pair = pair
        self._large, self._program = pair.large, pair.large.reading.program
        self._depth, self._twin = depth, twins(pair)
        self._ratios = Ratios(pair, self._twin)
        self._layers = Layers(pair, depth, self._twin)
        self._shapes = Shapes(pair, self._twin, self._layers)
        point = parametrization("mup")
        self._scales = [
            replace(found[path], depth=1.0) for path in self._large.reading.path_of
        ]
        self._rates = [multipliers(x, point).learning_rate for x in self._scales]
        self._kernels: set[int] = set()  # what holds entries of kernels
        self._sizes: set[int] = set()  # what holds their squares, or absolute values
        self._derived: set[int] = set()  # what is computed from gradients
        self.of: dict[int, Log | None] = {}
        self.offsets: dict[str, set[float]] = {}
        self.biases: set[str] = set()
        for _ in range(1 + any(x.op == "carry" for x in self._program.nodes)):
            self._rules: list[Rule] = []
            values: list[tuple[Log, bool]] = []  # and whether a constant multiplies
            for node in self._program.nodes:
                zeros = [self.of.get(x.id, ONE) is None for x in node.operands[1:]]
                self._shapes.add(node, has_zeros=any(zeros))
                if node.backward or any(x.id in self._derived for x in node.operands):
                    self._derived.add(node.id)
                number = self.of[node.id] = self._find(node)
                if number is not None and self._is_result(node):
                    value = number, is_scaled(node)
                    is_stream = node.id in self._layers.streams
                    values += [value] if is_stream or value not in values else []
        self.keys: set[str] = set()
        queries = self._find_keys()
        # Queries may be multiplied before or after their product with keys.
        self.values = [x for x, y in values if not (y and x.carried.keys() & queries)]
        self.rules = [*filter(self._is_used(), self._rules)]
        ends = [x for x in self._program.outputs.values() if x.data and not x.backward]
        self.results: list[Rule] = []
        for x in ends:
            twin, of = self._twin.get(x.id), self.of[x.id]
            if of is not None and not self._large.branches.is_shown(x):
                whole = twin is not None and twin.shape == x.shape and of.is_known
                of_widths = x.id in self._derived
                self.results.append(Rule(of, x, whole, of_widths=of_widths))
        self._check_generated()
        self._check_known()

    def _generated(self, node: Node) -> list[tuple[int, bool]]:
        """The parameters that make the kernel of a product, for each input.

        With whether they are stored with one axis for its inputs and its outputs.
        """
        found = []
        pairs = node.op in PRODUCTS and node.id not in self._large.axes.kernel_sums
        for k in range(2) if pairs and all(x.data for x in node.operands[:2]) else ():
            labels = self._large.axes.entries(node.operands[k])
            into, out = (
                {
                    axis
                    for index in indices(node)
                    if set(index.axes) == among and (index.out is None) == summed
                    for a in (index.axes[k],)
                    if self._shapes.growth(node, k, a) != 1
                    for axis in labels[a]
                }
                for among, summed in (({0, 1}, True), ({k}, False))
            )
            params = {p for p, _ in into} & {p for p, _ in out}
            made = (p for p in params if self._is_made(node.operands[k], p))
            found += [(p, bool(into & out)) for p in made]
        return found

    def _is_made(self, node: Node, param: int) -> bool:
        """Whether two axes are of one result of a parameter, not of two results."""

        def holds(x: Node) -> bool:
            entries = self._large.axes.entries(x)
            sizes = zip(x.shape, self._shapes.of[x.id], entries, strict=False)
            grow = (of for now, then, of in sizes if now != then)
            return sum(any(p == param for p, _ in of) for of in grow) > 1

        every = reach([node], lambda x: filter(holds, earlier(x)))
        first = (x for x in every if not any(map(holds, earlier(x))))
        return any(x.op not in ("mul", *PRODUCTS) for x in first)

    def _check_generated(self) -> None:
        """Raise a `ValueError` for a kernel that a parameter makes, if a norm follows.

        Where the size of the kernel has no effect, only the ratio of its initial size
        and its rate matters. It is the root of the fan-in, which a multiplier cannot
        give to a parameter whose own fan-in is another one.
        """
        known = {k for x in (*self.rules, *self.results) for k in x.number.parts}
        for node in self._program.nodes:
            number = self.of[node.id]
            of = number is not None and -1 - node.id in number.parts
            if not of or -1 - node.id in known:
                continue
            for param, in_one in self._generated(node):
                advice = (
                    "store it with an axis for the inputs and one for the outputs of "
                    "the kernel, e.g. (k, n, m) in place of (k, n * m), and let k not "
                    "grow"
                    if in_one
                    else "compute the kernel from a fixed number of values, or leave "
                    "the norm out"
                )
                raise ValueError(
                    f"{self._large.reading.path_of[param]!r} makes a kernel for each "
                    f"input ({node.line}) whose result is normalized: its initial "
                    f"size and its rate need different powers of the width; {advice}"
                )

    def _check_known(self) -> None:
        """Raise a `ValueError` for a sum of activations that the base has none like."""
        for rule in self.rules:
            for key in rule.number.parts if not rule.branch else ():
                node = self._program.nodes[key] if isinstance(key, int) else rule.node
                products = node.op in PRODUCTS and all(x.data for x in node.operands)
                is_sum = products and node.id == key
                if is_sum and not self._shapes.terms(node) > 0:
                    raise ValueError(
                        f"the base has no sum like the one over products of "
                        f"activations at {node.line}, so that the factor that it needs "
                        "is not known; build a base with layers of each kind"
                    )

    def _is_used(self) -> Callable[[Rule], bool]:
        """Whether a rule is not of a loop that was written anew, by its parameters."""
        outputs = self._program.outputs.values()
        used = {x.id for x in reach(outputs, lambda x: x.operands)}
        events = zip(self._large.reading.path_of, self._large.axes.events, strict=True)
        paths = {p for p, of in events if any(e.node.id in used for e in of)}

        def is_used(rule: Rule) -> bool:
            unused = rule.node.id not in used and rule.number.carried.keys() <= paths
            return rule.branch is not None or not unused

        return is_used

    def _is_result(self, node: Node) -> bool:
        """Whether a value is that of a layer, of a stream, or rows of a table."""
        if node.op in PRODUCTS or node.id in self._layers.streams:
            return node.data
        inner = origin(node.operands[0]) if is_scaled(node) else node
        looked = inner.op == "gather" and inner.operands[0].weight
        scaled = inner is node and any(map(is_scaled, self._large.axes.uses(node)))
        return inner.id in self._large.axes.kernel_sums or (looked and not scaled)

    def _find_keys(self) -> set[str]:
        """The parameters of queries alone; notes those of keys.

        A softmax sums their logits over the keys.
        """
        found: set[str] = set()
        for node in self._program.nodes:
            if node.op == "dot_general" and all(x.data for x in node.operands):
                one, other = (self.of[x.id] or ONE for x in node.operands)
                if (k := self._keys_of(node)) is not None:
                    keys, queries = (other, one) if k else (one, other)
                    self.keys |= keys.carried.keys() - queries.carried.keys()
                    found |= queries.carried.keys() - keys.carried.keys()
        return found

    def _keys_of(self, node: Node) -> int | None:
        """The place of the keys among the factors of logits; None for other sums."""
        (contracted, _), _ = node.params["dimension_numbers"]
        first = len(node.operands[0].shape) - len(contracted)  # of the second's axes
        reached = [(node, axis, axis) for axis in range(len(node.shape))]
        seen: set[tuple[int, int]] = set()
        while reached:
            at, axis, own = reached.pop()
            if (at.id, axis) in seen:
                continue
            seen.add((at.id, axis))
            for user in self._large.axes.uses(at):
                if user.op == "reduce_max" and axis in user.params["axes"]:
                    return int(own >= first)
                index = index_of(user, user.operands.index(at), axis)
                if user.op not in PRODUCTS and index and index.out is not None:
                    reached.append((user, index.out, own))
        return None

    def first_uses(self) -> dict[str, bool]:
        """Parameters in the order of their uses, and whether they are kernels."""
        events = enumerate(self._large.axes.events)
        first = {
            i: min(e.node.id for e in of if e.is_use)
            for i, of in events
            if any(e.is_use for e in of)
        }
        paths = self._large.reading.path_of
        return {
            paths[i]: bool(self._scales[i].in_axes)
            for i in sorted(first, key=first.__getitem__)
        }

    def _find(self, node: Node) -> Log | None:
        """The number that a value is multiplied by."""
        if node.param is not None:
            return self._of_parameter(node, node.param)
        if 0 in node.shape:
            return None
        if not node.operands or not (node.data or node.weight):
            return self._of_constant(node)
        each = [self._of(node, k) for k in range(len(node.operands))]
        kernels = [x for x in node.operands if x.id in self._kernels]
        if not kernels or not (node.weight or node.op not in (*PRODUCTS, "reduce_sum")):
            return self._result(node, each)
        # The entries of kernels, unlike those of activations, are random.
        of_sizes = node.operands[0].id in self._sizes
        if node.weight and of_sizes and node.op in ("reduce_sum", "reduce_max"):
            return self._result(node, each)
        self._kernels.add(node.id)
        if node.weight and (size := self._size(node)):
            self._sizes.add(node.id)
            return size
        moved = node.op in ("concatenate", *MOVES)
        if moved and all(x.id in self._sizes for x in kernels):
            self._sizes.add(node.id)
        if node.weight and node.op in ("div", "mul") and (of := self._divided(node)):
            return of
        scaled = node.op in ("mul", "div") and len(kernels) == 1
        linear = node.op in (*_LINEAR, "carry", "reduce_sum") and node.op != "mul"
        if scaled or linear:
            return self._result(node, each)
        known = all(x is None or x.is_one for x in each)
        return self._result(node, each) if known else self._of_kernels(node, each)

    def _size(self, node: Node) -> Log | None:
        """The number of the size of a kernel's entries, as in a norm of it."""
        of, power = node.operands[0], node.params.get("y", 1)
        is_square = node.op == "mul" and node.operands[1] is of
        if not is_square and (node.op, power) not in (("integer_pow", 2), ("abs", 1)):
            return None
        number = self.of[of.id]
        if number is None or len(number.parts) != 1 or not number.carried:
            return None
        size = number - Log(self._initial(number))
        return size * (2 if is_square else power)

    def _initial(self, number: Log) -> float:
        """The number of a kernel's updates beside that of its initial entries."""
        (path,) = number.carried
        scale = self._scales[self._large.reading.path_of.index(path)]
        return (POWERS.get(scale.role, 0.0) - 1) * math.log(scale.width_in)

    def _divided(self, node: Node) -> Log | None:
        """The number of a kernel that is divided by its largest singular value."""
        for k, of in enumerate(node.operands):
            number = self.of[of.id]
            by = node.operands[1 - k]
            if number and self._large.factors.is_singular_value(by, of):
                growth = max(
                    self._shapes.growth(node, k, a) for a in range(len(of.shape))
                )
                return Log(self._initial(number) - math.log(growth) / 2)
        return None

    def _of_kernels(self, node: Node, each: list[Log | None]) -> Log | None:
        """The number of a function of the entries of kernels, which is not known.

        What parameters carry is known if it is homogeneous.
        """
        self._rules, known = [], self._rules
        result = self._result(node, each)
        known += [x._replace(whole=False) for x in self._rules if x.number.carried]
        self._rules = known
        return result and self._unknown(node, result)

    def _of_parameter(self, node: Node, param: int) -> Log:
        scale, path = self._scales[param], self._large.reading.path_of[param]
        role = self._large.roles[path]
        is_kernel = scale.in_axes and not (role and role.table)
        self._kernels |= {node.id} if is_kernel else set()
        known = math.log(self._rates[param])
        number = Log(known, parts={path: 1.0})
        scales_entries = param in self._large.axes.scalers
        return self._unknown(node, number) if scales_entries else number

    def _unknown(self, node: Node, like: Log | None = None) -> Log:
        """A number that is not known, of which parameters are a part."""
        like = like or ONE
        parts: dict[str | int, float] = {node.id: 1.0}
        parts.update(like.carried)
        return replace(like, known=0.0, parts=parts)

    def _of_constant(self, node: Node) -> Log | None:
        """The number of what depends on no inputs; an identity has no copies."""
        sizes = np.abs(1.0 if node.array is None else node.array)
        if np.all((sizes < _SMALL) | (sizes >= _LARGE)):  # e.g. of a mask
            return None
        if node.value is not None and abs(node.value) < _SMALL:
            return None
        before = [self.of[x.id] for x in earlier(node) if node.op in _LINEAR]
        known = all(x is None or x.is_known for x in before)
        if node.value is None and node.array is None:
            known &= (
                node.op not in (*PRODUCTS, "reduce_sum")
                or self._shapes.terms(node) == 1
            )
        return ONE if known else self._unknown(node)

    def _of(self, node: Node, k: int) -> Log | None:
        """The number of an operand, or the ratio of constants."""
        value, twin = node.operands[k].value, self._twin.get(node.id)
        then = twin.operands[k] if twin else None
        arrays = value is None and node.operands[k].array is not None
        if arrays and then and then.array is not None and node.op in ("mul", "div"):
            ratio = _ratio(node.operands[k], then)
            return (
                Log(math.log(ratio), math.log(ratio)) if ratio else self._unknown(node)
            )
        if value is None:
            return self.of.get(node.operands[k].id)  # the end of a loop
        if node.op in ("mul", "div"):
            total, growth = averaged(node), math.nan
            if total and (twin is None or averaged(twin)):
                each = (self._shapes.growth(total, 0, a) for a in total.params["axes"])
                growth = math.prod(each)
            ratio = 1 / growth if growth > 0 else self._ratios.of(node, k)
            if ratio == 0:
                return None
            known = math.log(ratio) if ratio > 0 else 0.0
            constant = 0.0 if total else known
            return Log(known, constant) if ratio > 0 else self._unknown(node)
        if not value or not _SMALL <= abs(value) < _LARGE:
            return None
        return ONE if alike(abs(self._ratios.of(node, k)), 1) else self._unknown(node)

    def _result(self, node: Node, each: list[Log | None]) -> Log | None:
        op, first = node.op, each[0]
        paths = {path for x in each if x is not None for path in x.carried}
        if node.id in self._pair.sides[1].adds and paths & self._pair.beside.keys():
            return self._added_up(node, each)
        if node.id in self._layers.sums:
            return self._over(node, each)
        again = node.id in self._layers.again - self._layers.streams.keys()
        if again or node.id in self._layers.others:
            for number in self._differences(each):
                self._rules.append(Rule(number, node, False, of_widths=again))
            some = next((x for x in each if x is not None), None)  # one may be zero
            return first if again else self._unknown(node, some)
        if node.id in self._layers.steps:
            k, ratio = self._layers.steps[node.id]
            if (part := each[k]) is not None and (skip := each[1 - k]) is not None:
                number = part - skip + Log(depth=math.log(ratio))
                rule = Rule(number, node, number.is_known, of_widths=True)
                self._rules.append(rule)
            return each[1 - k]
        if op in _SAME:
            return self._moved(node, first)
        if op in PRODUCTS or op == "reduce_sum":
            return self._summed(node, each)
        if op == "mul":
            return self._product(each)
        if op in ("div", "custom_linear_solve", "triangular_solve"):
            by, of = (each[1], first) if op == "div" else (first, each[-1])
            return None if by is None or of is None else of - by
        if op == "fft":
            return self._turned(node, first)
        if op == "carry":
            return each[1] if first is None else first
        if op in _SUMS:
            return self._sum(node, each)
        power = node.params.get("y") if op == "integer_pow" else _POWERS.get(op)
        power = node.operands[1].value if op == "pow" else power
        if power is not None:
            return None if first is None else first * power
        return self._bent(node, each)

    def _summed(self, node: Node, each: list[Log | None]) -> Log | None:
        """The number of a sum over axes, perhaps of products."""
        number, terms = self._product(each[:2]), self._shapes.terms(node)
        if number is None:
            return None
        fixed = (x for x in node.operands[:2] if not (x.data or x.weight))
        if terms != 1 and node.op in PRODUCTS and any(x.value is None for x in fixed):
            terms = math.nan  # e.g. an average, or a random or orthogonal matrix
        known = Log(math.log(terms)) if terms > 0 else self._unknown(node)
        layers = Log(depth=math.log(self._layers.products.get(node.id, 1.0)))
        matters = Log(parts={-1 - node.id: 1.0}) if self._generated(node) else ONE
        return number + known + layers + matters

    def _added_up(self, node: Node, each: list[Log | None]) -> Log | None:
        """The sum of results of kernels side by side, whose number may grow."""
        adds = self._pair.sides[1].adds
        beside, found = self._pair.beside, []
        for x, number in zip(node.operands, each, strict=False):
            if number and self._large.factors.trunk(x)[0].id not in adds:
                more = [max(beside[x]) for x in number.carried if x in beside]
                number += Log(math.log(max(more, default=1.0)))
            found.append(number)
        for number in self._differences(found):
            self._rule(number, node, whole=True)
        first = next((x for x in found if x is not None), None)
        join = self._pair.sides[1].joins.get((node.op, node.spot))
        # The gates of experts may choose few.
        return self._unknown(node, first) if join and join.ends is None else first

    def _over(self, node: Node, each: list[Log | None]) -> Log | None:
        """The sum of a term of each layer, and of those before."""
        found, more = [], Log(depth=math.log(self._layers.sums[node.id]))
        for x, number in zip(node.operands, each, strict=False):
            found.append(
                number + more if number and x.id in self._layers.terms else number
            )
        for number in self._differences(found):
            self._rule(number, node, whole=True)
        return next((x for x in found if x is not None), None)

    def _bent(self, node: Node, each: list[Log | None]) -> Log:
        """The result of an operation that is not homogeneous."""
        if node.op in _CHOICES:
            return ONE
        if node.op in _COMPARISONS:
            for number in self._differences(each):
                self._rule(number, node, whole=False)
            return ONE
        if node.op == "top_k":
            return ONE if node.params["result"] else each[0] or ONE
        some = [x for x in each if x is not None]
        if node.op == "log" and is_addend(node, self._large.axes.uses):
            return ONE  # a factor is added then, and has no gradient
        for number in some:
            self._rule(number, node, whole=node.op in _BENDS)
        grows = any(self._shapes.growth(node, k) != 1 for k in range(len(each)))
        known = node.op in _BENDS or (not grows and all(x.is_one for x in some))
        return ONE if known else self._unknown(node)

    def _moved(self, node: Node, number: Log | None) -> Log | None:
        """The number of what takes or moves entries."""
        looked = (
            node.op == "gather"
            and node.weight
            and any(
                n != size and self._shapes.growth(node, 0, a) != 1
                for a, (n, size) in enumerate(
                    zip(node.operands[0].shape, node.params["slice_sizes"], strict=True)
                )
            )
        )
        return self._unknown(node, number) if number and looked else number

    def _turned(self, node: Node, number: Log | None) -> Log | None:
        """A Fourier transform sums n entries of random signs; its inverse divides."""
        if number is None:
            return None
        power = -0.5 if "I" in node.params["fft_type"].name else 0.5
        axes = range(-len(node.params["fft_lengths"]), 0)
        growth = math.prod(self._shapes.growth(node, 0, axis) for axis in axes)
        return number + Log(power * math.log(growth))

    @staticmethod
    def _product(each: Sequence[Log | None]) -> Log | None:
        result = ONE
        for x in each:
            if x is None:
                return None
            result = result + x
        return result

    def _sum(self, node: Node, each: list[Log | None]) -> Log | None:
        """The number of a sum, or of joined or chosen values, if all have the same."""
        branch = self._layers.streams.get(node.id)
        if branch is not None and branch.end in node.operands:
            return self._branched(node, branch, each)
        operands = node.operands
        if node.op == "select_n":
            mask, *operands = operands
            kept = [self._large.factors.kept(mask, x) for x in operands]
            dropped = zip(kept, operands, each[1:], strict=True)
            each = [of if x is y else self.of[x.id] for x, y, of in dropped]
        elif node.op.startswith("scatter"):
            operands, each = operands[::2], each[::2]
        elif node.op == "dynamic_update_slice":
            operands, each = operands[:2], each[:2]
        for k, (x, number) in enumerate(zip(operands, each, strict=True)):
            if number is not None and x.weight and node.data:
                self.biases |= number.carried.keys()
                # A penalty of parameters is only added to a result.
                if not x.shape and origin(x).param is None:
                    each[k] = None if is_addend(x, self._large.axes.uses) else number
        if node.op == "add" and node.weight and (of := self._offset(node)):
            return of
        if node.weight:  # a small number avoids a division by zero
            pairs = zip(operands, each, strict=True)
            each = [None if abs(x.value or 1) < 0.1 else of for x, of in pairs]
        if node.op in ("add", "concatenate", "sub", "join", "sum"):
            each = self._beside_identities(node, self._beside_masks(node, each))
        differ = [*self._differences(each)]
        same = all(x.is_known and abs(x.known) < 0.01 for x in differ)
        is_kernel = node.id in self._kernels
        for number in differ:
            # E.g. the constant on a product of low rank that is added to a kernel.
            of_constants = abs(number.known - number.constant) < 0.01
            self._rule(number, node, whole=of_constants or not is_kernel)
        some = [x for x in each if x is not None]
        result = min(some, key=lambda x: not x.is_known, default=None)
        return self._unknown(node, result) if is_kernel and not same else result

    def _branched(
        self, node: Node, branch: Branch, each: list[Log | None]
    ) -> Log | None:
        """The number of a stream to which a branch is added."""
        end = each[node.operands.index(branch.end)]
        others = zip(node.operands, each, strict=True)
        skip = next((x for of, x in others if of is not branch.end), end)
        ends, is_again = self._large.ends(branch), node.id in self._layers.again
        more = Log(depth=math.log(self._depth.of(branch)))
        twin = self._twin.get(node.id)
        if twin and end:
            then = twin.operands[node.operands.index(branch.end)]
            end += self._ratios.only_of_base(then)
        number = end and end + more
        if number is None or (ends and not ends & number.carried.keys()):
            # E.g. values of zeros, or a sum over more members.
            number = more + Log(parts=dict.fromkeys(ends, 1.0))
        elif skip is not None and not is_again:
            number = number - skip
        whole = None not in (end, skip) and branch.skip == 1 and not is_again
        # Where layers enlarge the stream, what they add is smaller beside it.
        own = number if branch.skip > 1 else end or ONE
        rule = Rule(number, node, whole and number.is_known, branch, own)
        self._rules.append(rule)
        if is_again:  # e.g. with momentum
            return self._unknown(node, skip)
        if skip is None:  # the stream starts at zero
            return end and end + more
        # A share of a stream is as large as the stream.
        return skip if branch.skip == 1 else self.of.get(branch.trunk.id, skip)

    def _is_diagonal(self, node: Node) -> bool:
        """Whether a value is an identity, perhaps times something."""
        moves = ("mul", "select_n", *MOVES)
        every = reach([node], lambda x: x.operands if x.op in moves else ())
        return len(self._shapes.chosen[node.id]) > 1 and any(map(is_identity, every))

    def _beside_identities(
        self, node: Node, each: list[Log | None]
    ) -> list[Log | None]:
        """The numbers of terms; n entries of others are one of an identity."""
        some = [k for k, x in enumerate(node.operands) if self._is_diagonal(x)]
        rest = [each[k] for k in range(len(each)) if k not in some]
        if not some or all(x is None for x in rest):
            return each
        growth = self._shapes.growth(node, some[0], -1)
        for x in (each[k] for k in some):
            for y in rest if growth > 0 else ():
                if x is not None and y is not None:
                    # The derivative of a residual layer is 1 plus that of a branch.
                    number = replace(y + Log(math.log(growth)) - x, depth=0.0)
                    rule = Rule(number, node, number.is_known, of_widths=True)
                    self._rules.append(rule)
        return rest if growth != 1 else [each[k] for k in some]

    @staticmethod
    def _beside_masks(node: Node, each: list[Log | None]) -> list[Log | None]:
        """The numbers of terms, but for masks, as in logits - 1e9 * (1 - mask)."""
        inner = [origin(x) for x in node.operands]
        masks = [is_scaled(x) and _is_large(x.operands[1]) for x in inner]
        if all(masks):
            return each
        pairs = zip(masks, each, strict=True)
        return [None if mask and of and of.is_one else of for mask, of in pairs]

    def _offset(self, node: Node) -> Log | None:
        """The number of a parameter to which a constant is added, as in 1 + gain."""
        weight = next((x for x in node.operands if x.weight), None)
        number = self.of.get(weight.id) if weight else None
        if number is None or all(x.value is None for x in node.operands):
            return None
        with contextlib.suppress(Failure):
            for param, _, offset in self._large.factors.offsets(node):
                path = self._large.reading.path_of[param]
                self.offsets.setdefault(path, set()).add(offset)
            return number
        return None

    @staticmethod
    def _differences(each: Sequence[Log | None]) -> Iterator[Log]:
        """The quotients of numbers that are not zero."""
        some = [x for x in each if x is not None]
        some.sort(key=lambda x: not x.is_known)
        for x in some[1:]:
            yield x - some[0]

    def _rule(self, number: Log, node: Node, *, whole: bool) -> None:
        """Note that a number must be one, or that parameters must not change it."""
        whole = whole and number.is_known
        uses = self._large.axes.uses
        is_penalty = not node.data and not node.shape and is_addend(node, uses)
        if node.backward or is_penalty:
            return  # a gradient has the multiplier of what it is of
        # What is computed from inputs alone is the user's, e.g. angles of positions.
        wrong = whole and not number.is_one
        wrong = wrong and (node.weight or bool(self._large.sources(node)))
        if number.carried or number.depth or wrong:
            of_widths = node.id in self._derived
            self._rules.append(Rule(number, node, whole, of_widths=of_widths))


def _ratio(now: Node, then: Node) -> float:
    """The ratio of arrays' entries; zero if it is not known, e.g. of random ones.

    Of tables of frequencies, and of masks, the largest entries count.
    """
    size = root_mean_square(now) / root_mean_square(then)
    largest = _largest(now) / _largest(then)
    return largest if alike(largest, 1) or alike(largest, size) else 0.0


def _is_large(node: Node) -> bool:
    return abs(node.value or 0) >= _LARGE


def _largest(node: Node) -> float:
    entries = np.abs(np.ravel(node.array))
    return float(entries.max(initial=0.0, where=np.isfinite(entries))) or 1.0

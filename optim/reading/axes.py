"""What the program does with each axis of each parameter."""

import dataclasses
import enum
import functools
import math
from collections.abc import Collection, Iterable, Sequence

from .links import ELEMENTWISE, index_of, indices, is_known, walks_layers
from .program import (
    CONVOLUTION,
    MOVES,
    PRODUCTS,
    Node,
    Program,
    Spot,
    averaged,
    earlier,
    is_scaled,
    origin,
    reach,
)

Axis = tuple[int, int]  # index of a parameter, and one of its axes
# An operand, its contracted axes, its batch axes, and the other operand.
Side = tuple[Node, tuple[int, ...], tuple[int, ...], Node]
Labels = tuple[frozenset[Axis], ...]  # for each axis of a value, where it comes from
NONE: frozenset[Axis] = frozenset()


class Use(enum.StrEnum):
    """What one operation does with one axis of a parameter."""

    IN = "in"  # summed over, with an activation
    OUT = "out"  # indexes results
    COPY = "copy"  # each entry is for another layer, expert or group
    TABLE = "table"  # looked up
    ENTRY = "entry"  # multiplied with or added to an activation, entry by entry
    LINK = "link"  # summed over between two parameters


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation on a parameter: the uses of its axes, and where it stands."""

    node: Node
    uses: dict[int, frozenset[Use]]

    @property
    def is_use(self) -> bool:
        """Whether it does more than take the slices of a stack."""
        return not self.uses or any(uses != {Use.COPY} for uses in self.uses.values())

    def axes(self, use: Use) -> tuple[int, ...]:
        """The axes with this use."""
        return tuple(sorted(a for a, uses in self.uses.items() if use in uses))


class Axes:
    """Reads what a program does with each axis of its parameters.

    Args:
      program: the forward pass.
      growing: the axes of parameters that grow from the base to the target.
      few: places that choose a number of entries which does not grow.

    Attributes:
      events: for each parameter, its uses in the order of the program.
      unread: for each parameter, the operations that could not be read.
      labels: for each node that depends on parameters alone, and for rows that were
        looked up, the axes of parameters that its axes come from.
      hot: nodes whose entries are one for a choice and zero for others.
      kernel_sums: for each node that sums over an axis of a parameter, with an
        activation, the products that it sums (itself, for `dot_general`).
      seeds: (product, factor) ids of functions of parameters alone that are multiplied
        as activations, e.g. learned queries.
      scalers: parameters that multiply each entry of a kernel by one of their own.
      states: for each product with a matrix that data changes, e.g. the state of linear
        attention, which operand it is, and the parameters that it starts from.
    """

    def __init__(
        self,
        program: Program,
        growing: frozenset[Axis] = NONE,
        few: Collection[Spot] = (),
    ):
        self._program, self.growing, self._few = program, growing, few
        self.events: list[list[Event]] = [[] for _ in program.params]
        self.unread: list[list[Node]] = [[] for _ in program.params]
        self.sliced: set[Axis] = set()
        self.labels: dict[int, Labels] = {}
        # Sums of products of parameters and activations that are not summed over an
        # axis yet: each term, with its axes of equal entries of the activation.
        self._pending: dict[int, list[tuple[Labels, Node, frozenset[int]]]] = {}
        self._results: dict[int, Labels] = {}  # of parameters' products
        # Rows that were looked up, and the axes that they were looked up on.
        self._rows: dict[int, frozenset[Axis]] = {}
        # Output axes that a later kernel sums over: units, not copies.
        self.units: set[Axis] = set()
        self._normed: set[int] = set()
        self._kernels: dict[int, Labels] = {}  # those that depend on data
        # For each function of parameters, the axes of those that scale the rows or
        # columns of a kernel in it, and the diagonal matrices of such parameters.
        self._gains: dict[int, frozenset[Axis]] = {}
        self._positive: set[int] = set()  # functions of parameters; see `_is_positive`
        self.scalers: set[int] = set()
        self._diagonal: set[int] = set()
        self._steps: dict[int, bool] = {}
        self.hot: set[int] = set()
        self.kernel_sums: dict[int, list[Node]] = {}
        self.seeds: set[tuple[int, int]] = set()
        self.states: dict[int, tuple[int, set[int]]] = {}
        self._states: set[int] = set()  # such matrices
        self.spread: dict[int, frozenset[int]] = {}  # axes of equal entries
        self.sparse: dict[int, set[int]] = {}  # axes along which few are not zero
        # Functions of parameters that cannot be read, and the operation of each.
        self._lost: dict[int, Node] = {}
        # Axes of the kernel of each product that count kernels.
        self._copied: dict[int, frozenset[Axis]] = {}
        self._copies: set[Axis] = set()  # all axes that count copies
        self._numbers: dict[int, set[int]] = {}  # parameters that a value depends on
        self._uses: dict[int, list[Node]] = {}
        for node in program.nodes:
            for operand in node.operands:
                self._uses.setdefault(operand.id, []).append(node)
        for node in program.nodes:
            self._read(node)

    def uses(self, node: Node) -> list[Node]:
        """The nodes that are computed from this one directly."""
        return self._uses.get(node.id, [])

    def depends(self, node: Node) -> set[int]:
        """The parameters that a function of parameters alone depends on."""
        if node.op == "param" and node.param is not None:
            return {node.param}
        return self._numbers.get(node.id, set())

    @functools.cached_property
    def products(self) -> frozenset[int]:
        """Ids of products with parameters, also of those that are summed later."""
        return frozenset(x.id for each in self.kernel_sums.values() for x in each)

    def is_mean(self, node: Node) -> bool:
        """Whether a sum is divided by the number of its terms."""
        moved = reach(
            [node], lambda x: self.uses(x) if x is node or x.op in MOVES else ()
        )
        return any(averaged(x) is node for x in moved)

    def is_product(self, node: Node) -> bool:
        """Whether it is a product with a parameter, or with a kernel that data mix."""
        known = node.op in PRODUCTS and any(x.weight for x in node.operands)
        return known or node.id in self.products

    def _of(self, node: Node) -> Labels:
        return self.labels.get(node.id, (NONE,) * len(node.shape))

    def _is_kernel(self, node: Node) -> bool:
        """Whether it is a function of parameters, or rows of one."""
        return node.id in self.labels and any(self.labels[node.id])

    def _mark(self, node: Node, marks: Iterable[tuple[Iterable[Axis], Use]]) -> None:
        found: dict[int, dict[int, set[Use]]] = {}
        if node.backward:
            return  # a gradient sums over the outputs of a kernel
        for axes, use in marks:
            self._copies.update(axes if use is Use.COPY else ())
            for param, axis in axes:
                found.setdefault(param, {}).setdefault(axis, set()).add(use)
        for param, uses in found.items():
            fixed = {axis: frozenset(each) for axis, each in uses.items()}
            self.events[param].append(Event(node, fixed))

    def _read(self, node: Node) -> None:
        if node.op == "param":
            assert node.param is not None
            self.labels[node.id] = tuple(
                frozenset({(node.param, a)}) for a in range(len(node.shape))
            )
            if not node.shape:
                self.labels[node.id] = ()
            return
        if node.weight and any(x.data for x in node.operands):
            node.data, node.weight = True, False  # computed from a learned activation
        self._follow_scalars(node)
        if node.weight and self._is_positive(node):
            self._positive.add(node.id)
        if self._passes_on(node):
            return
        reader = getattr(self, f"_op_{node.op.replace('-', '_')}", None)
        if reader is not None:
            reader(node)
        elif is_known(node.op):
            self._elementwise(node)
        elif any(self._is_kernel(x) and x.weight for x in node.operands):
            self._give_up(node)
        if any(x.id in self.sparse for x in node.operands):
            self._keep_sparse(node)
        keeps = node.op in ("mul", "sub", "select_n", *MOVES)
        data = [x for x in node.operands if x.data]
        if keeps and data and all(x.id in self.hot for x in data):
            self.hot.add(node.id)

    def _is_positive(self, node: Node) -> bool:
        """Whether all entries are of order one, however small the parameters are.

        E.g. those of an exp or a sigmoid; not if noise or a mask multiplies them.
        """
        each = [x.id in self._positive or x.value is not None for x in earlier(node)]
        if node.op in ("add", "concatenate", "join", "max", "select_n", "sub"):
            return any(x.id in self._positive for x in node.operands)
        return node.op in ("exp", "logistic") or (bool(each) and all(each))

    def _keep_sparse(self, node: Node) -> None:
        """A product is zero where a factor is, and so is a sum of chosen entries."""
        zero = node.op == "select_n" and node.operands[1].value == 0
        if zero or node.op in ("mul", "reduce_sum", "dot_general", *MOVES):
            self.sparse[node.id] = {
                index.out
                for index in indices(node)
                for k, a in index.axes.items()
                if index.out is not None
                if a in self.sparse.get(node.operands[k].id, ())
            }

    def _follow_scalars(self, node: Node) -> None:
        """Numbers, also those taken from an array, have no axes to follow."""
        found: set[int] = set()
        for operand in node.operands:
            if operand.op == "param" and operand.param is not None:
                self._numbers[operand.id] = {operand.param}
            if operand.weight:
                found |= self._numbers.get(operand.id, set())
        if node.weight:
            if found:
                self._numbers[node.id] = found
            lost = [self._lost[x.id] for x in node.operands if x.id in self._lost]
            if lost:
                self._lost[node.id] = lost[0]
            return
        for operand in node.operands:
            if not operand.weight:
                continue
            reason = self._lost.get(operand.id)
            labelled = _params(self._of(operand))
            for param in self.depends(operand) - labelled:
                if reason is None or param not in self.depends(reason):
                    self.events[param].append(Event(node, {}))
                elif not labelled:
                    self.unread[param].append(reason)

    def _give_up(self, node: Node) -> None:
        if node.weight:
            self._lost[node.id] = node
        for operand in node.operands:
            for param in {p for axis in self._of(operand) for p, _ in axis}:
                self.unread[param].append(node)

    def _elementwise(self, node: Node) -> None:
        """Operations on entries in the same place, e.g. adding a bias."""
        kernels = [x for x in node.operands if self._is_kernel(x) and x.weight]
        total = origin(node.operands[0]) if node.op == "log" else averaged(node)
        if total is not None and total.op == "reduce_sum":
            self._average(total)
        if node.weight:
            self.labels[node.id] = self._joined(node, kernels)
            if any(x.id in self._normed for x in node.operands):
                self._normed.add(node.id)
            self._keep_gains(node)
            total = origin(node.operands[-1])
            if total.op == "reduce_sum" and total.operands == node.operands[:1]:
                # Shares of a sum, e.g. a softmax: a sum over them does not grow.
                shares = [self._of(node)[a] for a in total.params["axes"]]
                self._gains[node.id] = self._gains.get(node.id, NONE).union(*shares)
            if node.op in ("mul", "div") and len(kernels) == 2:
                kernels.sort(key=lambda x: x.id not in self._positive)
                self._add_gains(node, [self._joined(node, [x]) for x in kernels])
            elif node.op in ("mul", "select_n") and self._is_diagonal(node):
                both = NONE.union(*self.labels[node.id])
                self.labels[node.id] = both, both
                self._gains[node.id] = both
                self._diagonal.add(node.id)
            return
        if node.op == "mul" and self._gated_rows(node):
            return
        rows = [x for x in node.operands if x.id in self._rows and self._is_kernel(x)]
        data = [x for x in node.operands if x.data]
        added = node.op == "add" and any(self._is_square(self._of(x)) for x in rows)
        alone = added or (not kernels and node.op not in ELEMENTWISE - MOVES)
        if rows and alone and data == rows:
            self.labels[node.id] = self._joined(node, [*rows, *kernels])
            self._rows[node.id] = NONE.union(*(self._rows[x.id] for x in rows))
            return
        is_one = node.op == "mul" and len(data) == 1 and kernels
        if is_one and not self.is_step(data[0]):  # else the rate of each entry
            self._multiply(node, data[0], kernels[0])
            return
        for kernel in kernels:
            self._mark(node, [(axes, Use.ENTRY) for axes in self._of(kernel)])
        self._carry_results(node)
        if node.op == "add" and kernels:  # biases
            self._add_results(node, self._joined(node, kernels))

    def _gated_rows(self, node: Node) -> bool:
        """Looked-up kernels that gates multiply or mix, as experts are."""
        for k, rows in enumerate(node.operands):
            gate = node.operands[1 - k]
            if rows.id not in self._rows or gate.id in self._rows or gate.weight:
                continue
            equal = {None, *self.spread.get(gate.id, NONE)}
            places = {x.out for x in indices(node) if x.axes.get(1 - k) not in equal}
            moved = self._joined(node, [rows])
            units = {a for a, axes in enumerate(moved) if axes}
            if len(units) > 1 and not units & places:
                self.labels[node.id] = moved
                self._rows[node.id] = self._rows[rows.id]
                return True
        return False

    def _is_diagonal(self, node: Node) -> bool:
        """Whether a vector times the identity is a diagonal matrix."""
        alone = len([axes for axes in self.labels[node.id] if axes]) == 1
        return alone and any(map(is_identity, node.operands))

    def is_gain(self, kernel: Node, axis: int) -> bool:
        """Whether each entry along an axis multiplies one value, e.g. of a diagonal."""
        return self._of(kernel)[axis] <= self._gains.get(kernel.id, NONE)

    def _keep_gains(self, node: Node) -> None:
        found = NONE.union(*(self._gains.get(x.id, NONE) for x in node.operands))
        if found:
            self._gains[node.id] = found

    def _add_gains(self, node: Node, sides: Sequence[Labels]) -> None:
        """Of two parameters, one may scale the rows or columns of the other.

        Or each entry: both are kernels then. Members may have gains of their own.
        """
        for one, other in (sides, sides[::-1]):
            at, of = ({a for a, x in enumerate(side) if x} for side in (one, other))
            own = _params(other)
            found = {x for axes in one for x in axes if x[0] not in own}
            whole = self._is_matrix(one), self._is_matrix(other)
            if at <= of and all(whole) and found:
                self.scalers |= {param for param, _ in found}
                return
            if whole == (True, False):
                continue
            wide, among = (
                {a for a, x in enumerate(side) if x & self.growing}
                for side in (one, other)
            )
            outer = wide == among and whole == (False, True)
            if at < of or (wide and (wide < among or outer)):
                self._gains[node.id] = self._gains.get(node.id, NONE) | found

    def _is_matrix(self, labels: Labels) -> bool:
        """Whether one parameter has two axes that grow, unlike a product of gains."""
        grown = [p for axes in labels for p in _params((axes & self.growing,))]
        return len(grown) > len({*grown})

    def _multiply(self, node: Node, data: Node, kernel: Node) -> None:
        """An activation times a parameter, which may be summed afterwards."""
        labels = self._of(kernel)
        spread = self.spread.get(data.id, frozenset())
        self._carry_results(node)
        if self._copied.get(origin(data).id):
            self._add_gains(node, [self._joined(node, [kernel]), self.entries(node)])
        if any(labels) and len(self._uses.get(node.id, ())) == 1:
            self._pending[node.id] = [(labels, node, spread)]
            self.spread[node.id] = spread
            return
        self._mark(node, [(axes, Use.ENTRY) for axes in labels])

    def _passes_on(self, node: Node) -> bool:
        """Whether the node moves a product that is not summed yet; settle others."""
        waiting = [x for x in node.operands if x.id in self._pending]
        if not waiting or node.op == "reduce_sum":
            return False
        by = [x for x in node.operands if x.weight and node.op == "mul"]
        moved = node.op in MOVES or is_scaled(node) or any(map(self._is_kernel, by))
        added = node.op in ("add", "sub") and all(
            x in waiting or self._copied.get(origin(x).id) for x in node.operands
        )
        if (
            len(self._uses.get(node.id, ())) == 1
            and node.op not in ("last", "carry", "scan_in", "scan_out")
            and (moved or added)
        ):
            self._carry_results(node)
            terms = self._pending[node.id] = []
            for source in dict.fromkeys(waiting):
                k, new = node.operands.index(source), {*self.spread.get(node.id, ())}
                new = new if node.op in ("broadcast_in_dim", "reshape") else set()
                each: list[Labels] = [() for _ in node.operands]
                for labels, product, spread in self._pending.pop(source.id):
                    each[k] = labels
                    kept = (x.out for x in indices(node) if x.axes.get(k) in spread)
                    equal = new.union(a for a in kept if a is not None)
                    terms.append((self._moved(node, each), product, frozenset(equal)))
            for kernel in filter(self._is_kernel, by):
                own = self._joined(node, [kernel])
                self._add_gains(node, [own, terms[0][0]])
                terms.append((own, node, self.spread.get(waiting[0].id, frozenset())))
            self._keep_gains(node)
            return True
        for source in dict.fromkeys(waiting):
            self._settle(source)
        return False

    def _settle(self, node: Node, summed: Sequence[int] = ()) -> None:
        """Pending products meet a sum over some axes, or something else."""
        for labels, product, spread in self._pending.pop(node.id):
            sources = node, product, *product.operands
            gains = NONE.union(*(self._gains.get(x.id, NONE) for x in sources))
            marks = [(labels[a] & gains, Use.ENTRY) for a in summed]
            inside = any(labels[a] for a in summed)
            for axis, axes in enumerate(labels):
                if axis in summed:
                    axes, use = axes - gains, Use.IN
                elif not inside:
                    use = Use.ENTRY
                else:
                    own = axis in spread or _params(labels) & self.scalers
                    use = Use.OUT if own else Use.COPY
                marks.append((axes, use))
            self._mark(product, marks)

    def _joined(self, node: Node, operands: Iterable[Node]) -> Labels:
        """The labels of operands at the places of the node's axes."""
        chosen = {id(x) for x in operands}
        return self._moved(
            node, [self._of(x) if id(x) in chosen else () for x in node.operands]
        )

    def _moved(self, node: Node, each: Sequence[Labels]) -> Labels:
        """Labels of each operand's axes, or (), at the places of the node's axes."""
        moved = [NONE] * len(node.shape)
        for index in indices(node) if any(each) else ():
            for k, a in index.axes.items():
                if index.out is not None and each[k]:
                    moved[index.out] |= each[k][a]
        return tuple(moved)

    def _carry_results(self, node: Node) -> None:
        """Follow the axes of results that come from output axes of parameters."""
        each = [self._results.get(x.id, ()) for x in node.operands]
        joined = self._moved(node, each)
        spread: set[int] = set()
        if node.op == "broadcast_in_dim" and node.operands[0].data:
            kept = node.params["broadcast_dimensions"]
            old = node.operands[0].shape
            spread = {a for a in range(len(node.shape)) if a not in kept}
            spread |= {a for i, a in enumerate(kept) if old[i] != node.shape[a]}
        elif node.op == "reshape" and node.operands[0].data:
            spread = {a for a, size in enumerate(node.shape) if size == 1}
        elif len(node.operands) == 1 or is_scaled(node):
            spread = set(self.spread.get(node.operands[0].id, ()))
        if any(joined):
            self._results[node.id] = joined
        if spread:
            self.spread[node.id] = frozenset(spread)

    def _op_dot_general(self, node: Node) -> None:
        left, right = node.operands[:2]
        (lc, rc), (lb, rb) = node.params["dimension_numbers"]
        sides = ((left, lc, lb, right), (right, rc, rb, left))
        seeds = self._seeds(node, sides)
        if left.weight and right.weight and self._meets_both(node, sides):
            self._give_up(node)  # either kernel may be the one that sums, in a train
            return
        if left.weight and right.weight and not any(seeds):
            self._product_of_weights(node, sides)
            return
        zero = node.weight and any(x.value == 0 for x in (left, right))
        if any(seeds) or zero:  # an activation from here on, e.g. of a first state
            node.data, node.weight = True, False
            pairs = zip((left, right), seeds, strict=True)
            self.seeds |= {(node.id, x.id) for x, is_seed in pairs if is_seed}
        if node.weight:
            self._mixed_by_constants(node, sides)
            return
        kernels: list[Labels] = [(), ()]
        for k, (x, contracted, batch, other) in enumerate(sides):
            if not seeds[k]:
                mixed = self._kernel_of(x, contracted, batch) if other.data else ()
                if mixed and x.id in self._states:
                    self.states[node.id] = k, _params(mixed)
                # Of two rows of tables, that with outputs of its own is the kernel.
                others = sides[1 - k][1:3]
                selects = x.weight or (
                    self._selects(x, contracted, batch)
                    and not (other.weight and self._is_kernel(other))
                    and not self._selects(other, *others)
                )
                if mixed or (selects and self._is_kernel(x)):
                    kernels[k] = mixed or self._of(x)
            if not kernels[k] and self._is_kernel(x):
                self._mark(node, [(axes, Use.ENTRY) for axes in self._of(x)])
        if all(x.id not in self._rows for x in (left, right)):
            for (x, contracted, *_), labels in zip(sides, kernels, strict=True):
                if labels and x.weight and self._mixes(node, x, labels, contracted):
                    return
        results = self._multiplied(node, kernels)
        if left.data and right.data and not any(kernels):
            for a, b in zip(lc, rc, strict=True):
                self._gate(node, self._whole(left, a) | self._whole(right, b))
        # Axes that stay beside the parameters.
        each = [self._results.get(x.id, ()) if x.data else () for x in (left, right)]
        self._add_results(node, results)
        self._add_results(node, self._moved(node, each))

    def _multiplied(self, node: Node, kernels: Sequence[Labels]) -> Labels:
        """Mark the axes of a product's kernels; those of its result."""
        for k, labels in enumerate(kernels):
            if not labels:
                continue
            kernel, other = node.operands[k], node.operands[1 - k]
            gains, copied = self._gains.get(kernel.id, NONE), NONE
            if kernel.id in self._positive:
                gains = NONE.union(*labels)
            marks = [(self._rows.get(kernel.id, NONE), Use.COPY)]
            summed = {x.axes.get(1 - k) for x in indices(node) if x.out is None}
            few = self.sparse.get(other.id, set())
            chosen = self._chosen(other, summed) | few
            copy = Use.COPY if summed - few - {None} else Use.TABLE
            every = [x for x in indices(node) if k in x.axes]
            for index in every:
                axes, shared = labels[index.axes[k]], 1 - k in index.axes
                if index.out is None and index.axes.get(1 - k, -1) in chosen:
                    marks.append((axes, copy))
                    self._batched(node, other, index.axes[1 - k])
                elif index.out is None and (shared or node.op == CONVOLUTION):
                    into = Use.TABLE if other.id in self.hot else Use.IN
                    marks += [(axes - gains, into), (axes & gains, Use.ENTRY)]
                    across = self.entries(other)[index.axes[1 - k]] if shared else NONE
                    self.units |= across
                elif index.out is not None and (not shared or node.op == CONVOLUTION):
                    marks.append((axes, Use.OUT))
                else:
                    copied |= axes
                    marks.append((axes, Use.COPY))
                    if index.out is not None:
                        self._batched(node, other, index.axes[1 - k])
            self._mark(node, marks)
            if node.op == "dot_general":
                if node.id not in self.states:
                    self.kernel_sums[node.id] = [node]
                self._copied[node.id] = copied
        return self._moved(node, kernels)

    def _chosen(self, node: Node, summed: set[int | None]) -> set[int | None]:
        """The axes along which gates choose or average, e.g. experts.

        Gates are equal for the units of an expert, which are summed over, too.
        """
        found: set[int | None] = set()
        for k, gate in enumerate(node.operands if node.op == "mul" else ()):
            if gate.data and any(map(self._averages, reach([gate], _weights_of))):
                equal = {None, *self.spread.get(gate.id, NONE)}
                own = {x.out for x in indices(node) if x.axes.get(k) not in equal}
                if summed - own - {None}:
                    found |= own - {None}
        return found

    def _averages(self, node: Node) -> bool:
        """Whether entries are those of a choice, or shares of their sum."""
        shares = node.op == "div" and origin(node.operands[1]).op == "reduce_sum"
        return shares or node.op == "top_k"

    def entries(self, node: Node) -> Labels:
        """The output axes of parameters that the axes of an activation come from."""
        return self._results.get(node.id, (NONE,) * len(node.shape))

    def _add_results(self, node: Node, labels: Labels) -> None:
        if any(labels):
            more = zip(self.entries(node), labels, strict=True)
            self._results[node.id] = tuple(a | b for a, b in more)

    def _selects(
        self, node: Node, contracted: Sequence[int], batch: Sequence[int]
    ) -> bool:
        """Whether looked-up rows are kernels, e.g. of the expert of each token."""
        own = {a for a, axes in enumerate(self._of(node)) if axes}
        free = own - {*contracted, *batch}
        return node.id in self._rows and bool(free) and not own.isdisjoint(contracted)

    def _seeds(self, node: Node, sides: Sequence[Side]) -> tuple[bool, bool]:
        """Which factor of a function of parameters is a first activation, not a kernel.

        Learned queries and latents are vectors, are few, are broadcast over the batch
        or normalized before they meet a kernel, or what the kernel makes of them has a
        bias or a nonlinearity. Low-rank products of kernels have none of this. Constant
        features of a width, e.g. sinusoids, are activations, too.
        """
        left, right = (side[0] for side in sides)
        kernels = [self._is_kernel(x) for x in (left, right)]
        if left.data or right.data or not any(kernels):
            return False, False
        if not all(kernels):
            kernel, summed, *_, constant = sides[kernels.index(True)]
            own = self._of(kernel)
            wide = any(own[a] & self.growing for a in summed) and len(own) > 1
            is_seed = constant.value is None and (
                (wide and self._leads_on(node))
                or self._is_read(node, self._joined(node, [kernel]))
            )
            return is_seed and not kernels[0], is_seed and not kernels[1]
        if self.depends(left) & self.depends(right):  # e.g. a kernel's singular vector
            return False, False
        seeds = self._is_seed(left, right), self._is_seed(right, left)
        if any(seeds):
            return seeds
        into, gone = (side[1] for side in sides)
        if self._stays(left, into):
            return True, False
        if [*gone] == [len(right.shape) - 1] and self._stays(right, gone):
            return False, True  # kernel @ activation, of each query
        return self._leads_on(node), False  # most libraries: activation @ kernel

    def _meets_both(self, node: Node, sides: Sequence[Side]) -> bool:
        """Whether one product with data sums over axes of both factors, which grow."""
        (left, gone, both, _), (right, more, *_) = sides
        free = len(left.shape) - len(gone)
        grow = [
            any(self._of(x)[a] & self.growing for a in axes)
            for x, axes in ((left, gone), (right, more))
        ]
        todo, summed = [(node, a, a) for a in range(len(node.shape))], set[int]()
        while todo and all(grow):
            at, axis, own = todo.pop()
            for user in self.uses(at):
                index = index_of(user, user.operands.index(at), axis)
                if index is not None and index.out is None and user.data:
                    summed |= {own} if user.op == "dot_general" else set()
                elif index is not None and index.out is not None and user.op in MOVES:
                    todo.append((user, index.out, own))
        return any(len(both) <= a < free for a in summed) and max(summed) >= free

    def _stays(self, node: Node, gone: Sequence[int]) -> bool:
        """Whether only the axes grow that are summed over, as of a few queries."""
        grows = [bool(axes & self.growing) for axes in self._of(node)]
        free = [a for a in range(len(grows)) if a not in gone]
        return any(grows[a] for a in gone) and not any(grows[a] for a in free)

    def _is_seed(self, node: Node, other: Node) -> bool:
        labels = self._of(node)
        if any(not x and n > 1 for x, n in zip(labels, node.shape, strict=True)):
            return True
        return node.id in self._normed and other.id not in self._normed

    def _leads_on(self, node: Node) -> bool:
        """Whether a product of parameters gets a bias or a nonlinearity."""
        for after in self._uses.get(node.id, ()):
            if after.op == "add" and len(after.operands) == 2:
                other = after.operands[after.operands[0] is node]
                if len([n for n in origin(other).shape if n > 1]) < 2:
                    return True
            elif not after.weight:
                continue
            elif after.op in MOVES or is_scaled(after):
                if self._leads_on(after):
                    return True
            elif after.op in ("exp", "tanh", "logistic", "erf", "max", "sin"):
                return True
        return False

    def _is_read(self, node: Node, labels: Labels) -> bool:
        """Whether data is summed over what a kernel makes, as queries over keys."""
        for user in self.uses(node):
            k = user.operands.index(node)
            if user.op in MOVES:
                if self._is_read(user, self._moved(user, [labels])):
                    return True
            elif user.op == "dot_general" and user.operands[1 - k].data:
                into = [
                    x.axes[k] for x in indices(user) if k in x.axes and x.out is None
                ]
                if any(labels[a] for a in into):
                    return True
        return False

    def _product_of_weights(self, node: Node, sides: Sequence[Side]) -> None:
        self._keep_gains(node)
        each: list[Labels] = []
        for x, contracted, _, other in sides:
            own = self._of(x)
            if x.id in self._diagonal:
                their = next(side[1] for side in sides if side[0] is other)
                own = (own[0].union(*(self._of(other)[a] for a in their)),) * 2
            elif other.id not in self._diagonal:
                gains, same = self._gains.get(x.id, NONE), self.depends(other)
                summed = NONE.union(*(own[a] for a in contracted)) - gains
                links = [axis for axis in summed if axis[0] not in same]
                self._mark(node, [(links, Use.LINK)])
            each.append(own)
        self.labels[node.id] = self._moved(node, each)

    def _mixed_by_constants(self, node: Node, sides: Sequence[Side]) -> None:
        """A parameter times a constant matrix, e.g. positions that are resized."""
        each: list[Labels] = []
        for (x, *gone, _), (other, summed, *_) in zip(sides, sides[::-1], strict=True):
            own = self._of(x)
            if not self._is_kernel(x):
                mixed = NONE.union(*(self._of(other)[a] for a in summed))
                fixed = {
                    *gone[0],
                    *gone[1],
                    *(a for a, n in enumerate(x.shape) if n == 1),
                }
                own = tuple(NONE if a in fixed else mixed for a in range(len(x.shape)))
            each.append(own)
        self.labels[node.id] = self._moved(node, each)

    def _batched(self, node: Node, data: Node, axis: int) -> None:
        """Axes of earlier results that are batch axes here count copies (experts)."""
        self._mark(node, [(self._whole(data, axis), Use.COPY)])

    def _whole(self, node: Node, axis: int) -> frozenset[Axis]:
        """The output axes of parameters that an axis is all of, unlike heads."""
        stored = self._program.params
        size, found = node.shape[axis], self.entries(node)[axis]
        return frozenset(x for x in found if stored[x[0]].shape[x[1]] == size)

    def _op_conv_general_dilated(self, node: Node) -> None:
        data, kernel = node.operands[:2]
        if data.weight and self._is_kernel(data):
            # A learned image: an activation from here on.
            node.data, node.weight = True, False
            self._mark(node, [(axes, Use.ENTRY) for axes in self._of(data)])
        labels = self._modulated(kernel)
        if labels:
            self._results[node.id] = self._multiplied(node, [(), labels])
            self.kernel_sums[node.id] = [node]

    def _modulated(self, node: Node) -> Labels:
        """The axes of a kernel that depends on data: masked, sampled, or updated."""
        if node.weight:
            return self._of(node) if self._is_kernel(node) else ()
        if node.id not in self._kernels:
            self._kernels[node.id] = self._mixed(node)
        return self._kernels[node.id]

    def _mixed(self, node: Node) -> Labels:
        if node.op in ("concatenate", *MOVES):
            parts = [self._modulated(x) for x in node.operands]
            self._keep_gains(node)
            return self._moved(node, parts) if all(parts) else ()
        if node.op == "carry":
            start, end = node.operands
            labels = self._modulated(start)
            learns = end.op in ("add", "sub") and self.is_step(end.operands[1])
            return labels if learns or self._is_square(labels) else ()
        is_product = node.op in ("mul", "div")
        known = is_product or node.op in ("add", "sub", "select_n")
        if not known or (is_product and self.is_step(node)):
            return ()
        stored = [x.operands[0] if x.op == "transpose" else x for x in node.operands]
        if node.op == "add" and any(self._copied.get(x.id) for x in stored):
            return ()  # biases of experts
        sides = [self._modulated(operand) for operand in node.operands]
        joined = self._moved(node, sides)
        self._keep_gains(node)
        if is_product and all(sides):
            self._add_gains(node, sides)
        matrix = len([axes for axes in joined if axes]) > 1
        whole = all(x or n == 1 for x, n in zip(joined, node.shape, strict=True))
        kernel = whole or self._is_square(joined) or self._is_masked(node)
        return joined if matrix and kernel else ()

    def _is_square(self, labels: Labels) -> bool:
        """Whether two axes grow: a matrix of each example, as in linear attention."""
        return len([axes for axes in labels if axes & self.growing]) > 1

    def is_step(self, node: Node) -> bool:
        """Whether it is a gradient of an inner optimizer, or a sum or product of some.

        Gates and rates may multiply it, and momentum may add it up from zero.
        """
        if node.id not in self._steps:
            data = [x for x in node.operands if x.data]
            self._steps[node.id] = node.backward  # also within loops
            if node.op in ("mul", "div"):
                self._steps[node.id] |= any(map(self.is_step, data))
            elif node.op in ("add", "sub", *PRODUCTS, *MOVES) and data:
                self._steps[node.id] |= all(map(self.is_step, reversed(data)))
            elif node.op == "carry" and node.operands[0].value == 0:
                moved = ("add", "sub", "mul", *MOVES)
                terms = reach(data, lambda x: x.operands if x.op in moved else ())
                self._steps[node.id] = any(x.backward for x in terms)
        return self._steps[node.id]

    def _is_masked(self, node: Node) -> bool:
        """Whether data multiply a kernel, or add noise times one, or a gradient."""
        if node.op == "carry":  # what it ends as is computed from it
            return node.weight
        sides = [x for x in node.operands if self._modulated(x)]
        rest = [x for x in node.operands if x not in sides]
        if node.op in ("add", "sub") and not all(map(self.is_step, rest)):
            return False
        return node.weight or (bool(sides) and all(map(self._is_masked, sides)))

    def _kernel_of(
        self, node: Node, contracted: Sequence[int], batch: Sequence[int]
    ) -> Labels:
        """The axes of a product's kernel that depends on data; () for an activation."""
        is_modulated = node.data and node.id not in self._rows
        labels = self._modulated(node) if is_modulated else ()
        if not labels or not all(labels[a] for a in contracted):
            return ()
        rest = {a for a, n in enumerate(node.shape) if n > 1 and not labels[a]}
        free = {*range(len(labels))}.difference(contracted, batch)
        # Each example may have a mask, or noise, of its own; else it is a state.
        if rest and not (rest <= {*batch} and self._is_masked(node)):
            if not any(labels[a] for a in free):
                return ()  # the biases of each head's queries
            self._states.add(node.id)
        return labels

    def _mixes(
        self, node: Node, product: Node, labels: Labels, summed: Sequence[int]
    ) -> bool:
        """Whether data mix a fixed number of kernels, which then act as one.

        The sum `node` is over axes of `product` (or the kernels) that count them.
        """
        number = NONE.union(*(labels[a] for a in summed))
        each = [labels if x is product else () for x in node.operands]
        moved = self._moved(node, each)
        if not number or number & self.growing or not self._is_square(moved):
            return False
        if not self._acts(node, moved):
            return False
        self._mark(node, [(number, Use.COPY)])
        self._kernels[node.id] = moved
        return True

    def _acts(self, node: Node, labels: Labels) -> bool:
        """Whether a value is later a kernel: an activation is summed over its axis."""
        for user in self.uses(node):
            k = user.operands.index(node)
            added = user.op == "add" and user.operands[1 - k].weight  # to a kernel
            if added or user.op in ("concatenate", *MOVES):
                parts = [labels if x is node else () for x in user.operands]
                if self._acts(user, self._moved(user, parts)):
                    return True
            elif user.op in PRODUCTS and all(x.data for x in user.operands):
                into = [
                    x.axes[k] for x in indices(user) if k in x.axes and x.out is None
                ]
                free = {a for a, axes in enumerate(labels) if axes} - {*into}
                if free and any(labels[a] for a in into):
                    return True
        return False

    def _op_ragged_dot_general(self, node: Node) -> None:
        if self._is_kernel(node.operands[1]):
            self._multiplied(node, [(), self._of(node.operands[1]), ()])

    def _op_gather(self, node: Node) -> None:
        table, indices = node.operands[:2]
        numbers = node.params["dimension_numbers"]
        if not self._is_kernel(table):
            self._carry_results(node)
            return
        labels, sizes = self._of(table), node.params["slice_sizes"]
        batch = tuple(getattr(numbers, "operand_batching_dims", ()))
        gone = {*numbers.collapsed_slice_dims, *batch}
        kept = [a for a in range(len(labels)) if a not in gone]
        result = self._joined(node, [table])
        looked = [a for a in range(len(labels)) if sizes[a] != table.shape[a]]
        if not indices.data and any(labels[a] & self.growing for a in looked):
            rest = [a for a in range(len(node.shape)) if a not in numbers.offset_dims]
            places = [a for a in rest if node.shape[a] > 1]
            number = math.prod(node.shape[a] for a in places)
            if len(places) > 1 and number > math.prod(table.shape[a] for a in looked):
                self._give_up(node)  # an entry has several places, as in a circulant
                return
            if places:
                found = NONE.union(*(labels[b] for b in looked))
                self.labels[node.id] = tuple(
                    found if a in places else axes for a, axes in enumerate(result)
                )
                return
        self.labels[node.id] = result
        if indices.data:
            self._look_up(node, labels, looked, kept)
        else:
            self.sliced |= {x for a in looked for x in labels[a]}

    def _look_up(
        self, node: Node, labels: Labels, looked: Sequence[int], kept: Iterable[int]
    ) -> None:
        """Rows of a table are looked up on some of its axes."""
        self._rows[node.id] = NONE.union(*(labels[a] for a in looked))
        self._choose(node, node.operands[1])
        uses = dict.fromkeys(kept, Use.OUT) | dict.fromkeys(looked, Use.TABLE)
        self._mark(node, [(labels[a], use) for a, use in uses.items()])

    def _op_dynamic_slice(self, node: Node) -> None:
        table, *indices = node.operands
        if not self._is_kernel(table) or not table.weight:
            self._carry_results(node)
            return
        labels = self._of(table)
        looked = [a for a, n in enumerate(node.shape) if n != table.shape[a]]
        # One entry is looked up; a window of several is moved.
        one = [a for a in looked if node.shape[a] == 1]
        if any(x.data for x in indices):
            self.labels[node.id] = tuple(
                NONE if a in one else x for a, x in enumerate(labels)
            )
            self._look_up(node, labels, looked, range(len(labels)))
        else:
            self.labels[node.id] = labels
            self.sliced |= {x for a in one for x in labels[a]}

    def _op_slice(self, node: Node) -> None:
        source = node.operands[0]
        if source.weight and self._is_kernel(source):
            self._op_dynamic_slice(node)
            return
        self._elementwise(node)
        every = self._of(source)
        for a, axes in enumerate(every):
            alone = sum(bool(x & axes) for x in every) == 1
            one = (x.op == "slice" and x.shape[a] == 1 for x in self.uses(source))
            # Looked up for all layers at once.
            if source.shape[a] > 1 and alone and all(one):
                self._mark(node, [(axes, Use.COPY)])

    def _op_select_n(self, node: Node) -> None:
        cases = node.operands[1:]
        if not node.weight and all(x.weight and self._is_kernel(x) for x in cases):
            # One of several kernels, e.g. of a `cond` under `vmap`.
            self.labels[node.id] = self._joined(node, cases)
            self._rows[node.id] = NONE
            return
        self._elementwise(node)

    def _op_eq(self, node: Node) -> None:
        if node.data and not any(self._is_kernel(x) for x in node.operands):
            self.hot.add(node.id)
            for x, places in (node.operands, node.operands[::-1]):
                self._choose(node, x, _counts(places))

    def _op_scatter(self, node: Node) -> None:
        self._elementwise(node)
        at = node.params["dimension_numbers"].scatter_dims_to_operand_dims
        self._choose(node, node.operands[1], at[-1] if at else None)

    _op_scatter_add = _op_scatter

    def _gate(self, node: Node, summed: frozenset[Axis]) -> None:
        """Outputs that gate copies, which are then summed, are as many as those."""
        if summed & self._copies:
            self._mark(node, [(summed & self.growing, Use.COPY)])

    def _choose(self, node: Node, index: Node, axis: int | None = None) -> None:
        """Outputs of which some are chosen are copies, e.g. those of a router.

        Args:
          node: what is computed from the choice.
          index: the numbers of those that are chosen.
          axis: of the node, along which it has an entry of each.
        """
        known = ("select_n", "add", "min", "max", "clamp", "concatenate", *MOVES)
        moved = (*known, "slice", "reduce_min")
        for x in reach([index], lambda x: x.operands if x.op in moved else ()):
            if x.op in ("top_k", "argmax"):
                at = (*x.params.get("axes", ()), x.params.get("axis", -1))[0]
                chosen = self.entries(x.operands[0])[at] & self.growing
                self._mark(node, [(chosen, Use.COPY)])
                if axis is not None and chosen:
                    each = [NONE] * len(node.shape)
                    each[axis] = chosen
                    self._results[node.id] = tuple(each)
                    if x.op == "argmax" or x.spot in self._few:
                        self.sparse[node.id] = {axis}

    def _op_ge(self, node: Node) -> None:
        """Entries as large as the least of those that are chosen."""
        self._elementwise(node)
        value, least = node.operands
        for axis, found in enumerate(self.entries(value)):
            if value.data and least.data and found & self.growing:
                self._choose(node, least, axis)

    def _op_carry(self, node: Node) -> None:
        start = node.operands[0]
        if node.data and start.weight and self._is_kernel(start):
            self._mark(node, [(axes, Use.ENTRY) for axes in self._of(start)])
        elif node.weight:
            self.labels[node.id] = self._of(start)

    def _op_scan_in(self, node: Node) -> None:
        source = node.operands[0]
        if self._is_kernel(source):
            labels = self._of(source)
            self._mark(node, [(labels[0], Use.COPY)])
            self.labels[node.id] = self._joined(node, [source])
            if source.id in self._rows:
                self._rows[node.id] = self._rows[source.id]
        else:
            self._carry_results(node)
            if source.data and walks_layers(self._program, node.loop):
                self._batched(node, source, 0)  # what layer after layer reads

    def _reduce(self, node: Node) -> None:
        source, axes = node.operands[0], node.params["axes"]
        if source.id in self._pending:
            terms = self._pending[source.id]
            if len(terms) == 1 and self._mixes(node, source, terms[0][0], axes):
                del self._pending[source.id]
                return
            self._settle(source, axes)
            for labels, product, spread in terms:
                if any(labels[a] for a in axes):
                    beside = {*range(len(labels))}.difference(axes, spread)
                    copied = NONE.union(*(labels[a] for a in beside))
                    self._copied[node.id] = copied | self._copied.get(node.id, NONE)
                    self.kernel_sums.setdefault(node.id, []).append(product)
                    self._add_results(node, self._moved(node, [labels]))
        if node.weight:
            labels = self._of(source)
            self.labels[node.id] = self._moved(node, [labels])
            self._normed.add(node.id)
            return
        labels = self._of(source)
        if source.id in self._rows and not any(labels[a] for a in axes):
            self.labels[node.id] = self._joined(node, [source])  # a sum of experts
            self._rows[node.id] = self._rows[source.id]
        found = self._results.get(source.id)
        if found is not None:
            self._add_results(node, self._moved(node, [found]))
            if node.op == "reduce_sum":
                inner = origin(source)
                if inner.op == "mul" and all(x.data for x in inner.operands):
                    self._gate(
                        node, NONE.union(*(self._whole(source, a) for a in axes))
                    )
                self._sum_copies(node, NONE.union(*(found[a] for a in axes)))

    def _average(self, total: Node) -> None:
        """Kernels whose results are averaged are a layer, as members of an ensemble."""
        found = self.entries(total.operands[0])
        summed = NONE.union(*(found[a] for a in total.params["axes"]))
        if all(
            any(axis in e.axes(Use.COPY) for e in self.events[param])
            for param, axis in summed
        ):
            self.units |= summed

    def _sum_copies(self, node: Node, summed: frozenset[Axis]) -> None:
        """Kernels whose results are summed are one, e.g. those of an attention's heads.

        What an expert computes is multiplied by a gate first.
        """

        def before(x: Node) -> Iterable[Node]:
            scaled = x.op == "mul" and any(y.weight for y in x.operands)
            terms = [y for y in x.operands if y.data or not scaled]
            return map(origin, terms) if scaled or x.op in ("add", "sub") else ()

        terms = [*reach([origin(node.operands[0])], before)]
        for term in terms:
            products = self.kernel_sums.get(term.id, [])
            copied = self._copied.get(term.id, NONE) & summed
            if not copied:
                continue
            biased = [] if self.is_mean(node) else [x for x in terms if x.op == "add"]
            for param, axis in summed:
                alike = products if (param, axis) in copied else biased
                for event in self.events[param]:
                    if event.node in alike:
                        event.uses[axis] = frozenset({Use.IN})
            self.units |= summed - copied
            self.kernel_sums.setdefault(node.id, []).extend(products)

    _op_reduce_sum = _op_reduce_max = _op_reduce_min = _op_reduce_prod = _reduce
    _op_argmax = _op_argmin = _op_reduce_and = _op_reduce_or = _reduce


def _weights_of(node: Node) -> list[Node]:
    """What the weights of an average are computed from."""
    moved = node.op in ("mul", "reduce_sum", "scatter", "select_n", *MOVES)
    return [x for x in node.operands if x.data] if moved else []


def _params(labels: Labels) -> set[int]:
    return {param for axes in labels for param, _ in axes}


def is_identity(node: Node) -> bool:
    """Whether a value is one, or true, on a diagonal: places on two axes are equal."""
    while node.op in ("slice", *MOVES):
        node = node.operands[0]
    if node.op != "eq" or len(node.shape) != 2 or node.shape[0] != node.shape[1]:
        return False
    return {_counts(x) for x in node.operands} == {0, 1}


def _counts(node: Node) -> int | None:
    """The axis along which a value counts places; None for another value."""
    while node.op == "add" and sum(x.value is None for x in node.operands) == 1:
        node = next(x for x in node.operands if x.value is None)
    if node.op == "iota":
        return int(node.params["dimension"])
    axes = [a for a, n in enumerate(node.shape) if n > 1]
    if node.op == "broadcast_in_dim":
        kept, inner = node.params["broadcast_dimensions"], node.operands[0].shape
        axes = [a for a, n in zip(kept, inner, strict=True) if n > 1]
    return axes[0] if len(axes) == 1 and origin(node).op == "iota" else None

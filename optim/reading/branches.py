"""Residual branches of a program: their number, constants, and last parameters."""

import dataclasses
from collections.abc import Iterable

from .axes import Axes
from .joints import SUM
from .program import MOVES, Node, Program

_KERNEL_OPS = (
    "dot_general",
    "conv_general_dilated",
    "ragged_dot",
    "ragged_dot_general",
)
_NONLINEAR = frozenset(
    (
        "max",
        "min",
        "exp",
        "exp2",
        "expm1",
        "tanh",
        "logistic",
        "erf",
        "erf_inv",
        "sin",
        "cos",
        "log",
        "log1p",
        "integer_pow",
        "square",
        "pow",
        "sqrt",
        "sign",
        "abs",
        "round",
        "floor",
        "atan2",
    )
)
# Linear in their data operands, besides `MOVES`.
_LINEAR = frozenset(
    (
        "last",
        "stack",
        "unstack",
        "pad",
        "reduce_sum",
        "cumsum",
        "psum",
        "psum_invariant",
        "all_gather",
        "neg",
        "dynamic_update_slice",
        "scatter-add",
        "scatter_add",
        "select_n",
        "join",
        "concatenate",
        "copy",
        "reduce_window_sum",
        "rev",
        SUM,
    )
)
# They take a part of a value, so that a parameter holds more than this part.
_PARTS = frozenset(["slice", "split", "dynamic_slice", "gather"])


@dataclasses.dataclass(frozen=True)
class End:
    """A parameter in which a value is linear.

    Attributes:
      param: index of the parameter.
      factor: the constant between the parameter and the value.
      node: the operation on the parameter.
      part: whether the value takes only a part of what the parameter computes.
    """

    param: int
    factor: float
    node: Node
    part: bool = False


class Failure(Exception):
    """A value is not linear in any parameter; `node` is the reason."""

    def __init__(self, node: Node):
        super().__init__(node.op)
        self.node = node


@dataclasses.dataclass(frozen=True)
class Branch:
    """One residual addition, x + f(x).

    Attributes:
      add: the addition.
      trunk: the value that both sides are computed from.
      end: the branch's result.
      inside: ids of the nodes between trunk and end.
      runs: number of additions: more than one in a loop over layers.
      ends: the parameters that the branch ends in.
      failure: why it ends in none; None if it does.
      constant: the known number that multiplies the branch, over that of the stream.
      layers: number of kernels on the longest path through the branch.
    """

    add: Node
    trunk: Node
    end: Node
    inside: frozenset[int]
    runs: int
    ends: tuple[End, ...]
    failure: Node | None
    constant: float
    layers: int


class Branches:
    """Finds the residual branches of a program.

    Attributes:
      all: the branches, in the order of the program.
      outside: ids of the nodes that reach the outputs without entering a branch.
    """

    def __init__(self, program: Program, axes: Axes):
        self._program, self._axes = program, axes
        self._dominator: dict[int, Node | None] = {}
        self._depth: dict[int, int] = {}
        self._dominate()
        self._trunks: dict[int, Node] = {}
        self._known: dict[tuple[int, bool], list[End] | Node] = {}
        self.all: list[Branch] = []
        for node in program.nodes:
            branch = self._branch(node)
            if branch is not None:
                self.all.append(branch)

    @staticmethod
    def before(node: Node) -> list[Node]:
        """Operands, without the end of a loop's body."""
        return node.operands[:1] if node.op == "carry" else node.operands

    def _dominate(self) -> None:
        """Find each data node's immediate dominator, seen from the inputs."""
        for node in self._program.nodes:
            if not node.data:
                continue
            found: Node | None = None
            first = True
            for operand in self.before(node):
                if operand.data:
                    found = operand if first else self._common(found, operand)
                    first = False
            self._dominator[node.id] = found
            self._depth[node.id] = 0 if found is None else self._depth[found.id] + 1

    def _common(self, one: Node | None, other: Node | None) -> Node | None:
        while one is not other and one is not None and other is not None:
            if self._depth[one.id] >= self._depth[other.id]:
                one = self._dominator[one.id]
            else:
                other = self._dominator[other.id]
        return one if one is other else None

    def leads(self, start: Node, end: Node) -> bool:
        """Whether `end` is computed from `start`."""
        return start is end or bool(self.between(start, end))

    def between(self, start: Node, end: Node) -> frozenset[int]:
        """Ids of the nodes that lead from `start` to `end`, with `end`."""
        nodes = self._program.nodes
        reached = {start.id}
        seen: set[int] = set()
        stack = [end]
        while stack:  # ancestors of the end, down to the start
            node = stack.pop()
            if node.id in seen or node.id <= start.id or not node.data:
                continue
            seen.add(node.id)
            stack.extend(self.before(node))
        for at in sorted(seen):
            if any(x.id in reached for x in self.before(nodes[at])):
                reached.add(at)
        reached.discard(start.id)
        return frozenset(reached) if end.id in reached else frozenset()

    def _branch(self, node: Node) -> Branch | None:
        if node.op not in ("add", "add_any", "sub") or len(node.operands) != 2:
            return None
        one, other = node.operands
        if not (one.data and other.data) or one.shape != other.shape or not one.shape:
            return None
        pairs = [(one, other)] if node.op == "sub" else [(one, other), (other, one)]
        for skip, end in pairs:
            if self._is_constant_to_gradients(end):
                continue
            trunk, factor = self._trunk(skip)
            for start in self._same_stream(trunk):
                inside = self.between(start, end)
                if inside and self._kernels(inside):
                    self._trunks[node.id] = trunk
                    return self._made(node, start, end, inside, factor)
        return self._projected(node) if node.op != "sub" else None

    def _is_constant_to_gradients(self, node: Node) -> bool:
        while node.op in MOVES and len(node.operands) == 1:
            if node.op == "stop_gradient":
                return True
            node = node.operands[0]
        return False

    def _projected(self, node: Node) -> Branch | None:
        """A branch beside a shortcut that changes the width, as in ResNets."""
        one, other = node.operands
        start = self._common(one, other)
        if start is None or start.op == "input" or start in (one, other):
            return None
        sides = [self.between(start, x) for x in (one, other)]
        kernels = [self._kernels(inside) for inside in sides]
        bends = [any(self._bends(i, inside) for i in inside) for inside in sides]
        for a, b in ((0, 1), (1, 0)):
            later = self._kernel_after_bend(sides[b])
            if len(kernels[a]) == 1 and not bends[a] and bends[b] and later:
                return self._made(node, start, node.operands[b], sides[b])
        return None

    def _kernel_after_bend(self, inside: frozenset[int]) -> bool:
        nodes = self._program.nodes
        bent = [nodes[i] for i in inside if self._bends(i, inside)]
        return any(
            self.leads(x, kernel) for x in bent for kernel in self._kernels(inside)
        )

    def _bends(self, at: int, inside: frozenset[int]) -> bool:
        """Whether a node is a nonlinearity, other than the statistics of a norm."""
        node = self._program.nodes[at]
        if node.op in ("square", "integer_pow", "sqrt", "abs"):
            return False
        return node.op in _NONLINEAR and not self._becomes_scale(node, inside)

    def _becomes_scale(self, node: Node, inside: frozenset[int]) -> bool:
        """Whether only the root of a value is used, as of a variance."""
        users = [x for x in self._axes.uses(node) if x.id in inside]
        return bool(users) and all(
            x.op in ("rsqrt", "sqrt")
            or ((x.op in MOVES or x.op == "add") and self._becomes_scale(x, inside))
            for x in users
        )

    def _trunk(self, node: Node) -> tuple[Node, float]:
        """The value without casts, reshapes and constant factors, and the factor."""
        factor = 1.0
        while True:
            if node.op in MOVES and len(node.operands) == 1:
                node = node.operands[0]
            elif node.op in ("mul", "div") and node.operands[1].value:
                value = node.operands[1].value
                factor *= value if node.op == "mul" else 1 / value
                node = node.operands[0]
            elif node.op == "mul" and node.operands[0].value:
                factor *= node.operands[0].value
                node = node.operands[1]
            else:
                return node, factor

    def _same_stream(self, trunk: Node) -> Iterable[Node]:
        """The trunk, and what it was before branches were added to it in parallel."""
        yield trunk
        while trunk.id in self._trunks:
            trunk = self._trunks[trunk.id]
            yield trunk

    def _kernels(self, inside: Iterable[int]) -> list[Node]:
        return [
            node
            for node in (self._program.nodes[i] for i in sorted(inside))
            if node.op in _KERNEL_OPS and any(x.weight for x in node.operands)
        ]

    def _made(
        self,
        add: Node,
        trunk: Node,
        end: Node,
        inside: frozenset[int],
        skip: float = 1.0,
    ) -> Branch | None:
        runs = 1
        loop = add.loop
        while loop:
            length, parent, is_time = self._program.loops[loop]
            if is_time and self._program.carries_through(trunk, loop):
                return None  # a recurrence over time
            runs *= 1 if is_time else length
            loop = parent
        try:
            ends, failure = tuple(self.ends(end)), None
        except Failure as reason:
            ends, failure = (), reason.node
        return Branch(
            add,
            trunk,
            end,
            inside,
            runs,
            ends,
            failure,
            (self._kernel_factor(ends) if ends else self.inner(end)) / skip,
            self._layers(inside),
        )

    def _kernel_factor(self, ends: Iterable[End]) -> float:
        """The constant on the branch's kernel, or its gain, rather than on a bias."""
        ends = list(ends)
        for end in ends:
            if end.node.op not in ("add", "add_any", "sub"):
                return end.factor
        return ends[0].factor

    def _layers(self, inside: frozenset[int]) -> int:
        longest: dict[int, int] = {}
        nodes = self._program.nodes
        for at in sorted(inside):
            before = max(
                (longest.get(x.id, 0) for x in self.before(nodes[at])), default=0
            )
            longest[at] = before + bool(self._kernels([at]))
        return max(longest.values(), default=0)

    def ends(self, node: Node, factor: float = 1.0, part: bool = False) -> list[End]:
        """The parameters in which a value is linear, when all are scaled together.

        Raises:
          Failure: there are none.
          ValueError: a number whose value is not known multiplies it.
        """
        key = node.id, part
        if key not in self._known:  # a value may be reached on many paths
            try:
                self._known[key] = list(dict.fromkeys(self._ends(node, part)))
            except Failure as failure:
                self._known[key] = failure.node
        known = self._known[key]
        if isinstance(known, Node):
            raise Failure(known)
        return [dataclasses.replace(e, factor=e.factor * factor) for e in known]

    def _ends(self, node: Node, part: bool) -> list[End]:
        factor = 1.0
        if node.weight:
            return [End(p, factor * f, node, part) for p, f in self._roots(node, node)]
        data = [x for x in node.operands if not x.weight and x.data]
        if node.op in ("mul", "div"):
            return self._product(node, factor, part)
        if node.op in _KERNEL_OPS:
            return self._kernel_ends(node, factor, part)
        if node.op in ("add", "add_any", "sub"):
            found: list[End] = []
            for operand in node.operands:
                if operand.data or operand.weight:
                    found += self._end_or_ends(operand, node, factor, part)
                elif operand.value != 0:
                    raise Failure(node)
            return found
        if node.op in _PARTS and data and node.operands[0].data:
            shrinks = node.op != "gather"
            return self.ends(node.operands[0], factor, part or shrinks)
        if (node.op in MOVES or node.op in _LINEAR) and data:
            found = []
            for operand in node.operands:
                if node.op == "select_n":
                    if operand is node.operands[0]:
                        continue
                    operand = self._kept(node.operands[0], operand)
                if operand.data or operand.weight:
                    found += self._end_or_ends(operand, node, factor, part)
            return found
        raise Failure(node)

    @staticmethod
    def _kept(mask: Node, node: Node) -> Node:
        """What dropout keeps, without the division by the share that it keeps."""
        drops = not mask.data and not mask.weight and mask.value is None
        if drops and node.op == "div" and node.operands[1].value is not None:
            return node.operands[0]
        return node

    def _end_or_ends(
        self, operand: Node, node: Node, factor: float, part: bool
    ) -> list[End]:
        if operand.weight:
            roots = self._roots(operand, node)
            return [End(p, factor * f, node, part) for p, f in roots]
        return self.ends(operand, factor, part)

    def _product(self, node: Node, factor: float, part: bool) -> list[End]:
        one, other = node.operands
        for x, y in ((one, other), (other, one)):
            if y.value is not None and (node.op == "mul" or y is other):
                scale = y.value if node.op == "mul" else 1 / y.value if y.value else 0.0
                return self.ends(x, factor * scale, part)
        for x, y in ((one, other), (other, one)):
            if x.weight and (node.op == "mul" or x is one):
                return [End(p, factor * f, node, part) for p, f in self._roots(x, node)]
            if not y.data and not y.weight and (node.op == "mul" or y is other):
                if self._trunk(y)[0].op == "constant" and max(y.shape, default=1) == 1:
                    raise ValueError(
                        f"a number whose value is not known multiplies a branch or "
                        f"logits ({node.line}); store it as a Python float, or pass "
                        "built models in place of functions that build them"
                    )
                return self.ends(x, factor, part)  # e.g. a mask
        reason = node
        for x, y in ((one, other), (other, one)):
            if node.op == "div" and x is other:
                continue
            try:
                found = self.ends(x, factor, part)
            except Failure as failure:
                reason = failure.node
                continue
            # A norm divides by what depends on the same parameters.
            if not any(self.leads(end.node, y) for end in found if end.node.data):
                return found
            reason = node
        raise Failure(reason)

    def _kernel_ends(self, node: Node, factor: float, part: bool) -> list[End]:
        one, other = node.operands[:2]
        for kernel, x in ((other, one), (one, other)):
            if kernel.weight and x.data:
                inner = factor * self.inner(x)
                return [
                    End(p, inner * f, node, part) for p, f in self._roots(kernel, node)
                ]
        reason = node
        for x, y in ((other, one), (one, other)):
            try:
                found = self.ends(x, factor, part)
            except Failure as failure:
                reason = failure.node
                continue
            if not any(self.leads(end.node, y) for end in found if end.node.data):
                return found
        raise Failure(reason)

    def inner(self, node: Node) -> float:
        """The constant by which the input of a kernel is multiplied."""
        factor = 1.0
        while True:
            if node.op in MOVES and len(node.operands) == 1:
                node = node.operands[0]
                continue
            if node.op in ("mul", "div") and node.operands[1].value:
                value = node.operands[1].value
                factor *= value if node.op == "mul" else 1 / value
                node = node.operands[0]
                continue
            if node.op == "mul" and node.operands[0].value:
                factor *= node.operands[0].value
                node = node.operands[1]
                continue
            if node.op == "sub" and all(x.data for x in node.operands):
                node = node.operands[0]  # the mean is subtracted
                continue
            return factor

    def outer(self, node: Node) -> float:
        """The constant by which a result is multiplied next, also after its bias."""
        factor = 1.0
        while len(users := self._axes.uses(node)) == 1:
            user = users[0]
            if user.op in ("mul", "div"):
                other = user.operands[user.operands[0] is node]
                if not other.value or (user.op == "div" and user.operands[1] is node):
                    break
                factor *= other.value if user.op == "mul" else 1 / other.value
            elif user.op == "add":
                if not user.operands[user.operands[0] is node].weight:
                    break
            elif user.op not in MOVES and user.op not in ("stack", "last", SUM):
                break
            node = user
        return factor

    def on_weight(self, node: Node) -> float:
        """The constant by which the parameter of an operation is multiplied."""
        for x in node.operands:
            if x.weight:
                try:
                    return self._roots(x, node)[0][1]
                except Failure:
                    return 1.0
        return 1.0

    def is_unit(self, node: Node) -> bool:
        """Whether a value is divided by the root of its own sum of squares."""
        node, _ = self._trunk(node)
        if node.op not in ("mul", "div") or not all(x.data for x in node.operands):
            return False
        for norm in node.operands:
            for _ in range(12):
                inner = [x for x in norm.operands if x.data]
                if norm.op == "reduce_sum":
                    return True
                # A mean is a sum over a known number.
                if len(inner) != 1 or (norm.op == "div" and norm.operands[1].value):
                    break
                norm = inner[0]
        return False

    def logits(self, node: Node) -> float | None:
        """The constant between a product of activations and the softmax after it.

        None if no exponential follows.
        """
        factor: float = 1.0
        for _ in range(24):
            users = [x for x in self._axes.uses(node) if x.data]
            if any(x.op in ("exp", "exp2", "logistic") for x in users):
                return factor
            following = [
                x
                for x in users
                if x.op in MOVES
                or x.op
                in ("mul", "div", "add", "sub", "select_n", "tanh", "max", "join", SUM)
            ]
            if not following:
                return None
            user = following[0]
            if user.op in ("mul", "div"):
                other = user.operands[user.operands[0] is node]
                if other.value and not (user.op == "div" and user.operands[1] is node):
                    factor *= other.value if user.op == "mul" else 1 / other.value
                elif other.data:
                    return None
            node = user
        return None

    def _roots(self, node: Node, user: Node) -> list[tuple[int, float]]:
        """The parameters in which a function of parameters is linear."""
        factor = 1.0
        while node.op != "param":
            weights = [x for x in node.operands if x.weight]
            if node.op in ("mul", "div"):
                known = [x for x in node.operands if x.value is not None]
                if known and (node.op == "mul" or known[0] is node.operands[1]):
                    value = known[0].value or 0.0
                    factor *= value if node.op == "mul" else 1 / value
                    node = weights[0]
                    continue
                if len(weights) == 1 and (
                    node.op == "mul" or weights[0] is node.operands[0]
                ):
                    node = weights[0]  # e.g. times the stored statistics of a norm
                    continue
                # Weight norm: linear in the gain, which is the smaller one.
                if node.op == "mul" and len(weights) == 2:
                    node = min(weights, key=lambda x: len(self._params(x)))
                    continue
                raise Failure(user)
            if node.op == "dot_general" and len(weights) == 2:
                node = weights[1]  # low rank: linear in the last factor
                continue
            if node.op in ("add", "sub") and len(weights) == 2:
                return [
                    (p, factor * f) for x in weights for p, f in self._roots(x, user)
                ]
            moves = node.op in MOVES or node.op in (*_PARTS, "unstack", "carry", "rev")
            if moves and node.operands[0].weight:
                node = node.operands[0]
                continue
            raise Failure(user)
        assert node.param is not None
        return [(node.param, factor)]

    def _params(self, node: Node) -> set[int]:
        return {p for axes in self._axes.labels.get(node.id, ()) for p, _ in axes}

    def feeding(self, node: Node, chosen: Iterable[Branch]) -> list[Branch] | None:
        """The branches through which a node outside of all reaches the outputs.

        None if it reaches them without a branch.
        """
        chosen = list(chosen)
        ends = {(b.add.id, b.end.id): b for b in chosen}
        outputs = {x.id for x in self._program.outputs}
        found: dict[int, Branch] = {}
        seen: set[int] = set()
        stack = [node]
        while stack:
            at = stack.pop()
            if at.id in seen:
                continue
            seen.add(at.id)
            if at.id in outputs:
                return None
            for user in self._axes.uses(at):
                branch = ends.get((user.id, at.id))
                if branch is None:
                    stack.append(user)
                else:
                    found[user.id] = branch
        return list(found.values())

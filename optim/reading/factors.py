"""Factors of values: the parameters that they are linear in, and constants."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from .axes import Axes
from .degrees import degree_in_parameters
from .program import MOVES, PRODUCTS, Node, Program, averaged, origin, reach

# Linear in their data operands, besides `MOVES`.
LINEAR = frozenset(
    """
    all_gather complex concatenate conj cumsum fft imag join last neg pad psum real
    reduce_sum reduce_window_sum rev scan_in scan_out sum
    """.split()  # noqa: SIM905
)
# They take a part of a value, so that a parameter holds more than this part.
PARTS = frozenset(["slice", "dynamic_slice", "gather"])


@dataclasses.dataclass(frozen=True)
class End:
    """A parameter in which a value is linear.

    Attributes:
      param: index of the parameter.
      node: the operation on the parameter.
    """

    param: int
    node: Node

    @property
    def is_kernel(self) -> bool:
        """Whether it multiplies the value, as kernels and gains do; a bias is added."""
        return self.node.op not in ("add", "sub")


class Failure(Exception):
    """A value is not linear in any parameter; `node` is the reason."""

    def __init__(self, node: Node):
        super().__init__(node.op)
        self.node = node


class Factors:
    """The parameters that values are linear in, and constants that multiply them."""

    def __init__(self, program: Program, axes: Axes):
        self._program, self._axes = program, axes
        self._known: dict[int, list[End] | Node] = {}
        self._shared: frozenset[int] = frozenset()

    def trunk(self, node: Node) -> tuple[Node, float]:
        """The value without casts, reshapes and constant factors, and the factor."""
        factor, last = 1.0, None
        while node is not last:
            last = node
            node, factor = self.inner_step(node, factor)
        return node, factor

    @staticmethod
    def inner_step(node: Node, factor: float) -> tuple[Node, float]:
        """The operand of a cast, a move or a constant factor; else the node."""
        if node.op in MOVES:
            return node.operands[0], factor
        if node.op == "mul" and node.operands[1].value:
            share = 1.0 if averaged(node) else node.operands[1].value
            return node.operands[0], factor * share
        return node, factor

    def ends(self, node: Node) -> list[End]:
        """The parameters in which a value is linear, when all are scaled together.

        Raises:
          Failure: there are none.
          ValueError: a number whose value is not known multiplies it.
        """
        if node.id not in self._known:  # a value may be reached on many paths
            if node.op == "carry":
                self._known[node.id] = []  # in what a loop adds to it
            try:
                ends = self._ends(node)
                if node.weight:
                    ends = [End(e.param, node) for e in ends]
                self._known[node.id] = [*dict.fromkeys(ends)]
            except Failure as failure:
                self._known[node.id] = failure.node
        known = self._known[node.id]
        if isinstance(known, Node):
            raise Failure(known)
        return known

    def _ends(self, node: Node) -> list[End]:
        if node.op == "param" and node.param is not None:
            return [End(node.param, node)]
        if node.op in ("mul", "div", *PRODUCTS):
            return self._product(node)
        if node.op in ("add", "sub"):
            operands = [x for x in node.operands if x.data or x.weight]
            if any(x.value != 0 for x in node.operands if x not in operands):
                return [End(param, node) for param, *_ in self.offsets(node)]
        elif node.op in PARTS or (node.op == "carry" and node.weight):
            operands = node.operands[:1]
        elif node.op == "carry":
            operands = [x for x in node.operands if x.value != 0]
        elif node.op == "scatter-add":
            operands = [node.operands[0], node.operands[2]]
        elif node.op == "dynamic_update_slice":
            buffer, new = node.operands[:2]
            # A loop writes its results into it, part by part.
            operands = [buffer.operands[0] if buffer.op == "carry" else buffer, new]
        elif node.op == "select_n":
            mask, *cases = node.operands
            operands = [self.kept(mask, x) for x in cases]
        elif node.op in MOVES or node.op in LINEAR or _is_homogeneous(node):
            operands = node.operands
        else:
            raise Failure(node)
        found: list[End] = []
        for operand in operands:
            if operand.weight:
                found += self.used(operand, node)
            elif operand.data:
                found += self.ends(operand)
        if not found:
            raise Failure(node)
        return found

    def offsets(self, node: Node) -> Iterator[tuple[int, float, float]]:
        """The parameters that a value consists of, their factors, and what is added.

        The last is beside the parameter itself, e.g. 1 in x (1 + w).

        Raises:
          Failure: it is another function of parameters, or the number is not known.
        """
        if node.op == "param" and node.param is not None:
            yield node.param, 1.0, 0.0
            return
        number = next((x.value for x in node.operands if x.value is not None), None)
        moved = node.op in (*MOVES, *PARTS, "concatenate")
        if not (moved or (node.op in ("mul", "add") and number)):
            raise Failure(node)
        for weight in (x for x in node.operands if x.weight):
            for param, factor, offset in self.offsets(weight):
                if node.op == "mul":
                    factor *= number or 1.0
                elif node.op == "add":
                    offset += (number or 0.0) / factor
                yield param, factor, offset

    def used(self, weight: Node, node: Node) -> list[End]:
        """The parameters that scale an operation by a function of them."""
        try:
            params = [e.param for e in self.ends(weight)]
        except Failure:
            # E.g. rounded: not linear, but twice as large for parameters twice as large
            if degree_in_parameters(weight) != 1:
                raise Failure(node) from None
            params = sorted(self._axes.depends(weight))
        return [End(param, node) for param in params]

    @staticmethod
    def kept(mask: Node, node: Node) -> Node:
        """What dropout keeps, without the division by the share that it keeps."""
        if node.op == "mul" and node.operands[1].value is not None:
            return node.operands[0] if _is_random(mask) else node
        return node

    def _product(self, node: Node) -> list[End]:
        pairs = [(node.operands[0], node.operands[1])]
        if node.op == "mul":
            pairs.append(pairs[0][::-1])
        elif node.op != "div":
            pairs.insert(0, pairs[0][::-1])
        for x, y in pairs:
            if y.value is not None and node.op == "mul":
                return self.ends(x)
            if x.weight and (y.data or (node.id, y.id) in self._axes.seeds):
                ends = []
                # It may be no multiple of parameters, e.g. their cosine, or a kernel
                # that is divided by its norm. Then what it multiplies is.
                with contextlib.suppress(Failure):
                    ends = self.used(x, node)
                if ends and not self._is_shared(ends):
                    return ends
            if not (y.data or y.weight) and node.op in ("mul", "div"):
                if node.data:
                    self._check_known(self.trunk(y)[0], node)
                return self.ends(x)
        reason = node
        for apart, (x, y) in itertools.product((False, True), pairs):
            try:
                found = self.ends(x)
                # E.g. v of g v / |v|.
                if apart and not self._shared and self.depends(y, found):
                    with self.apart_from(e.param for e in found):
                        found = self.ends(x)
            except Failure as failure:
                reason = failure.node
                continue
            if not self.depends(y, found) and not self._is_shared(found):
                return found
            reason = node
        raise Failure(reason)

    def depends(self, node: Node, ends: Iterable[End]) -> bool:
        """Whether a value depends on the same parameters, as what a norm divides by."""
        if node.weight:
            return any(end.param in self._axes.depends(node) for end in ends)
        return any(self._program.leads(end.node, node) for end in ends if end.node.data)

    @staticmethod
    def _check_known(number: Node, node: Node) -> None:
        if number.op == "constant" and max(number.shape, default=1) == 1:
            raise ValueError(
                f"a number whose value is not known multiplies a branch or logits "
                f"({node.line}); store it as a Python float, or pass built models in "
                "place of functions that build them"
            )

    @contextlib.contextmanager
    def apart_from(self, params: Iterable[int]) -> Iterator[None]:
        """Find other ends than some parameters."""
        known, shared = self._known, self._shared
        self._known, self._shared = {}, shared.union(params)
        try:
            yield
        finally:
            self._known, self._shared = known, shared

    def _is_shared(self, ends: Iterable[End]) -> bool:
        return any(end.param in self._shared for end in ends)

    @staticmethod
    def with_weight(node: Node) -> Node | None:
        """The gain or the bias of a value that has one; None for other operations."""
        if node.op not in ("mul", "add") or not any(x.data for x in node.operands):
            return None
        return next((x for x in node.operands if x.weight), None)

    def unweighted(self, node: Node) -> Node:
        """The value that learned weights multiply."""
        inner, _ = self.trunk(node)
        if inner.op == "mul" and self.with_weight(inner):
            inner, _ = self.trunk(next(x for x in inner.operands if x.data))
        return inner

    def is_singular_value(self, by: Node, kernel: Node) -> bool:
        """Whether a number is a product of a kernel with a vector on either side."""
        moves = (*MOVES, *PARTS, "select_n")
        if math.prod(origin(by).shape) > 1 or not by.weight:
            return False
        inner = reach([by], lambda x: x.operands if x.op in moves else ())
        params = self._axes.depends(kernel)
        return any(
            x.op == "dot_general" and x.weight and self._axes.depends(x) & params
            for x in inner
        )


def _is_homogeneous(node: Node) -> bool:
    """Whether a positive factor of the operand is one of the result, as in ReLU."""
    relu = node.op == "max" and any(x.value == 0 for x in node.operands)
    return relu or node.op == "abs"


def root_mean_square(node: Node) -> float:
    """The size of an array of constants; what is zero, as in a mask, does not count."""
    if node.array is None:
        return 1.0
    entries = np.ravel(node.array)
    entries = entries[np.isfinite(entries) & (entries != 0)]
    return float(np.sqrt(np.mean(np.abs(entries) ** 2))) if entries.size else 1.0


def _is_random(mask: Node) -> bool:
    """Whether a mask is drawn from random bits."""
    sources = itertools.islice(reach([mask], lambda node: node.operands), 200)
    return any(node.op.startswith(("random", "threefry")) for node in sources)

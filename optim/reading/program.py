"""A model's forward pass as a flat graph, without computing anything.

`jax.make_jaxpr` traces the forward pass on abstract values. The graph inlines every
call (`jit`, `remat`, `custom_jvp`, `cond`, ...). A loop's body stands in it once, with
the number of its iterations.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

Spot = tuple[str, tuple[int, ...]]
# The jaxpr of a loop's `vmap`, and the numbers that its carries count, by place.
Maps = dict[tuple[int, ...], tuple[core.ClosedJaxpr, dict[int, np.ndarray]]]
_NOWHERE: Spot = "", ()
# Primitives that hold the jaxpr to inline under one of these names.
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_JOINED = "join"  # the results of several branches of `cond`
_FEW = 4096  # arrays of constants with more entries are not followed
# Constants are folded in float64 by these functions.
_FOLD: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
}
_ALONE = (*_FOLD, "integer_pow")  # functions of single entries
_FOLD |= {
    "rem": np.fmod,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "floor": np.floor,
    "sign": np.sign,
    "abs": np.abs,
}
_ONCE = frozenset((*_ALONE, "reduce_sum", "broadcast_in_dim", "reshape", "slice"))
# Operations that change no entry; the graph has their operands in place of them.
_IDENTITIES = frozenset(
    """
    convert_element_type copy copy_p device_put layout_constraint mesh_cast name
    optimization_barrier pvary reduce_precision reshard sharding_constraint
    """.split()  # noqa: SIM905
)
_OTHER_NAMES = {
    "add_any": "add",
    "psum_invariant": "psum",
    "scatter_add": "scatter-add",
}
CONVOLUTION = "conv_general_dilated"
PRODUCTS = ("dot_general", CONVOLUTION, "ragged_dot_general")
# Operations that give every entry of their operand a place, and change none.
MOVES = frozenset(
    """
    broadcast_in_dim last real reshape rev scan_in scan_out squeeze stop_gradient
    transpose
    """.split()  # noqa: SIM905
)


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class Node:
    """One value of the program.

    Attributes:
      id: its position; operands of loops apart, a node follows its operands.
      op: the primitive that computes it, or "param", "input", "constant", "literal";
        in loops "carry" (the operands are the initial value and that of the next
        iteration), "scan_in" (one iteration's slice), "scan_out" and "last" (results).
      operands: the nodes that it is computed from.
      shape: its shape, inside of a loop that of one iteration.
      params: parameters of the primitive.
      source: where the user's code computes it, and calls what computes it.
      runs: how often the surrounding loops run it.
      value: the number that all its entries are, if that is known.
      array: its entries, if they are known and differ; in a loop, or where rows are
        chosen by an index that is not known, those of all rows.
      param: index of the parameter, for op "param".
      data: whether it depends on the model's inputs.
      weight: whether it depends on parameters, but not on inputs.
      loop: the innermost loop around it; 0 for none.
      joint: the axis along which its operands are joined segments; None for others.
      at: the place of the equation that computes it: its index in the jaxpr, after
        those of the equations that hold this jaxpr. () for other nodes.
      backward: whether it belongs to a gradient that the forward pass computes.
    """

    id: int
    op: str
    operands: list["Node"]
    shape: tuple[int, ...]
    params: dict[str, Any]
    source: Any
    runs: int
    value: float | None = None
    array: Any = None
    param: int | None = None
    data: bool = False
    weight: bool = False
    loop: int = 0
    joint: int | None = None
    at: tuple[int, ...] = ()
    backward: bool = False

    @property
    def line(self) -> str:
        """File and line of the user's code, e.g. "model.py:31"; "" if unknown."""
        return self.spot[0]

    @property
    def spot(self) -> Spot:
        """Its line, and the lines and columns of its expression."""
        spots = map(spot_of, self.source)
        return next((spot for spot in spots if spot[0]), _NOWHERE)


def origin(node: Node) -> Node:
    """What a value was before it was moved, e.g. broadcast or reshaped."""
    while node.op in MOVES:
        node = node.operands[0]
    return node


def averaged(node: Node) -> Node | None:
    """The sum that a value divides by the number of its terms; None for others."""
    total = origin(node.operands[0]) if node.op == "mul" else node
    if total.op != "reduce_sum" or total is node:
        return None
    number = math.prod(total.operands[0].shape[a] for a in total.params["axes"])
    factor = node.operands[1].value or 0.0
    return total if math.isclose(number * factor, 1, rel_tol=1e-4) else None


def is_scaled(node: Node) -> bool:
    """Whether a node is a value, which is not known, times a known number."""
    scaled = node.op == "mul" and node.value is None
    return scaled and node.operands[1].value is not None


def earlier(node: Node) -> list[Node]:
    """Operands, without the end of a loop's body."""
    return node.operands[:1] if node.op == "carry" else node.operands


def reach(
    starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]
) -> Iterator[Node]:
    """Nodes, and what follows them and so on, each once."""
    stack = list(starts)
    seen = {node.id for node in stack}
    while stack:
        node = stack.pop()
        yield node
        for after in following(node):
            if after.id not in seen:
                seen.add(after.id)
                stack.append(after)


# Files in these directories are never the user's own code.
_LIBRARIES = ("/jax/", "/flax/", "/equinox/", "/haiku/", "/optax/", "/haliax/")
_OURS = str(pathlib.Path(__file__).parent)


def spot_of(source: Any) -> Spot:
    """Where the innermost frame outside of JAX and the model libraries stands.

    Its file and line, and the columns of the expression; where Python was told to keep
    no columns, the number of the instruction. That number may change once Python has
    called a function a few times.
    """
    found: Spot = _NOWHERE
    trace = getattr(source, "traceback", None)
    if trace is None:
        return found
    codes, places = trace.raw_frames()
    for frame, code, place in zip(trace.frames, codes, places, strict=True):
        name = frame.file_name
        if "/jax/_src/" in name or name.startswith((_OURS, "<frozen")):
            continue
        users = "/site-packages/" not in name or not any(x in name for x in _LIBRARIES)
        if users or found is _NOWHERE:
            line = f"{name.rpartition('/')[2]}:{frame.line_num}"
            at = trace.code_addr2location(code, place)
            found = line, at if at[1] >= 0 else (place,)
        if users:
            break
    return found


class Program:
    """The graph of a forward pass.

    Args:
      function: takes a list of parameters, a list of other state, and the inputs.
      params: shapes and dtypes of the parameters.
      state: those of arrays that are neither parameters nor inputs.
      inputs: the arguments of the forward pass.

    Attributes:
      traced: the jaxpr, with its constants.
      nodes: all values.
      params: the nodes of the parameters, in the order of the argument.
      outputs: {place: result} of the forward pass, without gradients beside results;
        and values whose gradient is read, by negative places.
      maps: the loops that are read as a `vmap`, by their places in the jaxpr.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        params: Sequence[Any],
        state: Sequence[Any],
        inputs: tuple[Any, ...],
    ):
        self.traced = jax.make_jaxpr(function)(list(params), list(state), *inputs)
        self.counts = len(params), len(state)
        self._build()

    def _build(self) -> None:
        """Make the graph of the traced forward pass."""
        self.nodes: list[Node] = []
        # {loop: (iterations, surrounding loop, whether each gets its own data)}
        self.loops: dict[int, tuple[int, int, bool]] = {}
        self._carried: dict[int, list[Node]] = {}
        self._sliced: dict[int, list[Node]] = {}
        self._numbers: set[int] = set()  # carries that count iterations from zero
        self._computed: dict[tuple[Any, ...], Node] = {}
        # Sums of some rows of a value: (the value, the axis, the rows).
        self._rows: dict[int, tuple[Node, int, frozenset[int]]] = {}
        self._runs, self._loop = 1, 0
        self._mesh: dict[str, int] = {}  # the axes of devices, and their sizes
        self._at: tuple[int, ...] = ()
        self.maps: Maps = {}
        self._calls: tuple[Any, ...] = ()
        shapes = [v.aval.shape for v in self.traced.jaxpr.invars]
        n, m = self.counts
        self.params: list[Node] = []
        values = [self._param(i, shape) for i, shape in enumerate(shapes[:n])]
        others = [self._new("constant", [], shape) for shape in shapes[n : n + m]]
        self.inputs = [self._new("input", [], shape) for shape in shapes[n + m :]]
        arguments = [*values, *others, *self.inputs]
        outputs = self._inline(self.traced.jaxpr, self.traced.consts, arguments)
        self.outputs = dict(enumerate(outputs))
        self._leave_out_zeros()
        self._say_alike()
        self._flow()

    def _param(self, index: int, shape: tuple[int, ...]) -> Node:
        """The value of a parameter."""
        node = self._new("param", [], shape, param=len(self.params))
        self.params.append(node)
        return node

    def _new(
        self, op: str, operands: list[Node], shape: Sequence[int], **more: Any
    ) -> Node:
        params, source = more.pop("params", {}), more.pop("source", None)
        node = Node(
            len(self.nodes),
            op,
            operands,
            tuple(shape),
            params,
            source if isinstance(source, tuple) else (source, *self._calls),
            self._runs,
            loop=self._loop,
            at=self._at if "result" in params else (),
            **more,
        )
        self.nodes.append(node)
        return node

    def _emit(
        self,
        op: str,
        operands: list[Node],
        shape: Sequence[int],
        source: Any,
        params: dict[str, Any] | None = None,
    ) -> Node:
        """The result of an operation."""
        params = params or {}
        rows = self._some_rows(op, operands, params, tuple(shape))
        if op == "add" and rows and len(rows[2]) == rows[0].shape[rows[1]]:
            whole, axis, _ = rows  # as Python's sum over all rows
            return self._emit("reduce_sum", [whole], shape, source, {"axes": (axis,)})
        terms = (x.id if x.value is None else ("", x.value) for x in operands)
        key = op, *terms, tuple(shape), self._loop, str(params)
        # What is computed twice, e.g. a stream that each layer sums up anew, is one.
        if op not in _ONCE or key not in self._computed:
            known = _fields(_fold(op, operands, params, tuple(shape)))
            if "value" in known:  # a number, however it was computed
                op, operands = "literal", []
            self._computed[key] = self._new(
                op, operands, shape, params=params, source=source, **known
            )
        if rows:
            self._rows[self._computed[key].id] = rows
        return self._computed[key]

    def _some_rows(
        self, op: str, operands: list[Node], params: Any, shape: tuple[int, ...]
    ) -> tuple[Node, int, frozenset[int]] | None:
        """Which rows of a value are taken, or added up by an addition."""
        if op == "slice":
            (node,), starts = operands, params["start_indices"]
            if params["strides"] is not None:
                return None
            axis = next(a for a, n in enumerate(node.shape) if n != shape[a])
            before = self._rows.get(node.id) if node.op == "slice" else None
            whole, at, rows = before or (node, axis, frozenset([0]))
            if at != axis:
                return None
            first = min(rows) + starts[axis]
            return whole, axis, frozenset(range(first, first + shape[axis]))
        terms = [x for x in operands if x.value != 0]
        known = [self._rows[x.id] for x in terms if x.id in self._rows]
        mixed = not known or len(known) < len(terms)
        if op not in ("add", "squeeze", "reshape", "transpose") or mixed:
            return None
        whole, axis, _ = known[0]
        if op == "transpose":  # as of a slice under `vmap`
            rest = [a for a in params["permutation"] if a != axis]
            return known[0] if rest == sorted(rest) else None
        each = [row for *_, rows in known for row in rows]
        alike = all(x[:2] == (whole, axis) for x in known) and len({*each}) == len(each)
        is_row = shape == (*whole.shape[:axis], *whole.shape[axis + 1 :])
        return (whole, axis, frozenset(each)) if alike and is_row else None

    def _constant(self, value: Any) -> Node:
        return self._new("literal", [], np.shape(value), **_fields(_known(value)))

    def _inline(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Node]
    ) -> list[Node]:
        known: dict[Any, Node] = {}

        def read(atom: Any) -> Node:
            if isinstance(atom, core.Literal):
                return self._constant(atom.val)
            return known[atom]

        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = self._constant(value)
        known.update(zip(jaxpr.invars, arguments, strict=True))
        around = self._at
        for i, equation in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in equation.invars]
            self._at = (*around, i)
            results = self._equation(equation, operands)
            self._at = around
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, operands: list[Node]) -> list[Node]:
        name, params = equation.primitive.name, equation.params
        name = _OTHER_NAMES.get(name, name)
        if name in _IDENTITIES:
            return operands
        is_zero = name == "sub" and operands[1].value == 0
        if is_zero and operands[0].shape == equation.outvars[0].aval.shape:
            return operands[:1]  # nothing is added
        name, operands = self._respelled(name, operands)
        if name == "square":
            name, params = "integer_pow", {"y": 2}
        if name in ("broadcast_in_dim", "reshape", "squeeze", "transpose"):
            return [self._moved(name, params, operands[0], equation)]
        if name == "dot_general" and params["dimension_numbers"][0] == ((), ()):
            name, params = "mul", {}
            operands = self._side_by_side(equation, operands)
            name, operands = self._respelled(name, operands)
        if name == "dot_general" and (pairs := self._apart(equation, operands)):
            shape, source = equation.outvars[0].aval.shape, equation.source_info
            how = {**params, "result": 0}
            with self._within():
                terms = [self._emit(name, [*x], shape, source, how) for x in pairs]
                added = functools.reduce(
                    lambda x, y: self._emit("add", [x, y], shape, source), terms
                )
            return [added]
        share = _share(name, operands)
        if share is not None and share.op == "logistic":
            return share.operands[:1]  # the logit of a sigmoid
        if name == "stack":
            return [self._stacked(equation, operands)]
        if name == "concatenate":
            every = [*_flat(operands, params["dimension"])]
            # `jnp.pad` joins parts without entries.
            operands = [x for x in every if 0 not in x.shape] or every[:1]
            if len(operands) == 1:
                return operands
        if name == "dynamic_slice":
            row = self._row(equation, operands)
            if row is not None:
                return [row]
            name, params, operands = _static(name, params, operands)
        if name in ("slice", "split", "unstack"):
            parts = self._parts(name, params, operands[0], equation.source_info)
            if parts:
                return parts
        if name in ("scatter", "scatter-add", "dynamic_update_slice"):
            written = self._written(name, params, operands, equation.source_info)
            if written is not None:
                return [written]
        if name == "gather":
            rows = self._in_order(params, operands, equation)
            if rows is not None:
                return [rows]
        if name == "reduce_sum":
            total = self._sum_of_rows(operands[0], params["axes"], equation.source_info)
            if total is not None:
                return [total]
        if name == "scan":
            return self._scan(equation, operands)
        if name == "while":
            return self._while(equation, operands)
        if name == "cond":
            with self._called(equation):
                results = [
                    self._inline(branch.jaxpr, branch.consts, operands[1:])
                    for branch in params["branches"]
                ]
            return [
                self._emit(_JOINED, list(each), each[0].shape, equation.source_info)
                for each in zip(*results, strict=True)
            ]
        body = next((params[k] for k in _BODIES if k in params), None)
        inner = getattr(body, "jaxpr", body)
        if name == "shard_map":
            self._mesh |= params["mesh"].shape
        if inner is not None and len(inner.invars) == len(operands):
            with self._called(equation):
                return self._inline(inner, getattr(body, "consts", ()), operands)
        return [
            self._emit(
                name,
                operands,
                variable.aval.shape,
                equation.source_info,
                {**params, "result": i},
            )
            for i, variable in enumerate(equation.outvars)
        ]

    def _row(self, equation: Any, operands: list[Node]) -> Node | None:
        """One iteration's row of a value that has one of each, by its number."""
        whole, *indices = operands
        sizes, source = equation.params["slice_sizes"], equation.source_info
        cut = [a for a, n in enumerate(sizes) if n == 1 != whole.shape[a]]
        numbers = [a for a in cut if _unwrapped(indices[a]).id in self._numbers]
        if len(numbers) != 1 or whole.loop == self._loop:
            return None
        (axis,), length = numbers, self.loops[self._loop][0]
        if whole.shape[axis] != length:
            return None
        for a, (index, size) in enumerate(zip(indices, sizes, strict=True)):
            if a != axis and size != whole.shape[a]:
                if index.value is None:
                    return None
                start = min(max(int(index.value), 0), whole.shape[a] - size)
                whole = self._slice(whole, a, start, start + size, source)
        rest = [a for a in range(len(sizes)) if a != axis]
        with self._within():
            first = self._transposed(equation, whole, [axis, *rest])
        row = self._emit("scan_in", [first], first.shape[1:], source)
        self._sliced[self._loop].append(row)
        return self._emit("reshape", [row], sizes, source, {"result": 0})

    def _in_order(
        self, params: Any, operands: list[Node], equation: Any
    ) -> Node | None:
        """All rows of a value along an axis, in order; None for other look-ups."""
        node, places = operands
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        taken = [a for a, n in enumerate(node.shape) if sizes[a] != n]
        if places.array is None or len(taken) != 1 or len(places.shape) != 2:
            return None
        if origin(node).op == "param":
            return None  # a table, e.g. of positions
        (axis,) = taken
        start = [a == axis for a in numbers.start_index_map]
        rows = np.outer(np.arange(node.shape[axis]), start)
        if not np.array_equal(places.array, rows):
            return None
        shape = equation.outvars[0].aval.shape
        (at,) = (a for a in range(len(shape)) if a not in numbers.offset_dims)
        axes = [a for a in range(len(node.shape)) if a != axis]
        axes.insert(at - (at > axis and not numbers.collapsed_slice_dims), axis)
        order = tuple(axes)
        source = equation.source_info
        moved = self._emit(
            "transpose",
            [node],
            tuple(node.shape[a] for a in order),
            source,
            {"permutation": order},
        )
        return self._emit("reshape", [moved], shape, source, {"new_sizes": shape})

    def _respelled(self, name: str, operands: list[Node]) -> tuple[str, list[Node]]:
        """One of several ways to say the same, with a known number last."""
        if name not in ("add", "sub", "mul", "div", "max", "min"):
            return name, operands
        one, other = operands
        if name not in ("sub", "div") and one.value:  # not of a first sum
            one, other = operands = [other, one]
        if name == "mul" and other.value is not None and other.shape == one.shape:
            return name, [one, self._new("literal", [], (), value=other.value)]
        if name == "div" and other.value and math.isfinite(other.value):
            inverse = self._new("literal", [], (), value=1 / other.value)
            return "mul", [one, inverse]
        if name == "sub" and other.op == "neg":
            return "add", [one, other.operands[0]]
        for x, y in ((one, other), (other, one)):
            if name == "add" and y.op == "neg":
                return "sub", [x, y.operands[0]]
            if name == "mul" and y.op == "div" and y.operands[0].value == 1:
                return "div", [x, y.operands[1]]
        return name, operands

    def _parts(
        self, name: str, params: Any, node: Node, source: Any
    ) -> list[Node] | None:
        """Parts of a value along an axis after another; None for other slices."""
        if name == "split":
            ends = itertools.accumulate(map(int, params["sizes"]), initial=0)
            pairs = itertools.pairwise(ends)
            return [self._slice(node, params["axis"], *p, source) for p in pairs]
        if name == "unstack":
            axis = params["axis"]
            shape = [*node.shape[:axis], *node.shape[axis + 1 :]]
            rows = [
                self._slice(node, axis, i, i + 1, source)
                for i in range(node.shape[axis])
            ]
            gone = {"dimensions": (axis,)}
            return [self._emit("squeeze", [x], shape, source, gone) for x in rows]
        bounds = [*zip(params["start_indices"], params["limit_indices"], strict=True)]
        taken = [a for a, n in enumerate(node.shape) if bounds[a] != (0, n)]
        if any(x != 1 for x in params["strides"] or ()):
            return None
        for axis in taken:
            node = self._slice(node, axis, *bounds[axis], source)
        return [node]

    def _slice(self, node: Node, axis: int, start: int, stop: int, source: Any) -> Node:
        """Some entries along an axis; of joined values, the values that stand there."""
        if stop - start == node.shape[axis]:
            return node
        is_join = node.op == "concatenate" and node.params["dimension"] == axis
        if is_join and "repeats" not in node.params:
            edges = itertools.accumulate(
                (x.shape[axis] for x in node.operands), initial=0
            )
            at = [*edges]
            if start in at and stop in at and start < stop:
                parts = node.operands[at.index(start) : at.index(stop)]
                return self._concatenation(parts, axis, source)
        shape = (*node.shape[:axis], stop - start, *node.shape[axis + 1 :])
        starts, limits = [0] * len(shape), [*node.shape]
        starts[axis], limits[axis] = start, stop
        bounds = {"start_indices": (*starts,), "limit_indices": (*limits,)}
        return self._emit("slice", [node], shape, source, {**bounds, "strides": None})

    def _concatenation(self, parts: list[Node], axis: int, source: Any) -> Node:
        if len(parts) == 1:
            return parts[0]
        shape = [*parts[0].shape]
        shape[axis] = sum(x.shape[axis] for x in parts)
        return self._emit("concatenate", parts, shape, source, {"dimension": axis})

    def _written(
        self, name: str, params: Any, operands: list[Node], source: Any
    ) -> Node | None:
        """What stands beside a part that is replaced, joined with what replaces it."""
        whole = operands[0]
        if name != "dynamic_update_slice":
            numbers, at = params["dimension_numbers"], operands[1]
            part, axes = operands[2], numbers.scatter_dims_to_operand_dims
            places = np.full(at.shape, at.value) if at.array is None else at.array
            if numbers.inserted_window_dims or places.shape != (len(axes),):
                return None
            found = dict(zip(axes, places, strict=True))
        else:
            part = operands[1]
            found = {a: x.value for a, x in enumerate(operands[2:])}
        cut = [a for a, n in enumerate(whole.shape) if part.shape[a] != n]
        if len(part.shape) != len(whole.shape) or len(cut) != 1:
            return None
        (axis,), first = cut, found.get(cut[0])
        if first is None:
            return None
        size, start = whole.shape[axis], int(first)
        stop = start + part.shape[axis]
        if not 0 <= start < stop <= size:
            return None
        if name == "scatter-add":
            old = self._slice(whole, axis, start, stop, source)
            is_join = whole.op == "concatenate" and old in whole.operands
            parts = [x for x in whole.operands if x is not old] if is_join else [whole]
            least = min(x.id for x in parts)
            read = [*reach([part], lambda x: [y for y in x.operands if y.id >= least])]
            slices = [x for x in read if whole in x.operands]
            others = parts if is_join else slices
            apart = all(x.op == "slice" and x is not old for x in slices)
            if not apart or not any(x in read for x in others):
                return None  # rows of a stream, to which no other rows are added
            part = self._emit("add", [old, part], part.shape, source)
        before = [self._slice(whole, axis, 0, start, source)] if start else []
        after = [self._slice(whole, axis, stop, size, source)] if stop < size else []
        return self._concatenation([*before, part, *after], axis, source)

    def _sum_of_rows(self, node: Node, axes: Sequence[int], source: Any) -> Node | None:
        """The sum of stacked values as additions; None for another sum."""
        if node.op != "concatenate":
            return None
        axis: int = node.params["dimension"]
        if axis not in axes or len(node.operands) != node.shape[axis]:
            return None
        shape = [*node.shape[:axis], *node.shape[axis + 1 :]]
        total: Node | None = None
        for row in node.operands:
            one = row
            while one.op in ("reshape", "broadcast_in_dim") and one.shape != (*shape,):
                one = one.operands[0]
            if one.shape != (*shape,):
                one = self._emit("reshape", [row], shape, source)
            total = (
                one if total is None else self._emit("add", [total, one], shape, source)
            )
        rest = tuple(a - (a > axis) for a in axes if a != axis)
        if total is None or not rest:
            return total
        shape = [n for a, n in enumerate(shape) if a not in rest]
        return self._emit("reduce_sum", [total], shape, source, {"axes": rest})

    def _moved(self, name: str, params: Any, node: Node, equation: Any) -> Node:
        """A value in another shape, by one operation after the other as by one."""
        shape, source = equation.outvars[0].aval.shape, equation.source_info
        if is_scaled(node) and node.operands[0].shape == node.shape:
            # Means are divided before they are repeated, or after: one value.
            with self._within():
                moved = self._moved(name, params, node.operands[0], equation)
            operands = [moved, node.operands[1]]
            return self._emit("mul", operands, shape, node.source, {"result": 0})
        if name == "transpose":
            return self._transposed(equation, node, params["permutation"])
        if name == "reshape":
            if params["dimensions"] is not None:
                with self._within():
                    node = self._transposed(equation, node, params["dimensions"])
            while node.op == "reshape":
                (node,) = node.operands
            if node.shape == shape:
                return node
        return self._emit(name, [node], shape, source, {**params, "result": 0})

    def _transposed(self, equation: Any, node: Node, order: Sequence[int]) -> Node:
        """A value with its axes in another order."""
        if node.op == "transpose":
            order = [node.params["permutation"][a] for a in order]
            (node,) = node.operands
        if [*order] == sorted(order):
            return node
        shape = [node.shape[a] for a in order]
        how = {"permutation": (*order,), "result": 0}
        return self._emit("transpose", [node], shape, equation.source_info, how)

    def _apart(self, equation: Any, operands: list[Node]) -> list[tuple[Node, Node]]:
        """The pairs of values whose products add up to that of two joined values.

        The two are not parts of one value each, as of queries that positions turn.
        """
        axes = [*itertools.chain(*equation.params["dimension_numbers"][0])]
        if len(axes) != 2:
            return []
        each = [*map(self._joined, operands, axes, [equation] * 2)]
        sizes = [[x.shape[a] for x in y] for y, a in zip(each, axes, strict=True)]
        whole = all(set.intersection(*map(_wholes, y)) for y in each if y)
        # Parts of parameters are segments, which are joined to be multiplied.
        stored = any(origin(x).op == "param" for y in each for x in y)
        if len(each[0]) < 2 or sizes[0] != sizes[1] or whole or stored:
            return []
        return [*zip(*each, strict=True)]

    def _joined(self, node: Node, axis: int, equation: Any) -> list[Node]:
        """The values that the user joins along an axis; none for another value."""
        own = node.op == "concatenate" and "result" in node.params
        if own and node.params["dimension"] == axis:
            return node.operands
        order = node.params.get("permutation")
        if node.op == "transpose" and order:
            parts = self._joined(node.operands[0], order[axis], equation)
            return [self._transposed(equation, x, order) for x in parts]
        if is_scaled(node) and node.operands[0].shape == node.shape:
            parts, by = self._joined(node.operands[0], axis, equation), node.operands[1]
            source = equation.source_info
            return [self._emit("mul", [x, by], x.shape, source) for x in parts]
        return []

    def _side_by_side(self, equation: Any, operands: list[Node]) -> list[Node]:
        """The operands of a product that sums over nothing, in its result's shape."""
        batches = equation.params["dimension_numbers"][1]
        shape, free = equation.outvars[0].aval.shape, itertools.count(len(batches[0]))
        spread = []
        for x, batch in zip(operands, batches, strict=True):
            kept = [
                batch.index(a) if a in batch else next(free)
                for a in range(len(x.shape))
            ]
            how = {"shape": shape, "broadcast_dimensions": (*kept,), "result": 0}
            source = equation.source_info
            spread.append(self._emit("broadcast_in_dim", [x], shape, source, how))
        return spread

    def _stacked(self, equation: Any, operands: list[Node]) -> Node:
        """`jnp.stack` as a concatenation."""
        axis, source = equation.params["axis"], equation.source_info
        shape = list(operands[0].shape)
        shape.insert(axis, 1)
        rows = [self._emit("reshape", [x], tuple(shape), source) for x in operands]
        shape[axis] = len(rows)
        return self._emit("concatenate", rows, shape, source, {"dimension": axis})

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """Emit values that are within an equation, and not its result."""
        at, self._at = self._at, ()
        yield
        self._at = at

    @contextlib.contextmanager
    def _called(self, equation: Any) -> Iterator[None]:
        """Note the equation that holds the jaxpr which is being inlined."""
        calls, self._calls = self._calls, (equation.source_info, *self._calls)
        yield
        self._calls = calls

    @contextlib.contextmanager
    def _loop_body(self, runs: int) -> Iterator[None]:
        """Count the iterations of the loop whose body is being inlined."""
        outside = self._runs, self._loop
        number = len(self.loops) + 1
        self.loops[number] = (runs, self._loop, False)
        self._runs, self._loop = self._runs * runs, number
        yield
        self._runs, self._loop = outside

    def _scan(self, equation: Any, operands: list[Node]) -> list[Node]:
        mapped = self._mapped(equation, operands)
        if mapped is not None:
            return mapped
        params, source = equation.params, equation.source_info
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        starts = [[x] for x in operands[first:last]]
        axes: list[int] = [0] * len(starts)
        body = (equation, params["length"], params["jaxpr"], operands[:first])
        results = self._body(*body, starts, axes, operands[last:])
        shares: set[int] = set()  # carried as their logits
        for i, (carry, after) in enumerate(results[: len(starts)]):
            axis = after.params.get("dimension")
            if axis is not None and self._is_taken_apart(carry, after, axis):
                sizes = [part.shape[axis] for part in after.operands]
                edges = itertools.accumulate(sizes, initial=0)
                axes[i], whole = axis, operands[first + i]
                starts[i] = [
                    self._slice(whole, axis, *pair, source)
                    for pair in itertools.pairwise(edges)
                ]
            each = (_share(x.op, x.operands) for x in self.nodes[carry.id :])
            if _unclipped(after).op == "logistic" and carry in each:
                shares.add(i)
                starts[i] = [self._logit(starts[i][0], source)]
        if shares or any(len(x) > 1 for x in starts):
            results = self._body(*body, starts, axes, operands[last:], shares)
        found = []
        for parts, axis, (_, after) in zip(starts, axes, results, strict=False):
            ends = after.operands if len(parts) > 1 else [after]
            lasts = [self._emit("last", [x], x.shape, source) for x in ends]
            found.append(self._concatenation(lasts, axis, source))
        rest = len(starts)
        return found + [
            self._emit("scan_out", [x], variable.aval.shape, source)
            for (x, _), variable in zip(
                results[rest:], equation.outvars[rest:], strict=True
            )
        ]

    def _mapped(self, equation: Any, operands: list[Node]) -> list[Node] | None:
        """The results of a loop that reads nothing of what it made before: a `vmap`.

        It may count its iterations, and add up what they make. None for other loops.
        """
        params, source = equation.params, equation.source_info
        body, length = _opened(params["jaxpr"].jaxpr), params["length"]
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        made = {id(e.outvars[0]): e for e in body.eqns if e.primitive.name == "add"}
        uses = Counter(id(x) for e in body.eqns for x in e.invars)
        uses.update(map(id, body.outvars))
        axes = [None if k < last else 0 for k in range(len(operands))]
        arguments, ends, terms = [*operands], list[Node | None](), list[Any]()
        numbers: dict[int, np.ndarray] = {}
        for k in range(first, last):
            carry, after, start = body.invars[k], body.outvars[k - first], operands[k]
            add = made.get(id(after))
            by = [x for x in add.invars if x is not carry] if add else []
            if carry is after:
                ends.append(start)
            elif len(by) != 1:
                return None
            elif start.shape and uses[id(carry)] == uses[id(after)] == 1:
                terms.append(by[0])
                ends.append(None)
            elif isinstance(by[0], core.Literal) and start.value is not None:
                every = start.value + by[0].val * np.arange(length + 1)
                numbers[k] = every[:-1].astype(carry.aval.dtype)
                arguments[k], axes[k] = self._constant(numbers[k]), 0
                ends.append(self._constant(every[-1]))
            else:
                return None
        if 0 not in axes or not length:
            return None
        jaxpr = body.replace(outvars=[*terms, *body.outvars[last - first :]])
        run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, params["jaxpr"].consts))
        shapes = [
            numbers.get(k, jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype))
            for k, x in enumerate(equation.invars)
        ]
        try:
            trace = jax.make_jaxpr(jax.vmap(run, axes), axis_env=[*self._mesh.items()])
            mapped = trace(*shapes)
        except (NotImplementedError, ValueError):  # of operations without a vmap
            return None
        self.maps[self._at] = mapped, numbers
        with self._called(equation):
            results = self._inline(mapped.jaxpr, mapped.consts, arguments)
        each = iter(results)
        for k, (end, start) in enumerate(zip(ends, operands[first:last], strict=True)):
            if end is None:
                axis = {"axes": (0,)}
                end = self._emit("reduce_sum", [next(each)], start.shape, source, axis)
                if start.value != 0:
                    end = self._emit("add", [start, end], start.shape, source)
                ends[k] = end
        return [*(x for x in ends if x is not None), *each]

    def _logit(self, node: Node, source: Any) -> Node:
        """The logit of a value."""
        if _unclipped(node).op == "logistic":
            return _unclipped(node).operands[0]
        rest = self._emit("sub", [self._constant(1.0), node], node.shape, source)
        odds = self._emit("div", [node, rest], node.shape, source)
        return self._emit("log", [odds], node.shape, source)

    def _is_taken_apart(self, carry: Node, after: Node, axis: int) -> bool:
        """Whether a loop splits its carry where the iteration before joined it."""
        edges = {0}
        for part in after.operands:
            edges.add(max(edges) + part.shape[axis])
        users = [x for x in self.nodes[carry.id :] if carry in x.operands]
        return bool(users) and all(
            x.op == "slice"
            and x.params["start_indices"][axis] in edges
            and x.params["limit_indices"][axis] in edges
            and x.shape[axis] < carry.shape[axis]
            for x in users
        )

    def _body(
        self,
        loop: Any,
        runs: int,
        body: Any,
        consts: Sequence[Node],
        starts: list[list[Node]],
        axes: list[int],
        stacked: Sequence[Node] = (),
        shares: Collection[int] = (),
    ) -> list[tuple[Node, Node]]:
        """The body of a loop: each carry (or a result) and what it is next.

        `starts` are the parts of each carry before the loop, joined along `axes`;
        `consts` are the same in each iteration, and of `stacked` each gets a slice. The
        carries with the numbers `shares` start as logits, which each iteration updates.
        """
        source = loop.source_info
        with self._called(loop), self._loop_body(runs):
            parts = [
                [self._new("carry", [x], x.shape, source=source) for x in each]
                for each in starts
            ]
            carried = [
                self._concatenation(each, axis, source)
                for each, axis in zip(parts, axes, strict=True)
            ]
            for i in shares:
                carried[i] = self._emit("logistic", parts[i], parts[i][0].shape, source)
            slices = [
                self._emit("scan_in", [node], node.shape[1:], source)
                for node in stacked
            ]
            self._carried[self._loop] = [x for each in parts for x in each]
            self._sliced[self._loop] = slices
            pairs = zip(body.jaxpr.invars[len(consts) :], parts, strict=False)
            for at, (carry, each) in enumerate(pairs):
                from_zero = each[0].operands[0].value == 0
                if from_zero and _is_counted(body.jaxpr, carry, at):
                    self._numbers.add(each[0].id)
            results = self._inline(
                body.jaxpr, body.consts, [*consts, *carried, *slices]
            )
        for i, (each, after) in enumerate(zip(parts, results, strict=False)):
            after = _unclipped(after).operands[0] if i in shares else after
            ends = after.operands if len(each) > 1 else [after]
            for carry, end in zip(each, ends, strict=True):
                carry.operands.append(end)
        rest = results[len(parts) :]
        return [*zip(carried, results, strict=False), *((x, x) for x in rest)]

    def _while(self, equation: Any, operands: list[Node]) -> list[Node]:
        params = equation.params
        before, consts = params["cond_nconsts"], params["body_nconsts"]
        starts = [[x] for x in operands[before + consts :]]
        results = self._body(
            equation,
            _iterations(params, operands),
            params["body_jaxpr"],
            operands[before : before + consts],
            starts,
            [0] * len(starts),
        )
        return [self._new("last", [end], end.shape) for _, end in results]

    def _leave_out_zeros(self) -> None:
        """Read 0 + x as x where x is a stream, e.g. in Python's sum([x, f(x)]).

        Then it comes from such a sum without a kernel. What starts a sum over layers
        does not, and shows that their results are no stream.
        """
        starts: dict[int, Node] = {}
        for node in (x for x in self.nodes if x.op == "add"):
            for x, y in (node.operands, node.operands[::-1]):
                if y.value == 0 and x.shape == node.shape:
                    starts[node.id] = x
        again = {
            self.nodes[i].spot
            for i, start in starts.items()
            for x in reach([start], lambda x: () if x.op in PRODUCTS else x.operands)
            if x.op == "add" and x.id not in starts and x.spot == self.nodes[i].spot
        }
        self._replace({i: x for i, x in starts.items() if self.nodes[i].spot in again})

    def _say_alike(self) -> None:
        """Say in one way what depends on all uses of a value.

        A product has its axes in the order in which all its uses have them. So the
        kernel is the second factor where Equinox's layers, which multiply a vector by a
        kernel, are under `vmap`. And a stream (c x + y) / d is c / d x + y / d.
        """
        users: dict[int, list[Node]] = {}
        for node in self.nodes:
            for x in node.operands:
                users.setdefault(x.id, []).append(node)
        shown, gone = {id(x) for x in self.outputs.values()}, dict[int, Node]()

        def scaled(node: Node) -> Node | None:
            """The product of a sum of scaled values, by a number, if it is all use."""
            (one, *more) = users.get(node.id, [node])
            is_sum = node.op == "add" and any(map(is_scaled, node.operands))
            same = all(x.shape == node.shape for x in (one, *node.operands))
            return one if is_sum and same and not more and is_scaled(one) else None

        products = [
            (x, y) for x in self.nodes if (y := scaled(x)) and id(x) not in shown
        ]
        read = {id(y): users.get(y.id, []) for _, y in products}
        streams = {
            x.spot
            for x, y in products
            if len(read[id(y)]) > 1 or any(z.op == "carry" for z in read[id(y)])
        }
        for node, product in products:
            if node.spot in streams:
                node.operands = [self._times(x, product, node) for x in node.operands]
                gone[product.id] = node
        for node in self.nodes:
            after = users.get(node.id, [])
            if node.op != "dot_general" or not after or id(node) in shown:
                continue
            sums, batches = node.params["dimension_numbers"]
            n, rank = len(batches[0]), len(node.shape)
            first = len(node.operands[0].shape) - len(sums[0])  # of the second factor
            order = (*range(n), *range(first, rank), *range(n, first))
            orders = {x.params.get("permutation") for x in after}
            if orders == {order} and all(x.op == "transpose" for x in after):
                swapped = {"dimension_numbers": (sums[::-1], batches[::-1])}
                node.operands, node.params = node.operands[::-1], node.params | swapped
                node.shape, node.at = after[0].shape, after[0].at
                gone |= {x.id: node for x in after}
        self._replace(gone)

    def _times(self, node: Node, product: Node, before: Node) -> Node:
        """A value times the number of a product."""
        number = self._new("literal", [], (), value=product.operands[1].value)
        more = {"params": product.params, "source": product.source}
        found = self._new("mul", [node, number], node.shape, **more)
        found.loop, found.runs, found.at = product.loop, product.runs, product.at
        del self.nodes[-2:]
        at = self.nodes.index(before)
        self.nodes[at:at] = [number, found]
        return found

    def _replace(self, gone: dict[int, Node]) -> None:
        """Read values, by their ids, as others."""

        def kept(node: Node) -> Node:
            while node.id in gone:
                node = gone[node.id]
            return node

        for node in self.nodes if gone else ():
            node.operands = list(map(kept, node.operands))
        self.outputs = {i: kept(x) for i, x in self.outputs.items()}

    def _leave_out_unused(self) -> None:
        """Keep what results depend on, and parameters that are used nowhere else.

        Also the last addition to a stream of which only another result is read.
        """
        used = {id(x) for x in self.outputs.values()}
        self._add_sources(used)
        sums = [x for x in self.nodes if x.op in ("add", "sub") and x.shape]
        sums = [x for x in sums if not x.backward]
        dead = [node for node in sums if id(node) not in used]
        spots = {x.spot for x in sums if id(x) in used and dead}
        used |= {id(x) for x in dead if x.spot in spots}
        self._add_sources(used)
        met: set[int] = set()
        for node in reversed(self.nodes):
            is_moved = node.op in MOVES and origin(node).op == "param"
            if id(node) in (met if is_moved else used):
                met |= {id(x) for x in node.operands}
        alone = {id(x) for x in self.params} - met
        for node in self.nodes:
            if any(id(x) in alone for x in node.operands):
                alone.add(id(node))
        used |= alone | {id(x) for x in (*self.params, *self.inputs)}
        self._add_sources(used)
        self.nodes = [node for node in self.nodes if id(node) in used]
        for i, node in enumerate(self.nodes):
            node.id = i

    def _add_sources(self, used: set[int]) -> None:
        """Add all that some nodes are computed from."""
        before = -1
        while len(used) > before:  # once more for the end of a loop's body
            before = len(used)
            for node in reversed(self.nodes):
                if id(node) in used:
                    used |= {id(x) for x in node.operands}

    def _flow(self) -> None:
        """Find which nodes depend on inputs, on parameters only, and on gradients."""
        for node in self.nodes:
            node.backward = _is_in(node, "transpose(")
        # Gradients beside other results, and what an optimizer makes of them.
        if any(node.backward for node in self.nodes):
            shown = {i: x for i, x in self.outputs.items() if not _is_gradient(x)}
            self.outputs = shown or self.outputs
            # Also the values of which only gradients are read, e.g. an energy.
            read = {id(x) for node in self.nodes for x in node.operands}
            forward = [x for x in self.nodes if not x.backward]
            ends = [x for x in forward if x.value is None and id(x) not in read]
            ends = [x for x in ends if _is_in(x, "jvp(")]
            least = min((len(x.shape) for x in ends), default=0)  # no leftovers
            ends = [x for x in ends if len(x.shape) == least]
            others = {(x.op, x.spot) for x in forward if id(x) in read and ends}
            ends = [x for x in ends if (x.op, x.spot) not in others]
            self.outputs |= {-1 - i: x for i, x in enumerate(ends)}
        self._leave_out_unused()
        depends = [False] * len(self.nodes)
        changed = True
        while changed:  # a loop's carry depends on the end of its body
            changed = False
            for node in self.nodes:
                data = node.op == "input" or any(x.data for x in node.operands)
                on = node.op == "param" or any(depends[x.id] for x in node.operands)
                if data != node.data or on != depends[node.id]:
                    node.data, depends[node.id], changed = data, on, True
        for node in self.nodes:
            node.weight = depends[node.id] and not node.data
        for loop, (length, parent, _) in self.loops.items():
            slices = self._sliced.get(loop, ())
            over_data = any(y.data for x in slices for y in (x, *x.operands))
            # Layers may have data of their own, e.g. keys for dropout, or a cache.
            if any(x.weight and sum(n > 1 for n in x.shape) > 1 for x in slices):
                over_data = False
            self.loops[loop] = length, parent, over_data

    def leads(self, start: Node, end: Node) -> bool:
        """Whether `end` is computed from `start`."""
        if start is end or (end.data and self._sources[end.id] >> start.id & 1):
            return True
        has_steps = any(over_data for _, _, over_data in self.loops.values())
        return has_steps and bool(self.between(start, end))

    @functools.cached_property
    def _sources(self) -> list[int]:
        """The data that each node is computed from, as bits at the places of their ids.

        Also the operands that are no data.
        """
        found: list[int] = []
        for node in self.nodes:
            bits = 0
            for x in earlier(node):
                bits |= 1 << x.id | (found[x.id] if x.data else 0)
            found.append(bits)
        return found

    def between(self, start: Node, end: Node) -> frozenset[int]:
        """Ids of the nodes that lead from `start` to `end`, with `end`."""
        if end.id <= start.id or not end.data:
            return frozenset()
        reached, around = {start.id}, {0, *self.around(start.loop)}

        def is_state(node: Node) -> bool:
            """Whether it is also computed in the step before, within the branch."""
            inner = node.op == "carry" and node.loop not in around
            return inner and self.is_over_data(node.loop)

        def before(node: Node) -> list[Node]:
            return node.operands if is_state(node) else earlier(node)

        sources = reach(
            [end], lambda x: [y for y in before(x) if y.data and y.id > start.id]
        )
        nodes, size = sorted(sources, key=lambda node: node.id), 0
        while size < len(reached):
            size = len(reached)
            for node in nodes:
                if any(x.id in reached for x in before(node)):
                    reached.add(node.id)
            if not any(map(is_state, nodes)):
                break
        reached.discard(start.id)
        return frozenset(reached) if end.id in reached else frozenset()

    def around(self, loop: int) -> Iterator[int]:
        """A loop, and those around it."""
        while loop:
            yield loop
            loop = self.loops[loop][1]

    def is_over_data(self, loop: int) -> bool:
        """Whether each iteration of a loop gets its own data, e.g. a row or a step."""
        return bool(loop) and self.loops[loop][2]

    def is_counted(self, node: Node) -> bool:
        """Whether a loop counts a value, or takes it from an input of the model."""
        return any(
            (at.op == "scan_in" and at.operands[0].op == "input")
            or (at.op in ("scan_in", "carry") and not at.data)
            for at in reach([node], lambda x: () if x.op == "carry" else x.operands)
        )

    def carries_through(self, node: Node, loop: int) -> bool:
        """Whether a node of a loop's body is computed from the loop's carry."""
        starts = {x.id for x in self._carried.get(loop, ())}
        least = min(starts, default=0)
        sources = reach([node], lambda x: [y for y in earlier(x) if y.id >= least])
        return any(x.id in starts for x in sources)


def _is_counted(body: Any, carry: Any, at: int) -> bool:
    """Whether a loop's body adds one to a carry, which is its result at a place."""
    return any(
        e.primitive.name == "add"
        and e.outvars[0] is body.outvars[at]
        and any(x is carry for x in e.invars)
        and any(isinstance(x, core.Literal) and x.val == 1 for x in e.invars)
        for e in body.eqns
    )


def _unwrapped(node: Node) -> Node:
    """The index i that `jnp` writes as where(i < 0, i + n, i)."""
    if node.op != "select_n" or node.operands[0].op != "lt":
        return node
    is_negative = node.operands[0].operands[1].value == 0
    return node.operands[1] if is_negative else node


def _opened(body: Any) -> Any:
    """What a loop's body calls, if that is one function, e.g. of `jax.checkpoint`."""
    call, *others = body.eqns or [None]
    if others or not call or call.primitive.name not in ("checkpoint", "jit", "remat2"):
        return body
    if any(isinstance(x, core.Literal) for x in call.invars):
        return body
    inner = getattr(call.params["jaxpr"], "jaxpr", call.params["jaxpr"])
    own = dict(zip(call.invars, inner.invars, strict=True))
    own |= zip(call.outvars, inner.outvars, strict=True)
    if inner.constvars or len(own) < len(inner.invars) + len(inner.outvars):
        return body
    into, out = ([own.get(x, x) for x in of] for of in (body.invars, body.outvars))
    return _opened(inner.replace(invars=into, outvars=out))


def _wholes(node: Node) -> set[int]:
    """The ids of the values whose parts a value is computed from, place by place."""
    found = set()
    for part in reach([node], _in_place):
        while part.op in ("slice", *MOVES):
            (part,) = part.operands
            found.add(part.id)
    return found


def _in_place(node: Node) -> list[Node]:
    """What a value is computed from, up to products and parts of values."""
    return [] if node.op in ("slice", *PRODUCTS) else node.operands


def _flat(operands: list[Node], axis: int) -> Iterator[Node]:
    """Values that are joined; `jnp` joins more than 16 of them in two steps."""
    for node in operands:
        join = node.op == "concatenate" and node.params["dimension"] == axis
        yield from node.operands if join and "repeats" not in node.params else [node]


def _is_in(node: Node, transform: str) -> bool:
    """Whether it belongs to what JAX's derivatives made, by the name that they give."""
    return any(transform in str(getattr(x, "name_stack", "")) for x in node.source)


def _is_gradient(node: Node) -> bool:
    """Whether a result is computed from gradients, and not from inputs beside them."""
    sources = list(reach([node], lambda x: () if x.backward else earlier(x)))
    known = any(x.backward for x in sources)
    return known and not any(x.op == "input" for x in sources)


def _unclipped(node: Node) -> Node:
    """A value before it was clipped."""
    while node.op in ("max", "min", "clamp", "stop_gradient"):
        node = next((x for x in node.operands if x.value is None), node.operands[0])
    return node


def _share(name: str, operands: list[Node]) -> Node | None:
    """The value s, perhaps clipped, of log(s / (1 - s)) or log(s) - log(1 - s)."""
    if name == "log" and operands[0].op == "div":
        above, below = operands[0].operands
    elif name == "sub" and [x.op for x in operands] in (["log"] * 2, ["log", "log1p"]):
        (above,), (below,) = (x.operands for x in operands)
    else:
        return None
    above, below = _unclipped(above), _unclipped(below)
    is_rest = (
        below.op == "neg"
        if operands[-1].op == "log1p"
        else (below.op == "sub" and below.operands[0].value == 1)
    )
    return above if is_rest and _unclipped(below.operands[-1]) is above else None


def _known(value: Any) -> Any:
    """The entries of a constant as an array, or None if they are not known."""
    if isinstance(value, jax.core.Tracer) or not 0 < np.size(value) < 10**6:
        return None
    dtype = getattr(value, "dtype", np.asarray(0.0).dtype)
    known = isinstance(value, bool | int | float | complex | np.ndarray | np.generic)
    if not known and not getattr(value, "is_fully_addressable", False):
        return None
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    is_number = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    if not is_number:
        return None
    entries = np.asarray(value)
    sizes = np.abs(entries) if np.iscomplexobj(entries) else entries
    return sizes.astype(np.float64)


def _fields(known: Any) -> dict[str, Any]:
    """The fields `value` and `array` of a node with known entries."""
    if known is None or not np.size(known):
        return {}
    first = float(np.reshape(known, -1)[0])
    if np.array_equal(known, np.full(np.shape(known), first), equal_nan=True):
        return {"value": first}
    return {"array": known} if np.size(known) <= _FEW else {}


def _fold(name: str, operands: list[Node], params: Any, shape: tuple[int, ...]) -> Any:
    """The entries of a function of constants; None if they are not known."""
    if name == "iota":
        size = math.prod(shape)
        axis = params["dimension"]
        return np.indices(shape)[axis].astype(float) if size <= _FEW else None
    known = [x.array if x.value is None else x.value for x in operands]
    if name == "scan_in":
        return known[0]
    if name in ("slice", "dynamic_slice", "gather") and known and known[0] is not None:
        return _part(name, operands[0], known[0], params)
    if name == "mul" and any(x.value == 0 for x in operands):
        sources = reach(operands, lambda node: node.operands)
        if not any(x.op in ("input", "param", "carry") for x in sources):
            return 0.0  # random numbers, that are switched off
    if not known or any(x is None for x in known):
        return None
    if name in MOVES:
        return _moved(name, operands[0], known[0], params, shape)
    arrays = [(x, k) for x, k in zip(operands, known, strict=True) if np.ndim(k)]
    # Of some rows of unknown places only, pairs of entries are not known.
    exact = all(np.shape(k) == x.shape for x, k in arrays)
    if not exact and (len(arrays) > 1 or name not in _ALONE):
        return None
    with np.errstate(all="ignore"):
        if name == "integer_pow":
            return np.power(known[0], float(params["y"]))
        if name == "reduce_prod" and math.prod(operands[0].shape) <= _FEW:
            entries = np.broadcast_to(known[0], operands[0].shape)
            return np.prod(entries, params["axes"])
        if name in ("and", "or") and all(np.isin(k, (0, 1)).all() for k in known):
            name = "min" if name == "and" else "max"
        if name == "concatenate":
            each = zip(known, (x.shape for x in operands), strict=True)
            parts = [np.broadcast_to(*pair) for pair in each]
            return np.concatenate(parts, params["dimension"])
        if name == "select_n" and len(known) == 3:
            return np.where(known[0], known[2], known[1])
        if name in _FOLD:
            return np.asarray(_FOLD[name](*known), np.float64)
    return None


def _moved(
    name: str, node: Node, known: Any, params: Any, shape: tuple[int, ...]
) -> Any:
    """Known entries at other places; without their places if there are too many."""
    if not np.ndim(known) or np.shape(known) != node.shape or math.prod(shape) > _FEW:
        return known
    if name == "broadcast_in_dim":
        axes = params["broadcast_dimensions"]
        at = [1] * len(shape)
        for axis, size in zip(axes, node.shape, strict=True):
            at[axis] = size
        return np.broadcast_to(np.reshape(known, at), shape)
    if name == "transpose":
        return np.transpose(known, params["permutation"])
    if name == "rev":
        return np.flip(known, params["dimensions"])
    return np.reshape(known, shape)


def _part(name: str, node: Node, known: Any, params: Any) -> Any:
    if name != "slice" or np.shape(known) != node.shape:
        return known
    strides = params.get("strides") or (1,) * len(node.shape)
    starts, limits = params["start_indices"], params["limit_indices"]
    return known[tuple(map(slice, starts, limits, strides))]


def _static(
    name: str, params: dict[str, Any], operands: list[Node]
) -> tuple[str, dict[str, Any], list[Node]]:
    """A dynamic slice as a slice, if it is known where it begins."""
    whole, *indices = operands
    starts, limits = [], []
    for at, size, n in zip(indices, params["slice_sizes"], whole.shape, strict=True):
        if size != n and at.value is None:
            return name, params, operands
        start = min(max(int(at.value or 0), 0), n - size)
        starts.append(start)
        limits.append(start + size)
    bounds = {"start_indices": (*starts,), "limit_indices": (*limits,)}
    return "slice", {**bounds, "strides": None}, [whole]


def _iterations(params: Any, operands: list[Node]) -> int:
    """How often a `while_loop` runs that counts in steps of one; 1 if not known."""
    test, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    before, consts = params["cond_nconsts"], params["body_nconsts"]
    if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt":
        return 1
    counter, limit = test.eqns[0].invars
    given = dict(zip(test.invars[:before], operands, strict=False))
    end = limit.val if isinstance(limit, core.Literal) else _value(given.get(limit))
    if end is None or counter not in test.invars[before:]:
        return 1
    at = test.invars.index(counter) - before
    start = _value(operands[before + consts + at])
    old, new = body.invars[consts + at], body.outvars[at]
    steps = [
        atom.val
        for eqn in body.eqns
        if eqn.primitive.name == "add" and new in eqn.outvars and old in eqn.invars
        for atom in eqn.invars
        if isinstance(atom, core.Literal)
    ]
    return max(int(end - start), 1) if steps == [1] and start is not None else 1


def _value(node: Node | None) -> float | None:
    return None if node is None else node.value


def regrouped(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[range, range]]:
    """Axes of two shapes that hold the same entries; [] if the sizes differ.

    Examples:
      >>> regrouped((4, 6), (4, 2, 3))
      [(range(0, 1), range(0, 1)), (range(1, 2), range(1, 3))]
    """
    found, i, j = [], 0, 0
    if math.prod(old) != math.prod(new) or 0 in old:
        return []
    while i < len(old) and j < len(new):
        first, start = i, j
        a, b = old[i], new[j]
        while a != b:
            if a < b:
                i += 1
                a *= old[i]
            else:
                j += 1
                b *= new[j]
        i, j = i + 1, j + 1
        found.append((range(first, i), range(start, j)))
    return found

"""Record what a forward pass computes: products of parameters, and the stream.

The forward pass is traced and read by `mupax.optim.reading`. The traced program is then
evaluated, and the values that were chosen are kept. Not recorded: the bodies of
`jax.lax.while_loop`, `jax.lax.cond` and `shard_map`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ..reading.axes import Axes, Event, Use
from ..reading.branches import Branches
from ..reading.program import MOVES, Maps, Node, Program, is_scaled, origin

STREAM = "stream after "
_Place = tuple[int, ...]  # of an equation in the program, and the number of its result


@dataclasses.dataclass(frozen=True)
class Layer:
    """One value of the forward pass that is recorded."""

    line: str  # of the user's code that computes it, e.g. "model.py:31"
    param: str = ""  # path of what makes it, or ends its branch; "" for outputs
    branch: str = ""  # that it is inside of, or that was added to the stream
    multiplier: float = 1.0  # of this branch in the program
    size: int = 0  # number of entries
    stacked: bool = False  # whether it stands for all layers of a scan


class Recording:
    """The layers of a forward pass, and their values.

    Args:
      forward: a function of a list of parameters, a list of other arrays and the
        inputs. It returns the model's floating-point outputs, a list.
      params: the parameters, by path.
      state, inputs: other arrays of the model, and its inputs.

    Attributes:
      layers: by name. A product of a parameter (with its bias or gain) has the path of
        the parameter, or of the module that holds no other; further uses end in #2.
        Outside of branches it includes numbers that multiply it, e.g. of a readout.
        Names of the sums with residual branches begin with `STREAM`.

    Raises:
      ValueError: a number whose value is not known multiplies a branch.
    """

    def __init__(
        self,
        forward: Callable[..., list[jax.Array]],
        params: Mapping[str, Any],
        state: Sequence[Any],
        inputs: Sequence[Any],
    ):
        self.program = Program(forward, list(params.values()), state, tuple(inputs))
        self._paths = list(params)
        self._axes = Axes(self.program)
        self.layers: dict[str, Layer] = {}
        self._nodes: dict[str, Node] = {}
        self._outputs: dict[str, int] = {}
        self._add_products()
        self._add_branches(Branches(self.program, self._axes))
        for name, node in self._nodes.items():
            if not self.layers[name].branch:
                self._nodes[name] = self._multiplied(node)
        order = sorted(self.layers, key=lambda name: self._nodes[name].id)
        self.layers = {name: self.layers[name] for name in order}
        self._add_outputs()
        self._places = {name: _place(node) for name, node in self._nodes.items()}

    def __call__(
        self, params: Sequence[Any], state: Sequence[Any], inputs: Sequence[Any]
    ) -> dict[str, jax.Array]:
        """The value of each layer; the first axis counts the layers of scans."""
        seen = _Seen(frozenset(self._places.values()), self.program.maps)
        traced, arguments = self.program.traced, [*params, *state, *inputs]
        outputs = seen.evaluate(traced.jaxpr, traced.consts, arguments, ())
        found = {
            name: self._layers_first(self._nodes[name], seen.values[place])
            for name, place in self._places.items()
            if place in seen.values
        }
        return found | {name: outputs[i][None] for name, i in self._outputs.items()}

    def _over_layers(self, node: Node) -> list[bool]:
        """For each loop around a node, the outer first: does it run over layers?"""
        found: list[bool] = []
        loop = node.loop
        while loop:
            _, loop, is_time = self.program.loops[loop]
            found.insert(0, not is_time)
        return found

    def _layers_first(self, node: Node, value: jax.Array) -> jax.Array:
        first = np.flatnonzero(self._over_layers(node)).tolist()
        value = jnp.moveaxis(value, first, range(len(first)))
        return value.reshape(-1, *value.shape[len(first) :])

    def _add(self, name: str, node: Node, layer: Layer) -> None:
        before = sum(n.partition("#")[0] == name for n in self.layers)
        unique = f"{name}#{before + 1}" if before else name
        stacked = any(self._over_layers(node))
        size = math.prod(node.shape)
        self.layers[unique] = dataclasses.replace(layer, size=size, stacked=stacked)
        self._nodes[unique] = node

    def _add_products(self) -> None:
        firsts: dict[int, tuple[int, int, Node]] = {}  # of operations with one result
        for param, events in enumerate(self._axes.events):
            for event in events:
                if event.is_use and event.node.data and event.node.at:
                    node = self._whole(event)
                    first = event.node.id, param, node
                    firsts[node.id] = min(firsts.get(node.id, first), first)
        makers = [self._paths[param] for _, param, _ in firsts.values()]
        modules = [path.rpartition("/")[0] for path in dict.fromkeys(makers)]
        for _, param, node in sorted(firsts.values(), key=lambda x: x[2].id):
            path = self._paths[param]
            module, _, last = path.rpartition("/")
            alone = module and modules.count(module) == 1 and not last.isdigit()
            self._add(module if alone else path, node, Layer(node.line, path))

    def _whole(self, event: Event) -> Node:
        """The product of a parameter with its sum, its bias or the rest of a norm."""
        node = event.node
        while (after := self._after(node, event)) is not None:
            node = after
        return node

    def _after(self, node: Node, event: Event) -> Node | None:
        first = node is event.node
        while len(users := self._axes.uses(node)) == 1:
            user = users[0]
            others = [x for x in user.operands if x is not node]
            if user.op in MOVES and user.at:
                node = user
                continue
            is_bias = user.op == "add" and others and others[0].weight
            is_sum = user.op == "reduce_sum" and event.node.op == "mul"
            # Norms multiply 1/std by their gain, and this by the activation.
            is_norm = first and user.op == "mul" and _has_root(event.node) and others
            sums = is_sum and bool(event.axes(Use.IN))
            return user if user.at and (is_bias or sums or is_norm) else None
        return None

    def _multiplied(self, node: Node) -> Node:
        """The last product of a value with numbers, or the value."""
        found = node
        while len(users := self._axes.uses(node)) == 1:
            user = users[0]
            is_factor = user.op in MOVES or is_scaled(user)
            if not (user.at and user.loop == node.loop and is_factor):
                break
            found = found if user.op in MOVES else user
            node = user
        return found

    def _add_branches(self, branches: Branches) -> None:
        for branch in branches.all:
            inside = [n for n, node in self._nodes.items() if node.id in branch.inside]
            inside = [n for n in inside if not n.startswith(STREAM)]
            if not inside or not branch.add.at:
                continue
            name = max(inside, key=lambda n: self._nodes[n].id)
            for other in inside:
                if not self.layers[other].branch:
                    inner = dataclasses.replace(self.layers[other], branch=name)
                    self.layers[other] = inner
            # The parameter in which it ends: its kernel rather than its bias.
            ends = (self._paths[end.param] for end in branch.ends if end.is_kernel)
            layer = Layer(branch.add.line, next(ends, ""), name, branch.constant)
            self._add(STREAM + name, branch.add, layer)

    def _add_outputs(self) -> None:
        known = {x.id for x in self._nodes.values()}
        of = self.program.outputs
        outputs = [(i, x) for i, x in of.items() if x.shape and i >= 0]
        for i, result in outputs:
            node = origin(result)
            if node.id not in known:
                name = f"output/{i}" if len(outputs) > 1 else "output"
                size = math.prod(node.shape)
                self.layers[name], self._outputs[name] = Layer(node.line, size=size), i


def _has_root(node: Node) -> bool:
    """Whether an operand of a product is one over a root."""
    return any(
        x.op == "rsqrt" or (x.op == "div" and x.operands[0].value is not None)
        for x in map(origin, node.operands)
    )


def _place(node: Node) -> _Place:
    return (*node.at, node.params["result"])


class _Seen:
    """Evaluates a traced program, and keeps the values of chosen equations."""

    def __init__(self, places: frozenset[_Place], maps: Maps):
        self.values: dict[_Place, jax.Array] = {}
        self._wanted, self._maps = places, maps
        # Equations that hold others of which a value is wanted.
        self._around = {p[:i] for p in places for i in range(1, len(p) - 1)}

    def evaluate(
        self, jaxpr: core.Jaxpr, consts: Any, args: Any, at: _Place
    ) -> list[Any]:
        env = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
        )

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            values, here = [read(v) for v in eqn.invars], (*at, i)
            name, inside = eqn.primitive.name, here in self._around
            # Of a program that is only wrapped, as by jit or checkpoint.
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if inside and here in self._maps:
                mapped, numbers = self._maps[here]
                inputs = [numbers.get(k, x) for k, x in enumerate(values)]
                self.evaluate(mapped.jaxpr, mapped.consts, inputs, here)
                inside = False
            if inside and name == "scan":
                outs = self._scan(eqn.params, values, here)
            elif inside and inner is not None and name != "shard_map":
                outs = self.evaluate(*_open(inner), values, here)
            else:
                # Releases of JAX differ in whether this returns functions too.
                bound = eqn.primitive.get_bind_params(eqn.params)
                functions, settings = bound if isinstance(bound, tuple) else ((), bound)
                outs = eqn.primitive.bind(*functions, *values, **settings)
                outs = outs if eqn.primitive.multiple_results else [outs]
            for number, out in enumerate(outs):
                if (*here, number) in self._wanted:
                    self.values[*here, number] = out
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _scan(self, params: dict[str, Any], values: list[Any], at: _Place) -> list[Any]:
        """Evaluate a scan that also returns its chosen values, stacked."""
        body, held = _open(params["jaxpr"])
        constants, start, xs = _arguments(params, values)

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], Any]:
            inner = _Seen(self._wanted, self._maps)
            outs = inner.evaluate(body, held, [*constants, *carry, *x], at)
            return outs[: len(start)], (outs[len(start) :], inner.values)

        carry, (ys, stacks) = jax.lax.scan(
            step, start, xs, params["length"], reverse=params["reverse"]
        )
        self.values.update(stacks)
        return [*carry, *ys]


def _arguments(params: dict[str, Any], values: list[Any]) -> Iterator[list[Any]]:
    """Constants, carry and stacked inputs of a scan."""
    if "ft_in" in params:  # from JAX 0.11 on
        yield from map(list, params["ft_in"].update(values).unpack())
        return
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    yield from (values[:first], values[first:last], values[last:])


def _open(jaxpr: Any) -> tuple[core.Jaxpr, Any]:
    closed = isinstance(jaxpr, core.ClosedJaxpr)
    return (jaxpr.jaxpr, jaxpr.consts) if closed else (jaxpr, ())

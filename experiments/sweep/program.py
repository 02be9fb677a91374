"""The runs of a task as one compiled program, over seeds and grid points.

Accelerators train all runs at once, by `jax.vmap` (`lanes`). A CPU core trains one run
after another, in the same program: a single run keeps the core busy, and its weights
stay in the cache. Grid points are sharded over the local devices.

On CPUs a program with convolutions is one training step instead (`_Stepwise`): XLA
has fast code for the gradients of convolutions, but not inside of loops.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import lanes

if TYPE_CHECKING:
    from ..run.step import Hyper
    from .tasks import Training


def at_once() -> bool:
    """Whether a device trains its runs at once: all devices but CPUs do."""
    return jax.default_backend() != "cpu"


def program(
    training: "Training",
    arguments: tuple[Any, ...],
    *,
    together: bool,
    options: dict[str, str | bool] | None = None,
) -> Any:
    """Compile all runs of a training, sharded over the local devices.

    Args:
      training: the functions of one run.
      arguments: of the result, or arrays of the same shapes: (keys, hyper, orders,
        steps, examples). `keys` has shape (seeds,), each leaf of `hyper` (points,),
        `orders` (steps, seeds, batch). `steps`, shape (points,), is how many steps each
        point trains: 0 for points that only fill up a device.
      together: whether a device trains its runs at once, as `at_once` advises.
      options: of the compiler.

    Returns:
      A function of the arguments, which `memory.needed` measures. It returns losses of
      shape (seeds, points, steps), NaN for steps that were not trained.
    """
    train = _together if together else _in_turn
    runs: Callable[..., Any] = functools.partial(train, training)
    none, points = PartitionSpec(), PartitionSpec("runs")
    specs = none, points, none, points, none
    runs = _sharded(runs, specs, PartitionSpec(None, "runs"))
    traced = jax.jit(runs).trace(*arguments)
    if not together and holds(traced.jaxpr.jaxpr, "conv_general_dilated"):
        return _Stepwise(training, arguments, options)
    return traced.lower().compile(options)


def _mesh() -> jax.sharding.Mesh:
    """The local devices, which take grid points in turn."""
    count = jax.local_device_count()
    return jax.make_mesh((count,), ("runs",), axis_types=(AxisType.Auto,))


def _sharded(function: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
    """The function on a part of each argument, on every local device."""
    if jax.local_device_count() == 1:
        return function
    return jax.shard_map(
        function, mesh=_mesh(), in_specs=specs, out_specs=out, check_vma=False
    )


def holds(jaxpr: Any, primitive: str) -> bool:
    """Whether a program holds a primitive of this name."""
    if any(e.primitive.name == primitive for e in jaxpr.eqns):
        return True
    return any(holds(inner, primitive) for inner in core.subjaxprs(jaxpr))


class _Stepwise:
    """The runs of `program`, by a compiled step that Python calls.

    Every device trains one run at a time. On CPUs, calls return before the step has
    ended, so that the devices do not wait for Python.
    """

    def __init__(
        self,
        training: "Training",
        arguments: tuple[Any, ...],
        options: dict[str, str | bool] | None,
    ):
        def one(hyper: "Hyper") -> "Hyper":
            return {name: values[0] for name, values in hyper.items()}

        def start(key: jax.Array, hyper: "Hyper", order: jax.Array) -> Any:
            state, fixed = training.init(key, one(hyper))
            carry = jnp.int32(0), _begin(state, (), len(order))
            return jax.tree.map(lambda x: x[None], (carry, fixed))

        def step(
            carry: Any, fixed: Any, key: Any, hyper: "Hyper", order: Any, examples: Any
        ) -> Any:
            carry, fixed = jax.tree.map(lambda x: x[0], (carry, fixed))

            def move(state: Any, batch: Any) -> Any:
                return training.step(state, fixed, batch, one(hyper), key)

            t, rest = carry
            rest = _move(move, order, examples, t, rest)
            return jax.tree.map(lambda x: x[None], (t + 1, rest))

        keys, hyper, orders, _, examples = arguments
        none, runs = PartitionSpec(), PartitionSpec("runs")
        self._start: Any = jax.jit(_sharded(start, (none, runs, none), runs))
        self._step: Any = jax.jit(
            _sharded(step, (runs, runs, none, runs, none, none), runs),
            donate_argnums=0,
        )
        first = (
            self._replicated(keys[0]),
            self._block(hyper, 0),
            self._replicated(orders[:, 0]),
        )
        examples = jax.tree.map(self._replicated, examples)
        self._start = self._start.lower(*first).compile(options)
        carry, fixed = self._start(*first)
        self._step = self._step.lower(carry, fixed, *first, examples).compile(options)

    def memory_analysis(self) -> Any:
        """That of a step, whose arguments are the state and the examples."""
        return self._step.memory_analysis()

    def __call__(
        self,
        keys: jax.Array,
        hyper: "Hyper",
        orders: np.ndarray,
        steps: np.ndarray,
        examples: Any,
    ) -> np.ndarray:
        """The losses, shape (seeds, points, steps)."""
        examples = jax.tree.map(self._replicated, examples)
        devices = jax.local_device_count()
        blocks = len(steps) // devices
        limits = steps.reshape(devices, blocks)
        losses = np.full((len(keys), devices, blocks, len(orders)), np.nan)
        for seed, block in np.ndindex(len(keys), blocks):
            if not limits[:, block].any():
                continue
            order = self._replicated(orders[:, seed])
            rest = self._replicated(keys[seed]), self._block(hyper, block), order
            carry, fixed = self._start(*rest)
            for _ in range(limits[:, block].max()):
                carry = self._step(carry, fixed, *rest, examples)
            losses[seed, :, block] = carry[1][1]
        trained = np.arange(len(orders)) < steps[:, None]
        return np.where(trained, losses.reshape(len(keys), -1, len(orders)), np.nan)

    def _block(self, hyper: "Hyper", block: int) -> "Hyper":
        """Hyperparameters of one point for each device."""
        devices = jax.local_device_count()
        columns = {k: np.asarray(x).reshape(devices, -1) for k, x in hyper.items()}
        return {k: self._put(x[:, block], "runs") for k, x in columns.items()}

    def _replicated(self, x: Any) -> jax.Array:
        return self._put(x)

    def _put(self, x: Any, *axes: str) -> jax.Array:
        if jax.local_device_count() == 1:
            return jnp.asarray(x)
        return jax.device_put(x, NamedSharding(_mesh(), PartitionSpec(*axes)))


def _together(
    training: "Training",
    keys: jax.Array,
    hyper: "Hyper",
    orders: jax.Array,
    steps: jax.Array,
    examples: Any,
) -> jax.Array:
    """All runs at once."""
    every = jax.vmap(jax.vmap(training.init, (None, 0)), (0, None))
    state = every(keys, hyper)[0]
    first = {name: values[0] for name, values in hyper.items()}
    fixed = jax.vmap(lambda key: training.init(key, first)[1])(keys)
    order = orders[0, 0]
    of_one = jax.eval_shape(
        lambda: (
            jax.tree.map(lambda x: x[0, 0], state),
            jax.tree.map(lambda x: x[0], fixed),
            jax.tree.map(lambda x: x[order], examples),
            first,
            keys[0],
        )
    )
    one = lanes.rewritten(training.step, len(keys) * len(steps), *of_one)
    # All points of a seed see the same batches.
    points = jax.vmap(one, (0, None, None, 0, None))
    seeds = jax.vmap(points, (0, 0, 0, None, 0))

    def step(state: Any, batch: Any) -> Any:
        return seeds(state, fixed, batch, hyper, keys)

    shape = (len(keys), len(steps))
    losses = _loop(step, state, shape, orders, steps.max(), examples)
    return jnp.moveaxis(losses, 0, -1)


def _in_turn(
    training: "Training",
    keys: jax.Array,
    hyper: "Hyper",
    orders: jax.Array,
    steps: jax.Array,
    examples: Any,
) -> jax.Array:
    """One run after another, each from its first step to its last."""

    def seed(row: Any) -> jax.Array:
        key, order = row

        def run(row: Any) -> jax.Array:
            hyper, steps = row
            state, fixed = training.init(key, hyper)

            def step(state: Any, batch: Any) -> Any:
                return training.step(state, fixed, batch, hyper, key)

            return _loop(step, state, (), order, steps, examples)

        return jax.lax.map(run, (hyper, steps))

    return jax.lax.map(seed, (keys, jnp.moveaxis(orders, 1, 0)))


def _loop(
    step: Callable[[Any, Any], Any],
    state: Any,
    shape: tuple[int, ...],
    orders: jax.Array,
    steps: jax.Array,
    examples: Any,
) -> jax.Array:
    """The losses of all steps, with shape (steps, *shape).

    `step` is (state, batch) -> (state, losses); `shape`, the shape of its losses, is ()
    for one run and (seeds, points) for all runs.
    """
    body = functools.partial(_move, step, orders, examples)
    return jax.lax.fori_loop(0, steps, body, _begin(state, shape, len(orders)))[1]


def _begin(state: Any, shape: tuple[int, ...], steps: int) -> Any:
    """What `_move` carries before the first step: (state, losses)."""
    return state, jnp.full((steps, *shape), jnp.nan)


def _move(
    step: Callable[[Any, Any], Any],
    orders: jax.Array,
    examples: Any,
    t: jax.Array,
    carry: Any,
) -> Any:
    """A step, and its losses; see `_loop`."""
    state, losses = carry
    order = jax.lax.dynamic_index_in_dim(orders, t, keepdims=False)
    state, now = step(state, jax.tree.map(lambda x: x[order], examples))
    return state, losses.at[t].set(now)

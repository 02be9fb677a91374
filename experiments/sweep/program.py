"""The runs of a task as one compiled program, over seeds and grid points.

Accelerators train all runs at once, by `jax.vmap` (`lanes`). A CPU core trains one run
after another, in the same program: a single run keeps the core busy, and its weights
stay in the cache. Grid points are sharded over the local devices. For either, module
`lanes` rewrites the step.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

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
    return jax.jit(runs).lower(*arguments).compile(options)


def _sharded(function: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
    """The function on a part of each argument, on every local device."""
    count = jax.local_device_count()
    if count == 1:
        return function
    mesh = jax.make_mesh((count,), ("runs",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
    )


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
    runs = len(keys) * len(steps)
    one = _rewritten(training, runs, keys, hyper, orders, examples)
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
    one = _rewritten(training, 0, keys, hyper, orders, examples)

    def seed(row: Any) -> jax.Array:
        key, order = row

        def run(row: Any) -> jax.Array:
            hyper, steps = row
            state, fixed = training.init(key, hyper)

            def step(state: Any, batch: Any) -> Any:
                return one(state, fixed, batch, hyper, key)

            return _loop(step, state, (), order, steps, examples)

        return jax.lax.map(run, (hyper, steps))

    return jax.lax.map(seed, (keys, jnp.moveaxis(orders, 1, 0)))


def _rewritten(
    training: "Training",
    runs: int,
    keys: jax.Array,
    hyper: "Hyper",
    orders: jax.Array,
    examples: Any,
) -> Callable[..., Any]:
    """The step of a run, rewritten for `runs` at once; see `lanes.rewritten`."""

    def of_one() -> Any:
        first = {name: values[0] for name, values in hyper.items()}
        batch = jax.tree.map(lambda x: x[orders[0, 0]], examples)
        return *training.init(keys[0], first), batch, first, keys[0]

    return lanes.rewritten(training.step, runs, *jax.eval_shape(of_one))


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

    def move(t: jax.Array, carry: Any) -> Any:
        state, losses = carry
        order = jax.lax.dynamic_index_in_dim(orders, t, keepdims=False)
        state, now = step(state, jax.tree.map(lambda x: x[order], examples))
        return state, losses.at[t].set(now)

    begin = state, jnp.full((len(orders), *shape), jnp.nan)
    return jax.lax.fori_loop(0, steps, move, begin)[1]

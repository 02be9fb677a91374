"""The runs of a task as one compiled program, over seeds and grid points.

Accelerators train all runs at once, by `jax.vmap`. A CPU core trains one run after
another, in the same program: a single run keeps the core busy, and its weights stay in
the cache. Grid points are sharded over the local devices.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

if TYPE_CHECKING:
    from ..run.step import Hyper
    from .tasks import Training

_DIVERGED = 16.0


def at_once() -> bool:
    """Whether a device trains its runs at once: all devices but CPUs do."""
    return jax.default_backend() != "cpu"


def program(
    training: "Training", *, together: bool, stop_diverged: bool = False
) -> Any:
    """Jit all runs of a training, sharded over the local devices.

    Args:
      training: the functions of one run.
      together: whether a device trains its runs at once, as `at_once` advises.
      stop_diverged: stop diverged runs; if runs train at once, only once all of them
        have diverged.

    Returns:
      A jitted function (keys, hyper, orders, steps, examples) -> losses. `keys` has
      shape (seeds,), each leaf of `hyper` (points,), `orders` (steps, seeds, batch).
      `steps`, shape (points,), is how many steps each point trains: 0 for points that
      only fill up a device. The losses have shape (seeds, points, steps), NaN for steps
      that were not trained.
    """
    train = _together if together else _in_turn
    floor = (training.guess or 0.0) if stop_diverged else None
    runs = functools.partial(train, training, floor)
    count = jax.local_device_count()
    if count > 1:
        mesh = jax.make_mesh((count,), ("runs",), axis_types=(AxisType.Auto,))
        none, points = PartitionSpec(), PartitionSpec("runs")
        runs = jax.shard_map(
            runs,
            mesh=mesh,
            in_specs=(none, points, none, points, none),
            out_specs=PartitionSpec(None, "runs"),
            check_vma=False,
        )
    return jax.jit(runs)


def _together(
    training: "Training",
    floor: float | None,
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
    # All points of a seed see the same batches.
    points = jax.vmap(training.step, (0, None, None, 0, None))
    seeds = jax.vmap(points, (0, 0, 0, None, 0))

    def step(state: Any, batch: Any) -> Any:
        return seeds(state, fixed, batch, hyper, keys)

    shape = (len(keys), len(steps))
    losses = _loop(step, state, shape, orders, steps.max(), examples, floor)
    return jnp.moveaxis(losses, 0, -1)


def _in_turn(
    training: "Training",
    floor: float | None,
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

            return _loop(step, state, (), order, steps, examples, floor)

        return jax.lax.map(run, (hyper, steps))

    return jax.lax.map(seed, (keys, jnp.moveaxis(orders, 1, 0)))


def _loop(
    step: Callable[[Any, Any], Any],
    state: Any,
    shape: tuple[int, ...],
    orders: jax.Array,
    steps: jax.Array,
    examples: Any,
    floor: float | None,
) -> jax.Array:
    """The losses of all steps, with shape (steps, *shape).

    `step` is (state, batch) -> (state, losses); `shape`, the shape of its losses, is ()
    for one run and (seeds, points) for all runs. A run stops once its loss exceeds
    `_DIVERGED` times its first loss, or times `floor` if that is larger; with None it
    never stops.
    """

    def move(state: Any, t: jax.Array) -> Any:
        order = jax.lax.dynamic_index_in_dim(orders, t, keepdims=False)
        return step(state, jax.tree.map(lambda x: x[order], examples))

    def body(t: jax.Array, carry: Any) -> Any:
        state, limit, losses = carry
        if floor is None:
            state, now = move(state, t)
            return state, limit, losses.at[t].set(now)
        # NaN is the limit of a diverged run.
        skip = lambda state: (state, jnp.full(shape, jnp.nan))  # noqa: E731
        some = ~jnp.isnan(limit).all()
        state, now = jax.lax.cond(some, lambda s: move(s, t), skip, state)
        first = _DIVERGED * jnp.maximum(now, floor)
        limit = jnp.where(jnp.isinf(limit), first, limit)
        fine = now < limit
        now, limit = jnp.where(fine, now, jnp.nan), jnp.where(fine, limit, jnp.nan)
        return state, limit, losses.at[t].set(now)

    nothing = jnp.full((len(orders), *shape), jnp.nan)
    start = state, jnp.full(shape, jnp.inf), nothing
    return jax.lax.fori_loop(0, steps, body, start)[2]

"""Many runs as one program: the steps of `run.step`, over seeds and grid points.

Accelerators train all runs at once, by `jax.vmap`. A core of a CPU trains one run after
another, in the same program: a single run keeps the core busy, and its weights stay in
the cache. The steps are a loop whose first and last step are arguments, so that one
program trains from any step to any other.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

if TYPE_CHECKING:
    from ..run.step import Hyper
    from .tasks import Training

# With stop_diverged a run is stopped once its loss is this multiple of chance level.
_GIVEN_UP = 16.0


class Programs(NamedTuple):
    """Two jitted functions.

    Attributes:
      begin: (keys, hyper) to a state, whose leaves lead with (seeds, points).
      advance: (state, keys, hyper, orders, first, last, examples) to the state after
        the steps from `first` to before `last`, and the losses of all steps, shape
        (seeds, points, steps), NaN for steps that were not done. The orders of examples
        have shape (steps, seeds, batch). `last` has one entry for each point: points
        that only fill up a device are not trained. The state's buffers are donated.
    """

    begin: Any
    advance: Any


def programs(
    training: "Training", *, stop_diverged: bool = False, together: bool | None = None
) -> Programs:
    """The programs of a training, on every local device.

    Args:
      training: its functions.
      stop_diverged: do no steps for a run that has diverged; of runs that are trained
        at once, only once all of them have.
      together: whether a device trains its runs at once; by default unless it is a
        CPU.
    """
    if together is None:
        together = jax.default_backend() != "cpu"
    population = _together if together else _in_turn

    def start(key: jax.Array, hyper: "Hyper") -> Any:
        return training.init(key, hyper)[0], jnp.inf

    every = jax.vmap(jax.vmap(start, (None, 0)), (0, None))

    def begin(keys: jax.Array, hyper: "Hyper") -> Any:
        return _bare(every(keys, hyper))

    def advance(
        state: Any,
        keys: jax.Array,
        hyper: "Hyper",
        orders: jax.Array,
        first: jax.Array,
        last: jax.Array,
        examples: Any,
    ) -> Any:
        def train(
            step: Any,
            state: Any,
            fixed: Any,
            hyper: Any,
            keys: Any,
            orders: Any,
            last: Any,
        ) -> Any:
            """The state, and the losses, led by steps, of one run or of many."""

            def move(state: Any, t: jax.Array) -> Any:
                order = jax.lax.dynamic_index_in_dim(orders, t, keepdims=False)
                batch = jax.tree.map(lambda x: x[order], examples)
                return step(state, fixed, batch, hyper, keys)

            if stop_diverged:
                move = _careful(move, training.guess or 0.0)
            else:
                move = _carefree(move)

            def body(t: jax.Array, carry: Any) -> Any:
                state, losses = carry
                state, now = move(state, t)
                return state, losses.at[t].set(now)

            nothing = jnp.full((len(orders), *state[1].shape), jnp.nan)
            return jax.lax.fori_loop(first, last, body, (state, nothing))

        state = _like(_kinds(every, keys, hyper), state)
        state, losses = population(training, train, state, keys, hyper, orders, last)
        return _bare(state), losses

    return Programs(*_shared(begin, advance))


def _together(
    training: "Training",
    train: Any,
    state: Any,
    keys: Any,
    hyper: Any,
    orders: Any,
    last: Any,
) -> Any:
    """All runs at once."""
    some = {name: values[0] for name, values in hyper.items()}
    fixed = jax.vmap(lambda key: training.init(key, some)[1])(keys)
    # Every point of a seed sees the same batches.
    points = jax.vmap(training.step, (0, None, None, 0, None))
    steps = jax.vmap(points, (0, 0, 0, None, 0))
    state, losses = train(steps, state, fixed, hyper, keys, orders, last.max())
    return state, jnp.moveaxis(losses, 0, -1)


def _in_turn(
    training: "Training",
    train: Any,
    state: Any,
    keys: Any,
    hyper: Any,
    orders: Any,
    last: Any,
) -> Any:
    """One run after another, each from its first step to its last."""

    def seed(row: Any) -> Any:
        state, key, order = row
        some = {name: values[0] for name, values in hyper.items()}
        fixed = training.init(key, some)[1]

        def run(row: Any) -> Any:
            state, hyper, last = row
            return train(training.step, state, fixed, hyper, key, order, last)

        return jax.lax.map(run, (state, hyper, last))

    return jax.lax.map(seed, (state, keys, jnp.moveaxis(orders, 1, 0)))


def _carefree(move: Any) -> Any:
    """Steps for all runs, diverged or not."""

    def moved(carry: Any, t: jax.Array) -> Any:
        state, bound = carry
        state, losses = move(state, t)
        return (state, bound), losses

    return moved


def _careful(move: Any, guess: float) -> Any:
    """No steps once every run's loss has exceeded its bound."""

    def moved(carry: Any, t: jax.Array) -> Any:
        state, bound = carry
        nothing = jnp.full(bound.shape, jnp.nan)
        state, losses = jax.lax.cond(
            ~jnp.isnan(bound).all(),
            lambda s: move(s, t),
            lambda s: (s, nothing),
            state,
        )
        # The first step sets the bound: its own loss, or chance level if larger.
        now = _GIVEN_UP * jnp.maximum(losses, guess)
        bound = jnp.where(jnp.isinf(bound), now, bound)
        alive = losses < bound
        losses = jnp.where(alive, losses, jnp.nan)
        return (state, jnp.where(alive, bound, jnp.nan)), losses

    return moved


def _shared(begin: Any, advance: Any) -> tuple[Any, Any]:
    """Jitted, with the points shared among the devices."""
    count = jax.local_device_count()
    if count == 1:
        return jax.jit(begin), jax.jit(advance, donate_argnums=0)
    mesh = jax.make_mesh((count,), ("runs",), axis_types=(AxisType.Auto,))
    points, runs, none = (
        PartitionSpec("runs"),
        PartitionSpec(None, "runs"),
        PartitionSpec(),
    )
    shared = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    begin = shared(begin, in_specs=(none, points), out_specs=runs)
    advance = shared(
        advance,
        in_specs=(runs, none, points, none, none, points, none),
        out_specs=runs,
    )
    return jax.jit(begin), jax.jit(advance, donate_argnums=0)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _bare(tree: Any) -> Any:
    """With random keys as plain integers, which the host can store."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _kinds(function: Any, *arguments: Any) -> Any:
    """The kind of each random key among the results; False for other leaves."""
    found = []

    def traced(*arguments: Any) -> None:
        out = function(*arguments)
        name = jax.tree.map(lambda x: _is_key(x) and jax.random.key_impl(x), out)
        found.append(name)

    jax.eval_shape(traced, *arguments)
    return found[0]


def _like(kinds: Any, tree: Any) -> Any:
    """The inverse of `_bare`."""

    def whole(kind: Any, leaf: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(leaf, impl=kind) if kind else leaf

    return jax.tree.map(whole, kinds, tree)

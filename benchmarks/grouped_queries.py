"""Do keys and values need another learning rate where more queries share them?

    python -m benchmarks.grouped_queries FILE   # trains, minutes of one core
    python -m benchmarks.grouped_queries        # prints the verdicts

FILE is a text. A Llama of one block has eight heads of queries. Keys and values have
as many (r = 1) or one (r = 8). The learning rate of all parameters, and a factor of
that of keys and values, are swept. Losses are in benchmarks/grouped_queries.csv.

Source: arXiv:2605.15290 claims that this rate depends on r.
"""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax import optim, zoo
from mupax.experiments.sweep.verdict import Transfer, transfer

from . import losses

TABLE = losses.Table(
    pathlib.Path(__file__).with_suffix(".csv"), ("repeats", "log2_rate"), "log2_factor"
)
REPEATS, RATES, FACTORS, SEEDS = (1, 8), (-7, -6, -5), (-2, -1, 0, 1, 2, 3), 4
STEPS, LAST, ROWS, TIME = 200, 20, 16, 32


def runs(tokens: jax.Array, repeats: int) -> np.ndarray:
    """Mean loss of the last steps, shape (seeds, rates, factors)."""
    make = functools.partial(
        zoo.create,
        "llama",
        **{"width": 64, "depth": 1, "base_width": 64, "base_depth": 1, "head_dim": 8},
        queries_per_key=repeats,
        vocab_size=int(tokens.max()) + 1,
        context=TIME,
    )
    own = zoo.scales(make(rngs=nnx.Rngs(0)))
    peak = optax.warmup_cosine_decay_schedule(0.0, 1.0, STEPS // 10, STEPS)

    def run(point: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        seed, rate, factor = point
        graph, params, rest = nnx.split(
            make(rngs=nnx.Rngs(jax.random.key(seed))), nnx.Param, ...
        )
        groups = {"attention/(key|value)": {"learning_rate": factor}}
        tx = optim.adam(lambda step: rate * peak(step), optim.for_modules(own, groups))

        def loss(params: nnx.State, rows: jax.Array) -> jax.Array:
            logits = nnx.merge(graph, params, rest)(rows[:, :-1])
            each = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
            return each.mean()

        def step(carry: tuple, at: jax.Array) -> tuple[tuple, jax.Array]:
            params, state = carry
            key = jax.random.fold_in(jax.random.key(1), at + STEPS * seed)
            start = jax.random.randint(key, (ROWS, 1), 0, len(tokens) - TIME - 1)
            value, grads = jax.value_and_grad(loss)(
                params, tokens[start + jnp.arange(TIME + 1)]
            )
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        begin = params, tx.init(params)
        return jax.lax.scan(step, begin, jnp.arange(STEPS))[1][-LAST:].mean()

    axes = jnp.arange(SEEDS), 2.0 ** jnp.array(RATES), 2.0 ** jnp.array(FACTORS)
    points = [axis.ravel() for axis in jnp.meshgrid(*axes, indexing="ij")]
    found = jax.jit(lambda points: jax.lax.map(run, points))(tuple(points))
    return np.asarray(found).reshape(SEEDS, len(RATES), len(FACTORS))


def train(text: str) -> None:
    """Train what the table lacks."""
    _, tokens = np.unique(np.frombuffer(text.encode(), np.uint8), return_inverse=True)
    for repeats in (repeats for repeats in REPEATS if not TABLE.at(repeats, RATES[-1])):
        loss = runs(jnp.asarray(tokens), repeats)
        for i, rate in enumerate(RATES):
            TABLE.add(
                repeats, rate, losses=dict(zip(FACTORS, loss[:, i].T, strict=True))
            )


def verdict(log2_rate: int) -> Transfer:
    """Whether the best factor at r = 1 is that at r = 8, at one learning rate."""
    cells = [TABLE.cell(r, log2_rate, width=64, depth=1) for r in REPEATS]
    return transfer([cell for cell in cells if cell], "repeats", sizes=REPEATS)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        train(pathlib.Path(path).read_text())
    for rate in RATES:
        judged = verdict(rate)
        print(f"rate 2^{rate}: {judged.words}; shift {judged.trend.slope:+.2f}")
        for repeats, cell in zip(REPEATS, judged.cells, strict=True):
            means = (f"{x:.3f}" for x in cell.loss.mean(axis=0))
            print(f"  r = {repeats}:", *means)

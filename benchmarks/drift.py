"""Is the drift of Depth-μP's best learning rate one of finite width, or of training?

    python -m benchmarks.drift train --data_dir DIR   # 30 minutes of a core; resumes
    python -m benchmarks.drift                        # writes the page

Residual MLPs with branches of one ReLU layer train on CIFAR-10 at 16 x 16 pixels for
11,000 steps of Adam, at widths 32, 64 and 128 and depths 8 and 32, at a constant
learning rate and with a cosine to zero. All are scaled from width 64 and depth 8. If
the drift is one of finite width, it shrinks with the width. Rates, seeds and sizes were
fixed before the first run; at width 32, two rates were added below. Losses are the
mean of the last 1,100 steps, in benchmarks/drift.csv.
"""

import argparse
import functools
import itertools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax import optim, zoo
from mupax.experiments.data.datasets import open_dataset
from mupax.experiments.sweep.tasks import orders
from mupax.experiments.sweep.verdict import Transfer, transfer
from papers import pages

from . import losses

FOLDER = pathlib.Path(__file__).parent
PAGE = FOLDER / "results.md"
TABLE = losses.Table(FOLDER / "drift.csv", ("schedule", "width", "depth"), "log2_lr")
COMMAND = "python -m benchmarks.drift"
SCHEDULES, WIDTHS, DEPTHS = ("constant", "cosine"), (32, 64, 128), (8, 32)
LOWEST = {32: -9.5, 64: -8.5, 128: -8.5}  # up to 2^-5.5, in half octaves
SEEDS, STEPS, BATCH, AVERAGED = 3, 11_000, 64, 1_100


def _create(width: int, depth: int, key: jax.Array) -> nnx.Module:
    """The model of `configs/resmlp_sweep.py`."""
    return zoo.create(
        "resmlp",
        **{"width": width, "depth": depth, "base_width": 64, "base_depth": 8},
        **{"input_shape": (16, 16, 3), "branch_multiplier": 0.25},
        train_ends=False,
        rngs=nnx.Rngs(key),
    )


@functools.cache
def _trainer(schedule: str, width: int, depth: int) -> Callable[..., Any]:
    """A function from the data, seeds, orders and a rate to losses, (seeds,)."""
    scales = zoo.scales(
        nnx.eval_shape(lambda: _create(width, depth, jax.random.key(0)))
    )
    shape = {
        "constant": optax.constant_schedule(1.0),
        "cosine": optax.cosine_decay_schedule(1.0, STEPS),
    }[schedule]

    def run(data: Any, seed: jax.Array, order: jax.Array, rate: jax.Array) -> jax.Array:
        graph, params, rest = nnx.split(
            _create(width, depth, jax.random.key(seed)), nnx.Param, ...
        )
        tx = optim.adam(lambda count: rate * shape(count), scales)

        def step(carry: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
            params, state = carry
            images, labels = data["image"][rows], data["label"][rows]

            def mean_loss(p: Any) -> jax.Array:
                logits = nnx.merge(graph, p, rest)(images)
                each = optax.softmax_cross_entropy_with_integer_labels
                return each(logits, labels).mean()

            loss, grads = jax.value_and_grad(mean_loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        found = jax.lax.scan(step, (params, tx.init(params)), order)[1]
        return found[-AVERAGED:].mean()

    def runs(
        data: Any, seeds: jax.Array, orders: jax.Array, rate: jax.Array
    ) -> jax.Array:
        return jax.lax.map(lambda x: run(data, *x, rate), (seeds, orders))

    return jax.jit(runs)


def train(data_dir: str | None) -> None:
    """Train what the table lacks, small models first."""
    dataset = open_dataset("cifar10", data_dir, image_size=16)
    data = dataset.normalize(dict(dataset.training_arrays()))
    data = {key: jnp.asarray(value) for key, value in data.items()}
    order = orders(len(data["label"]), BATCH, range(SEEDS), STEPS)
    order = jnp.asarray(order.swapaxes(0, 1))  # seeds first
    for schedule, width, depth in itertools.product(SCHEDULES, WIDTHS, DEPTHS):
        known = TABLE.at(schedule, width, depth)
        for rate in (rate for rate in rates(width) if rate not in known):
            run = _trainer(schedule, width, depth)
            found = run(data, jnp.arange(SEEDS), order, 2.0**rate)
            TABLE.add(schedule, width, depth, losses={rate: found})


def rates(width: int) -> list[float]:
    """The learning rates that are swept, as log2."""
    return np.arange(LOWEST[width], -5.0, 0.5).tolist()


def judged(schedule: str, width: int) -> Transfer | None:
    """The verdict on the learning rate over depth; None if a run is missing."""
    sized = {"width": width, "values": rates(width)}
    cells = [TABLE.cell(schedule, width, n, depth=n, **sized) for n in DEPTHS]
    known = [cell for cell in cells if cell is not None]
    return transfer(known, "depth", DEPTHS[0]) if len(known) == len(DEPTHS) else None


def page() -> str:
    """A line for each schedule and width."""
    heads = ["best at 8", "best at 32", "shift, octaves a doubling"]
    heads += ["cost of the base's rate at 32", "in nats", "least loss at 8", "at 32"]
    text = [f"| schedule, width | {' | '.join(heads)} |", "|---" * 8 + "|"]
    for schedule, width in itertools.product(SCHEDULES, WIDTHS):
        one = judged(schedule, width)
        if one is None:
            continue
        least = np.nanmin(one.cells[-1].loss.mean(0))
        nats = math.nan if one.regret is None else one.regret.share * least
        cells = [*losses.optima(one), losses.shift(one), losses.cost(one)]
        cells += [f"{nats:.3f}"]
        cells += [losses.mean(cell, losses.best(cell)) for cell in one.cells]
        text.append(f"| {schedule}, {width} | {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    """Train, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["train"])
    parser.add_argument("--data_dir")
    given = parser.parse_args()
    if given.what:
        train(given.data_dir)
    PAGE.write_text(pages.replaced(PAGE, {"": page()}, COMMAND))


if __name__ == "__main__":
    main()

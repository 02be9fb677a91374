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
import csv
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
from mupax.experiments.sweep.results import Cell
from mupax.experiments.sweep.tasks import orders
from mupax.experiments.sweep.verdict import Transfer, transfer
from papers import pages

FOLDER = pathlib.Path(__file__).parent
TABLE, PAGE = FOLDER / "drift.csv", FOLDER / "results.md"
COMMAND = "python -m benchmarks.drift"
COLUMNS = ("schedule", "width", "depth", "log2_lr", "losses")
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
                losses = optax.softmax_cross_entropy_with_integer_labels
                return losses(logits, labels).mean()

            loss, grads = jax.value_and_grad(mean_loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        losses = jax.lax.scan(step, (params, tx.init(params)), order)[1]
        return losses[-AVERAGED:].mean()

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
        for rate in np.arange(LOWEST[width], -5.0, 0.5):
            place = (schedule, str(width), str(depth), f"{rate:g}")
            if place in {tuple(row[key] for key in COLUMNS[:-1]) for row in table()}:
                continue
            run = _trainer(schedule, width, depth)
            losses = run(data, jnp.arange(SEEDS), order, 2.0**rate)
            new = not TABLE.exists()
            with TABLE.open("a", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                if new:
                    writer.writerow(COLUMNS)
                writer.writerow([*place, " ".join(f"{x:.5g}" for x in losses.tolist())])
            print(*place, flush=True)


def table() -> list[dict[str, str]]:
    """The lines of the committed table; "nan" is the loss of a run that diverged."""
    if not TABLE.exists():
        return []
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def judged(schedule: str, width: int) -> Transfer | None:
    """The verdict on the learning rate over depth; None if a depth is missing."""
    cells = []
    for depth in DEPTHS:
        place = (schedule, str(width), str(depth))
        rows = [r for r in table() if (r["schedule"], r["width"], r["depth"]) == place]
        rates = np.array([float(row["log2_lr"]) for row in rows])
        if len(rows) < len(np.arange(LOWEST[width], -5.0, 0.5)):
            return None
        loss = np.array([[float(x) for x in r["losses"].split()] for r in rows]).T
        cells.append(Cell(schedule, width, depth, rates, loss, loss[..., None], 0.0))
    return transfer(cells, "depth", DEPTHS[0])


def page() -> str:
    """A line for each schedule and width."""
    heads = ["best at 8", "best at 32", "shift, octaves a doubling"]
    heads += ["cost of the base's rate at 32", "in nats", "least loss at 8", "at 32"]
    text = [f"| schedule, width | {' | '.join(heads)} |", "|---" * 8 + "|"]
    for schedule, width in itertools.product(SCHEDULES, WIDTHS):
        one = judged(schedule, width)
        if one is None:
            continue
        low, high = one.trend.interval
        least = np.nanmin(one.cells[-1].loss.mean(0))
        nats = math.nan if one.regret is None else one.regret.share * least
        cells = ["none" if x is None else f"2^{x:.2f}" for x in one.optima]
        cells += [
            f"{one.trend.slope:+.2f} ({low:+.2f} to {high:+.2f})",
            "unknown" if one.regret is None else one.regret.words,
            f"{nats:.3f}",
            *(_loss(cell) for cell in one.cells),
        ]
        text.append(f"| {schedule}, {width} | {' | '.join(cells)} |")
    return "\n".join(text)


def _loss(cell: Cell) -> str:
    """The least mean loss of a cell and its standard error."""
    loss = cell.loss[:, int(np.nan_to_num(cell.loss.mean(0), nan=np.inf).argmin())]
    return f"{loss.mean():.3f} ± {loss.std(ddof=1) / math.sqrt(len(loss)):.3f}"


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

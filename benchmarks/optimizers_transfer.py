"""Measure how far the best learning rate of each optimizer moves with width and depth.

    python -m benchmarks.optimizers_transfer [--optimizers muon,adamw] [--table]

A residual MLP (branches of one layer under Depth-μP, of two under CompleteP) learns a
fixed random teacher from fresh batches of 64 for 150 steps. Its base has width 16 and 4
blocks; sizes go to 8 times the width and 16 times the depth. Four seeds each draw the
initial weights and the batches. At the base, the learning rates are powers of two; at
every size, 9 half octaves around the base's best. Runs are appended to
`benchmarks/optimizers_transfer.csv`, and those that are there are not repeated.
`--table` prints the table of `docs/howto/parametrization.md`: for each optimizer and
dimension, by how many octaves the optimum moves a doubling (a parabola through the
losses of each seed; mean and standard error over seeds), and what the base's learning
rate costs at the largest size, relative to the best of the grid there.
"""

import argparse
import csv
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax import optim

TABLE = pathlib.Path(__file__).with_suffix(".csv")
COLUMNS = ("optimizer", "layers", "width", "depth", "seed", "log2_rate", "loss")
BASE = (16, 4)
SIZES = [(32, 4), (64, 4), (128, 4), (16, 8), (16, 16), (16, 32), (16, 64)]
SEEDS, STEPS, BATCH, INPUTS, OUTPUTS = 4, 150, 64, 16, 4
AVERAGED = 30  # the loss is that of the last steps
BRANCH = 0.5  # multiplier of branches at the base
POINTS = {1: "depth_mup", 2: "completep"}  # by layers of a branch

# Each with the octaves of its rates at the base.
OPTIMIZERS: dict[str, tuple[Callable[..., Any], range]] = {
    "adamw": (functools.partial(optim.adamw, weight_decay=0.0), range(-11, -1)),
    "muon": (optim.muon, range(-9, 1)),
    "muon_h": (optim.muon_h, range(-9, 1)),
    "scion": (optim.scion, range(-11, -1)),
    "adam_h": (optim.adam_h, range(-9, 1)),
    "sgd": (functools.partial(optim.sgd, momentum=0.9), range(-9, 1)),
    "lion": (functools.partial(optim.lion, weight_decay=0.0), range(-12, -2)),
    "schedule_free": (
        lambda rate, scales: optim.schedule_free(
            optim.adamw, rate, scales, weight_decay=0.0
        ),
        range(-10, 0),
    ),
    "shampoo": (optim.shampoo, range(-9, 1)),
    "soap": (optim.soap, range(-9, 1)),
}


def shapes(width: int, depth: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters."""
    blocks = {f"w{i}": (depth, width, width) for i in range(layers)}
    return {"read": (INPUTS, width), **blocks, "out": (width, OUTPUTS)}


def abstract(width: int, depth: int, layers: int) -> Any:
    """Parameters without values."""
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in shapes(width, depth, layers).items()
    }


def call(params: Any, x: jax.Array, layers: int) -> jax.Array:
    """The forward pass."""
    alpha = optim.parametrization(POINTS[layers]).alpha
    depth = params["w0"].shape[0]
    factor = BRANCH * (depth / BASE[1]) ** -alpha

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        y = x
        for weight in weights:
            y = jax.nn.relu(y) @ weight
        return x + factor * y, None

    weights = [params[f"w{i}"] for i in range(layers)]
    x, _ = jax.lax.scan(block, x @ params["read"], weights)
    return x @ params["out"]


def teacher(x: jax.Array) -> jax.Array:
    """The function to learn, of variance one."""
    keys = jax.random.split(jax.random.key(99))
    hidden = jax.random.normal(keys[0], (INPUTS, 32)) * 2 / INPUTS**0.5
    out = jax.random.normal(keys[1], (32, OUTPUTS)) * (2 / 32) ** 0.5
    return jnp.tanh(x @ hidden) @ out


@functools.cache
def trainer(name: str, layers: int, width: int, depth: int) -> Callable[..., Any]:
    """A function from seeds and rates, both (runs,), to losses."""
    scales = optim.infer_scales(
        abstract(*BASE, layers),
        abstract(width, depth, layers),
        inputs=(jax.ShapeDtypeStruct((1, INPUTS), jnp.float32),),
        call=lambda params, x: call(params, x, layers),
        parametrization=POINTS[layers],
        delta=abstract(2 * BASE[0], BASE[1], layers),
    )
    start = {}
    for path, scale in scales.items():
        fan_in = scale.base_shape[scale.in_axes[0]]
        start[path] = (
            fan_in**-0.5 * optim.multipliers(scale, scales.parametrization).init_std
        )
    if layers == 1:  # relu halves variances
        start = {p: s * 2**0.5 if p == "w0" else s for p, s in start.items()}

    def run(seed: jax.Array, rate: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        keys = jax.random.split(key, len(start) + 1)
        params = {
            path: std * jax.random.normal(k, scales[path].shape)
            for (path, std), k in zip(start.items(), keys[1:], strict=True)
        }
        tx = OPTIMIZERS[name][0](rate, scales)

        def step(carry: Any, number: jax.Array) -> tuple[Any, jax.Array]:
            params, state = carry
            x = jax.random.normal(jax.random.fold_in(keys[0], number), (BATCH, INPUTS))
            loss, grads = jax.value_and_grad(
                lambda p: jnp.mean((call(p, x, layers) - teacher(x)) ** 2)
            )(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        carry = params, tx.init(params)
        losses = jax.lax.scan(step, carry, jnp.arange(STEPS))[1]
        return losses[-AVERAGED:].mean()

    return jax.jit(jax.vmap(run))


def rows() -> list[dict[str, str]]:
    """The runs of the table."""
    if not TABLE.exists():
        return []
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def losses(name: str, layers: int, size: tuple[int, int]) -> dict[float, np.ndarray]:
    """{log2 of the rate: losses of each seed}, of the runs that are there."""
    found: dict[float, dict[int, float]] = {}
    for row in rows():
        key = row["optimizer"], int(row["layers"]), int(row["width"]), int(row["depth"])
        if key == (name, layers, *size):
            rate = float(row["log2_rate"])
            found.setdefault(rate, {})[int(row["seed"])] = float(row["loss"])
    return {
        rate: np.array([each[s] for s in range(SEEDS)])
        for rate, each in sorted(found.items())
        if len(each) == SEEDS
    }


def measure(name: str, layers: int, size: tuple[int, int], rates: list[float]) -> None:
    """Run what is missing of these rates, and append it to the table."""
    missing = [rate for rate in rates if rate not in losses(name, layers, size)]
    if not missing:
        return
    pairs = [(seed, rate) for rate in missing for seed in range(SEEDS)]
    seeds, exponents = (jnp.array(column) for column in zip(*pairs, strict=True))
    found = trainer(name, layers, *size)(seeds, 2.0**exponents)
    new = not TABLE.exists()
    with TABLE.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for (seed, rate), loss in zip(pairs, found, strict=True):
            writer.writerow((name, layers, *size, seed, rate, f"{float(loss):.5g}"))
    print(name, layers, size, len(pairs), "runs", flush=True)


def grid(name: str, layers: int) -> list[float]:
    """Nine half octaves around the base's best rate."""
    wide = losses(name, layers, BASE)
    octaves = [float(rate) for rate in OPTIMIZERS[name][1]]
    best = min(octaves, key=lambda rate: np.nan_to_num(wide[rate].mean(), nan=np.inf))
    return [best + i / 2 for i in range(-4, 5)]


def optimum(rates: list[float], found: np.ndarray) -> float:
    """log2 of the best rate of one seed: a parabola through five points."""
    values = np.log(np.nan_to_num(found, nan=np.inf))
    best = int(np.clip(values.argmin(), 2, len(rates) - 3))
    around = slice(best - 2, best + 3)
    if not np.isfinite(values[around]).all():
        return rates[int(values.argmin())]
    curve = np.polyfit(rates[around], values[around], 2)
    if curve[0] <= 0:
        return rates[int(values.argmin())]
    return float(np.clip(-curve[1] / (2 * curve[0]), rates[0], rates[-1]))


def summary(name: str, layers: int, axis: int) -> str | None:
    """The shift a doubling and the cost along width (0) or depth (1)."""
    sizes = [BASE, *(s for s in SIZES if s[1 - axis] == BASE[1 - axis])]
    if not losses(name, layers, BASE):
        return None
    rates = grid(name, layers)
    tables = []
    for size in sizes:
        found = losses(name, layers, size)
        if not all(rate in found for rate in rates):
            return None
        tables.append(np.stack([found[rate] for rate in rates]))
    optima = np.array([[optimum(rates, t[:, s]) for t in tables] for s in range(SEEDS)])
    doublings = np.log2([size[axis] / BASE[axis] for size in sizes])
    slopes = np.polyfit(doublings, optima.T, 1)[0]
    middle = np.array(tables[-1]).mean(1)
    at_base = rates[int(np.nan_to_num(tables[0].mean(1), nan=np.inf).argmin())]
    cost = middle[rates.index(at_base)] / np.nanmin(middle) - 1
    error = slopes.std(ddof=1) / math.sqrt(SEEDS)
    return f"{slopes.mean():+.2f} ± {error:.2f}, {100 * cost:.0f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--layers", type=int, default=1, choices=POINTS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print("| optimizer | layers | width x8 | depth x16 |\n|---|---|---|---|")
        for layers in POINTS:
            for name in OPTIMIZERS:
                cells = [summary(name, layers, axis) for axis in range(2)]
                if any(cells):
                    print(
                        f"| {name} | {layers} | {' | '.join(c or '' for c in cells)} |"
                    )
        return
    for name in options.optimizers.split(","):
        octaves = [float(rate) for rate in OPTIMIZERS[name][1]]
        measure(name, options.layers, BASE, octaves)
        for size in [BASE, *SIZES]:
            measure(name, options.layers, size, grid(name, options.layers))


if __name__ == "__main__":
    main()

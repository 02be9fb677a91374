"""Measure the speed of a sweep, including compilation.

    python -m benchmarks.sweep [--torch PYTHON]

Trains 24 runs (12 learning rates, 2 seeds) of the residual MLP on digits, 200 steps of
batch 64, by mupax and by plain JAX and Optax, in pairs, because the machine's speed
drifts. Then measures the time to trace and compile at depths 8 and 512, and the
arithmetic rate at width 256 relative to a matrix product. With `--torch`, the Python of
an environment with torch and mup, three runs by one process of a single thread per
core, in pairs with the same grid and with the larger one that tunes a base model, of 4
branch multipliers and 4 seeds.
Results: docs/performance.md. On CPUs `mupax sweep` uses one device per core; here set
JAX_NUM_CPU_DEVICES=2.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax.experiments import data as datasets
from mupax.experiments import memory
from mupax.experiments.cli import flags
from mupax.experiments.sweep import engine, space, tasks


def job(depth: int, width: int = 64) -> tasks.ZooTask:
    """The cell of this shape under Depth-μP."""
    words = ["--config=digits_resmlp", "--config.schedule.name=constant"]
    words.append("--config.dataset=digits")
    cells = space.tasks(space.parse_sweep(flags.parse(["sweep", *words]).config))
    cell = next(t for t in cells if t.parametrization == "depth_mup")
    return dataclasses.replace(cell, config=cell.config.sized(width, depth))


def compiled(
    cell: tasks.ZooTask, data: datasets.Dataset
) -> tuple[engine.Chunks, list[tuple[float, ...]]]:
    """A cell's program, traced and compiled, and the points of its grid."""
    points = [(x,) for x in cell.grid["learning_rate"]]
    program = engine.Chunks(
        cell, cell.training(data), engine.Limits(), len(points), range(cell.seeds)
    )
    return program, points


def plain(data: datasets.Dataset, cell: tasks.ZooTask, *, quick: bool) -> float:
    """Time the same runs in plain JAX, in seconds, including compilation.

    Args:
      data: the digits.
      cell: the runs.
      quick: compile at the low optimization level of mupax's sweeps.
    """
    start = time.perf_counter()
    n, depth, classes = cell.width, cell.depth, data.out_features
    arrays = data.training_arrays()
    images = data.normalize(arrays)["image"]
    images = images.reshape(len(images), -1)
    labels = jnp.asarray(arrays["label"])
    branch = (depth / cell.config.base_depth) ** -0.5

    def init(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        u, w, v = jax.random.split(key, 3)
        d = images.shape[1]
        return (
            jax.random.normal(u, (d, n)) * d**-0.5,
            jax.random.normal(w, (depth, n, n)) * n**-0.5,
            jax.random.normal(v, (n, classes)) * n**-0.5,
        )

    def loss(params: Any, batch: Any) -> jax.Array:
        u, w, v = params

        def block(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            z = jax.nn.relu(x @ w)
            return x + branch * (z - z.mean(axis=-1, keepdims=True)), None

        logits = jax.lax.scan(block, batch[0] @ u, w)[0] @ v
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def run(rate: jax.Array, params: Any, batches: Any) -> jax.Array:
        tx = optax.adam(rate)

        def step(carry: Any, batch: Any) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, tx.init(params)), batches)[1]

    def seed(key: jax.Array, indices: jax.Array, rates: jax.Array) -> jax.Array:
        batches = images[indices], labels[indices]
        return jax.vmap(run, (0, None, None))(rates, init(key), batches)

    orders = [
        datasets.batch_indices(len(labels), cell.batch_size, s, cell.steps)
        for s in range(cell.seeds)
    ]
    keys = jax.random.split(jax.random.key(0), cell.seeds)
    rates = jnp.asarray(cell.grid["learning_rate"])
    options = {"xla_backend_optimization_level": 1} if quick else None
    program = jax.jit(jax.vmap(seed, (0, 0, None)), compiler_options=options)
    jax.block_until_ready(program(keys, np.stack(orders), rates))
    return time.perf_counter() - start


def arithmetic(cell: tasks.ZooTask) -> float:
    """Floating-point operations of a cell's hidden layers.

    Forward and backward: three products of batch x n by n x n a layer.
    """
    products = cell.runs * cell.steps * cell.batch_size * cell.depth
    return 6 * products * cell.width**2


def against_plain(data: datasets.Dataset) -> None:
    """Print the times beside plain JAX, and those of compiling."""
    for depth, width in ((8, 64), (64, 64)):
        cell = job(depth, width)
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(3):
            start = time.perf_counter()
            program, points = compiled(cell, data)
            middle = time.perf_counter()
            program(points)
            end = time.perf_counter()
            for quick, measured in ratios.items():
                measured.append((end - start) / plain(data, cell, quick=quick))
        print(
            f"width {width}, depth {depth}: {cell.runs} runs in {end - start:.1f} s "
            f"({middle - start:.1f} s of it tracing and compiling, then "
            f"{arithmetic(cell) / (end - middle) / 1e9:.0f} GFLOP/s); "
            f"{statistics.median(ratios[False]):.2f} of plain JAX's time, "
            f"{statistics.median(ratios[True]):.2f} where that compiles as quickly "
            "(medians of 3)"
        )
    growth = []
    for _ in range(3):
        times = []
        for depth in (8, 512):
            start = time.perf_counter()
            compiled(job(depth), data)
            times.append(time.perf_counter() - start)
        growth.append(times[1] / times[0])
        print(f"trace and compile: {times[0]:.2f} s at 8, {times[1]:.2f} s at 512")
    print(f"ratio, median of 3: {statistics.median(growth):.2f}")


def processor_time(data: datasets.Dataset) -> None:
    """Print the processor time and the memory of a cell's program, at depth 8."""
    cell = job(8)
    for _ in range(3):
        start = time.process_time()
        program, points = compiled(cell, data)
        middle = time.process_time()
        program(points)
        end = time.process_time()
        needed = memory.needed(program._program) / 2**20
        print(
            f"{cell.runs} runs: {middle - start:.2f} processor seconds to trace and "
            f"compile, {end - middle:.2f} to train, in {needed:.1f} MiB"
        )


def rate_of_arithmetic(data: datasets.Dataset) -> None:
    """Print the share of the machine's matrix-multiply rate at width 256."""
    cell = job(32, 256)
    cell = dataclasses.replace(cell, config=dataclasses.replace(cell.config, steps=30))
    program, points = compiled(cell, data)
    side = 2048
    x = jax.random.normal(jax.random.key(0), (side, side))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    shares = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(4):
            jax.block_until_ready(product(x, x))
        middle = time.perf_counter()
        program(points[: program.points])
        end = time.perf_counter()
        lanes = min(program.points, len(points)) / len(points)
        peak = 4 * 2 * side**3 / (middle - start)
        ours = lanes * arithmetic(cell) / (end - middle)
        shares.append(ours / peak)
        print(
            f"width 256, depth 32: {ours / 1e9:.0f} GFLOP/s, a product of {side} x "
            f"{side}: {peak / 1e9:.0f}"
        )
    print(f"share, median of 3: {statistics.median(shares):.2f}")


def against_torch(
    python: str, data: datasets.Dataset, depths: list[int], pairs: int
) -> None:
    """Print how many times as many runs mupax trains as PyTorch with mup.

    Both use as many cores: a device of JAX each, and a process of torch each.
    """
    script = pathlib.Path(__file__).parent / "torch_mup.py"
    multipliers = {"branch_multiplier": (0.5, 1.0, 2.0, 4.0)}
    cores = jax.local_device_count()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "data.npz")
        arrays = data.training_arrays()
        images = np.asarray(data.normalize(arrays)["image"], np.float32)
        np.savez(file, images=images, labels=arrays["label"])
        for depth in depths:
            small = job(depth)
            tuned = dataclasses.replace(
                small, seeds=4, grid={**small.grid, **multipliers}
            )
            ratios: dict[int, list[np.ndarray]] = {small.runs: [], tuned.runs: []}
            for _ in range(pairs):
                command = [python, str(script), str(file), f"--depth={depth}"]
                running = [
                    subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                    for _ in range(cores)
                ]
                runs = [
                    json.loads(process.communicate()[0].splitlines()[-1])
                    for process in running
                ]
                theirs = np.median(np.concatenate(runs), 0) / [cores, 1]
                for cell in (small, tuned):
                    datasets.batch_indices.cache_clear()
                    start = time.perf_counter(), time.process_time()
                    engine.run(cell, data)
                    end = time.perf_counter(), time.process_time()
                    ours = np.subtract(end, start) / cell.runs
                    ratios[cell.runs].append(theirs / ours)
                    print(
                        f"depth {depth}, {cell.runs} runs on {cores} cores: "
                        f"{ours[0]:.3f} s each, of torch {theirs[0]:.3f} s; processor "
                        f"time {ours[1]:.3f} and {theirs[1]:.3f} s",
                        flush=True,
                    )
            for count, measured in ratios.items():
                wall, processor = np.median(measured, 0)
                print(
                    f"depth {depth}, {count} runs, as many in the same time, median of "
                    f"{pairs}: {wall:.1f} times; in the same processor time "
                    f"{processor:.1f} times"
                )


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="the Python of torch and mup")
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--pairs", type=int, default=3, help="with torch")
    parser.add_argument("--only", choices=("plain", "processor", "arithmetic", "torch"))
    given = parser.parse_args()
    data = datasets.open_dataset("digits")
    engine.run(job(4), data)  # what is done once a process
    if given.only in (None, "plain"):
        against_plain(data)
    if given.only in (None, "processor"):
        processor_time(data)
    if given.only in (None, "arithmetic"):
        rate_of_arithmetic(data)
    if given.torch:
        against_torch(given.torch, data, given.depths, given.pairs)


if __name__ == "__main__":
    main()

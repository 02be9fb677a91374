"""`--dry_run` of `mupax sweep` and `mupax transfer`: the cost before any run trains."""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import rich.console
import rich.table

from ..data import Dataset
from ..estimate.flops import count_flops
from .tasks import ZooTask

_SIDE = 1024  # of the matrices that measure the machine's speed


def show(
    tasks: Sequence[ZooTask], dataset: Dataset, console: rich.console.Console
) -> None:
    """Print runs, steps and operations of each task, and the least time of all."""
    table = rich.table.Table(box=None)
    table.add_column("shape")
    for name in ("runs", "steps", "TFLOP"):
        table.add_column(name, justify="right")
    total = 0.0
    for task in tasks:
        work = flops(task, dataset)
        total += work
        cells = f"{task.runs:,}", f"{task.steps:,}", f"{work / 1e12:,.3g}"
        table.add_row(task.name, *cells)
    console.print(table)
    runs = sum(task.runs for task in tasks)
    rate = _rate() * jax.local_device_count()
    console.print(
        f"{runs:,} runs, {total / 1e12:,.3g} TFLOP in products and convolutions: "
        f"at least {total / rate:,.3g} s on this machine, at the {rate / 1e9:,.0f} "
        f"GFLOP/s of a product of {_SIDE} x {_SIDE} matrices. Compilation and small "
        "models take longer. Nothing was trained or written.",
        highlight=False,
        soft_wrap=True,
    )


def flops(task: ZooTask, dataset: Dataset) -> float:
    """Floating-point operations of all runs of a task, by tracing one step."""
    training = task.training(dataset)
    key = jax.eval_shape(lambda: jax.random.key(0))
    hyper = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in task.grid}
    state, fixed = jax.eval_shape(training.init, key, hyper)
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in dataset.spec(task.batch_size).items()
    }
    step = count_flops(training.step, state, fixed, batch, hyper, key)
    return step * task.steps * task.runs


def _rate() -> float:
    """Floating-point operations per second of a large product on one device."""
    x = jnp.ones((_SIDE, _SIDE))
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2.0 * _SIDE**3 / min(times)

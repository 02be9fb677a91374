"""How fast a sweep is: one program a cell, compilation included.

    python benchmarks/sweep.py

24 runs (12 learning rates by 2 seeds) of the residual MLP on digits, 200 steps of
batch 64, at width 64; then the time to trace and compile at depth 8 and 512.
"""

import dataclasses
import statistics
import tempfile
import time

from mupax.experiments import config as configs
from mupax.experiments import data as datasets
from mupax.experiments import transfer
from mupax.experiments.sweeps import engine


def job(depth: int, width: int = 64) -> engine.Job:
    """The cell of this shape under Depth-μP."""
    config, _ = configs.parse(["benchmark", "--config=digits_resmlp"])
    jobs = transfer.plan_jobs(config, configs.points(config))
    cell = next(j for j in jobs if j.parametrization == "depth_mup")
    return dataclasses.replace(cell, depth=depth, width=width)


def main() -> None:
    """Print the times."""
    with tempfile.TemporaryDirectory() as folder:
        data = datasets.load("digits", folder)
    engine.compile_cell(job(4), data)()  # what is done once a process
    for depth, width in ((8, 64), (64, 64), (8, 256)):
        cell = job(depth, width)
        start = time.perf_counter()
        call = engine.compile_cell(cell, data)
        middle = time.perf_counter()
        call()
        end = time.perf_counter()
        # Forward and backward: three products of batch x n by n x n a layer.
        flops = 6 * cell.runs * cell.steps * cell.batch_size * depth * width**2
        print(
            f"width {width}, depth {depth}: {cell.runs} runs in {end - start:.1f} s "
            f"({middle - start:.1f} s of it tracing and compiling), "
            f"{flops / (end - middle) / 1e9:.0f} GFLOP/s"
        )
    ratios = []
    for _ in range(3):  # in pairs, for the machine's speed drifts
        times = []
        for depth in (8, 512):
            start = time.perf_counter()
            engine.compile_cell(job(depth), data)
            times.append(time.perf_counter() - start)
        ratios.append(times[1] / times[0])
        print(f"trace and compile: {times[0]:.2f} s at 8, {times[1]:.2f} s at 512")
    print(f"ratio, median of 3: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()

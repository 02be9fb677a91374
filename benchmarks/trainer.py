"""Measure the overhead of the trainer, and the time to its first step.

    python -m benchmarks.trainer [--pairs 5 | --processor]

- The loop: milliseconds per step of `mupax train`'s loop (batches from the pipeline,
  losses fetched, norms and a line of records every 50 steps), relative to repeated
  calls of the same compiled step on one batch; in pairs.
- A checkpoint: how long it blocks the loop, also as a fraction of a minute.
- The start: seconds from the command to the first step of a ViT-Ti, with an empty
  compilation cache and with a full one.
- With `--processor`, only the processor time of a step of the loop, for comparisons
  between versions on a busy machine.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from mupax import zoo
from mupax.experiments.run import open_checkpoints, train
from mupax.experiments.run.config import defaults, parse
from mupax.experiments.run.evaluate import place_batch
from mupax.experiments.run.prepare import PreparedRun, prepare

STEPS = 100


def config(width: int = 64, steps: int = STEPS) -> ConfigDict:
    """A CNN of 0.1 million parameters on noise of CIFAR-10's shape."""
    c = defaults()
    c.dataset = "fake:32x32x3:10"
    c.model = ConfigDict({"name": "cnn", "width": width, "depth": 4})
    c.learning_rate = 1e-3
    c.batch_size = 64
    c.steps = steps
    c.log_every = 50
    c.eval_every = c.save_every = 10 * STEPS
    return c


def bare(run: PreparedRun) -> float:
    """Seconds a step, of the compiled step alone."""
    state = run.program.init_on_mesh(run.built.create)
    feed = run.dataset.train(run.options.batch_size, 0)
    batch = place_batch(next(feed), zoo.batch_sharding(run.program.mesh))
    feed.close()
    step = run.program.jit_step()
    for _ in range(3):
        state, out = step(state, batch, run.program.hyper)
    jax.block_until_ready(out)
    start = time.perf_counter()
    for _ in range(STEPS):
        state, out = step(state, batch, run.program.hyper)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / STEPS


def looped(run: PreparedRun, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds per step of the loop, without its first steps and its end."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        train(
            run.built.model,
            run.program,
            run.dataset,
            run.options,
            workdir=pathlib.Path(folder) / "run",
            create=run.built.create,
            on_step=lambda step, loss, line: times.append(clock()),
        )
    # The last step waits for evaluation and checkpoint.
    return (times[-2] - times[2]) / (len(times) - 4)


def checkpoint(run: PreparedRun) -> float:
    """Seconds that saving blocks the loop; files are written in the background."""
    state = run.program.init_on_mesh(run.built.create)
    seconds = []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_checkpoints(pathlib.Path(folder)) as checkpoints,
    ):
        for step in range(1, 6):
            start = time.perf_counter()
            checkpoints.save(step, state, {})
            seconds.append(time.perf_counter() - start)
            checkpoints.wait()
    return statistics.median(seconds)


def first_step(cache: str) -> float:
    """Seconds from the command to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        args = [
            *("train", "--config=cifar10_vit", f"--workdir={folder}/run"),
            *("--config.dataset=fake:32x32x3:10", "--config.augment=()"),
            *("--config.log_every=1", "--config.steps=50"),
            *("--config.schedule.warmup=0", "--config.model.depth=12"),
        ]
        start = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "mupax", *args],
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache},
            stdout=subprocess.DEVNULL,
        )
        records = pathlib.Path(folder) / "run" / "metrics.jsonl"
        while not (records.exists() and records.stat().st_size):
            if child.poll():
                raise RuntimeError(f"the run ended with {child.returncode}")
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        child.kill()
        child.wait()
    return seconds


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--processor", action="store_true")
    options = parser.parse_args()
    if options.processor:
        run = prepare(parse(config(width=32, steps=24)))
        seconds = [looped(run, time.process_time) for _ in range(2)]
        print(f"the loop: {1000 * min(seconds):.1f} ms of processor time per step")
        return
    pairs = options.pairs
    run = prepare(parse(config()))
    ratios, alone = [], []
    for pair in range(pairs):
        measures = [bare, looped][:: 1 if pair % 2 else -1]
        times = {measure: measure(run) for measure in measures}
        ratios.append(times[looped] / times[bare])
        alone.append(times[bare])
    print(
        f"step {1000 * statistics.median(alone):.1f} ms; the loop takes "
        f"{statistics.median(ratios):.3f} of it (median of {pairs} pairs, "
        f"{min(ratios):.3f} to {max(ratios):.3f})"
    )
    stop = checkpoint(run)
    print(f"checkpoint: {1000 * stop:.0f} ms, {stop / 60:.2%} at one a minute")
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = first_step(cache), first_step(cache)
    print(f"ViT-Ti, to the first step: {cold:.1f} s, with the cache {warm:.1f} s")


if __name__ == "__main__":
    main()

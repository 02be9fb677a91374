"""Measure the memory of a process over an hour of training on small data.

    python -m benchmarks.soak [--minutes 60]

Trains a small residual MLP on digits with augmentation, evaluations and checkpoints
every 200 steps, and prints the resident memory of the process ten times.
"""

import argparse
import contextlib
import pathlib
import resource
import tempfile
import time

from ml_collections import ConfigDict

from mupax.experiments.run import train
from mupax.experiments.run.config import defaults, parse
from mupax.experiments.run.prepare import prepare


def resident() -> float:
    """Resident memory of this process, MiB."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Enough(Exception):
    """Raised when the time is up."""


def soak(minutes: float, points: int = 10, every: int = 200) -> list[tuple[int, float]]:
    """Train for some minutes, and return (step, MiB) at equal intervals.

    Args:
      minutes: duration.
      points: number of measurements.
      every: steps between evaluations and checkpoints.
    """
    c = defaults()
    c.dataset = "digits"
    c.augment = ({"name": "rotate", "degrees": 10},)
    c.model = ConfigDict({"name": "resmlp", "width": 64, "depth": 8})
    c.learning_rate = 1e-3
    c.batch_size = 64
    c.steps = 10**9
    c.log_every = 100
    c.eval_every = c.save_every = every
    prepared = prepare(parse(c))
    sizes: list[tuple[int, float]] = []
    start = time.monotonic()

    def watch(step: int, loss: float, line: dict[str, float]) -> None:
        if time.monotonic() - start > 60 * minutes * (len(sizes) + 1) / points:
            sizes.append((step, resident()))
        if len(sizes) == points:
            raise Enough

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Enough):
        train(
            prepared.built.model,
            prepared.program,
            prepared.dataset,
            prepared.options,
            workdir=pathlib.Path(folder) / "run",
            create=prepared.built.create,
            on_step=watch,
            learning_rate=prepared.config.learning_rates,
        )
    return sizes


def main() -> None:
    """Print the memory during training."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    for step, size in soak(parser.parse_args().minutes):
        print(f"step {step:>9,}: {size:,.0f} MiB")


if __name__ == "__main__":
    main()

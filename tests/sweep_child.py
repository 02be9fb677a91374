"""Sweeps a toy in a process of its own kind: many devices, or little memory.

    python tests/sweep_child.py DEVICES [MEBIBYTES [blind]]

Prints as JSON the losses, and how many points each chunk took. With MEBIBYTES that
is what the process may yet allocate, by the system's own limit, once it has started;
with "blind" the sweep is told that memory has no end, and learns by running out.
Not a test: test_sweep_machines.py starts it.
"""

import json
import math
import os
import pathlib
import resource
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import sweep_toys

from mupax.experiments import memory
from mupax.experiments.sweep import engine

RATES = tuple(float(x) for x in range(-12, -4))


def limit(mebibytes: int) -> None:
    """Let the process allocate so much more, and no byte beyond."""
    jax.block_until_ready(jax.numpy.ones(()) + 1)  # what the runtime itself takes
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGESIZE") + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Sweeps."""
    devices, mebibytes = int(sys.argv[1]), int([*sys.argv, "0"][2])
    jax.config.update("jax_num_cpu_devices", devices)
    chunks = []
    call = engine.Chunks.__call__

    def counted(self, points):
        chunks.append(len(points))
        return call(self, points)

    engine.Chunks.__call__ = counted  # type: ignore[method-assign]
    if mebibytes:  # as on accelerators, where memory grows with the runs at once
        engine.at_once = lambda: True
    task = sweep_toys.task(log2_lr=RATES)
    if mebibytes:
        # Weights, moments and gradients of 16 runs are 256 MiB, and as much again is
        # in flight.
        task = sweep_toys.task(log2_lr=RATES, width=512, steps=6)
        limit(mebibytes)
    if "blind" in sys.argv:
        memory.host = lambda: math.inf
    found = engine.run(task, sweep_toys.stripes())
    json.dump({"losses": found.loss.tolist(), "chunks": chunks}, sys.stdout)


if __name__ == "__main__":
    main()

"""One of several processes: JAX's own multi-controller runtime, joined and left."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from ..errors import UserError

FLAGS = {"distributed": False, "coordinator": "", "processes": 0, "process": -1}


@contextlib.contextmanager
def joined(flags: dict[str, Any]) -> Iterator[None]:
    """Join the other processes, if there are any.

    Args:
      flags: values of `FLAGS`. `distributed` alone lets JAX find the others, as it
        can on Cloud TPU, GKE, Slurm and MPI.

    Raises:
      UserError: they cannot be found.
    """
    if not flags["distributed"]:
        for name in ("coordinator", "processes", "process"):
            if flags[name] != FLAGS[name]:
                raise UserError(f"--{name} needs --distributed")
        yield
        return
    given: dict[str, Any] = {
        "coordinator_address": flags["coordinator"] or None,
        "num_processes": flags["processes"] or None,
        "process_id": flags["process"] if flags["process"] >= 0 else None,
    }
    try:
        jax.distributed.initialize(**given)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the other processes were not found ({_first_line(error)}); where JAX "
            "does not find them by itself, give --coordinator=host:port, --processes "
            "and --process"
        ) from None
    try:
        yield
    finally:
        jax.distributed.shutdown()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no reason"

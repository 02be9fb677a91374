"""The flags of commands that run in several processes."""

import os
from contextlib import AbstractContextManager

from mupax.zoo.weights import remote

from .flags import Flag, Parsed

FLAGS = (
    Flag(
        "distributed",
        False,
        "this is one of several processes; JAX finds the others on Cloud TPU, GKE, "
        "Slurm and MPI; elsewhere also give the next three flags",
    ),
    Flag("coordinator", "", "host:port on which process 0 listens"),
    Flag("processes", 0, "number of processes"),
    Flag("process", -1, "index of this process, from 0"),
    Flag(
        "timeout",
        45,
        "seconds to wait for the other processes, at the start and when one no longer "
        "answers; default: 45",
    ),
)


def joined(given: Parsed) -> AbstractContextManager[None]:
    """Join the other processes, whose settings are the same except for `FLAGS`."""
    import jax

    import mupax

    from ..run import processes
    from ..run.config import plain

    flags = {flag.name: given.flags[flag.name] for flag in FLAGS}
    workdir = given.workdir
    settings = {
        "versions": {"mupax": mupax.__version__, "jax": jax.__version__},
        "command": given.argv[0],
        "config": plain(given.config) | {"data_dir": None},
        "--workdir": workdir if remote.is_remote(workdir) else os.path.abspath(workdir),
        **{f"--{name}": x for name, x in given.flags.items() if name not in flags},
    }
    return processes.joined(settings, **flags)

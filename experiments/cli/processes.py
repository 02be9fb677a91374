"""The flags of commands that run in several processes."""

import os
from typing import Any

from .. import remote
from .flags import Flag

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


def of(own: dict[str, Any]) -> dict[str, Any]:
    """The values of `FLAGS`, as arguments of `joined`."""
    return {flag.name: own[flag.name] for flag in FLAGS}


def settings(
    argv: list[str], config: Any, workdir: str, own: dict[str, Any]
) -> dict[str, Any]:
    """The settings that must be the same in all processes."""
    import jax

    import mupax

    from ..run.config import plain

    plain_config = plain(config)
    plain_config.pop("data_dir", None)
    own_flags = {flag.name for flag in FLAGS}
    return {
        "versions": {"mupax": mupax.__version__, "jax": jax.__version__},
        "command": argv[0],
        "config": plain_config,
        "--workdir": workdir if remote.is_remote(workdir) else os.path.abspath(workdir),
        **{f"--{name}": own[name] for name in own if name not in own_flags},
    }

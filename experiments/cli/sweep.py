"""`mupax sweep`."""

from .command import Command
from .flags import Flag, Parsed

DRY_RUN = Flag(
    "dry_run", False, "print number, sizes and cost of the runs, and train nothing"
)
FLAGS = (
    Flag("executor", "here", "where runs train: here (default), local, dask or slurm"),
    Flag("workers", 2, "parallel tasks of the other executors; default: 2"),
    Flag(
        "scheduler",
        None,
        "address of a Dask scheduler, e.g. tcp://host:8786; default: a cluster on this "
        "machine",
    ),
    Flag(
        "stop_diverged",
        False,
        "stop diverged runs; on accelerators, only once the whole chunk has diverged",
    ),
    DRY_RUN,
)


def run(given: Parsed) -> None:
    """Train the runs of the grid, and print the verdicts."""
    from ..run import bucket
    from ..sweep import main

    command = ["mupax", *given.argv]
    if given.flags["dry_run"]:
        main.run(given.config, given.workdir, command, **given.flags)
        return
    with bucket.opened(given.workdir) as folder:
        main.run(given.config, folder, command, **given.flags)


COMMAND = Command(
    "run a grid of hyperparameters at several model sizes, and report which transfer",
    run,
    FLAGS,
)

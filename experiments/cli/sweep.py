"""`mupax sweep`."""

from .command import Command
from .flags import Flag, parse

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


def run(argv: list[str]) -> None:
    """Train the runs of the grid, and print the verdicts."""
    from ..run import mirror
    from ..sweep import main

    config, workdir, own = parse(argv, FLAGS)
    if own["dry_run"]:
        main.run(config, workdir, command=["mupax", *argv], dry_run=True)
        return
    with mirror.opened(workdir) as folder:
        main.run(
            config,
            folder,
            command=["mupax", *argv],
            executor=own["executor"],
            workers=own["workers"],
            address=own["scheduler"],
            stop_diverged=own["stop_diverged"],
        )


COMMAND = Command(
    "run a grid of hyperparameters at several model sizes, and report which transfer",
    run,
    FLAGS,
)

"""`mupax train`."""

from . import processes
from .command import Command
from .flags import Flag, parse

FLAGS = (
    Flag("dry_run", False, "print a description of the run without training"),
    *processes.FLAGS,
)


def run(argv: list[str]) -> None:
    """Train, alone or with other processes."""
    from ..run import commands
    from ..run.processes import joined

    config, workdir, own = parse(argv, FLAGS)
    with joined(processes.settings(argv, config, workdir, own), **processes.of(own)):
        commands.run(config, workdir, command=["mupax", *argv], dry_run=own["dry_run"])


COMMAND = Command(
    "train one model, on one device or on many; run it again to resume", run, FLAGS
)

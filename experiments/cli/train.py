"""`mupax train`."""

from . import processes
from .command import Command
from .flags import Flag, Parsed

FLAGS = (
    Flag("dry_run", False, "print a description of the run without training"),
    *processes.FLAGS,
)


def run(given: Parsed) -> None:
    """Train, alone or with other processes."""
    from ..run import bucket, commands

    config, workdir, command = given.config, given.workdir, ["mupax", *given.argv]
    with processes.joined(given):
        if given.flags["dry_run"]:
            commands.run(config, workdir, command=command, dry_run=True)
            return
        with bucket.opened(workdir, shared=given.flags["distributed"]) as folder:
            commands.run(config, folder, command=command)


COMMAND = Command(
    "train one model, on one device or on many; run it again to resume", run, FLAGS
)

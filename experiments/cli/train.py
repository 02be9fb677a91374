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
    from .. import remote
    from ..run import commands, mirror

    config, workdir, own = parse(argv, FLAGS)
    dry_run, command = own["dry_run"], ["mupax", *argv]
    with processes.joined(argv, config, workdir, own):
        if dry_run:
            commands.run(config, workdir, command=command, dry_run=True)
            return
        with mirror.opened(workdir, shared=own["distributed"]) as folder:
            separate = remote.is_remote(workdir)
            commands.run(config, folder, command=command, separate=separate)


COMMAND = Command(
    "train one model, on one device or on many; run it again to resume", run, FLAGS
)

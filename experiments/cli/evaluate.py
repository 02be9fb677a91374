"""`mupax eval`."""

from . import processes
from .command import Command
from .flags import Flag, parse

FLAGS = (
    Flag("checkpoint", "latest", "latest (default), best, or a step"),
    *processes.FLAGS,
)


def run(argv: list[str]) -> None:
    """Evaluate a checkpoint and print the result."""
    from ..run import commands, mirror

    config, workdir, own = parse(argv, FLAGS)
    with (
        processes.joined(argv, config, workdir, own),
        mirror.opened(workdir, writes=False, shared=own["distributed"]) as folder,
    ):
        commands.evaluate(config, folder, own["checkpoint"])


COMMAND = Command("evaluate a checkpoint of a run on the test split", run, FLAGS)

"""`mupax eval`."""

from . import processes
from .command import Command
from .flags import Flag, Parsed

FLAGS = (
    Flag("checkpoint", "latest", "latest (default), best, or a step"),
    *processes.FLAGS,
)


def run(given: Parsed) -> None:
    """Evaluate a checkpoint and print the result."""
    from ..run import bucket, commands

    shared = given.flags["distributed"]
    with (
        processes.joined(given),
        bucket.opened(given.workdir, writes=False, shared=shared) as folder,
    ):
        commands.evaluate(given.config, folder, given.flags["checkpoint"])


COMMAND = Command("evaluate a checkpoint of a run on the test split", run, FLAGS)

"""`mupax explain`."""

from ..errors import visible
from .command import Command
from .flags import parse


def run(argv: list[str]) -> None:
    """Print the table of a training config's model, or of a transfer's target."""
    from .. import transfer
    from ..run import commands

    config, *_ = parse(argv)
    explain = transfer.explain_target if "sweep" in config else commands.explain
    print(visible(str(explain(config)), keep="\n"))


COMMAND = Command(
    "print role, initialization and learning rate of each parameter of a config's "
    "model",
    run,
    workdir=False,
)

"""`mupax explain`."""

from ..errors import visible
from .command import Command
from .flags import Parsed


def run(given: Parsed) -> None:
    """Print the table of a training config's model, or of a transfer's target."""
    from .. import transfer
    from ..run import commands

    explain = transfer.explain_target if "sweep" in given.config else commands.explain
    print(visible(str(explain(given.config)), keep="\n"))


COMMAND = Command(
    "print role, initialization and learning rate of each parameter of a config's "
    "model",
    run,
    workdir=False,
)

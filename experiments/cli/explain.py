"""`mupax explain`."""

from .command import Command
from .flags import parse


def run(argv: list[str]) -> None:
    """Print the table of a training config's model, or of a sweep's target."""
    from .. import transfer
    from ..run import job

    config, *_ = parse(argv)
    swept = "sweep" in config
    print(transfer.explain_target(config) if swept else job.explain(config))


COMMAND = Command(
    "print role, initialization and learning rate of each parameter of a config's "
    "model",
    run,
    workdir=False,
)

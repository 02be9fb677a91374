"""`mupax transfer`."""

from .command import Command
from .flags import parse
from .sweep import DRY_RUN

FLAGS = (DRY_RUN,)


def run(argv: list[str]) -> None:
    """Sweep, train the target, write the report."""
    from .. import transfer
    from ..run import mirror

    config, workdir, own = parse(argv, FLAGS)
    if own["dry_run"]:
        transfer.dry_run(config, workdir)
        return
    with mirror.opened(workdir) as folder:
        transfer.run(config, folder, command=["mupax", *argv])


COMMAND = Command(
    "tune small models, train the large one with the same hyperparameters, write a "
    "report",
    run,
    FLAGS,
)

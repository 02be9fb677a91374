"""`mupax transfer`."""

from .command import Command
from .flags import Parsed
from .sweep import DRY_RUN


def run(given: Parsed) -> None:
    """Sweep, train the target, write the report."""
    from .. import transfer
    from ..run import bucket

    if given.flags["dry_run"]:
        transfer.dry_run(given.config, given.workdir)
        return
    with bucket.opened(given.workdir) as folder:
        transfer.run(given.config, folder, command=["mupax", *given.argv])


COMMAND = Command(
    "tune small models, train the large one with the same hyperparameters, write a "
    "report",
    run,
    (DRY_RUN,),
)

"""`mupax coord-check`."""

from .command import Command
from .flags import Flag, parse

FLAGS = (
    Flag("widths", "", "e.g. 64,128,256; default: 1, 2 and 4 times the base width"),
    Flag("depths", "", "e.g. 4,8,16; default: 1, 2 and 4 times the base depth"),
    Flag("seeds", 4, "number of initializations; default: 4"),
    Flag("rate", None, "learning rate; default: the config's", kind=float),
    Flag("tolerance", 0.15, "largest slope that passes; default: 0.15"),
)


def run(argv: list[str]) -> None:
    """Run the coordinate check of a training config."""
    from .. import coord_check
    from ..run import mirror

    config, workdir, own = parse(argv, FLAGS)
    with mirror.opened(workdir) as folder:
        coord_check.run(config, folder, learning_rate=own.pop("rate"), **own)


COMMAND = Command(
    "check that activations of a config's model change alike at every width and depth",
    run,
    FLAGS,
)

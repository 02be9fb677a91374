"""`mupax coord-check`."""

from .command import Command
from .flags import Flag, Parsed

FLAGS = (
    Flag("widths", "", "e.g. 64,128,256; default: 1, 2 and 4 times the base width"),
    Flag("depths", "", "e.g. 4,8,16; default: 1, 2 and 4 times the base depth"),
    Flag("seeds", 4, "number of initializations; default: 4"),
    Flag("rate", None, "learning rate; default: the config's", kind=float),
    Flag(
        "tolerance",
        0.15,
        "a slope up to this passes, within its error and if surely below 0.25; "
        "default: 0.15. The exit status is 1 if a slope is wrong",
    ),
)


def run(given: Parsed) -> int:
    """Run the coordinate check of a training config; returns 1 if it is wrong."""
    from .. import coord_check
    from ..run import bucket

    rate = given.flags.pop("rate")
    with bucket.opened(given.workdir) as folder:
        result = coord_check.run(
            given.config, folder, learning_rate=rate, **given.flags
        )
    return 1 if result.failed else 0


COMMAND = Command(
    "check that activations of a config's model change alike at every width and depth",
    run,
    FLAGS,
)

"""`mupax search`."""

from .command import Command
from .flags import Flag, Parsed

FLAGS = (
    Flag("candidates", 16, "candidates of each round, at least 4; default: 16"),
    Flag("rounds", 8, "rounds of candidates; default: 8"),
    Flag(
        "radius",
        1.0,
        "initial standard deviation of the candidates around the start, in octaves "
        "(factors of 2); default: 1",
    ),
)


def run(given: Parsed) -> None:
    """Search hyperparameters on the base, and write the best of them."""
    from ..run import bucket
    from ..sweep import search

    with bucket.opened(given.workdir) as folder:
        search.run(given.config, folder, **given.flags)


COMMAND = Command(
    "search many hyperparameters of the base at once, also of groups of parameters",
    run,
    FLAGS,
)

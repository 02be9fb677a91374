"""`mupax figure`."""

from .command import Command


def run(argv: list[str]) -> None:
    """List the figures, or draw one."""
    from ..papers import figures

    figures.run(argv)


def text() -> str:
    """The help text of the figures."""
    from ..papers import figures

    return figures.HELP


COMMAND = Command(
    "redraw a figure of the papers and check its claim; `figure list` lists them",
    run,
    text=text,
)

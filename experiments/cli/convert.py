"""`mupax convert`."""

from .command import Command


def run(argv: list[str]) -> None:
    """Convert weights, and print what was done."""
    from .. import convert

    convert.run(argv)


def text() -> str:
    """The flags, as the converter describes them."""
    from ..convert import HELP

    return HELP


COMMAND = Command(
    "convert weights from and to timm, torchvision, big_vision and transformers",
    run,
    text=text,
)

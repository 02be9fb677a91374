"""`mupax models`."""

import difflib

from ..errors import UserError
from .command import Command
from .flags import parse_own


def run(argv: list[str]) -> None:
    """Print the names of the zoo's models, one per line.

    Raises:
      UserError: an unknown flag, a second word, or a pattern that matches no model.
    """
    from mupax import zoo

    patterns, _ = parse_own(argv, (), arguments=1)
    names = zoo.list_models(*patterns)
    if not names:
        everything = zoo.list_models()
        near = difflib.get_close_matches(patterns[0].strip("*"), everything, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"no model is named {patterns[0]!r}{hint}; models are: "
            f"{', '.join(everything)}"
        )
    print("\n".join(names))


COMMAND = Command(
    "list the models of the zoo; a pattern may follow, e.g. 'res*'",
    run,
    text=lambda: "  PATTERN          a pattern of names, e.g. 'res*'; default: all",
)

"""`mupax models`."""

import difflib

from ..errors import UserError
from .command import Command

HELP = "  PATTERN          which names, e.g. 'res*'; default: all"


def run(argv: list[str]) -> None:
    """Print the names of the zoo's models, one a line."""
    for name in matching(argv[1:]):
        print(name)


def matching(words: list[str]) -> list[str]:
    """The models that a pattern names.

    Args:
      words: the pattern, or none.

    Raises:
      UserError: a flag, a second word, or a pattern that names no model.
    """
    from mupax import zoo

    for word in words:
        if word.startswith("-"):
            raise UserError(f"Unknown command line flag {word!r}; models takes none")
    if len(words) > 1:
        raise UserError(f"unexpected argument {words[1]!r}; give one pattern in quotes")
    found = zoo.list_models(*words)
    if not found:
        near = difflib.get_close_matches(words[0].strip("*"), zoo.list_models(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"no model is named {words[0]!r}{hint}; models are: "
            f"{', '.join(zoo.list_models())}"
        )
    return found


COMMAND = Command(
    "list the models of the zoo; a pattern may follow, e.g. 'res*'",
    run,
    text=lambda: HELP,
)

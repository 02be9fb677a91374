"""The definition of a subcommand, and the list of all."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .flags import Flag, Parsed, parse, parser, wrapped

Run = Callable[[Parsed], int | None]


@dataclasses.dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
      summary: one line for the list of commands.
      run: takes the parsed command line; returns the exit status, or None for 0.
      flags: its own flags.
      config: whether it takes `--config`, its overrides and `--workdir`.
      words: maximal number of arguments without dashes.
      arguments: their help text.
      examples: command lines, shown last.
    """

    summary: str
    run: Run
    flags: Sequence[Flag] = ()
    config: bool = True
    words: int = 0
    arguments: str = ""
    examples: str = ""

    def __call__(self, argv: Sequence[str]) -> int:
        """Parse a command line, which begins with the command's name, and run it."""
        given = parse(argv, self.flags, config=self.config, words=self.words)
        return self.run(given) or 0

    def help(self, name: str) -> str:
        """The output of `mupax NAME --help`."""
        summary = "\n\n".join(filter(None, [wrapped(self.summary), self.arguments]))
        examples = f"examples:\n{self.examples}" if self.examples else ""
        texts = {"description": summary, "epilog": examples}
        return parser(name, self.flags, config=self.config, **texts).format_help()


COMMANDS: dict[str, Command] = {}


def command(name: str, summary: str, *flags: Flag, **more: Any) -> Callable[[Run], Run]:
    """Make a command of a function; the arguments are those of `Command`."""

    def register(run: Run) -> Run:
        COMMANDS[name] = Command(summary, run, flags, **more)
        return run

    return register

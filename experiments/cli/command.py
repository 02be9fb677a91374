"""The definition of a subcommand, and the list of all."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .flags import CONFIG, WORKDIR, Flag, Parsed, describe, parse, wrapped

Run = Callable[[Parsed], int | None]


@dataclasses.dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
      summary: one line for the list of commands.
      run: takes the parsed command line; returns the exit status, or None for 0.
      flags: its own flags.
      config: whether it takes `--config`, its overrides and `--workdir`.
      workdir: whether its help shows `--workdir` too.
      words: maximal number of arguments without dashes.
      arguments: their help text.
      examples: command lines, shown last.
    """

    summary: str
    run: Run
    flags: Sequence[Flag] = ()
    config: bool = True
    workdir: bool = True
    words: int = 0
    arguments: str = ""
    examples: str = ""

    def __call__(self, argv: Sequence[str]) -> int:
        """Parse a command line, which begins with the command's name, and run it."""
        given = parse(argv, self.flags, config=self.config, words=self.words)
        return self.run(given) or 0

    def help(self, name: str) -> str:
        """The output of `mupax NAME --help`."""
        flags = list(self.flags)
        if self.config:
            flags = [*CONFIG, *([WORKDIR] if self.workdir else []), *flags]
        known = "\n".join(filter(None, [self.arguments, describe(flags, name)]))
        summary = wrapped(f"mupax {name}: {self.summary}")
        parts = [summary, known, self.examples]
        return "\n\n".join(filter(None, parts))


COMMANDS: dict[str, Command] = {}


def command(name: str, summary: str, *flags: Flag, **more: Any) -> Callable[[Run], Run]:
    """Make a command of a function; the arguments are those of `Command`."""

    def register(run: Run) -> Run:
        COMMANDS[name] = Command(summary, run, flags, **more)
        return run

    return register

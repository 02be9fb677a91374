"""The definition of a subcommand."""

import dataclasses
from collections.abc import Callable, Sequence

from .flags import CONFIG, WORKDIR, Flag, describe


@dataclasses.dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
      summary: one line for the list of commands.
      run: takes the command's name and its arguments.
      flags: its own flags.
      config: whether it takes `--config` and its overrides.
      workdir: whether it takes `--workdir`.
      text: help text that replaces the list of flags.
    """

    summary: str
    run: Callable[[list[str]], None]
    flags: Sequence[Flag] = ()
    config: bool = True
    workdir: bool = True
    text: Callable[[], str] | None = None

    def help(self, name: str) -> str:
        """The output of `mupax NAME --help`."""
        if self.text:
            return f"mupax {name}: {self.summary}\n\n{self.text()}"
        return f"mupax {name}: {self.summary}\n\n{describe(self.shown())}"

    def shown(self) -> list[Flag]:
        """The flags that the command takes."""
        shared = [*(CONFIG if self.config else ()), *([WORKDIR] * self.workdir)]
        return [*shared, *self.flags]

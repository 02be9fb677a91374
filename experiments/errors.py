"""Exceptions that the command line turns into one sentence."""

import importlib
from typing import Any


class UserError(Exception):
    """Bad input. The message is one sentence that names the remedy.

    The command line prints it and exits with status 2. Existing files are unchanged.
    """


class Diverged(UserError):
    """The training loss is not finite."""


class Stopped(Exception):
    """A run was told to stop, and saved a checkpoint.

    Attributes:
      step: of the checkpoint.
    """

    def __init__(self, step: int):
        super().__init__(f"stopped and saved at step {step}")
        self.step = step


def import_extra(package: str, extra: str, user: str) -> Any:
    """Import a package that an extra of mupax installs.

    Args:
      package: its name.
      extra: the extra, e.g. "search" of `pip install 'mupax[search]'`.
      user: what needs it, for the message.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(
            f"{user} needs {package}: pip install 'mupax[{extra}]'"
        ) from None

"""Exceptions that the command line turns into one sentence."""

import importlib
import re
from collections.abc import Iterable
from typing import Any

from mupax.optim.rules.parametrizations import closest
from mupax.zoo.addresses import public


class UserError(Exception):
    """Bad input. The message is one sentence that names the remedy.

    The command line prints it and exits with status 2. Existing files are unchanged.
    Addresses in the message lose user, password and query.
    """

    def __init__(self, message: object = ""):
        super().__init__(public(str(message)))


class Diverged(UserError):
    """The training loss is not finite."""


class Stopped(Exception):
    """A run received SIGTERM, and saved a checkpoint.

    Attributes:
      step: of the checkpoint.
    """

    def __init__(self, step: int):
        super().__init__(f"stopped and saved at step {step}")
        self.step = step


def reason(error: BaseException, most: int = 200) -> str:
    """The message of an error as one line, shortened; its type if it has no message.

    Examples:
      >>> reason(OSError(28, "No space left on device", "/tmp/a"))
      'No space left on device'
      >>> reason(KeyboardInterrupt())
      'KeyboardInterrupt'
    """
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return short(text, most) or type(error).__name__


# Control characters, separators of lines, directions of writing, lone surrogates.
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str, keep: str = "") -> str:
    r"""Text for a terminal, with control characters written as escapes.

    A terminal would obey them: text of a file could clear the screen, or look like
    another line of the output.

    Args:
      text: e.g. labels of a model's file.
      keep: control characters that stay, e.g. "\n".

    Examples:
      >>> print(visible("a cat\x1b[2J\n99 % a dog"))
      a cat\x1b[2J\n99 % a dog
    """

    def escape(found: re.Match[str]) -> str:
        return found[0] if found[0] in keep else ascii(found[0])[1:-1]

    return _HIDDEN.sub(escape, text)


def short(value: Any, most: int = 120) -> str:
    """A value as text of at most `most` characters, without secrets of addresses.

    Examples:
      >>> short("x" * 300, 8)
      'xxxxx...'
    """
    # Before it is cut: the rest of an address would not be recognised.
    text = public(str(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a message about an unknown name; empty if no known name is similar.

    Examples:
      >>> nearest("digts", ["digits", "mnist"])
      "; did you mean 'digits'?"
    """
    near = closest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def import_extra(package: str, extra: str, user: str) -> Any:
    """Import a package that an extra of mupax installs.

    Args:
      package: its name.
      extra: the extra, e.g. "text" of `pip install '.[text]'`.
      user: what needs it, for the message.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(
            f"{user} needs {package}: pip install '.[{extra}]' in a clone of mupax"
        ) from None

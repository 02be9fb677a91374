"""The `mupax` command. Module `commands` lists its subcommands."""

import os
import sys

from mupax.zoo.addresses import public
from mupax.zoo.weights.remote import RemoteError

from ..errors import Stopped, UserError, nearest, reason, visible
from . import commands as commands  # which registers them
from .command import COMMANDS
from .flags import wrapped

_LONG = 1000  # letters of a word that a message shortens


def main(argv: list[str]) -> int:
    """Run one command; `argv` is `sys.argv`.

    Returns:
      The exit status: 0; 1 if `coord-check` finds a slope that is wrong; 2 with one
      sentence on stderr for bad input, damaged files or errors of the file system; 130
      after Ctrl-C.
    """
    try:
        return _run(argv[1] if len(argv) > 1 else "help", argv[1:])
    except (UserError, RemoteError) as error:
        return _refuse(str(error))
    except Stopped as error:
        _say(f"{error}; run the same command to resume")
        return 0
    except KeyboardInterrupt:
        _say("interrupted; run the same command to resume")
        return 130
    except BrokenPipeError:
        # A reader such as `head` closed the pipe. Python would print an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno is None:  # raised by mupax, with a sentence
            return _refuse(str(error))
        if error.filename is None:
            return _refuse(f"the system reports: {reason(error)}")
        path = os.fsdecode(error.filename)
        return _refuse(f"{path!r} cannot be used: {reason(error)}")
    except Exception as error:
        from ..memory import ran_out

        if not ran_out(error):
            raise
        return _refuse(
            f"out of memory ({reason(error)}); make the model, the batch or the number "
            "of seeds smaller, or use more devices"
        )


def _run(name: str, argv: list[str]) -> int:
    if name in ("help", "--help", "-h"):
        of = COMMANDS.get(argv[1]) if len(argv) > 1 else None
        print(of.help(argv[1]) if of else _help())
        return 0
    if name in ("--version", "version"):
        print(_version())
        return 0
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or "."
        raise UserError(
            f"there is no command {name!r}{hint} Commands are: {', '.join(COMMANDS)}"
        )
    if {"--help", "-h"} & set(argv[1:]):
        print(COMMANDS[name].help(name))
        return 0
    return COMMANDS[name](argv)


def _refuse(sentence: str) -> int:
    # Whoever mistypes a word of thousands of letters need not read all of them.
    words = public(sentence).split()
    _say(" ".join(w if len(w) < _LONG else f"{w[:100]}...{w[-20:]}" for w in words))
    return 2


def _say(sentence: str) -> None:
    # One write: `print` writes the end of the line separately, and another thread may
    # come between.
    sys.stderr.write(f"mupax: {visible(sentence)}\n")


def _version() -> str:
    import platform

    import jax

    import mupax

    return (
        f"mupax {mupax.__version__} (jax {jax.__version__}, Python "
        f"{platform.python_version()})"
    )


def _help() -> str:
    rows = [
        wrapped(command.summary, head=f"  {name:<11} ")
        for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "mupax: hyperparameter transfer for JAX, across width and depth",
            "",
            "usage: mupax COMMAND --config NAME [--workdir DIR] [--config.KEY=V ...]",
            "       mupax COMMAND --help",
            "       mupax --version",
            "",
            *rows,
        ]
    )

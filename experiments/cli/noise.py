"""Hides secrets, and errors of threads that are explained.

If a disk is full, Orbax and TensorStore print a traceback in each of their threads,
before and after the command's one sentence. `__main__` calls these functions, as they
concern the whole process.
"""

import contextlib
import logging
import sys
import threading
import warnings
from typing import Any

from mupax.zoo.addresses import public

from ..errors import visible


class _Public:
    """A text stream, to which addresses are written without secrets."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(public(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def hide_secrets() -> None:
    """Drop user, password and query from addresses on the screen.

    A second guard, e.g. for tracebacks: messages name addresses without them.
    """
    sys.stdout, sys.stderr = _Public(sys.stdout), _Public(sys.stderr)


def clean_records() -> None:
    """Drop secrets from log records, and write control characters as escapes.

    Handlers of packages keep the stream that they found when they were imported.
    """
    make = logging.getLogRecordFactory()

    def escaped(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        # Python itself reports a record whose arguments do not fit.
        with contextlib.suppress(Exception):
            text = public(record.getMessage())
            record.msg, record.args = visible(text, keep="\n\t"), ()
        return record

    logging.setLogRecordFactory(escaped)


def hide_late_writes() -> None:
    """Hide errors of a checkpoint's other files after one file has failed.

    Orbax raises the first error and stops listening, so TensorStore's threads and
    asyncio print the others.
    """
    others = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            others(unraisable)

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(
        lambda record: "exception was never retrieved" not in record.getMessage()
    )


def hide_threads() -> None:
    """Hide errors of threads and exit handlers; the process is about to end."""
    warnings.simplefilter("ignore")
    threading.excepthook = lambda _: None
    sys.unraisablehook = lambda _: None

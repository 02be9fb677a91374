"""Hides what other threads print about an error that the command explains itself.

If a disk is full, Orbax and TensorStore print a traceback in each of their threads,
before and after the command's one sentence. `__main__` calls these functions, as they
concern the whole process.
"""

import logging
import sys
import threading
import warnings
from typing import Any


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

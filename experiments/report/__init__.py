"""The report of a sweep or a transfer: a self-contained page, and a table.

`write_report` writes report.html; `print_verdicts` prints the same in a terminal.
Module `page` imports Matplotlib; this package does not.
"""

import os
import pathlib

from ..io import write_durably
from .data import SweepData, Trained, machine
from .terminal import print_target, print_verdicts

__all__ = [
    "SweepData",
    "Trained",
    "machine",
    "print_target",
    "print_verdicts",
    "write_report",
]


def write_report(data: SweepData, workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Write report.html.

    Args:
      data: results of a sweep or transfer.
      workdir: an existing directory; a file of the same name is replaced.

    Returns:
      The path of the page.
    """
    from .page import report_page  # Matplotlib takes a second to import

    path = pathlib.Path(workdir) / "report.html"
    write_durably(path, report_page(data))
    return path

"""The report of a sweep or a transfer: a self-contained page, and a table.

`write_report` writes report.html; `print_verdicts` prints the same in a terminal.
Module `page` imports Matplotlib; this package does not.
"""

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


def write_report(
    data: SweepData, folder: pathlib.Path, name: str = "", numbers: str = ""
) -> pathlib.Path:
    """Write report.html into an existing folder, and beside it a file of its numbers.

    If the file has these numbers already, the page is not drawn again.

    Args:
      data: results of a sweep or transfer.
      folder: where both files are written.
      name: of the file of numbers; "" for none, and the page is drawn.
      numbers: content of the file.

    Returns:
      The path of the page.
    """
    page, file = folder / "report.html", folder / name
    known = name and page.exists() and file.exists() and file.read_text() == numbers
    if known and data.trained:  # a page that is newer than its numbers is the sweep's
        known = page.stat().st_mtime_ns <= file.stat().st_mtime_ns
    if not known:
        from .page import report_page  # Matplotlib takes a second to import

        write_durably(page, report_page(data))
        if name:
            write_durably(file, numbers)
    return page

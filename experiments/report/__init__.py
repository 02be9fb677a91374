"""The report of a sweep or a transfer: a self-contained page, and a table.

`write_report` writes report.html, and of a transfer depth.png, width.png, regret.png
and target.png beside it; `print_verdicts` prints the same in a terminal. Module `page`
imports Matplotlib; this package does not.
"""

from .data import SweepData, Trained, machine
from .files import write_report
from .terminal import print_target, print_verdicts

__all__ = [
    "SweepData",
    "Trained",
    "machine",
    "print_target",
    "print_verdicts",
    "write_report",
]

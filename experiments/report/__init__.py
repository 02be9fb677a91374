"""The report of `mupax transfer`: pictures, one self-contained page, a table.

`write_report` writes depth.png, width.png, regret.png, target.png and report.html;
`print_table` says the same in a terminal.
"""

from .data import ReportData
from .page import write_report
from .terminal import print_table

__all__ = ["ReportData", "print_table", "write_report"]

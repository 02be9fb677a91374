"""The reports of `mupax sweep` and `mupax transfer`: self-contained pages, a table.

`write_sweep_report` writes the report.html of a sweep; `write_report` that of a
transfer, with depth.png, width.png, regret.png and target.png beside it;
`print_table` says the same in a terminal.
"""

from .data import ReportData, SweepData
from .page import write_report
from .sweep_page import write_sweep_report
from .terminal import print_table

__all__ = [
    "ReportData",
    "SweepData",
    "print_table",
    "write_report",
    "write_sweep_report",
]

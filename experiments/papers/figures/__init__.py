"""The figures of the papers, redrawn.

| module | contents |
|---|---|
| `job` | the command |
| `registry` | what a figure is: its claim, how it is drawn and checked |
| `tp6`, `bordelon`, `jelassi`, `yaida` | the figures of each paper |
| `rows`, `training` | claims beyond the papers |
| `solved_*` | drawings from the solvers of `papers.theory` |
| `claims_*`, `curves` | from sweeps to drawings and verdicts |
| `parts`, `sizes`, `tables` | the sweeps, their sizes by scale, and their tables |
| `draw`, `drawings`, `pages` | pictures; drawings as CSV; the generated docs |
"""

from .job import figures, run
from .registry import SCALES, Request

__all__ = ["SCALES", "Request", "figures", "run"]

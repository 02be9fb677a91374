"""The figures of the papers, redrawn: a module for each paper.

registry: what a figure is. draw: PNG, SVG and CSV. job: the command.
"""

from .job import HELP, figures, run
from .registry import Drawing, Figure, Line, Panel

__all__ = ["HELP", "Drawing", "Figure", "Line", "Panel", "figures", "run"]

"""The figures of the papers, redrawn; a module for each paper.

registry: what a figure is. draw: PNG, SVG and CSV. job: the command. Those that are
sweeps of networks are listed in sweeps; parts: how they are run; curves and claims_*:
from the runs to lines and verdicts.
"""

from .job import figures, run
from .registry import SCALES, Drawing, Figure, Line, Panel, Request

__all__ = ["SCALES", "Drawing", "Figure", "Line", "Panel", "Request", "figures", "run"]

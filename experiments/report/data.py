"""What the report is made of: the sweep's cells, their optima, the target's curve."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..sweeps.results import Cell, Optimum

Axis = Literal["depth", "width"]
AXES: tuple[Axis, Axis] = ("depth", "width")


@dataclasses.dataclass(frozen=True)
class ReportData:
    """Everything `mupax transfer` found, as plain data.

    Attributes:
      cells: all cells of the sweep. Those of the base width form the depth axis,
        those of the base depth the width axis; the base cell belongs to both.
      optima: (parametrization, width, depth) to its optimum, None where every run
        diverged.
      summary: what summary.json holds.
      labels: parametrization key to the name that a reader sees, in reading order.
      featured: key of the parametrization that the target is trained under; the
        verdict is about this one.
      base_width: width at which depth is swept.
      base_depth: depth at which width is swept.
      target_curve: (step, training loss) of the target.
      target_evals: (step, test loss, test accuracy) of the target.
      settings: nested plain data: config, versions, devices.
      subject: what was trained, in a few words, e.g. "resmlp on digits, Adam".
      command: the command line that makes this report again.
    """

    cells: Sequence[Cell]
    optima: Mapping[tuple[str, int, int], Optimum | None]
    summary: Mapping[str, Any]
    labels: Mapping[str, str]
    featured: str
    base_width: int
    base_depth: int
    target_curve: Sequence[tuple[int, float]]
    target_evals: Sequence[tuple[int, float, float]]
    settings: Mapping[str, Any]
    subject: str
    command: str

    @property
    def parametrizations(self) -> list[str]:
        """Keys that have cells, in the order of `labels`."""
        swept = dict.fromkeys(c.parametrization for c in self.cells)
        return [k for k in dict.fromkeys([*self.labels, *swept]) if k in swept]

    @property
    def reference(self) -> str | None:
        """What the featured parametrization is compared with: sp, or else the first."""
        others = [k for k in self.parametrizations if k != self.featured]
        return "sp" if "sp" in others else next(iter(others), None)

    def label(self, key: str) -> str:
        """The name that a reader sees."""
        return self.labels.get(key, key)

    def along(self, axis: Axis, key: str | None = None) -> list[Cell]:
        """Cells of one axis, smallest first; of one parametrization where given."""
        cells = [
            c
            for c in self.cells
            if key in (None, c.parametrization)
            and (
                c.width == self.base_width
                if axis == "depth"
                else c.depth == self.base_depth
            )
        ]
        return sorted(cells, key=lambda c: size(c, axis))

    def sizes(self, axis: Axis) -> list[int]:
        """All sizes of an axis, ascending, over all parametrizations."""
        return sorted({size(c, axis) for c in self.along(axis)})

    def optimum(self, cell: Cell) -> Optimum | None:
        """The optimum of a cell, None where every run diverged."""
        return self.optima.get((cell.parametrization, cell.width, cell.depth))

    def held(self, axis: Axis) -> str:
        """What stays fixed along an axis: "width 64" while depth is swept."""
        return (
            f"width {self.base_width}"
            if axis == "depth"
            else f"depth {self.base_depth}"
        )


def size(cell: Cell, axis: Axis) -> int:
    """Where a cell stands on an axis."""
    return cell.depth if axis == "depth" else cell.width


def finite(value: Any) -> float | None:
    """A number as float; None for what is missing, NaN or infinite."""
    return float(value) if value is not None and math.isfinite(value) else None

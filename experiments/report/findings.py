"""What a transferred hyperparameter costs, and how the target did, in words."""

import dataclasses

import numpy as np

from ..sweep.results import Cell
from ..sweep.verdict import listed
from . import names
from .data import AXES, Axis, Lines, SweepData, finite, size


@dataclasses.dataclass(frozen=True)
class Finding:
    """How the optimum of one parametrization behaves along one axis.

    Attributes:
      axis: "depth" or "width".
      key: the parametrization's key.
      label: the parametrization's name.
      sizes: swept sizes, ascending.
      optima: log2 of the best learning rate at each size, None: nothing trained.
      at_edge: sizes whose optimum lies at an end of the grid of learning rates.
      shift: octaves between the least and the greatest optimum; None if unknown.
      error: standard error of `shift` over seeds, in octaves.
      regret: loss that the largest model gives up at the smallest model's best
        learning rate; None if unknown.
      own: the largest model's least loss over the grid, mean over seeds.
    """

    axis: Axis
    key: str
    label: str
    sizes: tuple[int, ...]
    optima: tuple[float | None, ...]
    at_edge: tuple[int, ...]
    shift: float | None
    error: float
    regret: float | None
    own: float | None

    @property
    def failed(self) -> list[int]:
        """Sizes at which nothing trained."""
        return [s for s, o in zip(self.sizes, self.optima, strict=True) if o is None]

    @property
    def measured(self) -> bool:
        """Whether there is a shift to speak of."""
        return self.shift is not None and len(self.sizes) > 1

    @property
    def transferred(self) -> float | None:
        """Loss of the largest model at the smallest model's learning rate."""
        if self.own is None or self.regret is None:
            return None
        return self.own + self.regret

    @property
    def diverges(self) -> bool:
        """Whether the largest model trains, but not at the smallest model's rate."""
        ends = self.optima[:1] + self.optima[-1:]
        return len(self.sizes) > 1 and None not in ends and self.regret is None

    @property
    def cost(self) -> float | None:
        """Transferred loss over own best loss; None where a ratio means nothing."""
        if self.transferred is None or self.own is None or self.own <= 0:
            return None
        return self.transferred / self.own if self.transferred > 0 else None


def find(data: Lines, axis: Axis, key: str) -> Finding:
    """Gather what one parametrization does along one axis."""
    cells = data.along(axis, key)
    optima = [data.optimum(c) for c in cells]
    rates = [None if o is None else finite(o.log2_lr) for o in optima]
    known = [o for o in optima if o is not None and finite(o.log2_lr) is not None]
    ends = sorted(known, key=lambda o: o.log2_lr)
    error = (ends[0].error ** 2 + ends[-1].error ** 2) ** 0.5 if len(ends) > 1 else 0.0
    return Finding(
        axis=axis,
        key=key,
        label=data.label(key),
        sizes=tuple(size(c, axis) for c in cells),
        optima=tuple(rates),
        at_edge=tuple(
            size(c, axis)
            for c, o in zip(cells, rates, strict=True)
            if o is not None and not c.log2_lr.min() < o < c.log2_lr.max()
        ),
        shift=finite(data.shift.get(axis, {}).get(key)),
        error=finite(error) or 0.0,
        regret=finite(data.regret.get(axis, {}).get(key)),
        own=_least(cells[-1]) if cells else None,
    )


def _least(cell: Cell) -> float | None:
    # Regret is counted from here, and only where every seed trained.
    loss = cell.loss.mean(axis=0)
    return None if np.isnan(loss).all() else float(np.nanmin(loss))


def octaves(finding: Finding) -> str:
    """The shift with its standard error, as in "3.2 ± 0.1"; without where it is 0."""
    error = f" ± {finding.error:.1f}" if finding.error >= 0.05 else ""
    return f"{finding.shift:.1f}{error}"


def loss(value: float) -> str:
    """A loss to three digits."""
    return f"{value:.3g}"


def cost(finding: Finding) -> str:
    """What the smallest model's learning rate costs the largest, as a ratio."""
    if finding.diverges:
        return "diverges"
    if len(finding.failed) == len(finding.sizes):
        return "nothing trained"
    if finding.transferred is None:
        ends = [s for s in finding.failed if s in (finding.sizes[0], finding.sizes[-1])]
        at = f"nothing trained at {finding.axis} {listed(ends)}"
        return at if ends else "not measured"
    if finding.cost is None:
        return f"+{loss(finding.regret or 0.0)}"
    ratio = finding.cost
    return f"{ratio:.2f}×" if ratio < 9.95 else f"{ratio:.3g}×"


def excess(finding: Finding) -> str | None:
    """The same in words: "ends with 4% more loss"; None where it is not known."""
    if finding.diverges:
        return "diverges"
    ratio = finding.cost
    if ratio is None:
        return None
    if ratio < 1.01:
        return "ends with less than 1% more loss"
    if ratio < 2:
        return f"ends with {ratio - 1:.0%} more loss"
    return f"ends with {ratio:.3g} times the loss"


def target(data: SweepData) -> str:
    """How the target did, in one sentence; "" where none was trained."""
    found = data.trained
    if found is None:
        return ""
    name = f"The target (width {found.sizes.width}, depth {found.sizes.depth})"
    rate = f"{found.learning_rate:.2g}"
    accuracy, train = finite(found.test_accuracy), finite(found.train_loss)
    if train is None:
        return f"{name} diverged at the transferred learning rate {rate}."
    reaches = f"training loss {loss(train)}"
    if accuracy is not None:
        reaches = f"{accuracy:.1%} test accuracy"
    return (
        f"{name}, trained once at the transferred learning rate {rate}, reaches "
        f"{reaches}."
    )


def regret_title(data: Lines) -> str:
    """What the transferred learning rate costs, for the picture of regrets."""
    parts = []
    for axis in AXES:
        f = find(data, axis, data.featured)
        if len(f.sizes) > 1 and (told := excess(f)) is not None:
            parts.append(f"{axis} {f.sizes[-1]} {told}")
    if not parts:
        return "No loss to compare at the transferred learning rate"
    name = data.label(data.featured)
    return f"At the smallest model's learning rate, with {name}, {listed(parts)}"


def notes(data: Lines, axis: Axis) -> list[str]:
    """What a careful reader should know about an axis."""
    found = [find(data, axis, key) for key in data.parametrizations]
    return [
        f"{f.label}: at {axis} {listed(f.at_edge)} the optimum lies at the edge of "
        f"the grid of {names.noun(data.hyperparameter)}, so its true place may be "
        "farther out."
        for f in found
        if f.at_edge
    ]

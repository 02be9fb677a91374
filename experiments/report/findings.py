"""What the numbers say, in words.

Every title and sentence of the report comes from here, and none is written in
advance: the same functions must be right when the optimum moves, when it stays, and
when nothing trained.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..sweep.results import Cell
from . import names
from .data import AXES, Axis, Lines, ReportData, finite, size

# Within one octave either side agrees on the nearest power of two, which is as fine
# as learning rates are tuned in practice and as the default grid can tell.
STAYS_WITHIN = 1.0


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
    def stays(self) -> bool:
        """Whether the optimum stays, as far as a grid of octaves can tell."""
        return self.measured and (self.shift or 0.0) <= STAYS_WITHIN

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

    @property
    def span(self) -> str:
        """The swept range: "from depth 4 to 64"."""
        if len(self.sizes) < 2:
            return f"at {self.axis} {listed(self.sizes)}"
        return f"from {self.axis} {self.sizes[0]} to {self.sizes[-1]}"


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
        shift=finite(data.summary.get("shift_octaves", {}).get(axis, {}).get(key)),
        error=finite(error) or 0.0,
        regret=finite(data.summary.get("regret", {}).get(axis, {}).get(key)),
        own=_least(cells[-1]) if cells else None,
    )


def _least(cell: Cell) -> float | None:
    # Regret is counted from here, and only where every seed trained.
    loss = cell.loss.mean(axis=0)
    return None if np.isnan(loss).all() else float(np.nanmin(loss))


def listed(items: Sequence[object]) -> str:
    """ "4", "4 and 8", "4, 8 and 16"."""
    words = [str(i) for i in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def octaves(finding: Finding) -> str:
    """The shift with its standard error, as in "3.2 ± 0.1"; without where it is 0."""
    error = f" ± {finding.error:.1f}" if finding.error >= 0.05 else ""
    return f"{finding.shift:.1f}{error}"


def factor(shift: float) -> str:
    """A shift in octaves as a ratio of learning rates."""
    return f"{2**shift:.1f}" if shift < 3.3 else f"{2**shift:.0f}"


def loss(value: float) -> str:
    """A loss to three digits."""
    return f"{value:.3g}"


def movement(finding: Finding) -> str:
    """What a measured optimum does: "moves by 3.2 octaves"."""
    verb = "stays within" if finding.stays else "moves by"
    return f"{verb} {finding.shift:.1f} octaves"


def absence(finding: Finding) -> str:
    """Why there is no shift to speak of, as a clause."""
    if not finding.sizes:
        return "nothing was swept"
    if len(finding.failed) == len(finding.sizes):
        return "nothing trained"
    if finding.failed:
        return f"nothing trained at {finding.axis} {listed(finding.failed)}"
    if len(finding.sizes) == 1:
        return f"only {finding.axis} {finding.sizes[0]} was swept"
    return "the shift was not measured"


def caption(finding: Finding) -> str:
    """A panel's second title, short."""
    return f"optimum {movement(finding)}" if finding.measured else absence(finding)


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


def headline(data: ReportData) -> str:
    """The verdict, in one sentence about the featured parametrization."""
    if all(data.optimum(c) is None for c in data.cells):
        return "Nothing trained: every run of the sweep diverged."
    name = data.label(data.featured)
    every = [find(data, axis, data.featured) for axis in AXES]
    if all(len(f.failed) == len(f.sizes) for f in every):
        return f"No answer: with {name}, nothing trained."
    told = [f for f in every if len(f.sizes) > 1]
    if not told:
        return f"No answer: with {name}, only one size was swept."
    known = [f for f in told if f.measured]
    unknown = [absence(f) for f in told if not f.measured]
    if not known:
        return f"No answer: with {name}, {listed(unknown)}."
    stay = [f.axis for f in known if f.stays]
    move = [f.axis for f in known if not f.stays]
    if stay and move:
        verdict = f"transfers across {stay[0]}, but not across {move[0]}"
    elif len(known) == len(AXES):
        verdict = "transfers" if stay else "does not transfer"
    else:
        verdict = f"{'transfers' if stay else 'does not transfer'} across "
        verdict += known[0].axis
    parts = [f"{movement(f)} {f.span}" for f in known]
    # "stays within 0.3 octaves … and within 0.2 octaves …"
    if len(stay) == 2 or len(move) == 2:
        parts[1] = parts[1].split(" ", 1)[1]
    moved = (", but " if stay and move else " and ").join(parts)
    rest = f"; {listed(unknown)}" if unknown else ""
    return f"The learning rate {verdict}: with {name}, its optimum {moved}{rest}."


def contrast(data: Lines, axis: Axis) -> str:
    """How the reference compares with the featured one along an axis, or nothing."""
    key = data.reference
    if key is None or not (other := find(data, axis, key)).sizes:
        return ""
    if all(data.optimum(c) is None for c in data.cells):
        return ""
    mine = find(data, axis, data.featured)
    if not other.measured:
        return f"With {other.label}, {absence(other)}."
    also = ", too," if mine.measured and mine.stays == other.stays else ""
    verb, amount = movement(other).split(" ", 1)
    times = "" if other.stays else f", a factor of {factor(other.shift or 0.0)}"
    return f"With {other.label}, the optimum{also} {verb} {amount} {other.span}{times}."


def consequence(data: Lines, axis: Axis) -> str:
    """What the transferred learning rate costs the largest model, or nothing."""
    keys = [k for k in (data.featured, data.reference) if k is not None]
    found = [find(data, axis, k) for k in keys]
    found = [f for f in found if len(f.sizes) > 1 and excess(f) is not None]
    if not found:
        return ""
    mine, *other = found
    ends = "" if mine.diverges else " than at its own best"
    rest = [f"; with {f.label} it {excess(f)}" for f in other]
    return (
        f"Given the best {names.noun(data.hyperparameter)} of {axis} {mine.sizes[0]}, "
        f"the model of {axis} {mine.sizes[-1]} {excess(mine)}{ends} with "
        f"{mine.label}{''.join(rest)}."
    )


def target(data: ReportData) -> str:
    """How the target did, in one sentence."""
    t = data.summary.get("target") or {}
    rate = finite(t.get("log2_lr"))
    if rate is None:
        return (
            "The target was not trained: there was no learning rate to transfer, "
            "because nothing trained at the base size."
        )
    name = f"The target (width {t['width']}, depth {t['depth']})"
    accuracy, train = finite(t.get("test_accuracy")), finite(t.get("train_loss"))
    if train is None:
        return f"{name} diverged at the transferred learning rate {2**rate:.2g}."
    reaches = f"training loss {loss(train)}"
    if accuracy is not None:
        reaches = f"{accuracy:.1%} test accuracy"
    return (
        f"{name}, trained once at the transferred learning rate {2**rate:.2g}, "
        f"reaches {reaches}."
    )


def title(data: Lines, axis: Axis) -> str:
    """The finding of one axis, for its picture and its section."""
    keys = [k for k in (data.featured, data.reference) if k is not None]
    told = [f for f in (find(data, axis, k) for k in keys) if f.sizes]
    if not told:
        return f"No {axis} was swept"
    known = [f for f in told if f.measured]
    unknown = [f"with {f.label}, {absence(f)}" for f in told if not f.measured]
    parts = [f"{movement(f)} with {f.label}" for f in known]
    joint = ", but "
    if len({f.stays for f in known}) == 1:
        joint = ", and "
        parts[1:] = [p.split(" ", 1)[1] for p in parts[1:]]
    moved = f"the best learning rate {joint.join(parts)}" if parts else ""
    return f"Across {axis}, {'; '.join([moved] * bool(parts) + unknown)}"


def regret_title(data: ReportData) -> str:
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

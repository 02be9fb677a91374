"""From verdicts to sentences: what transfers, what shifts, what cannot be told.

The verdicts themselves are those of `mupax.experiments.sweep.verdict`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..sweep import grids
from ..sweep.results import Population
from ..sweep.verdict import Verdict, listed, reason
from . import findings, names
from .data import Axis, SweepData

GUIDE = (
    "An optimum transfers where the 95 % interval of its shift per doubling of the "
    "size lies within a quarter of an octave, and shifts where the interval excludes "
    "zero and the shift is larger than that. In between the seeds are too few to tell."
)
MANY = 3  # more hyperparameters than that are counted before they are named


@dataclasses.dataclass(frozen=True)
class Row:
    """What one hyperparameter does under one parametrization along one axis.

    Attributes:
      name: of the hyperparameter.
      key: of the parametrization.
      label: its name.
      axis: "depth" or "width".
      sizes: swept sizes, rising.
      optima: `grids.coordinate` of the best value at each; None: nothing trained.
      slope: shift per doubling; None where it is unknown.
      interval: 95 % of the slope; None where it is unknown.
      told: as `sweep.verdict.verdicts` gives it.
      cost: of the smallest size's best value at the largest.
    """

    name: str
    key: str
    label: str
    axis: Axis
    sizes: tuple[int, ...]
    optima: tuple[float | None, ...]
    slope: float | None
    interval: tuple[float, float] | None
    told: Mapping[str, Any]
    cost: str

    @property
    def verdict(self) -> Verdict:
        """The verdict itself."""
        return Verdict(self.told["verdict"])

    @property
    def sign(self) -> str:
        """The verdict as one character, for a glance and for black and white."""
        if self.verdict is Verdict.SHIFTS:
            return "↗" if (self.slope or 0.0) > 0 else "↘"
        return {True: "✓", False: "✗", None: "?"}[self.verdict.known]

    @property
    def reason(self) -> str:
        """What is missing, or where nothing trained."""
        return reason(self.axis, self.told)

    @property
    def shift(self) -> str:
        """The shift with its interval, "−0.98 [−1.05, −0.91]"."""
        if self.slope is None:
            return "–"
        slope = names.signed(self.name, self.slope)
        if self.interval is None:
            return slope
        low, high = (names.signed(self.name, x) for x in self.interval)
        return f"{slope} [{low}, {high}]"

    @property
    def words(self) -> str:
        """The verdict for a table, with a proper minus."""
        return re.sub(r"-(?=\d)", "−", self.told["words"])


def every(data: SweepData) -> list[Row]:
    """All verdicts: by hyperparameter, parametrization and axis."""
    found = []
    for name, by_key in data.verdicts.items():
        lines = data.lines(name)
        for key, label in data.keys.items():
            for axis in data.axes:
                if axis not in by_key.get(key, {}):
                    continue
                told = by_key[key][axis]
                finding = findings.find(lines, axis, key)
                low, high = told["interval"]
                found.append(
                    Row(
                        name,
                        key,
                        label,
                        axis,
                        tuple(told["sizes"]),
                        tuple(told["optimum"]),
                        told["shift_per_doubling"],
                        None if low is None or high is None else (low, high),
                        told,
                        findings.cost(finding) if len(finding.sizes) > 1 else "–",
                    )
                )
    return found


def groups(data: SweepData) -> list[dict[str, Any]]:
    """The rows of the table of verdicts, a group for each hyperparameter."""
    found = every(data)
    return [
        {
            "noun": _capital(names.noun(name)),
            "rows": [_row(v, data.main) for v in found if v.name == name],
            "predicted": [
                {
                    "label": label,
                    "text": f"predicted at {target(data)}: {text}",
                    "featured": key == data.main,
                }
                for key, label in data.keys.items()
                if (text := prediction(data, name, key))
            ],
        }
        for name in data.names
    ]


def _row(found: Row, featured: str) -> dict[str, Any]:
    best = [
        "nothing trained" if x is None else names.value(found.name, x)
        for x in found.optima
    ]
    return {
        "label": found.label,
        "axis": found.axis,
        "sign": found.sign,
        "words": found.words,
        "shift": found.shift,
        "best": list(zip(found.sizes, best, strict=True)),
        "cost": found.cost,
        "featured": found.key == featured,
    }


def prediction(data: SweepData, name: str, key: str) -> str:
    """The predicted optimum at the target with its interval, or nothing."""
    told = data.verdicts[name].get(key, {})
    found = told.get("predicted")
    if found is None or data.target is None:
        return ""
    # An optimum beyond the grid has no place to predict from.
    if any(told[axis]["at_edge"] for axis in data.axes if axis in told):
        return ""
    low, high = (names.value(name, x) for x in found["interval"])
    return f"{names.value(name, found['optimum'])} (95 %: {low} to {high})"


def target(data: SweepData) -> str:
    """The target's sizes."""
    return (
        f"width {data.target.width}, depth {data.target.depth}" if data.target else ""
    )


def headline(data: SweepData) -> str:
    """The verdict, in one sentence about the featured parametrization."""
    if all(dead(p) for p in data.populations):
        return "Nothing trained: every run of the sweep diverged."
    label = data.keys[data.main]
    if all(dead(p) for p in data.of(data.main)):
        return f"No answer: with {label}, nothing trained."
    mine = [v for v in every(data) if v.key == data.main and len(v.sizes) > 1]
    if not mine:
        what = "size" if data.names else "value of each hyperparameter"
        return f"No answer: with {label}, only one {what} was swept."
    by_name = {n: [v for v in mine if v.name == n] for n in data.names}
    if len(by_name) > MANY:
        good = [
            n
            for n, v in by_name.items()
            if {x.verdict for x in v} == {Verdict.TRANSFERS}
        ]
        which = f": {listed([names.noun(n) for n in good])}" if good else ""
        return (
            f"With {label}, {len(good)} of {len(by_name)} hyperparameters transfer "
            f"across {listed(data.axes)}{which}."
        )
    # Those of which the same is said are told together.
    told: dict[tuple[str, str], list[str]] = {}
    for name, found in by_name.items():
        told.setdefault((phrase(found), phrase(found, many=True)), []).append(name)
    parts = []
    for (one, many), group in told.items():
        subject = listed([f"the {names.noun(n)}" for n in group])
        parts.append(f"{subject} {many if group[1:] else one}")
    return f"With {label}, {'; '.join(parts)}."


def dead(population: Population) -> bool:
    """Whether no run of a population came to its end."""
    return bool(np.isnan(population.loss).all())


def phrase(found: Sequence[Row], *, many: bool = False) -> str:
    """What one hyperparameter does along its axes: "transfers across depth and …".

    Args:
      found: verdicts of one hyperparameter and parametrization.
      many: whether the subject is more than one.
    """
    s, do = ("", "do") if many else ("s", "does")
    parts = []
    stay = [v.axis for v in found if v.verdict is Verdict.TRANSFERS]
    if stay:
        parts.append(f"transfer{s} across {listed(stay)}")
    for v in found:
        if v.verdict is Verdict.SHIFTS:
            unit = " octaves" if grids.unit(v.name) != "linear" else ""
            least = " at least" if v.told["at_edge"] else ""
            moved = names.signed(v.name, v.slope or 0.0)
            parts.append(f"shift{s} by{least} {moved}{unit} per doubling of {v.axis}")
    for v in found:
        if v.verdict is Verdict.FAILS:
            parts.append(f"{do} not transfer across {v.axis} ({v.reason})")
    reasons: dict[str, list[str]] = {}
    for v in found:
        if v.verdict.known is None:
            reasons.setdefault(v.reason, []).append(v.axis)
    for why, axes in reasons.items():
        parts.append(f"cannot be judged across {listed(axes)} ({why})")
    return listed(parts)


def title(data: SweepData, name: str, axis: Axis) -> str:
    """The finding about one hyperparameter along one axis, for its picture."""
    found = [v for v in every(data) if v.name == name and v.axis == axis]
    if all(all(x is None for x in v.optima) for v in found):
        return f"{_capital(names.noun(name))}: nothing trained"
    # The featured one first.
    found.sort(key=lambda v: v.key != data.main)
    told: dict[str, list[str]] = {}
    for v in found[:3]:
        told.setdefault(phrase([v]), []).append(v.label)
    parts = [f"{words} with {listed(labels)}" for words, labels in told.items()]
    return f"The best {names.noun(name)} {', '.join(parts)}"


def captions(data: SweepData, name: str, axis: Axis) -> dict[str, str]:
    """What stands above each panel, by parametrization."""
    found = [v for v in every(data) if v.name == name and v.axis == axis]
    return {v.key: f"{v.sign} {v.words}" for v in found}


def fixed(data: SweepData, name: str, axis: Axis) -> str:
    """From which step on the optima stay where they end, in a sentence or nothing."""
    parts: dict[str, list[str]] = {}
    for key, label in data.keys.items():
        told = data.verdicts[name].get(key, {}).get(axis)
        if told is None or all(x is None for x in told["optimum"]):
            continue
        rows = zip(told["sizes"], told["optimum"], told["fixed_after"], strict=True)
        since = {size: share for size, best, share in rows if best is not None}
        moving = [size for size, share in since.items() if share is None]
        if moving:
            when = f"not before the end at {axis} {listed(moving)}"
        else:
            step = max(1, round(max(since.values()) * data.steps))
            when = f"from step {step} of {data.steps} on"
        parts.setdefault(when, []).append(label)
    if not parts:
        return ""
    told = [f"{when} with {listed(labels)}" for when, labels in parts.items()]
    return f"The best {names.noun(name)} stays where it ends {'; '.join(told)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

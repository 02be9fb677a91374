"""From verdicts to sentences: which hyperparameters transfer, and which do not.

The verdicts are those of `mupax.experiments.sweep.verdict`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..sweep import grids
from ..sweep.results import Population
from ..sweep.verdict import SHARE, Transfer, Verdict, listed, percent
from . import names
from .data import Axis, SweepData

GUIDE = (
    "The cost is the share of the loss that the largest model gives up at the base's "
    "best value, with a 90 % interval: seeds are compared one by one. A hyperparameter "
    f"transfers if the upper end of the interval lies below {percent(SHARE)}, or below "
    "the standard deviation of the loss between seeds where that is larger. It does "
    "not transfer if the lower end lies above it, or if the largest model diverges "
    "there, or learns nothing with some seed."
)
MANY = 3  # the headline counts the hyperparameters if there are more


def sign(transfer: Transfer) -> str:
    """The verdict as one character."""
    return {True: "✓", False: "✗", None: "?"}[transfer.verdict.known]


def shift(transfer: Transfer) -> str:
    """The shift per doubling with its interval, "−0.98 [−1.05, −0.91]"."""
    slope, ends = transfer.trend.slope, transfer.trend.interval
    if not math.isfinite(slope):
        return "–"
    text = names.signed(transfer.name, slope)
    if math.isfinite(ends[0]):
        low, high = (names.signed(transfer.name, x) for x in ends)
        text += f" [{low}, {high}]"
    return text


def unit(name: str) -> str:
    """The unit of a shift: "octaves" or "units"."""
    return "units" if grids.unit(name) == "linear" else "octaves"


def groups(data: SweepData) -> list[dict[str, Any]]:
    """The rows of the table of verdicts, a group for each hyperparameter."""
    return [
        {
            "noun": _capital(names.noun(name)),
            "rows": [_row(data, t) for t in data.shown if t.name == name],
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


def _row(data: SweepData, transfer: Transfer) -> dict[str, Any]:
    best = [
        "nothing trained" if x is None else names.value(transfer.name, x)
        for x in transfer.optima
    ]
    moved = shift(transfer)
    if moved != "–":
        moved += f" {unit(transfer.name)} per doubling"
    return {
        "label": data.all_labels[transfer.key],
        "axis": transfer.axis,
        "sign": sign(transfer),
        "words": transfer.words,
        "change": transfer.change_words or "–",
        "shift": moved,
        "best": list(zip(transfer.sizes, best, strict=True)),
        "featured": transfer.key in data.mains,
    }


def prediction(data: SweepData, name: str, key: str) -> str:
    """The predicted optimum at the target with its interval, or ""."""
    predicted = data.verdicts[name].get(key, {}).get("predicted")
    if predicted is None or data.target is None:
        return ""
    # An optimum at the edge of the grid may lie beyond it.
    if any(t.at_edge for t in data.transfers if (t.name, t.key) == (name, key)):
        return ""
    low, high = (names.value(name, x) for x in predicted["interval"])
    return f"{names.value(name, predicted['optimum'])} (95 %: {low} to {high})"


def target(data: SweepData) -> str:
    """The target's sizes, or ""."""
    sizes = data.target
    return f"width {sizes.width}, depth {sizes.depth}" if sizes else ""


def headline(data: SweepData) -> str:
    """The verdict, in one sentence about the featured parametrization."""
    if all(dead(p) for p in data.populations):
        return "Nothing trained: every run of the sweep diverged."
    label = data.keys[data.main]
    if all(dead(p) for p in data.of(data.main)):
        return f"No answer: with {label}, nothing trained."
    transfers = featured(data)
    if not transfers:
        missing = "size" if data.names else "value of each hyperparameter"
        return f"No answer: with {label}, only one {missing} was swept."
    label = data.all_labels[min((t.key for t in transfers), key=len)]
    by_name = {n: [t for t in transfers if t.name == n] for n in data.names}
    if len(by_name) > MANY:
        good = [
            names.noun(name)
            for name, own in by_name.items()
            if {t.verdict for t in own} == {Verdict.TRANSFERS}
        ]
        axes = list(dict.fromkeys(t.axis for t in transfers))
        return (
            f"With {label}, {len(good)} of {len(by_name)} hyperparameters transfer "
            f"across {listed(axes)}{f': {listed(good)}' if good else ''}."
        )
    # Hyperparameters with the same verdicts share one clause.
    clauses: dict[tuple[str, str], list[str]] = {}
    for name, own in by_name.items():
        clause = phrase(own), phrase(own, many=True)
        clauses.setdefault(clause, []).append(f"the {names.noun(name)}")
    parts = [
        f"{listed(subjects)} {many if subjects[1:] else one}"
        for (one, many), subjects in clauses.items()
    ]
    return f"With {label}, {'; '.join(parts)}."


def featured(data: SweepData) -> list[Transfer]:
    """The verdicts of the featured parametrization along axes of several sizes."""
    return [t for t in data.shown if t.key in data.mains and len(t.sizes) > 1]


def dead(population: Population) -> bool:
    """Whether every run of a population diverged."""
    return bool(np.isnan(population.loss).all())


def phrase(transfers: Sequence[Transfer], *, many: bool = False) -> str:
    """The verdicts on one hyperparameter: "transfers across depth and …".

    Args:
      transfers: verdicts of one hyperparameter and parametrization.
      many: whether the subject is plural.
    """
    s, do = ("", "do") if many else ("s", "does")
    parts = []
    if stay := [t.axis for t in transfers if t.verdict is Verdict.TRANSFERS]:
        parts.append(f"transfer{s} across {listed(stay)}")
    unknown: dict[str, list[str]] = {}
    for t in transfers:
        if t.verdict.known is False:
            share = percent(t.regret.share) if t.regret else ""
            why = t.reason or f"costs {share} of the loss at {t.size_text()}"
            parts.append(f"{do} not transfer across {t.axis} ({why})")
        if t.verdict.known is None:
            unknown.setdefault(t.reason, []).append(t.axis)
    for why, axes in unknown.items():
        parts.append(f"cannot be judged across {listed(axes)} ({why})")
    return listed(parts)


def numbers(data: SweepData) -> list[str]:
    """The numbers behind the headline: change and cost, a sentence for each axis."""
    sentences = []
    for t in featured(data)[: 2 * MANY]:
        change = t.trend.change
        if not math.isfinite(change):
            continue
        cost = f"; keeping the base's best value costs {t.cost}" if t.cost else ""
        sentences.append(
            f"While {t.axis} grows {t.sizes[-1] / t.sizes[0]:g}x, the best "
            f"{names.noun(t.name)} changes by {names.factor(t.name, change)}{cost}."
        )
    return sentences


def title(data: SweepData, name: str, axis: Axis) -> str:
    """The finding about one hyperparameter along one axis, for its picture."""
    transfers = data.along_axis(name, axis)
    if all(all(x is None for x in t.optima) for t in transfers):
        return f"{_capital(names.noun(name))}: nothing trained"
    # The featured one first.
    transfers.sort(key=lambda t: t.key != data.main)
    clauses: dict[str, list[str]] = {}
    for t in transfers[:MANY]:
        clauses.setdefault(phrase([t]), []).append(data.keys[t.key])
    parts = [f"{clause} with {listed(labels)}" for clause, labels in clauses.items()]
    return f"The best {names.noun(name)} {'; it '.join(parts)}"


def fixed(data: SweepData, name: str, axis: Axis) -> list[str]:
    """The step after which the optima stay in place, in at most one sentence."""
    clauses: dict[str, list[str]] = {}
    for key, label in data.keys.items():
        verdict = data.verdicts[name].get(key, {}).get(axis)
        if verdict is None:
            continue
        rows = zip(
            verdict["sizes"], verdict["optimum"], verdict["fixed_after"], strict=True
        )
        shares = {size: share for size, best, share in rows if best is not None}
        moving = [size for size, share in shares.items() if share is None]
        if moving:
            clause = f"not before the end at {axis} {listed(moving)}"
        elif shares:
            step = max(1, round(max(shares.values()) * data.steps))
            clause = f"from step {step} of {data.steps} on"
        else:
            continue
        clauses.setdefault(clause, []).append(label)
    if not clauses:
        return []
    parts = [f"{clause} with {listed(labels)}" for clause, labels in clauses.items()]
    return [f"The best {names.noun(name)} stays where it ends {'; '.join(parts)}."]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

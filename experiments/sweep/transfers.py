"""All verdicts of a sweep, for each hyperparameter, parametrization and axis."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .results import Cell, Population, Sizes
from .statistics import AXES, along, predicted
from .verdict import Transfer, transfer


def transfers(populations: Sequence[Population], base: Sizes) -> list[Transfer]:
    """Every verdict over depth and width; the axes cross at `base`.

    Choices count as parametrizations of their own.
    """
    out = []
    keys = dict.fromkeys(p.key() for p in populations)
    names = dict.fromkeys(n for p in populations for n, v in p.axes.items() if v[1:])
    for name, key in itertools.product(names, keys):
        swept = [p for p in populations if name in p.axes]
        for axis in AXES:
            if cells := [p.cell(name) for p in along(swept, key, axis, base)]:
                out.append(transfer(cells, axis, getattr(base, axis)))
    return out


# Choices that scale the training, and the names of their axes.
TRAININGS = {"batch_size": "batch size", "steps": "steps"}


def over_training(
    populations: Sequence[Population], base: Sizes, tuned: Mapping[str, int]
) -> list[Transfer]:
    """The verdicts over batch size and over training length, of the base's model.

    The best values at `tuned`, the base's "batch_size" and "steps", are used at the
    others; those at the smallest if `tuned` was not swept. Other choices count as
    parametrizations.
    """
    lines: dict[tuple[str, str, str], list[tuple[int, Cell]]] = {}
    for p in (p for p in populations if p.sizes == base):
        for choice in (choice for choice in TRAININGS if choice in p.choices):
            key = p.key(without=choice)
            for name in (n for n, values in p.axes.items() if values[1:]):
                cell = dataclasses.replace(p.cell(name), parametrization=key)
                lines.setdefault((name, key, choice), []).append(
                    (p.choices[choice], cell)
                )
    out = []
    for (_, _, choice), line in lines.items():
        if line[1:]:
            sizes, cells = zip(*sorted(line, key=lambda one: one[0]), strict=True)
            axis, at = TRAININGS[choice], tuned.get(choice)
            out.append(transfer(cells, axis, at, sizes))
    return out


def verdicts(
    judged: Sequence[Transfer], base: Sizes, target: Sizes | None = None
) -> dict[str, Any]:
    """All verdicts as JSON-ready data, by hyperparameter, parametrization and axis.

    With a target, also "predicted", the optimum there.
    """
    out: dict[str, Any] = {}
    for one in judged:
        by_key = out.setdefault(one.name, {}).setdefault(one.key, {})
        by_key[one.axis] = one.to_json()
    if target is not None:
        for name, by_key in out.items():
            for key in by_key:
                own = (t for t in judged if (t.name, t.key) == (name, key))
                lines = {t.axis: t.trend for t in own}
                if len(lines) == 2:
                    by_key[key]["predicted"] = predicted(lines, base, target)
    return out

"""All verdicts of a sweep, for each hyperparameter, parametrization and axis."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .results import Cell, Population, Sizes
from .statistics import AXES, along
from .verdict import Transfer, transfer


def transfers(populations: Sequence[Population], base: Sizes) -> list[Transfer]:
    """Every verdict over depth, width and both; the axes cross at `base`.

    The other hyperparameters have the base's best values at every size, as they are
    transferred too. Choices count as parametrizations of their own.
    """
    out = []
    keys = dict.fromkeys(p.key() for p in populations)
    names = dict.fromkeys(n for p in populations for n, v in p.axes.items() if v[1:])
    for name, key in itertools.product(names, keys):
        swept = [p for p in populations if name in p.axes]
        for axis in AXES:
            if line := along(swept, key, axis, base):
                at = next((p for p in line if p.sizes == base), line[0])
                cells = cells_beside(line, name, at)
                out.append(transfer(cells, axis, getattr(base, axis)))
        if line := _joint([p for p in swept if p.key() == key], base):
            out.append(transfer(cells_beside(line, name, line[0]), "joint"))
    return out


def _joint(populations: Iterable[Population], base: Sizes) -> list[Population]:
    """The base and the shapes of another width and depth, by width times depth."""
    line = [
        p for p in populations if (p.width == base.width) == (p.depth == base.depth)
    ]
    line.sort(key=lambda p: (math.prod(p.sizes), p.sizes))
    return line if len(line) > 1 else []


def cells_beside(
    populations: Iterable[Population], name: str, base: Population
) -> list[Cell]:
    """The runs over one hyperparameter, with the base's best values of the others."""
    best = base.best() if np.isfinite(base.loss).any() else {}
    cells = []
    for p in populations:
        for other, value in best.items():
            if other != name and value in p.axes.get(other, ()):
                p = p.at(other, value)
        cells.append(p.cell(name))
    return cells


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
    lines: dict[tuple[str, str, str], list[Population]] = {}
    for p in (p for p in populations if p.sizes == base):
        for choice in (choice for choice in TRAININGS if choice in p.choices):
            for name in (n for n, values in p.axes.items() if values[1:]):
                lines.setdefault((name, p.key(without=choice), choice), []).append(p)
    out = []
    for (name, key, choice), line in lines.items():
        if line[1:]:
            line = sorted(line, key=lambda p: p.choices[choice])
            sizes = [p.choices[choice] for p in line]
            axis, at = TRAININGS[choice], tuned.get(choice)
            first = line[sizes.index(at) if at in sizes else 0]
            cells = [
                dataclasses.replace(cell, parametrization=key)
                for cell in cells_beside(line, name, first)
            ]
            out.append(transfer(cells, axis, at, sizes))
    return out


def verdicts(judged: Sequence[Transfer]) -> dict[str, Any]:
    """All verdicts as JSON-ready data, by hyperparameter, parametrization and axis."""
    out: dict[str, Any] = {}
    for one in judged:
        out.setdefault(one.name, {}).setdefault(one.key, {})[one.axis] = one.to_json()
    return out

"""All verdicts of a sweep, for each hyperparameter, parametrization and axis."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .results import Cell, Population, Sizes
from .statistics import AXES, along
from .verdict import Transfer, transfer

# Choices that scale the training, and the names of their axes.
TRAININGS = {"batch_size": "batch size", "steps": "steps"}


class _Line(NamedTuple):
    """The populations along one axis, small to large."""

    key: str  # the parametrization with its choices
    axis: str  # as `Transfer.axis`
    populations: list[Population]
    sizes: list[int]
    base: int | None  # the size that is tuned


def transfers(
    populations: Sequence[Population],
    base: Sizes,
    tuned: Mapping[str, int | None] | None = None,
) -> list[Transfer]:
    """Every verdict over depth, width, both, batch size and training length.

    The other hyperparameters have the base's best values at every size, as they are
    transferred too. Choices count as parametrizations of their own.

    Args:
      populations: all runs.
      base: where the axes of size cross.
      tuned: the base's "batch_size" and "steps", where they were swept as choices; by
        default the smallest ones.
    """
    out = []
    for name in dict.fromkeys(
        n for p in populations for n, v in p.axes.items() if v[1:]
    ):
        swept = [p for p in populations if name in p.axes]
        for line in _lines(swept, base, tuned or {}):
            at = line.sizes.index(line.base) if line.base in line.sizes else 0
            cells = [
                dataclasses.replace(cell, parametrization=line.key)
                for cell in cells_beside(line.populations, name, line.populations[at])
            ]
            out.append(transfer(cells, line.axis, line.base, line.sizes))
    return out


def _lines(
    populations: Sequence[Population], base: Sizes, tuned: Mapping[str, int | None]
) -> Iterator[_Line]:
    for key in dict.fromkeys(p.key() for p in populations):
        for axis in AXES:
            if line := along(populations, key, axis, base):
                sizes = [getattr(p, axis) for p in line]
                yield _Line(key, axis, line, sizes, getattr(base, axis))
        # The base and the shapes of another width and depth, by width times depth.
        own = (p for p in populations if p.key() == key)
        line = [p for p in own if (p.width == base.width) == (p.depth == base.depth)]
        line.sort(key=lambda p: (math.prod(p.sizes), p.sizes))
        if line[1:]:
            yield _Line(key, "joint", line, [math.prod(p.sizes) for p in line], None)
    for choice, over in TRAININGS.items():
        lines: dict[str, list[Population]] = {}
        for p in populations:
            if p.sizes == base and choice in p.choices:
                lines.setdefault(p.key(without=choice), []).append(p)
        for key, line in lines.items():
            if line[1:]:
                line.sort(key=lambda p: p.choices[choice])
                sizes = [p.choices[choice] for p in line]
                yield _Line(key, over, line, sizes, tuned.get(choice))


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


def verdicts(judged: Sequence[Transfer]) -> dict[str, Any]:
    """All verdicts as JSON-ready data, by hyperparameter, parametrization and axis."""
    out: dict[str, Any] = {}
    for one in judged:
        out.setdefault(one.name, {}).setdefault(one.key, {})[one.axis] = one.to_json()
    return out

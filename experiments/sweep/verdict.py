"""When a hyperparameter transfers: the one definition, for tables and figures alike.

A line is fitted to the optima against log2 of the size (`trend`). The optimum
*transfers* where the 95 % interval of its slope lies within a quarter of a unit (an
octave, for most hyperparameters) per doubling. It *shifts* where the interval excludes
zero and the slope is larger than that. In between, more seeds are needed to tell.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import grids, optima
from .results import Population
from .statistics import Sizes, Trend, fixed_after, key_of, predicted, trend

# Units per doubling: five doublings then stay within about the octave that a grid of
# powers of two can tell.
TOLERANCE = 0.25


class Verdict(enum.StrEnum):
    """What the optimum of a hyperparameter does as the model grows."""

    TRANSFERS = "transfers"
    SHIFTS = "shifts"
    FAILS = "nothing trained"  # at some size
    EDGE = "edge of the grid"  # the optimum may lie beyond
    SEEDS = "more seeds needed"
    ONE_SIZE = "one size"

    @property
    def known(self) -> bool | None:
        """True where it transfers, False where it does not, None where nobody knows."""
        known = {Verdict.TRANSFERS: True, Verdict.SHIFTS: False, Verdict.FAILS: False}
        return known.get(self)


def judge(trend: Trend) -> Verdict:
    """The verdict on a trend."""
    if len(trend.sizes) < 2:
        return Verdict.ONE_SIZE
    if None in trend.optima:
        return Verdict.FAILS
    if len(trend.at_edge) == len(trend.sizes):
        return Verdict.EDGE
    if trend.freedom == 0:
        return Verdict.SEEDS
    low, high = trend.interval
    if (low > 0 or high < 0) and abs(trend.slope) > TOLERANCE:
        return Verdict.SHIFTS
    if trend.at_edge:
        return Verdict.EDGE
    if low >= -TOLERANCE and high <= TOLERANCE:
        return Verdict.TRANSFERS
    return Verdict.SEEDS


def words(name: str, axis: str, told: Mapping[str, Any]) -> str:
    """A verdict, as `verdicts` gives it, in a few words.

    Args:
      name: of the hyperparameter.
      axis: "depth" or "width".
      told: verdict, slope and sizes.
    """
    match Verdict(told["verdict"]):
        case Verdict.TRANSFERS:
            return "transfers"
        case Verdict.SHIFTS:
            unit = "octaves" if grids.unit(name) != "linear" else "units"
            moved = f"shifts by {told['shift_per_doubling']:+.2f} {unit} per doubling"
            beyond = ", at least: the optimum reaches the edge of the grid"
            return moved + beyond * bool(told["at_edge"])
        case Verdict.FAILS:
            return f"does not transfer: {reason(axis, told)}"
    return f"cannot tell: {reason(axis, told)}"


def reason(axis: str, told: Mapping[str, Any]) -> str:
    """Why a verdict is not that it transfers or shifts; "" where it is."""
    match Verdict(told["verdict"]):
        case Verdict.FAILS:
            pairs = zip(told["sizes"], told["optimum"], strict=True)
            failed = [size for size, optimum in pairs if optimum is None]
            return f"nothing trained at {axis} {listed(failed)}"
        case Verdict.EDGE:
            verb = "reaches" if len(told["at_edge"]) < len(told["sizes"]) else "lies at"
            return f"the optimum {verb} the edge of the grid; widen it"
        case Verdict.SEEDS:
            return "more seeds needed"
        case Verdict.ONE_SIZE:
            return f"only one {axis}"
    return ""


def listed(items: Sequence[object]) -> str:
    """ "4", "4 and 8", "4, 8 and 16"."""
    texts = [str(i) for i in items]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


def verdicts(
    populations: Sequence[Population], base: Sizes, target: Sizes | None = None
) -> dict[str, Any]:
    """By hyperparameter, parametrization and axis: optima, shift, regret, verdict.

    Args:
      populations: all of a sweep. Choices count as parametrizations of their own.
      base: the sizes where the axes cross.
      target: the size to predict the optimum at; None for none.

    Returns:
      JSON-ready data. Optima are `grids.coordinate`s; "fixed_after" is the share of
      the run after which each of them stayed, or None.
    """
    out: dict[str, Any] = {}
    keys = dict.fromkeys(key_of(p) for p in populations)
    names = dict.fromkeys(n for p in populations for n, v in p.axes.items() if v[1:])
    for name in names:
        for key in keys:
            mine = [p for p in populations if key_of(p) == key and name in p.axes]
            cells = [
                dataclasses.replace(p.cell(name), parametrization=key) for p in mine
            ]
            found: dict[str, Any] = {}
            trends: dict[str, Trend] = {}
            for axis, fixed in (("depth", base.width), ("width", base.depth)):
                along = optima.along(cells, key, axis, fixed)
                if not along.cells:
                    continue
                trends[axis] = trend(along.cells, axis)
                found[axis] = told(trends[axis], name, axis, along.regret)
                found[axis]["fixed_after"] = [
                    _number(fixed_after(cell)) for cell in along.cells
                ]
            if target is not None and len(trends) == 2:
                found["predicted"] = predicted(trends, base, target)
            out.setdefault(name, {})[key] = found
    return out


def told(
    found: Trend, name: str, axis: str, regret: float | None = None
) -> dict[str, Any]:
    """A trend, its verdict and the verdict's words, as JSON-ready data.

    Args:
      found: the trend.
      name: of the hyperparameter.
      axis: "depth" or "width".
      regret: of the smallest model's optimum at the largest.
    """
    out: dict[str, Any] = {
        "sizes": list(found.sizes),
        "optimum": [None if o is None else round(o, 3) for o in found.optima],
        "at_edge": list(found.at_edge),
        "unit": grids.unit(name),
        "shift_per_doubling": _number(found.slope),
        "interval": [_number(x) for x in found.interval],
        "regret": _number(regret),
        "verdict": judge(found),
    }
    return out | {"words": words(name, axis, out)}


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)

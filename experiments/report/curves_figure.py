"""Learning curves of all sizes at the base's best hyperparameters."""

import dataclasses
import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..sweep import optima
from . import names
from .data import Axis, SweepData, least
from .findings import listed, loss
from .style import INK, MUTED, Page, Sheet, log_ticks, say_nothing, strokes, wrap


@dataclasses.dataclass(frozen=True)
class Curves:
    """The curves of one parametrization along one axis.

    Attributes:
      key: of the parametrization.
      label: its name.
      axis: "depth" or "width".
      at: the hyperparameters; None where the base has none that train every seed.
      curves: size to training loss, shape (seeds, points).
      final: size to the loss at the end, geometric mean over seeds; None: diverged.
      stopped: sizes whose runs were stopped early.
    """

    key: str
    label: str
    axis: Axis
    at: dict[str, float] | None
    curves: dict[int, np.ndarray]
    final: dict[int, float | None]
    stopped: tuple[int, ...] = ()


def find(data: SweepData, axis: Axis, key: str) -> Curves:
    """Gather the curves of one parametrization."""
    base = data.at_base(key)
    if math.isinf(least(base)):
        return Curves(key, data.keys[key], axis, None, {}, {})
    best = base.best()
    curves, final, stopped = {}, {}, []
    for population in data.along(key, axis):
        place = (values.index(best[n]) for n, values in population.axes.items())
        at: Any = (slice(None), *place)
        every = population.loss[at]
        size = getattr(population, axis)
        curves[size] = population.curves[at]
        lost = np.isnan(every).any()
        early = population.stopped
        if early is not None and lost and early[at].any():
            stopped.append(size)
        final[size] = None if lost else float(2 ** optima.log2(every).mean())
    return Curves(key, data.keys[key], axis, best, curves, final, tuple(stopped))


def told(found: Curves) -> str:
    """How the final loss goes with the size, as a clause."""
    if found.at is None:
        return "the base does not train"
    failed = [s for s, x in found.final.items() if x is None and s not in found.stopped]
    if failed:
        return f"{found.axis} {listed(failed)} diverged"
    known = {s: x for s, x in found.final.items() if x is not None}
    sizes, ends = list(known), list(known.values())
    if not known:
        return "every run was stopped early"
    if len(ends) < 2:
        return f"{found.axis} {sizes[0]} ends at {loss(ends[0])}"
    rises = np.diff(ends)
    more = {"depth": "deeper", "width": "wider"}[found.axis]
    way = "not in order of size"
    if (rises < 0).all():
        way = f"the {more} the better"
    elif (rises > 0).all():
        way = f"the {more} the worse"
    return (
        f"{way}: {loss(ends[0])} at {found.axis} {sizes[0]}, {loss(ends[-1])} at "
        f"{found.axis} {sizes[-1]}"
    )


def title(data: SweepData, axis: Axis) -> str:
    """The finding about the featured parametrization."""
    found = find(data, axis, data.main)
    start = f"At the base's best point, with {found.label}: "
    return start + told(found)


def held(data: SweepData) -> str:
    """The hyperparameters of the curves, for a caption."""
    told: dict[str, list[str]] = {}
    for key, label in data.keys.items():
        base = data.at_base(key)
        if math.isinf(least(base)):
            continue
        at = listed([f"{names.noun(n)} {x:.2g}" for n, x in base.best().items()])
        told.setdefault(at, []).append(label)
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{listed(labels)}: {at}" for at, labels in told.items())


def curves_figure(data: SweepData, axis: Axis, page: Page, *, title: str) -> Figure:
    """Draw the learning curves, a panel a parametrization."""
    found = [find(data, axis, key) for key in data.keys]
    sizes = sorted({s for f in found for s in f.curves} | _sizes(data, axis))
    looks = dict(zip(sizes, strokes(len(sizes)), strict=True))
    columns = max(1, min(page.columns, len(found)))
    rows = math.ceil(len(found) / columns)
    left, right, gap = 0.82, 0.22, 0.36
    width = (page.width - left - right - gap * (columns - 1)) / columns
    captions = [wrap(told(f), width, page.size) for f in found]
    head = 0.36 + 0.2 * max(c.count("\n") + 1 for c in captions)
    main, foot = 2.7 if columns > 1 else 2.2, 0.3 if columns > 1 else 0.46

    sheet = Sheet(page, title)
    handles = [
        Line2D([], [], lw=1.8, ms=5, mew=0, label=f"{axis} {s}", **look)
        for s, look in looks.items()
    ]
    handles.append(Line2D([], [], ls="", marker="x", ms=7, color=INK, label="diverged"))
    per_row = min(len(handles), 8)
    first = sheet.top + 0.23 * math.ceil(len(handles) / per_row) + 0.14
    step = head + main + foot
    sheet.open(first + rows * step + 0.32)
    sheet.legend(0.14, sheet.top, handles, per_row)
    limits = _limits(found)
    for i, f in enumerate(found):
        x = left + i % columns * (width + gap)
        y = first + i // columns * step
        sheet.text(x, y, f.label, size=page.size + 1.5, weight="bold")
        sheet.text(x, y + 0.23, captions[i], size=page.size, color=MUTED)
        ax = sheet.axes(x, y + head, width, main)
        ax.set(xlim=(0, data.steps), ylim=limits, yscale="log")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        log_ticks(ax.yaxis, *limits)
        _draw(ax, f, data.steps, looks)
        if i % columns:
            ax.tick_params(labelleft=False)
        else:
            ax.set_ylabel("training loss")
    middle = left + (page.width - left - right) / 2
    sheet.text(middle, sheet.height - 0.3, "step", ha="center", color=MUTED)
    return sheet.figure


def _sizes(data: SweepData, axis: Axis) -> set[int]:
    return {getattr(p, axis) for key in data.keys for p in data.along(key, axis)}


def _draw(ax: Any, found: Curves, steps: int, looks: dict[int, Any]) -> None:
    if not found.curves:
        say_nothing(ax)
    for size, curves in found.curves.items():
        x = middles(steps, curves.shape[-1])
        mean = 2 ** optima.log2(curves).mean(axis=0)  # NaN from the first seed's end
        every = max(1, len(x) // 6)
        ax.plot(x, mean, lw=1.7, ms=4.6, mew=0, markevery=every, **looks[size])
        whole = np.flatnonzero(~np.isnan(mean))
        if found.final[size] is None and size not in found.stopped and whole.size:
            at = whole[-1]
            ax.plot(x[at], mean[at], "x", ms=8, mew=2, color=looks[size]["color"])


def middles(steps: int, count: int) -> np.ndarray:
    """The steps that the points of a learning curve stand for.

    Examples:
      >>> middles(20, 4).tolist()
      [3.0, 8.0, 13.0, 18.0]
    """
    spans = np.array_split(np.arange(1, steps + 1), count)
    return np.array([span.mean() for span in spans])


def _limits(found: list[Curves]) -> tuple[float, float]:
    every = [c.ravel() for f in found for c in f.curves.values()]
    losses = np.concatenate([*every, np.full(1, np.nan)])
    losses = losses[np.isfinite(losses) & (losses > 0)]
    if not losses.size:
        return 0.1, 1.0
    starts = [c[:, 0] for f in found for c in f.curves.values()]
    start = np.concatenate(starts)
    low = float(losses.min())
    roof = 2 * float(np.nanmedian(start)) if np.isfinite(start).any() else losses.max()
    high = max(min(float(losses.max()), roof), 1.5 * low)
    return low / 1.15, high * 1.15

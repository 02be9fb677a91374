"""Learning curves of all sizes at the base's best hyperparameters."""

import dataclasses
import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..sweep import grids
from ..sweep.results import log2
from ..sweep.verdict import listed
from .data import Axis, SweepData, least
from .sentences import loss
from .style import (
    INK,
    MUTED,
    Page,
    headings,
    log_ticks,
    loss_range,
    mark_empty,
    size_handles,
    strokes,
)


@dataclasses.dataclass(frozen=True)
class Curves:
    """The learning curves of one parametrization along one axis.

    Both are empty where no grid point trained every seed of the base.
    """

    label: str  # the parametrization's name
    axis: Axis
    curves: dict[int, np.ndarray]  # size to training loss, shape (seeds, points)
    final: dict[int, float | None]  # size to geometric mean over seeds; None: diverged


def at_best(data: SweepData, axis: Axis, key: str) -> Curves:
    """The learning curves of one parametrization at its base's best grid point."""
    base = data.at_base(key)
    if math.isinf(least(base)):
        return Curves(data.keys[key], axis, {}, {})
    best = base.best()
    curves, final = {}, {}
    for population in data.along(key, axis):
        place = (values.index(best[n]) for n, values in population.axes.items())
        at: Any = (slice(None), *place)
        size, losses = getattr(population, axis), population.loss[at]
        curves[size] = population.curves[at]
        diverged = np.isnan(losses).any()
        final[size] = None if diverged else float(2 ** log2(losses).mean())
    return Curves(data.keys[key], axis, curves, final)


def finding(curves: Curves) -> str:
    """How the final loss changes with the size, as a clause."""
    if not curves.final:
        return "the base does not train"
    diverged = [size for size, x in curves.final.items() if x is None]
    if diverged:
        return f"{curves.axis} {listed(diverged)} diverged"
    sizes = list(curves.final)
    ends = [x for x in curves.final.values() if x is not None]
    if len(ends) < 2:
        return f"{curves.axis} {sizes[0]} ends at {loss(ends[0])}"
    rises = np.diff(ends)
    more = {"depth": "deeper", "width": "wider"}[curves.axis]
    order = "not in order of size"
    if (rises < 0).all():
        order = f"the {more} the better"
    elif (rises > 0).all():
        order = f"the {more} the worse"
    return (
        f"{order}: {loss(ends[0])} at {curves.axis} {sizes[0]}, {loss(ends[-1])} at "
        f"{curves.axis} {sizes[-1]}"
    )


def title(data: SweepData, axis: Axis) -> str:
    """The finding about the featured parametrization."""
    curves = at_best(data, axis, data.main)
    return f"At the base's best grid point, with {curves.label}: {finding(curves)}"


def held(data: SweepData) -> str:
    """The hyperparameters of the curves, for a caption."""
    labels: dict[str, list[str]] = {}
    for key, label in data.keys.items():
        base = data.at_base(key)
        if math.isfinite(least(base)):
            at = listed([f"{grids.noun(n)} {x:.2g}" for n, x in base.best().items()])
            labels.setdefault(at, []).append(label)
    if len(labels) == 1:
        return next(iter(labels))
    return "; ".join(f"{listed(some)}: {at}" for at, some in labels.items())


def curves_figure(data: SweepData, axis: Axis, page: Page) -> Figure:
    """Draw the learning curves, a panel per parametrization."""
    every = [at_best(data, axis, key) for key in data.keys]
    sizes = data.sizes(axis)
    looks = dict(zip(sizes, strokes(len(sizes)), strict=True))
    columns = min(page.columns, len(every))
    rows = math.ceil(len(every) / columns)
    figure = Figure((page.width, 3.6 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    losses = [c for panel in every for c in panel.curves.values()]
    shown = loss_range(losses, [c[:, 0] for c in losses])
    limits = (shown[0] / 1.15, shown[1] * 1.15) if shown else (0.1, 1.0)
    for ax, panel in zip(axes, every, strict=False):
        ax.set(xlim=(0, data.steps), ylim=limits, yscale="log")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        log_ticks(ax.yaxis, *limits)
        _draw(ax, panel, data.steps, looks)
    for ax in axes[len(every) :]:
        ax.set_axis_off()
    texts = [(panel.label, finding(panel), MUTED) for panel in every]
    headings(
        [(ax, *text) for ax, text in zip(axes, texts, strict=False)], page, columns
    )
    figure.supxlabel("step", color=MUTED)
    figure.supylabel("training loss", color=MUTED)
    cross = Line2D([], [], ls="", marker="x", ms=7, color=INK, label="diverged")
    figure.legend(
        handles=[*size_handles(axis, looks), cross],
        loc="outside upper left",
        ncols=8 if page.columns > 1 else 3,
    )
    return figure


def _draw(ax: Any, of_axis: Curves, steps: int, looks: dict[int, Any]) -> None:
    if not of_axis.curves:
        mark_empty(ax)
    for size, curves in of_axis.curves.items():
        x = middles(steps, curves.shape[-1])
        mean = 2 ** log2(curves).mean(axis=0)  # NaN once a seed diverged
        every = max(1, len(x) // 6)
        ax.plot(x, mean, lw=1.7, ms=4.6, mew=0, markevery=every, **looks[size])
        finite = np.flatnonzero(~np.isnan(mean))
        if of_axis.final[size] is None and finite.size:
            at = finite[-1]
            ax.plot(x[at], mean[at], "x", ms=8, mew=2, color=looks[size]["color"])


def middles(steps: int, count: int) -> np.ndarray:
    """The middle step of each span that a learning curve averages over.

    Examples:
      >>> middles(20, 4).tolist()
      [3.0, 8.0, 13.0, 18.0]
    """
    spans = np.array_split(np.arange(1, steps + 1), count)
    return np.array([span.mean() for span in spans])

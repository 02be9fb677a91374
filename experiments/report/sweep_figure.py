"""Loss against a hyperparameter, a line per size, a panel per parametrization."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..sweep import grids, optima
from ..sweep.results import Cell, log2
from ..sweep.verdict import Transfer
from . import sentences
from .data import Axis, SweepData
from .style import (
    COLUMNS,
    INK,
    MUTED,
    canvas,
    headings,
    log_ticks,
    loss_range,
    mark_empty,
    size_handles,
    strokes,
)

_STAR: dict[str, Any] = {"marker": "*", "ms": 14, "mec": INK, "mew": 0.9}
_ROW = 0.04  # height of a row of diverged runs, as a share of the panel
# A logarithmic axis needs limits even when there is no loss to show.
_NO_LIMITS = (0.1, 1.0)

Range = tuple[float, float]
Looks = dict[int, dict[str, Any]]  # line styles by size


def sweep_figure(
    data: SweepData, name: str, axis: Axis, *, titled: bool = False
) -> Figure:
    """Draw the sweep of one hyperparameter along one axis of size.

    Diverged runs have no loss to plot. They are crosses at their values of the
    hyperparameter, at the top of each panel with a row per size.
    """
    transfers = data.along_axis(name, axis)
    cells = [cell for t in transfers for cell in t.cells]
    sizes = sorted({getattr(cell, axis) for cell in cells})
    looks = dict(zip(sizes, strokes(len(sizes)), strict=True))
    columns = min(COLUMNS, len(transfers))
    rows = math.ceil(len(transfers) / columns)
    title = sentences.title(data, name, axis) if titled else ""
    body = canvas(4.3 * rows + 0.5, title)
    panels = body.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    x_limits, y_limits, shown = _limits(cells, len(sizes))
    ticks = _ticks(name, cells)
    heads = []
    for panel, transfer in zip(panels, transfers, strict=False):
        panel.set(xlim=x_limits, ylim=y_limits, yscale="log")
        panel.set_xticks(ticks, [sentences.tick(name, x) for x in ticks])
        panel.tick_params(labelsize=10)
        log_ticks(panel.yaxis, *shown)
        if y_limits == _NO_LIMITS:
            panel.tick_params(labelleft=False)
        _draw_runs(panel, transfer.cells, axis, looks)
        _draw_change(panel, transfer)
        _draw_diverged(panel, transfer.cells, axis, looks)
        caption = f"{sentences.sign(transfer)} {transfer.words}"
        color = INK if transfer.key == data.main else MUTED
        heads.append((panel, data.keys[transfer.key], caption, color))
    headings(heads, columns)
    for panel in panels[len(transfers) :]:
        panel.set_axis_off()
    body.supxlabel(_x_label(name, ticks), color=MUTED)
    if y_limits != _NO_LIMITS:
        body.supylabel("training loss", color=MUTED)
    noun = grids.noun(name)
    best = f"best {noun}" if len(noun) < 14 else "best value"
    star = Line2D([], [], ls="", mfc="white", label=best, **_STAR)
    star.set_markersize(11)
    cross = Line2D([], [], ls="", marker="x", ms=5, color=MUTED, label="diverged")
    body.legend(
        handles=[*size_handles(axis, looks), star, cross],
        loc="outside upper left",
        ncols=8,
    )
    return body.figure


def _ticks(name: str, cells: Sequence[Cell]) -> list[float]:
    """Whole octaves, or grid points if the grid spans no two octaves."""
    grid = sorted({float(x) for cell in cells for x in cell.log2_lr})
    if grids.unit(name) != "linear" and len(grid) >= 3:
        octaves = max(1, round((grid[-1] - grid[0] + 1.2) / 6))
        first, last = math.ceil(grid[0] / octaves), math.floor(grid[-1] / octaves)
        if first < last:
            return [float(octaves * i) for i in range(first, last + 1)]
    return grid[:: math.ceil(len(grid) / 6)]


def _x_label(name: str, ticks: list[float]) -> str:
    noun = grids.noun(name)
    steps = {b - a for a, b in itertools.pairwise(ticks)}
    if grids.unit(name) != "log2" or len(steps) != 1 or not min(steps).is_integer():
        return noun
    return f"{noun} (grid lines are {2 ** min(steps):g}x apart)"


def _limits(cells: Sequence[Cell], sizes: int) -> tuple[Range, Range, Range]:
    """Limits of the coordinate and of the loss in all panels, and those of the runs."""
    # A little more than half a grid spacing on either side.
    margin = 0.6 * min(float(np.diff(c.log2_lr).min(initial=1.0)) for c in cells)
    x_low = min(c.log2_lr.min() for c in cells) - margin
    x_high = max(c.log2_lr.max() for c in cells) + margin
    starts = [c.curves[..., 0] for c in cells if c.curves.shape[-1]]
    shown = loss_range([c.loss for c in cells], starts)
    if shown is None:
        return (x_low, x_high), _NO_LIMITS, _NO_LIMITS
    low, high = shown
    # Room below the lines for the ruler of the shift, and above for diverged runs.
    below, above = ((high / low) ** share for share in (0.24, 0.05 + _ROW * sizes))
    return (x_low, x_high), (low / below, high * above), shown


def _draw_diverged(ax: Any, cells: Sequence[Cell], axis: Axis, looks: Looks) -> None:
    """Crosses for diverged runs; pale ones where only some seeds diverged."""
    rows = list(looks)
    for cell in cells:
        size, share = getattr(cell, axis), cell.diverged.mean(axis=0)
        style = {"color": looks[size]["color"], "transform": ax.get_xaxis_transform()}
        height = 1 - _ROW * (len(rows) - rows.index(size) - 0.4)
        for x, lost in zip(cell.log2_lr, share, strict=True):
            if lost:
                alpha = 1.0 if lost == 1 else 0.4
                ax.plot(x, height, "x", ms=4.5, mew=1.3, alpha=alpha, **style)


def _draw_runs(ax: Any, cells: Sequence[Cell], axis: Axis, looks: Looks) -> None:
    fitted = [optima.optimum(cell) for cell in cells]
    if not any(fitted):
        mark_empty(ax)
    for cell, best in zip(cells, fitted, strict=True):
        look = looks[getattr(cell, axis)]
        color = look["color"]
        # Lines stop where the first seed diverges: a mean over the other seeds would
        # look too good.
        whole = ~cell.diverged.any(axis=0)
        # The geometric mean, to which the optimum is fitted.
        mean = np.exp2(log2(cell.loss).mean(axis=0))
        if len(cell.loss) > 1:
            low = np.where(whole, cell.loss.min(axis=0), np.nan)
            high = np.where(whole, cell.loss.max(axis=0), np.nan)
            ax.fill_between(cell.log2_lr, low, high, color=color, alpha=0.16, lw=0)
            for run in cell.loss:
                ax.plot(cell.log2_lr, run, ".", ms=4, mew=0, color=color, alpha=0.6)
        ax.plot(cell.log2_lr, mean, lw=1.7, ms=4.6, mew=0, **look)
        if best is None or best.loss <= 0:
            continue
        floor = ax.get_ylim()[0]
        ax.vlines(best.log2_lr, floor, best.loss, color=color, lw=1, ls=(0, (2, 2)))
        ax.errorbar(
            best.log2_lr, best.loss, xerr=best.error, fmt="none", ecolor=INK, lw=1
        )
        ax.plot(best.log2_lr, best.loss, mfc=color, zorder=5, **_STAR)


def _draw_change(ax: Any, transfer: Transfer) -> None:
    """A ruler as long as the change of the best value that the verdict states."""
    if not transfer.moved:
        return
    sizes, optima = np.log2(transfer.sizes), np.array(transfer.optima, float)
    line = optima.mean() + transfer.trend.slope * (sizes - sizes.mean())
    ends = [line.min(), line.max()]
    style: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "zorder": 6}
    y = 0.065
    ax.plot(ends, [y, y], color=INK, lw=2, **style)
    ax.plot(ends, [y, y], "|", color=INK, ms=8, mew=2, **style)
    left, right = ax.get_xlim()
    middle = sum(ends) / 2
    near = (middle - left) / (right - left)
    side = "left" if near < 0.15 else "right" if near > 0.85 else "center"
    ax.text(
        {"left": ends[0], "right": ends[1], "center": middle}[side],
        y + 0.035,
        transfer.moved,
        ha=side,
        va="bottom",
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85},
        **style | {"zorder": 7},
    )

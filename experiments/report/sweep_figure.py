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
    LANE,
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
# A logarithmic axis needs limits even when there is no loss to show.
_NO_LIMITS = (0.1, 1.0)

Looks = dict[int, dict[str, Any]]  # line styles by size


def sweep_figure(
    data: SweepData, name: str, axis: Axis, *, titled: bool = False
) -> Figure:
    """Draw the sweep of one hyperparameter along one axis of size.

    Diverged runs have no loss to plot. They are crosses at their values of the
    hyperparameter, in a lane above each panel with a row per size.
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
    x_limits, y_limits = _limits(cells)
    ticks = _ticks(name, cells)
    lanes = []
    for panel, transfer in zip(panels, transfers, strict=False):
        panel.set(xlim=x_limits, ylim=y_limits, yscale="log")
        panel.set_xticks(ticks, [sentences.tick(name, x) for x in ticks])
        panel.tick_params(labelsize=10)
        log_ticks(panel.yaxis, *y_limits)
        if y_limits == _NO_LIMITS:
            panel.tick_params(labelleft=False)
        _draw_runs(panel, transfer.cells, axis, looks)
        _draw_change(panel, transfer)
        lane = panel.inset_axes((0, 1, 1, 0.04 + 0.03 * len(sizes)), facecolor=LANE)
        lane.set(xlim=x_limits, ylim=(-0.8, len(sizes) - 0.2), xticks=[])
        _draw_lane(
            lane, transfer.cells, axis, looks, labelled=panel in panels[::columns]
        )
        caption = f"{sentences.sign(transfer)} {transfer.words}"
        color = INK if transfer.key == data.main else MUTED
        lanes.append((lane, data.keys[transfer.key], caption, color))
    headings(lanes, columns)
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


def _limits(cells: Sequence[Cell]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Limits of the coordinate and of the loss, shared by all panels."""
    # A little more than half a grid spacing on either side.
    margin = 0.6 * min(float(np.diff(c.log2_lr).min(initial=1.0)) for c in cells)
    x_low = min(c.log2_lr.min() for c in cells) - margin
    x_high = max(c.log2_lr.max() for c in cells) + margin
    starts = [c.curves[..., 0] for c in cells if c.curves.shape[-1]]
    shown = loss_range([c.loss for c in cells], starts)
    if shown is None:
        return (x_low, x_high), _NO_LIMITS
    low, high = shown
    # The ruler of the shift needs room below the lines.
    room = 10 ** (-0.24 * math.log10(high / low))
    return (x_low, x_high), (low * room, high * 10**0.06)


def _draw_lane(
    ax: Any, cells: Sequence[Cell], axis: Axis, looks: Looks, *, labelled: bool
) -> None:
    """Crosses for diverged runs; pale ones where only some seeds diverged."""
    rows = list(looks)
    for cell in cells:
        size = getattr(cell, axis)
        share = cell.diverged.mean(axis=0)
        some = share > 0
        color = looks[size]["color"]
        shades = [(*color[:3], 1.0 if s == 1 else 0.4) for s in share[some]]
        ax.scatter(
            cell.log2_lr[some],
            np.full(int(some.sum()), rows.index(size)),
            marker="x",
            s=17,
            linewidths=1.3,
            c=shades or None,
        )
    ax.set_yticks([(len(rows) - 1) / 2] if labelled else [], ["diverged"][:labelled])
    ax.tick_params(length=0, labelsize=8.5, pad=3)
    ax.grid(False)
    for side in ax.spines.values():
        side.set_visible(False)


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
    """A ruler from the least to the greatest optimum, with its length."""
    known = [o for o in transfer.optima if o is not None]
    if len(known) < max(len(transfer.sizes), 2):
        return
    ends = [min(known), max(known)]
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
        grids.factor(transfer.name, ends[1] - ends[0]),
        ha=side,
        va="bottom",
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85},
        **style | {"zorder": 7},
    )

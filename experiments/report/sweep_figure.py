"""Loss against a hyperparameter, a line per size, a panel per parametrization."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..sweep import grids
from ..sweep.results import Cell
from ..sweep.verdict import Transfer
from . import names
from .data import Axis, Lines, size
from .style import INK, LANE, MUTED, Page, Sheet, log_ticks, mark_empty, strokes, wrap

_STAR: dict[str, Any] = {"marker": "*", "ms": 14, "mec": INK, "mew": 0.9}

# A logarithmic axis wants limits even when there is no loss to show.
_NO_LIMITS = (0.1, 1.0)


def sweep_figure(
    data: Lines,
    axis: Axis,
    transfers: Sequence[Transfer],
    page: Page,
    *,
    title: str,
    captions: Mapping[str, str],
) -> Figure:
    """Draw the sweep along one axis.

    Runs that diverged are crosses in a lane above each panel, a row per size: a
    loss that is not a number has no height, but it has a learning rate.

    Args:
      data: the sweep of one hyperparameter.
      axis: of size.
      transfers: the verdicts along this axis.
      page: to draw on.
      title: the finding.
      captions: what stands above each panel, by parametrization.
    """
    keys = data.parametrizations
    sizes = data.sizes(axis)
    looks = dict(zip(sizes, strokes(len(sizes)), strict=True))
    columns = max(1, min(page.columns, len(keys)))
    rows = max(1, math.ceil(len(keys) / columns))

    left, right, gap = 0.82, 0.18, 0.2
    width = (page.width - left - right - gap * (columns - 1)) / columns
    lane, main = 0.1 + 0.085 * max(len(sizes), 1), 2.9 if columns > 1 else 2.3
    by_key = {t.key: t for t in transfers}
    told = [wrap(captions.get(key, "not swept"), width, page.size) for key in keys]
    head = 0.36 + 0.2 * max((t.count("\n") + 1 for t in told), default=1)
    foot = 0.28 if columns > 1 else 0.5

    sheet = Sheet(page, title)
    handles = _handles(axis, looks, names.noun(data.hyperparameter))
    per_row = min(len(handles), 8 if page.columns > 1 else 2)
    legend = sheet.top
    first = legend + 0.23 * math.ceil(len(handles) / per_row) + 0.14
    step = head + lane + main + foot
    sheet.open(first + rows * step + 0.32)
    sheet.legend(0.14, legend, handles, per_row)

    x_limits, y_limits = _limits(data, axis)
    ticks = _ticks(data, axis)
    for i, key in enumerate(keys):
        column = i % columns
        x, y = left + column * (width + gap), first + i // columns * step
        featured = key == data.featured
        sheet.text(x, y, data.label(key), size=page.size + 1.5, weight="bold")
        sheet.text(
            x,
            y + 0.23,
            told[i],
            size=page.size,
            color=INK if featured else MUTED,
        )
        cells = data.along(axis, key)
        above = sheet.axes(x, y + head, width, lane, facecolor=LANE)
        _draw_lane(above, cells, axis, looks, sizes, x_limits, labelled=column == 0)
        panel = sheet.axes(x, y + head + lane, width, main)
        panel.set(xlim=x_limits, ylim=y_limits, yscale="log")
        _draw_runs(panel, data, cells, axis, looks)
        if key in by_key:
            _draw_change(panel, by_key[key], page)
        _dress(panel, column == 0 and y_limits != _NO_LIMITS)
        panel.set_xticks(ticks, [names.tick(data.hyperparameter, x) for x in ticks])
    sheet.text(
        left + (page.width - left - right) / 2,
        sheet.height - 0.3,
        _across(data.hyperparameter, ticks),
        ha="center",
        color=MUTED,
        size=page.size,
    )
    return sheet.figure


def _ticks(data: Lines, axis: Axis) -> list[float]:
    """Where values are named: whole octaves, or points of a grid that has none."""
    grid = sorted({float(x) for c in data.along(axis) for x in c.log2_lr})
    if not grid:
        return []
    if grids.unit(data.hyperparameter) == "linear" or len(grid) < 3:
        return grid[:: math.ceil(len(grid) / 6)]
    octaves = max(1, round((grid[-1] - grid[0] + 1.2) / 6))
    first, last = math.ceil(grid[0] / octaves), math.floor(grid[-1] / octaves)
    whole = [float(octaves * i) for i in range(first, last + 1)]
    return whole if len(whole) > 1 else grid[:: math.ceil(len(grid) / 6)]


def _across(name: str, ticks: list[float]) -> str:
    noun = names.noun(name)
    steps = {b - a for a, b in itertools.pairwise(ticks)}
    if grids.unit(name) != "log2" or len(steps) != 1 or not min(steps).is_integer():
        return noun
    return f"{noun} (grid lines are {2 ** min(steps):g}x apart)"


def _handles(axis: Axis, looks: dict[int, dict[str, Any]], noun: str) -> list[Line2D]:
    lines = [
        Line2D([], [], lw=1.8, ms=5, mew=0, label=f"{axis} {s}", **look)
        for s, look in looks.items()
    ]
    best = f"best {noun}" if len(noun) < 14 else "best value"
    star = Line2D([], [], ls="", mfc="white", label=best, **_STAR)
    star.set_markersize(11)
    cross = Line2D([], [], ls="", marker="x", ms=5, color=MUTED, label="diverged")
    return [*lines, star, cross]


def _limits(data: Lines, axis: Axis) -> tuple[tuple[float, float], tuple[float, float]]:
    """Limits that all panels share, in log2 learning rate and in loss."""
    cells = data.along(axis)
    if not cells:
        return (0.0, 1.0), _NO_LIMITS
    # A little more than half a grid spacing on either side.
    margin = 0.6 * min(float(np.diff(c.log2_lr).min(initial=1.0)) for c in cells)
    x_low = min(c.log2_lr.min() for c in cells) - margin
    x_high = max(c.log2_lr.max() for c in cells) + margin
    losses = np.concatenate([c.loss.ravel() for c in cells])
    losses = losses[np.isfinite(losses) & (losses > 0)]
    if not losses.size:
        return (x_low, x_high), _NO_LIMITS
    # A run that ends far above where runs start has not learned; following it up
    # would flatten everything that did.
    starts = [c.curves[..., 0].ravel() for c in cells if c.curves.shape[-1]]
    start = np.concatenate([*starts, np.full(1, np.nan)])
    known = start[np.isfinite(start)]
    roof = 2.0 * np.median(known) if known.size else losses.max()
    low = losses.min()
    high = max(min(losses.max(), roof), low * 1.5)
    decades = math.log10(high / low)
    # The room below the lines holds the ruler of the shift.
    return (x_low, x_high), (low * 10 ** (-0.24 * decades), high * 10**0.06)


def _draw_lane(
    ax: Any,
    cells: list[Cell],
    axis: Axis,
    looks: dict[int, dict[str, Any]],
    sizes: list[int],
    x_limits: tuple[float, float],
    labelled: bool,
) -> None:
    for cell in cells:
        row = sizes.index(size(cell, axis))
        share = cell.diverged.mean(axis=0)
        some = share > 0
        color = looks[size(cell, axis)]["color"]
        shades = [(*color[:3], 1.0 if s == 1 else 0.4) for s in share[some]]
        ax.scatter(
            cell.log2_lr[some],
            np.full(int(some.sum()), row),
            marker="x",
            s=17,
            linewidths=1.3,
            c=shades or None,
        )
    ax.set(xlim=x_limits, ylim=(-0.8, max(len(sizes) - 0.2, 0.8)), xticks=[])
    ax.set_yticks([(len(sizes) - 1) / 2] if labelled else [], ["diverged"][:labelled])
    ax.tick_params(length=0, labelsize=8.5, pad=3)
    ax.grid(False)
    for side in ax.spines.values():
        side.set_visible(False)


def _draw_runs(
    ax: Any,
    data: Lines,
    cells: list[Cell],
    axis: Axis,
    looks: dict[int, dict[str, Any]],
) -> None:
    if all(data.optimum(c) is None for c in cells):
        mark_empty(ax)
    for cell in cells:
        look = looks[size(cell, axis)]
        color = look["color"]
        # A mean over the seeds that survived would flatter a learning rate at which
        # others diverged: the line stops where the first seed does.
        whole = ~cell.diverged.any(axis=0)
        # The geometric mean is what the optimum is fitted to.
        with np.errstate(divide="ignore"):
            mean = np.exp(np.log(cell.loss).mean(axis=0))
        if len(cell.loss) > 1:
            low = np.where(whole, cell.loss.min(axis=0), np.nan)
            high = np.where(whole, cell.loss.max(axis=0), np.nan)
            ax.fill_between(cell.log2_lr, low, high, color=color, alpha=0.16, lw=0)
            for run in cell.loss:
                ax.plot(cell.log2_lr, run, ".", ms=4, mew=0, color=color, alpha=0.6)
        ax.plot(cell.log2_lr, mean, lw=1.7, ms=4.6, mew=0, **look)
        best = data.optimum(cell)
        if best is None or best.loss <= 0:
            continue
        floor = ax.get_ylim()[0]
        ax.vlines(best.log2_lr, floor, best.loss, color=color, lw=1, ls=(0, (2, 2)))
        ax.errorbar(
            best.log2_lr, best.loss, xerr=best.error, fmt="none", ecolor=INK, lw=1
        )
        ax.plot(best.log2_lr, best.loss, mfc=color, zorder=5, **_STAR)


def _draw_change(ax: Any, transfer: Transfer, page: Page) -> None:
    """A ruler from the least to the greatest optimum, with its length."""
    known = [o for o in transfer.optima if o is not None]
    if len(known) < max(len(transfer.sizes), 2):
        return
    low, high = min(known), max(known)
    across = ax.get_xaxis_transform()
    y = 0.065
    ax.plot([low, high], [y, y], color=INK, lw=2, transform=across, zorder=6)
    ax.plot(
        [low, high], [y, y], "|", color=INK, ms=8, mew=2, transform=across, zorder=6
    )
    left, right = ax.get_xlim()
    middle = (low + high) / 2
    near = (middle - left) / (right - left)
    side = "left" if near < 0.15 else "right" if near > 0.85 else "center"
    place = {"left": low, "right": high, "center": middle}[side]
    ax.text(
        place,
        y + 0.035,
        names.factor(transfer.name, high - low),
        transform=across,
        ha=side,
        va="bottom",
        size=page.size,
        weight="bold",
        zorder=7,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85},
    )


def _dress(ax: Any, labelled: bool) -> None:
    log_ticks(ax.yaxis, *ax.get_ylim())
    ax.tick_params(labelsize=10)
    if labelled:
        ax.set_ylabel("training loss")
    else:
        ax.tick_params(labelleft=False)

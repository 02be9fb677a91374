"""Loss over two hyperparameters, a panel a size (Tensor Programs VI, Figure 7)."""

import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from ..sweep import grids, valley
from ..sweep.results import Population
from . import names
from .data import Axis, SweepData
from .style import INK, LANE, MUTED, Page, Sheet, log_ticks

Pair = tuple[str, str]
_COLORS = "plasma"  # its lightness rises evenly: dark is the least loss
_STAR: dict[str, Any] = {"marker": "*", "ms": 13, "mfc": "white", "mec": INK, "ls": ""}
_GOOD = 1.1  # outlined: what costs at most a tenth


def pairs(data: SweepData) -> list[Pair]:
    """Pairs of hyperparameters to draw; of more than three, those with the first."""
    found = [(a, b) for i, a in enumerate(data.names) for b in data.names[i + 1 :]]
    return [p for p in found if len(data.names) <= 3 or p[0] == data.names[0]]


def title(data: SweepData, pair: Pair, axis: Axis) -> str:
    """Where the best pair goes along an axis, under the featured parametrization."""
    nouns = " and ".join(names.noun(name) for name in pair)
    along = data.along(data.main, axis)
    found = {getattr(p, axis): _best(p, pair) for p in along}
    known = {size: best for size, best in found.items() if best is not None}
    label = data.keys[data.main]
    if not known:
        return f"Over {nouns}, nothing trained with {label}"
    sizes = list(known)
    ends = [_pair(pair, known[s]) for s in (sizes[0], sizes[-1])]
    if len(set(known.values())) == 1:
        where = f"{axis} {sizes[0]}" if len(sizes) == 1 else f"every {axis}"
        return f"With {label}, the best {nouns} of {where} are {ends[0]}"
    return (
        f"With {label}, the best {nouns} go from {ends[0]} at {axis} {sizes[0]} to "
        f"{ends[1]} at {axis} {sizes[-1]}"
    )


def _pair(pair: Pair, best: tuple[float, float]) -> str:
    return " and ".join(f"{x:.2g}" for x in best)


def _amount(name: str) -> str:
    linear = grids.unit(name) == "linear"
    return names.noun(name) if linear else f"octaves of {names.noun(name)}"


def _best(population: Population, pair: Pair) -> tuple[float, float] | None:
    loss = valley.surface(population, pair)
    if np.isnan(loss).all():
        return None
    i, j = np.unravel_index(int(np.nanargmin(loss)), loss.shape)
    return population.axes[pair[0]][i], population.axes[pair[1]][j]


def caption(data: SweepData) -> str:
    """How a panel is read."""
    rest = ", every other hyperparameter at its best" if len(data.names) > 2 else ""
    return (
        "Training loss at the end of a run, geometric mean over seeds"
        f"{rest}. Hatched: a seed diverged. Outlined: within 10 % of the star. "
        "All panels share one scale of colours."
    )


def table(data: SweepData, pair: Pair, axis: Axis) -> dict[str, Any]:
    """The valley's slope at each size (Tensor Programs VI, Figure 7)."""
    sizes = sorted({getattr(p, axis) for k in data.keys for p in data.along(k, axis)})
    body = []
    for key, label in data.keys.items():
        found = {getattr(p, axis): p for p in data.along(key, axis)}
        slopes = [valley.slope(found[s], pair) if s in found else None for s in sizes]
        told = ["–" if x is None else f"{x:+.1f}".replace("-", "−") for x in slopes]
        body.append([label, *told])
    return {
        "caption": (
            f"Slope of the valley at each {axis}: {_amount(pair[1])} over "
            f"{_amount(pair[0])}; – where it is round, or too "
            "noisy to tell"
        ),
        "heads": [axis, *map(str, sizes)],
        "body": body,
    }


def heatmap_figure(
    data: SweepData, pair: Pair, axis: Axis, page: Page, *, title: str
) -> Figure:
    """Draw loss over a pair of hyperparameters, a row of panels a parametrization.

    Args:
      data: the sweep.
      pair: hyperparameters (across, up).
      axis: of size, along which panels stand.
      page: to draw on.
      title: the finding.
    """
    rows = [(label, data.along(key, axis)) for key, label in data.keys.items()]
    most = max(len(found) for _, found in rows)
    columns = min(most, 5)
    left, right, gap = 0.82, 0.18, 0.16
    width = (page.width - left - right - gap * (columns - 1)) / columns
    width = min(width, 3.0)
    grid = [len(data.populations[0].axes[name]) for name in pair]
    main = float(np.clip(width * grid[1] / grid[0], 1.1, 1.4 * width))
    head, name_head, foot = 0.27, 0.34, 0.36
    heights = [
        name_head + math.ceil(len(found) / columns) * (head + main + foot)
        for _, found in rows
    ]

    sheet = Sheet(page, title)
    handles = _handles(rows)
    per_row = 4
    first = sheet.top + 0.23 * math.ceil(len(handles) / per_row) + 0.85
    sheet.open(first + sum(heights) + 0.36)
    sheet.legend(0.14, sheet.top, handles, per_row)
    norm = _norm(rows, pair)
    _draw_scale(sheet, first - 0.62, norm, page)
    y = first
    for (label, found), height in zip(rows, heights, strict=True):
        sheet.text(left, y, label, size=page.size + 1.5, weight="bold")
        for i, population in enumerate(found):
            row, column = divmod(i, columns)
            x = left + column * (width + gap)
            top = y + name_head + row * (head + main + foot)
            size = getattr(population, axis)
            sheet.text(x, top, f"{axis} {size}", size=page.size, color=MUTED)
            panel = sheet.axes(x, top + head, width, main, facecolor=LANE)
            _draw_panel(panel, population, pair, norm)
            _dress(panel, population, pair, width, main, labelled=column == 0)
        y += height
    sheet.text(
        left + (columns * (width + gap) - gap) / 2,
        sheet.height - 0.32,
        names.noun(pair[0]),
        ha="center",
        color=MUTED,
    )
    return sheet.figure


def _handles(rows: list[tuple[str, list[Population]]]) -> list[Any]:
    star = Line2D([], [], label="best of its panel", **_STAR)
    good = Line2D([], [], color="white", lw=2, label="within 10 % of it")
    good.set_path_effects(_halo())
    lost = Patch(fc=LANE, ec=MUTED, hatch="////", lw=0, label="diverged")
    handles = [star, good, lost]
    if any(_stopped(p).any() for _, found in rows for p in found):
        handles.append(
            Patch(fc=LANE, ec=MUTED, hatch="..", lw=0, label="stopped early")
        )
    return handles


def _halo() -> list[Any]:
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=3.4, foreground=INK)]


def _norm(rows: list[tuple[str, list[Population]]], pair: Pair) -> LogNorm:
    """One scale of colours for all panels."""
    found = [p for _, populations in rows for p in populations]
    losses = np.concatenate([valley.surface(p, pair).ravel() for p in found])
    losses = losses[np.isfinite(losses) & (losses > 0)]
    if not losses.size:
        return LogNorm(0.1, 1.0)
    # What has not learned would take most of the colours.
    starts = np.concatenate([p.curves[..., 0].ravel() for p in found])
    starts = starts[np.isfinite(starts)]
    roof = float(np.median(starts)) if starts.size else losses.max()
    low = float(losses.min())
    return LogNorm(low, max(min(float(losses.max()), roof), 1.5 * low))


def _stopped(population: Population) -> np.ndarray:
    lost = np.isnan(population.loss)
    early = population.stopped
    return np.zeros_like(lost) if early is None else lost & (early != 0)


def _edges(coordinates: list[float]) -> np.ndarray:
    """Where the boxes around grid points meet."""
    at = np.array(coordinates)
    if len(at) == 1:
        return np.array([at[0] - 0.5, at[0] + 0.5])
    middle = (at[1:] + at[:-1]) / 2
    return np.concatenate([[2 * at[0] - middle[0]], middle, [2 * at[-1] - middle[-1]]])


def _coordinates(population: Population, name: str) -> list[float]:
    return [grids.coordinate(name, x) for x in population.axes[name]]


def _draw_panel(ax: Any, population: Population, pair: Pair, norm: LogNorm) -> None:
    loss = valley.surface(population, pair)
    across, up = (_coordinates(population, name) for name in pair)
    x, y = _edges(across), _edges(up)
    ax.set(xlim=x[[0, -1]], ylim=y[[0, -1]])
    ax.grid(False)
    shown = np.ma.masked_invalid(np.maximum(loss, norm.vmin or 0.0)).T
    ax.pcolormesh(x, y, shown, norm=norm, cmap=_COLORS, rasterized=True)
    stopped = _all_stopped(population, pair)
    for i, j in np.argwhere(np.isnan(loss)):
        box = (x[i], y[j]), x[i + 1] - x[i], y[j + 1] - y[j]
        hatch = ".." if stopped[i, j] else "////"
        ax.add_patch(Rectangle(*box, fc=LANE, ec=MUTED, lw=0, hatch=hatch))
    if np.isnan(loss).all():
        ax.text(
            *(0.5, 0.5, "nothing trained"),
            transform=ax.transAxes,
            ha="center",
            va="center",
            style="italic",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
        )
        return
    good = np.nan_to_num(loss, nan=np.inf) <= _GOOD * np.nanmin(loss)
    ax.add_collection(
        LineCollection(
            _outline(good, x, y),
            colors="white",
            linewidths=1.8,
            path_effects=_halo(),
            zorder=4,
        )
    )
    i, j = np.unravel_index(int(np.nanargmin(loss)), loss.shape)
    ax.plot(across[i], up[j], zorder=5, **_STAR)


def _all_stopped(population: Population, pair: Pair) -> np.ndarray:
    """Where no run diverged, and yet some have no loss."""
    at = [1 + list(population.axes).index(name) for name in pair]
    lost = np.moveaxis(np.isnan(population.loss) & ~_stopped(population), at, (0, 1))
    return ~lost.reshape(*lost.shape[:2], -1).any(axis=-1)


def _outline(good: np.ndarray, x: np.ndarray, y: np.ndarray) -> list[Any]:
    """The edges between boxes that are good and boxes that are not."""
    lines = []
    wide = np.pad(good, 1)
    for i in range(len(x)):
        for j in range(len(y) - 1):
            if wide[i, j + 1] != wide[i + 1, j + 1]:
                lines.append([(x[i], y[j]), (x[i], y[j + 1])])
    for i in range(len(x) - 1):
        for j in range(len(y)):
            if wide[i + 1, j] != wide[i + 1, j + 1]:
                lines.append([(x[i], y[j]), (x[i + 1], y[j])])
    return lines


def _dress(
    ax: Any, population: Population, pair: Pair, width: float, height: float, **on: bool
) -> None:
    across, up = (_coordinates(population, name) for name in pair)
    step = math.ceil(len(across) / max(2, int(width / 0.5)))
    ax.set_xticks(across[::step], [names.tick(pair[0], x) for x in across[::step]])
    step = math.ceil(len(up) / max(2, int(height / 0.24)))
    ax.set_yticks(up[::step], [names.tick(pair[1], v) for v in up[::step]])
    ax.tick_params(labelsize=9, labelleft=on["labelled"])
    if on["labelled"]:
        ax.set_ylabel(names.noun(pair[1]))


def _draw_scale(sheet: Sheet, y: float, norm: LogNorm, page: Page) -> None:
    """The scale of colours, once."""
    width = 3.2
    sheet.text(0.82, y - 0.2, "training loss", size=page.size, color=MUTED)
    ax = sheet.axes(0.82, y + 0.06, width, 0.13)
    colors = ScalarMappable(norm, matplotlib.colormaps[_COLORS])
    sheet.figure.colorbar(colors, cax=ax, orientation="horizontal")
    log_ticks(ax.xaxis, float(norm.vmin or 0.1), float(norm.vmax or 1.0))
    ax.tick_params(labelsize=9, which="both")
    ax.grid(False)

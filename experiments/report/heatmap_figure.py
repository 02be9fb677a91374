"""Loss over two hyperparameters, a panel per size (Tensor Programs VI, Figure 7)."""

import itertools
import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from ..sweep import grids
from ..sweep.results import Population
from . import sentences
from .data import Axis, SweepData, least
from .style import INK, LANE, MUTED, WIDTH, log_ticks, loss_range, mark_empty, plain

Pair = tuple[str, str]
_COLORS = matplotlib.colormaps["plasma"]  # lightness rises evenly: dark is least loss
_STAR: dict[str, Any] = {"marker": "*", "ms": 13, "mfc": "white", "mec": INK, "ls": ""}
_GOOD = 1.1  # outlined: a loss of at most so many times the least
_HALO: list[Any] = [withStroke(linewidth=3.4, foreground=INK)]


def pairs(data: SweepData) -> list[Pair]:
    """The pairs to draw; of more than three hyperparameters, those with the first."""
    pairs = itertools.combinations(data.names, 2)
    return [p for p in pairs if len(data.names) <= 3 or p[0] == data.names[0]]


def title(data: SweepData, pair: Pair, axis: Axis) -> str:
    """How the best pair changes along an axis, for the featured parametrization."""
    nouns = " and ".join(grids.noun(name) for name in pair)
    along = data.along(data.main, axis)
    known = {
        getattr(p, axis): tuple(p.best()[name] for name in pair)
        for p in along
        if math.isfinite(least(p))
    }
    label = data.keys[data.main]
    if not known:
        return f"{nouns}: nothing trained with {label}".capitalize()
    (first, start), *_, (last, end) = [*known.items()] * 2
    start_text, end_text = (" and ".join(f"{x:.2g}" for x in p) for p in (start, end))
    if len(set(known.values())) == 1:
        where = f"{axis} {first}" if len(known) == 1 else f"every {axis}"
        return f"With {label}, the best {nouns} at {where} are {start_text}"
    return (
        f"With {label}, the best {nouns} change from {start_text} at {axis} {first} to "
        f"{end_text} at {axis} {last}"
    )


def caption(data: SweepData) -> str:
    """How to read a panel."""
    rest = ", every other hyperparameter at its best" if len(data.names) > 2 else ""
    return (
        "Training loss at the end of a run, geometric mean over seeds"
        f"{rest}. Hatched: a seed diverged. Outlined: at most 10 % above the least "
        "loss, which the star marks. All panels share one colour scale."
    )


def heatmap_figure(data: SweepData, pair: Pair, axis: Axis) -> Figure:
    """Draw loss over two hyperparameters, (across, up).

    Each parametrization has rows of panels, a panel for each size along `axis`.
    """
    rows = [(label, data.along(key, axis)) for key, label in data.keys.items()]
    columns = min(5, max(len(row) for _, row in rows))
    lines = [math.ceil(len(row) / columns) for _, row in rows]
    across, up = (len(data.populations[0].axes[name]) for name in pair)
    width = min(3.0, (WIDTH - 1) / columns)
    height = float(np.clip(width * up / across, 1.1, 1.4 * width)) + 0.7
    figure = Figure(
        (width * columns + 1, height * sum(lines) + 1), layout="constrained"
    )
    panels = figure.subplots(
        sum(lines), columns, squeeze=False, sharex=True, sharey=True
    )
    shown = [p for _, row in rows for p in row]
    losses = [p.surface(pair) for p in shown]
    # Runs that did not learn would take up most of the colours.
    limits = loss_range(losses, [p.curves[..., 0] for p in shown], factor=1.0)
    norm = LogNorm(*(limits or (0.1, 1.0)))
    for i, (label, row) in enumerate(rows):
        axes = panels[sum(lines[:i]) : sum(lines[: i + 1])].ravel()
        for ax, population in zip(axes, row, strict=False):
            head = f"{plain(label)}\n" if ax is axes[0] else "\n"
            size = f"{axis} {getattr(population, axis)}"
            ax.set_title(head, loc="left", weight="bold").set_in_layout(False)
            ax.set_title(f"\n{size}", loc="right", size=9.5, color=MUTED)
            _draw(ax, population, pair, norm)
            _label(ax, population, pair, width, height)
        for ax in axes[len(row) :]:
            ax.set_axis_off()
    figure.supxlabel(grids.noun(pair[0]), color=MUTED)
    figure.supylabel(grids.noun(pair[1]), color=MUTED)
    star = Line2D([], [], label="best of its panel", **_STAR)
    good = Line2D([], [], color="white", lw=2, label="at most 10 % worse")
    good.set_path_effects(_HALO)
    lost = Patch(fc=LANE, ec=MUTED, hatch="////", lw=0, label="diverged")
    figure.legend(handles=[star, good, lost], loc="outside upper left", ncols=3)
    scale = figure.colorbar(
        ScalarMappable(norm, _COLORS), ax=panels, location="top", shrink=0.4, aspect=25
    )
    scale.set_label("training loss", color=MUTED)
    log_ticks(scale.ax.xaxis, float(norm.vmin or 0.1), float(norm.vmax or 1.0))
    return figure


def _edges(at: np.ndarray) -> np.ndarray:
    """Where the boxes around grid points meet."""
    if len(at) == 1:
        return at[0] + np.array([-0.5, 0.5])
    middle = (at[1:] + at[:-1]) / 2
    return np.concatenate([[2 * at[0] - middle[0]], middle, [2 * at[-1] - middle[-1]]])


def _draw(ax: Any, population: Population, pair: Pair, norm: LogNorm) -> None:
    loss = population.surface(pair)
    across, up = (population.coordinates(name) for name in pair)
    x, y = _edges(across), _edges(up)
    ax.grid(visible=False)
    lost = np.isnan(loss).T
    shown = np.ma.masked_array(np.maximum(loss, norm.vmin or 0.0).T, lost)
    ax.pcolormesh(x, y, shown, norm=norm, cmap=_COLORS, rasterized=True)
    hatched = np.ma.masked_array(np.zeros(lost.shape), ~lost)
    plain = ListedColormap([LANE])
    ax.pcolor(x, y, hatched, cmap=plain, ec=MUTED, hatch="////", lw=0)
    if lost.all():
        mark_empty(ax)
        return
    good = np.pad(np.nan_to_num(loss, nan=np.inf) <= _GOOD * np.nanmin(loss), 1)
    for i, j in np.argwhere(good[1:, 1:-1] != good[:-1, 1:-1]):
        ax.plot([x[i]] * 2, y[j : j + 2], color="white", lw=1.8, path_effects=_HALO)
    for i, j in np.argwhere(good[1:-1, 1:] != good[1:-1, :-1]):
        ax.plot(x[i : i + 2], [y[j]] * 2, color="white", lw=1.8, path_effects=_HALO)
    i, j = np.unravel_index(int(np.nanargmin(loss)), loss.shape)
    ax.plot(across[i], up[j], zorder=5, **_STAR)


def _label(
    ax: Any, population: Population, pair: Pair, width: float, height: float
) -> None:
    """Ticks at as many grid points as there is room for."""
    across, up = (population.coordinates(name) for name in pair)
    for set_ticks, name, at, room in (
        (ax.set_xticks, pair[0], across, width / 0.5),
        (ax.set_yticks, pair[1], up, height / 0.24),
    ):
        at = at[:: math.ceil(len(at) / max(2, int(room)))]
        set_ticks(at, [sentences.tick(name, value) for value in at])
    ax.tick_params(labelsize=9, labelbottom=True)

"""Loss over two hyperparameters, a panel per size (Tensor Programs VI, Figure 7)."""

import itertools
import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ..sweep import grids
from ..sweep.results import Population
from . import sentences
from .data import Axis, SweepData, least
from .style import INK, LANE, MUTED, WIDTH, log_ticks, loss_range, mark_empty

Pair = tuple[str, str]
_COLORS = matplotlib.colormaps["plasma"].with_extremes(bad=LANE)  # dark: least loss
_COLUMNS = 5


def pairs(data: SweepData) -> list[Pair]:
    """The pairs to draw; of more than three hyperparameters, those with the first."""
    pairs = itertools.combinations(data.names, 2)
    return [p for p in pairs if len(data.names) <= 3 or p[0] == data.names[0]]


def title(data: SweepData, pair: Pair, axis: Axis) -> str:
    """The best pair at the smallest and the largest size of an axis that trained."""
    best = {
        getattr(p, axis): " and ".join(f"{p.best()[name]:.2g}" for name in pair)
        for p in data.along(data.main, axis)
        if math.isfinite(least(p))
    }
    nouns = " and ".join(grids.noun(name) for name in pair)
    ends = list(best)[:1] + list(best)[1:][-1:]
    places = [f"{best[size]} at {axis} {size}" for size in ends]
    label = data.keys[data.main]
    return f"With {label}, the best {nouns}: {', '.join(places) or 'nothing trained'}"


def caption(data: SweepData) -> str:
    """How to read a panel."""
    rest = ", every other hyperparameter at its best" if len(data.names) > 2 else ""
    return (
        f"Training loss at the end of a run with {data.keys[data.main]}, geometric "
        f"mean over seeds{rest}. Grey: a seed diverged. The star marks the least loss."
    )


def heatmap_figure(data: SweepData, pair: Pair, axis: Axis) -> Figure:
    """Draw loss over two hyperparameters, (across, up), of the featured runs."""
    row = data.along(data.main, axis)
    columns = min(_COLUMNS, len(row))
    rows = math.ceil(len(row) / columns)
    figure = Figure((WIDTH, 2.6 * rows + 1), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    # Runs that did not learn would take up most of the colours.
    losses = [p.surface(pair) for p in row]
    low, high = loss_range(losses, [p.curves[..., 0] for p in row]) or (0.1, 1.0)
    norm = LogNorm(low, high)
    for ax in panels.flat[len(row) :]:
        ax.set_axis_off()
    for ax, population, loss in zip(panels.flat, row, losses, strict=False):
        size = f"{axis} {getattr(population, axis)}"
        ax.set_title(size, loc="right", size=9.5, color=MUTED)
        _draw(ax, population, pair, np.maximum(loss, low), norm)
    figure.supxlabel(grids.noun(pair[0]), color=MUTED)
    figure.supylabel(grids.noun(pair[1]), color=MUTED)
    scale = figure.colorbar(
        ScalarMappable(norm, _COLORS), ax=panels, location="top", shrink=0.4, aspect=25
    )
    scale.set_label("training loss", color=MUTED)
    log_ticks(scale.ax.xaxis, low, high)
    return figure


def _draw(
    ax: Any, population: Population, pair: Pair, loss: np.ndarray, norm: LogNorm
) -> None:
    across, up = (population.coordinates(name) for name in pair)
    ax.grid(visible=False)
    ax.pcolormesh(across, up, loss.T, norm=norm, cmap=_COLORS, rasterized=True)
    for name, at, axis in zip(pair, (across, up), (ax.xaxis, ax.yaxis), strict=True):
        at = at[:: math.ceil(len(at) / 5)]
        axis.set_ticks(at, [sentences.tick(name, value) for value in at])
    ax.tick_params(labelsize=9, labelbottom=True)
    if np.isnan(loss).all():
        mark_empty(ax)
        return
    i, j = np.unravel_index(int(np.nanargmin(loss)), loss.shape)
    ax.plot(across[i], up[j], "*", ms=13, mfc="white", mec=INK)

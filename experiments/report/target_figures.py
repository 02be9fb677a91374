"""The result of the target and its baselines."""

import math
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..sweep.statistics import BASE
from . import sentences
from .data import SweepData, Trained
from .style import POINTS, canvas, end_label, ramp

_HEIGHT = 3.3  # of the result's panel, in inches
_LIGHT, _DARK = ramp(2)


def has_result(data: SweepData) -> bool:
    """Whether there is more than one evaluation to draw."""
    return any(len(run.scores(by_loss=data.by_loss)) > 1 for run in _runs(data))


def result_figure(data: SweepData) -> Figure:
    """Test accuracy, of text test loss, over steps: the target and each baseline."""
    body = canvas(_HEIGHT + 1.4)
    ax = body.subplots()
    ends, handles = [], []
    for run in _runs(data):
        label, look = _look(data, run)
        handles.append(Line2D([], [], lw=2.6, label=label, **look))
        points = run.scores(by_loss=data.by_loss)
        if not points.size:
            continue
        ax.plot(*points.T, lw=2.6, marker="o", ms=4.5, clip_on=False, **look)
        step, value = points[-1]
        text = "diverged"
        if run.train_loss is not None:
            text = sentences.scored(data, value, named=False)
        ends.append((value, step, text, look["color"]))
    body.legend(handles=handles, loc="outside upper left")
    ax.set(xlim=(0, max(end[1] for end in ends)))
    if not data.by_loss:
        ax.set(ylim=(0, 1), yticks=[0, 0.25, 0.5, 0.75, 1])
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    what = "test loss" if data.by_loss else "test accuracy"
    ax.set(xlabel="training step", ylabel=what)
    # The numbers at the ends of lines are at least a line of text apart.
    low, high = ax.get_ylim()
    apart = 1.45 * POINTS / 72 / _HEIGHT * (high - low)
    height = -math.inf
    for value, step, text, color in sorted(ends, key=lambda end: end[0]):
        height = max(value, height + apart)
        end_label(ax, (step, height), text, color=color)
    return body.figure


def _runs(data: SweepData) -> list[Trained]:
    return [*([data.trained] if data.trained else []), *data.compared]


def _look(data: SweepData, run: Trained) -> tuple[str, dict[str, Any]]:
    """The label and the style of a run's line."""
    if run.baseline is None:
        return "large network, learning rate of the small one", {"color": _DARK}
    if run.baseline == BASE:
        return "small network, where it was tuned", {"color": _LIGHT}
    dashed = {"color": "#7c8494", "linestyle": (0, (4, 1.5))}
    return f"large network, {sentences.way(data, run)}", dashed

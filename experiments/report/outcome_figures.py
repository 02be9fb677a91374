"""The cost of a transferred learning rate, the target's training and its result."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..sweep.statistics import BASE
from ..sweep.verdict import Transfer, Verdict, percent
from . import sentences
from .data import AXES, SweepData, Trained
from .style import (
    INK,
    MUTED,
    POINTS,
    Page,
    canvas,
    end_label,
    log_ticks,
    mark_empty,
    ramp,
    wrapped,
)

_OWN: dict[str, Any] = {"marker": "*", "ms": 13, "mec": INK, "mew": 0.9, "ls": ""}
_GIVEN: dict[str, Any] = {"marker": "o", "ms": 8, "mec": INK, "mew": 1.6, "ls": ""}
_LIGHT, _DARK = ramp(2)


def has_result(data: SweepData) -> bool:
    """Whether the target has baselines and more than one evaluation to draw."""
    return bool(data.compared) and any(
        len(run.scores(by_loss=data.by_loss)) > 1 for run in _runs(data)
    )


def result_figure(data: SweepData, page: Page) -> Figure:
    """Test accuracy, of text test loss, over steps: the target and each baseline."""
    main = 3.3 if page.columns > 1 else 2.7
    body = canvas(page, main + 1.4, sentences.result(data))
    ax = body.subplots()
    ends, handles = [], []
    for run in _runs(data):
        label, look = _look(run)
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
    ax.xaxis.set_major_locator(MaxNLocator(3 + page.columns, integer=True))
    what = "test loss" if data.by_loss else "test accuracy"
    ax.set(xlabel="training step", ylabel=what)
    # The numbers at the ends of lines are at least a line of text apart.
    low, high = ax.get_ylim()
    apart = 1.45 * POINTS / 72 / main * (high - low)
    height = -math.inf
    for value, step, text, color in sorted(ends, key=lambda end: end[0]):
        height = max(value, height + apart)
        end_label(ax, (step, height), text, color=color)
    return body.figure


def _runs(data: SweepData) -> list[Trained]:
    return [*([data.trained] if data.trained else []), *data.compared]


def _look(run: Trained) -> tuple[str, dict[str, Any]]:
    """The label and the style of a run's line."""
    if run.baseline is None:
        return "large network, learning rate of the small one", {"color": _DARK}
    if run.baseline == BASE:
        return "small network, where it was tuned", {"color": _LIGHT}
    dashed = {"color": "#7c8494", "linestyle": (0, (4, 1.5))}
    return "large network, without mupax's scaling", dashed


def regret_figure(data: SweepData, transfers: Sequence[Transfer], page: Page) -> Figure:
    """Draw the largest models' least loss, and their loss at the base's best rate."""
    labels = list(dict.fromkeys(data.keys[t.key] for t in transfers))
    axes = [axis for axis in AXES if any(t.axis == axis for t in transfers)]
    columns = max(1, min(page.columns, len(axes)))
    rows = max(1, math.ceil(len(axes) / columns))
    height = (0.5 * len(labels) + 1.1) * rows + 0.4
    body = canvas(page, height, sentences.regret_title(data, transfers))
    panels = body.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    limits = _limits(transfers)
    for ax, axis in zip(panels, axes, strict=False):
        by_label = {data.keys[t.key]: t for t in transfers if t.axis == axis}
        most = max(t.sizes[-1] for t in by_label.values())
        large = f"Largest {axis}: {most} ({data.held(axis)})"
        ax.set_title(large, weight="bold")
        ax.set(xscale="log", xlim=limits, ylim=(len(labels) - 0.3, -0.7))
        for label, transfer in by_label.items():
            _draw_regret(ax, labels.index(label), transfer)
        names = [wrapped(label, 1.6, POINTS) for label in labels]
        ax.set_yticks(range(len(labels)), names)
        ax.tick_params(axis="y", length=0, labelcolor=INK)
        if any(t.own is not None for t in by_label.values()):
            log_ticks(ax.xaxis, *limits)
        else:
            ax.set(xticks=[])
            ax.minorticks_off()
        ax.set_xlabel("training loss")
        ax.spines["left"].set_visible(False)
    for ax in panels[len(axes) :]:
        ax.set_axis_off()
    handles = [
        Line2D([], [], mfc=_DARK, label="own best learning rate", **_OWN),
        Line2D([], [], mfc="white", label="the base's best, 90 %", **_GIVEN),
    ]
    body.legend(handles=handles, loc="outside upper left", ncols=min(2, page.columns))
    return body.figure


def _limits(transfers: Sequence[Transfer]) -> tuple[float, float]:
    losses = [t.own for t in transfers] + [
        t.regret.given for t in transfers if t.regret is not None
    ]
    known = [v for v in losses if v is not None and v > 0]
    if not known:
        return 0.1, 1.0
    low, high = min(known), max(known)
    margin = max(0.12 * math.log10(high / low), 0.15)
    # More room on the right, for the text.
    return low * 10**-margin, high * 10 ** (4.5 * margin)


def _draw_regret(ax: Any, row: int, transfer: Transfer) -> None:
    label: dict[str, Any] = {"va": "center"}
    cost, own = transfer.regret, transfer.own
    across = ax.get_yaxis_transform()
    words = {"color": MUTED, "style": "italic"}
    if own is None or own <= 0:
        ax.text(0.02, row, sentences.cost(transfer), transform=across, **label, **words)
        return
    right = ax.get_xlim()[1]
    if transfer.verdict is Verdict.DIVERGES:
        ax.plot([own, right], [row, row], color=_DARK, lw=2.2, ls=(0, (2, 1.5)))
        ax.plot(1, row, ">", color=_DARK, ms=9, transform=across, clip_on=False)
        ax.text(0.97, row - 0.24, "diverges", transform=across, ha="right", **label)
    elif cost is None:
        beside = {"xytext": (11, 0), "textcoords": "offset points"}
        ax.annotate(sentences.cost(transfer), (own, row), **beside, **label, **words)
    else:
        ends = [min(own * (1 + x), right) for x in (cost.low, cost.high)]
        ax.plot([own, cost.given], [row, row], color=_DARK, lw=2.2, zorder=2)
        ax.plot(ends, [row, row], color=INK, lw=1, zorder=2)
        ax.plot(cost.given, row, mfc="white", zorder=4, **_GIVEN)
        ax.text(
            0.99,
            row - 0.3,
            f"+{percent(cost.share)}",
            transform=across,
            ha="right",
            weight="bold",
            **label,
        )
    ax.plot(own, row, mfc=_DARK, zorder=3, **_OWN)


def target_figure(data: SweepData, page: Page) -> Figure:
    """The target's losses, and beside them its test accuracy.

    The accuracy is left out where it has fewer than two points, and for text.
    """
    run = data.trained
    assert run is not None
    points = run.scores(by_loss=False)
    two = len(points) > 1 and not data.text
    columns = min(1 + two, page.columns)
    rows = (1 + two) // columns
    body = canvas(page, 3.7 * rows, sentences.target(data).rstrip("."))
    panels = body.subplots(rows, columns, squeeze=False).ravel()
    for ax, name in zip(panels, ("Loss", "Test accuracy"), strict=False):
        ax.set_title(name, weight="bold")
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _draw_losses(panels[0], run)
    if two:
        _draw_accuracy(panels[1], points)
    return body.figure


def _draw_losses(ax: Any, data: Trained) -> None:
    # Non-finite losses make gaps in the line.
    train = np.array(data.curve, dtype=float).reshape(-1, 2)
    tests = np.array([e[:2] for e in data.evals], dtype=float).reshape(-1, 2)
    losses = np.concatenate([train, tests])[:, 1]
    if not (np.isfinite(losses) & (losses > 0)).any():
        ax.set(xticks=[], yticks=[])
        mark_empty(ax)
        return
    ax.set_yscale("log")
    ax.plot(*train.T, color=_DARK, lw=1.4, label="training")
    ax.plot(*tests.T, color=_LIGHT, lw=1.6, ls=(0, (4, 1.5)), marker="o", label="test")
    log_ticks(ax.yaxis, *ax.get_ylim())
    ax.legend(loc="upper right", ncols=2)


def _draw_accuracy(ax: Any, points: np.ndarray) -> None:
    ax.plot(*points.T, color=_DARK, lw=1.6, marker="o", clip_on=False)
    low = points[:, 1].min()
    # Start near the data: near 100 % a few percentage points matter.
    ax.set_ylim(max(0.0, low - 0.15 * (1 - low) - 0.005), 1.0)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    step, last = points[-1]
    end_label(ax, (step, last), f"{last:.1%}")

"""The cost of a transferred learning rate, and the target's training."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from ..sweep.verdict import Transfer, Verdict, percent
from . import findings
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


def regret_figure(data: SweepData, transfers: Sequence[Transfer], page: Page) -> Figure:
    """Draw the largest models' least loss, and their loss at the base's best rate."""
    labels = list(dict.fromkeys(data.keys[t.key] for t in transfers))
    axes = [axis for axis in AXES if any(t.axis == axis for t in transfers)]
    columns = max(1, min(page.columns, len(axes)))
    rows = max(1, math.ceil(len(axes) / columns))
    height = (0.5 * len(labels) + 1.1) * rows + 0.4
    body = canvas(page, height, findings.regret_title(data, transfers))
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
        ax.text(0.02, row, findings.cost(transfer), transform=across, **label, **words)
        return
    right = ax.get_xlim()[1]
    if transfer.verdict is Verdict.DIVERGES:
        ax.plot([own, right], [row, row], color=_DARK, lw=2.2, ls=(0, (2, 1.5)))
        ax.plot(1, row, ">", color=_DARK, ms=9, transform=across, clip_on=False)
        ax.text(0.97, row - 0.24, "diverges", transform=across, ha="right", **label)
    elif cost is None:
        beside = {"xytext": (11, 0), "textcoords": "offset points"}
        ax.annotate(findings.cost(transfer), (own, row), **beside, **label, **words)
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
    """The target's losses, and beside them its test accuracy."""
    columns = min(2, page.columns)
    rows = 2 // columns
    body = canvas(page, 3.7 * rows, findings.target(data).rstrip("."))
    panels = body.subplots(rows, columns).ravel()
    for ax, name in zip(panels, ("Loss", "Test accuracy"), strict=True):
        ax.set_title(name, weight="bold")
        ax.set_xlabel("step")
    if data.trained is not None:
        _draw_losses(panels[0], data.trained)
        _draw_accuracy(panels[1], data.trained)
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


def _draw_accuracy(ax: Any, data: Trained) -> None:
    points = data.accuracies
    if not points.size:
        ax.set(xticks=[], yticks=[])
        mark_empty(ax)
        return
    ax.plot(*points.T, color=_DARK, lw=1.6, marker="o", clip_on=False)
    low = points[:, 1].min()
    # Start near the data: near 100 % a few percentage points matter.
    ax.set_ylim(max(0.0, low - 0.15 * (1 - low) - 0.005), 1.0)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    step, last = points[-1]
    end_label(ax, (step, last), f"{last:.1%}")

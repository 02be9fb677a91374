"""What a transferred learning rate costs, and how the target trained."""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from . import findings
from .data import AXES, Lines, SweepData, Trained, finite
from .style import INK, MUTED, Page, Sheet, log_ticks, ramp, say_nothing

_OWN: dict[str, Any] = {"marker": "*", "ms": 13, "mec": INK, "mew": 0.9, "ls": ""}
_GIVEN: dict[str, Any] = {"marker": "o", "ms": 8, "mec": INK, "mew": 1.6, "ls": ""}
_LIGHT, _DARK = ramp(2)


def regret_figure(data: Lines, page: Page) -> Figure:
    """A line from the own best loss to the loss at the small model's rate."""
    keys = data.parametrizations
    axes = [a for a in AXES if len(data.sizes(a)) > 1]
    columns = max(1, min(page.columns, len(axes)))
    names = 1.75
    left, right, gap = names, 0.25, 0.3
    width = (page.width - left - right - gap * (columns - 1)) / columns
    row = 0.5
    head, main, foot = 0.34, row * max(len(keys), 1) + 0.1, 0.62

    sheet = Sheet(page, findings.regret_title(data))
    handles = [
        Line2D([], [], mfc=_DARK, label="own best learning rate", **_OWN),
        Line2D([], [], mfc="white", label="the smallest model's", **_GIVEN),
    ]
    first = sheet.top + 0.4
    step = head + main + foot
    sheet.open(first + step * max(1, math.ceil(len(axes) / columns)))
    sheet.legend(0.14, sheet.top, handles, 2)

    found = {a: [findings.find(data, a, k) for k in keys] for a in axes}
    limits = _limits([f for fs in found.values() for f in fs])
    for i, axis in enumerate(axes):
        x, y = left + i % columns * (width + gap), first + i // columns * step
        large = f"Largest {axis}: {data.sizes(axis)[-1]} ({data.held(axis)})"
        sheet.text(x, y, large, size=page.size + 0.5, weight="bold")
        ax = sheet.axes(x, y + head, width, main)
        ax.set(xscale="log", xlim=limits, ylim=(len(keys) - 0.3, -0.7))
        for r, f in enumerate(found[axis]):
            _draw_regret(ax, r, f, page)
        beside = i % columns == 0
        ax.set_yticks(range(len(keys)), [data.label(k) for k in keys] if beside else [])
        ax.tick_params(axis="y", length=0, labelsize=page.size, labelcolor=INK)
        if any(f.own is not None for f in found[axis]):
            log_ticks(ax.xaxis, *limits)
        else:
            ax.set(xticks=[])
            ax.minorticks_off()
        ax.set_xlabel("training loss")
        ax.spines["left"].set_visible(False)
    return sheet.figure


def _limits(found: list[findings.Finding]) -> tuple[float, float]:
    losses = [v for f in found for v in (f.own, f.transferred) if v is not None]
    losses = [v for v in losses if v > 0]
    if not losses:
        return 0.1, 1.0
    low, high = min(losses), max(losses)
    margin = max(0.12 * math.log10(high / low), 0.15)
    # More room on the right, where the ratios are written.
    return low * 10**-margin, high * 10 ** (3.2 * margin)


def _draw_regret(ax: Any, row: int, f: findings.Finding, page: Page) -> None:
    color = _DARK
    label: dict[str, Any] = {"va": "center", "size": page.size}
    own, given = f.own, f.transferred
    across = ax.get_yaxis_transform()
    if own is None or own <= 0:
        words = {"color": MUTED, "style": "italic"}
        ax.text(0.02, row, findings.cost(f), transform=across, **label, **words)
        return
    if f.diverges:
        right = ax.get_xlim()[1]
        ax.plot([own, right], [row, row], color=color, lw=2.2, ls=(0, (2, 1.5)))
        ax.plot(1, row, ">", color=color, ms=9, transform=across, clip_on=False)
        ax.text(0.97, row - 0.24, "diverges", transform=across, ha="right", **label)
    elif given is not None and given > 0:
        ax.plot([own, given], [row, row], color=color, lw=2.2, zorder=2)
        ax.plot(given, row, mfc="white", zorder=4, **_GIVEN)
        ax.annotate(
            findings.cost(f),
            (max(own, given), row),
            xytext=(11, 0),
            textcoords="offset points",
            weight="bold",
            **label,
        )
    else:
        ax.annotate(
            findings.cost(f),
            (own, row),
            xytext=(11, 0),
            textcoords="offset points",
            color=MUTED,
            style="italic",
            **label,
        )
    ax.plot(own, row, mfc=color, zorder=3, **_OWN)


def target_figure(data: SweepData, page: Page) -> Figure:
    """The target's losses, and beside them its test accuracy."""
    columns = 2
    left, right, gap = 0.72, 0.55, 0.95
    width = (page.width - left - right - gap * (columns - 1)) / columns
    head, main, foot = 0.36, 2.7, 0.62
    sheet = Sheet(page, findings.target(data).rstrip("."))
    first, step = sheet.top, head + main + foot
    sheet.open(first + step * (2 // columns))
    places = [(left + i % columns * (width + gap), i // columns) for i in range(2)]
    boxes = [(x, first + r * step) for x, r in places]
    for (x, y), name in zip(boxes, ("Loss", "Test accuracy"), strict=True):
        sheet.text(x, y, name, size=page.size + 0.5, weight="bold")
    losses, accuracy = (sheet.axes(x, y + head, width, main) for x, y in boxes)
    if data.trained is not None:
        _draw_losses(losses, data.trained)
        _draw_accuracy(accuracy, data.trained)
    return sheet.figure


def _draw_losses(ax: Any, data: Trained) -> None:
    # Non-finite losses make gaps in the line: that is what they are.
    train = np.array(data.curve, dtype=float).reshape(-1, 2)
    tests = np.array([e[:2] for e in data.evals], dtype=float).reshape(-1, 2)
    ax.set_xlabel("step")
    if not _drawable(train) and not _drawable(tests):
        ax.set(xticks=[], yticks=[])
        say_nothing(ax)
        return
    ax.set_yscale("log")
    ax.plot(*train.T, color=_DARK, lw=1.4, label="training")
    ax.plot(*tests.T, color=_LIGHT, lw=1.6, ls=(0, (4, 1.5)), marker="o", label="test")
    log_ticks(ax.yaxis, *ax.get_ylim())
    ax.legend(loc="upper right", ncols=2)


def _draw_accuracy(ax: Any, data: Trained) -> None:
    evals = [(e[0], finite(e[2])) for e in data.evals]
    known = [(s, a) for s, a in evals if a is not None]
    ax.set_xlabel("step")
    if not known:
        ax.set(xticks=[], yticks=[])
        say_nothing(ax)
        return
    ax.plot(*zip(*known, strict=True), color=_DARK, lw=1.6, marker="o", clip_on=False)
    low = min(a for _, a in known)
    # Percent points are only told apart near the top when the axis starts there.
    ax.set_ylim(max(0.0, low - 0.15 * (1 - low) - 0.005), 1.0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
    step, last = known[-1]
    ax.annotate(
        f"{last:.1%}",
        (step, last),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        weight="bold",
        annotation_clip=False,
    )


def _drawable(points: np.ndarray) -> bool:
    return bool((np.isfinite(points[:, 1]) & (points[:, 1] > 0)).any())

"""Deeper or wider at equal parameters (Bordelon et al., Figure B.1)."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from ..sweep.tradeoff import Suggestion, Tradeoff
from .findings import listed, loss
from .style import INK, MUTED, Page, Sheet, log_ticks, say_nothing, strokes

_STAR: dict[str, Any] = {"marker": "*", "ms": 14, "mec": INK, "mew": 0.9, "ls": ""}


def count(parameters: float) -> str:
    """A number of parameters.

    Examples:
      >>> count(950), count(31_400), count(1_250_000), count(7e9)
      ('950', '31k', '1.2M', '7B')
    """
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return (
                f"{parameters / size:.2g}{unit}"
                if parameters < 100 * size
                else (f"{parameters / size:.0f}{unit}")
            )
    return f"{parameters:.0f}"


def depth(found: Suggestion) -> str:
    """The suggested depth with its interval: "12 (95 %: 9 to 16)"."""
    if found.depth is None:
        return "none: nothing trained"
    best = f"{found.depth:.0f}"
    if found.at_edge:
        ends = list(found.losses)
        side = "or less" if round(found.depth) <= ends[0] else "or more"
        return f"{best} {side}"
    if found.interval is None:
        return f"{best} (of one seed)"
    low, high = found.interval
    return f"{best} (95 %: {low:.0f} to {high:.0f})"


def title(found: Tradeoff) -> str:
    """What depth is suggested, at the largest budget that trained."""
    known = [s for s in found.suggestions if s.depth is not None]
    if not known:
        return "Nothing trained at equal parameters"
    told = [f"{depth(s)} at {count(s.parameters)} parameters" for s in known]
    best = listed(told if len(told) < 3 else [told[0], told[-1]])
    return f"At equal parameters, the best depth is {best}"


def sentences(found: Tradeoff, label: str) -> list[str]:
    """What the power laws say, and what to do with it."""
    out = []
    if found.laws:
        told = [
            f"{law.exponent:.3f}"
            + (f" ± {law.error:.3f}" if law.error is not None else "")
            + f" at depth {law.depth}"
            for law in found.laws
        ]
        out.append(
            f"With {label}, the loss goes as the number of parameters to the power "
            f"−b, where b is {listed(told)}."
        )
    else:
        out.append("No depth trained at two sizes, so no power law could be fitted.")
    edges = [s for s in found.suggestions if s.at_edge and len(s.losses) > 1]
    if edges:
        at = listed([count(s.parameters) for s in edges])
        out.append(
            f"At {at} parameters the least loss is at an end of the depths that were "
            "trained; more depths would tell."
        )
    predicted = found.predicted
    if predicted is not None and predicted.depth is not None:
        out.append(
            f"Followed to the target's {count(predicted.parameters)} parameters, the "
            f"power laws suggest depth {depth(predicted)}."
        )
    gone = [p for p in found.points if p.mean is None]
    if gone:
        shapes = listed([f"{p.width} × {p.depth}" for p in gone])
        out.append(f"A seed diverged at width × depth {shapes}, left out.")
    return out


def table(found: Tradeoff) -> dict[str, Any]:
    """A row for each budget: loss at each depth, and the suggested one."""
    body = []
    for s in found.suggestions:
        losses = [loss(s.losses[d]) if d in s.losses else "–" for d in found.depths]
        body.append([count(s.parameters), *losses, depth(s)])
    return {
        "caption": "Training loss at each depth, at equal parameters",
        "heads": ["parameters", *map(str, found.depths), "suggested depth"],
        "body": body,
    }


def tradeoff_figure(found: Tradeoff, page: Page, *, title: str) -> Figure:
    """Loss against parameters, a line a depth; against depth, a line a budget."""
    columns = 2
    left, right, gap = 0.82, 0.2, 0.75
    width = (page.width - left - right - gap * (columns - 1)) / columns
    legend_rows = math.ceil(max(len(found.depths), len(found.budgets)) / 3)
    head, main, foot = 0.42 + 0.23 * legend_rows, 2.9, 0.66
    sheet = Sheet(page, title)
    first, step = sheet.top, head + main + foot
    sheet.open(first + step * (2 // columns))
    by_depth = dict(zip(found.depths, strokes(len(found.depths)), strict=True))
    by_budget = dict(zip(found.budgets, strokes(len(found.budgets)), strict=True))
    panels = (
        ("One depth a line: its power law", by_depth, "depth {}"),
        ("Equal parameters a line", by_budget, "{}"),
    )
    axes = []
    for i, (name, looks, label) in enumerate(panels):
        of_budgets = looks is by_budget
        x = left + i % columns * (width + gap)
        y = first + i // columns * step
        sheet.text(x, y, name, size=page.size + 0.5, weight="bold")
        shown = {s: count(s) if of_budgets else str(s) for s in looks}
        handles = [
            Line2D([], [], lw=1.8, ms=5, mew=0, label=label.format(shown[s]), **look)
            for s, look in looks.items()
        ]
        sheet.legend(x, y + 0.25, handles, 3)
        ax = sheet.axes(x, y + head, width, main)
        ax.set(xscale="log", yscale="log", ylabel="training loss")
        axes.append(ax)
    if all(p.mean is None for p in found.points):
        for ax in axes:
            ax.set(xscale="linear", yscale="linear", xticks=[], yticks=[])
            say_nothing(ax)
        return sheet.figure
    _draw_laws(axes[0], found, by_depth)
    _draw_budgets(axes[1], found, by_budget)
    for ax in axes:
        log_ticks(ax.yaxis, *ax.get_ylim())
    return sheet.figure


def _draw_laws(ax: Any, found: Tradeoff, looks: dict[int, Any]) -> None:
    laws = {law.depth: law for law in found.laws}
    for d, look in looks.items():
        mine = [p for p in found.points if p.depth == d and p.mean is not None]
        mine.sort(key=lambda p: p.parameters)
        x, y = [p.parameters for p in mine], [p.mean for p in mine]
        for p in mine:
            seeds = [p.loss.min(), p.loss.max()]
            ax.plot([p.parameters] * 2, seeds, color=look["color"], lw=1, alpha=0.6)
        ax.plot(x, y, ms=6, mew=0, **{**look, "linestyle": ""})
        if d in laws:
            ends = [min(found.budgets) / 1.2, _most(found) * 1.2]
            fitted = [laws[d](size) for size in ends]
            dashes = look["linestyle"]
            ax.plot(ends, fitted, color=look["color"], lw=1.4, ls=dashes)
    if found.predicted is not None and found.target is not None:
        ax.axvline(found.target, color=MUTED, lw=1)
        ax.text(
            *(found.target, 0.98, "target "),
            transform=ax.get_xaxis_transform(),
            ha="right",
            va="top",
            color=MUTED,
        )
    ax.set_xlabel("trained parameters")
    ax.xaxis.set_major_formatter(lambda v, _: count(v))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _most(found: Tradeoff) -> int:
    target = found.target if found.predicted is not None else None
    return max([*found.budgets, *([target] if target else [])])


def _draw_budgets(ax: Any, found: Tradeoff, looks: dict[int, Any]) -> None:
    for s in found.suggestions:
        look = looks[s.parameters]
        if not s.losses:
            continue
        ax.plot(list(s.losses), list(s.losses.values()), lw=1.7, ms=5, mew=0, **look)
        if s.depth is None:
            continue
        least = float(min(s.losses.values()))
        if s.interval is not None and not s.at_edge:
            ax.plot(s.interval, [least] * 2, "-|", color=INK, lw=1.2, ms=7)
        ax.plot(s.depth, least, mfc=look["color"], zorder=5, **_STAR)
    _depth_ticks(ax, found.depths)
    ax.set_xlabel("depth (stars: the best, with 95 %)")


def _depth_ticks(ax: Any, depths: Sequence[int]) -> None:
    ax.xaxis.set_major_locator(NullLocator())
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(list(depths), [str(d) for d in depths])
    ax.set_xlim(min(depths) / 1.25, max(depths) * 1.25)

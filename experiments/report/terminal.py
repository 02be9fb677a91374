"""The transfer's result in a terminal."""

import os

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from . import findings
from .data import AXES, ReportData


def print_table(
    data: ReportData, console: Console, report_path: str | os.PathLike
) -> None:
    """Print the verdict, a row per axis and parametrization, and where to look.

    Args:
      data: what the transfer found.
      console: where to print.
      report_path: the written report.html, named on the last line.
    """
    console.print()
    console.print(escape(findings.headline(data)), style="bold", highlight=False)
    table = Table(
        box=None,
        show_header=False,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column()
    for _ in range(4):
        table.add_column(justify="right")
    for axis in AXES:
        sizes = data.sizes(axis)
        if not sizes:
            continue
        many = len(sizes) > 1
        heads = (
            f"lr at {sizes[0]}",
            f"lr at {sizes[-1]}" if many else "",
            "shift",
            f"regret at {sizes[-1]}" if many else "regret",
        )
        table.add_row()
        table.add_row(
            Text(f"over {axis}, {data.held(axis)}", style="bold"),
            *(Text(head, style="dim") for head in heads),
        )
        for key in data.parametrizations:
            found = findings.find(data, axis, key)
            if found.sizes:
                table.add_row(*_row(found, featured=key == data.featured))
    console.print(table, highlight=False)
    console.print()
    console.print(escape(findings.target(data)), highlight=False)
    console.print(
        f"Report: {escape(os.fspath(report_path))}", highlight=False, soft_wrap=True
    )


def _row(found: findings.Finding, *, featured: bool) -> list[Text]:
    first, last = found.optima[0], found.optima[-1]
    many = len(found.sizes) > 1
    if not many:
        shift, tone = Text("–"), ""
    elif found.shift is None:
        shift, tone = Text("none"), "red"
    else:
        shift, tone = Text(f"{found.shift:.1f} oct"), "green" if found.stays else "red"
    shift.stylize(tone)
    return [
        Text(f"  {found.label}", style="bold" if featured else ""),
        _rate(first),
        _rate(last) if many else Text(""),
        shift,
        _regret(found) if many else Text("–"),
    ]


def _rate(log2: float | None) -> Text:
    return Text("none", style="red") if log2 is None else Text(f"2^{log2:.1f}")


def _regret(found: findings.Finding) -> Text:
    if found.regret is None:
        return Text(findings.cost(found), style="red")
    gap = f"{found.regret:+.2g}"
    return Text(gap if found.cost is None else f"{gap} ({findings.cost(found)})")

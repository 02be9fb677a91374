"""The result of a sweep or a transfer in a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import findings, names, words
from .data import SweepData


def print_verdicts(data: SweepData, console: Console) -> None:
    """Print the headline, a row for each verdict, and how the target did."""
    console.print()
    console.print(escape(words.headline(data)), style="bold", highlight=False)
    table = Table(box=None, pad_edge=False)
    for head in ("hyperparameter", "parametrization", "over", "best", "verdict"):
        table.add_column(head)
    table.add_column("cost", justify="right")
    for row in words.every(data):
        best = ["none" if x is None else names.value(row.name, x) for x in row.optima]
        style = "bold" if row.key == data.main else ""
        cells = (names.noun(row.name), row.label, row.axis, " ".join(best))
        table.add_row(*cells, row.words, row.cost, style=style)
    console.print(table, highlight=False)
    if target := findings.target(data):
        console.print(f"\n{escape(target)}", highlight=False)

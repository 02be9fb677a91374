"""The result of a sweep or a transfer in a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import findings, names, words
from .data import SweepData


def print_verdicts(data: SweepData, console: Console) -> None:
    """Print the headline and a row for each verdict."""
    console.print()
    console.print(escape(words.headline(data)), style="bold", highlight=False)
    for sentence in words.numbers(data):
        console.print(escape(sentence), highlight=False)
    table = Table(box=None, pad_edge=False)
    for head in ("hyperparameter", "parametrization", "over", "best", "verdict"):
        table.add_column(head)
    units = sorted({words.unit(transfer.name) for transfer in data.shown})
    table.add_column(f"{'/'.join(units)} per doubling", justify="right")
    for transfer in data.shown:
        name = transfer.name
        best = ["none" if x is None else names.value(name, x) for x in transfer.optima]
        style = "bold" if transfer.key in data.mains else ""
        label = escape(data.all_labels[transfer.key])
        cells = (names.noun(name), label, transfer.axis, " ".join(best))
        table.add_row(
            *cells, transfer.words, escape(words.shift(transfer)), style=style
        )
    console.print(table, highlight=False)


def print_target(data: SweepData, console: Console) -> None:
    """Print the target's result, if one was trained."""
    if target := findings.target(data):
        console.print(f"\n{escape(target)}", highlight=False)

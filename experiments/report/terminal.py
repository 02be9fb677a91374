"""The result of a sweep or a transfer in a terminal."""

import textwrap

from rich.console import Console
from rich.text import Text

from ..sweep import grids
from ..sweep.verdict import Transfer
from . import sentences
from .data import SweepData


def print_verdicts(data: SweepData, console: Console) -> None:
    """Print the headline, every verdict, and what to do next."""
    console.print()
    _print(console, sentences.headline(data), style="bold")
    rows: dict[tuple[str, str], list[Transfer]] = {}
    for t in data.shown:
        rows.setdefault((t.name, t.over), []).append(t)
    for (name, axis), transfers in rows.items():
        _print(console, f"\n{sentences.capital(grids.noun(name))} over {axis}:")
        for t in transfers:
            style = "bold" if t.key in data.mains else ""
            label = f"{sentences.sign(t)} {data.all_labels[t.key]}"
            _print(console, f"{label}: {t.words}", style=style, indent=2)
            best = ", ".join(f"{size}: {value}" for size, value in sentences.best(t))
            moved = sentences.moved(t)
            _print(console, f"  best at {best}" + f"; {moved}" * bool(moved), indent=2)
    _print(console, "")
    for sentence in [sentences.at_base(data), *sentences.next_steps(data)]:
        _print(console, sentence)


def print_target(data: SweepData, console: Console) -> None:
    """Print the target's result, if one was trained."""
    if data.trained is not None:
        console.print()
        _print(console, sentences.result(data), style="bold")
        _print(console, sentences.target(data))


def _print(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    """Print a text in lines that fit; all lines but the first are indented."""
    for line in text.split("\n"):
        wrapped = textwrap.fill(
            line,
            console.width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        console.print(Text(wrapped, style), soft_wrap=True)

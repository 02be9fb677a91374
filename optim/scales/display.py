"""Display results in a notebook: tables as HTML, and figures."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

_CELL = "padding: 0.1em 0.6em; text-align: left; white-space: nowrap"


def html_table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: Iterable[str] = (),
) -> str:
    """Format a table as HTML for `_repr_html_`, in a box that scrolls sideways.

    Args:
      title: one line, printed in bold above the table.
      head: names of the columns.
      rows: cells of each row, as text; this function escapes it.
      notes: lines below the table.

    Examples:
      >>> "<td" in html_table("a < b", ["path"], [["w"]])
      True
    """
    line = html.escape
    cells = "".join(f'<th style="{_CELL}">{line(name)}</th>' for name in head)
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL}">{line(cell)}</td>' for cell in row)
        + "</tr>"
        for row in rows
    )
    below = "".join(f"<div><small>{line(note)}</small></div>" for note in notes)
    return (
        f'<div style="overflow-x: auto"><b>{line(title)}</b>'
        f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
        f"{below}</div>"
    )


class Figures(list[Any]):
    """A list of Matplotlib figures that a notebook displays.

    They are plain figures (`savefig` works), created without pyplot: none stays open.
    """

    def _repr_html_(self) -> str:
        shown = []
        for figure in self:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", bbox_inches="tight", dpi=120)
            coded = base64.b64encode(buffer.getvalue()).decode()
            style = "max-width: 100%"
            shown.append(f'<img style="{style}" src="data:image/png;base64,{coded}">')
        return "\n".join(shown)

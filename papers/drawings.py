"""Drawings as CSV files, to draw a solver's figure again without solving."""

import csv
import io
import json
import math
import pathlib
from typing import Any

from mupax.experiments.errors import UserError
from mupax.experiments.io import csv_text, write_durably

from .registry import Drawing, Figure, Line, Panel, Request


def path(figure: Figure, request: Request) -> pathlib.Path:
    """The file of a figure that is computed and not trained."""
    return request.tables / request.scale / f"{figure.id}.csv"


def write(file: pathlib.Path, drawing: Drawing) -> Drawing:
    """Write a drawing, and return it as the file holds it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(file, text(drawing))
    return read(file)


def text(drawing: Drawing) -> str:
    """A drawing as CSV: a comment with its words, then its points."""
    head = {
        "ours": drawing.ours,
        "agrees": drawing.agrees,
        "length": drawing.length,
        "panels": [
            {
                "title": panel.title,
                "x_label": panel.x_label,
                "y_label": panel.y_label,
                "log_x": panel.log_x,
                "log_y": panel.log_y,
                "lines": [[line.label, line.look] for line in panel.lines],
            }
            for panel in drawing.panels
        ],
    }
    rows: list[list[Any]] = [["panel", "line", "x", "y", "standard_error"]]
    for i, panel in enumerate(drawing.panels):
        for j, line in enumerate(panel.lines):
            errors = line.error if line.error is not None else [math.nan] * len(line.x)
            for values in zip(line.x, line.y, errors, strict=True):
                rows.append([i, j, *(_short(float(value)) for value in values)])
    return f"# {json.dumps(head, ensure_ascii=False)}\n{csv_text(rows)}"


def _short(value: float) -> str:
    return f"{value:.7g}" if math.isfinite(value) else ""


def read(file: pathlib.Path) -> Drawing:
    """The inverse of `write`.

    Raises:
      UserError: there is no such file, or it is not a drawing.
    """
    try:
        head, _, body = file.read_text().partition("\n")
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); leave --from_data out to "
            "compute the figure"
        ) from None
    try:
        facts = json.loads(head.removeprefix("# "))
        rows = list(csv.DictReader(io.StringIO(body)))
        panels = []
        for i, panel in enumerate(facts["panels"]):
            lines = []
            for j, (label, look) in enumerate(panel.pop("lines")):
                own = [r for r in rows if (r["panel"], r["line"]) == (str(i), str(j))]
                x, y, errors = (
                    [float(r[k] or "nan") for r in own]
                    for k in ("x", "y", "standard_error")
                )
                known = any(map(math.isfinite, errors))
                lines.append(Line(label, x, y, errors if known else None, look))
            panels.append(Panel(lines=lines, **panel))
        length = facts.get("length", "")
        return Drawing(panels, facts["ours"], facts["agrees"], length)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is not a drawing ({error}); remove it and draw the figure again"
        ) from None

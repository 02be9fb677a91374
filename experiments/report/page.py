"""The pictures and the page, written so that a half-written one is never seen."""

import base64
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from . import findings
from .data import AXES, Axis, ReportData, finite, size
from .outcome_figures import regret_figure, target_figure
from .style import FILE, PHONE, WIDE, render
from .sweep_figure import sweep_figure

PAGE = "report.html"
_PICTURES: dict[str, tuple[Any, ...]] = {
    "depth": (sweep_figure, "depth"),
    "width": (sweep_figure, "width"),
    "regret": (regret_figure,),
    "target": (target_figure,),
}


def write_report(data: ReportData, workdir: str | os.PathLike) -> list[Path]:
    """Write the pictures and report.html into a run directory.

    Args:
      data: what the transfer found.
      workdir: an existing directory; files of the same name are replaced.

    Returns:
      The written paths: depth.png, width.png, regret.png, target.png, report.html.
    """
    folder = Path(workdir)
    files = {}
    for name, (draw, *axis) in _PICTURES.items():
        files[f"{name}.png"] = render(draw, data, *axis, FILE)
    files[PAGE] = page(data).encode()
    return [_replace(folder / name, content) for name, content in files.items()]


def page(data: ReportData) -> str:
    """The page as one string: style and pictures inside, nothing fetched."""
    env = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["power"] = _power
    labels = [data.label(key) for key in data.parametrizations]
    env.filters["whole"] = lambda text: _whole(text, labels)
    pictures = {
        name: {
            "wide": _inline(render(draw, data, *axis, WIDE)),
            "phone": _inline(render(draw, data, *axis, PHONE)),
        }
        for name, (draw, *axis) in _PICTURES.items()
    }
    return env.get_template("page.html").render(
        data=data,
        say=findings,
        pictures=pictures,
        sections=[_section(data, axis) for axis in AXES if data.sizes(axis)],
        seeds=max((len(c.loss) for c in data.cells), default=0),
        featured=data.label(data.featured),
        target=data.summary.get("target") or {},
        figures=_key_figures(data),
        settings=list(_flat(data.settings)),
        spent=_spent(data),
        regrets=[
            find
            for axis in AXES
            for key in data.parametrizations
            if len((find := findings.find(data, axis, key)).sizes) > 1
        ],
    )


def _section(data: ReportData, axis: Axis) -> dict[str, Any]:
    """One axis: its finding, and the table of optima, a row per parametrization."""
    rows = []
    for key in data.parametrizations:
        f = findings.find(data, axis, key)
        cells = {size(c, axis): data.optimum(c) for c in data.along(axis, key)}
        rows.append((f, [(s in cells, cells.get(s)) for s in data.sizes(axis)]))
    return {
        "axis": axis,
        "title": findings.title(data, axis),
        "rows": rows,
        "sizes": data.sizes(axis),
        "notes": findings.notes(data, axis),
    }


def _key_figures(data: ReportData) -> list[tuple[str, str]]:
    """The few numbers that a reader takes away, each with what it is."""
    figures = []
    for axis in AXES:
        f = findings.find(data, axis, data.featured)
        if f.measured:
            figures.append((f"{f.shift:.1f} octaves", f"shift {f.span}"))
        elif f.failed:
            figures.append((f"no {axis} shift", findings.absence(f)))
    t = data.summary.get("target") or {}
    if (accuracy := finite(t.get("test_accuracy"))) is not None:
        figures.append((f"{accuracy:.1%}", "test accuracy of the target"))
    if (total := finite(data.summary.get("seconds", {}).get("total"))) is not None:
        runs = data.summary.get("runs")
        figures.append((_duration(total), f"for {runs} runs and the target"))
    return figures


def _spent(data: ReportData) -> list[tuple[str, str]]:
    seconds = data.summary.get("seconds", {})
    known = ((k, finite(v)) for k, v in seconds.items())
    return [(k, _duration(v)) for k, v in known if v is not None]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _power(log2: float | None) -> markupsafe.Markup:
    """2 to a power, for a page."""
    if log2 is None:
        return markupsafe.Markup('<em class="none">nothing trained</em>')
    exponent = f"{log2:.1f}".replace("-", "−")
    return markupsafe.Markup("2<sup>{}</sup>").format(exponent)


def _whole(text: str, labels: list[str]) -> markupsafe.Markup:
    """Text in which no line ends inside a name or between a number and its unit."""
    escaped = str(markupsafe.escape(text))
    for label in map(str, map(markupsafe.escape, labels)):
        escaped = escaped.replace(label, f'<span class="whole">{label}</span>')
    return markupsafe.Markup(escaped.replace(" octaves", "&nbsp;octaves"))


def _inline(png: bytes) -> markupsafe.Markup:
    return markupsafe.Markup("data:image/png;base64," + base64.b64encode(png).decode())


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield name, ", ".join(map(str, value))
        else:
            yield name, "–" if value is None else str(value)


def _replace(path: Path, content: bytes) -> Path:
    # In the same directory, because os.replace is atomic within one file system.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path

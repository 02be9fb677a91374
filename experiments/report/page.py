"""The pictures and the page, written so that a half-written one is never seen."""

import functools
import os
from pathlib import Path
from typing import Any

from ..sweep import grids
from . import findings, names, verdicts
from .data import AXES, Axis, Lines, ReportData, finite, size
from .outcome_figures import regret_figure, target_figure
from .style import FILE, PHONE, WIDE, render
from .sweep_figure import sweep_figure
from .templates import download, duration, environment, flat, picture, replace

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
    return [replace(folder / name, content) for name, content in files.items()]


def page(data: ReportData) -> str:
    """The page as one string: style and pictures inside, nothing fetched."""
    env = environment(data.label(key) for key in data.parametrizations)
    env.filters["power"] = functools.partial(names.power, "learning_rate")
    pictures = {
        name: {
            "wide": picture(render(draw, data, *axis, WIDE)),
            "phone": picture(render(draw, data, *axis, PHONE)),
        }
        for name, (draw, *axis) in _PICTURES.items()
    }
    return env.get_template("page.html").render(
        data=data,
        say=findings,
        pictures=pictures,
        sections=[
            section(data, axis, findings.title(data, axis))
            for axis in AXES
            if data.sizes(axis)
        ],
        seeds=max((len(c.loss) for c in data.cells), default=0),
        featured=data.label(data.featured),
        target=data.summary.get("target") or {},
        figures=_key_figures(data),
        settings=list(flat(data.settings)),
        told=_told(data),
        results=data.sweep and download(data.sweep.table),
        groups=data.sweep and verdicts.groups(data.sweep),
        sure=data.sweep and verdicts.headline(data.sweep),
        guide=verdicts.GUIDE,
        regrets=[
            find
            for axis in AXES
            for key in data.parametrizations
            if len((find := findings.find(data, axis, key)).sizes) > 1
        ],
    )


def section(data: Lines, axis: Axis, title: str) -> dict[str, Any]:
    """One axis: its finding, and the table of optima, a row per parametrization."""
    rows = []
    for key in data.parametrizations:
        f = findings.find(data, axis, key)
        cells = {size(c, axis): data.optimum(c) for c in data.along(axis, key)}
        rows.append((f, [(s in cells, cells.get(s)) for s in data.sizes(axis)]))
    name = data.hyperparameter
    octaves = grids.unit(name) != "linear"
    return {
        "axis": axis,
        "title": title,
        "rows": rows,
        "sizes": data.sizes(axis),
        "notes": findings.notes(data, axis),
        "value": functools.partial(names.power, name),
        "unit": " in octaves" if octaves else "",
        "octaves": findings.octaves if octaves else lambda f: f"{f.shift:.2g}",
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
        figures.append((duration(total), f"for {runs} runs and the target"))
    return figures


def _told(data: ReportData) -> str:
    """How many runs, and what they took."""
    seconds = data.summary.get("seconds", {})
    known = ((k, finite(v)) for k, v in seconds.items())
    spent = [f"{k} {duration(v)}" for k, v in known if v is not None]
    runs = f"{data.summary.get('runs', 0)} runs in the sweep"
    return "; ".join([runs, ", ".join(spent)][: 1 + bool(spent)]) + "."

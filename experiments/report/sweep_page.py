"""The report of `mupax sweep`: one page, verdict first."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..sweeps.results import table
from . import names, verdicts
from .data import Axis, SweepData
from .page import PAGE, section
from .style import PHONE, WIDE, Page, render
from .sweep_figure import sweep_figure
from .templates import download, duration, environment, flat, picture, replace

Draw = Callable[[Page], Figure]


def write_sweep_report(data: SweepData, workdir: str | os.PathLike) -> Path:
    """Write report.html into a run directory.

    Args:
      data: what the sweep found.
      workdir: an existing directory; a report that is there is replaced.

    Returns:
      Its path.
    """
    return replace(Path(workdir) / PAGE, sweep_page(data).encode())


def sweep_page(data: SweepData) -> str:
    """The page as one string: style, pictures and table inside, nothing fetched."""
    env = environment(data.keys.values())
    drawn: dict[str, Draw] = {}
    sections = [_lines(data, n, axis, drawn) for n in data.names for axis in data.axes]
    for more in (_heatmaps, _curves, _tradeoff):
        sections += more(data, drawn)
    pictures = {
        name: {
            "wide": picture(render(draw, WIDE)),
            "phone": picture(render(draw, PHONE)),
        }
        for name, draw in drawn.items()
    }
    populations = list(data.populations)
    seconds = sum(p.seconds for p in populations)
    runs = sum(p.loss.size for p in populations)
    return env.get_template("sweep.html").render(
        data=data,
        headline=verdicts.headline(data),
        advice=verdicts.advice(data),
        contrast=verdicts.contrast(data),
        groups=verdicts.groups(data),
        guide=verdicts.GUIDE,
        sections=sections,
        pictures=pictures,
        seeds=max(len(p.loss) for p in populations),
        settings=list(flat(data.settings)),
        told=f"{runs} runs of {data.steps} steps in {duration(seconds)}.",
        results=download(table(populations)),
    )


def _lines(
    data: SweepData, name: str, axis: Axis, drawn: dict[str, Draw]
) -> dict[str, Any]:
    """Loss against one hyperparameter along one axis."""
    lines = data.lines(name)
    noun = names.noun(name)
    title = verdicts.title(data, name, axis)
    place = f"{name}-{axis}"
    drawn[place] = functools.partial(
        sweep_figure,
        lines,
        axis,
        title=title,
        captions=verdicts.captions(data, name, axis),
    )
    others = [names.noun(n) for n in data.names if n != name]
    held = f"over {axis}, at {lines.held(axis)}"
    if others:
        held += f", {verdicts.listed(others)} at the best for each {noun}"
    alt = (
        f"{title}. Training loss against {noun}, a line per {axis}, a panel per "
        "parametrization; a star marks each optimum."
    )
    return {
        **section(lines, axis, title),
        "id": place,
        "over": noun,
        "noun": noun,
        "held": held,
        "text": "",
        "lines": lines,
        "pictures": [{"name": place, "alt": alt, "caption": ""}],
        "table": None,
    }


def _plain(place: str, over: str, held: str, title: str, text: str) -> dict[str, Any]:
    """A section that is not about one hyperparameter."""
    return {
        "id": place,
        "over": over,
        "held": held,
        "title": title,
        "text": text,
        "lines": None,
        "rows": [],
        "notes": [],
        "pictures": [],
        "table": None,
    }


def _heatmaps(data: SweepData, drawn: dict[str, Draw]) -> list[dict[str, Any]]:
    return []


def _curves(data: SweepData, drawn: dict[str, Draw]) -> list[dict[str, Any]]:
    return []


def _tradeoff(data: SweepData, drawn: dict[str, Draw]) -> list[dict[str, Any]]:
    return []

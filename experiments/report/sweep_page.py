"""The report of `mupax sweep`: one page, verdict first."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from . import advice, curves_figure, heatmap_figure, names, tradeoff_figure, verdicts
from .data import Axis, SweepData
from .page import PAGE, section
from .style import DPI, PHONE, WIDE, Page, render
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


def sweep_page(data: SweepData, dpi: int = DPI) -> str:
    """The page as one string: style, pictures and table inside, nothing fetched.

    Args:
      data: what the sweep found.
      dpi: of the pictures; less is faster.
    """
    env = environment(data.keys.values())
    drawn: dict[str, Draw] = {}
    sections = [_lines(data, n, axis, drawn) for n in data.names for axis in data.axes]
    for more in (_heatmaps, _curves, _tradeoff):
        sections += more(data, drawn)
    pictures = {
        name: {
            "wide": picture(render(draw, WIDE, dpi=dpi)),
            "phone": picture(render(draw, PHONE, dpi=dpi)),
        }
        for name, draw in drawn.items()
    }
    populations = list(data.populations)
    seconds = sum(p.seconds for p in data.everything)
    return env.get_template("sweep.html").render(
        data=data,
        headline=verdicts.headline(data),
        advice=advice.advice(data),
        contrast=advice.contrast(data),
        groups=verdicts.groups(data),
        guide=verdicts.GUIDE,
        sections=sections,
        pictures=pictures,
        seeds=max(len(p.loss) for p in populations),
        stopped=any(p.stopped is not None and p.stopped.any() for p in populations),
        settings=list(flat(data.settings)),
        told=f"{data.runs} runs of {data.steps} steps in {duration(seconds)}.",
        results=download(data.table),
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
    made = section(lines, axis, title)
    if told := verdicts.fixed(data, name, axis):
        made["notes"] = [*made["notes"], told]
    return {
        **made,
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
    """Loss over pairs of hyperparameters."""
    out = []
    for pair in heatmap_figure.pairs(data):
        nouns = [names.noun(name) for name in pair]
        for axis in data.axes:
            place = f"{pair[0]}-{pair[1]}-{axis}"
            title = heatmap_figure.title(data, pair, axis)
            drawn[place] = functools.partial(
                heatmap_figure.heatmap_figure, data, pair, axis, title=title
            )
            made = _plain(
                place,
                f"{nouns[0]} × {nouns[1]}",
                f"over {axis}, at {held(data, axis)}",
                title,
                "Dark is the least loss. A valley that leans says that the two trade "
                "against each other: what one loses, the other can make up for. Both "
                "can be taken from a small model where the star and the outline stay.",
            )
            alt = f"{title}. Loss over both, a panel for each {axis}."
            made["pictures"] = [
                {"name": place, "alt": alt, "caption": heatmap_figure.caption(data)}
            ]
            made["table"] = heatmap_figure.table(data, pair, axis)
            out.append(made)
    return out


def held(data: SweepData, axis: Axis) -> str:
    """What stays fixed along an axis."""
    base = data.base
    return f"width {base.width}" if axis == "depth" else f"depth {base.depth}"


def _curves(data: SweepData, drawn: dict[str, Draw]) -> list[dict[str, Any]]:
    """Learning curves at the base's best point."""
    out = []
    for axis in data.axes:
        place = f"curves-{axis}"
        title = curves_figure.title(data, axis)
        drawn[place] = functools.partial(
            curves_figure.curves_figure, data, axis, title=title
        )
        made = _plain(
            place, "learning curves", f"over {axis}, at {held(data, axis)}", title, ""
        )
        caption = (
            "Training loss over the steps, geometric mean over seeds, every size at "
            "the point of the grid that the base of the same parametrization likes "
            f"best ({curves_figure.held(data)}). A line ends where the first seed "
            "diverged."
        )
        alt = f"{title}. Training loss against step, a line per {axis}."
        made["pictures"] = [{"name": place, "alt": alt, "caption": caption}]
        out.append(made)
    return out


def _tradeoff(data: SweepData, drawn: dict[str, Draw]) -> list[dict[str, Any]]:
    """Deeper or wider at equal parameters, where it was asked for."""
    found = data.tradeoff
    if found is None:
        return []
    title = tradeoff_figure.title(found)
    drawn["tradeoff"] = functools.partial(
        tradeoff_figure.tradeoff_figure, found, title=title
    )
    label = data.keys.get(found.key, found.key)
    made = _plain(
        "tradeoff",
        "deeper or wider",
        f"at equal parameters, {label}",
        title,
        " ".join(tradeoff_figure.sentences(found, label)),
    )
    at = [f"{names.noun(n)} {x:.2g}" for n, x in found.hyper.items()]
    caption = (
        "All shapes train with what the base likes best "
        f"({verdicts.listed(at)}), for the same number of steps: with other numbers of "
        "steps the best depth may be another. Left, thin bars are the range of seeds. "
        "Right, each loss is moved to exactly equal parameters along its depth's power "
        "law."
    )
    alt = f"{title}. Loss against parameters and against depth."
    made["pictures"] = [{"name": "tradeoff", "alt": alt, "caption": caption}]
    made["table"] = tradeoff_figure.table(found)
    return [made]

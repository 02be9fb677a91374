"""The report of a sweep or a transfer: one page, verdict first."""

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mupax.optim.display import Figures

from ..errors import UserError
from ..io import write_durably
from ..sweep.verdict import Transfer
from . import (
    advice,
    curves_figure,
    findings,
    heatmap_figure,
    names,
    opening,
    words,
)
from .data import AXES, Axis, Lines, SweepData, size
from .outcome_figures import regret_figure, target_figure
from .style import DPI, FILE, NARROW, WIDE, Page, render, styled
from .sweep_figure import sweep_figure
from .templates import download, duration, environment, flat, picture

Draw = Callable[[Page], Figure]

_RATE = "learning_rate"


def write_report(data: SweepData, workdir: str | os.PathLike) -> list[Path]:
    """Write report.html into a run directory.

    Args:
      data: results of a sweep or transfer. With a trained target, depth.png, width.png,
        regret.png and target.png are written too, and with baselines demo.png.
      workdir: an existing directory; files of the same name are replaced.

    Returns:
      The written paths, the report first.
    """
    files = {"report.html": report_page(data).encode()}
    if data.trained is not None:
        for name, draw in _pictures(data).items():
            files[f"{name}.png"] = render(draw, FILE)
    paths = [Path(workdir) / name for name in files]
    for path, content in zip(paths, files.values(), strict=True):
        write_durably(path, content)
    return paths


def _pictures(data: SweepData) -> dict[str, Draw]:
    """The files beside the report of a transfer."""
    lines = data.lines(_RATE)
    transfers = rates(data)
    drawn: dict[str, Draw] = {
        axis: functools.partial(
            sweep_figure,
            lines,
            axis,
            [t for t in transfers if t.axis == axis],
            title=words.title(data, _RATE, axis),
            captions=words.captions(data, _RATE, axis),
        )
        for axis in AXES
    }
    drawn["regret"] = functools.partial(regret_figure, data, transfers)
    drawn["target"] = functools.partial(target_figure, data)
    if opening.shown(data):
        drawn["demo"] = functools.partial(opening.figure, data)
    return drawn


def sweep_figures(data: SweepData, name: str) -> Figures:
    """Loss against one hyperparameter, a figure for each axis of size.

    Args:
      data: results of a sweep.
      name: of the hyperparameter.

    Raises:
      UserError: it has one value only, or is unknown.
    """
    if name not in data.names:
        raise UserError(
            f"the sweep has no values of {name!r} to compare; it has "
            f"{', '.join(data.names) or 'none'}"
        )
    with styled():
        return Figures(
            sweep_figure(
                data.lines(name),
                axis,
                [t for t in data.transfers if (t.name, t.axis) == (name, axis)],
                FILE,
                title=words.title(data, name, axis),
                captions=words.captions(data, name, axis),
            )
            for axis in data.axes
        )


def rates(data: SweepData) -> list[Transfer]:
    """The verdicts on the learning rate, along axes of several sizes."""
    return [t for t in data.transfers if t.name == _RATE and len(t.sizes) > 1]


def report_page(data: SweepData, dpi: int = DPI, *, phone: bool = True) -> str:
    """The page as HTML with styles, pictures and results inside; it loads no files.

    Args:
      data: results of a sweep or transfer.
      dpi: dots per inch of the pictures; fewer are drawn faster.
      phone: draw every picture a second time, for narrow screens.
    """
    env = environment(data.keys.values())
    drawn: dict[str, Draw] = {}
    first = opening.shown(data)
    if first:
        drawn["opening"] = functools.partial(opening.figure, data)
    sections = [_lines(data, n, axis, drawn) for n in data.names for axis in data.axes]
    for more in (_heatmaps, _curves, _target):
        sections += more(data, drawn)
    populations = list(data.populations)
    return env.get_template("page.html").render(
        data=data,
        opening=opening.sentence(data) if first else "",
        bought=opening.bought(data),
        headline=words.headline(data),
        advice=advice.advice(data),
        numbers=words.numbers(data),
        contrast=advice.contrast(data),
        target=findings.target(data),
        tiles=_tiles(data),
        groups=words.groups(data),
        guide=words.GUIDE,
        sections=sections,
        pictures={n: picture(render(d, WIDE, dpi=dpi)) for n, d in drawn.items()},
        narrow={
            n: picture(render(d, NARROW, dpi=dpi)) for n, d in drawn.items() if phone
        },
        seeds=max(len(p.loss) for p in populations),
        settings=list(flat(data.settings)),
        told=_told(data),
        results=download(data.table),
    )


def _told(data: SweepData) -> str:
    """The number of runs, and the time that they took."""
    seconds = sum(p.seconds for p in data.populations)
    told = f"{data.runs} runs of {data.steps} steps in {duration(seconds)}"
    if data.trained is not None:
        told += f"; the target in {duration(data.trained.seconds)}"
    return f"{told}."


def _tiles(data: SweepData) -> list[tuple[str, str]]:
    """The main numbers of a transfer, each with its name."""
    if data.trained is None:
        return []
    tiles = []
    for t in data.transfers:
        if (t.name, t.key) != (_RATE, data.main) or len(t.sizes) < 2:
            continue
        if math.isfinite(t.trend.change):
            over = f"over {t.axis} {t.sizes[0]} to {t.sizes[-1]}"
            moved = names.factor(_RATE, t.trend.change)
            tiles.append((moved, f"change of the best learning rate {over}"))
    if data.trained.test_accuracy is not None:
        tiles.append((f"{data.trained.test_accuracy:.1%}", "test accuracy of target"))
    seconds = sum(p.seconds for p in data.populations) + data.trained.seconds
    tiles.append((duration(seconds), f"for {data.runs} runs and the target"))
    return tiles


def _target(data: SweepData, drawn: dict[str, Draw]) -> list[dict[str, Any]]:
    """The sections of a transfer: the cost at the largest sizes, and the target."""
    trained = data.trained
    if trained is None:
        return []
    rows = rates(data)
    drawn["regret"] = functools.partial(regret_figure, data, rows)
    drawn["target"] = functools.partial(target_figure, data)
    cost = _plain(
        "regret",
        "what transfer costs",
        "at the largest sizes",
        findings.regret_title(data, rows),
        "Here is the largest model of each axis at two learning rates: its own best "
        "one (the star), and the base's best one (the circle, with a 90 % interval). "
        "The distance between the two is the cost of not tuning the large model.",
    )
    alt = f"{cost['title']}. Own best loss and loss at the base's learning rate."
    cost["pictures"] = [{"name": "regret", "alt": alt, "caption": ""}]
    if rows:
        cost["table"] = {
            "caption": "Training loss of the largest model, at its own best learning "
            "rate and at the base's",
            "heads": ("", "over", "own best", "base's", "cost (90 %)", "verdict"),
            "body": [
                (data.keys[t.key], t.axis, *_losses(t), findings.cost(t), told)
                for t in rows
                for told in [f"{words.sign(t)} {t.verdict}"]
            ],
        }
    base = data.base
    target = _plain(
        "target",
        "the target",
        data.labels.get(data.featured, data.featured),
        findings.target(data),
        "The target was not tuned. Its learning rate before scaling, "
        f"{trained.learning_rate:.3g}, is that of the base (width {base.width}, depth "
        f"{base.depth}).",
    )
    alt = f"{target['title']} Training and test loss over steps, and test accuracy."
    target["pictures"] = [{"name": "target", "alt": alt, "caption": ""}]
    target["notes"] = [f"Checkpoint: {trained.checkpoint}"]
    return [cost, target]


def _losses(transfer: Transfer) -> tuple[str, str]:
    """The largest model's own least loss, and its loss at the base's best value."""
    own = transfer.own
    given = None if transfer.regret is None else transfer.regret.given
    told = ["–" if x is None else findings.loss(x) for x in (own, given)]
    return told[0], told[1]


def _optima(data: SweepData, lines: Lines, axis: Axis, title: str) -> dict[str, Any]:
    """The verdict along one axis, and a table of optima, a row per parametrization."""
    name = lines.hyperparameter
    transfers = [t for t in data.transfers if (t.name, t.axis) == (name, axis)]
    rows = []
    for t in transfers:
        cells = {size(c, axis): lines.optimum(c) for c in t.cells}
        optima = [(s in cells, cells.get(s)) for s in lines.sizes(axis)]
        change = t.trend.change if len(t.sizes) > 1 else math.nan
        moved = names.factor(name, change) if math.isfinite(change) else "–"
        rows.append(
            {
                "label": data.keys[t.key],
                "featured": t.key == data.main,
                "moved": moved,
                "shift": words.shift(t),
                "optima": optima,
            }
        )
    return {
        "axis": axis,
        "title": title,
        "rows": rows,
        "sizes": lines.sizes(axis),
        "notes": findings.notes(data, transfers),
        "value": functools.partial(names.power, name),
        "unit": words.unit(name),
    }


def _lines(
    data: SweepData, name: str, axis: Axis, drawn: dict[str, Draw]
) -> dict[str, Any]:
    """Loss against one hyperparameter along one axis."""
    lines = data.lines(name)
    noun = names.noun(name)
    title = words.title(data, name, axis)
    place = f"{name}-{axis}"
    drawn[place] = functools.partial(
        sweep_figure,
        lines,
        axis,
        [t for t in data.transfers if (t.name, t.axis) == (name, axis)],
        title=title,
        captions=words.captions(data, name, axis),
    )
    others = [names.noun(n) for n in data.names if n != name]
    held = f"over {axis}, at {data.held(axis)}"
    if others:
        held += f", {words.listed(others)} at the best for each {noun}"
    alt = (
        f"{title}. Training loss against {noun}, a line per {axis}, a panel per "
        "parametrization; a star marks each optimum."
    )
    made = _optima(data, lines, axis, title)
    if told := words.fixed(data, name, axis):
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
                heatmap_figure.heatmap_figure, data, pair, axis
            )
            made = _plain(
                place,
                f"{nouns[0]} × {nouns[1]}",
                f"over {axis}, at {data.held(axis)}",
                title,
                "Dark colours are low losses. In a slanted valley, a change of one "
                "hyperparameter can be made up for by the other. Both can be taken "
                "from a small model if the star and the outline stay in place.",
            )
            alt = f"{title}. Loss over both, a panel for each {axis}."
            made["pictures"] = [
                {"name": place, "alt": alt, "caption": heatmap_figure.caption(data)}
            ]
            made["table"] = heatmap_figure.table(data, pair, axis)
            out.append(made)
    return out


def _curves(data: SweepData, drawn: dict[str, Draw]) -> list[dict[str, Any]]:
    """Learning curves at the base's best point."""
    out = []
    for axis in data.axes:
        place = f"curves-{axis}"
        title = curves_figure.title(data, axis)
        drawn[place] = functools.partial(curves_figure.curves_figure, data, axis)
        made = _plain(
            place, "learning curves", f"over {axis}, at {data.held(axis)}", title, ""
        )
        caption = (
            "Training loss over the steps, geometric mean over seeds, every size at "
            "the best grid point of the base of the same parametrization "
            f"({curves_figure.held(data)}). A line ends where the first seed diverged."
        )
        alt = f"{title}. Training loss against step, a line per {axis}."
        made["pictures"] = [{"name": place, "alt": alt, "caption": caption}]
        out.append(made)
    return out

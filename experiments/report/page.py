"""The report of a sweep or a transfer: one page, verdict first."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from mupax.optim.scales.display import Figures

from ..errors import UserError
from ..sweep import grids
from ..sweep.verdict import listed
from . import heatmap_figure, sentences
from .data import Axis, SweepData
from .style import DPI, render, styled
from .sweep_figure import sweep_figure
from .target_figures import has_result, result_figure, target_figure
from .templates import download, duration, environment, flat, inline

Draw = Callable[[], Figure]

_RATE = "learning_rate"


def sweep_figures(data: SweepData, name: str) -> Figures:
    """Loss against one hyperparameter, a figure for each axis of size.

    Raises:
      UserError: the hyperparameter has one value only, or is unknown.
    """
    if name not in data.names:
        raise UserError(
            f"the sweep has no values of {name!r} to compare; it has "
            f"{', '.join(data.names) or 'none'}"
        )
    with styled():
        return Figures(
            sweep_figure(data, name, axis, titled=True) for axis in data.axes
        )


def report_page(data: SweepData, dpi: int = DPI) -> str:
    """The page as HTML with styles, pictures and results inside; it loads no files.

    Args:
      data: results of a sweep or transfer.
      dpi: dots per inch of the pictures; fewer are drawn faster.
    """
    sections = [
        *(_loss(data, name, axis) for name in data.names for axis in data.axes),
        *_heatmaps(data),
        *_target(data),
    ]
    draws = {section.id: section.draw for section in sections}
    if has_result(data):
        draws["result"] = functools.partial(result_figure, data)
    drawn = {name: render(draw, dpi=dpi) for name, draw in draws.items()}
    template = environment(data.keys.values()).get_template("page.html")
    return template.render(
        data=data,
        sentences=sentences,
        tiles=_tiles(data),
        sections=sections,
        pictures={name: inline("image/png", png) for name, png in drawn.items()},
        settings=list(flat(data.settings)),
        effort=_effort(data),
        results=download(data.table),
    )


def _effort(data: SweepData) -> str:
    """The number of runs, and how long they took."""
    seconds = sum(p.seconds for p in data.populations)
    effort = f"{data.runs} runs of {data.steps} steps in {duration(seconds)}"
    if data.trained is not None:
        effort += f"; the target in {duration(data.trained.seconds)}"
    return f"{effort}."


def _tiles(data: SweepData) -> list[tuple[str, str]]:
    """The main numbers of a transfer, each with its name."""
    if data.trained is None:
        return []
    tiles = []
    for t in data.transfers:
        judged = t.name == _RATE and t.key == data.main and len(t.sizes) > 1
        if judged and math.isfinite(t.trend.change):
            moves = grids.moves(_RATE, t.trend.change).removeprefix("is ")
            over = f"over {t.axis} {t.sizes[0]} to {t.sizes[-1]}"
            tiles.append((moves, f"the best learning rate, {over}"))
    score = sentences.score(data, data.trained)
    if score is not None:
        what = "test loss" if data.by_loss else "test accuracy"
        value = sentences.scored(data, score, named=False)
        tiles.append((value, f"{what} of the target"))
    seconds = sum(p.seconds for p in data.populations) + data.trained.seconds
    tiles.append((duration(seconds), f"for {data.runs} runs and the target"))
    return tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A picture of the page with its text and table, as page.html reads it."""

    id: str  # of the HTML element; also the name of the picture
    over: str  # the subject, shown above the title
    held: str  # the fixed size, shown beside the subject
    title: str  # the finding
    draw: Draw
    alt: str  # describes the picture for people who cannot see it
    text: str = ""  # shown above the picture
    caption: str = ""  # shown below the picture
    notes: Sequence[str] = ()  # shown below the caption
    table: Mapping[str, Any] | None = None  # its "caption", "heads" and "body"


def _loss(data: SweepData, name: str, axis: Axis) -> Section:
    """Loss against one hyperparameter along one axis, and a table of its optima."""
    noun = grids.noun(name)
    title = sentences.title(data, name, axis)
    transfers = data.along_axis(name, axis)
    others = [grids.noun(n) for n in data.names if n != name]
    held = f"over {axis}, at {data.held(axis)}"
    if others:
        held += f", {listed(others)} at the base's best"
    seeds = max(len(p.loss) for p in data.populations)
    over_seeds = (
        f", geometric mean over {seeds} seeds (small points: single seeds; band: their "
        "range)"
    )
    rates = (
        f" Learning rates are those of the base shape (width {data.base.width}, depth "
        f"{data.base.depth})."
    )
    return Section(
        id=f"{name}-{axis}",
        over=noun,
        held=held,
        title=title,
        draw=functools.partial(sweep_figure, data, name, axis),
        alt=f"{title}. Training loss against {noun}, a line per {axis}, a panel per "
        "parametrization; a star marks each optimum.",
        caption=f"Training loss at the end of a run{over_seeds if seeds > 1 else ''}. "
        f"Crosses above a panel are runs that diverged, a row per {axis}; at a pale "
        "cross only some seeds diverged. A run counts as diverged if its loss is not "
        "finite, or ends above twice the chance-level loss. Lines stop where the first "
        f"seed diverged.{rates if name == _RATE else ''}",
        notes=[*sentences.notes(data, transfers), *sentences.fixed(data, name, axis)],
        table=_optima(data, name, axis),
    )


def _optima(data: SweepData, name: str, axis: Axis) -> dict[str, Any]:
    """A table of the optima at each size, and of the line through them."""
    sizes = data.sizes(axis)
    body = []
    for t in data.along_axis(name, axis):
        best = dict(zip(t.sizes, t.optima, strict=True))
        change = t.trend.change if len(t.sizes) > 1 else math.nan
        body.append(
            [
                data.keys[t.key],
                *(sentences.power(name, best[s]) if s in best else "–" for s in sizes),
                grids.factor(name, change) if math.isfinite(change) else "–",
                sentences.shift(t),
            ]
        )
    return {
        "caption": f"Best {grids.noun(name)} at each size. The last two columns follow "
        "the line through these optima: its change from the smallest to the largest "
        f"size, and its slope in {sentences.unit(name)} per doubling of the size, with "
        "a 90 % interval.",
        "heads": [axis, *sizes, "moves by", "per doubling"],
        "body": body,
    }


def _heatmaps(data: SweepData) -> list[Section]:
    """Loss over pairs of hyperparameters."""
    sections = []
    for pair in heatmap_figure.pairs(data):
        for axis in data.axes:
            title = heatmap_figure.title(data, pair, axis)
            section = Section(
                id=f"{pair[0]}-{pair[1]}-{axis}",
                over=" × ".join(map(grids.noun, pair)),
                held=f"over {axis}, at {data.held(axis)}",
                title=title,
                draw=functools.partial(heatmap_figure.heatmap_figure, data, pair, axis),
                alt=f"{title}. Loss over both, a panel for each {axis}.",
                text="Dark colours are low losses. In a slanted valley, one "
                "hyperparameter can compensate for a change of the other. Both "
                "transfer if the star and the outline stay in place.",
                caption=heatmap_figure.caption(data),
                table=heatmap_figure.table(data, pair, axis),
            )
            sections.append(section)
    return sections


def _target(data: SweepData) -> list[Section]:
    """The training of the target, of a transfer."""
    trained = data.trained
    if trained is None:
        return []
    title = sentences.target(data)
    section = Section(
        id="target",
        over="the target",
        held=data.labels.get(data.featured, data.featured),
        title=title,
        draw=functools.partial(target_figure, data),
        alt=f"{title} Training and test loss over steps.",
        text="The target was not tuned. Its learning rate before scaling, "
        f"{trained.learning_rate:.3g}, is that of the base (width {data.base.width}, "
        f"depth {data.base.depth}).",
        notes=[f"Checkpoint: {trained.checkpoint}"],
    )
    return [section]

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
from ..sweep.verdict import Transfer, listed
from . import curves_figure, heatmap_figure, sentences
from .data import AXES, Axis, SweepData
from .outcome_figures import has_result, regret_figure, result_figure, target_figure
from .style import DPI, FILE, NARROW, WIDE, Page, render, styled
from .sweep_figure import sweep_figure
from .templates import download, duration, environment, flat, inline

Draw = Callable[[Page], Figure]

_RATE = "learning_rate"


def pictures(data: SweepData) -> dict[str, bytes]:
    """The pictures of a trained target, as PNG files by name."""
    if data.trained is None:
        return {}
    draws: dict[str, Draw] = {
        axis: functools.partial(sweep_figure, data, _RATE, axis) for axis in AXES
    }
    draws["regret"] = functools.partial(regret_figure, data, _rates(data))
    draws["target"] = functools.partial(target_figure, data)
    if has_result(data):
        draws["demo"] = functools.partial(result_figure, data)
    return {f"{name}.png": render(draw, FILE) for name, draw in draws.items()}


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
        return Figures(sweep_figure(data, name, axis, FILE) for axis in data.axes)


def report_page(data: SweepData, dpi: int = DPI, *, phone: bool = True) -> str:
    """The page as HTML with styles, pictures and results inside; it loads no files.

    Args:
      data: results of a sweep or transfer.
      dpi: dots per inch of the pictures; fewer are drawn faster.
      phone: draw every picture a second time, for narrow screens.
    """
    sections = [
        *(_loss(data, name, axis) for name in data.names for axis in data.axes),
        *_heatmaps(data),
        *(_curves(data, axis) for axis in data.axes),
        *_transfer(data),
    ]
    draws = {section.id: section.draw for section in sections}
    if has_result(data):
        draws["result"] = functools.partial(result_figure, data)

    def embedded(page: Page) -> dict[str, str]:
        drawn = {name: render(draw, page, dpi=dpi) for name, draw in draws.items()}
        return {name: inline("image/png", png) for name, png in drawn.items()}

    template = environment(data.keys.values()).get_template("page.html")
    return template.render(
        data=data,
        sentences=sentences,
        tiles=_tiles(data),
        sections=sections,
        pictures=embedded(WIDE),
        narrow=embedded(NARROW) if phone else {},
        settings=list(flat(data.settings)),
        told=_effort(data),
        results=download(data.table),
    )


def _rates(data: SweepData) -> list[Transfer]:
    """The verdicts on the learning rate, along axes of several sizes."""
    return [t for t in data.transfers if t.name == _RATE and len(t.sizes) > 1]


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
    for t in _rates(data):
        if t.key == data.main and math.isfinite(t.trend.change):
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


def _curves(data: SweepData, axis: Axis) -> Section:
    """Learning curves at the base's best grid point."""
    title = curves_figure.title(data, axis)
    return Section(
        id=f"curves-{axis}",
        over="learning curves",
        held=f"over {axis}, at {data.held(axis)}",
        title=title,
        draw=functools.partial(curves_figure.curves_figure, data, axis),
        alt=f"{title}. Training loss against step, a line per {axis}.",
        caption="Training loss over the steps, geometric mean over seeds, every size "
        "at the best grid point of the base of the same parametrization "
        f"({curves_figure.held(data)}). A line ends where the first seed diverged.",
    )


def _transfer(data: SweepData) -> list[Section]:
    """The sections of a transfer: the cost at the largest sizes, and the target."""
    trained = data.trained
    if trained is None:
        return []
    transfers = _rates(data)
    title = sentences.regret_title(data, transfers)
    table = {
        "caption": "Training loss of the largest model, at its own best learning "
        "rate and at the base's",
        "heads": ("", "over", "own best", "base's", "cost (90 %)", "verdict"),
        "body": [
            (
                data.keys[t.key],
                t.axis,
                "–" if t.own is None else sentences.loss(t.own),
                "–" if t.regret is None else sentences.loss(t.regret.given),
                sentences.cost(t),
                f"{sentences.sign(t)} {t.verdict}",
            )
            for t in transfers
        ],
    }
    cost = Section(
        id="regret",
        over="what transfer costs",
        held="at the largest sizes",
        title=title,
        draw=functools.partial(regret_figure, data, transfers),
        alt=f"{title}. Own best loss and loss at the base's learning rate.",
        text="Here is the largest model of each axis at two learning rates: its own "
        "best one (the star), and the base's best one (the circle, with a 90 % "
        "interval). The distance between the two is the cost of not tuning the large "
        "model.",
        table=table if transfers else None,
    )
    title = sentences.target(data)
    target = Section(
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
    return [cost, target]

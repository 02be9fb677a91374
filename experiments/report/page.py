"""The report of a sweep or a transfer: one page, verdict first."""

import base64
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
import markupsafe
from matplotlib.figure import Figure

from ..errors import UserError
from ..sweep import grids
from ..sweep.verdict import listed
from . import sentences
from .data import Axis, SweepData
from .style import DPI, render, styled
from .sweep_figure import sweep_figure
from .target_figures import has_result, result_figure

Draw = Callable[[], Figure]

_RATE = "learning_rate"

# A larger table would make the page slow to open: it is linked instead.
_EMBEDDED = 4_000_000


def sweep_figures(data: SweepData, name: str) -> list[Any]:
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
        return [sweep_figure(data, name, axis, titled=True) for axis in data.axes]


def report_page(data: SweepData, dpi: int = DPI) -> str:
    """The page as HTML with styles, pictures and results inside; it loads no files.

    Args:
      data: results of a sweep or transfer.
      dpi: dots per inch of the pictures; fewer are drawn faster.
    """
    sections = [_loss(data, name, axis) for name in data.names for axis in data.axes]
    draws = {section.id: section.draw for section in sections}
    if has_result(data):
        draws["result"] = functools.partial(result_figure, data)
    drawn = {name: render(draw, dpi=dpi) for name, draw in draws.items()}
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html").render(
        data=data,
        sentences=sentences,
        sections=sections,
        pictures={name: _inline("image/png", png) for name, png in drawn.items()},
        settings=list(_flat(data.settings)),
        effort=_effort(data),
        results=_download(data.table),
    )


def _effort(data: SweepData) -> str:
    """The number of runs, and how long they took."""
    seconds = sum(p.seconds for p in data.populations)
    effort = f"{data.runs} runs of {data.steps} steps in {_duration(seconds)}"
    if data.tuning_runs:
        effort += f", after {data.tuning_runs} that tuned factors of groups at the base"
    if data.trained is not None:
        effort += f"; the target in {_duration(data.trained.seconds)}"
    return f"{effort}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A picture of the page with its text, as page.html reads it."""

    id: str  # of the HTML element; also the name of the picture
    over: str  # the subject, shown above the title
    held: str  # the fixed size, shown beside the subject
    title: str  # the finding
    draw: Draw
    alt: str  # describes the picture for people who cannot see it
    caption: str  # shown below the picture


def _loss(data: SweepData, name: str, axis: Axis) -> Section:
    """Loss against one hyperparameter along one axis."""
    noun = grids.noun(name)
    title = sentences.title(data, name, axis)
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
        f"Crosses at the top are runs that diverged, a row per {axis}; at a pale cross "
        "only some seeds diverged. A run counts as diverged if its loss is not "
        "finite, or ends above twice the chance-level loss. Lines stop where the first "
        "seed diverged. The bar below the stars is the change of the best value, on a "
        "line through all sizes."
        f"{rates if name == _RATE else ''}",
    )


# ----- Files, durations and settings as the template shows them.


def _inline(kind: str, content: bytes) -> markupsafe.Markup:
    """A file as a data URL."""
    coded = base64.b64encode(content).decode()
    return markupsafe.Markup("data:{};base64,{}").format(kind, coded)


def _download(text: str) -> markupsafe.Markup:
    """A table as a data URL; the file's name if the table is large."""
    content = text.encode()
    if len(content) > _EMBEDDED:
        return markupsafe.Markup("results.csv")
    return _inline("text/csv", content)


def _duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as rows of a table."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield name, ", ".join(map(str, value))
        else:
            yield name, "–" if value is None else str(value)

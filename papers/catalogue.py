"""Every figure, and how it is drawn."""

import dataclasses
import pathlib
import textwrap

from mupax.experiments.errors import UserError, nearest
from mupax.experiments.sweep import space

from . import bordelon, draw, jelassi, numbers, rows, tp6, training, yaida
from .registry import Drawing, Figure, judged
from .request import DRAWN, Request

DATA = pathlib.Path(__file__).parent / "data"  # the tables


def figures() -> dict[str, Figure]:
    """Every figure of the papers and every claim beyond them, by id."""
    modules = (tp6, bordelon, jelassi, yaida, rows, training)
    return {figure.id: figure for module in modules for figure in module.FIGURES}


def run(name: str, request: Request) -> str:
    """Draw a figure into the request's folder.

    Returns:
      Its verdict: claim, measured number and label, in one line.

    Raises:
      UserError: an unknown id, a figure that is not drawn here, data that is not
        there, or a directory that cannot be written.
    """
    known = figures()
    if name not in known:
        raise UserError(
            f"there is no figure {name!r}; `python -m papers list` names all"
            f"{nearest(name, known)}"
        )
    figure = known[name]
    if figure.draw is None:
        raise UserError(f"{figure.id} is not drawn here: {why_not(figure)}")
    data = figure.parts or figure.base
    if not data and (request.data_dir or request.dataset):
        raise UserError(
            f"{figure.id} trains on no data; leave --data_dir and --dataset out"
        )
    draw.prepare(request.folder)
    drawing = drawn(figure, request)
    draw.write(request.folder, figure, drawing)
    return verdict(figure, dataclasses.replace(drawing, scale=request.scale))


def drawn(figure: Figure, request: Request) -> Drawing:
    """A figure's panels and verdict; missing runs are trained or computed."""
    assert figure.draw is not None
    if not figure.parts:
        if request.scale == "wide":
            raise UserError(f"{figure.id} has no sizes of its own at --scale wide")
        assert figure.measure is not None
        path = figure.path(request)
        if not request.from_data:
            numbers.write(path, figure.measure(request))
        return figure.draw(numbers.read(path))
    if request.from_data:
        tables = [part.read(request) for part in figure.parts]
    else:
        for part in figure.parts:  # bad input is reported before any work
            space.parse_sweep(part.parsed(request))
        tables = [part.train(request) for part in figure.parts]
    shown = [p.shown(table) for p, table in zip(figure.parts, tables, strict=True)]
    drawing = figure.draw(*(table.data for table in shown))
    length = "; ".join(dict.fromkeys(table.length for table in shown))
    seeds = min(len(p.loss) for table in shown for p in table.data.populations)
    return dataclasses.replace(drawing, length=length, seeds=seeds)


def from_data(figure: Figure, request: Request) -> Drawing | None:
    """A figure from the tables of the largest of `DRAWN` that has all of its runs.

    None if no scale has all runs, or the figure is not drawn.
    """
    if figure.draw is None:
        return None
    for scale in reversed(DRAWN):
        again = dataclasses.replace(request, scale=scale, from_data=True)
        if figure.parts:
            complete = all(part.is_complete(again) for part in figure.parts)
        else:
            complete = figure.path(again).exists()
        if complete:
            return dataclasses.replace(drawn(figure, again), scale=scale)
    return None


def verdict(figure: Figure, drawing: Drawing) -> str:
    """One line: the paper's claim, the measured number, and the label."""
    return (
        f"{figure.id}: {figure.claim} | here: {drawing.ours} | {word(figure, drawing)}"
    )


def word(figure: Figure, drawing: Drawing) -> str:
    """The label of a claim and its reason, e.g. "undecided: two seeds"."""
    label, reason = judged(figure, drawing)
    return f"{label}: {reason}" if reason else str(label)


def why_not(figure: Figure) -> str:
    """Why a figure is not drawn, and the command that would measure it."""
    return f"{figure.how}; {figure.command}" if figure.command else figure.how


def print_list() -> None:
    """Print every figure, and for those that are not drawn the reason."""
    for figure in figures().values():
        here = why_not(figure)
        if figure.draw is not None:
            here = f"drawn: {figure.how}" if figure.how else "drawn"
        print(f"{figure.id}  {figure.paper}, {figure.number}")
        for text in (figure.claim, here):
            print(textwrap.fill(text, 80, initial_indent="  ", subsequent_indent="  "))

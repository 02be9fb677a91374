"""`mupax figure`: list the figures of the papers, draw one."""

import dataclasses
import pathlib

import rich.console
import rich.table

from ...errors import UserError
from . import draw, drawings
from .registry import SCALES, Drawing, Figure, Request


def figures() -> dict[str, Figure]:
    """Every figure of the papers and every row beside them, by id."""
    from . import bordelon, jelassi, rows, tp6, training, yaida

    rooms = (tp6, bordelon, jelassi, yaida, rows, training)
    return {figure.id: figure for room in rooms for figure in room.FIGURES}


def run(name: str, request: Request) -> None:
    """List the figures, or draw one and print claim, number and verdict.

    Args:
      name: id of a figure; or "list", "all" or "pages".
      request: where and how to draw it.

    Raises:
      UserError: an unknown id, a figure that is not drawn here, data that is not
        there, or a directory that cannot be written.
    """
    if name == "list":
        print_list(rich.console.Console())
        return
    if name == "pages":
        from . import pages

        pages.write(pathlib.Path("docs"))
        return
    known = figures()
    if name == "all":
        draw.prepare(request.folder)
        for figure in known.values():
            if (done := from_data(figure, request)) is not None:
                draw.write(request.folder, figure, done)
                print(verdict(figure, done.ours, done.agrees))
        return
    if name not in known:
        raise UserError(f"there is no figure {name!r}; `mupax figure list` names all")
    figure = known[name]
    check(figure, request)
    draw.prepare(request.folder)
    try:
        drawing = drawn(figure, request)
    except ModuleNotFoundError as error:
        if error.name is not None:
            raise
        # Raised by mupax: the message names the missing extra.
        raise UserError(str(error)) from None
    draw.write(request.folder, figure, drawing)
    print(verdict(figure, drawing.ours, drawing.agrees))


def check(figure: Figure, request: Request) -> None:
    """Raise for figures that cannot be drawn, before anything is written."""
    if figure.draw is None and figure.train is None:
        raise UserError(f"{figure.id} is not drawn here: {why_not(figure)}")
    if figure.train is None and (request.data_dir or request.dataset):
        raise UserError(
            f"{figure.id} trains on no data; leave --data_dir and --dataset out"
        )


def drawn(figure: Figure, request: Request) -> Drawing:
    """A figure's panels and verdict; whatever is missing is computed."""
    if figure.draw:
        if request.from_data:
            return drawings.read(drawings.path(figure, request))
        drawing = figure.draw(request.paper)
        return drawings.write(drawings.path(figure, request), drawing)
    if figure.train:
        return figure.train(request)
    raise UserError(f"{figure.id} is not drawn here: {why_not(figure)}")


def from_data(figure: Figure, request: Request) -> Drawing | None:
    """A figure from the tables of the largest scale that has all of its runs.

    Args:
      figure: to draw.
      request: tells the folder of the tables.

    Returns:
      None where no scale has all runs.
    """
    if not figure.is_drawn:
        return None
    for scale in reversed(SCALES):
        again = dataclasses.replace(request, scale=scale, from_data=True)
        if figure.train:
            there = all(part.is_complete(again) for part in figure.train.parts)
        else:
            there = drawings.path(figure, again).exists()
        if there:
            return dataclasses.replace(drawn(figure, again), scale=scale)
    return None


def verdict(figure: Figure, ours: str, agrees: bool | None) -> str:
    """One line: the paper's claim, the measured number, and the verdict."""
    word = {True: "agrees", False: "DOES NOT AGREE", None: "CANNOT TELL"}[agrees]
    return f"{figure.id}: {figure.claim} | here: {ours} | {word}"


def why_not(figure: Figure) -> str:
    """Why a figure is not drawn, and the command that would measure it."""
    remedy = f"; {figure.command}" if figure.command else ""
    return figure.how + remedy


def print_list(console: rich.console.Console) -> None:
    """Print every figure, and for those that are not drawn the reason."""
    table = rich.table.Table(title="figures of the papers", show_lines=True)
    table.add_column("id", no_wrap=True)
    for head in ("figure", "claim", "here"):
        table.add_column(head)
    for figure in figures().values():
        here = why_not(figure)
        if figure.is_drawn:
            here = f"drawn: {figure.how}" if figure.how else "drawn"
        table.add_row(figure.id, f"{figure.paper}, {figure.number}", figure.claim, here)
    console.print(table)

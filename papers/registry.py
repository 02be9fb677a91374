"""A figure: a claim of a paper, and how it is drawn and checked."""

import dataclasses
import enum
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from .numbers import Row
from .parts import Part
from .request import Request

# How the data differ from the papers', in `Figure.how`.
CIFAR = "CIFAR-10 at 16 x 16 pixels"
TEXT = "your own text file: --dataset=text:FILE"

Values = Sequence[float] | np.ndarray
Look = Literal["measured", "theory", "points"]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a panel.

    Attributes:
      label: its text in the legend.
      x: horizontal coordinates.
      y: vertical coordinates.
      error: standard error of each y.
      look: "measured": a line with markers; "theory": black and dashed; "points":
        markers alone.
    """

    label: str
    x: Values
    y: Values
    error: Values | None = None
    look: Look = "measured"


@dataclasses.dataclass(frozen=True)
class Panel:
    """Lines that share their axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


loglog = functools.partial(Panel, log_x=True, log_y=True)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure's numbers, and whether they agree with its claim.

    Attributes:
      panels: side by side.
      ours: the number measured here, in half a sentence.
      agrees: whether the claim holds; None if the numbers cannot tell.
      length: steps, sizes and seeds of the training; "" if nothing was trained.
      scale: scale of the tables from which it was drawn; "" without tables.
      keeps: where a claim compares a rule with a control, whether the rule's part
        holds.
      seeds: the fewest seeds of any size and parametrization; 0 if nothing was trained.
    """

    panels: Sequence[Panel]
    ours: str
    agrees: bool | None
    length: str = ""
    scale: str = ""
    keeps: bool | None = None
    seeds: int = 0


BEYOND = "Beyond the papers"  # of a figure, in place of a paper


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of a paper.

    Attributes:
      id: its name on the command line, after `python -m papers figure`.
      paper: short name of the paper.
      number: the figure's number in the paper, or that of a theorem.
      claim: the paper's claim, in one sentence.
      draw: draws the figure from the runs of each part, or from the numbers of
        `measure`. None if the figure is not drawn.
      parts: the sweeps that it needs.
      how: how it differs from the paper's figure, or why it is not drawn.
      command: a command that would measure a figure that is not drawn.
      base: of a figure that trains networks by itself, the sweep that tunes them.
      measure: computes the table of a figure without parts.
      table: name of this table; by default the figure's id.
      untested: what the claim needs and our runs lack, if they do not test it.
      small: why our sizes, if the claim fails here, are no evidence against the paper.
      decided_by: the runs that decide, if others in the picture have two seeds.
    """

    id: str
    paper: str
    number: str
    claim: str
    draw: Callable[..., Drawing] | None = None
    parts: Sequence[Part] = ()
    how: str = ""
    command: str = ""
    base: Part | None = None
    measure: Callable[[Request], Sequence[Row]] | None = None
    table: str = ""
    untested: str = ""
    small: str = ""
    decided_by: str = ""

    def path(self, request: Request) -> pathlib.Path:
        """The file of the numbers of a figure without parts."""
        return request.tables / request.scale / f"{self.table or self.id}.csv"


class Label(enum.StrEnum):
    """What a figure's numbers say about its claim."""

    AGREES = "agrees"
    AGAINST = "evidence against the paper"
    SMALL = "our size is too small"
    UNDECIDED = "undecided"
    UNTESTED = "not tested"
    FAILS = "the rule fails"
    CONTROL = "the control transfers as well"


def judged(figure: Figure, drawing: Drawing) -> tuple[Label, str]:
    """The label of a claim, and its reason or "".

    A claim is undecided with two seeds, whatever they say. What our sizes lack does not
    count at the scale "paper".
    """
    smaller = drawing.scale != "paper"
    if figure.untested and smaller:
        return Label.UNTESTED, figure.untested
    if drawing.seeds == 2 and not figure.decided_by:
        return Label.UNDECIDED, "two seeds"
    if drawing.agrees is None:
        return Label.UNDECIDED, ""
    if drawing.agrees:
        return Label.AGREES, ""
    if figure.paper == BEYOND:
        failed = drawing.keeps is not None and not drawing.keeps
        return (Label.FAILS if failed else Label.CONTROL), ""
    if figure.small and smaller:
        return Label.SMALL, figure.small
    return Label.AGAINST, ""


def beyond(
    id: str,
    number: str,
    claim: str,
    draw: Callable[..., Drawing],
    parts: Sequence[Part],
    how: str = CIFAR,
) -> Figure:
    """A claim beyond the papers."""
    return Figure(id, BEYOND, number, claim, draw, parts, how)


def near(value: float, expected: float, tolerance: float) -> bool:
    """Whether a finite number is as expected, within a tolerance.

    Examples:
      >>> near(-1.04, -1, 0.1), near(float("nan"), 0, 1)
      (True, False)
    """
    return bool(np.isfinite(value) and abs(value - expected) <= tolerance)

"""A figure: a claim of a paper, and how it is drawn and checked."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from .parts import Part

# How the data differ from the papers', in `Figure.how`.
CIFAR = "CIFAR-10 at 16 x 16 pixels"
TEXT = "your own text file: --dataset=text:FILE"

Numbers = Sequence[float] | np.ndarray
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
    x: Numbers
    y: Numbers
    error: Numbers | None = None
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
    """

    panels: Sequence[Panel]
    ours: str
    agrees: bool | None
    length: str = ""
    scale: str = ""


BEYOND = "Beyond the papers"  # of a figure, in place of a paper
# "wide" tests whether the size is the reason for a verdict at "long".
SCALES = ("laptop", "medium", "long", "wide", "paper")
DRAWN = tuple(scale for scale in SCALES if scale != "wide")


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of `python -m papers figure`.

    Attributes:
      scale: one of `SCALES`.
      folder: folder of the pictures. It holds a folder of sweeps for each scale.
      data_dir: directory of TFDS; None for TFDS's default.
      dataset: the dataset to use instead of the paper's.
      tables: folder of the tables.
      from_data: draw from the tables alone, and train nothing.
    """

    scale: str
    folder: pathlib.Path = pathlib.Path()
    data_dir: str | None = None
    dataset: str | None = None
    tables: pathlib.Path = pathlib.Path("data")
    from_data: bool = False

    @property
    def paper(self) -> bool:
        """Whether the scale is the paper's."""
        return self.scale == "paper"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of a paper.

    Attributes:
      id: its name on the command line, after `python -m papers figure`.
      paper: short name of the paper.
      number: the figure's number in the paper, or that of a theorem.
      claim: the paper's claim, in one sentence.
      draw: draws the figure from the runs of each part. Without parts it computes the
        figure, and its argument is whether to use the paper's sizes, or the request if
        it has a `base`. None if the figure is not drawn.
      parts: the sweeps that it needs.
      how: how it differs from the paper's figure, or why it is not drawn.
      command: a command that would measure a figure that is not drawn.
      base: of a figure that trains networks by itself, the sweep that tunes them.
    """

    id: str
    paper: str
    number: str
    claim: str
    draw: Callable[..., Drawing] | None = None
    parts: "Sequence[Part]" = ()
    how: str = ""
    command: str = ""
    base: "Part | None" = None


def beyond(
    id: str,
    number: str,
    claim: str,
    draw: Callable[..., Drawing],
    parts: "Sequence[Part]",
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

"""A figure: a claim of a paper, and how it is drawn and checked."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

Look = Literal["measured", "theory", "points"]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a panel; the CSV holds its points.

    Attributes:
      label: in the legend.
      x: along the horizontal axis.
      y: as many values.
      error: one standard error of each y, or nothing.
      look: "measured" with marks, "theory" black and dashed, "points" marks alone.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
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


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure's numbers, and whether they agree with its claim.

    Attributes:
      panels: side by side.
      ours: the number measured here, in half a sentence.
      agrees: computed from the same numbers; None where they cannot tell.
      length: how long the networks were trained, how wide, with how many seeds; ""
        where nothing was trained on data.
      scale: of the tables that it was drawn from; "" where it was not.
    """

    panels: Sequence[Panel]
    ours: str
    agrees: bool | None
    length: str = ""
    scale: str = ""


SCALES = ("laptop", "medium", "paper")


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
      scale: "laptop", "medium" or "paper".
      folder: of the pictures; the sweeps are in a folder of each scale inside.
      data_dir: of TFDS; None for where TFDS looks.
      dataset: in place of the paper's.
      tables: folder of the tables; by default "data" inside `folder`.
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
        """Whether the paper's sizes are wanted."""
        return self.scale == "paper"


class Trained(Protocol):
    """Draws a figure from sweeps, which it trains where their tables are missing."""

    @property
    def parts(self) -> Sequence[Any]:
        """The sweeps."""

    def __call__(self, request: Request) -> Drawing:
        """The drawing."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of a paper.

    Attributes:
      id: as typed after `mupax figure`.
      paper: its short name.
      number: as printed, or the theorem where the paper has no picture of it.
      claim: the paper's claim, in one sentence.
      draw: computes the figure; its argument is whether the paper's sizes are wanted.
      train: trains networks on data, in place of `draw`. A figure with neither is not
        drawn.
      how: how it differs from the paper's figure, or why it is not drawn.
      command: a command that would measure it, if it is not drawn.
    """

    id: str
    paper: str
    number: str
    claim: str
    draw: Callable[[bool], Drawing] | None = None
    train: Trained | None = None
    how: str = ""
    command: str = ""

    @property
    def is_drawn(self) -> bool:
        """Whether mupax can draw it."""
        return self.draw is not None or self.train is not None


def near(value: float, wanted: float, tolerance: float) -> bool:
    """Whether a finite number lies within a tolerance.

    Examples:
      >>> near(-1.04, -1, 0.1), near(float("nan"), 0, 1)
      (True, False)
    """
    return bool(np.isfinite(value) and abs(value - wanted) <= tolerance)

"""The style of all pictures: fonts, colours, lines, titles."""

import contextlib
import functools
import io
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

INK, MUTED, GRID = "#16181d", "#5a6170", "#e4e7ec"
DPI = 200
WIDTH = 10.4  # of a picture, in inches
COLUMNS = 3  # panels side by side
POINTS = 10.5  # size of the font
_FONTS = ("Inter", "Helvetica Neue", "Helvetica", "Arial", "Liberation Sans")
_MARKERS = "osD^vPX<>p"
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (4, 1.5, 1, 1.5)), (0, (1, 1.3)))


@functools.cache
def _rc() -> Any:
    installed = {f.name for f in font_manager.fontManager.ttflist}
    # Matplotlib logs a warning per text for each font that is not installed.
    family = [f for f in (*_FONTS, "DejaVu Sans") if f in installed]
    return {
        "font.family": family,
        "font.size": POINTS,
        "figure.labelsize": POINTS,
        "figure.titlesize": 14,
        "figure.titleweight": "bold",
        "mathtext.default": "regular",
        "text.color": INK,
        "axes.edgecolor": "#aab0bb",
        "axes.labelcolor": MUTED,
        "axes.titlelocation": "left",
        "axes.titlesize": POINTS,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.which": "major",
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "ytick.minor.size": 0,
        "legend.frameon": False,
        "figure.facecolor": "white",
        "savefig.dpi": DPI,
    }


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """The style of mupax for the figures that are drawn in the context."""
    with matplotlib.rc_context(_rc()):
        yield


def render(
    draw: Callable[..., Figure], *args: Any, kind: str = "png", dpi: int = DPI
) -> bytes:
    """Draw a figure in the style of mupax, as the bytes of a PNG or SVG file."""
    buffer = io.BytesIO()
    # Without a date and random ids, the same numbers give the same file.
    metadata = {"Software": None} if kind == "png" else {"Date": None}
    with matplotlib.rc_context({**_rc(), "svg.hashsalt": "mupax"}):
        draw(*args).savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()


def canvas(height: float, title: str = "") -> Any:
    """A figure of a height in inches, and above it a title.

    Returns:
      The part below the title, whose legend leaves the title free.
    """
    text = wrapped(title, WIDTH - 0.3, 14)
    size = WIDTH, height + 0.28 * len(text.splitlines())
    figure = Figure(size, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    if text:
        figure.suptitle(text, x=0.01, ha="left")
    return figure.subfigures()


def headings(panels: Sequence[tuple[Any, str, str, str]], columns: int) -> None:
    """Write a bold label above each panel, and between them a text.

    Args:
      panels: axes, label, text and the text's colour, row by row.
      columns: panels side by side.
    """
    width = (WIDTH - 1) / columns - 0.2
    offset = {"xytext": (0, 4), "textcoords": "offset points"}
    for row in (panels[i : i + columns] for i in range(0, len(panels), columns)):
        texts = [wrapped(text, width, POINTS) for _, _, text, _ in row]
        most = max(text.count("\n") for text in texts)
        for (ax, label, _, color), text in zip(row, texts, strict=True):
            # The labels of a row are at one height.
            below = ax.set_title(text + "\n" * (most - text.count("\n")), color=color)
            style = {"weight": "bold", "va": "bottom"}
            ax.annotate(plain(label), (0, 1), xycoords=below, **offset, **style)


def end_label(ax: Any, at: tuple[float, float], text: str, **style: Any) -> None:
    """Write the last value of a line beside its end."""
    style |= {"va": "center", "weight": "bold", "annotation_clip": False}
    ax.annotate(text, at, xytext=(8, 0), textcoords="offset points", **style)


def ramp(n: int) -> list[tuple[float, float, float, float]]:
    """`n` colours from light (small) to dark (large).

    Lightness falls evenly, so that the order can be read by colour-blind readers and
    in black and white. The palest colours are too faint on white, and are left out.
    """
    shades = np.linspace(0.78, 0.02, n) if n > 1 else [0.35]
    return [tuple(matplotlib.colormaps["plasma"](s)) for s in shades]


def strokes(n: int) -> list[dict[str, Any]]:
    """Line styles for `n` sizes, smallest first. The line of the largest is solid."""
    colors = ramp(n)
    return [
        {
            "color": colors[i],
            "marker": _MARKERS[i % len(_MARKERS)],
            "linestyle": _LINES[(n - 1 - i) % len(_LINES)],
        }
        for i in range(n)
    ]


def wrapped(text: str, inches: float, points: float) -> str:
    """A text in lines of about so many inches, `plain`."""
    letters = int(inches * 72 / (0.6 * points))  # a letter is 0.6 of the size wide
    return plain(textwrap.fill(text, letters, break_on_hyphens=False))


def plain(text: str) -> str:
    """A text that people wrote, in which Matplotlib finds no formula."""
    return text.replace("$", r"\$")


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Label a logarithmic axis with plain numbers, also where it spans no decade."""
    decades = math.log10(high / low)
    if decades < 0.5:  # the numbers 1, 2 and 5 could leave it without labels
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1,) if decades > 1.6 else (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def loss_range(
    losses: Sequence[np.ndarray], first: Sequence[np.ndarray]
) -> tuple[float, float] | None:
    """The least and the greatest loss to show; None if there is none.

    A run that ends above twice the loss at which runs start has not learned. Such
    losses are cut off, because they would flatten everything else.

    Args:
      losses: the losses to show.
      first: losses of the first steps.
    """
    shown = np.concatenate([x.ravel() for x in losses] or [np.empty(0)])
    shown = shown[np.isfinite(shown) & (shown > 0)]
    if not shown.size:
        return None
    start = np.concatenate([x.ravel() for x in first] or [np.empty(0)])
    start = start[np.isfinite(start)]
    low, high = float(shown.min()), float(shown.max())
    if start.size:
        high = min(high, 2 * float(np.median(start)))
    return low, max(high, 1.5 * low)


def mark_empty(ax: Any) -> None:
    """Write "nothing trained" into the middle of a panel."""
    ax.text(
        0.5,
        0.5,
        "nothing trained",
        transform=ax.transAxes,
        ha="center",
        va="center",
        color=MUTED,
        style="italic",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
    )


def size_handles(axis: str, looks: Mapping[int, dict[str, Any]]) -> list[Line2D]:
    """The legend's entries for lines in the styles of `strokes`, by size."""
    return [
        Line2D([], [], lw=1.8, ms=5, mew=0, label=f"{axis} {size}", **look)
        for size, look in looks.items()
    ]

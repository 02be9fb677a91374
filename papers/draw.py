"""A figure's panels as PNG and SVG."""

import io
import pathlib
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, NullFormatter
from PIL import Image

from mupax.experiments.errors import UserError
from mupax.experiments.io import check_writable, write_durably
from mupax.experiments.report import style

from .registry import Drawing, Figure, Line, Panel

# Dots per inch of the PNG: the gallery has many pictures. The SVG is for print.
_PIXELS = 110


def write(directory: pathlib.Path, figure: Figure, drawing: Drawing) -> None:
    """Write <id>.png and <id>.svg."""
    for kind in ("png", "svg"):
        write_durably(directory / f"{figure.id}.{kind}", picture(drawing, kind))


def prepare(directory: pathlib.Path) -> None:
    """Make the directory and check that it can be written, before minutes of work.

    Raises:
      UserError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        check_writable(directory)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"{str(directory)!r} cannot be used ({why}); choose another --workdir"
        ) from None


def picture(drawing: Drawing, kind: str) -> bytes:
    """The panels as PNG or SVG: up to three in a row, more in two rows."""
    made = style.render(_canvas, drawing, kind=kind, dpi=_PIXELS)
    return small(made) if kind == "png" else made


def small(png: bytes) -> bytes:
    """The same picture in 64 colours, which suffice for lines and letters."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(64).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def _canvas(drawing: Drawing) -> Canvas:
    # Matplotlib's own font, so that every machine draws the same files. `style.render`
    # resets it.
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    panels = drawing.panels
    count = len(panels)
    # Panels with the same lines share one legend, outside of the panels.
    shared = count > 1 and len({tuple(x.label for x in p.lines) for p in panels}) == 1
    rows = 1 if count <= 3 else 2
    columns = -(-count // rows)
    width = (5.2 if count == 1 else 4.0 * columns) + 1.7 * shared
    height = (3.9 if shared else 4.5) * rows
    canvas = Canvas(figsize=(width, height), layout="constrained")
    # Panels of the same quantity share its axis too, if it is linear.
    same = shared and len({(p.y_label, p.log_y) for p in panels}) == 1
    sharey = same and not panels[0].log_y
    axes = canvas.subplots(rows, columns, squeeze=False, sharey=sharey).flat[:count]
    for ax, panel in zip(axes, panels, strict=True):
        _panel(ax, panel, legend=not shared)
        if sharey and not ax.get_subplotspec().is_first_col():
            ax.set_ylabel("")
    if shared:
        handles, names = axes[0].get_legend_handles_labels()
        canvas.legend(handles, names, loc="outside right center", **_LEGEND)
    return canvas


_LEGEND: dict[str, Any] = {
    "fontsize": 8.5,
    "labelcolor": style.INK,
    "handlelength": 2.8,
}


def _panel(ax: Any, panel: Panel, legend: bool) -> None:
    measured = [line for line in panel.lines if line.look != "theory"]
    looks = iter(style.strokes(len(measured)))
    for line in panel.lines:
        _line(ax, line, {} if line.look == "theory" else next(looks))
    ax.set_title(panel.title, fontsize=10.5, loc="left", color=style.INK)
    ax.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log_x:
        ax.set_xscale("log")
        _sizes(ax.xaxis, sorted({float(x) for line in measured for x in line.x}))
    if panel.log_y:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        if low > 1e-3 and high < 1e4:
            style.log_ticks(ax.yaxis, low, high)
    if legend and len(panel.lines) > 1:
        # Below the panel: inside, it would hide lines.
        anchor = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17)}
        ax.legend(ncols=2, **anchor, **_LEGEND)


def _sizes(axis: Any, sizes: list[float]) -> None:
    """Put ticks at up to six sizes, and at every other one of up to twelve."""
    apart: list[float] = []
    for size in sizes:  # labels of sizes that are almost equal would overlap
        if not apart or size > 1.2 * apart[-1]:
            apart.append(size)
    if len(apart) <= 12:
        axis.set_ticks(apart[:: 1 + (len(apart) > 6)])
        axis.set_major_formatter(FuncFormatter(lambda v, _: _short(v)))
    axis.set_minor_formatter(NullFormatter())


def _short(size: float) -> str:
    """Whole numbers in full, others with three digits, for labels that fit."""
    return f"{size:g}" if size == round(size) else f"{size:.3g}"


def _line(ax: Any, line: Line, look: dict[str, Any]) -> None:
    if line.look == "theory":
        label = line.label or None
        ax.plot(line.x, line.y, "--", color="black", lw=1.4, label=label, zorder=3)
        return
    if line.look == "points":
        look = {**look, "linestyle": "none"}
    ax.errorbar(
        line.x, line.y, line.error, label=line.label, lw=1.5, ms=5, elinewidth=1, **look
    )

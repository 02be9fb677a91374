"""From sweeps to the pictures and verdicts of Tensor Programs VI.

Whether an optimum stays or moves is the verdict of `sweep.verdict`; whether a loss is
lower is decided by `curves.gaps`. Where either cannot tell, the figure cannot tell.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from mupax.experiments.report import SweepData
from mupax.experiments.sweep.results import Cell, Population
from mupax.experiments.sweep.statistics import Trend
from mupax.experiments.sweep.verdict import SHARE, transfer

from . import curves, valley
from .registry import Drawing, Line, Panel

_TITLES = {
    "depth_mup": "Depth-μP",
    "half_alpha": "α = ½, γ = 0",
    "no_depth_scaling": "no depth scaling",
    "ode": "ODE: α = 1, γ = 0",
}
_FREE = np.log(1.02)  # of a log loss that hardly depends on a hyperparameter
_EARLY = 0.2  # of the steps; the claim is about "initial training"


def rate_over_depth(data: SweepData) -> Drawing:
    """Depth-μP stays and gains, the others move (Figures 10 and 12)."""
    keys = dict.fromkeys(["depth_mup", *(p.parametrization for p in data.populations)])
    transfers = {_TITLES[key]: curves.judge(data, key) for key in keys}
    deep, *others = transfers.values()
    losses = _least(deep.cells)
    agrees = curves.conjunction(
        curves.stays(deep), curves.falls(losses), *map(curves.moves, others)
    )
    last = {"Depth-μP between the deepest two": transfer(deep.cells[-2:], "depth")}
    ours = (
        f"{curves.describe(transfers | last)}; loss of Depth-μP {curves.span(losses)}"
    )
    panels = [*curves.panels(transfers), curves.shift_panel(transfers)]
    return Drawing(panels, ours, agrees)


def ode_moves(data: SweepData) -> Drawing:
    """The ODE's optimum moves, and its loss is the larger (Figure 11)."""
    ode, deep = (curves.judge(data, key) for key in ("ode", "depth_mup"))
    losses, others = _least(ode.cells), _least(deep.cells)
    gap = curves.gaps(list(zip(losses, others, strict=True)))[-1]
    ours = (
        f"{curves.describe({'ODE': ode})}; loss at depth {ode.sizes[-1]} {losses[-1]}, "
        f"of Depth-μP {others[-1]}, difference {gap} (seed by seed)"
    )
    agrees = curves.conjunction(curves.moves(ode), curves.lower(others, losses)[-1])
    panels = curves.panels({_TITLES["ode"]: ode, _TITLES["depth_mup"]: deep})
    return Drawing(panels, ours, agrees)


def multiplier_settles(data: SweepData) -> Drawing:
    """Between the deepest networks the best block multiplier stays (Figure 13)."""
    name = "branch_multiplier"
    over_all = curves.judge(data, "depth_mup", name=name)
    last = transfer(over_all.cells[-2:], "depth")
    values = ", ".join(f"{curves.best_value(name, c):.2f}" for c in over_all.cells)
    transfers = {"between the deepest two": last, "over all": over_all}
    panels = [
        curves.panel("Each at its best learning rate", over_all.cells),
        curves.panel(
            "Each at its best block multiplier", curves.cells(data, "depth_mup")
        ),
    ]
    ours = f"best a {values} over the depths; {curves.describe(transfers)}"
    return Drawing(panels, ours, curves.stays(last))


def weights_last(phi_first: SweepData, weights_first: SweepData) -> Drawing:
    """W φ(x) stays, gains nothing by depth and is worse than φ(W x) (Figure 2)."""
    before = curves.judge(phi_first, "depth_mup")
    after = curves.cells(weights_first, "depth_mup")
    losses, others = _least(before.cells), _least(after)
    gains = curves.gaps([(losses[0], deeper) for deeper in losses[1:]])
    ours = (
        f"{curves.describe({'nonlinearity first': before})}; its loss over depths "
        f"{curves.span(losses)}, weights first {curves.span(others)}"
    )
    agrees = curves.conjunction(
        curves.stays(before),
        *(gain.under(np.log1p(SHARE)) for gain in gains),
        curves.lower(others, losses)[-1],
    )
    panels = [
        curves.panel("Nonlinearity first", before.cells),
        _by_depth({"nonlinearity first": before.cells, "weights first": after}),
    ]
    return Drawing(panels, ours, agrees)


def absolute_gains(absolute: SweepData, relu: SweepData) -> Drawing:
    """|x| trains better than ReLU, most where it is deep (Figure 3)."""
    runs = {
        "|x|": curves.cells(absolute, "depth_mup"),
        "ReLU": curves.cells(relu, "depth_mup"),
    }
    losses, others = map(_least, runs.values())
    ours = (
        f"at depth {runs['|x|'][-1].depth} the loss with |x| is {losses[-1]}, with "
        f"ReLU {others[-1]}"
    )
    deepest = [
        (name, cells[-1], curves.best_point(cells[-1])) for name, cells in runs.items()
    ]
    panels = [curves.panel(title, cells) for title, cells in runs.items()]
    panels.append(_by_depth(runs))
    depth = runs["|x|"][-1].depth
    panels.append(curves.learning_panel(f"Depth {depth}", deepest, absolute.steps))
    return Drawing(panels, ours, curves.lower(losses, others)[-1])


def two_layers_lose(
    two: SweepData, one: SweepData, each: SweepData | None = None
) -> Drawing:
    """Branches of two layers are worse at the same number of layers (4 and 5).

    Args:
      two: branches of two layers.
      one: branches of one.
      each: branches of two where the mean is subtracted after each layer, not only at
        the end. Shown, but not judged.
    """
    deep, flat = (curves.cells(data, "depth_mup") for data in (two, one))
    losses = {c.depth * 2: curves.least(c) for c in deep}
    others = {c.depth: curves.least(c) for c in flat}
    layers = sorted(losses.keys() & others.keys())
    compared = ", ".join(f"{losses[n]} against {others[n]} at {n}" for n in layers)
    measured = f"loss with branches of two layers and of one: {compared} layers"
    lines = [_losses("block depth 2", deep, 2), _losses("block depth 1", flat)]
    if each is not None:
        cells = curves.cells(each, "depth_mup")
        lines.append(_losses("block depth 2, mean of each layer", cells, 2))
        measured += "; of two, with the mean subtracted after each layer: "
        measured += ", ".join(str(curves.least(cell)) for cell in cells)
    panels = [
        curves.panel("Block depth 2", deep, scale=2),
        _best_rates("layers", lines),
        _ratios_over_time(deep, flat, two.steps),
    ]
    return Drawing(
        panels,
        measured,
        curves.conjunction(
            *curves.lower([others[n] for n in layers], [losses[n] for n in layers])
        ),
    )


def _ratios_over_time(deep: Sequence[Cell], flat: Sequence[Cell], steps: int) -> Panel:
    """Loss with branches of two layers over that of one, at the same layers."""
    one = {cell.depth: cell for cell in flat}
    pairs = [(cell, one[2 * cell.depth]) for cell in deep if 2 * cell.depth in one]
    lines = []
    for pair in pairs:
        spans = pair[0].curves.shape[-1]
        shares = (np.arange(spans) + 1) / spans
        losses = [_least(curves.after(pair, share)) for share in shares]
        ratios = [two.loss / one.loss for two, one in losses]
        lines.append(Line(f"{2 * pair[0].depth} layers", shares * steps, ratios))
    lines.append(Line("equal", [0, steps], [1, 1], look="theory"))
    title = "Best learning rate at each step"
    return Panel(title, "step", "loss, block depth 2 over 1", lines)


def two_layers_move(relu: SweepData, absolute: SweepData) -> Drawing:
    """The best learning rate of branches of two layers moves (Figure 6)."""
    transfers = {
        "ReLU": curves.judge(relu, "depth_mup"),
        "|x| and LayerNorm": curves.judge(absolute, "depth_mup"),
    }
    drawn = curves.drawing(transfers, *map(curves.moves, transfers.values()))
    shifts = curves.shift_panel(transfers)
    if not any(len(line.x) > 1 for line in shifts.lines):
        return drawn  # on a narrow grid only the end has an optimum inside
    return dataclasses.replace(drawn, panels=[*drawn.panels, shifts])


def valley_turns(data: SweepData) -> Drawing:
    """The valley of (η, a) turns from slope -2 to -1 with depth (Figure 7)."""
    names = ("learning_rate", "branch_multiplier")
    populations = sorted(data.populations, key=lambda p: p.depth)
    floors, slopes = [], {}
    for p in populations:
        loss = p.surface(names)
        trained = ~np.isnan(loss).all(axis=1)
        best = np.nanargmin(loss[trained], axis=1)
        rates, heights = (p.coordinates(name) for name in names)
        floors.append(Line(f"depth {p.depth}", rates[trained], heights[best]))
        slope = valley.slope(p, names)
        if slope is not None:
            error = valley.slope_error(p, names)
            slopes[p.depth] = curves.interval(slope, error, len(p.loss) - 1)
    ends = [populations[0].depth, populations[-1].depth]
    lines = [
        Line("measured", list(slopes), [slope.value for slope in slopes.values()]),
        *(Line(f"{s:g}", ends, [s, s], look="theory") for s in (-2, -1)),
    ]
    labels = "log₂ learning rate", "log₂ of the best block multiplier a"
    panels = [
        Panel("Where the loss is least", *labels, floors),
        Panel("Slope of the valley", "depth", "slope", lines, log_x=True),
    ]
    panels.append(_slopes_over_time(populations, names, data.steps))
    panels.append(_slopes_by_rate(populations, names))
    first, last = (slopes.get(depth) for depth in ends)
    steep = [
        f"{s.value:.2f} ± {s.error:.2f}" if s else "no valley" for s in (first, last)
    ]
    ours = (
        f"slope {steep[0]} at depth {ends[0]} (agrees within ½ of -2) and {steep[1]} "
        f"at depth {ends[1]} (within ½ of -1)"
    )
    if not first or not last:
        return Drawing(panels, ours, None)
    agrees = curves.conjunction(first.inside(-2.5, -1.5), last.inside(-1.5, -0.5))
    return Drawing(panels, ours, agrees)


def _slopes_over_time(
    populations: Sequence[Population], names: Sequence[str], steps: int
) -> Panel:
    """The slope of the valley during training, for the smallest and largest depth."""
    lines = []
    for p in (populations[0], populations[-1]):
        slopes = {
            share * steps: valley.slope(curves.after([p], share)[0], names)
            for share in np.linspace(0.1, 1.0, 10)
        }
        known = {at: slope for at, slope in slopes.items() if slope is not None}
        lines.append(Line(f"depth {p.depth}", list(known), list(known.values())))
    return Panel("Slope during training", "step", "slope", lines)


def _slopes_by_rate(populations: Sequence[Population], names: Sequence[str]) -> Panel:
    """The slope of level sets below the valley, for the smallest and largest depth."""
    lines = []
    for p in (populations[0], populations[-1]):
        rates, slopes = level_slopes(p, names)
        known = ~np.isnan(slopes)
        lines.append(Line(f"depth {p.depth}", rates[known], slopes[known]))
    labels = "log₂ learning rate", "slope of level sets"
    return Panel("Where the loss falls with both", *labels, lines)


def level_slopes(
    population: Population, names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Slopes of the level sets below the valley, where the loss falls in both.

    Returns:
      The middle of each two neighbouring values of `across`, as `grids.coordinate`,
      and there the change of `up` per unit of `across` on a level set: the ratio of the
      mean derivatives between grid points where both are negative. NaN without any.
    """
    level = np.log2(population.surface(names))
    x, y = (population.coordinates(name) for name in names)
    across = np.diff(level, axis=0) / np.diff(x)[:, None]
    up = np.diff(level, axis=1) / np.diff(y)
    across = (across[:, 1:] + across[:, :-1]) / 2
    up = (up[1:] + up[:-1]) / 2
    falls = (across < 0) & (up < 0)
    rise, run = (np.where(falls, part, 0.0).sum(axis=1) for part in (across, up))
    slopes = np.divide(-rise, run, out=np.full_like(run, np.nan), where=run != 0)
    return (x[1:] + x[:-1]) / 2, slopes


def multiplier_is_free(data: SweepData) -> Drawing:
    """A transformer's loss hardly depends on the block multiplier (Figure 14)."""
    cells = curves.cells(data, "depth_mup", name="branch_multiplier")
    spreads = _spreads(cells)
    ours = (
        f"over a from {2 ** cells[0].log2_lr[0]:g} to {2 ** cells[0].log2_lr[-1]:g} "
        f"the loss differs by {', '.join(map(str, spreads))} at depths "
        f"{', '.join(str(c.depth) for c in cells)} (agrees below 2%)"
    )
    agrees = curves.conjunction(*(spread.under(_FREE) for spread in spreads))
    shares = np.linspace(0.1, 1.0, 10)
    over_time = np.exp(
        [[one.value for one in _spreads(curves.after(cells, x))] for x in shares]
    )
    lines = [
        Line(f"depth {cell.depth}", shares, ratios)
        for cell, ratios in zip(cells, over_time.T, strict=True)
    ]
    labels = (
        "During training",
        "share of the steps",
        "loss of the worst a over the best",
    )
    panels = [
        curves.panel("Each at its best learning rate", cells),
        Panel(*labels, lines),
    ]
    return Drawing(panels, ours, agrees)


def _spreads(cells: Sequence[Cell]) -> list[curves.Interval]:
    """By how much the worst grid point's log loss lies above the best one's."""
    pairs = []
    for cell in cells:
        log_loss = np.log(cell.loss)
        mean = log_loss.mean(axis=0)
        if np.isnan(mean).any():  # the loss of a diverged run counts as infinite
            pairs.append((curves.Least(np.empty(0)), curves.Least(np.zeros(1))))
            continue
        worst, best = (log_loss[:, at] for at in (mean.argmax(), mean.argmin()))
        pairs.append((curves.Least(worst), curves.Least(best)))
    points = len(cells[0].log2_lr)
    return curves.gaps(pairs, points * (points - 1))


def deeper_starts_worse(data: SweepData) -> Drawing:
    """Deeper transformers start worse and end better (Figure 15).

    The early loss is that of the runs that are best at the end.
    """
    cells = curves.cells(data, "depth_mup")
    points = [curves.best_point(cell) for cell in cells]
    late = _least(cells)
    early = [
        end if at is None else curves.Least(np.log(then.loss[:, at]))
        for then, at, end in zip(curves.after(cells, _EARLY), points, late, strict=True)
    ]
    runs = [(f"depth {c.depth}", c, at) for c, at in zip(cells, points, strict=True)]
    ours = (
        f"loss of depths {', '.join(str(c.depth) for c in cells)}: "
        f"{', '.join(map(str, early))} after {_EARLY:.0%} of the steps, "
        f"{', '.join(map(str, late))} at the end"
    )
    panels = [
        curves.learning_panel("Best learning rate of each", runs, data.steps),
        _over_time(cells, data.steps),
    ]
    agrees = curves.conjunction(curves.falls(early[::-1]), curves.falls(late))
    return Drawing(panels, ours, agrees)


def _over_time(cells: Sequence[Cell], steps: int) -> Panel:
    """The least loss of any learning rate at each time, over the first size's."""
    spans = cells[0].curves.shape[-1]
    shares = (np.arange(spans) + 1) / spans
    losses = np.array(
        [[one.loss for one in _least(curves.after(cells, x))] for x in shares]
    )
    lines = [
        Line(f"depth {cell.depth}", shares * steps, ratios)
        for cell, ratios in zip(cells, (losses / losses[:, :1]).T, strict=True)
    ]
    title = "Best learning rate at each step"
    return Panel(title, "step", f"loss over that of depth {cells[0].depth}", lines)


def root_law_at_the_end(data: SweepData) -> Drawing:
    """The best rate is constant in the middle, as 1/√L at the end (Figure 16).

    Depth-μP divides by √L itself: the shift of its own optimum is the difference from
    1/√L. The learning rate of the layers shifts by half an octave less. The claim is
    about how the optimum scales, so shifts decide it, not costs: the two, and how much
    smaller the second is.
    """
    end = curves.judge(data, "depth_mup")
    cells = curves.after(end.cells, 0.5)
    middle = transfer(cells, "depth", data.base.depth)
    change = _change(middle.trend, end.trend)
    low, high = change.interval
    ours = (
        "best η of blocks that train at η/√L: in the middle of training – "
        f"{curves.shift(middle)} (agrees if the shift is within ¼ of +½); at the end – "
        f"{curves.shift(end)} (within ¼ of 0); between the two the shift changes by "
        f"{change.slope:+.2f} [{low:.2f}, {high:.2f}] (within ¼ of -½)"
    )
    panels = curves.panels({"In the middle": middle, "At the end": end})
    agrees = curves.conjunction(
        middle.trend.within(0.25, 0.75),
        end.trend.within(-0.25, 0.25),
        change.within(-0.75, -0.25),
    )
    return Drawing(panels, ours, agrees)


def _change(first: Trend, second: Trend) -> Trend:
    """How much larger the second shift is, with the error of independent seeds."""
    return dataclasses.replace(
        second,
        slope=second.slope - first.slope,
        error=math.hypot(first.error, second.error),
        freedom=min(first.freedom, second.freedom),
    )


def _least(cells: Sequence[Cell]) -> list[curves.Least]:
    return [curves.least(cell) for cell in cells]


def _losses(label: str, cells: Sequence[Cell], scale: int = 1) -> Line:
    """The least loss against the depth, where something trained."""
    return curves.least_line(label, {c.depth * scale: curves.least(c) for c in cells})


def _by_depth(runs: Mapping[str, Sequence[Cell]]) -> Panel:
    return _best_rates("depth", [_losses(name, cells) for name, cells in runs.items()])


def _best_rates(x_label: str, lines: Sequence[Line]) -> Panel:
    title = "Best learning rate of each"
    return Panel(title, x_label, "training loss", lines, log_x=True, log_y=True)

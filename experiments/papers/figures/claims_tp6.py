"""From sweeps to the pictures and verdicts of Tensor Programs VI.

Whether an optimum stays or moves is the verdict of `sweep.verdict`; whether a loss is
lower is decided by `curves.gaps`. Where either cannot tell, the figure cannot tell.
"""

from collections.abc import Sequence

import numpy as np

from ...report import SweepData
from ...sweep import valley
from ...sweep.results import Cell
from ...sweep.verdict import SHARE
from . import curves
from .registry import Drawing, Line, Panel

_TITLES = {
    "depth_mup": "Depth-μP",
    "half_alpha": "α = ½, γ = 0",
    "no_depth_scaling": "no depth scaling",
    "ode": "ODE: α = 1, γ = 0",
}


def rate_over_depth(data: SweepData) -> Drawing:
    """Depth-μP stays and gains, the others move (Figures 10 and 12)."""
    others = [key for key in _keys(data) if key != "depth_mup"]
    order = ["depth_mup", *others]
    by_name = {key: curves.cells(data, key) for key in order}
    moves = {key: curves.move(cells, base=data.base) for key, cells in by_name.items()}
    losses = _least(by_name["depth_mup"])
    named = {_TITLES[key]: moves[key] for key in order}
    ours = f"{curves.told(named)}; loss of Depth-μP {curves.span(losses)}"
    agrees = curves.every(
        curves.stays(moves["depth_mup"]),
        curves.falls(losses),
        *(curves.moves(moves[key]) for key in others),
    )
    panels = [curves.panel(_TITLES[key], by_name[key]) for key in order]
    return Drawing(panels, ours, agrees)


def ode_moves(data: SweepData) -> Drawing:
    """The ODE's optimum moves, and its loss is the larger (Figure 11)."""
    ode, deep = (curves.cells(data, key) for key in ("ode", "depth_mup"))
    moved = curves.move(ode, base=data.base)
    losses, others = _least(ode), _least(deep)
    gap = curves.gaps(list(zip(losses, others, strict=True)))[-1]
    ours = (
        f"{curves.told({'ODE': moved})}; loss at depth {ode[-1].depth} {losses[-1]}, "
        f"of Depth-μP {others[-1]}, difference {gap} (95 %, seed by seed)"
    )
    panels = [
        curves.panel(_TITLES[key], cells)
        for key, cells in (("ode", ode), ("depth_mup", deep))
    ]
    return Drawing(
        panels,
        ours,
        curves.every(curves.moves(moved), curves.lower(others, losses)[-1]),
    )


def multiplier_settles(data: SweepData) -> Drawing:
    """The best block multiplier moves less and less (Figure 13)."""
    cells = curves.cells(data, "depth_mup", name="branch_multiplier")
    whole = curves.move(cells, base=data.base)
    last = curves.move(cells[-2:])
    values = ", ".join(f"{curves.value('branch_multiplier', c):.2f}" for c in cells)
    moves = {"between the deepest two": last, "over all": whole}
    ours = f"best a {values} over the depths; {curves.told(moves)}"
    panels = [
        curves.panel("Each at its best learning rate", cells),
        curves.panel(
            "Each at its best block multiplier", curves.cells(data, "depth_mup")
        ),
    ]
    return Drawing(panels, ours, curves.stays(last))


def weights_last(pre: SweepData, post: SweepData) -> Drawing:
    """W φ(x) stays, gains nothing by depth and is worse than φ(W x) (Figure 2)."""
    before, after = (curves.cells(data, "depth_mup") for data in (pre, post))
    moved = curves.move(before, base=pre.base)
    losses, others = _least(before), _least(after)
    ours = (
        f"{curves.told({'nonlinearity first': moved})}; its loss over depths "
        f"{curves.span(losses)}, weights first {curves.span(others)}"
    )
    agrees = curves.every(
        curves.stays(moved), _no_gain(losses), curves.lower(others, losses)[-1]
    )
    panels = [
        curves.panel("Nonlinearity first", before),
        _by_depth({"nonlinearity first": before, "weights first": after}),
    ]
    return Drawing(panels, ours, agrees)


def absolute_gains(absolute: SweepData, relu: SweepData) -> Drawing:
    """|x| trains better than ReLU, most where it is deep (Figure 3)."""
    mine, other = (curves.cells(data, "depth_mup") for data in (absolute, relu))
    best, others = _least(mine), _least(other)
    ours = (
        f"at depth {mine[-1].depth} the loss with |x| is {best[-1]}, with ReLU "
        f"{others[-1]}"
    )
    panels = [
        curves.panel("|x|", mine),
        curves.panel("ReLU", other),
        _by_depth({"|x|": mine, "ReLU": other}),
    ]
    return Drawing(panels, ours, curves.lower(best, others)[-1])


def two_layers_lose(two: SweepData, one: SweepData) -> Drawing:
    """Branches of two layers are worse at the same number of layers (4 and 5)."""
    deep, flat = (curves.cells(data, "depth_mup") for data in (two, one))
    losses = {c.depth * 2: curves.least(c) for c in deep}
    others = {c.depth: curves.least(c) for c in flat}
    layers = sorted(losses.keys() & others.keys())
    told = ", ".join(f"{losses[n]} against {others[n]} at {n}" for n in layers)
    ours = f"loss with branches of two layers and of one: {told} layers"
    panel = Panel(
        "Best learning rate of each",
        "layers",
        "training loss",
        [
            _losses("block depth 2", deep, 2),
            _losses("block depth 1", flat),
        ],
        log_x=True,
        log_y=True,
    )
    panels = [curves.panel("Block depth 2", deep, scale=2), panel]
    return Drawing(
        panels,
        ours,
        curves.every(
            *curves.lower([others[n] for n in layers], [losses[n] for n in layers])
        ),
    )


def two_layers_move(relu: SweepData, absolute: SweepData) -> Drawing:
    """The best learning rate of branches of two layers moves (Figure 6)."""
    by_name = {
        "ReLU": curves.cells(relu, "depth_mup"),
        "|x| and LayerNorm": curves.cells(absolute, "depth_mup"),
    }
    moves = {n: curves.move(cells, base=relu.base) for n, cells in by_name.items()}
    ours = curves.told(moves)
    panels = [curves.panel(name, cells) for name, cells in by_name.items()]
    return Drawing(
        panels, ours, curves.every(*(curves.moves(one) for one in moves.values()))
    )


def valley_turns(data: SweepData) -> Drawing:
    """The valley of (η, a) turns from slope -2 to -1 with depth (Figure 7)."""
    names = ("learning_rate", "branch_multiplier")
    populations = sorted(data.populations, key=lambda p: p.depth)
    slopes = [valley.slope(p, names) for p in populations]
    floors = []
    for population in populations:
        loss = valley.surface(population, names)
        cell = population.cell()
        trained = ~np.isnan(loss).all(axis=1)
        best = np.nanargmin(loss[trained], axis=1)
        heights = np.log2(population.axes["branch_multiplier"])[best]
        rates = cell.log2_lr[trained].tolist()
        floors.append(Line(f"depth {population.depth}", rates, heights.tolist()))
    known = [
        (p.depth, s) for p, s in zip(populations, slopes, strict=True) if s is not None
    ]
    depths = [populations[0].depth, populations[-1].depth]
    levels = [Line(f"{s:g}", depths, [s, s], look="theory") for s in (-2, -1) if depths]
    turned = Line("measured", [d for d, _ in known], [s for _, s in known])
    panels = [
        Panel(
            "Where the loss is least",
            "log₂ learning rate",
            "best log₂ block multiplier a",
            floors,
        ),
        Panel("Slope of the valley", "depth", "slope", [turned, *levels], log_x=True),
    ]
    steep = [
        None
        if s is None
        else curves.interval(s, valley.slope_error(p, names), len(p.loss))
        for p, s in zip(populations, slopes, strict=True)
    ]
    told = [
        "no valley" if s is None else f"{s.value:.2f} ± {s.wide:.2f}" for s in steep
    ]
    ours = (
        f"slope {told[0]} at depth {depths[0]} (agrees within ½ of -2) and {told[-1]} "
        f"at depth {depths[1]} (within ½ of -1)"
    )
    first, last = steep[0], steep[-1]
    if first is None or last is None:
        return Drawing(panels, ours, None)
    agrees = curves.every(
        curves.inside(first, -2.5, -1.5), curves.inside(last, -1.5, -0.5)
    )
    return Drawing(panels, ours, agrees)


def multiplier_is_free(data: SweepData) -> Drawing:
    """A transformer's loss hardly depends on the block multiplier (Figure 14)."""
    cells = curves.cells(data, "depth_mup", name="branch_multiplier")
    spreads = [_spread(cell) for cell in cells]
    told = ", ".join(map(str, spreads))
    ours = (
        f"over a from {2 ** cells[0].log2_lr[0]:g} to {2 ** cells[0].log2_lr[-1]:g} "
        f"the loss differs by {told} at depths "
        f"{', '.join(str(c.depth) for c in cells)} (agrees below 2%)"
    )
    panels = [curves.panel("Each at its best learning rate", cells)]
    return Drawing(
        panels, ours, curves.every(*(curves.under(x, _FREE) for x in spreads))
    )


_FREE = np.log(1.02)


def _spread(cell: Cell) -> curves.Gap:
    """By how much the worst grid point's log loss lies above the best one's."""
    log_loss = np.log(cell.loss)
    mean = log_loss.mean(axis=0)
    if np.isnan(mean).any():
        return curves.Gap(np.inf, 0.0)
    pair = (log_loss[:, mean.argmax()], log_loss[:, mean.argmin()])
    return curves.gaps([(curves.Least(pair[0]), curves.Least(pair[1]))])[0]


def deeper_starts_worse(data: SweepData) -> Drawing:
    """Deeper transformers start worse and end better (Figure 15)."""
    cells = curves.cells(data, "depth_mup")
    early = [_standing(cell, _EARLY) for cell in cells]
    late = [curves.least(cell) for cell in cells]
    lines = [curves.learning(c, f"depth {c.depth}", data.steps) for c in cells]
    ours = (
        f"loss of depth {cells[0].depth} to {cells[-1].depth}: {curves.span(early)} "
        f"after {_EARLY:.0%} of the steps, {curves.span(late)} at the end"
    )
    panels = [
        Panel("Best learning rate of each", "step", "training loss", lines, log_y=True)
    ]
    return Drawing(
        panels,
        ours,
        curves.every(
            *curves.lower([early[0]], [early[-1]]), *curves.lower([late[-1]], [late[0]])
        ),
    )


_EARLY = 0.2


def _standing(cell: Cell, share: float) -> curves.Least:
    """The loss early on, of the runs that are best at the end."""
    best = curves.best_point(cell)
    if best is None:
        return curves.least(cell)
    (then,) = curves.at([cell], share)
    return curves.Least(np.log(then.loss[:, best]))


def root_law_at_the_end(data: SweepData) -> Drawing:
    """The best rate is constant in the middle, as 1/√L at the end (Figure 16).

    Depth-μP divides by √L itself: what its own optimum moves by is what differs from
    1/√L, and half an octave less is what the rate of the layers moves by.
    """
    cells = curves.cells(data, "depth_mup")
    middle = curves.at(cells, 0.5)
    half, end = (curves.move(c, base=data.base) for c in (middle, cells))
    ours = (
        f"with the learning rate over √L the optimum in the middle: "
        f"{curves.shift(half)} octaves per doubling (agrees within ¼ of ½); at the "
        f"end: {curves.shift(end)}"
    )
    panels = [
        curves.panel("In the middle", middle),
        curves.panel("At the end", cells),
    ]
    agrees = curves.every(half.trend.within(0.25, 0.75), curves.stays(end))
    return Drawing(panels, ours, agrees)


def _keys(data: SweepData) -> list[str]:
    return list(dict.fromkeys(p.parametrization for p in data.populations))


def _least(cells: Sequence[Cell]) -> list[curves.Least]:
    return [curves.least(cell) for cell in cells]


def _no_gain(losses: Sequence[curves.Least]) -> bool | None:
    """Whether depth lowers the loss by less than 1 %; None where it is not known."""
    gains = curves.gaps([(losses[0], deeper) for deeper in losses[1:]])
    return curves.every(*(curves.under(gain, np.log1p(SHARE)) for gain in gains))


def _losses(label: str, cells: Sequence[Cell], scale: int = 1) -> Line:
    known = [(c.depth * scale, curves.least(c)) for c in cells]
    known = [(depth, best) for depth, best in known if np.isfinite(best.loss)]
    return Line(
        label,
        [depth for depth, _ in known],
        [best.loss for _, best in known],
        [best.error for _, best in known],
    )


def _by_depth(by_name: dict[str, list[Cell]]) -> Panel:
    lines = [_losses(name, cells) for name, cells in by_name.items()]
    return Panel(
        "Best learning rate of each",
        "depth",
        "training loss",
        lines,
        log_x=True,
        log_y=True,
    )

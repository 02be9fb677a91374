"""From sweeps to the pictures and verdicts of Bordelon et al.

Whether an optimum stays is the verdict of `sweep.verdict`, as in `claims_tp6`.
"""

import numpy as np

from ...report import SweepData
from ...sweep import optima, statistics
from ...sweep.results import Cell
from ...sweep.verdict import Transfer
from . import curves
from .registry import Drawing, Panel

_SOON = 0.25  # of the steps


def both_sizes(data: SweepData) -> Drawing:
    """1/√L keeps the optimum over depth and width, μP over width (Figure 1).

    At the base's depth both are the same: there is one panel of widths.
    """
    alone, both = (curves.judge(data, key) for key in ("mup", "depth_mup"))
    width = curves.judge(data, "depth_mup", "width")
    transfers = {
        "1/√L over depth": both,
        "μP over depth": alone,
        "either over width": width,
    }
    panels = curves.panels({"μP over depth": alone, "μP and 1/√L over depth": both})
    panels.append(curves.panel("Both over width", width.cells, "width"))
    agrees = curves.conjunction(
        curves.stays(both), curves.stays(width), curves.moves(alone)
    )
    return Drawing(panels, curves.describe(transfers), agrees)


def without_scaling(data: SweepData) -> Drawing:
    """Neither SP nor μP keeps the optimum over depth (Figure B.2).

    At the base's width both are the same: there is one panel of depths.
    """
    depth = curves.judge(data, "mup")
    widths = {
        "SP over width": curves.judge(data, "sp", "width"),
        "μP over width": curves.judge(data, "mup", "width"),
    }
    panels = curves.panels({"Both over depth": depth})
    panels += curves.panels(widths, "width")
    ours = curves.describe({"both over depth": depth, **widths})
    return Drawing(panels, ours, curves.moves(depth))


def norm_is_not_enough(data: SweepData) -> Drawing:
    """With 1/√L a ResNet's optimum stays, with a norm alone less so (Figure 2)."""
    transfers = {
        "μP, batch norm": curves.judge(data, "mup, model.norm=batch"),
        "1/√L, batch norm": curves.judge(data, "depth_mup, model.norm=batch"),
        "1/√L, no norm": curves.judge(data, "depth_mup, model.norm=none"),
    }
    alone, *scaled = transfers.values()
    return curves.drawing(
        transfers,
        *(curves.stays(one) for one in scaled),
        *(curves.moves_more(alone, one) for one in scaled),
    )


def norm_helps(data: SweepData, norm: str, label: str) -> Drawing:
    """A norm makes depths more alike, 1/√L more so (Figures B.4 and B.5)."""
    transfers = {
        "μP, no norm": curves.judge(data, "mup, model.norm=none"),
        f"μP, {label}": curves.judge(data, f"mup, model.norm={norm}"),
        f"1/√L, {label}": curves.judge(data, f"depth_mup, model.norm={norm}"),
    }
    none, alone, both = transfers.values()
    return curves.drawing(
        transfers,
        curves.stays(both),
        curves.moves_more(none, alone),
        curves.moves_more(alone, both),
    )


def transformers(data: SweepData) -> Drawing:
    """The optimum of ViTs stays in each case, 1/√L gains by depth (Figure 3)."""
    transfers = {
        "μP, LayerNorm": curves.judge(data, "mup, model.layer_norm=True"),
        "1/√L, LayerNorm": curves.judge(data, "depth_mup, model.layer_norm=True"),
        "μP": curves.judge(data, "mup, model.layer_norm=False"),
        "1/√L": curves.judge(data, "depth_mup, model.layer_norm=False"),
    }
    falls = {title: _fall(transfer) for title, transfer in transfers.items()}
    shares = ", ".join(
        f"{np.expm1(fall.log_loss.mean()):+.1%} ({n})"
        if len(fall.log_loss)
        else f"nothing trained ({n})"
        for n, fall in falls.items()
    )
    better = curves.lower(
        [falls["1/√L"], falls["1/√L, LayerNorm"]], [falls["μP"], falls["μP, LayerNorm"]]
    )
    return Drawing(
        curves.panels(transfers),
        f"{curves.describe(transfers)}; from the smallest depth to the largest "
        f"the loss changes by {shares}",
        curves.conjunction(*map(curves.stays, transfers.values()), *better),
    )


def _fall(transfer: Transfer) -> curves.Least:
    """Log of the deepest size's least loss over the smallest's, seed by seed."""
    first, last = (curves.least(transfer.cells[i]).log_loss for i in (0, -1))
    return curves.Least(last - first if len(first) and len(last) else np.empty(0))


def other_axes(momentum: SweepData, richness: SweepData) -> Drawing:
    """The best momentum and richness stay over depth (Figure 4)."""
    transfers = {
        "momentum": curves.judge(momentum, "depth_mup", name="momentum"),
        "richness": curves.judge(richness, "depth_mup", name="richness"),
    }
    panels = curves.panels(
        {f"{n.capitalize()}, best learning rate": t for n, t in transfers.items()}
    )
    agrees = curves.conjunction(*map(curves.stays, transfers.values()))
    return Drawing(panels, curves.describe(transfers), agrees)


def decay_stays(data: SweepData) -> Drawing:
    """The loss depends on weight decay in the same way at each depth (Figure B.8).

    In training the best decay may be zero. The claim compares how far the log loss of
    each decay lies above the least.
    """
    cells = curves.cells(data, "depth_mup", name="weight_decay")
    log_loss = np.stack([np.log(cell.loss) for cell in cells])
    seeds = log_loss.shape[1]
    share = _difference(log_loss)
    left_out = [_difference(np.delete(log_loss, i, axis=1)) for i in range(seeds)]
    error = statistics.jackknife(left_out) if seeds > 1 else np.inf
    difference = curves.interval(share, error, seeds - 1)
    ours = (
        "log loss against weight decay: curves of different depths lie within "
        f"{difference.value:.0%} ± {difference.wide:.0%} of the base's range "
        "(agrees below 25%)"
    )
    panels = [curves.panel("Each at its best learning rate", cells)]
    for cell in (cells[0], cells[-1]):
        runs = [(f"λ = {2.0**x:g}", cell, at) for at, x in enumerate(cell.log2_lr)]
        panels.append(curves.learning_panel(f"Depth {cell.depth}", runs, data.steps))
    return Drawing(panels, ours, None if np.isnan(share) else difference.under(0.25))


def _difference(log_loss: np.ndarray) -> float:
    """The largest difference between depths, as a share of the base's whole rise.

    NaN where no weight decay trained at every depth. The log losses have the shape
    (depths, seeds, weight decays).
    """
    mean = log_loss.mean(axis=1)
    mean = mean[:, ~np.isnan(mean).any(axis=0)]
    if not mean.size:
        return np.nan
    above = mean - mean.min(axis=1, keepdims=True)
    return float(np.abs(above - above[0]).max() / above[0].max())


def middle_depth(*sweeps: SweepData) -> Drawing:
    """At equal size neither the flattest nor the deepest model is best (B.1).

    Each of the three sweeps has one depth; its widths give width² x depth the same
    values as in the other sweeps.
    """
    by_sweep = [curves.cells(data, "depth_mup", "width") for data in sweeps]
    sizes = [cell.width**2 * cell.depth for cell in by_sweep[0]]
    losses = [[curves.least(cell) for cell in cells] for cells in by_sweep]
    depths = [cells[0].depth for cells in by_sweep]
    flat, middle, deep = losses
    words = [
        f"{', '.join(map(str, of_size))} at width² x depth = {size:,}"
        for size, of_size in zip(sizes, zip(*losses, strict=True), strict=True)
    ]
    lines = [
        curves.least_line(f"depth {depth}", dict(zip(sizes, of_depth, strict=True)))
        for depth, of_depth in zip(depths, losses, strict=True)
    ]
    labels = "Each at its best learning rate", "width² x depth", "training loss"
    return Drawing(
        [Panel(*labels, lines, log_x=True, log_y=True)],
        f"loss of depths {', '.join(map(str, depths))}: {'; '.join(words)}",
        curves.conjunction(*curves.lower(2 * middle, flat + deep)),
    )


def decided_early(data: SweepData) -> Drawing:
    """The best learning rate shows after a few epochs of twenty (Figure B.3)."""
    cells = curves.cells(data, "depth_mup")
    early = curves.after(cells, _SOON)
    gaps = [_distance(*pair) for pair in zip(early, cells, strict=True)]
    ours = (
        f"after {_SOON:.0%} of the steps the optimum is "
        f"{', '.join(f'{gap.value:.2f}' for gap in gaps)} octaves from its last place, "
        f"at depths {', '.join(str(c.depth) for c in cells)} (agrees within ½)"
    )
    cell = cells[-1]
    best = curves.best_point(cell) or 0
    near = range(max(best - 2, 0), min(best + 3, len(cell.log2_lr)))
    runs = [(f"rate 2^{cell.log2_lr[at]:g}", cell, at) for at in near]
    panels = [
        curves.learning_panel(f"Depth {cell.depth}", runs, data.steps),
        curves.panel("After a quarter of the steps", early),
        curves.panel("At the end", cells),
    ]
    agrees = curves.conjunction(*(gap.under(0.5) for gap in gaps))
    return Drawing(panels, ours, agrees)


def _distance(one: Cell, other: Cell) -> curves.Interval:
    """Octaves between two optima, 90 %; infinite where either is missing."""
    first, last = (optima.optimum(cell) for cell in (one, other))
    if first is None or last is None:
        return curves.Interval(np.inf, 0.0)
    fits = [optima.fit(cell) for cell in (one, other)]
    grid = [fit.place_error for fit in fits if fit is not None]
    error = float(np.sqrt(np.sum(np.square([first.error, last.error, *grid]))))
    return curves.Interval(abs(first.log2_lr - last.log2_lr), 1.645 * error)


def long_branches(data: SweepData) -> Drawing:
    """Branches of 4 layers: only 1/L gains by each doubling, early on (M.1)."""
    transfers = {
        "μP and 1/√L": curves.judge(data, "depth_mup"),
        "ODE: 1/L": curves.judge(data, "ode"),
    }
    root, ode = (
        [curves.least(cell) for cell in curves.after(transfer.cells, _SOON)]
        for transfer in transfers.values()
    )
    ours = (
        f"after {_SOON:.0%} of the steps the best loss over depths is "
        f"{', '.join(map(str, ode))} for 1/L and {', '.join(map(str, root))} for 1/√L; "
        f"{curves.describe(transfers)}"
    )
    agrees = curves.conjunction(
        curves.falls_always(ode), curves.negation(curves.falls_always(root))
    )
    return Drawing(curves.panels(transfers), ours, agrees)

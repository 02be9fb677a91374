"""From sweeps to the pictures and verdicts of Bordelon et al.

Whether an optimum stays is the verdict of `sweep.verdict`, as in `claims_tp6`.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from scipy import stats

from ...report import SweepData
from ...sweep import optima, statistics
from ...sweep.results import Cell
from ...sweep.verdict import Transfer
from . import curves
from .registry import Drawing, Line, Panel

_TITLES = {
    "sp": "SP",
    "mup": "μP",
    "depth_mup": "μP and 1/√L",
    "ode": "ODE: 1/L",
}


def both_sizes(data: SweepData) -> Drawing:
    """1/√L keeps the optimum over depth and width, μP over width (Figure 1).

    At the base's depth both are the same: there is one panel of widths.
    """
    by_name = {
        "μP over depth": curves.cells(data, "mup"),
        "μP and 1/√L over depth": curves.cells(data, "depth_mup"),
    }
    wide = curves.cells(data, "depth_mup", "width")
    alone, both = (curves.move(cells, base=data.base) for cells in by_name.values())
    width = curves.move(wide, "width", data.base)
    moves = {
        "1/√L over depth": both,
        "μP over depth": alone,
        "either over width": width,
    }
    panels = [curves.panel(title, cells) for title, cells in by_name.items()]
    panels.append(curves.panel("Both over width", wide, "width"))
    return Drawing(
        panels,
        curves.told(moves),
        curves.every(curves.stays(both), curves.stays(width), curves.moves(alone)),
    )


def without_scaling(data: SweepData) -> Drawing:
    """Neither SP nor μP keeps the optimum over depth (Figure B.2).

    At the base's width both are the same: there is one panel of depths.
    """
    deep = curves.cells(data, "mup")
    wide = {key: curves.cells(data, key, "width") for key in ("sp", "mup")}
    depth = curves.move(deep, base=data.base)
    sp, mup = (curves.move(cells, "width", data.base) for cells in wide.values())
    moves = {"both over depth": depth, "SP over width": sp, "μP over width": mup}
    panels = [curves.panel("Both over depth", deep)]
    panels += [
        curves.panel(f"{_TITLES[key]} over width", cells, "width")
        for key, cells in wide.items()
    ]
    return Drawing(panels, curves.told(moves), curves.moves(depth))


def norm_is_not_enough(data: SweepData, norm: str, label: str) -> Drawing:
    """With 1/√L a ResNet's optimum stays, with a norm alone less so (Figure 2)."""
    keys = {
        f"μP, {label}": f"mup, model.norm={norm}",
        f"1/√L, {label}": f"depth_mup, model.norm={norm}",
        "1/√L, no norm": "depth_mup, model.norm=none",
    }
    panels, moves = _keyed(data, keys)
    alone, both, bare = moves.values()
    agrees = curves.every(
        *(curves.stays(one) for one in (both, bare)),
        *(curves.moves_more(alone, one) for one in (both, bare)),
    )
    return Drawing(panels, curves.told(moves), agrees)


def norm_helps(data: SweepData, norm: str, label: str) -> Drawing:
    """A norm makes depths more alike, 1/√L more so (Figures B.4 and B.5)."""
    keys = {
        "μP, no norm": "mup, model.norm=none",
        f"μP, {label}": f"mup, model.norm={norm}",
        f"1/√L, {label}": f"depth_mup, model.norm={norm}",
    }
    panels, moves = _keyed(data, keys)
    none, alone, both = moves.values()
    agrees = curves.every(
        curves.stays(both),
        curves.moves_more(none, alone),
        curves.moves_more(alone, both),
    )
    return Drawing(panels, curves.told(moves), agrees)


def _keyed(
    data: SweepData, keys: dict[str, str]
) -> tuple[list[Panel], dict[str, Transfer]]:
    by_name = {title: curves.cells(data, key) for title, key in keys.items()}
    panels = [curves.panel(title, cells) for title, cells in by_name.items()]
    moves = {n: curves.move(cells, base=data.base) for n, cells in by_name.items()}
    return panels, moves


def transformers(data: SweepData) -> Drawing:
    """The optimum of ViTs stays in each case, 1/√L gains by depth (Figure 3)."""
    keys = {
        f"{title}{', LayerNorm' if norm else ''}": f"{key}, model.layer_norm={norm}"
        for norm, (key, title) in itertools.product(
            (True, False), (("mup", "μP"), ("depth_mup", "1/√L"))
        )
    }
    panels, moves = _keyed(data, keys)
    falls = {n: _fall(curves.cells(data, key)) for n, key in keys.items()}
    told = ", ".join(
        f"{1 - np.exp(fall.log_loss.mean()):.1%} ({n})" if len(fall.log_loss) else n
        for n, fall in falls.items()
    )
    ours = f"{curves.told(moves)}; depth lowers the loss by {told}"
    norms = ("", ", LayerNorm")
    better = curves.lower(
        [falls[f"1/√L{norm}"] for norm in norms], [falls[f"μP{norm}"] for norm in norms]
    )
    stays = (curves.stays(one) for one in moves.values())
    return Drawing(panels, ours, curves.every(*stays, *better))


def _fall(cells: Sequence[Cell]) -> curves.Least:
    """Log of the deepest size's least loss over the smallest's, seed by seed."""
    first, last = curves.least(cells[0]), curves.least(cells[-1])
    if not len(first.log_loss) or not len(last.log_loss):
        return curves.Least(np.empty(0))
    return curves.Least(last.log_loss - first.log_loss)


def other_axes(momentum: SweepData, richness: SweepData) -> Drawing:
    """The best momentum and richness stay over depth (Figure 4)."""
    panels, moves = [], {}
    for name, data in (("momentum", momentum), ("richness", richness)):
        cells = curves.cells(data, "depth_mup", name=name)
        moves[name] = curves.move(cells, base=data.base)
        panels.append(curves.panel(f"{name.capitalize()}, best learning rate", cells))
    return Drawing(
        panels, curves.told(moves), curves.every(*map(curves.stays, moves.values()))
    )


def decay_stays(data: SweepData) -> Drawing:
    """The loss depends on weight decay in the same way at each depth (Figure B.8).

    In training the best decay may be none at all: what is compared is how far the log
    loss of each decay lies above the least.
    """
    cells = curves.cells(data, "depth_mup", name="weight_decay")
    log_loss = np.stack([np.log(cell.loss) for cell in cells])
    seeds = log_loss.shape[1]
    share = _differently(log_loss)
    rest = [_differently(np.delete(log_loss, i, axis=1)) for i in range(seeds)]
    error = statistics.jackknife(rest) if seeds > 1 else np.inf
    known = curves.interval(share, error, seeds)
    ours = (
        f"over depths the log loss rises with weight decay differently by "
        f"{known.value:.0%} ± {known.wide:.0%} of the base's whole rise (agrees below "
        "25%)"
    )
    panels = [curves.panel("Each at its best learning rate", cells)]
    for cell in (cells[0], cells[-1]):
        lines = [
            _curve(cell, i, f"λ = {2.0**x:g}", data.steps)
            for i, x in enumerate(cell.log2_lr)
        ]
        title = f"Depth {cell.depth}"
        panels.append(Panel(title, "step", "training loss", lines, log_y=True))
    agrees = None if np.isnan(share) else curves.under(known, 0.25)
    return Drawing(panels, ours, agrees)


def _differently(log_loss: np.ndarray) -> float:
    """The largest difference between depths, as a share of the base's whole rise.

    Args:
      log_loss: shape (depths, seeds, weight decays).

    Returns:
      NaN where no weight decay trained at every depth.
    """
    mean = log_loss.mean(axis=1)
    mean = mean[:, ~np.isnan(mean).any(axis=0)]
    if not mean.size:
        return np.nan
    above = mean - mean.min(axis=1, keepdims=True)
    return float(np.abs(above - above[0]).max() / above[0].max())


def middle_depth(*sweeps: SweepData) -> Drawing:
    """At equal size neither the flattest nor the deepest model is best (B.1).

    Each sweep has one depth; its widths give width² x depth the same values as in the
    other sweeps.
    """
    by_sweep = [curves.cells(data, "depth_mup", "width") for data in sweeps]
    depths = [cells[0].depth for cells in by_sweep]
    lines = []
    for cells in by_sweep:
        best = [curves.least(cell) for cell in cells]
        sizes = [cell.width**2 * cell.depth for cell in cells]
        losses, errors = [b.loss for b in best], [b.error for b in best]
        lines.append(Line(f"depth {cells[0].depth}", sizes, losses, errors))
    told: list[str] = []
    inside: list[bool | None] = []
    for equal in zip(*by_sweep, strict=True):
        size = f"{equal[0].width ** 2 * equal[0].depth:,}"
        places = [curves.best_point(cell) for cell in equal]
        if None in places:
            told.append(f"nothing trained at {size}")
            inside.append(False)
            continue
        at = zip(equal, places, strict=True)
        log_loss = np.stack([np.log(cell.loss[:, i]) for cell, i in at], axis=1)
        vertices = [optima.parabola(np.log2(depths), row)[0] for row in log_loss]
        low, middle, high = 2 ** _interval(np.array(vertices))
        told.append(f"{middle:.1f} [{low:.1f}, {high:.1f}] at {size}")
        sure = True if min(depths) < low and high < max(depths) else None
        outside = int(log_loss.mean(axis=0).argmin()) in (0, len(depths) - 1)
        inside.append(False if outside else sure)
    panel = Panel(
        "Each at its best learning rate",
        "width² x depth",
        "training loss",
        lines,
        log_x=True,
        log_y=True,
    )
    ours = f"best depth by width² x depth, 95 %: {', '.join(told)}"
    return Drawing([panel], ours, curves.every(*inside))


def _interval(draws: np.ndarray) -> np.ndarray:
    """The mean of independent values and its 95 % interval, as (low, mean, high)."""
    wide = np.inf
    if len(draws) > 1:
        error = draws.std(ddof=1) / np.sqrt(len(draws))
        wide = float(stats.t.ppf(0.975, len(draws) - 1)) * error
    return draws.mean() + wide * np.array([-1.0, 0.0, 1.0])


def decided_early(data: SweepData) -> Drawing:
    """The best learning rate shows after a few epochs of twenty (Figure B.3)."""
    cells = curves.cells(data, "depth_mup")
    early = curves.at(cells, _SOON)
    pairs = list(zip(early, cells, strict=True))
    gaps = [_apart(*pair) for pair in pairs]
    ours = (
        f"after {_SOON:.0%} of the steps the optimum is "
        f"{', '.join(f'{gap:.2f}' for gap, _ in gaps)} octaves from where it ends, at "
        f"depths {', '.join(str(c.depth) for c in cells)} (agrees within ½)"
    )
    cell = cells[-1]
    best = curves.best_point(cell) or 0
    lines = [
        _curve(cell, i, f"rate 2^{cell.log2_lr[i]:g}", data.steps)
        for i in range(max(best - 2, 0), min(best + 3, len(cell.log2_lr)))
    ]
    panels = [
        Panel(f"Depth {cell.depth}", "step", "training loss", lines, log_y=True),
        curves.panel("After a quarter of the steps", early),
        curves.panel("At the end", cells),
    ]
    near = [curves.under(curves.Gap(gap, 1.645 * error), 0.5) for gap, error in gaps]
    return Drawing(panels, ours, curves.every(*near))


_SOON = 0.25


def _apart(one: Cell, other: Cell) -> tuple[float, float]:
    """Octaves between two optima and their error; infinite where either is missing."""
    first, last = (optima.optimum(cell) for cell in (one, other))
    fits = [optima.fit(cell) for cell in (one, other)]
    if first is None or last is None:
        return np.inf, 0.0
    grid = [fit.place_error for fit in fits if fit is not None]
    error = float(np.sqrt(np.sum(np.square([first.error, last.error, *grid]))))
    return abs(first.log2_lr - last.log2_lr), error


def long_branches(data: SweepData) -> Drawing:
    """Branches of 4 layers: only 1/L gains by each doubling, early on (M.1)."""
    keys = ("depth_mup", "ode")
    by_name = {key: curves.cells(data, key) for key in keys}
    early = {
        key: [curves.least(c) for c in curves.at(cells, _SOON)]
        for key, cells in by_name.items()
    }
    named = {
        _TITLES[key]: curves.move(cells, base=data.base)
        for key, cells in by_name.items()
    }
    told = {key: ", ".join(map(str, losses)) for key, losses in early.items()}
    ours = (
        f"after {_SOON:.0%} of the steps the best loss over depths is {told['ode']} "
        f"for 1/L and {told['depth_mup']} for 1/√L; {curves.told(named)}"
    )
    gains = {key: curves.falls_always(losses) for key, losses in early.items()}
    agrees = curves.every(gains["ode"], curves.opposite(gains["depth_mup"]))
    panels = [curves.panel(_TITLES[key], cells) for key, cells in by_name.items()]
    return Drawing(panels, ours, agrees)


def _curve(cell: Cell, point: int, label: str, steps: int) -> Line:
    """The learning curve of a grid point, mean over seeds, as far as it goes."""
    spans = cell.curves.shape[-1]
    times = (np.arange(spans) + 0.5) * steps / spans
    mean = cell.curves[:, point].mean(axis=0)
    good = ~np.isnan(mean)
    return Line(label, times[good].tolist(), mean[good].tolist())

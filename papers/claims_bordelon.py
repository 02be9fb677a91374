"""From sweeps to the pictures and verdicts of Bordelon et al.

Whether an optimum stays is the verdict of `sweep.verdict`, as in `claims_tp6`.
"""

import jax
import numpy as np
from flax import nnx

from mupax import zoo
from mupax.experiments.report import SweepData
from mupax.experiments.sweep import optima
from mupax.experiments.sweep.regret import Regret, regret
from mupax.experiments.sweep.results import Cell
from mupax.experiments.sweep.verdict import SHARE, Transfer

from . import curves
from .registry import Drawing, Panel

_SOON = 0.25  # of the steps
_APART = 0.25  # of the base's range


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


def without_scaling(mup: SweepData, standard: SweepData) -> Drawing:
    """Neither SP nor μP keeps the optimum over depth (Figure B.2).

    At the base's width both are the same: there is one panel of depths.
    """
    depth = curves.judge(mup, "mup")
    widths = {
        "SP over width": curves.judge(standard, "sp", "width"),
        "μP over width": curves.judge(mup, "mup", "width"),
    }
    panels = curves.panels({"Both over depth": depth})
    panels += curves.panels(widths, "width")
    ours = curves.describe({"both over depth": depth, **widths})
    return Drawing(panels, ours, curves.moves(depth))


def norm_is_not_enough(data: SweepData) -> Drawing:
    """With 1/√L a ResNet's optimum stays, with a norm alone it shifts more (Figure 2).

    The paper compares the consistency of curves: shifts are compared, not costs.
    """
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
    """A norm makes the optimum shift less, 1/√L less still (Figures B.4 and B.5)."""
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
    first, last = (curves.least(transfer.cells[i]) for i in (0, -1))
    if not len(first.log_loss) or not len(last.log_loss):
        return curves.Least(np.empty(0))
    slip = float(np.hypot(first.slip, last.slip))
    return curves.Least(last.log_loss - first.log_loss, slip)


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
    share, agrees = _difference(log_loss)
    ours = (
        "log loss against weight decay: curves of different depths lie within "
        f"{share:.0%} of the base's range (agrees if surely below {_APART:.0%})"
    )
    panels = [curves.panel("Each at its best learning rate", cells)]
    for cell in (cells[0], cells[-1]):
        runs = [(f"λ = {2.0**x:g}", cell, at) for at, x in enumerate(cell.log2_lr)]
        panels.append(curves.learning_panel(f"Depth {cell.depth}", runs, data.steps))
    return Drawing(panels, ours, agrees)


def _difference(log_loss: np.ndarray) -> tuple[float, bool | None]:
    """How far curves lie from the base's, and whether that is below `_APART`.

    With d the difference of two curves at a decay, each less its value at the base's
    best decay, and r the base's range: the largest d / r, and whether both d - 0.25 r
    and -d - 0.25 r are negative at every decay. This divides by no noisy number. That
    one of them is positive is known if it is at 95 % for as many comparisons
    (Bonferroni).

    Args:
      log_loss: shape (depths, seeds, weight decays).
    """
    trained = log_loss[..., ~np.isnan(log_loss).any(axis=(0, 1))]
    if trained.shape[-1] < 2:
        return np.nan, None
    base = trained[0].mean(axis=0)
    best, worst = base.argmin(), base.argmax()
    rise = np.delete(trained - trained[..., [best]], best, axis=-1)
    span = (trained[0, :, worst] - trained[0, :, best])[:, None]
    apart = rise[1:] - rise[0]
    share = float(np.abs(apart.mean(axis=1)).max() / span.mean())
    excess = np.concatenate([apart - _APART * span, -apart - _APART * span])
    by_seed = excess.transpose(1, 0, 2).reshape(len(span), -1)
    count = by_seed.shape[1]
    below = [curves.over_seeds(seeds).negative for seeds in by_seed.T]
    above = [curves.over_seeds(seeds, count).negative is False for seeds in by_seed.T]
    if any(above):
        return share, False
    return share, True if all(below) else None


def middle_depth(*sweeps: SweepData) -> Drawing:
    """At equal size neither the flattest nor the deepest model is best (B.1).

    Each of the three sweeps has one depth; its widths give about the same numbers of
    parameters as in the other sweeps.
    """
    by_sweep = [curves.cells(data, "depth_mup", "width") for data in sweeps]
    counts = [
        [parameters(data, cell.width, cell.depth) for cell in cells]
        for data, cells in zip(sweeps, by_sweep, strict=True)
    ]
    sizes = [f"{min(n):,} to {max(n):,} parameters" for n in zip(*counts, strict=True)]
    losses = [[curves.least(cell) for cell in cells] for cells in by_sweep]
    depths = [cells[0].depth for cells in by_sweep]
    by_size = dict(zip(sizes, zip(*losses, strict=True), strict=True))
    words = [f"{', '.join(map(str, row))} at {size}" for size, row in by_size.items()]
    lines = [
        curves.least_line(size, dict(zip(depths, row, strict=True)))
        for size, row in by_size.items()
    ]
    title = sizes[0] if len(sizes) == 1 else "Each at its best learning rate"
    flat, middle, deep = losses
    return Drawing(
        [Panel(title, "depth", "training loss", lines, log_x=True)],
        f"loss of depths {', '.join(map(str, depths))}: {'; '.join(words)}",
        curves.conjunction(*curves.lower(2 * middle, flat + deep)),
    )


def parameters(data: SweepData, width: int, depth: int) -> int:
    """The number of parameters of a sweep's CNN at a width and a depth."""
    config = data.settings["config"]
    options = {**config["model"], "width": width, "depth": depth}
    pixels = config["data"]["image_size"]

    def made() -> nnx.Module:
        shape = (pixels, pixels, 3)
        return zoo.create(**options, input_shape=shape, rngs=nnx.Rngs(0))

    leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(made), nnx.Param))
    return sum(leaf.size for leaf in leaves)


def decided_early(data: SweepData) -> Drawing:
    """The best learning rate shows after a few epochs of twenty (Figure B.3)."""
    cells = curves.cells(data, "depth_mup")
    early = curves.after(cells, _SOON)
    fits = [fit for cell in cells if (fit := optima.fit(cell)) is not None]
    trained = len(fits) == len(cells)  # at every depth
    costs = [
        regret(fits, i, best.log2_lr) if trained and best is not None else None
        for i, best in enumerate(map(optima.optimum, early))
    ]
    ours = (
        f"at the end, the optimum after {_SOON:.0%} of the steps costs "
        f"{', '.join(cost.words if cost else 'an unknown share' for cost in costs)} of "
        f"the loss at depths {', '.join(str(c.depth) for c in cells)} (agrees below "
        f"{SHARE:.0%})"
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
    return Drawing(panels, ours, curves.conjunction(*map(_costs_little, costs)))


def _costs_little(cost: Regret | None) -> bool | None:
    """Whether a regret is below `SHARE`, at the 5 % level; None where unknown."""
    if cost is None or cost.low <= SHARE <= cost.high:
        return None
    return cost.high < SHARE


def long_branches(data: SweepData) -> Drawing:
    """Branches of 4 layers: early on, depth helps with 1/L and harms with 1/√L (M.1).

    Both use the base's best learning rate. Early is the first quarter of the steps.
    """
    transfers = {
        "1/√L (SDE)": curves.judge(data, "depth_mup"),
        "1/L (ODE)": curves.judge(data, "ode"),
    }
    rate = curves.best_point(next(iter(transfers.values())).cells[0])
    root, ode = (
        [_early(cell, rate) for cell in transfer.cells]
        for transfer in transfers.values()
    )
    ours = (
        f"mean loss of the first {_SOON:.0%} of the steps, over depths: "
        f"{', '.join(map(str, ode))} with 1/L, {', '.join(map(str, root))} with 1/√L; "
        f"at the end: {curves.describe(transfers)}"
    )
    agrees = curves.conjunction(
        curves.falls_always(ode), curves.falls_always(root[::-1])
    )
    panels = [
        curves.learning_panel(
            f"{title}, base's best rate",
            [(f"depth {c.depth}", c, rate) for c in transfer.cells],
            data.steps,
        )
        for title, transfer in transfers.items()
    ]
    return Drawing(panels + curves.panels(transfers), ours, agrees)


def _early(cell: Cell, point: int | None) -> curves.Least:
    """Each seed's log of the mean loss of the first steps, at one grid point."""
    if point is None:
        return curves.Least(np.empty(0))
    spans = round(_SOON * cell.curves.shape[-1])
    losses = cell.curves[:, point, :spans].mean(axis=-1)
    diverged = np.isnan(losses).any()
    return curves.Least(np.empty(0) if diverged else np.log(losses))

"""The summaries in papers/evidence.md: numbers of several tables side by side."""

import csv
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mupax.experiments.errors import UserError
from mupax.experiments.report import sentences
from mupax.experiments.sweep import grids, optima
from mupax.experiments.sweep.results import Cell, Population, Sizes
from mupax.experiments.sweep.verdict import Transfer, transfer

from . import curves, tables

_RATE, _MULTIPLIER = "learning_rate", "branch_multiplier"
_NAMES = {1 / 16: "1/16", 1 / 8: "⅛", 1 / 4: "¼", 1 / 2: "½", 1.0: "1", 2.0: "2"}


def sections(data: pathlib.Path) -> dict[str, str]:
    """The generated summaries of papers/evidence.md, by the name in their markers.

    Args:
      data: the folder of the tables, papers/data.

    Raises:
      UserError: a table is missing or cannot be read.
    """
    read = functools.cache(functools.partial(_read, data))
    return {
        "branch multiplier": multipliers(read),
        "branch multiplier and learning rate": multiplier_grid(read),
        "drift": drift(read),
        "batch size": batch_sizes(read),
        "batch size during training": during_training(read),
        "length": lengths(read),
        "joint": joint(data / "joint.csv"),
    }


Read = Callable[[str], tables.Table]


def _read(data: pathlib.Path, name: str) -> tables.Table:
    table = tables.read(data / f"{name}.csv")
    if table is None:
        raise UserError(
            f"{data / name}.csv is missing: a summary in evidence.md needs it"
        )
    return table


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = (f"| {' | '.join(line)} |" for line in (head, *rows))
    first, *rest = lines
    return "\n".join([first, f"|{'---|' * len(head)}", *rest])


def _loss(value: float) -> str:
    """A loss to four digits, or to three below 1."""
    if not math.isfinite(value):
        return "diverged"
    return f"{value:.3f}" if value >= 1 else f"{value:.3g}"


def _number(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _percent(share: float) -> str:
    text = f"{100 * share:+.0f} %"
    return "0 %" if text[1:] == "0 %" else text.replace("-", "−")


# ----- The branch multiplier of the base.

_BASES = (
    "laptop/one-relu-base",
    "laptop/one-relu-both",
    "medium/one-relu-base",
    "medium/one-relu-both",
    "long/one-relu-early",
    "long/one-relu-base",
    "long/one-relu-both",
    "laptop/features-base",
    "medium/features-base",
    "wide/one-relu-early",
)
_KEPT = 1 / 4  # the branch multiplier of `resmlp_sweep`


def multipliers(read: Read) -> str:
    """The least loss at each branch multiplier of the base."""
    head = ("runs", "steps", "width, pixels", "seeds")
    rows = []
    for name in _BASES:
        table = read(name)
        base, least = _base(table), _least(table)
        cell = base.cell(_MULTIPLIER)
        best, fit = optima.optimum(cell), optima.fit(cell)
        assert best is not None
        assert fit is not None
        scale, sweep = name.split("/")
        pixels = table.facts["settings"]["data"]["image_size"]
        low = min(least.values())
        fitted = "at the edge" if fit.at_edge else f"{2**best.log2_lr:.2f}"
        rows.append(
            [
                f"[{sweep}, {scale}](#{sweep}-{scale})",
                f"{table.data.steps:,}",
                f"{base.width}, {pixels} x {pixels}",
                str(len(base.loss)),
                *(_bold(least.get(a), low) for a in _NAMES),
                fitted,
                f"{100 * (least[_KEPT] / low - 1):.2f} %",
            ]
        )
    return markdown([*head, *_NAMES.values(), "fitted best a", "¼ over the best"], rows)


def _base(table: tables.Table) -> Population:
    """The base's runs of Depth-μP."""
    return table.data.at_base("depth_mup")


def _grid(runs: Population) -> np.ndarray:
    """Geometric mean over seeds, shape (branch multipliers, learning rates).

    NaN where a seed diverged.
    """
    axes = list(runs.axes)
    mean = np.exp2(np.log2(runs.loss).mean(axis=0))
    return np.transpose(mean, (axes.index(_MULTIPLIER), axes.index(_RATE)))


def _least(table: tables.Table) -> dict[float, float]:
    """The loss of the base at the best learning rate of each branch multiplier."""
    base = _base(table)
    least = np.nanmin(_grid(base), axis=1)
    return dict(zip(base.axes[_MULTIPLIER], map(float, least), strict=True))


def _bold(value: float | None, least: float) -> str:
    if value is None:
        return ""
    return f"**{value:.4f}**" if value == least else f"{value:.4f}"


def multiplier_grid(read: Read) -> str:
    """The loss of the base over branch multiplier and learning rate."""
    base = _base(read("medium/one-relu-base"))
    mean = _grid(base)
    least = np.nanmin(mean)
    rows = [
        [_NAMES[a], *(f"**{_loss(x)}**" if x == least else _loss(x) for x in row)]
        for a, row in zip(base.axes[_MULTIPLIER], mean, strict=True)
    ]
    rates = [f"2^{math.log2(x):g}" for x in base.axes[_RATE]]
    return markdown(["a", *rates], rows)


# ----- The drift of Depth-μP.

_DRIFTS = ("laptop/one-relu-both", "medium/one-relu-both", "long/one-relu-both")
_EDGE = "edge of the grid"


def drift(read: Read) -> str:
    """Shift of the best learning rate over depth at a fixed a, and its cost."""
    columns = [read(name) for name in _DRIFTS]
    heads = []
    for table in columns:
        depths = [p.depth for p in _over_depth(table)]
        heads.append(f"{table.data.steps:,} steps, depths {depths[0]} to {depths[-1]}")
    judged = {
        a: [_drift(table, a) for table in columns]
        for a in sorted(_NAMES, reverse=True)
        if any(a in _base(table).axes[_MULTIPLIER] for table in columns)
    }
    base_depth = _base(columns[0]).depth
    shifts, costs = [], []
    for a, own in judged.items():
        first = [_NAMES[a], f"{a * a * base_depth:g}"]
        shifts.append([*first, *map(_shift, own)])
        costs.append([*first, *map(_cost, own)])
    tuned = [_drift(table, None) for table in columns]
    edges = [_tuned_at_edge(table) for table in columns]
    note = {True: f" (a at the {_EDGE})", False: ""}
    for rows, cell in ((shifts, _shift), (costs, _cost)):
        cells = [cell(t) + note[e] for t, e in zip(tuned, edges, strict=True)]
        rows.append(["best at each depth", "", *cells])
    head = ["a", "a²·base_depth"]
    shift = [*head, *(f"shift, {text}" for text in heads)]
    cost = [*head, *(f"cost, {text}" for text in heads)]
    return f"{markdown(shift, shifts)}\n\n{markdown(cost, costs)}"


def _over_depth(table: tables.Table) -> list[Population]:
    return table.data.along("depth_mup", "depth")


def _drift(table: tables.Table, multiplier: float | None) -> Transfer | None:
    """The verdict on the learning rate over depth at one a, or at the best ones."""
    runs = _over_depth(table)
    if multiplier is not None:
        if multiplier not in runs[0].axes[_MULTIPLIER]:
            return None
        runs = [p.at(_MULTIPLIER, multiplier) for p in runs]
    return transfer([p.cell() for p in runs], "depth", table.data.base.depth)


def _tuned_at_edge(table: tables.Table) -> bool:
    """Whether the best a of some depth is an end of its grid."""
    for runs in _over_depth(table):
        values = runs.axes[_MULTIPLIER]
        if runs.best()[_MULTIPLIER] in (values[0], values[-1]):
            return True
    return False


def _shift(judged: Transfer | None) -> str:
    if judged is None:
        return ""
    return _EDGE if judged.at_edge else sentences.shift(judged)


def _cost(judged: Transfer | None) -> str:
    if judged is None:
        return ""
    if judged.at_edge or judged.regret is None:
        return _EDGE
    return judged.regret.words


# ----- Batch size and length, without and with the rule.

_DATA = {"cnn": "CNN", "text": "GPT", "digits": "digits"}
_SIDES = {"": "without the rule", "-rule": "with the rule"}


def batch_sizes(read: Read) -> str:
    """Best learning rates, and losses at the base's best, over batch sizes."""
    rates, losses, costs = [], [], []
    sizes = [str(2**n) for n in range(4, 10)]
    for key, name in _DATA.items():
        at_base = []
        for side, label in _SIDES.items():
            judged = _over(read, key, "batch", side)
            row = f"{name}, {label}"
            rates.append([row, *_spread(judged, sizes, map(_number, _optima(judged)))])
            at_base.append(curves.at_base_best(judged))
            losses.append([row, *_spread(judged, sizes, map(_loss, at_base[-1]))])
            costs.append([row, sentences.shift(judged), judged.words])
        change = [
            _percent(b / a - 1) for a, b in zip(at_base[0], at_base[1], strict=True)
        ]
        losses.append([f"{name}, change by the rule", *_spread(judged, sizes, change)])
    base = judged.size_text(judged.base)
    first = markdown(["log2 of the best learning rate, at batch size", *sizes], rates)
    second = markdown(
        [f"training loss at the best learning rate of {base}", *sizes], losses
    )
    return "\n\n".join([first, second, _verdicts(costs)])


def lengths(read: Read) -> str:
    """The same over the number of steps at one batch size."""
    rates, losses, costs = [], [], []
    for (key, name), (side, label) in itertools.product(_DATA.items(), _SIDES.items()):
        judged = _over(read, key, "length", side)
        row = f"{name}, {label}"
        rates.append([row, *map(_number, _optima(judged))])
        losses.append([row, *map(_loss, curves.at_base_best(judged))])
        costs.append([row, sentences.shift(judged), judged.words])
    steps = [f"{size:,}" for size in judged.sizes]
    base = judged.size_text(judged.base)
    first = markdown(["log2 of the best learning rate, at steps", *steps], rates)
    second = markdown(
        [f"training loss at the best learning rate of {base}", *steps], losses
    )
    return "\n\n".join([first, second, _verdicts(costs)])


def _verdicts(rows: Sequence[Sequence[str]]) -> str:
    head = ("", "octaves per doubling", "keeping the base's best learning rate")
    return markdown(head, rows)


def _over(read: Read, key: str, over: str, side: str) -> Transfer:
    """The verdict of a sweep over batch size or steps."""
    (judged,) = read(f"laptop/{key}-{over}{side}").data.shown
    return judged


def _optima(judged: Transfer) -> list[float]:
    return [math.nan if x is None else x for x in judged.optima]


def _spread(judged: Transfer, sizes: Sequence[str], texts: Iterable[str]) -> list[str]:
    """A text for each of `sizes`; "" for those that were not swept."""
    own = dict(zip(map(str, judged.sizes), texts, strict=True))
    return [own.get(size, "") for size in sizes]


_AT = 256  # batch size
_SHARES = [i / 10 for i in range(1, 11)]


def during_training(read: Read) -> str:
    """Loss with the batch-size rule over loss without, during training."""
    rows = []
    for key, name in _DATA.items():
        sides = []
        for side in _SIDES:
            judged = _over(read, key, "batch", side)
            cell = judged.cells[judged.sizes.index(_AT)]
            spans = [curves.after([cell], share)[0] for share in _SHARES]
            sides.append(curves.at_base_best(judged, spans))
        ratios = [b / a for a, b in zip(*sides, strict=True)]
        rows.append([name, *(f"{ratio:.2f}" for ratio in ratios)])
    head = f"loss with the rule over loss without, at batch size {_AT}, after"
    return markdown([head, *(f"{share:.0%}" for share in _SHARES)], rows)


# ----- Width, depth, batch size and length together.

# The models of benchmarks/joint.py.
JOINT = {"base": Sizes(32, 2), "target": Sizes(64, 8)}


def joint(path: pathlib.Path) -> str:
    """Losses of a base and of a target that differs from it in every size.

    Raises:
      UserError: the table cannot be read, or lacks runs.
    """
    try:
        with path.open() as file:
            rows = list(csv.DictReader(file))
        cells = [_joint_cell(rows, run) for run in JOINT]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} cannot be read, or lacks runs ({type(error).__name__}: {error}); "
            "run: python -m benchmarks.joint --dataset text:FILE"
        ) from None
    lines = [
        [f"2^{rate:g}", *(f"{c.loss[:, i].mean():.3f}" for c in cells)]
        for i, rate in enumerate(cells[0].log2_lr)
    ]
    judged = transfer(cells, "joint")
    best = " and ".join(f"2^{x:.2f}" for x in _optima(judged))
    table = markdown(["learning rate", "base, loss", "target, loss"], lines)
    return (
        f"{table}\n\nBest: {best}. The base's best rate at the target: {judged.words}."
    )


def _joint_cell(rows: Sequence[dict[str, str]], run: str) -> Cell:
    """The runs of the base or of the target, every seed at every learning rate."""
    losses = {
        (int(row["seed"]), int(row["log2_lr"])): float(row["train_loss"])
        for row in rows
        if row["run"] == run
    }
    seeds, rates = (sorted(set(own)) for own in zip(*losses, strict=True))
    loss = np.array([[losses[seed, rate] for rate in rates] for seed in seeds])
    grid = np.array([grids.coordinate(_RATE, 2.0**rate) for rate in rates])
    return Cell("completep", *JOINT[run], grid, loss, loss[..., None], 0.0)

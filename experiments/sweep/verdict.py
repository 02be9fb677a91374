"""Whether a hyperparameter transfers: the one verdict, for tables, figures and docs.

The verdict depends on the cost. The value that is best at the base is used at the
largest size of an axis, and the regret there is the share of the loss that this gives
up. The hyperparameter *transfers* if the upper 95 % bound of the regret lies below
`SHARE`. It *does not transfer* if the lower 95 % bound lies above it, or if the
largest size diverges at the base's value. In between the sweep cannot tell. Then the
bounds that more seeds would give, if means and variances stay, say how many seeds
decide (`Transfer.seeds_needed`), or that the error of the grid is the larger one.

Nor does it transfer if, at the base's value, seeds of the largest size end no better
than guessing, which they do at another value: such a network is dead. Its loss is that
of chance whatever the others reach, so a mean over seeds and its interval, which take
the losses to be normal, say little.

`SHARE` is 1 % of the loss, whatever the loss and however much seeds differ.
With the compute exponent 0.05 of language models (Kaplan et al., arXiv 2001.08361,
eq. 1.3) about 20 % more compute buys 1 % of the loss (1.01^20 = 1.22). Retuning costs
at least one more training of the large model, which is 100 % more compute.

The shift of the optimum per doubling of the size (`Trend`) does not decide the verdict.
In a flat valley the optimum and its shift are uncertain, but the regret is small and
well known.
"""

import bisect
import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import grids
from .optima import fit, optimum
from .regret import Regret, percent, regret
from .results import Cell
from .statistics import Trend, trend

SHARE = 0.01
MOST_SEEDS = 100


class Verdict(enum.StrEnum):
    """Whether the best value of a hyperparameter can be used at the largest size."""

    TRANSFERS = "transfers"
    COSTS = "does not transfer"
    DIVERGES = "diverges"  # the largest size, at the base's best value
    DIES = "learns nothing"  # the same, with some seeds
    FAILS = "nothing trained"  # at some size, with every seed
    EDGE = "wider grid needed"  # the optimum may lie outside the grid
    GRID = "finer grid needed"
    SEEDS = "more seeds needed"
    ONE_SIZE = "not swept"

    @property
    def known(self) -> bool | None:
        """True where it transfers, False where it does not, None where unknown."""
        if self is Verdict.TRANSFERS:
            return True
        no = (Verdict.COSTS, Verdict.DIVERGES, Verdict.DIES, Verdict.FAILS)
        return False if self in no else None


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The verdict on one hyperparameter along one axis of size, and its numbers."""

    axis: str  # "depth", "width", "joint" (width times depth), "batch size" or "steps"
    cells: tuple[Cell, ...]  # small to large
    base: int  # index of the size whose best value is used at the largest
    trend: Trend  # the line through the optima
    regret: Regret | None  # of the base's best value at the largest size, where known
    at_base: Regret | None  # of the same value at the base: how well it is known
    at_edge: tuple[int, ...]  # sizes whose best grid point is an end of the grid
    failed: tuple[int, ...]  # sizes at which no value trained with every seed
    # Seeds of the largest size that learn nothing at the base's best value, but at
    # another; those of the base are subtracted.
    dead: int

    @property
    def name(self) -> str:
        """The hyperparameter."""
        return self.cells[0].axis

    @property
    def key(self) -> str:
        """The parametrization, with its choices."""
        return self.cells[0].parametrization

    @property
    def over(self) -> str:
        """The axis in a sentence: "depth", "width and depth"."""
        return "width and depth" if self.axis == "joint" else self.axis

    @property
    def sizes(self) -> tuple[int, ...]:
        """Widths, depths, batch sizes or steps, rising; of "joint", the products."""
        return self.trend.sizes

    @property
    def optima(self) -> tuple[float | None, ...]:
        """`grids.coordinate` of the best value at each size; None: nothing trained."""
        return self.trend.optima

    @property
    def least(self) -> float | None:
        """Least loss of the largest size; None where nothing trained."""
        if self.regret is not None:
            return self.regret.least
        best = optimum(self.cells[-1])
        return None if best is None else best.loss

    @property
    def seeds(self) -> int:
        """Seeds of the largest size."""
        return len(self.cells[-1].loss)

    @functools.cached_property
    def verdict(self) -> Verdict:
        """The verdict."""
        if len(self.cells) < 2:
            return Verdict.ONE_SIZE
        if self.failed:
            return Verdict.FAILS
        ends = {self.sizes[self.base], self.sizes[-1]}
        edge = ends.intersection(self.at_edge)
        if edge == ends:
            return Verdict.EDGE
        cost, at_base = self.regret, self.at_base
        if cost is None or at_base is None:
            grid, best = self.cells[-1].log2_lr, self.optima[self.base]
            inside = best is not None and grid.min() <= best <= grid.max()
            return Verdict.DIVERGES if inside else Verdict.EDGE
        if self.sizes[self.base] in edge:  # a better value may cost less
            return Verdict.EDGE
        judged = self._judged(self.seeds)
        if judged is Verdict.COSTS:
            return judged
        if self.dead:
            return Verdict.DIES
        if edge and math.isfinite(cost.high):
            return Verdict.EDGE
        if judged is not None:
            return judged
        if self.seeds_needed is None:  # unless seeds halve the error, the grid matters
            left = cost.expected(MOST_SEEDS).high - cost.share
            return Verdict.GRID if 2 * left > cost.high - cost.share else Verdict.SEEDS
        return Verdict.SEEDS

    def _judged(self, seeds: int) -> Verdict | None:
        """Whether it transfers, if so many seeds give the same means and variances.

        None if they could not tell.
        """
        if seeds < 2 or self.regret is None or self.at_base is None:
            return None
        cost, at_base = self.regret.expected(seeds), self.at_base.expected(seeds)
        # A badly tuned base costs at every size, which is no failure to transfer:
        # either the optimum surely moves, or the cost exceeds that at the base.
        low, high = self.trend.expected(seeds / self.seeds)
        if cost.low > SHARE and (low > 0 or high < 0 or cost.low > at_base.high):
            return Verdict.COSTS
        return Verdict.TRANSFERS if cost.high < SHARE else None

    @functools.cached_property
    def seeds_needed(self) -> int | None:
        """About how many seeds decide whether it transfers, where they do not yet.

        None if `MOST_SEEDS` do not. 3 after one seed, which does not show how much
        seeds differ.
        """
        if self.seeds == 1:
            return 3
        if self.seeds >= MOST_SEEDS or not self._judged(MOST_SEEDS):
            return None
        few = range(self.seeds + 1, MOST_SEEDS + 1)
        return few[bisect.bisect_left(few, True, key=lambda n: bool(self._judged(n)))]

    @property
    def ends(self) -> dict[str, list[str]]:
        """The sizes whose optimum lies at the "lower" or "upper" end of the grid.

        Of the base and of the largest size.
        """
        ends: dict[str, list[str]] = {}
        for i in (self.base, len(self.sizes) - 1):
            if end := self._end(i):
                ends.setdefault(end, []).append(self.size_text(i))
        return ends

    def _end(self, index: int) -> str:
        """The end of the grid at which a size's optimum lies; "" if it is inside."""
        best, grid = self.optima[index], self.cells[index].log2_lr
        if best is None or self.sizes[index] not in self.at_edge:
            return ""
        return "lower" if 2 * best < grid.min() + grid.max() else "upper"

    @property
    def moved(self) -> str:
        """The change of the best value, e.g. "falls 1.3x"; "" if it is not known.

        "or more" follows where the grid ends before the best value, on this side.
        """
        change = self.trend.change if len(self.sizes) > 1 else math.nan
        if not math.isfinite(change):
            return ""
        ends = ("lower", "upper") if change > 0 else ("upper", "lower")
        cut = self._end(0) == ends[0] or self._end(-1) == ends[1]
        words = grids.moves(self.name, change).removeprefix("is ")
        return words + " or more" * (cut and words != "unchanged")

    def size_text(self, index: int = -1) -> str:
        """One of the sizes: "depth 64", "1600 steps", or "width 64, depth 8"."""
        if self.axis == "joint":
            cell = self.cells[index]
            return f"width {cell.width}, depth {cell.depth}"
        if self.axis == "steps":
            return f"{self.sizes[index]} steps"
        return f"{self.axis} {self.sizes[index]}"

    @property
    def cost(self) -> str:
        """The cost in a few words: "at most 0.6% of the loss"; "" where not known."""
        regret = self.regret
        if regret is None:
            return ""
        if self.verdict is Verdict.TRANSFERS:
            return f"at most {percent(regret.high)} of the loss"
        return f"{regret.words} of the loss"

    @property
    def at_most(self) -> str:
        """What the base's value costs at most, if seeds would not judge it; or ""."""
        regret = self.regret
        if self.verdict is not Verdict.SEEDS or self.seeds_needed or regret is None:
            return ""
        if regret.high >= 1:  # a bound above the whole loss says nothing
            return ""
        return f"at most {percent(regret.high)} of the loss"

    @property
    def reason(self) -> str:
        """Why it does not transfer, or why there is no verdict; "" if it transfers."""
        return self._explanation[0]

    @property
    def remedy(self) -> str:
        """What to do next, as an order; "" if nothing."""
        return self._explanation[1]

    @functools.cached_property
    def _explanation(self) -> tuple[str, str]:
        """`reason` and `remedy` of each verdict."""
        noun, at = grids.noun(self.name), self.size_text()
        where = "size" if self.axis == "joint" else self.axis
        again = f"tune the {noun} again at the large size"
        match self.verdict:
            case Verdict.TRANSFERS:
                return "", ""
            case Verdict.COSTS:
                share = percent(self.regret.share) if self.regret else ""
                return f"costs {share} of the loss at {at}", again
            case Verdict.DIVERGES:
                return f"diverges at {at}", again
            case Verdict.DIES:
                many = f"{self.dead} of {self.seeds} seeds"
                many = many if self.seeds > 1 else "the only seed"
                verb = "learn" if self.dead > 1 else "learns"
                return f"{many} {verb} nothing at {at}", again
            case Verdict.FAILS:
                sizes = [self.size_text(self.sizes.index(x)) for x in self.failed]
                remedy = f"sweep other values of the {noun}, at which every size trains"
                return f"nothing trained at {listed(sizes)}", remedy
            case Verdict.EDGE if not self.ends:
                remedy = f"sweep the same values of the {noun} at every size"
                return "the base's best value lies outside the grid", remedy
            case Verdict.EDGE:
                ends = [
                    f"the {end} end of the grid at {listed(at)}"
                    for end, at in self.ends.items()
                ]
                return f"the best value lies at {listed(ends)}", self._wider
            case Verdict.GRID:
                remedy = f"halve the distance between the values of the {noun}"
                return "finer grid needed", remedy
            case Verdict.SEEDS:
                many = f"more than {MOST_SEEDS}"
                if self.seeds_needed:
                    about = "about" if self.seeds > 1 else "at least"
                    many = f"{about} {self.seeds_needed}"
                remedy = f"use {many} seeds instead of {self.seeds}"
                if self.at_most:
                    remedy = f"keep the base's {noun}, which costs {self.at_most}, or "
                    remedy += f"use {many} seeds"
                if self.ends:
                    remedy += f", and {self._wider}"
                return f"{many} seeds needed", remedy
            case Verdict.ONE_SIZE:
                return f"one {where} only", f"sweep two or more {where}s"

    @property
    def _wider(self) -> str:
        """The order to extend the grid at `ends`."""
        grid = np.concatenate([cell.log2_lr for cell in self.cells])
        ends = {"lower": ("below", grid.min()), "upper": ("above", grid.max())}
        beyond = [
            f"{side} {grids.text(self.name, float(x))}"
            for side, x in (ends[end] for end in self.ends)
        ]
        return f"extend the grid of the {grids.noun(self.name)} {listed(beyond)}"

    @property
    def words(self) -> str:
        """The verdict, its cost and its reason, in a few words."""
        known = self.cost and len(self.cells) > 1
        cost = f"costs {self.cost} at {self.size_text()}" if known else ""
        match self.verdict:
            case Verdict.TRANSFERS | Verdict.COSTS:
                return f"{self.verdict}: {cost}"
            case Verdict.DIVERGES | Verdict.DIES | Verdict.FAILS:
                return f"does not transfer: {self.reason}"
            case Verdict.ONE_SIZE:
                return f"{self.verdict} ({self.reason})"
        return f"cannot tell ({self.reason})" + (f": {cost}" if cost else "")

    @property
    def change_words(self) -> str:
        """How far the best value moves: "grows 1.3x over depth 4 to 64".

        "" if nothing trained at some size.
        """
        if not self.moved:
            return ""
        over = f"from {self.size_text(0)} to {self.size_text()}"
        if self.axis != "joint":
            over = f"over {self.axis} {self.sizes[0]} to {self.sizes[-1]}"
        return f"{self.moved} {over}"

    def to_json(self) -> dict[str, Any]:
        """The verdict and its numbers as JSON-ready data.

        "regret" holds shares of the loss: "share", its 90 % "interval" and what is
        "allowed"; "of" is the base's size and "at" the largest.
        """
        cost = self.regret
        sizes: list[Any] = list(self.sizes)
        if self.axis == "joint":
            sizes = [[c.width, c.depth] for c in self.cells]
        return {
            "sizes": sizes,
            "optimum": [None if o is None else round(o, 3) for o in self.optima],
            "at_edge": list(self.at_edge),
            "unit": grids.unit(self.name),
            "shift_per_doubling": _number(self.trend.slope),
            "interval": [_number(x) for x in self.trend.interval],
            "regret": None
            if cost is None
            else {
                "of": sizes[self.base],
                "at": sizes[-1],
                "share": _number(cost.share),
                "interval": [_number(cost.low), _number(cost.high)],
                "allowed": SHARE,
                "loss": _number(cost.least),
            },
            "verdict": self.verdict,
            "words": self.words,
            "change": self.change_words,
        }


def transfer(
    cells: Sequence[Cell],
    axis: str,
    base: int | None = None,
    sizes: Sequence[int] | None = None,
) -> Transfer:
    """Judge one hyperparameter along one axis.

    Args:
      cells: the runs of one parametrization, small to large.
      axis: "depth", "width" or "joint" (sizes are width times depth); any name if
        `sizes` are given.
      base: the size that is tuned; by default, or if it is the largest, the smallest.
      sizes: the sizes of the cells if something else than the model grows.

    Examples:
      >>> import numpy as np
      >>> grid, seeds = np.arange(-10.0, -4.0), np.array([[0.0], [0.01]])
      >>> def cell(depth, best):
      ...     loss = np.exp2(0.05 * (grid - best) ** 2 + seeds)
      ...     return Cell("p", 64, depth, grid, loss, loss[..., None], 0.0)
      >>> judged = transfer([cell(8, -7), cell(16, -7), cell(32, -7.1)], "depth")
      >>> judged.words
      'transfers: costs at most 0.16% of the loss at depth 32'
      >>> judged.change_words
      'falls 1.07x over depth 8 to 32'
    """
    if axis == "joint":
        sizes = [c.width * c.depth for c in cells]
    line = trend(cells, sizes or [getattr(c, axis) for c in cells])
    at = line.sizes.index(base) if base in line.sizes[:-1] else 0
    fits = [fit(cell) for cell in cells]
    fitted_sizes = list(zip(line.sizes, fits, strict=True))
    trained = [fitted for fitted in fits if fitted is not None]
    cost = at_base = None
    dead = 0
    if len(trained) == len(fits):
        best = trained[at].optimum
        cost, at_base = (regret(trained, i, best) for i in (len(trained) - 1, at))
        dead = max(0, _dead(cells[-1], best) - _dead(cells[at], best))
    return Transfer(
        axis,
        tuple(cells),
        at,
        line,
        cost,
        at_base,
        tuple(size for size, fitted in fitted_sizes if fitted and fitted.at_edge),
        tuple(size for size, fitted in fitted_sizes if fitted is None),
        dead,
    )


def _dead(cell: Cell, value: float) -> int:
    """How many seeds learn nothing at the grid point nearest to a value.

    They end at most 0.1 % better than guessing there, and at least 10 % better at some
    other grid point. 0 where the loss of guessing is not known.
    """
    if cell.guess is None:
        return 0
    at = int(np.abs(np.asarray(cell.log2_lr) - value).argmin())
    least = np.fmin.reduce(cell.loss, axis=1)  # NaN where every run diverged
    dead = (cell.loss[:, at] > 0.999 * cell.guess) & (least < 0.9 * cell.guess)
    return int(dead.sum())


def listed(items: Sequence[object]) -> str:
    """ "4", "4 and 8", "4, 8 and 16"."""
    texts = [str(i) for i in items]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)

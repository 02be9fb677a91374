"""Whether features are diverse: from the numbers of `features` to drawings."""

import itertools
from collections.abc import Sequence

import numpy as np

from . import curves
from .features import ACTIVATIONS, LAWS
from .numbers import Numbers
from .registry import Drawing, Line, Panel

_DIVERSE = 0.4  # our tolerance for κ = ½
_TITLES = {"depth_mup": "Depth-μP", "ode": "ODE", "relu": "ReLU", "abs": "|x|"}


class Kappas(Numbers):
    """The numbers of `features`, whose docstring names the columns."""

    @property
    def depths(self) -> list[int]:
        return self.distinct("depth")

    @property
    def steps(self) -> list[int]:
        return self.distinct("steps")

    @property
    def best(self) -> float:
        """The base's best block multiplier: the only one of the deepest networks."""
        deepest = self.where(depth=self.depths[-1])
        (best,) = set(deepest.having("multiplier")["multiplier"])
        return float(best)

    def of(self, column: str, network: str, **place: float) -> Numbers:
        """The rows of a network that have a column."""
        return self.where(network=network, **place).having(column)

    def at_best(self, network: str, **place: float) -> Numbers:
        """κ of a network at the best multiplier."""
        return self.of("kappa", network, multiplier=self.best, **place)

    def intervals(self, rows: Numbers, column: str = "kappa") -> list[curves.Interval]:
        """The values of a column, each with its 95 % interval."""
        (seeds,) = self.distinct("seeds")
        numbers = zip(rows[column], rows["standard_error"], strict=True)
        return [curves.interval(*pair, seeds - 1) for pair in numbers]

    def interval(self, column: str, network: str, **place: float) -> curves.Interval:
        """The only value at a place."""
        (one,) = self.intervals(self.of(column, network, **place), column)
        return one

    def drawing(
        self, panels: Sequence[Panel], ours: str, *answers: bool | None
    ) -> Drawing:
        (width,), (seeds,) = self.distinct("width"), self.distinct("seeds")
        length = (
            f"{self.steps[-1]:,} steps, width {width}, depth "
            f"{', '.join(map(str, self.depths))}, {seeds} seeds, a = {self.best:g}"
        )
        agrees = curves.conjunction(*answers)
        return Drawing(panels, ours, agrees, length, seeds=seeds)


def diversity(numbers: Numbers) -> Drawing:
    """κ at growing depths, of Depth-μP and of the ODE (Figure 17)."""
    own = Kappas(numbers.rows)
    last = own.steps[-1]
    panels = [_shape_panel(own, name) for name in LAWS]
    at_best = {name: own.at_best(name, steps=last) for name in LAWS}
    lines = [_line(_TITLES[name], rows, "depth") for name, rows in at_best.items()]
    panels.append(_kappa("By depth", "depth", lines))
    first = {"depth": own.depths[0], "steps": last}
    lines = [
        _line(_TITLES[name], own.of("kappa", name, **first), "multiplier")
        for name in LAWS
    ]
    title = f"L = {own.depths[0]}, by multiplier"
    panels.append(_kappa(title, "block multiplier a", lines))
    deep, ode = map(own.intervals, at_best.values())
    ours = (
        f"κ from {_text(deep[0])} to {_text(deep[-1])} for Depth-μP (agrees above "
        f"{_DIVERSE}), from {_text(ode[0])} to {_text(ode[-1])} for the ODE (agrees if "
        "it falls)"
    )
    falls = [
        own.interval("rise", "ode", depth=b, from_depth=a).negative
        for a, b in itertools.pairwise(own.depths)
    ]
    return own.drawing(panels, ours, *_diverse(deep), *falls)


def diversity_in_time(numbers: Numbers) -> Drawing:
    """κ after more steps of training (Figure 18)."""
    own = Kappas(numbers.rows)
    shallow, deepest = own.depths[0], own.depths[-1]
    first, last = own.steps[0], own.steps[-1]
    panels = []
    for name in LAWS:
        lines = [
            _line(f"L = {n}", own.at_best(name, depth=n), "steps") for n in own.depths
        ]
        panels.append(_kappa(_TITLES[name], "steps", lines))
    end = own.interval("kappa", "ode", depth=deepest, steps=last)
    over_steps = own.interval("rise", "ode", depth=deepest, from_steps=first)
    over_depths = own.interval("rise", "ode", depth=deepest, from_depth=shallow)
    every = own.intervals(own.at_best("depth_mup"))
    least = min(every, key=lambda one: one.value)
    ours = (
        f"κ of the ODE is {_text(end)} at the end; it changes by "
        f"{_text(over_steps, '+.2f')} over steps and {_text(over_depths, '+.2f')} over "
        f"depths (agrees if both fall); that of Depth-μP falls to {_text(least)} "
        f"(agrees above {_DIVERSE})"
    )
    falls = over_steps.negative, over_depths.negative
    return own.drawing(panels, ours, *_diverse(every), *falls)


def absolute_value(numbers: Numbers) -> Drawing:
    """κ with |x| and with ReLU, under Depth-μP (Figure 19)."""
    own = Kappas(numbers.rows)
    panels = []
    for depth in own.depths:
        lines = [
            _line(_TITLES[name], own.at_best(name, depth=depth), "steps")
            for name in ACTIVATIONS
        ]
        panels.append(_kappa(f"L = {depth}", "steps", lines))
    panels.append(_gain_panel(own))
    gains = [
        own.interval(
            "gain", "abs", depth=own.depths[-1], multiplier=own.best, steps=step
        )
        for step in own.steps
    ]
    each = ", ".join(_text(gain, "+.3f") for gain in gains)
    steps = ", ".join(f"{step:,}" for step in own.steps)
    ours = (
        f"κ of |x| less κ of ReLU is {each} after {steps} steps at depth "
        f"{own.depths[-1]}"
    )
    answers = [curves.negation(gain.negative) for gain in gains]
    return own.drawing(panels, ours, *answers)


# ----- Panels.


def _shape_panel(own: Kappas, network: str) -> Panel:
    """d(ε)/√ε over its value at the first shared ε, as in the paper's Figure 18."""
    lines = []
    for depth in own.depths:
        rows = own.of("shape", network, depth=depth)
        line = rows["epsilon"], rows["shape"], rows["standard_error"]
        lines.append(Line(f"L = {depth}", *line))
    x = lines[0].x
    lines.append(Line("κ = ½", x, np.ones(len(x)), look="theory"))
    label = "|x(λ+ε) - x(λ)| / √ε, relative"
    return Panel(_TITLES[network], "ε", label, lines, log_x=True, log_y=True)


def _gain_panel(own: Kappas) -> Panel:
    """κ of |x| less κ of ReLU against the multiplier, after each of the steps."""
    lines = []
    for step in own.steps:
        rows = own.of("gain", "abs", depth=own.depths[0], steps=step)
        lines.append(_line(f"{step:,} steps", rows, "multiplier", "gain"))
    ends = lines[0].x[0], lines[0].x[-1]
    lines.append(Line("equal", ends, [0.0, 0.0], look="theory"))
    labels = "block multiplier a", "κ of |x| less κ of ReLU"
    title = f"L = {own.depths[0]}, by multiplier"
    return Panel(title, *labels, lines, log_x=True)


def _kappa(title: str, x_label: str, lines: list[Line]) -> Panel:
    ends = [min(lines[0].x), max(lines[0].x)]
    half = Line("½", ends, [0.5, 0.5], look="theory")
    return Panel(title, x_label, "κ as seen", [*lines, half], log_x=True)


def _line(label: str, rows: Numbers, over: str, column: str = "kappa") -> Line:
    order = np.argsort(rows[over])
    x, y, error = (rows[name][order] for name in (over, column, "standard_error"))
    return Line(label, x, y, error)


def _text(kappa: curves.Interval, form: str = ".2f") -> str:
    """E.g. "0.49 ± 0.01", with the standard error."""
    return f"{kappa.value:{form}} ± {kappa.error:{form.lstrip('+')}}"


def _diverse(kappas: Sequence[curves.Interval]) -> list[bool | None]:
    """Whether each κ is above the tolerance."""
    return [curves.negation(kappa.under(_DIVERSE)) for kappa in kappas]

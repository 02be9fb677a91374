"""The result of a coordinate check: slopes, their errors, verdicts and hints."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from scipy import special

from ..scales.display import Figures, html_table
from .activations import STREAM
from .coord_hints import Facts, Verdict, hints

# Exponents of width and depth are multiples of ½, so a |slope| below ¼ is nearer to
# zero than to the next exponent.
_HALFWAY = 0.25
# Chance that noise makes any layer of a check wrong; each layer's interval is 95 %.
_FALSE_ALARMS = 0.01
_INTERVAL = 0.05
# A few seeds estimate their own spread poorly, so the layers' median counts as this
# many further seeds (an empirical Bayes estimate of the variance; Smyth 2004).
_PRIOR = 4
# Slopes of depth of correct models of finite depth, which a mistake exceeds: it gives ½
# or more. Inside of branches both are larger, because norms in front divide by the
# stream, whose initial size falls towards its limit with depth.
_STREAM, _INNER = 0.45, 0.65


@dataclasses.dataclass(frozen=True, repr=False)
class CoordCheck:
    """Result of `coord_check`; print it for a table, a verdict and hints.

    Every layer gets a verdict from its slope and the slope's 95 % interval:

    - ok: the interval overlaps ±`tolerance` and lies within ±¼. Exponents are multiples
      of ½, so only zero remains.
    - wrong: the interval, widened for the number of layers, lies beyond ±¼, and so does
      the slope between the two largest sizes, with its own interval (beyond ±½ if
      slopes fade from small to large sizes); or the layer diverged.
    - unclear: neither. More seeds narrow the interval. Larger sizes remove effects of
      small models, and help where the interval is narrow, e.g. +0.18 ± 0.01.

    In depth, models of few layers have slopes of their own, up to ±0.45 where branch
    multipliers are large. So slopes below that are unclear rather than wrong; below
    0.65 for layers inside branches after which the stream does not grow with depth.
    Smaller branch multipliers or larger depths make a correct model pass.

    A layer that is zero at initialization is not judged if its slope is negative: its
    first changes are sums of terms of random signs, under every parametrization.

    Attributes:
      sizes: for each axis ("width", "depth") the sizes that were trained.
      changes: by axis and layer, the root mean square of the activation's change
        since initialization, of shape (sizes, steps, seeds).
      tolerance: the largest |slope| that counts as zero.
      facts: by axis, further measurements for the hints.
      own_loss: whether the loss is the user's own, rather than linear in the outputs.

    Source: Tensor Programs V (arXiv:2203.03466), appendix D.1.

    Examples:
      >>> import numpy as np
      >>> sizes = {"width": (64, 128, 256)}
      >>> change = np.array([[1.0, 2.0, 4.0]] * 2).T[:, None]  # sizes, steps, seeds
      >>> check = CoordCheck(sizes, {"width": {"readout": change}})
      >>> round(check.slopes["width"]["readout"], 6), check.failed
      (1.0, [('width', 'readout')])
      >>> check.verdict.value, check.passed
      ('wrong', False)
    """

    sizes: Mapping[str, tuple[int, ...]]
    changes: Mapping[str, Mapping[str, np.ndarray]]
    tolerance: float = 0.15
    facts: Mapping[str, Facts] = dataclasses.field(default_factory=dict)
    own_loss: bool = False

    @property
    def slopes(self) -> dict[str, dict[str, float]]:
        """By axis and layer, the slope of log |Δ activation| against log size.

        It belongs to the step whose slope is farthest from zero.
        """
        return self._each(lambda fit: fit.worst.slope)

    @property
    def by_step(self) -> dict[str, dict[str, list[float]]]:
        """By axis and layer, the slopes after each step; NaN before it changes."""
        return self._each(lambda fit: fit.slopes)

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """By axis and layer, the largest standard error of a slope over seeds."""
        return self._each(lambda fit: float(np.max([s.error for s in fit.steps])))

    @property
    def verdicts(self) -> dict[str, dict[str, Verdict]]:
        """By axis and layer, the verdict; layers that are not judged are left out."""
        return {
            axis: {
                layer: self._judge(axis, layer)
                for layer, fit in layers.items()
                if not self._starts_at_zero(axis, layer, fit)
            }
            for axis, layers in self.fits.items()
        }

    @property
    def verdict(self) -> Verdict:
        """The overall verdict: the worst verdict of any layer."""
        verdicts = [v for layers in self.verdicts.values() for v in layers.values()]
        for verdict in (Verdict.WRONG, Verdict.UNCLEAR):
            if verdict in verdicts:
                return verdict
        return Verdict.OK

    @property
    def failed(self) -> list[tuple[str, str]]:
        """List of (axis, layer) whose verdict is wrong."""
        return self._with(Verdict.WRONG)

    @property
    def unclear(self) -> list[tuple[str, str]]:
        """List of (axis, layer) whose verdict is unclear."""
        return self._with(Verdict.UNCLEAR)

    @property
    def passed(self) -> bool:
        """Whether the verdict is ok.

        False if it is wrong or unclear; `failed` and `unclear` list the layers.
        """
        return self.verdict is Verdict.OK

    @property
    def hints(self) -> list[str]:
        """Likely causes of the slopes, one or two sentences each."""
        return hints(self)

    def _with(self, verdict: Verdict) -> list[tuple[str, str]]:
        return [
            (axis, layer)
            for axis, layers in self.verdicts.items()
            for layer, given in layers.items()
            if given is verdict
        ]

    @functools.cached_property
    def fits(self) -> dict[str, dict[str, "Fit"]]:
        """By axis and layer, the lines that were fitted."""
        return {
            axis: _fit_layers(self.sizes[axis], layers)
            for axis, layers in self.changes.items()
        }

    def _each(self, value: Callable[["Fit"], Any]) -> dict[str, dict[str, Any]]:
        return {
            axis: {layer: value(fit) for layer, fit in layers.items()}
            for axis, layers in self.fits.items()
        }

    def _is_finite_depth(self, axis: str, layer: str) -> bool:
        """Whether correct models of few layers have such a slope."""
        limit = _INNER if self._is_in_flat_branch(layer) else _STREAM
        return axis == "depth" and abs(self.slopes[axis][layer]) < limit

    def _is_in_flat_branch(self, layer: str) -> bool:
        """Whether it is in a branch after which the stream does not grow with depth."""
        layers = self.facts.get("depth", Facts()).layers
        branch = layers[layer][0].branch if layer in layers else ""
        fits = self.fits.get("depth", {}).items()
        stream = [fit for n, fit in fits if n.rpartition("@")[0] == STREAM + branch]
        inside = bool(branch and stream) and not layer.startswith(STREAM)
        return inside and all(map(_does_not_grow, stream))

    def _starts_at_zero(self, axis: str, layer: str, fit: "Fit") -> bool:
        facts = self.facts.get(axis, Facts())
        start = facts.initial.get(layer)
        zero = start is not None and not np.any(start)
        return zero and not fit.diverged and fit.worst.slope < -self.tolerance

    def _judge(self, axis: str, layer: str) -> Verdict:
        fits, edge = self.fits[axis], max(self.tolerance, _HALFWAY)
        fit, chance = fits[layer], _FALSE_ALARMS / len(fits)
        if fit.diverged:
            return Verdict.WRONG
        if any(_is_beyond(step, edge, chance) for step in fit.steps):
            excused = self._is_finite_depth(axis, layer)
            return Verdict.UNCLEAR if excused else Verdict.WRONG
        if all(self._is_near_zero(step, edge) for step in fit.steps):
            return Verdict.OK
        return Verdict.UNCLEAR

    def _is_near_zero(self, step: "Step", edge: float) -> bool:
        half = step.half_width(_INTERVAL)
        return abs(step.slope) - half <= self.tolerance and (
            abs(step.slope) + half <= edge
        )

    def __repr__(self) -> str:
        sizes = "; ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        return f"<CoordCheck over {sizes}: {self._summary()}>"

    def __str__(self) -> str:
        lines: list[str] = []
        for axis, layers in self._rows().items():
            lines.append(self._title(axis))
            long = max(len(layer) for layer, *_ in layers)
            for layer, slope, verdict in layers:
                shown = "" if verdict == Verdict.OK.upper() else f"  {verdict}"
                lines.append(f"  {layer:<{long}}  {slope}{shown}")
        return "\n".join([*lines, self._summary(), *(f"- {h}" for h in self.hints)])

    def _repr_html_(self) -> str:
        tables = [
            html_table(self._title(axis), ["layer", "slope", "verdict"], layers)
            for axis, layers in self._rows().items()
        ]
        return "".join(tables) + html_table(self._summary(), [], [], self.hints)

    def _title(self, axis: str) -> str:
        sizes = ", ".join(map(str, self.sizes[axis]))
        return f"log |Δ activation| against log {axis} ({sizes})"

    def _rows(self) -> dict[str, list[tuple[str, str, str]]]:
        """By axis, (layer, slope ± error, verdict) as text."""
        errors, verdicts = self.errors, self.verdicts
        return {
            axis: [
                (
                    self.facts.get(axis, Facts()).named(layer),
                    f"{fit.worst.slope:+.3f} ± {errors[axis][layer]:.3f}",
                    _word(verdicts[axis].get(layer)),
                )
                for layer, fit in layers.items()
            ]
            for axis, layers in self.fits.items()
        }

    def _summary(self) -> str:
        count = sum(map(len, self.verdicts.values()))
        edge = max(self.tolerance, _HALFWAY)
        match self.verdict:
            case Verdict.OK:
                return (
                    f"ok: {count} slopes agree with zero (within ±{self.tolerance:g})"
                )
            case Verdict.WRONG:
                return (
                    f"wrong: {len(self.failed)} of {count} slopes are beyond "
                    f"±{edge:g}; {len(self.unclear)} are unclear"
                )
        reasons: dict[str, list[float]] = {}
        for axis, layer in self.unclear:
            step = self.fits[axis][layer].worst
            size, half = abs(step.slope), step.half_width(_INTERVAL)
            reason = "too uncertain: use more seeds or larger sizes"
            if math.isinf(half):
                reason = "of unknown error: use more than one seed"
            elif size > self.tolerance and self._is_finite_depth(axis, layer):
                reason = (
                    "below what a mistake in depth gives: use smaller branch "
                    "multipliers or larger depths, and more seeds if errors are large"
                )
            elif self.tolerance < size - half and size + half <= edge:
                reason = (
                    f"surely between ±{self.tolerance:g} and ±{edge:g}: use larger "
                    "sizes, as more seeds would not change that"
                )
            reasons.setdefault(reason, []).append(step.slope)
        parts = [
            f"{len(slopes)} (up to {max(slopes, key=abs):+.2f}) {reason}"
            for reason, slopes in reasons.items()
        ]
        return f"unclear: none of {count} slopes is wrong; {'; '.join(parts)}"

    @overload
    def plot(self, path: None = None) -> Figures: ...
    @overload
    def plot(self, path: str | os.PathLike[str]) -> list[str]: ...
    def plot(self, path: str | os.PathLike[str] | None = None) -> Figures | list[str]:
        """Plot |Δ activation| against size, one figure per axis.

        Args:
          path: of the figure. With two axes, the name of the axis is inserted before
            the suffix, e.g. `check-width.png`. None writes no file.

        Returns:
          The paths that were written. Without a path, the figures, which a notebook
          displays.

        Raises:
          ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            from matplotlib import figure
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "plotting needs matplotlib: pip install '.[train]' in a clone of mupax"
            ) from None
        # Figure rather than pyplot, which has global state and needs a display.
        drawn = {
            axis: _draw(figure.Figure, self, axis, layers)
            for axis, layers in self.changes.items()
        }
        if path is None:
            return Figures(drawn.values())
        stem, suffix = os.path.splitext(os.fspath(path))
        written = []
        for axis, canvas in drawn.items():
            name = f"{stem}-{axis}{suffix}" if len(self.changes) > 1 else f"{path}"
            canvas.savefig(name, bbox_inches="tight", dpi=120)
            written.append(name)
        return written


def _word(verdict: Verdict | None) -> str:
    return "not judged (starts at zero)" if verdict is None else verdict.upper()


def _draw(
    make: Any, check: CoordCheck, axis: str, layers: Mapping[str, np.ndarray]
) -> Any:
    steps = next(iter(layers.values())).shape[1]
    canvas = make(figsize=(3.2 * steps + 2.4, 3.6))
    panels = canvas.subplots(1, steps, sharex=True, sharey=True, squeeze=False)
    slopes = check.by_step[axis]
    for step, panel in enumerate(panels[0]):
        for layer, change in layers.items():
            label = f"{layer}  {slopes[layer][step]:+.2f}"
            mean = np.exp(_log(change[:, step]).mean(axis=-1))
            panel.plot(check.sizes[axis], mean, marker="o", label=label)
        panel.set(xscale="log", yscale="log", xlabel=axis)
        panel.set_xticks(check.sizes[axis], map(str, check.sizes[axis]))
        panel.minorticks_off()
        panel.set_title(f"step {step + 1}")
    panels[0][-1].legend(
        title="layer  slope",
        fontsize="x-small",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    panels[0][0].set_ylabel("rms change of the activation")
    return canvas


# --- fits ---


class Step(NamedTuple):
    """The line fitted to log |Δ activation| after one step.

    Attributes:
      slope: against log size, the mean over seeds; nan if a size did not change.
      error: its standard error over seeds; nan if there is one.
      steady: the standard error, pooled with those of the other layers.
      freedom: degrees of freedom of `steady`.
      head: the slope between the two smallest sizes.
      tail: the slope between the two largest sizes.
      tail_half_width: half of the 90 % interval of `tail`.
      moves: whether the layer changes at any size. Before a readout of zeros, no layer
        changes in the first step.
    """

    slope: float
    error: float
    steady: float
    freedom: float
    head: float
    tail: float
    tail_half_width: float
    moves: bool

    def half_width(self, chance: float) -> float:
        """Half-width of the interval that misses the slope with this probability."""
        if not self.freedom > 0:
            return math.inf
        quantile = special.stdtrit(self.freedom, 1 - chance / 2)
        return float(quantile) * self.steady


class Fit(NamedTuple):
    """The lines of one layer, for the steps after which it has changed.

    `slopes` are those after every step; NaN before it has changed.
    """

    steps: tuple[Step, ...]
    diverged: bool
    slopes: list[float]

    @property
    def worst(self) -> Step:
        """The step whose slope is farthest from zero."""
        return max(self.steps, key=lambda s: (math.isnan(s.slope), abs(s.slope)))


def _does_not_grow(fit: Fit) -> bool:
    return not fit.diverged and all(
        -_STREAM < step.slope <= step.slope + step.half_width(_INTERVAL) <= _HALFWAY
        for step in fit.steps
    )


def _is_beyond(step: Step, edge: float, chance: float) -> bool:
    if not abs(step.slope) - step.half_width(chance) > edge:
        return False
    # A slope that fades with size is a correction of small models, not an exponent.
    head, tail = (
        local * math.copysign(1, step.slope) for local in (step.head, step.tail)
    )
    lowest = tail - step.tail_half_width
    return lowest > edge and not (tail < 0.8 * head and tail < 0.5)


def _fit_layers(
    sizes: Sequence[int], layers: Mapping[str, np.ndarray]
) -> dict[str, Fit]:
    x = np.log(np.asarray(sizes, dtype=float))
    order = np.argsort(x)
    raw = {name: list(_steps(x[order], c[order])) for name, c in layers.items()}
    seeds = next(iter(layers.values())).shape[-1]
    freedom = seeds - 1
    errors = [s.error for steps in raw.values() for s in steps]
    known = [e for e in errors if math.isfinite(e)]
    usual = float(np.median(known)) if known else math.nan
    fits = {}
    for name, steps in raw.items():
        moved = [_steadied(s, usual, freedom) for s in steps if s.moves] or steps
        diverged = not np.all(np.isfinite(layers[name]))
        fits[name] = Fit(tuple(moved), diverged, [s.slope for s in steps])
    return fits


def _steadied(step: Step, usual: float, freedom: int) -> Step:
    if not (freedom > 0 and math.isfinite(step.error)):
        return step
    total = freedom + _PRIOR
    square = (freedom * step.error**2 + _PRIOR * usual**2) / total
    return step._replace(steady=square**0.5, freedom=total)


def _steps(x: np.ndarray, change: np.ndarray) -> Iterator[Step]:
    """Fit each step of (sizes, steps, seeds)."""
    centred = x - x.mean()
    for y in np.moveaxis(_log(change), 1, 0):  # (sizes, seeds)
        moves = bool(np.any(y > -np.inf))
        # If a size did not change, its logarithm is infinite and the slope NaN.
        with np.errstate(invalid="ignore"):
            slopes = centred @ y / (centred**2).sum()
            local = np.diff(y, axis=0) / np.diff(x)[:, None]  # (intervals, seeds)
            error, half = _seed_errors(slopes, local[-1])
            slope, head, tail = (float(s.mean()) for s in (slopes, *local[[0, -1]]))
        yield Step(slope, error, math.nan, 0, head, tail, half, moves)


def _seed_errors(slopes: np.ndarray, tails: np.ndarray) -> tuple[float, float]:
    """The slope's standard error, and the half-width of the tail's 90 % interval."""
    count = len(slopes)
    if count == 1:
        return math.nan, 0.0
    error, spread = (s.std(ddof=1) / math.sqrt(count) for s in (slopes, tails))
    return float(error), float(special.stdtrit(count - 1, 1 - _INTERVAL) * spread)


def _log(change: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        logarithm: np.ndarray = np.log(change.astype(float))
    return logarithm

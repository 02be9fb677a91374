"""The result of a coordinate check: slopes, their errors, verdicts and hints."""

import dataclasses
import enum
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from .activations import STREAM, Layer

# Exponents of width and depth are multiples of ½, so a |slope| below ¼ is nearer to
# zero than to the next exponent.
_HALFWAY = 0.25
# Chance that noise makes any layer of a check wrong; each layer's interval is 95 %.
_FALSE_ALARMS = 0.01
_INTERVAL = 0.05
# A few seeds estimate their own spread poorly, so the layers' median counts as this
# many further seeds (an empirical Bayes estimate of the variance; Smyth 2004).
_PRIOR = 4
# Correct models of few layers have slopes of depth up to this; a mistake gives ½.
_FEW_LAYERS = 0.45
_NEAR = 0.2  # distance from an exponent at which a slope is recognized
_SCALES = (
    "for each size make scales = infer_scales(base, model, inputs=...) with one base, "
    "apply rescale_init(params, scales), and pass them to an optimizer of mupax.optim"
)


class Verdict(enum.StrEnum):
    """Verdict on a slope and its standard error; see `CoordCheck`.

    Examples:
      >>> [verdict.value for verdict in Verdict]
      ['ok', 'unclear', 'wrong']
    """

    OK = "ok"
    UNCLEAR = "unclear"
    WRONG = "wrong"


class Facts(NamedTuple):
    """What else is known at each size of an axis, by layer."""

    initial: Mapping[str, np.ndarray] = {}  # rms of its initial values, (sizes,)
    layers: Mapping[str, tuple[Layer, ...]] = {}  # what the program of each size says
    scaled: bool = True  # whether the optimizer applies scales

    def of(self, layer: str) -> Layer:
        """What the program of the first size says of a layer."""
        return self.layers[layer][0] if layer in self.layers else Layer("", layer)

    def named(self, layer: str) -> str:
        """The name of a layer with the line of code, e.g. "head (model.py:31)"."""
        line = self.of(layer).line
        return f"{layer} ({line})" if line else layer

    def is_readout(self, layer: str) -> bool:
        """Whether its number of units does not grow."""
        sizes = {x.size for x in self.layers.get(layer, ())}
        return len(sizes) == 1 or layer.partition("/")[0] == "output"


@dataclasses.dataclass(frozen=True, repr=False)
class CoordCheck:
    """Result of `coord_check`; print it for a table, a verdict and hints.

    A layer is ok if its slope is about zero and surely (by its 95 % interval) below ¼,
    wrong if it is surely beyond ¼ or the layer diverged, else unclear.
    `docs/coord_check.md` has the details, and says which layers are not judged.

    Attributes:
      sizes: for each axis ("width", "depth") the sizes that were trained.
      changes: by axis and layer, the root mean square of the activation's change
        since initialization, of shape (sizes, steps, seeds).
      tolerance: the largest |slope| that counts as zero.
      facts: by axis, further measurements for the hints.

    Source: Tensor Programs V (arXiv:2203.03466), appendix D.1.

    Examples:
      >>> import numpy as np
      >>> sizes = {"width": (64, 128, 256)}
      >>> change = np.array([[1.0, 2.0, 4.0]] * 2).T[:, None]  # sizes, steps, seeds
      >>> check = CoordCheck(sizes, {"width": {"readout": change}})
      >>> round(check.slopes["width"]["readout"], 6), check.failed
      (1.0, [('width', 'readout')])
    """

    sizes: Mapping[str, tuple[int, ...]]
    changes: Mapping[str, Mapping[str, np.ndarray]]
    tolerance: float = 0.15
    facts: Mapping[str, Facts] = dataclasses.field(default_factory=dict)

    @property
    def slopes(self) -> dict[str, dict[str, float]]:
        """By axis and layer, the slope at the step where it is farthest from zero."""
        return self._each(lambda fit: fit.slope)

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """By axis and layer, the standard error over seeds of the slope."""
        return self._each(lambda fit: float(fit.errors[fit.worst]))

    @functools.cached_property
    def verdicts(self) -> dict[str, dict[str, Verdict]]:
        """By axis and layer, the verdict; layers that are not judged are left out."""
        return {
            axis: {
                layer: self._judge(axis, fit, _FALSE_ALARMS / len(layers))
                for layer, fit in layers.items()
                if not self._excused(axis, layer)
            }
            for axis, layers in self.fits.items()
        }

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any layer."""
        verdicts = [v for layers in self.verdicts.values() for v in layers.values()]
        worst_first = (Verdict.WRONG, Verdict.UNCLEAR)
        return next((v for v in worst_first if v in verdicts), Verdict.OK)

    @property
    def failed(self) -> list[tuple[str, str]]:
        """(axis, layer) whose verdict is wrong."""
        return self._with(Verdict.WRONG)

    @property
    def unclear(self) -> list[tuple[str, str]]:
        """(axis, layer) whose verdict is unclear."""
        return self._with(Verdict.UNCLEAR)

    @property
    def passed(self) -> bool:
        """Whether the verdict is ok."""
        return self.verdict is Verdict.OK

    @property
    def hints(self) -> list[str]:
        """Likely causes of the slopes, one or two sentences each."""
        each = (hint for axis in self.changes for hint in _of_axis(self, axis))
        return list(dict.fromkeys(each))

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

    @property
    def _edge(self) -> float:
        return max(self.tolerance, _HALFWAY)

    def _excused(self, axis: str, layer: str) -> str:
        """Why a layer is not judged, or ""."""
        facts, fits = self.facts.get(axis, Facts()), self.fits[axis]
        start, branch = facts.initial.get(layer), facts.of(layer).branch
        is_inside = axis == "depth" and branch and not layer.startswith(STREAM)
        names = [name for name in fits if name.rpartition("@")[0] == STREAM + branch]
        if fits[layer].diverged:
            return ""
        if is_inside and names and all(fits[name].is_flat() for name in names):
            return "in a branch of a flat stream"
        is_zero = start is not None and not np.any(start)
        falls = fits[layer].slope < -self.tolerance
        return "starts at zero" if is_zero and falls else ""

    def _judge(self, axis: str, fit: "Fit", chance: float) -> Verdict:
        if fit.diverged:
            return Verdict.WRONG
        if np.any(fit.is_beyond(self._edge, chance)[fit.moves]):
            # Correct models of few layers have such slopes of depth.
            few = axis == "depth" and abs(fit.slope) < _FEW_LAYERS
            return Verdict.UNCLEAR if few else Verdict.WRONG
        sizes, half = np.abs(fit.slopes), fit.half_widths(_INTERVAL)
        is_zero = (sizes - half <= self.tolerance) & (sizes + half <= self._edge)
        return Verdict.OK if np.all(is_zero[fit.moves]) else Verdict.UNCLEAR

    def __repr__(self) -> str:
        sizes = "; ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        return f"<CoordCheck over {sizes}: {self._summary()}>"

    def __str__(self) -> str:
        lines: list[str] = []
        for axis, fits in self.fits.items():
            sizes = ", ".join(map(str, self.sizes[axis]))
            lines.append(f"log |Δ activation| against log {axis} ({sizes})")
            facts = self.facts.get(axis, Facts())
            names = {layer: facts.named(layer) for layer in fits}
            long = max(map(len, names.values()))
            for layer, fit in fits.items():
                verdict = f"not judged ({self._excused(axis, layer)})"
                if layer in self.verdicts[axis]:
                    verdict = self.verdicts[axis][layer].upper().replace("OK", "")
                slope = f"{fit.slope:+.3f} ± {fit.errors[fit.worst]:.3f}"
                lines.append(f"  {names[layer]:<{long}}  {slope}  {verdict}".rstrip())
        return "\n".join([*lines, self._summary(), *(f"- {h}" for h in self.hints)])

    def _summary(self) -> str:
        count, edge = sum(map(len, self.verdicts.values())), self._edge
        if self.verdict is Verdict.OK:
            return f"ok: {count} slopes agree with zero (within ±{self.tolerance:g})"
        if self.verdict is Verdict.WRONG:
            return (
                f"wrong: {len(self.failed)} of {count} slopes are beyond ±{edge:g}; "
                f"{len(self.unclear)} are unclear"
            )
        slopes = [self.slopes[axis][layer] for axis, layer in self.unclear]
        return (
            f"unclear: none of {count} slopes is wrong, and {len(slopes)} (up to "
            f"{max(slopes, key=abs):+.2f}) are not surely zero: use more seeds, at "
            "least 2, if errors are large, or larger sizes; in depth, smaller branch "
            "multipliers"
        )

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot |Δ activation| against size: a row of panels for each axis of size.

        Args:
          path: of the image to write; None writes none.

        Returns:
          A figure of Matplotlib, made without pyplot: none stays open.

        Raises:
          ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            from matplotlib import figure
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "plotting needs matplotlib: pip install '.[train]' in a clone of mupax"
            ) from None
        layers = next(iter(self.changes.values()))
        shape = len(self.changes), next(iter(layers.values())).shape[1]
        canvas = figure.Figure(figsize=(3.2 * shape[1] + 2.4, 3.6 * shape[0]))
        rows = canvas.subplots(*shape, sharex="row", sharey="row", squeeze=False)
        for (axis, changes), panels in zip(self.changes.items(), rows, strict=True):
            sizes, fits = self.sizes[axis], self.fits[axis]
            for step, panel in enumerate(panels):
                for layer, change in changes.items():
                    label = f"{layer}  {fits[layer].slopes[step]:+.2f}"
                    mean = np.exp(_log(change[:, step]).mean(axis=-1))
                    panel.plot(sizes, mean, marker="o", label=label)
                panel.set(xscale="log", yscale="log", xlabel=axis)
                panel.set_title(f"step {step + 1}")
                panel.set_xticks(sizes, map(str, sizes))
                panel.minorticks_off()
            panels[0].set_ylabel("rms change of the activation")
            beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
            panels[-1].legend(title="layer  slope", fontsize="x-small", **beside)
        if path is not None:
            canvas.savefig(path, bbox_inches="tight", dpi=120)
        return canvas


# --- fits ---


class Fit(NamedTuple):
    """The lines fitted to log |Δ activation| of one layer, one after each step."""

    slopes: np.ndarray  # means over seeds; NaN if a size did not change
    errors: np.ndarray  # their standard errors over seeds; NaN if there is one seed
    steady: np.ndarray  # pooled with those of the other layers; infinite if not known
    heads: np.ndarray  # slopes between the two smallest sizes
    tails: np.ndarray  # slopes between the two largest sizes
    # The steps that are judged: those after which the layer has changed at any size.
    # Before a readout of zeros, no layer changes in the first step.
    moves: np.ndarray
    diverged: bool  # whether a change is not finite
    freedom: int  # degrees of freedom of `steady`

    @property
    def worst(self) -> int:
        """The judged step whose slope is farthest from zero."""
        sizes = np.where(np.isnan(self.slopes), np.inf, np.abs(self.slopes))
        return int(np.argmax(np.where(self.moves, sizes, -1)))

    @property
    def slope(self) -> float:
        return float(self.slopes[self.worst])

    def half_widths(self, chance: float) -> np.ndarray:
        """Half-widths of the intervals that miss a slope with this probability."""
        quantile = float(special.stdtrit(self.freedom, 1 - chance / 2))
        widths: np.ndarray = quantile * self.steady
        return widths

    def is_flat(self) -> bool:
        """Whether it surely does not grow, and falls less than a mistake does."""
        most = self.slopes + self.half_widths(_INTERVAL)
        is_flat = (self.slopes > -_FEW_LAYERS) & (most <= _HALFWAY)
        return not self.diverged and bool(np.all(is_flat[self.moves]))

    def is_beyond(self, edge: float, chance: float) -> np.ndarray:
        """Whether slopes are beyond ±edge, also between the largest sizes."""
        heads, tails = (x * np.sign(self.slopes) for x in (self.heads, self.tails))
        # A slope that fades with size is a correction of small models, not an exponent.
        lasts = tails > np.clip(0.8 * heads, edge, max(edge, 0.5))
        beyond = np.abs(self.slopes) - self.half_widths(chance) > edge
        found: np.ndarray = lasts & beyond
        return found


def _fit_layers(
    sizes: Sequence[int], layers: Mapping[str, np.ndarray]
) -> dict[str, Fit]:
    order = np.argsort(sizes)
    x = np.log(np.asarray(sizes, dtype=float))[order]
    y = _log(np.stack(list(layers.values())))[:, order]  # layers, sizes, steps, seeds
    seeds, centred = y.shape[-1], x - x.mean()
    # If a size did not change, its logarithm is infinite and the slope NaN.
    with np.errstate(invalid="ignore"):
        each = np.tensordot(centred, y, (0, 1)) / (centred**2).sum()
        local = np.diff(y, axis=1) / np.diff(x)[:, None, None]
        slopes, heads, tails = (s.mean(-1) for s in (each, local[:, 0], local[:, -1]))
        errors = np.full(slopes.shape, np.nan)
        if seeds > 1:
            errors = each.std(-1, ddof=1) / seeds**0.5
    freedom, known = seeds - 1 + _PRIOR, np.isfinite(errors)
    usual = np.median(errors[known]) if known.any() else np.inf
    squares = ((seeds - 1) * errors**2 + _PRIOR * usual**2) / freedom
    steady = np.where(known, squares**0.5, np.inf)
    moves = np.any(y > -np.inf, axis=(1, 3))
    moves |= ~np.any(moves, axis=1, keepdims=True)
    diverged = [not np.all(np.isfinite(change)) for change in layers.values()]
    columns = slopes, errors, steady, heads, tails, moves, diverged
    each = zip(layers, zip(*columns, strict=True), strict=True)
    return {name: Fit._make((*values, freedom)) for name, values in each}


def _log(change: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        logarithm: np.ndarray = np.log(change.astype(float))
    return logarithm


# --- hints: which known mistake would give these slopes ---


def _of_axis(check: CoordCheck, axis: str) -> Iterator[str]:
    slopes, facts = check.slopes[axis], check.facts.get(axis, Facts())
    wrong = [layer for at, layer in check.failed if at == axis]
    if axis == "width":
        # Whatever the slopes: Adam's updates do not depend on a weight's initial size.
        doubtful = any(at == axis for at, _ in (*check.failed, *check.unclear))
        yield from _initial_sizes(check, facts, doubtful)
    if any(np.isnan(slopes[layer]) for layer in wrong):
        yield (
            "some activations are not finite: lower the learning rate, or, if all "
            "layers are listed, check the batch for NaN"
        )
    elif rising := [layer for layer in wrong if slopes[layer] > 0]:
        streams = [layer for layer in rising if layer.startswith(STREAM)]
        worst = max(streams or rising, key=slopes.__getitem__)
        yield _growing(facts, axis, worst, slopes[worst])
    elif wrong:
        worst = min(wrong, key=slopes.__getitem__)
        yield (
            f"{facts.named(worst)} falls with {axis}, as {axis}^{slopes[worst]:+.2f}: "
            "its updates are too small, e.g. scaled twice, or under 'ntk'. If your "
            "loss returns a scalar, its gradient may be the cause, which depends on "
            "the initial outputs: return the outputs, for a loss that is linear in them"
        )


def _growing(facts: Facts, axis: str, worst: str, slope: float) -> str:
    """The likeliest cause of growth with an axis."""
    layer, named = facts.of(worst), facts.named(worst)
    factors = [x.multiplier for x in facts.layers.get(worst, ())]
    cause = f"{'' if facts.scaled else 'the optimizer applies no scales: '}{_SCALES}"
    if axis == "depth" and worst.startswith(STREAM):
        line = f" ({layer.line})" if layer.line else ""
        named = f"branch ending in {worst.removeprefix(STREAM).partition('@')[0]}{line}"
        if factors and max(factors) < 1.2 * min(factors):
            cause = (
                f"it is multiplied by {layer.multiplier:.3g} at every depth; multiply "
                "it by optim.parametrization('depth_mup').branch_multiplier(depth / "
                f"base depth), or {cause}"
            )
        elif facts.scaled:
            cause = (
                "has the branch mean zero over units (a ReLU's output does not)? If "
                "so, use smaller branch multipliers or larger depths"
            )
    return f"{named} grows with {axis}, as {axis}^{slope:+.2f}: {cause}"


def _initial_sizes(check: CoordCheck, facts: Facts, doubtful: bool) -> Iterator[str]:
    """Hint at the first layer whose initial size has another exponent of width.

    It is 0, or -1/2 for outputs, which are named only if a slope is not ok. What
    follows a bottleneck, whose units are outputs, may start as small as it.
    """
    x = np.log(np.asarray(check.sizes["width"], dtype=float))
    least = 0.0
    for layer, rms in facts.initial.items():
        is_readout = facts.is_readout(layer)
        smaller, least = least, least - 0.5 * is_readout
        if not np.all(rms > 0) or (is_readout and not doubtful):
            continue
        slope, right = np.polyfit(x, np.log(rms), 1)[0], -0.5 if is_readout else 0.0
        if not right + smaller - _NEAR <= slope <= right + _NEAR:
            yield (
                f"{facts.named(layer)} starts as width^{slope:+.2f}, where "
                f"width^{right:+.2f} is right: call rescale_init(params, scales)"
            )
            return

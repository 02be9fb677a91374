"""Hints for a coordinate check: which known mistake would give these slopes."""

import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .activations import STREAM, Layer

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
    """What else is known at each size of an axis.

    Attributes:
      initial: by layer, the root mean square of its initial values, (sizes,).
      layers: by layer, what the program of each size says of it.
      scaled: whether the optimizer applies scales.
    """

    initial: Mapping[str, np.ndarray] = {}
    layers: Mapping[str, tuple[Layer, ...]] = {}
    scaled: bool = True

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


def hints(check: Any) -> list[str]:
    """Hints for the slopes of a `CoordCheck`, the most specific first.

    For each axis, the likeliest cause of its worst wrong slope, and a layer whose
    initial size has a wrong exponent of width.
    """
    found = (hint for axis in check.changes for hint in _of_axis(check, axis))
    return list(dict.fromkeys(found))


def _of_axis(check: Any, axis: str) -> Iterator[str]:
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


def _initial_sizes(check: Any, facts: Facts, doubtful: bool) -> Iterator[str]:
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

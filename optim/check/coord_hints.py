"""Hints for a coordinate check: which known mistake would give these slopes."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .activations import STREAM, Layer, Parameter

_NEAR = 0.2  # distance from an exponent at which a slope is recognized
# Exponents of initial sizes, by whether fan-in and fan-out grow.
_EXPECTED = {(False, True): 0.0, (True, True): -0.5, (True, False): -1.0}
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
      parameters: by path, how the program uses it, its shapes at each size, and its
        initial root mean squares.
      scaled: whether the optimizer applies scales.
    """

    initial: Mapping[str, np.ndarray] = {}
    layers: Mapping[str, tuple[Layer, ...]] = {}
    parameters: Mapping[
        str, tuple[Parameter, tuple[tuple[int, ...], ...], np.ndarray]
    ] = {}
    scaled: bool = True

    def of(self, layer: str) -> Layer:
        """What the program of the first size says of a layer."""
        return self.layers[layer][0] if layer in self.layers else Layer("", layer)

    def named(self, layer: str) -> str:
        """The name of a layer with the line of code, e.g. "head (model.py:31)"."""
        line = self.of(layer).line
        return f"{layer} ({line})" if line else layer

    def quote(self, layers: Sequence[str]) -> str:
        """The first few layers, and how many more there are."""
        shown = ", ".join(map(self.named, layers[:3]))
        return shown + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")

    def grows(self, path: str) -> tuple[bool, bool] | None:
        """Whether fan-in and fan-out of a matrix grow; None for vectors."""
        use, shapes, _ = self.parameters[path]
        if not (use.fan_in or use.table) or len(set(map(len, shapes))) > 1:
            return None
        sizes = zip(*shapes, strict=True)
        growing = {axis for axis, each in enumerate(sizes) if len(set(each)) > 1}
        fan_in = use.table or use.fan_in
        return bool(growing & use.fan_in - use.table), bool(growing - fan_in)

    def is_readout(self, layer: str) -> bool:
        path = self.of(layer).param or layer
        if path not in self.parameters:
            return path.partition("/")[0] == "output"
        return self.grows(path) == (True, False)

    def multiplies_alike(self, layer: str) -> bool:
        """Whether a branch is multiplied alike at every size.

        Its multiplier may also be in the initial size of the parameter that ends it.
        """
        factors = np.array([x.multiplier for x in self.layers.get(layer, ())])
        if not factors.size:
            return False
        if (path := self.of(layer).param) in self.parameters:
            sizes = self.parameters[path][2]
            factors = factors * (sizes if np.all(sizes > 0) else 1.0)
        return bool(factors.max() < 1.2 * factors.min())


def hints(check: Any) -> list[str]:
    """Hints for the slopes of a check.

    Args:
      check: a `CoordCheck`.

    Returns:
      Sentences, the most specific first. Causes are named for slopes that are wrong
      only; for unclear slopes, what was measured: initial sizes of readouts, and large
      steps. Tables whose initial size depends on width are always named.
    """
    found = (hint for axis in check.changes for hint in _of_axis(check, axis))
    return list(dict.fromkeys(found))


def _of_axis(check: Any, axis: str) -> Iterator[str]:
    slopes, facts = check.slopes[axis], check.facts.get(axis, Facts())
    wrong = [layer for at, layer in check.failed if at == axis]
    unclear = [layer for at, layer in check.unclear if at == axis]
    if axis == "width":
        # Whatever the slopes: Adam's updates do not depend on a weight's initial size.
        yield from _initial_sizes(check, facts, bool(wrong), bool(unclear))
    if any(np.isnan(slopes[layer]) for layer in wrong):
        yield (
            "some activations are not finite: lower the learning rate, or, if all "
            "layers are listed, check the batch for NaN"
        )
        return
    yield from _large_steps(check, axis, [*wrong, *unclear])
    if rising := {layer: slopes[layer] for layer in wrong if slopes[layer] > 0}:
        yield _growing(facts, axis, rising)
    falling = [layer for layer in wrong if abs(slopes[layer] + 0.5) < 0.15]
    if falling and axis == "width":
        yield (
            f"{facts.quote(falling)} fall as width^-0.5: their updates are too small, "
            "e.g. under 'ntk' or because the readout was rescaled twice. If your loss "
            "returns a scalar, its gradient may be the cause, which depends on the "
            "initial outputs: return the outputs, for a loss that is linear in them"
        )


def _growing(facts: Facts, axis: str, rising: Mapping[str, float]) -> str:
    """The likeliest cause of growth with an axis; in depth, of the worst branch."""
    streams = [layer for layer in rising if layer.startswith(STREAM)]
    worst = max(streams or rising, key=lambda layer: rising[layer])
    layer, named = facts.of(worst), facts.quote(list(rising))
    in_branch = axis == "depth" and bool(streams)
    if in_branch:
        line = f" ({layer.line})" if layer.line else ""
        named = f"branch ending in {worst.removeprefix(STREAM).partition('@')[0]}{line}"
    if in_branch and facts.multiplies_alike(worst):
        cause = (
            f"it is multiplied by {layer.multiplier:.3g} at every depth. "
            "Multiply it by optim.parametrization('depth_mup').branch_multiplier("
            f"depth / base depth), or {_SCALES}"
        )
    elif not facts.scaled:
        cause = f"the optimizer applies no scales: {_SCALES}"
    elif axis == "depth":
        cause = (
            "has the branch mean zero over units (a ReLU's output does not)? If so, "
            "use smaller branch multipliers or larger depths"
        )
    elif all(map(facts.is_readout, rising)):
        cause = f"the readout is not scaled, hidden layers are; {_SCALES}"
    else:
        cause = f"learning rates are not scaled; {_SCALES}"
    return f"{named} grows with {axis}, as {axis}^{rising[worst]:+.2f}: {cause}"


def _initial_sizes(
    check: Any, facts: Facts, wrong: bool, unclear: bool
) -> Iterator[str]:
    """Hints on parameters whose initial size has another exponent of width.

    On tables always, on readouts if a layer is not ok, on others if one is wrong:
    models that multiply their weights (as in mean field) store other sizes.
    """
    x = np.log(np.asarray(check.sizes["width"], dtype=float))
    for path, (use, _, rms) in facts.parameters.items():
        grows = facts.grows(path)
        shown = use.table or wrong or (unclear and grows == (True, False))
        if grows not in _EXPECTED or not np.all(rms > 0) or not shown:
            continue
        slope, right = np.polyfit(x, np.log(rms), 1)[0], _EXPECTED[grows]
        if abs(slope - right) > _NEAR:
            line = f" ({use.line})" if use.line else ""
            yield (
                f"{path}{line} starts as width^{slope:+.2f}, where "
                f"width^{right:+.2f} is right: call rescale_init(params, scales)"
            )


def _large_steps(check: Any, axis: str, layers: Sequence[str]) -> Iterator[str]:
    """Hint at a learning rate so large that activations change by more than their size.

    Judged at the smallest model.
    """
    smallest = int(np.argmin(check.sizes[axis]))
    facts = check.facts.get(axis, Facts())
    for layer in layers:
        start = facts.initial[layer][smallest] if layer in facts.initial else 0.0
        change = np.median(check.changes[axis][layer][smallest], -1).max()
        if 0 < start < change:
            yield (
                f"{facts.named(layer)} changes by {change / start:.1f} times its "
                "initial size in the smallest model: the rules hold for small steps; "
                "lower the learning rate"
            )
            return

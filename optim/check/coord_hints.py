"""Hints for a coordinate check: which known mistake would give these slopes."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .activations import STREAM, Layer
from .coord_facts import Facts, Verdict

_NEAR = 0.2  # distance from a multiple of a half at which a slope is recognized
# Exponents of initial sizes, by whether fan-in and fan-out grow.
_EXPECTED = {(False, True): 0.0, (True, True): -0.5, (True, False): -1.0}


def hints(check: Any) -> list[str]:
    """Hints for the slopes of a check.

    Args:
      check: a `CoordCheck`.

    Returns:
      Sentences, the most specific first. If all layers are ok, the only hints are on
      tables whose initial size depends on width.
    """
    hints = [hint for axis in check.changes for hint in _of_axis(check, axis)]
    return list(dict.fromkeys(hints))


def _of_axis(check: Any, axis: str) -> Iterator[str]:
    verdicts, slopes = check.verdicts[axis], check.slopes[axis]
    wrong = [layer for layer, v in verdicts.items() if v is Verdict.WRONG]
    doubtful = [layer for layer, v in verdicts.items() if v is not Verdict.OK]
    facts = check.facts.get(axis, Facts())
    if axis == "width":
        # Whatever the slopes: Adam's updates do not depend on a weight's initial size.
        yield from _initial_sizes(check, facts, bool(wrong), bool(doubtful))
    if any(math.isnan(slopes[layer]) for layer in wrong):
        yield (
            "some activations are not finite: lower the learning rate, or, if all "
            "layers are listed, check the batch for NaN"
        )
        return
    yield from _large_steps(check, axis, doubtful)
    rising = [layer for layer in wrong if slopes[layer] > 0]
    falling = [layer for layer in doubtful if abs(slopes[layer] + 0.5) < 0.15]
    if rising:
        grow = _grow_with_depth if axis == "depth" else _grow_with_width
        yield grow(check, facts, rising)
    if falling and axis == "width":
        yield _falling(facts, falling, check.own_loss)
    yield from _fading(check, axis, [x for x in doubtful if x not in wrong])


def _quote(facts: Facts, layers: Sequence[str]) -> str:
    shown = ", ".join(facts.named(layer) for layer in layers[:3])
    return shown + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")


_SCALES = (
    "for each size make scales = infer_scales(base, model, inputs=...) with one base, "
    "apply rescale_init(params, scales), and pass them to an optimizer of mupax.optim"
)


def _grow_with_depth(check: Any, facts: Facts, rising: list[str]) -> str:
    slopes, fits = check.slopes["depth"], check._fits()["depth"]
    streams = [layer for layer in rising if layer.startswith(STREAM)]
    worst = max(streams or rising, key=lambda layer: slopes[layer])
    power = f"depth^{slopes[worst]:+.2f}"
    if all(check.is_in_flat_branch(layer, fits) for layer in rising):
        return (
            f"{_quote(facts, rising)} grow with depth (as {power}), the stream after "
            "their branches does not: usually finite depth. Use smaller branch "
            "multipliers or larger depths"
        )
    finite = (
        "has the branch mean zero over units (a ReLU's output does not)? If so, use "
        "smaller branch multipliers or larger depths"
    )
    cause = finite if facts.scaled else f"the optimizer applies no scales: {_SCALES}"
    if not streams:
        return f"{_quote(facts, rising)} grow with depth (as {power}): {cause}"
    layers = facts.layers.get(worst, ())
    if layers and _stays(facts, layers):
        cause = (
            f"it is multiplied by {layers[0].multiplier:.3g} at every depth. Multiply "
            "it by optim.parametrization('depth_mup').branch_multiplier(depth / base "
            f"depth), or {_SCALES}"
        )
    branch = worst.removeprefix(STREAM).partition("@")[0]
    line = f" ({layers[0].line})" if layers else ""
    return f"branch ending in {branch}{line} grows with depth, as {power}: {cause}"


def _stays(facts: Facts, layers: Sequence[Layer]) -> bool:
    """Whether a branch is multiplied alike at every depth.

    Its multiplier may also be in the initial size of the parameter that it ends in.
    """
    factors = np.array([layer.multiplier for layer in layers])
    if layers[0].param in facts.parameters:
        sizes = facts.parameters[layers[0].param][2]
        factors = factors * (sizes if np.all(sizes > 0) else 1.0)
    return bool(factors.max() < 1.2 * factors.min())


def _grow_with_width(check: Any, facts: Facts, rising: list[str]) -> str:
    power = max(check.slopes["width"][layer] for layer in rising)
    readouts = all(_is_readout(facts, layer) for layer in rising)
    return (
        f"{_quote(facts, rising)} grow with width (as width^{power:+.1f})"
        + (", hidden layers do not: " if readouts else ": ")
        + ("the readout is not scaled" if readouts else "learning rates are not scaled")
        + ("; " if facts.scaled else ", the optimizer applies no scales; ")
        + _SCALES
    )


def _falling(facts: Facts, falling: list[str], own_loss: bool) -> str:
    size = f"{_quote(facts, falling)} fall as width^-0.5: "
    if own_loss:
        return size + (
            "with cross-entropy or a squared error the loss may be the cause, because "
            "its gradient depends on the initial outputs, which fall with width under "
            "μP. Pass a loss function that returns the outputs; the check then uses a "
            "linear loss"
        )
    return size + (
        "their updates are too small, e.g. under 'ntk' or because the readout was "
        "rescaled twice"
    )


def _grows(facts: Facts, path: str) -> tuple[bool, bool] | None:
    """Whether fan-in and fan-out of a matrix grow; None for vectors."""
    use, shapes, _ = facts.parameters[path]
    first = shapes[0]
    if not (use.fan_in or use.table) or any(len(s) != len(first) for s in shapes):
        return None
    growing = {i for i in range(len(first)) if len({s[i] for s in shapes}) > 1}
    fan_in = use.table or use.fan_in
    return bool(growing & use.fan_in - use.table), bool(growing - fan_in)


def _is_readout(facts: Facts, layer: str) -> bool:
    if layer.partition("/")[0] == "output" and layer not in facts.parameters:
        return True
    path = facts.layers[layer][0].param if layer in facts.layers else layer
    return path in facts.parameters and _grows(facts, path) == (True, False)


def _initial_sizes(
    check: Any, facts: Facts, wrong: bool, doubtful: bool
) -> Iterator[str]:
    """Hints on parameters whose initial size has another exponent of width.

    On tables always, on readouts if a layer is doubtful, on others if one is wrong:
    models that multiply their weights (as in mean field) store other sizes.
    """
    x = np.log(np.asarray(check.sizes["width"], dtype=float))
    x -= x.mean()
    for path, (use, _, rms) in facts.parameters.items():
        grows = _grows(facts, path)
        if grows not in _EXPECTED or not np.all(rms > 0):
            continue
        line = f" ({use.line})" if use.line else ""
        shown = bool(use.table) or (doubtful if grows == (True, False) else wrong)
        slope, right = float(x @ np.log(rms) / (x @ x)), _EXPECTED[grows]
        if shown and abs(slope - right) > _NEAR:
            yield (
                f"{path}{line} starts as width^{slope:+.2f}, where "
                f"width^{right:+.2f} is right: call rescale_init(params, scales)"
            )


def _large_steps(check: Any, axis: str, layers: list[str]) -> Iterator[str]:
    """Hint at a learning rate so large that activations change by more than their size.

    Judged at the smallest model.
    """
    smallest = int(np.argmin(check.sizes[axis]))
    facts = check.facts.get(axis, Facts())
    for layer in layers:
        if layer not in facts.initial:
            continue
        start = float(facts.initial[layer][smallest])
        change = float(np.median(check.changes[axis][layer][smallest], -1).max())
        if 0 < start < change:
            yield (
                f"{facts.named(layer)} changes by {change / start:.1f} times its "
                "initial size in the smallest model: the rules hold for small steps; "
                "lower the learning rate"
            )
            return


def _fading(check: Any, axis: str, layers: list[str]) -> Iterator[str]:
    fits = check._fits()[axis]
    for layer in layers:
        step = fits[layer].worst
        if len(check.sizes[axis]) < 3 or abs(step.slope) <= check.tolerance:
            continue
        if 0 < step.tail / step.head < 0.8 and abs(step.slope) > 2 * step.steady:
            yield (
                f"the slope of {layer} fades with {axis}, from {step.head:+.2f} to "
                f"{step.tail:+.2f}: an effect of small models; use larger {axis}s, "
                f"or leave out the smallest"
            )
            return

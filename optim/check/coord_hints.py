"""Hints for a coordinate check: which known mistake would give these slopes."""

import math
import re
from collections.abc import Iterator

import numpy as np

from .coord_verdict import CoordCheck, Facts, Verdict, is_in_flat_block

_EMBEDDING = re.compile(r"(?i)embed|wte|wpe|tok|lookup")
_READOUT = re.compile(r"(?i)^(output|.*(readout|head|logits|classifier|lm_head|out))$")
_NEAR = 0.2  # distance from a multiple of a half at which a slope is recognized


def hints(check: CoordCheck) -> list[str]:
    """Hints for the slopes of a check.

    Args:
      check: the check.

    Returns:
      Sentences, the most specific first. If all layers are ok, the only hints are on
      parameters whose initial size depends on width in an unexpected way.
    """
    hints = [hint for axis in check.changes for hint in _of_axis(check, axis)]
    return list(dict.fromkeys(hints))


def _of_axis(check: CoordCheck, axis: str) -> Iterator[str]:
    verdicts = check.verdicts[axis]
    slopes = check.slopes[axis]
    wrong = [layer for layer, v in verdicts.items() if v is Verdict.WRONG]
    doubtful = [layer for layer, v in verdicts.items() if v is not Verdict.OK]
    facts = check.facts.get(axis, Facts())
    if axis == "width":
        # Whatever the slopes: Adam's updates do not depend on a weight's initial size.
        yield from _initial_sizes(check, facts, bool(wrong), bool(doubtful))
    if not doubtful:
        return
    if any(math.isnan(slopes[layer]) for layer in wrong):
        yield (
            "some activations are not finite: lower the learning rate, or, if all "
            "layers are listed, check the batch for NaN"
        )
        return
    yield from _large_steps(check, axis, doubtful)
    if axis == "width" and wrong:
        yield from _tied(facts)
    rising = [layer for layer in wrong if slopes[layer] > 0]
    falling = [layer for layer in doubtful if _is_half(slopes[layer], -1)]
    if rising:
        yield from _rising(check, axis, rising)
    if falling and axis == "width":
        yield from _falling(falling, check.own_loss)
    yield from _fading(check, axis, [x for x in doubtful if x not in wrong])
    yield from _noise(check, axis, [x for x in doubtful if x not in wrong])


def _is_half(slope: float, sign: int) -> bool:
    return abs(slope - sign * 0.5) < _NEAR - 0.05


def _quote(layers: list[str]) -> str:
    shown = ", ".join(repr(layer) for layer in layers[:3])
    return shown + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")


def _rising(check: CoordCheck, axis: str, rising: list[str]) -> Iterator[str]:
    slopes = check.slopes[axis]
    worst = max(rising, key=lambda layer: slopes[layer])
    size = f"{_quote(rising)} grow with {axis} (as {axis}^{slopes[worst]:+.1f})"
    if axis == "depth":
        fits = check._fits()[axis]
        if all(is_in_flat_block(layer, fits) for layer in rising):
            size += (
                ", the outputs of their blocks do not. This is usually finite depth: "
                "a forgotten branch multiplier makes these outputs grow too (+0.6 or "
                "more). Check the setup first"
            )
        hint = (
            f"{size}: are the residual branches multiplied by branch_multiplier(depth "
            "/ base depth), do the scales have depth=(base depth, this depth), and "
            "do branch outputs have mean zero over units (a ReLU's do not)?"
        )
        if check.strength is None:
            hint += (
                " If so, check again with strength=a**2 * base_depth, where a is the "
                "branch multiplier at the base depth, or with a smaller a or larger "
                "depths: inner layers of a network of finite depth grow"
            )
        yield hint
    elif all(_READOUT.match(layer) for layer in rising):
        yield (
            f"{size}, hidden layers do not: the readout is not scaled. Apply "
            "rescale_init, and train with an optimizer of mupax.optim or "
            "scale_by_parametrization"
        )
    else:
        yield (
            f"{size}: learning rates are not scaled. Make scales for each "
            "size, infer_scales(base, model of this width), with one base, and pass "
            "them to an optimizer of mupax.optim"
        )


def _falling(falling: list[str], own_loss: bool) -> Iterator[str]:
    if own_loss:
        yield (
            f"{_quote(falling)} fall as width^-0.5: with cross-entropy or a squared "
            "error the loss may be the cause, because its gradient depends "
            "on the initial outputs, which fall with width under μP. Pass a loss "
            "function that returns the outputs; the check then uses a linear loss"
        )
    else:
        yield (
            f"{_quote(falling)} fall as width^-0.5: their updates are too small, e.g. "
            "under 'ntk' or because the readout was rescaled twice"
        )


def _growth(shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    """The axes of a parameter that differ between sizes."""
    first = shapes[0]
    if any(len(s) != len(first) for s in shapes):
        return []
    return [i for i in range(len(first)) if len({s[i] for s in shapes}) > 1]


def _initial_sizes(
    check: CoordCheck, facts: Facts, kernels: bool, readouts: bool
) -> Iterator[str]:
    """Hints on embeddings that start smaller in wider models, and on constant kernels.

    With `readouts`, also hint at readouts of the standard parametrization. With
    `kernels`, also hint at kernels whose initial size does not fall with width. That is
    correct if the model multiplies its weights, as in mean field.
    """
    x = np.log(np.asarray(check.sizes["width"], dtype=float))
    x -= x.mean()
    for path, (shapes, rms) in facts.parameters.items():
        rank = len(shapes[0])
        if rank < 2 or not np.all(rms > 0):
            continue
        slope = float(x @ np.log(rms) / (x @ x))
        growing = _growth(shapes)
        if growing == [rank - 1] and _EMBEDDING.search(path) and slope < -_NEAR:
            yield (
                f"the embedding {path!r} starts smaller in wider models (as "
                f"width^{slope:.2f}); nnx.Embed and nn.Embed do by default. Give it "
                "embedding_init=initializers.normal(1.0), or call rescale_init(..., "
                "base=...)"
            )
        elif (
            readouts
            and growing == [rank - 2]
            and _READOUT.match(path.rpartition("/")[0])
            and _is_half(slope, -1)
        ):
            yield (
                f"the readout {path!r} starts as width^{slope:.2f}, as in the standard "
                "parametrization; under μP it starts as width^-1.00: apply "
                "rescale_init to the parameters"
            )
        elif kernels and len(growing) == 2 and slope > -0.5 + _NEAR:
            yield (
                f"{path!r} starts at nearly the same size in wider models (as "
                f"width^{slope:+.2f}, where width^-0.50 is right); call rescale_init("
                "..., init='constant') or rescale_init(..., base=...)"
            )


def _tied(facts: Facts) -> Iterator[str]:
    """Hint at tied embeddings if no parameter has a readout's shape."""
    shapes = {p: s for p, (s, _) in facts.parameters.items() if len(s[0]) >= 2}
    tables = [p for p in shapes if _EMBEDDING.search(p)]
    outputs = [
        path
        for path, s in shapes.items()
        if _growth(s) and len(s[0]) - 1 not in _growth(s)
    ]
    if tables and not outputs:
        yield (
            f"no parameter is a readout; if the logits use {tables[0]!r} again (tied "
            "embeddings), multiply them by 1/m, with m the width ratio, and pass "
            "tied=... to infer_scales"
        )


def _large_steps(check: CoordCheck, axis: str, layers: list[str]) -> Iterator[str]:
    """Hint at a learning rate so large that activations change by more than their size.

    Judged at the smallest model.
    """
    smallest = int(np.argmin(check.sizes[axis]))
    initial = check.facts.get(axis, Facts()).initial
    for layer in layers:
        start = float(initial[layer][smallest]) if layer in initial else 0.0
        change = float(np.median(check.changes[axis][layer][smallest], -1).max())
        if 0 < start < change:
            yield (
                f"{layer!r} changes by {change / start:.1f} times its initial size in "
                "the smallest model: the rules hold for small steps; lower the "
                "learning rate"
            )
            return


def _fading(check: CoordCheck, axis: str, layers: list[str]) -> Iterator[str]:
    fits = check._fits()[axis]
    for layer in layers:
        step = fits[layer].worst
        if len(check.sizes[axis]) < 3 or abs(step.slope) <= check.tolerance:
            continue
        if 0 < step.tail / step.head < 0.8 and abs(step.slope) > 2 * step.steady:
            yield (
                f"the slope of {layer!r} fades with {axis}, from {step.head:+.2f} to "
                f"{step.tail:+.2f}: an effect of small models; use larger {axis}s, "
                f"or leave out the smallest"
            )
            return


def _noise(check: CoordCheck, axis: str, layers: list[str]) -> Iterator[str]:
    fits = check._fits()[axis]
    noisy = [x for x in layers if fits[x].worst.half_width(0.05) > 0.15]
    seeds = next(iter(check.changes[axis].values())).shape[-1]
    if noisy:
        wide = max(fits[layer].worst.half_width(0.05) for layer in noisy)
        finite = math.isfinite(wide) and wide < 2
        need = max(math.ceil(seeds * (wide / 0.15) ** 2), 2 * seeds) if finite else 0
        many = f"about seeds={need}" if finite else "more seeds"
        yield f"the slopes of {_quote(noisy)} are noisy: use {many}, or more sizes"

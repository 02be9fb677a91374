"""Judge an optimizer by its updates on known gradients.

At the target, the part of an update that comes from the gradient must be Δ/θ times the
base's, whatever the size of the gradient; the part that comes from weight decay must
follow the weight alone. What an update does not have tells which mistake was made.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..apply.transforms import resolve
from ..rules.multipliers import Family, Multipliers, multipliers
from ..scales.probe import Kind, Mode, of_widest
from ..scales.table import Scales, stacked_vectors
from .probing import Condition, Probe, Run, rms

# Sizes of the base's gradients. Adam's eps does not matter at the first, clipping
# does not matter at the second, and any eps is larger than the third.
_LARGE, _SMALL, _TINY = 1e3, 1e-3, 1e-12
# Weights beside which a decay inside a trust ratio vanishes.
_LIGHT = 1e-4
# Sizes of gradients after one that is clipped.
_THEN = (1.0, 0.03, 1e-3)
# A factor of updates beyond which every clipping acts.
_LOUD = 2.0**20
# Mistakes change an update by a ratio of widths or depths, which is far from one.
_TOLERANCE = 0.05

_CONDITIONS = (
    Condition(_LARGE),
    Condition(0.0),
    Condition(2 * _LARGE),
    Condition(_SMALL),
    Condition(2 * _SMALL),
    Condition(_SMALL, odd=2.0),
    Condition(0.0, 0.0),
    Condition(0.0, 2.0),
    Condition(_LARGE, 2.0),
    Condition(_LARGE, _LIGHT),
    Condition(_TINY, 0.0),
    Condition(2 * _TINY, 0.0),
    *(Condition(_LARGE, then=size) for size in _THEN),
)
_ENLARGED = {size: Condition(size, loud=_LOUD) for size in (_LARGE, 0.0)}


@dataclasses.dataclass(frozen=True)
class Checked:
    """Result of `check_chain` for one parameter.

    Attributes:
      factor: size of the target's update, relative to the base's.
      expected: the factor that the rules give. Both are None if the update is zero,
        or its size cannot be measured.
      hint: what may be wrong, or "".

    Examples:
      >>> Checked(factor=0.25, expected=0.25).hint
      ''
    """

    factor: float | None = None
    expected: float | None = None
    hint: str = ""


def judge(
    probe: Probe,
    rules: Mapping[str, Multipliers],
    scales: Scales,
) -> tuple[dict[str, Checked], list[str]]:
    """Run a probe at base and target, and judge the updates of each parameter.

    `rules` are the multipliers of Adam's family by path: its raw updates have size one,
    so its learning rate is the ratio that updates must have. Returns the results by
    path, and for each parameter what is wrong, or "".
    """
    # With gradients of the base's global norm, clipping by it multiplies both alike.
    norm = probe.norm(Mode.BASE) / probe.norm(Mode.TARGET)
    alike = [Condition(_LARGE * norm, then=size * norm) for size in _THEN]
    base, _ = probe.run(Mode.BASE, _CONDITIONS)
    more = [*alike, *_ENLARGED.values()]
    target, acted = probe.run(Mode.TARGET, [*_CONDITIONS, *more])
    runs = {Mode.BASE: base, Mode.TARGET: target}
    rows = []
    for path in base[Condition(_LARGE)].first:
        acts = {kind: acted.of(kind, path) for kind in Kind}
        rows.append(_Parameter(path, runs, acts, probe, rules[path], scales, alike))
    descends = any(row.ascent < 0 for row in rows)
    spared = any(not row.decays for row in rows)
    results = {row.path: row.checked(descends, spared) for row in rows}
    checked = {path: result for path, (result, _) in results.items()}
    return checked, [problem for _, problem in results.values()]


class _Parameter:
    """The updates of one parameter, and the judgements drawn from them."""

    def __init__(
        self,
        path: str,
        runs: Mapping[Mode, Mapping[Condition, Run]],
        acted: Mapping[Kind, list[Any]],
        probe: Probe,
        rule: Multipliers,
        scales: Scales,
        alike: list[Condition],
    ):
        self.path, self.scale, self.scales = path, scales[path].widest, scales
        self.runs, self.acted = runs, acted
        self.rule, self.rate, self.alike = rule, rule.learning_rate, alike
        self.slope, self.weight = probe.slope(path), probe.weight(path)
        self.heavier = probe.leaves[path].weight
        one, two = (rms(self.update(Mode.BASE, _LARGE, w)) for w in (1.0, 2.0))
        self.relative = _near(two, 2 * one)
        self.noise = self.update(Mode.BASE, 0.0, 0.0)
        self.decay, double = (self.update(Mode.BASE, 0.0, w) for w in (1.0, 2.0))
        self.proportional = np.allclose(double, 2 * self.decay, rtol=1e-3)
        # Without a gradient, a trust ratio scales the decay to the whole update's size.
        trusted = self.relative and _near(rms(self.decay), one)
        # Whether a decay proportional to the weight is added to the update.
        self.decays = bool(np.any(self.decay)) and self.proportional and not trusted
        update = self.part(Mode.BASE, _LARGE)
        finite = np.all(np.isfinite(update))
        # By how much the update raises the loss.
        self.ascent = float(np.vdot(update, self.slope)) if finite else 0.0

    # --- sizes ---

    def update(self, which: Mode, gradient: float, weight: float = 1.0) -> np.ndarray:
        """The first update under a condition."""
        return self.runs[which][Condition(gradient, weight)].first[self.path]

    def part(self, which: Mode, gradient: float, weight: float = 1.0) -> np.ndarray:
        """The part of an update that comes from the gradient, not from weight decay."""
        update = self.update(which, gradient, weight)
        return update - weight * self.update(which, 0.0) if self.decays else update

    def size(self, which: Mode, gradient: float, weight: float = 1.0) -> float:
        return rms(self.part(which, gradient, weight))

    def degree(self, gradient: float, which: Mode = Mode.BASE) -> float:
        """Power of the gradient with which the update grows."""
        one, two = (self.size(which, gradient * k) for k in (1, 2))
        return math.log2(two / one) if one > 0 and two > 0 else math.nan

    def has_degree(self, power: int, gradient: float) -> bool:
        return all(abs(self.degree(gradient, m) - power) < 0.03 for m in Mode)

    def independent(self) -> bool:
        """Whether the base's updates do not depend on the size of large gradients."""
        return abs(self.degree(_LARGE)) < 0.03

    def alone(self) -> bool:
        """Whether updates do not depend on small gradients of other parameters."""
        # Every second parameter has a gradient that is twice as large.
        mixed = self.runs[Mode.BASE][Condition(_SMALL, odd=2.0)].first[self.path]
        return any(
            np.allclose(self.update(Mode.BASE, size), mixed, rtol=1e-3, atol=0)
            for size in (_SMALL, 2 * _SMALL)
        )

    def factor(self) -> float | None:
        """Target's update over the base's; None if no regime allows measuring it."""
        if not self.alone():
            return None
        seen = []
        light = [(_LARGE, _LIGHT)] if self.relative else []
        for gradient, weight in ((_LARGE, 1.0), (_SMALL, 1.0), *light):
            powers = [p for p in (0, 1) if self.has_degree(p, gradient)]
            base, target = (self.size(which, gradient, weight) for which in Mode)
            if not base > 0 or (weight == 1.0 and not powers):
                continue
            if gradient == _SMALL and powers == [1]:
                # Updates are proportional to gradients of usual size: this one counts.
                return target / base
            seen.append(target / base)
        good = [f for f in seen if _near(f, self.rate)]
        return next(iter(good or seen), None)

    def enlarged(self, gradient: float) -> np.ndarray:
        """The target's update with larger factors of scalings."""
        return self.runs[Mode.TARGET][_ENLARGED[gradient]].first[self.path]

    def gain(self) -> float:
        """Power of the scaling's factors with which the update grows; 1 if unknown."""
        usual = rms(self.update(Mode.TARGET, _LARGE) - self.update(Mode.TARGET, 0.0))
        large = rms(self.enlarged(_LARGE) - self.enlarged(0.0))
        if not (self.acted[Kind.SCALING] and usual > 0 and large > 0):
            return 1.0
        return math.log(large / usual, _LOUD)

    # --- judgements ---

    def checked(self, descends: bool, spared: bool) -> tuple[Checked, str]:
        """The result, and what is wrong, or "".

        `descends` is whether the update of any parameter lowers the loss, and `spared`
        whether any parameter does not decay.
        """
        both = [self.update(which, _LARGE) for which in Mode]
        if descends and self.passes_through():
            return Checked(), (
                f"the update of {self.path!r} is its gradient, which raises the loss: "
                "optax.masked passes gradients through where its mask is False. To "
                'freeze parameters, use optax.partition({"train": tx, "freeze": '
                "optax.set_to_zero()}, labels)"
            )
        if not any(map(np.any, both)):
            return Checked(), ""  # frozen
        if not all(np.all(np.isfinite(update)) for update in both):
            return Checked(hint="the update is not finite, and cannot be checked"), ""
        factor = self.factor()
        problem = next(filter(None, self.problems(factor)), "")
        hint = "" if problem else next(filter(None, self.hints(spared)), "")
        return Checked(factor, self.rate, hint), problem

    def problems(self, factor: float | None) -> Iterator[str]:
        yield from self.decay_problems()
        yield from self.scaling_problems(factor)
        # Weight decay whose effect does not follow the weight.
        if np.any(self.decay) and not (np.any(self.noise) or self.proportional):
            yield self.wrong_decay("passes through the optimizer (L2)")
        yield self.normalization()[1]
        if self.ascent > 0:
            yield (
                f"the update of {self.path!r} points along its gradient, which raises "
                "the loss: the learning rate needs a minus, which "
                "optax.scale_by_learning_rate has; two of them, or one beside a whole "
                "optimizer, cancel it: in place of optax.adam(rate) use "
                "optax.scale_by_adam(). To maximize, put optax.scale(-1.0) beside "
                "this chain in an optax.chain"
            )

    def decay_problems(self) -> Iterator[str]:
        # Noise needs neither a gradient nor a weight.
        decay = self.decay - self.noise
        grows = float(np.vdot(decay, self.weight)) > 0
        if self.ascent < 0 and grows and np.all(np.isfinite(decay)):
            yield self.wrong_decay("makes the weights grow")
        if all(np.all(self.update(m, _LARGE) == self.update(m, 0.0)) for m in Mode):
            yield (
                f"the update of {self.path!r} is its weight decay alone: if it is "
                "frozen, freeze it after the decay, or by optax.partition with "
                "optax.set_to_zero()"
            )
        if self.decays and not self.relative:
            target = rms(self.update(Mode.TARGET, 0.0))
            factor = target / rms(self.decay) / self.heavier
            scaled = not _near(rms(self.enlarged(0.0)), target)
            if scaled or not _near(factor, 1):
                yield self.wrong_decay(
                    f"is multiplied by {factor:.4g} and must not be scaled"
                )

    def scaling_problems(self, factor: float | None) -> Iterator[str]:
        gain = self.gain()
        if abs(gain - 2) < 0.003:
            yield (
                f"the updates of {self.path!r} are scaled twice: drop "
                "scale_by_parametrization, or use optax's own scale_by_... transforms "
                "in place of an optimizer of mupax.optim"
            )
        elif abs(gain - 1) > 0.003:
            yield (
                f"the scaling of {self.path!r} has no effect on its update, or only "
                "part of it: put clipping first, then the transform that makes the "
                "update, then scale_by_parametrization"
            )
        if factor is not None and not _near(factor, self.rate):
            off = factor / self.rate
            size = f"{off:.4g} times too large"
            if off < 1:
                size = f"{1 / off:.4g} times too small"
            yield (
                f"the update of {self.path!r} is {factor:.4g} times the base's and "
                f"should be {self.rate:.4g} times: it is {size}; {self.reason(factor)}"
            )

    def hints(self, spared: bool) -> Iterator[str]:
        own = not self.alone() or self.degree(_LARGE) < -0.5
        if own or np.any(self.noise):
            yield (
                f"the update of {self.path!r} does not follow its gradient alone: it "
                "is noise, or a step size found from other parameters' gradients; no "
                "rule is known for it: tune it again at the target, or leave it out"
            )
        yield self.normalization()[0]
        if self.path in stacked_vectors(self.scales) and self.decays and spared:
            yield (
                f"the weight decay of {self.path!r}, of shape "
                f"{self.scale.shape}, acts on a bias or norm scale in each "
                "layer of a stack, as the mask x.ndim >= 2 does; choose kernels by "
                "their names, or use optim.adamw with mask='matrices'"
            )
        bounded = self.has_degree(1, _SMALL) and abs(self.degree(_LARGE) - 1) > 0.03
        if (bounded and not self.acted[Kind.NORMALIZING]) or self.is_clipped_alone():
            yield (
                f"the gradient of {self.path!r}, whose size changes with width and "
                "depth, is clipped by a fixed number or by its weight, or by the "
                "global norm after it was normalized: put optax.clip_by_global_norm "
                "first, or optax.clip between optim.normalize_gradients and Optax's "
                "own scale_by_... transform; with SGD, tune the threshold again at the "
                "target, or leave it out"
            )

    def passes_through(self) -> bool:
        """Whether the gradient itself is the update."""
        # Below every threshold of clipping, and above.
        return bool(np.any(self.slope)) and any(
            np.allclose(self.update(Mode.BASE, size), size * self.slope, 1e-6, 0)
            for size in (_SMALL, _LARGE)
        )

    def wrong_decay(self, what: str) -> str:
        return (
            f"the weight decay of {self.path!r} {what}: make it positive, and put "
            "add_decayed_weights after scale_by_parametrization and before the "
            "learning rate, which has the minus, in place of an Optax optimizer that "
            "decays by itself; or use optim.adamw or optim.build_optimizer(..., "
            "weight_decay=...)"
        )

    def reason(self, factor: float) -> str:
        """The likeliest mistake that gives this factor, with a remedy."""
        scaling = next(iter(self.acted[Kind.SCALING]), None)
        if scaling is None:
            return (
                "no scaling acts on it: use an optimizer of mupax.optim, or add "
                "scale_by_parametrization after the transform that makes the update"
            )
        point, other = resolve(self.scales), resolve(scaling.scales)
        if not point.same_rules(other):
            return (
                f"tx scales by {other.label}, and this check is for {point.label}: "
                "give both the same scales"
            )
        if scaling.scales.get(self.path) != self.scales[self.path]:
            return "tx was made from other scales: make it from those of this check"
        base, target = (self.size(which, _LARGE) for which in Mode)
        if base and self.independent() and _near(target / base, self.rate):
            return (
                "its eps or initial accumulator is larger than gradients of 0.001, so "
                "the update is proportional to the gradient: put optim."
                "normalize_gradients(scales) before it"
            )
        applied = of_widest(scaling.factors[self.path], self.scales[self.path])
        wanted = self.rate * applied / factor
        fits = [
            family.value
            for family in Family
            if _near(multipliers(self.scale, point, family).learning_rate, wanted)
        ]
        normalized = _near(factor * self.rule.gradient, self.rate)
        normalized = normalized and bool(self.acted[Kind.NORMALIZING])
        if normalized and not (fits and self.independent()):
            return (
                "normalize_gradients changes its size: drop it with SGD, and put it "
                "before the transform that makes the update with other optimizers"
            )
        needed = f"the scaling multiplies it by {applied:.4g} and it needs {wanted:.4g}"
        if fits:
            return (
                f"{needed}: pass family={fits[0]!r}; where an optax.partition has "
                "several optimizers, put a scaling into each branch"
            )
        return (
            f"{needed}: this optimizer is in none of the families (sgd, adam, "
            "spectral, relative), or a transform after the scaling changes its updates"
        )

    def normalization(self) -> tuple[str, str]:
        """(hint, problem) if eps is not compared with a gradient of the base's size."""
        gradient = self.rule.gradient
        adaptive = self.alone() and self.independent() and not self.relative
        if _near(gradient, 1) or not adaptive:
            return "", ""
        sizes = []
        for which in Mode:
            one, two = (rms(self.update(which, k * _TINY, 0.0)) for k in (1, 2))
            if not (one > 0 and _near(two, 2 * one)):
                return "", ""
            sizes.append(one)
        got = sizes[1] / sizes[0] / self.rate
        if _near(got, 1):
            return "", ""
        if _near(got, gradient):
            return (
                f"the gradients of {self.path!r} are {gradient:.4g} times the base's, "
                "but its eps is the same: put normalize_gradients(scales) before the "
                "transform that has eps",
                "",
            )
        if _near(got, 1 / gradient):
            return "", (
                f"the gradients of {self.path!r} are normalized twice: use one "
                "normalize_gradients, and none before an optimizer of mupax.optim, "
                "which has its own"
            )
        return "", (
            f"the gradient of {self.path!r} is multiplied by {got / gradient:.4g} "
            "before eps is added; it should be multiplied by "
            f"{1 / gradient:.4g}: give normalize_gradients and the scaling the same "
            "scales"
        )

    def is_clipped_alone(self) -> bool:
        """Whether a large gradient is clipped before it has the base's size.

        Adam's next update shows it. It is right if the target's follows the base's for
        gradients of the same normalized size, or of the same global norm.
        """
        if _near(self.rule.gradient, 1) or not self.has_degree(0, _SMALL):
            return False
        base, *targets = (
            [
                self.runs[which][condition].second[self.path]
                - self.runs[which][Condition(0.0)].second[self.path] * self.decays
                for condition in conditions
            ]
            for which, conditions in (
                (Mode.BASE, [Condition(_LARGE, then=size) for size in _THEN]),
                (Mode.TARGET, [Condition(_LARGE, then=size) for size in _THEN]),
                (Mode.TARGET, self.alike),
            )
        )
        return not any(
            all(
                not np.any(b) or _near(rms(t) / rms(b), self.rate)
                for b, t in zip(base, target, strict=True)
            )
            for target in targets
        )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * abs(other)

"""Judge an optimizer by its updates on known gradients.

At the target, the part of an update that comes from the gradient must be Δ/θ times the
base's, whatever the size of the gradient; the part that comes from weight decay must
follow the weight alone. What an update does not have tells which mistake was made.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..apply.transforms import resolve
from ..rules.multipliers import GEOMETRIES, Family, Multipliers, multipliers
from ..scales.probe import Acting, Mode, of_widest
from ..scales.table import Scales
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


def judge(
    probe: Probe, rules: Mapping[str, Multipliers], scales: Scales
) -> tuple[dict[str, float | None], list[str], list[str]]:
    """Run a probe at base and target, and judge the updates of each parameter.

    `rules` are the multipliers of Adam by path: its raw updates have size one, so its
    learning rate is the ratio that updates must have. Returns the ratios by path (None:
    zero, or not measurable), what is wrong, and what may be.
    """
    # With gradients of the base's global norm, clipping by it multiplies both alike.
    norm = probe.norm(Mode.BASE) / probe.norm(Mode.TARGET)
    alike = [Condition(_LARGE * norm, then=size * norm) for size in _THEN]
    base, _ = probe.run(Mode.BASE, _CONDITIONS)
    more = [*alike, *_ENLARGED.values()]
    target, acted = probe.run(Mode.TARGET, [*_CONDITIONS, *more])
    runs = {Mode.BASE: base, Mode.TARGET: target}
    factors: dict[str, float | None] = {}
    problems, hints = [], []
    for path in base[Condition(_LARGE)].first:
        scaling = next(iter(acted.scalings.get(path, ())), None)
        row = _Parameter(path, runs, scaling, probe, rules[path], scales)
        factors[path], updates = None, [row.update(which, _LARGE) for which in Mode]
        if not any(map(np.any, updates)):
            continue  # frozen
        if not all(np.isfinite(update).all() for update in updates):
            hints.append(f"the update of {path!r} is not finite, and is not checked")
            continue
        factors[path] = row.factor()
        if problem := next(row.problems(), None):
            problems.append(problem)
        elif hint := next(row.hints(alike), None):
            hints.append(hint)
    return factors, problems, hints


class _Parameter:
    """The updates of one parameter, and the judgements drawn from them."""

    def __init__(
        self,
        path: str,
        runs: Mapping[Mode, Mapping[Condition, Run]],
        scaling: Acting | None,
        probe: Probe,
        rule: Multipliers,
        scales: Scales,
    ):
        self.path, self.scales = path, scales
        self.runs, self.scaling = runs, scaling
        self.gradient, self.rate = rule.gradient, rule.learning_rate
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

    # --- sizes ---

    def update(self, which: Mode, gradient: float, weight: float = 1.0) -> np.ndarray:
        """The first update under a condition."""
        return self.runs[which][Condition(gradient, weight)].first[self.path]

    def part(self, which: Mode, gradient: float, weight: float = 1.0) -> np.ndarray:
        """The part of an update that comes from the gradient, not from weight decay."""
        update = self.update(which, gradient, weight)
        return update - weight * self.update(which, 0.0) if self.decays else update

    def degree(self, gradient: float) -> float:
        """Power of the gradient with which the base's update grows."""
        one, two = (rms(self.part(Mode.BASE, gradient * k)) for k in (1, 2))
        return math.log2(two / one) if one > 0 and two > 0 else math.nan

    def ratio(self, gradient: float, weight: float = 1.0) -> float:
        """The target's update over the base's; NaN if that is zero."""
        base, target = (rms(self.part(which, gradient, weight)) for which in Mode)
        return target / base if base > 0 else math.nan

    def alone(self) -> bool:
        """Whether updates do not depend on small gradients of other parameters."""
        # Every second parameter has a gradient that is twice as large.
        mixed = self.runs[Mode.BASE][Condition(_SMALL, odd=2.0)].first[self.path]
        return any(
            np.allclose(self.update(Mode.BASE, size), mixed, rtol=1e-3, atol=0)
            for size in (_SMALL, 2 * _SMALL)
        )

    def factor(self) -> float | None:
        """The ratio at the size of gradients at which it is most nearly right.

        None if other parameters' gradients take part.
        """
        light = [(_LARGE, _LIGHT)] if self.relative else []
        ratios = [self.ratio(*each) for each in ((_LARGE,), (_SMALL,), *light)]
        ratios = [ratio for ratio in ratios if ratio > 0]
        if not ratios or not self.alone():
            return None
        return min(ratios, key=lambda ratio: abs(math.log(ratio / self.rate)))

    def enlarged(self, gradient: float) -> np.ndarray:
        """The target's update with larger factors of scalings."""
        return self.runs[Mode.TARGET][_ENLARGED[gradient]].first[self.path]

    def gain(self) -> float:
        """Power of the scaling's factors with which the update grows; 1 if unknown."""
        usual = rms(self.update(Mode.TARGET, _LARGE) - self.update(Mode.TARGET, 0.0))
        large = rms(self.enlarged(_LARGE) - self.enlarged(0.0))
        if not (self.scaling and usual > 0 and large > 0):
            return 1.0
        return math.log(large / usual, _LOUD)

    # --- judgements ---

    def problems(self) -> Iterator[str]:
        """What is wrong, the surest first."""
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
        ascent = float(np.vdot(self.part(Mode.BASE, _LARGE), self.slope))
        if ascent > 0:
            yield (
                f"the update of {self.path!r} points along its gradient, which raises "
                "the loss: the learning rate needs one minus, which "
                "optax.scale_by_learning_rate and whole optimizers such as "
                "optax.adam(rate) have; the precondition of optim.build_optimizer is a "
                "transform without it, such as optax.scale_by_adam(). To freeze "
                "parameters, use optax.partition("
                '{"train": tx, "freeze": optax.set_to_zero()}, labels), as '
                "optax.masked passes gradients through. To maximize, put optax.scale("
                "-1.0) beside this chain in an optax.chain"
            )
        if wrong := self.wrong_decay(descends=ascent < 0):
            yield (
                f"the weight decay of {self.path!r} {wrong}: make it positive, and put "
                "add_decayed_weights after scale_by_parametrization and before the "
                "learning rate, which has the minus, in place of an Optax optimizer "
                "that decays by itself; or use optim.adamw or optim.build_optimizer("
                "..., weight_decay=...). To freeze parameters, use optax.partition "
                "with optax.set_to_zero()"
            )
        factor = self.factor()
        if factor is not None and not _near(factor, self.rate):
            yield (
                f"the update of {self.path!r} is {factor:.4g} times the base's and "
                f"should be {self.rate:.4g} times; {self.reason(factor)}"
            )
        normal = self.normalization()
        if not (_near(normal, 1) or _near(normal, self.gradient)):
            yield (
                f"the gradient of {self.path!r} is multiplied by "
                f"{normal / self.gradient:.4g} before eps is added; it should be "
                f"multiplied by {1 / self.gradient:.4g}: use one normalize_gradients, "
                "with the scales of the scaling, and none before an optimizer of "
                "mupax.optim, which has its own"
            )

    def wrong_decay(self, *, descends: bool) -> str:
        """What is wrong with the weight decay, or ""."""
        # Noise needs neither a gradient nor a weight.
        decay = self.decay - self.noise
        if not np.any(decay) or not np.all(np.isfinite(decay)):
            return ""
        if descends and float(np.vdot(decay, self.weight)) > 0:
            return "makes the weights grow"
        if all(np.all(self.update(m, _LARGE) == self.update(m, 0.0)) for m in Mode):
            return "is its whole update"
        if self.decays and not self.relative:
            target = rms(self.update(Mode.TARGET, 0.0))
            factor = target / rms(self.decay) / self.heavier
            if not (_near(rms(self.enlarged(0.0)), target) and _near(factor, 1)):
                return f"is scaled, here by {factor:.4g}"
        if not self.proportional and not np.any(self.noise):
            return "passes through the optimizer (L2)"
        return ""

    def reason(self, factor: float) -> str:
        """The likeliest mistake that gives this factor, with a remedy."""
        scaling = self.scaling
        if scaling is None:
            return (
                "no scaling acts on it: use an optimizer of mupax.optim, or add "
                "scale_by_parametrization after the transform that makes the update"
            )
        point, other = resolve(self.scales), resolve(scaling.scales)
        scale = self.scales[self.path]
        if scaling.scales.get(self.path) != scale or not point.same_rules(other):
            return (
                f"tx scales by other scales ({other.label}) than those of this check "
                f"({point.label}): give both the same"
            )
        applied = of_widest(scaling.factors[self.path], scale)
        wanted = self.rate * applied / factor
        needed = f"the scaling multiplies it by {applied:.4g} and it needs {wanted:.4g}"
        degree = self.degree(_SMALL)
        for family in Family:
            rule = multipliers(scale.widest, point, family)
            alike = abs(GEOMETRIES[family].gradient - degree) < 0.03
            if alike and _near(rule.learning_rate, wanted):
                return (
                    f"{needed}: pass family={family.value!r}; where an optax.partition "
                    "has several optimizers, put a scaling into each branch"
                )
        return (
            f"{needed}: this optimizer is in none of the families (sgd, adam, "
            "spectral, relative), or another transform changes the size of its "
            "updates, e.g. a normalize_gradients that stands after the transform that "
            "makes the update, or is used with SGD"
        )

    def normalization(self) -> float:
        """Size of gradients that meet eps, relative to the base's; 1 if unknown."""
        known = self.alone() and abs(self.degree(_LARGE)) < 0.03 and not self.relative
        if _near(self.gradient, 1) or not known:
            return 1.0
        for which in Mode:
            one, two = (rms(self.update(which, k * _TINY, 0.0)) for k in (1, 2))
            if not (one > 0 and _near(two, 2 * one)):
                return 1.0
        base, target = (rms(self.update(which, _TINY, 0.0)) for which in Mode)
        normal: float = target / base / self.rate
        return normal

    def hints(self, alike: Sequence[Condition]) -> Iterator[str]:
        """What may be wrong."""
        own = not self.alone() or self.degree(_LARGE) < -0.5
        if own or np.any(self.noise):
            yield (
                f"the update of {self.path!r} does not follow its gradient alone: it "
                "is noise, or a step size found from other parameters' gradients; no "
                "rule is known for it: tune it again at the target, or leave it out"
            )
        if not _near(self.normalization(), 1):
            yield (
                f"the gradients of {self.path!r} are {self.gradient:.4g} times the "
                "base's, but its eps is the same: put normalize_gradients(scales) "
                "before the transform that has eps"
            )
        bounded = not _near(self.ratio(_LARGE), self.rate) and self.degree(_SMALL) > 0.5
        if bounded or self.is_clipped_alone(alike):
            yield (
                f"the gradient of {self.path!r}, whose size changes with width and "
                "depth, is clipped by a fixed number or by its weight, or by the "
                "global norm after it was normalized: put optax.clip_by_global_norm "
                "first, or optax.clip between optim.normalize_gradients and Optax's "
                "own scale_by_... transform; with SGD, tune the threshold again at the "
                "target, or leave it out"
            )

    def is_clipped_alone(self, alike: Sequence[Condition]) -> bool:
        """Whether a large gradient is clipped before it has the base's size.

        Adam's next update shows it. It is right if the target's follows the base's for
        gradients of the same normalized size, or of the same global norm.
        """
        if _near(self.gradient, 1) or abs(self.degree(_SMALL)) > 0.03:
            return False
        same = [Condition(_LARGE, then=size) for size in _THEN]
        base = self.seconds(Mode.BASE, same)
        return not any(
            all(
                not np.any(b) or _near(rms(t) / rms(b), self.rate)
                for b, t in zip(base, self.seconds(Mode.TARGET, each), strict=True)
            )
            for each in (same, alike)
        )

    def seconds(self, which: Mode, conditions: Sequence[Condition]) -> list[np.ndarray]:
        """The second updates, without their decay."""
        decay = self.runs[which][Condition(0.0)].second[self.path] * self.decays
        return [self.runs[which][c].second[self.path] - decay for c in conditions]


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * abs(other)

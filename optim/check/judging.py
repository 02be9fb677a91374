"""Judge an optimizer by its updates on known gradients."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..apply.transforms import resolve
from ..rules.multipliers import Family, Multipliers, multipliers
from ..scales.probe import Kind, Mode
from ..scales.table import Scales, stacked_vectors
from .probing import Condition, Probe, rms

# Sizes of the base's gradients. Adam's eps does not matter at the first, clipping
# does not matter at the second.
_LARGE, _SMALL = 1e3, 1e-3
# A gradient far below any eps.
_TINY = 1e-12
# Weights beside which no decay is seen.
_LIGHT = 1e-4
# Factors of updates beyond which every clipping acts, and none.
_LOUD, _QUIET = 2.0**20, 2.0**-20
# Sizes of gradients after one that is clipped.
_THEN = (1.0, 0.03, 1e-3)
# Mistakes change an update by a ratio of widths or depths, which is far from one.
_TOLERANCE = 0.05

_AT_BASE = (
    Condition(_LARGE),
    Condition(0.0),
    Condition(2 * _LARGE),
    Condition(_SMALL),
    Condition(2 * _SMALL),
    Condition(0.0, 0.0),
    Condition(0.0, 2.0),
    Condition(_LARGE, 2.0),
    Condition(_TINY, 0.0),
    Condition(2 * _TINY, 0.0),
    # Inside a trust ratio, the decay of small weights vanishes.
    Condition(_LARGE, _LIGHT),
    Condition(0.0, _LIGHT),
    Condition(_SMALL, odd=2.0),
    *(Condition(_LARGE, then=size) for size in _THEN),
    *(Condition(_LARGE, then=size, odd=2.0) for size in _THEN),
)
_CONDITIONS = {
    Mode.BASE: _AT_BASE,
    Mode.TARGET: (
        *_AT_BASE,
        Condition(0.0, loud=_LOUD),
        Condition(_LARGE, loud=_LOUD),
        # Light, so that no decay hides the gradient's part.
        Condition(_LARGE, _LIGHT, loud=_QUIET),
    ),
}

ONE_SCALING = (
    "drop scale_by_parametrization, or use optax's own scale_by_... transforms in "
    "place of an optimizer of mupax.optim"
)
_ONE_NORMALIZING = (
    "use one normalize_gradients, and none before an optimizer of mupax.optim, which "
    "has its own"
)


@dataclasses.dataclass(frozen=True)
class Checked:
    """Result of `check_chain` for one parameter.

    Attributes:
      factor: size of the target's update, relative to the base's.
      expected: the factor that the rules give. Both are None if the update is zero,
        or its size cannot be measured.
      problem: what is wrong, or "".
      hint: what may be wrong, or "".

    Examples:
      >>> Checked(factor=1.0, expected=0.25).off
      4.0
    """

    factor: float | None = None
    expected: float | None = None
    problem: str = ""
    hint: str = ""

    @property
    def off(self) -> float | None:
        """Factor by which the update is too large; None if its size is right."""
        if not self.factor or not self.expected or _near(self.factor, self.expected):
            return None
        return self.factor / self.expected

    @property
    def verdict(self) -> str:
        """A word for a table: "ok", "WRONG" or "unclear"."""
        if self.problem:
            return "WRONG"
        return "ok" if self.factor is not None else "unclear"


class Judge:
    """The runs of one check, and the judgements drawn from them.

    Args:
      probe: the optimizer and the tree on which it runs.
      rules: the multipliers of Adam's family by path. Adam's raw updates have size
        one, so its learning rate is the ratio that updates must have.
      scales: of the model.
    """

    def __init__(self, probe: Probe, rules: Mapping[str, Multipliers], scales: Scales):
        self.probe, self.rules, self.scales = probe, rules, scales
        self.runs = {}
        for which, conditions in _CONDITIONS.items():
            self.runs[which], self.acted = probe.run(which, conditions)
        self.paths = list(self.runs[Mode.BASE][Condition(_LARGE)].first)

    def rows(self) -> dict[str, Checked]:
        """The result of each parameter."""
        self.clipped = self._is_clipped_as_one()
        self.coupled = self._is_coupled()
        self.descends = any(self._slope(path) < 0 for path in self.paths)
        return {path: self._row(path) for path in self.paths}

    def _row(self, path: str) -> Checked:
        if self.descends and self._passes_through(path):
            return Checked(
                problem=f"the update of {path!r} is its gradient, which raises the "
                "loss: optax.masked passes gradients through where its mask is False. "
                'To freeze parameters, use optax.partition({"train": tx, "freeze": '
                "optax.set_to_zero()}, labels)"
            )
        both = [self._update(path, which, _LARGE) for which in Mode]
        if not any(map(np.any, both)):
            return Checked()  # frozen
        if not all(np.all(np.isfinite(update)) for update in both):
            return Checked(hint="the update is not finite, and cannot be checked")
        factor, expected = self._factor(path), self.rules[path].learning_rate
        problem = next(filter(None, self._problems(path, factor)), "")
        hint = "" if problem else next(filter(None, self._hints(path)), "")
        return Checked(factor, expected, problem, hint)

    def _problems(self, path: str, factor: float | None) -> Iterator[str]:
        yield self._twice(path)
        yield self._growing(path)
        yield self._alone(path)
        yield self._scaled_decay(path)
        yield self._response(path)
        yield self._wrong_size(path, factor)
        yield self._coupled_decay(path)
        yield self._normalization(path)[1]
        yield self._climbing(path)

    def _hints(self, path: str) -> Iterator[str]:
        yield self._normalization(path)[0]
        yield self._stacked(path)
        yield self._noise(path)
        yield self._clipping(path)
        yield self._threshold(path)
        yield self._shared(path)
        yield self._shrinking(path)

    # --- sizes ---

    def _update(
        self, path: str, which: Mode, gradient: float, weight: float = 1.0
    ) -> np.ndarray:
        return self.runs[which][Condition(gradient, weight)].first[path]

    def _decay(self, path: str, which: Mode, weight: float = 1.0) -> np.ndarray:
        """The part of an update that comes from weight decay, not from the gradient."""
        return self._update(path, which, 0.0, weight)

    def _part(
        self, path: str, which: Mode, gradient: float, weight: float = 1.0
    ) -> np.ndarray:
        """The part of an update that comes from the gradient, not from weight decay."""
        update = self._update(path, which, gradient, weight)
        apart = self._decays_apart(path)
        return update - self._decay(path, which, weight) if apart else update

    def _size(self, *condition: Any) -> float:
        return rms(self._part(*condition))

    def _decays_apart(self, path: str) -> bool:
        """Whether a decay proportional to the weight is added to the update."""
        one, two = (self._decay(path, Mode.BASE, w) for w in (1.0, 2.0))
        # Without a gradient, a trust ratio scales the decay to the whole update's size.
        whole = rms(self._update(path, Mode.BASE, _LARGE))
        if self._is_relative(path) and _near(rms(one), whole):
            return False
        return bool(np.any(one)) and np.allclose(two, 2 * one, rtol=1e-3)

    def _degree(self, path: str, which: Mode, gradient: float) -> float:
        """Power of the gradient with which the update grows."""
        one, two = (self._size(path, which, gradient * k) for k in (1, 2))
        return math.log2(two / one) if one > 0 and two > 0 else math.nan

    def _clean_degree(self, path: str, gradient: float) -> int | None:
        """1 if the update is proportional to the gradient, 0 if independent of it."""
        degrees = [self._degree(path, which, gradient) for which in Mode]
        for clean in (0, 1):
            if all(abs(degree - clean) < 0.03 for degree in degrees):
                return clean
        return None

    def _is_relative(self, path: str) -> bool:
        one, two = (rms(self._update(path, Mode.BASE, _LARGE, w)) for w in (1.0, 2.0))
        return _near(two, 2 * one)

    def _factor(self, path: str) -> float | None:
        """Target's update over the base's; None if no regime allows measuring it."""
        seen = []
        light = [(_LARGE, _LIGHT)] if self._is_relative(path) else []
        for gradient, weight in ((_LARGE, 1.0), (_SMALL, 1.0), *light):
            degree = self._clean_degree(path, gradient)
            base, target = (self._size(path, m, gradient, weight) for m in Mode)
            if not base > 0 or (weight == 1.0 and degree is None):
                continue
            if gradient == _SMALL and degree == 1:
                # Updates are proportional to gradients of usual size: this one counts.
                return target / base
            seen.append(target / base / (self.clipped if gradient == _LARGE else 1.0))
        good = [f for f in seen if _near(f, self.rules[path].learning_rate)]
        return next(iter(good or seen), None)

    def _is_clipped_as_one(self) -> float:
        """Common factor of clipping by the global norm at the target; 1 without it.

        Such clipping multiplies all gradients by one factor.
        """
        moved = [p for p in self.paths if self._size(p, Mode.BASE, _LARGE)]
        ratios = [
            (self._part(p, Mode.BASE, _LARGE) / self.probe.slope(p)).ravel()
            for p in moved
        ]
        if len(moved) < 2 or not np.allclose(
            ratios[0][0], np.concatenate(ratios), 1e-3
        ):
            return 1.0
        if any(abs(self._degree(p, Mode.BASE, _LARGE)) > 0.03 for p in moved):
            return 1.0
        sizes = ([self._size(p, which, _LARGE) for p in moved] for which in Mode)
        rates = [self.rules[p].learning_rate for p in moved]
        base, target = map(np.array, sizes)
        return float(np.median(target / base / rates))

    def _is_coupled(self) -> bool:
        """Whether one parameter's updates depend on the gradients of others."""
        base = self.runs[Mode.BASE]
        pairs = [
            (
                base[Condition(_LARGE, then=size)].second[path],
                base[Condition(_LARGE, then=size, odd=2.0)].second[path],
            )
            for path in self.paths[::2]
            for size in _THEN
        ]
        return not all(np.allclose(*pair, rtol=1e-3, atol=0) for pair in pairs)

    # --- directions ---

    def _slope(self, path: str) -> float:
        """By how much the update raises the loss; negative if it lowers it."""
        update = self._part(path, Mode.BASE, _LARGE)
        finite = np.all(np.isfinite(update))
        return float(np.vdot(update, self.probe.slope(path))) if finite else 0.0

    def _passes_through(self, path: str) -> bool:
        """Whether the gradient itself is the update."""
        # Below every threshold of clipping, and above.
        return any(
            np.any(gradient := size * self.probe.slope(path))
            and np.allclose(self._update(path, Mode.BASE, size), gradient, 1e-6, 0)
            for size in (_SMALL, _LARGE)
        )

    def _climbing(self, path: str) -> str:
        if not self._slope(path) > 0:
            return ""
        return (
            f"the update of {path!r} points along its gradient, which raises the loss: "
            "the learning rate needs a minus, which optax.scale_by_learning_rate has; "
            "two of them, or one before or after a whole optimizer, cancel it. To "
            "maximize, or to subtract updates, put optax.scale(-1.0) beside this chain "
            "in an optax.chain"
        )

    # --- problems ---

    def _twice(self, path: str) -> str:
        if len(self.acted.of(Kind.SCALING, path)) > 1:
            return f"the updates of {path!r} are scaled twice: {ONE_SCALING}"
        if len(self.acted.of(Kind.NORMALIZING, path)) > 1:
            return f"the gradients of {path!r} are normalized twice: {_ONE_NORMALIZING}"
        return ""

    def _growing(self, path: str) -> str:
        """Decay that adds to the weights, although the gradient's part descends."""
        # Noise needs neither a gradient nor a weight.
        noise = self._decay(path, Mode.BASE, 0.0)
        decay = self._decay(path, Mode.BASE) - noise
        if not np.any(decay) or not np.all(np.isfinite(decay)):
            return ""
        # Beside light weights, the decay does not hide the gradient's part.
        update = self._update(path, Mode.BASE, _LARGE, _LIGHT)
        update = update - self._decay(path, Mode.BASE, _LIGHT)
        descends = float(np.vdot(update, self.probe.slope(path))) < 0
        if not descends or float(np.vdot(decay, self.probe.weight(path))) <= 0:
            return ""
        return (
            f"the weight decay of {path!r} makes the weights grow: make it positive, "
            "and put add_decayed_weights before the learning rate, which has the "
            "minus; after optim.adam, use optim.adamw in place of both; after "
            "optim.sgd, use optim.build_optimizer(..., weight_decay=...)"
        )

    def _alone(self, path: str) -> str:
        """A frozen parameter that decays."""
        if not all(
            np.array_equal(self._update(path, which, _LARGE), self._decay(path, which))
            for which in Mode
        ):
            return ""
        return (
            f"the update of {path!r} is its weight decay alone: if it is frozen, "
            "freeze it after the decay, or by optax.partition with optax.set_to_zero()"
        )

    def _scaled_decay(self, path: str) -> str:
        if not self._decays_apart(path) or self._is_relative(path):
            return ""
        base, target = (rms(self._decay(path, which)) for which in Mode)
        loud = self.runs[Mode.TARGET][Condition(0.0, loud=_LOUD)].first[path]
        factor = target / base / self.probe.leaves[path].weight
        if self.acted.of(Kind.GROUPS, path) and _near(factor, 1):
            if _near(rms(loud), target):
                return ""
            return (
                f"factors of scale_by_path also scale the weight decay of {path!r}: "
                "put scale_by_path before add_decayed_weights; beside an optimizer of "
                "mupax.optim, give that the scales of optim.for_modules"
            )
        if _near(factor, 1) and _near(rms(loud), target):
            return ""
        return (
            f"the weight decay of {path!r} is multiplied by {factor:.4g} and must not "
            "be scaled: put add_decayed_weights after scale_by_parametrization and "
            "before the learning rate, in place of an Optax optimizer that decays by "
            "itself; before optim.sgd, use optim.build_optimizer(..., weight_decay=...)"
        )

    def _response(self, path: str) -> str:
        """Whether the update follows the factors by which it is multiplied."""
        scalings, groups = (
            len(self.acted.of(kind, path)) for kind in (Kind.SCALING, Kind.GROUPS)
        )
        gains = []
        for weight, loud in ((1.0, _LOUD), (_LIGHT, _QUIET)):
            usual = self._size(path, Mode.TARGET, _LARGE, weight)
            other = self.runs[Mode.TARGET][Condition(_LARGE, weight, loud=loud)]
            update = other.first[path]
            if self._decays_apart(path):
                update = update - self._decay(path, Mode.TARGET, weight)
            if not (usual > 0 and np.any(update)):
                return ""
            gains.append(math.log(rms(update) / usual, loud))
        if all(abs(gain - scalings - groups) < 0.003 for gain in gains):
            return ""
        if all(abs(gain - scalings - groups - 1) < 0.003 for gain in gains):
            return f"the updates of {path!r} are scaled twice: {ONE_SCALING}"
        if all(abs(gain - scalings) < 0.003 for gain in gains):
            return (
                f"the factors of scale_by_path have no effect on the update of {path!r}"
                ": put it after scale_by_parametrization, and before weight decay; "
                "beside an optimizer of mupax.optim, give that the scales of "
                "optim.for_modules"
            )
        if all(abs(gain) < 0.003 for gain in gains):
            return (
                f"the scaling of {path!r} has no effect on its update: put "
                "scale_by_parametrization after the transform that makes the update, "
                "and clipping before both"
            )
        return (
            f"the update of {path!r} does not follow its scaling: a transform after it "
            "clips or normalizes; put clipping first, before the transform that makes "
            "the update"
        )

    def _wrong_size(self, path: str, factor: float | None) -> str:
        expected = self.rules[path].learning_rate
        if factor is None or _near(factor, expected):
            return ""
        off = factor / expected
        size = f"{off:.4g} times too large"
        if off < 1:
            size = f"{1 / off:.4g} times too small"
        return (
            f"the update of {path!r} is {factor:.4g} times the base's and should be "
            f"{expected:.4g} times: it is {size}; {self._reason(path, factor)}"
        )

    def _reason(self, path: str, factor: float) -> str:
        """The likeliest mistake that gives this factor, with a remedy."""
        scaling = next(iter(self.acted.of(Kind.SCALING, path)), None)
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
        if scaling.scales.get(path) != self.scales[path]:
            return "tx was made from other scales: make it from those of this check"
        applied, expected = scaling.factors[path], self.rules[path].learning_rate
        large = self._size(path, Mode.BASE, _LARGE)
        independent = abs(self._degree(path, Mode.BASE, _LARGE)) < 0.03
        if (
            large
            and independent
            and _near(self._size(path, Mode.TARGET, _LARGE) / large, expected)
        ):
            return (
                "its eps, initial accumulator or clipping threshold is larger than "
                "gradients of 0.001, so the update is proportional to the gradient: "
                "pass family='sgd', or for an adaptive optimizer put "
                "normalize_gradients(scales) before it"
            )
        wanted = expected * applied / factor
        fits = [
            family.value
            for family in Family
            if _near(
                multipliers(self.scales[path], point, family).learning_rate, wanted
            )
        ]
        normalized = self.acted.of(Kind.NORMALIZING, path) and _near(
            factor * self.rules[path].gradient, expected
        )
        if normalized and not (fits and independent):
            return (
                "normalize_gradients changes its size: drop it with SGD, and put it "
                "before the transform that makes the update with other optimizers"
            )
        if fits:
            return (
                f"the scaling multiplies it by {applied:.4g} and its optimizer needs "
                f"{wanted:.4g}: pass family={fits[0]!r}; where an optax.partition has "
                "several optimizers, put a scaling into each branch"
            )
        return (
            f"the scaling multiplies it by {applied:.4g} and it needs {wanted:.4g}: "
            "this optimizer is in none of the families (sgd, adam, spectral, "
            "relative), or a transform after the scaling changes its updates"
        )

    def _coupled_decay(self, path: str) -> str:
        """Weight decay whose effect does not follow the weight: L2 through Adam."""
        one, two = (self._decay(path, Mode.BASE, w) for w in (1.0, 2.0))
        none = self._decay(path, Mode.BASE, 0.0)
        if not np.any(one) or np.any(none) or np.allclose(two, 2 * one, rtol=1e-3):
            return ""
        return (
            f"the weight decay of {path!r} passes through the optimizer (L2), for "
            "which no rule is known: put add_decayed_weights after "
            "scale_by_parametrization, or use optim.adamw"
        )

    def _normalization(self, path: str) -> tuple[str, str]:
        """(hint, problem) if eps is not compared with a gradient of the base's size."""
        gradient = self.rules[path].gradient
        if _near(gradient, 1) or self._is_relative(path):
            return "", ""
        if not abs(self._degree(path, Mode.BASE, _LARGE)) < 0.03:
            return "", ""
        sizes = []
        for which in Mode:
            one, two = (rms(self._update(path, which, k * _TINY, 0.0)) for k in (1, 2))
            if not (one > 0 and _near(two, 2 * one)):
                return "", ""
            sizes.append(one)
        got = sizes[1] / sizes[0] / self.rules[path].learning_rate
        if _near(got, 1):
            return "", ""
        if _near(got, gradient):
            return (
                f"the gradients of {path!r} are {gradient:.4g} times the base's, but "
                "its eps is the same: put normalize_gradients(scales) before the "
                "transform that has eps",
                "",
            )
        remedy = "give normalize_gradients and the scaling the same scales"
        if _near(got, 1 / gradient):
            remedy = _ONE_NORMALIZING
        return "", (
            f"the gradient of {path!r} is multiplied by {got / gradient:.4g} before "
            f"eps is added; it should be multiplied by {1 / gradient:.4g}: {remedy}"
        )

    def _clipping(self, path: str) -> str:
        """Clipping of one parameter's gradient before it has the base's size."""
        if self.coupled or self._clean_degree(path, _SMALL) != 0:
            return ""
        apart = self._decays_apart(path)
        for size in _THEN:
            base, target = (
                self.runs[which][Condition(_LARGE, then=size)].second[path]
                - self.runs[which][Condition(0.0)].second[path] * apart
                for which in Mode
            )
            rate = self.rules[path].learning_rate
            if np.any(base) and not _near(rms(target) / rms(base), rate):
                return (
                    f"the gradient of {path!r}, whose size changes with width and "
                    "depth, is clipped by a fixed number or by its weight: use "
                    "optax.clip_by_global_norm, or put optax.clip between "
                    "optim.normalize_gradients and Optax's own scale_by_... transform"
                )
        return ""

    # --- hints ---

    def _stacked(self, path: str) -> str:
        spared = any(not self._decays_apart(p) for p in self.rules)
        stacked = path in stacked_vectors(self.scales)
        if not (spared and stacked and self._decays_apart(path)):
            return ""
        return (
            f"the weight decay of {path!r}, of shape {self.scales[path].shape}, "
            "acts on a bias or norm scale in each layer of a stack, as the mask "
            "x.ndim >= 2 does; choose kernels by their names, or use optim.adamw "
            "with mask='matrices'"
        )

    def _noise(self, path: str) -> str:
        if not np.any(self._decay(path, Mode.BASE, 0.0)):
            return ""
        return (
            f"{path!r} is updated without a gradient and a weight, as by noise, whose "
            "size does not follow the gradients; no rule is known for it over width "
            "and depth: tune it again at the target, or leave it out"
        )

    def _threshold(self, path: str) -> str:
        if (
            self._clean_degree(path, _SMALL) != 1
            or abs(self._degree(path, Mode.BASE, _LARGE) - 1) < 0.03
            or self.acted.of(Kind.NORMALIZING, path)
        ):
            return ""
        return (
            f"the update of {path!r} is proportional to small gradients and not to "
            "large ones: they are compared with a fixed number, e.g. by clipping, but "
            "their size changes with width and depth; tune the threshold again at the "
            "target, leave it out, or use Adam, whose updates do not depend on the "
            "gradients' size"
        )

    def _shared(self, path: str) -> str:
        small = self._update(path, Mode.BASE, _SMALL)
        other = self.runs[Mode.BASE][Condition(_SMALL, odd=2.0)].first[path]
        if path not in self.paths[::2] or np.allclose(small, other, rtol=1e-3, atol=0):
            return ""
        return (
            f"the update of {path!r} depends on the gradients of other parameters, "
            "even where these are small, as if a step size were found from all of "
            "them; no rule is known for it: tune it again at the target"
        )

    def _shrinking(self, path: str) -> str:
        if not self._degree(path, Mode.BASE, _LARGE) < -0.5:
            return ""
        return (
            f"the update of {path!r} shrinks as the gradient grows: the optimizer "
            "sets its own step size, for which no rule is known"
        )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * abs(other)

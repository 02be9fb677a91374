"""`check_chain`: check that an optimizer's updates have the right size.

The check runs the transformation on known gradients, twice: on a small base with all
multipliers of this package off, and at target sizes with them on. The rules give the
sizes of the target's gradients and weights relative to the base, and the ratio that the
two updates must have. This holds for any optimizer, however it is wrapped.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..apply.transforms import ParametrizationLike, resolve
from ..rules.multipliers import Multipliers, multipliers
from ..rules.parametrizations import Parametrization
from ..rules.traced import Traced
from ..scales.paths import flatten
from ..scales.probe import Mode
from ..scales.table import Scales, stacked_vectors
from .probing import Condition, Leaf, Probe, TracedError, nested, probe_shapes, rms

# Sizes of the base's gradients. Adam's eps does not matter at the first, clipping
# does not matter at the second.
_LARGE, _SMALL = 1e3, 1e-3
# A gradient far below any eps.
_TINY = 1e-12
_ONE_SCALING = (
    "drop scale_by_parametrization, or use optax's own scale_by_... transforms in "
    "place of an optimizer of mupax.optim"
)
_ONE_NORMALIZING = (
    "use one normalize_gradients, and none before an optimizer of mupax.optim, which "
    "has its own"
)
_PASSED_THROUGH = (
    "the update of {!r} is its gradient, which raises the loss: optax.masked passes "
    "gradients through where its mask is False. To freeze parameters, use "
    'optax.partition({{"train": tx, "freeze": optax.set_to_zero()}}, labels)'
)
_CLIMBS = (
    "the update of {!r} points along its gradient, which raises the loss: the learning "
    "rate needs a minus, which optax.scale_by_learning_rate has; two of them, or one "
    "after a whole optimizer, cancel it"
)
OTHER_TREE = (
    "a tree of masks or labels does not have the structure of the gradients (nnx."
    "Optimizer passes them without nnx.Param); pass a function in its place, e.g. "
    "mask=lambda params: jax.tree.map(lambda x: x.ndim >= 2, params); or give "
    "check_chain the parameters as params=..."
)
# Weights beside which no decay is seen.
_LIGHT = 1e-4
# Mistakes change an update by a ratio of widths or depths, which is far from one.
_TOLERANCE = 0.05


class Unchecked(ValueError):
    """Raised if a check is not possible.

    Attributes:
      traced: whether the reason is a traced value, e.g. inside of jit.
    """

    def __init__(self, message: str, *, traced: bool = False):
        super().__init__(message)
        self.traced = traced


@dataclasses.dataclass(frozen=True)
class Checked:
    """Result of `check_chain` for one parameter.

    Attributes:
      factor: size of the target's update, relative to the base's.
      expected: the factor that the rules give. Both are None if the update is zero,
        or its size cannot be measured.
      problem: what is wrong, or "".
      hint: what may be wrong, or "".
      climbs: whether the update points along the gradient.

    Examples:
      >>> Checked(factor=1.0, expected=0.25).off
      4.0
    """

    factor: float | None = None
    expected: float | None = None
    problem: str = ""
    hint: str = ""
    climbs: bool = False

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


@dataclasses.dataclass(frozen=True, repr=False)
class ChainCheck:
    """Result of `check_chain`; print it for the verdict.

    Attributes:
      rows: result of each parameter, by path.
      problems: what is wrong, one sentence for each kind of mistake.
      hints: what may be wrong.

    Source: docs/chains.md.

    Examples:
      >>> ChainCheck({"w": Checked(0.25, 0.25)}).passed
      True
    """

    rows: Mapping[str, Checked]
    hints: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        return _summary({p: r.problem for p, r in self.rows.items()})

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __repr__(self) -> str:
        return f"<ChainCheck: {self}>"

    def __str__(self) -> str:
        lines = [f"wrong: {problem}" for problem in self.problems]
        lines += [f"hint: {hint}" for hint in self.hints]
        known = [r for r in self.rows.values() if r.factor is not None]
        if self.passed:
            line = f"{len(known)} of {len(self.rows)} parameters have updates of the "
            line += "right size"
            if len(known) < len(self.rows):
                line += "; the others were not updated, or could not be measured"
            lines.insert(0, line)
        return "\n".join(lines)


def check_chain(
    tx: Any,
    scales: Scales,
    parametrization: ParametrizationLike | None = None,
    *,
    params: Any = None,
) -> ChainCheck:
    """Run an optimizer on known gradients and compare each update with the rules.

    Finds a scaling that is missing, applied twice, made for another family of
    optimizers or undone by a later transform; weight decay that is scaled;
    gradients that are normalized twice; clipping after the scaling; parameters that a
    mask leaves out, whose gradients `optax.masked` adds to them; and weight decay after
    the learning rate, which makes weights grow. How the transformations are combined
    does not matter: `optax.chain`, `masked`, `partition`, `inject_hyperparams` and
    `MultiSteps` are all looked through.

    Does not find a wrong order that leaves the size of updates unchanged, e.g.
    elementwise clipping before `normalize_gradients`; `optim.chain` refuses that. It
    runs the first step only, so later changes go unnoticed. Multipliers that are
    written by hand count as one learning rate per layer, the same at base and target; a
    chain with nothing else fails the check.

    Args:
      tx: an `optax.GradientTransformation`, or any object with its `init` and `update`.
        Its hyperparameters must be numbers or schedules, not traced values.
      scales: of the target model, those that `tx` was made from.
      parametrization: a name, or the result of `optim.parametrization`. By default the
        one that the scales carry, or "mup" if they carry none and depth stays.
      params: the parameters, or their abstract shapes, as the optimizer gets them.
        Needed if `tx` holds a tree of masks or labels that is not a dictionary.

    Returns:
      A `ChainCheck`, with hints if something may be wrong.

    Raises:
      ValueError: an update has the wrong size (the message has the path, the factor
        and what to do), or `tx` cannot be run.

    Source: Tensor Programs VI, Definition 6.1; docs/rules.md tabulates the sizes of
    update, gradient and weight.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> print(optim.check_chain(optim.adam(0.1, scales, "mup"), scales, "mup"))
      2 of 2 parameters have updates of the right size
      >>> optim.check_chain(optax.adam(0.1), scales, "mup")
      Traceback (most recent call last):
      ...
      ValueError: the update of 'out' is 1 times the base's and should be 0.25 times: \
it is 4 times too large; no scaling acts on it: use an optimizer of mupax.optim, or \
add scale_by_parametrization after the transform that makes the update
    """
    inspection = inspect_chain(tx, scales, parametrization, params=params)
    if not inspection.passed:
        raise ValueError("\n".join(inspection.problems))
    hints = (*inspection.hints, *climbing(inspection))
    return dataclasses.replace(inspection, hints=hints)


def climbing(inspection: ChainCheck) -> tuple[str, ...]:
    """Hints at updates that raise the loss."""
    rows = inspection.rows.items()
    return _summary({path: _CLIMBS.format(path) for path, row in rows if row.climbs})


def inspect_chain(
    tx: Any,
    scales: Scales,
    parametrization: ParametrizationLike | None = None,
    *,
    params: Any = None,
) -> ChainCheck:
    """Do as `check_chain`, but return problems instead of raising."""
    point = resolve(scales, parametrization)
    if not (callable(getattr(tx, "init", None)) and callable(tx.update)):
        raise ValueError(
            f"tx is a {type(tx).__name__}; pass an optax.GradientTransformation"
        )
    tree = nested(scales) if params is None else params
    paths = [path for path, _ in flatten(tree) if path in scales]
    rules = {path: multipliers(scales[path], point) for path in paths}
    if any(isinstance(x, Traced) for r in rules.values() for x in vars(r).values()):
        raise Unchecked(
            "richness is a traced value, which cannot be checked; check the optimizer "
            "outside of jit, with a number",
            traced=True,
        )
    shapes = {p: (scales[p].base_shape, scales[p].shape) for p in paths}
    if not point.scaled:
        # No rule gives sizes; the target is compared with itself, unscaled.
        shapes = {path: (target, target) for path, (_, target) in shapes.items()}
        rules = {
            path: dataclasses.replace(rule, init_std=1.0, forward=1.0)
            for path, rule in rules.items()
        }
    leaves = {
        path: Leaf(*pair, rules[path].gradient, rules[path].init_std)
        for path, pair in probe_shapes(shapes).items()
    }
    try:
        rows = _Inspector(Probe(tx, tree, leaves), rules, scales, point).rows()
    except (TracedError, jax.errors.JAXTypeError) as error:
        raise Unchecked(
            "a hyperparameter of tx is a traced value; check the optimizer outside of "
            "jit and vmap, with numbers",
            traced=True,
        ) from error
    except Exception as error:
        if _is_ours(error):
            raise Unchecked(str(error)) from error
        if "pytree structure error" in str(error):
            raise Unchecked(OTHER_TREE) from error
        raise Unchecked(
            "tx cannot be run on gradients with the paths of the scales "
            f"({type(error).__name__}: {error}); pass params=... if it holds trees of "
            "masks or labels, or check the optimizer inside of it (lookahead, SAM)"
        ) from error
    return ChainCheck(rows, _summary({p: r.hint for p, r in rows.items()}))


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised an error, whose message says what to do."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = __name__.rpartition(".")[0]
    raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return isinstance(error, ValueError) and raised_in.startswith(f"{package}.")


_CONDITIONS = (
    *(Condition(k * g) for g in (_LARGE, _SMALL) for k in (1, 2)),
    Condition(0.0),
    Condition(0.0, 0.0),
    Condition(0.0, 2.0),
    Condition(_LARGE, 2.0),
    Condition(_TINY, 0.0),
    Condition(2 * _TINY, 0.0),
    # Inside a trust ratio, the decay of small weights vanishes.
    Condition(_LARGE, _LIGHT),
    Condition(0.0, _LIGHT),
)


class _Inspector:
    """The runs of one check, and the judgements drawn from them."""

    def __init__(
        self,
        probe: Probe,
        rules: Mapping[str, Multipliers],
        scales: Scales,
        point: Parametrization,
    ):
        self.probe, self.rules, self.scales, self.point = probe, rules, scales, point
        self.runs = {}
        for which in Mode:
            self.runs[which], self.acted = probe.run(which, _CONDITIONS)

    def rows(self) -> dict[str, Checked]:
        clipped = self._is_clipped_as_one()
        rows = {}
        descends = any(self._slope(p) < 0 for p in self.rules)
        for path in self.runs[Mode.BASE][Condition(_LARGE)]:
            if descends and self._passes_through(path):
                rows[path] = Checked(problem=_PASSED_THROUGH.format(path))
                continue
            row = self._leaf(path, clipped)
            rows[path] = dataclasses.replace(row, climbs=self._slope(path) > 0)
        return rows

    # --- directions ---

    def _slope(self, path: str) -> float:
        """By how much the update raises the loss; negative if it lowers it."""
        update = self._update(path, Mode.BASE, _LARGE)
        if self._decays_apart(path):
            update = update - self._decay(path, Mode.BASE)
        if not np.all(np.isfinite(update)):
            return 0.0
        return float(np.vdot(update, self.probe.slope(path)))

    def _passes_through(self, path: str) -> bool:
        """Whether the gradient itself is the update."""
        slope, size = self.probe.slope(path), rms(self.probe.slope(path))
        # Below every threshold of clipping, and above.
        for gradient in (_SMALL, _LARGE):
            update = self._update(path, Mode.BASE, gradient)
            off = rms(update - gradient * slope)
            if size and off <= 1e-6 * gradient * size:
                return True
        return False

    # --- sizes ---

    def _update(
        self, path: str, which: Mode, gradient: float, weight: float = 1.0
    ) -> np.ndarray:
        return self.runs[which][Condition(gradient, weight)][path]

    def _decay(self, path: str, which: Mode, weight: float = 1.0) -> np.ndarray:
        """The part of an update that comes from weight decay, not from the gradient."""
        return self._update(path, which, 0.0, weight)

    def _size(
        self, path: str, which: Mode, gradient: float, weight: float = 1.0
    ) -> float:
        """Root mean square of the part of an update that comes from the gradient."""
        update = self._update(path, which, gradient, weight)
        if self._decays_apart(path):
            update = update - self._decay(path, which, weight)
        return rms(update)

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

    # --- judgements ---

    def _leaf(self, path: str, clipped: float | None) -> Checked:
        both = [self._update(path, which, _LARGE) for which in (Mode.BASE, Mode.TARGET)]
        if not np.any(both[0]) and not np.any(both[1]):
            return Checked()  # frozen
        if not all(np.all(np.isfinite(update)) for update in both):
            return Checked(hint="the update is not finite, and cannot be checked")
        factor = self._factor(path, clipped)
        expected = self._expected(path)
        problem = self._twice(path)
        if factor is not None and not _near(factor, expected):
            problem = problem or self._wrong_size(path, factor, expected)
        problem = problem or self._wrong_decay(path) or self._wrong_clipping(path)
        hint, wrong = self._normalization(path) if not problem else ("", "")
        return Checked(factor, expected, problem or wrong, hint or self._hint(path))

    def _twice(self, path: str) -> str:
        if self.acted.count("scaling", path) > 1:
            return f"the updates of {path!r} are scaled twice: {_ONE_SCALING}"
        if self.acted.count("normalizing", path) > 1:
            return f"the gradients of {path!r} are normalized twice: {_ONE_NORMALIZING}"
        return ""

    def _expected(self, path: str) -> float:
        # Adam's raw updates have size one, so its multiplier is the desired ratio.
        return self.rules[path].learning_rate

    def _factor(self, path: str, clipped: float | None) -> float | None:
        """Target's update over the base's; None if no regime allows measuring it."""
        seen = []
        conditions = [(_LARGE, 1.0), (_SMALL, 1.0)]
        if self._is_relative(path):
            conditions += [(_LARGE, _LIGHT)]
        for gradient, weight in conditions:
            degree = self._clean_degree(path, gradient)
            if weight == 1.0 and degree is None:
                continue
            base = self._size(path, Mode.BASE, gradient, weight)
            target = self._size(path, Mode.TARGET, gradient, weight)
            if not base > 0:
                continue
            factor = target / base
            common = clipped if clipped and gradient == _LARGE else 1.0
            if gradient == _SMALL and degree == 1:
                # Updates are proportional to gradients of usual size: this one counts.
                return factor
            seen.append(factor / common)
        good = [f for f in seen if _near(f, self._expected(path))]
        return next(iter(good or seen), None)

    def _clean_degree(self, path: str, gradient: float) -> int | None:
        """1 if the update is proportional to the gradient, 0 if independent of it."""
        degrees = [self._degree(path, m, gradient) for m in (Mode.BASE, Mode.TARGET)]
        for clean in (0, 1):
            if all(abs(degree - clean) < 0.03 for degree in degrees):
                return clean
        return None

    def _is_relative(self, path: str) -> bool:
        one, two = (rms(self._update(path, Mode.BASE, _LARGE, w)) for w in (1.0, 2.0))
        return _near(two, 2 * one)

    def _is_clipped_as_one(self) -> float | None:
        """Common factor of clipping by the global norm at the target; None without it.

        Such clipping multiplies all gradients by one factor.
        """
        ratios = []
        for path, update in self.runs[Mode.BASE][Condition(_LARGE)].items():
            if self._decays_apart(path):
                update = update - self._decay(path, Mode.BASE)
            if not np.any(update):
                continue
            ratio = update / self.probe.slope(path)
            if not np.allclose(ratio, ratio.flat[0], rtol=1e-3):
                return None
            ratios.append(float(ratio.flat[0]))
        if len(ratios) < 2 or not np.allclose(ratios, ratios[0], rtol=1e-3):
            return None
        paths = [p for p in self.rules if self._size(p, Mode.BASE, _LARGE)]
        if not all(abs(self._degree(p, Mode.BASE, _LARGE)) < 0.03 for p in paths):
            return None
        return statistics.median(
            self._size(p, Mode.TARGET, _LARGE)
            / self._size(p, Mode.BASE, _LARGE)
            / self._expected(p)
            for p in paths
        )

    def _wrong_size(self, path: str, factor: float, expected: float) -> str:
        off = factor / expected
        size = (
            f"{off:.4g} times too large"
            if off > 1
            else f"{1 / off:.4g} times too small"
        )
        measured = (
            f"the update of {path!r} is {factor:.4g} times the base's and should be "
            f"{expected:.4g} times: it is {size}"
        )
        return f"{measured}; {self._reason(path, factor)}"

    def _reason(self, path: str, factor: float) -> str:
        """The likeliest mistake that gives this factor, with a remedy."""
        if not self.acted.count("scaling", path):
            return (
                "no scaling acts on it: use an optimizer of mupax.optim, or add "
                "scale_by_parametrization after the transform that makes the update"
            )
        acting = next(iter(self.acted.acted["scaling", path]))
        if acting.scales.get(path) != self.scales[path]:
            return "tx was made from other scales: make it from those of this check"
        if not self.point.same_rules(acting.point):
            return (
                f"tx scales by {acting.point.label}, and this check is for "
                f"{self.point.label}: give both the same parametrization"
            )
        on = self._size(path, Mode.TARGET, _LARGE)
        off = self._size(path, Mode.UNSCALED, _LARGE)
        expected = self._expected(path)
        if _near(on, off) and not _near(expected, 1):
            return (
                "its scaling has no effect: put scale_by_parametrization after the "
                "transform that makes the update, and clipping before both"
            )
        if _near(on / off, expected**2) and _near(factor, expected**2):
            return _ONE_SCALING
        large = self._size(path, Mode.BASE, _LARGE)
        if (
            _near(on / large, expected)
            and abs(self._degree(path, Mode.BASE, _LARGE)) < 0.03
        ):
            return (
                "its eps, initial accumulator or clipping threshold is larger than "
                "gradients of 0.001, so the update is proportional to the "
                "gradient: pass family='sgd', or for an adaptive optimizer put "
                "normalize_gradients(scales) before it"
            )
        rule = self.rules[path]
        gains = {
            "sgd": expected / rule.gradient,
            "adam": expected,
            "spectral": expected * self._spectral(path),
            "relative": expected / rule.init_std,
        }
        wanted = expected * (on / off) / factor
        fits = [name for name, gain in gains.items() if _near(gain, wanted)]
        if fits:
            return (
                f"the scaling multiplies it by {on / off:.4g} and its optimizer needs "
                f"{wanted:.4g}: pass family={fits[0]!r}; where an optax.partition has "
                "several optimizers, put a scaling into each branch. Under family="
                "'sgd', drop normalize_gradients"
            )
        return (
            f"the scaling multiplies it by {on / off:.4g} and it needs {wanted:.4g}: "
            "this optimizer is in none of the families (sgd, adam, spectral, "
            "relative), or a transform after the scaling changes its updates"
        )

    def _spectral(self, path: str) -> float:
        return math.sqrt(
            math.prod(self.probe.leaves[path].shape)
            / math.prod(self.probe.leaves[path].base_shape)
        )

    def _wrong_decay(self, path: str) -> str:
        if self._grows(path):
            return (
                f"the weight decay of {path!r} makes the weights grow: put "
                "add_decayed_weights before the learning rate, which has the minus; "
                "after optim.adam, use optim.adamw in place of both"
            )
        if not self._decays_apart(path) or self._is_relative(path):
            return ""
        base, target = (rms(self._decay(path, m)) for m in (Mode.BASE, Mode.TARGET))
        factor = target / base / self.probe.leaves[path].weight
        if _near(factor, 1):
            return ""
        return (
            f"the weight decay of {path!r} is multiplied by {factor:.4g} and must not "
            "be: put add_decayed_weights after scale_by_parametrization and before "
            "the learning rate, in place of an Optax optimizer that decays by itself"
        )

    def _grows(self, path: str) -> bool:
        """Whether decay adds to the weights, although the gradient's part descends."""
        # Noise needs neither a gradient nor a weight.
        noise = self._decay(path, Mode.BASE, 0.0)
        decay = self._decay(path, Mode.BASE) - noise
        if not np.any(decay) or not np.all(np.isfinite(decay)):
            return False
        # Beside light weights, the decay does not hide the gradient's part.
        update = self._update(path, Mode.BASE, _LARGE, _LIGHT)
        update = update - self._decay(path, Mode.BASE, _LIGHT)
        descends = float(np.vdot(update, self.probe.slope(path))) < 0
        return descends and float(np.vdot(decay, self.probe.weight(path))) > 0

    def _wrong_clipping(self, path: str) -> str:
        factors = []
        for gradient in (_LARGE, _SMALL):
            on = self._size(path, Mode.TARGET, gradient)
            off = self._size(path, Mode.UNSCALED, gradient)
            if not (on > 0 and off > 0):
                return ""
            factors.append(on / off)
        if _near(*factors):
            return ""
        return (
            f"the scaling of {path!r} multiplies large updates by {factors[0]:.4g} and "
            f"small ones by {factors[1]:.4g}: a transform after it clips or "
            "normalizes; put clipping before the transform that makes the update"
        )

    def _normalization(self, path: str) -> tuple[str, str]:
        """(hint, problem) if eps is not compared with a gradient of the base's size."""
        gradient = self.rules[path].gradient
        if _near(gradient, 1) or self._is_relative(path):
            return "", ""
        if not abs(self._degree(path, Mode.BASE, _LARGE)) < 0.03:
            return "", ""
        sizes = []
        for which in (Mode.BASE, Mode.TARGET):
            one, two = (rms(self._update(path, which, k * _TINY, 0.0)) for k in (1, 2))
            if not (one > 0 and _near(two, 2 * one)):
                return "", ""
            sizes.append(one)
        got = sizes[1] / sizes[0] / self._expected(path)
        if _near(got, 1):
            return "", ""
        if _near(got, gradient):
            return (
                f"the gradients of {path!r} are {gradient:.4g} times the base's, but "
                "its eps is the same; put normalize_gradients(scales) "
                "before the transform that has eps",
                "",
            )
        if _near(got, 1 / gradient):
            return "", (
                f"the gradient of {path!r} is multiplied by {got / gradient:.4g} "
                f"before eps is added; it should be multiplied by {1 / gradient:.4g}: "
                f"{_ONE_NORMALIZING}"
            )
        return (
            f"the gradients of {path!r} are multiplied by {got / gradient:.4g} before "
            f"eps is added, and should be multiplied by {1 / gradient:.4g}: give "
            "normalize_gradients the scales and the parametrization of the scaling",
            "",
        )

    def _hint(self, path: str) -> str:
        if all(
            np.array_equal(self._update(path, which, _LARGE), self._decay(path, which))
            for which in (Mode.BASE, Mode.TARGET)
        ):
            return (
                f"the update of {path!r} is its weight decay alone: if it is frozen, "
                "freeze it after the decay, or by optax.partition with "
                "optax.set_to_zero()"
            )
        spared = any(not self._decays_apart(p) for p in self.rules)
        if spared and path in stacked_vectors(self.scales) and self._decays_apart(path):
            return (
                f"the weight decay of {path!r}, of shape {self.scales[path].shape}, "
                "acts on a bias or norm scale in each layer of a stack, as the mask "
                "x.ndim >= 2 does; choose kernels by their names, or use optim.adamw "
                "with mask='matrices'"
            )
        if self._degree(path, Mode.BASE, _LARGE) < -0.5:
            return (
                f"the update of {path!r} shrinks as the gradient grows: the optimizer "
                "sets its own step size, for which no rule is known"
            )
        one, two = (self._decay(path, Mode.BASE, w) for w in (1.0, 2.0))
        none = self._decay(path, Mode.BASE, 0.0)
        if (
            np.any(one)
            and not np.any(none)
            and not np.allclose(two, 2 * one, rtol=1e-3)
        ):
            return (
                f"the weight decay of {path!r} passes through the optimizer (L2), for "
                "which no rule is known; use decoupled decay, as optim.adamw does"
            )
        return ""


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * abs(other)


def _summary(sentences: Mapping[str, str], most: int = 3) -> tuple[str, ...]:
    """The first few sentences of each kind, and how many follow."""
    said = [s for s in sentences.values() if s]
    lines = []
    kinds = itertools.groupby(sorted(said, key=_kind), _kind)
    for _, group in sorted(
        ((k, list(g)) for k, g in kinds), key=lambda x: said.index(x[1][0])
    ):
        lines += group[:most]
        if len(group) > most:
            lines.append(f"... and the same for {len(group) - most} more parameters")
    return tuple(lines)


def _kind(sentence: str) -> str:
    return sentence.partition(" of '")[0]

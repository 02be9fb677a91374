"""Check that an optimizer's updates have the right size, by running it.

It runs on known gradients twice: on a small base with all multipliers of this package
off, and at target sizes with them on.
"""

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import optax

from ..apply.build import Mask, Optimizer, Transform, build
from ..apply.hyperparameters import checked
from ..apply.transforms import resolve
from ..rules.multipliers import family_of, multipliers, shift
from ..rules.traced import Traced
from ..scales.paths import flatten, nested
from ..scales.probe import mode
from ..scales.table import ChainWarning, Scales
from .judging import judge
from .probing import Leaf, Probe, TracedError, Unchecked, acting, probe_shapes

_OTHER_TREE = (
    "a tree of masks or labels does not have the structure of the gradients (nnx."
    "Optimizer passes them without nnx.Param); pass a function in its place, e.g. "
    "lambda params: jax.tree.map(lambda x: x.ndim >= 2, params); or give check_chain "
    "the parameters as params=..."
)
_UNSCALED = (
    "no transform of optim.chain scales the updates, so that the parametrization has "
    "no effect on them: put optim.scale_by_parametrization(scales, family=...) after "
    "the transform that makes the update, or use optim.build_optimizer. A chain that "
    "is not meant to be scaled, or is a part of a larger one, is an optax.chain"
)


@dataclasses.dataclass(frozen=True, repr=False)
class ChainCheck:
    """Result of `check_chain`; print it for the verdict.

    Attributes:
      factors: by path, the size of the target's update relative to the base's; None if
        it is zero, or cannot be measured.
      hints: what may be wrong, a sentence for each kind of mistake.

    Examples:
      >>> ChainCheck({"w": 0.25})
      1 of 1 parameters have updates of the right size
    """

    factors: Mapping[str, float | None]
    hints: tuple[str, ...] = ()

    def __repr__(self) -> str:
        known = [factor for factor in self.factors.values() if factor is not None]
        count = f"{len(known)} of {len(self.factors)}"
        line = f"{count} parameters have updates of the right size"
        if len(known) < len(self.factors):
            line += "; the others were not updated, or could not be measured"
        return "\n".join([line, *(f"hint: {hint}" for hint in self.hints)])


def check_chain(tx: Any, scales: Scales, *, params: Any = None) -> ChainCheck:
    """Run an optimizer on known gradients and compare each update with the rules.

    `docs/chains.md` lists what it finds, and what two updates do not show. Multipliers
    that are written by hand count as one learning rate per layer. Of a fused parameter,
    the segment that grows most is judged.

    Args:
      tx: an `optax.GradientTransformation`, or any object with its `init` and `update`.
        Its hyperparameters must be numbers or schedules, not traced values.
      scales: of the target model, those that `tx` was made from.
      params: the parameters, or their abstract shapes, as the optimizer gets them.
        Needed if `tx` holds a tree of masks or labels that is not a dictionary.

    Raises:
      ValueError: an update is wrong (the message has the path, what was measured, and
        what to do), or `tx` cannot be run.

    Source: Tensor Programs VI, Definition 6.1; docs/rules.md.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> print(optim.check_chain(optim.adam(0.1, scales), scales))
      1 of 1 parameters have updates of the right size
      >>> optim.check_chain(optax.adam(0.1), scales)
      Traceback (most recent call last):
      ...
      ValueError: the update of 'out' is 1 times the base's and should be 0.25 times; \
no scaling acts on it: use an optimizer of mupax.optim, or add \
scale_by_parametrization after the transform that makes the update
    """
    point = resolve(scales)
    if not (callable(getattr(tx, "init", None)) and callable(tx.update)):
        raise ValueError(
            f"tx is a {type(tx).__name__}; pass an optax.GradientTransformation"
        )
    # Nested, so that masks find names of parameters.
    tree = nested(dict.fromkeys(scales, 0.0)) if params is None else params
    held = {p: scales[p].widest for p, _ in flatten(tree) if p in scales}
    rules = {path: multipliers(scale, point) for path, scale in held.items()}
    if any(isinstance(x, Traced) for r in rules.values() for x in vars(r).values()):
        raise TracedError
    # Without rules for sizes, the target is compared with itself, unscaled.
    shapes = {
        path: (scale.base_shape if point.scaled else scale.shape, scale.shape)
        for path, scale in held.items()
    }
    leaves = {
        p: Leaf(*pair, rules[p].gradient, rules[p].init_std if point.scaled else 1.0)
        for p, pair in probe_shapes(shapes).items()
    }
    shifts = {path: shift(scale, point) for path, scale in held.items()}
    try:
        with _explained_trees():
            probe = Probe(tx, tree, leaves, shifts)
            factors, problems, hints = judge(probe, rules, scales)
    except Unchecked:
        raise
    except jax.errors.JAXTypeError as error:
        raise TracedError from error
    except Exception as error:
        raise Unchecked(
            "tx cannot be run on gradients with the paths of the scales "
            f"({type(error).__name__}: {error}); pass params=... if it holds trees of "
            "masks or labels, or check the optimizer inside of it (lookahead, SAM)"
        ) from error
    if problems:
        raise ValueError("\n".join(_summary(problems)))
    return ChainCheck(factors, tuple(_summary(hints)))


def _summary(sentences: Iterable[str]) -> list[str]:
    """The first sentence of each kind, and how many follow."""
    kinds: dict[str, list[str]] = {}
    for sentence in sentences:
        kinds.setdefault(sentence.partition(" of '")[0], []).append(sentence)
    return [
        f"{first} (and so for {len(rest)} more parameters)" if rest else first
        for first, *rest in kinds.values()
    ]


# --- optim.chain ---

# Set while a chain initializes those inside of it, which it has checked.
_inside = contextvars.ContextVar("inside", default=False)


def chain(*transforms: Any) -> optax.GradientTransformationExtraArgs:
    """`optax.chain` whose first `init` runs it as `check_chain` does.

    It takes about a second, and is skipped if hyperparameters are traced values.

    Args:
      *transforms: as in `optax.chain`. One of them, or of those inside of them, must
        be a scaling: `scale_by_parametrization`, or an optimizer of this package.

    Raises:
      ValueError: a transform is not one of Optax's kind; from `init`, as `check_chain`,
        and if nothing scales the updates.

    Warns:
      ChainWarning: from `init`, the hints of `check_chain`.

    Source: the order of docs/chains.md.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> scaling = optim.scale_by_parametrization(scales, family="adam")
      >>> rate = optax.scale_by_learning_rate(0.1)
      >>> state = optim.chain(optax.scale_by_lion(), scaling, rate).init(params)
      >>> optim.chain(scaling, optax.scale_by_lion(), rate).init(params)
      Traceback (most recent call last):
      ...
      ValueError: the scaling of 'out' has no effect on its update, or only part of \
it: put clipping first, then the transform that makes the update, then \
scale_by_parametrization
    """
    if not transforms:
        raise ValueError("optim.chain needs at least one transform")
    for tx in transforms:
        if not (callable(getattr(tx, "init", None)) and callable(tx.update)):
            raise ValueError(
                f"{tx!r} in optim.chain is not an optax.GradientTransformation; pass "
                "the transforms one by one: optim.chain(first, second)"
            )
    plain = optax.chain(*transforms)
    seen: set[Any] = set()

    def init(params: optax.Params) -> optax.OptState:
        structure = jax.tree.structure(params)
        if not _inside.get() and mode() is None and structure not in seen:
            with _explained_trees():
                _check_running(plain, params)
            seen.add(structure)
        outer = _inside.set(True)
        try:
            return plain.init(params)
        finally:
            _inside.reset(outer)

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
        with _explained_trees():
            return plain.update(updates, state, params, **more)

    return optax.GradientTransformationExtraArgs(init, update)


@checked
def build_optimizer(
    learning_rate: optax.ScalarOrSchedule,
    scales: Scales,
    precondition: Transform,
    family: str,
    *,
    clip: Transform | None = None,
    weight_decay: optax.ScalarOrSchedule | None = None,
    mask: Mask = None,
) -> Optimizer:
    """Build an optimizer from a transform of your own, in the right order.

    The order is: `clip`, normalization of gradients, `precondition`, scaling, weight
    decay, learning rate. Its first `init` checks it, as that of `chain` does.

    Args:
      learning_rate: that of the base model; a number or a schedule.
      scales: from `infer_scales` or `mupax.zoo.scales`.
      precondition: the transform that gives updates their size, without learning rate
        and weight decay, e.g. `optax.scale_by_adam()` or `optax.trace(0.9)`.
      family: a `Family`: "sgd" if its updates are proportional to the gradient, "adam"
        if their entries have size one, "spectral" if their spectral norm is one,
        "relative" if they are proportional to the weight. `optim.check_chain` measures
        it.
      clip: a transform of gradients, e.g. `optax.clip_by_global_norm(1.0)`.
      weight_decay: decoupled weight decay of the base model; None for none.
      mask: what decays, as in `adamw`.

    Raises:
      ValueError: a hyperparameter is not finite or out of range; a group of
        `for_modules` has a factor that the optimizer cannot use; see
        `scale_by_parametrization` for the rest.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> tx = optim.build_optimizer(0.1, scales, optax.trace(0.9), "sgd",
      ...                            weight_decay=1e-2)
      >>> print(optim.check_chain(tx, scales))
      1 of 1 parameters have updates of the right size

    Source: Tensor Programs VI, Definition 6.1.
    """
    decay = None if weight_decay is None else (weight_decay, mask)
    rule = family_of(family).value
    built = build(
        "this optimizer",
        scales,
        precondition,
        learning_rate,
        clip=clip,
        decay=decay,
        rule=rule,
    )
    return chain(built)


@contextlib.contextmanager
def _explained_trees() -> Iterator[None]:
    """Turn JAX's error for a tree of masks or labels into one sentence."""
    try:
        yield
    except ValueError as error:
        if "pytree structure error" not in str(error):
            raise
        raise Unchecked(_OTHER_TREE) from error


def _check_running(tx: Any, params: Any) -> None:
    """Run a chain on known gradients, raise for problems and warn of the rest."""
    leaves = jax.tree.leaves(params)
    if not leaves or not all(hasattr(x, "shape") for x in leaves):
        return  # a placeholder of optax.tree.map_params
    try:
        scaling = acting(tx, params)
    except TypeError:
        return  # `update` needs an extra argument that is not known here
    if scaling is None:
        raise ValueError(_UNSCALED)
    try:
        check = check_chain(tx, scaling.scales, params=params)
    except TracedError:
        return
    except Unchecked as error:
        text = f"optim.chain could not check this chain: {error}"
        warnings.warn(text, ChainWarning, stacklevel=3)
        return
    if check.hints:
        warnings.warn("\n".join(check.hints), ChainWarning, stacklevel=3)

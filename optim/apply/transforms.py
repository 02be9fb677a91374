"""Stateless Optax transforms that scale updates and gradients, one float per leaf."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from ..rules.multipliers import OptimizerName, family_of, multipliers
from ..rules.parametrizations import Name, Parametrization, parametrization
from ..rules.roles import ParamScale, Role
from ..scales.paths import map_with_paths
from ..scales.probe import Acting, Mode, mode, record
from ..scales.table import Scales, check_depth, check_scales
from .initial_sizes import warn_of_readouts
from .links import SCALING, ChainWarning, Kind, Link, mark

ParametrizationLike = Name | str | Parametrization


def scale_by_parametrization(
    scales: Scales,
    parametrization: ParametrizationLike | None = None,
    family: OptimizerName | str = "adam",
) -> optax.GradientTransformation:
    """Multiply each parameter's update by its learning-rate multiplier.

    Put it after the transform that determines the update (e.g. `optax.scale_by_adam`)
    and before weight decay and learning rate, which it must not scale. Chain it by
    `optim.chain` instead of `optax.chain` to have the order checked.

    Args:
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or the result of `optim.parametrization`. By default the
        one that the scales carry, or "mup" if they carry none and depth stays.
      family: family of the optimizer whose updates come in: "sgd", "adam", "spectral"
        or "relative", or the name of an optimizer of that family, e.g. "lion".

    Returns:
      A stateless `optax.GradientTransformation`. Its `init` checks that `scales` were
      made for the parameters.

    Raises:
      ValueError: the parametrization or family is unknown, the parametrization's
        depth rule does not apply to the model, or the scales are from `for_modules`;
        from `init`, a parameter has no scale or another shape.

    Warns:
      ChainWarning: from `init`, a readout that starts as large as in the standard
        parametrization: `rescale_init` was forgotten. From the first `update`, a gauge
        with forward multipliers, where `apply_multipliers` was not called before.

    Source: the learning-rate rows of Tensor Programs V, Table 3, and Tensor Programs
    VI, Table 1 and Definition 6.1.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "mid": jnp.ones((n, n)),
      ...             "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optax.chain(
      ...     optax.scale_by_adam(),
      ...     optim.scale_by_parametrization(scales, "mup", family="adam"),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> params = mlp(16)
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> {k: round(float(v[0, 0]), 4) for k, v in updates.items()}
      {'in': -0.1, 'mid': -0.025, 'out': -0.025}
    """
    point = resolve(scales, parametrization)
    if scales.modules:
        raise ValueError(
            f"the scales have factors of {next(iter(scales.modules))!r} from "
            "for_modules, which scale_by_parametrization does not apply; use an "
            "optimizer such as optim.adamw, or give it the scales without them and put "
            "optim.scale_by_path behind it"
        )
    tx = scale_leaves(
        scales, point, lambda s: multipliers(s, point, family).learning_rate, "scaling"
    )
    return mark(
        tx,
        Link(SCALING, Kind.SCALING, family_of(family), scales=scales, point=point),
    )


def normalize_gradients(
    scales: Scales, parametrization: ParametrizationLike | None = None
) -> optax.GradientTransformation:
    """Divide each gradient by its size relative to the base model's.

    Put it before an Adam-like transform. It keeps the size of the gradient relative to
    eps the same at every width and depth: the factor n^d L^δ before Q_t in Tensor
    Programs VI, Definition 6.1. Multiplying eps by the gradient's size is equivalent.

    Args:
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or the result of `optim.parametrization`. By default the
        one that the scales carry, or "mup" if they carry none and depth stays.

    Returns:
      A stateless `optax.GradientTransformation`.

    Raises:
      ValueError: as `scale_by_parametrization`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16), axes={".": "i -> o"})
      >>> tx = optim.normalize_gradients(scales, "mup")
      >>> updates, _ = tx.update(mlp(16), tx.init(mlp(16)))
      >>> float(updates["in"][0, 0]), float(updates["out"][0, 0])
      (4.0, 1.0)

    Source: Tensor Programs VI, Definition 6.1.
    """
    point = resolve(scales, parametrization)
    tx = scale_leaves(
        scales, point, lambda s: 1 / multipliers(s, point).gradient, "normalizing"
    )
    return mark(
        tx, Link("normalize_gradients", Kind.NORMALIZING, scales=scales, point=point)
    )


def scale_leaves(
    scales: Scales,
    point: Parametrization,
    factor: Callable[[ParamScale], float],
    kind: str,
) -> optax.GradientTransformation:
    """Multiply each leaf by a factor that is computed once, from its scale.

    Args:
      scales: of the model.
      point: the parametrization.
      factor: returns the factor of a scale.
      kind: "scaling" for learning rates, which a probe can turn off, or "normalizing"
        for gradients.
    """
    factors = {path: factor(scale) for path, scale in scales.items()}
    this = Acting(kind, scales, point)
    missing = missing_multipliers(scales, point) if kind == "scaling" else None

    def init(params: optax.Params) -> optax.EmptyState:
        scales.check_params(params)
        if kind == "scaling":
            warn_of_readouts(params, scales, point)
        return optax.EmptyState()

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        nonlocal missing
        del params
        record(this, updates)
        # Only now: the gradients of a model that is called right went through them.
        if missing and mode() is None:
            if forward_multipliers(scales, point) not in applied:
                warnings.warn(missing, ChainWarning, stacklevel=2)
            missing = None
        if kind == "scaling" and mode() is Mode.UNSCALED:
            return updates, state
        return multiply_leaves(updates, factors, scales), state

    return optax.GradientTransformation(init, update)


def forward_multipliers(
    scales: Scales, point: Parametrization
) -> tuple[tuple[str, float], ...]:
    """The forward multiplier of each path."""
    return tuple((p, multipliers(s, point).forward) for p, s in scales.items())


# The forward multipliers that `apply_multipliers` was called with.
applied: set[tuple[tuple[str, float], ...]] = set()


def missing_multipliers(scales: Scales, point: Parametrization) -> str | None:
    """What the caller has to do, if the gauge has forward multipliers.

    None if it has none, or if the model multiplies its weights itself.

    Source: Yaida 2022, eq. 2.8 (gauge).
    """
    factors = {p: f for p, f in forward_multipliers(scales, point) if f != 1}
    if scales.multiplied or not factors:
        return None
    readouts = (p for p in factors if scales[p].role is Role.OUTPUT)
    path = next(readouts, next(iter(factors)))
    more = f" ({len(factors) - 1} others too)" if len(factors) > 1 else ""
    plain = "'mup'" if point.name == "mean_field" else "gauge='table3'"
    # The one learning rate of SP acts differently in each gauge.
    other = f", or use {plain}, which trains the same function" if point.scaled else ""
    return (
        f"{point.label} multiplies {path!r} by {factors[path]:.4g} in the forward "
        f"pass{more}: call the model with optim.apply_multipliers(params, scales, "
        f"parametrization){other}"
    )


def multiply_leaves(tree: Any, factors: Mapping[str, float], scales: Scales) -> Any:
    """Multiply each leaf by the factor of its path.

    Raises:
      ValueError: a leaf has no scale, or another shape.
    """

    at_base = mode() is Mode.BASE

    def multiply(path: str, leaf: jax.Array) -> jax.Array:
        scales.check_leaf(path, leaf)
        if at_base:
            return leaf
        # A Python float is weakly typed, so bf16 stays bf16.
        return leaf if factors[path] == 1.0 else leaf * factors[path]

    return map_with_paths(multiply, tree)


def scale_schedule(
    learning_rate: Any, schedule: optax.Schedule
) -> Callable[[Any], Any]:
    """Multiply a schedule of peak 1 by a learning rate, which may be a traced value.

    Some Optax schedules, e.g. `optax.warmup_cosine_decay_schedule`, branch on the
    value of their peak. They fail with `TracerBoolConversionError` if it is a traced
    value, e.g. in a sweep under `jax.vmap`.

    Args:
      learning_rate: the peak; a number or a traced value.
      schedule: a schedule with a peak of 1. Its other values are relative to the peak.

    Returns:
      A schedule: learning_rate times schedule(step).

    Raises:
      ValueError: `schedule` is not callable, or its largest value is below 0.1.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from mupax import optim
      >>> unit = optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100)
      >>> jax.vmap(lambda rate: optim.scale_schedule(rate, unit)(10))(
      ...     jnp.array([0.5, 2.0]))
      Array([0.5, 2. ], dtype=float32)
    """
    if not callable(schedule):
        raise ValueError(
            f"schedule={schedule!r} must be a function of the step; the learning rate "
            "comes first: optim.scale_schedule(1e-3, schedule)"
        )
    steps = (0, *(2**i for i in range(24)))
    with jax.ensure_compile_time_eval():  # not in a program that is being traced
        values = [schedule(jnp.asarray(step, jnp.int32)) for step in steps]
    if not any(isinstance(x, jax.core.Tracer) for x in values):
        peak = max(map(float, values))
        if peak < 0.1:
            raise ValueError(
                f"the schedule's largest value is {peak:.3g}, and it must have a peak "
                "of 1: scale_schedule multiplies it by the learning rate"
            )
    return lambda step: learning_rate * schedule(step)


def resolve(scales: Scales, given: ParametrizationLike | None) -> Parametrization:
    """Choose the parametrization, and check it against the scales.

    Args:
      scales: of the model.
      given: a parametrization, or None for the one that the scales carry. If they carry
        none, it is "mup", unless depth changes.

    Raises:
      ValueError: `scales` is not a `Scales`; the name is unknown; the model was built
        with another parametrization; the depth rule does not apply to the model; or
        none is given although depth changes, where the model's branch multiplier
        decides which one is right.
    """
    check_scales(scales)
    own = scales.parametrization
    if given is None and own is None and scales.depth != 1:
        raise ValueError(_which_rule(scales))
    if isinstance(given, str) and given in get_args(OptimizerName):
        raise ValueError(
            f"{given!r} is an optimizer, not a parametrization; pass a "
            "parametrization such as 'depth_mup' in its place (explain takes "
            f"optimizer={given!r}, scale_by_parametrization family={given!r})"
        )
    point = _named(own or "mup" if given is None else given)
    if own is not None and not own.same_rules(point):
        raise ValueError(
            f"the model was built with {own.label}, or its program was read for it, "
            f"but the optimizer is given {point.label}; leave parametrization out to "
            f"keep the former, or build the model with {point.label} and give "
            "parametrization to infer_scales"
        )
    check_depth(scales, point)
    return point


def _which_rule(scales: Scales) -> str:
    """Error message for a depth that changes without a parametrization."""
    start = (
        f"depth grows by {scales.depth:g}, but no parametrization is given, and the "
        "scales do not carry one"
    )
    if not scales.branches:
        return (
            f"{start}; no parameter is inside a residual branch, so pass "
            "parametrization='relu_mlp', or 'mup' to leave depth unscaled"
        )
    return (
        f"{start}; pass the one whose branch_multiplier the model uses: "
        "parametrization='depth_mup' for residual branches of one layer, 'completep' "
        "for branches of two or more, 'mup' where branches are not scaled"
    )


# The functions above have an argument of this name.
_named = parametrization

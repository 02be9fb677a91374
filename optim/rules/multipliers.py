"""Derive the multipliers of a parameter from its growth ratios.

Relative to the base model, the effective weight has a desired update of size Δ, a raw
gradient of size g and an initial size σ (docs/rules.md). θ is the forward multiplier
that the gauge puts in front of the stored weight; for one that carries a multiplier c
of the model, θ = 1/c. Then the stored weight has initial size σ/θ and gradient g·θ, and
its update must have size Δ/θ. The learning rate is that size over the size of the raw
update, which the family's geometry gives (`GEOMETRIES`).

The rules apply to each segment of a parameter. Where they give different numbers, a
multiplier is an array that broadcasts to the parameter.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .parametrizations import Parametrization, unknown
from .roles import ParamScale, Role
from .traced import Traced


class Family(enum.StrEnum):
    """Families of optimizers by the size of their raw update.

    sgd: proportional to the gradient. adam: entries of order one. spectral: spectral
    norm one. column, row: Euclidean norm one of the weights of each output, or of each
    input. relative: proportional to the weight. sphere: the same, for a weight that
    keeps its norm.

    Source: Tensor Programs VI, Definition 6.1 (sgd, and adam as any entrywise one).

    Examples:
      >>> [family.value for family in Family]
      ['sgd', 'adam', 'spectral', 'column', 'row', 'relative', 'sphere']
    """

    SGD = "sgd"
    ADAM = "adam"
    SPECTRAL = "spectral"
    COLUMN = "column"
    ROW = "row"
    RELATIVE = "relative"
    SPHERE = "sphere"


class Geometry(NamedTuple):
    """Size of the entries of a family's raw update, as powers of four sizes.

    An update is aligned with the activations: as a matrix it has rank one.
    """

    gradient: float = 0  # of the stored weight
    weight: float = 0  # its initial values
    fan_in: float = 0  # of one head where heads are matrices
    fan_out: float = 0

    @property
    def multiplier(self) -> float:
        """Exponent of a forward multiplier in the change of the effective weight."""
        return 1 + self.gradient - self.weight


GEOMETRIES = {
    Family.SGD: Geometry(gradient=1),
    Family.ADAM: Geometry(),
    # A matrix of rank one with n x m entries of size (n m)^-½ has spectral norm one.
    Family.SPECTRAL: Geometry(fan_in=-0.5, fan_out=-0.5),
    Family.COLUMN: Geometry(fan_in=-0.5),
    Family.ROW: Geometry(fan_out=-0.5),
    Family.RELATIVE: Geometry(weight=1),
    Family.SPHERE: Geometry(weight=1),
}


class Recipe(NamedTuple):
    """What the rule of an optimizer needs beside its family's geometry."""

    family: Family
    # The exponent of the gradient's size in its eps; 0 without one.
    eps: int = 0
    # What its weight decay is multiplied by: "rate", the learning rate; "update", only
    # the rate of the trust ratio's result; or "step", nothing.
    decay: str = "rate"
    # The optimizer of all parameters but hidden matrices; "" if it trains all alike.
    partner: str = ""
    # A factor of the raw update of a matrix, from its fan-in and fan-out.
    shape: Callable[[int, int], float] = lambda fan_in, fan_out: 1.0
    # Weights below this size, or at zero, have updates of a fixed size.
    least: float | None = None


def widened(fan_in: int, fan_out: int) -> float:
    """The shape factor of `optax.contrib.muon`."""
    return math.sqrt(max(1.0, fan_out / fan_in))


_ADAMS = ("adam", "adamw", "nadam", "amsgrad", "rmsprop")
# A new optimizer is a row here, and its function.
RECIPES = {
    **{family.value: Recipe(family, eps=1) for family in Family},
    **{name: Recipe(Family.SGD) for name in ("sgd", "momentum", "nesterov")},
    **{name: Recipe(Family.ADAM, eps=1) for name in _ADAMS},
    **{name: Recipe(Family.ADAM) for name in ("lion", "sign", "signsgd")},
    "lars": Recipe(Family.RELATIVE),
    "lamb": Recipe(Family.RELATIVE, eps=1, decay="update", least=0.0),
    "adafactor": Recipe(Family.RELATIVE, eps=2, decay="step", least=1e-3),
    "muon": Recipe(Family.SPECTRAL, partner="adamw", shape=widened),
    "soap": Recipe(Family.SPECTRAL, partner="adamw", shape=widened),
    "shampoo": Recipe(Family.SPECTRAL, partner="adamw", shape=widened),
    "scion": Recipe(Family.SPECTRAL, partner="sign", shape=lambda n, m: (m / n) ** 0.5),
    "adam_h": Recipe(Family.SPHERE, eps=1, partner="adamw"),
    # Singular values of one in a matrix of the weight's norm.
    "muon_h": Recipe(Family.SPHERE, partner="adamw", shape=lambda *n: min(n) ** -0.5),
}


def family_of(optimizer: str) -> Family:
    """The family of an optimizer, by its name.

    Raises:
      ValueError: the name is unknown; the message lists the known ones.
    """
    if not isinstance(optimizer, str):
        raise ValueError(
            f"the optimizer family is a {type(optimizer).__name__}; pass a name, e.g. "
            "'adamw'. To check an optimizer, use optim.check_chain(tx, scales)"
        )
    if optimizer not in RECIPES:
        raise ValueError(unknown("optimizer family", optimizer, RECIPES))
    return RECIPES[optimizer].family


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """Multipliers of one parameter's hyperparameters, relative to the base.

    Each is a float; or, if the parameter's segments differ, an array that broadcasts
    to it.

    Attributes:
      init_std: of the stored weight's initial standard deviation.
      forward: the factor in front of the stored weight in the model.
      learning_rate: of the stored weight's learning rate.
      gradient: size of the stored weight's raw gradient, relative to the base's.
      eps: of Adam's eps, which is `gradient`; 1 for optimizers without eps.
      weight_decay: of decoupled weight decay. Learning rate times decay is κ times the
        base's at every size (Wang & Aitchison 2024, arXiv:2405.13698).
      family: the family whose rule gives the learning rate; see `Family`.

    Source: Tensor Programs V, Table 3; Tensor Programs VI, Definition 6.1.

    Examples:
      >>> Multipliers(learning_rate=0.25).init_std
      1.0
    """

    init_std: Any = 1.0
    forward: Any = 1.0
    learning_rate: Any = 1.0
    gradient: Any = 1.0
    eps: Any = 1.0
    weight_decay: Any = 1.0
    family: Family = Family.ADAM


def multipliers(
    scale: ParamScale, point: Parametrization, optimizer: str = "adam", **options: Any
) -> Multipliers:
    """Compute the multipliers of one parameter under an optimizer or a family.

    Args:
      scale: its role and ratios.
      point: the parametrization.
      optimizer: the optimizer's name, or its family. Muon and the like stand for whole
        optimizers, with a partner for all but hidden matrices.
      **options: of optimizers of hidden matrices: `per_head` and `consistent_rms`, as
        in `muon`.

    Raises:
      ValueError: the optimizer is unknown.

    Source: Tensor Programs V, Table 3 (width); Tensor Programs VI, Definition 6.1
    and Table 1 (depth); Yaida eqs. 3.16-3.20 (s); Bordelon et al. eqs. 1, 3 (μ0);
    Malladi et al. 2022 (κ).

    Examples:
      >>> from mupax.optim import param_scale, parametrization
      >>> w = param_scale("w", (64, 64), (256, 256), (0,), (1,), depth=16.0,
      ...                 in_branch=True)
      >>> rule = multipliers(w, parametrization("depth_mup"), "adamw")
      >>> rule.learning_rate, rule.eps, rule.weight_decay
      (0.0625, 0.0625, 16.0)
    """
    each = of_parts(scale, point, optimizer, **options)
    if len(each) == 1:
        return next(iter(each.values()))
    rows = [vars(row) for row in each.values()]
    keys = rows[0].keys() - {"family"}
    numbers = {key: joined(scale, [row[key] for row in rows]) for key in keys}
    return Multipliers(**numbers, family=family_of(optimizer))


def of_parts(
    scale: ParamScale, point: Parametrization, optimizer: str, **options: Any
) -> dict[str, Multipliers]:
    """`multipliers` of each segment by its label, or of the parameter by its path."""
    family_of(optimizer)  # checks it
    if not scale.segments or not (point.scaled or RECIPES[optimizer].partner):
        return {scale.path: _of_part(scale, point, optimizer, **options)}
    each = [_of_part(part, point, optimizer, **options) for part in scale.segments]
    return dict(zip(scale.labels, each, strict=True))


def _of_part(
    scale: ParamScale,
    point: Parametrization,
    optimizer: str,
    *,
    per_head: bool = False,
    consistent_rms: float | None = None,
) -> Multipliers:
    family, recipe = family_of(optimizer), RECIPES[optimizer]
    if recipe.partner and not is_hidden_matrix(scale):
        return _of_part(scale, point, recipe.partner)
    scale = scale.by_head() if per_head else scale
    row, clock = point.rows[scale.role], scale.training
    forward = point.gauge[scale.role].of(scale) if scale.role in point.gauge else 1.0
    theta, init = forward / carried(scale, point), row.init.of(scale)
    if not point.scaled:
        # One learning rate for all stored weights, in every gauge.
        rate = clock.linear if family is Family.SGD else clock.update
        gradient = clock.gradient
    else:
        acts = scale.in_branch or not point.branches_only
        depth = scale.depth if acts else 1.0
        update = row.update.of(scale) * depth**-point.gamma * point.richness
        gradient = row.gradient.of(scale) * depth**-point.alpha / point.richness
        if point.branches_only and (repeats := point.alpha + point.gamma):
            gradient *= scale.shared
            if scale.on_stream:
                update *= scale.depth**-repeats
        update, gradient = update * clock.update, gradient * clock.gradient * theta
        geometry = GEOMETRIES[family]
        raw = (
            gradient**geometry.gradient
            * (init / theta) ** geometry.weight
            * (scale.width_in / scale.heads_in) ** geometry.fan_in
            * (scale.width_out / scale.heads_out) ** geometry.fan_out
        )
        rate = update / theta / raw
        if recipe.partner:
            # The rule has the powers of width already: the base's shape factor holds.
            small, large = (
                shape_factor(optimizer, scale, x, consistent=consistent_rms is not None)
                for x in (scale.base_shape, scale.shape)
            )
            rate *= small / large
    decayed = rate if recipe.decay == "rate" else 1.0
    if recipe.decay == "update":
        decayed = _of_part(scale, point, "adam").learning_rate
    eps, decay = gradient**recipe.eps, clock.kappa / decayed
    return Multipliers(init / theta, forward, rate, gradient, eps, decay, family)


def shape_factor(
    optimizer: str, scale: ParamScale, shape: tuple[int, ...], *, consistent: bool
) -> float:
    """What an optimizer, or Muon's `consistent_rms`, multiplies an update by."""
    axes = scale.in_axes, scale.out_axes
    sizes = [math.prod(shape[a] for a in each) for each in axes]
    return math.sqrt(max(sizes)) if consistent else RECIPES[optimizer].shape(*sizes)


def is_hidden_matrix(scale: ParamScale) -> bool:
    """Whether Muon trains this parameter: a matrix between hidden layers.

    If only depth grows, that is every matrix in a branch.
    """
    matrix = bool(scale.in_axes) and bool(scale.out_axes)
    return scale.role is Role.HIDDEN or (
        scale.role is Role.FIXED and matrix and scale.in_branch
    )


def joined(scale: ParamScale, values: Sequence[Any]) -> Any:
    """One number per segment, or one in all, as one number for the parameter.

    If they differ, it is an array that broadcasts to the parameter, as small as it can
    be: [[1., 1., 2., 2.]] for 1 and 2 of two segments of two columns.
    """
    first = values[0]
    if isinstance(first, Traced):
        factors = joined(scale, [value.factor for value in values])
        return Traced(first.value, factors, first.power)
    traced = any(isinstance(value, jax.core.Tracer) for value in values)
    if len(values) == 1 or (not traced and all(value == first for value in values)):
        return first
    place = scale.segments[0].place
    array: Any = np.zeros(scale.shape, int)  # the number of each entry's segment
    for number, segment in enumerate(scale.segments):
        array.reshape(place.view(scale.shape))[segment.place.index] = number
    for axis in range(array.ndim):
        one = array.take([0], axis)
        if (array == one).all():
            array = one
    return jnp.stack(values)[array] if traced else np.array(values)[array]


def is_one(factor: Any) -> bool:
    """Whether a factor is known to change nothing."""
    return isinstance(factor, int | float) and factor == 1


def is_zero(number: Any) -> bool:
    """Whether a number is known to add nothing."""
    return isinstance(number, int | float) and number == 0


def carried(scale: ParamScale, point: Parametrization) -> Any:
    """The multiplier of the model that a stored weight carries, e.g. M^-α.

    It is 1 in a model that multiplies its branches and logits itself, and under SP.

    Source: Yaida eq. 2.8 (gauge).
    """
    if not point.scaled:
        return 1.0
    if scale.segments:
        return joined(scale, [carried(s, point) for s in scale.segments])
    branch = scale.depth**-point.alpha if scale.ends_branch else 1.0
    return scale.carried * branch


def shift(scale: ParamScale, point: Parametrization) -> Any:
    """What makes a stored weight that is used as c + w its multiple by what it carries.

    A model that multiplies has c + w; one that does not, θ (c + w) = c + w'. Then w' +
    c (1 - θ) = θ w. An optimizer that sees this sum trains it as a weight carrying θ.
    """
    if scale.segments:
        return joined(scale, [shift(s, point) for s in scale.segments])
    return scale.offset * (1 - carried(scale, point)) if scale.offset else 0.0

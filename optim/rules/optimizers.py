"""The rule of one parameter under an optimizer: its family's, and what differs."""

import dataclasses
import math
from typing import Any

from .multipliers import RECIPES, Family, family_of, joined, multipliers, shape_of
from .parametrizations import Parametrization
from .roles import ParamScale, Role


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parameter's settings under an optimizer, as ratios to those of the base.

    Numbers are floats, or arrays, as those of `Multipliers`.

    Attributes:
      role: see `Role`.
      base_shape: its shape in the base model.
      shape: its shape in the target model.
      branch: whether the parameter is in a residual branch.
      family: the optimizer family whose rule gives the learning rate; see `Family`.
      origin: how the role was found.
      init_std: of the stored weight.
      multiplier: the forward multiplier in front of the stored weight.
      learning_rate: multiplier of the base model's learning rate.
      eps: multiplier of eps; 1 for optimizers without eps.
      weight_decay: multiplier of weight decay.
    """

    role: Role
    base_shape: tuple[int, ...]
    shape: tuple[int, ...]
    branch: bool
    family: Family
    origin: str
    init_std: Any
    multiplier: Any
    learning_rate: Any
    eps: Any
    weight_decay: Any


def optimizer_rule(
    name: str,
    scale: ParamScale,
    point: Parametrization,
    *,
    partner: str | None = None,
    per_head: bool = False,
    split_fused: bool = True,
    consistent_rms: float | None = None,
    whole: ParamScale | None = None,
) -> Rule:
    """The rule of one parameter under an optimizer or a family.

    The raw update of a matrix has a shape factor in some optimizers. The rule already
    contains the powers of width, so the multiplier replaces the target's shape factor
    by the base's.

    Args:
      name: of the optimizer or family.
      scale: the parameter's role and ratios.
      point: the parametrization.
      partner: the optimizer of all parameters but hidden matrices, if not its own.
      per_head, split_fused, consistent_rms: as in `muon`.
      whole: the fused kernel of a segment that is not split.

    Raises:
      ValueError: the name is unknown.

    Examples:
      >>> from mupax import optim
      >>> mid = optim.param_scale("mid", (4, 4), (16, 16), (0,), (1,))
      >>> rule = optimizer_rule("adamw", mid, optim.parametrization("mup"))
      >>> rule.learning_rate, rule.eps, rule.weight_decay
      (0.25, 0.25, 4.0)
    """
    family, recipe = family_of(name), RECIPES[name]
    facts = scale.role, scale.base_shape, scale.shape, scale.in_branch, family
    if recipe.partner and scale.segments:
        each = [
            optimizer_rule(
                *(name, segment, point),
                partner=partner,
                per_head=per_head,
                consistent_rms=consistent_rms,
                whole=None if split_fused else scale,
            )
            for segment in scale.segments
        ]
        numbers = ("init_std", "multiplier", "learning_rate", "eps", "weight_decay")
        columns = ([getattr(rule, number) for rule in each] for number in numbers)
        values = (joined(scale, column) for column in columns)
        return Rule(*facts, scale.origin, *values)
    if recipe.partner and not is_hidden_matrix(scale):
        return optimizer_rule(partner or recipe.partner, scale, point)
    scale = scale.by_head() if per_head else scale
    rule = multipliers(scale, point, name)
    rate = rule.learning_rate
    if recipe.partner and point.scaled:
        shape = shape_of(name, consistent=consistent_rms is not None)
        matrix = whole or scale
        both = matrix.in_axes, matrix.out_axes
        small, large = (
            shape(*(math.prod(sizes[a] for a in axes) for axes in both))
            for sizes in (matrix.base_shape, matrix.shape)
        )
        rate *= small / large
    decay = {
        "rate": lambda: rule.kappa / rate,
        "update": lambda: multipliers(scale, point, "adam").weight_decay,
        "step": lambda: rule.kappa,
    }[recipe.decay]()
    sizes = rule.init_std, rule.forward
    return Rule(*facts, scale.origin, *sizes, rate, rule.eps**recipe.eps, decay)


def is_hidden_matrix(scale: ParamScale) -> bool:
    """Whether Muon trains this parameter: a matrix between hidden layers.

    If only depth grows, no parameter has the role "hidden"; then every matrix in a
    branch counts.
    """
    matrix = bool(scale.in_axes) and bool(scale.out_axes)
    return scale.role is Role.HIDDEN or (
        scale.role is Role.FIXED and matrix and scale.in_branch
    )

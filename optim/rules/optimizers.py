"""The rule of one parameter under an optimizer: its family's, and what differs."""

import math
from typing import Any, NamedTuple

from .multipliers import RECIPES, Family, family_of, joined, multipliers, shape_of
from .parametrizations import Parametrization
from .roles import ParamScale, Role


class Rule(NamedTuple):
    """Multipliers of one parameter's hyperparameters under an optimizer.

    Attributes:
      family: that of the optimizer, for this parameter.
      learning_rate: of the learning rate.
      eps: of eps; 1 for optimizers without one.
      weight_decay: of the weight decay. All three are floats, or arrays, as those of
        `Multipliers`.
    """

    family: Family
    learning_rate: Any
    eps: Any = 1.0
    weight_decay: Any = 1.0


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
      >>> optimizer_rule("adamw", mid, optim.parametrization("mup"))[1:]
      (0.25, 0.25, 4.0)
    """
    family, recipe = family_of(name), RECIPES[name]
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
        columns = list(zip(*each, strict=True))[1:]
        return Rule(family, *(joined(scale, column) for column in columns))
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
    return Rule(family, rate, rule.eps**recipe.eps, decay)


def is_hidden_matrix(scale: ParamScale) -> bool:
    """Whether Muon trains this parameter: a matrix between hidden layers.

    If only depth grows, no parameter has the role "hidden"; then every matrix in a
    branch counts.
    """
    matrix = bool(scale.in_axes) and bool(scale.out_axes)
    return scale.role is Role.HIDDEN or (
        scale.role is Role.FIXED and matrix and scale.in_branch
    )

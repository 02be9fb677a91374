"""Scaling rules over width and depth, and the Optax transforms that apply them.

Three steps: `infer_scales` finds the growth ratios of your model's parameters, a
parametrization (by name) gives the rules, and an optimizer (`adam`, `adamw`, `sgd`,
..., or `scale_by_parametrization` in your own `optim.chain`) applies them. `explain`
prints the whole setup before training.
"""

from .apply.groups import for_modules
from .apply.init import apply_multipliers, rescale_init
from .apply.matrix_optimizers import adam_h, muon, muon_h, scion, shampoo, soap
from .apply.optimizers import adafactor, adam, adamw, lamb, lion, sgd
from .apply.transforms import normalize_gradients, scale_by_parametrization
from .check.chain_check import ChainCheck, build_optimizer, chain, check_chain
from .check.coord_check import coord_check
from .check.coord_verdict import CoordCheck, Verdict
from .check.explain import Explanation, explain
from .reading.infer import infer_scales
from .rules.multipliers import Family, Multipliers, multipliers
from .rules.parametrizations import (
    Parametrization,
    Powers,
    list_parametrizations,
    parametrization,
)
from .rules.roles import ParamScale, Role, param_scale
from .rules.traced import Traced
from .rules.training import TrainingScale
from .scales.declare import Declarations, declare
from .scales.table import ChainWarning, Scales

__all__ = [
    "ChainCheck",
    "ChainWarning",
    "CoordCheck",
    "Declarations",
    "Explanation",
    "Family",
    "Multipliers",
    "ParamScale",
    "Parametrization",
    "Powers",
    "Role",
    "Scales",
    "Traced",
    "TrainingScale",
    "Verdict",
    "adafactor",
    "adam",
    "adam_h",
    "adamw",
    "apply_multipliers",
    "build_optimizer",
    "chain",
    "check_chain",
    "coord_check",
    "declare",
    "explain",
    "for_modules",
    "infer_scales",
    "lamb",
    "lion",
    "list_parametrizations",
    "multipliers",
    "muon",
    "muon_h",
    "normalize_gradients",
    "param_scale",
    "parametrization",
    "rescale_init",
    "scale_by_parametrization",
    "scion",
    "sgd",
    "shampoo",
    "soap",
]

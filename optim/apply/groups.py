"""Hyperparameters per group of parameters, as factors of the global ones.

They are tuned on the base and transfer like the learning rate: the rules for width,
depth, batch size and length multiply them as they are.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..rules.roles import Role
from ..scales.group import Module
from ..scales.patterns import Pattern
from ..scales.table import Scales


def _matching(pattern: str, scales: Scales) -> list[str]:
    """The paths of a role, or those that a regular expression matches."""
    roles = {path: f"role:{s.role}" for path, s in scales.items()}
    if pattern in roles.values():
        return [path for path, role in roles.items() if role == pattern]
    if pattern.startswith("role:") or pattern in list(Role):
        held = ", ".join(map(repr, dict.fromkeys(roles.values())))
        raise ValueError(f"{pattern!r} matches no parameter; the scales hold {held}")
    regex = Pattern("pattern", pattern)
    found = [path for path in scales if regex.matches(path)]
    regex.check(scales)
    return found


def for_modules(scales: Scales, modules: Mapping[str, Mapping[str, Any]]) -> Scales:
    """Set hyperparameters per group of parameters, in a copy of the scales.

    Args:
      scales: from `infer_scales` or `mupax.zoo.scales`.
      modules: {pattern: {hyperparameter: factor}}. A pattern is a regular expression
        that is searched in the parameter paths; or, for all parameters of a role, e.g.
        "role:hidden". The hyperparameters are

        - `learning_rate`. The decay per step, learning rate times weight decay, does
          not change with it.
        - `weight_decay`, which is decoupled; 0 for none.
        - `init_scale`, of the initial weights, for `rescale_init`.
        - `multiplier`, of the parameters in the forward pass, as a gauge: it multiplies
          weights (in `rescale_init`) and their updates, so that the network trains as
          with a multiplier. On all parameters of a branch's last layer it is a branch
          multiplier.

    Raises:
      ValueError: a pattern matches nothing, names an unknown role, or matches a path
        that another pattern matches too; an unknown hyperparameter; a factor is not a
        number, not finite, or not positive (weight decay may be 0).

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> base, params = {"out": jnp.ones((4, 2))}, {"out": jnp.ones((16, 2))}
      >>> scales = optim.infer_scales(base, params, axes={"out": "i -> o"})
      >>> slow = optim.for_modules(scales, {"role:output": {"learning_rate": 0.5}})
      >>> tx = optim.adam(0.1, slow)
      >>> tx.update(params, tx.init(params))[0]["out"][0, 0].round(4)
      Array(-0.0125, dtype=float32)

    Source: Mlodozeniec et al. 2025 (arXiv:2512.22382); Yaida eq. 2.8 (multiplier as a
    gauge).
    """
    known = [field.name for field in dataclasses.fields(Module)]
    by_path = dict(scales.modules)
    for pattern, factors in modules.items():
        if wrong := factors.keys() - known:
            raise ValueError(
                f"unknown hyperparameter {min(wrong)!r} of {pattern!r}; a group of "
                f"parameters has {', '.join(known)}"
            )
        try:
            module = Module(**factors)
        except ValueError as error:
            raise ValueError(f"the factors of {pattern!r}: {error}") from None
        for path in _matching(pattern, scales):
            if path in by_path:
                raise ValueError(
                    f"parameter {path!r} matches {pattern!r}, and already has factors "
                    "of another pattern or of an earlier for_modules; change one of "
                    "them, so that each parameter has one"
                )
            by_path[path] = module
    return scales.replaced(modules=by_path)

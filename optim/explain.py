"""`explain`: the whole setup, parameter by parameter, before a step is run."""

import dataclasses
from collections.abc import Mapping

from .optimizers import is_hidden_matrix, shape_factor
from .parametrizations import Parametrization, parametrization
from .rules import check_depth, family_of, multipliers
from .scales import ParamScale, Scales

_HEAD = "path role base target init fwd lr eps wd family found".split()  # noqa: SIM905
_WITH_EPS = ("adam", "adamw", "nadam", "amsgrad", "rmsprop", "lamb")


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter's settings, as ratios to those of the base model.

    Attributes:
      role: input, hidden, output, vector or fixed.
      base_shape: its shape in the base model.
      shape: its shape in the target model.
      init_std: of the stored weight.
      multiplier: the forward multiplier in front of the stored weight.
      learning_rate: multiplier of the base model's learning rate.
      eps: multiplier of eps; 1 for optimizers without.
      weight_decay: multiplier of weight decay.
      branch: whether it stands in a residual branch.
      family: the rule by which the learning rate follows.
      origin: how the role was found.
    """

    role: str
    base_shape: tuple[int, ...]
    shape: tuple[int, ...]
    init_std: float
    multiplier: float
    learning_rate: float
    eps: float
    weight_decay: float
    branch: bool
    family: str
    origin: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns: `.rows` by path, and a table when printed.

    Source: docs/rules.md derives every number.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16))
      >>> optim.explain(scales, "mup", optimizer="sgd").rows["in"].learning_rate
      4.0
    """

    parametrization: Parametrization
    optimizer: str
    depth: float
    rows: Mapping[str, Row]

    def __str__(self) -> str:
        point = self.parametrization
        head = list(_HEAD)
        table = [head]
        for path, row in self.rows.items():
            table.append(
                [
                    path + (" *" if row.branch else ""),
                    row.role,
                    "x".join(map(str, row.base_shape)) or "()",
                    "x".join(map(str, row.shape)) or "()",
                    *(f"{x:.4g}" for x in (row.init_std, row.multiplier)),
                    *(
                        f"{x:.4g}"
                        for x in (row.learning_rate, row.eps, row.weight_decay)
                    ),
                    row.family,
                    row.origin,
                ]
            )
        widths = [max(len(r[i]) for r in table) for i in range(len(head))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip()
            for r in table
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        notes = [f"{point.name}, {self.optimizer}; every number is a ratio to the base"]
        if self.depth != 1 or self.parametrization.alpha:
            notes.append(
                f"branches (*) times {point.branch_multiplier(self.depth):.4g}·a, "
                f"a·M^-{point.alpha:g} at depth ratio M = {self.depth:g}"
            )
        if point.richness != 1:
            notes.append(f"the model divides its output by μ0 = {point.richness:g}")
        notes.append(f"init, fwd, lr, eps: {point.citation}")
        if point.scaled and self.optimizer != "adafactor":
            notes.append("wd: such that lr·wd is the same at every size")
        return "\n".join([notes[0], "", *lines, "", *notes[1:]])


def explain(
    scales: Scales,
    parametrization: str | Parametrization = "depth_mup",
    optimizer: str = "adam",
) -> Explanation:
    """Every parameter's role, initialization, multipliers and settings.

    Args:
      scales: from `infer_scales` or `mupax.zoo.scales`.
      parametrization: a name, or what `optim.parametrization` returns.
      optimizer: its name, as "adamw", or its family.

    Returns:
      An `Explanation`: print it, or read `.rows[path]`.

    Raises:
      ValueError: unknown parametrization or optimizer, or depth that the
        parametrization cannot act on.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import optim
      >>> def mlp(n):
      ...     return {"in": jnp.ones((8, n)), "out": jnp.ones((n, 2))}
      >>> scales = optim.infer_scales(mlp(4), mlp(16))
      >>> print(optim.explain(scales, "mup", optimizer="adamw"))
      mup, adamw; every number is a ratio to the base
      <BLANKLINE>
      path  role    base  target  init  fwd  lr    eps   wd  family  found
      ----------------------------------------------------------------------------
      in    input   8x4   8x16    1     1    1     0.25  1   adam    shape, in_out
      out   output  4x2   16x2    0.25  1    0.25  1     4   adam    readout
      <BLANKLINE>
      init, fwd, lr, eps: Yang et al. 2022, Tensor Programs V (arXiv:2203.03466), \
Table 3
      wd: such that lr·wd is the same at every size

    Source: docs/rules.md derives every number.
    """
    point = _named(parametrization)
    check_depth(scales, point)
    rows = {path: _row(scale, point, optimizer) for path, scale in scales.items()}
    return Explanation(point, optimizer, scales.depth, rows)


# `explain` has an argument of this name.
_named = parametrization


def _row(scale: ParamScale, point: Parametrization, optimizer: str) -> Row:
    family = family_of(optimizer)
    if optimizer == "muon" and not is_hidden_matrix(scale):
        family = family_of("adamw")
    rule = multipliers(scale, point, family)
    learning_rate = rule.learning_rate
    if optimizer == "muon" and is_hidden_matrix(scale) and point.scaled:
        learning_rate *= shape_factor(scale, consistent_rms=False)
    has_eps = optimizer in _WITH_EPS or (optimizer == "muon" and family == "adam")
    eps = rule.eps if has_eps else 1.0
    decay = 1 / learning_rate
    if optimizer == "adafactor":
        # Its eps stands beside the gradient's square; its decay knows no rate.
        eps, decay = rule.eps**2, 1.0
    elif optimizer == "lamb":
        # Its decay joins Adam's update, before the trust ratio.
        decay = multipliers(scale, point, "adam").weight_decay
    return Row(
        role=scale.role.value,
        base_shape=scale.base_shape,
        shape=scale.shape,
        init_std=rule.init_std,
        multiplier=rule.forward,
        learning_rate=learning_rate,
        eps=eps,
        weight_decay=decay,
        branch=scale.in_branch,
        family=family.value,
        origin=scale.origin,
    )

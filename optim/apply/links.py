"""Classify the links of a chain by their effect on the size of updates.

Transforms of this package carry a mark. Those of Optax are known by the name of the
function that creates them.
"""

import dataclasses
import enum
import math
from typing import Any

import jax
import numpy as np

from ..rules.multipliers import Family

_MARK = "mupax_link"
SCALING = "scale_by_parametrization"


class ChainWarning(UserWarning):
    """Warning: this chain trains, but its optimal learning rate may move with size.

    Examples:
      >>> import warnings
      >>> warnings.simplefilter("error", ChainWarning)  # to make it an error
      >>> warnings.simplefilter("default", ChainWarning)
    """


class Kind(enum.Enum):
    """The effect of a link on the size of updates."""

    SCALING = "scale_by_parametrization, or one of our optimizers"
    NORMALIZING = "normalize_gradients"
    MAKER = "sets the size of updates: the family's"
    LINEAR = "keeps updates proportional"
    GROUPS = "scale_by_path: multiplies the updates of groups"
    FREEZING = "scale_by_path with zeros only"
    CLIP = "bounds updates"
    DECAY = "adds weight decay"
    OWN_STEP = "finds its own step size; no rule is known"
    NOISE = "adds noise; no rule is known"
    CURVATURE = "uses curvature or a line search; no rule is known"
    HIDDEN = "holds other transforms, or is unknown"


@dataclasses.dataclass(frozen=True)
class Link:
    """One transform of a chain.

    Attributes:
      name: the function that created it.
      kind: its effect.
      family: of the updates that a MAKER returns, or that a SCALING expects.
      normalizes: whether a SCALING brings its own `normalize_gradients`.
      has_eps: whether a MAKER compares gradients with an eps.
      decays: whether a SCALING has a weight decay of its own.
      inner: the links of a chain.
      plain: the transform without the check that `optim.chain` adds to `init`.
      source: the transform, for links of Optax whose sign matters.
      scales: those of a SCALING or NORMALIZING.
      point: the parametrization of a SCALING or NORMALIZING.
      rules: (scales, parametrization) of an optimizer of this package.
    """

    name: str
    kind: Kind
    family: Family | None = None
    normalizes: bool = False
    has_eps: bool = False
    decays: bool = False
    inner: "tuple[Link, ...]" = ()
    plain: Any = None
    source: Any = None
    scales: Any = None
    point: Any = None
    rules: Any = None

    @property
    def factor(self) -> float:
        """The factor of `optax.scale` or a schedule, or the coefficient of a decay.

        A schedule's is that of its first step. -1 for an optimizer of this package, 1
        for links that keep the sign of updates; 0 if it is unknown, e.g. traced.
        """
        if self.kind is Kind.SCALING and self.name != SCALING:
            return -1.0
        if self.kind in (Kind.HIDDEN, Kind.OWN_STEP, Kind.CURVATURE):
            return 0.0
        if self.source is None:
            return 1.0
        update, one = np.float32(self.kind is not Kind.DECAY), np.float32(1)
        try:
            with jax.ensure_compile_time_eval():
                return float(self.source.update(update, self.source.init(one), one)[0])
        except Exception:  # traced values; or a user's schedule, which fails later
            return 0.0

    @property
    def sign(self) -> float:
        """The sign of `factor`; -1 for a schedule that starts at -0.0."""
        return math.copysign(1, self.factor) if str(self.factor) != "0.0" else 0.0


def mark(tx: Any, link: Link) -> Any:
    """Attach a description to a transform, for `optim.chain` to read."""
    for function in (tx.init, tx.update):
        setattr(function, _MARK, link)
    return tx


def _table() -> dict[str, Link]:
    makers = {
        Family.ADAM: (
            "scale_by_acprop scale_by_adadelta scale_by_adam scale_by_adamax "
            "scale_by_adan scale_by_ademamix scale_by_adopt scale_by_amsgrad "
            "scale_by_belief scale_by_factored_rms scale_by_lion scale_by_radam "
            "scale_by_rms scale_by_rprop scale_by_rss scale_by_sign "
            "scale_by_simplified_ademamix scale_by_sm3 scale_by_stddev scale_by_yogi"
        ),
        Family.SPECTRAL: "scale_by_muon",
        Family.RELATIVE: ("scale_by_param_block_rms scale_by_trust_ratio"),
    }
    # These do not add an eps to the size of the gradient.
    without_eps = (
        "scale_by_factored_rms",
        "scale_by_lion",
        "scale_by_rprop",
        "scale_by_sign",
        "scale_by_sm3",
    )
    others = {
        Kind.LINEAR: (
            "apply_every centralize ema identity keep_params_nonnegative "
            "scale scale_by_learning_rate scale_by_optimistic_gradient "
            "scale_by_schedule snapshot trace zero_nans set_to_zero "
            "reduce_on_plateau"
        ),
        Kind.CLIP: (
            "adaptive_grad_clip clip clip_by_block_rms clip_by_global_norm normalize "
            "normalize_by_update_norm per_example_global_norm_clip "
            "per_example_layer_norm_clip differentially_private_aggregate"
        ),
        Kind.DECAY: "add_decayed_weights",
        Kind.NOISE: "add_noise",
        Kind.OWN_STEP: (
            "dadapt_adamw mechanize momo momo_adam prodigy scale_by_cocob "
            "scale_by_distance_over_gradients scale_by_polyak"
        ),
        Kind.CURVATURE: (
            "hutchinson_estimator_diag_hessian sam scale_by_backtracking_linesearch "
            "scale_by_lbfgs scale_by_sophia scale_by_zoom_linesearch"
        ),
        # Their update sizes depend on a parameter's norm, a projection, or a sum since
        # the start, so they are measured by running the chain.
        Kind.HIDDEN: (
            "scale_by_galore scale_by_madgrad scale_by_novograd "
            "scale_by_param_block_norm chain named_chain "
            "masked partition apply_if_finite conditionally_mask "
            "conditionally_transform flatten inject_hyperparams lookahead "
            "schedule_free split_real_and_imaginary stateless stateless_with_tree_map "
            "with_extra_args_support"
        ),
    }
    table = {n: Link(n, kind) for kind, names in others.items() for n in names.split()}
    for family, names in makers.items():
        for name in names.split():
            eps = family is Family.ADAM and name not in without_eps
            table[name] = Link(name, Kind.MAKER, family, has_eps=eps)
    return table


# Every transform of Optax 0.2.8 and its contrib.
LINKS = _table()
# Those that multiply updates by a number; scale_by_learning_rate returns one of them.
FACTORS = ("scale", "scale_by_schedule")

# Optimizers inside other transforms are known by the type of their state.
STATES = {
    "COCOBState": Kind.OWN_STEP,
    "DAdaptAdamWState": Kind.OWN_STEP,
    "DoGState": Kind.OWN_STEP,
    "DoWGState": Kind.OWN_STEP,
    "MechanicState": Kind.OWN_STEP,
    "MomoAdamState": Kind.OWN_STEP,
    "MomoState": Kind.OWN_STEP,
    "ProdigyState": Kind.OWN_STEP,
    "HutchinsonState": Kind.CURVATURE,
    "ScaleByBacktrackingLinesearchState": Kind.CURVATURE,
    "ScaleByLBFGSState": Kind.CURVATURE,
    "ScaleByZoomLinesearchState": Kind.CURVATURE,
    "SophiaState": Kind.CURVATURE,
}


def rules_of(tx: Any) -> tuple[Any, Any] | None:
    """The (scales, parametrization) that a transform applies; None if unknown."""
    pending = [describe(tx)]
    while pending:
        link = pending.pop()
        if link.rules is not None:
            return link.rules
        if link.scales is not None:
            return link.scales, link.point
        pending += link.inner
    return None


def describe(tx: Any) -> Link:
    """Describe a transform by its mark, or by the Optax function that created it."""
    link = getattr(getattr(tx, "update", None), _MARK, None)
    if isinstance(link, Link):
        return link
    if not (callable(getattr(tx, "init", None)) and callable(tx.update)):
        raise ValueError(
            f"{tx!r} in optim.chain is not an optax.GradientTransformation; pass the "
            "transforms one by one: optim.chain(first, second)"
        )
    module = getattr(tx.update, "__module__", None) or ""
    name = getattr(tx.update, "__qualname__", type(tx).__name__).partition(".")[0]
    if module.partition(".")[0] == "optax" and name in LINKS:
        link = LINKS[name]
        signed = link.kind is Kind.DECAY or name in FACTORS
        return dataclasses.replace(link, source=tx) if signed else link
    return Link(name, Kind.HIDDEN)

"""Parametrizations as data: one row of exponents per role.

For the effective weight of a role (the factor of the activations), three sizes are
powers of the width ratios: its initial standard deviation, the entries of the desired
update, and the entries of its raw gradient. `multipliers.py` derives every multiplier
from them; `docs/rules.md` derives the rows.
"""

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .roles import ParamScale, Role
from .traced import Traced


class Powers(NamedTuple):
    """A size as powers of the ratios of fan-in, fan-out and the last hidden width.

    Examples:
      >>> from mupax.optim import param_scale
      >>> wide = param_scale("w", (64, 64), (256, 128), (0,), (1,))
      >>> Powers(fan_in=-1, fan_out=0.5).of(wide)  # (256/64)^-1 (128/64)^½
      0.3535533905932738

    Source: Tensor Programs V, Table 3; Yaida eq. 3.20 (`last`).
    """

    fan_in: float = 0.0
    fan_out: float = 0.0
    last: float = 0.0

    def of(self, scale: ParamScale) -> float:
        """The size of one parameter."""
        value: float = (
            scale.width_in**self.fan_in
            * scale.width_out**self.fan_out
            * scale.width_last**self.last
        )
        return value


class Row(NamedTuple):
    """Sizes of one role's effective weight, as powers of the width ratios."""

    init: Powers = Powers()
    update: Powers = Powers()
    gradient: Powers = Powers()


ONE = Powers()

Gauge = str | Mapping[Role | str, Powers]

# The powers that the forward multiplier takes over from the stored weight, by role.
# The network computes and learns the same in every gauge (Yaida eq. 2.8).
GAUGES: dict[str, dict[Role, Powers]] = {
    # Tensor Programs V, Table 3: everything in initialization and learning rate.
    "table3": {},
    # Table 8, and the mup package: the readout is multiplied by 1/m.
    "table8": {Role.OUTPUT: Powers(fan_in=-1)},
    # Bordelon et al. Table 1: weights of order one everywhere, one learning rate.
    "mean_field": {Role.HIDDEN: Powers(fan_in=-0.5), Role.OUTPUT: Powers(fan_in=-1)},
}


@dataclasses.dataclass(frozen=True, repr=False)
class Parametrization:
    """A parametrization: exponents of width by role, exponents of depth, and a gauge.

    Attributes:
      name: its name, as in `list_parametrizations()`.
      rows: for each role, sizes in powers of width.
      citation: the paper and equation.
      alpha: a residual branch is multiplied by a·M^-alpha.
      gamma: updates inside branches get another M^-gamma.
      scaled: False for SP, which has one learning rate for all parameters.
      branches_only: whether gamma acts only inside residual branches; False for
        networks without them (`relu_mlp`).
      gauge: for each role, the powers that its forward multiplier carries.
      richness: μ0 of Bordelon et al. eq. 1; the model divides its output by it.

    Raises:
      ValueError: an exponent is not finite, or the richness is not positive.

    Source: Tensor Programs V, Table 3; Tensor Programs VI, Definition 6.2; Yaida
    eq. 2.8 (gauge).

    Examples:
      >>> point = parametrization("completep", alpha=0.75)
      >>> point, point.gamma, point.citation
      (completep(alpha=0.75), 0.25, 'Dey et al. 2025 (arXiv:2505.01618), Table 1')
    """

    name: str
    rows: Mapping[Role, Row]
    citation: str
    alpha: float = 0.0
    gamma: float = 0.0
    scaled: bool = True
    branches_only: bool = True
    gauge: Mapping[Role, Powers] = dataclasses.field(default_factory=dict)
    richness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("alpha", "gamma", "richness"):
            value = getattr(self, name)
            if isinstance(value, Traced):  # the value is not known yet
                continue
            if not math.isfinite(value) or (name == "richness" and value <= 0):
                positive = " and positive" * (name == "richness")
                raise ValueError(
                    f"{name}={value} of {self.name!r} must be finite{positive}"
                )

    def __hash__(self) -> int:
        # jit hashes models, which carry their parametrization; rows are dictionaries
        # and cannot be hashed.
        return hash((self.name, self.alpha, self.gamma, self.richness))

    def same_rules(self, other: "Parametrization") -> bool:
        """Whether both give the same multipliers; names and citations may differ.

        A `Traced` value is unknown, and counts as equal to any other.

        Examples:
          >>> parametrization("ode").same_rules(parametrization("completep"))
          True
        """
        mine, theirs = vars(self), vars(other)
        return all(
            isinstance(mine[name], Traced)
            or isinstance(theirs[name], Traced)
            or mine[name] == theirs[name]
            for name in mine.keys() - {"name", "citation"}
        )

    @property
    def label(self) -> str:
        """Its name, with the gauge and richness if they are not the defaults."""
        options = []
        plain = self.name.partition("(")[0]
        default = _REGISTRY["mean_field"]().gauge if plain == "mean_field" else {}
        if self.gauge != default:
            named = [k for k, g in GAUGES.items() if g == self.gauge]
            options.append(f"gauge={named[0]!r}" if named else "gauge={...}")
        if isinstance(self.richness, Traced) or self.richness != 1:
            options.append(f"richness={self.richness}")
        return self.name + (f" ({', '.join(options)})" if options else "")

    def __repr__(self) -> str:
        return self.label

    def branch_multiplier(self, depth_ratio: float, *, a: float = 1.0) -> float:
        """The factor a·M^-alpha in front of each residual branch.

        Args:
          depth_ratio: M = depth / base depth, one number.
          a: the multiplier at the base depth, which you tune.

        Raises:
          ValueError: the depth ratio is not a positive number.

        Source: Tensor Programs VI, eq. 1 and Definition 6.2.

        Examples:
          >>> parametrization("depth_mup").branch_multiplier(64 / 4, a=2.0)
          0.5
        """
        if not 0 < depth_ratio < math.inf:
            raise ValueError(
                f"depth_ratio={depth_ratio!r} must be a positive number; pass "
                "depth / base depth"
            )
        multiplier: float = a * depth_ratio**-self.alpha
        return multiplier


def _s_family(s: float) -> dict[Role, Row]:
    # At s = 1 these are μP's rows (Tensor Programs V, Table 3), with gradients ∝
    # 1/fan_out. Every s equals μP at richness n^-(1-s)/2, with n the last hidden width;
    # `last` holds these powers of n (Yaida eqs. 3.16-3.20).
    lazy = (1 - s) / 2
    inner = Powers(last=0.0 - lazy)
    gradient = Powers(fan_out=-1, last=lazy)
    return {
        Role.INPUT: Row(ONE, inner, gradient),
        Role.HIDDEN: Row(Powers(fan_in=-0.5), Powers(-1, last=0.0 - lazy), gradient),
        Role.OUTPUT: Row(Powers(-1, last=lazy), Powers(fan_in=-1), ONE),
        Role.VECTOR: Row(ONE, inner, gradient),
        Role.FIXED: Row(),
    }


_SP_ROWS = dict.fromkeys(Role, Row()) | dict.fromkeys(
    (Role.HIDDEN, Role.OUTPUT), Row(init=Powers(fan_in=-0.5))
)

_YAIDA = "Yaida 2022 (arXiv:2210.04909), eqs. 3.16-3.20"
_TP5 = "Yang et al. 2022, Tensor Programs V (arXiv:2203.03466), Table 3"
_TP6 = "Yang et al. 2023, Tensor Programs VI (arXiv:2310.02244)"
_DEY = "Dey et al. 2025 (arXiv:2505.01618), Table 1"


def _meta_principled(s: float = 1.0) -> Parametrization:
    if not 0 <= s <= 1:
        # The output (s < 0) or the differentials of the kernel (s > 1) grow with width.
        raise ValueError(
            f"s={s} must lie in [0, 1]: 0 is NTK, 1 is μP (Yaida eq. 3.15)"
        )
    return Parametrization(f"meta_principled(s={s:g})", _s_family(s), _YAIDA)


def _mup(name: str, citation: str, **depth: Any) -> Parametrization:
    return Parametrization(name, _s_family(1.0), citation, **depth)


def _residual(alpha: float, gamma: float) -> Parametrization:
    name, citation = f"residual(alpha={alpha:g}, gamma={gamma:g})", "Definition 6.2"
    return _mup(name, f"{_TP6}, {citation}", alpha=alpha, gamma=gamma)


def _completep(alpha: float = 1.0) -> Parametrization:
    if not 0.5 <= alpha <= 1:
        raise ValueError(
            f"alpha={alpha} must lie in [1/2, 1]; for any other point write "
            "residual(alpha=..., gamma=...)"
        )
    return _mup(f"completep(alpha={alpha:g})", _DEY, alpha=alpha, gamma=1 - alpha)


# By name, functions of their options; `parametrization` describes them.
_REGISTRY: dict[str, Callable[..., Parametrization]] = {
    "sp": lambda: Parametrization(
        "sp", _SP_ROWS, "He et al. 2015 (arXiv:1502.01852)", scaled=False
    ),
    "ntk": lambda: Parametrization("ntk", _s_family(0.0), _YAIDA),
    "mup": lambda: _mup("mup", _TP5),
    "mean_field": lambda: _mup(
        "mean_field",
        "Bordelon et al. 2023 (arXiv:2309.16620), Table 1",
        gauge=GAUGES["mean_field"],
    ),
    "meta_principled": _meta_principled,
    "depth_mup": lambda: _mup(
        "depth_mup", f"{_TP6}, Table 1 and Claim 7.5", alpha=0.5, gamma=0.5
    ),
    "ode": lambda: _mup("ode", f"{_TP6}, Claim 7.4", alpha=1.0),
    "completep": _completep,
    "residual": _residual,
    "relu_mlp": lambda: _mup(
        "relu_mlp",
        "Jelassi et al. 2023 (arXiv:2305.07810), Theorem 1.1",
        gamma=1.5,
        branches_only=False,
    ),
}


def list_parametrizations() -> list[str]:
    """List the names that `parametrization` accepts.

    Examples:
      >>> "depth_mup" in list_parametrizations()
      True
    """
    return sorted(_REGISTRY)


def parametrization(
    name: str | Parametrization,
    *,
    gauge: Gauge | None = None,
    richness: float | None = None,
    **options: Any,
) -> Parametrization:
    """Look up a parametrization by name.

    - "sp": standard, with an initial variance of 1/fan_in and one learning rate.
    - "meta_principled" (`s` in [0, 1]): Yaida's family, over width alone; "ntk" is
      s = 0, "mup" s = 1, and "mean_field" μP with weights of order one.
    - "residual" (`alpha`, `gamma`): μP with branches times M^-alpha and updates inside
      them times M^-gamma. "depth_mup" is 1/2 and 1/2, for branches of one layer; "ode"
      1 and 0; "completep" (`alpha` in [1/2, 1]) has gamma = 1 - alpha.
    - "relu_mlp": for plain ReLU networks, every learning rate times M^-3/2, a theorem
      for the first step of SGD. Over hundreds of steps the best rate falls less: tune
      a plain network at its own depth.

    `docs/rules.md` derives them, and says what are extensions of ours.

    Args:
      name: one of `list_parametrizations()`. A `Parametrization` is returned with the
        given gauge and richness.
      gauge: which factors are forward multipliers: "table3" (none: all are in
        initialization and learning rate), "table8" (the readout is multiplied by 1/m,
        as in the mup package), "mean_field", or {role: `Powers` of the ratios that the
        forward multiplier carries}.
      richness: μ0. The model divides its output by it; SGD's learning rates are
        multiplied by μ0², Adam's by μ0 (Bordelon et al. eqs. 1 and 3).
      **options: of the parametrization itself, e.g. `s`, `alpha`, `gamma`.

    Raises:
      ValueError: a name, gauge, role or option is unknown, or a value out of range.

    Examples:
      >>> parametrization("depth_mup").alpha
      0.5
      >>> parametrization("mup", gauge="table8").gauge[Role.OUTPUT]
      Powers(fan_in=-1, fan_out=0.0, last=0.0)
      >>> parametrization("depthmup")
      Traceback (most recent call last):
      ...
      ValueError: unknown parametrization 'depthmup'; nearest is 'depth_mup', known \
are completep, depth_mup, mean_field, meta_principled, mup, ntk, ode, relu_mlp, \
residual, sp

    Source: see the `citation` of each parametrization.
    """
    if isinstance(name, Parametrization):
        point = name
        if options:
            raise ValueError(
                f"options {sorted(options)} need a name such as 'completep', but "
                f"{point.name!r} was passed as a Parametrization"
            )
    else:
        if name not in _REGISTRY:
            raise ValueError(unknown("parametrization", name, _REGISTRY))
        try:
            point = _REGISTRY[name](**options)
        except TypeError as error:
            takes = inspect.signature(_REGISTRY[name])
            raise ValueError(f"the options of {name!r} are {takes}: {error}") from None
    if gauge is not None:
        point = dataclasses.replace(point, gauge=_gauge(gauge))
    if richness is not None:
        point = dataclasses.replace(point, richness=richness)
    return point


def _gauge(gauge: Gauge) -> Mapping[Role, Powers]:
    if isinstance(gauge, str):
        if gauge not in GAUGES:
            raise ValueError(unknown("gauge", gauge, GAUGES))
        return GAUGES[gauge]
    for role in gauge:
        if role not in list(Role):
            raise ValueError(unknown("role", str(role), [r.value for r in Role]))
    return {Role(role): powers for role, powers in gauge.items()}


def unknown(kind: str, name: str, known: Any) -> str:
    """The message for a name that is not in `known`."""
    names = sorted(map(str, known))
    near = closest(str(name), names, least=0.0)
    listed = ", ".join(names)
    return f"unknown {kind} {name!r}; nearest is {near!r}, known are {listed}"


def closest(name: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """The known name that is most similar, in upper or lower case; None if none is.

    `least` is the least similarity, from 0 to 1.

    Examples:
      >>> closest("adamW", ["adam", "adamw"]), closest("digits", ["adam"])
      ('adamw', None)
    """
    folded = {other.casefold(): other for other in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=least)
    return folded[near[0]] if near else None

"""`Family`, the base class of models, and the options that all families share.

A family is a module with a dataclass of its own options and a subclass of `Family`,
whose `build` creates the layers. Sizes, parametrization and dtypes are defined here.
"""

import dataclasses
import inspect
import math
import numbers
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax import optim

from .plan import Axis, Plan, times_width

# {annotation of an option: (accepted types, their name in messages)}
_TYPES: Mapping[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool, np.bool_), "True or False"),
    int: ((int,), "a whole number"),
    float: ((numbers.Real, jax.Array, optim.Traced), "a number"),
    str: ((str,), "a string"),
    tuple: ((tuple, list), "a tuple"),
    tuple[int, ...]: ((tuple, list), "a tuple of whole numbers"),
    types.NoneType: ((types.NoneType,), "None"),
}

_LARGEST = 2**31 - 1  # XLA indexes axes by int32


class Range(NamedTuple):
    """The values that an annotated option may have: their name, and whether one is."""

    text: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Range("a whole number, at least 1", lambda n: n >= 1)]
Natural = Annotated[int, Range("a whole number, at least 0", lambda n: n >= 0)]
Positive = Annotated[float, Range("a positive number", lambda x: 0 < x < math.inf)]
Fraction = Annotated[float, Range("a number in [0, 1]", lambda x: 0 <= x <= 1)]
Rate = Annotated[float, Range("a number in [0, 1)", lambda x: 0 <= x < 1)]
Counts = Annotated[
    tuple[int, ...],
    Range("whole numbers, at least 1", lambda n: len(n) > 0 and min(n) >= 1),
]
ImageShape = Annotated[
    tuple[int, ...],
    Range(
        "(height, width, channels), each at least 1",
        lambda shape: len(shape) == 3 and min(shape) >= 1,
    ),
]
Remat = bool | Literal["none", "full", "products"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every model.

    Attributes:
      width: n, of the residual stream.
      depth: L, the number of blocks.
      base_width: the width that you tuned; None for `width`.
      base_depth: the depth that you tuned; None for `depth`. M = depth / base_depth.
      parametrization: a name, or what `optim.parametrization` returns. None:
        "depth_mup" for residual branches of one layer, "completep" for deeper ones,
        "mup" without any.
      remat: recompute blocks in the backward pass: True or "full" for all of a block,
        "products" for all but matrix products, convolutions and attention; False or
        "none" for nothing.
      dtype: data type of the computation; statistics of normalizations, softmax and
        logits are at least float32.
      param_dtype: data type of the parameters.

    Raises:
      ValueError: a value does not have its option's type, or a dtype is not one of
        floating-point numbers; the message names the option.
    """

    width: Count
    depth: Count
    base_width: Count | None = None
    base_depth: Count | None = None
    parametrization: str | optim.Parametrization | None = None
    remat: Remat = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        check_values(self)
        for name in _types(type(self)):
            value = getattr(self, name)
            items = value if isinstance(value, tuple | list) else (value,)
            if any(isinstance(item, int) and abs(item) > _LARGEST for item in items):
                raise ValueError(
                    f"{name} holds a number beyond {_LARGEST:,}, the largest size of "
                    "an axis"
                )
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            try:
                floats = jnp.issubdtype(jnp.dtype(value), jnp.floating)
            except TypeError:
                floats = False
            if not floats:
                raise ValueError(
                    f"{name}={value!r} must be a floating-point type, e.g. bfloat16"
                )

    def check_unused(self, *names: str, without: str) -> None:
        """Check that options that need another one have their default values.

        Args:
          *names: of the options.
          without: the option that they need, e.g. "experts".

        Raises:
          ValueError: one of them differs from its default; the message names it.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} has no effect without {without}; pass "
                    f"{without} too, or leave {field.name} out"
                )

    @property
    def tuned_depth(self) -> int:
        """The depth of the base."""
        return self.depth if self.base_depth is None else self.base_depth

    @property
    def branch_layers(self) -> int:
        """Number of layers in a residual branch."""
        return 1

    @property
    def default_parametrization(self) -> str:
        """The parametrization of a model that is created without one.

        "depth_mup" for branches of one layer, for which it is optimal (Tensor Programs
        VI, Claim 7.5). "completep" for branches of two or more layers, for which
        "depth_mup" is not optimal (Tensor Programs VI, section 9; Dey et al. 2025).
        """
        return "depth_mup" if self.branch_layers == 1 else "completep"

    def plan(
        self,
        *,
        growing: Mapping[str, float] | None = None,
        fixed: Mapping[str, int] | None = None,
        axes: Mapping[str, Axis] | None = None,
    ) -> Plan:
        """Build the plan of a model with these options.

        The width of the residual stream is the axis "embed".

        Args:
          growing: further axes that grow with width, as multiples of it.
          fixed: further axes that do not grow, with their sizes.
          axes: further axes, as they are.

        Raises:
          ValueError: a multiple of the width is not whole.
        """
        width, base_width = self.width, self.base_width or self.width
        known = {"embed": Axis(base_width, width, True), **(axes or {})}
        for name, multiple in (growing or {}).items():
            base, size = (
                times_width(n, multiple, f"axis {name!r}") for n in (base_width, width)
            )
            known[name] = Axis(base, size, True)
        known |= {name: Axis(size, size) for name, size in (fixed or {}).items()}
        return Plan(
            tuple(known.items()),
            optim.parametrization(self.parametrization or self.default_parametrization),
            self.depth / self.tuned_depth,
            getattr(self, "branch_multiplier", 1.0),
            self.dtype,
            self.param_dtype,
        )


def check_values(holder: Any, where: str = "") -> None:
    """Check that attributes have their annotated types, and lie in their `Range`.

    Args:
      holder: of the attributes.
      where: end of the name in the message, e.g. " of row 3".

    Raises:
      ValueError: one does not; the message names it.
    """
    for name, kinds in _types(type(holder)).items():
        value = getattr(holder, name)
        if not any(_fits(value, kind) for kind in kinds):
            needed = " or ".join(map(_described_kind, kinds))
            raise ValueError(f"{name}={reprlib.repr(value)}{where} must be {needed}")


def _types(holder: type) -> dict[str, tuple[Any, ...]]:
    """Types of the attributes that are checked: all but dtypes and objects."""
    checked = {}
    for name, hint in typing.get_type_hints(holder, include_extras=True).items():
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        kinds = typing.get_args(hint) if union else (hint,)
        kinds = tuple(map(_known_kind, kinds))
        if None not in kinds:
            checked[name] = kinds
    return checked


def _known_kind(kind: Any) -> Any:
    """A type that can be checked; None for another one."""
    origin = typing.get_origin(kind)
    if kind in _TYPES or origin in (Annotated, Literal):
        return kind
    return origin if origin in _TYPES else None


def _described_kind(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) is Annotated:
        return str(kind.__metadata__[0].text)
    return _TYPES[kind][1]


def _fits(value: Any, kind: Any) -> bool:
    """Whether the value of an attribute has a type of its annotation."""
    items: Any = value
    if typing.get_origin(kind) is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        fits = _fits(value, _known_kind(kind.__origin__))
        # The values of hyperparameters in a trace are not known.
        known = not isinstance(value, jax.Array | optim.Traced)
        return fits and not (known and not kind.__metadata__[0].holds(value))
    if not isinstance(value, _TYPES[kind][0]):
        return False
    if kind == tuple[int, ...]:
        return all(_fits(item, int) for item in items)
    return kind is bool or not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualOptions(Options):
    """Options of every model with residual branches.

    Attributes:
      branch_multiplier: a, the factor of each residual branch at the base depth.
    """

    branch_multiplier: Positive = 1.0


class Family(nnx.Module):
    """Base class of the zoo's models, built from the options of a family.

    A subclass names its dataclass, `class ResMLP(Family, options=ResMLPOptions)`, and
    defines `build(options, rngs)`, which sets `self.plan` and creates the layers. The
    constructor takes the dataclass's fields as keyword arguments, and `rngs`. The
    docstring describes those of the subclass; those that families share are added.
    """

    options_type: ClassVar[type[Options]]
    plan: Plan
    readout: Any

    def __init_subclass__(
        cls, *, options: type[Options] | None = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if options is None:
            return
        cls.options_type = options

        def __init__(self: Family, *, rngs: nnx.Rngs, **given: Any) -> None:
            checked = options(**given)
            if not isinstance(rngs, nnx.Rngs):
                raise ValueError(
                    f"rngs is a {type(rngs).__name__}; pass rngs=nnx.Rngs(0), with a "
                    "seed or a key"
                )
            self.build(checked, rngs)

        __init__.__signature__ = _signature(options)  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[assignment]
        cls.__doc__ = _described(cls.__doc__ or "", options)

    def build(self, options: Any, rngs: nnx.Rngs) -> None:
        """Set `self.plan`, and create the layers.

        Args:
          options: of the family's dataclass.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no build method")

    def features(self, *inputs: Any, **more: Any) -> Any:
        """The input of the readout."""
        raise NotImplementedError(f"{type(self).__name__} defines no features method")

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        """The logits of a batch of inputs."""
        logits = self.readout(self.features(*inputs, **more)) * self.plan.output
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


# An option in a docstring, with the lines that describe it.
_ENTRY = re.compile(r"^  (\w+): .*(?:\n    .*)*", re.MULTILINE)


def _described(doc: str, options: type[Options]) -> str:
    """The docstring of a model, with the options of the dataclass's base classes."""
    before, _, after = inspect.cleandoc(doc).partition("Args:\n")
    own, _, rest = after.partition("\n\n")
    entries = {entry[1]: entry[0] for entry in _ENTRY.finditer(own)}
    for base in options.__mro__[1:-1]:
        _, _, shared = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for entry in _ENTRY.finditer(shared.partition("\n\n")[0]):
            entries.setdefault(entry[1], entry[0])
    lines = [*entries.values(), "  rngs: random state.", "", rest]
    return before + "Args:\n" + "\n".join(lines)


def _signature(options: type[Options]) -> inspect.Signature:
    """The constructor's signature: `self`, the fields by keyword, and `rngs`."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rngs = inspect.Parameter(
        "rngs", inspect.Parameter.KEYWORD_ONLY, annotation=nnx.Rngs
    )
    fields = inspect.signature(options).parameters.values()
    return inspect.Signature([own, *fields, rngs])

"""`Scales`: the role and growth ratios of every parameter of a model."""

import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..rules.parametrizations import Parametrization, parametrization
from ..rules.roles import ParamScale
from ..rules.training import SAME, TrainingScale
from .group import Module
from .paths import flatten, has_base
from .probe import mode


class ChainWarning(UserWarning):
    """Warning: this chain trains, but its optimal learning rate may move with size.

    Examples:
      >>> import warnings
      >>> warnings.simplefilter("default", ChainWarning)  # or "error"
    """


class Scales(Mapping[str, ParamScale]):
    """The scales of all parameters of a model: a mapping from path to `ParamScale`.

    Created by `infer_scales` (any JAX model) or `mupax.zoo.scales` (zoo models).

    Attributes:
      parametrization: the one that everything made from the scales follows. If it is
        None, it is "mup", unless depth changes.
      modules: {path: factors of its hyperparameters}, from `for_modules`.
      multiplied: whether the model was built with `parametrization` and multiplies its
        weights by the forward multipliers itself, without `apply_multipliers`.
      base: the base model, or a function that builds it, for `rescale_init`.

    Source: Tensor Programs V, Table 8; Tensor Programs VI, Definition 6.2.

    Examples:
      >>> from mupax.optim import Scales, param_scale
      >>> scales = Scales({"w": param_scale("w", (8, 4), (8, 16), (0,), (1,))})
      >>> scales, scales["w"].width_out
      (Scales(w: input), 4.0)
    """

    def __init__(
        self,
        scales: Mapping[str, ParamScale],
        parametrization: Parametrization | None = None,
        modules: Mapping[str, Module] | None = None,
        multiplied: bool | None = None,
        base: Any = None,
    ):
        self._scales = dict(scales)
        self.parametrization = parametrization
        self.modules = dict(modules or {})
        built = parametrization is not None
        self.multiplied = built if multiplied is None else multiplied
        self.base = base

    def replaced(self, **changes: Any) -> "Scales":
        """A copy with some attributes changed."""
        held = {name.removeprefix("_"): value for name, value in vars(self).items()}
        return Scales(**{**held, **changes})

    def for_parametrization(self, name: str | Parametrization) -> "Scales":
        """Copy the scales, with another parametrization.

        A model that multiplies its branches itself must do so by the constant of this
        one.

        Raises:
          ValueError: the name is unknown, or the model was built with another
            parametrization, as zoo models are.

        Examples:
          >>> from mupax.optim import Scales, param_scale
          >>> one = {"w": param_scale("w", (8, 4), (8, 16), (0,), (1,))}
          >>> Scales(one).for_parametrization("mup").parametrization.name
          'mup'
        """
        point, own = parametrization(name), self.parametrization
        if self.multiplied and own is not None and not own.same_rules(point):
            raise ValueError(
                f"the model was built with {own.label}, and these scales are to be for "
                f"{point.label}; build the model with {point.label}"
            )
        return self.replaced(parametrization=point)

    def for_training(
        self,
        *,
        batch: tuple[float, float] | None = None,
        examples: tuple[float, float] | None = None,
        length_exponent: float = 0.5,
    ) -> "Scales":
        """Copy the scales, for a target with another batch size or training length.

        Optimizers of `mupax.optim` then follow the rules of `TrainingScale`. In your
        own chain, `scale_by_parametrization` and `normalize_gradients` do; pass
        `scales.training.beta(0.9)` and `scales.training.weight_decay(0.1)` to Optax.

        Args:
          batch: (base, target) batch size in examples; None if they are equal.
          examples: (base, target) number of examples of the whole training, i.e. batch
            size times steps; None if they are equal.
          length_exponent: learning rates of all optimizers but SGD fall with the number
            of examples to this power; see `TrainingScale`.

        Raises:
          ValueError: the scales already have other ratios than one; a ratio is
            not positive; the exponent is not between 0 and 1.

        Examples:
          >>> from mupax.optim import Scales, param_scale
          >>> one = {"w": param_scale("w", (8, 4), (8, 16), (0,), (1,))}
          >>> Scales(one).for_training(batch=(64, 1024)).training.kappa
          16.0

        Source: see `TrainingScale`.
        """
        if self.training != SAME:
            raise ValueError(
                "these scales already have a batch size or length of an earlier "
                "for_training, infer_scales or zoo.scales; pass batch and examples in "
                "one call"
            )

        def ratio(pair: tuple[float, float] | None) -> float:
            return 1.0 if pair is None else pair[1] / pair[0]

        ratios = TrainingScale(ratio(batch), ratio(examples), length_exponent)
        scales = {p: s.with_all(training=ratios) for p, s in self.items()}
        return self.replaced(scales=scales)

    def __getitem__(self, path: str) -> ParamScale:
        if path not in self._scales:
            raise KeyError(f"no parameter {path!r}; the scales hold {some([*self])}")
        return self._scales[path]

    def __contains__(self, path: object) -> bool:
        return path in self._scales

    def __iter__(self) -> Iterator[str]:
        return iter(self._scales)

    def __len__(self) -> int:
        return len(self._scales)

    def __repr__(self) -> str:
        rows = [f"{s.path}: {s.role}" for s in self.values()]
        more = [f"... {len(rows) - 6} more"] if len(rows) > 6 else []
        return f"Scales({', '.join([*rows[:6], *more])})"

    @property
    def depth(self) -> float:
        """Depth ratio M of the model: the largest of its streams, or 1."""
        return max((s.depth for s in self.values()), default=1.0)

    @property
    def training(self) -> TrainingScale:
        """Ratios of batch size and training length, 1 where they do not change."""
        return next((s.training for s in self.values()), SAME)

    @property
    def branches(self) -> bool:
        """Whether any parameter is inside a residual branch."""
        return any(s.in_branch for s in self.values())

    def check_params(self, params: Any) -> None:
        """Raise a `ValueError` unless these scales were made for `params`.

        They may lack what `optax.masked` or `optax.partition` mask out, and what NNX
        (a state of `wrt=nnx.All(nnx.Param, ...)`) and Equinox (None of `eqx.filter`)
        freeze.
        """
        # `optax.tree.map_params` has one placeholder for all parameters.
        if type(params).__name__ == "_ParamsPlaceholder":
            return
        held, masked = set(), []
        for path, leaf in flatten(params, is_leaf=_is_masked):
            if _is_masked(leaf):  # or None, in place of a leaf that was filtered out
                masked.append(path)
                continue
            if not hasattr(leaf, "shape"):
                raise ValueError(
                    f"{path!r} is a {type(leaf).__name__}, not an array; pass only the "
                    "parameters to the optimizer, e.g. eqx.filter(model, "
                    "eqx.is_inexact_array)"
                )
            self.check_leaf(path, leaf)
            held.add(path)
        # An NNX state lacks the parameters that a filter left out.
        if held and has_base(params, "State"):
            _warn_of_missing_blocks(self, held)
            return
        for path in self:
            hidden = any(m in ("", path) or path.startswith(m + "/") for m in masked)
            if path not in held and not hidden:
                raise ValueError(
                    f"the scales hold {path!r}, which the parameters lack; make the "
                    "scales again from the parameters that the optimizer gets. To "
                    "freeze a part, give the whole tree to optax.partition, with "
                    "optax.set_to_zero() for that part, or leave None in its place "
                    "(optax.masked would add its gradients to it)"
                )

    def check_leaf(self, path: str, leaf: Any) -> None:
        """Raise a `ValueError` unless a parameter or update has a scale of its shape.

        Shapes are not compared in probes, nor inside of `jax.shard_map`, where a leaf
        is one shard.
        """
        if path not in self:
            # Integers are step counters, and keys seed dropout.
            kind = getattr(leaf, "dtype", jnp.float32)
            if not jnp.issubdtype(kind, jnp.inexact):
                raise ValueError(
                    f"{path!r} has dtype {kind}, so it is not trained and has no "
                    "scale; pass only floating-point parameters to the optimizer, or "
                    f"optax.masked(tx, mask), with a mask that is False for {path!r}"
                )
            raise ValueError(
                f"parameter {path!r} has no scale; the scales hold "
                f"{some(list(self))}: make them from the same parameters that the "
                "optimizer gets (for Linen variables, the 'params' collection; for "
                "NNX, nnx.state(model, nnx.Param), or for other variables their state: "
                "infer_scales(nnx.state(base, wrt), nnx.state(target, wrt)); without "
                "optax.flatten, which hides their names)"
            )
        shape = tuple(getattr(leaf, "shape", self[path].shape))
        shards = jax.sharding.get_abstract_mesh().manual_axes
        if shape != self[path].shape and mode() is None and not shards:
            raise ValueError(
                f"parameter {path!r} has shape {shape}, but its scale was made for "
                f"shape {self[path].shape}; make new scales with this model as the "
                "target"
            )


def _is_masked(leaf: Any) -> bool:
    # By name, because optax does not export MaskedNode at a stable place.
    return leaf is None or type(leaf).__name__ == "MaskedNode"


def _warn_of_missing_blocks(scales: Iterable[str], held: Collection[str]) -> None:
    """Warn where only the last blocks of a list are missing: is the model shallower?"""
    last: dict[str, int] = {}
    for found in filter(None, map(_BLOCK.match, held)):
        last[found[1]] = max(int(found[2]), last.get(found[1], 0))
    missing = [path for path in scales if path not in held]
    blocks = [_BLOCK.match(path) for path in missing]
    if missing and all(b and int(b[2]) > last.get(b[1], math.inf) for b in blocks):
        warnings.warn(
            f"the scales hold {missing[0]!r}, a later block than the parameters have: "
            "make the scales again with this model as the target. If a filter freezes "
            "the last blocks, ignore this",
            ChainWarning,
            stacklevel=4,
        )


_BLOCK = re.compile(r"(.*?/)(\d+)/")  # the number of a block in a list


def some(names: list[str], most: int = 4) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(repr(n) for n in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def check_scales(scales: Any) -> None:
    """Raise a `ValueError` for something else than scales."""
    if not isinstance(scales, Scales):
        raise ValueError(
            f"scales is a {type(scales).__name__}; make it with "
            "infer_scales(base, target, inputs=(x,)) or zoo.scales(model), and pass it "
            "as scales, e.g. optim.adamw(learning_rate, scales)"
        )


def check_depth(scales: Scales, point: Parametrization) -> None:
    """Raise a `ValueError` if a parametrization has no depth rule for these scales."""
    if scales.depth == 1:
        return
    if point.branches_only and (point.alpha or point.gamma) and not scales.branches:
        raise ValueError(
            f"{point.name!r} scales residual branches by depth, but no parameter is "
            "in one; pass inputs=(x,) to infer_scales, so that they are found, or use "
            "'mup' for a network without residual branches"
        )
    if not point.branches_only and scales.branches:
        path = next(s.path for s in scales.values() if s.in_branch)
        raise ValueError(
            f"{point.name!r} is for networks without residual branches, but {path!r} "
            "is in one; use 'depth_mup' or 'completep'"
        )

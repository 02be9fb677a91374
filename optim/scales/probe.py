"""What acts while a transformation runs on known gradients; see `check/probing.py`."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import jax

from ..rules.multipliers import is_one
from ..rules.roles import ParamScale
from .paths import flatten


class Mode(enum.Enum):
    """The factors that act while a probe runs."""

    BASE = "those of groups"
    TARGET = "all"


class Kind(enum.Enum):
    """What a transform of this package multiplies."""

    SCALING = "updates, by the learning rates of the parametrization"
    NORMALIZING = "gradients, by the inverse of their sizes"
    DECAYING = "weight decay, where it is scaled together with the update"


@dataclasses.dataclass(frozen=True, eq=False)
class Acting:
    """A transform of this package; compared by identity."""

    kind: Kind
    scales: Any  # the scales it was made from
    factors: Mapping[str, Any]  # by path; 1 for the others
    groups: Mapping[str, Any]  # those of groups of parameters, which the base has too

    def factor(self, path: str) -> Any:
        """The factor of one parameter in the mode of the running probe."""
        group, factor = self.groups.get(path, 1.0), self.factors.get(path, 1.0)
        if mode() is Mode.BASE:
            return group
        if mode() is Mode.TARGET:
            factor = of_widest(factor, self.scales[path])
            if self.kind is Kind.SCALING:
                factor = factor * running.value.loudness
        return factor if is_one(group) else factor * group

    def record(self, tree: Any) -> None:
        """Note in a running probe that this acts on the parameters of a tree."""
        if running.value is None:
            return
        for path, _ in flatten(tree):
            if path in self.factors:
                running.value.acted.setdefault((self.kind, path), set()).add(self)


def of_widest(factor: Any, scale: ParamScale) -> Any:
    """The number that an array of factors holds for the segment that grows most.

    A probe holds this segment alone: the others are multiplied by the same transforms.
    """
    if not getattr(factor, "ndim", 0):
        return factor
    places = zip(scale.widest.start, factor.shape, strict=True)
    return factor[tuple(0 if size == 1 else start for start, size in places)]


class Recorder:
    """The mode of one run, and the transforms that acted on each parameter."""

    def __init__(self, which: Mode):
        self.which = which
        self.loudness: Any = 1.0  # a factor of the factors of scalings, at the target
        # Sets, because a loop may trace its body more than once.
        self.acted: dict[tuple[Kind, str], set[Acting]] = {}

    def of(self, kind: Kind, path: str) -> list[Acting]:
        """The transforms of this kind that acted on a parameter."""
        return list(self.acted.get((kind, path), ()))


# A user context is part of the cache key of compiled functions. So functions that a
# probe compiles, even inside of a user's jit, are not reused outside of it.
running = jax.make_user_context(default_value=None)


def mode() -> Mode | None:
    """The mode of the running probe; None outside of probes."""
    return running.value.which if running.value else None

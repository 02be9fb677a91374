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


@dataclasses.dataclass(frozen=True, eq=False)
class Acting:
    """A transform of this package; compared by identity."""

    scales: Any  # the scales it was made from
    factors: Mapping[str, Any]  # by path; 1 for the others
    groups: Mapping[str, Any]  # those of groups of parameters, which the base has too
    # Whether it multiplies updates by the learning rates of the parametrization.
    is_scaling: bool = False

    def factor(self, path: str) -> Any:
        """The factor of one parameter in the mode of the running probe."""
        group, factor = self.groups.get(path, 1.0), self.factors.get(path, 1.0)
        if mode() is Mode.BASE:
            return group
        if mode() is Mode.TARGET:
            factor = of_widest(factor, self.scales[path])
            if self.is_scaling:
                factor = factor * running.value.loudness
        return factor if is_one(group) else factor * group

    def record(self, tree: Any) -> None:
        """Note in a running probe that this scales the updates of a tree."""
        if running.value is None or not self.is_scaling:
            return
        for path, _ in flatten(tree):
            running.value.scalings.setdefault(path, set()).add(self)


def of_widest(factor: Any, scale: ParamScale) -> Any:
    """The number that an array of factors holds for the segment that grows most.

    A probe holds this segment alone: the others are multiplied by the same transforms.
    """
    if not getattr(factor, "ndim", 0):
        return factor
    places = zip(scale.widest.start, factor.shape, strict=True)
    return factor[tuple(0 if size == 1 else start for start, size in places)]


class Recorder:
    """The mode of one run, and the scalings of each parameter's update."""

    def __init__(self, which: Mode):
        self.which = which
        self.loudness: Any = 1.0  # a factor of the factors of scalings, at the target
        # Sets, because a loop may trace its body more than once.
        self.scalings: dict[str, set[Acting]] = {}


# A user context is part of the cache key of compiled functions. So functions that a
# probe compiles, even inside of a user's jit, are not reused outside of it.
running = jax.make_user_context(default_value=None)


def mode() -> Mode | None:
    """The mode of the running probe; None outside of probes."""
    return running.value.which if running.value else None

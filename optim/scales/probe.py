"""What acts while a transformation runs on known gradients.

While such a probe runs, the transforms of this package accept its shapes, and their
factors can be turned off or enlarged; see `mupax.optim.check.probing`.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import jax

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
    GROUPS = "updates, by the factors of groups of parameters"
    SHARED = "gradients or decay of groups, by factors that the base has too"


@dataclasses.dataclass(frozen=True, eq=False)
class Acting:
    """A transform of this package; compared by identity.

    Attributes:
      kind: what it multiplies.
      scales: the scales it was made from.
      factors: the factor of each path; 1 for the others.
    """

    kind: Kind
    scales: Any
    factors: Mapping[str, Any]

    @property
    def point(self) -> Any:
        """The parametrization."""
        return self.scales.parametrization

    def factor(self, path: str) -> Any:
        """The factor of one parameter in the mode of the running probe."""
        factor = self.factors.get(path, 1.0)
        if mode() is Mode.BASE and self.kind not in (Kind.GROUPS, Kind.SHARED):
            return 1.0
        if mode() is Mode.TARGET and self.kind in (Kind.SCALING, Kind.GROUPS):
            return factor * running.value.loudness if path in self.factors else factor
        return factor

    def record(self, tree: Any) -> None:
        """Note in a running probe that this acts on the parameters of a tree."""
        if running.value is not None:
            for path, _ in flatten(tree):
                if path in self.factors:
                    acted = running.value.acted.setdefault((self.kind, path), set())
                    acted.add(self)


class Recorder:
    """The mode of one run, and the transforms that acted on each parameter.

    Args:
      which: the factors that act.

    Attributes:
      loudness: a factor of all factors of updates, at the target.
    """

    def __init__(self, which: Mode):
        self.which = which
        self.loudness: Any = 1.0
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

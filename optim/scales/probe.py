"""What acts while a transformation runs on known gradients.

While such a probe runs, the transforms of this package accept its shapes, and their
multipliers can be turned off; see `mupax.optim.check.probing`.
"""

import dataclasses
import enum
from typing import Any

import jax

from .paths import flatten


class Mode(enum.Enum):
    """The multipliers that act while a probe runs."""

    TARGET = "all"
    UNSCALED = "all but the learning rates'"
    BASE = "none"


@dataclasses.dataclass(frozen=True, eq=False)
class Acting:
    """A transform of this package; compared by identity.

    Attributes:
      kind: "scaling" for learning rates, "normalizing" for gradients.
      scales: the scales it was made from.
      point: its parametrization.
    """

    kind: str
    scales: Any
    point: Any


class Recorder:
    """The mode of one run, and the transforms that acted on each parameter.

    Args:
      which: the multipliers that act.
    """

    def __init__(self, which: Mode):
        self.which = which
        # A set, because a loop may trace its body more than once.
        self.acted: dict[tuple[str, str], set[Acting]] = {}

    def count(self, kind: str, path: str) -> int:
        """How many transforms of this kind acted on a parameter."""
        return len(self.acted.get((kind, path), ()))


# A user context is part of the cache key of compiled functions. So functions that a
# probe compiles, even inside of a user's jit, are not reused outside of it.
running = jax.make_user_context(default_value=None)


def mode() -> Mode | None:
    """The mode of the running probe; None outside of probes."""
    return running.value.which if running.value else None


def record(transform: Acting, tree: Any) -> None:
    """Record that a transform acts on the parameters of this tree."""
    if running.value is not None:
        acted = running.value.acted
        for path, _ in flatten(tree):
            acted.setdefault((transform.kind, path), set()).add(transform)

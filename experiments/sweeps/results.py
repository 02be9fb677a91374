"""What a sweep hands on: plain records, written to and read from JSON."""

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Cell:
    """All runs of one model shape under one parametrization.

    Attributes:
      parametrization: the key of the parametrization in the config, e.g. "depth_mup".
      width: target width of the model.
      depth: target depth (number of residual blocks).
      log2_lr: the grid of learning rates, as log2, ascending, shape (lrs,).
      loss: training loss averaged over the last steps, shape (seeds, lrs);
        NaN where the run diverged.
      curves: training loss, shape (seeds, lrs, points), averaged over equal spans
        of steps; NaN from the step of divergence on.
      seconds: wall time, compilation included.
    """

    parametrization: str
    width: int
    depth: int
    log2_lr: np.ndarray
    loss: np.ndarray
    curves: np.ndarray
    seconds: float

    @property
    def diverged(self) -> np.ndarray:
        """Which runs diverged, shape (seeds, lrs)."""
        return np.isnan(self.loss)

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data, with null for NaN."""
        fields = dataclasses.asdict(self)
        return {k: _listed(v) for k, v in fields.items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Cell":
        """The inverse of `to_json`."""
        arrays = {key: _array(data[key]) for key in ("log2_lr", "loss", "curves")}
        return cls(**{**data, **arrays})


@dataclasses.dataclass(frozen=True)
class Optimum:
    """Where the loss of a cell is least.

    Attributes:
      log2_lr: the fitted optimum, log2 of the learning rate.
      error: its standard error over seeds, in octaves (0 for one seed).
      loss: the fitted loss there.
    """

    log2_lr: float
    error: float
    loss: float


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _listed(value.tolist())
    if isinstance(value, list):
        return [_listed(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _array(value: list) -> np.ndarray:
    # dtype=float turns None into NaN at any depth of nesting.
    return np.array(value, dtype=float)

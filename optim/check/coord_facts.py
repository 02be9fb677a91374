"""What a coordinate check knows of each layer, and the words of its verdict."""

import enum
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .activations import Layer, Parameter


class Verdict(enum.StrEnum):
    """Verdict on a slope and its standard error; see `CoordCheck`.

    Examples:
      >>> [verdict.value for verdict in Verdict]
      ['ok', 'unclear', 'wrong']
    """

    OK = "ok"
    UNCLEAR = "unclear"
    WRONG = "wrong"


class Facts(NamedTuple):
    """What else is known at each size of an axis.

    Attributes:
      initial: by layer, the root mean square of its initial values, (sizes,).
      layers: by layer, what the program of each size says of it.
      parameters: by path, how the program uses it, its shapes at each size, and its
        initial root mean squares.
      scaled: whether the optimizer applies scales.
    """

    initial: Mapping[str, np.ndarray] = {}
    layers: Mapping[str, tuple[Layer, ...]] = {}
    parameters: Mapping[
        str, tuple[Parameter, tuple[tuple[int, ...], ...], np.ndarray]
    ] = {}
    scaled: bool = True

    def named(self, layer: str) -> str:
        """The name of a layer with the line of code, e.g. "head (model.py:31)"."""
        line = self.layers[layer][0].line if layer in self.layers else ""
        return f"{layer} ({line})" if line else layer

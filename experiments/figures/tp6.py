"""Yang, Yu, Zhu and Hayou, Tensor Programs VI."""

from .registry import Figure

FIGURES: list[Figure] = []

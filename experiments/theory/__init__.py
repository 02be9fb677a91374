"""The limits behind the rules, computed: one file a limit.

linear_sgd: deep linear residual network under SGD (Tensor Programs VI, section 4).
relu_mlp: first step of a plain ReLU network (Jelassi et al.).
"""

from . import linear_sgd, relu_mlp

__all__ = ["linear_sgd", "relu_mlp"]

"""The limits behind the rules, computed: one file a limit.

relu_mlp: first step of a plain ReLU network (Jelassi et al.).
"""

from . import relu_mlp

__all__ = ["relu_mlp"]

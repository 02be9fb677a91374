"""Squeeze-and-excitation: a gate per channel, computed from all channels."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ..plan import Plan
from .basic import ACTIVATIONS, Dense, single

GATES = {"sigmoid": jax.nn.sigmoid, "hard_sigmoid": jax.nn.hard_sigmoid}


class SqueezeExcite(nnx.Module):
    """x · gate(W2 φ(W1 <x>)), where <x> is the mean over pixels.

    Both kernels have a fan-in and a fan-out that grow with width, and biases.

    Args:
      name: the axis of channels.
      squeezed: the axis between the two kernels.
      nonlinearity: φ, a name of `zoo.layers.basic.ACTIVATIONS`.
      gate: a name of `GATES`.
      in_branch: whether it is in a residual branch.

    Source: Hu et al. 2018 (arXiv:1709.01507), eqs. 2 to 4.
    """

    def __init__(
        self,
        plan: Plan,
        name: str,
        squeezed: str,
        *,
        nonlinearity: str = "relu",
        gate: str = "sigmoid",
        in_branch: bool = False,
        rngs: nnx.Rngs,
    ):
        def dense(before: str, after: str) -> Dense:
            # As timm draws them: variance 2/fan_out.
            gain = (2 * plan[before].base / plan[after].base) ** 0.5
            return Dense(
                plan,
                (before, after),
                bias=True,
                in_branch=in_branch,
                gain=gain,
                rngs=rngs,
            )

        self.squeeze = dense(name, squeezed)
        self.excite = dense(squeezed, name)
        self.activation = ACTIVATIONS[nonlinearity]
        self.gate = GATES[gate]

    def __call__(self, x: Float[Array, "b h w n"]) -> Float[Array, "b h w n"]:
        mean = x.astype(single(x.dtype)).mean(axis=(1, 2)).astype(x.dtype)
        gate = self.gate(self.excite(self.activation(self.squeeze(mean))))
        return x * jnp.broadcast_to(gate[:, None, None, :], x.shape)

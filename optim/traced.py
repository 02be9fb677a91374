"""Numbers that are only known inside a compiled program, where a rule wants a float.

A model keeps its branch multiplier, and a parametrization its richness, as part of
what is compared and hashed whenever the model is traced. An array can be neither.
"""

from typing import Any

import jax
import jax.numpy as jnp


class Traced:
    """factor · value^power, of a traced value; computed where it meets an array.

    It is hashed and compared by identity, as a static part of a model must be. So a
    sweep can have branch multipliers or richness as an axis of `jax.vmap`.

    Args:
      value: a traced scalar, positive where it is divided by.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from mupax import optim
      >>> point = optim.parametrization("depth_mup")
      >>> def branch(a):
      ...     return point.branch_multiplier(4.0, a=optim.Traced(a)) * jnp.ones(())
      >>> jax.jit(jax.vmap(branch))(jnp.array([1.0, 2.0]))
      Array([0.5, 1. ], dtype=float32)
    """

    def __init__(self, value: Any, factor: float = 1.0, power: float = 1.0):
        self.value = value
        self.factor = factor
        self.power = power

    def _times(self, other: Any, sign: int) -> Any:
        if isinstance(other, Traced):
            if other.value is not self.value:
                raise TypeError("two different traced numbers cannot be multiplied")
            return Traced(
                self.value,
                self.factor * other.factor**sign,
                self.power + sign * other.power,
            )
        if isinstance(other, int | float):
            return Traced(self.value, self.factor * other**sign, self.power)
        array = self.array(other.dtype)
        return array * other if sign == 1 else array / other

    def array(self, dtype: Any = jnp.float32) -> jax.Array:
        """As an array; like a Python float it leaves half precision as it is."""
        return (self.factor * self.value**self.power).astype(dtype)

    def __mul__(self, other: Any) -> Any:
        return self._times(other, 1)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._times(other, -1)

    def __rtruediv__(self, other: Any) -> Any:
        return self**-1 * other

    def __pow__(self, power: float) -> "Traced":
        return Traced(self.value, self.factor**power, self.power * power)

    def __repr__(self) -> str:
        return f"Traced({self.factor:g} · value^{self.power:g})"

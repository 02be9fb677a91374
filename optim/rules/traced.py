"""`Traced`: a traced value in place of a float, e.g. a branch multiplier."""

from typing import Any

import jax
import jax.numpy as jnp


class Traced:
    """The product factor · value^power of a traced value, computed when it is used.

    Models and parametrizations hold such numbers as static data, which is hashed and
    compared; arrays cannot be. A `Traced` is compared by identity, so that a sweep can
    vary branch multipliers or richness along an axis of `jax.vmap`.

    Args:
      value: a traced scalar; positive if it is raised to a negative power.
      factor: a float.
      power: a float.

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
                raise TypeError(
                    "two different Traced values cannot be multiplied; multiply the "
                    "traced arrays before wrapping them in optim.Traced"
                )
            factor = self.factor * other.factor**sign
            return Traced(self.value, factor, self.power + sign * other.power)
        if isinstance(other, int | float):
            return Traced(self.value, self.factor * other**sign, self.power)
        array = self.array(other.dtype)
        return array * other if sign == 1 else array / other

    def array(self, dtype: Any = jnp.float32) -> jax.Array:
        """Convert to an array of this dtype."""
        array: jax.Array = (self.factor * self.value**self.power).astype(dtype)
        return array

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

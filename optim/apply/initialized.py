"""Which initial arrays were scaled already, so that none is scaled twice."""

import weakref
from typing import Any

import jax


class Remembered:
    """Arrays that a function returned and that still exist.

    Examples:
      >>> import jax.numpy as jnp
      >>> known, array = Remembered(), jnp.ones(2)
      >>> known.add(array)
      >>> array in known, array + 0 in known
      (True, False)
    """

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.ref[Any]] = {}

    def add(self, array: Any) -> None:
        if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
            return
        number = id(array)
        forget = lambda _: self._by_id.pop(number, None)  # noqa: E731
        self._by_id[number] = weakref.ref(array, forget)

    def __contains__(self, array: Any) -> bool:
        known = self._by_id.get(id(array))
        return known is not None and known() is array


rescaled = Remembered()  # by rescale_init
scaled_by_path = Remembered()  # by scale_init_by_path

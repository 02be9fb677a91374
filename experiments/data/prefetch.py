"""Prefetch batches to the device."""

import collections
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grain

from ..errors import UserError

Placed = TypeVar("Placed")


class Prefetched(Iterator[Placed]):
    """Batches that are copied to the device while it computes.

    The state follows the consumed batches, not the prefetched ones.

    Args:
      iterator: of batches on the host, e.g. from `Dataset.train`. It must not be used
        elsewhere.
      place: copies a batch to the device without waiting, e.g. jax.device_put.
      depth: number of batches on the device, including the next one; 1 or more.
    """

    def __init__(
        self,
        iterator: grain.DatasetIterator,
        place: Callable[[Any], Placed],
        depth: int = 2,
    ):
        if depth < 1:
            raise UserError(f"the depth of prefetching is {depth}; it must be >= 1")
        self._iterator = iterator
        self._place = place
        self._depth = depth
        self._ready: collections.deque[tuple[Placed, Any]] = collections.deque()
        self._state = iterator.get_state()

    def __next__(self) -> Placed:
        while len(self._ready) < self._depth:
            batch = self._place(next(self._iterator))
            self._ready.append((batch, self._iterator.get_state()))
        batch, self._state = self._ready.popleft()
        return batch

    def get_state(self) -> Any:
        """The state after the last consumed batch."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Resume after the batch at which the state was saved."""
        self._ready.clear()
        self._iterator.set_state(state)
        self._state = self._iterator.get_state()

    def close(self) -> None:
        """Drop prefetched batches, and close the iterator."""
        self._ready.clear()
        self._iterator.close()

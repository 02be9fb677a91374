"""The next batches, on the device before they are asked for."""

import collections
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from ..errors import UserError

Host = TypeVar("Host")
Placed = TypeVar("Placed")


class Resumable(Protocol):
    """An endless iterator whose state can be saved, such as `Dataset.train` gives."""

    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...

    def close(self) -> None: ...


class Prefetched(Iterator[Placed], Generic[Placed]):
    """An iterator of batches on the device; its state is that of what was consumed.

    Made by `prefetch`.
    """

    def __init__(self, iterator: Resumable, place: Callable[[Any], Placed], depth: int):
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
        """The state after the last batch that was given out, not placed."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Goes on after the batch that the state was saved after."""
        self._ready.clear()
        self._iterator.set_state(state)
        self._state = self._iterator.get_state()

    def close(self) -> None:
        """Drops what is on the device, and closes the iterator below."""
        self._ready.clear()
        self._iterator.close()


def prefetch(
    iterator: Resumable, place: Callable[[Any], Placed], depth: int = 2
) -> Prefetched[Placed]:
    """Keeps the next batches on the device, while the device is at work.

    Args:
      iterator: gives batches on the host; used by nobody else from now on.
      place: puts one on the device without waiting for it, as jax.device_put and
        jax.make_array_from_process_local_data do.
      depth: batches that are placed, the one that is asked for included.

    Raises:
      UserError: depth is less than 1.
    """
    if depth < 1:
        raise UserError(f"The depth of prefetching is {depth}; it must be 1 or more.")
    return Prefetched(iterator, place, depth)

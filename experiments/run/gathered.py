"""Checkpoints of processes without a shared disk: process 0 writes and reads all."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .checkpoints import Checkpoints, Restored, open_checkpoints
from .collectives import broadcast, gathered, is_key, meet, scattered


class Gathered:
    """Does what `Checkpoints` does. All processes call these methods.

    Process 0 needs main memory for the state, and a device of each process room for the
    largest array.
    """

    def __init__(self, own: Checkpoints | None, folder: pathlib.Path):
        """Only process 0 has checkpoints of its `own`."""
        self._own, self._folder = own, folder

    def save(
        self,
        step: int,
        state: Any,
        progress: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """The processes wait while the state is gathered."""
        self.wait()  # so that process 0 holds one state at most
        state = gathered(jax.tree.map(_words, state))
        if self._own:
            self._own.save(step, state, progress, score)

    def wait(self) -> None:
        if self._own:
            self._own.wait()
        meet()

    def latest(self) -> int | None:
        """The newest step that has a checkpoint; None in the other processes."""
        return self._own.latest() if self._own else None

    def restore(self, like: Any) -> Restored | None:
        empty = jax.tree.map(_empty, like)
        restored = self._own.restore(empty) if self._own else None
        known = broadcast(restored and [restored.step, restored.progress])
        if known is None:
            return None
        step, progress = known
        state = scattered(restored.state if restored else empty, like)
        return Restored(step, state, progress)

    def path(self, step: int) -> pathlib.Path:
        return self._folder / str(step)


@contextlib.contextmanager
def open_gathered(folder: pathlib.Path, **keep: Any) -> Iterator[Gathered]:
    """As `open_checkpoints`, for a directory that only process 0 has."""
    if jax.process_index() > 0:
        yield Gathered(None, folder)
        return
    with open_checkpoints(folder, alone=True, **keep) as own:
        yield Gathered(own, folder)


def read_scattered(read: Callable[[Any], Any], like: Any) -> Any:
    """Arrays that process 0 reads, on the mesh.

    Args:
      read: returns arrays like the NumPy arrays of its argument.
      like: arrays or `jax.ShapeDtypeStruct`s with shardings.
    """
    empty = jax.tree.map(_empty, like)
    return scattered(read(empty) if jax.process_index() == 0 else empty, like)


def _words(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _empty(leaf: Any) -> np.ndarray:
    """A NumPy array of the shape; the memory is not touched."""
    if is_key(leaf):
        leaf = jax.eval_shape(
            jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        )
    return np.empty(leaf.shape, leaf.dtype)

"""Evaluate loss and accuracy on a test split."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from mupax import zoo

from ..data import Dataset
from .mesh import batch_share, replicated
from .program import Program
from .step import State

_STAGED_BYTES = 2**30  # a test split up to this size stays on the devices


def tester(
    program: Program, dataset: Dataset, batch_size: int
) -> Callable[[State], Float[Array, " 3"]]:
    """A function from a state to the sums of loss, correct predictions and count.

    The function does not wait for the device. A small test split is copied to the
    devices once. The last batch is padded, so that one compilation is enough.
    `batch_size` counts the examples over all devices.
    """
    score = program.jit_score()
    sharding = zoo.batch_sharding(program.mesh)
    zeros = jax.jit(lambda: jnp.zeros(3), out_shardings=replicated(program.mesh))()
    index, count = batch_share(batch_size, program.mesh)

    def batches() -> Iterator[dict[str, np.ndarray]]:
        return dataset.test(batch_size, process_index=index, process_count=count)

    def place(batch: dict[str, np.ndarray]) -> dict[str, Array]:
        return place_batch(batch, sharding)

    staged: list[dict[str, Array]] = []
    padded_size = -(-dataset.test_size // batch_size) * batch_size
    if dataset.bytes_of(padded_size) <= _STAGED_BYTES:
        staged = [place(batch) for batch in batches()]

    def test(state: State) -> Float[Array, " 3"]:
        # Each batch depends on the one before. Independent programs could meet their
        # collectives in different orders in two processes, and deadlock.
        sums = zeros
        for batch in staged or map(place, batches()):
            sums = score(state, batch, sums)
        return sums

    return test


def means(sums: Any) -> tuple[float, float]:
    """(mean loss, accuracy) from the sums of a tester; waits for the device."""
    loss, hits, count = jax.device_get(sums).tolist()
    return loss / count, hits / count


def place_batch(
    batch: dict[str, np.ndarray], sharding: NamedSharding
) -> dict[str, Array]:
    """Copies this process's rows of a batch to the devices."""
    return {
        key: jax.make_array_from_process_local_data(sharding, value)
        for key, value in batch.items()
    }

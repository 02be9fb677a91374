"""Loss and accuracy on a whole test split."""

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
    """A function of a state to sums of loss, hits and count, which does not wait.

    A test split that is small is put on the devices once. The last batch is padded,
    so that all have one shape and one compilation does.

    Args:
      program: the model and its mesh.
      dataset: its test split is gone through.
      batch_size: examples at once, over all devices.
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
    if _bytes(dataset, batch_size) <= _STAGED_BYTES:
        staged = [place(batch) for batch in batches()]

    def test(state: State) -> Float[Array, " 3"]:
        # One after another by what they compute: programs in flight together, whose
        # collectives meet in another order in another process, wait for ever.
        sums = zeros
        for batch in staged or map(place, batches()):
            sums = score(state, batch, sums)
        return sums

    return test


def means(sums: Any) -> tuple[float, float]:
    """(mean loss, accuracy) of the sums that a tester returned; waits for them."""
    loss, hits, count = jax.device_get(sums).tolist()
    return loss / count, hits / count


def place_batch(
    batch: dict[str, np.ndarray], sharding: NamedSharding
) -> dict[str, Array]:
    """A batch on the devices, made of the rows that each process has."""
    return {
        key: jax.make_array_from_process_local_data(sharding, value)
        for key, value in batch.items()
    }


def _bytes(dataset: Dataset, batch_size: int) -> int:
    spec = dataset.spec(batch_size).values()
    batch = sum(s.size * s.dtype.itemsize for s in spec)
    return -(-dataset.test_size // batch_size) * batch

"""The order of the examples: shuffled anew each epoch, fixed by the seed."""

from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Int32

from .images import ImageData


def batches(
    data: ImageData,
    batch_size: int,
    seed: int,
    *,
    process_index: int | None = None,
    process_count: int | None = None,
) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    """An endless iterator of training batches, whose state can be saved.

    An epoch's last examples share a batch with the next epoch's first, so that no
    example is ever dropped. The state counts batches of the whole run, and not of a
    process: it may be restored with another number of processes.

    Args:
      data: the dataset.
      batch_size: examples in a step, over all processes.
      seed: gives the order, 0 <= seed < 2**32.
      process_index: which part of every batch to give, as contiguous rows, so that
        the whole batch is the same; jax.process_index() by default.
      process_count: into how many parts; jax.process_count() by default.

    Returns:
      An iterator of {"image": uint8 (batch_size / process_count, height, width,
      channels), "label": int32 (batch_size / process_count,)}, with get_state and
      set_state; close() ends its threads.
    """
    rank = jax.process_index() if process_index is None else process_index
    count = jax.process_count() if process_count is None else process_count
    order = _order(len(data.train_labels), seed)
    parts = order.batch(batch_size // count, drop_remainder=True)
    return iter(
        parts[rank::count]
        .map(_gather(data))
        .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8))
    )


def batch_indices(
    n: int, batch_size: int, seed: int, steps: int
) -> Int32[np.ndarray, "steps batch"]:
    """Which examples `batches` gives at each step, for gathering on the device.

    About 40 microseconds an index, nearly all of it in Grain's shuffle.

    Args:
      n: number of training examples.
      batch_size: examples in a step.
      seed: as for `batches`.
      steps: number of steps.
    """
    order = _order(n, seed)
    indices = [order[i] for i in range(steps * batch_size)]
    return np.array(indices, np.int32).reshape(steps, batch_size)


def _order(n: int, seed: int) -> grain.MapDataset[int]:
    # Shuffled before repeated: Grain then shuffles every epoch by a seed of its own.
    return grain.MapDataset.range(n).seed(seed).shuffle().repeat()


def _gather(data: ImageData) -> Callable[[Any], dict[str, np.ndarray]]:
    # One fancy index a batch: stacking single examples costs more than a small step.
    def gather(indices: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "image": data.train_images[indices],
            "label": data.train_labels[indices],
        }

    return gather

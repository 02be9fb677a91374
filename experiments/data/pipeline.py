"""The order of the examples, and batches that Grain prepares in advance."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import grain
import jax
import numpy as np
from absl import flags
from jaxtyping import Float, Int32, Int64

from .. import memory
from ..checks import whole
from ..errors import UserError

#: Maps indices of examples, and random numbers for each, to a batch.
Load = Callable[
    [Int64[np.ndarray, " batch"], Float[np.ndarray, "batch draws"]],
    dict[str, np.ndarray],
]

#: Batches, which are prepared in advance until they are closed.
Batches = Generator[dict[str, np.ndarray], None, None]
Placed = TypeVar("Placed")

# Smaller datasets are shuffled with a table per epoch, which is faster than Grain's
# shuffle.
_SMALL = 2**16

_MOST = 1024  # threads or worker processes per process
_AHEAD = 8  # batches that are kept ready


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The index of the process that reads a part of each batch, and their number."""

    index: int
    count: int

    @classmethod
    def of(cls, index: int | None, count: int | None) -> "Hosts":
        """Replaces None by JAX's process index and count."""
        return cls(
            jax.process_index() if index is None else index,
            jax.process_count() if count is None else count,
        )

    def share(self, batch_size: int) -> int:
        """The number of rows per process, which are contiguous."""
        if batch_size < 1 or batch_size % self.count:
            raise UserError(
                f"batch_size {batch_size} does not divide over {self.count} processes; "
                f"use a multiple of {self.count}."
            )
        return batch_size // self.count


@dataclasses.dataclass(frozen=True)
class Workers:
    """Threads or processes that prepare batches.

    Attributes:
      threads: number of threads; each prepares one batch at a time.
      processes: number of worker processes, which replace threads; 0: threads.
    """

    threads: int = 2
    processes: int = 0

    def __post_init__(self) -> None:
        whole(1, _MOST)("threads", self.threads)
        whole(0, _MOST)("processes", self.processes)

    def run(self, batches: grain.MapDataset) -> grain.IterDataset:
        """The batches in order, prepared in advance."""
        if not self.processes:
            ahead = max(_AHEAD, self.threads)
            return batches.to_iter_dataset(grain.ReadOptions(self.threads, ahead))
        if not flags.FLAGS.is_parsed():
            # Grain passes absl's flags to its workers, parsed or not.
            flags.FLAGS.mark_as_parsed()
        ahead = -(-_AHEAD // self.processes)
        return batches.to_iter_dataset(grain.ReadOptions(1, 1)).mp_prefetch(
            grain.MultiprocessingOptions(self.processes, per_worker_buffer_size=ahead)
        )


def iterate(
    n: int,
    load: Load,
    batch_size: int,
    seed: int,
    *,
    draws: int = 0,
    hosts: Hosts,
    workers: Workers,
    start: int = 0,
) -> Batches:
    """Endless batches of this process's rows, shuffled anew for each epoch.

    The last examples of an epoch share a batch with the first of the next, so that no
    example is dropped. Each batch follows from its number, so that a run resumes with
    another number of processes, threads or workers.

    Args:
      n: number of examples.
      load: makes a batch from indices 0..n-1.
      batch_size: examples per step, over all processes.
      seed: of order and random numbers, 0 <= seed < 2**32.
      draws: number of random numbers per example, uniform in [0, 1). They depend only
        on the seed and on the example's place in the run.
      hosts: this process.
      workers: prepare the batches.
      start: number of the first batch.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"seed is {seed}; it must lie in 0..{2**32 - 1}.")
    order = _order(n, seed)
    if draws:
        order = order.random_map(functools.partial(_drawn, draws))
    # Whole batches are loaded at once: single examples take longer.
    parts = order.batch(hosts.share(batch_size), drop_remainder=True)
    own_parts = parts[hosts.index :: hosts.count].map(functools.partial(_loaded, load))
    return _running(workers, own_parts[start:])


def run_through(
    n: int, load: Load, batch_size: int, *, hosts: Hosts, workers: Workers
) -> Batches:
    """Every example once, in order, as this process's rows.

    All batches have one shape: the last one is padded with the last example. Their key
    "counts", float32 (rows,), is 1 for an example and 0 for padding.
    """
    share = hosts.share(batch_size)

    def part(step: int) -> dict[str, np.ndarray]:
        rows = step * batch_size + hosts.index * share + np.arange(share)
        batch = load(np.minimum(rows, n - 1), np.empty((share, 0)))
        return {**batch, "counts": (rows < n).astype(np.float32)}

    parts = grain.MapDataset.range(-(-n // batch_size)).map(part)
    return _running(workers, parts)


def _running(workers: Workers, batches: grain.MapDataset) -> Batches:
    """The batches; their threads end with them, or when this is closed."""
    iterator = iter(workers.run(batches))
    try:
        yield from iterator
    finally:
        iterator.close()


def placed_ahead(
    batches: Batches, place: Callable[[dict[str, np.ndarray]], Placed], depth: int = 2
) -> Generator[Placed, None, None]:
    """Copy batches to the device while it computes.

    Args:
      batches: endless, on the host; closed together with the result.
      place: copies a batch to the device without waiting, e.g. jax.device_put.
      depth: number of batches on the device, including the next one.
    """
    ready: collections.deque[Placed] = collections.deque()
    with contextlib.closing(batches):
        for batch in batches:
            ready.append(place(batch))
            if len(ready) == depth:
                yield ready.popleft()


@functools.lru_cache(maxsize=64)
def batch_indices(
    n: int, batch_size: int, seed: int, steps: int
) -> Int32[np.ndarray, "steps batch"]:
    """The examples of each step of `iterate`, for gathering on the device."""
    count = steps * batch_size
    memory.check(
        4 * 3 * count,  # the table and its temporary copies
        f"The order of examples of {steps} steps of {batch_size}",
        "make steps or batch_size smaller",
    )
    if n < _SMALL:
        epochs = [_epoch(n, seed, epoch) for epoch in range(-(-count // n))]
        indices = np.concatenate(epochs)[:count].astype(np.int32)
    else:
        order = _order(n, seed)
        indices = np.array([order[i] for i in range(count)], np.int32)
    table = indices.reshape(steps, batch_size)
    table.setflags(write=False)  # the cache returns it again
    return table


def _order(n: int, seed: int) -> grain.MapDataset[int]:
    examples = grain.MapDataset.range(n).seed(seed)
    if n < _SMALL:
        return examples.repeat().map_with_index(functools.partial(_at, n, seed))
    # In this order, Grain shuffles each epoch with another seed.
    return examples.shuffle().repeat()


# Worker processes can pickle the next functions, but not lambdas.


def _at(n: int, seed: int, place: int, _: int) -> int:
    """The example at a place of the run."""
    epoch, at = divmod(place, n)
    return int(_epoch(n, seed, epoch)[at])


def _drawn(
    draws: int, index: int, rng: np.random.Generator
) -> tuple[int, Float[np.ndarray, " draws"]]:
    return index, rng.random(draws)


def _loaded(load: Load, part: Any) -> dict[str, np.ndarray]:
    """A batch from indices, maybe with random numbers for each."""
    indices, u = part if isinstance(part, tuple) else (part, np.empty((len(part), 0)))
    return load(indices, u)


@functools.lru_cache(maxsize=8)
def _epoch(n: int, seed: int, epoch: int) -> np.ndarray:
    # NumPy guarantees that the numbers of this legacy generator never change.
    return np.random.RandomState([seed, epoch]).permutation(n)

"""The order of the examples: shuffled anew each epoch, fixed by the seed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from absl import flags
from jaxtyping import Float, Int32, Int64

from .. import memory
from ..errors import UserError
from .images import ImageData

#: From the examples' numbers, and random numbers for each, to what a batch holds.
Load = Callable[
    [Int64[np.ndarray, " batch"], Float[np.ndarray, "batch draws"]],
    dict[str, np.ndarray],
]

# Grain's shuffle permutes at least so many numbers, and draws until it meets one of
# the dataset's: 25 microseconds an example of digits. A table takes a sixth of it.
_SMALL = 2**16

_MOST = 1024  # threads or processes of one process of a run


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Which contiguous rows of every batch a process gives.

    Attributes:
      index: of this process; jax.process_index() by default.
      count: of all processes; jax.process_count() by default.
    """

    index: int
    count: int

    @classmethod
    def of(cls, index: int | None, count: int | None) -> "Hosts":
        """With what is None filled in."""
        return cls(
            jax.process_index() if index is None else index,
            jax.process_count() if count is None else count,
        )

    def share(self, batch_size: int) -> int:
        """Rows of each process.

        Raises:
          UserError: the batch does not divide.
        """
        if batch_size < 1 or batch_size % self.count:
            raise UserError(
                f"batch_size {batch_size} does not divide over {self.count} processes; "
                f"use a multiple of {self.count}."
            )
        return batch_size // self.count


@dataclasses.dataclass(frozen=True)
class Workers:
    """What prepares batches ahead of time, in each process of the run.

    Attributes:
      threads: in this process; each prepares one batch at a time.
      processes: instead of threads, for what Python's lock holds up; 0: threads.
      ahead: batches that are kept ready.
    """

    threads: int = 2
    processes: int = 0
    ahead: int = 8

    def __post_init__(self) -> None:
        for name, least in (("threads", 1), ("processes", 0), ("ahead", 1)):
            if getattr(self, name) < least:
                raise UserError(
                    f"{name} is {getattr(self, name)}, and must be {least} or more."
                )
        for name in ("threads", "processes"):
            if getattr(self, name) > _MOST:
                raise UserError(
                    f"{name} is {getattr(self, name)}, and must be {_MOST} or less."
                )

    def run(self, batches: grain.MapDataset) -> grain.IterDataset:
        """`batches`, prepared ahead of time and in order."""
        if not self.processes:
            ahead = max(self.ahead, self.threads)
            return batches.to_iter_dataset(grain.ReadOptions(self.threads, ahead))
        if not flags.FLAGS.is_parsed():
            # Grain hands its flags on to its workers, and not every program is absl's.
            flags.FLAGS.mark_as_parsed()
        # Batches are large: what each process keeps ready adds up.
        ahead = -(-self.ahead // self.processes)
        return batches.to_iter_dataset(grain.ReadOptions(1, 1)).mp_prefetch(
            grain.MultiprocessingOptions(self.processes, per_worker_buffer_size=ahead)
        )


class BatchIterator(grain.DatasetIterator[dict[str, np.ndarray]]):
    """Endless batches, whose state counts those of the whole run.

    So it may be restored with another number of processes, threads or workers, but
    with the same batch size and seed.

    Attributes:
      batches: every batch by its number, made where it is asked for.
    """

    def __init__(
        self, batches: grain.MapDataset, workers: Workers, identity: dict[str, int]
    ):
        super().__init__()
        self.batches = batches
        self._workers = workers
        self._identity = identity
        self._next = 0
        self._running: grain.DatasetIterator | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        if self._running is None:
            self._running = iter(self._workers.run(self.batches[self._next :]))
        batch = next(self._running)
        self._next += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """What `set_state` takes: plain integers."""
        return {"next_index": self._next, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
          UserError: it was saved with another batch size or seed.
        """
        for name, value in self._identity.items():
            if state.get(name, value) != value:
                raise UserError(
                    f"The order of the examples was saved with {name} {state[name]}, "
                    f"and this run has {name} {value}; go on with {state[name]}, or "
                    "start in another workdir."
                )
        self.close()
        self._next = int(state["next_index"])

    def close(self) -> None:
        """Ends the threads and processes; what is not consumed yet is dropped."""
        if self._running is not None:
            self._running.close()
            self._running = None


def iterate(
    n: int,
    load: Load,
    batch_size: int,
    seed: int,
    *,
    draws: int = 0,
    hosts: Hosts,
    workers: Workers,
) -> BatchIterator:
    """Endless batches of this process's rows, each epoch in an order of its own.

    An epoch's last examples share a batch with the next epoch's first, so that no
    example is ever dropped.

    Args:
      n: number of examples.
      load: makes a batch of the numbers of its examples, 0..n-1.
      batch_size: examples in a step, over all processes.
      seed: gives order and random numbers, 0 <= seed < 2**32.
      draws: how many random numbers, uniform in [0, 1), each example gets; they
        depend on the seed and on the example's place in the run alone.
      hosts: which rows.
      workers: what runs it.

    Raises:
      UserError: the batch does not divide over the processes, or the seed is out of
        range.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"seed is {seed}; it must lie in 0..{2**32 - 1}.")
    share = hosts.share(batch_size)
    order = _order(n, seed)
    if draws:
        drawn = order.random_map(_Draw(draws))
        parts = drawn.batch(share, drop_remainder=True)
    else:
        parts = order.batch(share, drop_remainder=True)
    mine = parts[hosts.index :: hosts.count].map(_Part(load, bool(draws)))
    return BatchIterator(mine, workers, {"batch_size": batch_size, "seed": seed})


def run_through(
    n: int, load: Load, batch_size: int, *, hosts: Hosts, workers: Workers
) -> Iterator[dict[str, np.ndarray]]:
    """Every example once, in order, as this process's rows.

    All batches have one shape: the last is filled up with the last example.

    Returns:
      An iterator of what `load` gives and "counts", float32 (rows,): 1 for an example,
      0 for what fills up.
    """
    share = hosts.share(batch_size)
    parts = grain.MapDataset.range(-(-n // batch_size))

    def part(step: int) -> dict[str, np.ndarray]:
        rows = step * batch_size + hosts.index * share + np.arange(share)
        batch = load(np.minimum(rows, n - 1), np.empty((share, 0)))
        return {**batch, "counts": (rows < n).astype(np.float32)}

    return _closing(iter(workers.run(parts.map(part))))


def _closing(iterator: grain.DatasetIterator) -> Iterator[dict[str, np.ndarray]]:
    """`iterator`, whose threads end with it, or where it is left."""
    try:
        yield from iterator
    finally:
        iterator.close()


def check_batch(batch_size: int, train_size: int, name: str) -> None:
    """Raises a UserError for a batch that is larger than the training split."""
    if batch_size > train_size:
        raise UserError(
            f"batch_size {batch_size} is more than the {train_size} training examples "
            f"of {name}; make it smaller."
        )


def batches(
    data: ImageData,
    batch_size: int,
    seed: int,
    *,
    process_index: int | None = None,
    process_count: int | None = None,
) -> BatchIterator:
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

    Raises:
      UserError: the batch does not divide over the processes.
    """
    return iterate(
        len(data.train_labels),
        _gather(data),
        batch_size,
        seed,
        hosts=Hosts.of(process_index, process_count),
        workers=Workers(),
    )


@functools.lru_cache(maxsize=64)
def batch_indices(
    n: int, batch_size: int, seed: int, steps: int
) -> Int32[np.ndarray, "steps batch"]:
    """Which examples `batches` gives at each step, for gathering on the device.

    The cells of a sweep see the same order, and the second asks for what is there.

    Args:
      n: number of training examples.
      batch_size: examples in a step.
      seed: as for `batches`.
      steps: number of steps.
    """
    count = steps * batch_size
    memory.check(
        4 * 3 * count,  # the table, and what it is made of
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
    table.setflags(write=False)  # it is handed out again
    return table


def _order(n: int, seed: int) -> grain.MapDataset[int]:
    examples = grain.MapDataset.range(n).seed(seed)
    if n < _SMALL:
        return examples.repeat().map_with_index(_Shuffled(n, seed))
    # Shuffled before repeated: Grain then shuffles every epoch by a seed of its own.
    return examples.shuffle().repeat()


@dataclasses.dataclass(frozen=True)
class _Shuffled(grain.transforms.MapWithIndex):
    """The example that stands at a place of the run."""

    n: int
    seed: int

    def map_with_index(self, index: int, element: int) -> int:
        epoch, at = divmod(index, self.n)
        return int(_epoch(self.n, self.seed, epoch)[at])


@functools.lru_cache(maxsize=8)
def _epoch(n: int, seed: int, epoch: int) -> np.ndarray:
    # What NumPy calls legacy is the generator whose numbers no release will change.
    return np.random.RandomState([seed, epoch]).permutation(n)


@dataclasses.dataclass(frozen=True)
class _Draw(grain.transforms.RandomMap):
    """Puts uniform numbers beside an example's number."""

    draws: int

    def random_map(
        self, element: int, rng: np.random.Generator
    ) -> tuple[int, np.ndarray]:
        return element, rng.random(self.draws)


@dataclasses.dataclass(frozen=True)
class _Part(grain.transforms.Map):
    """One fancy index or one read a batch: single examples cost more."""

    load: Load
    drawn: bool

    def map(self, element: Any) -> dict[str, np.ndarray]:
        indices, u = element if self.drawn else (element, None)
        return self.load(indices, np.empty((len(indices), 0)) if u is None else u)


def _gather(data: ImageData) -> Load:
    def gather(indices: np.ndarray, _: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "image": data.train_images[indices],
            "label": data.train_labels[indices],
        }

    return gather

"""Train the runs of a task that are missing, in chunks that fit into memory.

All runs of a task share a shape, and are one program (`program`), compiled for a
chunk of them. A diverged run has NaN losses and changes no other run. The runs of each
chunk are stored before the next chunk begins. Where runs train in turn, on a CPU, a
chunk is as many as end within `_STORED` seconds.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import memory
from ..errors import UserError
from .program import at_once, program
from .results import Population
from .store import Record, Run, Store
from .tasks import Task, Training

Point = tuple[float, ...]  # a value of each hyperparameter

# A run that ends above this multiple of chance-level loss counts as diverged.
DIVERGED = 2.0
_CURVE = 40  # points of a stored learning curve
_STORED = 30.0  # seconds of a chunk where runs train in turn
# Optimization level of the CPU compiler. Training spends its time in matrix products,
# which are library calls: level 1 halves the compile time at the same speed
# (benchmarks/sweep.py).
_LEVEL = 1


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a sweep may use.

    Attributes:
      share: share of the free memory.
      lanes: runs in a chunk at most; 0 for as many as fit.
    """

    share: float = 0.5
    lanes: int = 0


def run(
    task: Task, data: Any, store: Store | None = None, limits: Limits | None = None
) -> Population:
    """Train the runs of a task that a store lacks; arguments as in `prepare`."""
    return prepare(task, data, store, limits)(0.0)


def prepare(
    task: Task,
    data: Any,
    store: Store | None = None,
    limits: Limits | None = None,
    *,
    ahead: bool = False,
    on_runs: Callable[[int], None] = lambda count: None,
) -> Callable[[float], Population]:
    """Find the runs that a store lacks, and compile their program.

    Args:
      task: the runs.
      data: the training data; None for a task that opens its own dataset.
      store: holds the finished runs; None keeps none.
      limits: as in `mupax.sweep`.
      ahead: another task is training now, and uses memory that will be free later.
      on_runs: called with the number of stored runs, and with that of each chunk.

    Returns:
      A function that trains. Its argument, the seconds that the caller waited for
      `prepare`, counts as time of the runs.

    Raises:
      UserError: a single run does not fit into memory.
    """
    limits = limits or Limits()
    stored: dict[Run, Record] = {}
    if store is not None:
        task = task.bound(data)
        stored = stored_runs(task, store)
    left = _left(task, stored)
    missing = list(dict.fromkeys(at for _, at in left))
    rows = sorted({seed for seed, _ in left})
    compiled = None
    if missing:
        training = task.training(data)
        compiled = Chunks(task, training, limits, len(missing), rows)

    def train(waited: float) -> Population:
        since = time.perf_counter() - waited
        on_runs(task.runs - len(missing) * len(rows))
        if compiled is not None:
            chunks = compiled
            if ahead and chunks.cramped:
                chunks = Chunks(task, training, limits, len(missing), rows)
            stored.update(train_points(chunks, missing, store, since, on_runs))
        return _population(task, stored)

    return train


def stored_runs(task: Task, store: Store) -> dict[Run, Record]:
    """The finished runs of a task; others than its steps give are ignored."""
    length = 1 + min(_CURVE, task.steps)
    runs = store.runs(task.name, task.key)
    return {run: record for run, record in runs.items() if len(record.losses) == length}


def missing(task: Task, store: Store) -> bool:
    """Whether a store lacks runs of a task, whose key needs no data."""
    return bool(_left(task, stored_runs(task, store)))


def _left(task: Task, stored: Mapping[Run, Record]) -> list[Run]:
    """The runs that are not stored."""
    points = itertools.product(*task.grid.values())
    runs = itertools.product(range(task.seeds), points)
    return [run for run in runs if run not in stored]


class Chunks:
    """The compiled program of a task, for as many points at once as fit into memory."""

    def __init__(
        self,
        task: Task,
        training: Training,
        limits: Limits,
        most: int,
        seeds: Sequence[int],
    ):
        """Compile for at most `most` points at once, even if more would fit."""
        self.task, self.training, self.seeds = task, training, seeds
        self._limits = limits
        self._devices = jax.local_device_count()
        self._rows = len(seeds)  # seeds at once
        lanes = limits.lanes or most * self._rows
        # Points that a call takes at most; fewer after memory ran out.
        self.points = min(most, max(1, lanes // self._rows))
        self.cramped = False  # whether memory allowed fewer than were asked for
        self._keys, self._orders, self._examples = training.feed(seeds)
        self._compile()

    def __call__(self, points: Sequence[Point]) -> np.ndarray | None:
        """Losses of at most `self.points` points, shape (seeds, points, steps).

        None if they did not fit into memory; `self.points` is smaller then.
        """
        try:
            return self._train(points)
        except jax.errors.JaxRuntimeError as error:
            if not memory.ran_out(error):
                raise
        # Outside of the except clause, which keeps the buffers of the attempt alive.
        self._reduce(0.5, math.nan, self._limits.share * memory.available())
        self._compile()
        return None

    def _train(self, points: Sequence[Point]) -> np.ndarray:
        # Devices take points in turn, so that each has as many as another, up to one.
        order = np.arange(self._width).reshape(-1, self._devices).T.ravel()
        dealt = np.minimum(order, len(points) - 1)
        back = np.argsort(order)[: len(points)]
        hyper = self._hyper([points[i] for i in dealt])
        steps = np.where(order < len(points), self.task.steps, 0).astype(np.int32)
        losses = []
        for at in range(0, len(self.seeds), self._rows):
            # The last part overlaps the one before, and is as large.
            begin = min(at, len(self.seeds) - self._rows)
            rows = slice(begin, begin + self._rows)
            loss = self._program(
                self._keys[rows], hyper, self._orders[:, rows], steps, self._examples
            )
            losses.append(np.asarray(loss)[at - begin :, back])
        return np.concatenate(losses)

    @property
    def _width(self) -> int:
        """Points of the program: a multiple of the devices."""
        return -(-self.points // self._devices) * self._devices

    def _hyper(self, points: Sequence[Point]) -> dict[str, np.ndarray]:
        table = np.array(points, np.float32)
        return dict(zip(self.task.grid, table.T, strict=True))

    def _compile(self) -> None:
        limit = self._limits.share * memory.available()
        cpu = jax.default_backend() == "cpu"
        options: dict[str, str | bool] | None = None
        if cpu:
            options = {"xla_backend_optimization_level": str(_LEVEL)}
        while True:
            arguments = (
                self._keys[: self._rows],
                self._hyper([(1.0,) * len(self.task.grid)] * self._width),
                self._orders[:, : self._rows],
                np.zeros(self._width, np.int32),
                jax.tree.map(jnp.asarray, self._examples),
            )
            self._program = program(
                self.training,
                arguments,
                together=at_once(),
                options=options,
            )
            needed = memory.needed(self._program)
            if needed <= limit:
                return
            self._reduce(limit / needed, needed, limit)

    def _reduce(self, ratio: float, needed: float, limit: float) -> None:
        """Take fewer runs at once, by a ratio; `needed` is NaN if it is not known."""
        self.cramped = True
        if self.points > 1:
            self.points = max(1, math.floor(self.points * ratio))
        elif self._rows > 1:
            self._rows = max(1, math.floor(self._rows * ratio))
        else:
            known = "more" if math.isnan(needed) else f"{needed / 2**30:.3g} GiB"
            raise UserError(
                f"one run of {self.task.name} does not fit into memory: it may use "
                f"{limit / 2**30:.3g} GiB and needs {known}; make batch_size or the "
                "model smaller, or sweep.memory_share larger (of `mupax.sweep`: "
                "Limits(share=...))"
            )


def train_points(
    chunks: Chunks,
    points: Sequence[Point],
    store: Store | None,
    since: float | None = None,
    on_runs: Callable[[int], None] = lambda count: None,
) -> dict[Run, Record]:
    """Train grid points chunk by chunk, and store each chunk before the next begins.

    `since` is the `time.perf_counter` at which the time of the first chunk began.
    """
    task, left = chunks.task, list(points)
    since = time.perf_counter() if since is None else since
    devices = jax.local_device_count()
    most = chunks.points if at_once() else devices
    runs: dict[Run, Record] = {}
    while left:
        chunk = left[: min(most, chunks.points)]
        begun = time.perf_counter()
        losses = chunks(chunk)
        if losses is None:  # out of memory; chunks.points is smaller now
            continue
        now = time.perf_counter()
        if not at_once():
            rounds = _STORED / (now - begun) * math.ceil(len(chunk) / devices)
            most = devices * max(1, int(rounds))
        seconds = (now - since) / (len(chunks.seeds) * len(chunk))
        new = _records(chunks, chunk, losses, seconds)
        if store is not None:
            store.add(task.name, task.key, new)
        runs.update(new)
        on_runs(len(new))
        since, left = now, left[len(chunk) :]
    return runs


def _records(
    chunks: Chunks, points: Sequence[Point], losses: np.ndarray, seconds: float
) -> dict[Run, Record]:
    """Final loss and learning curve of each run, from its losses at all steps."""
    task, guess = chunks.task, chunks.training.guess
    losses = losses.astype(np.float64)
    diverged = np.maximum.accumulate(~np.isfinite(losses), axis=-1)
    losses = np.where(diverged, np.nan, losses)
    final = losses[..., -task.average_last :].mean(axis=-1)
    if guess is not None:
        # A finite loss far above chance level counts as diverged: nothing was learned.
        final = np.where(final < DIVERGED * guess, final, np.nan)
    spans = np.array_split(losses, min(_CURVE, task.steps), axis=-1)
    curves = [span.mean(axis=-1) for span in spans]
    table = np.stack([final, *curves], axis=-1)
    return {
        (seed, at): Record(
            [None if math.isnan(x) else x for x in table[row, column].tolist()],
            seconds,
            guess,
        )
        for row, seed in enumerate(chunks.seeds)
        for column, at in enumerate(points)
    }


def _population(task: Task, stored: Mapping[Run, Record]) -> Population:
    points = list(itertools.product(*task.grid.values()))
    runs = [[stored[seed, at] for at in points] for seed in range(task.seeds)]
    # None turns into NaN.
    table = np.array([[run.losses for run in row] for row in runs], dtype=float)
    table = table.reshape(task.seeds, *map(len, task.grid.values()), -1)
    return Population(
        task.name,
        task.parametrization,
        task.width,
        task.depth,
        dict(task.choices),
        {name: list(values) for name, values in task.grid.items()},
        table[..., 0],
        table[..., 1:],
        math.fsum(run.seconds for row in runs for run in row),
        runs[0][0].guess,
    )

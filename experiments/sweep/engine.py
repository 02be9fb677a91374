"""Train a task's runs: what is missing, in chunks that fit into memory.

All runs of a shape are one program (`population`), compiled for a chunk of them. A run
that diverges fills its own lane with NaN and no other. Each finished chunk is stored
before the next one begins.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import memory
from ..errors import UserError
from . import halving
from .chunks import Chunks, Point
from .results import Population
from .store import Run, Store
from .tasks import Task

# A run that ends above this multiple of chance-level loss counts as diverged.
_HOPELESS = 2.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may take.

    Attributes:
      share: of the free memory.
      lanes: runs in a chunk at most; 0 for as many as fit.
      stop_diverged: stop diverged runs; on accelerators, only once the whole chunk has
        diverged.
      halving: keep one grid point in so many after a quarter and after half of the
        steps (see `halving`); 0 keeps all.
    """

    share: float = 0.5
    lanes: int = 0
    stop_diverged: bool = False
    halving: int = 0

    def __post_init__(self) -> None:
        """Refuse a factor below 2."""
        if self.halving != 0 and self.halving < 2:
            raise UserError(
                f"halving={self.halving} must be a whole number, at least 2: one grid "
                "point in so many is kept; leave it out to keep all"
            )


def run(
    task: Task, data: Any, store: Store | None = None, limits: Limits | None = None
) -> Population:
    """Run what a store lacks of a task; each finished chunk is stored at once.

    Args:
      task: the trainings.
      data: what it trains on.
      store: where finished runs are; None for nowhere.
      limits: of memory.

    Raises:
      UserError: a single run does not fit into memory.
    """
    start = time.perf_counter()
    finish = prepared(task, data, store, limits)
    return finish(time.perf_counter() - start)


def prepared(
    task: Task,
    data: Any,
    store: Store | None = None,
    limits: Limits | None = None,
    *,
    ahead: bool = False,
) -> Callable[[float], Population]:
    """Find what a store lacks of a task, and compile for it; nothing is trained yet.

    Args:
      task: the trainings.
      data: what it trains on.
      store: where finished runs are; None for nowhere.
      limits: of memory.
      ahead: another task is still training, and holds memory that will be free later.

    Returns:
      A function that trains, given the seconds that the caller waited for this one.
    """
    limits = limits or Limits()
    runs = _Runs(task, data, store, limits)
    first = task.steps
    if limits.halving and (rungs := halving.rungs(first)):
        first = int(halving.spans(first)[rungs[0] - 1])
    runs.compile(first)
    again = first if ahead and runs.cramped else None
    return functools.partial(_finished, runs, again)


def _finished(runs: "_Runs", again: int | None, waited: float) -> Population:
    start = time.perf_counter() - waited
    task, halved = runs.task, runs.limits.halving
    if again is not None:
        runs.compile(again)
    if halved:
        _halve(runs, halved)
    else:
        runs.train(runs.points, task.steps)
    loss, curves, stopped = runs.table()
    return Population(
        task.name,
        task.parametrization,
        task.width,
        task.depth,
        task.chosen,
        {name: list(values) for name, values in task.grid.items()},
        loss.reshape(task.seeds, *runs.sizes),
        curves.reshape(task.seeds, *runs.sizes, -1),
        time.perf_counter() - start,
        stopped.reshape(task.seeds, *runs.sizes) if halved else None,
    )


def _halve(runs: "_Runs", factor: int) -> None:
    """Train all points for a part of the steps, and the best of them to the end."""
    steps = runs.task.steps
    ends = halving.spans(steps)
    going = np.ones(len(runs.points), bool)
    reached, scores = np.zeros(len(going)), np.full(len(going), np.inf)
    for count in (rungs := halving.rungs(steps)):
        runs.train(runs.of(going), int(ends[count - 1]), keep=True)
        curves = runs.table()[1][..., :count]
        now = halving.score(curves, runs.task.average_last / steps)
        reached[going], scores[going] = count, now[going]
        going = halving.survivors(scores, going, runs.sizes, factor)
        if count < rungs[-1]:  # of those that stop last, some may be wanted yet
            runs.forget(~going)
    while going.any():
        runs.train(runs.of(going), steps)
        loss, _, stopped = runs.table()
        over = (stopped == 0).all(axis=0)
        ranks = halving.ranks(loss, over, reached, scores)
        going = halving.wanted(loss, over, ranks, runs.sizes)


class _Runs:
    """The known runs of a task, and the program that trains them further.

    Attributes:
      task: theirs.
      limits: of memory.
      sizes: of the grid.
      points: all of it.
    """

    def __init__(self, task: Task, data: Any, store: Store | None, limits: Limits):
        self.task, self.limits, self._store = task, limits, store
        self.sizes = tuple(map(len, task.grid.values()))
        self.points = list(itertools.product(*task.grid.values()))
        self._training = task.training(data)
        self._chunks: Chunks | None = None
        self._held: dict[Point, _Held] = {}
        # The furthest that each run came: after how many steps, and its losses.
        self._known: dict[Run, tuple[int, list[float | None]]] = {}
        ends = halving.spans(task.steps)
        rungs = halving.rungs(task.steps) if limits.halving else []
        for steps in (*(int(ends[n - 1]) for n in rungs), task.steps):
            if store is not None:
                found = store.runs(task.name, task.key, self._stopped(steps))
                self._known |= {run: (steps, losses) for run, losses in found.items()}

    @property
    def cramped(self) -> bool:
        """Whether what is compiled takes fewer runs at once, for want of memory."""
        return self._chunks is not None and self._chunks.cramped

    def of(self, which: np.ndarray) -> list[Point]:
        """Some of the points."""
        return [at for at, one in zip(self.points, which, strict=True) if one]

    def forget(self, which: np.ndarray) -> None:
        """Keep no state of points that are not going on."""
        for at in self.of(which):
            self._held.pop(at, None)

    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Losses at the end, curves, and the steps after which a run was stopped.

        Returns:
          Of shapes (seeds, points), (seeds, points, spans) and (seeds, points); the
          last is 0 where a run came to its end, or diverged before it was stopped.
        """
        known = [[self._known[s, at] for at in self.points] for s in self._seeds]
        found = np.array([[x[1] for x in row] for row in known], dtype=float)
        steps = np.array([[x[0] for x in row] for row in known])
        loss, curves = found[..., 0], found[..., 1:]
        spans = np.searchsorted(halving.spans(self.task.steps), steps)
        last = np.take_along_axis(curves, spans[..., None], axis=-1)[..., 0]
        going = (steps < self.task.steps) & ~np.isnan(last)
        return loss, curves, np.where(going, steps, 0)

    def train(self, points: list[Point], until: int, *, keep: bool = False) -> None:
        """Train points to before a step, from where they stand.

        Args:
          points: some of the grid.
          until: the step.
          keep: whether they may be trained further.
        """
        missing = [at for at in points if not self._has(at, until)]
        if missing and self._chunks is None:
            self.compile(until)
        while missing and self._chunks:
            first = self._stands(missing[0])
            now = [at for at in missing if self._stands(at) == first]
            now = now[: self._chunks.points]
            states = [self._held[at].state for at in now] if first else None
            found = self._chunks(now, first, until, states, keep=keep)
            if found is None:  # too large after all; it has become smaller
                continue
            self._take(now, self._chunks.seeds, until, *found)
            missing = [at for at in missing if at not in set(now)]

    @property
    def _seeds(self) -> range:
        return range(self.task.seeds)

    def compile(self, until: int) -> None:
        """Compile for what is missing before a step, if anything is."""
        missing = [at for at in self.points if not self._has(at, until)]
        if not missing:
            return
        # Halving may ask for any run again.
        seeds = [
            s
            for s in self._seeds
            if self.limits.halving
            or any(not self._stored(s, at, until) for at in missing)
        ]
        most = self._most(len(missing))
        self._chunks = Chunks(self.task, self._training, self.limits, most, seeds)

    def _stored(self, seed: int, at: Point, until: int) -> bool:
        return self._known.get((seed, at), (0,))[0] >= until

    def _has(self, at: Point, until: int) -> bool:
        return all(self._stored(s, at, until) for s in self._seeds)

    def _stands(self, at: Point) -> int:
        return self._held[at].losses.shape[-1] if at in self._held else 0

    def _stopped(self, steps: int) -> int | None:
        return steps if steps < self.task.steps else None

    def _most(self, missing: int) -> int:
        """How many points a chunk is for."""
        if not self.limits.halving or jax.default_backend() == "cpu":
            return missing
        # Those that are left at the end, of which a fit needs three: chunks are full,
        # and one program trains all of them. A CPU trains no more than it is given.
        left = self.limits.halving ** len(halving.rungs(self.task.steps))
        return min(len(self.points), max(3, math.ceil(len(self.points) / left)))

    def _take(
        self,
        points: list[Point],
        seeds: list[int],
        until: int,
        losses: np.ndarray,
        states: list[Any],
    ) -> None:
        """Keep what a chunk gave, on the disk first."""
        before = [self._held.pop(at, None) for at in points]
        if before[0] is not None:
            old = np.stack([held.losses for held in before if held], axis=1)
            losses = np.concatenate([old, losses], axis=-1)
        fresh = _records(self.task, points, seeds, losses, self._training.guess)
        if self._store is not None:
            steps = self._stopped(until)
            self._store.add(self.task.name, self.task.key, fresh, steps)
        self._known |= {run: (until, losses) for run, losses in fresh.items()}
        # A state that is not held is trained again from the start if it is needed.
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(states))
        if size <= self.limits.share * memory.host():
            for i, (at, state) in enumerate(zip(points, states, strict=False)):
                self._held[at] = _Held(losses[:, i], state)


class _Held(NamedTuple):
    """A partly trained point: its losses so far, (seeds, steps), and its state."""

    losses: np.ndarray
    state: Any


def _records(
    task: Task,
    points: list[Point],
    seeds: list[int],
    losses: np.ndarray,
    guess: float | None,
) -> dict[Run, list[float | None]]:
    """Final loss and learning curve of each run so far; None for NaN, and to come."""
    losses = losses.astype(np.float64)
    broken = np.maximum.accumulate(~np.isfinite(losses), axis=-1)
    losses = np.where(broken, np.nan, losses)
    to_come = task.steps - losses.shape[-1]
    losses = np.pad(losses, ((0, 0), (0, 0), (0, to_come)), constant_values=np.nan)
    final = losses[..., -task.average_last :].mean(axis=-1)
    if to_come:
        final = np.full_like(final, np.nan)
    if guess is not None:
        # A finite loss far above chance level counts as diverged: nothing was learned.
        final = np.where(final < _HOPELESS * guess, final, np.nan)
    spans = np.split(losses, halving.spans(task.steps)[:-1], axis=-1)
    curves = np.stack([span.mean(axis=-1) for span in spans], axis=-1)
    both = np.concatenate([final[..., None], curves], axis=-1)
    return {
        (seed, at): [None if math.isnan(x) else x for x in both[row, i].tolist()]
        for row, seed in enumerate(seeds)
        for i, at in enumerate(points)
    }

"""Chunks: as many runs at once as memory allows, trained from one step to another."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import memory
from ..errors import UserError
from .population import programs

if TYPE_CHECKING:
    from .engine import Limits
    from .tasks import Task, Training

Point = tuple[float, ...]

# Optimization levels of the CPU compiler. Training spends its time in matrix products,
# which are library calls: level 1 halves the compile time at the same speed
# (benchmarks/sweep.py). Initialization runs once, so level 0 is fastest overall.
_BEGIN, _ADVANCE = 0, 1


class Chunks:
    """Compiled programs for as many points at once as memory allows.

    Attributes:
      points: how many points a call takes at most. It may become smaller.
      seeds: the seeds that each point is trained with.
      cramped: whether memory allowed fewer points at once than were asked for.
    """

    def __init__(
        self,
        task: "Task",
        training: "Training",
        limits: "Limits",
        most: int,
        seeds: Sequence[int] | None = None,
    ):
        """Compile.

        Args:
          task: the trainings.
          training: their functions.
          limits: of memory, and how many runs at once.
          most: points at once, even where more would fit.
          seeds: those that are trained; all by default.
        """
        self._task, self._training, self._limits = task, training, limits
        self._devices = jax.local_device_count()
        self.seeds = list(range(task.seeds)) if seeds is None else list(seeds)
        self._rows = len(self.seeds)  # seeds at once
        lanes = limits.lanes or most * self._rows
        self.points = min(most, max(1, lanes // self._rows))
        self.cramped = False
        # (steps, seeds, batch)
        self._examples, self._orders = training.feed(self.seeds)
        self._keys = training.keys(self.seeds)
        self._compile()

    def __call__(
        self,
        points: list[Point],
        first: int,
        last: int,
        states: list[Any] | None = None,
        *,
        keep: bool = False,
    ) -> tuple[np.ndarray, list[Any]] | None:
        """Train points from step `first` to before step `last`.

        Args:
          points: at most `self.points` of the grid.
          first: the step to start from.
          last: the step to stop at (exclusive).
          states: the state of each point, with seeds as leading axis; None to start
            from the initialization.
          keep: whether to return the states after `last`.

        Returns:
          Losses of shape (seeds, points, last - first), and the states, of which
          there are none unless they are kept. None: it did not fit into memory, and
          `self.points` has become smaller.
        """
        try:
            return self._attempt(points, first, last, states, keep=keep)
        except jax.errors.JaxRuntimeError as error:
            if not memory.ran_out(error):
                raise
        # Outside of the except clause, which keeps the buffers of the attempt alive.
        self._reduce(0.5, math.nan, self._limits.share * memory.available())
        self._compile()
        return None

    def _attempt(
        self,
        points: list[Point],
        first: int,
        last: int,
        states: list[Any] | None,
        *,
        keep: bool,
    ) -> tuple[np.ndarray, list[Any]]:
        # Points are dealt out to the devices in turn. Neighbours tend to diverge
        # together: one device would hold all of them, and be idle once they stop.
        order = np.arange(self._width).reshape(-1, self._devices).T.ravel()
        dealt = np.minimum(order, len(points) - 1)
        back = np.argsort(order)[: len(points)]
        hyper = self._hyper([points[i] for i in dealt])
        until = np.where(order < len(points), last, first).astype(np.int32)
        if states is not None:
            states = [states[i] for i in dealt]
        losses, after = [], []
        for at in range(0, len(self.seeds), self._rows):
            # The last part is as large as all, and begins earlier.
            begin = min(at, len(self.seeds) - self._rows)
            rows = slice(begin, begin + self._rows)
            state, found = self._train(hyper, rows, first, until, states)
            mine = slice(at - begin, None)
            losses.append(np.asarray(found)[mine, back, first:last])
            if keep:
                host = jax.tree.map(np.asarray, state)
                after.append(jax.tree.map(lambda x, mine=mine: x[mine, back], host))
        return np.concatenate(losses), _by_point(after, len(points))

    def _train(
        self,
        hyper: dict[str, np.ndarray],
        rows: slice,
        first: int,
        until: np.ndarray,
        states: list[Any] | None,
    ) -> Any:
        keys = self._keys[rows]
        if states is None:
            state = self._begin(keys, hyper)
        else:
            state = jax.tree.map(
                lambda *leaves: np.stack([leaf[rows] for leaf in leaves], axis=1),
                *states,
            )
        return self._advance(
            state,
            keys,
            hyper,
            self._orders[:, rows],
            np.int32(first),
            until,
            self._examples,
        )

    @property
    def _width(self) -> int:
        """Points of the program: a multiple of the devices."""
        return -(-self.points // self._devices) * self._devices

    def _hyper(self, points: list[Point]) -> dict[str, np.ndarray]:
        table = np.array(points, np.float32)
        return dict(zip(self._task.grid, table.T, strict=True))

    def _compile(self) -> None:
        limit = self._limits.share * memory.available()
        begin, advance = programs(
            self._training, stop_diverged=self._limits.stop_diverged
        )
        while True:
            keys = self._keys[: self._rows]
            hyper = self._hyper([(1.0,) * len(self._task.grid)] * self._width)
            lowered = advance.lower(
                jax.eval_shape(begin, keys, hyper),
                keys,
                hyper,
                self._orders[:, : self._rows],
                np.int32(0),
                np.zeros(self._width, np.int32),
                jax.tree.map(jnp.asarray, self._examples),
            )
            self._advance = lowered.compile(_options(_ADVANCE))
            needed = memory.needed(self._advance)
            if needed <= limit:
                self._begin = begin.lower(keys, hyper).compile(_options(_BEGIN))
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
            more = "more than" if math.isnan(needed) else f"{needed / 2**30:.3g} GiB of"
            raise UserError(
                f"one run of {self._task.name} does not fit into memory: it needs "
                f"{more} the {limit / 2**30:.3g} GiB that it may take; make batch_size "
                "or the model smaller, or sweep.memory_share larger"
            )


def _options(level: int) -> dict[str, str | bool] | None:
    cpu = jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": str(level)} if cpu else None


def _by_point(parts: list[Any], points: int) -> list[Any]:
    """The state of each point, from those of parts of the seeds."""
    if not parts:
        return []
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    # Copied: a view would keep the states of all points alive.
    return [jax.tree.map(lambda x, i=i: x[:, i].copy(), whole) for i in range(points)]

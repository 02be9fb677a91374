"""Stop a run on SIGTERM after a checkpoint."""

import signal
import threading
from types import TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Stopper:
    """Whether this run was told to stop.

    A single process listens for SIGTERM. Several processes agree, through JAX, on the
    step at which all of them stop.
    """

    def __init__(self) -> None:
        self._told = False
        self._before: Any = None
        self._listens = (
            jax.process_count() == 1
            and threading.current_thread() is threading.main_thread()
        )

    def __enter__(self) -> "Stopper":
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._tell)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._listens:
            signal.signal(signal.SIGTERM, self._before)

    def now(self, step: int) -> bool:
        """Whether to save and stop now. Every process must call this at each step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._told

    def _tell(self, number: int, frame: Any) -> None:
        self._told = True

"""SIGTERM: a run stops after a checkpoint."""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

_calls = itertools.count(1)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """A function of the step: whether to save and stop now.

    Every process must call the function at each step. A single process listens for
    SIGTERM. Several processes agree, through JAX, on the step at which all stop.
    """
    if jax.process_count() > 1:
        # JAX stops all processes at the number after the largest one that was given. A
        # resumed run starts at a later step than that if SIGTERM arrives before its
        # first step; calls are counted without a gap.
        yield lambda step: multihost_utils.reached_preemption_sync_point(next(_calls))
        return
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False  # only the main thread can handle signals
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield lambda step: stop.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)

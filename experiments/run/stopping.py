"""SIGTERM: a run stops after a checkpoint, and a sweep at once."""

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

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


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """End this process at SIGTERM with one sentence and status 143.

    A thread does so, because Python handles signals only between compiled programs,
    which may take minutes. Where training handles SIGTERM itself, it is left to that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return

    def ours(*_: Any) -> None:
        pass

    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        # Empty once the writer is closed.
        while number := os.read(reader, 1):
            term = number[0] == signal.SIGTERM
            if term and signal.getsignal(signal.SIGTERM) is ours:
                sys.stderr.write(
                    "mupax: stopped by SIGTERM; finished runs are kept, and the same "
                    "command resumes from them\n"
                )
                sys.stderr.flush()
                os._exit(128 + signal.SIGTERM)
        os.close(reader)

    before = signal.signal(signal.SIGTERM, ours)
    last = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(last)
        signal.signal(signal.SIGTERM, before)
        os.close(writer)

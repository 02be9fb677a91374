"""Join the other processes of a run, compare settings, and end together."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from mupax.zoo.addresses import public

from ..errors import Stopped, UserError, reason, short
from .collectives import store
from .workdir import differences

# Keys in the store of JAX's coordination service, which process 0 runs.
_SETTINGS, _VERDICT = "mupax/settings", "mupax/verdict"
_ALIVE, _FAILED, _SEEN = "mupax/alive", "mupax/failed", "mupax/seen"

_BEAT = 1.0  # seconds between two signs of life, for up to 100 processes
_GRACE = 15  # seconds by which JAX's own timeouts are longer
_FAULT = 10  # seconds for which calls of the store may fail


class Disagreement(UserError):
    """The processes were started with different settings; all of them raise this."""


@contextlib.contextmanager
def joined(
    settings: dict[str, Any],
    *,
    distributed: bool = False,
    coordinator: str = "",
    processes: int = 0,
    process: int = -1,
    timeout: int = 45,
) -> Iterator[None]:
    """Join the other processes of a run, and leave them at the end of the context.

    If a process fails, all processes end. If a process is killed, the others end at the
    next collective, or after `timeout` seconds without a sign of life.

    Args:
      settings: JSON-ready settings that must be the same in all processes.
      distributed: whether there are other processes.
      coordinator: host:port on which process 0 listens. This argument and the next two
        are needed where JAX does not find the other processes by itself.
      processes: number of processes.
      process: index of this process.
      timeout: seconds to wait for the other processes, at the start and later.

    Raises:
      UserError: bad flags, missing processes, or different settings.
    """
    if not distributed:
        for name, given, default in (
            ("coordinator", coordinator, ""),
            ("processes", processes, 0),
            ("process", process, -1),
        ):
            if given != default:
                raise UserError(f"--{name} needs --distributed")
        yield
        return
    _check(coordinator, processes, process, timeout)
    _initialize(coordinator, processes, process, timeout)
    _explain_abort(f"another process is gone, as JAX says above; {_AGAIN}")
    global _watch
    watch = _watch = _Watch(timeout)
    try:
        _agree(settings | {"--processes": processes}, timeout)
        yield
    except (Disagreement, Stopped):
        watch.stop()
        jax.distributed.shutdown()
        raise
    except BaseException as error:
        watch.fail(error)  # does not return
        raise
    finally:
        _watch = None
    watch.stop()
    jax.distributed.shutdown()


def _check(coordinator: str, processes: int, process: int, timeout: int) -> None:
    if timeout < 1:
        raise UserError(f"--timeout={timeout} must be at least 1 second")
    if coordinator:
        host, colon, port = coordinator.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
            raise UserError(
                f"--coordinator={coordinator!r} must be host:port, e.g. 10.0.0.1:1234"
            )
    if processes < 0:
        raise UserError(f"--processes={processes} must be at least 1")
    if process < -1 or (processes and process >= processes):
        raise UserError(
            f"--process={process} must lie in 0 to {max(processes, 1) - 1}, for "
            f"--processes={processes}"
        )


def _initialize(coordinator: str, processes: int, process: int, timeout: int) -> None:
    where = f" at {coordinator}" if coordinator else ""
    sentence = (
        f"the other processes were not found{where} within {timeout} s; start all of "
        "them with the same --coordinator and --processes and each with its own "
        "--process, or give a longer --timeout"
    )
    # JAX would abort the process with a stack trace, a little later.
    _explain_abort(
        "the process on which --coordinator listens refuses this one, as JAX says "
        "above; give all of them the same --processes, and each its own --process"
    )
    timer = threading.Timer(timeout, end, [sentence])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator or None,
            num_processes=processes or None,
            process_id=process if process >= 0 else None,
            initialization_timeout=timeout + _GRACE,
            heartbeat_timeout_seconds=timeout + _GRACE,
            shutdown_timeout_seconds=timeout,
        )
    # Cluster detection can raise other exceptions.
    except Exception as error:
        raise UserError(
            f"the other processes were not found ({reason(error)}); where JAX "
            "does not find them by itself, give --coordinator=host:port, --processes "
            "and --process"
        ) from None
    finally:
        timer.cancel()


def _agree(settings: dict[str, Any], timeout: int) -> None:
    """Compare the settings of all processes. All processes return, or all raise."""
    keys, index = store(), jax.process_index()
    keys.key_value_set(f"{_SETTINGS}/{index}", json.dumps(settings, default=str))
    if index == 0:
        keys.key_value_set(_VERDICT, _verdict(settings, timeout))
    verdict = _get(_VERDICT, 2 * timeout)
    if verdict:
        raise Disagreement(verdict)


def _verdict(settings: dict[str, Any], timeout: int) -> str:
    settings = json.loads(json.dumps(settings, default=str))
    for index in range(1, jax.process_count()):
        other = json.loads(_get(f"{_SETTINGS}/{index}", timeout))
        if differ := differences(settings, other):
            texts = [
                f"{key} ({short(own)} in process 0, {short(their)} in process {index})"
                for key, own, their in differ
            ]
            return (
                f"the processes were started differently: {', '.join(texts)}; start "
                "all of them with the same config, flags and --workdir"
            )
    return ""


def _get(key: str, timeout: float) -> str:
    try:
        return store().blocking_key_value_get(key, int(1000 * timeout))
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"another process does not answer ({reason(error)})") from None


def _failures() -> list[str]:
    """Why a process failed first, if one did."""
    return [text for _, text in store().key_value_dir_get(_FAILED)]


class _Watch:
    """Ends this process after another process failed or died.

    A thread writes signs of life and reads those of the other processes.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._index, self._count = jax.process_index(), jax.process_count()
        self._beat = min(_BEAT * (1 + self._count // 100), timeout / 4)
        self._done = threading.Event()
        self._heard: dict[str, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, before the processes part."""
        self._done.set()
        self._thread.join()

    def tell(self, error: BaseException) -> None:
        """Tell the other processes why this process fails."""
        # The store may be gone, or another process may have failed first.
        with contextlib.suppress(Exception):
            text = f"process {self._index} failed: {_sentence(error)}"
            store().key_value_set(f"{_FAILED}/first", text)

    def fail(self, error: BaseException) -> None:
        """Tell the other processes why this process fails, and end it."""
        self.stop()
        # A collective fails after another process, which told why.
        told = []
        if _of_collective(error):
            with contextlib.suppress(Exception):  # the store ends with process 0
                told = _failures()
        self.tell(error)
        expected = isinstance(error, UserError | OSError | KeyboardInterrupt)
        if not expected and not _of_collective(error):  # a bug
            sys.excepthook(type(error), error, error.__traceback__)
        sentence = told[0] if told else _sentence(error)
        self._leave(sentence, 130 if isinstance(error, KeyboardInterrupt) else 2)

    def _leave(self, sentence: str, status: int = 2) -> None:
        with contextlib.suppress(Exception):
            store().key_value_set(f"{_SEEN}/{self._index}", "", True)
            # The store ends with process 0, after the others have read it.
            until = time.monotonic() + 5 * self._beat
            while self._index == 0 and time.monotonic() < until:
                if len(store().key_value_dir_get(_SEEN)) == self._count:
                    break
                time.sleep(0.1)
        end(sentence, status)

    def _look(self) -> None:
        keys, beats, answered = store(), 0, time.monotonic()
        while not self._done.wait(self._beat):
            try:
                beats += 1
                keys.key_value_set(f"{_ALIVE}/{self._index}", str(beats), True)
                failed = _failures()
                if self._index == 0 and not failed and (silent := self._silent()):
                    # Another process may have been faster.
                    with contextlib.suppress(jax.errors.JaxRuntimeError):
                        keys.key_value_set(f"{_FAILED}/first", silent)
                    failed = _failures()
                answered = time.monotonic()
            except Exception:
                if self._done.is_set():
                    return
                if time.monotonic() - answered < min(_FAULT, self._timeout):
                    continue
                end(f"process 0 is gone; {_AGAIN}")
            if failed:
                self._leave(failed[0])

    def _silent(self) -> str | None:
        """A sentence about a process without signs of life, if any."""
        now = time.monotonic()
        beats = dict(store().key_value_dir_get(_ALIVE))
        for index in range(1, self._count):
            key = f"{_ALIVE}/{index}"
            beat = beats.get(key, "")
            before, since = self._heard.get(key, (None, now))
            if beat != before:
                self._heard[key] = beat, now
            elif now - since > self._timeout:
                return (
                    f"process {index} has given no sign of life for "
                    f"{self._timeout:.0f} s; {_AGAIN}"
                )
        return None


def announce(error: BaseException) -> None:
    """Tell the other processes about an error, before code that may wait for them.

    The other processes end, and so does this process if it is still running.
    """
    if _watch is not None and not isinstance(error, Disagreement | Stopped):
        _watch.tell(error)


_watch: _Watch | None = None
_AGAIN = "run the same command in all processes to resume"


def _sentence(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if _of_collective(error):
        return f"another process is gone ({reason(error)}); {_AGAIN}"
    return f"{type(error).__name__}: {reason(error)}"


def _of_collective(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone."""
    if not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return False
    words = ("Gloo", "NCCL", "collective", "UNAVAILABLE", "coordination")
    return any(word in str(error) for word in words)


def end(sentence: str, status: int = 2) -> None:
    """End the process immediately, whatever its threads wait for."""
    print(f"mupax: {' '.join(public(sentence).split())}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


_abort: Any = None  # keeps the C callback alive


def _explain_abort(sentence: str) -> None:
    """Print `sentence` if JAX's C++ runtime aborts the process."""
    if os.name != "posix":
        return
    global _abort
    text = f"mupax: {sentence}\n".encode()

    def explain(_: int) -> None:
        os.write(2, text)
        os._exit(2)

    # Python's signal handlers run only between bytecodes.
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
    install = ctypes.CDLL(None).signal
    install.argtypes, install.restype = (ctypes.c_int, ctypes.c_void_p), None
    install(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    _abort = handler

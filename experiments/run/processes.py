"""Join the other processes of a run, compare settings, and end together.

JAX's coordination service, which process 0 runs, notices processes that are gone, and
ends the others. Only the launcher starts them again.
"""

import contextlib
import json
import os
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

# Keys in the store of JAX's coordination service.
_SETTINGS, _VERDICT, _FAILED = "mupax/settings", "mupax/verdict", "mupax/failed"
_GRACE = 15  # seconds by which JAX's own timeouts are longer


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

    If a process fails, all processes end with its message. If a process is killed, the
    others end at the next collective, or JAX ends them `timeout` seconds later.

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
    global _joined
    _joined = True
    try:
        with _ending_with_others():
            _agree(settings | {"--processes": processes}, timeout)
            yield
    except (Disagreement, Stopped):
        jax.distributed.shutdown()
        raise
    except BaseException as error:
        _fail(error)
    finally:
        _joined = False
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
    # JAX would abort the process with a stack trace, a little later.
    sentence = (
        f"the other processes were not found{where} within {timeout} s; start all of "
        "them with the same --coordinator and --processes and each with its own "
        "--process, or give a longer --timeout"
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


@contextlib.contextmanager
def _ending_with_others() -> Iterator[None]:
    """End this process if another one fails, with its message."""
    done, keys = threading.Event(), store()

    def look() -> None:
        while not done.is_set():
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is none yet
                end(keys.blocking_key_value_get(_FAILED, 1000))
            done.wait(0.1)  # where the store is gone, JAX says so

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def announce(error: BaseException) -> None:
    """End all processes with an error, before code that may wait for the others."""
    if _joined and not isinstance(error, Disagreement | Stopped):
        _fail(error)


def _fail(error: BaseException) -> None:
    """Tell the other processes why this process fails, and end it."""
    if _of_collective(error):
        time.sleep(1)  # another process failed first, and perhaps told why
    expected = isinstance(error, UserError | OSError | KeyboardInterrupt)
    if not expected and not _of_collective(error):  # a bug
        sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(Exception):  # another process was first
        text = f"process {jax.process_index()} failed: {_sentence(error)}"
        store().key_value_set(_FAILED, text)
        time.sleep(3)  # the store ends with process 0, after the others have read it
    end(_sentence(error), 130 if isinstance(error, KeyboardInterrupt) else 2)


def _sentence(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if _of_collective(error):
        again = "run the same command in all processes to resume"
        return f"another process is gone ({reason(error)}); {again}"
    return f"{type(error).__name__}: {reason(error)}"


def _of_collective(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone."""
    if not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return False
    words = ("Gloo", "NCCL", "collective", "UNAVAILABLE", "coordination")
    return any(word in str(error) for word in words)


def end(sentence: str, status: int = 2) -> None:
    """End the process immediately, whatever its threads wait for."""
    # Exit handlers and threads would wait for processes that are gone.
    with _ending:
        print(
            f"mupax: {' '.join(public(sentence).split())}", file=sys.stderr, flush=True
        )
        sys.stdout.flush()
        os._exit(status)


_ending, _joined = threading.Lock(), False

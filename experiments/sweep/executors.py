"""Train tasks here, in local processes, on a Dask cluster, or as Slurm jobs."""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import pathlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import rich.console
import rich.progress
from absl import logging

from .. import io
from .. import progress as progress_bars
from ..errors import UserError, import_extra, nearest, reason, short
from . import engine
from .results import Population
from .store import Store
from .tasks import Task

NAMES = ("here", "local", "dask", "slurm")
_SOON = 2.0  # seconds until a shared folder is seen

Executor = concurrent.futures.Executor


def run_all(
    tasks: Sequence[Task],
    data: Any,
    folder: pathlib.Path | None,
    limits: engine.Limits,
    executor: Executor | None = None,
    *,
    ahead: bool = True,
    console: rich.console.Console | None = None,
) -> list[Population]:
    """Train all tasks.

    Args:
      tasks: the tasks.
      data: as in `engine.prepare`.
      folder: of the store. Workers that see it write to it; others send their runs
        when a task ends. None keeps no runs, and needs `executor=None`.
      limits: of each worker.
      executor: None for this process.
      ahead: in this process, compile the next task in a thread while one trains. JAX's
        context managers hold for one thread only: they do not apply there.
      console: shows a progress bar, or a line for each finished task where it is no
        terminal; None for neither.

    Raises:
      UserError: a task raised it, or its worker died. The other tasks end first.
    """
    console = console or rich.console.Console(quiet=True)
    bar = progress_bars.bar(
        "{task.description:<24}", rich.progress.TaskProgressColumn(), console
    )
    lines = not (console.is_terminal or console.is_jupyter)
    left = {task.name: task.runs for task in tasks}
    begun = time.perf_counter()
    with bar:
        total = sum(task.runs * task.work for task in tasks)
        shown = bar.add_task("sweep", total=total)

        def advance(task: Task, runs: int) -> None:
            # By work, because tasks differ by a factor of a hundred.
            bar.advance(shown, runs * task.work)
            left[task.name] -= runs
            if lines and left[task.name] == 0:
                ready = sum(runs == 0 for runs in left.values())
                console.print(
                    f"{task.name}: {task.runs} runs done ({ready} of {len(tasks)} "
                    f"shapes, {time.perf_counter() - begun:.0f} s)",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )

        if executor is not None and folder is not None:
            populations = _run_on(executor, tasks, data, folder, limits, advance)
        else:
            store = Store(folder.absolute()) if folder else None
            prepare = [
                functools.partial(
                    engine.prepare,
                    task,
                    data,
                    store,
                    limits,
                    on_runs=functools.partial(advance, task),
                )
                for task in tasks
            ]
            populations = list(in_turn(prepare, ahead))
        runs = sum(task.runs for task in tasks)
        bar.update(shown, description=f"{runs} runs swept")
    return populations


def _run_on(
    executor: Executor,
    tasks: Sequence[Task],
    data: Any,
    folder: pathlib.Path,
    limits: engine.Limits,
    advance: Callable[[Task, int], None],
) -> list[Population]:
    sign = _sign(folder.absolute())
    store = Store(folder.absolute())

    # The largest first, so that all workers end at about the same time.
    order = sorted(tasks, key=lambda task: -task.work)
    futures = {
        executor.submit(
            run_task, task, data, str(sign), store.content(task.name), limits
        ): task
        for task in order
    }
    results: dict[str, Population] = {}

    def collect(future: concurrent.futures.Future) -> None:
        task = futures.pop(future)
        try:
            results[task.name], new = future.result()
        except Exception as error:
            if not _worker_died(error):
                raise
            # A broken pool fails all tasks, also those that wait.
            broken = isinstance(error, BrokenProcessPool)
            where = "" if broken else f" while it ran {task.name}"
            raise UserError(
                f"a worker died{where} ({error!r}); finished runs are kept, and the "
                "same command resumes from them"
            ) from error
        if new:
            store.append(task.name, new)
        advance(task, task.runs)

    try:
        for future in concurrent.futures.as_completed(list(futures)):
            collect(future)
    except Exception as error:
        # Running tasks go on to their end, so that their runs are kept. Dask does not
        # tell running tasks from waiting ones, and cancels both.
        running = [future for future in futures if not future.cancel()]
        if running:
            logging.error("A task failed (%s); running tasks end first.", error)
        for future in concurrent.futures.as_completed(running):
            with contextlib.suppress(Exception):
                collect(future)
        raise
    return [results[task.name] for task in tasks]


def _worker_died(error: Exception) -> bool:
    # By name: Dask and submitit need not be installed.
    names = {c.__name__ for c in type(error).__mro__}
    return bool(names & {"KilledWorker", "BrokenExecutor", "UncompletedJobError"})


def _sign(folder: pathlib.Path) -> pathlib.Path:
    """A file of a random name, by which workers on other machines know the folder.

    It stays: Slurm may start a job after this process ended. It is not uploaded, so a
    copy of the folder on another disk lacks it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sign = next(folder.glob(".shared.*"), folder / f".shared.{secrets.token_hex(6)}")
    sign.touch()
    return sign


def run_task(
    task: Task, data: Any, sign: str, known: bytes, limits: engine.Limits
) -> tuple[Population, bytes]:
    """Train one task, in a worker.

    Args:
      task: the task.
      data: as in `engine.prepare`.
      sign: a file in the folder of the store.
      known: what the store knows of the task; used if this worker has another disk,
        i.e. does not see the file.
      limits: of this worker.

    Returns:
      All runs of the task, and the lines that the caller must add to the store.
    """
    folder = pathlib.Path(sign).parent
    if io.appears(pathlib.Path(sign), _SOON):
        return engine.run(task, data, Store(folder), limits), b""
    with tempfile.TemporaryDirectory() as local:
        store = Store(pathlib.Path(local))
        store.append(task.name, known)
        population = engine.run(task, data, store, limits)
        return population, store.content(task.name)[len(known) :]


def in_turn(
    prepare: Sequence[Callable[..., Callable[[float], Population]]], ahead: bool = True
) -> Iterator[Population]:
    """Train one task after another; while one trains, the next is compiled.

    `prepare` is `engine.prepare` of each task, without its argument `ahead`. A task
    that cannot be prepared while another trains, e.g. for lack of memory, is prepared
    again after that. With `ahead=False`, tasks are compiled in this thread.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        coming = None
        for i, make in enumerate(prepare):
            start = time.perf_counter()
            try:
                train = make(ahead=False) if coming is None else coming.result()
            except Exception:
                if coming is None:
                    raise
                train = make(ahead=False)
            waited = time.perf_counter() - start
            if ahead and i + 1 < len(prepare):
                coming = pool.submit(prepare[i + 1], ahead=True)
            yield train(waited)


@contextlib.contextmanager
def opened(
    name: str, workers: int, folder: pathlib.Path, address: str | None = None
) -> Iterator[Executor | None]:
    """Open an executor by its name.

    Args:
      name: "here" (this process), "local" (processes of this machine), "dask" (the
        scheduler at `address`, or a cluster on this machine), "slurm" (a Slurm job for
        each task).
      workers: tasks at once, at most.
      folder: for the logs of Slurm.
      address: of a Dask scheduler.

    Raises:
      UserError: a package is missing.
    """
    if name == "here":
        yield None
    elif name == "local":
        # SIGTERM leaves the pool's semaphores to Python's tracker of them. It removes
        # them, and would warn.
        ignored = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, ignored))
        # Forked processes share locks of JAX's threads, and hang.
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(
            workers, mp_context=spawn, initializer=_end_with_parent
        ) as pool:
            yield pool
    elif name == "dask":
        distributed = import_extra("distributed", "dask", "--executor=dask")
        # One task at a time in each worker: a task takes a whole device.
        local = {"n_workers": workers, "threads_per_worker": 1}
        try:
            client = distributed.Client(**({"address": address} if address else local))
        except (OSError, ValueError) as error:
            # Dask quotes the address without its scheme, so its user is not recognised.
            user = "".join((address or "").partition("://")[2].rpartition("@")[:2])
            why = reason(error).replace(user, "")
            raise UserError(
                f"--scheduler={short(address)} cannot be used: {why}"
            ) from None
        with client:
            yield client.get_executor()
    else:
        submitit = import_extra("submitit", "slurm", "--executor=slurm")
        try:
            jobs = submitit.AutoExecutor(folder / "slurm", cluster="slurm")
        except RuntimeError as error:
            raise UserError(
                f"--executor=slurm cannot be used: {reason(error)}; run it on a login "
                "node of the cluster"
            ) from None
        jobs.update_parameters(timeout_min=24 * 60, slurm_array_parallelism=workers)
        yield _Futures(jobs)


def _end_with_parent() -> None:
    """End this worker when its parent ends, also by SIGKILL, amid a task too."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def check_name(name: str, address: str | None = None) -> None:
    """Raise UserError for an unknown executor, or an address that is not used."""
    if name not in NAMES:
        raise UserError(
            f"--executor={name!r} must be one of {', '.join(NAMES)}"
            f"{nearest(name, NAMES)}"
        )
    if address is not None and name != "dask":
        raise UserError(
            f"--scheduler has no effect with --executor={name}; add --executor=dask, "
            "or leave it out"
        )


class _Futures(concurrent.futures.Executor):
    """A submitit executor whose jobs are futures of `concurrent.futures`."""

    def __init__(self, executor: Any):
        self._executor = executor
        self._waiters = concurrent.futures.ThreadPoolExecutor(256)

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Submit a job."""
        job = self._executor.submit(fn, *args, **kwargs)
        return self._waiters.submit(job.result)

"""Where jobs run: here, in processes, on a Dask cluster, or by Slurm."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .. import data as datasets
from ..errors import UserError
from . import engine
from .own import OwnTask
from .results import Population
from .store import Nowhere, Store
from .tasks import Task

NAMES = ("here", "local", "dask", "slurm", "submitit_local")

Executor = concurrent.futures.Executor


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset by its name, for a process that reads it itself."""

    name: str
    data_dir: str | None
    options: tuple[tuple[str, Any], ...] = ()

    def read(self) -> datasets.Held:
        """The data; once a process."""
        return _read(self)


@functools.lru_cache(maxsize=2)
def _read(source: Source) -> datasets.Held:
    return datasets.hold(source.name, source.data_dir, dict(source.options))


def run_job(task: Task, source: Any, folder: str, limits: engine.Limits) -> Population:
    """Do one job, unless it is done; this is what is sent to workers."""
    return _prepared(task, source, Store(pathlib.Path(folder)), limits)(0.0)


def _prepared(
    task: Task,
    source: Any,
    store: Store,
    limits: engine.Limits,
    *,
    ahead: bool = False,
) -> Callable[[float], Population]:
    if isinstance(task, OwnTask) and not isinstance(store, Nowhere):
        task = task.bound(source)
    # Another grid, more seeds or all runs in place of the best: not what is there.
    key = f"{task.key}, {task.grid}, {task.seeds}, {limits.halving}"
    found = store.get(task.name, key)
    if found is not None:
        return lambda waited: found
    data = source.read() if isinstance(source, Source) else source
    ready = engine.prepared(task, data, store, limits, ahead=ahead)

    def finish(waited: float) -> Population:
        population = ready(waited)
        store.put(task.name, key, population)
        return population

    return finish


Maker = Callable[..., Callable[[float], Population]]


def in_turn(makers: Sequence[Maker], ahead: bool = True) -> Iterator[Population]:
    """Each job's result in turn; while one trains, the next is compiled.

    Neither core nor device waits for the other. What does not fit beside the job that
    trains is prepared again when its turn comes.

    Args:
      makers: `ahead` to what trains a job, given the seconds that were waited for it.
      ahead: False for one after the other, all in this thread.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        coming = None
        for i, maker in enumerate(makers):
            start = time.perf_counter()
            try:
                now = maker(ahead=False) if coming is None else coming.result()
            except Exception:
                if coming is None:
                    raise
                now = maker(ahead=False)
            waited = time.perf_counter() - start
            if ahead and i + 1 < len(makers):
                coming = pool.submit(makers[i + 1], ahead=True)
            yield now(waited)


def run_all(
    tasks: Sequence[Task],
    source: Any,
    folder: pathlib.Path | None,
    limits: engine.Limits,
    executor: Executor | None,
    on_done: Callable[[Task], None] = lambda task: None,
    *,
    ahead: bool = True,
    on_runs: Callable[[int], None] = lambda count: None,
) -> list[Population]:
    """Do all jobs, the largest first; a job whose worker died is done again.

    Args:
      tasks: the jobs.
      source: the data, or a `Source`.
      folder: of the store, which all workers see; None keeps nothing, in this process.
      limits: of each worker.
      executor: None for this process.
      on_done: called as each job ends.
      ahead: in this process, compile the next job in a thread while one trains. What
        JAX's context managers set for this thread does not hold in that one.
      on_runs: called with the number of runs as a chunk of them ends, in this process.

    Raises:
      UserError: a job failed with one, or its worker died three times.
    """
    if executor is None or folder is None:
        store = Store(folder.absolute(), on_runs) if folder else Nowhere(on_runs)
        makers = [
            functools.partial(_prepared, task, source, store, limits) for task in tasks
        ]
        found = []
        for task, population in zip(tasks, in_turn(makers, ahead), strict=True):
            found.append(population)
            on_done(task)
        return found
    folder = folder.absolute()
    # The largest first: what is left at the end is small.
    order = sorted(tasks, key=lambda t: -t.depth * t.width**2)
    waiting = {
        executor.submit(run_job, task, source, str(folder), limits): (task, 1)
        for task in order
    }
    results: dict[str, Population] = {}
    while waiting:
        done, _ = concurrent.futures.wait(
            waiting, return_when=concurrent.futures.FIRST_COMPLETED
        )
        for future in done:
            task, tries = waiting.pop(future)
            try:
                results[task.name] = future.result()
            except UserError:
                _cancel(waiting)
                raise
            except Exception as error:
                if not _worker_died(error):
                    _cancel(waiting)
                    raise
                if tries == 3 or isinstance(
                    error, concurrent.futures.process.BrokenProcessPool
                ):
                    raise UserError(
                        f"a worker died while it ran {task.name} ({error!r}); what was "
                        "finished is kept, and the same command goes on from there"
                    ) from error
                again = executor.submit(run_job, task, source, str(folder), limits)
                waiting[again] = (task, tries + 1)
                continue
            on_done(task)
    return [results[task.name] for task in tasks]


def _cancel(waiting: Iterable[concurrent.futures.Future]) -> None:
    """Start no further jobs; those that run end, and are kept."""
    for future in waiting:
        future.cancel()


def _worker_died(error: Exception) -> bool:
    # By name: Dask and submitit need not be installed.
    names = {c.__name__ for c in type(error).__mro__}
    return bool(names & {"KilledWorker", "BrokenExecutor", "UncompletedJobError"})


@contextlib.contextmanager
def opened(
    name: str, workers: int, folder: pathlib.Path, address: str | None = None
) -> Iterator[Executor | None]:
    """An executor by its name.

    Args:
      name: "here" (this process), "local" (processes of this machine), "dask" (the
        scheduler at `address`, or a cluster of this machine), "slurm" (a job each),
        or "submitit_local" (as Slurm, on this machine).
      workers: at most so many jobs at once.
      folder: for the logs of Slurm.
      address: of a Dask scheduler.

    Raises:
      UserError: an unknown name, or a package that is missing.
    """
    if name not in NAMES:
        raise UserError(f"executor={name!r} must be one of {', '.join(NAMES)}")
    if name == "here":
        yield None
    elif name == "local":
        # Forked processes share locks of JAX's threads, and hang.
        spawn = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn)
        with pool:
            yield pool
    elif name == "dask":
        with _dask(workers, address) as client:
            yield client.get_executor()
    else:
        yield _submitit(name, workers, folder)


def _dask(workers: int, address: str | None) -> Any:
    try:
        import distributed
    except ModuleNotFoundError:
        raise UserError(_missing("dask", "dask.distributed")) from None
    if address:
        return distributed.Client(address)
    # One job at a time in each: a job takes a whole device.
    return distributed.Client(n_workers=workers, threads_per_worker=1)


def _submitit(name: str, workers: int, folder: pathlib.Path) -> Executor:
    try:
        import submitit
    except ModuleNotFoundError:
        raise UserError(_missing("slurm", "submitit")) from None
    cluster = "slurm" if name == "slurm" else "local"
    executor = submitit.AutoExecutor(folder / "slurm", cluster=cluster)
    options: dict[str, Any] = {"timeout_min": 24 * 60}
    if cluster == "slurm":
        options["slurm_array_parallelism"] = workers
    executor.update_parameters(**options)
    return _Futures(executor)


class _Futures(concurrent.futures.Executor):
    """A submitit executor whose jobs are futures that can be waited for."""

    def __init__(self, executor: Any):
        self._executor = executor
        self._waiters = concurrent.futures.ThreadPoolExecutor(256)

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Submit a job; the future ends as it does."""
        job = self._executor.submit(fn, *args, **kwargs)
        return self._waiters.submit(job.result)


def _missing(extra: str, package: str) -> str:
    return (
        f"--executor={extra} needs {package}; install it: pip install 'mupax[{extra}]'"
    )

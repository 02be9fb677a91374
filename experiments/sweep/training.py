"""Train the tasks of a sweep, here or on an executor; write its tables and report.

Both front doors, `api` and `command`, describe a sweep as tasks and as a
`report.SweepData` without runs.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import rich.console
import rich.progress
from absl import logging

from .. import io, report
from .. import progress as progress_bars
from ..errors import UserError, reason
from . import engine
from .results import Population
from .store import Store
from .tasks import Task

STORED = "runs"  # folder of the finished runs, in the folder of the sweep
_SOON = 2.0  # seconds until a worker sees a new folder on a shared disk

Executor = concurrent.futures.Executor
PROCESSES = "ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('spawn'))"


def train(
    tasks: Sequence[Task],
    described: report.SweepData,
    limits: engine.Limits,
    *,
    data: Any = None,
    folder: pathlib.Path | None = None,
    executor: Executor | None = None,
    ahead: bool = True,
    console: rich.console.Console | None = None,
) -> report.SweepData:
    """Train the runs that a folder lacks, and write its tables and report.

    Args:
      tasks: all runs, a task for each shape, parametrization and choice.
      described: everything that a report shows, except for the runs.
      limits: of each worker.
      data: as in `engine.prepare`.
      folder: holds the finished runs, results.csv, sweep.json and report.html; None
        for nowhere.
      executor: where tasks train; None for this process.
      ahead: as in `run_all`.
      console: shows the progress; None for none.

    Returns:
      `described` with the runs.

    Raises:
      UserError: bad input, a task that failed, a loss that is negative, or a file that
        cannot be written. Finished runs are kept.
    """
    store = None if folder is None else folder / STORED
    populations = run_all(
        tasks, data, store, limits, executor, ahead=ahead, console=console
    )
    _check_losses(populations)
    settings = {**described.settings, "machine": report.machine()}
    swept = dataclasses.replace(described, populations=populations, settings=settings)
    if folder is not None:
        verdicts = json.dumps(swept.verdicts, indent=1)
        with writing(folder):
            io.write_durably(folder / "sweep.json", verdicts)
            report.write_report(swept, folder, "results.csv", swept.table)
    return swept


def _check_losses(populations: Sequence[Population]) -> None:
    """Raise a `UserError` if a loss is negative, of which no share can be given up."""
    for p in populations:
        finite = p.loss[np.isfinite(p.loss)]
        if finite.size and finite.min() < 0:
            raise UserError(
                f"the loss falls to {finite.min():.4g} at width {p.width} and depth "
                f"{p.depth}. Verdicts compare shares of the loss, so it must not be "
                "negative: return a loss whose least value is zero, e.g. less its "
                "lower bound, or the exponential of a negative log-likelihood"
            )


@contextlib.contextmanager
def writing(directory: pathlib.Path) -> Iterator[None]:
    """Name the file that cannot be written, e.g. on a full disk, and the next step."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{os.fsdecode(error.filename or directory)} cannot be written: "
            f"{reason(error)}; finished runs are kept, and the same command resumes "
            "from them"
        ) from None


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
      folder: of the store, which workers share. None keeps no runs, and needs
        `executor=None`.
      limits: of each worker.
      executor: None for this process.
      ahead: in this process, compile the next task in a thread while one trains. JAX's
        context managers hold for one thread only: they do not apply there.
      console: shows a progress bar, or a line for each finished task where it is no
        terminal; None for neither.

    Raises:
      UserError: a task raised it, or its worker died. The other tasks end first. Or the
        executor forks.
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
            folder = folder.absolute()
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
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise UserError(
            "forked processes share locks of JAX's threads, and hang; pass "
            f"executor={PROCESSES}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # The largest first, so that all workers end at about the same time.
    order = sorted(tasks, key=lambda task: -task.work)
    futures = {
        executor.submit(run_task, task, data, folder, limits): task for task in order
    }
    results: dict[str, Population] = {}
    try:
        for future in concurrent.futures.as_completed(futures):
            task = futures[future]
            results[task.name] = future.result()
            advance(task, task.runs)
    except Exception as error:
        # Running tasks go on to their end. Dask does not tell running tasks from
        # waiting ones, and cancels both.
        if running := [future for future in futures if not future.cancel()]:
            logging.error("A task failed (%s); running tasks end first.", error)
            concurrent.futures.wait(running)
        # By name: Dask need not be installed.
        names = {c.__name__ for c in type(error).__mro__}
        if names & {"KilledWorker", "BrokenExecutor"}:
            raise UserError(
                f"a worker died ({error!r}); finished runs are kept, and the same call "
                "resumes from them"
            ) from error
        raise
    return [results[task.name] for task in tasks]


def run_task(
    task: Task, data: Any, folder: pathlib.Path, limits: engine.Limits
) -> Population:
    """Train one task, in a worker, which must see the folder of the store."""
    if not io.appears(folder, _SOON):
        raise UserError(
            f"a worker does not see {folder}, where runs are stored; give a folder on "
            "a disk that all workers share"
        )
    return engine.run(task, data, Store(folder), limits)


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

"""`mupax sweep`: many hyperparameters at several sizes, as tables and a report."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich.console
from ml_collections import ConfigDict

from mupax import optim
from mupax.zoo.addresses import public

from .. import report
from ..errors import UserError, reason
from ..io import write_durably
from ..run import workdir
from ..run.build import build
from ..run.trackers import open_trackers
from . import cost, engine, executors, export, space
from .results import Population
from .space import SweepConfig
from .store import Store
from .tasks import ZooTask

# Names of parametrizations in reports, by key.
LABELS = {
    "sp": "Standard (SP)",
    "half_alpha": "α = ½, γ = 0",
    "no_depth_scaling": "No depth scaling",
    "ode": "ODE",
    "depth_mup": "Depth-μP",
    "mup": "μP",
    "completep": "CompleteP",
}

_STORED = "cells"  # folder of the finished runs
# Settings that may change between calls in a run directory. Stored runs are kept.
_FREE = (
    *(f"sweep.{name}" for name in ("axes", "choices", "parametrizations", "seeds")),
    *("sweep.depths", "sweep.widths"),
)


def run(
    config: ConfigDict,
    folder: str | pathlib.Path,
    command: Sequence[str],
    *,
    executor: str = "here",
    workers: int = 2,
    scheduler: str | None = None,
    stop_diverged: bool = False,
    dry_run: bool = False,
) -> report.SweepData | None:
    """Run a sweep; the same command resumes a sweep that was killed.

    Args:
      config: a sweep's config, or a training run's, whose learning rate is swept.
      folder: the run directory.
      command: the command line, for the report.
      executor: where tasks run; see `executors.opened`.
      workers: number of tasks that run at once.
      scheduler: address of a Dask scheduler.
      stop_diverged: as in `engine.Limits`.
      dry_run: print what the sweep would cost, and return None.

    Raises:
      UserError: bad input, in one sentence; existing files are kept.
    """
    console = rich.console.Console()
    parsed = space.parse_sweep(config)
    executors.check_name(executor)
    if workers < 1:
        raise UserError(f"--workers={workers} must be at least 1")
    limits = dataclasses.replace(
        parsed.limits,
        share=parsed.limits.share / (1 if executor in ("here", "slurm") else workers),
        stop_diverged=stop_diverged,
    )
    directory = pathlib.Path(folder)
    workdir.check(directory, parsed.settings(), free=_FREE)
    tasks = space.tasks(parsed)
    contents = check_data(tasks, console, directory)
    settings = parsed.settings() | {"contents": contents}
    if dry_run:
        cost.show(tasks, tasks[0].dataset(), console)
        return None
    with ended_by_sigterm(), workdir.claim(directory, settings, free=_FREE):
        populations = train(
            tasks, directory, limits, console, executor, workers, scheduler
        )
        data = report_data(parsed, populations, command)
        with writing(directory):
            write_tables(directory, data)
            page = report.write_report(data, directory)
            track(parsed, data, directory)
    report.print_verdicts(data, console)
    console.print(
        f"{data.runs} runs: {directory}/results.csv, {directory}/sweep.json\n"
        f"Report: {page}",
        highlight=False,
        soft_wrap=True,
    )
    return data


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


def check_data(
    tasks: Sequence[ZooTask], console: rich.console.Console, directory: pathlib.Path
) -> str:
    """Open the dataset of a sweep; check batch and model of each choice that trains.

    Returns its fingerprint.
    """
    with console.status(f"reading {public(tasks[0].config.dataset)}"):
        dataset = tasks[0].dataset()
        fingerprint = dataset.fingerprint
    store = Store(directory / _STORED)
    trained = (task for task in reversed(tasks) if engine.missing(task, store))
    for task in {str(task.choices): task for task in trained}.values():
        dataset.check_batch(task.batch_size)
        if task.batch_size % task.config.accumulate:
            raise UserError(
                f"batch_size {task.batch_size} does not divide into "
                f"{task.config.accumulate} parts; change batch_size or accumulate"
            )
        build(task.config, dataset)
    return fingerprint


def train(
    tasks: list[ZooTask],
    directory: pathlib.Path,
    limits: engine.Limits,
    console: rich.console.Console,
    executor: str = "here",
    workers: int = 1,
    address: str | None = None,
) -> list[Population]:
    """Train the runs that a run directory lacks, with a progress bar."""
    with executors.opened(executor, workers, directory, address) as pool:
        return executors.run_all(
            tasks, None, directory / _STORED, limits, pool, console=console
        )


def report_data(
    config: SweepConfig, populations: list[Population], command: Sequence[str]
) -> report.SweepData:
    base = config.base
    return report.SweepData(
        populations=populations,
        base=config.sizes,
        labels={
            key: LABELS.get(
                key, optim.parametrization(value.name, **value.options).name
            )
            for key, value in config.parametrizations.items()
        },
        featured=config.featured,
        steps=base.steps,
        settings={"config": config.settings(), "machine": report.machine()},
        subject=subject(config.settings()),
        command=shlex.join(map(public, command)),
        target=config.target_sizes,
    )


def subject(settings: Mapping[str, Any]) -> str:
    """What runs of these settings train, e.g. "resmlp on digits, adam"."""
    model, optimizer = settings["model"]["name"], settings["optimizer"]["name"]
    return f"{model} on {public(settings['dataset'])}, {optimizer}"


def track(config: SweepConfig, data: report.SweepData, directory: pathlib.Path) -> None:
    """Write a finished sweep to the trackers of its config."""
    base = config.base
    runs = list(export.finished(data.populations, data.steps))
    for tracker in open_trackers(
        directory,
        config.settings(),
        tensorboard=base.tensorboard,
        wandb=base.wandb,
        mlflow=base.mlflow,
    ):
        try:
            page = str(directory / "report.html")
            tracker.write_sweep(runs, data.verdicts, page)
        finally:
            tracker.close()


def write_tables(directory: pathlib.Path, data: report.SweepData) -> None:
    """Write every run as results.csv, and the verdicts as sweep.json."""
    write_durably(directory / "results.csv", data.table)
    write_durably(directory / "sweep.json", json.dumps(data.verdicts, indent=1))

"""`mupax sweep`: many hyperparameters at several sizes, as tables and a report."""

import dataclasses
import functools
import json
import pathlib
import shlex
from collections.abc import Callable
from typing import Any

import rich.console
import rich.progress
from ml_collections import ConfigDict

from mupax import optim

from .. import report
from ..data import Dataset
from ..errors import UserError
from ..io import write_durably
from ..run import workdir
from ..run.build import build
from . import engine, executors, optima, shapes, space, tasks
from . import tradeoff as tradeoffs
from .results import Population
from .space import SweepConfig

_LABELS = {
    "sp": "Standard (SP)",
    "half_alpha": "α = ½, γ = 0",
    "depth_mup": "Depth-μP",
}

# What may differ in a run directory: every stored run stays, and counts again.
_FREE = tuple(
    f"sweep.{name}"
    for name in (
        "axes",
        "choices",
        "depths",
        "parametrizations",
        "seeds",
        "tradeoff",
        "widths",
    )
)


def run(
    config: ConfigDict, folder: str, command: list[str], **options: Any
) -> list[Population]:
    """All runs of a sweep; the arguments are those of `swept`."""
    return list(swept(config, folder, command, **options).populations)


def swept(
    config: ConfigDict,
    folder: str,
    command: list[str],
    *,
    executor: str = "here",
    workers: int = 2,
    address: str | None = None,
    stop_diverged: bool = False,
    halving: int = 0,
) -> report.SweepData:
    """Sweep; the same command resumes a sweep that was killed.

    Args:
      config: of a sweep, or of a training, whose learning rate is swept; a target is
        only predicted.
      folder: the run directory.
      command: what was typed, for the report.
      executor: where jobs run; see `executors.opened`.
      workers: jobs at once.
      address: of a Dask scheduler.
      stop_diverged: stop diverged runs; on accelerators, only once the whole chunk has
        diverged.
      halving: keep one grid point in so many at each rung; 0 keeps all.

    Raises:
      UserError: bad input, in one sentence; nothing that was there is lost.
    """
    console = rich.console.Console()
    parsed = space.parse_sweep(config)
    if executor not in executors.NAMES:
        raise UserError(
            f"--executor={executor!r} must be one of {', '.join(executors.NAMES)}"
        )
    if workers < 1:
        raise UserError(f"--workers={workers} must be at least 1")
    limits = dataclasses.replace(
        parsed.limits,
        share=parsed.limits.share / (1 if executor in ("here", "slurm") else workers),
        stop_diverged=stop_diverged,
        halving=halving,
    )
    directory = pathlib.Path(folder)
    refuse_old(directory)
    workdir.check(directory, parsed.settings(), free=_FREE)
    jobs = space.jobs(parsed)
    data = open_data(jobs[0], console)
    equal = shapes.pairs(parsed, jobs[0], data)
    with workdir.claim(directory, parsed.settings(), free=_FREE):
        launch = functools.partial(
            run_jobs,
            limits=limits,
            console=console,
            executor=executor,
            workers=workers,
            address=address,
        )
        populations = launch(jobs, directory=directory)
        found = report_data(parsed, populations, command)
        if equal:
            more = functools.partial(launch, directory=directory / "tradeoff")
            tradeoff = train_tradeoff(parsed, found, jobs, equal, data, more)
            if tradeoff is None:
                console.print("no run of the base trained: no shapes of equal size")
            found = dataclasses.replace(found, tradeoff=tradeoff)
        write_tables(directory, found)
        page = report.write_report(found, directory)[0]
    report.print_verdicts(found, console)
    console.print(
        f"{found.runs} runs: {directory}/results.csv, "
        f"{directory}/sweep.json\nReport: {page}",
        highlight=False,
        soft_wrap=True,
    )
    return found


def refuse_old(directory: pathlib.Path) -> None:
    """Refuse the run directory of an earlier version, whose runs are not read."""
    if "base" in (workdir.settings_of(directory) or {}):
        raise UserError(
            f"{directory} holds a sweep of an earlier version of mupax, which is not "
            "read; choose another --workdir, or remove that one"
        )


def open_data(job: tasks.Job, console: rich.console.Console) -> Dataset:
    """The dataset of a sweep, once a run on it is known to be possible.

    Raises:
      UserError: a batch or a model that does not suit it.
    """
    with console.status(f"reading {job.config.dataset}"):
        dataset = job.dataset()
    check_job(job, dataset)
    return dataset


def report_data(
    config: SweepConfig,
    populations: list[Population],
    command: list[str],
) -> report.SweepData:
    """A sweep as its report shows it.

    Args:
      config: of the sweep; a target in it is predicted.
      populations: all runs of both axes of size.
      command: what was typed.
    """
    return report.SweepData(
        populations=populations,
        base=config.sizes,
        labels=labels(config),
        featured=config.featured,
        steps=config.base.steps,
        settings={"config": config.settings(), "machine": report.machine()},
        subject=subject(config),
        command=shlex.join(command),
        target=config.target_sizes,
    )


def labels(config: SweepConfig) -> dict[str, str]:
    """The names of parametrizations that a reader sees, by key."""
    return {
        key: _LABELS.get(key, optim.parametrization(value.name, **value.options).name)
        for key, value in config.parametrizations.items()
    }


def subject(config: SweepConfig) -> str:
    """What is trained, in a few words."""
    base = config.base
    return f"{base.model.name} on {base.dataset}, {base.optimizer.name}"


def train_tradeoff(
    config: SweepConfig,
    found: report.SweepData,
    jobs: list[tasks.Job],
    equal: list[tuple[int, int]],
    data: Dataset,
    launch: Callable[[list[tasks.Job]], list[Population]],
) -> tradeoffs.Tradeoff | None:
    """Train shapes of equal parameters with what the base likes best.

    Returns:
      None where the base trained nowhere: there is nothing to train them with.
    """
    population = found.at_base(found.main)
    best = optima.optimum(population.cell())
    if best is None:
        return None
    hyper = population.best()
    if len(found.names) < 2:  # of several, the fit's place on one is not the others'
        hyper["learning_rate"] = 2.0**best.log2_lr
    base = next(job for job in jobs if job.name == population.name)
    populations = launch(shapes.jobs(equal, base, hyper))
    points = tradeoffs.points(populations, shapes.counter(base, data))
    return tradeoffs.Tradeoff(
        found.main,
        hyper,
        points,
        tradeoffs.budgets([point.parameters for point in points]),
        shapes.target(config, base, data),
        populations,
    )


def run_jobs(
    jobs: list[tasks.Job],
    directory: pathlib.Path,
    limits: engine.Limits,
    console: rich.console.Console,
    *,
    executor: str = "here",
    workers: int = 1,
    address: str | None = None,
) -> list[Population]:
    """Run the jobs that a run directory lacks, with a bar of progress."""
    # By work, as matrix products a step: jobs differ by a factor of hundred.
    work = {job.name: job.depth * job.width**2 for job in jobs}
    with progress(console) as shown:
        bar = shown.add_task("sweep", total=sum(work.values()))
        with executors.opened(executor, workers, directory, address) as pool:
            found = executors.run_all(
                jobs,
                None,  # each opens its own, once in a process
                directory / "cells",
                limits,
                pool,
                lambda job: shown.advance(bar, work[job.name]),
            )
        count = sum(job.runs for job in jobs)
        shown.update(bar, description=f"{count} runs swept")
    return found


def write_tables(directory: pathlib.Path, found: report.SweepData) -> None:
    """Write every run as results.csv, and the verdicts as sweep.json."""
    write_durably(directory / "results.csv", found.table)
    write_durably(directory / "sweep.json", json.dumps(found.verdicts, indent=1))


def progress(console: rich.console.Console) -> rich.progress.Progress:
    """A bar."""
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description:<24}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
    )


def check_job(job: tasks.Job, dataset: Dataset) -> None:
    """Say what is wrong with batch and model before anything is written."""
    if job.batch_size > dataset.train_size:
        raise UserError(
            f"batch_size {job.batch_size} is more than the {dataset.train_size} "
            f"training examples of {dataset.name}; make it smaller"
        )
    if job.batch_size % job.config.accumulate:
        raise UserError(
            f"batch_size {job.batch_size} does not divide into {job.config.accumulate} "
            "parts; change batch_size or accumulate"
        )
    build(job.config, dataset)

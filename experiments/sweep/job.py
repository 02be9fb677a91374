"""The job of `mupax sweep`: many hyperparameters at several sizes, as tables."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import rich.console
import rich.progress
import rich.table
from flax import nnx
from ml_collections import ConfigDict

from .. import config as configs
from .. import data as datasets
from .. import report
from ..errors import UserError
from ..report import gather as reporting
from ..run import workdir
from . import engine, executors, grids, optima, shapes, statistics, tasks
from . import plan as plans
from . import tradeoff as tradeoffs
from .results import Population
from .store import write_durably

# What may differ in a run directory: every stored run stays, and counts again.
_PLAN = tuple(
    f"sweep.{name}"
    for name in (
        "axes",
        "choices",
        "depths",
        "only",
        "parametrizations",
        "seeds",
        "tradeoff",
        "widths",
    )
)


def run(
    config: ConfigDict, folder: str | None, command: list[str], **options: Any
) -> list[Population]:
    """All runs of a sweep; the arguments are those of `swept`."""
    return list(swept(config, folder, command, **options).populations)


def swept(
    config: ConfigDict,
    folder: str | None,
    command: list[str],
    *,
    executor: str = "here",
    workers: int = 2,
    address: str | None = None,
    stop_diverged: bool = False,
    halving: int = 0,
) -> report.SweepData:
    """Sweep; a killed sweep goes on where it stopped.

    Args:
      config: as `configs/digits_resmlp.py` gives it; its target is only predicted.
      folder: the run directory; None for runs/<dataset>_<model>.
      command: what was typed, for the report.
      executor: where jobs run; see `executors.opened`.
      workers: jobs at once.
      address: of a Dask scheduler.
      stop_diverged: do no steps for chunks in which nothing trains any more.
      halving: one grid point in so many goes on at each rung; 0 for all of them.

    Raises:
      UserError: bad input, said in one sentence; nothing that was there is lost.
    """
    console = rich.console.Console()
    configs.check_sweep(config)
    if executor not in executors.NAMES:
        raise UserError(
            f"--executor={executor!r} must be one of {', '.join(executors.NAMES)}"
        )
    if workers < 1:
        raise UserError(f"--workers={workers} must be at least 1")
    limits = plans.limits(
        config,
        stop_diverged=stop_diverged,
        halving=halving,
        workers=1 if executor in ("here", "slurm") else workers,
    )
    jobs = plans.jobs(config, configs.points(config))
    settings = configs.plain(config)
    for key in ("data_dir", "target"):
        settings.pop(key, None)
    settings["sweep"].pop("memory_share", None)
    directory = workdir.named(config, folder)
    workdir.check(directory, settings, free=_PLAN)
    with console.status(f"reading {config.dataset}"):
        data = source(config).read()
    check_job(jobs[0], data)
    equal = shapes.pairs(config, jobs[0], data)
    with workdir.claim(directory, settings, free=_PLAN):
        launch = functools.partial(
            run_jobs,
            data=data if executor == "here" else source(config),
            limits=limits,
            console=console,
            executor=executor,
            workers=workers,
            address=address,
        )
        populations = launch(jobs, directory=directory)
        found = reporting.swept(config, populations, command)
        if equal:
            more = functools.partial(launch, directory=directory / "tradeoff")
            tradeoff = train_tradeoff(config, found, jobs, equal, data, more)
            if tradeoff is None:
                console.print("the base trained nowhere: no shapes of equal parameters")
            found = dataclasses.replace(found, tradeoff=tradeoff)
        write_tables(directory, found)
        page = report.write_sweep_report(found, directory)
    print_verdicts(console, found.verdicts)
    console.print(
        f"{found.runs} runs: {directory}/results.csv, "
        f"{directory}/sweep.json\nReport: {page}",
        highlight=False,
        soft_wrap=True,
    )
    return found


def source(config: ConfigDict) -> executors.Source:
    """The config's dataset, by name."""
    options = configs.plain(config.get("data", {}))
    return executors.Source(config.dataset, config.data_dir, tuple(options.items()))


def base_of(config: ConfigDict) -> statistics.Sizes:
    """The base's sizes."""
    return statistics.Sizes(config.base.width, config.base.depth)


def train_tradeoff(
    config: ConfigDict,
    found: report.SweepData,
    jobs: list[tasks.Job],
    equal: list[tuple[int, int]],
    data: datasets.Held,
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
    data: Any,
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
                data,
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


def print_verdicts(console: rich.console.Console, found: dict[str, Any]) -> None:
    """A row for each hyperparameter, parametrization and axis of size."""
    shown = rich.table.Table(box=None, pad_edge=False)
    for head in ("hyperparameter", "parametrization", "over", "best", "verdict"):
        shown.add_column(head)
    for name, by_key in found.items():
        for key, by_axis in by_key.items():
            for axis in ("depth", "width"):
                if axis not in by_axis:
                    continue
                best = [
                    "none" if x is None else f"{grids.value(name, x):.3g}"
                    for x in by_axis[axis]["optimum"]
                ]
                shown.add_row(name, key, axis, " ".join(best), by_axis[axis]["verdict"])
    console.print(shown, highlight=False)


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


def check_job(job: tasks.Job, data: datasets.Held) -> None:
    """Say what is wrong with batch and model before anything is written."""
    examples = len(data.examples[0])
    if job.batch_size > examples:
        raise UserError(
            f"batch_size {job.batch_size} is more than the {examples} training "
            f"examples of {data.name}; make it smaller"
        )
    hyper = {name: values[0] for name, values in job.grid.items()}
    try:
        nnx.eval_shape(lambda: job.build(data, nnx.Rngs(0, dropout=1), hyper))
    except (TypeError, ValueError) as error:
        raise UserError(f"the model cannot be built: {error}") from None

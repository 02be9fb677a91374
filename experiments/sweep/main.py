"""`mupax sweep`: many hyperparameters at several sizes, as tables and a report."""

import dataclasses
import json
import pathlib
import shlex
from collections.abc import Sequence

import rich.console
from ml_collections import ConfigDict

from mupax import optim
from mupax.zoo.addresses import public

from .. import report
from ..errors import UserError
from ..io import write_durably
from ..run import workdir
from ..run.build import build
from ..run.trackers import open_trackers
from . import engine, executors, export, space
from .results import Population
from .space import SweepConfig
from .tasks import ZooTask

_LABELS = {
    "sp": "Standard (SP)",
    "half_alpha": "α = ½, γ = 0",
    "no_depth_scaling": "No depth scaling",
    "ode": "ODE",
    "depth_mup": "Depth-μP",
    "mup": "μP",
    "completep": "CompleteP",
}

# Keys of earlier versions, without effect.
REMOVED = ("sweep.tradeoff",)
# Settings that may change between calls in a run directory. Stored runs are kept.
_FREE = (
    *(f"sweep.{name}" for name in ("axes", "choices", "parametrizations", "seeds")),
    *("sweep.depths", "sweep.widths", *REMOVED),
)


def run(
    config: ConfigDict,
    folder: str | pathlib.Path,
    command: Sequence[str],
    *,
    executor: str = "here",
    workers: int = 2,
    address: str | None = None,
    stop_diverged: bool = False,
) -> report.SweepData:
    """Run a sweep; the same command resumes a sweep that was killed.

    Args:
      config: a sweep's config, or a training run's, whose learning rate is swept.
      folder: the run directory.
      command: the command line, for the report.
      executor: where tasks run; see `executors.opened`.
      workers: number of tasks that run at once.
      address: address of a Dask scheduler.
      stop_diverged: as in `engine.Limits`.

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
    settings = parsed.settings() | {"contents": check_data(tasks, console)}
    with workdir.claim(directory, settings, free=_FREE):
        populations = train(
            tasks, directory, limits, console, executor, workers, address
        )
        data = report_data(parsed, populations, command)
        write_tables(directory, data)
        page = report.write_report(data, directory)[0]
        track(parsed, data, directory)
    report.print_verdicts(data, console)
    console.print(
        f"{data.runs} runs: {directory}/results.csv, {directory}/sweep.json\n"
        f"Report: {page}",
        highlight=False,
        soft_wrap=True,
    )
    return data


def check_data(tasks: Sequence[ZooTask], console: rich.console.Console) -> str:
    """Open the dataset of a sweep, and check batch and model of each choice against it.

    Returns its fingerprint.
    """
    with console.status(f"reading {public(tasks[0].config.dataset)}"):
        dataset = tasks[0].dataset()
        fingerprint = dataset.fingerprint
    for task in {str(task.choices): task for task in reversed(tasks)}.values():
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
            tasks, None, directory / "cells", limits, pool, console=console
        )


def report_data(
    config: SweepConfig, populations: list[Population], command: Sequence[str]
) -> report.SweepData:
    base = config.base
    return report.SweepData(
        populations=populations,
        base=config.sizes,
        labels={
            key: _LABELS.get(
                key, optim.parametrization(value.name, **value.options).name
            )
            for key, value in config.parametrizations.items()
        },
        featured=config.featured,
        steps=base.steps,
        settings={"config": config.settings(), "machine": report.machine()},
        subject=f"{base.model.name} on {public(base.dataset)}, {base.optimizer.name}",
        command=shlex.join(map(public, command)),
        target=config.target_sizes,
    )


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

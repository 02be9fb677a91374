"""`mupax sweep`: many hyperparameters at several sizes, as tables and a report."""

import dataclasses
import pathlib
from collections.abc import Sequence

import rich.console
from ml_collections import ConfigDict

from mupax.zoo.addresses import public

from .. import report
from ..errors import UserError
from ..run import workdir
from ..run.build import build
from . import cost, engine, space
from .at_base import as_stored, base_tasks, tune
from .space import SweepConfig
from .store import Store
from .training import STORED, Executor, train

# Settings that may change between calls in a run directory. Stored runs are kept.
_FREE = (
    "sweep.axes",
    "sweep.base_axes",
    "sweep.choices",
    "sweep.depths",
    "sweep.parametrizations",
    "sweep.seeds",
    "sweep.widths",
)


def run(
    config: ConfigDict,
    folder: str | pathlib.Path,
    command: Sequence[str] = (),
    *,
    executor: Executor | None = None,
    dry_run: bool = False,
) -> report.SweepData | None:
    """Run a sweep; the same command resumes a sweep that was killed.

    Args:
      config: a sweep's config, or a training run's, whose learning rate is swept.
      folder: the run directory.
      command: the command line, for the report.
      executor: any `concurrent.futures.Executor`, whose workers see the folder; None
        for this process.
      dry_run: print what the sweep would cost, and return None.

    Raises:
      UserError: bad input, in one sentence; existing files are kept.
    """
    console = rich.console.Console()
    space.check_untracked(config)
    parsed = space.parse_sweep(config)
    directory = pathlib.Path(folder)
    workdir.check(directory, parsed.settings(), free=_FREE)
    contents = check_data(parsed, console, directory)
    settings = parsed.settings() | {"contents": contents}
    if dry_run:
        tasks = base_tasks(parsed) + space.tasks(parsed)
        cost.show(tasks, tasks[0].dataset(), console)
        return None
    with workdir.claim(directory, settings, free=_FREE):
        data = tune_and_train(parsed, directory, command, console, executor)[1]
    report.print_verdicts(data, console)
    console.print(
        f"{data.runs} runs: {directory}/results.csv, {directory}/sweep.json\n"
        f"Report: {directory}/report.html",
        highlight=False,
        soft_wrap=True,
    )
    return data


def tune_and_train(
    config: SweepConfig,
    directory: pathlib.Path,
    command: Sequence[str],
    console: rich.console.Console,
    executor: Executor | None = None,
) -> tuple[SweepConfig, report.SweepData]:
    """The sweep with its factors tuned at the base, and its trained runs."""
    tuning = sum(task.runs for task in base_tasks(config))
    config = tune(config, directory, console, executor)
    data = train(
        space.tasks(config),
        dataclasses.replace(space.described(config, command), tuning_runs=tuning),
        config.limits,
        folder=directory,
        executor=executor,
        console=console,
    )
    return config, data


def check_data(
    config: SweepConfig, console: rich.console.Console, directory: pathlib.Path
) -> str:
    """Open the dataset of a sweep; check batch and model of each choice that trains.

    Returns its fingerprint.
    """
    config = as_stored(config, directory)
    tasks = space.tasks(config)
    with console.status(f"reading {public(tasks[0].config.dataset)}"):
        dataset = tasks[0].dataset()
        fingerprint = dataset.fingerprint
    store = Store(directory / STORED)
    # Without the tuning of the base it is not known which runs are stored.
    trained = {
        str(task.choices): task
        for task in reversed(tasks)
        if config.base_axes or engine.missing(task, store)
    }
    for task in trained.values():
        dataset.check_batch(task.batch_size)
        if task.batch_size % task.config.accumulate:
            raise UserError(
                f"batch_size {task.batch_size} does not divide into "
                f"{task.config.accumulate} parts; change batch_size or accumulate"
            )
        build(task.config, dataset)
    return fingerprint

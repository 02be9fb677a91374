"""A sweep as both front doors describe it, and one function that carries it out.

`mupax.sweep` describes a user's functions (`api`), `mupax sweep` a config (`space`).
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import rich.console

from .. import report
from ..errors import UserError, reason
from ..io import write_durably
from . import engine, executors
from .results import Population, Sizes
from .tasks import Task

STORED = "runs"  # folder of the finished runs, in the folder of the sweep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """A sweep before it trains.

    Attributes:
      tasks: all runs, a task for each shape, parametrization and choice.
      limits: of memory, and of runs at once.
      base: sizes of the model where the axes cross.
      labels: names of the parametrizations in reports, by key, in reading order.
      steps: of a run at the base.
      featured: key of the parametrization that the report is about.
      subject: what is trained, in a few words.
      settings: what a report shows of the settings, as nested plain data.
      command: the command line that runs the sweep again, or "".
      target: sizes where the optimum is predicted.
    """

    tasks: Sequence[Task]
    limits: engine.Limits
    base: Sizes
    steps: int
    labels: Mapping[str, str]
    featured: str
    subject: str
    settings: Mapping[str, Any]
    command: str = ""
    target: Sizes | None = None


def train(
    sweep: Description,
    data: Any = None,
    folder: pathlib.Path | None = None,
    executor: executors.Executor | None = None,
    *,
    ahead: bool = True,
    console: rich.console.Console | None = None,
) -> report.SweepData:
    """Train the runs that a folder lacks, and write its tables and report.

    Args:
      sweep: the description.
      data: as in `engine.prepare`.
      folder: holds the finished runs, results.csv, sweep.json and report.html; None
        for nowhere.
      executor: where tasks train; None for this process.
      ahead: as in `executors.run_all`.
      console: shows the progress; None for none.

    Raises:
      UserError: bad input, a task that failed, a loss that is negative, or a file that
        cannot be written. Finished runs are kept.
    """
    populations = executors.run_all(
        sweep.tasks,
        data,
        None if folder is None else folder / STORED,
        sweep.limits,
        executor,
        ahead=ahead,
        console=console,
    )
    _check_losses(populations)
    swept = report.SweepData(
        populations=populations,
        base=sweep.base,
        labels=sweep.labels,
        featured=sweep.featured,
        steps=sweep.steps,
        settings={**sweep.settings, "machine": report.machine()},
        subject=sweep.subject,
        command=sweep.command,
        target=sweep.target,
    )
    if folder is not None:
        with writing(folder):
            write_durably(folder / "results.csv", swept.table)
            write_durably(folder / "sweep.json", json.dumps(swept.verdicts, indent=1))
            report.write_report(swept, folder)
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

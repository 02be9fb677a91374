"""Experiment trackers: TensorBoard, and Weights & Biases and MLflow, which are extras.

A resumed run continues its runs there, whose ids are kept in the run directory.
"""

import contextlib
import math
import pathlib
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from absl import logging
from flax.traverse_util import flatten_dict

from .. import io
from ..errors import UserError

_Calls = tuple[Callable[[int, dict[str, float]], Any], Callable[[], Any]]


class Tracker:
    """Logs in a thread; one that fails is left out, with a warning."""

    def __init__(self, name: str, calls: _Calls):
        """`calls` log the metrics of a step, and end the run."""
        self._name, (self._log, self._end) = name, calls
        self._failed, self._thread = False, ThreadPoolExecutor(1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log the metrics of a step."""
        self._thread.submit(self._try, self._log, step, values)

    def close(self) -> None:
        """End the run."""
        self._thread.submit(self._try, self._end)
        self._thread.shutdown()

    def _try(self, call: Callable[..., Any], *values: Any) -> None:
        try:
            if not self._failed:
                call(*values)
        except Exception as error:  # of a server, the network, a disk or the client
            self._failed = True
            after = "logs nothing more of this run; the run directory has all results."
            logging.warning("%s failed (%s) and %s", self._name, error, after)
            with contextlib.suppress(Exception):
                self._end()


def open_trackers(
    folder: pathlib.Path, settings: dict[str, Any], **wanted: Any
) -> tuple[Tracker, ...]:
    """Open the trackers of a run.

    Args:
      folder: of the run.
      settings: JSON-ready settings of the run.
      **wanted: `tensorboard`, a bool; `wandb`, a project; `mlflow`, an experiment.

    Raises:
      UserError: one does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, Callable[..., _Calls]]
    known = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
    try:
        return tuple(
            Tracker(name, known[name](where, folder, settings))
            for name, where in wanted.items()
            if where
        )
    except Exception as error:  # of a server, the network or the client
        raise UserError(
            f"a tracker cannot be started: {error}; for Weights & Biases run `wandb "
            "login` or set WANDB_MODE=offline, for MLflow check MLFLOW_TRACKING_URI"
        ) from None


def _tensorboard(_: bool, folder: pathlib.Path, settings: dict[str, Any]) -> _Calls:
    # Not a SummaryWriter, which blocks once its disk is full.
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter
    from tensorboardX.summary import scalar

    (folder / "tensorboard").mkdir(exist_ok=True)
    name = f"tensorboard/events.out.tfevents.{time.time():.0f}"
    file = RecordWriter(str(folder / name))

    def write(**content: Any) -> None:
        file.write(Event(wall_time=time.time(), **content).SerializeToString())

    def log(step: int, values: dict[str, float]) -> None:
        for name, x in values.items():
            if math.isfinite(x):  # TensorBoard shows no others
                write(step=step, summary=scalar(name, x))
        file.flush()

    write(file_version="brain.Event:2")
    return log, file.close


def _wandb(project: str, folder: pathlib.Path, settings: dict[str, Any]) -> _Calls:
    import wandb

    known = folder / "wandb.id"
    run = wandb.init(
        project=project,
        dir=str(folder),
        name=folder.name,
        config=settings,
        id=known.read_text() if known.exists() else secrets.token_hex(4),
        resume="allow",
        # Not the command line, which may hold the secrets of addresses.
        settings={"x_disable_meta": True},
    )
    io.write_durably(known, run.id)
    return lambda step, values: run.log(values, step=step), run.finish


def _mlflow(experiment: str, folder: pathlib.Path, settings: dict[str, Any]) -> _Calls:
    import mlflow

    client, known = mlflow.MlflowClient(), folder / "mlflow.id"
    if known.exists():
        run = known.read_text()
        client.update_run(run, status="RUNNING")
    else:
        at = mlflow.set_experiment(experiment).experiment_id
        run = client.create_run(at, run_name=folder.name).info.run_id
        flat = flatten_dict(settings, sep=".").items()
        # MLflow refuses other characters, e.g. those of the patterns of `modules`.
        names = {re.sub(r"[^\w\-. /:]", "_", k, flags=re.ASCII): v for k, v in flat}
        mlflow.log_params(names, run_id=run)
        io.write_durably(known, run)
    return (
        lambda step, values: mlflow.log_metrics(values, step, run_id=run),
        lambda: client.set_terminated(run),
    )

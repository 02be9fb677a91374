"""Experiment trackers: TensorBoard, Weights & Biases and MLflow.

A tracker gets the metrics of a run while it trains (`Tracker.write`), or all runs of a
sweep at its end (`Tracker.write_sweep`). The ids of the runs of Weights & Biases and
MLflow are kept in the run directory, so that a resumed run continues them.
"""

import concurrent.futures
import contextlib
import json
import math
import pathlib
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from absl import logging
from flax.traverse_util import flatten_dict

from mupax.zoo.addresses import public

from .. import io
from ..errors import UserError
from .records import Sink

NAME = "trackers.json"
# TensorBoard's page of hyperparameters reads one directory per run.
_MOST_EVENTS = 2_000
_FLUSH_SECONDS = 30.0  # between two writes of TensorBoard's events to the disk


class Finished(NamedTuple):
    """A run of a sweep.

    Attributes:
      name: unique within the sweep, e.g. "depth_mup-w64-d8/3".
      settings: its hyperparameters, size, parametrization and seed.
      loss: its final loss; None: it diverged.
      curve: (step, training loss); only finite losses.
    """

    name: str
    settings: Mapping[str, Any]
    loss: float | None
    curve: Sequence[tuple[int, float]]


Runs = Iterable[Finished]
Verdicts = Mapping[str, Any]


class Tracker(Sink, Protocol):
    """Receives the metrics of a run, or a sweep."""

    def write_sweep(self, runs: Runs, verdicts: Verdicts, report: str) -> None:
        """Write a finished sweep.

        `verdicts` are the contents of `sweep.json`; `report` is the path of a page.
        """


def open_trackers(
    folder: pathlib.Path,
    settings: dict[str, Any],
    *,
    tensorboard: bool = False,
    wandb: str | None = None,
    mlflow: str | None = None,
) -> tuple[Tracker, ...]:
    """Open the trackers of a run or a sweep.

    Args:
      folder: the run directory.
      settings: shown as the run's config, with public addresses.
      tensorboard: write event files to `folder/tensorboard`.
      wandb: a project of Weights & Biases; None: off.
      mlflow: an experiment of MLflow, at MLFLOW_TRACKING_URI; None: off.

    Raises:
      UserError: a tracker does not start.
    """
    trackers: list[Tracker] = []
    if tensorboard:
        trackers.append(InBackground(TensorBoard(folder / "tensorboard")))
    if wandb:
        trackers.append(InBackground(WandB(wandb, folder, settings)))
    if mlflow:
        trackers.append(InBackground(MLflow(mlflow, folder, settings)))
    return tuple(trackers)


# ----- Ids in the run directory.


def read_id(folder: pathlib.Path, tracker: str) -> str | None:
    """The tracker's id of the run in a directory; None if it has none yet."""
    try:
        value = io.read_sealed(folder / NAME).get(tracker)
    except FileNotFoundError:
        return None
    except io.Damaged as error:
        logging.warning(
            "%s is damaged (%s); the run gets a new id.", folder / NAME, error
        )
        return None
    return value if isinstance(value, str) else None


def keep_id(folder: pathlib.Path, tracker: str, value: str) -> None:
    """Store the tracker's id of the run in a directory."""
    try:
        ids = io.read_sealed(folder / NAME)
    except (FileNotFoundError, io.Damaged):
        ids = {}
    folder.mkdir(parents=True, exist_ok=True)
    io.write_sealed(folder / NAME, {**ids, tracker: value})


# ----- Trackers.


class InBackground:
    """Sends the metrics of a run to a tracker from a thread.

    Training does not wait for it. A tracker that fails, e.g. because its server is
    gone or its disk is full, is left out from then on, with a warning.
    """

    def __init__(self, tracker: Tracker):
        self._tracker = tracker
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._failed = False

    def write(self, step: int, values: dict[str, float]) -> None:
        self._thread.submit(self._try, self._tracker.write, step, values)

    def write_sweep(self, runs: Runs, verdicts: Verdicts, report: str) -> None:
        self._tracker.write_sweep(runs, verdicts, report)

    def close(self) -> None:
        self._thread.submit(self._try, self._tracker.close)
        self._thread.shutdown()

    def _try(self, write: Callable[..., None], *values: Any) -> None:
        if self._failed:
            return
        try:
            write(*values)
        except Exception as error:  # of a server, the network, a disk or the client
            self._failed = True
            logging.warning(
                "%s failed (%s) and gets no more metrics of this run; metrics.jsonl "
                "has all of them.",
                type(self._tracker).__name__,
                error,
            )


class TensorBoard:
    """Writes event files for TensorBoard: those of a sweep's run in its own directory.

    It skips the runs of a sweep that it has written before.
    """

    def __init__(self, folder: pathlib.Path):
        # Imported here and below: the base install lacks it.
        import tensorboardX  # noqa: F401

        self._folder = folder
        self._events: _Events | None = None
        self._flushed = 0.0

    def write(self, step: int, values: dict[str, float]) -> None:
        if self._events is None:
            self._events = _Events(self._folder)
        try:
            for name, value in values.items():
                self._events.number(name, value, step)
            now = time.time()
            if now - self._flushed > _FLUSH_SECONDS:
                self._events.flush()
                self._flushed = now
        except OSError:
            with contextlib.suppress(OSError):
                self._events.close()
            raise

    def write_sweep(self, runs: Runs, verdicts: Verdicts, report: str) -> None:
        del verdicts, report
        runs = list(runs)
        if len(runs) > _MOST_EVENTS:
            logging.warning(
                "The sweep has %d runs; TensorBoard shows the hyperparameters of at "
                "most %d. See results.csv.",
                len(runs),
                _MOST_EVENTS,
            )
            return
        from tensorboardX.summary import hparams

        for run in runs:
            folder = self._folder / run.name
            if folder.exists():
                continue
            scalars = bool | int | float | str
            plain = {
                key: value if isinstance(value, scalars) else str(value)
                for key, value in run.settings.items()
            }
            with contextlib.closing(_Events(folder)) as events:
                for summary in hparams(plain, {"final_loss": 0.0}):
                    events.add(summary)
                for step, loss in run.curve:
                    events.number("loss", loss, step)
                if run.loss is not None:
                    events.number("final_loss", run.loss, 0)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


class _Events:
    """An event file of TensorBoard.

    Not a `SummaryWriter`: it writes from a thread, and if that thread fails, e.g. of a
    full disk, it blocks after ten more numbers.
    """

    def __init__(self, folder: pathlib.Path):
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        self._file = RecordWriter(str(folder / name))
        self._event = Event
        self._write(file_version="brain.Event:2")
        self.flush, self.close = self._file.flush, self._file.close

    def add(self, summary: Any, step: int = 0) -> None:
        self._write(summary=summary, step=step)

    def number(self, name: str, value: float, step: int) -> None:
        """Write a number; TensorBoard cannot show those that are not finite."""
        from tensorboardX.summary import scalar

        if math.isfinite(value):
            self.add(scalar(name, value), step)

    def _write(self, **content: Any) -> None:
        event = self._event(wall_time=time.time(), **content)
        self._file.write(event.SerializeToString())


class WandB:
    """Writes to a run of Weights & Biases, named after the run directory.

    Of a sweep, it gets a table of all runs, the verdicts and the report.

    Raises:
      UserError: Weights & Biases does not start.
    """

    def __init__(self, project: str, folder: pathlib.Path, settings: dict[str, Any]):
        import wandb

        self._wandb: Any = wandb
        known_id = read_id(folder, "wandb")
        run_id = known_id or secrets.token_hex(4)
        # It would upload the command line, with the secrets of addresses.
        hidden = {"x_disable_meta": True} if public(sys.argv) != sys.argv else {}
        try:
            self._run = wandb.init(
                project=project,
                dir=str(folder),
                name=folder.name,
                config=settings,
                id=run_id,
                resume="allow",
                settings=hidden,
            )
        except Exception as error:  # wandb's exceptions have no common base class
            raise UserError(
                f"Weights & Biases cannot be started: {error}; run `wandb login`, or "
                "set WANDB_MODE=offline"
            ) from None
        if known_id is None:
            keep_id(folder, "wandb", run_id)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def write_sweep(self, runs: Runs, verdicts: Verdicts, report: str) -> None:
        rows = [{**run.settings, "loss": run.loss} for run in runs]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = self._wandb.Table(
            columns=columns, data=[[row.get(name) for name in columns] for row in rows]
        )
        self._run.log({"runs": table, "report": self._wandb.Html(report)})
        self._run.summary.update({"verdicts": _plain(verdicts)})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Writes to a run of MLflow, at MLFLOW_TRACKING_URI, named after the run directory.

    The experiment is created if it does not exist. Of a sweep, it gets a nested run for
    each run that it does not have yet, the verdicts and the report.

    Raises:
      UserError: MLflow does not start.
    """

    def __init__(self, experiment: str, folder: pathlib.Path, settings: dict[str, Any]):
        import mlflow

        try:
            self._client: Any = mlflow.MlflowClient()
            existing = self._client.get_experiment_by_name(experiment)
            self._experiment = (
                existing.experiment_id
                if existing
                else self._client.create_experiment(experiment)
            )
            if known_id := read_id(folder, "mlflow"):
                self._id = known_id
                self._client.update_run(known_id, status="RUNNING")
                return
            run = self._client.create_run(self._experiment, run_name=folder.name)
            self._id = run.info.run_id
            self._log(self._id, params=flatten_dict(settings, sep="."))
            keep_id(folder, "mlflow", self._id)
        except Exception as error:  # of a store, a server or the network
            raise UserError(
                f"MLflow cannot be started: {error}; check MLFLOW_TRACKING_URI"
            ) from None

    def _log(
        self,
        run: str,
        *,
        params: Mapping[str, Any] | None = None,
        metrics: Iterable[tuple[str, float, int]] = (),
    ) -> None:
        from mlflow.entities import Metric, Param

        # MLflow's limits: 100 parameters of 6,000 characters, 1,000 metrics in a call.
        kept = [Param(_key(k), str(v)[:6000]) for k, v in (params or {}).items()]
        now = time.time_ns() // 10**6
        logged = [Metric(_key(k), value, now, step) for k, value, step in metrics]
        for at in range(0, len(kept), 100):
            self._client.log_batch(run, params=kept[at : at + 100])
        for at in range(0, len(logged), 500):
            self._client.log_batch(run, metrics=logged[at : at + 500])

    def write(self, step: int, values: dict[str, float]) -> None:
        self._log(self._id, metrics=[(name, x, step) for name, x in values.items()])

    def write_sweep(self, runs: Runs, verdicts: Verdicts, report: str) -> None:
        written = self._children()
        for run in runs:
            if run.name in written:
                continue
            tags = {"mlflow.parentRunId": self._id}
            child = self._client.create_run(
                self._experiment, run_name=run.name, tags=tags
            ).info.run_id
            metrics = [("loss", loss, step) for step, loss in run.curve]
            if run.loss is not None:
                metrics.append(("final_loss", run.loss, 0))
            self._log(child, params=run.settings, metrics=metrics)
            diverged = run.loss is None
            self._client.set_terminated(child, "FAILED" if diverged else "FINISHED")
        self._client.log_text(
            self._id, json.dumps(_plain(verdicts), indent=1), "sweep.json"
        )
        self._client.log_artifact(self._id, report)

    def _children(self) -> set[str]:
        """The names of the finished runs that were written for this sweep."""
        query = f"tags.mlflow.parentRunId = '{self._id}'"
        names: set[str] = set()
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment], query, max_results=1000, page_token=token
            )
            names |= {r.info.run_name for r in page if r.info.status != "RUNNING"}
            token = page.token
            if not token:
                return names

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _key(name: str) -> str:
    """A name with only characters that MLflow accepts."""
    return re.sub(r"[^A-Za-z0-9_\-. /:]", "_", name)

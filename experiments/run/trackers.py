"""Experiment trackers: TensorBoard, Weights & Biases and MLflow, which are extras.

A tracker logs the metrics of a run while it trains, and all runs of a sweep at its end.
The ids of runs are kept in the run directory, so that a resumed run continues them.
"""

import contextlib
import json
import math
import pathlib
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from absl import logging
from flax.traverse_util import flatten_dict

from mupax.zoo.addresses import public

from .. import io
from ..errors import UserError, import_extra

_MOST_RUNS = 2_000  # that TensorBoard's page of hyperparameters reads


class Finished(NamedTuple):
    """A run of a sweep."""

    name: str  # unique within the sweep, e.g. "depth_mup-w64-d8/3"
    settings: Mapping[str, Any]  # hyperparameters, size, parametrization and seed
    loss: float | None  # at the end; None: it diverged
    curve: Sequence[tuple[int, float]]  # (step, training loss); finite losses


Runs = Sequence[Finished]


class Client(Protocol):
    """What a tracker does; `report` is the path of a page."""

    def log(self, step: int, values: dict[str, float]) -> None: ...
    def sweep(self, runs: Runs, verdicts: dict[str, Any], report: str) -> None: ...
    def end(self) -> None: ...


class Tracker:
    """Calls a client in a thread; one that fails is left out, with a warning."""

    def __init__(self, client: Client):
        self._client, self._failed = client, False
        self._thread = ThreadPoolExecutor(1)
        self.write_sweep = client.sweep

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log the metrics of a step."""
        self._thread.submit(self._try, self._client.log, step, values)

    def close(self) -> None:
        """End the run."""
        self._thread.submit(self._try, self._client.end)
        self._thread.shutdown()

    def _try(self, call: Callable[..., None], *values: Any) -> None:
        try:
            if not self._failed:
                call(*values)
        except Exception as error:  # of a server, the network, a disk or the client
            self._failed = True
            logging.warning(
                "%s failed (%s) and gets no more metrics of this run; metrics.jsonl "
                "has all of them.",
                type(self._client).__name__,
                error,
            )


def open_trackers(
    folder: pathlib.Path,
    settings: dict[str, Any],
    *,
    tensorboard: bool = False,
    wandb: str | None = None,
    mlflow: str | None = None,
) -> tuple[Tracker, ...]:
    """Open TensorBoard in `folder`, a project of W&B and an experiment of MLflow.

    Raises:
      UserError: one does not start.
    """
    clients: list[Client] = [TensorBoard(folder / "tensorboard")] if tensorboard else []
    try:
        if wandb:
            clients.append(WandB(wandb, folder, settings))
        if mlflow:
            clients.append(MLflow(mlflow, folder, settings))
    except UserError:  # a package is missing
        raise
    except Exception as error:  # of a server, the network or the client
        raise UserError(
            f"a tracker cannot be started: {error}; for Weights & Biases run `wandb "
            "login` or set WANDB_MODE=offline, for MLflow check MLFLOW_TRACKING_URI"
        ) from None
    return tuple(map(Tracker, clients))


class TensorBoard:
    """Event files; of a sweep, each run in a directory of its own."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._file: Any = None

    def log(self, step: int, values: dict[str, float]) -> None:
        self._file = self._file or self._open(self._folder)
        try:
            self._write(self._file, step, values)
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def sweep(self, runs: Runs, verdicts: dict[str, Any], report: str) -> None:
        if len(runs) > _MOST_RUNS:
            text = "TensorBoard shows at most %d runs, not the %d here; see results.csv"
            logging.warning(text, _MOST_RUNS, len(runs))
            return
        for run in (run for run in runs if not (self._folder / run.name).exists()):
            from tensorboardX.summary import hparams

            file = self._open(self._folder / run.name)
            kinds = bool | int | float | str
            settings = run.settings.items()
            plain = {k: v if isinstance(v, kinds) else str(v) for k, v in settings}
            for summary in hparams(plain, {"final_loss": 0.0}):
                self._event(file, summary=summary)
            for step, loss in run.curve:
                self._write(file, step, {"loss": loss})
            last = math.nan if run.loss is None else run.loss
            self._write(file, 0, {"final_loss": last})
            file.close()

    def end(self) -> None:
        if self._file:
            self._file.close()

    def _open(self, folder: pathlib.Path) -> Any:
        # Not a SummaryWriter, which blocks once its disk is full.
        from tensorboardX.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        file = RecordWriter(str(folder / f"events.out.tfevents.{time.time():.0f}"))
        self._event(file, file_version="brain.Event:2")
        return file

    def _event(self, file: Any, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        file.write(Event(wall_time=time.time(), **content).SerializeToString())

    def _write(self, file: Any, step: int, values: dict[str, float]) -> None:
        from tensorboardX.summary import scalar

        for name, x in values.items():
            if math.isfinite(x):  # TensorBoard shows no others
                self._event(file, summary=scalar(name, x), step=step)


class WandB:
    """A run of Weights & Biases; of a sweep, a table of its runs and the report."""

    def __init__(self, project: str, folder: pathlib.Path, settings: dict[str, Any]):
        self._wandb = import_extra("wandb", "wandb", f"--config.wandb={project}")
        run_id = ids(folder).get("wandb") or secrets.token_hex(4)
        # It would upload the command line, with the secrets of addresses.
        hidden = {"x_disable_meta": True} if public(sys.argv) != sys.argv else {}
        self._run = self._wandb.init(
            project=project,
            dir=str(folder),
            name=folder.name,
            config=settings,
            id=run_id,
            resume="allow",
            settings=hidden,
        )
        ids(folder, wandb=run_id)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def sweep(self, runs: Runs, verdicts: dict[str, Any], report: str) -> None:
        rows = [{**run.settings, "loss": run.loss} for run in runs]
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[row.get(name) for name in names] for row in rows]
        table = self._wandb.Table(columns=names, data=cells)
        self._run.log({"runs": table, "report": self._wandb.Html(report)})
        self._run.summary.update({"verdicts": json.loads(_text(verdicts))})

    def end(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow; of a sweep, a nested run for each run, and the report."""

    def __init__(self, experiment: str, folder: pathlib.Path, settings: dict[str, Any]):
        self._mlflow = import_extra("mlflow", "mlflow", f"--config.mlflow={experiment}")
        self._client = self._mlflow.MlflowClient()
        known = self._client.get_experiment_by_name(experiment)
        create = self._client.create_experiment
        self._experiment = known.experiment_id if known else create(experiment)
        self._id = ids(folder).get("mlflow", "")
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._start(folder.name, flatten_dict(settings, sep="."))
            ids(folder, mlflow=self._id)

    def _start(self, name: str, params: Mapping[str, Any], **tags: str) -> str:
        run = self._client.create_run(self._experiment, run_name=name, tags=tags)
        for key, value in params.items():
            # MLflow refuses other characters, and longer values.
            name = re.sub(r"[^\w\-. /:]", "_", key, flags=re.ASCII)
            self._client.log_param(run.info.run_id, name, str(value)[:6000])
        return run.info.run_id

    def log(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step, run_id=self._id)

    def sweep(self, runs: Runs, verdicts: dict[str, Any], report: str) -> None:
        parent = "mlflow.parentRunId"
        query = f"tags.`{parent}` = '{self._id}'"
        children = self._mlflow.search_runs(
            [self._experiment], query, output_format="list"
        )
        written = {r.info.run_name for r in children if r.info.status != "RUNNING"}
        for run in (run for run in runs if run.name not in written):
            child = self._start(run.name, run.settings, **{parent: self._id})
            for step, loss in run.curve:
                self._client.log_metric(child, "loss", loss, step=step)
            if run.loss is not None:
                self._client.log_metric(child, "final_loss", run.loss)
            status = "FAILED" if run.loss is None else "FINISHED"
            self._client.set_terminated(child, status)
        self._client.log_text(self._id, _text(verdicts), "sweep.json")
        self._client.log_artifact(self._id, report)

    def end(self) -> None:
        self._client.set_terminated(self._id)


def ids(folder: pathlib.Path, **new: str) -> dict[str, str]:
    """The ids of a run directory's runs, by tracker, after `new` ones are stored."""
    path = folder / "trackers.json"
    known: dict[str, str] = {}
    try:
        known = json.loads(path.read_text())
    except FileNotFoundError:
        pass
    except ValueError as error:
        logging.warning("%s is damaged (%s); the run gets a new id.", path, error)
    if new:
        folder.mkdir(parents=True, exist_ok=True)
        io.write_durably(path, json.dumps({**known, **new}))
    return {**known, **new}


def _text(verdicts: Mapping[str, Any]) -> str:
    return json.dumps(verdicts, indent=1, default=str)

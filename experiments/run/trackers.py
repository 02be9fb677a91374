"""Experiment trackers: TensorBoard, Weights & Biases and MLflow, which are extras.

A tracker logs the metrics of a run while it trains. The ids of runs are kept in the run
directory, so that a resumed run continues them.
"""

import contextlib
import math
import pathlib
import re
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from absl import logging
from flax.traverse_util import flatten_dict

from mupax.zoo.addresses import public

from .. import io
from ..errors import UserError, import_extra


class Tracker:
    """Logs in a thread; one that fails is left out, with a warning."""

    def __init__(self) -> None:
        self._failed, self._thread = False, ThreadPoolExecutor(1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log the metrics of a step."""
        self._thread.submit(self._try, self._log, step, values)

    def close(self) -> None:
        """End the run."""
        self._thread.submit(self._try, self._end)
        self._thread.shutdown()

    def _log(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _try(self, call: Callable[..., None], *values: Any) -> None:
        try:
            if not self._failed:
                call(*values)
        except Exception as error:  # of a server, the network, a disk or the client
            self._failed = True
            logging.warning(
                "%s failed (%s) and logs nothing more of this run; the run directory "
                "has all results.",
                type(self).__name__,
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
    trackers: list[Tracker] = []
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if tensorboard:
            trackers.append(TensorBoard(folder / "tensorboard"))
        if wandb:
            trackers.append(WandB(wandb, folder, settings))
        if mlflow:
            trackers.append(MLflow(mlflow, folder, settings))
    except UserError:  # a package is missing
        raise
    except Exception as error:  # of a server, the network or the client
        raise UserError(
            f"a tracker cannot be started: {error}; for Weights & Biases run `wandb "
            "login` or set WANDB_MODE=offline, for MLflow check MLFLOW_TRACKING_URI"
        ) from None
    return tuple(trackers)


class TensorBoard(Tracker):
    """An event file of a run's metrics."""

    def __init__(self, folder: pathlib.Path):
        super().__init__()
        self._folder = folder
        self._file: Any = None

    def _log(self, step: int, values: dict[str, float]) -> None:
        # Not a SummaryWriter, which blocks once its disk is full.
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.0f}"
            self._file = RecordWriter(str(self._folder / name))
            self._write(file_version="brain.Event:2")
        try:
            for name, x in values.items():
                if math.isfinite(x):  # TensorBoard shows no others
                    self._write(summary=scalar(name, x), step=step)
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def _write(self, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), **content)
        self._file.write(event.SerializeToString())

    def _end(self) -> None:
        if self._file:
            self._file.close()


class WandB(Tracker):
    """A run of Weights & Biases."""

    def __init__(self, project: str, folder: pathlib.Path, settings: dict[str, Any]):
        super().__init__()
        self._wandb = import_extra("wandb", "wandb", f"--config.wandb={project}")
        known = folder / "wandb.id"
        run_id = known.read_text() if known.exists() else secrets.token_hex(4)
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
        io.write_durably(known, run_id)

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def _end(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow."""

    def __init__(self, experiment: str, folder: pathlib.Path, settings: dict[str, Any]):
        super().__init__()
        self._mlflow = import_extra("mlflow", "mlflow", f"--config.mlflow={experiment}")
        self._client, known = self._mlflow.MlflowClient(), folder / "mlflow.id"
        if known.exists():
            self._id = known.read_text()
            self._client.update_run(self._id, status="RUNNING")
            return
        at = self._mlflow.set_experiment(experiment).experiment_id
        run = self._client.create_run(at, run_name=folder.name)
        self._id = run.info.run_id
        for key, value in flatten_dict(settings, sep=".").items():
            # MLflow refuses other characters, and longer values.
            name = re.sub(r"[^\w\-. /:]", "_", key, flags=re.ASCII)
            self._client.log_param(self._id, name, str(value)[:6000])
        io.write_durably(known, self._id)

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step, run_id=self._id)

    def _end(self) -> None:
        self._client.set_terminated(self._id)

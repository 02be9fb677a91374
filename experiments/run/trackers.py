"""Experiment trackers: TensorBoard, Weights & Biases and MLflow, which are extras.

A tracker logs the metrics of a run while it trains. The ids of runs are kept in the run
directory, so that a resumed run continues them.
"""

import contextlib
import functools
import math
import pathlib
import re
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from absl import logging
from flax.traverse_util import flatten_dict

from mupax.zoo.addresses import public

from .. import io
from ..errors import UserError, import_extra


class _Calls(NamedTuple):
    """What a tracker does with the metrics of a step, and at the end of a run."""

    log: Callable[[int, dict[str, float]], Any]
    end: Callable[[], Any]


class Tracker:
    """Logs in a thread; one that fails is left out, with a warning."""

    def __init__(self, name: str, calls: _Calls):
        self._name, self._calls = name, calls
        self._failed, self._thread = False, ThreadPoolExecutor(1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log the metrics of a step."""
        self._thread.submit(self._try, self._calls.log, step, values)

    def close(self) -> None:
        """End the run."""
        self._thread.submit(self._try, self._calls.end)
        self._thread.shutdown()

    def _try(self, call: Callable[..., Any], *values: Any) -> None:
        try:
            if not self._failed:
                call(*values)
        except Exception as error:  # of a server, the network, a disk or the client
            self._failed = True
            logging.warning(
                "%s failed (%s) and logs nothing more of this run; the run directory "
                "has all results.",
                self._name,
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
    trackers = []
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if tensorboard:
            trackers.append(Tracker("TensorBoard", _tensorboard(folder)))
        if wandb:
            trackers.append(Tracker("WandB", _wandb(wandb, folder, settings)))
        if mlflow:
            trackers.append(Tracker("MLflow", _mlflow(mlflow, folder, settings)))
    except UserError:  # a package is missing
        raise
    except Exception as error:  # of a server, the network or the client
        raise UserError(
            f"a tracker cannot be started: {error}; for Weights & Biases run `wandb "
            "login` or set WANDB_MODE=offline, for MLflow check MLFLOW_TRACKING_URI"
        ) from None
    return tuple(trackers)


def _tensorboard(folder: pathlib.Path) -> _Calls:
    # Not a SummaryWriter, which blocks once its disk is full.
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter
    from tensorboardX.summary import scalar

    @functools.cache
    def file() -> Any:
        """The event file, opened by the first line of a run."""
        place = folder / "tensorboard"
        place.mkdir(parents=True, exist_ok=True)
        opened = RecordWriter(str(place / f"events.out.tfevents.{time.time():.0f}"))
        opened.write(event(file_version="brain.Event:2"))
        return opened

    def event(**content: Any) -> bytes:
        return Event(wall_time=time.time(), **content).SerializeToString()

    def log(step: int, values: dict[str, float]) -> None:
        try:
            for name, x in values.items():
                if math.isfinite(x):  # TensorBoard shows no others
                    file().write(event(summary=scalar(name, x), step=step))
            file().flush()
        except OSError:
            with contextlib.suppress(OSError):
                file().close()
            raise

    def end() -> None:
        if file.cache_info().currsize:
            file().close()

    return _Calls(log, end)


def _wandb(project: str, folder: pathlib.Path, settings: dict[str, Any]) -> _Calls:
    client = import_extra("wandb", "wandb", f"--config.wandb={project}")
    known = folder / "wandb.id"
    run_id = known.read_text() if known.exists() else secrets.token_hex(4)
    # It would upload the command line, with the secrets of addresses.
    hidden = {"x_disable_meta": True} if public(sys.argv) != sys.argv else {}
    run = client.init(
        project=project,
        dir=str(folder),
        name=folder.name,
        config=settings,
        id=run_id,
        resume="allow",
        settings=hidden,
    )
    io.write_durably(known, run_id)
    return _Calls(lambda step, values: run.log(values, step=step), run.finish)


def _mlflow(experiment: str, folder: pathlib.Path, settings: dict[str, Any]) -> _Calls:
    package = import_extra("mlflow", "mlflow", f"--config.mlflow={experiment}")
    client, known = package.MlflowClient(), folder / "mlflow.id"
    if known.exists():
        run = known.read_text()
        client.update_run(run, status="RUNNING")
    else:
        at = package.set_experiment(experiment).experiment_id
        run = client.create_run(at, run_name=folder.name).info.run_id
        for key, value in flatten_dict(settings, sep=".").items():
            # MLflow refuses other characters, and longer values.
            name = re.sub(r"[^\w\-. /:]", "_", key, flags=re.ASCII)
            client.log_param(run, name, str(value)[:6000])
        io.write_durably(known, run)
    return _Calls(
        lambda step, values: package.log_metrics(values, step, run_id=run),
        lambda: client.set_terminated(run),
    )

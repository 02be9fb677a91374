"""Trackers get the metrics of runs, and a resumed run continues its own."""

import errno
import math
import sys
import types

import pytest

from mupax.experiments.cli import flags
from mupax.experiments.errors import UserError
from mupax.experiments.run.trackers import open_trackers
from mupax.experiments.sweep import command


class FakeRun:
    """A run of the stand-in for wandb, which notes what it is given."""

    def __init__(self, given):
        self.given, self.logged, self.id = given, [], given["id"]

    def log(self, values, step=None):
        self.logged.append((step, values))

    def finish(self):
        self.logged.append("finished")


@pytest.fixture
def fake_wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.runs = []

    def init(**given):
        module.runs.append(FakeRun(given))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_resumed_run_continues_its_run_of_wandb(fake_wandb, tmp_path):
    for _ in range(2):
        (tracker,) = open_trackers(tmp_path, {"seed": 0}, wandb="project")
        tracker.write(3, {"loss": 1.0})
        tracker.close()
    first, second = fake_wandb.runs
    assert first.given["id"] == second.given["id"]
    assert first.given["resume"] == "allow"
    assert first.given["name"] == tmp_path.name
    # The command line, which may hold secrets, is not uploaded.
    assert first.given["settings"] == {"x_disable_meta": True}
    assert first.logged == [(3, {"loss": 1.0}), "finished"]
    (other,) = open_trackers(tmp_path / "other", {}, wandb="project")
    assert fake_wandb.runs[2].given["id"] != first.given["id"]
    other.close()


def test_a_tracker_that_fails_is_left_out_and_does_not_end_the_run(
    fake_wandb, tmp_path, monkeypatch, caplog
):
    steps = []

    def log(self, values, step=None):
        steps.append(step)
        if step == 6:
            raise ConnectionError("the server is gone")

    monkeypatch.setattr(FakeRun, "log", log)
    (tracker,) = open_trackers(tmp_path, {"seed": 0}, wandb="project")
    for step in (3, 6, 9):
        tracker.write(step, {"loss": 1.0})
    tracker.close()
    assert steps == [3, 6]
    assert caplog.text.count("wandb failed (the server is gone)") == 1


def test_a_tracker_that_does_not_start_is_one_sentence(fake_wandb, tmp_path):
    def init(**given):
        raise RuntimeError("no key")

    fake_wandb.init = init
    with pytest.raises(UserError, match="a tracker cannot be started: no key"):
        open_trackers(tmp_path, {}, wandb="project")
    assert not (tmp_path / "wandb.id").exists()


def events(folder):
    """The scalars in the event files of a directory, by tag."""
    from tensorboardX.proto.event_pb2 import Event

    by_tag = {}
    for path in folder.glob("events.*"):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            for value in event.summary.value:
                number = value.simple_value
                by_tag.setdefault(value.tag, []).append((event.step, number))
    return by_tag


def test_tensorboard_is_left_out_when_its_disk_is_full(tmp_path, monkeypatch, caplog):
    """Training goes on, however many numbers follow."""
    from tensorboardX.record_writer import RecordWriter

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tracker,) = open_trackers(tmp_path, {}, tensorboard=True)
    monkeypatch.setattr(RecordWriter, "flush", flush)
    for step in range(100):
        tracker.write(step, {"loss": 1.0})
    tracker.close()
    assert caplog.text.count("tensorboard failed ([Errno 28] No space left") == 1


def test_tensorboard_gets_the_metrics_of_a_run(tmp_path):
    (tracker,) = open_trackers(tmp_path, {}, tensorboard=True)
    for step, loss in enumerate([2.0, math.inf, 1.0]):
        tracker.write(step, {"loss": loss, "parameter_norm/hidden": 4.0})
    tracker.close()
    assert events(tmp_path / "tensorboard") == {
        "loss": [(0, 2.0), (2, 1.0)],
        "parameter_norm/hidden": [(0, 4.0), (1, 4.0), (2, 4.0)],
    }


@pytest.mark.parametrize("key", ["wandb", "mlflow"])
def test_sweeps_refuse_trackers(key, tmp_path):
    words = ["--config=mlp_sweep", f"--config.{key}=x"]
    config = flags.parse(["sweep", *words]).config
    said = f"^{key} logs trainings.* leave {key} out$"
    with pytest.raises(UserError, match=said):
        command.run(config, tmp_path, [])
    assert not list(tmp_path.iterdir())


# ----- With the packages themselves.


@pytest.mark.long
def test_wandb_offline_continues_a_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (1, 2):
        (tracker,) = open_trackers(tmp_path, {"seed": 0}, wandb="project")
        tracker.write(step, {"loss": 1.0})
        tracker.close()
    kept = (tmp_path / "wandb.id").read_text()
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert folders
    assert all(f"-{kept}" in folder.name for folder in folders)


@pytest.mark.long
def test_mlflow_continues_a_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is an extra")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    for step in (1, 2):
        settings = {"modules": {"^embed": {"init_scale": 8.0}}}
        (tracker,) = open_trackers(tmp_path, settings, mlflow="mine")
        tracker.write(step, {"loss": 1.0 / step})
        tracker.close()
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == tmp_path.name
    assert run.data.params == {"modules._embed.init_scale": "8.0"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5)]
    assert all(m.timestamp > 1_700_000_000_000 for m in history)  # ms since 1970

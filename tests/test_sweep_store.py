"""Damage to the stored runs of a sweep: runs are right, or trained again."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import sweep_toys

from mupax.experiments.errors import UserError
from mupax.experiments.sweep import engine, training
from mupax.experiments.sweep.store import Record, Store

TASKS = [dataclasses.replace(sweep_toys.Line(), width=w, steps=8) for w in (2, 3)]


class Known:
    """In place of compiled programs: losses that follow from seed, rate and step."""

    cramped = False
    points = 3

    def __init__(self, task, training, limits, most, seeds):
        self.task, self.training, self.seeds = task, training, seeds

    def __call__(self, points):
        steps = np.arange(self.task.steps)
        rates = np.array(points)[:, 0, None]
        rows = [seed + self.task.width / (1 + rates * steps) for seed in self.seeds]
        losses = np.stack(rows)
        losses[:, np.array(points)[:, 0] > 3] = np.nan
        return losses


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(engine, "Chunks", Known)


def swept(folder, limits=None):
    tasks = [named(task) for task in TASKS]
    return training.run_all(
        tasks, sweep_toys.points(), folder, limits or engine.Limits(), None, ahead=False
    )


@dataclasses.dataclass(frozen=True)
class Named(sweep_toys.Line):
    """A line whose files are named for its width."""

    @property
    def name(self):
        return f"line{self.width}"


def named(task):
    return Named(**{f.name: getattr(task, f.name) for f in dataclasses.fields(task)})


def same(found, wanted):
    return all(
        np.array_equal(getattr(a, field), getattr(b, field), equal_nan=True)
        for a, b in zip(found, wanted, strict=True)
        for field in ("loss", "curves")
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Chunks", Known)
        return folder, swept(folder)


def attempt(folder):
    """(populations, None), or (None, the sentence)."""
    try:
        return swept(folder), None
    except UserError as error:
        return None, str(error)


def test_a_damaged_line_is_named_and_the_others_are_used(
    whole, tmp_path, caplog, monkeypatch
):
    folder = tmp_path / "store"
    shutil.copytree(whole[0], folder)
    path = folder / "line2.runs.jsonl"
    lines = path.read_text().split("\n")
    at = next(i for i, line in enumerate(lines) if line)
    lines[at] = lines[at].replace('"seed": 0', '"see')
    path.write_text("\n".join(lines))
    added = []
    add = Store.add
    monkeypatch.setattr(
        Store, "add", lambda self, *a: (added.extend(a[2]), add(self, *a))[1]
    )
    assert same(swept(folder), whole[1])
    assert "line2.runs.jsonl has damaged lines" in caplog.text
    assert "line 1: it is not JSON" in caplog.text
    assert {at for _, at in added} == {(2.0**-9,)}  # one point of the grid


@pytest.mark.parametrize("kind", ["folder", "fifo", "unreadable"])
def test_what_is_no_readable_file_is_named(whole, tmp_path, kind):
    folder = tmp_path / "store"
    shutil.copytree(whole[0], folder)
    path = folder / "line2.runs.jsonl"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        if not hasattr(os, "mkfifo"):
            pytest.skip("named pipes are POSIX's")
        os.mkfifo(path)
    else:
        path.touch()
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("root reads every file")
    error = attempt(folder)[1]
    assert str(path) in error
    assert "\n" not in error


KILLED = """
import os, pathlib, signal
from mupax.experiments.sweep import store

def die(file):
    os.ftruncate(file, os.fstat(file).st_size - 20)
    os.kill(os.getpid(), signal.SIGKILL)

kept = store.Store(pathlib.Path({folder!r}))
kept.add("job", "key", {{(0, (0.5,)): store.Record([0.1, None])}})
os.fsync = die  # with half of a line written
kept.add("job", "key", {{(1, (0.5,)): store.Record([0.2, None])}})
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX's signal")
def test_a_writer_that_is_killed_spoils_no_other_line(tmp_path, caplog):
    code = KILLED.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], timeout=120)
    assert done.returncode == -signal.SIGKILL
    store = Store(tmp_path)
    kept, more = Record([0.1, None]), Record([0.3, 0.4], 2.5)
    store.add("job", "key", {(2, (0.5,)): more})
    assert store.runs("job", "key") == {(0, (0.5,)): kept, (2, (0.5,)): more}
    assert "(line 2: it is not JSON: " in caplog.text


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.* cannot be written"):
        swept(tmp_path / "file" / "runs")

"""Runs of several processes in object storage, on one disk or on several."""

import os
import pathlib
import re
import signal
import subprocess
import time

import numpy as np
import object_stores
import pytest
from patience import pair_flags
from test_bucket import TESTS, lines, start, weights

from mupax import zoo
from mupax.experiments.run import bucket
from mupax.experiments.run.checkpoints import load_weights
from mupax.experiments.run.lease import Objects

pytestmark = pytest.mark.long

TRAIN = ("train", f"--config={TESTS / 'toy_pod.py'}")


@pytest.fixture(autouse=True)
def reader(tmp_path, monkeypatch):
    """The disk of the tests themselves."""
    monkeypatch.setenv("MUPAX_CACHE", str(tmp_path / "reader"))


@pytest.fixture(scope="module", params=["s3", "gs"])
def run(request):
    """An address where no run is yet, for all tests of a store one after another."""
    with object_stores.opened(request.param) as bucket:
        yield lambda name: f"{bucket}/{name}/run"


def pair(words: tuple[str, ...], *caches: pathlib.Path) -> list[subprocess.Popen]:
    """A command in two processes, each with the local copies of its machine."""
    flags = zip(pair_flags(), caches, strict=True)
    return [start([*words, *own], cache) for own, cache in flags]


def ended(processes: list[subprocess.Popen], *statuses: int) -> str:
    """What process 0 printed, after all have ended with one of these statuses."""
    texts = [process.communicate(timeout=900)[0] for process in processes]
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode in statuses, text
    return texts[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of two processes that share a disk."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    cache = folder.parent / "cache"
    ended(pair((*TRAIN, f"--workdir={folder}"), cache, cache), 0)
    return folder


def same_weights(first: pathlib.Path, second: pathlib.Path) -> None:
    models = (zoo.load_pretrained(str(folder / "model")) for folder in (first, second))
    for a, b in zip(*map(weights, models), strict=True):
        np.testing.assert_array_equal(a, b)


def test_two_processes_of_one_machine_train_in_a_bucket(run, whole, tmp_path):
    """And process 0 writes the trained model, of which each holds a part."""
    at, cache = run("shared"), tmp_path / "cache"
    ended(pair((*TRAIN, f"--workdir={at}"), cache, cache), 0)
    with bucket.opened(at, writes=False) as folder:
        assert lines(folder) == lines(whole)
        same_weights(folder, whole)
        model, saved = (zoo.load_pretrained(str(folder / "model")) for _ in range(2))
        load_weights(saved, folder / "checkpoints" / "36", ema=True)
    for a, b in zip(weights(model), weights(saved), strict=True):
        np.testing.assert_array_equal(a, b)


def test_two_machines_end_as_one_does_when_they_are_killed(run, whole, tmp_path):
    """One, both, or both by SIGTERM; each time, they start again with empty disks."""
    at = run("killed")
    words = (*TRAIN, f"--workdir={at}")
    for number, (victims, how) in enumerate(
        [((1,), signal.SIGKILL), ((0, 1), signal.SIGKILL), ((1,), signal.SIGTERM)]
    ):
        disks = [tmp_path / f"disk{2 * number + n}" for n in range(2)]
        both = pair(words, *disks)
        wait_for_checkpoint(at, 4 * (number + 1), both)
        for victim in victims:
            both[victim].send_signal(how)
        ended(both, *([0] if how == signal.SIGTERM else [2, -how]))
        assert not list(disks[1].rglob("checkpoints"))
        time.sleep(4)  # the lease of a killed process
    out = ended(pair(words, tmp_path / "last0", tmp_path / "last1"), 0)
    assert "all files are in" in out
    with bucket.opened(at, writes=False) as folder:
        assert lines(folder) == lines(whole)
        same_weights(folder, whole)


def test_another_number_of_machines_resumes_a_killed_run_and_evaluates(
    run, whole, tmp_path, monkeypatch
):
    at = run("resized")
    both = pair((*TRAIN, f"--workdir={at}"), tmp_path / "a", tmp_path / "b")
    wait_for_checkpoint(at, 4, both)
    both[0].kill()
    ended(both, 2, -signal.SIGKILL, -signal.SIGABRT)
    time.sleep(4)  # the lease of a killed process
    with monkeypatch.context() as alone:
        devices = " --xla_force_host_platform_device_count=2"
        alone.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + devices)
        ended([start([*TRAIN, f"--workdir={at}"], tmp_path / "c")], 0)
    with bucket.opened(at, writes=False) as folder:
        for ours, theirs in zip(lines(folder), lines(whole), strict=True):
            assert ours == pytest.approx(theirs, rel=2e-3)
        loss = [x["test_loss"] for x in lines(folder) if "test_loss" in x][-1]
    # The disk of an earlier run holds older files, which are not used.
    words = ("eval", *TRAIN[1:], f"--workdir={at}")
    out = ended(pair(words, tmp_path / "b", tmp_path / "a"), 0)
    found = re.search(r"step 36: test loss ([\d.]+)", out)
    assert found, out
    assert float(found[1]) == pytest.approx(loss, abs=2e-4)


def wait_for_checkpoint(address: str, step: int, both: list[subprocess.Popen]) -> None:
    """Wait until a checkpoint of a step or a later one is in the bucket."""
    objects = Objects(address)
    until = time.monotonic() + 900
    while time.monotonic() < until:
        names = (name.split("/") for name in objects.names("checkpoints"))
        steps = [
            int(step) for _, step, *last in names if last == ["_CHECKPOINT_METADATA"]
        ]
        if max(steps, default=0) >= step:
            return
        if any(process.poll() is not None for process in both):
            break
        time.sleep(0.05)
    for process in both:
        process.kill()
    pytest.fail(f"no checkpoint of step {step}: {both[0].communicate()[0]}")

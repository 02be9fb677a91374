"""Runs in object storage: held by one process, resumed anywhere, never mixed."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time

import fsspec
import jax
import numpy as np
import object_stores
import pytest
import test_sweep_functions

from mupax import zoo
from mupax.experiments import cli, io
from mupax.experiments.errors import Stopped, UserError
from mupax.experiments.run import bucket as runs
from mupax.experiments.run import records
from mupax.experiments.run.lease import Lease, Lost, Objects
from mupax.experiments.sweep import engine
from mupax.zoo.weights import remote

TESTS = pathlib.Path(__file__).parent


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request):
    """The address of a bucket of an emulator."""
    with object_stores.opened(request.param) as address:
        yield address


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Changes to a machine with an empty disk."""

    def change(name: str) -> None:
        monkeypatch.setenv("MUPAX_CACHE", str(tmp_path / name))

    change("first")
    return change


@pytest.fixture
def run(bucket, request):
    """An address where no run is yet."""
    return f"{bucket}/{re.sub(r'[^a-z]+', '-', request.node.name)}/run"


@pytest.fixture
def memory():
    """An address in memory, where no run is yet."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://b/run"
    system.store.clear()


def files(folder: pathlib.Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): p.read_text()
        for p in folder.rglob("*")
        if p.is_file()
    }


def names(address: str) -> list[str]:
    return Objects(address).names()


def runs_of(address: str) -> int:
    """The number of runs in the table of a sweep."""
    return len(remote.local(f"{address}/results.csv").read_text().splitlines()) - 1


def checkpoint(folder: pathlib.Path, step: int) -> None:
    """A directory that appears by a rename, as Orbax writes it."""
    building = folder / "checkpoints" / f"{step}.orbax-checkpoint-tmp"
    (building / "state" / "d").mkdir(parents=True)
    for name in ("state/d/a", "state/d/b", "_CHECKPOINT_METADATA"):
        (building / name).write_text(f"{name} of {step}")
    (building / "empty").touch()
    building.rename(folder / "checkpoints" / str(step))


def steps(folder: pathlib.Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def killed(address: str) -> runs._Run:
    """A holder whose process was killed: it released nothing."""
    place = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs._Run, "uploading", lambda run: place.append(run) or _none())
        with runs.opened(address):
            pass
    return place[0]


def _none():
    return contextlib.nullcontext()


def test_a_run_resumes_with_an_empty_disk(run, machine):
    with runs.opened(run) as folder:
        (folder / "metrics.jsonl").write_text("one\n")
        (folder / ".lock").touch()
        (folder / ".metrics.jsonl.0123456789ab").write_text("half")
        checkpoint(folder, 3)
        (folder / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()
        expected = {n: t for n, t in files(folder).items() if not n.startswith(".")}
    machine("second")
    with runs.opened(run) as folder:
        assert files(folder) == expected
        checkpoint(folder, 6)
        shutil.rmtree(folder / "checkpoints" / "3")
        (folder / "metrics.jsonl").write_text("one\ntwo\n")
    machine("third")
    with runs.opened(run, writes=False) as folder:
        assert steps(folder) == {"6"}
        assert (folder / "metrics.jsonl").read_text() == "one\ntwo\n"
    assert not [name for name in names(run) if "checkpoints/3" in name]


def test_what_changes_is_uploaded_while_the_run_works(run, machine, monkeypatch):
    monkeypatch.setenv("MUPAX_LEASE", "1")
    with runs.opened(run) as folder:
        (folder / "metrics.jsonl").write_text("one\n")
        until = time.monotonic() + 100
        while "metrics.jsonl" not in names(run):
            assert time.monotonic() < until
            time.sleep(0.1)


def test_a_second_process_is_refused_in_one_sentence(run, machine):
    with runs.opened(run):
        words = rf"another process uses {run} \(process {os.getpid()} on .*\)"
        machine("second")
        with pytest.raises(UserError, match=words), runs.opened(run):
            pytest.fail("both hold it")
        machine("first")
        words = r"another process uses .* \(on this machine\)"
        with pytest.raises(UserError, match=words), runs.opened(run):
            pytest.fail("both hold it")
    machine("second")
    with runs.opened(run):
        pass


def test_a_killed_holder_is_succeeded_and_cannot_write_again(run, machine, monkeypatch):
    monkeypatch.setenv("MUPAX_LEASE", "2")
    holder = killed(run)
    machine("second")
    words = "if it was killed, start this again in"
    with pytest.raises(UserError, match=words), runs.opened(run):
        pytest.fail("it might be alive")
    time.sleep(2.1)
    with runs.opened(run) as folder:
        (folder / "metrics.jsonl").write_text("new")
    (holder._place / "metrics.jsonl").write_text("old")
    with pytest.raises(Lost, match="another process took over"):
        holder.upload()
    machine("third")
    with runs.opened(run, writes=False) as folder:
        assert (folder / "metrics.jsonl").read_text() == "new"


def test_the_same_machine_resumes_at_once(run):
    holder = killed(run)
    checkpoint(holder._place, 3)
    holder.upload()
    with runs.opened(run) as folder:
        assert steps(folder) == {"3"}


def test_of_processes_that_want_a_run_one_gets_it(run):
    holders = [Lease(Objects(run)) for _ in range(4)]
    for number in range(1, 6):
        together, won = threading.Barrier(4), []

        def take(holder, number=number, together=together, won=won):
            holder._record = holder._record._replace(number=number)
            together.wait()
            if holder._create():
                won.append(holder.session)

        threads = [threading.Thread(target=take, args=[holder]) for holder in holders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [holders[0]._newest().session]


def test_a_lease_whose_answer_was_lost_is_ours(memory):
    """The client tried again, and was told that it exists."""
    holder = Lease(Objects(memory))
    assert holder._create()
    assert holder._create()
    holder._record = holder._record._replace(session="other")
    assert not holder._create()


def test_a_lease_whose_number_is_free_again_is_not_ours(memory):
    """A process slept between its look at the leases and its own."""
    slow, fast = Lease(Objects(memory)), Lease(Objects(memory))
    fast._record = fast._record._replace(number=2)
    assert fast._create()
    slow._record = slow._record._replace(number=1)
    assert not slow._create()


def test_a_holder_that_was_paused_does_not_write_over_the_next(memory, machine):
    holder = killed(memory)
    (holder._place / "metrics.jsonl").write_text("old")
    holder.lease._renewed -= 61
    Objects(memory).delete([".mupax/lease/1"])
    machine("second")
    system, root = remote.connect(memory)
    other = holder.lease._record._replace(number=2, session="other")
    system.pipe_file(f"{root}/.mupax/lease/2", json.dumps(other).encode())
    with pytest.raises(Lost):
        holder._put("metrics.jsonl")
    assert "metrics.jsonl" not in names(memory)


class Killed(BaseException):
    """The process was killed before a request."""


def killed_at(request: int, patch: pytest.MonkeyPatch) -> None:
    """Let all requests that write fail from one on."""
    count = iter(range(10_000))
    system = type(fsspec.filesystem("memory"))
    for name in ("pipe_file", "put_file", "rm_file"):
        real = getattr(system, name)

        def ask(*args, real=real, **kwargs):
            if next(count) >= request:
                raise Killed
            return real(*args, **kwargs)

        patch.setattr(system, name, ask)


def test_a_torn_upload_is_never_read(memory, machine, monkeypatch):
    """Killed before each of the requests of two uploads, one after another."""
    for request in range(100):
        fsspec.filesystem("memory").store.clear()
        machine(f"writer{request}")
        holder = killed(memory)
        place = holder._place
        (place / "metrics.jsonl").write_text("3")
        checkpoint(place, 3)
        holder.upload()
        known, ended = files(place), False
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            killed_at(request, patch)
            for step in (6, 9):
                (place / "metrics.jsonl").write_text(str(step))
                checkpoint(place, step)
                shutil.rmtree(place / "checkpoints" / str(step - 3))
                known |= files(place)
                holder.upload()
            ended = True
        machine(f"reader{request}")
        with runs.opened(memory, writes=False) as folder:
            seen = files(folder)
            found = {int(name) for name in steps(folder)}
        # Records are never older than the checkpoints.
        assert max(found) <= int(seen.pop("metrics.jsonl"))
        assert all(known[name] == text for name, text in seen.items())
        assert len(seen) == 4 * len(found)
        if ended:
            assert found == {9}
            break
    else:
        pytest.fail("it never ended")
    assert request > 10


def test_a_checkpoint_that_is_being_removed_is_not_uploaded(memory, monkeypatch):
    holder = killed(memory)
    checkpoint(holder._place, 3)
    system = type(fsspec.filesystem("memory"))
    put = system.put_file

    def remove(*arguments, **options):
        put(*arguments, **options)
        shutil.rmtree(holder._place / "checkpoints" / "3", ignore_errors=True)

    monkeypatch.setattr(system, "put_file", remove)
    holder.upload()
    assert not [name for name in names(memory) if "checkpoints" in name]


def test_a_local_directory_that_is_deleted_leaves_the_bucket_as_it_is(memory):
    with runs.opened(memory) as folder:
        (folder / "metrics.jsonl").write_text("one")
        checkpoint(folder, 3)
        expected = files(folder)
    with runs.opened(memory) as folder:
        shutil.rmtree(folder)
    with runs.opened(memory) as folder:
        assert files(folder) == expected


def test_what_a_killed_upload_left_is_removed(memory, machine):
    """A model or a checkpoint without the file that is uploaded last."""
    with runs.opened(memory):
        pass
    system, root = remote.connect(memory)
    torn = ["model/weights.npz", "target/checkpoints/3/state/d/a"]
    for name in (*torn, "target/model/config.json"):
        system.pipe_file(f"{root}/{name}", b"")
    machine("second")
    with runs.opened(memory) as folder:
        assert {*files(folder)} == {"target/model/config.json"}
    assert not {*torn} & {*names(memory)}


def test_a_run_that_lost_its_network_uploads_later(memory, monkeypatch, caplog):
    monkeypatch.setenv("MUPAX_LEASE", "1")
    system = type(fsspec.filesystem("memory"))
    real, fails = system.pipe_file, True

    def pipe(self, path, *args, **kwargs):
        if fails and path.endswith("metrics.jsonl"):
            raise OSError("connection reset")
        return real(self, path, *args, **kwargs)

    monkeypatch.setattr(system, "pipe_file", pipe)
    with runs.opened(memory) as folder:
        (folder / "metrics.jsonl").write_text("one")
        until = time.monotonic() + 60
        while "the upload is retried" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.05)
        fails = False
    assert "metrics.jsonl" in names(memory)


@pytest.mark.parametrize("ended", [Stopped(3), Killed()])
def test_a_failed_upload_is_reported_when_a_run_stops(
    memory, monkeypatch, caplog, ended
):
    """A run that SIGTERM stops says that it is saved, and must not if it is not."""

    def upload(self):
        raise OSError("connection reset")

    def stop():
        with runs.opened(memory):
            raise ended

    monkeypatch.setattr(runs._Run, "upload", upload)
    with pytest.raises(UserError if isinstance(ended, Stopped) else Killed) as error:
        stop()
    assert "could not be written" in f"{error.value} {caplog.text}"


def test_files_of_others_are_not_taken_over(memory):
    fsspec.filesystem("memory").pipe_file("/b/run/thesis.tex", b"")
    with (
        pytest.raises(
            UserError, match=r"files that do not belong to a mupax run.*thesis"
        ),
        runs.opened(memory),
    ):
        pytest.fail("it is not ours")


def test_names_that_lead_out_of_the_directory_are_not_copied(memory, machine):
    with runs.opened(memory):
        pass
    system, root = remote.connect(memory)
    for name in ("good", "../evil", "checkpoints/3/../../../evil"):
        system.pipe_file(f"{root}/{name}", b"")
    machine("second")
    with runs.opened(memory) as folder:
        assert {*files(folder)} == {"good"}
        assert not list(folder.parent.rglob("evil"))


def test_a_bad_lease_is_refused(memory, monkeypatch):
    monkeypatch.setenv("MUPAX_LEASE", "soon")
    with (
        pytest.raises(UserError, match="MUPAX_LEASE='soon' must be a number"),
        runs.opened(memory),
    ):
        pytest.fail("it has no lease")


@pytest.mark.parametrize("command", ["train", "sweep", "transfer"])
def test_a_bucket_that_is_not_there_is_said_before_any_work(
    bucket, capsys, monkeypatch, command
):
    monkeypatch.setattr(remote, "local", lambda *_: pytest.fail("nothing is read"))
    address = bucket.replace("bucket", "no-such-bucket") + "/run"
    words = ["mupax", command, "--config=digits_resmlp", f"--workdir={address}"]
    assert cli.main(words) == 2
    assert f"{address} cannot be used (there is no such bucket)" in (
        capsys.readouterr().err
    )


LOGIN = {
    "s3": "no credentials were found: run `aws configure`",
    "gs": "no credentials were found: run `gcloud auth application-default login`",
}


@pytest.mark.parametrize("kind", ["s3", "gs"])
@pytest.mark.parametrize("refused", ["everything", "writes", "deletes", "strangers"])
def test_a_bucket_that_refuses_is_one_sentence(kind, refused, capfd, machine):
    def said(*words: str) -> str:
        assert cli.main(["mupax", *words]) == 2
        (sentence,) = capfd.readouterr().err.splitlines()
        return sentence

    with object_stores.refusing(kind, refused) as bucket:
        run = f"{bucket}/run"
        sentence = said("train", "--config=digits_resmlp", f"--workdir={run}")
        assert sentence.startswith(f"mupax: {run} cannot be used (")
        needed = "allow to list, read, write and delete the objects of this bucket"
        assert (LOGIN[kind] if refused == "strangers" else needed) in sentence

        sentence = said("generate", f"--model={run}", "--prompt=x")
        if refused in ("writes", "deletes"):
            assert sentence == f"mupax: there is nothing at {run}"
        else:
            assert sentence.startswith(f"mupax: {run} cannot be read (")
            needed = "allow to list and read the objects of this bucket"
            assert (LOGIN[kind] if refused == "strangers" else needed) in sentence


def test_a_sweep_in_object_storage_trains_only_what_is_missing(
    run, machine, monkeypatch
):
    first = test_sweep_functions.sweep(run)
    machine("second")
    monkeypatch.setattr(
        engine, "train_points", lambda *_: pytest.fail("it is there already")
    )
    again = test_sweep_functions.sweep(run)
    assert str(first) == str(again)
    assert "report.html" in names(run)
    assert runs_of(run) == 3


def test_workers_of_a_sweep_in_object_storage_write_its_local_copy(run, machine):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        test_sweep_functions.sweep(run, executor=pool)
    machine("second")
    assert runs_of(run) == 3


# ----- Whole commands.


def start(words: list[str], cache: pathlib.Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "mupax", *words],
        env={**os.environ, "MUPAX_CACHE": str(cache), "MUPAX_LEASE": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def spoken(tmp_path):
    """Runs a command in a bucket; returns its words, which name no local copy."""

    def run(status: int, *words: str, cache: str = "a", most: int | None = None) -> str:
        process = start(list(words), tmp_path / cache)
        if most is not None:
            records = None
            while process.poll() is None and not records:
                records = next((tmp_path / cache).rglob("metrics.jsonl"), None)
                time.sleep(0.05)
            # No file can grow past this: what a full disk looks like to a writer.
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
        out, _ = process.communicate(timeout=600)
        assert process.returncode == status, out
        assert str(tmp_path) not in out
        return out

    return run


@pytest.mark.long
def test_messages_name_the_address(spoken):
    """Of a run, a damaged checkpoint, a full disk, and of what is not there."""
    config = [f"--config={TESTS / 'toy_train.py'}", "--config.save_every=2"]
    with object_stores.opened("s3") as bucket:
        run = f"{bucket}/run"
        words = ["train", *config, f"--workdir={run}", "--config.steps=6"]
        out = spoken(0, *words)
        assert f"{run}/metrics.jsonl" in out
        assert f"the model: {run}/model" in out
        (data, *_) = [n for n in names(run) if n.startswith("checkpoints/6/state/d/")]
        system, root = remote.connect(run)
        system.pipe_file(f"{root}/{data}", b"damaged")
        out = spoken(2, *words, cache="b")
        assert f"the checkpoint {run}/checkpoints/6 cannot be read" in out
        Objects(run).delete(n for n in names(run) if n.startswith("checkpoints/6/"))
        assert f"all files are in {run}" in spoken(0, *words, cache="b")
        assert [name for name in names(run) if name.startswith("checkpoints/6/")]
        long = [*config, f"--workdir={bucket}/full", "--config.log_every=1000"]
        out = spoken(2, "train", *long, cache="c", most=100)
        assert "File too large" in out
        assert f"{bucket}/full" in out
        out = spoken(2, "eval", *config, f"--workdir={bucket}/nothing")
        assert f"{bucket}/nothing holds no checkpoints" in out


@pytest.mark.long
def test_messages_and_files_of_a_transfer_name_the_address(run, tmp_path, spoken):
    words = ["transfer", f"--config={TESTS / 'toy_config.py'}", f"--workdir={run}"]
    assert f"Report: {run}/report.html" in spoken(0, *words)
    system, root = remote.connect(run)
    # Orbax writes the local path into files of its own, e.g. commit_success.txt.
    ours = [name for name in names(run) if "/checkpoints/" not in name]
    texts = {name: system.cat_file(f"{root}/{name}") for name in ours}
    named = [name for name, text in texts.items() if str(tmp_path).encode() in text]
    assert named == []
    assert f"{run}/target/checkpoints/".encode() in texts["summary.json"]


def lines(folder: pathlib.Path) -> list[dict]:
    """The records of a run, without times."""
    clock = ("step_seconds", "examples_per_second", "mfu")
    return [
        {key: value for key, value in line.items() if key not in clock}
        for line in records.read(folder)
    ]


def uninterrupted(words: list[str], folder: pathlib.Path) -> float:
    """Run a command on a disk. Returns the seconds that it worked in its directory."""
    process = start([*words, f"--workdir={folder}"], folder.parent)
    while process.poll() is None and not folder.exists():
        time.sleep(0.02)
    begun = time.monotonic()
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    return time.monotonic() - begun


def until_it_ends(
    words: list[str], tmp_path: pathlib.Path, seconds: float, seed: int
) -> int:
    """Kill a command at random moments, each time on a machine with an empty disk.

    `seconds` is how long it takes, or took when nothing was compiled yet. The first
    kills come before its end in any case, and all together they come at every stage.
    """
    chance = random.Random(seed)
    kills = 0
    for machine in range(60):
        cache = tmp_path / f"machine{machine}"
        process = start(words, cache)
        while process.poll() is None and not any(cache.glob("*/*/session")):
            time.sleep(0.02)
        try:
            latest = seconds * ((1 + kills) / 10) ** 2
            patience = chance.uniform(0, latest) if kills < 8 else 600
            out, _ = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        if process.returncode == 0:
            return kills
        # The killed process holds its lease for a while.
        assert "if it was killed, start this again in" in out, out
        time.sleep(1)
    pytest.fail("it never ended")


@pytest.mark.long
def test_a_run_that_is_killed_everywhere_ends_as_one_that_is_not(run, tmp_path):
    config = [f"--config={TESTS / 'toy_train.py'}", "--config.save_every=5"]
    config.append("--config.steps=120")
    words = ["train", *config]
    seconds = uninterrupted(words, tmp_path / "whole")
    assert until_it_ends([*words, f"--workdir={run}"], tmp_path, seconds, 0) > 2
    os.environ["MUPAX_CACHE"] = str(tmp_path / "last")
    with runs.opened(run, writes=False) as folder:
        assert lines(folder) == lines(tmp_path / "whole")
        first, second = (
            zoo.load_pretrained(str(p / "model")) for p in (folder, tmp_path / "whole")
        )
    for a, b in zip(weights(first), weights(second), strict=True):
        np.testing.assert_array_equal(a, b)


def weights(model) -> list[np.ndarray]:
    from flax import nnx

    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


@pytest.mark.long
def test_a_transfer_that_is_killed_everywhere_ends_as_one_that_is_not(run, tmp_path):
    words = ["transfer", f"--config={TESTS / 'toy_config.py'}"]
    seconds = uninterrupted(words, tmp_path / "whole")
    assert until_it_ends([*words, f"--workdir={run}"], tmp_path, seconds, 1) > 2
    os.environ["MUPAX_CACHE"] = str(tmp_path / "last")
    with runs.opened(run, writes=False) as folder:
        ours, theirs = (
            io.read_json(p / "summary.json") for p in (folder, tmp_path / "whole")
        )
        for key in ("transfer", "verdicts"):
            assert ours[key] == theirs[key]
        assert lines(folder / "target") == lines(tmp_path / "whole" / "target")

"""Runs in object storage: held by one process, resumed anywhere, never torn."""

import concurrent.futures
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import threading
import time

import fsspec
import numpy as np
import object_stores
import pytest
import test_sweep_own

from mupax import zoo
from mupax.experiments import cli, io
from mupax.experiments.errors import Stopped, UserError
from mupax.experiments.run import mirror, records
from mupax.experiments.run.object_store import (
    Commit,
    Lost,
    Objects,
    commit_name,
    newest_commit,
    put_commit,
)
from mupax.experiments.sweep import engine, export

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


def checkpoint(folder: pathlib.Path, step: int, text: str = "") -> None:
    """A directory that appears by a rename, as Orbax writes it."""
    building = folder / "checkpoints" / f"{step}.orbax-checkpoint-tmp-0"
    (building / "state" / "d").mkdir(parents=True)
    for name in ("state/d/a", "state/d/b", "state/manifest", "meta"):
        (building / name).write_text(f"{name} of {step}{text}")
    (building / "empty").touch()
    building.rename(folder / "checkpoints" / str(step))


def files(folder: pathlib.Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): p.read_text()
        for p in folder.rglob("*")
        if p.is_file()
    }


def killed(address: str, name: str = "elsewhere") -> mirror._Mirror:
    """A holder whose process was killed: its threads ended, and it released nothing."""
    place = mirror._place(address, True)
    place.parent.mkdir(parents=True, exist_ok=True)
    holder = mirror._Mirror(Objects(address), place)
    for event in (holder._closing, holder._released):
        event.set()
    for thread in holder._threads:
        thread.join()
    return holder


def test_a_run_goes_on_with_an_empty_disk(run, machine):
    with mirror.opened(run) as folder:
        (folder / "metrics.jsonl").write_text("one\n")
        (folder / ".lock").touch()
        (folder / ".metrics.jsonl.0123456789ab").write_text("half")
        checkpoint(folder, 3)
        (folder / "checkpoints" / "6.orbax-checkpoint-tmp-1").mkdir()
        before = files(folder)
    machine("second")
    with mirror.opened(run) as folder:
        after = files(folder)
        checkpoint(folder, 6)
        shutil.rmtree(folder / "checkpoints" / "3")
        (folder / "metrics.jsonl").write_text("one\ntwo\n")
    left_out = {".lock", ".metrics.jsonl.0123456789ab"}
    assert after == {k: v for k, v in before.items() if k not in left_out}
    machine("third")
    with mirror.opened(run, writes=False) as folder:
        assert {p.name for p in (folder / "checkpoints").iterdir()} == {"6"}
        assert (folder / "metrics.jsonl").read_text() == "one\ntwo\n"
    names = Objects(run).names()
    assert not [name for name in names if "checkpoints/3" in name or "alive" in name]


def test_what_changes_is_uploaded_while_the_run_goes_on(run, machine, monkeypatch):
    monkeypatch.setenv("MUPAX_LEASE", "1")
    with mirror.opened(run) as folder:
        (folder / "metrics.jsonl").write_text("one\n")
        checkpoint(folder, 3)
        machine("second")
        until = time.monotonic() + 100
        while time.monotonic() < until:
            with mirror.opened(run, writes=False) as seen:
                if files(seen) == files(folder):
                    break
            time.sleep(0.1)
        else:
            pytest.fail("it was not uploaded")


def test_a_second_process_is_refused_in_one_sentence(run, machine):
    with mirror.opened(run):
        words = rf"another process uses {run} \(process {os.getpid()} on .*\)"
        machine("second")
        with pytest.raises(UserError, match=words), mirror.opened(run):
            pytest.fail("both hold it")
        machine("first")
        with (
            pytest.raises(
                UserError, match=r"another process uses .* \(on this machine\)"
            ),
            mirror.opened(run),
        ):
            pytest.fail("both hold it")
    machine("second")
    with mirror.opened(run):
        pass


def test_a_killed_holder_is_succeeded_and_cannot_write_again(run, machine, monkeypatch):
    holder = killed(run)
    machine("second")
    with (
        pytest.raises(UserError, match="if it was killed, start this again in"),
        mirror.opened(run),
    ):
        pytest.fail("it might be alive")
    modified = Objects.modified

    def long_ago(self, name):
        return modified(self, name) - (61 if holder._session in name else 0)

    monkeypatch.setattr(Objects, "modified", long_ago)
    with mirror.opened(run) as folder:
        checkpoint(folder, 6)
    machine("first")
    checkpoint(holder._place, 3)
    with pytest.raises(Lost):
        holder._sync()
    machine("third")
    with mirror.opened(run, writes=False) as folder:
        assert {p.name for p in (folder / "checkpoints").iterdir()} == {"6"}


def test_the_same_machine_resumes_at_once_with_what_it_has(run):
    holder = killed(run)
    checkpoint(holder._place, 3)
    holder._sync()
    checkpoint(holder._place, 6)
    (holder._place / "metrics.jsonl").write_text("newer")
    with mirror.opened(run) as folder:
        assert {p.name for p in (folder / "checkpoints").iterdir()} == {"3", "6"}
        assert (folder / "metrics.jsonl").read_text() == "newer"


def test_a_local_copy_that_lost_files_is_not_taken_for_newer(run):
    with mirror.opened(run) as folder:
        (folder / "experiment.json").write_text("settings")
        checkpoint(folder, 3)
        whole = files(folder)
    for name in ("experiment.json", "checkpoints/3/state/d/a", "checkpoints/3/meta"):
        (folder / name).unlink()
        with mirror.opened(run) as again:
            assert files(again) == whole


def test_of_processes_that_want_a_number_one_gets_it(run):
    objects = Objects(run)
    for number in range(1, 6):
        together = threading.Barrier(4)
        won = []

        def take(number=number, together=together, won=won):
            commit = Commit(number, token=os.urandom(4).hex())
            together.wait()
            if put_commit(objects, commit):
                won.append(commit.token)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [newest_commit(objects).token]


def test_a_number_that_is_free_again_is_not_taken(memory):
    """A process slept between its look at the commits and its own."""
    holder = killed(memory)
    for number in range(2, 5):
        commit = Commit(number, session="other", token=str(number))
        assert put_commit(holder._objects, commit)
    holder._objects.delete([commit_name(2)])
    with pytest.raises(Lost):
        holder._put({})
    assert newest_commit(holder._objects).session == "other"


def test_a_number_that_was_taken_and_given_up_is_not_ours(memory, monkeypatch):
    """Between the refusal and the look at who has it, its owner removed it."""
    objects = Objects(memory)
    errors = iter([FileExistsError("precondition failed"), OSError("no network")])

    def refuse(*_, **__):
        raise next(errors)

    monkeypatch.setattr(type(objects._system), "pipe_file", refuse)
    assert not objects.create("name", b"content")
    with pytest.raises(OSError, match="no network"):
        objects.create("name", b"content")


def test_a_commit_whose_answer_was_lost_is_ours(memory):
    """It was taken for that of another process, and the run ended."""
    holder = killed(memory)
    create = holder._objects.create

    def lose(*args):
        create(*args)
        raise OSError("connection reset")

    holder._objects.create = lose
    for ends in (False, True):
        checkpoint(holder._place, 3 + 3 * ends)
        with pytest.raises(OSError, match="connection reset"):
            holder._sync(held=not ends)
    holder._objects.create = create
    holder._sync(held=False)
    commit = newest_commit(holder._objects)
    assert not commit.held
    assert commit.whole.keys() == {"checkpoints/3", "checkpoints/6"}


@pytest.mark.parametrize("released", [True, False])
def test_a_start_that_fails_does_not_lose_what_was_not_uploaded(
    memory, monkeypatch, released
):
    """Whether it was interrupted or killed."""
    holder = killed(memory)
    (holder._place / "metrics.jsonl").write_text("one")
    holder._sync()
    (holder._place / "metrics.jsonl").write_text("two")
    with monkeypatch.context() as broken:

        def fail(*_):
            raise Killed

        broken.setattr(mirror, "is_newer", fail)
        if not released:
            broken.setattr(mirror._Mirror, "_release", lambda self: None)
        for _ in range(2):
            with pytest.raises(Killed), mirror.opened(memory):
                pytest.fail("it started")
    with mirror.opened(memory) as folder:
        assert (folder / "metrics.jsonl").read_text() == "two"


def test_a_local_copy_that_is_deleted_leaves_the_bucket_as_it_is(memory):
    """Of a purged cache, whole or in part; and the next run begins with all files."""
    with mirror.opened(memory) as folder:
        (folder / "metrics.jsonl").write_text("one")
        checkpoint(folder, 3)
        checkpoint(folder, 6)
        expected = files(folder)
    for lost in ("checkpoints/6/meta", "checkpoints/6", "."):
        with mirror.opened(memory) as folder:
            assert files(folder) == expected
            place = folder / lost
            place.unlink() if place.is_file() else shutil.rmtree(place)
    with mirror.opened(memory) as folder:
        assert files(folder) == expected


def test_a_holder_that_was_paused_does_not_write_over_the_next(
    memory, machine, monkeypatch
):
    """Between its look at the commits and an upload, another one came and ended."""
    holder = killed(memory)
    (holder._place / "metrics.jsonl").write_text("old")
    copy = shutil.copyfile

    def pause(source, target):
        copy(source, target)
        monkeypatch.setattr(shutil, "copyfile", copy)
        holder._heard -= 61
        holder._objects.delete([holder._alive])
        machine("second")
        with mirror.opened(memory) as folder:
            (folder / "metrics.jsonl").write_text("new")

    monkeypatch.setattr(shutil, "copyfile", pause)
    with pytest.raises(Lost):
        holder._sync()
    assert Objects(memory).read("metrics.jsonl") == b"new"


class Killed(BaseException):
    """The process was killed before a request."""


def killed_at(objects: Objects, request: int) -> None:
    """Let all requests that write fail from one on."""
    count = iter(range(10_000))
    for name in ("write", "create", "put", "delete"):
        real = getattr(objects, name)

        def ask(*args, real=real):
            if next(count) >= request:
                raise Killed
            return real(*args)

        setattr(objects, name, ask)


def test_a_torn_upload_is_never_read(memory, machine, tmp_path):
    """Killed before each of the requests of two uploads, one after another."""
    for request in range(100):
        fsspec.filesystem("memory").store.clear()
        machine(f"writer{request}")
        holder = killed(memory)
        place = holder._place
        (place / "metrics.jsonl").write_text("3")
        checkpoint(place, 3)
        holder._sync()
        states = [files(place)]
        killed_at(holder._objects, request)
        ended = False
        try:
            for step in (6, 9):
                (place / "metrics.jsonl").write_text(str(step))
                checkpoint(place, step)
                shutil.rmtree(place / "checkpoints" / str(step - 3))
                states.append(files(place))
                holder._sync()
            ended = True
        except Killed:
            pass
        machine(f"reader{request}")
        with mirror.opened(memory, writes=False) as folder:
            seen = files(folder)
        steps = {int(p.name) for p in (folder / "checkpoints").iterdir()}
        metrics = int(seen.pop("metrics.jsonl"))
        # Records are never older than the checkpoints.
        assert max(steps) <= metrics
        known = {name: text for state in states for name, text in state.items()}
        assert all(known[name] == text for name, text in seen.items())
        assert len(seen) == 5 * len(steps)
        if ended:
            assert steps == {9}
            break
    else:
        pytest.fail("it never ended")
    assert request > 10


def test_an_altered_checkpoint_is_left_out(memory, machine, caplog):
    with mirror.opened(memory) as folder:
        checkpoint(folder, 3)
        checkpoint(folder, 6)
    objects = Objects(memory)
    objects.write("checkpoints/6/state/d/a", b"state/d/a of 7")
    machine("second")
    with mirror.opened(memory, writes=False) as folder:
        assert {p.name for p in (folder / "checkpoints").iterdir()} == {"3"}
    assert "checkpoints/6 is incomplete or altered" in caplog.text


def test_a_checkpoint_that_is_being_removed_is_not_uploaded(memory, monkeypatch):
    holder = killed(memory)
    checkpoint(holder._place, 3)
    link = os.link

    def remove(source, target):
        link(source, target)
        shutil.rmtree(holder._place / "checkpoints" / "3", ignore_errors=True)

    monkeypatch.setattr(os, "link", remove)
    holder._sync()
    assert newest_commit(holder._objects).whole == {}


def test_a_step_that_is_saved_anew_replaces_the_first(memory, machine):
    with mirror.opened(memory) as folder:
        checkpoint(folder, 3)
    with mirror.opened(memory) as folder:
        shutil.rmtree(folder / "checkpoints" / "3")
        checkpoint(folder, 3, " again")
        expected = files(folder)
    machine("second")
    with mirror.opened(memory, writes=False) as folder:
        assert files(folder) == expected


def test_the_run_goes_on_without_the_network(memory, monkeypatch, caplog, machine):
    monkeypatch.setenv("MUPAX_LEASE", "1")
    fails = True

    def put(self, path, name):
        if fails:
            raise OSError("connection reset")
        real(self, path, name)

    real = Objects.put
    monkeypatch.setattr(Objects, "put", put)
    with mirror.opened(memory) as folder:
        (folder / "metrics.jsonl").write_text("one")
        until = time.monotonic() + 100
        while "connection reset" not in caplog.text and time.monotonic() < until:
            time.sleep(0.05)
        assert "The run continues, and the upload is retried" in caplog.text
        fails = False
    machine("second")
    with mirror.opened(memory, writes=False) as folder:
        assert (folder / "metrics.jsonl").read_text() == "one"


def test_what_could_not_be_uploaded_is_kept_and_uploaded_next(memory, monkeypatch):
    monkeypatch.setattr(mirror.time, "sleep", lambda _: None)
    with monkeypatch.context() as broken:

        def put(self, path, name):
            raise OSError("connection reset")

        broken.setattr(Objects, "put", put)
        words = r"could not be written \(connection reset\); the missing files are in"
        with pytest.raises(UserError, match=words), mirror.opened(memory) as folder:
            (folder / "metrics.jsonl").write_text("one")
    with mirror.opened(memory) as folder:
        assert (folder / "metrics.jsonl").read_text() == "one"
    assert Objects(memory).read("metrics.jsonl") == b"one"


@pytest.mark.parametrize("ended", [Stopped(3), Killed()])
def test_a_failed_upload_is_reported_when_a_run_stops(
    memory, monkeypatch, caplog, ended
):
    """A run that SIGTERM stops says that it is saved, and must not if it is not."""
    monkeypatch.setattr(mirror.time, "sleep", lambda _: None)

    def put(self, path, name):
        raise OSError("connection reset")

    def stop():
        with mirror.opened(memory) as folder:
            (folder / "metrics.jsonl").write_text("one")
            raise ended

    monkeypatch.setattr(Objects, "put", put)
    with pytest.raises(UserError if isinstance(ended, Stopped) else Killed) as error:
        stop()
    assert "the missing files are in" in f"{error.value} {caplog.text}"


def test_files_of_others_are_not_taken_over(memory):
    Objects(memory).write("thesis.tex", b"")
    with (
        pytest.raises(
            UserError, match=r"files that do not belong to a mupax run.*thesis"
        ),
        mirror.opened(memory),
    ):
        pytest.fail("it is not ours")


def test_a_bad_lease_is_refused(memory, monkeypatch):
    monkeypatch.setenv("MUPAX_LEASE", "soon")
    with (
        pytest.raises(UserError, match="MUPAX_LEASE='soon' must be a number"),
        mirror.opened(memory),
    ):
        pytest.fail("it has no lease")


@pytest.mark.parametrize("command", ["train", "sweep", "transfer", "search"])
def test_a_bucket_that_is_not_there_is_said_before_any_work(
    bucket, capsys, monkeypatch, command
):
    monkeypatch.setattr(
        mirror.remote, "local", lambda *_: pytest.fail("nothing is read")
    )
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
        verb = "written" if refused in ("writes", "deletes") else "used"
        assert sentence.startswith(f"mupax: {run} cannot be {verb} (")
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
    first = test_sweep_own.sweep(run)
    machine("second")
    monkeypatch.setattr(
        engine, "train_points", lambda *_: pytest.fail("it is there already")
    )
    again = test_sweep_own.sweep(run)
    assert str(first) == str(again)
    assert "report.html" in Objects(run).names()
    assert len(export.read_results(run)) == 3


def test_workers_of_a_sweep_in_object_storage_write_its_local_copy(run, machine):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        test_sweep_own.sweep(run, executor=pool)
    # Another machine's copy must lack the file by which workers know the folder.
    assert not [n for n in Objects(run).names() if "shared" in n]
    machine("second")
    assert len(export.read_results(run)) == 3


# ----- Whole commands.


def start(words: list[str], cache: pathlib.Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "mupax", *words],
        env={**os.environ, "MUPAX_CACHE": str(cache), "MUPAX_LEASE": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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
    with mirror.opened(run, writes=False) as folder:
        assert lines(folder) == lines(tmp_path / "whole")
        first, second = (
            zoo.load_pretrained(str(p / "model")) for p in (folder, tmp_path / "whole")
        )
    for a, b in zip(weights(first), weights(second), strict=True):
        np.testing.assert_array_equal(a, b)


def weights(model) -> list[np.ndarray]:
    import jax
    from flax import nnx

    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


@pytest.mark.long
def test_a_transfer_that_is_killed_everywhere_ends_as_one_that_is_not(run, tmp_path):
    words = ["transfer", f"--config={TESTS / 'toy_config.py'}"]
    seconds = uninterrupted(words, tmp_path / "whole")
    assert until_it_ends([*words, f"--workdir={run}"], tmp_path, seconds, 1) > 2
    os.environ["MUPAX_CACHE"] = str(tmp_path / "last")
    with mirror.opened(run, writes=False) as folder:
        ours, theirs = (
            io.read_sealed(p / "summary.json") for p in (folder, tmp_path / "whole")
        )
        for key in ("transfer", "verdicts"):
            assert ours[key] == theirs[key]
        assert lines(folder / "target") == lines(tmp_path / "whole" / "target")

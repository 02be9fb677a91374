"""Two processes that disagree, or of which one is gone: one sentence, within a minute.

Each test starts the real command twice.
"""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from patience import MUPAX, pair_flags

from mupax.experiments.errors import UserError
from mupax.experiments.run import processes, records
from mupax.experiments.run.workdir import claim

TOY = f"--config={pathlib.Path(__file__).with_name('toy_train.py')}"
WITHIN = 60  # seconds, of which TIMEOUT are waiting and the rest is starting Python
TIMEOUT = 20


@pytest.fixture
def pair(tmp_path):
    """Starts two processes, and leaves none behind."""
    started = []

    def start(*different: list[str], command: tuple[str, str] = ("train", "train")):
        flags = pair_flags()
        for rank, words in enumerate(different):
            args = [
                *(command[rank], TOY, "--config.mesh.fsdp=2", f"--timeout={TIMEOUT}"),
                *(f"--workdir={tmp_path / 'run'}", f"--config.data_dir={tmp_path}"),
                *flags[rank],
                *words,
            ]
            with (tmp_path / f"err{rank}").open("w") as err:
                child = subprocess.Popen(
                    [sys.executable, "-c", MUPAX, *args],
                    stdout=subprocess.DEVNULL,
                    stderr=err,
                    env=os.environ | {"JAX_PLATFORMS": "cpu"},
                )
            started.append(child)
        return started

    yield start
    for child in started:
        child.kill()
        child.wait()


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended."""

    status: int
    sentence: str  # the last line on stderr
    lines: int  # that are ours
    text: str


def ends(tmp_path: pathlib.Path, children: list[subprocess.Popen]) -> list[End]:
    """How both ended; fails where one has not within the time that is promised."""
    until = time.monotonic() + WITHIN
    found = []
    for rank, child in enumerate(children):
        status = child.wait(timeout=max(0.1, until - time.monotonic()))
        text = (tmp_path / f"err{rank}").read_text()
        assert "Traceback (most" not in text, text
        said = re.findall(r"^mupax: .*$", text, re.MULTILINE)
        found.append(End(status, said[-1] if said else "", len(said), text))
    return found


def refused(tmp_path: pathlib.Path, children: list[subprocess.Popen]) -> list[str]:
    """The one sentence of each of them."""
    found = ends(tmp_path, children)
    assert [end.status for end in found] == [2, 2]
    assert [end.lines for end in found] == [1, 1]
    return [end.sentence for end in found]


@pytest.mark.long
def test_a_coordinator_that_is_not_there_is_one_sentence(tmp_path, pair):
    begun = time.monotonic()
    (child,) = pair(["--process=1", "--timeout=3"])
    (end,) = ends(tmp_path, [child])
    assert end.status == 2
    assert "not found at 127.0.0.1" in end.sentence
    assert "within 3 s" in end.sentence
    assert time.monotonic() - begun < WITHIN


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("--config.steps=300", "config.steps (420 in process 0, 300 in process 1)"),
        ("--workdir=elsewhere", "--workdir ("),
        ("--config.optimizer.weight_decay=0.5", "config.optimizer.weight_decay"),
        ("--processes=3", "--processes (2 in process 0, 3 in process 1)"),
        ("--dry_run", "--dry_run (False in process 0, True in process 1)"),
        ("--config.nope=1", "config.nope (None in process 0, 1 in process 1)"),
    ],
)
def test_what_differs_is_named_by_both(tmp_path, pair, change, named):
    for said in refused(tmp_path, pair([], [change])):
        assert named in said
        assert "same config, flags and --workdir" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_another_command_is_named_by_both(tmp_path, pair):
    for said in refused(tmp_path, pair([], [], command=("train", "eval"))):
        assert "command (train in process 0, eval in process 1)" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([], ["--process=0"]),
        (["--process=1"], []),
        (["--processes=3"], []),
        ([], ["--processes=3", "--process=2"]),
        ([], ["--coordinator=127.0.0.1:9"]),
    ],
)
def test_processes_that_do_not_meet_say_so(tmp_path, pair, first, second):
    found = ends(tmp_path, pair(first, second))
    assert all(end.status for end in found)
    for end in found:  # JAX aborts a process that its service refuses
        known = re.search("not found at|failed: ", end.sentence)
        assert known or end.status == -signal.SIGABRT, end


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_process_lacks_is_said_by_both(tmp_path, pair, failing):
    words: list[list[str]] = [["--config.dataset=mnist"]] * 2
    words[failing] = [*words[failing], "--config.data_dir=/nowhere"]
    words[1 - failing] = [*words[1 - failing], f"--config.data_dir={mnist()}"]
    for said in refused(tmp_path, pair(*words)):
        assert "mnist is not in /nowhere" in said


def mnist() -> str:
    folder = os.environ.get("TFDS_DATA_DIR", "")
    if not (pathlib.Path(folder) / "mnist").is_dir():
        pytest.skip("needs MNIST in TFDS_DATA_DIR")
    return folder


@pytest.mark.long
def test_a_workdir_that_is_held_is_said_by_both(tmp_path, pair):
    with claim(tmp_path / "run", {}):
        for said in refused(tmp_path, pair([], [])):
            assert "holds another experiment" in said or "another process uses" in said


def wait_for_line(run: pathlib.Path, children: list[subprocess.Popen]) -> None:
    until = time.monotonic() + 300
    while not records.read(run):
        assert time.monotonic() < until
        assert all(child.poll() is None for child in children)
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_ends_the_other_ends_within_a_minute(tmp_path, pair, victim, how):
    children = pair([], [])
    wait_for_line(tmp_path / "run", children)
    children[victim].send_signal(how)
    other = ends(tmp_path, children)[1 - victim]
    assert other.status
    # Where process 0 ends, JAX may be faster than its last words.
    if how == signal.SIGINT and victim == 1:
        assert other.sentence == "mupax: process 1 failed: interrupted"
    else:  # by mupax at a collective, or by JAX's coordination service
        known = r"failed: interrupted|another process is gone|JAX"
        assert re.search(known, other.sentence + other.text)


@pytest.mark.long
def test_a_process_that_stands_still_is_noticed(tmp_path, pair):
    children = pair([], [])
    wait_for_line(tmp_path / "run", children)
    children[1].send_signal(signal.SIGSTOP)
    until = time.monotonic() + WITHIN
    assert children[0].wait(timeout=until - time.monotonic())
    assert "heartbeat" in (tmp_path / "err0").read_text()


SEES = """
import os, pathlib, sys
import jax
from mupax.experiments import io
from mupax.experiments.errors import UserError
from mupax.experiments.run import loop
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
io.APPEARS_WITHIN = 0.5
try:
    with loop._claimed(pathlib.Path(sys.argv[3]), {}):
        print("shared")
except UserError as error:
    print(error, flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.long
def test_a_directory_on_another_disk_is_not_taken_for_a_shared_one(tmp_path):
    """Neither is one that an earlier run left there."""
    for name in ("first", "second"):
        with claim(tmp_path / name, {}):
            pass
    before = {p.name for p in tmp_path.rglob("*")}

    def said(*folders: str) -> set[str]:
        (_, address, *_), _ = pair_flags()
        port = address.rpartition(":")[2]
        children = [
            subprocess.Popen(
                [sys.executable, "-c", SEES, port, str(n), tmp_path / folder],
                stdout=subprocess.PIPE,
                text=True,
            )
            for n, folder in enumerate(folders)
        ]
        try:
            texts = [child.communicate(timeout=WITHIN)[0] for child in children]
        finally:
            for child in children:
                child.kill()
        return {text.splitlines()[-1] for text in texts}

    assert said("first", "first") == {"shared"}
    for sentence in said("first", "second"):
        start = "process 1 does not see the run directory of process 0 at "
        assert sentence.startswith(f"{start}{tmp_path}")
        assert "or one in object storage" in sentence
    assert {p.name for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"coordinator": "here"}, "must be host:port"),
        ({"coordinator": "here:port"}, "must be host:port"),
        ({"coordinator": ":1234"}, "must be host:port"),
        ({"coordinator": "here:99999"}, "must be host:port"),
        ({"processes": -1}, "--processes=-1"),
        ({"processes": 2, "process": 2}, "--process=2 must lie in 0 to 1"),
        ({"process": -2}, "--process=-2"),
        ({"timeout": 0}, "--timeout=0"),
    ],
)
def test_bad_flags_of_processes_are_one_sentence(flags, said):
    with (
        pytest.raises(UserError, match=re.escape(said)),
        processes.joined({}, distributed=True, **flags),
    ):
        pass


@pytest.mark.parametrize("flag", [{"coordinator": "a:1"}, {"process": 0}])
def test_flags_without_distributed_are_refused(flag):
    name = next(iter(flag))
    with (
        pytest.raises(UserError, match=f"--{name} needs --distributed"),
        processes.joined({}, **flag),
    ):
        pass

"""Runs whose directory is damaged, or that are stopped: right, or one sentence."""

import contextlib
import errno
import gc
import logging
import os
import pathlib
import shutil
import time
import types

import jax
import pytest
import train_child
from flax import nnx

from mupax.experiments import cli, io
from mupax.experiments.errors import Stopped, UserError
from mupax.experiments.run import loop, records
from mupax.experiments.run.checkpoints import Checkpoints, load_weights

# After a read that failed, TensorStore reports to an event loop that Orbax has closed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

STEPS = 20
TOY = f"--config={pathlib.Path(__file__).with_name('toy_train.py')}"


def train(folder: pathlib.Path):
    """The run, or what is left to do of it: result and digest of the weights."""
    result, model = train_child.run(folder, steps=STEPS)
    return result, train_child.digest(model)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """The programs of all these runs are the same."""
    before = jax.config.jax_compilation_cache_dir
    folder = str(tmp_path_factory.mktemp("programs"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """What a failed read leaves is collected here, and not in a later test."""

    def forget(record: logging.LogRecord) -> bool:
        record.exc_info = None  # it holds frames, and they hold coroutines
        return True

    logger = logging.getLogger("absl")
    logger.addFilter(forget)
    yield
    logger.removeFilter(forget)
    gc.collect()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody stopped: its folder, result and digest."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, *train(folder)


def lines(folder: pathlib.Path) -> list[dict]:
    """A run's records, without what a clock says."""
    clock = ("step_seconds", "examples_per_second", "mfu")
    return [
        {key: value for key, value in line.items() if key not in clock}
        for line in records.read(folder)
    ]


def same(folder: pathlib.Path, found, whole) -> bool:
    """Whether a run ended as the whole one did."""
    (result, digest), (model, expected, wanted) = found, whole
    return (
        digest == wanted
        and (result.curve, result.evals) == (expected.curve, expected.evals)
        and result.train_loss == expected.train_loss
        and lines(folder) == lines(model)
    )


# ----- Stopped and resumed, the log is that of a run that was not.


def stop_at(monkeypatch, step: int) -> None:
    requests = contextlib.nullcontext(lambda now: now == step)
    monkeypatch.setattr(loop, "stop_requests", lambda: requests)


@pytest.mark.parametrize("stops", [(7, 13)])
def test_a_stopped_run_has_the_log_of_a_whole_one(tmp_path, monkeypatch, whole, stops):
    for step in stops:
        stop_at(monkeypatch, step)
        with pytest.raises(Stopped):
            train(tmp_path / "run")
    monkeypatch.undo()
    assert same(tmp_path / "run", train(tmp_path / "run"), whole)


def test_a_clock_that_jumps_backwards_does_not_matter(tmp_path, monkeypatch, whole):
    now = iter(range(2_000_000_000, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    monkeypatch.setattr(time, "time_ns", lambda: next(now) * 10**9)
    stop_at(monkeypatch, 12)
    with pytest.raises(Stopped):
        train(tmp_path / "run")
    stop_at(monkeypatch, 0)
    found = train(tmp_path / "run")
    monkeypatch.undo()
    assert same(tmp_path / "run", found, whole)


# ----- Damaged between two calls.


@pytest.mark.parametrize(
    "damage",
    [
        pathlib.Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(os.urandom(100)),
    ],
)
def test_a_finished_run_whose_log_is_lost_still_gives_its_result(
    tmp_path, whole, damage
):
    """The weights are tested again."""
    folder, expected, digest = whole
    run = shutil.copytree(folder, tmp_path / "run")
    damage(run / "metrics.jsonl")
    result, found = train(run)
    assert found == digest
    assert result.test_accuracy == expected.test_accuracy


def test_a_workdir_deleted_under_the_run_is_one_sentence(tmp_path):
    run = tmp_path / "run"

    def delete(step: int, loss: float) -> None:
        if step == 8:
            run.rename(tmp_path / "elsewhere")  # a save may be writing into it

    with pytest.raises(UserError, match=r"cannot be used|could not be written"):
        train_child.run(run, steps=STEPS, on_step=delete)


DAMAGE = {
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "overwritten": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": pathlib.Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["state/manifest.ocdbt", "progress/metadata"])
def test_a_damaged_checkpoint_is_one_sentence_for_its_run_and_its_readers(
    tmp_path, whole, damage, name
):
    run = shutil.copytree(whole[0], tmp_path / "run")
    last = run / "checkpoints" / str(STEPS)
    damage(last / name)
    with pytest.raises(UserError, match=rf"{last} cannot be read .*remove this"):
        train(run)
    if name.startswith("state"):
        with pytest.raises(UserError, match="does not hold weights of this model"):
            load_weights(train_child.TinyMLP(nnx.Rngs(1)), last)
    shutil.rmtree(last)  # the remedy
    result, digest = train(run)
    assert result.resumed_from == STEPS - 5
    assert digest == whole[2]


# ----- A file system that refuses.


def test_coord_check_on_a_read_only_file_system_is_one_sentence(
    tmp_path, capsys, monkeypatch
):
    mounted = tmp_path / "mounted"
    mounted.mkdir()

    def refuse(dir):  # as it answers everybody, the superuser too
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{dir}/tmp")

    monkeypatch.setattr(io.tempfile, "TemporaryFile", refuse)
    words = [TOY, f"--workdir={mounted}/new", f"--config.data_dir={tmp_path}"]
    assert cli.main(["mupax", "coord-check", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"'{mounted}' cannot be used: {os.strerror(errno.EROFS)}" in err


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (ValueError("WRITE: No space left on device"), "No space left on device"),
        (ValueError("the commit is older"), "the commit is older"),
        (TimeoutError("ChainedFuture completed 2/5 futures"), "the clock was set"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_says_why(error, why):
    """Only a full disk asks for room: other errors pass, e.g. after a clock was set."""
    fake = types.SimpleNamespace(_folder="runs/x/checkpoints", latest=lambda: 7)
    with (
        pytest.raises(UserError, match=f"{why}; .* step 7.*un the same") as said,
        Checkpoints._writing(fake),
    ):
        raise error
    assert ("Make room" in str(said.value)) == ("space" in why)
    assert "ChainedFuture" not in str(said.value)

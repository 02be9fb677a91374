"""Runs whose directory is damaged, or that are stopped: right, or one sentence."""

import contextlib
import errno
import gc
import logging
import os
import pathlib
import random
import shutil
import time
import types

import jax
import jax.numpy as jnp
import mutations
import numpy as np
import pytest
import train_child
from flax import nnx

from mupax.experiments import cli, io
from mupax.experiments.errors import Stopped, UserError
from mupax.experiments.run import loop, records
from mupax.experiments.run.checkpoints import (
    Checkpoints,
    load_weights,
    open_checkpoints,
)

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


def check_run(folder: pathlib.Path, seed: int, whole, warned) -> str:
    """Damage a file of a run, train to the end again; how it ended."""
    rng = random.Random(seed)
    run = shutil.copytree(whole[0], folder / "run")
    if rng.random() < 0.5:  # a run that has steps left
        shutil.rmtree(run / "checkpoints" / "20")
    path, kind = mutations.mutate_one(run, rng)
    told = len(warned())
    try:
        found = train(run)
    except UserError as error:
        said = str(error)
        assert len(said) > 20
        return "refused"
    if same(run, found, whole):
        return "right"
    # Numbers are missing from the curve: they were named, and none is another.
    result, digest = found
    _, expected, wanted = whole
    assert len(warned()) > told, (path, kind)
    assert digest == wanted, (path, kind)
    assert set(result.curve) <= set(expected.curve), (path, kind)
    assert set(result.evals) <= set(expected.evals), (path, kind)
    return "named"


@pytest.fixture
def warned(caplog):
    """What was logged as a warning."""
    caplog.set_level(logging.WARNING, "absl")
    return lambda: [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize("seeds", mutations.seeds(3, 100))
def test_mutated_runs(tmp_path, whole, warned, seeds):
    mutations.many(check_run, tmp_path, seeds, whole, warned)


# ----- Checkpoints alone, which most of a run's files belong to.


def state_of(step: int) -> dict:
    """What is saved at a step."""
    values = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    return {"weights": jnp.asarray(values), "count": jnp.asarray(step)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with open_checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {"examples": {"next": step}})
            checkpoints.wait()
    return folder


def check_weights(folder: pathlib.Path, seed: int, whole) -> str:
    """Damage the last checkpoint; its weights are those of the run, or refused."""
    rng = random.Random(seed)
    copy = shutil.copytree(whole[0] / "checkpoints" / "20", folder / "20")
    path, kind = mutations.mutate_one(copy, rng)
    model = train_child.TinyMLP(nnx.Rngs(1))
    try:
        load_weights(model, copy)
    except UserError:
        return "refused"
    assert train_child.digest(model) == whole[2], (path, kind)
    return "right"


@pytest.mark.parametrize("seeds", mutations.seeds(8, 100))
def test_mutated_weights(tmp_path, whole, seeds):
    counts = mutations.many(check_weights, tmp_path, seeds, whole)
    assert counts["refused"] > len(seeds) / 10


def check_checkpoint(folder: pathlib.Path, seed: int, saved: pathlib.Path) -> str:
    """Damage a file of a checkpoint; what is restored was saved, or it is refused."""
    rng = random.Random(seed)
    copy = shutil.copytree(saved, folder / "checkpoints")
    path, kind = mutations.mutate_one(copy, rng)
    try:
        with open_checkpoints(copy) as checkpoints:
            found = checkpoints.restore(like=state_of(0))
    except UserError:
        return "refused"
    assert found is not None
    wanted = state_of(found.step)
    for name, leaf in found.state.items():
        assert (np.asarray(leaf) == np.asarray(wanted[name])).all(), (path, kind)
    assert found.progress == {"examples": {"next": found.step}}, (path, kind)
    return "right" if found.step == 2 else "older"


@pytest.mark.parametrize("seeds", mutations.seeds(12, 150))
def test_mutated_checkpoints(tmp_path, saved, seeds):
    counts = mutations.many(check_checkpoint, tmp_path, seeds, saved)
    assert counts["refused"] > len(seeds) / 15


# ----- summary.json, which `mupax train --config.transfer_from` reads.


def test_mutated_summaries(tmp_path):
    for seed in range(mutations.FIRST, mutations.FIRST + 100):
        path = tmp_path / "summary.json"
        summary = {"transfer": {"base_depth": 8, "base_width": 16}}
        io.write_sealed(path, summary)
        kind = mutations.mutate(path, random.Random(seed))
        try:
            found = io.read_sealed(path, required=True)
        except (io.Damaged, FileNotFoundError):
            continue
        assert found == summary, (seed, kind)


def test_a_changed_summary_is_refused(tmp_path, capsys):
    path = tmp_path / "summary.json"
    io.write_sealed(path, {"transfer": {"base_width": 16}})
    path.write_text(path.read_text().replace("16", "32"))
    config = pathlib.Path(__file__).with_name("toy_train.py")
    words = [f"--config={config}", f"--config.transfer_from={path}"]
    assert cli.main(["mupax", "explain", *words]) == 2
    assert "checksum" in capsys.readouterr().err


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

"""Training: the same weights and curve, however often it is killed."""

import hashlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from patience import ended
from train_child import STEPS, TinyMLP, digest, run, toy_data

from mupax.experiments import data
from mupax.experiments import run as training
from mupax.experiments.errors import UserError
from mupax.experiments.run import loss

CHILD = pathlib.Path(__file__).with_name("train_child.py")


def spawn(workdir: pathlib.Path, *flags: str, devices: int = 1) -> subprocess.Popen:
    xla = f" --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(CHILD), str(workdir), *flags],
        env=os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + xla},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen) -> dict:
    out, err = ended(child)
    assert child.returncode == 0, err
    return json.loads(out)


def killed(child: subprocess.Popen) -> bool:
    """Waits for the end of a run, and says whether it killed itself."""
    ended(child)
    assert child.returncode in (0, -signal.SIGKILL)
    return child.returncode != 0


def contents(folder: pathlib.Path) -> dict[str, tuple[int, str]]:
    """Every file below a folder: when it was changed, and a hash of what it holds."""
    return {
        str(file.relative_to(folder)): (
            file.stat().st_mtime_ns,
            hashlib.sha256(file.read_bytes()).hexdigest(),
        )
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nobody killed: (workdir, result, digest of its weights)."""
    workdir = tmp_path_factory.mktemp("finished")
    result, model = run(workdir)
    return workdir, result, digest(model)


def assert_same(found: dict, finished) -> None:
    _, result, weights = finished
    assert found["digest"] == weights
    assert [tuple(point) for point in found["curve"]] == result.curve
    assert [tuple(score) for score in found["evals"]] == result.evals


# --- killed, and started again


@pytest.mark.ci
@pytest.mark.long
def test_a_killed_run_ends_with_the_same_weights_bit_for_bit(tmp_path, finished):
    # A step between two saves, the writing of one, and the writing of a later one.
    kills = [
        ("--kill-at-step", str(random.randint(6, 14))),
        ("--kill-in-save", "1"),
        ("--kill-in-save", str(random.randint(2, 4))),
    ]
    for kill in kills:
        assert killed(spawn(tmp_path / "run", *kill)), kills
    assert_same(finish(spawn(tmp_path / "run")), finished)


def test_the_step_that_a_run_goes_on_from_is_told(tmp_path):
    class Stop(Exception):
        pass

    def stop(step, loss):
        if step == 12:
            raise Stop

    with pytest.raises(Stop):
        run(tmp_path / "run", on_step=stop)
    steps = []
    result, _ = run(tmp_path / "run", on_step=lambda step, loss: steps.append(step))
    assert result.resumed_from == 10
    assert steps == list(range(10, STEPS + 1))


def test_a_finished_run_returns_at_once(finished):
    class Unused(TinyMLP):
        def __call__(self, x):
            raise AssertionError("it was called")

    workdir, result, weights = finished
    before = contents(workdir)
    again, model = run(workdir, model=Unused(nnx.Rngs(7)))
    assert (again.resumed_from, result.resumed_from) == (STEPS, None)
    assert (again.curve, again.evals) == (result.curve, result.evals)
    assert again.seconds == result.seconds
    assert digest(model) == weights
    assert contents(workdir) == before


# --- what is refused


def test_a_workdir_of_other_settings_is_refused_and_left_alone(finished):
    workdir = finished[0]
    before = contents(workdir)
    for changes, named in (
        ({"settings": {"lr": 0.02}}, r"settings\.lr \(0\.01, here 0\.02\)"),
        ({"seed": 2}, "seed"),
        ({"steps": STEPS + 1}, "steps"),
    ):
        with pytest.raises(UserError, match=named):
            run(workdir, **changes)
    assert contents(workdir) == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"batch_size": 12, "mesh": AbstractMesh((8,), ("data",))},
            r"12 does not divide over 8 devices.*such as 16",
        ),
        ({"batch_size": 201}, "more than the 200 training examples of toy"),
        ({"save_every": 0}, "save_every is 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path, changes, sentence
):
    with pytest.raises(UserError, match=sentence):
        run(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    tx = optax.chain(
        optax.sgd(0.1),
        optax.scale_by_schedule(lambda step: jax.numpy.where(step < 7, 1.0, np.nan)),
    )
    words = r"nan at step 9; lower the learning rate.*step 5 is good"
    with pytest.raises(UserError, match=words):
        run(tmp_path / "run", tx=tx, plain=True)
    # The last checkpoint is one from which the loss was finite.
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["5"]


# --- what is computed


@pytest.mark.ci
@pytest.mark.long
def test_eight_devices_and_then_one_give_the_losses_of_one(tmp_path, finished):
    workdir = tmp_path / "run"
    assert killed(spawn(workdir, "--kill-at-step", "33", devices=8))
    result, _ = run(workdir)
    # A save is asynchronous: the one of step 30 may not have been whole yet.
    assert result.resumed_from in (25, 30)
    np.testing.assert_allclose(result.curve, finished[1].curve, rtol=1e-4)
    np.testing.assert_allclose(result.evals, finished[1].evals, rtol=1e-4)


@pytest.mark.ci
@pytest.mark.long
def test_two_processes_and_then_one_give_the_losses_of_one(tmp_path, finished):
    workdir = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = ("--port", port, "--kill-at-step", "33", "--process")
    for child in [spawn(workdir, *flags, rank) for rank in "01"]:
        # Either the order to die, or the loss of the other one, ends it.
        ended(child)
        assert child.returncode < 0
    result, _ = run(workdir)
    assert result.resumed_from in (25, 30)
    np.testing.assert_allclose(result.curve, finished[1].curve, rtol=1e-4)
    np.testing.assert_allclose(result.evals, finished[1].evals, rtol=1e-4)


def test_the_loop_is_what_it_says_it_is(tmp_path):
    """Against SGD written out, with none of the machinery."""
    (mean, std), toy = toy_data().statistics, toy_data().training_arrays()
    model = TinyMLP(nnx.Rngs(0), plain=True)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def loss(params, images, labels):
        logits = nnx.merge(graph, params, rest)(
            (images.astype(np.float32) - mean[0]) / std[0]
        )
        chosen = jax.nn.log_softmax(logits)[np.arange(16), labels]
        return -chosen.mean()

    expected = []
    for index in data.batch_indices(200, 16, 1, 20):
        value, grads = jax.value_and_grad(loss)(
            params, toy["image"][index], toy["label"][index]
        )
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        expected.append(float(value))
    result, model = run(tmp_path / "run", plain=True, steps=20, tx=optax.sgd(0.1))
    np.testing.assert_allclose([loss for _, loss in result.curve], expected, rtol=1e-5)
    assert result.train_loss == pytest.approx(np.mean(expected), rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        nnx.state(model, nnx.Param),
        params,
    )


def test_everything_trainable_is_trained_and_nothing_frozen(finished):
    start, end = TinyMLP(nnx.Rngs(0)), TinyMLP(nnx.Rngs(0))
    training.load_weights(end, finished[1].checkpoint)
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()),
        *(nnx.state(model, nnx.Param) for model in (start, end)),
    )
    assert not any(jax.tree.leaves(same))
    np.testing.assert_array_equal(start.gain[...], end.gain[...])
    # Statistics and random streams go along.
    assert (start.norm.mean[...] != end.norm.mean[...]).all()
    assert int(end.drop.rngs.count[...]) == STEPS


def test_one_compilation_trains_and_one_tests(tmp_path):
    calls = []

    class Counted(TinyMLP):
        def __call__(self, x):
            calls.append(x.shape)
            return super().__call__(x)

    run(tmp_path / "run", model=Counted(nnx.Rngs(0)))
    assert calls == [(16, 4, 4, 1), (16, 4, 4, 1)]


def test_nothing_moves_to_or_from_the_device_unasked(tmp_path):
    model = TinyMLP(nnx.Rngs(0), plain=True)
    with jax.transfer_guard("disallow"):
        run(tmp_path / "run", model=model, tx=optax.sgd(0.1), steps=10)


def test_a_model_keeps_its_arrays_when_its_run_fails(tmp_path):
    model = TinyMLP(nnx.Rngs(0))
    before = digest(model)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", model=model, on_step=lambda step, loss: 1 / 0)
    assert digest(model) == before


def test_optimizers_that_keep_the_parameters_themselves_work(tmp_path):
    tx = optax.chain(optax.sgd(0.1), optax.ema(0.9), optax.contrib.schedule_free_sgd())
    result, _ = run(tmp_path / "run", plain=True, tx=tx, steps=5)
    assert np.isfinite(result.test_loss)


@pytest.mark.parametrize("batch_size", [1, 10, 37, 64])
def test_every_test_example_counts_once_whatever_the_batch(finished, batch_size):
    _, result, _ = finished
    model = TinyMLP(nnx.Rngs(3))
    training.load_weights(model, result.checkpoint)
    found = training.evaluate(model, toy_data(), batch_size=batch_size)
    expected = (result.test_loss, result.test_accuracy)
    assert found == pytest.approx(expected, rel=1e-5)


def test_model_and_loss_need_no_implicit_promotion(strict_dtypes):
    model, toy = TinyMLP(nnx.Rngs(0), plain=True), toy_data()
    objective = loss.Classification(
        lambda images: data.normalize(images, *toy.statistics), toy.out_features
    )
    batch = toy.training_arrays()
    assert objective.loss(model, batch, jax.random.key(0))[0].dtype == np.float32

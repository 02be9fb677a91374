"""`mupax train` and `mupax eval`: stopped, killed, moved, and misused."""

import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest
from commands import TOY_TRAIN as TOY
from commands import mupax, refused
from flax import nnx
from patience import MUPAX, ended, pair_flags, wait_until

from mupax import zoo
from mupax.experiments.errors import UserError
from mupax.experiments.run import build
from mupax.experiments.run.config import defaults, parse
from mupax.experiments.run.hyperparameters import transfer_record
from mupax.experiments.run.records import read


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("tfds"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_dir) -> pathlib.Path:
    """The run that nobody stopped."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert mupax("train", TOY, f"--workdir={run}", f"--config.data_dir={data_dir}") == 0
    return run


def spawn(*args: object, devices: int = 1) -> subprocess.Popen:
    xla = f" --xla_force_host_platform_device_count={devices}"
    child = subprocess.Popen(
        [sys.executable, "-c", MUPAX, *map(str, args)],
        env=os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + xla},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children.append(child)
    return child


children: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nobody_is_left():
    """A test that fails leaves no process behind."""
    yield
    while children:
        child = children.pop()
        if child.poll() is None:
            child.kill()
            child.communicate()


def curve(run: pathlib.Path) -> list[dict[str, float]]:
    """What a run's records say that does not depend on the clock."""
    keys = ("step", "loss", "learning_rate", "test_loss", "test_accuracy")
    return [{key: line[key] for key in keys if key in line} for line in read(run)]


def wait_for_step(run: pathlib.Path, step: int, child: subprocess.Popen) -> None:
    """Until a run has written down a step."""
    wait_until(lambda: any(line["step"] >= step for line in read(run)), child)


def test_a_run_leaves_records_checkpoints_events_and_a_model(finished, capsys):
    lines = read(finished)
    assert [line["step"] for line in lines if "loss" in line] == list(range(3, 421, 3))
    assert [line["step"] for line in lines if "test_loss" in line] == list(
        range(20, 421, 20)
    )
    last = [line for line in lines if "loss" in line][-1]
    assert {
        "learning_rate",
        "gradient_norm",
        "parameter_norm/hidden",
        "update_norm/hidden",
        "examples_per_second",
        "step_seconds",
    } <= last.keys()
    assert list((finished / "tensorboard").iterdir())
    model = zoo.load_pretrained("resmlp", finished / "model")
    assert model.plan.width == 2.0
    # Evaluation of the same checkpoint gives the same score.
    args = ("eval", TOY, f"--workdir={finished}")
    assert mupax(*args) == 0
    score = [line for line in lines if "test_loss" in line][-1]
    assert f"test loss {score['test_loss']:.4f}" in capsys.readouterr().out


def test_a_flipped_bit_in_the_saved_model_of_a_finished_run_is_found(
    finished, tmp_path, data_dir, capsys
):
    run = shutil.copytree(finished, tmp_path / "run")
    args = (TOY, f"--workdir={run}", f"--config.data_dir={data_dir}")
    weights = run / "model" / "weights.npz"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    for command in ("train", "eval"):
        said = refused(capsys, command, *args)
        assert f"the weights in {run}/model cannot be read" in said
    # What the sentence says to do.
    shutil.rmtree(run / "model")
    assert mupax("train", *args) == 0
    zoo.load_pretrained("resmlp", run / "model")


def test_utilization_is_logged_where_the_peak_is_known(tmp_path, data_dir, monkeypatch):
    monkeypatch.setattr(
        "mupax.experiments.run.prepare.peak_flops", lambda devices: 1e12
    )
    args = [TOY, f"--workdir={tmp_path / 'run'}", f"--config.data_dir={data_dir}"]
    args += ["--config.steps=9", "--config.schedule.warmup=0"]
    assert mupax("train", *args) == 0
    line = [line for line in read(tmp_path / "run") if "mfu" in line][-1]
    # Forward and backward of 64 x 32, four times 32 x 32 and 32 x 10, but not the
    # gradient of the input: two flops each, 32 examples.
    weights = 64 * 32 + 4 * 32 * 32 + 32 * 10
    flops = 2 * 32 * (3 * weights - 64 * 32)
    assert line["mfu"] * line["step_seconds"] * 1e12 == pytest.approx(flops, rel=0.01)


def test_two_newest_and_the_best_checkpoint_are_kept(finished, capsys):
    kept = {int(path.name) for path in (finished / "checkpoints").iterdir()}
    # Saved every 7 steps, and scored every 20.
    scored = [x for x in read(finished) if "test_loss" in x and x["step"] % 140 == 0]
    best = min(scored, key=lambda line: line["test_loss"])["step"]
    assert kept == {413, 420, best}
    assert mupax("eval", TOY, f"--workdir={finished}", "--checkpoint=best") == 0
    assert f"step {best}:" in capsys.readouterr().out


@pytest.mark.long
def test_sigterm_saves_and_exits_with_zero_and_the_run_goes_on(
    tmp_path, finished, data_dir
):
    run = tmp_path / "run"
    args = ("train", TOY, f"--workdir={run}", f"--config.data_dir={data_dir}")
    child = spawn(*args)
    wait_for_step(run, 9, child)
    child.send_signal(signal.SIGTERM)
    _, err = ended(child)
    assert child.returncode == 0, err
    assert "saved at step" in err
    stopped = max(int(path.name) for path in (run / "checkpoints").iterdir())
    assert 9 <= stopped < 420
    assert f"step {stopped}" in err
    assert mupax(*args) == 0
    assert curve(run) == curve(finished)


@pytest.mark.long
def test_eight_devices_then_two_processes_then_one_device_go_on_alike(
    tmp_path, finished, data_dir
):
    """As FSDP, as FSDP x tensor in 2 processes, and on one device."""
    run = tmp_path / "run"
    args = ("train", TOY, f"--workdir={run}", f"--config.data_dir={data_dir}")
    child = spawn(*args, "--config.mesh.data=1", "--config.mesh.fsdp=8", devices=8)
    wait_for_step(run, 12, child)
    child.send_signal(signal.SIGTERM)
    _, err = ended(child)
    assert child.returncode == 0, err

    mesh = "--config.mesh.fsdp=2", "--config.mesh.tensor=2"
    pair = [spawn(*args, *mesh, *flags, devices=4) for flags in pair_flags()]
    wait_for_step(run, 36, pair[0])
    # Told to one of them, both stop at the same step.
    pair[1].send_signal(signal.SIGTERM)
    for child in pair:
        _, err = ended(child)
        assert child.returncode == 0, err
        assert "saved at step" in err

    assert mupax(*args) == 0
    for found, expected in zip(curve(run), curve(finished), strict=True):
        assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.long
def test_stopped_at_24_random_moments_it_ends_with_the_same_weights_and_log(
    tmp_path, data_dir
):
    rng = random.Random(0)
    signals = [signal.SIGKILL, signal.SIGINT, signal.SIGTERM] * 8

    def args(run: str) -> list[str]:
        return [
            *("train", TOY, f"--workdir={tmp_path / run}"),
            *(f"--config.data_dir={data_dir}", "--config.steps=3000"),
        ]

    assert mupax(*args("whole")) == 0
    killed, done = tmp_path / "killed", 0
    for how in signals:
        child = spawn(*args("killed"))
        wait_for_step(killed, done + rng.randint(3, 60), child)
        # Anywhere in a step, an evaluation (every 20) or a save (every 7).
        time.sleep(rng.uniform(0, 0.2))
        assert child.poll() is None
        child.send_signal(how)
        _, err = child.communicate()
        assert "Traceback" not in err, err
        done = read(killed)[-1]["step"]
    assert mupax(*args("killed")) == 0
    assert curve(killed) == curve(tmp_path / "whole")
    models = [
        nnx.state(zoo.load_pretrained("resmlp", tmp_path / run / "model"))
        for run in ("whole", "killed")
    ]
    same = jax.tree.map(lambda a, b: bool((a == b).all()), *models)
    assert all(jax.tree.leaves(same))


def pair(run: pathlib.Path, data_dir: str) -> list[subprocess.Popen]:
    """Two processes that train one model together."""
    words = ["train", TOY, f"--workdir={run}", f"--config.data_dir={data_dir}"]
    words += ["--config.steps=60", "--config.mesh.fsdp=2"]
    return [spawn(*words, *flags, devices=2) for flags in pair_flags()]


def finish(processes: list[subprocess.Popen]) -> None:
    for child in processes:
        _, err = ended(child)
        assert child.returncode == 0, err


@pytest.fixture(scope="module")
def finished_pair(tmp_path_factory, data_dir) -> pathlib.Path:
    """The run of two processes that nobody stopped."""
    run = tmp_path_factory.mktemp("runs") / "pair"
    finish(pair(run, data_dir))
    return run


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_of_two_processes_is_killed_the_pair_goes_on_bit_for_bit(
    tmp_path, data_dir, finished_pair, victim
):
    run = tmp_path / "killed"
    killed = pair(run, data_dir)
    wait_for_step(run, 30, killed[0])
    killed[victim].kill()
    for child in killed:
        ended(child)
        assert child.returncode != 0
    finish(pair(run, data_dir))
    assert curve(run) == curve(finished_pair)


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(tmp_path, data_dir, capsys):
    run = tmp_path / "run"
    args = ("train", TOY, f"--workdir={run}", f"--config.data_dir={data_dir}")
    assert mupax(*args, "--dry_run") == 0
    out = capsys.readouterr().out
    for word in ("resmlp", "width x 2", "depth x 2", "digits", "adamw", "MiB"):
        assert word in out
    assert not run.exists()


def test_fine_tuning_starts_from_the_pretrained_weights(tmp_path, data_dir):
    """The shipped model scores as it was shipped, before a step changes it."""
    run = tmp_path / "run"
    shipped = pathlib.Path(zoo.__file__).parent / "checkpoints" / "resmlp_digits"
    other = tmp_path / "transfer"  # a run directory, which holds the model
    (other / "target").mkdir(parents=True)
    (other / "model").symlink_to(shipped)
    assert (
        mupax(
            "train",
            TOY,
            f"--workdir={run}",
            f"--config.data_dir={data_dir}",
            f"--config.init_from={other / 'target'}",
            "--config.learning_rate=1e-9",
            "--config.base_width=64",
            "--config.base_depth=8",
            "--config.steps=2",
            "--config.schedule.warmup=0",
            "--config.model.width=64",
            "--config.model.depth=8",
        )
        == 0
    )
    assert read(run)[-1]["test_accuracy"] == pytest.approx(0.978, abs=0.002)


def test_another_process_in_the_same_workdir_is_refused(tmp_path, data_dir, capsys):
    run = tmp_path / "run"
    args = ("train", TOY, f"--workdir={run}", f"--config.data_dir={data_dir}")
    child = spawn(*args)
    try:
        wait_for_step(run, 3, child)
        child.send_signal(signal.SIGSTOP)
        assert "another process uses" in refused(capsys, *args)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.long
@pytest.mark.parametrize("most", [2000, 100])  # arrays fail; even metadata fails
def test_when_the_disk_is_full_the_last_good_checkpoint_stays(tmp_path, data_dir, most):
    run = tmp_path / "run"
    # Checkpoints are more frequent than lines of metrics, so that they fail first.
    often = ("--config.log_every=100", "--config.save_every=3")
    args = ("train", TOY, f"--workdir={run}", f"--config.data_dir={data_dir}", *often)
    child = spawn(*args)
    wait_for_step(run, 15, child)
    # From now on no file can grow past this: what a full disk looks like to a writer.
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (most, most))
    _, err = ended(child)
    assert child.returncode == 2, err
    (sentence,) = [line for line in err.splitlines() if line.startswith("mupax: ")]
    assert "File too large" in sentence
    assert "the last one is of step" in sentence or "checkpoint is kept" in sentence
    # The threads of TensorStore and TensorBoard add nothing to the sentence.
    assert "Traceback" not in err
    assert mupax(*args) == 0
    assert read(run)[-1]["step"] == 420


def test_a_workdir_that_cannot_be_written_is_refused(tmp_path, data_dir, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    args = ("train", TOY, f"--config.data_dir={data_dir}")
    refused(capsys, *args, f"--workdir={file}")
    refused(capsys, *args, f"--workdir={file}/below")
    assert file.read_text() == "mine"


def test_a_checkpoint_of_another_model_is_refused(tmp_path, finished, data_dir, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    args = (TOY, f"--workdir={copy}", "--config.model.width=64")
    for command in ("eval", "train"):
        assert "model.width (32, here 64)" in refused(capsys, command, *args)
    (copy / "experiment.json").unlink()
    err = refused(capsys, "eval", *args)
    assert "does not hold weights of this model" in err
    assert "layers.0.kernel.value has shape (4, 32, 32); expected (4, 64, 64)" in err
    assert "no checkpoint '7'" in refused(
        capsys, "eval", TOY, f"--workdir={copy}", "--checkpoint=7"
    )
    assert "holds no checkpoints" in refused(
        capsys, "eval", TOY, f"--workdir={tmp_path}"
    )
    copy.rename(tmp_path / "target")  # as in the directory of a transfer
    assert f"give --workdir={tmp_path}/target" in refused(
        capsys, "eval", TOY, f"--workdir={tmp_path}"
    )


@pytest.mark.parametrize(
    "flag",
    [
        "model.branch_multiplier=4.0",
        "model.nonlinearity=abs",
        "base_depth=1",
        "ema=0.99",
        "parametrization.name=completep",
    ],
)
def test_eval_refuses_a_model_that_computes_another_function(finished, capsys, flag):
    """The weights have the same shapes, so that another accuracy was printed."""
    args = ("eval", TOY, f"--workdir={finished}")
    err = refused(capsys, *args, f"--config.{flag}")
    assert flag.split("=")[0] in err
    assert "may evaluate another function" in err
    # What training alone uses may differ, and a default may be written out.
    same = ("learning_rate=0.5", "batch_size=16", "model.remat=True", "data.threads=2")
    same += ("model.nonlinearity=relu",)
    assert mupax(*args, *(f"--config.{key}" for key in same)) == 0


@pytest.mark.parametrize("settings", [{"learning_rate": 0.1}, {"model": "my model"}])
def test_eval_refuses_a_run_of_fit_with_settings_of_its_own(tmp_path, capsys, settings):
    stored = {"settings": settings, "dataset": "digits"}
    (tmp_path / "experiment.json").write_text(json.dumps(stored))
    err = refused(capsys, "eval", TOY, f"--workdir={tmp_path}")
    assert "may evaluate another function" in err


def record(examples=None, **values) -> dict:
    """What a transfer stores that tuned the learning rate, and perhaps more."""
    base = {
        "model": {"name": "resmlp", "width": 8, "depth": 2},
        "modules": {"head": {"pattern": "role:output"}}
        if "head/multiplier" in values
        else {},
        "optimizer": {"name": "adam"},
        "batch_size": 64,
        "learning_rate": 1.0,
        "clip_norm": 1.0 if values else None,
    }
    return transfer_record(
        parse(base), {"learning_rate": 2.0**-8.5, **values}, examples
    )


def test_what_a_sweep_found_is_taken_over(tmp_path, data_dir, capsys):
    summary = {"transfer": record()}
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary))
    args = [
        "train",
        TOY,
        f"--config.data_dir={data_dir}",
        f"--config.transfer_from={path}",
        "--dry_run",
    ]
    assert mupax(*args) == 0
    out = capsys.readouterr().out
    assert "width x 4, depth x 2" in out
    assert "learning rate 0.00276 at the base" in out
    assert f"from {path}" in out
    assert "adam," in out
    summary["transfer"]["config"]["model"]["name"] = "cnn"
    path.write_text(json.dumps(summary))
    said = "has the hyperparameters of 'cnn', and model.name is 'resmlp'"
    assert said in refused(capsys, *args)
    found = {"warmup": 0.1, "label_smoothing": 0.1, "branch_multiplier": 2.0}
    summary = {"transfer": record(100, **found, **{"head/multiplier": 2.0})}
    path.write_text(json.dumps(summary))
    for key in ("seed=1", "model.remat=True", "schedule.name=cosine"):
        assert mupax(*args, f"--config.{key}") == 0
    for key, value in {
        **dict.fromkeys(("learning_rate", "model.branch_multiplier"), 0.5),
        **dict.fromkeys(("optimizer.b1", "clip_norm", "label_smoothing"), 0.5),
        **dict.fromkeys(("base_examples", "schedule.warmup"), 7),
        "modules": "{}",
    }.items():
        said = f"--config.{key} is set, and transfer_from replaces it"
        assert said in refused(capsys, *args, f"--config.{key}={value}")


def transferred(tmp_path, warmup=0.0, **tuned):
    """A run's config, after a sweep that tuned more than the learning rate."""
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"transfer": record(warmup=warmup, **tuned)}))
    config = defaults()
    config.dataset = "digits"
    config.transfer_from = str(path)
    return config


def test_all_that_a_sweep_tuned_is_taken_over(tmp_path):
    config = transferred(
        tmp_path,
        branch_multiplier=2.0,
        warmup=0.1,
        label_smoothing=0.05,
        init_scale=0.5,
    )
    config.steps = 500
    found = parse(config)
    assert found.model.options["branch_multiplier"] == 2.0
    assert found.schedule.options["warmup"] == 50
    assert found.label_smoothing == 0.05
    assert found.init_scale == 0.5


def test_it_takes_the_place_of_what_the_config_says(tmp_path):
    config = transferred(tmp_path, branch_multiplier=2.0)
    config.learning_rate, config.base_width = 0.5, 77
    config.model.branch_multiplier = 3.0
    found = parse(config)
    assert found.learning_rate == 2.0**-8.5
    assert (found.base_width, found.base_depth) == (8, 2)
    assert found.model.options["branch_multiplier"] == 2.0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"transfer": 3}', '{"transfer": {"config": 1', "\x00"]
)
def test_a_file_that_is_no_summary_is_one_sentence(tmp_path, text):
    path = tmp_path / "summary.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"is not the summary\.json"):
        parse({"transfer_from": str(path)})
    with pytest.raises(UserError, match=r"did you mean '.*/summary\.json'\?"):
        parse({"transfer_from": str(tmp_path)})


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_run_does_not_resume_over_other_data(command, tmp_path, capsys):
    song = tmp_path / "song.txt"
    first = "one green bottle, hanging on the wall\n" * 40
    song.write_text(first)
    config = tmp_path / "config.py"
    config.write_text(
        f"""
from mupax.experiments import defaults

def get_config():
    c = defaults({command!r})
    c.dataset, c.data.context = "text:{song}", 16
    c.model.name, c.model.width, c.model.depth, c.model.head_dim = "gpt", 8, 1, 8
    c.steps, c.batch_size, c.learning_rate = 4, 4, 0.01
    if {command == "sweep"}:
        c.sweep.axes.learning_rate, c.sweep.seeds = "2**[-9:-7:1]", 1
    return c
"""
    )
    words = command, f"--config={config}", f"--workdir={tmp_path / 'run'}"
    assert mupax(*words) == 0
    song.write_text(first.replace("green", "brown"))
    build._opened.cache_clear()  # as in another process
    said = refused(capsys, *words)
    assert f"the examples of text:{song} have changed since the run in" in said
    song.write_text(first)
    build._opened.cache_clear()
    assert mupax(*words) == 0

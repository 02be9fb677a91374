"""The target is trained with every hyperparameter that was swept."""

import concurrent.futures
import csv
import dataclasses
import json
import math
import pathlib
import types
from unittest import mock

import numpy as np
import optax
import pytest
import rich.console
import sweep_toys
from commands import refused
from flax import nnx

from mupax import zoo
from mupax.experiments import cli, transfer
from mupax.experiments import run as training
from mupax.experiments.cli import flags
from mupax.experiments.errors import Diverged, UserError
from mupax.experiments.run.build import open_dataset
from mupax.experiments.run.checkpoints import open_checkpoints
from mupax.experiments.run.config import RunConfig, parse
from mupax.experiments.run.hyperparameters import transfer_record, tuned
from mupax.experiments.run.records import read
from mupax.experiments.sweep import at_base, space
from mupax.experiments.sweep.results import Population
from mupax.experiments.sweep.space import SweepConfig

TOY = pathlib.Path(__file__).with_name("toy_config.py")
TUNED = {
    "init_scale": 0.5,
    "warmup": 0.5,
    "label_smoothing": 0.2,
    "b1": 0.8,
    "branch_multiplier": 2.0,
    "richness": 4.0,
}


@pytest.fixture(scope="module")
def config() -> SweepConfig:
    return transfer.parse(flags.parse(["transfer", f"--config={TOY}"]).config)


def found(config: SweepConfig) -> Population:
    """The base's runs, of which the one with TUNED is the best."""
    axes = {"learning_rate": [0.01], **{k: [v / 2, v] for k, v in TUNED.items()}}
    loss = np.ones((2, *map(len, axes.values())))
    loss[(slice(None), 0, *[1] * len(TUNED))] = 0.5
    return Population(
        "n", "depth_mup", *config.sizes, {}, axes, loss, loss[..., None], 0.0
    )


@pytest.fixture(scope="module")
def best(config) -> dict[str, float]:
    return transfer.best_of_base(config, [found(config)])


def test_factors_of_groups_are_tuned_at_the_base_and_kept(config, tmp_path):
    few = dataclasses.replace(
        config,
        axes={"learning_rate": (0.01, 0.02, 0.04)},
        base_axes={"hidden/learning_rate": (1.0, 4.0)},
    )
    console = rich.console.Console(quiet=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit = mock.Mock(wraps=pool.submit)
        tuned_sweep = at_base.tune(few, tmp_path, console, pool)
    assert pool.submit.call_count == 1  # it trains where the sweep does
    table = (tmp_path / "base" / "results.csv").read_text()
    rows = list(csv.DictReader(table.splitlines()))
    points = [(row["hidden/learning_rate"], row["learning_rate"]) for row in rows]
    assert len(set(points)) == 2 * 3
    assert {(row["width"], row["depth"]) for row in rows} == {("8", "2")}
    losses = {
        point: math.prod(
            float(row["loss"])
            for row, other in zip(rows, points, strict=True)
            if other == point
        )
        for point in points
    }
    (factor, _) = min(losses, key=lambda point: losses[point])
    assert tuned_sweep.base.modules["hidden"]["learning_rate"] == float(factor)
    assert tuned_sweep.target.modules == tuned_sweep.base.modules
    assert not tuned_sweep.base_axes
    assert all(
        task.config.modules == tuned_sweep.base.modules
        for task in space.tasks(tuned_sweep)
    )


@pytest.fixture(scope="module")
def target(config, best) -> RunConfig:
    return tuned(config.target, best)


def test_the_best_values_are_those_of_the_base(best):
    assert best == {"learning_rate": pytest.approx(0.01), **TUNED}


def test_the_target_is_the_base_but_for_its_size_and_what_was_tuned(config, target):
    assert target.model.options["width"] == 16
    assert target.model.options["depth"] == 4
    assert (target.base_width, target.base_depth) == config.sizes
    assert target.learning_rate == pytest.approx(0.01)
    assert target.init_scale == 0.5
    assert target.schedule.plain() == {
        "name": "cosine",
        "warmup": 15,  # of 30 steps
        "decay": 0,
        "final": 0.0,
    }
    assert target.label_smoothing == 0.2
    assert target.optimizer.plain() == {"name": "adam", "b1": 0.8}
    assert target.model.options["branch_multiplier"] == 2.0
    assert target.rules.richness == 4.0
    assert config.target.init_scale == 1.0  # the sweep's own is as it was


def test_transfer_from_gives_the_same_run_as_transfer(config, best, target, tmp_path):
    """Both replace by one function, and nothing that was tuned is lost."""
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"transfer": transfer_record(config.base, best)}))
    given = config.target.plain() | {"learning_rate": 1.0, "base_width": 2}
    read = parse(given | {"transfer_from": str(path)})
    assert read.plain() == target.plain() | {"transfer_from": str(path)}


def test_a_run_directory_may_lie_behind_a_link(tmp_path):
    """The transfer failed after all of its runs."""
    (tmp_path / "disk").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "disk")
    checkpoint = open_checkpoints(link / "target" / "checkpoints")
    with checkpoint as files:
        trained = types.SimpleNamespace(checkpoint=files.path(600))
    assert transfer._below(link, trained) == f"{link}/target/checkpoints/600"


def test_a_fit_smooths_the_labels_that_it_learns_from(tmp_path):
    data = sweep_toys.stripes()
    model = zoo.create(
        "resmlp",
        input_shape=(4, 4, 1),
        out_features=4,
        width=8,
        depth=1,
        rngs=nnx.Rngs(0),
    )
    arrays = data.training_arrays()
    logits = model(data.normalize(arrays)["image"])
    labels = optax.smooth_labels(np.eye(4)[arrays["label"]], 0.3)
    wanted = float(optax.softmax_cross_entropy(logits, labels).mean())
    losses = []
    training.fit(
        model,
        optax.sgd(0.1),
        data,
        workdir=tmp_path,
        batch_size=len(labels),
        steps=1,
        seed=0,
        eval_every=1,
        save_every=1,
        on_step=lambda step, loss: losses.append(loss),
        label_smoothing=0.3,
    )
    assert losses[-1] == pytest.approx(wanted, rel=1e-5)


BASE = "c.sweep.base_axes"
CHOICES = "c.sweep.choices"
MISTAKES = {
    f"{BASE}.nothing = (1.0,)": "sweep.base_axes has 'nothing'",
    f"{BASE}.b1 = (0.9,)": "tunes factors of groups",
    f"c.sweep.axes['hidden/learning_rate'] = {BASE}['hidden/learning_rate'] = (1.0,)": (
        "at every size"
    ),
    f"{CHOICES} = (('model.width', (8, 16)),)": "sizes go into sweep.widths",
    f"c.sweep.axes.b1 = (0.8, 0.9); {CHOICES} = (('optimizer.b1', (0.8, 0.9)),)": (
        "sweep.axes has 'b1'; leave one"
    ),
    f"c.accumulate = 4; {CHOICES} = (('batch_size', (64, 30)),)": (
        "30 does not divide into 4 parts"
    ),
    f"{CHOICES} = (('batch_size', (64, 100_000)),)": (
        "is more than the 20000 training examples"
    ),
}


def changed(change, tmp_path):
    """The toy config with a change, in a file."""
    path = tmp_path / "changed.py"
    code = TOY.read_text().replace("    return c", f"    {change}\n    return c")
    path.write_text(code)
    return path


@pytest.mark.parametrize("change", MISTAKES)
def test_what_cannot_be_swept_is_one_sentence_before_any_run(change, capsys, tmp_path):
    path, run = changed(change, tmp_path), tmp_path / "run"
    said = refused(capsys, "sweep", f"--config={path}", f"--workdir={run}")
    assert MISTAKES[change] in said
    assert not run.exists()


def test_a_transfer_has_no_choices(tmp_path):
    path = changed(f"{CHOICES} = (('batch_size', (16, 32)),)", tmp_path)
    with pytest.raises(UserError, match=r"sweep\.choices must be empty"):
        transfer.parse(flags.parse(["transfer", f"--config={path}"]).config)


GPT = """
from ml_collections import ConfigDict
from mupax.experiments.run.config import defaults


def get_config():
    c = defaults("sweep", "target")
    c.dataset = "text:{text}"
    c.data = ConfigDict({{"context": 8}})
    c.model = ConfigDict({{"name": "gpt", "width": 8, "depth": 1, "head_dim": 4}})
    c.optimizer = ConfigDict({{"name": "adam"}})
    c.learning_rate = 0.01
    c.clip_norm = 1.0
    c.batch_size = 4
    c.steps = 6
    c.log_every = 1
    c.sweep.axes.learning_rate = (0.005, 0.01, 0.02)
    c.sweep.axes.init_scale = (0.5, 1.0)
    c.modules = ConfigDict({{"tables": {{"pattern": "role:input"}}}})
    c.sweep.base_axes = ConfigDict({{"tables/learning_rate": (2.0, 4.0)}})
    c.sweep.widths = (8, 16)
    c.sweep.seeds = 1
    c.target.width = 16
    c.target.depth = 2
    c.target.steps = 8
    c.target.mesh = ConfigDict({{"data": 1, "fsdp": -1}})
    return c
"""


@pytest.mark.long
def test_a_gpt_is_transferred_with_clipping_and_init_scale(tmp_path):
    """And the target leaves what `mupax train` leaves, evaluations on text included."""
    text = tmp_path / "song.txt"
    text.write_text("".join(f"{k} green bottles on the wall;\n" for k in range(60)))
    path = tmp_path / "gpt.py"
    path.write_text(GPT.format(text=text))
    run = tmp_path / "run"
    assert cli.main(["mupax", "transfer", f"--config={path}", f"--workdir={run}"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    values = summary["transfer"]["hyperparameters"]
    assert set(values) == {"learning_rate", "init_scale"}
    assert summary["transfer"]["config"]["clip_norm"] == 1.0
    modules = summary["transfer"]["config"]["modules"]
    assert modules["tables"]["learning_rate"] in (2.0, 4.0)
    lines = read(run / "target")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert lines[-1]["test_loss"] == pytest.approx(summary["target"]["test_loss"])
    assert list((run / "target" / "tensorboard").iterdir())
    assert zoo.load_pretrained("gpt", run / "model").plan.width == 2.0
    # The same run by `mupax train`, step by step.
    trained = tmp_path / "trained"
    words = [f"--config={path}", f"--workdir={trained}"]
    words += [f"--config.transfer_from={run / 'summary.json'}", "--config.steps=8"]
    words += ["--config.model.width=16", "--config.model.depth=2"]
    assert cli.main(["mupax", "train", *words]) == 0
    losses = [line["loss"] for line in read(trained) if "loss" in line]
    wanted = [line["loss"] for line in lines if "loss" in line]
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)


def test_an_open_dataset_is_shared_by_the_runs_of_a_process(config, tmp_path):
    base = parse(config.base.plain() | {"data_dir": str(tmp_path)})
    assert open_dataset(base) is open_dataset(base.sized(8, 8))


def test_another_model_than_the_tuned_one_is_refused(config, best, tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"transfer": transfer_record(config.base, best)}))
    given = config.target.plain() | {"learning_rate": 1.0, "transfer_from": str(path)}
    given["model"] = given["model"] | {"nonlinearity": "gelu"}
    with pytest.raises(UserError, match=r"tuned with model.nonlinearity=.* only small"):
        parse(given)
    given["model"] = given["model"] | {"nonlinearity": None, "remat": True}
    assert parse(given).base_depth == config.base.base_depth


def test_another_schedule_than_the_tuned_one_is_refused(config, best, tmp_path):
    path = tmp_path / "summary.json"
    record = transfer_record(config.base, best)
    path.write_text(json.dumps({"transfer": record}))
    given = config.target.plain() | {"learning_rate": 1.0, "transfer_from": str(path)}
    name = given["schedule"]["name"]
    other = "cosine" if name == "constant" else "constant"
    given["schedule"] = {"name": other}
    said = f"tuned with schedule.name='{name}', and here it is '{other}'"
    with pytest.raises(UserError, match=said):
        parse(given)


def test_a_target_that_diverges_leaves_a_report(capsys, tmp_path, monkeypatch):
    """The sweep's result is known before the target trains, and it is kept."""
    run = tmp_path / "run"
    words = ["mupax", "transfer", f"--config={TOY}", f"--workdir={run}"]

    def diverges(*_):
        assert (run / "report.html").exists()
        raise Diverged("The training loss is nan at step 1.")

    monkeypatch.setattr(transfer.commands, "train_in", diverges)
    small = [
        "--config.sweep.axes.b1=(0.9,)",
        "--config.sweep.axes.learning_rate=2**[-8:-6:1]",
    ]
    assert cli.main([*words, *small]) == 2
    said = capsys.readouterr()
    assert "Learning rate over depth:" in said.out
    assert "This was the target" in said.err
    assert "--config.model.width=16 --config.model.depth=4" in said.err
    assert (
        "diverged at the transferred learning rate" in (run / "report.html").read_text()
    )

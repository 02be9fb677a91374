"""The target is trained with every hyperparameter that was swept."""

import json
import pathlib

import numpy as np
import optax
import pytest
import rich.progress
import sweep_toys
from flax import nnx
from ml_collections import ConfigDict

from mupax import zoo
from mupax.experiments import cli, transfer
from mupax.experiments import config as configs
from mupax.experiments import data as datasets
from mupax.experiments import run as training
from mupax.experiments.cli import flags
from mupax.experiments.sweep.results import Population

TOY = pathlib.Path(__file__).with_name("toy_config.py")
TUNED = {"init_scale": 0.5, "warmup": 0.5, "label_smoothing": 0.2, "b1": 0.8}


@pytest.fixture(scope="module")
def config() -> ConfigDict:
    return flags.parse(["transfer", f"--config={TOY}"]).config


def found(config: ConfigDict) -> Population:
    """The base's runs, of which the one with TUNED is the best."""
    axes = {"learning_rate": [0.01], **{k: [v / 2, v] for k, v in TUNED.items()}}
    loss = np.ones((2, *map(len, axes.values())))
    loss[:, 0, 1, 1, 1, 1] = 0.5
    sizes = config.base.width, config.base.depth
    return Population("n", "depth_mup", *sizes, {}, axes, loss, loss[..., None], 0.0)


@pytest.fixture(scope="module")
def tuned(config):
    return transfer._tuned(config, configs.points(config), [found(config)])


def test_the_best_values_go_to_where_the_target_is_trained_with_them(config, tuned):
    new, _ = tuned
    assert new.target.init_scale == 0.5
    assert new.schedule.to_dict() == {"name": "cosine", "warmup": 15}  # of 30 steps
    assert new.label_smoothing == 0.2
    assert new.optimizer.b1 == 0.8
    assert "init_scale" not in config.target  # the sweep's own is as it was


def test_a_warm_up_is_put_before_the_schedule_that_there_is(config):
    before = config.copy_and_resolve_references()
    with before.unlocked():
        before.schedule = ConfigDict({"name": "cosine", "warmup": 3, "final": 0.1})
    new, _ = transfer._tuned(before, configs.points(before), [found(before)])
    assert new.schedule.to_dict() == {"name": "cosine", "warmup": 15, "final": 0.1}


def test_the_target_begins_with_scaled_weights(config, tuned):
    data = sweep_toys.stripes()

    def weights(config, points):
        point = points[config.target.parametrization]
        return transfer.target_model(config, point, data, nnx.Rngs(0))

    plain, scaled = weights(config, configs.points(config)), weights(*tuned)
    scales = zoo.scales(plain)
    before, after = (
        {"/".join(map(str, k)): v[...] for k, v in nnx.to_flat_state(nnx.state(m))}
        for m in (plain, scaled)
    )
    params = {
        "/".join(map(str, path))
        for path, _ in nnx.to_flat_state(nnx.state(plain, nnx.Param))
    }
    for path in params:
        factor = 0.5 if scales[path].in_axes else 1.0
        np.testing.assert_array_equal(after[path], factor * before[path])
    assert any(scales[path].in_axes for path in params)


def test_the_target_is_trained_with_what_was_tuned(tuned, tmp_path, monkeypatch):
    """Its fit gets the smoothing, and an optimizer that is warming up."""
    seen = {}

    def spied(model, tx, data, **options):
        params = nnx.state(model, nnx.Param)
        state = tx.init(params)
        ones = nnx.state(model, nnx.Param)
        first, state = tx.update(ones, state, params)
        second, _ = tx.update(ones, state, params)
        seen.update(options, sizes=[float(optax.tree.norm(x)) for x in (first, second)])

    monkeypatch.setattr(transfer.training, "fit", spied)
    with rich.progress.Progress(disable=True) as bars:
        transfer.train_target(*tuned, sweep_toys.stripes(), -7.0, tmp_path, bars)
    assert seen["label_smoothing"] == 0.2
    assert seen["settings"]["schedule"] == {"name": "cosine", "warmup": 15}
    assert seen["settings"]["target"]["init_scale"] == 0.5
    assert seen["sizes"][0] == 0.0
    assert seen["sizes"][1] > 0.0


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
    images = datasets.normalize(data.train_images, data.mean, data.std)
    logits = model(images)
    labels = optax.smooth_labels(np.eye(4)[data.train_labels], 0.3)
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


def test_choices_are_refused_in_one_sentence(capsys, tmp_path, config):
    path = tmp_path / "chosen.py"
    path.write_text(
        TOY.read_text().replace(
            "    return c",
            "    c.sweep.choices = (('batch_size', (16, 32)),)\n    return c",
        )
    )
    run = tmp_path / "run"
    assert cli.main(["mupax", "transfer", f"--config={path}", f"--workdir={run}"]) == 2
    assert "sweep.choices is for `mupax sweep`" in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.long
def test_the_command_sweeps_them_and_trains_the_target(tmp_path):
    path = tmp_path / "swept.py"
    axes = {"learning_rate": "2**[-9:-3:2]", "init_scale": (0.25, 1.0)}
    axes |= {"warmup": (0.0, 0.5), "label_smoothing": (0.1, 0.2)}
    path.write_text(
        TOY.read_text().replace(
            "    return c", f"    c.sweep.axes = {axes}\n    return c"
        )
    )
    run = tmp_path / "run"
    args = ["transfer", f"--config={path}", f"--workdir={run}"]
    assert cli.main(["mupax", *args, f"--config.data_dir={tmp_path}"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["verdicts"]) == set(axes)
    assert np.isfinite(summary["target"]["train_loss"])

"""Figures 17 to 19: distances between the features of a network's layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax.experiments.errors import UserError
from mupax.experiments.run.build import build, create_model
from mupax.zoo.layers.basic import flattened
from papers import catalogue, features, numbers, sizes
from papers.request import Request


@pytest.fixture
def request_(tmp_path, monkeypatch):
    """A request for tiny networks that train two steps on digits."""
    tiny = {"model.width": "8", "sweep.widths": "(8,)", "sweep.seeds": "2"}
    short = {"sweep.average_last": "1"}
    monkeypatch.setattr(sizes, "FEATURES", {"laptop": tiny | short})
    base = (
        tiny
        | short
        | {
            "steps": "2",
            "sweep.axes.learning_rate": "2**[-8:-6:1]",
            "sweep.axes.branch_multiplier": "2**[-1:0]",
        }
    )
    sweep = dataclasses.replace(features.BASE, sizes={"laptop": base})
    monkeypatch.setattr(features, "BASE", sweep)
    monkeypatch.setattr(sizes, "FEATURES_DEPTHS", {"laptop": (16, 32)})
    monkeypatch.setattr(features, "_STEPS", (1, 2))
    return Request("laptop", tmp_path, dataset="digits", tables=tmp_path / "data")


def test_kappa_is_half_for_random_walks_and_zero_for_lines():
    rng = np.random.default_rng(0)

    def found(path):
        gaps = [2**k for k in range(int(np.log2(len(path))) - 1)]
        return np.array([[np.sqrt(np.mean((path[k:] - path[:-k]) ** 2)) for k in gaps]])

    def kappas(paths):
        return [features._kappas(path, 16) for path in paths]

    steps = [rng.normal(size=(depth, 2000)) for depth in (16, 64)]
    walks = [found(np.concatenate([s[:1] * 0, s]).cumsum(0)) for s in steps]
    np.testing.assert_allclose(kappas(walks), 0.5, atol=0.02)
    lines = [found(np.linspace(0, 1, depth + 1)[:, None]) for depth in (16, 64)]
    np.testing.assert_allclose(kappas(lines), 0, atol=1e-6)


@pytest.mark.parametrize("law", ["depth_mup", "ode"])
def test_distances_are_those_of_the_network_after_each_step(law, request_):
    setting = features.Setting(16, 0.25, 2.0**-8, law, "abs")
    found = features.distances(setting, request_)
    task = setting.task(request_)
    training, dataset = task.training(), task.dataset()
    hyper = {"learning_rate": 2.0**-8}
    for seed in range(2):
        keys, orders, examples = training.feed([seed])
        state, fixed = training.init(keys[0], hyper)
        model = create_model(task.config, build(task.config, dataset).shapes, keys[0])
        first = {"image": examples["image"][orders[0, 0]]}
        for t in range(2):
            now = orders[t, 0]
            batch = jax.tree.map(lambda x, now=now: x[now], examples)
            state = training.step(state, fixed, batch, hyper, keys[0])[0]
            nnx.update(model, state["params"])
            graph, layers = nnx.split(model.blocks)
            images = jnp.asarray(dataset.normalize(first)["image"])
            x = [model.readin(flattened(images, model.input_shape))]
            for k in range(16):
                block = nnx.merge(graph, jax.tree.map(lambda w, k=k: w[k], layers))
                x.append(block(x[-1]))
            for i, gap in enumerate((1, 2, 4)):
                pairs = zip(x, x[gap:], strict=False)
                squares = [float(jnp.mean((b - a) ** 2)) for a, b in pairs]
                expected = np.mean(squares) ** 0.5
                np.testing.assert_allclose(found[t, seed, i], expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["tp6-17", "tp6-18", "tp6-19"])
def test_a_figure_is_drawn_again_from_its_table_and_keeps_its_runs(
    name, request_, monkeypatch
):
    figure = catalogue.figures()[name]
    drawing = catalogue.drawn(figure, request_)
    base = features.tuned(request_)
    a = base.multiplier
    assert drawing.length == f"2 steps, width 8, depth 16, 32, 2 seeds, a = {a:g}"
    network = "abs" if name == "tp6-19" else "ode"
    given = {"nonlinearity" if name == "tp6-19" else "law": network}
    distances = features.distances(base.setting(32, given), request_)
    kappas = features._kappas(distances, 16)
    table = numbers.read(figure.path(request_)).where(network=network, depth=32)
    np.testing.assert_allclose(table.having("kappa")["kappa"], kappas.mean(axis=1))
    again = catalogue.from_data(figure, request_)
    assert again.ours == drawing.ours
    assert again.length == drawing.length
    monkeypatch.delattr(features, "_measurement")  # nothing is trained again
    assert catalogue.drawn(figure, request_).ours == drawing.ours


def test_runs_of_other_data_or_sizes_are_not_reused(request_, monkeypatch):
    setting = features.Setting(16, 0.25, 2.0**-8)
    first = features.distances(setting, request_)
    other = dataclasses.replace(request_, dataset="fake_data")
    with pytest.raises(UserError, match="fake_data"):
        features.distances(setting, other)
    wide = sizes.FEATURES["laptop"] | {"model.width": "16", "sweep.widths": "(16,)"}
    monkeypatch.setattr(sizes, "FEATURES", {"laptop": wide})
    assert not np.allclose(features.distances(setting, request_), first)


def test_data_that_are_not_there_are_one_sentence(tmp_path):
    lacking = Request("laptop", tmp_path, str(tmp_path))
    with pytest.raises(UserError, match="cifar10"):
        catalogue.drawn(catalogue.figures()["tp6-17"], lacking)

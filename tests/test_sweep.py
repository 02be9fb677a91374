"""One program a cell: what its lanes compute, and what survives a kill."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import optax
import pytest
import sweep_toys
from flax import nnx
from sweep_toys import task

from mupax import optim, zoo
from mupax.experiments import data as datasets
from mupax.experiments import memory
from mupax.experiments.errors import UserError
from mupax.experiments.run.build import create_model
from mupax.experiments.run.hyperparameters import tuned
from mupax.experiments.sweep import engine, training
from mupax.experiments.sweep.program import program
from mupax.experiments.sweep.tasks import ZooTask


@pytest.fixture(scope="module")
def data() -> datasets.Dataset:
    return sweep_toys.stripes()


def built(task: ZooTask, seed: int) -> nnx.Module:
    """The model of a task, initialized."""
    shapes = {"input_shape": (4, 4, 1), "out_features": 4}
    return create_model(task.config, shapes, seed)


@pytest.fixture(params=[True, False], ids=["at once", "in turn"])
def lanes(request, monkeypatch):
    """Both of the ways to train them, that of accelerators and that of CPUs."""
    monkeypatch.setattr(engine, "at_once", lambda: request.param)


def test_a_run_is_a_plain_loop_with_the_scales_of_the_model(data):
    """Second seed and third rate, written out with none of the machinery."""
    cell = engine.run(task(), data).cell()
    model, arrays = built(task(), 1), data.training_arrays()
    tx = nnx.Optimizer(model, optim.adam(2.0**-5, zoo.scales(model)), wrt=nnx.Param)

    @nnx.jit
    def step(model, tx, images, labels):
        def loss(model):
            logits = model(datasets.normalize(images, *data.statistics))
            each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return each.mean()

        value, grads = nnx.value_and_grad(loss)(model)
        tx.update(model, grads)
        return value

    order = datasets.batch_indices(data.train_size, 16, 1, 20)
    batches = ((arrays["image"][rows], arrays["label"][rows]) for rows in order)
    losses = [float(step(model, tx, *batch)) for batch in batches]
    np.testing.assert_allclose(cell.curves[1, 2], losses, rtol=2e-4)
    np.testing.assert_allclose(cell.loss[1, 2], np.mean(losses[-5:]), rtol=2e-4)


@pytest.mark.usefixtures("lanes")
def test_a_diverged_run_is_recorded_and_spoils_no_neighbour(data):
    calm = engine.run(task(log2_lr=(-9.0, -7.0)), data).cell()
    wild = engine.run(task(log2_lr=(-9.0, 60.0, -7.0)), data).cell()
    assert wild.diverged.tolist() == [[False, True, False]] * 2
    assert np.isnan(wild.curves[:, 1, -1]).all()
    np.testing.assert_allclose(wild.loss[:, [0, 2]], calm.loss, rtol=1e-4)


def test_a_run_that_ends_far_above_guessing_is_diverged(data):
    # At 2^-60 nothing moves. At depth 64 SP's outputs begin in the hundreds,
    # Depth-μP's of order one, which is slow and not diverged.
    def loss(name):
        still = task(parametrization=name, depth=64, log2_lr=(-60.0,))
        return engine.run(still, data).cell()

    assert np.isfinite(loss("sp").curves).all()
    assert loss("sp").diverged.all()
    assert not loss("depth_mup").diverged.any()


def test_the_next_job_is_prepared_while_one_runs():
    prepared = [threading.Event() for _ in range(3)]

    def maker(i):
        def make(*, ahead):
            prepared[i].set()
            return lambda waited: (i, ahead, prepared[min(i + 1, 2)].wait(60))

        return make

    found = list(training.in_turn([maker(i) for i in range(3)]))
    assert found == [(0, False, True), (1, True, True), (2, True, True)]
    assert list(training.in_turn([])) == []


def test_jobs_are_prepared_in_turn_where_that_is_asked_for():
    order = []

    def maker(i):
        def make(*, ahead):
            order.append(("make", i, ahead))
            return lambda waited: order.append(("run", i))

        return make

    list(training.in_turn([maker(0), maker(1)], ahead=False))
    assert order == [("make", 0, False), ("run", 0), ("make", 1, False), ("run", 1)]


def test_what_cannot_be_prepared_beside_another_is_prepared_in_its_turn():
    def shy(*, ahead):
        if ahead:
            raise UserError("too large")
        return lambda waited: 2

    def broken(*, ahead):
        raise UserError("too large")

    def plain(*, ahead):
        return lambda waited: 1

    assert list(training.in_turn([plain, shy, plain])) == [1, 2, 1]
    found = training.in_turn([plain, broken, plain])
    assert next(found) == 1
    with pytest.raises(UserError, match="too large"):
        next(found)


def test_a_task_that_memory_cramped_beside_another_is_compiled_anew(data, monkeypatch):
    # As on accelerators, where memory grows with the runs at once.
    monkeypatch.setattr(engine, "at_once", lambda: True)
    small = task(depth=2)
    whole = engine.run(small, data)
    free = memory.available
    needed = []
    measure = memory.needed
    monkeypatch.setattr(
        memory, "needed", lambda c: needed.append(measure(c)) or needed[-1]
    )
    engine.run(small, data)
    monkeypatch.setattr(memory, "available", lambda: needed[0])
    finish = engine.prepare(small, data, ahead=True)  # may take half of it
    monkeypatch.setattr(memory, "available", free)
    needed.append(0.0)
    found = finish(0.0)
    assert needed[-1] == needed[0]  # the program for all points
    np.testing.assert_array_equal(found.loss, whole.loss)


def test_a_model_with_batch_statistics_is_swept(data):
    model = {"name": "resnet18", "blocks": (1,), "stem": "cifar"}
    size = {"width": 4, "depth": 1, "base_width": 4, "base_depth": 1}
    small = task(model=model, steps=2, average_last=1, **size)
    cell = engine.run(small, data).cell()
    assert np.isfinite(cell.curves).all()


SWEPT = {
    "branch_multiplier": 0.5,
    "richness": 2.0,
    "init_scale": 0.5,
    "warmup": 0.25,
    "label_smoothing": 0.1,
    "b1": 0.7,
    "b2": 0.97,
    "eps": 1e-3,
    "weight_decay": 0.3,
}


@pytest.fixture(scope="module", params=[True, False], ids=["at once", "in turn"])
def swept_at_once(data, request):
    """All hyperparameters, each at its default and at another value, in one program."""
    plain = {"label_smoothing": 0.0, "warmup": 0.0, "b1": 0.9, "b2": 0.999}
    plain |= {"eps": 1e-8, "weight_decay": 1e-4}
    points = [tuple(plain.get(k, 1.0) for k in SWEPT)]
    for name in SWEPT:
        changed = {**plain, name: SWEPT[name]}
        points.append(tuple(changed.get(k, 1.0) for k in SWEPT))
    small = task(axes=dict.fromkeys(SWEPT, (0.0,)), **ONE)
    training = small.training(data)
    hyper = dict(zip(SWEPT, np.array(points, np.float32).T, strict=True))
    hyper["learning_rate"] = np.full(len(points), 2.0**-6, np.float32)
    keys, orders, examples = training.feed([0])
    steps = np.full(len(points), 12, np.int32)
    arguments = keys, hyper, orders, steps, examples
    runs = program(training, arguments, together=request.param)
    return np.asarray(runs(*arguments))[0]


ONE = {
    "optimizer": {"name": "adamw"},
    "log2_lr": (-6.0,),
    "steps": 12,
    "seeds": 1,
}


@pytest.fixture(scope="module")
def alone(data):
    """Losses with one hyperparameter changed in the config, by its name."""

    @functools.cache
    def run(name):
        small = task(**ONE)
        config = tuned(small.config, {name: SWEPT[name]})
        if name == "label_smoothing":  # as a sweep of it, which keeps the plain loss
            small = task(axes={name: (SWEPT[name],)}, **ONE)
            config = small.config
        changed = dataclasses.replace(small, config=config)
        return engine.run(changed, data).curves.reshape(-1)

    return run


@pytest.mark.parametrize("name", list(SWEPT))
def test_a_swept_hyperparameter_does_what_the_config_does(name, swept_at_once, alone):
    """`tuned` puts a plain number where the sweep puts a lane's."""
    lane = swept_at_once[1 + list(SWEPT).index(name)]
    np.testing.assert_allclose(lane, alone(name), rtol=2e-4)
    assert np.abs(lane - swept_at_once[0]).max() > 1e-4


@pytest.mark.parametrize("name", ["resmlp", "vit"])
def test_init_scale_multiplies_weights_and_leaves_biases_and_norms(name, data):
    options = {"vit": {"patch_size": 2, "heads": 2}, "resmlp": {"layer_norm": True}}
    scaled = task(model={"name": name, **options[name]})
    init, key = scaled.training(data).init, jax.random.key(3)
    rate = {"learning_rate": 1.0}
    plain = init(key, rate)[0]["params"]
    half = init(key, rate | {"init_scale": np.float32(0.5)})[0]["params"]
    scales = zoo.scales(built(scaled, 0))
    kinds = set()
    for (path, before), (_, after) in zip(
        nnx.to_flat_state(plain), nnx.to_flat_state(half), strict=True
    ):
        weight = bool(scales["/".join(map(str, path))].in_axes)
        factor = 0.5 if weight else 1.0
        np.testing.assert_array_equal(after[...], factor * before[...])
        kinds.add((weight, bool(np.any(before[...]))))
    # Weights that are not zero, and norms that are one, were among them.
    assert {(True, True), (False, True)} <= kinds


@pytest.mark.parametrize(
    ("changes", "trained"),
    [({"rates": (0.5, 0.25, 0.125)}, 2), ({"seeds": 3}, 2)],
)
def test_another_grid_in_the_same_folder_is_another_result(tmp_path, changes, trained):
    small = sweep_toys.Line(rates=(0.5, 0.25), steps=4, average_last=1)
    wide = dataclasses.replace(small, **changes)

    def run(task):
        args = sweep_toys.points(), tmp_path, engine.Limits(), None
        return training.run_all([task], *args)[0]

    narrow, found = run(small), run(wide)
    assert found.loss.shape == (wide.seeds, len(wide.rates))
    np.testing.assert_allclose(found.loss[:2, :2], narrow.loss, rtol=1e-5)
    assert run(wide).seconds == found.seconds  # what is there is only read
    lines = (tmp_path / "line.runs.jsonl").read_text().split("\n")
    assert sum(bool(line) for line in lines) == 4 + trained

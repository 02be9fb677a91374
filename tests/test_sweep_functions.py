"""Sweeps of one's own model: what is read from a folder is what would be trained."""

import concurrent.futures
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mupax import optim
from mupax.experiments.errors import UserError
from mupax.experiments.sweep import (
    api,
    engine,
    fingerprint,
    functions,
    tasks,
    training,
)

DATA = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)


AXES = {"w": "i -> o"}


def make_model(key, width, depth):
    return {"w": jax.random.normal(key, (2, width))}


def make_optimizer(model, width, depth, learning_rate=0.1):
    return optax.sgd(learning_rate)


def loss(model, batch):
    return jnp.mean((batch @ model["w"] - 1) ** 2)


def sweep(
    folder,
    make_model=make_model,
    make_optimizer=make_optimizer,
    loss=loss,
    data=DATA,
    **options,
):
    """A sweep of one shape, three learning rates and one seed, four steps each."""
    defaults = {
        "grid": {"learning_rate": (0.01, 0.02, 0.04)},
        "sizes": [(2, 1)],
        "seeds": 1,
        "steps": 4,
        "batch_size": 4,
        "folder": folder,
    }
    return api.sweep(make_model, make_optimizer, loss, data, **(defaults | options))


@pytest.fixture
def trained(monkeypatch):
    """The names of the shapes that are compiled and trained, as they are."""
    names = []
    chunks = engine.Chunks.__call__

    def counted(self, *arguments, **options):
        names.append(self.task.name)
        return chunks(self, *arguments, **options)

    monkeypatch.setattr(engine.Chunks, "__call__", counted)
    return names


def scaled(model, width, depth, learning_rate):
    base, wider = (make_model(jax.random.key(0), n, 1) for n in (2, 4))
    scales = optim.infer_scales(base, model, axes=AXES, delta=wider)
    return optim.sgd(learning_rate, scales)


def test_data_with_nan_are_named_where_every_run_diverged(caplog):
    data = DATA.copy()
    data[:, 0] = np.nan
    found = sweep(None, data={"x": data}, loss=lambda m, b: loss(m, b["x"]))
    assert "data['x'] has 16 values that are not finite" in caplog.text
    with pytest.raises(UserError, match="check the data for NaN and for labels"):
        _ = found.best


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"loss": "mse"}, "loss must be a function; got 'mse'"),
        ({"make_model": {"w": 1}}, "make_model must be a function"),
        ({"make_optimizer": optax.sgd(0.1)}, "make_optimizer must be a function"),
        ({"guess": -1.0}, "guess=-1.0 must be positive"),
        ({"guess": float("nan")}, "guess=nan must be positive"),
        ({"guess": "3"}, "guess is '3'; it must be a number"),
        (
            {"loss": lambda m, b: (loss(m, b), {"aux": 1})},
            "returned a tuple at width=2, depth=1; return the loss alone",
        ),
    ],
)
def test_an_argument_of_another_type_is_named(wrong, said):
    with pytest.raises(UserError, match=said):
        sweep(None, **wrong)


def test_a_negative_loss_is_an_error():
    """No share of it can be given up, and all of them tied for the best."""
    with pytest.raises(UserError, match=r"the loss falls to -.* must not be negative"):
        sweep(None, loss=lambda model, batch: loss(model, batch) - 100)


@pytest.mark.parametrize("zeros", [np.zeros, jnp.zeros])
def test_arrays_of_numpy_are_trained_and_none_is_kept(zeros):
    def biased(key, width, depth):
        bias = zeros((1, 1), jnp.float32)
        return {**make_model(key, width, depth), "bias": bias, "other": None}

    def biased_loss(model, batch):
        assert model["other"] is None
        return jnp.mean((batch @ model["w"] + model["bias"] - 1) ** 2)

    with_bias = sweep(None, biased, loss=biased_loss, steps=20)
    without = sweep(None, steps=20)
    assert (with_bias.populations[0].loss < without.populations[0].loss).all()


def test_arrays_that_are_not_trained_differ_over_seeds():
    def masked(key, width, depth):
        mask = jax.random.bernoulli(key, 0.5, (64,))
        return {**make_model(key, width, depth), "mask": mask}

    found = sweep(None, masked, loss=lambda m, b: jnp.mean(m["mask"] * 1.0), seeds=3)
    losses = found.populations[0].loss[:, 0]
    means = [
        float(masked(key, 2, 1)["mask"].mean()) for key in functions.keys_of(range(3))
    ]
    assert losses == pytest.approx(np.array(means))
    assert len(set(means)) == 3


def same_weights(key, width, depth):
    return make_model(jax.random.key(0), width, depth)


def deep(key, width, depth):
    return {"w": [make_model(key, width, depth)["w"]] * depth}


def deep_loss(model, batch):
    return loss({"w": sum(model["w"])}, batch)


UNUSED = {
    "scales nothing in the optimizer that make_optimizer returned for width=4": {
        "sizes": [(2, 1), (4, 1)]
    },
    "depth 1 and of width 2, depth 3 are bit-identical": {"sizes": [(2, 1), (2, 3)]},
    "the same parameters for two keys": {"make_model": same_weights, "seeds": 2},
    "'learning_rate' changes no loss": {
        "make_optimizer": lambda model, width, depth, learning_rate: optax.sgd(0.1)
    },
}


@pytest.mark.parametrize("said", UNUSED)
def test_what_a_function_does_not_use_is_said(said, caplog):
    sweep(None, **UNUSED[said])
    assert said in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"seeds": 2},
        {"make_model": same_weights},  # of one seed
        {"make_optimizer": scaled, "sizes": [(2, 1), (4, 1)]},
        {"make_model": deep, "loss": deep_loss, "sizes": [(2, 1), (2, 3)]},
    ],
)
def test_what_is_used_is_not_warned_of(options, caplog):
    sweep(None, **options)
    assert not any(said in caplog.text for said in UNUSED)


# --- What is computed decides what is read.

SESSION = """
import functools
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx

CONFIG = {"layers": {"bias": 0.5}}
TABLE = np.zeros((300, 300), np.float32)

class Block(nnx.Module):
    gain = 1.0
    def __init__(self, width, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (2, width)))
    def __call__(self, x):
        return self.gain * x @ self.w[...]

def center():
    shift = 0.0
    return lambda x: x - shift

move = center()

def initial(x):
    return x

def make_model(key, width, depth):
    model = Block(width, nnx.Rngs(key))
    model.w[...] = initial(model.w[...])
    return model

def make_optimizer(model, width, depth, learning_rate):
    return optax.sgd(learning_rate, momentum=CONFIG.get("momentum"))

def loss(model, batch):
    out = move(model(batch)) + CONFIG["layers"]["bias"] + TABLE[7, 7:9].mean()
    return jnp.mean((out - 1) ** 2) + TABLE.sum()
"""

EDITS = {
    "a class attribute": "Block.gain = 2.0",
    "a closure": SESSION[
        SESSION.index("def center") : SESSION.index("def initial")
    ].replace("shift = 0.0", "shift = 0.25"),
    "a nested config value": 'CONFIG["layers"]["bias"] = 0.75',
    "an optimizer's option in a config": 'CONFIG["momentum"] = 0.9',
    "initial values": "initial = lambda x: 2 * x",
    "one entry of a large constant": "TABLE = TABLE.copy(); TABLE[150, 150] = 1e-3",
}


def session(*edits):
    """What a notebook holds after its cells: the three functions see the edits."""
    space: dict = {}
    for code in (SESSION, *edits):
        exec(compile(code, "<cell>", "exec"), space)
    return types.SimpleNamespace(**space)


def functions_of(space):
    return {k: getattr(space, k) for k in ("make_model", "make_optimizer", "loss")}


def key(data=DATA, **changes):
    """What a stored run of the toy is found by."""
    chosen = {"make_model": make_model, "make_optimizer": make_optimizer, "loss": loss}
    axes = {"learning_rate": (0.1, 0.2)}
    task = functions.FunctionTask(
        *(2, 1, 1, 4, 4, 1, axes),
        **(chosen | changes),
        guess=None,
        data=fingerprint.of_arrays(data),
    )
    return task.bound(jax.tree.map(jnp.asarray, data)).key


@pytest.fixture(scope="module")
def unedited():
    return key(**functions_of(session()))


def partial(momentum):
    def made(model, width, depth, learning_rate, momentum):
        return optax.sgd(learning_rate, momentum=momentum)

    return functools.partial(made, momentum=momentum)


def donating(factor):
    """A jitted step of the user may donate its buffers."""
    inner = jax.jit(lambda x: factor * x, donate_argnums=0)
    return lambda model, batch: inner(loss(model, batch))


def printed(model, batch):
    jax.debug.print("while debugging {}", batch.sum())
    return loss(model, batch)


RENAMED = SESSION.replace("shift", "offset").replace("def loss", "# why\ndef loss")
SAME = {
    "typed again": lambda: (functions_of(session()), functions_of(session())),
    "comments and names": lambda: (
        functions_of(session()),
        functions_of(session(RENAMED)),
    ),
    "JAX's arrays": lambda: ({"data": DATA}, {"data": jnp.asarray(DATA)}),
    "a donating loss": lambda: ({"loss": donating(2.0)}, {"loss": donating(2.0)}),
    "printing": lambda: ({"loss": printed}, {"loss": printed}),
}
OTHER = {
    "a partial": lambda: (
        {"make_optimizer": partial(0.5)},
        {"make_optimizer": partial(0.9)},
    ),
    "a donating loss": lambda: ({"loss": donating(2.0)}, {"loss": donating(3.0)}),
    "values": lambda: ({}, {"data": DATA + 1e-7}),
    "type": lambda: ({}, {"data": DATA.astype(np.float16)}),
}


@pytest.mark.parametrize("what", SAME)
def test_what_computes_the_same_has_the_same_key(what):
    one, other = SAME[what]()
    assert key(**one) == key(**other)


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_gives_another_key(what, unedited):
    assert key(**functions_of(session(EDITS[what]))) != unedited


@pytest.mark.parametrize("what", OTHER)
def test_what_computes_something_else_has_another_key(what):
    one, other = OTHER[what]()
    assert key(**one) != key(**other)


def test_an_edited_model_is_trained_and_two_versions_share_a_folder(
    tmp_path, trained, caplog
):
    edited = functions_of(session(EDITS["a class attribute"]))
    versions = functions_of(session()), edited
    both = [sweep(tmp_path, **made).populations[0].loss for made in versions]
    assert "of another program, other data or other settings" in caplog.text
    assert not np.allclose(*both)
    wanted = sweep(None, **edited).populations[0].loss
    np.testing.assert_array_equal(both[1], wanted)
    trained.clear()
    again = [sweep(tmp_path, **made).populations[0].loss for made in versions]
    assert trained == []
    np.testing.assert_array_equal(again, both)


def test_precision_and_random_bits_are_part_of_the_program():
    plain = key()
    with jax.default_matmul_precision("float32"):
        assert key() != plain
    with jax.default_prng_impl("rbg"):
        assert key() != plain


CHILD = """
import sys
sys.path.insert(0, {tests!r})
import test_sweep_functions as t
print(t.key(**t.functions_of(t.session())))
print(t.key(make_optimizer=t.partial(0.5)))
"""


def test_another_process_finds_the_same_key(unedited):
    """No memory address and no order of a set is in it."""
    tests = os.path.dirname(__file__)
    environment = os.environ | {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(tests=tests)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    wanted = [unedited, key(make_optimizer=partial(0.5))]
    assert done.stdout.split("\n")[:2] == wanted


def called_back(factor):
    def outside(model, batch):
        scaled = jax.pure_callback(
            lambda x: np.asarray(x) * factor,
            jax.ShapeDtypeStruct((), np.float32),
            jax.lax.stop_gradient(loss(model, batch)),
        )
        return loss(model, batch) * (1 + 0 * scaled)

    return outside


def test_a_call_outside_of_the_program_is_trained_again_and_said(caplog):
    outside = called_back(1.0)
    assert key(loss=outside) != key(loss=outside)
    assert "is trained again in every call" in caplog.text


def test_data_that_was_donated_is_refused_and_data_is_not_donated(tmp_path):
    data = jnp.asarray(DATA)
    sweep(tmp_path, data=data)
    assert float(data.sum()) == pytest.approx(float(DATA.sum()), rel=1e-5)
    jax.jit(lambda x: x + 1, donate_argnums=0)(data)
    with pytest.raises(UserError, match="donated to a jitted function; pass a copy"):
        sweep(tmp_path, data=data)


# --- Keeping, progress, sizes and costs.


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_sweep_functions as t
from mupax.experiments.sweep.store import Store
add = Store.add
def killed(self, *arguments):
    add(self, *arguments)
    os.kill(os.getpid(), signal.SIGKILL)
Store.add = killed
t.sweep({folder!r}, sizes=[(2, 1), (4, 2)])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX's signal")
@pytest.mark.long
def test_a_population_that_was_killed_half_way_keeps_its_finished_points(
    tmp_path, monkeypatch
):
    code = KILLED.format(tests=os.path.dirname(__file__), folder=str(tmp_path))
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    child = subprocess.run([sys.executable, "-c", code], env=environment)
    assert child.returncode == -signal.SIGKILL
    added = []
    add = training.Store.add
    monkeypatch.setattr(
        training.Store, "add", lambda self, *a: (added.append(a), add(self, *a))[1]
    )
    found = sweep(tmp_path, sizes=[(2, 1), (4, 2)])
    done = [(name, at) for name, _, runs in added for _, at in runs]
    rates = [(x,) for x in (0.01, 0.02, 0.04)]
    # A processor trains the first point alone, to learn how long points take.
    assert done == [
        *(("w2-d1", at) for at in rates[1:]),
        *(("w4-d2", at) for at in rates),
    ]
    for kept, fresh in zip(
        found.populations, sweep(None, sizes=[(2, 1), (4, 2)]).populations, strict=True
    ):
        np.testing.assert_array_equal(kept.loss, fresh.loss)


def test_without_a_terminal_progress_is_a_line_for_each_shape(capsys):
    sweep(None, progress=False)
    assert capsys.readouterr() == ("", "")
    sweep(None, sizes=[(2, 1), (4, 2)])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "w2-d1: 3 runs done (1 of 2 shapes" in shown.err
    assert "w4-d2: 3 runs done (2 of 2 shapes" in shown.err


class Noisy(nnx.Module):
    """A layer with batch statistics and dropout."""

    def __init__(self, width, rngs):
        self.norm = nnx.BatchNorm(2, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layer = nnx.Linear(2, width, rngs=rngs)


def noisy_loss(model, batch, key):
    x = model.drop(model.norm(batch + 1.0))
    y = model.layer(x) + jax.random.normal(key, (len(batch), 1))
    return jnp.mean(y**2) + jnp.sum(model.norm.mean[...] ** 2)


def test_batch_statistics_dropout_and_the_key_of_a_loss_are_those_of_a_loop():
    rates = (0.01, 0.02)
    (swept,) = sweep(
        None,
        lambda key, width, depth: Noisy(width, nnx.Rngs(key)),
        loss=noisy_loss,
        grid={"learning_rate": rates},
    ).populations
    order = tasks.orders(len(DATA), 4, [0], 4)[:, 0]
    for i, rate in enumerate(rates):
        key = jax.random.key(0)
        model, losses = Noisy(2, nnx.Rngs(key)), []
        optimizer = nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)
        for step, rows in enumerate(order):
            now = jax.random.fold_in(key, step)
            value, grads = nnx.value_and_grad(noisy_loss)(model, DATA[rows], now)
            optimizer.update(model, grads)
            losses.append(value)
        np.testing.assert_allclose(swept.curves[0, i], losses, rtol=1e-5)


def test_a_finished_sweep_builds_one_model_of_a_shape(tmp_path):
    built = []

    def counted(key, width, depth):
        built.append((width, depth))
        return make_model(key, width, depth)

    sweep(tmp_path, counted, sizes=[(2, 1), (4, 2)], seeds=2)
    built.clear()
    sweep(tmp_path, counted, sizes=[(2, 1), (4, 2)], seeds=2)
    assert built == [(2, 1), (4, 2)]


def test_width_and_depth_are_swept_jointly():
    moved = sweep(None, widths=(1, 2), depths=(1, 2), sizes=[(2, 2)], seeds=2)
    shapes = [(p.width, p.depth) for p in moved.populations]
    assert shapes == [(1, 1), (1, 2), (2, 1), (2, 2)]
    told = moved.verdicts["learning_rate"]["model"]["joint"]
    assert told["sizes"] == [[1, 1], [2, 2]]
    assert "over width and depth" in str(moved)


@pytest.mark.parametrize("kind", [list, np.array])
def test_sizes_alone_are_enough(kind):
    found = sweep(None, sizes=kind([(2, 1), (4, 2)]), base=kind([2, 1]))
    assert tuple(found.base) == (2, 1)
    told = found.verdicts["learning_rate"]["model"]["joint"]
    assert told["sizes"] == [[2, 1], [4, 2]]


def test_a_base_that_diverged_everywhere_has_no_best():
    found = sweep(None, grid={"learning_rate": (1e30, 1e36)}, steps=20)
    with pytest.raises(UserError, match=r"every run of the base, .* diverged"):
        _ = found.best


def test_a_hyperparameter_may_be_named_warmup():
    """In steps here, which is no share."""

    def warmed(model, width, depth, warmup):
        return optax.sgd(lambda step: 0.1 * jnp.minimum(1.0, (step + 1) / warmup))

    found = sweep(None, make_optimizer=warmed, grid={"warmup": (1, 2, 4)})
    assert found.populations[0].axes == {"warmup": [1.0, 2.0, 4.0]}
    assert np.isfinite(found.populations[0].loss).all()
    assert set(found.best) == {"warmup"}


def test_a_report_is_written_for_all_sizes_and_any_name(tmp_path):
    def warmed(model, width, depth, learning_rate, warmup):
        return optax.sgd(learning_rate / warmup)

    sweep(
        tmp_path,
        make_optimizer=warmed,
        grid={"learning_rate": (0.01, 0.02, 0.04), "warmup": (1, 20, 40)},
        widths=(2, 4),
        depths=(1, 2),
        sizes=[(4, 2)],
    )
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "results.csv").read_text().count("\n") == 1 + 4 * 9


# --- What fails in the user's functions is said with its name.


def cosine(model, width, depth, learning_rate):
    return optax.sgd(
        optax.warmup_cosine_decay_schedule(0.0, learning_rate, 1, 4),
    )


def test_a_schedule_that_compares_its_rate_names_the_remedy_and_the_remedy_works():
    with pytest.raises(UserError) as caught:
        sweep(None, make_optimizer=cosine)
    said = str(caught.value)
    assert said.startswith("make_optimizer (cosine, line ")
    assert "at width=2, depth=1 and traced learning_rate" in said
    remedy = said.split("a peak of 1: ")[1].removesuffix(".")

    def remedied(model, width, depth, learning_rate):
        names = {"optim": optim, "optax": optax, "warmup_steps": 1, "decay_steps": 4}
        return optax.sgd(eval(remedy, names | {"learning_rate": learning_rate}))

    found = sweep(None, make_optimizer=remedied)
    assert np.isfinite(found.populations[0].loss).all()


def broken_model(key, width, depth):
    raise KeyError("heads")


def branching_model(key, width, depth, gain):
    return make_model(key, width, depth) if gain > 1 else {}


MISTAKES = {
    "a model that raises": (
        {"make_model": broken_model},
        r"make_model \(broken_model, line \d+ of .*\) failed at width=2, depth=1: "
        r"KeyError: 'heads'",
    ),
    "a model that branches": (
        {"make_model": branching_model, "grid": {"gain": (1, 2)}},
        r"make_model .* and traced gain: Tracer.* call sweep once for each",
    ),
    "a model that ignores the width": (
        {
            "make_model": lambda key, width, depth: make_model(key, 2, depth),
            "sizes": [(2, 1), (4, 1)],
        },
        "same shapes for width=2 and width=4; use its argument width",
    ),
    "a model without parameters": (
        {"make_model": lambda key, width, depth: {}},
        "make_model .* returned a model without parameters",
    ),
    "a loss for each example": (
        {"loss": lambda m, b: (b @ m["w"]).sum(-1)},
        r"loss .* returned float32\[4\] at width=2, depth=1; return one",
    ),
    "a loss of wrong shapes": (
        {"loss": lambda m, b: jnp.mean(b @ b @ m["w"])},
        r"loss \(<lambda>, .* failed at width=2, depth=1: TypeError: dot_general",
    ),
    "an optimizer that is none": (
        {"make_optimizer": lambda m, width, depth, learning_rate: None},
        "make_optimizer .* returned NoneType; return an optax.GradientTransf",
    ),
    "an optimizer that lacks an argument": (
        {"make_optimizer": lambda m, learning_rate: optax.sgd(learning_rate)},
        "make_optimizer .* failed .*unexpected keyword argument 'width'",
    ),
    "a grid of sizes": ({"grid": {"width": (1, 2)}}, "mupax passes itself"),
    "a name that is not taken": (
        {"grid": {"lr": (1, 2)}},
        "the grid has 'lr', and neither make_model nor .*; they take 'learning_rate'$",
    ),
    "a misspelt name": (
        {
            "grid": {"learning_rte": (1, 2)},
            "make_optimizer": lambda m, width, depth, learning_rate, b1, **rest: None,
        },
        "they take 'b1', 'learning_rate'; did you mean 'learning_rate'",
    ),
    "a name where none is taken": (
        {"grid": {"lr": (1, 2)}, "make_optimizer": lambda m, width, depth: None},
        "they take no hyperparameter; give one of them an argument 'lr'",
    ),
    "an empty grid": ({"grid": {}}, "the grid is empty"),
    "a list as grid": ({"grid": [0.1]}, r"grid=\[0.1\] must be a dictionary"),
    "one width": ({"widths": 8}, "widths=8 must be a sequence"),
    "the name of an executor": (
        {"executor": "local"},
        "executor='local' has no method submit",
    ),
    "a number as limits": ({"limits": 8}, r"limits=8 must be Limits"),
    "a rate of zero": ({"grid": {"learning_rate": (0, 1)}}, "leave the value out"),
    "no sizes": ({"sizes": ()}, "give widths and depths, or sizes"),
    "sizes that are no pairs": ({"sizes": [2, 4]}, r"must be pairs \(width, depth\)"),
    "a width that is no integer": ({"sizes": [(2.5, 1)]}, "a value in sizes is 2.5"),
    "no seeds": ({"seeds": 0}, "seeds is 0; it must be 1 or more"),
    "steps beyond memory": ({"steps": 10**13}, r"would take .* GiB of memory"),
    "seeds beyond memory": ({"seeds": 10**11}, r"would take .* GiB of memory"),
    "fractional steps": ({"steps": 1e4}, "steps is 10000.0; it must be a whole"),
    "a batch too large": ({"batch_size": 64}, "more than the 16 examples of data"),
    "data of two lengths": ({"data": (DATA, DATA[:3])}, "same leading axis"),
    "no data": ({"data": ()}, "same leading axis"),
    "more last steps than steps": ({"average_last": 9}, "more than the 4 steps"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence_that_names_what_to_change(mistake, tmp_path):
    options, said = MISTAKES[mistake]
    folder = tmp_path if "executor" in options else None
    with pytest.raises(UserError, match=said) as caught:
        sweep(folder, **options)
    assert "\n" not in str(caught.value)


def test_functions_that_cannot_be_sent_are_refused_before_anything_runs(tmp_path):
    with (
        concurrent.futures.ProcessPoolExecutor(1) as pool,
        pytest.raises(UserError, match="define them at the top level of a module"),
    ):
        sweep(tmp_path, loss=lambda m, b: loss(m, b), executor=pool)
    assert not (tmp_path / "w2-d1.json").exists()


@pytest.mark.long
def test_processes_find_what_one_process_finds_and_keep_it(tmp_path, trained):
    spawn = multiprocessing.get_context("spawn")
    sizes = [(2, 1), (4, 2)]
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        found = sweep(tmp_path, sizes=sizes, executor=pool)
    again = sweep(tmp_path, sizes=sizes)  # in this process: the same keys
    assert trained == []
    for one, other in zip(found.populations, again.populations, strict=True):
        np.testing.assert_array_equal(one.loss, other.loss)


@pytest.mark.parametrize("folder", ["a\0b", "file/below"])
def test_a_folder_that_cannot_be_made_is_named_before_training(
    folder, tmp_path, trained, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        sweep(folder)
    assert trained == []


def test_a_report_that_cannot_be_written_loses_no_run(tmp_path, trained):
    (tmp_path / "results.csv").mkdir()
    with pytest.raises(UserError, match=r"results.csv cannot be written.* resumes"):
        sweep(tmp_path)
    (tmp_path / "results.csv").rmdir()
    trained.clear()
    sweep(tmp_path)
    assert trained == []


def test_sizes_that_are_not_larger_than_the_base_are_refused():
    for pair in ((4, 1), (1, 2), (8, 1)):
        with pytest.raises(UserError, match=r"is not above that of the base \(4, 2\)"):
            sweep(None, base=(4, 2), sizes=[(8, 4), pair])


def test_what_a_loss_sows_is_to_be_removed(tmp_path):
    class Model(nnx.Module):
        def __init__(self, key, width):
            self.layer = nnx.Linear(2, width, rngs=nnx.Rngs(params=key))

        def __call__(self, x):
            self.aux = nnx.Intermediate(x.mean())  # as `sow` does
            return self.layer(x)

    def make_model(key, width, depth):
        return Model(key, width)

    def loss(model, batch):
        return jnp.mean((model(batch) - 1) ** 2)

    with pytest.raises(UserError, match=r"'aux.*nnx.pop\(model, nnx.Intermediate\)"):
        sweep(tmp_path / "a", make_model, loss=loss)

    def cleaned(model, batch):
        value = loss(model, batch)
        nnx.pop(model, nnx.Intermediate)
        return value

    assert sweep(tmp_path / "b", make_model, loss=cleaned).best


def test_a_swept_value_that_an_equinox_model_keeps_is_not_trained(tmp_path):
    class Model(eqx.Module):
        layer: eqx.nn.Linear
        a: float

        def __init__(self, key, width, a):
            self.layer = eqx.nn.Linear(2, width, key=key)
            self.a = a

    def make_model(key, width, depth, a=1.0):
        return Model(key, width, a)

    def loss(model, batch):
        return jnp.mean((model.a * jax.vmap(model.layer)(batch) - 1) ** 2)

    def make_optimizer(model, width, depth, learning_rate=0.1):
        assert len(jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))) == 3
        return optax.adam(learning_rate)

    def kept(model, batch):
        return loss(eqx.tree_at(lambda m: m.a, model, jnp.float32(2.0)), batch)

    grid = {"learning_rate": (0.01, 0.02, 0.04), "a": (2.0, 4.0)}
    found = sweep(tmp_path, make_model, make_optimizer, loss, grid=grid)
    (swept,) = found.populations
    # With a fixed at 2 the losses are those of the value 2.
    fixed = sweep(tmp_path / "b", make_model, make_optimizer, kept, grid=grid)
    np.testing.assert_allclose(
        swept.loss[..., 0], fixed.populations[0].loss[..., 0], rtol=1e-5
    )
    assert not np.allclose(swept.loss[..., 0], swept.loss[..., 1])

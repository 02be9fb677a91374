"""A sweep's run computes what `mupax train` computes.

For every model family, optimizer and option, the first 20 losses of a sweep's run agree
within 1e-5 relative with those of the trainer with the same hyperparameters and seed.
Both compile the same step with the same arguments. On a CPU the sweep compiles at a
lower optimization level, which rounds some sums differently in the last bit. Compiled
at the trainer's level, the losses are equal bit for bit.
"""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from mupax import zoo
from mupax.experiments.run.config import defaults, parse
from mupax.experiments.run.evaluate import place_batch
from mupax.experiments.run.prepare import prepare
from mupax.experiments.run.schedule import make_schedule
from mupax.experiments.sweep import engine, space

STEPS, BATCH, RATE, SEED = 20, 16, 0.01, 1
SONG = "".join(f"{k} green bottles, hanging on the wall;\n" for k in range(100))
MODELS = {
    "resmlp": {"width": 16, "depth": 2},
    "mlp": {"width": 16, "depth": 2},
    "cnn": {"width": 8, "depth": 2},
    "resnet18": {"width": 4, "depth": 1, "stem": "cifar", "blocks": (1, 1)},
    "convnext_tiny": {"width": 4, "depth": 1, "blocks": (1, 2), "patch_size": 2},
    "efficientnet_b0": {
        "width": 8,
        "depth": 1,
        "rows_width": 8,
        "head": 16,
        "rows": (
            (0, "separable", 1, 3, 1, 1, 8, 0.25),
            (1, "inverted", 2, 3, 2, 2, 16),
        ),
    },
    "vit": {"width": 8, "depth": 2, "heads": 2, "patch_size": 4},
    "gpt": {"width": 8, "depth": 2, "heads": 2},
    "llama": {"width": 8, "depth": 2, "heads": 2, "queries_per_key": 2},
}
OPTIMIZERS = ("sgd", "adam", "adamw", "muon")
SCHEDULES = {
    "constant": {"schedule": {"name": "constant"}},
    "cosine": {"schedule": {"name": "cosine", "warmup": 5}},
}
EXTRAS = {
    "bare": {},
    "clipping": {"clip_norm": 0.5},
    "smoothing": {"label_smoothing": 0.1},
    "ema": {"ema": 0.9},
    "accumulation": {"accumulate": 2},
    "dropout": {"model": {"dropout": 0.1}},
    "mixup": {"mixup": 0.2},
    "augmentation": {"augment": ("flip", "pad_crop")},
    "all": {
        "clip_norm": 0.5,
        "label_smoothing": 0.1,
        "ema": 0.9,
        "accumulate": 2,
        "mixup": 0.2,
        "cutmix": 1.0,
        "model": {"dropout": 0.1},
        "augment": ("flip",),
        "init_scale": 0.5,
        "seed": 3,
    },
}
_OF_IMAGES = ("mixup", "cutmix", "augment")


def means_something(model: str, changes: dict) -> bool:
    """Whether these options apply to a model."""
    text = zoo.reads_tokens(model) and set(changes) & set(_OF_IMAGES)
    dropout = "model" in changes and model not in ("vit", "gpt", "llama")
    return not text and not dropout


def config(folder: pathlib.Path, family: str, rule: str, changes: dict) -> ConfigDict:
    c = defaults("sweep")
    c.dataset = "fake:8x8x1:8"
    if zoo.reads_tokens(family):
        (folder / "song.txt").write_text(SONG)
        c.dataset = f"text:{folder / 'song.txt'}"
        c.data = ConfigDict({"context": 8})
    c.model = ConfigDict({"name": family, **MODELS[family]})
    c.optimizer = ConfigDict({"name": rule})
    c.learning_rate, c.batch_size, c.steps, c.log_every = RATE, BATCH, STEPS, 7
    c.sweep.axes.learning_rate = (RATE / 2, RATE, 2 * RATE)
    for key, value in changes.items():
        if isinstance(value, dict):
            c[key].update(value)
        else:
            c[key] = value
    return c


def swept(given: ConfigDict) -> np.ndarray:
    """The losses of one run of a sweep: second seed, second learning rate."""
    (task,) = space.tasks(space.parse_sweep(given))
    return engine.run(task, None).curves[SEED, 1]


def trained(given: ConfigDict) -> np.ndarray:
    """The losses of the steps of `mupax train`."""
    given.seed += SEED
    job = prepare(parse(given))
    state = job.program.init_on_mesh(job.built.create)
    feed = job.dataset.train(BATCH, given.seed)
    sharding = zoo.batch_sharding(job.program.mesh)
    step, losses = job.program.jit_step(), []
    for _ in range(STEPS):
        batch = place_batch(next(feed), sharding)
        state, (loss, _) = step(state, batch, job.program.hyper)
        losses.append(float(loss))
    feed.close()
    return np.array(losses)


def assert_same(given: ConfigDict) -> None:
    here, there = swept(given), trained(given)
    assert np.isfinite(there).all()
    assert len(set(there)) > STEPS / 2  # something happens
    np.testing.assert_allclose(here, there, rtol=1e-5)


# A threshold for SGD does not transfer over width, which this test does not need.
@pytest.mark.filterwarnings("ignore:clip_by_global_norm compares")
@pytest.mark.parametrize(
    ("model", "optimizer", "schedule", "extra"),
    [
        ("resmlp", "muon", "cosine", "all"),
        pytest.param("gpt", "adamw", "cosine", "dropout", marks=pytest.mark.long),
        ("cnn", "sgd", "constant", "clipping"),
    ],
)
def test_a_run_of_a_sweep_is_that_of_the_trainer(
    tmp_path, model, optimizer, schedule, extra
):
    changes = dict(EXTRAS[extra])
    if extra == "all":
        del changes["model"]  # no dropout in this family
    assert_same(config(tmp_path, model, optimizer, SCHEDULES[schedule] | changes))


# Not muon: on some CPUs its matrix products differ in the last bit, by 1e-7 of a loss,
# between a lane of several runs and a run alone.
@pytest.mark.parametrize(
    ("model", "optimizer", "schedule", "extra"),
    [("resmlp", "sgd", "constant", "bare")],
)
def test_at_the_trainers_compiler_level_losses_are_equal_bit_for_bit(
    tmp_path, monkeypatch, model, optimizer, schedule, extra
):
    cheap = jax.config.read("jax_disable_most_optimizations")
    monkeypatch.setattr(engine, "_LEVEL", 0 if cheap else 3)  # as jax.jit compiles
    changes = {k: v for k, v in EXTRAS[extra].items() if k != "model"}
    given = config(tmp_path, model, optimizer, SCHEDULES[schedule] | changes)
    np.testing.assert_array_equal(swept(given), trained(given))


def pairs(case: tuple[str, ...]) -> set:
    return set(itertools.combinations(enumerate(case), 2))


def every_pair() -> list[tuple[str, str, str, str]]:
    """Few cases in which any two values of two columns meet."""
    cases = [
        (model, optimizer, schedule, extra)
        for model, optimizer, schedule, extra in itertools.product(
            MODELS, OPTIMIZERS, SCHEDULES, EXTRAS
        )
        if extra == "all" or means_something(model, EXTRAS[extra])
    ]
    chosen, missing = [], set().union(*map(pairs, cases))
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


@pytest.mark.filterwarnings("ignore:clip_by_global_norm compares")  # as above
@pytest.mark.long
@pytest.mark.parametrize(("model", "optimizer", "schedule", "extra"), every_pair())
def test_every_family_optimizer_and_option(tmp_path, model, optimizer, schedule, extra):
    changes = {
        key: value
        for key, value in EXTRAS[extra].items()
        if means_something(model, {key: value})
    }
    assert_same(config(tmp_path, model, optimizer, SCHEDULES[schedule] | changes))


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
def test_the_schedule_is_that_of_optax(name, warmup):
    steps, peak, final = 40, 0.3, 0.1
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, steps - warmup, final),
        "linear": optax.linear_schedule(peak, final * peak, steps - warmup),
    }[name]
    rise = optax.linear_schedule(0.0, peak, max(warmup, 1))
    wanted = optax.join_schedules([rise, after], [warmup]) if warmup else after
    schedule = make_schedule(name, peak, steps, warmup=warmup, final=final)
    traced = jax.jit(
        lambda step, peak, warmup: make_schedule(
            name, peak, steps, warmup=warmup, final=final
        )(step)
    )
    for step in range(steps + 2):
        assert float(schedule(step)) == pytest.approx(float(wanted(step)), rel=1e-5)
        lane = traced(step, jnp.float32(peak), jnp.float32(warmup))
        assert float(lane) == pytest.approx(float(wanted(step)), rel=1e-5)

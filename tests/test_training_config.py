"""Batch size and training length in configs: train, sweep, transfer, transfer_from."""

import copy
import dataclasses
import importlib
import json
import math
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sweep_toys
from flax import nnx

from mupax import optim
from mupax.experiments import transfer
from mupax.experiments.cli import flags
from mupax.experiments.errors import UserError
from mupax.experiments.run.build import build, open_dataset
from mupax.experiments.run.config import defaults, parse, plain
from mupax.experiments.run.hyperparameters import transfer_record, tuned
from mupax.experiments.sweep import space

TOY = pathlib.Path(__file__).with_name("toy_config.py")


def toy(command, *overrides):
    given = [f"--config.{x}" for x in overrides]
    return flags.parse([command, f"--config={TOY}", *given]).config


def small(**keys):
    model = {"name": "mlp", "width": 4, "depth": 2}
    return parse({"model": model, "learning_rate": 0.5, "steps": 64, **keys})


def first_update(config):
    built = build(config, sweep_toys.stripes())
    params = nnx.state(built.create(), nnx.Param)
    tx = built.recipe.optimizer({}, None, None)
    updates, _ = tx.update(params, tx.init(params), params)
    return float(optax.tree.norm(updates)), built


def test_a_run_follows_the_batch_size_of_its_base():
    keys = {"batch_size": 32, "ema": 0.9, "schedule": {"name": "constant"}}
    plain, _ = first_update(small(**keys))
    larger, built = first_update(small(**keys, base_batch_size=8))
    assert larger == pytest.approx(2 * plain, rel=1e-3)
    assert built.recipe.ema == pytest.approx(0.9**4)
    assert built.scales.training == optim.TrainingScale(4.0, 1.0)
    longer, built = first_update(small(**keys, base_examples=32 * 16))
    assert longer == pytest.approx(plain / 2, rel=1e-3)
    assert built.recipe.ema == pytest.approx(0.9**0.25)


def test_pairs_of_images_are_mixed_within_a_part_of_the_batch():
    assert small(batch_size=12, accumulate=2, mixup=0.2).mixup == 0.2
    with pytest.raises(UserError, match="must be even; it is 63"):
        small(batch_size=63, cutmix=1.0)
    with pytest.raises(UserError, match="must be even; it is 3"):
        small(batch_size=6, accumulate=2, mixup=0.2)


def test_a_target_follows_the_batch_size_and_if_asked_the_length():
    wanted = ("batch_size=16", "target.batch_size=32", "target.steps=120")
    config = transfer.parse(toy("transfer", *wanted))
    assert config.base.training == optim.TrainingScale()
    assert config.target.training == optim.TrainingScale(2.0, 1.0)
    assert "8 times as many examples" in transfer.length_note(config)
    config = transfer.parse(toy("transfer", *wanted, "target.length_rule=True"))
    assert config.target.training == optim.TrainingScale(2.0, 8.0)
    assert transfer.length_note(config) == ""


@pytest.mark.parametrize(("size", "ratio"), [(33, "2.06"), (64, "4"), (7, "0.438")])
def test_beyond_twice_the_batch_size_an_error_says_to_sweep_again(size, ratio):
    wanted = ("batch_size=16", f"target.batch_size={size}")
    with pytest.raises(UserError, match=rf"{size} is {ratio} times the 16") as error:
        transfer.parse(toy("transfer", *wanted))
    again, rule = re.findall(r"--config\.(\w+=\d+)", str(error.value))
    swept = transfer.parse(toy("transfer", *wanted, again))
    assert swept.target.training.batch == 1
    asked = transfer.parse(toy("transfer", *wanted, rule))
    assert asked.target.training.batch == size / 16


def test_a_target_warms_up_for_the_same_share_of_its_steps():
    wanted = ("batch_size=16", "schedule.warmup=6", "target.batch_size=32")
    config = transfer.parse(toy("transfer", *wanted, "target.steps=10"))
    assert config.target.schedule.options["warmup"] == 2
    longer = transfer.parse(toy("transfer", "schedule.warmup=6", "target.steps=60"))
    assert longer.target.schedule.options["warmup"] == 12
    own = toy("transfer", "schedule.warmup=6", "target.steps=60")
    with own.unlocked():
        own.target.schedule = {"name": "cosine", "warmup": 5}
    given = transfer.parse(own)
    assert given.target.schedule.options["warmup"] == 5
    with own.unlocked():
        own.target.schedule = {"name": "constant"}
    with pytest.raises(UserError, match=r"target was tuned with .*'cosine', and"):
        transfer.parse(own)
    short = space.parse_sweep(toy("transfer", "schedule.warmup=6", "sweep.steps=10"))
    assert short.base.schedule.options["warmup"] == 2


@pytest.mark.parametrize("rule", [False, True])
def test_transfer_from_has_the_batch_size_and_length_of_the_base(rule, tmp_path):
    wanted = ("target.batch_size=32", f"target.length_rule={rule}")
    config = transfer.parse(toy("transfer", *wanted))
    best = {"learning_rate": 0.25}
    target = tuned(config.target, best)
    path = tmp_path / "summary.json"
    record = transfer_record(config.base, best, target.base_examples)
    path.write_text(json.dumps({"transfer": record}))
    given = config.target.plain() | {"base_batch_size": None, "base_examples": None}
    read = parse(given | {"transfer_from": str(path)})
    assert read.training == target.training != optim.TrainingScale()


def test_a_sweep_over_batch_sizes_at_equal_examples():
    config = toy("sweep", "base_batch_size=16", "batch_size=16", "schedule.warmup=4")
    config.sweep.choices = (("batch_size", (4, 16, 60)),)
    config.sweep.equal_examples = True
    tasks = space.tasks(space.parse_sweep(config))
    sizes = {(t.batch_size, t.steps, t.average_last) for t in tasks}
    assert sizes == {(4, 120, 20), (16, 30, 5), (60, 8, 1)}
    warm = {t.batch_size: t.config.schedule.options["warmup"] for t in tasks}
    assert warm == {4: 16, 16: 4, 60: 1}
    ratios = {t.batch_size: t.config.training.kappa for t in tasks}
    assert ratios == {4: 0.25, 16: 1.0, 60: 3.75}
    config.sweep.equal_examples = False
    assert {t.steps for t in space.tasks(space.parse_sweep(config))} == {30}


def test_a_length_rule_must_be_a_flag():
    config = toy("transfer")
    config.target.length_rule = True
    assert space.parse_sweep(config).target.base_examples
    plain = config.to_dict()
    plain["target"]["length_rule"] = 1
    with pytest.raises(UserError, match="must be True or False"):
        space.parse_sweep(plain)


def test_swept_betas_follow_too():
    config = dataclasses.replace(small(batch_size=32, base_batch_size=8))
    built = build(config, sweep_toys.stripes())
    params = nnx.state(built.create(), nnx.Param)
    hyper = {"b1": jnp.float32(0.9), "learning_rate": jnp.float32(0.5)}
    tx = built.recipe.optimizer(hyper, None, None)
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    mu = optax.tree.get(state, "mu")
    leaf = next(iter(np.ravel(x)[0] for x in _leaves(mu) if np.ravel(x)[0]))
    start = next(iter(np.ravel(x)[0] for x in _leaves(params) if np.ravel(x)[0]))
    # The gradient is normalized: κ^½ times.
    assert leaf / start == pytest.approx(2 * (1 - 0.9**4), rel=1e-4)


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def test_a_sweep_over_lengths_keeps_the_share_of_warm_up():
    config = toy("sweep", "schedule.warmup=6", "base_examples=3840")
    config.sweep.choices = (("steps", (30, 120)),)
    tasks = space.tasks(space.parse_sweep(config))
    warm = {t.steps: t.config.schedule.options["warmup"] for t in tasks}
    assert warm == {30: 6, 120: 24}
    ratios = {t.steps: t.config.training.examples for t in tasks}
    assert ratios[120] == 4 * ratios[30]
    config.sweep.equal_examples = True
    with pytest.raises(UserError, match="leave one of them out"):
        space.parse_sweep(config)


@pytest.mark.parametrize("name", flags.list_configs())
def test_packaged_adamw_decays_matrices_only(name):
    config = importlib.import_module(f"mupax.configs.{name}").get_config()
    if config.optimizer.name == "adamw":
        assert config.optimizer.mask == "matrices"


WRONG = (1.5, -1, True, "x", None, 2**62, math.inf, "", [], [[1]], {"zzz": 1})


def entries(config, start=()):
    for key, value in config.items():
        yield (*start, key)
        if isinstance(value, dict):
            yield from entries(value, (*start, key))


def test_any_value_of_any_key_is_parsed_or_refused_in_one_sentence():
    whole = plain(flags.parse(["transfer", "--config=digits_resmlp"]).config)
    whole["target"] = plain(defaults("sweep", "target").target) | whole["target"]
    for keys in list(entries(whole)):
        for value in WRONG:
            config = section = copy.deepcopy(whole)
            for outer in keys[:-1]:
                section = section[outer]
            section[keys[-1]] = value
            try:
                space.parse_sweep(config)
            except UserError as error:
                said = str(error)
                assert "\n" not in said, said
                assert len(said) < 1000, said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"augment": (1,)}, "a value in augment is 1"),
        ({"augment": ({"name": ["flip"]},)}, "no augmentation ['flip']"),
        ({"data": {"mean": "", "std": 1}}, "mean='' must be a tuple"),
    ],
)
def test_a_value_of_another_type_names_its_key(keys, said):
    with pytest.raises(UserError, match=re.escape(said)):
        open_dataset(small(dataset="digits", **keys))

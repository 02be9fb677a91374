"""Hyperparameters of groups of parameters."""

import dataclasses
import json

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sweep_toys
from flax import nnx

from mupax import optim, zoo
from mupax.experiments.errors import UserError
from mupax.experiments.run.build import build
from mupax.experiments.run.config import defaults, parse
from mupax.experiments.run.hyperparameters import transfer_record, tuned
from mupax.experiments.sweep import engine, space
from mupax.optim.scales.paths import flatten


def mlp(n):
    return {
        "in": {"w": jnp.ones((3, n)) / 2, "b": jnp.zeros(n)},
        "mid": {"w": jnp.ones((n, n)) / n},
        "out": {"w": jnp.ones((n, 2)) / n},
    }


AXES = {"w": "i -> o", "b": "d"}
SCALES = optim.infer_scales(mlp(4), mlp(8), axes=AXES)
OPTIMIZERS = {
    "sgd": (lambda s: optim.sgd(0.1, s, momentum=0.5)),
    "adam": (lambda s: optim.adam(0.01, s, eps=0.1)),
    "adamw": (lambda s: optim.adamw(0.01, s, eps=0.1, weight_decay=0.5)),
    "lion": (lambda s: optim.lion(0.01, s, weight_decay=0.5)),
    "lamb": (lambda s: optim.lamb(0.01, s, eps=0.1, weight_decay=0.5)),
    "adafactor": (lambda s: optim.adafactor(0.01, s, weight_decay_rate=0.01)),
}


def trained(tx, params, factors, steps=3):
    """Train, with the leaves of some paths multiplied in the forward pass."""

    def loss(params):
        p = jax.tree.map(lambda leaf, c: leaf * c, params, factors)
        x = jnp.array([[1.0, -0.5, 2.0], [0.3, 1.0, -1.0]])
        h = jnp.tanh(x @ p["in"]["w"] + p["in"]["b"][None])
        y = jnp.tanh(h @ p["mid"]["w"]) @ p["out"]["w"]
        return jnp.mean((y - jnp.array([[1.0, -1.0], [0.5, 2.0]])) ** 2)

    state, losses = tx.init(params), []
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return np.array([*losses, float(loss(params))])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_multiplier_trains_as_one_in_the_forward_pass(name):
    with jax.enable_x64(True):
        base, start = (
            jax.tree.map(
                lambda x: (
                    jax.random.normal(jax.random.key(x.size), x.shape, jnp.float64)
                    * 0.3
                ),
                mlp(n),
            )
            for n in (4, 8)
        )
        start = optim.rescale_init(start, SCALES, base=base)
        one = jax.tree.map(lambda x: 1.0, start)
        forward = {**one, "mid": {"w": 3.0}}
        wanted = trained(OPTIMIZERS[name](SCALES), start, forward)
        scales = optim.for_modules(SCALES, {"^mid": {"multiplier": 3.0}})
        begun = optim.rescale_init(start, scales, base=base)
        weights = trained(OPTIMIZERS[name](scales), begun, one)
        plain = trained(OPTIMIZERS[name](SCALES), start, one)
    # Adafactor's own thresholds have no gauge.
    rtol = 1e-5 if name == "adafactor" else 1e-9
    np.testing.assert_allclose(weights, wanted, rtol=rtol)
    assert abs(plain[0] - wanted[0]) > 1e-3


def test_only_models_with_branches_take_over_a_branch_multiplier(tmp_path):
    path = tmp_path / "summary.json"
    for name, has in (("mlp", False), ("resmlp", True)):
        model = {"name": name, "width": 8, "depth": 2}
        given = {"dataset": "digits", "learning_rate": 0.1, "model": model}
        record = transfer_record(parse(given), {"learning_rate": 0.1})
        path.write_text(json.dumps({"transfer": record}))
        read = parse(given | {"transfer_from": str(path)})
        assert ("branch_multiplier" in read.model.options) is has


@pytest.mark.parametrize("copied", [False, True])
def test_initial_weights_of_a_group_are_scaled_once(copied):
    def random(n, seed=0):
        normal = lambda x: jax.random.normal(jax.random.key(seed), x.shape) / n**0.5  # noqa: E731
        return jax.tree.map(normal, mlp(n))

    base, target = random(64), random(256)
    plain = optim.infer_scales(base, target, axes=AXES)
    scales = optim.for_modules(plain, {"^mid": {"init_scale": 3.0}})
    once = optim.rescale_init(target, scales, base=base)
    right = optim.rescale_init(target, plain, base=base)
    np.testing.assert_allclose(once["mid"]["w"], 3 * right["mid"]["w"])
    np.testing.assert_array_equal(once["out"]["w"], right["out"]["w"])
    traced = jax.jit(
        lambda factor: optim.rescale_init(
            target,
            optim.for_modules(plain, {"^mid": {"init_scale": factor}}),
            base=base,
        )
    )
    np.testing.assert_allclose(traced(3.0)["mid"]["w"], once["mid"]["w"], rtol=1e-5)
    again = jax.tree.map(lambda x: x + 0, once) if copied else once
    twice = optim.rescale_init(again, scales, base=base)
    jax.tree.map(np.testing.assert_array_equal, twice, once)


def test_a_model_of_the_zoo_gets_the_factors_of_groups_once():
    options = {"width": 16, "depth": 2, "base_width": 8, "base_depth": 2}
    model = zoo.create("resmlp", **options, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    scales = optim.for_modules(zoo.scales(model), {"role:output": {"init_scale": 3.0}})
    once = optim.rescale_init(params, scales)
    factors = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a / b)), once, params)
    roles = {path: scale.role for path, scale in scales.items()}
    for path, factor in flatten(factors):
        if not jnp.isnan(factor):  # biases of zero
            assert factor == pytest.approx(3.0 if roles[path] == "output" else 1.0)
    twice = optim.rescale_init(once, scales)
    jax.tree.map(np.testing.assert_array_equal, twice, once)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_a_learning_rate_multiplies_the_update_and_not_the_decay(name):
    params = mlp(8)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 0.7), params)
    scales = optim.for_modules(SCALES, {"^in": {"learning_rate": 3.0}})

    def update(scales, weights):
        tx = OPTIMIZERS[name](scales)
        weights = jax.tree.map(lambda x: x * weights, params)
        return tx.update(grads, tx.init(weights), weights)[0]

    plain, tuned = (update(s, 1.0) for s in (SCALES, scales))
    np.testing.assert_allclose(tuned["out"]["w"], plain["out"]["w"], rtol=1e-6)
    np.testing.assert_allclose(tuned["mid"]["w"], plain["mid"]["w"], rtol=1e-6)
    without = [update(s, 0.0)["in"]["w"] for s in (SCALES, scales)]
    decays = [plain["in"]["w"] - without[0], tuned["in"]["w"] - without[1]]
    np.testing.assert_allclose(without[1], 3 * without[0], rtol=1e-5)
    np.testing.assert_allclose(decays[1], decays[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "adam", "adafactor"])
def test_a_decay_of_a_group_is_refused_where_there_is_none(name):
    scales = optim.for_modules(SCALES, {"^mid": {"weight_decay": 0.0}})
    with pytest.raises(ValueError, match="'mid/w' has a factor of weight_decay, but"):
        getattr(optim, name)(0.01, scales)
    optim.adamw(0.01, scales, weight_decay=0.0)


def test_a_learning_rate_of_zero_names_the_group_and_how_to_freeze():
    with pytest.raises(
        ValueError, match=r"'\^mid': .* positive number; to freeze .*partition"
    ):
        optim.for_modules(SCALES, {"^mid": {"learning_rate": 0.0}})


class Linen(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, name="in")(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        return nn.Dense(2, name="out")(x)


def test_initial_factors_of_linen_variables_and_of_modules_with_functions():
    base, variables = (
        Linen(width).init(jax.random.key(0), np.ones((1, 3))) for width in (8, 32)
    )
    axes = {"kernel": "i -> o", ".": "d"}
    scales = optim.infer_scales(base, variables, axes=axes)
    scales = optim.for_modules(scales, {"^in/kernel": {"init_scale": 2.0}})
    after = optim.rescale_init(variables, scales)
    kernels = [v["params"]["in"]["kernel"] for v in (variables, after)]
    np.testing.assert_allclose(kernels[1], 2 * kernels[0])
    assert after["batch_stats"] is not None
    np.testing.assert_array_equal(
        optim.apply_multipliers(variables, scales)["params"]["in"]["kernel"],
        kernels[0],
    )

    def build(width):
        return eqx.nn.MLP(4, 2, width, 2, key=jax.random.key(0))

    axes = {"weight": "out <- in", "bias": "d"}
    scales = optim.infer_scales(build(8), build(32), axes=axes)
    scales = optim.for_modules(scales, {"role:input": {"init_scale": 2.0}})
    before, model = build(32), optim.rescale_init(build(32), scales)
    first = [m.layers[0].weight for m in (before, model)]
    np.testing.assert_allclose(first[1], 2 * first[0])


def test_weight_decay_of_a_group():
    params = mlp(8)
    zero = jax.tree.map(jnp.zeros_like, params)
    for name in ("adamw", "adafactor"):
        scales = optim.for_modules(SCALES, {"role:hidden": {"weight_decay": 4.0}})
        one, four = (
            OPTIMIZERS[name](s).update(zero, OPTIMIZERS[name](s).init(params), params)
            for s in (SCALES, scales)
        )
        np.testing.assert_allclose(
            four[0]["mid"]["w"], 4 * one[0]["mid"]["w"], rtol=1e-6
        )
        np.testing.assert_allclose(four[0]["in"]["w"], one[0]["in"]["w"], rtol=1e-6)


def test_no_groups_leave_the_state_as_it_is():
    for name, make in OPTIMIZERS.items():
        states = [
            jax.tree.structure(make(s).init(mlp(8)))
            for s in (SCALES, optim.for_modules(SCALES, {}))
        ]
        assert states[0] == states[1], name


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_check_chain_is_content_with_groups(name):
    decay = {} if name in ("sgd", "adam") else {"weight_decay": 2.0}
    scales = optim.for_modules(SCALES, {"^mid": {"learning_rate": 3.0, **decay}})
    optim.check_chain(OPTIMIZERS[name](scales), scales)


def test_factors_transfer_with_size_batch_and_parametrization():
    scales = optim.for_modules(SCALES, {"^mid": {"learning_rate": 3.0}})
    for other in (scales.for_parametrization("mup"), scales.for_training(batch=(1, 4))):
        assert other.modules == scales.modules
    text = str(optim.explain(scales))
    assert "mid/w: also times learning_rate 3" in text


def test_an_own_chain_has_the_factors_of_groups():
    groups = {"^mid": {"learning_rate": 3.0, "multiplier": 2.0}}
    scales = optim.for_modules(SCALES, groups)
    chain = optax.chain(
        optim.normalize_gradients(scales),
        optax.scale_by_adam(),
        optim.scale_by_parametrization(scales, "adam"),
        optax.scale_by_learning_rate(0.1),
    )
    params = mlp(8)
    updates = [
        tx.update(params, tx.init(params), params)[0]
        for tx in (chain, optim.adam(0.1, scales))
    ]
    jax.tree.map(np.testing.assert_array_equal, *updates)
    scales = optim.for_modules(SCALES, {"^mid": {"weight_decay": 3.0}})
    with pytest.raises(ValueError, match="but scale_by_parametrization has no"):
        optim.scale_by_parametrization(scales)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ({"middle": {}}, "similar paths are 'mid/w'"),
        ({"hidden": {}}, "the scales hold .*'role:hidden'"),
        ({"role:inner": {}}, "'role:inner' matches no parameter; the scales hold"),
        ({"^in": {}, "/b$": {}}, "'in/b' matches '/b\\$', and already has"),
        ({"^in": {"lr": 1.0}}, "a group of parameters has learning_rate"),
        ({"^in": {"learning_rate": 0.0}}, "learning_rate=0.0 must be a positive"),
        ({"(": {}}, "not a regular expression"),
        ({"role:fixed": {}}, "the scales hold 'role:vector', 'role:input'"),
    ],
)
def test_a_mistake_is_one_sentence(modules, words):
    with pytest.raises(ValueError, match=words):
        optim.for_modules(SCALES, modules)


# ----- Configs and sweeps.

GROUPS = {
    "first": {"pattern": "^layers/0|readin"},
    "last": {"pattern": "readout", "learning_rate": 2.0},
}


def config(**more):
    model = {"name": "mlp", "width": 4, "depth": 2}
    keys = {"steps": 4, "batch_size": 8, "schedule": {"name": "constant"}, **more}
    return {"model": model, "learning_rate": 0.1, "modules": GROUPS, **keys}


def images():
    return sweep_toys.stripes()


def test_a_run_has_the_groups_of_its_config():
    run = parse(config())
    scales = build(run, images()).scales
    assert {m.learning_rate for m in scales.modules.values()} == {1.0, 2.0}
    assert all(
        "readout" in p for p, m in scales.modules.items() if m.learning_rate == 2
    )
    plain = parse(config(modules={}))
    assert run.settings() != plain.settings()


def test_values_replace_those_of_a_group_and_transfer():
    run = tuned(parse(config()), {"last/init_scale": 3.0, "first/learning_rate": 0.5})
    assert run.modules["last"]["init_scale"] == 3.0
    assert run.modules["last"]["learning_rate"] == 2.0
    weights = [
        nnx.to_pure_dict(nnx.state(build(c, images()).create(), nnx.Param))
        for c in (parse(config()), run)
    ]
    last = [jax.tree.leaves(w["readout"]) for w in weights]
    for before, after in zip(*last, strict=True):
        np.testing.assert_allclose(after, 3 * before, rtol=1e-6)


def test_transfer_from_has_the_groups(tmp_path):
    values = {"learning_rate": 0.25, "first/learning_rate": 0.5}
    base = parse(config(base_width=4, base_depth=2))
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"transfer": transfer_record(base, values)}))
    read = parse(config(modules={}) | {"transfer_from": str(path)})
    assert read.modules == tuned(base, values).modules
    assert read.modules["first"]["learning_rate"] == 0.5


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ({"a": {}}, "modules.a lacks a pattern"),
        ({"a": {"pattern": "x", "beta": 1}}, "modules.a has 'beta'"),
        ({"a": {"pattern": "x", "learning_rate": 0}}, "modules.a.learning_rate"),
        ({"a/b": {"pattern": "x"}}, "letters"),
    ],
)
def test_a_group_that_is_wrong_names_its_key(modules, words):
    with pytest.raises(UserError, match=words):
        parse(config(modules=modules))


def test_a_pattern_that_matches_nothing_stops_a_run_before_it_starts():
    run = parse(config(modules={"a": {"pattern": "read_out"}}))
    with pytest.raises(UserError, match="similar paths are 'readout"):
        build(run, images())


def sweep_config():
    c = defaults("sweep")
    for key, value in config(steps=6).items():
        c[key] = value
    c.sweep.axes.learning_rate = (0.05, 0.1, 0.2)
    c.sweep.axes["last/learning_rate"] = (1.0, 4.0)
    c.sweep.axes["first/weight_decay"] = (1.0, 2.0)
    c.sweep.axes["last/init_scale"] = (0.5, 1.0)
    c.sweep.seeds = 1
    c.sweep.average_last = 1
    return c


def test_groups_are_axes_of_one_program_and_lanes_are_runs():
    parsed = space.parse_sweep(sweep_config())
    (task,) = space.tasks(parsed)
    swept = engine.run(task, images())
    assert swept.loss.shape == (1, 3, 2, 2, 2)
    assert np.isfinite(swept.loss).all()
    # The lane is the run that has the values in its config.
    values = {"last/learning_rate": 4.0, "first/weight_decay": 2.0}
    values["last/init_scale"] = 0.5
    single = dataclasses.replace(
        task,
        config=tuned(task.config, values),
        grid={"learning_rate": (0.05, 0.1, 0.2)},
    )
    alone = engine.run(single, images())
    at = [swept.axes[name].index(values[name]) for name in list(swept.axes)[1:]]
    np.testing.assert_allclose(alone.loss[0], swept.loss[0][:, *at], rtol=1e-5)
    assert swept.best().keys() == parsed.axes.keys()


def test_an_axis_of_an_unknown_group_is_an_error():
    c = sweep_config()
    c.sweep.axes["frist/learning_rate"] = (1.0, 2.0)
    with pytest.raises(UserError, match="last/learning_rate"):
        space.parse_sweep(c)


def test_groups_or_lengths_given_twice_are_an_error():
    """The later call dropped the earlier one."""
    first = optim.for_modules(SCALES, {"^in": {"learning_rate": 4.0}})
    with pytest.raises(
        ValueError, match="'in/w' matches 'role:input', and already has"
    ):
        optim.for_modules(first, {"role:input": {"weight_decay": 0.0}})
    both = optim.for_modules(first, {"^mid": {"learning_rate": 2.0}})
    assert both.modules["in/w"].learning_rate == 4.0
    assert both.modules["mid/w"].learning_rate == 2.0
    longer = SCALES.for_training(batch=(64, 256))
    with pytest.raises(ValueError, match="pass batch and examples in one call"):
        longer.for_training(examples=(1e6, 16e6))

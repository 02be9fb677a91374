"""The coordinate check, and what it says of the parametrizations.

Sizes are such that what is not the parametrization stays far below the tolerance:
the readouts start small enough (a base of few units) that the initial output, of
size m^-1/2, does not change the gradients, and stacks begin at 16 layers, since
inside a block the part of the update that vanishes as M^-1/2 is still seen at 4.
"""

import concurrent.futures
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from mupax import optim
from mupax.optim.check.activations import collect
from mupax.optim.check.coord_check import _linear
from mupax.optim.check.coord_verdict import Facts

X = jax.random.normal(jax.random.key(1), (16, 16))
Y = jax.random.normal(jax.random.key(2), (16, 4))
LEARNING_RATES = {"sgd": 0.1, "adam": 0.01, "lion": 0.01, "muon": 0.02}
# Updates of SGD are as large as its gradients, and those differ between seeds.
SEEDS = {"sgd": 24}


def loss(model, batch):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


class MLP(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.Linear(16, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.third = nnx.Linear(width, width, rngs=rngs)
        self.readout = nnx.Linear(width, 4, rngs=rngs)

    def features(self, x):
        for layer in (self.first, self.second, self.third):
            x = jnp.tanh(layer(x))
        return x

    def __call__(self, x):
        return self.readout(self.features(x))


class Block(nnx.Module):
    def __init__(self, width, multiplier, rngs):
        self.multiplier = multiplier
        self.linear = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = jax.nn.relu(self.linear(x))
        return x + self.multiplier * (h - h.mean(-1, keepdims=True))


class ResMLP(nnx.Module):
    """Tensor Programs VI, section 6.3, its blocks stacked and scanned."""

    def __init__(self, width, depth, multiplier, rngs):
        self.first = nnx.Linear(16, width, use_bias=False, rngs=rngs)

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs):
            return Block(width, multiplier, rngs)

        self.blocks = blocks(rngs)
        self.readout = nnx.Linear(width, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        graph, state = nnx.split(self.blocks)

        def step(x, state):
            return nnx.merge(graph, state)(x), None

        return self.readout(jax.lax.scan(step, self.first(x), state)[0])


def rescaled(model, scales, name):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return nnx.merge(
        graph, optim.rescale_init(params, scales.for_parametrization(name)), rest
    )


def check_mlp(name, optimizer, widths, **settings):
    def scales(model):
        return optim.infer_scales(lambda: MLP(16, nnx.Rngs(0)), model)

    def build(key, width):
        model = MLP(width, nnx.Rngs(key))
        return rescaled(model, scales(model), name)

    def make(model, width):
        alias = getattr(optim, optimizer)
        return alias(LEARNING_RATES[optimizer], scales(model).for_parametrization(name))

    settings = {"seeds": SEEDS.get(optimizer, 8), "tolerance": 0.05, **settings}
    return optim.coord_check(build, make, loss, (X, Y), widths=widths, **settings)


def check_resmlp(name, optimizer, width=None, depth=None, **settings):
    """A check over widths or over depths; the other one is held."""
    point = optim.parametrization(name)

    def scales(model, depth):
        return optim.infer_scales(
            lambda: ResMLP(4, 4, 1.0, nnx.Rngs(0)),
            model,
            depth=(4, depth),
            branch="blocks",
        )

    def build(key, width=width, depth=depth):
        multiplier = point.branch_multiplier(depth / 4, a=0.5)
        model = ResMLP(width, depth, multiplier, nnx.Rngs(key))
        return rescaled(model, scales(model, depth), name)

    def make(model, width=width, depth=depth):
        alias = getattr(optim, optimizer)
        return alias(
            LEARNING_RATES[optimizer] / 2,
            scales(model, depth).for_parametrization(name),
        )

    settings = {"seeds": SEEDS.get(optimizer, 6), "tolerance": 0.05, **settings}
    return optim.coord_check(build, make, loss, (X, Y), **settings)


def assert_flat(check):
    assert check.passed, str(check)
    slopes = [abs(s) for layers in check.slopes.values() for s in layers.values()]
    assert max(slopes) <= check.tolerance, str(check)
    # The verdict is worth something only if it is measured well.
    worst = max(e for errors in check.errors.values() for e in errors.values())
    assert worst < 0.02, str(check)


# The two that follow the signs of gradients move alike; Adam stands for Lion.
LONG = [pytest.param(o, marks=pytest.mark.long) for o in ("lion", "muon")]
# Each claim is checked with one of these, and with the other where there is time.
SGD, ADAM = (
    pytest.param(o, marks=[pytest.mark.long, pytest.mark.ci]) for o in ("sgd", "adam")
)


@pytest.mark.parametrize("optimizer", ["sgd", ADAM, *LONG])
def test_under_mup_every_layer_of_an_mlp_moves_alike_at_every_width(optimizer):
    widths = (128, 512) if optimizer == "muon" else (128, 1024)
    assert_flat(check_mlp("mup", optimizer, widths))


@pytest.mark.parametrize("optimizer", [SGD, "adam", *LONG])
def test_under_depth_mup_every_layer_moves_alike_at_every_depth(optimizer):
    depths = (16, 64, 256) if optimizer == "adam" else (16, 256)
    assert_flat(check_resmlp("depth_mup", optimizer, width=64, depths=depths))


@pytest.mark.parametrize("optimizer", [SGD, "adam", *LONG])
def test_under_depth_mup_every_layer_moves_alike_at_every_width(optimizer):
    widths = (128, 512) if optimizer == "muon" else (256, 1024)
    assert_flat(check_resmlp("depth_mup", optimizer, depth=4, widths=widths))


@pytest.mark.parametrize("optimizer", ["sgd", ADAM])
def test_the_standard_parametrization_fails_over_width(optimizer):
    check = check_mlp("sp", optimizer, (128, 512), seeds=4)
    assert not check.passed
    assert ("width", "readout") in check.failed
    assert check.slopes["width"]["readout"] > 0.3


@pytest.mark.parametrize("optimizer", [SGD, "adam"])
def test_the_standard_parametrization_fails_over_depth(optimizer):
    check = check_resmlp("sp", optimizer, width=32, depths=(16, 64), seeds=4)
    assert not check.passed
    assert ("depth", "blocks@1") in check.failed


class Dense(nn.Module):
    """In Linen."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(self.width, name="first")(x))
        return nn.Dense(4, name="readout")(x)

    width: int = 8


def linen_check(activations=None):
    def run(variables, x):
        return Dense(variables["params"]["first"]["bias"].shape[0]).apply(variables, x)

    return optim.coord_check(
        lambda key, width: Dense(width).init(key, X),
        optax.sgd(0.1),
        lambda variables, batch: jnp.mean((run(variables, batch[0]) - batch[1]) ** 2),
        (X, Y),
        widths=(8, 16),
        steps=2,
        seeds=2,
        activations=activations,
    )


def test_linen_is_seen_as_its_own_capture_sees_it():
    def captured(variables, batch):
        model = Dense(variables["params"]["first"]["bias"].shape[0])
        _, state = model.apply(
            variables, batch[0], capture_intermediates=True, mutable="intermediates"
        )
        return state

    seen, given = linen_check(), linen_check(captured)
    assert set(seen.changes["width"]) == {"first", "readout", "output"}
    assert seen.slopes["width"].keys() == given.slopes["width"].keys()
    for layer, slope in seen.slopes["width"].items():
        assert slope == pytest.approx(given.slopes["width"][layer], rel=1e-4)


def test_linen_batch_statistics_are_not_trained():
    class Normed(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=True)(nn.Dense(self.width)(x))

    def run(variables, batch):
        module = Normed(variables["params"]["Dense_0"]["bias"].size)
        return jnp.mean(module.apply(variables, batch[0]) ** 2)

    seen = []

    def optimizer(model, width):
        seen.append(set(model))
        return optax.sgd(0.1)

    check = optim.coord_check(
        lambda key, width: Normed(width).init(key, X),
        optimizer,
        run,
        (X, Y),
        widths=(1, 2),
        steps=1,
        seeds=1,
    )
    assert seen[0] == {"params", "batch_stats"}
    assert np.isnan(check.errors["width"]["Dense_0"])
    assert check.verdict == "unclear"  # one seed and two sizes tell no error


class Equi(eqx.Module):
    first: eqx.nn.Linear
    readout: eqx.nn.Linear
    phi: object = eqx.field(static=False)

    def __init__(self, width, key, use_bias=True):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(16, width, use_bias=use_bias, key=keys[0])
        self.readout = eqx.nn.Linear(width, 4, use_bias=use_bias, key=keys[1])
        self.phi = jnp.tanh

    def hidden(self, x):
        return self.phi(jax.vmap(self.first)(x))

    def __call__(self, x):
        return jax.vmap(self.readout)(self.hidden(x))


@pytest.mark.parametrize("use_bias", [True, False])
def test_equinox_with_a_function_that_returns_activations(use_bias):
    settings = {"widths": (8, 16), "steps": 2, "seeds": 2}
    base = Equi(4, jax.random.key(0), use_bias)

    def optimizer(model, width):
        return optim.adam(0.01, optim.infer_scales(base, model))

    def build(key, width):
        return Equi(width, key, use_bias)

    check = optim.coord_check(
        build,
        optimizer,
        loss,
        (X, Y),
        activations=lambda model, batch: {"hidden": model.hidden(batch[0])},
        **settings,
    )
    assert set(check.slopes["width"]) == {"hidden"}
    with pytest.raises(ValueError, match="pass activations=function"):
        optim.coord_check(build, optimizer, loss, (X, Y), **settings)


@pytest.mark.parametrize("seeds", ["3", 3.0, 0, (), (1.5,)])
def test_seeds_are_whole_numbers(seeds):
    with pytest.raises(ValueError, match="must be a number of seeds, at least one, or"):
        optim.coord_check(None, None, None, X, widths=(8, 16), seeds=seeds)


@pytest.mark.parametrize("zeros", [np.zeros, jnp.zeros])
def test_arrays_of_numpy_are_trained(zeros):
    """The bias starts at zero, so it only moves if it is trained."""

    def build(key, width):
        weights = jax.random.normal(key, (16, width)) / 4
        readout = jnp.zeros((width, 4))
        return {"in": weights, "out": readout, "bias": zeros((1, 4), np.float32)}

    def forward(model, batch):
        return {"bias": model["bias"], "hidden": batch[0] @ model["in"]}

    def error(model, batch):
        logits = batch[0] @ model["in"] @ model["out"] + model["bias"]
        return ((logits - batch[1]) ** 2).mean()

    check = optim.coord_check(
        build,
        lambda model, width: optax.sgd(1.0),
        error,
        (X, Y),
        activations=forward,
        widths=(8, 16),
        steps=2,
        seeds=2,
    )
    assert (check.changes["width"]["bias"] > 0).all()


class Sower(nnx.Module):
    """A list of blocks, named by number, and a value that is sown."""

    def __init__(self, depth, rngs):
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(depth)])
        self.readout = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = x + 0.1 * block(x)
        self.sow(nnx.Intermediate, "features", x)
        return self.readout(x)


def test_nnx_sown_values_and_lists_of_blocks_are_found_by_relative_depth():
    check = optim.coord_check(
        lambda key, depth: Sower(depth, nnx.Rngs(key)),
        optax.sgd(0.01),
        loss,
        (X, Y),
        depths=(4, 8),
        steps=1,
        seeds=2,
    )
    quarters = {f"blocks/*@{p}" for p in ("0.25", "0.5", "0.75", "1")}
    assert set(check.slopes["depth"]) == quarters | {"features", "readout", "output"}


def test_the_change_reported_is_the_change_of_that_layer():
    learning_rate, size = 0.1, (8, 16)
    check = optim.coord_check(
        lambda key, width: MLP(width, nnx.Rngs(key)),
        optax.sgd(learning_rate),
        loss,
        (X, Y),
        widths=size,
        steps=1,
        seeds=[7],
    )
    for i, width in enumerate(size):
        model = MLP(width, nnx.Rngs(jax.random.key(7)))
        before = model.second(jnp.tanh(model.first(X)))
        grads = nnx.grad(loss)(model, (X, Y))
        params = nnx.state(model, nnx.Param)
        nnx.update(
            model, jax.tree.map(lambda p, g: p - learning_rate * g, params, grads)
        )
        after = model.second(jnp.tanh(model.first(X)))
        change = check.changes["width"]["second"][i, 0, 0]
        assert change == pytest.approx(float(jnp.std(after - before, mean=0)), rel=1e-4)


def test_no_class_is_changed_while_the_model_is_traced():
    """Other threads may use the same classes meanwhile."""
    classes = (MLP, nnx.Linear)
    before = [(cls.__call__, cls.sow) for cls in classes]
    seen = []

    def traced(model, batch):
        seen.append([(cls.__call__, cls.sow) for cls in classes] == before)
        assert isinstance(model, MLP)
        return loss(model, batch)

    found = collect(lambda m: traced(m, (X, Y)), MLP(8, nnx.Rngs(0)))
    assert seen == [True]
    assert set(found) == {"first", "second", "third", "readout", "output"}


def test_models_are_traced_in_several_threads_at_once():
    def names(depth):
        model = Sower(depth, nnx.Rngs(0))
        return set(collect(lambda m: loss(m, (X, Y)), model))

    depths = [1, 2, 3, 4] * 2
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for depth, found in zip(depths, pool.map(names, depths), strict=True):
            blocks = {f"blocks/{i}" for i in range(depth)}
            assert found == blocks | {"features", "readout", "output"}


def test_the_users_model_keeps_its_classes_and_values():
    model = MLP(8, nnx.Rngs(0))
    before = model(X)
    collect(lambda m: loss(m, (X, Y)), model)
    assert [type(m) for _, m in nnx.iter_modules(model)].count(nnx.Linear) == 4
    np.testing.assert_array_equal(model(X), before)


def small_check(**settings):
    return check_mlp("sp", "sgd", (32, 128), **{"steps": 2, "seeds": 3, **settings})


def test_the_verdict_names_layers_slopes_and_failures():
    check = small_check(seeds=24)
    text = str(check)
    assert "log |Δ activation| against log width (32, 128)" in text
    line = next(x for x in text.splitlines() if x.strip().startswith("readout"))
    assert f"{check.slopes['width']['readout']:+.3f}" in line
    assert line.endswith("WRONG")
    assert "\nwrong: " in text
    assert check.hints
    assert all(f"- {hint}" in text.splitlines() for hint in check.hints)


def test_layers_can_be_chosen():
    assert set(small_check(layers="^second$").slopes["width"]) == {"second"}


def test_one_picture_for_each_axis(tmp_path):
    pytest.importorskip("matplotlib")
    check = small_check()
    assert check.plot(tmp_path / "check.png") == [str(tmp_path / "check.png")]
    both = optim.CoordCheck(
        {"width": (32, 128), "depth": (32, 128)},
        {"width": check.changes["width"], "depth": check.changes["width"]},
    )
    written = both.plot(tmp_path / "both.png")
    assert written == [str(tmp_path / f"both-{a}.png") for a in ("width", "depth")]
    for path in written:
        with open(path, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_without_a_path_the_figures_are_returned_and_show_themselves(tmp_path):
    pytest.importorskip("matplotlib")
    shown = small_check(steps=1).plot()
    assert len(shown) == 1
    assert shown[0].axes
    assert '<img style="max-width: 100%" src="data:image/png' in shown._repr_html_()
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mupax\[train\]'"):
        small_check(steps=1).plot(tmp_path / "check.png")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "nothing to compare"),
        ({"widths": (8,)}, "at least two different positive sizes"),
        ({"widths": (8, 8)}, "at least two different positive sizes"),
        ({"widths": 8}, "widths=8 must be whole numbers"),
        ({"depths": "8,16"}, "depths='8,16' must be whole numbers"),
        ({"depths": (0, 8)}, "at least two different positive sizes"),
        ({"widths": (8, 16), "steps": 0}, "steps=0 must be at least 1"),
        ({"widths": (8, 16), "seeds": 0}, "must be a number of seeds"),
        ({"widths": (8, 16), "layers": "absent"}, "matches layers='absent'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        optim.coord_check(
            lambda key, width: MLP(width, nnx.Rngs(key)),
            optax.sgd(0.1),
            loss,
            (X, Y),
            **settings,
        )


def test_a_learning_rate_of_zero_is_no_success():
    with pytest.raises(ValueError, match="no activation changed"):
        optim.coord_check(
            lambda key, width: MLP(width, nnx.Rngs(key)),
            optax.sgd(0.0),
            loss,
            (X, Y),
            widths=(8, 16),
        )


def test_a_run_that_diverges_fails():
    changes = {"width": {"a": np.full((2, 1, 1), np.nan), "b": np.ones((2, 1, 1))}}
    check = optim.CoordCheck({"width": (8, 16)}, changes)
    assert check.failed == [("width", "a")]
    assert "check the batch for NaN" in " ".join(check.hints)


# --- verdicts ---


def synthetic(slope, noise, seeds=4, layers=1, sizes=(32, 64, 128), seed=0, **facts):
    """A check whose layers have this slope, and this scatter of a slope over seeds."""
    rng = np.random.default_rng(seed)
    x = np.log(np.array(sizes)) - np.log(sizes).mean()
    spread = noise * np.sqrt((x**2).sum())  # of each logarithm
    changes = {}
    for layer in range(layers):
        y = slope * x[:, None, None] + spread * rng.normal(size=(len(x), 2, seeds))
        changes[f"layer{layer}"] = np.exp(y)
    return optim.CoordCheck({"width": sizes}, {"width": changes}, facts=facts)


def share(verdict, slope, noise, checks=200, **options):
    found = [synthetic(slope, noise, seed=s, **options) for s in range(checks)]
    return np.mean([check.verdict == verdict for check in found])


@pytest.mark.parametrize("seeds", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("layers", [1, 20])
def test_noise_is_never_called_wrong(noise, seeds, layers):
    options = {"seeds": seeds, "layers": layers, "checks": 100}
    assert share("wrong", 0.0, noise, **options) <= 0.02
    assert share("wrong", 0.1, noise, **options) <= 0.02  # a finite size


def test_a_slope_of_noise_is_unclear_and_asks_for_seeds():
    check = synthetic(0.25, 1.5, seeds=4)
    assert (check.verdict, check.passed, check.failed) == ("unclear", False, [])
    assert any("more seeds" in h or "seeds=" in h for h in check.hints)


@pytest.mark.parametrize("slope", [0.5, -0.5, 1.0])
def test_an_exponent_of_a_half_is_found_and_never_ok(slope):
    assert share("wrong", slope, 0.05, layers=10) == 1
    assert share("ok", slope, 0.5, layers=10) == 0


def test_small_slopes_that_are_known_well_are_ok():
    assert share("ok", 0.0, 0.05, layers=10) > 0.95
    assert synthetic(0.0, 0.0).verdict == "ok"


def test_a_slope_between_zero_and_a_half_is_not_ok_and_not_wrong():
    between = synthetic(0.2, 0.001)
    assert between.verdict == "unclear"
    assert "1 surely lies between ±0.15 and ±0.25: use larger sizes" in repr(between)
    assert "as more seeds would not change that" in str(between)


def test_a_slope_that_fades_with_size_is_unclear_and_says_so():
    sizes = (4, 8, 16)
    change = (1 - 1.2 / np.array(sizes)) * np.ones((3, 1, 1)).T  # towards a limit
    change = np.moveaxis(change, -1, 0) * np.exp(0.001 * np.arange(4))
    check = optim.CoordCheck({"depth": sizes}, {"depth": {"stream": change}})
    assert check.slopes["depth"]["stream"] > 0.15
    assert check.verdict == "unclear"
    assert any("fades with depth" in hint for hint in check.hints)


def test_one_seed_and_three_sizes_tell_an_error_from_the_line():
    assert synthetic(1.0, 0.001, seeds=1).verdict == "wrong"
    assert synthetic(0.0, 0.001, seeds=1).verdict == "ok"
    assert synthetic(0.0, 0.001, seeds=1, sizes=(32, 64)).verdict == "unclear"


def test_steps_before_anything_moves_are_left_out():
    """Behind a readout that starts at zero, nothing moves in the first step."""
    change = np.ones((2, 3, 4)) + 0.001 * np.arange(4)
    change[:, 0] = 0
    check = optim.CoordCheck({"width": (8, 16)}, {"width": {"hidden": change}})
    assert check.verdict == "ok"
    assert check.slopes["width"]["hidden"] == pytest.approx(0)


def test_a_layer_that_starts_at_zero_is_not_judged_where_it_falls():
    facts = {"width": Facts({"layer0": np.zeros(3)})}
    fallen = synthetic(-0.5, 0.01)
    assert fallen.verdict == "wrong"
    start = optim.CoordCheck(fallen.sizes, fallen.changes, facts=facts)
    assert start.verdicts == {"width": {}}
    assert "not judged (starts at zero)" in str(start)
    grown = synthetic(0.5, 0.01)
    check = optim.CoordCheck(grown.sizes, grown.changes, facts=facts)
    assert check.failed == [("width", "layer0")]


# --- hints ---


def test_a_readout_of_the_standard_parametrization_is_named():
    def mlp(width, key=0):
        rngs = nnx.Rngs(key)
        layers = {"up": nnx.Linear(8, width, rngs=rngs)}
        layers["hidden"] = nnx.Linear(width, width, rngs=rngs)
        layers["head"] = nnx.Linear(width, 8, rngs=rngs)
        return Chained(layers)

    def scales(width):
        return optim.infer_scales(lambda: mlp(16), lambda: mlp(width))

    def check(build):
        tx = lambda model, width: optim.adam(0.01, scales(width))  # noqa: E731
        x = jax.random.normal(jax.random.key(1), (8, 8))
        return optim.coord_check(build, tx, None, x, widths=(32, 128), steps=2)

    def right(key, width):
        model = mlp(width, key)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, optim.rescale_init(params, scales(width)))
        return model

    said = "the readout 'head/kernel' starts as width^-0.5"
    assert any(said in h for h in check(lambda key, width: mlp(width, key)).hints)
    assert not any(said in h for h in check(right).hints)


class Chained(nnx.Module):
    """Layers in a row, with ReLUs between them."""

    def __init__(self, layers):
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.names = tuple(layers)

    def __call__(self, x):
        *inner, last = (getattr(self, name) for name in self.names)
        for layer in inner:
            x = nnx.relu(layer(x))
        return last(x)


def named(changes, **options):
    """A check of layers with these slopes."""
    sizes, axis = (32, 64, 128), options.pop("axis", "width")
    scatter = np.exp(0.01 * np.arange(4))
    layers = {
        name: (np.array(sizes) ** slope)[:, None, None] * scatter
        for name, slope in changes.items()
    }
    return optim.CoordCheck({axis: sizes}, {axis: layers}, **options)


@pytest.mark.parametrize(
    ("changes", "options", "hint"),
    [
        ({"hidden": 0.0, "readout": 0.5}, {}, "the readout is not scaled"),
        ({"hidden": 1.0, "readout": 1.0}, {}, "learning rates are not scaled"),
        ({"hidden": -0.5}, {"own_loss": True}, "the loss may be the cause"),
        ({"hidden": -0.5}, {}, "updates are too small"),
        ({"blocks@1": 0.5}, {"axis": "depth"}, "branch_multiplier"),
        ({"blocks@1": 0.5}, {"axis": "depth"}, "strength=a**2 * base_depth"),
    ],
)
def test_recognizable_slopes_get_a_hint(changes, options, hint):
    check = named(changes, **options)
    assert check.verdict == "wrong"
    assert any(hint in text for text in check.hints), check.hints


def test_what_is_ok_gets_no_hint():
    assert named({"hidden": 0.0, "readout": 0.01}, own_loss=True).hints == []


class Embedded(nnx.Module):
    """Its embedding starts at width^-1/2, as Flax has it, unless it is told."""

    def __init__(self, width, rngs, **options):
        self.embed = nnx.Embed(8, width, rngs=rngs, **options)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.head(nnx.relu(self.hidden(self.embed(tokens))))


def check_embedded(base, **options):
    def build(key, width):
        model = Embedded(width, nnx.Rngs(key), **options)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, optim.rescale_init(params, scales(width), base=base))
        return model

    def scales(width):
        return optim.infer_scales(
            lambda: Embedded(16, nnx.Rngs(0)), lambda: Embedded(width, nnx.Rngs(0))
        )

    return optim.coord_check(
        build,
        lambda model, width: optim.adam(0.01, scales(width)),
        batch=jnp.arange(8),
        widths=(64, 256),
        steps=2,
    )


@pytest.mark.ci
@pytest.mark.long
def test_an_embedding_that_shrinks_is_named_and_the_remedy_works():
    with pytest.warns(optim.ChainWarning, match="size of 'embed/embedding' is not"):
        wrong = check_embedded(base=None)
    assert any(
        "the embedding 'embed/embedding' starts smaller" in h for h in wrong.hints
    )
    right = check_embedded(lambda: Embedded(16, nnx.Rngs(0)))
    assert (right.passed, right.hints) == (True, []), str(right)


# --- the loss, and the user's functions ---


def check_outputs(loss, batch, **settings):
    settings = {"widths": (8, 16), "steps": 1, "seeds": 2, **settings}
    return optim.coord_check(
        lambda key, width: MLP(width, nnx.Rngs(key)),
        optax.sgd(0.1),
        loss,
        batch,
        **settings,
    )


@pytest.mark.ci
@pytest.mark.long
def test_without_a_loss_the_outputs_get_one_that_is_linear_in_them():
    given = check_outputs(lambda model, batch: model(batch[0]), (X, Y))
    for check in (check_outputs(None, (X, Y)), check_outputs(None, X)):
        assert check.slopes == given.slopes
        assert not check.own_loss
    assert check_outputs(loss, (X, Y)).own_loss


def test_the_gradient_of_the_linear_loss_does_not_see_the_size_of_the_outputs():
    gradients = [jax.grad(_linear)(scale * Y) for scale in (1.0, 100.0)]
    np.testing.assert_array_equal(*gradients)
    norms = jnp.linalg.norm(gradients[0], axis=-1)
    np.testing.assert_allclose(norms, 1 / len(Y), rtol=1e-5)
    np.testing.assert_allclose(gradients[0].sum(-1), 0, atol=1e-7)


BUILD = {"build": lambda key, width: MLP(width, nnx.Rngs(key))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"build": lambda key: None}, r"write it as def build\(key, width\)"),
        (
            {"build": lambda key, width, depth: None},
            r"build does not accept; give its depth a default, or pass depths=\(",
        ),
        ({"build": lambda key, depth: None}, r"write it as def build\(key, width\)"),
        ({"build": MLP(8, nnx.Rngs(0))}, "which build does not accept"),
        ({"build": 3}, "build is a int"),
        (
            {"build": lambda key, width: MLP(width, 0)},
            r"rngs=nnx\.Rngs\(key\), not as a number",
        ),
        ({"build": lambda key, width: Dense(width)}, "returns a Dense without arrays"),
        (
            {"build": lambda key, width: MLP(8, nnx.Rngs(key))},
            "same shapes at widths .*does it use its width",
        ),
        (
            {"build": lambda key, width: MLP(width, nnx.Rngs(0))},
            "same parameters for 2 different keys",
        ),
        (
            {"optimizer": lambda model: optax.sgd(0.1)},
            r"write it as def optimizer\(model, width\)",
        ),
        (
            {"optimizer": lambda model, width, depth: optax.sgd(0.1)},
            r"optimizer does not accept; give its depth a default, or pass depths=\(",
        ),
        (
            {"optimizer": lambda model, width: 0.1},
            "not an optax.GradientTransformation",
        ),
        ({"optimizer": 0.1}, "optimizer is a float"),
        ({"batch": None}, "batch is missing"),
        ({"loss": None, "batch": {"x": X}}, "pass loss=function"),
        ({"loss": lambda m, b: m.features(b[0])}, "whose shape changes with width"),
        ({"loss": lambda m, b: jnp.argmax(m(b[0]))[None]}, "no floating-point array"),
    ],
)
def test_wrong_functions_are_named(change, message):
    settings = {"optimizer": optax.sgd(0.1), "loss": loss, "batch": (X, Y)}
    settings = {**BUILD, **settings, **change}
    with pytest.raises(ValueError, match=message):
        optim.coord_check(**settings, widths=(8, 16), steps=1, seeds=2)


# --- finite depth ---


def depth_check(slope, strength):
    """A check of depth whose one layer moves exactly as depth^slope."""
    depths = (8, 16, 32)
    change = (np.array(depths) / 8.0) ** slope
    noise = 1 + 0.001 * np.random.default_rng(0).normal(size=(3, 1, 4))
    changes = {"depth": {"blocks@1": change[:, None, None] * noise}}
    return optim.CoordCheck({"depth": depths}, changes, strength=strength)


def test_a_small_slope_of_depth_is_blamed_on_strong_branches():
    found = depth_check(0.35, 8.0)
    assert found.verdict.value == "unclear"
    assert "finite depth, a²·base_depth = 8: 1 slopes of depth" in str(found)
    assert "2.8 times smaller" in str(found)


@pytest.mark.parametrize("strength", [None, 0.5, 1.0])
def test_weak_branches_excuse_nothing(strength):
    found = depth_check(0.35, strength)
    assert found.verdict.value == "wrong"
    assert "finite depth, a²" not in str(found)
    assert ("strength=" in str(found)) == (strength is None)


def test_the_exponent_of_a_mistake_is_wrong_at_any_strength():
    assert depth_check(0.5, 8.0).verdict.value == "wrong"


def in_blocks(stream, inner, strength=None, name="norm1"):
    slopes = {"blocks/*@0.5": stream, f"blocks/*/{name}@0.5": inner}
    return named(slopes, axis="depth", strength=strength)


def test_layers_that_grow_inside_blocks_that_do_not_are_blamed_on_finite_depth():
    found = in_blocks(-0.1, 0.5)
    assert found.failed == [("depth", "blocks/*/norm1@0.5")]
    [hint] = found.hints
    assert "the outputs of their blocks do not. This is usually finite depth" in hint
    assert "check again with strength=a**2 * base_depth" in hint
    [hint] = in_blocks(0.9, 0.5).hints
    assert "outputs of their blocks" not in hint
    excused = in_blocks(-0.1, 0.5, strength=4)
    assert (excused.verdict, excused.passed) == ("unclear", False)
    assert "up to +0.50), but below what a mistake gives (0.45, or 0.65" in str(excused)


@pytest.mark.parametrize(
    ("stream", "inner"),
    [(0.5, 0.5), (0.3, 0.5), (-0.1, 0.7), (-0.1, -0.5), (-0.5, 0.5)],
)
def test_blocks_that_change_with_depth_excuse_nothing(stream, inner):
    found = in_blocks(stream, inner, strength=4)
    assert ("depth", "blocks/*/norm1@0.5") in found.failed
    assert "strength=" not in str(found)


def test_only_known_strong_branches_excuse_layers_inside_flat_blocks():
    for strength in (None, 1.0):
        assert in_blocks(0.0, 0.5, strength).verdict == "wrong"


def test_slopes_of_own_updates_in_weak_branches_are_unclear():
    found = in_blocks(-0.1, -0.44, strength=0.5)
    assert (found.verdict, found.passed) == ("unclear", False)
    assert "weak branches, a²·base_depth = 0.5: 1 slopes" in str(found)
    assert "(down to -0.44)" in str(found)
    assert "train_ends=True" in str(found)


@pytest.mark.parametrize(
    ("stream", "inner"), [(-0.3, -0.44), (0.0, -0.7), (0.3, -0.44)]
)
def test_weak_branches_excuse_no_other_slopes(stream, inner):
    found = in_blocks(stream, inner, strength=0.5)
    assert ("depth", "blocks/*/norm1@0.5") in found.failed
    assert "weak branches" not in str(found)


def test_noise_is_not_blamed_on_finite_depth():
    depths = (8, 16, 32)
    exponents = 0.5 * np.array([1, -1, 1, -1])  # by seed
    change = (np.array(depths)[:, None, None] / 8.0) ** exponents
    layers = {"depth": {"output": change}}
    found = optim.CoordCheck({"depth": depths}, layers, strength=4.0)
    assert found.verdict == "unclear"
    assert "finite depth, a²" not in str(found)


def test_a_slope_that_finite_depth_does_not_explain_is_counted_apart():
    depths, layers = (8, 16, 32), {}
    for name, slope, noise in (("blocks@1", 0.35, 0.001), ("output", 0.63, 0.5)):
        exponents = slope + noise * np.array([1, -1, 1, -1])  # by seed
        layers[name] = (np.array(depths)[:, None, None] / 8.0) ** exponents
    found = optim.CoordCheck({"depth": depths}, {"depth": layers}, strength=4.0)
    assert [layer for _, layer in found.unclear] == ["blocks@1", "output"]
    assert "1 slopes of depth are unclear (up to +0.35)" in str(found)
    assert "(0.45); 1 more slopes are unclear for other reasons" in str(found)


def test_a_width_that_is_not_swept_needs_a_default():
    with pytest.raises(ValueError, match=r"give its width a default, or pass widths="):
        optim.coord_check(
            lambda key, width, depth: None, optax.sgd(0.1), batch=X, depths=(1, 2)
        )


def test_a_negative_strength_is_refused():
    with pytest.raises(ValueError, match=r"strength=-1.* must be a²·base_depth"):
        optim.coord_check(None, None, batch=X, depths=(1, 2), strength=-1)

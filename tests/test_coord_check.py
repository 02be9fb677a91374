"""The coordinate check, and what it says of the parametrizations.

Sizes are such that what is not the parametrization stays far below the tolerance:
the readouts start small enough (a base of few units) that the initial output, of
size m^-1/2, does not change the gradients, and stacks begin at 16 layers, since
inside a block the part of the update that vanishes as M^-1/2 is still seen at 4.
"""

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
    return nnx.merge(graph, optim.rescale_init(params, scales, name), rest)


def check_mlp(name, optimizer, widths, **settings):
    def scales(model):
        return optim.infer_scales(lambda: MLP(16, nnx.Rngs(0)), model)

    def build(key, width):
        model = MLP(width, nnx.Rngs(key))
        return rescaled(model, scales(model), name)

    def make(model, width):
        alias = getattr(optim, optimizer)
        return alias(LEARNING_RATES[optimizer], scales(model), name)

    settings = {"seeds": SEEDS.get(optimizer, 8), **settings}
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
        return alias(LEARNING_RATES[optimizer] / 2, scales(model, depth), name)

    settings = {"seeds": SEEDS.get(optimizer, 6), **settings}
    return optim.coord_check(build, make, loss, (X, Y), **settings)


def assert_flat(check):
    assert check.passed, str(check)
    # The verdict is worth something only if it is measured well.
    worst = max(e for errors in check.errors.values() for e in errors.values())
    assert worst < 0.02, str(check)


# The two that follow the signs of gradients move alike; Adam stands for Lion.
SOME = (
    "sgd",
    "adam",
    *(pytest.param(o, marks=pytest.mark.long) for o in ("lion", "muon")),
)


@pytest.mark.parametrize("optimizer", SOME)
def test_under_mup_every_layer_of_an_mlp_moves_alike_at_every_width(optimizer):
    widths = (128, 512) if optimizer == "muon" else (128, 1024)
    assert_flat(check_mlp("mup", optimizer, widths))


@pytest.mark.parametrize("optimizer", SOME)
def test_under_depth_mup_every_layer_moves_alike_at_every_depth(optimizer):
    depths = (16, 64, 256) if optimizer == "adam" else (16, 256)
    assert_flat(check_resmlp("depth_mup", optimizer, width=64, depths=depths))


@pytest.mark.parametrize("optimizer", SOME)
def test_under_depth_mup_every_layer_moves_alike_at_every_width(optimizer):
    widths = (128, 512) if optimizer == "muon" else (256, 1024)
    assert_flat(check_resmlp("depth_mup", optimizer, depth=4, widths=widths))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_standard_parametrization_fails_over_width(optimizer):
    check = check_mlp("sp", optimizer, (128, 512), seeds=4)
    assert not check.passed
    assert ("width", "readout") in check.failed
    assert check.slopes["width"]["readout"] > 0.3


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
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
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=True)(nn.Dense(4)(x))

    seen = []

    def optimizer(model, width):
        seen.append(set(model))
        return optax.sgd(0.1)

    check = optim.coord_check(
        lambda key, width: Normed().init(key, X),
        optimizer,
        lambda variables, batch: jnp.mean(Normed().apply(variables, batch[0]) ** 2),
        (X, Y),
        widths=(1, 2),
        steps=1,
        seeds=1,
    )
    assert seen[0] == {"params", "batch_stats"}
    assert check.passed  # the width is not used
    assert np.isnan(check.errors["width"]["Dense_0"])


class Equi(eqx.Module):
    first: eqx.nn.Linear
    readout: eqx.nn.Linear
    phi: object = eqx.field(static=False)

    def __init__(self, width, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(16, width, key=keys[0])
        self.readout = eqx.nn.Linear(width, 4, key=keys[1])
        self.phi = jnp.tanh

    def hidden(self, x):
        return self.phi(jax.vmap(self.first)(x))

    def __call__(self, x):
        return jax.vmap(self.readout)(self.hidden(x))


def test_equinox_with_a_function_that_returns_activations():
    settings = {"widths": (8, 16), "steps": 2, "seeds": 2}
    base = Equi(4, jax.random.key(0))

    def optimizer(model, width):
        return optim.adam(0.01, optim.infer_scales(base, model), "mup")

    def build(key, width):
        return Equi(width, key)

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


def test_classes_are_left_as_they_were():
    before = MLP.__call__, "sow" in vars(MLP), nnx.Linear.__call__
    check_mlp("mup", "sgd", (32, 64), steps=1, seeds=1)
    assert before == (MLP.__call__, "sow" in vars(MLP), nnx.Linear.__call__)


def small_check(**settings):
    return check_mlp("sp", "sgd", (32, 64), **{"steps": 2, "seeds": 2, **settings})


def test_the_verdict_names_layers_slopes_and_failures():
    check = small_check()
    text = str(check)
    assert "log |Δ activation| against log width (32, 64)" in text
    line = next(x for x in text.splitlines() if x.strip().startswith("readout"))
    assert f"{check.slopes['width']['readout']:+.3f}" in line
    assert line.endswith("FAILED")
    assert text.splitlines()[-1].startswith("failed: ")


def test_layers_can_be_chosen():
    assert set(small_check(layers="^second$").slopes["width"]) == {"second"}


def test_one_picture_for_each_axis(tmp_path):
    pytest.importorskip("matplotlib")
    check = small_check()
    assert check.plot(tmp_path / "check.png") == [str(tmp_path / "check.png")]
    both = optim.CoordCheck(
        {"width": (32, 64), "depth": (32, 64)},
        {"width": check.changes["width"], "depth": check.changes["width"]},
    )
    written = both.plot(tmp_path / "both.png")
    assert written == [str(tmp_path / f"both-{a}.png") for a in ("width", "depth")]
    for path in written:
        with open(path, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"


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
        ({"depths": (0, 8)}, "at least two different positive sizes"),
        ({"widths": (8, 16), "steps": 0}, "steps=0 must be at least 1"),
        ({"widths": (8, 16), "seeds": 0}, "must be at least one"),
        ({"widths": (8, 16), "layers": "absent"}, "no layer matches 'absent'"),
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
    with pytest.raises(ValueError, match="no activation moved"):
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

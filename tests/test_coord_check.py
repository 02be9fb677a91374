"""The coordinate check, and what it says of the parametrizations.

Sizes are such that what is not the parametrization stays far below the tolerance:
the readouts start small enough (a base of few units) that the initial output, of
size m^-1/2, does not change the gradients. Residual networks, and every family of
the zoo, are in test_zoo_coord_long.py.
"""

import sys

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from mupax import optim
from mupax.optim.check.activations import Layer, Recording
from mupax.optim.check.coord_check import _scalar
from mupax.optim.check.coord_verdict import Facts

X = jax.random.normal(jax.random.key(1), (16, 16))
Y = jax.random.normal(jax.random.key(2), (16, 4))
LEARNING_RATES = {"sgd": 0.1, "adam": 0.01}
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


def rescaled(model, scales):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return nnx.merge(graph, optim.rescale_init(params, scales), rest)


def check_mlp(name, optimizer, widths, **settings):
    def scales(width):
        small, wide, large = (lambda n=n: MLP(n, nnx.Rngs(0)) for n in (16, 32, width))
        return optim.infer_scales(
            small, large, inputs=(X,), parametrization=name, delta=wide
        )

    def build(key, width):
        return rescaled(MLP(width, nnx.Rngs(key)), scales(width))

    def make(model, width):
        return getattr(optim, optimizer)(LEARNING_RATES[optimizer], scales(width))

    settings = {"seeds": SEEDS.get(optimizer, 8), "tolerance": 0.05, **settings}
    return optim.coord_check(build, make, loss, (X, Y), widths=widths, **settings)


def assert_flat(check):
    assert check.passed, str(check)
    slopes = [abs(s) for layers in check.slopes.values() for s in layers.values()]
    assert max(slopes) <= check.tolerance, str(check)
    # The verdict is worth something only if it is measured well.
    worst = max(e for errors in check.errors.values() for e in errors.values())
    assert worst < 0.02, str(check)


# Others, in branches: test_matrix_optimizers.py and test_zoo_coord_long.py.
@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_under_mup_every_layer_of_an_mlp_moves_alike_at_every_width(optimizer):
    assert_flat(check_mlp("mup", optimizer, (128, 1024)))


@pytest.mark.long
def test_the_standard_parametrization_fails_over_width_under_adam():
    """Under SGD: the test of the verdict's text, below."""
    check = check_mlp("sp", "adam", (128, 512), seeds=4)
    assert ("width", "readout") in check.failed
    assert check.slopes["width"]["readout"] > 0.3


# --- layers, of any library ---


class LinenNet(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, name="first")(x)
        for i in range(self.depth):
            h = nn.Dense(2 * self.width, name=f"up_{i}")(nn.LayerNorm(name=f"n_{i}")(x))
            x = x + 0.5 * nn.Dense(self.width, name=f"out_{i}")(jnp.tanh(h))
        return nn.Dense(4, name="readout")(x)


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    blocks: list
    readout: eqx.nn.Linear
    phi: object  # not an array

    def __init__(self, width, depth, key):
        keys = iter(jax.random.split(key, 2 * depth + 2))
        self.first = eqx.nn.Linear(16, width, use_bias=False, key=next(keys))
        self.blocks = [
            {
                "n": eqx.nn.LayerNorm(width),
                "up": eqx.nn.Linear(width, 2 * width, key=next(keys)),
                "out": eqx.nn.Linear(2 * width, width, key=next(keys)),
            }
            for _ in range(depth)
        ]
        self.readout = eqx.nn.Linear(width, 4, key=next(keys))
        self.phi = jnp.tanh

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + 0.5 * block["out"](self.phi(block["up"](block["n"](x))))
        return self.readout(x)


def haiku_net(width, depth):
    def forward(x):
        x = hk.Linear(width, name="first")(x)
        for i in range(depth):
            h = hk.LayerNorm(-1, True, True, name=f"n_{i}")(x)
            h = jnp.tanh(hk.Linear(2 * width, name=f"up_{i}")(h))
            x = x + 0.5 * hk.Linear(width, name=f"out_{i}")(h)
        return hk.Linear(4, name="readout")(x)

    return hk.without_apply_rng(hk.transform(forward))


def plain(width, depth, key):
    def kernel(i, *shape):
        return jax.random.normal(jax.random.fold_in(key, i), shape) * shape[-2] ** -0.5

    return {
        "first": kernel(0, 16, width),
        "n": jnp.ones((depth, 1, width)),
        "up": kernel(1, depth, width, 2 * width),
        "out": kernel(2, depth, 2 * width, width),
        "out_bias": jnp.zeros((depth, 1, width)),
        "readout": kernel(3, width, 4),
    }


def plain_forward(p, x, multiplier=0.5):
    @jax.checkpoint
    def block(x, p):
        gain, up, out, bias = p
        h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True))
        return x + multiplier * (jnp.tanh((h * gain) @ up) @ out + bias), None

    x, _ = jax.lax.scan(
        block, x @ p["first"], [p[k] for k in ("n", "up", "out", "out_bias")]
    )
    return x @ p["readout"]


LIBRARIES = {
    "linen": (
        lambda key, depth: LinenNet(8, depth).init(key, X),
        lambda v, x: LinenNet(8, sum("up" in k for k in v["params"])).apply(v, x),
    ),
    "equinox": (
        lambda key, depth: EquinoxNet(8, depth, key),
        lambda m, x: jax.vmap(m)(x),
    ),
    "haiku": (
        lambda key, depth: haiku_net(8, depth).init(key, X),
        lambda p, x: haiku_net(8, sum("up" in k for k in p)).apply(p, x),
    ),
    "plain": (lambda key, depth: plain(8, depth, key), plain_forward),
}
NAMES = {"linen": "{}_*", "haiku": "{}_*", "equinox": "blocks/*/{}", "plain": "{}"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_models_of_every_library_are_read_alike(library):
    build, forward = LIBRARIES[library]
    # Blocks outside of a scan are compiled one by one.
    depths, positions = (
        ((4, 8), (0.25, 0.5, 0.75, 1))
        if library == "plain"
        else (
            (2, 4),
            (0.5, 1),
        )
    )
    check = optim.coord_check(
        build, optax.sgd(0.01), forward, X, depths=depths, steps=1, seeds=2
    )
    inner = [NAMES[library].format(name) for name in ("n", "up", "out")]
    stacked = {*inner, f"stream after {inner[-1]}"}
    inside = {f"{n}@{p:g}" for n in stacked for p in positions}
    assert set(check.slopes["depth"]) == inside | {"first", "readout"}
    facts = check.facts["depth"]
    assert all(
        x.line.startswith("test_coord_check.py:") for (x, _) in facts.layers.values()
    )
    for layer, (small, large) in facts.layers.items():
        branch = inner[-1] if layer in inside else ""
        assert small.branch == large.branch == branch
    assert facts.layers[f"stream after {inner[-1]}@1"][1].multiplier == 0.5


def recorded(function, params, *inputs):
    """The layers of a function, and their values, by name."""
    record = Recording(
        lambda p, _, *x: jax.tree.leaves(
            function(dict(zip(params, p, strict=True)), *x)
        ),
        params,
        [],
        inputs,
    )
    return record.layers, record([*params.values()], [], inputs)


def test_values_inside_of_loops_that_only_add_up_are_those_of_all_iterations():
    p = {"w": jax.random.normal(jax.random.key(0), (3, 4, 5))}
    x = jax.random.normal(jax.random.key(1), (2, 4))

    def forward(p, x):
        def add(i, y):
            return y + jnp.tanh((2 * x) @ p["w"][i])

        return jax.lax.fori_loop(0, 3, add, jnp.zeros((2, 5)))

    layers, found = recorded(forward, p, x)
    assert not layers["w"].stacked
    right = jnp.einsum("bi,eij->bej", 2 * x, p["w"])
    assert jnp.allclose(jnp.sort(found["w"].ravel()), jnp.sort(right.ravel()))


def test_values_inside_of_scans_are_stacked_by_layer_and_not_by_time():
    p = {
        "w": jax.random.normal(jax.random.key(0), (3, 4, 4)),
        "recurrent": jnp.eye(4),
        "twice": jnp.eye(4),
    }
    x = jax.random.normal(jax.random.key(1), (5, 2, 4))  # time, batch, units

    def layer(p, x, w):
        def cell(h, x):
            return h @ p["recurrent"] + jnp.tanh(x @ w), h

        return jax.lax.scan(cell, x[0], x)[1]

    def forward(p, x):
        x, _ = jax.lax.scan(lambda x, w: (layer(p, x, w), None), x, p["w"])
        return jax.jit(lambda x: x @ p["twice"] @ p["twice"])(x)

    layers, found = recorded(forward, p, x)
    assert {n: (a.shape, layers[n].stacked) for n, a in found.items()} == {
        "w": ((3, 5, 2, 4), True),
        "recurrent": ((3, 5, 2, 4), True),
        "twice": ((1, 5, 2, 4), False),
        "twice#2": ((1, 5, 2, 4), False),
    }
    second = layer(p, x, p["w"][0])
    np.testing.assert_allclose(found["w"][1], second @ p["w"][1], rtol=1e-4)
    np.testing.assert_allclose(found["twice#2"][0], forward(p, x))


def test_a_product_comes_with_its_bias_its_sum_and_the_rest_of_its_norm():
    p = {
        "w": jnp.full((4, 3), 2.0),
        "b": jnp.ones((1, 3)),
        "gain": jnp.full((1, 3), 5.0),
    }

    def forward(p, x):
        y = jnp.sum(x[:, :, None] * p["w"][None], 1) + p["b"]
        scale = jax.lax.rsqrt(y.var(-1, keepdims=True) + 1) * p["gain"]
        return jnp.sin((y - y.mean()) * scale)

    x = jnp.ones((2, 4))
    found = recorded(forward, p, x)[1]
    assert list(found) == ["w", "gain", "output"]
    np.testing.assert_allclose(found["w"], 9.0)
    np.testing.assert_allclose(found["output"], jnp.sin(found["gain"]))


def test_the_logits_of_a_tied_embedding_come_with_their_multiplier():
    def build(key, width):
        return {"embed": jax.random.normal(key, (8, width))}

    def forward(p, tokens):
        x = jnp.tanh(p["embed"][tokens])
        return jnp.square(x @ p["embed"].T * (16 / p["embed"].shape[1]))

    def make(model, width):
        models = (build(jax.random.key(0), n) for n in (16, width))
        return optim.adam(
            1e-2, optim.infer_scales(*models, inputs=(jnp.arange(8),), call=forward)
        )

    check = optim.coord_check(
        build, make, forward, jnp.arange(8), widths=(64, 1024), steps=2
    )
    assert set(check.slopes["width"]) == {"embed", "embed#2", "output"}
    assert check.passed, str(check)


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


@pytest.mark.parametrize("zeros", [np.zeros, jnp.zeros])
def test_arrays_of_numpy_are_trained(zeros):
    """The readout of zeros hides the rest, so only a bias that is trained moves it."""

    def build(key, width):
        weights = jax.random.normal(key, (16, width)) / 4
        readout = jnp.zeros((width, 4))
        return {"in": weights, "out": readout, "bias": zeros((1, 4), np.float32)}

    def forward(model, batch):
        return 0.0 * batch[0] @ model["in"] @ model["out"] + model["bias"]

    sizes = {"widths": (8, 16), "steps": 2, "seeds": 2}
    check = optim.coord_check(build, optax.sgd(1.0), forward, (X, Y), **sizes)
    assert (check.changes["width"]["out"] > 0).all()


def test_the_change_reported_is_the_change_of_that_layer():
    learning_rate, size = 0.1, (8, 16)
    check = optim.coord_check(
        lambda key, width: MLP(width, nnx.Rngs(key)),
        optax.sgd(learning_rate),
        loss,
        (X, Y),
        widths=size,
        steps=1,
        seeds=1,
    )
    for i, width in enumerate(size):
        model = MLP(width, nnx.Rngs(jax.random.key(0)))
        before = model.second(jnp.tanh(model.first(X)))
        grads = nnx.grad(loss)(model, (X, Y))
        params = nnx.state(model, nnx.Param)
        nnx.update(
            model, jax.tree.map(lambda p, g: p - learning_rate * g, params, grads)
        )
        after = model.second(jnp.tanh(model.first(X)))
        change = check.changes["width"]["second"][i, 0, 0]
        assert change == pytest.approx(float(jnp.std(after - before, mean=0)), rel=1e-4)


# --- messages ---


def check_plain(scale, multiply=False):
    """A residual network that does not multiply its branches, or that does."""
    point = optim.parametrization("depth_mup")

    def forward(p, x):
        factor = point.branch_multiplier(len(p["out"]) / 4) if multiply else 1
        return plain_forward(p, x, 0.5 * factor)

    def scales(depth):
        models = (lambda d=d: plain(16, d, jax.random.key(0)) for d in (4, depth))
        return optim.infer_scales(
            *models,
            inputs=(X,),
            call=forward,
            parametrization=point,
            delta=lambda: plain(32, 4, jax.random.key(0)),
        )

    def build(key, depth):
        params = plain(16, depth, key)
        return optim.rescale_init(params, scales(depth)) if scale else params

    return optim.coord_check(
        build,
        lambda model, depth: (
            optim.adam(1e-3, scales(depth)) if scale else optax.adam(1e-3)
        ),
        forward,
        X,
        depths=(4, 16),
        steps=2,
        seeds=2,
    )


def test_multipliers_in_the_parameters_are_measured_as_those_in_the_program():
    carried, multiplied = (check_plain(scale=True, multiply=m) for m in (False, True))
    for layer, change in carried.changes["depth"].items():
        np.testing.assert_allclose(
            change, multiplied.changes["depth"][layer], rtol=2e-3, err_msg=layer
        )


def test_a_branch_that_grows_is_named_with_its_line_and_its_multiplier():
    check = check_plain(scale=False)
    line = check.facts["depth"].layers["stream after out@1"][0].line
    [hint] = [h for h in check.hints if f"branch ending in out ({line}) grows" in h]
    assert "it is multiplied by 0.5 at every depth" in hint
    assert "the optimizer applies no scales" in hint
    assert f"stream after out@1 ({line})" in str(check)


def small_check(**settings):
    return check_mlp("sp", "sgd", (32, 128), **{"steps": 2, "seeds": 3, **settings})


def test_the_verdict_names_layers_lines_slopes_and_failures():
    check = small_check(seeds=24)
    assert ("width", "readout") in check.failed
    assert check.slopes["width"]["readout"] > 0.3
    text = str(check)
    assert "log |Δ activation| against log width (32, 128)" in text
    line = next(x for x in text.splitlines() if x.strip().startswith("readout"))
    assert line.strip().startswith("readout (test_coord_check.py:")
    assert f"{check.slopes['width']['readout']:+.3f}" in line
    assert line.endswith("WRONG")
    assert "\nwrong: " in text
    assert check.hints
    assert all(f"- {hint}" in text.splitlines() for hint in check.hints)


def test_layers_can_be_chosen():
    assert set(small_check(layers="^second$").slopes["width"]) == {"second"}


def test_a_picture_has_a_row_for_each_axis_and_labels_each_step(tmp_path):
    """A layer behind a readout of zeros changes from the second step on."""
    pytest.importorskip("matplotlib")
    change = np.array([1.0, 2.0, 4.0])[:, None, None] * np.ones((3, 2, 2))
    late = change.copy()
    late[:, 0] = 0
    layers = {"readout": change, "hidden": late}
    sizes = {"width": (16, 32, 64), "depth": (4, 8, 16)}
    check = optim.CoordCheck(sizes, dict.fromkeys(sizes, layers))
    shown = check.plot(tmp_path / "check.png")
    assert (tmp_path / "check.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    panels = shown.axes
    assert [p.get_xlabel() for p in panels] == ["width"] * 2 + ["depth"] * 2
    labels = [panels[i].get_legend_handles_labels()[1][1] for i in (0, 1)]
    assert labels == ["hidden  +nan", "hidden  +1.00"]


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[train\]'"):
        synthetic(0.0, 0.1).plot(tmp_path / "check.png")


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


@pytest.mark.parametrize("layers", [1, 20])
def test_noise_is_never_called_wrong(layers):
    for seeds in (2, 4, 8):
        for noise in (0.02, 0.1, 0.5):
            for slope in (0.0, 0.1):  # 0.1 of a finite size
                options = {"seeds": seeds, "layers": layers, "checks": 100}
                assert share("wrong", slope, noise, **options) <= 0.02


def test_a_slope_of_noise_is_unclear_and_asks_for_seeds():
    check = synthetic(0.25, 1.5, seeds=4)
    assert (check.verdict, check.passed, check.failed) == ("unclear", False, [])
    assert "use more seeds" in repr(check)


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
    assert "1 (up to +0.20) are not surely zero" in repr(between)


def test_a_slope_that_fades_with_size_is_unclear():
    sizes = (4, 8, 16)
    change = (1 - 1.2 / np.array(sizes)) * np.ones((3, 1, 1)).T  # towards a limit
    change = np.moveaxis(change, -1, 0) * np.exp(0.001 * np.arange(4))
    check = optim.CoordCheck({"depth": sizes}, {"depth": {"stream": change}})
    assert check.slopes["depth"]["stream"] > 0.15
    assert check.verdict == "unclear"


@pytest.mark.parametrize("axis", ["width", "depth"])
@pytest.mark.parametrize("slope", [0.0, 0.3, 1.0])
def test_one_seed_tells_no_error(axis, slope):
    sizes = (32, 64, 128)
    change = np.array(sizes)[:, None, None] ** np.full((1, 2, 1), slope)
    found = optim.CoordCheck({axis: sizes}, {axis: {"stream": change}})
    assert found.verdict == "unclear"
    assert "use more seeds, at least 2" in str(found)


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


def test_a_run_that_diverges_fails():
    changes = {"width": {"a": np.full((2, 1, 1), np.nan), "b": np.ones((2, 1, 1))}}
    check = optim.CoordCheck({"width": (8, 16)}, changes)
    assert check.failed == [("width", "a")]
    assert "check the batch for NaN" in " ".join(check.hints)


# --- finite depth ---


def named(changes, **options):
    """A check of layers with these slopes."""
    sizes, axis = (32, 64, 128), options.pop("axis", "width")
    scatter = np.exp(0.01 * np.arange(4))
    layers = {
        name: (np.array(sizes) ** slope)[:, None, None] * scatter
        for name, slope in changes.items()
    }
    return optim.CoordCheck({axis: sizes}, {axis: layers}, **options)


def in_branches(stream, inner, axis="depth"):
    slopes = {"stream after out@0.5": stream, "norm@0.5": inner}
    layers = {name: (Layer("m.py:3", branch="out"),) * 3 for name in slopes}
    return named(slopes, axis=axis, facts={axis: Facts(layers=layers)})


def test_a_small_slope_of_depth_is_of_few_layers():
    found = in_branches(0.35, 0.0)
    assert (found.verdict, found.passed) == ("unclear", False)
    assert "1 (up to +0.35) are not surely zero" in str(found)
    assert in_branches(0.5, 0.0).verdict == "wrong"  # the exponent of a mistake
    assert in_branches(0.35, 0.0, axis="width").verdict == "wrong"


@pytest.mark.parametrize("inner", [0.5, -0.44])
def test_layers_inside_branches_of_a_flat_stream_are_not_judged(inner):
    found = in_branches(-0.1, inner)
    assert (found.verdict, found.hints) == ("ok", [])
    assert "not judged (in a branch of a flat stream)" in str(found)


@pytest.mark.parametrize(("stream", "inner"), [(0.5, 0.5), (0.3, 0.5), (-0.5, 0.5)])
def test_a_stream_that_changes_with_depth_excuses_nothing(stream, inner):
    assert ("depth", "norm@0.5") in in_branches(stream, inner).failed


def test_a_branch_that_grows_is_named_with_its_line():
    [hint] = in_branches(0.9, 0.5).hints
    assert hint.startswith("branch ending in out (m.py:3) grows with depth, as")


# --- hints ---


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"hidden": 0.0, "output": 0.5}, "output grows with width, as width^+0.50"),
        ({"hidden": -0.5}, "updates are too small"),
    ],
)
def test_recognizable_slopes_get_a_hint(changes, hint):
    check = named(changes)
    assert check.verdict == "wrong"
    assert any(hint in text for text in check.hints), check.hints


def test_a_readout_that_starts_too_large_is_named_where_a_slope_is_not_ok():
    facts = Facts({"head": np.ones(3)}, {"head": (Layer("m.py:9", size=4),) * 3})
    first, *_ = named({"head": 0.5}, facts={"width": facts}).hints
    start = "head (m.py:9) starts as width^+0.00, where width^-0.50 is right"
    assert first.startswith(start)
    assert named({"head": 0.0}, facts={"width": facts}).hints == []


def test_what_follows_a_bottleneck_may_start_as_small():
    sizes = np.array((32, 64, 128))
    grows = tuple(Layer("m.py:9", size=n) for n in sizes)
    fixed = (Layer("m.py:8", size=4),) * 3
    layers, small = {"up": grows, "down": fixed}, sizes**-0.5
    slopes = dict.fromkeys(layers, 0.0)

    def hints(*names):
        facts = Facts(dict.fromkeys(names, small), layers)
        return named(slopes, facts={"width": facts}).hints

    assert hints("down", "up") == []
    [hint] = hints("up", "down")
    assert hint.startswith(
        "up (m.py:9) starts as width^-0.50, where width^+0.00 is right"
    )


def test_what_is_ok_gets_no_hint():
    assert named({"hidden": 0.0, "readout": 0.01}).hints == []


def test_no_cause_is_named_for_a_slope_that_is_unclear():
    slopes = -0.45 + 0.5 * np.array([1, -1, 1, -1])  # by seed
    change = (np.array([32, 64, 128])[:, None, None] / 32.0) ** slopes
    check = optim.CoordCheck({"width": (32, 64, 128)}, {"width": {"hidden": change}})
    assert (check.verdict, check.hints) == ("unclear", [])


class Embedded(nnx.Module):
    """Its embedding starts at width^-1/2, as Flax has it."""

    def __init__(self, width, rngs):
        self.embed = nnx.Embed(8, width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.head(nnx.relu(self.hidden(self.embed(tokens))))


def test_initial_sizes_are_checked_by_role_and_the_remedy_works():
    small = lambda: Embedded(16, nnx.Rngs(0))  # noqa: E731

    def scales(width):
        large = lambda: Embedded(width, nnx.Rngs(0))  # noqa: E731
        return optim.infer_scales(small, large, inputs=(jnp.arange(8),))

    def check(rescale):
        def build(key, width):
            model = Embedded(width, nnx.Rngs(key))
            return rescaled(model, scales(width)) if rescale else model

        return optim.coord_check(
            build,
            lambda model, width: optim.adam(0.01, scales(width)),
            batch=jnp.arange(8),
            widths=(64, 256),
            steps=2,
        )

    wrong = check(rescale=False)
    line = wrong.facts["width"].layers["embed"][0].line
    assert line.startswith("test_coord_check.py:")
    [hint] = [hint for hint in wrong.hints if hint.startswith(f"embed ({line})")]
    assert "starts as width^-0.5" in hint
    assert "where width^+0.00 is right" in hint
    right = check(rescale=True)
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


@pytest.mark.long
def test_without_a_loss_the_outputs_get_one_that_is_linear_in_them():
    given = check_outputs(lambda model, batch: model(batch[0]), (X, Y))
    for check in (check_outputs(None, (X, Y)), check_outputs(None, X)):
        assert check.slopes == given.slopes


def test_the_gradient_of_the_linear_loss_does_not_see_the_size_of_the_outputs():
    gradients = [jax.grad(_scalar)(scale * Y) for scale in (1.0, 100.0)]
    np.testing.assert_array_equal(*gradients)
    norms = jnp.linalg.norm(gradients[0], axis=-1)
    np.testing.assert_allclose(norms, 1 / len(Y), rtol=1e-5)
    np.testing.assert_allclose(gradients[0].sum(-1), 0, atol=1e-7)


class Short(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.Linear(16, width, rngs=rngs)
        self.readout = nnx.Linear(width, 4, rngs=rngs)

    def features(self, x):
        return self.first(x)

    def __call__(self, x):
        return self.readout(self.features(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widths": None}, "nothing to compare"),
        ({"widths": (8,)}, "at least two different positive sizes"),
        ({"widths": (8, 8)}, "at least two different positive sizes"),
        ({"widths": None, "depths": (0, 8)}, "at least two different positive sizes"),
        ({"widths": 8}, "widths=8 must be at least two different positive sizes"),
        ({"widths": "8,16"}, "whole numbers"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"steps": 1.5}, "whole number"),
        *(({"seeds": x}, f"seeds={x!r} must be at least 1") for x in ("3", 3.0, 0)),
        ({"layers": "["}, "not a regular expression"),
        *(({"tolerance": x}, "e.g. 0.15") for x in (-1, float("nan"))),
        ({"layers": "absent"}, "matches layers='absent'"),
        ({"optimizer": optax.sgd(0.0)}, "no activation changed"),
        (
            {"build": lambda key, width: LinenNet(width, 1)},
            "returns a LinenNet without arrays",
        ),
        (
            {"build": lambda key, width: Short(8, nnx.Rngs(key))},
            "same shapes at widths .*does it use its width",
        ),
        (
            {"build": lambda key, width: Short(width, nnx.Rngs(0))},
            "same parameters for 2 different keys",
        ),
        (
            {"optimizer": lambda model, width: 0.1},
            "not an optax.GradientTransformation",
        ),
        (
            {"optimizer": lambda model: 0.1},
            r"optimizer\(model, width=8\) fails: .*width",
        ),
        ({"loss": None, "batch": X[:, :3]}, r"model\(batch\) fails: .*contracting"),
        ({"batch": None}, "batch is missing"),
        ({"loss": None, "batch": {"x": X}}, "pass loss=function"),
        ({"loss": lambda m, b: m.features(b[0])}, "whose shape changes with width"),
        ({"loss": lambda m, b: jnp.argmax(m(b[0]))[None]}, "no floating-point array"),
        ({"loss": lambda m, b: jnp.sum(b[0])}, "no layer was found"),
    ],
)
def test_bad_settings_and_wrong_functions_are_named(settings, message):
    given = {
        "build": lambda key, width: Short(width, nnx.Rngs(key)),
        "optimizer": optax.sgd(0.1),
        "loss": loss,
        "batch": (X, Y),
        "widths": (8, 16),
        "steps": 1,
        "seeds": 2,
    }
    with pytest.raises(ValueError, match=message):
        optim.coord_check(**{**given, **settings})

"""No gauge changes the function: the property test of the whole table of rules.

A gauge moves a factor between forward multiplier, initialization and learning rate
of a role. Random small models are trained for several steps in a random gauge and
in the one without forward multipliers, in float64, and have to give the same
function. Exact invariance asks of the relative optimizers what their docstrings
say: LAMB's trust ratio needs weights that are not zero, and Optax's Adafactor takes
the size of a stored weight to be at least 1e-3.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mupax import optim

STEPS = 4
BATCH, INPUTS, OUTPUTS, DEPTH = 5, 3, 2, 3
# Sizes are few, so that operations are compiled once; the bases are drawn.
HIDDEN, INNER = 8, 12


_PLAIN = {"/w$": "i -> o", "/b$": "d"}
AXES = {
    True: optim.declare(
        {"up|down": "layers: i -> o", "blocks/b": "layers: -> d", **_PLAIN},
        branches="blocks",
    ),
    False: _PLAIN,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """Shapes of a base model, under axes that grow by ratios of their own."""

    residual: bool
    hidden: int  # base of HIDDEN
    inner: int  # base of INNER
    depth: int  # base of DEPTH

    def shapes(self, hidden=HIDDEN, inner=INNER):
        if self.residual:
            return {
                "in": {"w": (INPUTS, hidden), "b": (hidden,)},
                "blocks": {
                    "up": (DEPTH, hidden, inner),
                    "b": (DEPTH, inner),
                    "down": (DEPTH, inner, hidden),
                },
                "out": {"w": (hidden, OUTPUTS), "b": (OUTPUTS,)},
            }
        return {
            "in": {"w": (INPUTS, hidden), "b": (hidden,)},
            "mid": {"w": (hidden, inner), "b": (inner,)},
            "more": {"w": (inner, hidden), "b": (hidden,)},
            "out": {"w": (hidden, OUTPUTS), "b": (OUTPUTS,)},
        }

    def scales(self):
        def structs(shapes):
            return jax.tree.map(
                lambda s: jax.ShapeDtypeStruct(s, jnp.float64),
                shapes,
                is_leaf=lambda s: isinstance(s, tuple),
            )

        inferred = optim.infer_scales(
            structs(self.shapes(self.hidden, self.inner)),
            structs(self.shapes()),
            axes=AXES[self.residual],
        )
        ratio = DEPTH / self.depth if self.residual else 1.0
        return optim.Scales(
            {p: dataclasses.replace(s, depth=ratio) for p, s in inferred.items()}
        )

    def init(self, seed):
        """Weights of order one, biases too: none is zero."""
        shapes = self.shapes()
        rng = np.random.default_rng(seed)
        return jax.tree.map(
            lambda s: jnp.asarray(rng.normal(size=s) / max(1, s[0]) ** 0.5),
            shapes,
            is_leaf=lambda s: isinstance(s, tuple),
        )

    def apply(self, weights, x, point):
        x = jnp.tanh(x @ weights["in"]["w"] + weights["in"]["b"][None])
        if self.residual:
            blocks = weights["blocks"]
            a = point.branch_multiplier(DEPTH / self.depth, a=0.7)
            for i in range(DEPTH):
                h = jnp.tanh(x @ blocks["up"][i] + blocks["b"][i][None])
                x = x + a * (h @ blocks["down"][i])
        else:
            for name in ("mid", "more"):
                x = jnp.tanh(x @ weights[name]["w"] + weights[name]["b"][None])
        out = x @ weights["out"]["w"] + weights["out"]["b"][None]
        return out / point.richness


OPTIMIZERS = {
    "sgd": functools.partial(optim.sgd, 0.05),
    "momentum": functools.partial(optim.sgd, 0.03, momentum=0.9),
    "nesterov": functools.partial(optim.sgd, 0.03, momentum=0.9, nesterov=True),
    # An eps as large as gradients, so that its rule is tested as well.
    "adam": functools.partial(optim.adam, 0.03, eps=1e-2, eps_root=1e-4),
    "adamw": functools.partial(optim.adamw, 0.03, eps=1e-2, weight_decay=0.1),
    "lion": functools.partial(optim.lion, 0.02, weight_decay=0.1),
    "muon": functools.partial(
        optim.muon, 0.03, eps=1e-2, weight_decay=0.1, adam_weight_decay=0.2
    ),
    "soap": functools.partial(optim.soap, 0.03, weight_decay=0.1),
    "shampoo": functools.partial(optim.shampoo, 0.03, weight_decay=0.1),
    "scion": functools.partial(optim.scion, 0.03, weight_decay=0.1),
    "adam_h": functools.partial(optim.adam_h, 0.03, eps=1e-2),
    "muon_h": functools.partial(optim.muon_h, 0.03),
    "schedule_free": lambda s: optax.contrib.schedule_free(
        optim.adamw(0.03, s, b1=0.0, eps=1e-2, weight_decay=0.1), 0.03
    ),
    "lamb": functools.partial(optim.lamb, 0.03, eps=1e-2, weight_decay=0.1),
    "adafactor": functools.partial(
        optim.adafactor, 0.03, min_dim_size_to_factor=4, weight_decay_rate=1e-2
    ),
    "adafactor, not factored": functools.partial(
        optim.adafactor, 0.03, momentum=0.9, dtype_momentum=jnp.float64
    ),
    "adafactor, no parameter scale": functools.partial(
        optim.adafactor, 0.03, multiply_by_parameter_scale=False
    ),
}


MATRICES = ("muon", "soap", "shampoo", "scion", "muon_h")


def train(model, point, scales, optimizer, weights):
    """Outputs after training from the effective weights `weights`."""
    scales = scales.for_parametrization(point)
    ends = np.random.default_rng(1)
    x = jnp.asarray(ends.normal(size=(BATCH, INPUTS)))
    y = jnp.asarray(ends.normal(size=(BATCH, OUTPUTS)))

    def forward(params):
        effective = optim.apply_multipliers(params, scales)
        return model.apply(effective, x, point)

    def loss(params):
        return jnp.mean((forward(params) - y) ** 2)

    # The same effective weights in every gauge: stored = effective / forward.
    ones = jax.tree.map(jnp.ones_like, weights)
    factors = optim.apply_multipliers(ones, scales)
    params = jax.tree.map(jnp.divide, weights, factors)
    tx = optimizer(scales)
    state = tx.init(params)
    for _ in range(STEPS):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(forward(params))


def assert_same_function(model, name, options, optimizer, gauge, richness, seed):
    scales, weights = model.scales(), model.init(seed)
    plain = optim.parametrization(name, richness=richness, gauge="table3", **options)
    other = optim.parametrization(plain, gauge=gauge)
    before = np.asarray(model.apply(weights, jnp.zeros((BATCH, INPUTS)), plain))
    expected = train(model, plain, scales, optimizer, weights)
    got = train(model, other, scales, optimizer, weights)
    assert np.isfinite(expected).all()
    assert np.abs(expected - before).max() > 1e-3  # it was trained
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


models = st.builds(
    Model,
    residual=st.booleans(),
    hidden=st.sampled_from([2, 4]),
    inner=st.sampled_from([2, 3, 4, 6]),
    depth=st.sampled_from([1, 3]),
)
powers = st.floats(-1, 1).map(lambda x: round(x, 2))
own_gauges = st.dictionaries(
    st.sampled_from([r.value for r in optim.Role]),
    st.builds(optim.Powers, fan_in=powers, fan_out=powers, last=powers),
)
gauges = st.sampled_from(["table8", "mean_field"]) | own_gauges
points = st.one_of(
    st.sampled_from(["mup", "ntk", "depth_mup", "ode"]).map(lambda n: (n, {})),
    st.floats(0, 1).map(lambda s: ("meta_principled", {"s": s})),
    st.floats(0.5, 1).map(lambda a: ("completep", {"alpha": a})),
    st.tuples(powers, powers).map(
        lambda p: ("residual", {"alpha": p[0], "gamma": p[1]})
    ),
)


@pytest.mark.filterwarnings("ignore:the readout")  # the weights are arbitrary
@pytest.mark.parametrize(
    "optimizer",
    # Orthogonalization alone takes as long as all the others.
    [
        pytest.param(name, marks=pytest.mark.long) if name in MATRICES else name
        for name in OPTIMIZERS
    ],
)
@given(data=st.data())
@settings(max_examples=4, deadline=None, derandomize=True)
def test_training_gives_the_same_function_in_every_gauge(optimizer, data):
    model, (name, options) = data.draw(models), data.draw(points)
    gauge, seed = data.draw(gauges), data.draw(st.integers(0, 99))
    richness = data.draw(st.sampled_from([0.5, 1.0, 2.0]))
    with jax.enable_x64(True):
        assert_same_function(
            model, name, options, OPTIMIZERS[optimizer], gauge, richness, seed
        )


def both_gauges(name, optimizer, model, weights):
    """Outputs after training without forward multipliers, and in that of mean field."""
    point = optim.parametrization(name, gauge="table3")
    other = optim.parametrization(name, gauge="mean_field")
    scales = model.scales()
    return [train(model, p, scales, optimizer, weights) for p in (point, other)]


MLP = Model(residual=False, hidden=2, inner=3, depth=1)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_without_the_rules_a_gauge_is_another_optimizer(name):
    """What the property rests on: Optax's own optimizers do not have it."""
    make = {"adam": lambda *_: optax.adam(0.03), "sgd": lambda *_: optax.sgd(0.05)}
    with jax.enable_x64(True):
        a, b = both_gauges("mup", make[name], MLP, MLP.init(0))
        assert np.abs(a - b).max() > 1e-3


def test_under_sp_a_gauge_is_another_optimizer():
    """One learning rate for all stored weights, in whatever gauge: that is SP."""
    with jax.enable_x64(True):
        a, b = both_gauges("sp", OPTIMIZERS["adam"], MLP, MLP.init(0))
        assert np.abs(a - b).max() > 1e-3


@pytest.mark.parametrize("traced", [False, True], ids=["declared", "program"])
def test_who_forgets_the_forward_multipliers_is_told_at_the_first_update(traced):
    def model(width):
        return {"in": jnp.ones((3, width)), "out": jnp.ones((width, 2))}

    def call(params, x):
        return x @ params["in"] @ params["out"]

    x = jnp.ones((1, 3))
    # Widths of no other test: the multipliers may have been applied there.
    program = {"inputs": (x,), "call": call}
    given = program if traced else {"axes": {".": "i -> o"}}
    given["parametrization"] = "mean_field"
    target = 70 if traced else 77
    scales = optim.infer_scales(lambda: model(7), lambda: model(target), **given)
    scales = scales.for_training(batch=(1, 2))

    def step(effective):
        tx, params = optim.adam(0.1, scales), model(target)
        state = tx.init(params)
        grads = jax.grad(lambda p: call(effective(p), x).sum())(params)
        for _ in range(2):
            tx.update(grads, state, params)

    message = "'out' by 0.*call the model with optim.apply_multipliers.*or use 'mup'"
    assert "call the model" in str(optim.explain(scales))
    with pytest.warns(optim.ChainWarning, match=message) as told:
        step(lambda params: params)
    assert len(told) == 1
    step(lambda p: optim.apply_multipliers(p, scales))


@pytest.mark.parametrize(
    ("optimizer", "factor"), [("lamb", 0.0), ("adafactor", 1e-3), ("adafactor", 0.0)]
)
@pytest.mark.filterwarnings("ignore:.*'out/w' starts")
def test_relative_optimizers_feel_the_gauge_of_weights_that_are_almost_zero(
    optimizer, factor
):
    with jax.enable_x64(True):
        weights = MLP.init(0)
        weights["out"]["w"] *= factor
        a, b = both_gauges("mup", OPTIMIZERS[optimizer], MLP, weights)
        assert np.abs(a - b).max() > 1e-6

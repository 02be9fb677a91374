"""The plain MLP: the formula, its depth without branches, and what its plan tells."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mupax import optim, zoo
from mupax.zoo.families.mlp import GAINS
from mupax.zoo.layers.basic import ACTIVATIONS, scan

SIZES = {"width": 16, "depth": 6, "base_width": 8, "base_depth": 2}
# Those whose rules at the base are SP's, and that take no argument.
NAMES = ["mup", "mean_field", "relu_mlp", "depth_mup", "ode", "completep"]
X = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)


def quick(function, level=0):
    # Compiling takes longer than running.
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": level})


def build(seed=0, **options):
    return zoo.create("mlp", **{**SIZES, **options}, rngs=nnx.Rngs(seed))


def shape_of(**options):
    """Its abstract twin: nothing is run."""
    return nnx.eval_shape(lambda: build(**options))


def params_of(model):
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(v[...]) for path, v in params}


def test_the_forward_pass_is_equation_1_1():
    model = build(parametrization="mean_field", bias=True, depth=3)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if path[-1] == "bias":
            size = variable.shape
            variable.set_value(jnp.asarray(np.random.default_rng(1).normal(size=size)))
    w = params_of(model)
    # In this gauge hidden weights carry 1/√m in front, the readout 1/m.
    z = X @ w["readin/kernel"] + w["readin/bias"]
    for kernel, bias in zip(
        w["layers/linear/kernel"], w["layers/linear/bias"], strict=True
    ):
        z = 2**-0.5 * np.maximum(z, 0) @ kernel + bias
    expected = np.maximum(z, 0) @ w["readout/kernel"] / 2 + w["readout/bias"]
    np.testing.assert_allclose(model(X), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_depth_counts_hidden_layers_of_which_the_first_is_apart(depth):
    names = zoo.axis_names(shape_of(depth=depth, base_depth=1))
    stacked = params_of(build(depth=depth, base_depth=1)).get("layers/linear/kernel")
    assert ("layers/linear/kernel" in names) == (depth > 1)
    if depth > 1:
        assert stacked.shape == (depth - 1, 16, 16)
        assert names["layers/linear/kernel"] == ("layers", "embed", "mlp")


def test_roles_and_depth_without_branches():
    scales = zoo.scales(shape_of(bias=True))
    assert {path: s.role.value for path, s in scales.items()} == {
        "readin/kernel": "input",
        "readin/bias": "vector",
        "layers/linear/kernel": "hidden",
        "layers/linear/bias": "vector",
        "readout/kernel": "output",
        "readout/bias": "fixed",
    }
    for path, scale in scales.items():
        assert (scale.depth, scale.in_branch) == (3.0, False), path
    # Six hidden layers against two, of which the first of each is the readin.
    kernel = scales["layers/linear/kernel"]
    assert (kernel.base_shape, kernel.shape) == ((1, 8, 8), (5, 16, 16))


def test_depth_acts_under_relu_mlp_alone_and_on_every_learning_rate():
    for bias in (False, True):
        for name, factor in (("mup", 1.0), ("mean_field", 1.0), ("relu_mlp", 3**-1.5)):
            options = {"bias": bias, "parametrization": name}
            deep, shallow = (zoo.scales(shape_of(depth=d, **options)) for d in (6, 2))
            rates = [optim.explain(s, "sgd").rows for s in (deep, shallow)]
            for path, row in rates[0].items():
                expected = factor * rates[1][path].learning_rate
                assert row.learning_rate == pytest.approx(expected), (name, path)


@pytest.mark.parametrize("name", ["depth_mup", "ode", "completep"])
def test_rules_for_branches_are_refused_where_depth_changes(name):
    scales = zoo.scales(shape_of(parametrization=name))
    with pytest.raises(ValueError, match="use 'mup'"):
        optim.sgd(0.1, scales)
    optim.sgd(0.1, zoo.scales(shape_of(parametrization=name, base_depth=6)))


def test_initial_sizes_are_those_of_equation_1_2():
    wide = {"width": 512, "depth": 2, "base_width": 64}
    for name, power in (("sp", -0.5), ("mup", -1.0), ("relu_mlp", -1.0)):
        w = params_of(build(**wide, parametrization=name, bias=True))
        readout = 64**-0.5 * (512 / 64) ** power
        assert w["readout/kernel"].std() == pytest.approx(readout, rel=0.05)
        hidden = (2 / 512) ** 0.5
        assert w["layers/linear/kernel"].std() == pytest.approx(hidden, rel=0.05)
        assert w["readin/kernel"].std() == pytest.approx((2 / 64) ** 0.5, rel=0.05)
        assert not any(w[path].any() for path in w if path.endswith("bias"))


@pytest.mark.parametrize("nonlinearity", ACTIVATIONS)
def test_gains_keep_a_mean_square_of_one_or_are_one_over_the_slope(nonlinearity):
    phi, gain = ACTIVATIONS[nonlinearity], GAINS[nonlinearity]
    nodes = np.linspace(-12, 12, 24_001)
    weights = np.exp(-(nodes**2) / 2)
    with jax.enable_x64(True):
        squares = np.asarray(phi(jnp.asarray(gain * nodes))) ** 2
        slope = float(jax.grad(phi)(1e-9))
    kept = (weights @ squares) / weights.sum() == pytest.approx(1, abs=1e-4)
    assert kept or gain == pytest.approx(1 / slope), nonlinearity
    assert kept == (nonlinearity not in ("tanh", "erf"))


def sizes_over_depth(depth, **options):
    """Mean square of the activations of one input, first and last layer."""

    def run(key):
        rngs = nnx.Rngs(params=key)
        model = zoo.create("mlp", width=256, depth=depth, rngs=rngs, **options)
        phi = ACTIVATIONS[model.nonlinearity]
        first = model.readin(jnp.asarray(X[:1]))
        return jnp.stack([(phi(z) ** 2).mean() for z in (first, _last(model, X[:1]))])

    keys = jax.random.split(jax.random.key(0), 32)
    first, last = quick(lambda keys: jax.lax.map(run, keys), level=1)(keys).T
    return float(first.mean()), float(last.mean())


def _last(model, x):
    """The last preactivations z^L."""
    return scan(model.layers, model.readin(jnp.asarray(x)))


@pytest.mark.parametrize("nonlinearity", ["relu", "abs", "identity"])
def test_the_forward_pass_keeps_its_size_over_depth(nonlinearity):
    first, last = sizes_over_depth(16, nonlinearity=nonlinearity)
    assert first == pytest.approx((X[:1] ** 2).mean(), rel=0.1)
    # Sizes of ReLU networks spread by √(5 depth/width), a tenth of which is left.
    assert last == pytest.approx(first, rel=0.2)


def test_a_gain_of_ones_own_makes_the_forward_pass_shrink():
    first, last = sizes_over_depth(8, gain=1.0)
    assert last / first == pytest.approx(2**-7, rel=0.2)


def test_a_deep_linear_network_is_linear():
    model = build(nonlinearity="identity")
    x, y = X[:2], X[2:]
    np.testing.assert_allclose(
        model(2 * x - 3 * y), 2 * model(x) - 3 * model(y), rtol=1e-4, atol=1e-5
    )
    w = params_of(model)
    product = np.linalg.multi_dot(
        [w["readin/kernel"], *w["layers/linear/kernel"], w["readout/kernel"]]
    )
    np.testing.assert_allclose(model(x), x @ product, rtol=1e-4, atol=1e-5)
    relu = build()
    assert not np.allclose(relu(-x), -relu(x), rtol=1e-2)


@pytest.mark.parametrize("name", ["mlp", "resmlp"])
@pytest.mark.parametrize("shape", [(4, 1, 8, 8), (8, 8, 1), (4, 28, 28, 1)])
def test_inputs_of_another_shape_are_refused(name, shape):
    model = nnx.eval_shape(lambda: zoo.create(name, width=8, depth=2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"pass \(batch, 8, 8, 1\)"):
        jax.eval_shape(model, jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize("name", ["mlp", "resmlp"])
def test_whole_numbers_are_refused(name):
    model = nnx.eval_shape(lambda: zoo.create(name, width=8, depth=2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="x is uint8; models take floating-point"):
        jax.eval_shape(model, jax.ShapeDtypeStruct((4, 8, 8, 1), jnp.uint8))


def test_one_example_is_enough_and_images_are_flattened():
    model = build()
    np.testing.assert_allclose(model(X[:1]), model(X)[:1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model(X), model(X.reshape(4, 8, 8, 1)))


def squared_responses(depth, name, **options):
    """(Δz^L)² to first order in the learning rate, after a step of SGD, by seed."""
    # As wide at the base as its input, that W^1 learns like the other layers.
    more = {"width": 128, "base_width": 64, "base_depth": 8, "out_features": 1}
    more |= {"depth": depth, "parametrization": name, **options}

    def run(key):
        weights, inputs = jax.random.split(key)
        model = zoo.create("mlp", **more, rngs=nnx.Rngs(params=weights))
        graph, params = nnx.split(model)
        x = jax.random.normal(inputs, (1, 64))
        x /= jnp.sqrt((x**2).mean())

        def loss(params):
            # Of a square loss, where the label is far from the output.
            return nnx.merge(graph, params)(x)[0, 0]

        tx = optim.sgd(1.0, zoo.scales(model))
        update, _ = tx.update(jax.grad(loss)(params), tx.init(params), params)
        response = jax.jvp(
            lambda p: _last(nnx.merge(graph, p, copy=True), x), (params,), (update,)
        )[1]
        return (response**2).mean()

    keys = jax.random.split(jax.random.key(0), 64)
    return float(quick(lambda keys: jax.lax.map(run, keys), level=1)(keys).mean())


@pytest.mark.parametrize(
    ("name", "nonlinearity", "law"),
    [
        pytest.param("relu_mlp", "relu", 0, marks=pytest.mark.long),
        pytest.param("mup", "relu", 3, marks=pytest.mark.long),
        pytest.param("relu_mlp", "identity", 0, marks=pytest.mark.long),
        # No theorem says so: what the docstring of MLP states was measured here.
        pytest.param("mup", "tanh", 0.6, marks=pytest.mark.long),
    ],
)
def test_the_squared_step_grows_as_depth_cubed_and_under_relu_mlp_not_at_all(
    name, nonlinearity, law
):
    depths = (4, 8, 16, 32)
    steps = [squared_responses(d, name, nonlinearity=nonlinearity) for d in depths]
    slope = np.polyfit(np.log(depths), np.log(steps), 1)[0]
    assert slope == pytest.approx(law, abs=0.2), steps


def test_training_lowers_the_loss_at_depth():
    model = build(depth=16, base_depth=2)
    graph, params = nnx.split(model)
    tx = optim.sgd(0.005, zoo.scales(model))
    labels = jnp.arange(4)

    def loss(params):
        logits = nnx.merge(graph, params)(X)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @quick
    def train(params):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, tx.init(params)), length=300)[1]

    losses = train(params)
    assert losses[-1] < 0.5 * losses[0], losses

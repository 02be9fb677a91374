"""Zoo models inside a user's own `jax.jit`, `jax.grad`, `jax.vmap` and `nnx.jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mupax import zoo

X = np.linspace(-1, 1, 2 * 8 * 8 * 3, dtype=np.float32).reshape(2, 8, 8, 3)
Y = np.array([0, 3])
RESNET = {"width": 2, "blocks": (2,), "stem": "cifar", "out_features": 5}
MODELS = {
    "resnet18": ("resnet18", RESNET),
    "remat": ("resnet18", {**RESNET, "remat": True}),
    "cnn": ("cnn", {"width": 8, "depth": 4, "input_shape": (8, 8, 3)}),
    "vit": ("vit", {"width": 8, "depth": 2, "heads": 2, "dropout": 0.1}),
}
# Models whose call in training writes to their own variables.
STATEFUL = ("resnet18", "remat", "vit")


def build(name: str, mode: str) -> nnx.Module:
    kind, options = MODELS[name]
    if kind == "vit":
        options = {**options, "input_shape": (8, 8, 3)}
    model = zoo.create(kind, **options, rngs=nnx.Rngs(0))
    if name not in ("cnn", "vit"):
        # Running statistics that differ from their initial values 0 and 1.
        model.train()
        nnx.jit(lambda model, x: model(x))(model, jnp.asarray(X))
    getattr(model, mode)()
    return model


def state(model: nnx.Module) -> list[np.ndarray]:
    """Every array but random keys."""
    kept = nnx.state(model, nnx.Not(nnx.RngKey))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(kept)]


def cross_entropy(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
    return losses.mean()


# The tests compile many small programs, and run each only once.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("name", ["remat", "cnn", "vit"])
def test_in_eval_every_transform_may_close_over_a_model(name):
    model = build(name, "eval")
    graph, variables = nnx.split(model)
    before = state(model)

    @jit
    def closed_over(x):
        logits = {
            "jit": model(x),
            "vmap": jax.vmap(lambda image: model(image[None])[0])(x),
            "scan": jax.lax.scan(lambda c, i: (c, model(i[None])[0]), 0, x)[1],
            "checkpoint": jax.checkpoint(lambda x: model(x))(x),
        }
        return logits, jax.grad(lambda x: model(x).sum())(x)

    @jit
    def as_argument(variables, x):
        def call(x):
            return nnx.merge(graph, variables, copy=True)(x)

        return call(x), jax.grad(lambda x: call(x).sum())(x)

    logits_of, gradient = closed_over(jnp.asarray(X))
    expected, expected_gradient = as_argument(variables, jnp.asarray(X))
    for logits in logits_of.values():
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert np.abs(np.asarray(gradient)).max() > 0
    for a, b in zip(before, state(model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", STATEFUL)
def test_in_training_a_closure_is_refused_with_what_to_do(name):
    model = build(name, "train")
    with pytest.raises(ValueError, match=r"model\.eval\(\).*nnx\.jit.*copy=True"):
        jax.jit(lambda x: model(x))(jnp.asarray(X))
    model = build(name, "train")
    with pytest.raises(ValueError, match=r"in training mode"):
        jax.grad(lambda x: model(x).sum())(jnp.asarray(X))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_training_step_under_nnx_jit_runs(mode):
    model = build("resnet18", mode)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(cross_entropy)(model, x, y)
        optimizer.update(model, gradients)
        return loss

    statistics = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    first = step(model, optimizer, jnp.asarray(X), jnp.asarray(Y))
    last = step(model, optimizer, jnp.asarray(X), jnp.asarray(Y))
    assert np.isfinite(first)
    assert first != last
    moved = [
        bool((np.asarray(a) != np.asarray(b)).any())
        for a, b in zip(
            statistics, jax.tree.leaves(nnx.state(model, nnx.BatchStat)), strict=True
        )
    ]
    assert all(moved) if mode == "train" else not any(moved)


@pytest.mark.parametrize("name", ["resnet18", "vit"])
def test_a_training_step_under_jax_jit_needs_a_copy(name):
    """The remedy that the error names for functional steps works."""
    model = build(name, "train")
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def step(copy: bool):
        @jax.jit
        def run(params, rest, x, y):
            def loss(params):
                rebuilt = nnx.merge(graph, params, rest, copy=copy)
                value = cross_entropy(rebuilt, x, y)
                return value, nnx.state(rebuilt, nnx.Not(nnx.Param))

            return jax.value_and_grad(loss, has_aux=True)(params)

        return run(params, rest, jnp.asarray(X), jnp.asarray(Y))

    with pytest.raises(ValueError, match="copy=True"):
        step(copy=False)
    (loss, after), _ = step(copy=True)
    assert np.isfinite(loss)
    assert any(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(jax.tree.leaves(rest), jax.tree.leaves(after), strict=True)
        if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
    )

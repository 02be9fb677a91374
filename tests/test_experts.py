"""Mixtures of experts: balance, dispatch, scales and sharding."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from goldens import golden, repository
from jax.sharding import AbstractMesh
from test_goldens import next_token
from test_llama import TOKENS

from benchmarks import coord_check as bench
from mupax import optim, zoo
from mupax.zoo.layers.bilinear import formed
from mupax.zoo.layers.experts import Grouped, balance_loss

KINDS = ("mixtral", "qwen3_moe")
TINY = {
    "width": 16,
    "depth": 2,
    "head_dim": 4,
    "vocab_size": 11,
    "context": 12,
    "experts": 4,
    "mlp_ratio": 1.0,
}


def tiny(seed=0, **options):
    return zoo.create("llama", rngs=nnx.Rngs(seed), **{**TINY, **options})


def loss_of(model, tokens):
    return next_token(model(tokens), tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_the_balance_loss_is_that_of_transformers(kind, tmp_path):
    model = zoo.load_pretrained(repository(tmp_path, kind))
    model.eval()
    data, (graph, params) = golden(kind)[1], nnx.split(model)
    tokens = jnp.asarray(data["tokens"])

    @jax.jit
    def run(params):
        model = nnx.merge(graph, params)
        return model.routing(tokens)[1], _probabilities(model, tokens)

    used, blocks = run(params)
    # Theirs pools the blocks before it multiplies, and counts choices per token.
    whole = balance_loss(blocks.reshape(-1, 4), model.options.routing)
    assert float(2 * whole) == pytest.approx(float(data["balance"]), rel=1e-5)
    np.testing.assert_allclose(used.sum(axis=1), 1, rtol=1e-6)


def _probabilities(model, tokens):
    graph, weights = nnx.split(model.blocks)
    x, by_block = model._embed(tokens), []
    for layer in range(2):
        block = nnx.merge(graph, jax.tree.map(lambda w, i=layer: w[i], weights))
        by_block.append(block.routing(x))
        x = block(x)
    return jnp.stack(by_block)


# --- Dispatch and balance ---


def test_sorting_tokens_by_expert_gives_what_computing_all_experts_gives():
    dense, by_expert = tiny(), tiny(dispatch="sorted")

    def gradient(model):
        return nnx.jit(nnx.value_and_grad(loss_of))(model, TOKENS)

    (ours, some), (theirs, all_) = gradient(by_expert), gradient(dense)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), some, all_
    )


def test_a_grouped_product_has_derivatives_of_every_mode_and_maps_over_any_argument():
    x = jax.random.normal(jax.random.key(0), (6, 4))
    kernel = jax.random.normal(jax.random.key(1), (3, 4, 5))
    sizes, starts = jnp.array([1, 2, 3]), (0, 1, 3, 6)

    def ours(x, kernel):
        return (formed(Grouped(), x, kernel, sizes) ** 3).sum()

    def plain(x, kernel):
        rows = (x[a:b] for a, b in itertools.pairwise(starts))
        return sum(((r @ w) ** 3).sum() for r, w in zip(rows, kernel, strict=True))

    def derivatives(f, modes):
        """Of each mode by each argument, mixed ones, and mapped over each argument."""
        first = [[mode(f, i)(x, kernel) for mode in modes] for i in (0, 1)]
        mixed = [jax.jacfwd(jax.grad(f, i), 1 - i)(x, kernel) for i in (0, 1)]
        slope = jax.grad(f, 1)
        mapped = [
            jax.vmap(slope, (0, None))(jnp.stack([x, 2 * x]), kernel),
            jax.vmap(slope, (None, 0))(x, jnp.stack([kernel, 2 * kernel])),
        ]
        return first, mixed, mapped

    found = jax.jit(lambda: derivatives(ours, (jax.grad, jax.jacfwd)))()
    expected = jax.jit(lambda: derivatives(plain, (jax.grad, jax.grad)))()
    for ours_, plain_, atol in zip(found, expected, (1e-5, 1e-4, 1e-4), strict=True):
        for one, other in zip(*map(jax.tree.leaves, (ours_, plain_)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=atol)


def test_the_balance_loss_is_one_where_all_is_balanced():
    routing = tiny().options.routing
    even = jnp.eye(4) + 0.01 * jnp.roll(jnp.eye(4), 1, 1)  # each expert once as first
    assert float(balance_loss(even / even.sum(-1, keepdims=True), routing)) == 1
    one = jnp.tile(jnp.array([0.97, 0.01, 0.01, 0.01]), (8, 1))
    assert float(balance_loss(one, routing)) > 1.9


def test_training_adds_the_gradient_of_the_balance_loss_and_evaluation_does_not():
    model, without = tiny(balance=0.5), tiny(balance=0.0)

    def gradient(model):
        gradients = nnx.jit(nnx.grad(loss_of))(model, TOKENS)
        return gradients["blocks"]["mlp"]["router"]["kernel"][...]

    def balance(model):
        return 0.5 * model.routing(TOKENS)[0].mean()

    extra = nnx.jit(nnx.grad(balance))(without)
    extra = extra["blocks"]["mlp"]["router"]["kernel"][...]
    trained, plain = gradient(model), gradient(without)
    # The losses of later blocks also reach routers before them, in both.
    np.testing.assert_allclose(trained - plain, extra, rtol=1e-3, atol=1e-6)
    assert float(jnp.abs(extra).max()) > 1e-4
    # The loss is no part of the outputs, whose forward derivatives have none of it.
    (a, forward), (b, expected) = (
        jax.jvp(
            lambda factor, graph=graph, state=state: nnx.merge(
                graph, jax.tree.map(lambda p: factor * p, state)
            )(TOKENS),
            (1.0,),
            (1.0,),
        )
        for graph, state in map(nnx.split, (model, without))
    )
    np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(forward, expected, rtol=1e-6)
    model.eval()
    np.testing.assert_array_equal(gradient(model), plain)
    np.testing.assert_array_equal(model(TOKENS), without(TOKENS))


@pytest.mark.long
def test_training_with_the_balance_loss_uses_the_experts_evenly():
    tokens = jax.random.randint(jax.random.key(3), (8, 12), 0, 11)

    def spread(balance):
        model = tiny(balance=balance, experts=8, mlp_ratio=0.5, experts_per_token=1)
        tx = optim.adam(0.01, zoo.scales(model))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            optimizer.update(model, nnx.grad(loss_of)(model, tokens))

        for _ in range(150):
            step(model, optimizer)
        return float(model.routing(tokens)[0].mean())

    assert spread(1.0) < spread(0.0)
    assert spread(1.0) < 1.1


# --- Scales and sharding ---


def test_a_router_is_a_readout_and_experts_are_copies():
    model = nnx.eval_shape(lambda: tiny(base_width=8))
    scales = zoo.scales(model)
    router, up = scales["blocks/mlp/router/kernel"], scales["blocks/mlp/up/kernel"]
    assert (router.role.value, router.width_in, router.width_out) == ("output", 2, 1)
    assert (up.role.value, up.in_axes, up.out_axes) == ("hidden", (2,), (3,))
    assert zoo.axis_names(model)["blocks/mlp/down/kernel"] == (
        "layers",
        "experts",
        "mlp",
        "embed",
    )
    # Each expert is drawn as the MLP of a model without experts.
    wide = tiny(width=64, base_width=64, mlp_ratio=2.0)
    std = np.asarray(wide.blocks.mlp.down.kernel[...]).std(axis=(2, 3))
    np.testing.assert_allclose(std, 128**-0.5, rtol=0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("axis", "name", "mlp_ratio"),
    [("width", "mup", 2.0), ("depth", "depth_mup", 1.0), ("depth", "ode", 1.0)],
)
def test_streams_move_alike_at_every_size(axis, name, mlp_ratio, monkeypatch):
    """All experts are chosen: a token that changes its experts moves by a jump."""
    gpt = bench.CASES["gpt"]
    experts = {"experts": 4, "experts_per_token": 4, "mlp_ratio": mlp_ratio}
    case = dataclasses.replace(
        gpt, model="llama", options={**gpt.options, **experts}, seeds=24
    )
    monkeypatch.setitem(bench.CASES, "llama_moe", case)
    for layer, slope in (
        bench.check("llama_moe", name, "adam", axis).slopes[axis].items()
    ):
        assert abs(slope) < 0.05, (layer, slope)


def test_experts_lie_on_devices_along_tensor():
    mesh = AbstractMesh((1, 2, 4), ("data", "fsdp", "tensor"))
    model = nnx.eval_shape(lambda: tiny(vocab_size=12))
    specs = zoo.partition_specs(model, mesh)
    assert tuple(specs["blocks/mlp/up/kernel"]) == (None, "tensor", "fsdp", None)
    inside = zoo.partition_specs(model, mesh, {"experts": None})
    assert tuple(inside["blocks/mlp/up/kernel"]) == (None, None, "fsdp", "tensor")
    three = nnx.eval_shape(lambda: tiny(experts=3, vocab_size=12))
    with pytest.raises(ValueError, match="'experts' of parameter"):
        zoo.partition_specs(three, mesh)


def test_statistics_of_routing_need_experts():
    model = nnx.eval_shape(lambda: tiny(experts=0, mlp_ratio=2.0))
    with pytest.raises(ValueError, match="has no experts"):
        model.routing(TOKENS)


def test_experts_are_trained_as_a_batch_of_runs():
    """A sweep is a vmap over runs."""
    model = tiny(depth=1)
    graph, params = nnx.split(model)
    rates = jnp.array([0.0, 0.1])

    def run(rate):
        def loss(params):
            return loss_of(nnx.merge(graph, params), TOKENS)

        gradients = jax.grad(loss)(params)
        after = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
        return loss(after)

    losses = jax.jit(jax.vmap(run))(rates)
    assert losses[1] < losses[0]
    assert float(losses[0]) == pytest.approx(float(loss_of(model, TOKENS)), rel=1e-5)

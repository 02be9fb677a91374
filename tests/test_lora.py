"""LoRA: adapters of zoo models, and the scales of their parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mupax import optim, zoo
from mupax.zoo.weights import foreign

LLAMA = {
    "width": 32,
    "depth": 2,
    "base_width": 8,
    "base_depth": 1,
    "head_dim": 4,
    "vocab_size": 11,
    "context": 8,
}
TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, 11)
EVERY = "attention/|mlp/"


def llama(**options):
    return zoo.create("llama", rngs=nnx.Rngs(0), **{**LLAMA, **options})


def roles(scales):
    return {path: (s.role.value, s.width_in, s.width_out) for path, s in scales.items()}


def perturb(model):
    """Give each B random values, so that the adapters do something."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "lora_b":
            value = jax.random.normal(jax.random.key(len(path[-2])), variable.shape)
            variable.set_value(0.3 * value)
            nnx.update(model, nnx.from_flat_state([(path, variable)]))


def test_new_adapters_change_nothing_and_merged_ones_leave_a_plain_model(tmp_path):
    model = llama(parametrization="mean_field")
    before, names = model(TOKENS), set(zoo.scales(model))
    zoo.add_lora(model, 3, where=EVERY, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(model(TOKENS), before)
    assert len(zoo.scales(model)) == len(names) + 2 * 7
    perturb(model)
    adapted = model(TOKENS)
    assert jnp.abs(adapted - before).max() > 0.1
    for refused in (
        lambda: zoo.save(model, tmp_path / "x"),
        lambda: foreign.export(model),
    ):
        with pytest.raises(ValueError, match=r"call zoo\.merge_lora\(model\) first"):
            refused()
    zoo.merge_lora(model)
    np.testing.assert_allclose(model(TOKENS), adapted, rtol=1e-4, atol=1e-5)
    assert set(zoo.scales(model)) == names
    assert foreign.export(model)


def test_adapters_of_flax_get_the_same_scales_from_the_program():
    ours = llama(base_depth=2)
    zoo.add_lora(ours, 3, where="mlp/down", rngs=nnx.Rngs(1))
    expected = roles(zoo.scales(ours))

    def wrapped(width):
        model = llama(width=width, base_depth=2)
        mlp = model.blocks.mlp
        mlp.down = nnx.vmap(
            lambda rngs, layer: nnx.LoRA(
                4 * width, 3, width, base_module=layer, rngs=rngs
            )
        )(nnx.Rngs(1).split(2), mlp.down)
        return model

    with pytest.raises(ValueError, match=r"nnx\.LoRA, get the scales by optim\.infer_"):
        zoo.scales(wrapped(32))
    scales = optim.infer_scales(wrapped(8), wrapped(32), inputs=(TOKENS,))
    plain = {
        path.replace("base_module/", ""): role for path, role in roles(scales).items()
    }
    assert plain == expected
    assert plain["blocks/mlp/down/lora_a"] == ("output", 4, 1)
    assert plain["blocks/mlp/down/lora_b"] == ("input", 1, 4)


def test_only_the_adapters_are_trained_with_the_rates_of_their_roles():
    model = llama()
    zoo.add_lora(model, 3, rngs=nnx.Rngs(1))
    tx = optim.lion(0.1, zoo.scales(model), weight_decay=0.0)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    frozen = nnx.state(model, nnx.Not(nnx.LoRAParam))

    def loss(model):
        logits = model(TOKENS)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, TOKENS[:, 1:]
        ).mean()

    def step():
        before = jax.tree.map(jnp.copy, nnx.state(model, nnx.LoRAParam))
        optimizer.update(
            model, nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        )
        after = nnx.state(model, nnx.LoRAParam)
        changes = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), after, before)
        return changes["blocks"]["attention"]["value"]

    assert step()["lora_b"].get_value() == pytest.approx(0.1, rel=1e-3)
    assert step()["lora_a"].get_value() == pytest.approx(0.1 / 4, rel=1e-3)
    jax.tree.map(
        np.testing.assert_array_equal, frozen, nnx.state(model, nnx.Not(nnx.LoRAParam))
    )


def test_an_update_changes_features_alike_at_every_width():
    """With one learning rate for A and B, as under SP, it does not."""

    def moved(width, name):
        model = zoo.create(
            "resmlp",
            width=width,
            depth=1,
            base_width=64,
            input_shape=(16,),
            parametrization=name,
            out_features=1,
            rngs=nnx.Rngs(0),
        )
        zoo.add_lora(model, 4, where="blocks", rngs=nnx.Rngs(1))
        tx = optim.adam(0.01, zoo.scales(model))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
        x = jax.random.normal(jax.random.key(2), (8, 16))

        @nnx.jit
        def step(model, optimizer):
            def loss(model):
                return jnp.square(model(x) - 1).mean()

            wrt = nnx.DiffState(0, nnx.LoRAParam)
            optimizer.update(model, nnx.grad(loss, argnums=wrt)(model))

        before = model.features(x)
        for _ in range(2):  # in the first step A has no gradient
            step(model, optimizer)
        return float(jnp.sqrt(jnp.square(model.features(x) - before).mean()))

    ratio = {name: moved(1024, name) / moved(64, name) for name in ("mup", "sp")}
    assert 0.7 < ratio["mup"] < 1.4, ratio
    assert ratio["sp"] > 3, ratio


def test_a_parameter_that_is_not_of_the_zoo_is_named_with_a_remedy():
    model = llama()
    model.extra = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"'extra/bias' is not one of the zoo's Llama"):
        zoo.scales(model)
    with pytest.raises(
        ValueError, match="matches no linear layer of this Llama; it has"
    ):
        zoo.add_lora(llama(), 2, where="qkv", rngs=nnx.Rngs(0))

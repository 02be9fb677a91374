"""Features: what the readout sees, and the streams behind blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax import zoo

IMAGES = jax.random.normal(jax.random.key(0), (2, 16, 16, 3))
TOKENS = jax.random.randint(jax.random.key(1), (2, 7), 0, 11)
SMALL = {"width": 8, "depth": 3, "base_width": 4, "base_depth": 1, "heads": 2}
MODELS = {
    "vit": {**SMALL, "input_shape": (16, 16, 3)},
    "llama": {**SMALL, "vocab_size": 11, "context": 8, "tied": False},
    "resnet18": {"width": 4, "blocks": (1, 2), "stem": "cifar", "out_features": 5},
    "cnn": {"width": 16, "depth": 5, "input_shape": (16, 16, 3)},
    "resmlp": {"width": 8, "depth": 2, "input_shape": (16, 16, 3)},
    "mlp": {"width": 8, "depth": 2, "input_shape": (16, 16, 3)},
}


def make(name):
    model = zoo.create(name, rngs=nnx.Rngs(0), **MODELS[name])
    model.eval()
    return model, TOKENS if name == "llama" else IMAGES


@pytest.mark.parametrize("name", MODELS)
def test_the_readout_of_features_is_the_output(name):
    model, x = make(name)
    features = jax.jit(lambda x: model.features(x))(x)
    logits = model.readout(features) * model.plan.output
    np.testing.assert_allclose(logits, model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_streams_behind_blocks_are_those_of_blocks_called_one_by_one(name):
    model, x = make(name)
    graph, weights = nnx.split(model.blocks)
    stream = model._embed(x)
    expected = []
    for layer in range(3):
        block = nnx.merge(graph, jax.tree.map(lambda w, i=layer: w[i], weights))
        stream = block(stream)
        expected.append(stream)
    streams = jax.jit(lambda x: model.intermediates(x))(x)
    assert len(streams) == 3
    for ours, theirs in zip(streams, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    # In the order that is asked for, from the end too, and with the last norm.
    last, first = model.intermediates(x, (-1, 0), norm=True)
    np.testing.assert_allclose(first, model.norm(expected[0]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, model.norm(expected[2]), rtol=1e-5, atol=1e-6)


def test_only_the_streams_that_are_asked_for_are_stored():
    model, x = make("vit")
    text = str(jax.make_jaxpr(lambda x: model.intermediates(x, (1,)))(x))
    tokens = 16 + 1
    assert f"f32[1,2,{tokens},8]" in text
    assert f"f32[3,2,{tokens},8]" not in text


def test_gradients_pass_through_a_stream():
    model, x = make("llama")
    graph, params = nnx.split(model)

    def loss(params):
        return jnp.sum(nnx.merge(graph, params).intermediates(x, (1,))[0] ** 2)

    gradients = jax.grad(loss)(params)
    sizes = jnp.abs(gradients["blocks"]["mlp"]["up"]["kernel"][...]).max(axis=(1, 2))
    assert sizes[0] > 0
    assert sizes[1] > 0
    assert sizes[2] == 0  # the block behind it


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("resnet18", [(2, 16, 16, 4), (2, 8, 8, 8)]),
        ("cnn", [(2, 16, 16, 2), (2, 8, 8, 4), (2, 4, 4, 8), (2, 2, 2, 16)]),
    ],
)
def test_stages_are_maps_of_their_resolution(name, shapes):
    model, x = make(name)
    maps = model.intermediates(x)
    assert [h.shape for h in maps] == shapes
    np.testing.assert_array_equal(model.intermediates(x, (-1,))[0], maps[-1])


def test_statistics_are_updated_in_training_and_only_then():
    model, x = make("resnet18")
    before = np.asarray(model.norm.mean[...])
    model.features(x)
    np.testing.assert_array_equal(model.norm.mean[...], before)
    model.train()
    model.features(x)
    assert np.abs(np.asarray(model.norm.mean[...]) - before).max() > 0


@pytest.mark.parametrize(
    ("blocks", "said"),
    [((3,), "3 is out of range"), ((-4,), "-4 is out of range"), ((0, -3), "twice")],
)
def test_a_block_that_is_not_there_is_named(blocks, said):
    model, x = make("vit")
    with pytest.raises(ValueError, match=said):
        model.intermediates(x, blocks)

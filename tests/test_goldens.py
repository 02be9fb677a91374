"""Networks of timm, torchvision and transformers compute the same in the zoo.

Weights are read, and written back under the same names. golden/make.py makes the files.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from goldens import (
    NETWORKS,
    QUICK,
    TOLERANCE,
    TRANSFORMERS,
    apart,
    check_export,
    check_gradients,
    golden,
    loaded,
    run,
)

from mupax.zoo.weights import foreign

NAMES = (*NETWORKS, *TRANSFORMERS)
# Their gradients are those of a step of training.
CONVOLUTIONAL = (*list(NETWORKS)[16:], *TRANSFORMERS[-3:])
# The others take longer to compile than the tests of a commit may.
SHORT = ("resnet_d_se", "hf_convnextv2", "mobilenetv3")


def inputs(data):
    return jnp.asarray(data["images" if "images" in data else "tokens"])


def has_gradients(name):
    return any(key.startswith("gradient/") for key in golden(name)[1])


@pytest.mark.parametrize("name", NAMES)
def test_outputs_gradients_and_exported_weights_are_those_of_the_library(name):
    weights, data = golden(name)
    model = loaded(name)
    check_export(model, weights)
    model.eval()  # without the loss of experts that are used unevenly
    expected = data["outputs"] if "outputs" in data else data["logits"]
    if name in CONVOLUTIONAL or not has_gradients(name):
        assert apart(run(model, inputs(data)), expected) < TOLERANCE
        return
    graph, params = nnx.split(model)

    @jax.jit(compiler_options=QUICK)
    def both(params):
        def loss(params):
            outputs = nnx.merge(graph, params)(inputs(data))
            if "cotangent" in data:
                return jnp.sum(outputs * jnp.asarray(data["cotangent"])), outputs
            return next_token(outputs, inputs(data)), outputs

        return jax.grad(loss, has_aux=True)(params)

    gradients, outputs = both(params)
    assert apart(outputs, expected) < TOLERANCE
    # The bias of the keys moves all logits of a query alike.
    still = "key/bias" if "cotangent" in data else "/$"
    check_gradients(gradients, model, name, TOLERANCE, still=still)


def next_token(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits[:, :-1], tokens[:, 1:]).mean()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SHORT else pytest.mark.long)
        for name in CONVOLUTIONAL
        if has_gradients(name)
    ],
)
def test_gradients_of_a_step_of_training_are_those_of_the_library(name):
    """In float64: normalization over the few pixels of a small batch multiplies the
    rounding of float32 to about 1e-5. The file has float32."""
    with jax.enable_x64(True):
        model = loaded(name, dtype=jnp.float64, param_dtype=jnp.float64)
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        @jax.jit(compiler_options=QUICK)
        def gradient(params, rest, x):
            def loss(params):
                out = nnx.merge(graph, params, rest, copy=True)(x)
                return (out**2).mean(0).sum()

            return jax.grad(loss)(params)

        x = jnp.asarray(golden(name)[1]["images"], jnp.float64)
        # A bias that a normalization forgets has a gradient of zero, but for rounding.
        check_gradients(gradient(params, rest, x), model, name, 1e-6, least=1e-9)


@pytest.mark.parametrize("name", [n for n in NETWORKS if "train" in golden(n)[1]])
def test_a_step_of_training_has_the_logits_and_leaves_the_statistics_of_torch(name):
    model, data = loaded(name), golden(name)[1]
    graph, state = nnx.split(model)

    @jax.jit(compiler_options=QUICK)
    def step(state, x):
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model, nnx.BatchStat)

    logits, statistics = step(state, inputs(data))
    assert apart(logits, data["train"]) < TOLERANCE
    after = {"/".join(map(str, k)): v for k, v in nnx.to_flat_state(statistics)}
    for (path, layer), source in foreign.exported_names(model).items():
        if path in after:
            found = after[path][...] if layer is None else after[path][...][layer]
            assert apart(found, data[f"after/{source.key}"]) < TOLERANCE, source.key


@pytest.mark.parametrize("name", ["vit_dinov2_reg", "vit_siglip"])
def test_without_pooling_all_tokens_are_returned(name):
    more = {"class_token": False} if name == "vit_siglip" else {}
    data = golden(name)[1]
    found = run(loaded(name, out_features=0, pool="none", **more), data["images"])
    assert found.shape == data["tokens"].shape
    assert apart(found, data["tokens"]) < TOLERANCE


def test_positions_are_interpolated_as_timm_does():
    model, data = loaded("vit_token"), golden("vit_token")[1]
    for size in ("larger", "smaller"):
        assert apart(run(model, data[size]), data[f"logits_{size}"]) < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"parametrization": "sp"},
        {
            **{"base_width": 12, "base_depth": 1, "parametrization": "mup"},
            "branch_multiplier": 0.5,
        },
    ],
)
def test_a_file_computes_the_same_whatever_the_parametrization_and_base(changes):
    data = golden("vit_token")[1]
    model = loaded("vit_token", **changes)
    model.eval()
    assert apart(run(model, data["images"]), data["logits"]) < TOLERANCE

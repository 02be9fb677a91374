"""ViT and GPT: their rules, their noise, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from goldens import QUICK, abstract, apart, run

from mupax import optim, zoo
from mupax.zoo.layers.attention import Noise, drop_path, dropout
from mupax.zoo.layers.basic import scan
from mupax.zoo.weights import foreign

# Small networks of each kind, twice as wide and deep as their base.
IMAGES = jax.random.normal(jax.random.key(7), (3, 8, 8, 3))
TOKENS = jax.random.randint(jax.random.key(8), (3, 6), 0, 11)
TINY = {"width": 16, "depth": 4, "base_width": 8, "base_depth": 2, "heads": 2}
OWN = {
    "vit": {"input_shape": (8, 8, 3), "patch_size": 4, "out_features": 5},
    "gpt": {"vocab_size": 11, "context": 6},
    "llama": {"vocab_size": 11, "context": 6},
}
INPUTS = {"vit": IMAGES, "gpt": TOKENS, "llama": TOKENS}
KINDS = list(OWN)
NOISY = {"dropout": 0.2, "drop_path": 0.3}


def build(kind, parametrization="depth_mup", seed=0, **options):
    options = {**TINY, **OWN[kind], **options}
    rngs = nnx.Rngs(seed)
    return zoo.create(kind, parametrization=parametrization, rngs=rngs, **options)


def shape_of(kind, *args, **options):
    """A model's abstract twin: nothing is run."""
    return nnx.eval_shape(lambda: build(kind, *args, **options))


@functools.cache
def _state(kind, *args, **options):
    # One program compiles sooner than one for each shape of a random array.
    make = jax.jit(
        lambda: nnx.state(build(kind, *args, **options)), compiler_options=QUICK
    )
    return make()


def tiny(kind, *args, **options):
    """A small model of one kind."""
    graph = nnx.graphdef(shape_of(kind, *args, **options))
    return nnx.merge(graph, _state(kind, *args, **options), copy=True)


def params_of(model):
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(path): variable.get_value() for path, variable in params}


def test_names_refuse_what_they_do_not_fit():
    model = abstract("vit_token")
    with pytest.raises(ValueError, match="with rotary positions"):
        foreign.exported_names(model, "transformers_dinov3")
    with pytest.raises(ValueError, match="must be one of timm, torchvision"):
        foreign.exported_names(model, "keras")
    source = foreign.exported_names(model)["readout/kernel", None]
    with pytest.raises(ValueError, match=r"'head.weight' has shape \(7, 24\)"):
        source.read(np.zeros((7, 24)))


# The rules.


def test_logits_of_attention_scale_with_the_size_of_a_head():
    for parametrization, more in (("sp", 0.5), ("ntk", 0.5), ("mup", 1), ("ode", 1)):
        model = shape_of("vit", parametrization, width=32)
        # Heads grow from 4 to 16.
        assert model.blocks.attention.scale == pytest.approx(0.5 * 4**-more)
    half = optim.parametrization("meta_principled", s=0.5)
    model = shape_of("vit", half, width=32)
    assert model.blocks.attention.scale == pytest.approx(0.5 * 4**-0.75)
    model = shape_of("vit", "mup", width=32, heads=None, head_dim=4)
    assert model.blocks.attention.scale == 0.5


def test_a_tied_readout_is_an_embedding_with_logits_by_one_over_m():
    model = shape_of("gpt", "mup")
    scale = zoo.scales(model)["embedding"]
    assert (scale.role, scale.width_out) == (optim.Role.INPUT, 2.0)
    assert model.tied_multiplier == 0.5
    assert shape_of("gpt", "ntk").tied_multiplier == pytest.approx(2**-0.5)
    assert shape_of("gpt", "sp").tied_multiplier == 1.0
    untied = shape_of("gpt", "mup", tied=False)
    assert zoo.scales(untied)["readout/kernel"].role is optim.Role.OUTPUT


@pytest.mark.parametrize("kind", KINDS)
def test_roles_and_names_of_every_parameter(kind):
    model = shape_of(kind)
    scales, names = zoo.scales(model), zoo.axis_names(model)
    assert set(scales) == set(names) == set(params_of(model))
    for path, scale in scales.items():
        assert scale.in_branch == path.startswith("blocks/"), path
        assert (names[path][0] == "layers") == scale.in_branch, path
        if path.startswith("blocks/"):
            kernel = path.endswith("kernel")
            assert scale.role is optim.Role("hidden" if kernel else "vector"), path
            assert scale.width_out == 2, path
    assert names["blocks/attention/query/kernel"][1:] == ("embed", "heads", "head_dim")
    assert names["blocks/attention/out/kernel"][1:] == ("heads", "head_dim", "embed")
    assert scales["blocks/attention/out/kernel"].in_axes == (1, 2)


def test_queries_at_zero_leave_keys_without_a_gradient_and_nothing_else():
    assert not params_of(tiny("vit"))["blocks/attention/query/kernel"].any()
    still = {path for path, g in gradients("vit", **NOISY).items() if not g.any()}
    # The bias of the keys moves all logits of a query alike.
    assert still == {"blocks/attention/key/bias", "blocks/attention/key/kernel"}


@functools.cache
def gradients(kind, remat=False, **options):
    """Those of a weighted sum of its logits, by path."""
    _, params, rest = nnx.split(tiny(kind, **options), nnx.Param, ...)
    graph = nnx.graphdef(shape_of(kind, remat=remat, **options))
    x = INPUTS[kind]

    @jax.jit(compiler_options=QUICK)
    def gradient(params):
        def loss(params):
            logits = nnx.merge(graph, params, rest, copy=True)(x)
            weights = jax.random.normal(jax.random.key(5), logits.shape)
            return jnp.sum(logits * weights)

        return jax.grad(loss)(params)

    variables = nnx.to_flat_state(gradient(params))
    return {"/".join(path): value[...] for path, value in variables}


def test_nothing_is_cast_unsaid(strict_dtypes):
    for kind in KINDS:
        nnx.eval_shape(
            lambda kind=kind: build(kind, dropout=0.1, drop_path=0.1)(INPUTS[kind])
        )


# What a model can do.


@pytest.mark.parametrize("kind", KINDS)
def test_one_example_is_enough(kind):
    x, model = INPUTS[kind], tiny(kind)
    alone, together = run(model, x[:1]), run(model, x)[:1]
    np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-5)


def test_no_token_sees_those_after_it():
    model = tiny("gpt", zero_queries=False)
    changed = TOKENS.at[:, 4].set((TOKENS[:, 4] + 1) % 11)
    before, after = run(model, TOKENS), run(model, changed)
    np.testing.assert_allclose(before[:, :4], after[:, :4], rtol=1e-5, atol=1e-6)
    assert all(apart(before[:, i], np.asarray(after[:, i])) > 1e-3 for i in (4, 5))


def test_noise_is_off_in_evaluation_and_new_at_each_call():
    x = IMAGES
    model, plain = tiny("vit", **NOISY), tiny("vit")
    model.eval()
    np.testing.assert_array_equal(run(model, x), run(plain, x))
    model.train()
    call = nnx.jit(lambda model, x: model(x))
    assert apart(call(model, x), np.asarray(call(model, x))) > 1e-2
    call = nnx.jit(lambda model, x, rngs: model(x, rngs=rngs))
    given = [call(model, x, nnx.Rngs(dropout=seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(given[0], given[1])
    assert apart(given[0], np.asarray(given[2])) > 1e-2


def test_dropout_and_drop_path_keep_the_mean():
    x = jnp.ones((4096, 2, 3))
    key = jax.random.key(0)
    for y in (dropout(x, 0.25, key), drop_path(x, jnp.float32(0.25), key)):
        assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
        assert float(y.mean()) == pytest.approx(1, abs=0.03)
    whole = drop_path(x, jnp.float32(0.25), key)
    assert jnp.array_equal(whole[:, 0, 0], whole.mean(axis=(1, 2)))
    assert dropout(x, 0.25, None) is x


def test_layers_of_a_scan_draw_noise_of_their_own():
    graph, state = nnx.split(tiny("vit", **NOISY).blocks)
    # Two layers of one weight: what differs is the noise.
    state = jax.tree.map(lambda v: np.stack([v[0], v[0]]), state)
    one = jax.tree.map(lambda v: v[0], state)
    keys = jax.random.split(jax.random.key(0), 2)
    h = jax.random.normal(jax.random.key(1), (2, 5, 16))

    @jax.jit(compiler_options=QUICK)
    def alone(h, key):
        return nnx.merge(graph, one)(h, Noise(key, None))

    first, second = (alone(h, key) for key in keys)
    assert apart(first, np.asarray(second)) > 1e-2
    through = jax.jit(
        lambda h: scan(nnx.merge(graph, state), h, Noise(keys, None)),
        compiler_options=QUICK,
    )(h)
    np.testing.assert_allclose(through, alone(first, keys[1]), rtol=1e-5, atol=1e-5)


def test_remat_changes_no_gradient():
    again = gradients("vit", remat=True, **NOISY)
    for path, value in gradients("vit", **NOISY).items():
        np.testing.assert_allclose(again[path], value, rtol=1e-4, atol=1e-5)


def test_bad_inputs_say_what_to_write():
    for kind, x, message in (
        ("vit", jnp.ones((1, 8, 8, 1)), r"input_shape=\(height, width, 1\)"),
        ("vit", jnp.ones((1, 10, 8, 3)), "do not divide"),
        ("gpt", jnp.zeros((1, 7), int), "does not fit into context=6"),
    ):
        with pytest.raises(ValueError, match=message):
            nnx.eval_shape(shape_of(kind), x)
    for other in (11, -1):
        assert jnp.isnan(run(tiny("gpt"), TOKENS.at[:, 0].set(other))).all()
    for wrong in (TOKENS[0], TOKENS * 1.0):
        with pytest.raises(ValueError, match="expected whole numbers of shape"):
            tiny("gpt")(wrong)


@pytest.mark.parametrize(
    "options", [{"pool": "norm_mean"}, {"layer_norm": False}, {"zero_init": True}]
)
def test_options_that_change_the_network(options):
    model = tiny("vit", **options)
    logits = run(model, IMAGES)
    assert jnp.isfinite(logits).all()
    if "zero_init" in options:
        # Every branch is zero: the readout sees the norm of the token alone.
        token = model.token[...] + model.position[0]
        alone = model.readout(model.norm(token))
        np.testing.assert_allclose(logits, jnp.stack([alone] * 3), rtol=1e-5)
    if "layer_norm" in options:
        assert not any("norm" in path for path in params_of(model))

"""What holds for every family of the zoo, each claim made once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from goldens import QUICK, apart, drawn, run

from mupax import optim, zoo
from mupax.zoo import registry
from mupax.zoo.weights import foreign, saving
from mupax.zoo.weights.architectures import timm_architecture

IMAGES = {"width": 8, "depth": 1, "input_shape": (8, 8, 3), "out_features": 3}
TEXT = {"width": 8, "depth": 2, "vocab_size": 12, "context": 16, "heads": 2}
# At their base size.
SMALL = {
    "mlp": {"width": 8, "depth": 2, "nonlinearity": "tanh", "bias": True},
    "resmlp": {"width": 8, "depth": 2},
    "cnn": {**IMAGES, "depth": 4},
    "resnet18": {**IMAGES, "blocks": (1, 2), "stem": "cifar"},
    "resnet50": {**IMAGES, "blocks": (2, 1), "groups": 2, "squeeze": 0.25},
    "convnext_tiny": {**IMAGES, "blocks": (2, 1), "grn": True},
    "efficientnet_b0": {
        **IMAGES,
        "rows": ((0, "separable", 1, 3, 1, 1, 8), (1, "inverted", 2, 5, 2, 2, 8, 0.25)),
        "rows_width": 8,
        "head": 16,
    },
    "vit": {**IMAGES, "depth": 2, "heads": 2, "zero_queries": False},
    "gpt": {**TEXT, "zero_queries": False},
    "llama": {**TEXT, "experts": 3, "balance": 0},
}


def create(name, key=0, **options):
    """A small model; `key` is a seed or a random key."""
    return zoo.create(name, **{**SMALL.get(name, {}), **options}, rngs=nnx.Rngs(key))


def abstract(name, **options):
    return nnx.eval_shape(lambda: create(name, **options))


def inputs(name, batch=4):
    if zoo.reads_tokens(name):
        return jax.random.randint(jax.random.key(5), (batch, 8), 0, 12)
    shape = SMALL[name].get("input_shape", (8, 8, 1))
    return jax.random.normal(jax.random.key(5), (batch, *shape))


def test_the_table_has_every_family():
    def kinds(names):
        return {registry.options_of(name)[0] for name in names}

    assert kinds(SMALL) == kinds(zoo.list_models())


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward_derivatives_agree_and_reach_every_parameter(name):
    """In training: <u, J v> is <Jᵀ u, v>."""
    with jax.enable_x64():
        model = create(name, dtype=jnp.float64, param_dtype=jnp.float64)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        random, x = np.random.default_rng(0), inputs(name)

        def call(params):
            return nnx.merge(graph, params, rest, copy=True)(x)

        def drawn(tree):
            return jax.tree.map(lambda a: random.normal(size=a.shape), tree)

        change, weights = drawn(params), drawn(jax.eval_shape(call, params))

        @jax.jit(compiler_options=QUICK)
        def both(params):
            slopes = jax.vjp(call, params)[1](weights)[0]
            return jax.jvp(call, (params,), (change,))[1], slopes

        forward, slopes = jax.device_get(both(params))
        products = jax.tree.map(lambda a, b: (a * b).sum(), slopes, change)
        expected = float((weights * forward).sum())
        total = sum(map(float, jax.tree.leaves(products)))
        assert total == pytest.approx(expected, rel=1e-6)
        for path, slope in nnx.to_flat_state(slopes):
            # Keys' biases move all logits of a query alike; a norm may forget those of
            # the norm before it.
            if path[-1] != "bias" or not {"key", "norms"} & {*path}:
                assert np.abs(slope[...]).max() > 1e-12, path


NAMES = [n for n in optim.list_parametrizations() if n != "residual"]


@pytest.mark.parametrize("name", SMALL)
def test_every_parametrization_makes_a_model_and_an_optimizer(name):
    points = [*NAMES, optim.parametrization("residual", alpha=0.75, gamma=0.25)]
    for point in points:
        # Optimizers refuse rules of branches for a deeper network without any.
        grows = name != "mlp" or point == "relu_mlp"
        sizes = {"depth": 4, "base_depth": 2} if grows else {}
        model = abstract(name, width=16, base_width=8, parametrization=point, **sizes)
        params, scales = nnx.state(model, nnx.Param), zoo.scales(model)
        if point == "relu_mlp" and name != "mlp":
            with pytest.raises(ValueError, match="without residual branches"):
                optim.adamw(0.01, scales)
            continue
        # Of every kind of rule once; those of AdamW and Muon differ in more.
        rest = (optim.sgd, optim.lamb) if point == "completep" else ()
        for make in (optim.adamw, optim.muon, *rest):
            tx = make(0.01, scales)
            state = jax.eval_shape(tx.init, params)
            updates, _ = jax.eval_shape(tx.update, params, state, params)
            assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("name", SMALL)
def test_at_base_size_every_parametrization_is_sp_bit_for_bit(name):
    def program(point, **sizes):
        """Drawing the weights and a gradient, before it is compiled."""

        def run(key, x):
            model = create(name, key, parametrization=point, **sizes)
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            return jax.grad(lambda p: nnx.merge(graph, p, rest, copy=True)(x).sum())(
                params
            )

        return jax.jit(run).lower(jax.random.key(0), inputs(name)).as_text()

    standard = program("sp")
    # The others have the rules of one of these at the base (test_zoo_coord_long.py).
    for point in ("mean_field", "completep", "ntk"):
        assert program(point) == standard, point
    if name != "llama":  # its multipliers at another width are those of SP
        wide = {"width": 16, "base_width": 8}
        assert program("mup", **wide) != program("sp", **wide)


@pytest.mark.parametrize("name", SMALL)
def test_a_gauge_changes_no_output_and_no_step(name):
    """Above the base size, with a factor for each role, in a step of SGD."""
    powers = {"input": 0.5, "hidden": -0.5, "output": -1.0, "vector": 0.3}
    gauge = {role: optim.Powers(power, power) for role, power in powers.items()}
    sizes, x, results = {"width": 16, "base_width": 8}, inputs(name), []
    for chosen in ("table3", gauge):
        point = optim.parametrization("mup", gauge=chosen)
        model = create(name, parametrization=point, **sizes)
        tx = optim.sgd(0.1, zoo.scales(model))
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        @jax.jit(compiler_options=QUICK)
        def step(params, rest, graph=graph, tx=tx):
            def outputs(params):
                return nnx.merge(graph, params, rest, copy=True)(x)

            def loss(params):
                before = outputs(params)
                return jnp.square(before - 1).mean(), before

            slopes, before = jax.grad(loss, has_aux=True)(params)
            updates, _ = tx.update(slopes, tx.init(params), params)
            return before, outputs(optax.apply_updates(params, updates))

        results.append(step(params, rest))
    for plain, moved in zip(*results, strict=True):
        np.testing.assert_allclose(plain, moved, rtol=1e-3, atol=1e-4)
    assert np.abs(results[0][0] - results[0][1]).max() > 1e-3


@pytest.mark.parametrize("name", SMALL)
def test_a_saved_model_comes_back_by_its_directory_alone(name, tmp_path):
    model = registry.abstract(name, **SMALL[name])
    zeros = {k: np.zeros(a.shape) for k, a in saving.arrays_of(model).items()}
    saving.fill(model, zeros)
    again = zoo.load_pretrained(saving.save(model, tmp_path / "it"))
    assert again.plan == model.plan
    assert saving.arrays_of(again).keys() == saving.arrays_of(model).keys()


DINOV3 = {"rotary": True, "position": False, "key_bias": False, "registers": 2}
# Options that multiply something more, or that have names of their own elsewhere.
EXPORTED = [
    *((name, {}) for name in SMALL if name not in ("mlp", "resmlp", "cnn")),
    ("resnet18", {"shortcut": "average", "stem": "deep"}),
    ("convnext_tiny", {"grn": False}),
    ("vit", {"layer_scale": 1e-2}),
    ("vit", {"registers": 2, "class_position": False}),
    ("vit", {"pre_norm": True, "patch_bias": False, "nonlinearity": "quick_gelu"}),
    ("vit", {"pool": "attention"}),
    ("vit", {"gated": True, "nonlinearity": "silu", "layer_scale": 1.0}),
    ("vit", DINOV3),
    ("llama", {"experts": 0, "balance": 0.01, "queries_per_key": 2}),
    ("llama", {"experts": 0, "balance": 0.01, "qk_norm": True}),
]


@pytest.mark.parametrize(
    ("name", "options", "point"),
    [
        *((name, options, "completep") for name, options in EXPORTED),
        *(
            pytest.param(name, {}, point, marks=pytest.mark.long)
            for name in ("resnet18", "vit", "gpt")
            for point in ("depth_mup", "mean_field", "ntk", "sp")
        ),
    ],
    ids=str,
)
def test_a_grown_model_is_exported_with_its_multipliers(name, options, point):
    """A plain network that reads its file computes the same."""
    options = {**SMALL[name], **options, "width": 16, "depth": 2}
    base = {"base_width": 8, "base_depth": 1, "branch_multiplier": 0.5}
    grown = drawn(registry.abstract(name, **options, **base, parametrization=point))
    plain = registry.abstract(name, **options, parametrization="sp")
    assert foreign.factors(grown)
    assert not foreign.factors(plain)
    foreign.fill(plain, foreign.export(grown))
    x = inputs(name)
    for model in (grown, plain):
        model.eval()
    assert apart(run(plain, x), run(grown, x)) < 1e-5


def test_seeds_are_a_vmap_axis():
    def outputs(name):
        keys = jax.random.split(jax.random.key(0), 3)
        call = jax.vmap(lambda key: create(name, key)(inputs(name)))
        return jax.eval_shape(call, keys) if name != "resmlp" else jax.jit(call)(keys)

    for name in SMALL:
        assert outputs(name).shape[:2] in ((3, 4), (3, 2)), name
    assert np.unique(outputs("resmlp")[:, 0, 0]).size == 3


def test_a_hundred_billion_parameters_take_no_memory():
    sizes = {"base_width": 64, "base_depth": 1}
    for name, width, depth in (
        ("mlp", 2**15, 100),
        ("resmlp", 2**15, 100),
        ("cnn", 2**14, 128),
        ("resnet50", 2**13, 128),
        ("convnext_tiny", 2**14, 128),
        ("efficientnet_b0", 2**15, 128),
        ("vit", 2**14, 64),
        ("gpt", 2**14, 64),
        ("llama", 2**14, 64),
    ):
        model = abstract(name, width=width, depth=depth, **sizes)
        total = sum(math.prod(s.shape) for s in zoo.scales(model).values())
        assert total > 1e11, name


@pytest.mark.parametrize("name", SMALL)
def test_a_deeper_model_is_no_larger_program(name):
    def equations(depth):
        graph, params, rest = nnx.split(abstract(name, depth=depth), nnx.Param, ...)
        call = jax.grad(
            lambda p, s, x: nnx.merge(graph, p, s, copy=True)(x).astype(float).sum()
        )
        program = jax.make_jaxpr(call)(params, rest, inputs(name))
        return str(program).count(" = ")

    assert equations(512) == equations(8)


@pytest.mark.parametrize("name", SMALL)
def test_half_precision_computes_in_it_up_to_logits_of_single_precision(name):
    half = abstract(name, dtype=jnp.bfloat16)
    both = nnx.eval_shape(lambda m, x: (m.features(x), m(x)), half, inputs(name))
    assert [y.dtype for y in both] == [jnp.bfloat16, jnp.float32]
    for dtype, model in (
        (jnp.float32, half),
        (jnp.bfloat16, abstract(name, param_dtype=jnp.bfloat16)),
    ):
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            assert variable.dtype == dtype, path


@pytest.mark.parametrize("name", SMALL)
def test_features_are_what_the_readout_sees(name):
    untied = {"tied": False} if zoo.reads_tokens(name) else {}
    model, x = drawn(abstract(name, **untied)), inputs(name)
    model.eval()
    graph, state = nnx.split(model)

    @jax.jit(compiler_options=QUICK)
    def both(state, x):
        model = nnx.merge(graph, state)
        return model.readout(model.features(x)) * model.plan.output, model(x)

    np.testing.assert_allclose(*both(state, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "resmlp", "cnn", "vit"])
def test_richness_divides_the_output(name):
    law = "relu_mlp" if name == "mlp" else "completep"
    rich = optim.parametrization(law, richness=4.0)
    plain, other = (drawn(abstract(name, parametrization=p)) for p in (law, rich))
    x = inputs(name)
    np.testing.assert_allclose(run(other, x), run(plain, x) / 4, rtol=1e-5)


# As timm, torchvision, transformers and the papers have them, in millions; those of
# DINO and SigLIP without a head, those of tied language models without a readout.
MILLIONS = {
    **{"resnet18": 11.69, "resnet34": 21.80, "resnet50": 25.56, "resnet101": 44.55},
    **{"resnet152": 60.19, "resnext50_32x4d": 25.03, "resnext101_32x8d": 88.79},
    **{"wide_resnet50_2": 68.88, "resnet50d": 25.58, "resnet26d": 16.01},
    **{"seresnet50": 28.09, "seresnext26d_32x4d": 16.81, "seresnet18": 11.78},
    "convnext_tiny": 28.59,
    **{"convnext_base": 88.59, "convnext_pico": 9.05, "convnextv2_tiny": 28.64},
    **{"convnextv2_huge": 660.29, "efficientnet_b0": 5.29, "efficientnet_b2": 9.11},
    **{"efficientnet_b4": 19.34, "tf_efficientnet_b7": 66.35},
    **{"efficientnetv2_s": 21.46, "tf_efficientnetv2_m": 54.14},
    **{"mobilenetv3_small_100": 2.54, "mobilenetv3_large_100": 5.48},
    **{"mobilenetv2_050": 1.97, "mobilenetv2_100": 3.50, "mobilenetv2_110d": 4.52},
    **{"efficientnet_lite0": 4.65, "tf_efficientnet_lite3": 8.20},
    "tf_mobilenetv3_small_minimal_100": 2.04,
    "tf_mobilenetv3_large_minimal_100": 3.92,
    **{"vit_tiny_patch16_224": 5.717, "vit_small_patch16_224": 22.051},
    **{"vit_base_patch16_224": 86.568, "vit_large_patch16_224": 304.327},
    **{"deit3_small_patch16_224": 22.059, "vit_small_patch14_dinov2": 22.056},
    "vit_small_patch14_reg4_dinov2": 22.057,
    "vit_giant_patch14_dinov2": 1136.479,
    "vit_base_patch16_clip_224": 86.193,
    "vit_base_patch16_siglip_224": 92.884,
    "vit_so400m_patch14_siglip_384": 428.226,
    **{"vit_small_patch16_dinov3": 21.587, "vit_huge_plus_patch16_dinov3": 840.509},
    **{"gpt2": 124.440, "gpt2_xl": 1557.611},
    **{"smollm2_135m": 134.515, "smollm2_360m": 361.822, "qwen3_0_6b": 596.050},
    **{"llama3_2_1b": 1235.814, "llama3_2_3b": 3212.750},
}


@pytest.mark.parametrize("name", MILLIONS)
def test_a_name_has_the_published_number_of_parameters(name):
    found = timm_architecture(name)
    kind, options = (name, {}) if found is None else found
    model = registry.abstract(kind, **options)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    assert count / 1e6 == pytest.approx(MILLIONS[name], abs=6e-3)

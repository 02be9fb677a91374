"""ViT variants: parity with timm and transformers, round trips, and their rules."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from goldens import (
    QUICK,
    apart,
    check_export,
    check_gradients,
    drawn,
    golden,
    run,
)

from mupax import optim, zoo
from mupax.zoo.registry import options_of
from mupax.zoo.weights import foreign
from mupax.zoo.weights.architectures import identify

# Relative to the largest entry; what float32 leaves is ten times less.
TOLERANCE = 1e-5
SIZES = {
    "width": 16,
    "depth": 2,
    "heads": 2,
    "mlp_ratio": 2,
    "patch_size": 4,
    "input_shape": (12, 12, 3),
}
BODY = {**SIZES, "layer_scale": 1e-5, "out_features": 0}
DINOV3 = {
    **BODY,
    "registers": 2,
    "rotary": True,
    "position": False,
    "qkv_bias": False,
    "norm_eps": 1e-5,
    "pool": "norm_mean",
    "class_token": True,
}
EVA = {
    **SIZES,
    "pool": "mean",
    "class_token": True,
    "key_bias": False,
    "out_features": 5,
}
TIMM = {
    "vit_deit3": {
        **SIZES,
        "layer_scale": 1e-6,
        "class_position": False,
        "out_features": 5,
    },
    "vit_dinov2": BODY,
    "vit_dinov2_reg": {**BODY, "registers": 2, "class_position": False},
    "vit_dinov2_giant": {
        **BODY,
        "gated": True,
        "nonlinearity": "silu",
        "mlp_ratio": 1,
    },
    "vit_reg_gap": {**SIZES, "pool": "mean", "registers": 2, "out_features": 5},
    "vit_clip": {
        **SIZES,
        "pre_norm": True,
        "patch_bias": False,
        "norm_eps": 1e-5,
        "nonlinearity": "quick_gelu",
        "out_features": 5,
    },
    "vit_siglip": {**SIZES, "pool": "attention", "out_features": 0},
    "vit_dinov3": DINOV3,
    "vit_dinov3_plus": {**DINOV3, "gated": True, "nonlinearity": "silu"},
    "vit_eva": EVA,
}
TRANSFORMERS = (
    *("hf_vit", "hf_dinov2", "hf_dinov2_swiglu", "hf_dinov2_reg", "hf_clip"),
    *("hf_siglip", "hf_dinov3"),
)
NAMES = (*TIMM, *TRANSFORMERS)


def abstract(name, **changes):
    """A model of the golden file's shapes; no weight is drawn."""
    kind, options = "vit", TIMM.get(name)
    if options is None:
        kind, options = identify(json.loads(str(golden(name)[1]["config"])), name)
    options = {**options, **changes}
    return nnx.eval_shape(lambda: zoo.create(kind, **options, rngs=nnx.Rngs(0)))


def load(name, **changes):
    """A model with the golden weights."""
    model = abstract(name, **changes)
    foreign.fill(model, golden(name)[0])
    return model


@pytest.mark.parametrize("name", NAMES)
def test_outputs_gradients_and_exported_weights_are_those_of_the_library(name):
    weights, data = golden(name)
    model = load(name)
    check_export(model, weights)
    images, cotangent = jnp.asarray(data["images"]), jnp.asarray(data["cotangent"])
    graph, params = nnx.split(model)

    @jax.jit(compiler_options=QUICK)
    def both(params):
        def loss(params):
            outputs = nnx.merge(graph, params)(images)
            return jnp.sum(outputs * cotangent), outputs

        return jax.grad(loss, has_aux=True)(params)

    gradients, outputs = both(params)
    assert apart(outputs, data["outputs"]) < TOLERANCE
    # The bias of the keys moves all logits of a query alike.
    check_gradients(gradients, model, name, TOLERANCE, still="key/bias")


@pytest.mark.parametrize("name", ["vit_dinov2_reg", "vit_siglip"])
def test_without_pooling_all_tokens_are_returned(name):
    more = {"class_token": False} if name == "vit_siglip" else {}
    data = golden(name)[1]
    model = load(name, out_features=0, pool="none", **more)
    found = run(model, data["images"])
    assert found.shape == data["tokens"].shape
    assert apart(found, data["tokens"]) < TOLERANCE


def test_a_head_is_left_or_started_anew_where_that_is_asked_for():
    features = load("vit_deit3", out_features=0)
    assert run(features, golden("vit_deit3")[1]["images"]).shape == (2, 16)
    weights = golden("vit_dinov2")[0]
    headed = abstract("vit_dinov2", out_features=3)
    with pytest.raises(ValueError, match="out_features=0 for features"):
        foreign.match(headed, weights)
    assert foreign.match(headed, weights, new_head=True).fresh == "readout"


# Configs as published, shortened to what is read.
SIGLIP_CONFIG = {
    "architectures": ["SiglipModel"],
    "model_type": "siglip",
    "text_config": {"model_type": "siglip_text_model"},
    "vision_config": {"model_type": "siglip_vision_model"},
}
DINOV2_CONFIG = {
    "architectures": ["Dinov2Model"],
    "hidden_size": 384,
    "image_size": 518,
    "layer_norm_eps": 1e-06,
    "mlp_ratio": 4,
    "model_type": "dinov2",
    "num_attention_heads": 6,
    "num_hidden_layers": 12,
    "patch_size": 14,
    "use_swiglu_ffn": False,
}
VIT_CONFIG = {
    "architectures": ["ViTForImageClassification"],
    "hidden_act": "gelu",
    "hidden_size": 768,
    "id2label": {str(i): "x" for i in range(1000)},
    "image_size": 224,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "model_type": "vit",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "qkv_bias": True,
}
CLIP_CONFIG = {
    "architectures": ["CLIPModel"],
    "model_type": "clip",
    "projection_dim": 512,
    "vision_config": {"hidden_size": 768, "patch_size": 32, "projection_dim": 512},
}
GIANT = {
    **{"hidden_size": 1536, "num_attention_heads": 24, "num_hidden_layers": 40},
    "use_swiglu_ffn": True,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (VIT_CONFIG, ("vit_base_patch16_224", {"norm_eps": 1e-12})),
        (
            {**VIT_CONFIG, "architectures": ["ViTModel"]},
            ("vit_base_patch16_224", {"norm_eps": 1e-12, "out_features": 0}),
        ),
        (DINOV2_CONFIG, ("vit_small_patch14_dinov2", {"layer_scale": 1.0})),
        (
            {**DINOV2_CONFIG, **GIANT},
            ("vit_giant_patch14_dinov2", {"layer_scale": 1.0}),
        ),
        (
            CLIP_CONFIG,
            ("vit_base_patch32_clip_quickgelu_224", {"readout_bias": False}),
        ),
        (
            SIGLIP_CONFIG,
            ("vit_base_patch16_siglip_224", {"nonlinearity": "gelu_tanh"}),
        ),
    ],
)
def test_a_published_config_is_the_model_of_that_name(config, expected):
    assert identify(config, "x") == expected


def test_a_classifier_on_dinov2_reads_the_class_token_and_the_mean():
    classes = {"id2label": {"0": "a", "1": "b"}}
    name = {"architectures": ["Dinov2ForImageClassification"]}
    found = identify({**DINOV2_CONFIG, **classes, **name}, "x")
    assert found.options["pool"] == "token_and_mean"
    sizes = {"pool": "token_and_mean", "out_features": 2}
    model = drawn(nnx.eval_shape(lambda: tiny("layer_scale", **sizes)))
    table = foreign.exported_names(model, "transformers_dinov2")
    source = table["readout/kernel", None]
    assert (source.key, source.shape) == ("classifier.weight", (2, 32))
    x = jax.random.normal(jax.random.key(1), (3, 8, 8, 3))
    weights = foreign.export(model, "transformers_dinov2")
    tokens = nnx.eval_shape(lambda: tiny("layer_scale", pool="none", out_features=0))
    foreign.fill(tokens, weights)
    z = run(tokens, x)
    seen = np.concatenate([z[:, 0], z[:, 1:].mean(axis=1)], axis=1)
    expected = seen @ weights["classifier.weight"].T + weights["classifier.bias"]
    assert apart(run(model, x), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "relu2"}, "hidden_act='relu2'"),
        ({"num_attention_heads": 5}, "num_attention_heads=5, which must divide it"),
        ({"image_size": "x"}, "image_size='x', which must be a whole number"),
        ({"model_type": "beit"}, "the supported types are"),
    ],
)
def test_a_config_that_is_not_read_is_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        identify(VIT_CONFIG | changes, "someone/x")


# Ids of timm, and what their config.json says of classes and pooling.
IDS = {
    "vit_small_patch14_dinov2.lvd142m": (0, "token", "vit_small_patch14_dinov2"),
    "vit_base_patch14_reg4_dinov2.lvd142m": (
        *(0, "token"),
        "vit_base_patch14_reg4_dinov2",
    ),
    "deit3_base_patch16_384.fb_in1k": (1000, "token", "deit3_base_patch16_224"),
    "vit_base_patch16_clip_224.openai": (512, "token", "vit_base_patch16_clip_224"),
    "vit_base_patch16_siglip_224.webli": (0, "map", "vit_base_patch16_siglip_224"),
    "vit_base_patch16_siglip_gap_224.webli": (0, "avg", "vit"),
    "vit_base_patch16_reg4_gap_256.in1k": (1000, "avg", "vit"),
    "vit_small_patch16_dinov3.lvd1689m": (0, "avg", "vit_small_patch16_dinov3"),
    "eva_giant_patch14_336.clip_ft_in1k": (1000, "avg", "vit"),
    "eva_large_patch14_196.in22k_ft_in1k": (1000, "avg", "vit"),
}


@pytest.mark.parametrize("name", IDS)
def test_an_id_of_timm_names_a_model(name):
    classes, pooling, expected = IDS[name]
    config = {
        "architecture": name.split(".")[0],
        "num_classes": classes,
        "global_pool": pooling,
    }
    found = identify(config, name)
    assert found.model == expected
    made = {**options_of(found.model)[1], **found.options}
    assert made["out_features"] == classes
    names = {"token": "token", "map": "attention", "avg": made.get("pool")}
    assert made.get("pool", "token") == names[pooling]


# The rules.

VARIANTS = {
    "layer_scale": {"layer_scale": 1e-2},
    "registers": {"registers": 2, "class_position": False},
    "clip": {"pre_norm": True, "patch_bias": False, "nonlinearity": "quick_gelu"},
    "siglip": {"pool": "attention"},
}
TINY = {"input_shape": (8, 8, 3), "patch_size": 4, "out_features": 5, "mlp_ratio": 2}


def tiny(variant, parametrization="completep", **sizes):
    options = {**TINY, "width": 16, "depth": 2, "heads": 2, **VARIANTS[variant]}
    options = {**options, "zero_queries": False, **sizes}
    return zoo.create(
        "vit", **options, parametrization=parametrization, rngs=nnx.Rngs(0)
    )


@pytest.mark.parametrize(
    ("path", "variant", "axes", "in_branch"),
    [
        ("blocks/attention_scale/scale", "layer_scale", ("layers", "embed"), True),
        ("blocks/mlp_scale/scale", "layer_scale", ("layers", "embed"), True),
        ("registers", "registers", ("registers", "embed"), False),
        ("pre_norm/scale", "clip", ("embed",), False),
        ("attention_pool/token", "siglip", ("embed",), False),
        (
            "attention_pool/attention/query/bias",
            "siglip",
            ("heads", "head_dim"),
            False,
        ),
    ],
)
def test_new_vectors_have_their_role(path, variant, axes, in_branch):
    sizes = {"base_width": 8, "base_depth": 1}
    model = nnx.eval_shape(lambda: tiny(variant, "depth_mup", **sizes))
    scale = zoo.scales(model)[path]
    assert scale.role is optim.Role.VECTOR
    assert (scale.width_out, scale.in_branch) == (2.0, in_branch)
    assert zoo.axis_names(model)[path] == axes
    row = optim.explain(zoo.scales(model), optimizer="adam").rows[path]
    assert row.learning_rate == pytest.approx(2**-0.5 if in_branch else 1.0)


def test_attention_pooling_is_outside_of_the_branches():
    model = nnx.eval_shape(lambda: tiny("siglip", base_width=8, base_depth=1))
    scales = zoo.scales(model)
    for path in ("attention/query", "attention/out", "mlp/up", "mlp/down"):
        scale = scales[f"attention_pool/{path}/kernel"]
        assert scale.role is optim.Role.HIDDEN
        assert not scale.in_branch

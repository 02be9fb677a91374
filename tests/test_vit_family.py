"""ViT variants: heads, pooling, and their rules."""

import jax
import numpy as np
import pytest
from flax import nnx
from goldens import TOLERANCE, abstract, apart, drawn, golden, loaded, run

from mupax import optim, zoo
from mupax.zoo.weights import foreign


def test_a_head_is_left_or_started_anew_where_that_is_asked_for():
    features = loaded("vit_deit3", out_features=0)
    assert run(features, golden("vit_deit3")[1]["images"]).shape == (2, 16)
    weights = golden("vit_dinov2")[0]
    headed = abstract("vit_dinov2", out_features=3)
    with pytest.raises(ValueError, match="out_features=0 for features"):
        foreign.match(headed, weights)
    assert foreign.match(headed, weights, new_head=True).fresh == "readout"


def test_a_classifier_on_dinov2_reads_the_class_token_and_the_mean():
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

"""Convolutional networks of timm: their rules, and files without a head."""

import jax.numpy as jnp
import pytest
from flax import nnx
from goldens import EFFICIENTNET, drawn, golden, repository, run, write

from mupax import optim, zoo
from mupax.zoo.registry import abstract

# The rules.

GROWN = {
    "resnet50": {
        **{"width": 16, "base_width": 8, "depth": 4, "base_depth": 2},
        **{"blocks": (1, 2), "groups": 2, "width_per_group": 32, "squeeze": 1 / 4},
    },
    "convnextv2_tiny": {
        **{"width": 16, "base_width": 8, "depth": 4, "base_depth": 2},
        **{"blocks": (1, 1), "layer_scale": 1.0},
    },
    "efficientnet_b0": {
        **EFFICIENTNET,
        **{"width": 16, "base_width": 8, "depth": 4, "base_depth": 2},
    },
}


def grown(name, **more):
    model = abstract(name, **GROWN[name], **more)
    return model, zoo.scales(model)


@pytest.mark.parametrize(
    ("name", "path", "fan_in"),
    [
        ("convnextv2_tiny", "stages/1/blocks/depthwise/kernel", 49),
        ("efficientnet_b0", "stages/1/rest/convs/1/kernel", 25),
    ],
)
def test_a_depthwise_kernel_has_the_rules_of_an_input(name, path, fan_in):
    """Its fan-in is its pixels, at every width; they are those of `optim.rules`."""
    model, scales = grown(name, parametrization="mup")
    scale = scales[path]
    assert scale.fan_in == fan_in
    assert (scale.width_in, scale.width_out) == (1.0, 2.0)
    channels = scale.shape[-1]
    alone = optim.param_scale(
        path,
        (fan_in, channels // 2),
        (fan_in, channels),
        (0,),
        (1,),
        depth=2.0,
        in_branch=True,
    )
    assert alone.role is optim.Role.INPUT
    for family in ("sgd", "adam", "lion"):
        rules = optim.multipliers(scale, model.plan.parametrization, family)
        assert rules == optim.multipliers(alone, model.plan.parametrization, family)
    adam = optim.multipliers(scale, model.plan.parametrization, "adam")
    assert (adam.init_std, adam.learning_rate) == (1.0, 1.0)
    sgd = optim.multipliers(scale, model.plan.parametrization, "sgd")
    assert sgd.learning_rate == 2.0


def test_a_grouped_kernel_sums_over_its_group_which_grows():
    _, scales = grown("resnet50")
    scale = scales["stages/1/rest/convs/1/kernel"]
    # 32 channels inside at width 16, in two groups.
    assert scale.shape[1:] == (3, 3, 16, 32)
    assert scale.fan_in == 9 * 16
    assert scale.role is optim.Role.HIDDEN
    assert (scale.width_in, scale.width_out) == (2.0, 2.0)


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0"])
def test_the_width_of_the_squeeze_grows(name):
    _, scales = grown(name)
    at = "0/first" if name == "efficientnet_b0" else "1/rest"
    for kind in ("squeeze", "excite"):
        scale = scales[f"stages/{at}/se/{kind}/kernel"]
        assert scale.role is optim.Role.HIDDEN
        assert (scale.width_in, scale.width_out) == (2.0, 2.0)
        bias = scales[f"stages/{at}/se/{kind}/bias"]
        assert bias.role is optim.Role.VECTOR


def test_blocks_that_change_their_shape_stand_outside_of_branches():
    _, scales = grown("efficientnet_b0")
    inside = {path: scale.in_branch for path, scale in scales.items()}
    assert inside["stages/0/first/convs/0/kernel"]  # 8 to 8 channels, stride 1
    assert not inside["stages/1/first/convs/1/kernel"]
    assert inside["stages/1/rest/convs/1/kernel"]
    assert not inside["top_conv/kernel"]


def test_images_that_the_stages_shrink_to_nothing_are_an_error():
    """Their mean would be NaN."""
    small = {"width": 4, "out_features": 2, "blocks": (1, 1, 1, 1)}
    model = drawn(abstract("convnext_tiny", **small))
    with pytest.raises(ValueError, match="images of 28 x 28 pixels are too small"):
        run(model, jnp.ones((1, 28, 28, 3)))
    assert jnp.isfinite(run(model, jnp.ones((1, 32, 32, 3)))).all()


def test_squeeze_and_excitation_takes_the_nonlinearity_of_its_block():
    rows = ((0, "inverted", 1, 3, 1, 2, 8, 0.25),)
    options = {"width": 8, "rows_width": 8, "rows": rows, "nonlinearity": "hard_swish"}
    model = abstract("efficientnet_b0", **options)
    assert model.stages[0].first.se.activation is nnx.hard_swish


# Repositories.


@pytest.mark.parametrize("case", ["hf_resnet", "hf_convnext", "hf_convnextv2"])
def test_a_backbone_of_transformers_gets_a_new_head(case, tmp_path):
    """As `ResNetModel` writes it: without a prefix, and without a head."""
    repository(tmp_path, case, architectures=["ResNetModel"])
    bare = {
        key.split(".", 1)[1]: array
        for key, array in golden(case)[0].items()
        if not key.startswith("classifier")
    }
    write(tmp_path / "model.safetensors", bare)
    with pytest.raises(ValueError, match=r"without a head.*pass out_features="):
        zoo.load_pretrained(tmp_path)
    model = zoo.load_pretrained(tmp_path, out_features=3)
    assert run(model, golden(case)[1]["images"]).shape == (3, 3)

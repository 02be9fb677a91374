"""Convolutional networks: parity with timm and transformers, files, and their rules."""

import json

import goldens
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from goldens import apart, check_export, write

from mupax import optim, zoo
from mupax.zoo.weights import foreign
from mupax.zoo.weights.architectures import identify

# Relative to the largest entry; what float32 leaves is ten times less.
TOLERANCE = 1e-5
# Of gradients, which are computed in float64: normalization over the few pixels of a
# small batch multiplies the rounding of float32 to about 1e-5. The file has float32.
IN_DOUBLE = 1e-6

RESNET = {"block": "bottleneck", "width": 4, "depth": 1, "blocks": (1, 2)}
D = {"stem": "deep", "shortcut": "average"}
CONVNEXT = {"width": 4, "blocks": (1, 2, 1, 1)}
HF_CONVNEXT = {"width": 4, "blocks": (1, 2), "head_eps": 1e-3}
EFFICIENTNET = {
    "width": 8,
    "rows_width": 8,
    "head": 24,
    "rows": (
        (0, "separable", 1, 3, 1, 1, 8, 0.25),
        (1, "inverted", 2, 5, 2, 2, 16, 0.25),
        (2, "fused", 2, 3, 1, 2, 16),
        (3, "plain_residual", 2, 3, 1, 1, 16),
    ),
}
MOBILENET = {
    **EFFICIENTNET,
    "rows": (
        (0, "separable", 1, 3, 2, 1, 8, 0.25, "relu"),
        (1, "inverted", 1, 3, 1, 2, 16),
        (1, "inverted", 2, 5, 1, 3, 16, 0.25),
        (2, "plain", 1, 1, 1, 1, 24),
    ),
}
MOBILENETV2 = {
    **EFFICIENTNET,
    "rows": (
        (0, "separable", 1, 3, 1, 1, 8),
        (1, "inverted", 2, 3, 2, 2, 16),
        (2, "inverted", 2, 5, 1, 2, 16),
    ),
}
CASES = {
    "resnext": ("resnet50", {**RESNET, "groups": 2, "width_per_group": 64}),
    "resnet_d_se": ("resnet50", {**RESNET, **D, "squeeze": 1 / 16}),
    "hf_resnet": ("resnet50", RESNET),
    "convnext": ("convnext_tiny", CONVNEXT),
    "convnextv2": ("convnextv2_tiny", CONVNEXT),
    "hf_convnext": ("convnext_tiny", HF_CONVNEXT),
    "hf_convnextv2": ("convnextv2_tiny", HF_CONVNEXT),
    "efficientnet": ("efficientnet_b0", EFFICIENTNET),
    "tf_efficientnet": ("tf_efficientnet_b0", EFFICIENTNET),
    "mobilenetv3": ("mobilenetv3_small_100", MOBILENET),
    "mobilenetv2": ("mobilenetv2_100", MOBILENETV2),
}


def golden(name):
    """(weights under their library's names, everything else)."""
    arrays, data = goldens.golden(name)
    return {k: v.astype(np.float32) for k, v in arrays.items()}, data


def abstract(name, options):
    options = {"out_features": 5, **options}
    return nnx.eval_shape(lambda: zoo.create(name, **options, rngs=nnx.Rngs(0)))


def loaded(case, **more):
    """The golden's network in the zoo."""
    name, options = CASES[case]
    model = abstract(name, {**options, **more})
    foreign.fill(model, golden(case)[0])
    return model


def images(case):
    return jnp.asarray(golden(case)[1]["images"].transpose(0, 2, 3, 1), jnp.float32)


def quick(function):
    """Compiling takes longer than running."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def logits(model, x):
    graph, state = nnx.split(model)
    return quick(lambda s, x: nnx.merge(graph, s)(x))(state, x)


def repository(folder, case, **changes):
    """The files of transformers; their config names the classes."""
    weights, data = golden(case)
    labels = {"id2label": dict.fromkeys("01234", "x")}
    config = json.loads(str(data["config"])) | labels | changes
    write(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_library_and_export_writes_what_was_read(
    case, tmp_path
):
    """Networks of transformers are read by their config."""
    if case.startswith("hf_"):
        model = zoo.load_pretrained(repository(tmp_path, case))
    else:
        model = loaded(case)
    check_export(model, golden(case)[0])
    model.eval()
    assert apart(logits(model, images(case)), golden(case)[1]["logits"]) < TOLERANCE


# The others take longer to compile than the tests of a commit may.
QUICK = ("resnet_d_se", "hf_convnextv2", "mobilenetv3")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in QUICK else pytest.mark.long)
        for case in CASES
        if any(key.startswith("gradient/") for key in golden(case)[1])
    ],
)
def test_gradients_are_those_of_the_library(case):
    with jax.enable_x64(True):
        check_gradients(case)


def check_gradients(case):
    model = loaded(case, dtype=jnp.float64, param_dtype=jnp.float64)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        out = nnx.merge(graph, params, rest, copy=True)(x)
        return (out**2).mean(0).sum()

    x = images(case).astype(jnp.float64)
    gradient = quick(jax.grad(loss))(params, rest, x)
    # A bias that a normalization forgets has a gradient of zero, but for rounding.
    goldens.check_gradients(gradient, model, case, IN_DOUBLE, least=1e-9)


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
    model = abstract(name, {**GROWN[name], **more})
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
    small = {"width": 4, "out_features": 2, "rngs": nnx.Rngs(0)}
    model = zoo.create("convnext_tiny", blocks=(1, 1, 1, 1), **small)
    with pytest.raises(ValueError, match="images of 28 x 28 pixels are too small"):
        model(jnp.ones((1, 28, 28, 3)))
    assert jnp.isfinite(model(jnp.ones((1, 32, 32, 3)))).all()


def test_squeeze_and_excitation_takes_the_nonlinearity_of_its_block():
    rows = ((0, "inverted", 1, 3, 1, 2, 8, 0.25),)
    options = {"width": 8, "rows_width": 8, "rows": rows, "nonlinearity": "hard_swish"}
    model = abstract("efficientnet_b0", options)
    assert model.stages[0].first.se.activation is nnx.hard_swish


# Repositories.


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("hf_")])
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
    assert logits(model, images(case)).shape == (3, 3)


MICROSOFT_RESNET_50 = {
    "architectures": ["ResNetForImageClassification"],
    "depths": [3, 4, 6, 3],
    "downsample_in_first_stage": False,
    "embedding_size": 64,
    "hidden_act": "relu",
    "hidden_sizes": [256, 512, 1024, 2048],
    "id2label": {str(i): str(i) for i in range(1000)},
    "layer_type": "bottleneck",
    "model_type": "resnet",
    "num_channels": 3,
}


def test_microsofts_resnet_50_is_resnet50():
    assert identify(MICROSOFT_RESNET_50, "x") == ("resnet50", {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"downsample_in_bottleneck": True}, "downsample_in_bottleneck=True"),
        ({"hidden_sizes": [256, 512, 1024, 1024]}, "number of channels doubles"),
        ({"depths": [3, 0]}, "depths=0, which must be a whole number"),
        ({"layer_type": "wide"}, "layer_type='wide'"),
    ],
)
def test_a_config_that_is_not_read_is_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        identify(MICROSOFT_RESNET_50 | changes, "someone/x")

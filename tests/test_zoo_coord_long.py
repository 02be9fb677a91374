"""Every family of the zoo, every kind of optimizer: do activations move alike?

The sizes, and why the loss is linear, are in benchmarks/coord_check.py;
benchmarks/coord_check.md holds what it measured.
"""

import importlib.util
import pathlib
import sys

import pytest
from flax import nnx

from mupax import optim, zoo

PATH = pathlib.Path(__file__).parents[1] / "benchmarks" / "coord_check.py"
SPEC = importlib.util.spec_from_file_location("zoo_coord_check", PATH)
bench = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = bench
SPEC.loader.exec_module(bench)

RESIDUAL = [model for model in bench.CASES if model != "mlp"]
# Of these, what has been measured is below; of all others, everything.
NEWER = {
    *("convnext", "efficientnet", "efficientnetv2", "mobilenetv3", "resnet_options"),
    *("vit_rotary", "vit_clip", "vit_eva02", "regnet"),
}
EARLIER = [model for model in RESIDUAL if model not in NEWER]
WITH_MOMENTUM = ("convnext", "efficientnetv2", "vit_clip", "vit_rotary")
# Too noisy in depth to assert; see benchmarks/coord_check.md.
DEEP = sorted(NEWER - {"vit_eva02"})
TOLERANCE = 0.05


def slopes(model, name, optimizer, axis):
    return bench.check(model, name, optimizer, axis).slopes[axis]


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


# What need not be measured: rules that are the same numbers.


def rules(model, name, optimizer, **size):
    """What the rules of a parametrization make of each parameter."""
    case = bench.CASES[model]
    options = {**case.options, **size, "parametrization": bench.point(name)}
    registered = case.model or model
    made = nnx.eval_shape(lambda: zoo.create(registered, **options, rngs=nnx.Rngs(0)))
    scales = zoo.scales(made)
    return made.plan.branch, {
        path: optim.multipliers(scale, made.plan.parametrization, optimizer)
        for path, scale in scales.items()
    }


@pytest.mark.parametrize("model", RESIDUAL)
def test_at_the_base_depth_what_scales_depth_is_mup(model):
    depth = bench.CASES[model].options["base_depth"]
    for optimizer in ("sgd", "adam", "muon"):
        expected = rules(model, "mup", optimizer, depth=depth)
        for name in ("depth_mup", "ode", "completep", "completep(alpha=0.75)"):
            assert rules(model, name, optimizer, depth=depth) == expected


@pytest.mark.parametrize("model", RESIDUAL)
def test_completep_of_alpha_one_is_the_ode(model):
    for optimizer in ("sgd", "adam", "muon"):
        ours, theirs = (rules(model, n, optimizer) for n in ("completep", "ode"))
        assert ours == theirs


# What the theory says of each, and these sizes are large enough to show. Further
# optimizers are in test_coord_check.py; CNN, ResNet, ViT and GPT under Adam at smaller
# sizes, in test_zoo_conv.py and test_zoo_transformers.py.

OPTIMIZERS = ("sgd", "adam", "muon", "lion")


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        *((m, o) for m in ("mlp", *EARLIER) for o in OPTIMIZERS),
        *((m, "adam") for m in sorted(NEWER)),
        *((m, "sgd") for m in ("vit_clip", "vit_rotary", "convnext")),
        *((m, "momentum") for m in (*WITH_MOMENTUM, "vit_eva02", "mobilenetv3")),
        ("regnet", "momentum"),
    ],
)
def test_under_mup_every_layer_moves_alike_at_every_width(model, optimizer):
    for layer, slope in slopes(model, "mup", optimizer, "width").items():
        assert abs(slope) < TOLERANCE, (layer, slope)


@pytest.mark.parametrize(
    ("model", "name", "optimizer"),
    [
        ("resmlp", "depth_mup", "adam"),
        *(
            long(model, "depth_mup", optimizer)
            for model in EARLIER
            for optimizer in OPTIMIZERS
            if (model, optimizer) != ("resmlp", "adam")
        ),
        *(long(model, "depth_mup", "adam") for model in DEEP),
        *(long(model, "depth_mup", "momentum") for model in WITH_MOMENTUM),
        *(long(m, "depth_mup", "momentum") for m in ("efficientnet", "regnet")),
        *(long(m, "ode", o) for m in EARLIER for o in ("sgd", "adam")),
        *(long(m, "completep(alpha=0.75)", "adam") for m in EARLIER),
    ],
)
def test_where_alpha_and_gamma_add_up_to_one_the_stream_moves_alike_at_every_depth(
    model, name, optimizer
):
    for layer, slope in slopes(model, name, optimizer, "depth").items():
        assert abs(slope) < TOLERANCE, (layer, slope)


@pytest.mark.long
def test_under_ntk_features_freeze_as_width_grows():
    slope_of = slopes("gpt", "ntk", "adam", "width")
    for layer, slope in slope_of.items():
        expected = 0.0 if layer == "output" else -0.5
        assert slope == pytest.approx(expected, abs=TOLERANCE), (layer, slope)


@pytest.mark.parametrize(
    ("model", "name", "axis"),
    [
        long("resmlp", "mup", "depth"),
        long("cnn", "mup", "depth"),
        long("gpt", "sp", "width"),
    ],
)
def test_the_check_fails_where_no_rule_is_for_that_axis(model, name, axis):
    assert max(slopes(model, name, "adam", axis).values()) > 1

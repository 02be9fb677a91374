"""Every family of the zoo, every kind of optimizer: do activations move alike?

The sizes, and why the loss is linear, are in benchmarks/coord_check.py;
benchmarks/coord_check.md holds what it measured.
"""

import functools

import pytest
from flax import nnx

from benchmarks import coord_check as bench
from mupax import optim, zoo

RESIDUAL = [model for model in bench.CASES if model != "mlp"]
OPTIMIZERS = ("sgd", "muon", "lion")
TOLERANCE = 0.05


def slopes(model, name, optimizer, axis):
    return bench.check(model, name, optimizer, axis).slopes[axis]


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@functools.cache
def made(model, name, **size):
    """A model of a parametrization, without weights, and its scales."""
    case = bench.CASES[model]
    options = {**case.options, **size, "parametrization": bench.point(name)}
    registered = case.model or model
    model = nnx.eval_shape(lambda: zoo.create(registered, **options, rngs=nnx.Rngs(0)))
    return model, zoo.scales(model)


def rules(model, name, optimizer, **size):
    """What the rules of a parametrization make of each parameter."""
    model, scales = made(model, name, **size)
    return model.plan.branch, {
        path: optim.multipliers(scale, model.plan.parametrization, optimizer)
        for path, scale in scales.items()
    }


@pytest.mark.parametrize("model", RESIDUAL)
def test_rules_that_are_the_same_numbers(model):
    depth = bench.CASES[model].options["base_depth"]
    for optimizer in ("sgd", "adam", "muon"):
        # At the base depth, what scales depth is mup.
        expected = rules(model, "mup", optimizer, depth=depth)
        for name in ("depth_mup", "ode", "completep", "completep(alpha=0.75)"):
            assert rules(model, name, optimizer, depth=depth) == expected
        ours, theirs = (rules(model, n, optimizer) for n in ("completep", "ode"))
        assert ours == theirs


# What the theory says of each, and these sizes are large enough to show: every family
# under Adam, and every optimizer for one network of each kind. Further optimizers are
# in test_coord_check.py.


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("resmlp", "adam"),
        *(long(m, "adam") for m in bench.CASES if m != "resmlp"),
        *(long(m, o) for m in ("resmlp", "vit") for o in OPTIMIZERS),
        long("convnext", "momentum"),
    ],
)
def test_under_mup_every_layer_moves_alike_at_every_width(model, optimizer):
    for layer, slope in slopes(model, "mup", optimizer, "width").items():
        assert abs(slope) < TOLERANCE, (layer, slope)


@pytest.mark.parametrize(
    ("model", "name", "optimizer"),
    [
        ("resmlp", "depth_mup", "adam"),
        *(long(m, "depth_mup", "adam") for m in RESIDUAL if m != "resmlp"),
        *(long(m, "depth_mup", o) for m in ("resmlp", "vit") for o in OPTIMIZERS),
        long("convnext", "depth_mup", "momentum"),
        *(long(m, "ode", o) for m, o in (("resmlp", "sgd"), ("gpt", "adam"))),
        *(long(m, "completep(alpha=0.75)", "adam") for m in ("resmlp", "gpt")),
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
        ("resmlp", "mup", "depth"),
        long("cnn", "mup", "depth"),
        long("gpt", "sp", "width"),
    ],
)
def test_the_check_fails_where_no_rule_is_for_that_axis(model, name, axis):
    assert max(slopes(model, name, "adam", axis).values()) > 1

"""Agreement with the mup package (1.0.0), by numbers that it gave once.

`tests/golden/make_mup_ratios.py` made the numbers. mup multiplies the readout by
1/m in the forward pass, which is the gauge of Tensor Programs V, Table 8; in the
gauge of Table 3 the same factor sits in init and learning rate.
"""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from mupax import optim

GOLDEN = json.loads(
    pathlib.Path(__file__).with_name("golden").joinpath("mup_ratios.json").read_text()
)


def scales_of(model):
    def tree(key):
        return {
            path: jax.ShapeDtypeStruct(tuple(row[key]), jnp.float32)
            for path, row in GOLDEN[model].items()
        }

    names = {1: "d", 2: "out <- in", 4: "out <- in height width"}
    axes = {
        f"^{re.escape(path)}$": "vocab: d"
        if path in ("embed.weight", "positions.weight")
        else names[len(row["shape"])]
        for path, row in GOLDEN[model].items()
    }
    return optim.infer_scales(tree("base_shape"), tree("shape"), axes=axes)


@pytest.mark.parametrize("model", GOLDEN)
def test_every_ratio_is_mups(model):
    scales = scales_of(model)
    table8 = optim.parametrization("mup", gauge="table8")
    for path, row in GOLDEN[model].items():
        for name in ("adamw", "sgd"):
            learning_rate, weight_decay = row[name]
            rule = optim.multipliers(scales[path], table8, name)
            assert rule.learning_rate == pytest.approx(learning_rate, rel=1e-12), path
            assert rule.weight_decay == pytest.approx(weight_decay, rel=1e-12), path
            assert rule.forward == pytest.approx(row["forward"], rel=1e-12), path
            # mup's initial values are float32.
            assert rule.init_std == pytest.approx(row["init_std"], rel=1e-6), path


@pytest.mark.parametrize("model", GOLDEN)
def test_table3_moves_the_readouts_factor_from_forward_to_init_and_rate(model):
    for path, scale in scales_of(model).items():
        row = GOLDEN[model][path]
        for name, power in (("adamw", 1), ("sgd", 2)):
            rule = optim.multipliers(scale, optim.parametrization("mup"), name)
            forward = row["forward"]
            assert rule.forward == 1
            assert rule.init_std == pytest.approx(row["init_std"] * forward, rel=1e-6)
            expected = row[name][0] * forward**power
            assert rule.learning_rate == pytest.approx(expected, rel=1e-12)


def test_the_models_hold_every_role_and_ratios_that_differ():
    roles = {s.role for model in GOLDEN for s in scales_of(model).values()}
    assert roles == set(optim.Role)
    uneven = [
        s
        for model in GOLDEN
        for s in scales_of(model).values()
        if s.role is optim.Role.HIDDEN and s.width_in != s.width_out
    ]
    assert {(s.width_in, s.width_out) for s in uneven} == {(4, 8), (8, 4)}

"""`mupax coord-check` on packaged configs: their optimizers and initializations."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax.configs import digits_resmlp, resmlp_sweep
from mupax.experiments import coord_check
from mupax.experiments.errors import UserError
from mupax.experiments.run.hyperparameters import transfer_record
from mupax.experiments.sweep import space
from mupax.optim.scales.paths import flatten


def checked(module, folder, **model):
    config = module.get_config()
    if module is resmlp_sweep:  # its CIFAR-10 may be missing
        config.dataset = "digits"
    for key, value in model.items():
        setattr(config.model, key, value)
    return coord_check.run(config, folder)


@pytest.mark.parametrize(
    ("module", "model"),
    [
        (resmlp_sweep, {"train_ends": True}),
        (digits_resmlp, {"branch_multiplier": 0.25}),
    ],
)
def test_residual_mlps_with_weak_branches_are_ok(module, model, tmp_path):
    assert checked(module, tmp_path, **model).verdict == "ok"


def test_frozen_ends_are_no_mistake(tmp_path):
    """Without a trained input layer, a layer's own update dominates (Depth-μP)."""
    found = checked(resmlp_sweep, tmp_path)
    assert found.failed == []


def test_strong_branches_are_unclear(tmp_path):
    found = checked(digits_resmlp, tmp_path, branch_multiplier=1.0)
    assert (found.failed, found.passed) == ([], False)
    assert "in depth, smaller branch multipliers" in str(found)


def optimizers(config, folder, monkeypatch, **options):
    """The updates that the check makes of unit gradients, by path."""
    found = []

    def check(build, make, *_, **__):
        model = build(jax.random.key(0), width=16, depth=2)
        params = nnx.state(model, nnx.Param)
        tx = make(model)
        ones = jax.tree.map(jnp.ones_like, params)
        found.append(dict(flatten(tx.update(ones, tx.init(params), params)[0])))
        raise ValueError("seen")

    monkeypatch.setattr(coord_check.optim, "coord_check", check)
    with pytest.raises(UserError, match="seen"):
        coord_check.run(config, folder, **options)
    return found[0]


def small():
    config = digits_resmlp.get_config()
    config.model.width, config.model.depth = 8, 2
    return config


def test_groups_of_the_config_are_checked(tmp_path, monkeypatch):
    plain = optimizers(small(), tmp_path, monkeypatch)
    config = small()
    config.modules = {"head": {"pattern": "role:output", "multiplier": 2.0}}
    grouped = optimizers(config, tmp_path, monkeypatch)
    for path, update in plain.items():
        factor = 2.0 if path == "readout/kernel" else 1.0
        np.testing.assert_allclose(grouped[path], factor * update, rtol=1e-5)


def test_the_rate_replaces_that_of_transfer_from(tmp_path, monkeypatch):
    config = small()
    whole = digits_resmlp.get_config()
    base = space.parse_sweep(whole).base
    record = transfer_record(base, {"learning_rate": 2.0**-5})
    (tmp_path / "summary.json").write_text(json.dumps({"transfer": record}))
    config.transfer_from = str(tmp_path / "summary.json")
    config.model.width, config.model.depth = space.sizes_of(base)
    one, two = (
        optimizers(config, tmp_path, monkeypatch, learning_rate=rate)
        for rate in (0.01, 0.02)
    )
    np.testing.assert_allclose(
        two["readout/kernel"], 2 * one["readout/kernel"], rtol=1e-5
    )

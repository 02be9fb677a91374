"""`mupax coord-check` on packaged configs: their optimizers and initializations."""

import pytest

from mupax.configs import digits_resmlp, resmlp_sweep
from mupax.experiments import coord_check


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
    assert "weak branches, a²·base_depth = 0.5" in str(found)


def test_strong_branches_are_named(tmp_path):
    found = checked(digits_resmlp, tmp_path, branch_multiplier=1.0)
    assert (found.strength, found.passed) == (8.0, False)
    assert "finite depth, a²·base_depth = 8" in str(found)

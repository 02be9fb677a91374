"""The residual MLP: the formula, its options, and what its plan tells."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax import optim, zoo

SIZES = {"width": 16, "depth": 6, "base_width": 8, "base_depth": 2}


def build(seed: int = 0, **options) -> nnx.Module:
    return zoo.create("resmlp", **{**SIZES, **options}, rngs=nnx.Rngs(seed))


def kernels(model: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model, (nnx.Param, zoo.Frozen)))
    return {"/".join(map(str, path)): np.asarray(v[...]) for path, v in state}


def test_the_forward_pass_is_the_formula_of_section_6_3():
    model = build(branch_multiplier=1.5)
    w = kernels(model)
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    h = x @ w["readin/kernel"]
    for kernel in w["blocks/layers/0/kernel"]:
        z = np.maximum(h @ kernel, 0)
        h = h + 1.5 * (6 / 2) ** -0.5 * (z - z.mean(-1, keepdims=True))
    np.testing.assert_allclose(model(x), h @ w["readout/kernel"], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("inner", [True, False])
def test_the_mean_between_the_layers_of_a_branch_is_an_option(inner):
    model = build(block_depth=2, subtract_inner_mean=inner, parametrization="depth_mup")
    w = kernels(model)
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    h = x @ w["readin/kernel"]
    for first, second in zip(
        w["blocks/layers/0/kernel"], w["blocks/layers/1/kernel"], strict=True
    ):
        z = np.maximum(h @ first, 0)
        z = np.maximum((z - inner * z.mean(-1, keepdims=True)) @ second, 0)
        h = h + (6 / 2) ** -0.5 * (z - z.mean(-1, keepdims=True))
    np.testing.assert_allclose(model(x), h @ w["readout/kernel"], rtol=2e-5, atol=1e-5)


def test_initial_sizes_follow_the_parametrization():
    wide = {"width": 512, "depth": 2, "base_width": 64}
    for name, power in (("sp", -0.5), ("mup", -1.0)):
        w = kernels(build(**wide, parametrization=name))
        readout = 64**-0.5 * (512 / 64) ** power
        assert w["readout/kernel"].std() == pytest.approx(readout, rel=0.05)
        assert w["blocks/layers/0/kernel"].std() == pytest.approx(512**-0.5, rel=0.05)
        assert w["readin/kernel"].std() == pytest.approx(1 / 8, rel=0.05)


def test_frozen_ends_are_no_parameters():
    model = build(train_ends=False)
    assert list(zoo.scales(model)) == ["blocks/layers/0/kernel"]
    assert set(kernels(model)) == set(kernels(build()))


def test_scales_inferred_from_a_zoo_model_carry_its_parametrization():
    base, target = (
        lambda w=w, d=d: zoo.create("resmlp", width=w, depth=d, rngs=nnx.Rngs(0))
        for w, d in ((8, 2), (16, 6))
    )
    scales = optim.infer_scales(base, target, inputs=(jnp.ones((1, 64)),))
    assert scales.parametrization.name == "depth_mup"
    with pytest.raises(ValueError, match="was built with depth_mup"):
        scales.for_parametrization("mup")


def test_scales_are_refused_for_a_model_of_ones_own():
    with pytest.raises(ValueError, match="infer_scales"):
        zoo.scales(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    model, rngs = build(), nnx.Rngs(1)
    model.readout = nnx.LoRA(16, 2, 10, base_module=model.readout, rngs=rngs)
    with pytest.raises(ValueError, match=r"nnx\.LoRA, get the scales by optim\.infer_"):
        zoo.scales(model)

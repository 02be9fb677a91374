"""The convolutional models: scaling and batch statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from goldens import loaded

from mupax import zoo
from mupax.zoo.family import Options
from mupax.zoo.layers import conv
from mupax.zoo.plan import Axis
from mupax.zoo.registry import abstract
from mupax.zoo.weights import foreign

# Two stages, the second with a stack: all that a ResNet has, quick to compile.
TINY = {
    "width": 4,
    "depth": 1,
    "blocks": (1, 3),
    "stem": "cifar",
    "input_shape": (8, 8, 2),
    "out_features": 3,
}
CNN = {"width": 8, "depth": 8, "input_shape": (8, 8, 2), "out_features": 3}
X = np.random.default_rng(0).normal(size=(3, 8, 8, 2)).astype(np.float32)


def quick_jit(function):
    """Compiling takes longer than running."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def build(name: str, seed: int = 0, **options) -> nnx.Module:
    """A model with weights of NumPy, whose sizes a step of training can tell apart."""
    model = abstract(name, **options)
    random = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        shape, kind = variable.shape, path[-1]
        value = random.normal(size=shape)
        if kind == "kernel":
            value /= np.sqrt(np.prod(shape[-4:-1]))
        elif kind in ("scale", "var"):
            value = np.exp(0.1 * value)
        variable.set_value(jnp.asarray(value, variable.dtype))
    return model


def forward(model: nnx.Module, x: np.ndarray) -> tuple[np.ndarray, dict]:
    """Logits, and the batch statistics after them by path."""
    graph, state = nnx.split(model)

    def run(state: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model, nnx.BatchStat)

    logits, statistics = quick_jit(run)(state, x)
    return np.asarray(logits), {
        "/".join(map(str, path)): np.asarray(v[...])
        for path, v in nnx.to_flat_state(statistics)
    }


def gradient_of(model: nnx.Module, x: jax.Array) -> nnx.State:
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: nnx.State) -> jax.Array:
        logits = nnx.merge(graph, params, rest, copy=True)(x)
        return (logits[:, 0] ** 2).mean()

    return jax.grad(loss)(params)


def gradients(model: nnx.Module, x: np.ndarray) -> dict[str, np.ndarray]:
    graph, state = nnx.split(model)
    gradient = quick_jit(lambda s, x: gradient_of(nnx.merge(graph, s), x))(state, x)
    return {
        "/".join(map(str, path)): np.asarray(v[...])
        for path, v in nnx.to_flat_state(gradient)
    }


def test_the_running_variance_averages_the_unbiased_one():
    model = loaded("resnet_cifar")
    x = np.random.default_rng(0).normal(3.0, 2.0, (2, 3, 3, 4)).astype(np.float32)
    before = np.asarray(model.norm.var[...])
    y = model.norm(jnp.asarray(x))
    for ddof, same in ((1, True), (0, False)):
        after = 0.9 * before + 0.1 * x.var((0, 1, 2), ddof=ddof)
        assert np.allclose(model.norm.var[...], after, rtol=1e-5) == same
    normal = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5)
    scale, bias = np.asarray(model.norm.scale[...]), np.asarray(model.norm.bias[...])
    np.testing.assert_allclose(y, normal * scale + bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mean", "std"), [(1449, 0.5), (-1e6, 3), (7, 0)])
@pytest.mark.parametrize(
    ("kind", "axes"), [("batch", (0, 1, 2)), ("layer", -1), ("instance", (1, 2))]
)
def test_a_norm_is_accurate_from_its_first_step_whatever_the_mean(
    kind, axes, mean, std
):
    one = Options(width=6, depth=1).plan(axes={"channels": Axis(6, 6, False)})
    norm = conv.NORMS[kind](one, "channels", epsilon=conv.EPSILON)
    x = np.random.default_rng(0).normal(mean, std, (4, 5, 5, 6)).astype(np.float32)
    exact = x.astype(np.float64)
    exact = exact - exact.mean(axes, keepdims=True)
    exact /= np.sqrt((exact**2).mean(axes, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(jnp.asarray(x)), exact, atol=2e-6)


def test_torch_has_names_for_batch_normalization_alone():
    model = abstract("resnet18", **TINY, norm="layer")
    with pytest.raises(ValueError, match="norm='batch'"):
        foreign.exported_names(model)


# ----- The formula of the CNN


def test_the_cnn_is_the_formula_of_appendix_a1():
    options = {"width": 16, "base_width": 8, "depth": 8, "base_depth": 2}
    options |= {"input_shape": (9, 8, 2), "out_features": 3, "branch_multiplier": 1.5}
    options |= {"parametrization": "mean_field", "pooling": "max", "remat": True}
    model = build("cnn", **options)
    w = {
        "/".join(map(str, path)): v[...]
        for path, v in nnx.to_flat_state(nnx.state(model))
    }
    x = np.random.default_rng(1).normal(size=(2, 9, 8, 2)).astype(np.float32)

    def convolve(x, kernel, multiplier):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return multiplier * jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=dimensions
        )

    h = convolve(jnp.asarray(x), w["readin/kernel"], 1)
    for stage in range(4):
        if stage:
            b, height, width, n = h.shape
            h = h[:, : height // 2 * 2, : width // 2 * 2]
            h = h.reshape(b, height // 2, 2, width // 2, 2, n).max((2, 4))
            h = convolve(h, w[f"doubling/{stage - 1}/kernel"], 2**-0.5)
        for kernel in w[f"stages/{stage}/conv/kernel"]:
            # Mean field has no exponent of depth: the branch keeps its multiplier.
            h = h + 1.5 * convolve(jax.nn.relu(h), kernel, 2**-0.5)
    kernel = w["readout/kernel"].reshape(-1, 3)
    expected = jax.nn.relu(h).reshape(2, -1) @ kernel / 2
    np.testing.assert_allclose(forward(model, x)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("depth", "stages"), [(12, [3, 3, 3, 3]), (30, [7, 8, 7, 8]), (3, [0, 1, 1, 1])]
)
def test_the_three_poolings_are_equally_spaced(depth, stages):
    options = {"width": 8, "depth": depth, "input_shape": (8, 8, 1)}
    model = abstract("cnn", **options)
    counts = [0 if s is None else s.conv.kernel.shape[0] for s in model.stages]
    assert counts == stages


def test_the_convolutions_that_double_channels_may_count_as_layers():
    options = {"width": 8, "depth": 12, "base_depth": 4, "input_shape": (8, 8, 1)}
    for count, ratio in ((False, 12 / 4), (True, (12 + 3) / (4 + 3))):
        model = abstract("cnn", **options, count_pooling=count)
        scales = zoo.scales(model)
        assert scales["stages/0/conv/kernel"].depth == ratio
        assert scales["stages/0/conv/kernel"].base_shape[0] == 1
        assert model.plan.branch == ratio**-0.5


# ----- Scales


def test_roles_and_branches_of_a_resnet():
    sizes = {"width": 8, "depth": 4, "base_width": 2, "base_depth": 2}
    model = abstract("resnet50", **{**TINY, **sizes})
    scales = zoo.scales(model)
    roles = {path: (s.role.value, s.in_branch) for path, s in scales.items()}
    assert roles["conv/kernel"] == ("input", False)
    assert roles["norm/scale"] == ("vector", False)
    assert roles["stages/1/first/convs/1/kernel"] == ("hidden", True)
    assert roles["stages/1/first/norms/2/bias"] == ("vector", True)
    assert roles["stages/1/first/shortcut/conv/kernel"] == ("hidden", False)
    assert roles["stages/1/first/shortcut/norm/scale"] == ("vector", False)
    assert roles["stages/1/rest/convs/2/kernel"] == ("hidden", True)
    assert roles["readout/kernel"] == ("output", False)
    assert roles["readout/bias"] == ("fixed", False)
    stacked = scales["stages/1/rest/convs/1/kernel"]
    # Three blocks a stage, four times and at the base twice; the first is apart.
    assert stacked.shape == (4 * 3 - 1, 3, 3, 16, 16)
    assert stacked.base_shape == (2 * 3 - 1, 3, 3, 4, 4)
    assert (stacked.width_in, stacked.width_out, stacked.depth) == (4.0, 4.0, 2.0)
    assert stacked.fan_in == 9 * 16
    assert zoo.axis_names(model)["stages/0/first/convs/0/kernel"] == (
        "kernel1",
        "kernel1",
        "embed",
        "mid1",
    )


def test_initial_weights_have_the_variances_of_torchvision():
    options = {**TINY, "blocks": (1, 1), "width": 32, "out_features": 64}

    def create():
        return zoo.create("resnet18", **options, rngs=nnx.Rngs(0))

    model = nnx.eval_shape(create)
    nnx.update(model, quick_jit(lambda: nnx.state(create()))())
    fan_out = 9 * 64
    kernel = model.stages[1].first.convs[1].kernel[...]
    assert np.isclose(kernel.std(), (2 / fan_out) ** 0.5, rtol=0.02)
    kernel = model.readout.kernel[...]
    assert np.isclose(np.abs(kernel).max(), 64**-0.5, rtol=0.01)
    assert np.isclose(kernel.std(), (3 * 64) ** -0.5, rtol=0.02)


def test_rematerialization_changes_nothing_but_memory():
    plain, remat = (build("resnet18", **TINY, remat=r) for r in (False, True))
    for one, other in (
        (gradients(plain, X), gradients(remat, X)),
        (forward(plain, X)[1], forward(remat, X)[1]),
    ):
        assert one.keys() == other.keys()
        for path in one:
            np.testing.assert_allclose(
                one[path], other[path], rtol=1e-4, atol=1e-5, err_msg=path
            )


def test_statistics_move_in_training_and_stay_in_evaluation():
    model = build("resnet18", **TINY)
    before = forward_statistics(model)
    _, trained = forward(model, X)
    for path, value in trained.items():
        assert (value != before[path]).all(), path
    model.eval()
    logits, after = forward(model, X)
    for path, value in after.items():
        np.testing.assert_array_equal(value, before[path])
    # Each image alone: nothing is shared by the batch.
    alone, _ = forward(model, X[1:2])
    np.testing.assert_allclose(alone, logits[1:2], rtol=1e-4, atol=1e-5)
    model.train()
    assert not np.allclose(forward(model, X)[0], logits, rtol=1e-2)


def forward_statistics(model: nnx.Module) -> dict[str, np.ndarray]:
    return {
        "/".join(map(str, path)): np.asarray(v[...])
        for path, v in nnx.to_flat_state(nnx.state(model, nnx.BatchStat))
    }


def test_other_image_sizes():
    for model, options in (
        ("resnet18", {**TINY, "stem": "imagenet"}),
        ("cnn", {**CNN, "global_pool": True}),
    ):
        made = abstract(model, **options)
        for shape in ((1, 33, 20, 2), (5, 224, 224, 2)):
            logits = nnx.eval_shape(
                lambda m, x: m(x), made, jax.ShapeDtypeStruct(shape, jnp.float32)
            )
            assert logits.shape == (shape[0], 3)


def test_images_that_do_not_fit_are_refused():
    def logits(model, *shape):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        return nnx.eval_shape(lambda m, x: m(x), model, x)

    tiny = build("resnet18", **TINY)
    with pytest.raises(ValueError, match="channels last"):
        logits(tiny, 2, 2, 8, 8)
    with pytest.raises(ValueError, match="global_pool=True"):
        logits(build("cnn", **CNN), 2, 16, 16, 2)
    with pytest.raises(ValueError, match=r"x is uint8; .* \(x / 255 - mean\) / std"):
        tiny(jnp.zeros((2, 8, 8, 2), jnp.uint8))
    with pytest.raises(ValueError, match="more than one value per channel"):
        logits(tiny, 1, 2, 2, 2)
    tiny.eval()
    assert logits(tiny, 1, 2, 2, 2).shape == (1, 3)
    with pytest.raises(ValueError, match="maps of one pixel"):
        logits(build("resnet18", **TINY, norm="instance"), 2, 2, 2, 2)

"""Convolutions have JAX's gradients, in the form that XLA on CPUs is fast at."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax import zoo
from mupax.zoo.layers.convolve import (
    _depthwise,
    _narrow,
    _of_groups,
    _plain,
    _split,
    convolve,
)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("pixels", [(8, 9), (7, 4), (2, 2), (1, 3)])
def test_gradients_are_those_of_jax(size, stride, pixels):
    with jax.enable_x64():
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (2, *pixels, 3))
        kernel = jax.random.normal(keys[1], (size, size, 3, 5))
        (ours, ours_back), (theirs, theirs_back) = (
            jax.vjp(lambda x, kernel, f=f: f(x, kernel, stride), x, kernel)
            for f in (convolve, _plain)
        )
        grad = jax.random.normal(keys[2], ours.shape)
        pairs = (ours, theirs), *zip(ours_back(grad), theirs_back(grad), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("images", [1, 6, 7, 64])
def test_one_of_few_channels_has_the_gradients_of_jax(images, size):
    """In parts, of several images or of one; 64 images of 16x16 pixels need them."""
    assert (len(_split(jnp.ones((images, 16, 16, 2)), jnp.ones((3, 3, 2, 4)))) > 1) == (
        images == 64
    )
    with jax.enable_x64():
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (images, 16, 16, 2))
        kernel = jax.random.normal(keys[1], (size, size, 2, 4))
        (ours, ours_back), (theirs, theirs_back) = (
            jax.vjp(f, x, kernel)
            for f in (_narrow, lambda x, kernel: _plain(x, kernel, 1))
        )
        grad = jax.random.normal(keys[2], ours.shape)
        pairs = (ours, theirs), *zip(ours_back(grad), theirs_back(grad), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


@pytest.mark.parametrize("sides", [((1, 1), (1, 1)), ((0, 1), (2, 2)), ((0, 0),) * 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("size", "pixels"), [(3, (8, 9)), (5, (7, 5)), (2, (2, 3))])
def test_gradients_of_a_depthwise_one_are_those_of_jax(size, pixels, stride, sides):
    with jax.enable_x64():
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (2, *pixels, 4))
        kernel = jax.random.normal(keys[1], (size, size, 1, 4))
        (ours, ours_back), (theirs, theirs_back) = (
            jax.vjp(lambda x, kernel, f=f: f(x, kernel, stride, sides), x, kernel)
            for f in (_depthwise, _of_groups)
        )
        grad = jax.random.normal(keys[2], ours.shape)
        pairs = (ours, theirs), *zip(ours_back(grad), theirs_back(grad), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


@pytest.mark.parametrize(
    ("channels", "stride"), [((2, 3, 4), 1), ((2, 9, 4), 1), ((2, 3, 4), 2)]
)
def test_second_derivatives_are_those_of_jax(channels, stride):
    """Of a loss of three convolutions, by `jvp` or `grad` of its gradient."""
    with jax.enable_x64():
        keys = jax.random.split(jax.random.key(0), 4)
        x = jax.random.normal(keys[0], (2, 6, 5, channels[0]))
        kernels = [
            jax.random.normal(key, (3, 3, *sizes)) / 3
            for key, sizes in zip(
                keys[1:], [channels[:2], channels[1:], (1, channels[2])], strict=True
            )
        ]

        def loss(kernels, plain):
            first, second, last = kernels
            one = _plain if plain else convolve
            y = jnp.tanh(one(jnp.tanh(one(x, first, stride)), second, 1))
            if plain:
                y = _of_groups(y, last, 1, ((1, 1), (1, 1)))
            else:
                y = convolve(y, last, 1)
            return (y**2).sum()

        def along(outer, plain):
            ones = jax.tree.map(jnp.ones_like, kernels)
            slopes = jax.grad(loss)
            if outer == "jvp":
                return jax.jvp(lambda k: slopes(k, plain), (kernels,), (ones,))[1]
            return jax.grad(lambda k: sum(g.sum() for g in slopes(k, plain)))(kernels)

        theirs = along("jvp", plain=True)
        for outer in ("jvp", "grad"):
            for a, b in zip(along(outer, plain=False), theirs, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * np.abs(b).max())


def test_scanned_blocks_have_second_derivatives():
    model = zoo.create(
        "resnet18", width=8, input_shape=(8, 8, 3), out_features=10, rngs=nnx.Rngs(0)
    )
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    ones = jax.tree.map(jnp.ones_like, params)
    slopes = jax.grad(lambda p: (nnx.merge(graph, p, rest)(x) ** 2).mean())
    forward = jax.jit(lambda p: jax.jvp(slopes, (p,), (ones,))[1])(params)
    total = jax.grad(lambda p: sum(g.sum() for g in jax.tree.leaves(slopes(p))))
    reverse = jax.jit(total)(params)
    pairs = zip(jax.tree.leaves(forward), jax.tree.leaves(reverse), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max() + 1e-6)


@pytest.mark.parametrize("width", [8, 64])
def test_a_batch_may_be_empty_or_left_open(width):
    """Narrow convolutions take parts of a batch."""
    model = zoo.create(
        "cnn",
        width=width,
        depth=2,
        input_shape=(8, 8, 3),
        out_features=10,
        rngs=nnx.Rngs(0),
    )
    none = jnp.ones((0, 8, 8, 3))
    slopes = nnx.grad(lambda model: model(none).sum())(model)
    assert model(none).shape == (0, 10)
    assert not any(leaf.any() for leaf in jax.tree.leaves(slopes))
    graph, state = nnx.split(model)
    (batch,) = jax.export.symbolic_shape("batch")
    asked = jax.ShapeDtypeStruct((batch, 8, 8, 3), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: nnx.merge(graph, state)(x)))(asked)
    x = jax.random.normal(jax.random.key(0), (5, 8, 8, 3))
    np.testing.assert_allclose(exported.call(x), model(x), rtol=1e-5, atol=1e-6)


def test_padding_by_name_is_that_of_jax():
    x, kernel = np.ones((1, 7, 8, 2), "float32"), np.ones((3, 3, 1, 2), "float32")
    for stride in (1, 2, 3):
        expected = jax.lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )
        np.testing.assert_allclose(convolve(x, kernel, stride, "same"), expected)


def test_no_gradient_of_a_depthwise_one_is_that_of_all_channels():
    """XLA's is, on CPUs: seventy times slower at 256 channels and four networks."""

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return convolve(x, kernel, 1).sum()

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((3, 3, 1, 8), (2, 9, 9, 8))]
    text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text()
    assert " convolution(" not in text, text


@pytest.mark.parametrize("of", [convolve, _plain])
def test_in_a_loop_every_convolution_has_the_form_that_is_fast(of):
    """JAX's own have not, which is why `convolve` is there: seventeen times slower."""

    def loss(kernels: jax.Array, x: jax.Array) -> jax.Array:
        return (
            jax.lax.scan(lambda x, k: (of(x, k, 1), None), x, kernels)[0] ** 2
        ).sum()

    shapes = [
        jax.ShapeDtypeStruct(s, "float32") for s in ((4, 3, 3, 9, 9), (2, 9, 9, 9))
    ]
    text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text()
    forms = set(re.findall(r" convolution\(.*dim_labels=([^,\s]+)", text))
    assert (forms == {"b01f_01io->b01f"}) == (of is convolve), forms


def test_an_image_smaller_than_the_kernel_is_not_taken_for_it():
    """XLA would swap them where the kernel has more pixels: ten times slower."""
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((3, 3, 9, 9), (2, 2, 2, 9))]
    for of, swapped in ((convolve, False), (_plain, True)):

        def loss(kernel: jax.Array, x: jax.Array, of=of) -> jax.Array:
            return (of(of(x, kernel, 1), kernel, 1) ** 2).sum()

        text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text()
        assert ("rhs_reversal" in text) == swapped, text

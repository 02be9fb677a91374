"""Convolutions have JAX's gradients, in the form that XLA on CPUs is fast at."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from goldens import QUICK

from mupax import zoo
from mupax.zoo.layers.convolve import (
    Depthwise,
    Direct,
    Narrow,
    _split,
    convolve,
    formed,
    plain,
)

HALF = ((1, 1), (1, 1))
jit = functools.partial(jax.jit, compiler_options=QUICK)


def jax_own(x, kernel, stride):
    return plain(x, kernel, stride, HALF)


def same(ours, theirs, digits=1e-11):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=digits * np.abs(b).max())


def all_derivatives(of, x, kernel):
    """By `jvp` and `vjp`, outside and inside of `vmap`."""
    keys = jax.random.split(jax.random.key(7), 3)
    change = tuple(
        jax.random.normal(key, a.shape)
        for key, a in zip(keys, (x, kernel), strict=False)
    )
    out, forward = jax.jvp(of, (x, kernel), change)
    cotangent = jax.random.normal(keys[2], out.shape)
    backward = jax.vjp(of, x, kernel)[1](cotangent)

    def loss(x, kernels):
        outs = jax.vmap(of, (None, 0))(x, kernels)
        return (outs**2).sum()

    shared = jax.grad(loss, (0, 1))(x, jnp.stack([kernel, 2 * kernel]))
    return out, forward, backward, shared


@pytest.mark.parametrize(
    ("form", "size", "pixels", "stride", "sides", "channels", "images"),
    [
        *((Direct, 1, (8, 9), s, ((0, 0),) * 2, (3, 3, 5), 2) for s in (1, 2)),
        *((Direct, 3, p, 1, HALF, (3, 3, 5), 2) for p in ((7, 4), (2, 2), (1, 3))),
        *((Direct, 3, p, 2, HALF, (3, 3, 5), 2) for p in ((8, 9), (2, 2), (1, 3))),
        (Direct, 7, (7, 4), 2, ((3, 3),) * 2, (3, 3, 5), 2),
        *((Narrow, 3, (16, 16), 1, HALF, (2, 2, 4), n) for n in (1, 7, 64)),
        (Narrow, 5, (9, 8), 1, ((2, 2),) * 2, (2, 2, 4), 6),
        *((Depthwise, 3, (8, 9), s, ((0, 1), (2, 2)), (4, 1, 4), 2) for s in (1, 2, 3)),
        (Depthwise, 5, (7, 5), 2, ((1, 1), (1, 1)), (4, 1, 4), 2),
        (Depthwise, 2, (2, 3), 1, ((0, 0),) * 2, (4, 1, 4), 2),
    ],
)
def test_derivatives_are_those_of_jax(
    form, size, pixels, stride, sides, channels, images
):
    with jax.enable_x64():
        keys = jax.random.split(jax.random.key(0), 2)
        x = jax.random.normal(keys[0], (images, *pixels, channels[0]))
        kernel = jax.random.normal(keys[1], (size, size, *channels[1:]))
        # Each in one program, which compiles sooner than every operation alone.
        ours, theirs = (
            jit(functools.partial(all_derivatives, of))(x, kernel)
            for of in (
                lambda x, k: formed(form.of(x, k, stride, sides), x, k),
                lambda x, k: plain(x, k, stride, sides),
            )
        )
        same(ours, theirs)


def test_many_images_of_few_channels_are_taken_in_parts():
    assert len(_split(jnp.ones((64, 16, 16, 2)), 3)) > 1
    assert len(_split(jnp.ones((7, 16, 16, 2)), 3)) == 1


@pytest.mark.parametrize(
    ("channels", "stride"), [((2, 3, 4), 1), ((2, 9, 4), 1), ((2, 3, 4), 2)]
)
def test_second_derivatives_are_those_of_jax(channels, stride):
    """Of a loss of three convolutions, in every order of the modes."""
    with jax.enable_x64():
        keys = jax.random.split(jax.random.key(0), 4)
        x = jax.random.normal(keys[0], (2, 6, 5, channels[0]))
        kernels = [
            jax.random.normal(key, (3, 3, *sizes)) / 3
            for key, sizes in zip(
                keys[1:], [channels[:2], channels[1:], (1, channels[2])], strict=True
            )
        ]

        def loss(kernels, of):
            y = jnp.tanh(of(jnp.tanh(of(x, kernels[0], stride)), kernels[1], 1))
            return (of(y, kernels[2], 1) ** 2).sum()

        @functools.partial(jit, static_argnums=(0, 1))
        def along(outer, of, kernels):
            ones = jax.tree.map(jnp.ones_like, kernels)
            if outer == "reverse over forward":
                change = lambda k: jax.jvp(lambda k: loss(k, of), (k,), (ones,))[1]  # noqa: E731
                return jax.grad(change)(kernels)
            slopes = jax.grad(lambda k: loss(k, of))
            if outer == "forward over reverse":
                return jax.jvp(slopes, (kernels,), (ones,))[1]
            return jax.grad(lambda k: sum(g.sum() for g in slopes(k)))(kernels)

        theirs = along("reverse", jax_own, kernels)
        for outer in ("forward over reverse", "reverse over forward", "reverse"):
            same(along(outer, convolve, kernels), theirs)


def test_scanned_blocks_have_second_derivatives():
    sizes = {"width": 8, "blocks": (2,), "stem": "cifar", "input_shape": (8, 8, 3)}
    model = zoo.create("resnet18", **sizes, out_features=10, rngs=nnx.Rngs(0))
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    ones = jax.tree.map(jnp.ones_like, params)
    slopes = jax.grad(lambda p: (nnx.merge(graph, p, rest)(x) ** 2).mean())
    forward = jit(lambda p: jax.jvp(slopes, (p,), (ones,))[1])(params)
    total = jax.grad(lambda p: sum(g.sum() for g in jax.tree.leaves(slopes(p))))
    reverse = jit(total)(params)
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
    graph, state = nnx.split(model)

    def call(state, x):
        return nnx.merge(graph, state)(x)

    none, run = jnp.ones((0, 8, 8, 3)), jit(call)
    slopes = jit(jax.grad(lambda state: call(state, none).sum()))(state)
    assert run(state, none).shape == (0, 10)
    assert not any(leaf.any() for leaf in jax.tree.leaves(slopes))
    (batch,) = jax.export.symbolic_shape("batch")
    asked = jax.ShapeDtypeStruct((batch, 8, 8, 3), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: call(state, x)))(asked)
    x = jax.random.normal(jax.random.key(0), (5, 8, 8, 3))
    np.testing.assert_allclose(exported.call(x), run(state, x), rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("of", [convolve, jax_own])
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
    for of, swapped in ((convolve, False), (jax_own, True)):

        def loss(kernel: jax.Array, x: jax.Array, of=of) -> jax.Array:
            return (of(of(x, kernel, 1), kernel, 1) ** 2).sum()

        text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text()
        assert ("rhs_reversal" in text) == swapped, text

"""A convolution whose gradients are fast on CPUs too, also inside of loops."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..sharding import is_splitting, platform
from .basic import single

# On CPUs: up to so many channels on both sides a product of matrices is faster than a
# convolution, if about so many bytes of it stay in the cache.
_NARROW = 8
_CACHED = 150_000


def convolve(
    x: Float[Array, "b h w m"],
    kernel: Float[Array, "k k g n"],
    stride: int,
    padding: int | str = "half",
) -> Float[Array, "b h2 w2 n"]:
    """Convolve images, in groups of channels if the kernel has fewer than the image.

    On CPUs, depthwise convolutions and those with padding "half" and one group use
    custom gradients. They have the same values, and can be differentiated again, by
    `jax.hessian` too; `jax.jvp` of the convolution itself is an error of JAX. With at
    most 8 channels on both sides, a product of matrices takes their place.

    Args:
      x: images.
      kernel: (height, width, channels of a group, outputs). The image has m / g groups
        of channels, and each output sums over one of them.
      stride: step of the output over the input.
      padding: number of pixels on every side; "half" for (k - 1) // 2, as in torch's
        networks; "same" for an output of ceil(size / stride) pixels, with an odd
        padding pixel at the end, as in TensorFlow.

    Examples:
      >>> import jax.numpy as jnp
      >>> convolve(jnp.ones((1, 5, 5, 2)), jnp.ones((3, 3, 2, 4)), 2).shape
      (1, 3, 3, 4)
      >>> convolve(jnp.ones((1, 5, 5, 4)), jnp.ones((3, 3, 1, 4)), 1).shape
      (1, 5, 5, 4)
    """
    groups = x.shape[-1] // kernel.shape[2]
    if groups > 1 or padding != "half":
        return _grouped(x, kernel, stride, padding, groups)
    # XLA on CPUs rewrites convolutions into a form with fast code, but not inside of
    # loops such as scanned blocks, where the gradients of a ResNet-18 took 17x as
    # long. On other platforms XLA recognizes the form that JAX gives to gradients.
    if platform() != "cpu":
        return _plain(x, kernel, stride)
    size, _, inputs, outputs = kernel.shape
    is_narrow = max(inputs, outputs) <= _NARROW and stride == 1 and size in (3, 5, 7)
    is_known = isinstance(x.shape[0], int)  # not so if `jax.export` leaves it open
    # Taking parts of a batch would move images between devices.
    if is_narrow and is_known and not is_splitting():
        return _narrow(x, kernel)
    return _cpu(x, kernel, stride)


def _grouped(
    x: Array, kernel: Array, stride: int, padding: int | str, groups: int
) -> Array:
    sides = tuple(_sides(n, kernel.shape[0], stride, padding) for n in x.shape[1:3])
    is_depthwise = kernel.shape[2:] == (1, groups) and groups > 1
    of = _depthwise if platform() == "cpu" and is_depthwise else _of_groups
    return of(x, kernel, stride, sides)


def _sides(n: int, size: int, stride: int, padding: int | str) -> tuple[int, int]:
    """Numbers of padding pixels before and after a side of n pixels."""
    if padding == "same":
        added = max((-(-n // stride) - 1) * stride + size - n, 0)
        return added // 2, added - added // 2
    side = (size - 1) // 2 if isinstance(padding, str) else padding
    return side, side


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _depthwise(
    x: Array, kernel: Array, stride: int, sides: tuple[tuple[int, int], ...]
) -> Array:
    """A depthwise convolution whose gradient is fast on CPUs.

    By default, XLA computes the kernel's gradient for all pairs of channels and keeps
    the diagonal.
    """
    return _of_groups(x, kernel, stride, sides)


def _of_groups(
    x: Array, kernel: Array, stride: int, sides: tuple[tuple[int, int], ...]
) -> Array:
    groups = x.shape[-1] // kernel.shape[2]
    return _conv(x, kernel, list(sides), (stride, stride), feature_group_count=groups)


def _depthwise_forward(
    x: Array, kernel: Array, stride: int, sides: tuple[tuple[int, int], ...]
) -> tuple[Array, tuple[Array, Array]]:
    return _of_groups(x, kernel, stride, sides), (x, kernel)


def _depthwise_backward(
    stride: int,
    sides: tuple[tuple[int, int], ...],
    saved: tuple[Array, Array],
    grad: Float[Array, "b h2 w2 n"],
) -> tuple[Float[Array, "b h w n"], Float[Array, "k k 1 n"]]:
    x, kernel = saved
    size, dtype = kernel.shape[0], single(x.dtype)
    _, to_x = jax.vjp(lambda x: _of_groups(x, kernel, stride, sides), x)
    padded = jnp.pad(x, [(0, 0), *sides, (0, 0)]).astype(dtype)
    slopes = grad.astype(dtype)
    ends = [(steps - 1) * stride + 1 for steps in grad.shape[1:3]]

    def tap(place: Array) -> Array:
        start = (0, place // size, place % size, 0)
        seen = jax.lax.dynamic_slice(padded, start, (len(x), *ends, x.shape[-1]))
        return (seen[:, ::stride, ::stride] * slopes).sum((0, 1, 2))

    taps = jax.lax.map(tap, jnp.arange(size**2))
    return to_x(grad)[0], taps.reshape(kernel.shape).astype(kernel.dtype)


_depthwise.defvjp(_depthwise_forward, _depthwise_backward)


def _plain(x: Array, kernel: Array, stride: int) -> Array:
    pad = (kernel.shape[0] - 1) // 2
    return _conv(x, kernel, [(pad, pad)] * 2, (stride, stride))


def _conv(
    x: Array,
    kernel: Array,
    padding: list[tuple[int, int]],
    strides: tuple[int, int] = (1, 1),
    **more: Any,
) -> Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=numbers, **more
    )


def _product(x: Array, kernel: Array) -> Array:
    """A convolution at stride 1 of few channels, as a product of matrices.

    A few images at a time, so that the matrix of their pixels stays in the cache. Over
    8 layers of 2, 4 and 8 channels on 16x16 pixels, the gradient of a batch of 64 took
    a fifth, a third and two thirds of the time of `_cpu` (benchmarks/narrow_conv.py).
    """

    def some(x: Array) -> Array:
        n, (b, h, w, _) = kernel.shape[-1], x.shape
        weights = kernel.reshape(-1, n).T
        y = weights @ _pixels(x, kernel.shape[0])
        return y.reshape(n, h, w, b).transpose(3, 1, 2, 0)

    y = jax.lax.map(some, _split(x, kernel))
    return y.reshape(*x.shape[:-1], kernel.shape[-1])


def _pixels(x: Array, size: int) -> Float[Array, "places points"]:
    """What each place of a kernel sees: (size²·channels, height·width·images)."""
    x, pad = x.transpose(3, 1, 2, 0), size // 2
    around = jnp.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
    rows, columns = x.shape[1:3]
    seen = [
        around[:, i : i + rows, j : j + columns]
        for i in range(size)
        for j in range(size)
    ]
    return jnp.stack(seen).reshape(size**2 * len(x), -1)


def _split(x: Array, kernel: Array) -> Float[Array, "parts some h w m"]:
    """Images in parts whose `_pixels` have about `_CACHED` bytes."""
    one = kernel.shape[0] ** 2 * math.prod(x.shape[1:]) * x.dtype.itemsize
    most = max(_CACHED // one, 1)
    sizes = (n for n in range(1, len(x) + 1) if len(x) % n == 0 and n <= most)
    some = max(sizes, default=1)  # of no image
    return x.reshape(len(x) // some, some, *x.shape[1:])


_narrow = jax.custom_vjp(_product)


def _narrow_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, kernel), (x, kernel)


def _narrow_backward(
    saved: tuple[Array, Array], grad: Float[Array, "b h w n"]
) -> tuple[Float[Array, "b h w m"], Float[Array, "k k m n"]]:
    x, kernel = saved
    to_x = _product(grad, kernel[::-1, ::-1].swapaxes(2, 3))
    parts = _split(x, kernel)

    def add(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        images, slopes = part
        rows = slopes.transpose(1, 2, 0, 3).reshape(-1, slopes.shape[-1])
        product = _pixels(images, kernel.shape[0]) @ rows
        return total + product.astype(total.dtype), None

    zeros = jnp.zeros((kernel[..., 0].size, kernel.shape[-1]), single(x.dtype))
    slopes = grad.reshape(*parts.shape[:-1], grad.shape[-1])
    to_kernel, _ = jax.lax.scan(add, zeros, (parts, slopes))
    return to_x, to_kernel.reshape(kernel.shape).astype(kernel.dtype)


_narrow.defvjp(_narrow_forward, _narrow_backward)


def _small(
    x: Array, kernel: Array, padding: list[tuple[int, int]], *strides: tuple[int, int]
) -> Array:
    """`_conv` for images that may have fewer pixels than the kernel."""
    if 1 < x.shape[1] * x.shape[2] < kernel.shape[0] ** 2:
        # XLA would swap image and kernel, and has no fast code for that. The barrier
        # hides that part of the image is padding.
        x = jax.lax.optimization_barrier(jnp.pad(x, [(0, 0), *padding, (0, 0)]))
        padding = [(0, 0)] * 2
    return _conv(x, kernel, padding, *strides)


def _direct(x: Array, kernel: Array, stride: int) -> Array:
    pad = (kernel.shape[0] - 1) // 2
    return _small(x, kernel, [(pad, pad)] * 2, (stride, stride))


_cpu = jax.custom_vjp(_direct, nondiff_argnums=(2,))


def _forward(x: Array, kernel: Array, stride: int) -> tuple[Array, tuple[Array, Array]]:
    return _direct(x, kernel, stride), (x, kernel)


def _backward(
    stride: int, saved: tuple[Array, Array], grad: Float[Array, "b h2 w2 n"]
) -> tuple[Float[Array, "b h w m"], Float[Array, "k k m n"]]:
    x, kernel = saved
    size = kernel.shape[0]
    pad = (size - 1) // 2
    # For each side: number of pixels, and first pixel of the last step of the stride.
    ends = [
        (n, (steps - 1) * stride)
        for n, steps in zip(x.shape[1:3], grad.shape[1:3], strict=True)
    ]
    flipped = kernel[::-1, ::-1].swapaxes(2, 3)
    around = [(size - 1 - pad, n - last - 1 + pad) for n, last in ends]
    if stride == 1:
        to_x = _small(grad, flipped, around)
    else:
        to_x = _conv(grad, flipped, around, lhs_dilation=(stride, stride))
    # Sum over pixels, with the batch in place of the channels.
    to_kernel = _conv(
        x.transpose(3, 1, 2, 0),
        grad.transpose(1, 2, 0, 3),
        [(pad, size + last - n - pad) for n, last in ends],
        rhs_dilation=(stride, stride),
    )
    return to_x, to_kernel.transpose(1, 2, 0, 3)


_cpu.defvjp(_forward, _backward)

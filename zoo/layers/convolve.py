"""A convolution whose gradients are fast on CPUs too, also inside of loops."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..sharding import is_splitting, platform
from .basic import single
from .bilinear import formed

# On CPUs: up to so many channels on both sides a product of matrices is faster than a
# convolution, if about so many bytes of it stay in the cache.
_NARROW = 8
_CACHED = 150_000
Sides = tuple[tuple[int, int], ...]


def convolve(
    x: Float[Array, "b h w m"],
    kernel: Float[Array, "k k g n"],
    stride: int,
    padding: int | str = "half",
) -> Float[Array, "b h2 w2 n"]:
    """Convolve images, in groups of channels if the kernel has fewer than the image.

    On CPUs, depthwise convolutions and those with padding "half" and one group have
    derivatives of their own (`Form`): the same values, of every order, in forward and
    in reverse mode. With at most 8 channels on both sides, a product of matrices takes
    their place.

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
    size, _, inputs, outputs = kernel.shape
    groups, on_cpu = x.shape[-1] // inputs, platform() == "cpu"
    sides = tuple(_sides(n, size, stride, padding) for n in x.shape[1:3])
    if groups > 1 or padding != "half":
        is_depthwise = inputs == 1 and outputs == groups > 1
        if on_cpu and is_depthwise:
            return formed(Depthwise.of(x, kernel, stride, sides), x, kernel)
        return plain(x, kernel, stride, sides)
    # XLA on CPUs rewrites convolutions into a form with fast code, but not inside of
    # loops such as scanned blocks, where the gradients of a ResNet-18 took 17x as
    # long. On other platforms XLA recognizes the form that JAX gives to gradients.
    if not on_cpu:
        return plain(x, kernel, stride, sides)
    is_narrow = max(inputs, outputs) <= _NARROW and stride == 1 and size in (3, 5, 7)
    is_known = isinstance(x.shape[0], int)  # not so if `jax.export` leaves it open
    # Taking parts of a batch would move images between devices.
    is_narrow = is_narrow and is_known and not is_splitting()
    return formed(
        (Narrow if is_narrow else Direct).of(x, kernel, stride, sides), x, kernel
    )


def _sides(n: int, size: int, stride: int, padding: int | str) -> tuple[int, int]:
    """Numbers of padding pixels before and after a side of n pixels."""
    if padding == "same":
        added = max((-(-n // stride) - 1) * stride + size - n, 0)
        return added // 2, added - added // 2
    side = (size - 1) // 2 if isinstance(padding, str) else padding
    return side, side


def plain(x: Array, kernel: Array, stride: int, sides: Sides) -> Array:
    """JAX's convolution, whose gradients are JAX's too."""
    groups = x.shape[-1] // kernel.shape[2]
    return _conv(x, kernel, list(sides), (stride, stride), feature_group_count=groups)


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


@dataclasses.dataclass(frozen=True)
class _Sized:
    """What the forms know of a convolution.

    Attributes:
      size: of a side of the kernel.
      pixels: of the images, (height, width).
      stride: step of the output over the input.
      sides: padding pixels before and after each side.
    """

    size: int
    pixels: tuple[int, ...]
    stride: int
    sides: Sides

    @classmethod
    def of(cls, x: Array, kernel: Array, stride: int, sides: Sides) -> "_Sized":
        """The form of a convolution of these arrays."""
        return cls(kernel.shape[0], x.shape[1:3], stride, sides)


class Depthwise(_Sized):
    """A depthwise convolution.

    By default, XLA computes the kernel's gradient for all pairs of channels and keeps
    the diagonal.
    """

    def y(self, x: Array, kernel: Array) -> Array:
        return plain(x, kernel, self.stride, self.sides)

    def x(self, kernel: Array, y: Array) -> Array:
        shape = (len(y), *self.pixels, kernel.shape[-1])
        images = jax.ShapeDtypeStruct(shape, y.dtype)
        slopes: tuple[Array] = jax.linear_transpose(
            lambda x: self.y(x, kernel), images
        )(y)
        return slopes[0]

    def kernel(self, x: Array, y: Array) -> Array:
        dtype, step = single(x.dtype), self.stride
        padded = jnp.pad(x, [(0, 0), *self.sides, (0, 0)]).astype(dtype)
        slopes = y.astype(dtype)
        ends = [(steps - 1) * step + 1 for steps in y.shape[1:3]]

        def tap(place: Array) -> Array:
            start = (0, place // self.size, place % self.size, 0)
            seen = jax.lax.dynamic_slice(padded, start, (len(x), *ends, x.shape[-1]))
            return (seen[:, ::step, ::step] * slopes).sum((0, 1, 2))

        taps: Array = jax.lax.map(tap, jnp.arange(self.size**2))
        return taps.reshape(self.size, self.size, 1, -1).astype(x.dtype)


class Narrow(_Sized):
    """A convolution at stride 1 of few channels, as a product of matrices.

    A few images at a time, so that the matrix of their pixels stays in the cache. Over
    8 layers of 2, 4 and 8 channels on 16x16 pixels, the gradient of a batch of 64 took
    a fifth, a third and two thirds of the time of `Direct` (benchmarks/narrow_conv.py).
    """

    def y(self, x: Array, kernel: Array) -> Array:
        def some(x: Array) -> Array:
            n, (b, h, w, _) = kernel.shape[-1], x.shape
            y = kernel.reshape(-1, n).T @ _pixels(x, self.size)
            return y.reshape(n, h, w, b).transpose(3, 1, 2, 0)

        y: Array = jax.lax.map(some, _split(x, self.size))
        return y.reshape(*x.shape[:-1], kernel.shape[-1])

    def x(self, kernel: Array, y: Array) -> Array:
        return self.y(y, kernel[::-1, ::-1].swapaxes(2, 3))

    def kernel(self, x: Array, y: Array) -> Array:
        parts = _split(x, self.size)

        def add(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
            images, slopes = part
            rows = slopes.transpose(1, 2, 0, 3).reshape(-1, slopes.shape[-1])
            product = _pixels(images, self.size) @ rows
            return total + product.astype(total.dtype), None

        taps = self.size**2 * x.shape[-1]
        zeros = jnp.zeros((taps, y.shape[-1]), single(x.dtype))
        slopes = y.reshape(*parts.shape[:-1], y.shape[-1])
        total, _ = jax.lax.scan(add, zeros, (parts, slopes))
        shape = (self.size, self.size, x.shape[-1], y.shape[-1])
        return total.reshape(shape).astype(x.dtype)


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


def _split(x: Array, size: int) -> Float[Array, "parts some h w m"]:
    """Images in parts whose `_pixels` have about `_CACHED` bytes."""
    one = size**2 * math.prod(x.shape[1:]) * x.dtype.itemsize
    most = max(_CACHED // one, 1)
    sizes = (n for n in range(1, len(x) + 1) if len(x) % n == 0 and n <= most)
    some = max(sizes, default=1)  # of no image
    return x.reshape(len(x) // some, some, *x.shape[1:])


class Direct(_Sized):
    """A convolution of one group, whose gradients have the form that XLA is fast at."""

    def y(self, x: Array, kernel: Array) -> Array:
        return self._small(x, kernel, list(self.sides), (self.stride, self.stride))

    def x(self, kernel: Array, y: Array) -> Array:
        flipped, (pad, _) = kernel[::-1, ::-1].swapaxes(2, 3), self.sides[0]
        around = [
            (self.size - 1 - pad, n - last - 1 + pad) for n, last in self._ends(y)
        ]
        if self.stride == 1:
            return self._small(y, flipped, around)
        return _conv(y, flipped, around, lhs_dilation=(self.stride, self.stride))

    def kernel(self, x: Array, y: Array) -> Array:
        # Sum over pixels, with the batch in place of the channels.
        pad, _ = self.sides[0]
        out = _conv(
            x.transpose(3, 1, 2, 0),
            y.transpose(1, 2, 0, 3),
            [(pad, self.size + last - n - pad) for n, last in self._ends(y)],
            rhs_dilation=(self.stride, self.stride),
        )
        return out.transpose(1, 2, 0, 3)

    def _ends(self, y: Array) -> list[tuple[int, int]]:
        """Of each side the number of pixels, and the first one of the last step."""
        steps = y.shape[1:3]
        return [
            (n, (m - 1) * self.stride) for n, m in zip(self.pixels, steps, strict=True)
        ]

    def _small(
        self, x: Array, kernel: Array, padding: list[tuple[int, int]], *strides: Any
    ) -> Array:
        """`_conv` for images that may have fewer pixels than the kernel."""
        if 1 < x.shape[1] * x.shape[2] < self.size**2:
            # XLA would swap image and kernel, and has no fast code for that. The
            # barrier hides that part of the image is padding.
            x = jnp.pad(x, [(0, 0), *padding, (0, 0)])
            x, padding = jax.lax.optimization_barrier(x), [(0, 0)] * 2
        return _conv(x, kernel, padding, *strides)

"""Convolution, pooling and normalization layers of convolutional networks, NHWC."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ..plan import Plan
from ..sharding import weight
from .basic import (
    LayerNorm,
    Linear,
    Scaled,
    check_floating,
    single,
    standardized,
    times,
    writable_state,
)
from .convolve import convolve

EPSILON = 1e-5  # added to the variance, as in torch
MOMENTUM = 0.1  # share of the batch in the running statistics, as in torch
DEPTHWISE = "depthwise"  # input axis of a depthwise convolution, of size one


class Conv(Linear):
    """A square convolution, y = multiplier · x * W (+ b).

    Padded by (size - 1) // 2 on every side, as in torch's networks. At stride 2 that
    differs from "SAME" padding.

    The fan-in is size² times the input channels of one group. For a depthwise
    convolution it is size² at every width, so its kernel has the role of an input
    weight: only its outputs grow.

    Args:
      plan: the model's plan; its axis "kernel{size}" has this size.
      size: side of the kernel.
      names: (input axis, output axis). The input axis has the channels of one group,
        e.g. `DEPTHWISE` has one; the number of groups follows from the image.
      stride: step of the output over the input.
      padding: "half", "same" or a number; see `convolve`.
      **more: further arguments of `Linear`.
    """

    def __init__(
        self,
        plan: Plan,
        size: int,
        names: tuple[str, str],
        *,
        stride: int = 1,
        padding: int | str = "half",
        **more: Any,
    ):
        self.stride, self.padding = stride, padding
        spatial = f"kernel{size}"
        super().__init__(plan, (spatial, spatial, *names), inputs=3, **more)

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        kernel = weight(self.kernel, self.dtype)
        y = convolve(x.astype(self.dtype), kernel, self.stride, self.padding)
        return self.finished(y)


class BatchNorm(Scaled):
    """Batch normalization over all axes but the last, with scale and bias.

    As in torch, the batch is normalized by its biased variance, and the running
    variance averages the unbiased one. `model.eval()` normalizes by the running
    statistics. If a batch is sharded over devices, statistics are those of the whole
    batch. Its arguments are those of `Scaled`; epsilon is 1e-5 by default, as in torch.

    Raises:
      ValueError: called in training on one value per channel.

    Source: Ioffe and Szegedy 2015 (arXiv:1502.03167), Algorithms 1 and 2.
    """

    def __init__(self, plan: Plan, name: str, *, epsilon: float = EPSILON, **more: Any):
        super().__init__(plan, name, epsilon=epsilon, **more)
        self.use_running_average = False
        size = plan[name].size
        self.mean = nnx.BatchStat(jnp.zeros(size, jnp.float32))
        self.var = nnx.BatchStat(jnp.ones(size, jnp.float32))

    def __call__(self, x: Float[Array, "b h w n"]) -> Float[Array, "b h w n"]:
        y = x.astype(single(x.dtype))
        if self.use_running_average:
            y, var = y - _spread(self.mean[...].astype(y.dtype), y), self.var[...]
        else:
            y, var = self._centered(y)
        scale, bias = (
            times(weight(p, y.dtype), self.multiplier) for p in (self.scale, self.bias)
        )
        # One factor per channel, computed before the product with all entries.
        scale = scale * jax.lax.rsqrt(var.astype(y.dtype) + self.epsilon)
        return (y * _spread(scale, x) + _spread(bias, x)).astype(x.dtype)

    def _centered(
        self, x: Float[Array, "b h w n"]
    ) -> tuple[Float[Array, "b h w n"], Float[Array, " n"]]:
        """x - E x and Var x of each channel; updates the running statistics."""
        count = x.size // x.shape[-1]
        if count == 1:
            raise ValueError(
                "BatchNorm in training needs more than one value per channel, but got "
                f"x of shape {x.shape}; use a larger batch or image, the CIFAR stem, "
                "or norm='layer'"
            )
        # As in `standardized`, with both means over the batch in one pass.
        center = jax.lax.stop_gradient(x.mean(axis=(0, 1, 2)))
        shifted = x - _spread(center, x)
        offset = shifted.mean(axis=(0, 1, 2))
        var = jnp.maximum((shifted**2).mean(axis=(0, 1, 2)) - offset**2, 0.0)
        for running, new in (
            (self.mean, center + offset),
            (self.var, var * (count / (count - 1))),
        ):
            new = jax.lax.stop_gradient(new).astype(jnp.float32)
            with writable_state():
                running[...] = (1 - MOMENTUM) * running[...] + MOMENTUM * new
        return shifted - _spread(offset, x), var


class InstanceNorm(Scaled):
    """Normalization of each channel of each image over its two spatial axes.

    Its arguments are those of `Scaled`.

    Raises:
      ValueError: called on maps of one pixel, which it would set to zero.

    Source: Bordelon et al. 2023 (arXiv:2309.16620), App. A.2, "LayerNorm applied
    across each two dimensional channel".
    """

    def __call__(self, x: Float[Array, "b h w n"]) -> Float[Array, "b h w n"]:
        if x.shape[1] * x.shape[2] == 1:
            raise ValueError(
                f"norm='instance' would set maps of one pixel to zero; got x of shape "
                f"{x.shape}; use larger images, the CIFAR stem, or norm='layer'"
            )
        y = standardized(x.astype(single(x.dtype)), (1, 2), self.epsilon)
        return self.scaled(y, x.dtype)


class NoNorm(nnx.Module):
    """The identity, in place of a normalization."""

    def __call__(self, x: Float[Array, "b h w n"]) -> Float[Array, "b h w n"]:
        return x


NORMS: dict[str, Callable[..., Callable[[Array], Array]]] = {
    "batch": BatchNorm,
    "layer": LayerNorm,  # over the channels at each position
    "instance": InstanceNorm,  # over the positions of each channel
    "none": lambda *_, **__: NoNorm(),
}


def pool(x: Float[Array, "b h w n"], kind: str) -> Float[Array, "b h2 w2 n"]:
    """Pool 2x2 pixels by maximum or average; an odd last row or column is dropped."""
    of: Callable[..., Array] = {"average": nnx.avg_pool, "max": nnx.max_pool}[kind]
    return of(x, (2, 2), strides=(2, 2))


def stem_pool(x: Float[Array, "b h w n"]) -> Float[Array, "b h2 w2 n"]:
    """Max pooling over 3x3 pixels, padded by one, after ResNet's stem."""
    sides = ((1, 1), (1, 1))
    return jnp.asarray(nnx.max_pool(x, (3, 3), (2, 2), sides))


def half(x: Float[Array, "b h w n"]) -> Float[Array, "b h2 w2 n"]:
    """Average 2x2 pixels; an odd last row or column averages the pixels it has.

    Source: He et al. 2018 (arXiv:1812.01187), Figure 2c.
    """
    odd = [(0, n % 2) for n in x.shape[1:3]]
    return jnp.asarray(nnx.avg_pool(x, (2, 2), (2, 2), odd, count_include_pad=False))


def fan_out_conv(
    plan: Plan,
    size: int,
    names: tuple[str, str],
    *,
    per_group: bool = False,
    **more: Any,
) -> Conv:
    """A `Conv` with weights of variance 2/fan_out at the base.

    Args:
      plan: as of `Conv`.
      size: as of `Conv`.
      names: as of `Conv`.
      per_group: whether the fan-out is that of one group, as in timm's
        EfficientNet. It then is the fan-in.
      **more: further arguments of `Conv`.

    Source: He et al. 2015 (arXiv:1502.01852), eq. 14.
    """
    ratio = 1.0 if per_group else plan[names[0]].base / plan[names[1]].base
    return Conv(plan, size, names, gain=(2 * ratio) ** 0.5, **more)


def check_images(x: Float[Array, "..."], channels: int) -> None:
    """Raise a `ValueError` unless x is a batch of images with this many channels."""
    if x.ndim != 4 or x.shape[-1] != channels:
        raise ValueError(
            f"x has shape {x.shape}; expected (batch, height, width, {channels}), with "
            "the channels last; for other images create the model with "
            f"input_shape=(height, width, {x.shape[-1]})"
        )
    check_floating(x)


def _spread(vector: Float[Array, " n"], x: Float[Array, "b h w n"]) -> Array:
    return jnp.broadcast_to(vector, x.shape)

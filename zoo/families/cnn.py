"""`CNN`: the residual convolutional network of Bordelon et al. 2023, App. A.1."""

import dataclasses
import functools
import itertools
import math
from typing import Literal

from flax import nnx
from jaxtyping import Array, Float

from ..family import Count, ImageShape, ResidualOptions
from ..layers.basic import (
    ACTIVATIONS,
    Dense,
    Nonlinearity,
    check_activation,
    scan,
    stack,
    warn_of_drift,
)
from ..layers.conv import Conv, check_images, pool
from ..layers.stages import Staged
from ..registry import Record, register

STAGES = 4  # three poolings, after each of which the channels double


class Block(nnx.Module):
    """x + a M^-α · W * φ(x), or x + a M^-α · φ(W * x) without `activation_first`."""

    def __init__(
        self,
        conv: Conv,
        *,
        branch: float,
        nonlinearity: str,
        activation_first: bool,
    ):
        self.conv = conv
        self.branch = branch
        self.nonlinearity = nonlinearity
        self.activation_first = activation_first

    def __call__(self, x: Float[Array, "b h w n"]) -> Float[Array, "b h w n"]:
        phi = ACTIVATIONS[self.nonlinearity]
        h = self.conv(phi(x)) if self.activation_first else phi(self.conv(x))
        return x + self.branch * h


@dataclasses.dataclass(frozen=True, kw_only=True)
class CNNOptions(ResidualOptions):
    """Options of `CNN`; see there."""

    input_shape: ImageShape = (32, 32, 3)
    out_features: Count = 10
    nonlinearity: Nonlinearity = "relu"
    activation_first: bool = True
    pooling: Literal["average", "max"] = "average"
    global_pool: bool = False
    count_pooling: bool = False
    zero_init: bool = False


class CNN(Staged, options=CNNOptions):
    """h^{l+1} = h^l + a M^-α · W^l * φ(h^l), h^1 = W^0 * x, f = w φ(h^L).

    All convolutions are 3x3 at stride 1. At three places, after blocks floor(L/4),
    floor(L/2) and floor(3L/4), the map is pooled over 2x2 pixels, and a convolution
    outside the branches doubles the channels. The last map is flattened and read out.

    Args:
      width: channels of the last map, 8 times those of the first.
      input_shape: (height, width, channels) of an image; 8x8 pixels at least.
      out_features: number of classes.
      nonlinearity: "relu", "abs", "gelu" or "identity".
      activation_first: apply the nonlinearity before the weights and before the
        readout, as in eq. 1. False: apply it after the weights of each branch; its mean
        then adds up over blocks, and a `ModelWarning` says so if α < 1.
      pooling: "average" or "max"; App. A.1 mentions both.
      global_pool: average the last map instead of flattening it, so that images may
        have any size.
      count_pooling: use M = (depth + 3) / (base_depth + 3), which counts the three
        convolutions after the poolings as layers, as in the experiments of App. A.1.
      zero_init: initialize the convolution of each branch with zeros.

    Raises:
      ValueError: a size is not a positive whole number, the width is not a multiple of
        8, images are too small to be pooled three times, a name is unknown, or
        zero_init is combined with a final nonlinearity that is flat at zero.

    Source: Bordelon et al. 2023 (arXiv:2309.16620), eq. 1 and App. A.1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("cnn", width=8, depth=4, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((5, 32, 32, 3))).shape
      (5, 10)
    """

    def build(self, options: CNNOptions, rngs: nnx.Rngs) -> None:
        check_activation(
            options.nonlinearity,
            first=options.activation_first,
            zero_init=options.zero_init,
        )
        input_shape = options.input_shape
        if min(input_shape[:2]) < 8:
            raise ValueError(
                f"input_shape={input_shape} must be (height, width, channels) with at "
                "least 8x8 pixels, which are pooled three times"
            )
        pixels = (input_shape[0] // 8) * (input_shape[1] // 8)
        multiples = {f"stage{i}": 2.0 ** (i - STAGES) for i in range(1, STAGES + 1)}
        self.plan = options.plan(
            growing={
                **multiples,
                **{f"mid{name[-1]}": size for name, size in multiples.items()},
            },
            fixed={
                "kernel3": 3,
                "channels": input_shape[2],
                "pixels": pixels,
                "classes": options.out_features,
            },
        )
        depth, base_depth = options.depth, options.tuned_depth
        if options.count_pooling:
            poolings = STAGES - 1
            ratio = (depth + poolings) / (base_depth + poolings)
            self.plan = dataclasses.replace(self.plan, depth=ratio)
        warn_of_drift(
            "cnn",
            "activation_first=True",
            nonlinearity=options.nonlinearity,
            alpha=self.plan.parametrization.alpha,
            last=not options.activation_first,
        )
        self.input_shape, self.channels = tuple(input_shape), input_shape[2]
        self.nonlinearity = options.nonlinearity
        self.activation_first = options.activation_first
        self.pooling = options.pooling
        self.global_pool = options.global_pool
        self.remat = options.remat

        def block(stage: int, rngs: nnx.Rngs) -> Block:
            conv = Conv(
                self.plan,
                3,
                (f"stage{stage}", f"mid{stage}"),
                in_branch=True,
                init="zeros" if options.zero_init else "fan_in",
                rngs=rngs,
            )
            return Block(
                conv,
                branch=self.plan.branch,
                nonlinearity=options.nonlinearity,
                activation_first=options.activation_first,
            )

        self.readin = Conv(self.plan, 3, ("channels", "stage1"), rngs=rngs)
        stages: list[nnx.Module | None] = []
        doubling = []
        counts = zip(_counts(depth), _counts(base_depth), strict=True)
        for i, (count, base_count) in enumerate(counts, start=1):
            if i > 1:
                names = (f"stage{i - 1}", f"stage{i}")
                doubling.append(Conv(self.plan, 3, names, rngs=rngs))
            # Below depth 4 a stage can be empty.
            stages.append(
                stack(functools.partial(block, i), count, rngs, base_depth=base_count)
                if count
                else None
            )
        self.stages = nnx.List(stages)
        self.doubling = nnx.List(doubling)
        summed = ("stage4",) if options.global_pool else ("pixels", "stage4")
        self.readout = Dense(
            self.plan, (*summed, "classes"), inputs=len(summed), rngs=rngs
        )

    def features(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch *rest"]:
        """Features before the readout.

        Returns:
          The last map, of shape (batch, pixels, width); with `global_pool=True` its
          mean over pixels, of shape (batch, width).
        """
        x = self._map(x)
        if self.activation_first:
            x = ACTIVATIONS[self.nonlinearity](x)
        x = x.reshape(x.shape[0], math.prod(x.shape[1:3]), x.shape[-1])
        return x.mean(axis=1) if self.global_pool else x

    def _map(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 n"]:
        """The residual stream at the end."""
        check_images(x, self.channels)
        if not self.global_pool and x.shape[1:] != self.input_shape:
            raise ValueError(
                f"images of shape {x.shape[1:]} do not fit input_shape="
                f"{self.input_shape}; with global_pool=True any size does"
            )
        x = self.readin(x)
        for i, blocks in enumerate(self.stages):
            if i:
                x = self.doubling[i - 1](pool(x, self.pooling))
            if blocks is not None:
                x = scan(blocks, x, remat=self.remat)
        return x


def _counts(depth: int) -> list[int]:
    """Numbers of blocks before, between and after the three poolings."""
    ends = [stage * depth // STAGES for stage in range(STAGES + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


register(Record(model=CNN, sizes={"cnn": {}}))

"""Convolutional networks with stages: a stage, and the base class of the networks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from ..family import Count, Family, ImageShape, Remat, ResidualOptions
from .basic import ACTIVATIONS, call, scan, stack
from .conv import Conv, check_images, half
from .squeeze import SqueezeExcite


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageOptions(ResidualOptions):
    """Options of every network of stages.

    Attributes:
      input_shape: (height, width, channels) of an image. Images of any size are
        accepted.
      out_features: number of classes.
    """

    input_shape: ImageShape = (224, 224, 3)
    out_features: Count = 1000


class Projection(nnx.Module):
    """The shortcut of a block whose output has another shape: a 1x1 convolution.

    It has the stride, or follows an average over 2x2 pixels.
    """

    def __init__(
        self, conv: Conv, norm: Callable[[Array], Array], *, average: bool = False
    ):
        self.average = average
        self.conv = conv
        self.norm = norm

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        return self.norm(self.conv(half(x) if self.average else x))


class ConvBlock(nnx.Module):
    """φ(shortcut(x) + a M^-α · branch(x)), where the branch is a chain of convolutions.

    Each is normalized, and the nonlinearity stands between them.

    Args:
      convs: the convolutions.
      norms: of their outputs.
      branch: the factor a M^-α.
      nonlinearity: a name of `ACTIVATIONS`.
      after: where the nonlinearity also stands: "sum", "branch", or "" for nowhere.
      se: squeeze-and-excitation; None for none.
      se_before: the number of the convolution that it precedes; their number for the
        end of the branch.
      shortcut: a projection of x; None for x itself.
      residual: False: the block is its branch alone, without the factor.
    """

    def __init__(
        self,
        convs: Sequence[Conv],
        norms: Sequence[Callable[[Array], Array]],
        *,
        branch: float,
        nonlinearity: str = "relu",
        after: str = "sum",
        se: SqueezeExcite | None = None,
        se_before: int = 0,
        shortcut: Projection | None = None,
        residual: bool = True,
    ):
        self.branch = branch
        self.nonlinearity, self.after = nonlinearity, after
        self.residual = residual
        self.convs, self.norms = nnx.List(convs), nnx.List(norms)
        self.se, self.se_before = se, se_before
        self.shortcut = shortcut

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        φ, h, count = ACTIVATIONS[self.nonlinearity], x, len(self.convs)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if self.se is not None and i == self.se_before:
                h = self.se(h)
            h = norm(conv(h))
            if i < count - 1 or self.after == "branch":
                h = φ(h)
        if self.se is not None and self.se_before == count:
            h = self.se(h)
        if not self.residual:
            return h
        x = x if self.shortcut is None else self.shortcut(x)
        x = x + self.branch * h
        return φ(x) if self.after == "sum" else x


class Stage(nnx.Module):
    """The first block, which may change the shape, and a stack of identical blocks.

    Args:
      first: the first block.
      rest: the other blocks, stacked along a leading axis; None for no others.
      remat: as of `scan`.
    """

    def __init__(self, first: nnx.Module, rest: nnx.Module | None, *, remat: Remat):
        self.first = first
        self.rest = rest
        self.remat = remat

    @classmethod
    def of(
        cls,
        build: Callable[[int, nnx.Rngs], nnx.Module],
        count: int,
        options: ResidualOptions,
        rngs: nnx.Rngs,
    ) -> "Stage":
        """Build a stage.

        Args:
          build: builds its first block for 0, any other for 1.
          count: number of blocks at depth 1.
          options: of the family.
        """
        first, more = build(0, rngs), options.depth * count - 1
        rest = None
        if more:
            base = options.tuned_depth * count - 1
            rest = stack(functools.partial(build, 1), more, rngs, base_depth=base)
        return cls(first, rest, remat=options.remat)

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        x = call(self.first, x, remat=self.remat)
        return x if self.rest is None else scan(self.rest, x, remat=self.remat)


class Staged(Family):
    """A convolutional network: an entry, stages one after another, and a readout.

    A subclass sets `channels` (of its images), `stages` and `readout` in `build`. It
    defines `_enter`, the layers before the first stage, or `_map` if there are layers
    between stages.
    """

    channels: int
    stages: nnx.List[Any]

    def features(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch *n"]:
        """Features before the readout: the mean over pixels of the last stage.

        Returns:
          Features of shape (batch, channels of the last stage).
        """
        return self._map(x).mean(axis=(1, 2))

    def _map(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 n"]:
        """The output of the last stage."""
        check_images(x, self.channels)
        shape, x = x.shape, self._enter(x)
        for stage in self.stages:
            x = stage(x)
        if not x.size:
            raise ValueError(
                f"images of {shape[1]} x {shape[2]} pixels are too small: no pixel is "
                f"left after {len(self.stages)} stages; use larger images"
            )
        return x

    def _enter(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 n"]:
        """Apply the layers before the first stage."""
        raise NotImplementedError(f"{type(self).__name__} defines no _enter method")


def last_norm_factor(model: Staged, path: str) -> float:
    """The branch's multiplier for the parameters of the last norm of a branch, else 1.

    Args:
      model: whose stages have blocks of `ConvBlock`.
      path: of a parameter.
    """
    parts = path.split("/")
    if parts[0] != "stages":
        return 1.0
    block = getattr(model.stages[int(parts[1])], parts[2])
    is_last = parts[3:5] == ["norms", str(len(block.norms) - 1)]
    return block.branch if is_last and block.residual else 1.0

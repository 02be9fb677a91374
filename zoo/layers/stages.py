"""Convolutional networks with stages: a stage, and the base class of the networks."""

from collections.abc import Sequence

from flax import nnx
from jaxtyping import Array, Float

from ..family import Family
from .basic import Dense, call, numbers_of_blocks, scan, single
from .conv import check_images


class Stage(nnx.Module):
    """The first block, which may change the shape, and a stack of identical blocks.

    Args:
      first: the first block.
      rest: the other blocks, stacked along a leading axis; None for no others.
      remat: recompute blocks in the backward pass.
    """

    def __init__(self, first: nnx.Module, rest: nnx.Module | None, *, remat: bool):
        self.first = first
        self.rest = rest
        self.remat = remat

    def __call__(self, x: Float[Array, "b h w m"]) -> Float[Array, "b h2 w2 n"]:
        x = call(self.first, x, remat=self.remat)
        return x if self.rest is None else scan(self.rest, x, remat=self.remat)


class Staged(Family):
    """A convolutional network: an entry, stages one after another, and a readout.

    A subclass sets `channels` (of its images), `stages` and `readout` in `build`, and
    defines `features`. It also defines `_enter`, the layers before the first stage, or
    `_maps` if there are layers between stages.
    """

    channels: int
    stages: nnx.List
    readout: Dense

    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch out"]:
        logits = self.readout(self.features(x)) * self.plan.output
        return logits.astype(single(logits.dtype))

    def features(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch *n"]:
        """Features before the readout.

        Args:
          x: images, as in a call.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no features method")

    def intermediates(
        self, x: Float[Array, "batch h w c"], blocks: Sequence[int] | None = None
    ) -> tuple[Float[Array, "batch h2 w2 n"], ...]:
        """The output of some of the stages.

        Args:
          x: images, as in a call.
          blocks: indices of stages, from 0, or negative from the end; None for all. The
            rows of an `EfficientNet` with the same `stage` are one stage.

        Returns:
          For each stage an array of shape (batch, height, width, channels).

        Raises:
          ValueError: an index is out of range.
        """
        ends = self._ends()
        numbers = numbers_of_blocks(blocks, len(ends))
        maps = self._maps(x)
        return tuple(maps[ends[number]] for number in numbers)

    def _ends(self) -> list[int]:
        """For each stage the index of its map, the last one of several."""
        return list(range(len(self.stages)))

    def _maps(
        self, x: Float[Array, "batch h w c"]
    ) -> list[Float[Array, "batch h2 w2 n"]]:
        """The output of every stage."""
        check_images(x, self.channels)
        shape, x = x.shape, self._enter(x)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        if not x.size:
            raise ValueError(
                f"images of {shape[1]} x {shape[2]} pixels are too small: no pixel is "
                f"left after {len(maps)} stages; use larger images"
            )
        return maps

    def _enter(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 n"]:
        """Apply the layers before the first stage."""
        raise NotImplementedError(f"{type(self).__name__} defines no _enter method")

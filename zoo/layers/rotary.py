"""Positions: rotary embedding of queries and keys, and tables for other images."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .basic import single


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotate the pairs (i, i + d/2) of a head's entries by position · frequency.

    Attributes:
      theta: frequency i is theta^(-2i/d).
      scaling: None, or (factor, low, high, context) as in Llama 3: frequencies of
        fewer than `low` periods in `context` tokens are divided by `factor`, those of
        more than `high` are kept, and between them the two are mixed linearly.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 15 and 34.

    Examples:
      >>> Rotary(10000.0).frequencies(4).tolist()
      [1.0, 0.01]
    """

    theta: float = 10000.0
    scaling: tuple[float, float, float, float] | None = None

    def __post_init__(self) -> None:
        if self.scaling is not None:
            if len(self.scaling) != 4 or not all(number > 0 for number in self.scaling):
                raise ValueError(
                    f"rope_scaling={self.scaling!r} must be four positive numbers: "
                    "(factor, low, high, context)"
                )
            if self.scaling[1] >= self.scaling[2]:
                raise ValueError(
                    f"rope_scaling={self.scaling!r}: low (the second number) must be "
                    "below high (the third)"
                )

    def frequencies(self, head_dim: int) -> Float[np.ndarray, " half"]:
        """Radians per token of each pair, in float64.

        Raises:
          ValueError: an odd head_dim, or one of more than a million.
        """
        if head_dim % 2 or head_dim > 2**20:
            raise ValueError(
                f"head_dim={head_dim} must be even and at most 1,048,576: rotary "
                "positions turn pairs of entries"
            )
        kept = self.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        if self.scaling is None:
            return kept
        factor, low, high, context = self.scaling
        periods = context * kept / (2 * math.pi)
        share = np.clip((periods - low) / (high - low), 0, 1)
        return kept * (share + (1 - share) / factor)

    def rotate(
        self,
        x: Float[Array, "batch time heads head_dim"],
        positions: Int[Array, "#batch time"],
    ) -> Float[Array, "batch time heads head_dim"]:
        """Rotate queries or keys by their positions; angles in float32 or wider.

        Args:
          x: queries or keys.
          positions: of the tokens, from 0.
        """
        dtype = single(x.dtype)
        frequencies = jnp.asarray(self.frequencies(x.shape[-1]), dtype)
        return turn(x, positions.astype(dtype)[..., None] * frequencies[None, None])


def turn(
    x: Float[Array, "batch time heads head_dim"],
    angles: Float[Array, "time half"] | Float[Array, "#batch time half"],
) -> Float[Array, "batch time heads head_dim"]:
    """Rotate the pairs (i, i + d/2) of each token's entries by its angles.

    Args:
      x: queries or keys.
      angles: in radians; with a leading axis, they differ between sequences.
    """
    dtype = single(x.dtype)
    angles = (angles if angles.ndim == 3 else angles[None]).astype(dtype)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def grid_angles(
    grid: tuple[int, int],
    head_dim: int,
    *,
    theta: float = 100.0,
    prefix: int = 0,
) -> Float[np.ndarray, "time half"]:
    """Rotation angles of patches by their position in an image (DINOv3).

    The centers of the patches lie in [-1, 1] along each side. The first half of a
    head's pairs is rotated by 2π · row · theta^(-4i/d), the second half by the columns.

    Args:
      grid: (rows, columns) of patches.
      head_dim: d.
      theta: base of the frequencies.
      prefix: number of tokens before the patches; their angles are zero.

    Raises:
      ValueError: head_dim is not a multiple of 4.

    Source: Siméoni et al. 2025, arXiv:2508.10104, section 3.2.

    Examples:
      >>> grid_angles((1, 2), 4, prefix=1).round(2).tolist()  # 2π · (0, ∓1/2)
      [[0.0, 0.0], [0.0, -3.14], [0.0, 3.14]]
    """
    if head_dim % 4:
        raise ValueError(
            f"head_dim={head_dim} must be a multiple of 4: rotary positions of images "
            "turn pairs of entries by rows and by columns"
        )
    frequencies = theta ** -(np.arange(0, head_dim, 4) / head_dim)
    sides = [2 * math.pi * (2 * (np.arange(n) + 0.5) / n - 1) for n in grid]
    places = np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 2)
    angles = places[:, :, None] * frequencies
    angles = angles.reshape(len(places), -1)
    return np.concatenate([np.zeros((prefix, angles.shape[1])), angles])


def resize_positions(
    table: Float[Array, "positions n"],
    before: tuple[int, int],
    after: tuple[int, int],
) -> Float[Array, "positions2 n"]:
    """Interpolate a table of positions from one grid of patches to another.

    Args:
      table: the position of the class token, if it has one, and those of the patches.
      before: (rows, columns) of the table's patches.
      after: (rows, columns) of the result's.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.2; cubic, as timm.
    """
    n = table.shape[-1]
    first = table.shape[0] - before[0] * before[1]
    patches = table[first:].reshape(*before, n)
    patches = jax.image.resize(patches, (*after, n), "cubic").reshape(-1, n)
    return jnp.concatenate([table[:first], patches])

"""The statistics of pixels, and their normalization."""

import jax
import numpy as np
from jaxtyping import Array, Float, UInt8


def pixel_statistics(
    images: UInt8[np.ndarray, "n height width channels"],
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the pixels (1 where it is 0), each (channels,)."""
    # Integer sums are exact, and need no float copy of the images.
    pixels = images.size // images.shape[-1]
    mean = images.sum((0, 1, 2), dtype=np.int64) / pixels
    squares = np.einsum("nhwc,nhwc->c", images, images, dtype=np.int64)
    variance = squares / pixels - mean**2
    std = np.where(variance > 0, np.sqrt(variance), 1)
    return mean.astype(np.float32), std.astype(np.float32)


def normalize(
    images: UInt8[Array, "*batch channels"] | np.ndarray,
    mean: Float[np.ndarray, " channels"],
    std: Float[np.ndarray, " channels"],
) -> Float[Array, "*batch channels"]:
    """Maps raw pixels to float32 of mean 0 and standard deviation 1."""
    # An explicit shape, for callers that disable implicit rank promotion.
    shape = (1,) * (images.ndim - 1) + (-1,)
    shifted = jax.numpy.asarray(images, np.float32) - np.reshape(mean, shape)
    return shifted / np.reshape(std, shape)

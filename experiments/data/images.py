"""Image datasets in memory, and the normalization of pixels."""

import jax
import numpy as np
from jaxtyping import Array, Float, Integer, UInt8


class ImageData:
    """A labelled image dataset in memory.

    Args:
      name: as in TFDS.
      train: raw pixels, shape (train, height, width, channels), and classes
        0..num_classes-1, shape (train,).
      test: likewise.
      num_classes: number of classes.
      labels: names of the classes, if they have any.
      white: the raw value of a white pixel.

    Attributes:
      train_images, train_labels, test_images, test_labels: the arrays.
      mean: mean pixel of the training images, shape (channels,); 0..255 for
        photographs, 0..16 for digits.
      std: standard deviation of the pixels (1 where it is 0), shape (channels,).
    """

    def __init__(
        self,
        name: str,
        train: tuple[UInt8[np.ndarray, "n h w channels"], Integer[np.ndarray, " n"]],
        test: tuple[UInt8[np.ndarray, "m h w channels"], Integer[np.ndarray, " m"]],
        num_classes: int,
        labels: tuple[str, ...] | None = None,
        white: int = 255,
    ):
        self.name, self.num_classes, self.labels = name, num_classes, labels
        self.white = white
        self.train_images, self.train_labels = train[0], train[1].astype(np.int32)
        self.test_images, self.test_labels = test[0], test[1].astype(np.int32)
        self.mean, self.std = pixel_statistics(self.train_images)


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

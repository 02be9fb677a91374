"""Where images come from: arrays, prepared files, or nowhere."""

import dataclasses
from typing import Any, Protocol

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Int32, UInt8

from ..errors import UserError


class Source(Protocol):
    """Labelled images by number."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> tuple[Any, Int32[np.ndarray, " batch"]]:
        """The images and labels of these numbers, read at once.

        Images are one array, uint8 (batch, height, width, channels), or a list of
        files' contents, not decoded yet.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """Images in memory.

    Attributes:
      images: shape (n, height, width, channels).
      labels: shape (n,).
    """

    images: UInt8[np.ndarray, "n height width channels"]
    labels: Int32[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.labels)

    def read(
        self, indices: np.ndarray
    ) -> tuple[UInt8[np.ndarray, "b height width channels"], Int32[np.ndarray, " b"]]:
        return self.images[indices], self.labels[indices]


class Records:
    """A split of a prepared TFDS dataset of ArrayRecord files, read as it is needed.

    Args:
      builder: the dataset.
      split: its split, or a slice of it: "train[:90%]".
      keys: the features that hold image and label.

    Raises:
      NotImplementedError: the files are not ArrayRecord.
    """

    def __init__(
        self, builder: tfds.core.DatasetBuilder, split: str, keys: tuple[str, str]
    ):
        self._image, self._label = keys
        # We decode with Pillow ourselves: TFDS would do the same, with a warning.
        self._records: Any = builder.as_data_source(
            split, decoders={self._image: tfds.decode.SkipDecoding()}
        )

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: np.ndarray) -> tuple[list[bytes], Int32[np.ndarray, " b"]]:
        # A list at once: one by one takes ArrayRecord two to three times as long.
        examples = self._records.__getitems__(indices.tolist())
        labels = np.array([e[self._label] for e in examples], np.int32)
        return [e[self._image] for e in examples], labels


class Noise:
    """Images of uniform noise that mean nothing, for compiling, timing and dry runs.

    Each is a window of one buffer of random bytes, at a place that its number gives:
    as quick as copying, the same in every process, and distinct.

    Args:
      n: how many.
      shape: (height, width, channels).
      num_classes: image i is of class i mod num_classes.
      seed: of the noise.
    """

    def __init__(
        self, n: int, shape: tuple[int, int, int], num_classes: int, seed: int
    ):
        self._n, self._shape, self._classes = n, shape, num_classes
        self._size = int(np.prod(shape))
        rng = np.random.Generator(np.random.Philox(seed))
        self._bytes = rng.integers(0, 256, self._size + n, np.uint8)

    def __len__(self) -> int:
        return self._n

    def read(
        self, indices: np.ndarray
    ) -> tuple[UInt8[np.ndarray, "b height width channels"], Int32[np.ndarray, " b"]]:
        images = np.stack([self._bytes[i : i + self._size] for i in indices])
        labels = (indices % self._classes).astype(np.int32)
        return images.reshape(-1, *self._shape), labels


def parse_fake(name: str) -> tuple[tuple[int, int, int], int]:
    """((height, width, channels), classes) of a name such as "fake:224x224x3:1000".

    Raises:
      UserError: the name has another form.

    >>> parse_fake("fake:224x224x3:1000")
    ((224, 224, 3), 1000)
    """
    try:
        _, sizes, classes = name.split(":")
        height, width, channels = (int(size) for size in sizes.split("x"))
        if min(height, width, int(classes)) < 1 or channels not in (1, 3):
            raise ValueError
    except ValueError:
        raise UserError(
            f"{name!r} is not understood; write fake:HEIGHTxWIDTHxCHANNELS:CLASSES, "
            "such as fake:224x224x3:1000, with 1 or 3 channels."
        ) from None
    return (height, width, channels), int(classes)

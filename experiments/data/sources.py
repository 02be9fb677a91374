"""Sources of images: arrays, prepared files, noise."""

import contextlib
import dataclasses
import io
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Protocol, cast

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Int32, UInt8
from PIL import Image, UnidentifiedImageError

from .. import memory
from ..errors import UserError, reason
from . import intact
from .augment import Transform

# (height, width, channels) of images; None for sizes that differ.
Shape = tuple[int | None, int | None, int | None]


class Source(Protocol):
    """Labelled images by index."""

    @property
    def shape(self) -> Shape: ...

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> tuple[Any, Int32[np.ndarray, " batch"]]:
        """The images and labels of several indices.

        Images are an array, uint8 (batch, height, width, channels), or a list of such
        images and encoded files.
        """


class Encoded(Source, Protocol):
    """A source of encoded files."""

    def check(self, picture: Image.Image) -> None:
        """Check a picture before it is decoded, and turn it upright where needed."""

    def undecodable(self, k: int, error: Exception) -> str:
        """The message for image `k`, which cannot be decoded."""


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """Images in memory, shape (n, height, width, channels), and labels, shape (n,)."""

    images: UInt8[np.ndarray, "n height width channels"]
    labels: Int32[np.ndarray, " n"]

    @property
    def shape(self) -> tuple[int, int, int]:
        _, height, width, channels = self.images.shape
        return height, width, channels

    def __len__(self) -> int:
        return len(self.labels)

    def read(
        self, indices: np.ndarray
    ) -> tuple[UInt8[np.ndarray, "b height width channels"], Int32[np.ndarray, " b"]]:
        return self.images[indices], self.labels[indices]


class Records:
    """A split of a TFDS dataset of ArrayRecord files.

    Attributes:
      folder: of the dataset's version.

    Args:
      builder: of the dataset.
      split: a split or slice, e.g. "train[:90%]".
      keys: the features of image and label.

    Raises:
      NotImplementedError: the files are not ArrayRecord.
    """

    def __init__(
        self, builder: tfds.core.DatasetBuilder, split: str, keys: tuple[str, str]
    ):
        self._image, self._label = keys
        self._split = split
        self.folder = os.fspath(builder.data_dir)
        features = builder.info.features
        self.shape: Shape = features[self._image].shape
        self._classes = features[self._label].num_classes
        files = builder.info.splits[split].file_instructions
        self._files = [pathlib.Path(os.fspath(file.filename)) for file in files]
        self._ends = np.cumsum([file.take for file in files])
        for path, file in zip(self._files, files, strict=True):
            intact.check_file(path, file.examples_in_shard, len(files))
        # Decoded with Pillow below; TFDS would do the same, with a warning.
        self._records: Any = builder.as_data_source(
            split, decoders={self._image: tfds.decode.SkipDecoding()}
        )

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: np.ndarray) -> tuple[list[bytes], Int32[np.ndarray, " b"]]:
        try:
            examples = self._records.__getitems__(indices.tolist())
        except Exception as error:  # of ArrayRecord or TFDS
            raise UserError(intact.broken(self._damaged(indices), error)) from error
        labels = np.array([e[self._label] for e in examples], np.int32)
        if (labels == -1).any():
            raise UserError(f"{self.folder}: {intact.no_labels(self._split)}")
        intact.check_labels(self.folder, labels, self._classes)
        return [e[self._image] for e in examples], labels

    def is_labelled(self) -> bool:
        """Whether the first example has a label; TFDS writes -1 for none."""
        try:
            return bool(self._records[0][self._label] != -1)
        except Exception:  # of damaged files; `read` names the file
            return True

    def check(self, picture: Image.Image) -> None:
        size = picture.height, picture.width, len(picture.getbands())
        intact.check_picture(self.folder, size, self.shape)

    def undecodable(self, k: int, error: Exception) -> str:
        return (
            f"Image {k} of the split {self._split!r} in {self.folder} cannot be "
            f"decoded ({why(error)}); prepare the dataset again."
        )

    def _damaged(self, indices: np.ndarray) -> pathlib.Path:
        """The file with the first record that cannot be read."""
        file_numbers = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(file_numbers):
            try:
                self._records.__getitems__(indices[file_numbers == number].tolist())
            except Exception:
                return self._files[number]
        return self._files[file_numbers.min()]


def why(error: Exception) -> str:
    """Why Pillow cannot decode an image."""
    if isinstance(error, UnidentifiedImageError):  # it would name a buffer in memory
        return "it is in no known format"
    return reason(error)


class Noise:
    """Uniform noise, for compiling, timing and dry runs.

    Image i is a window at place i of one buffer of random bytes. Its label is i mod
    `num_classes`.
    """

    def __init__(
        self, n: int, shape: tuple[int, int, int], num_classes: int, seed: int
    ):
        self._n, self.shape, self._classes = n, shape, num_classes
        self._size = math.prod(shape)
        memory.check(self._size + n, "the noise", "make the images smaller")
        rng = np.random.Generator(np.random.Philox(seed))
        self._bytes = rng.integers(0, 256, self._size + n, np.uint8)

    def __len__(self) -> int:
        return self._n

    def read(
        self, indices: np.ndarray
    ) -> tuple[UInt8[np.ndarray, "b height width channels"], Int32[np.ndarray, " b"]]:
        images = np.stack([self._bytes[i : i + self._size] for i in indices])
        labels = (indices % self._classes).astype(np.int32)
        return images.reshape(-1, *self.shape), labels


@dataclasses.dataclass(frozen=True, eq=False)
class ImageLoad:
    """Loads a batch of images by index. Worker processes can pickle it.

    Attributes:
      name: of the dataset and split, for messages.
      source: of the images.
      transform: of an image; None for those of an array that stay as they are.
      shape: (height, width, channels) of the result.
    """

    name: str
    source: Source
    transform: Transform | None
    shape: tuple[int, int, int]

    def __call__(self, indices: np.ndarray, u: np.ndarray) -> dict[str, np.ndarray]:
        images, labels = self.source.read(indices)
        if self.transform is None:
            return {"image": np.asarray(images), "label": labels}
        out = np.empty((len(labels), *self.shape), np.uint8)
        for row, k, image, draws in zip(out, indices, images, u.tolist(), strict=True):
            with self._opened(image, k) as picture:
                pixels = np.asarray(self.transform(picture, draws))
            row[...] = pixels.reshape(self.shape)
        return {"image": out, "label": labels}

    @contextlib.contextmanager
    def _opened(self, image: np.ndarray | bytes, k: int) -> Iterator[Image.Image]:
        if not isinstance(image, bytes):
            yield Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
            return
        source = cast(Encoded, self.source)
        try:
            with Image.open(io.BytesIO(image)) as picture:
                source.check(picture)
                yield picture
        except UserError:
            raise
        # Pillow raises OSError, SyntaxError, ValueError and more for damaged files.
        except Exception as error:
            raise UserError(source.undecodable(int(k), error)) from error


def parse_fake(name: str) -> tuple[tuple[int, int, int], int]:
    """((height, width, channels), classes) of a name such as "fake:224x224x3:1000".

    Raises:
      UserError: the name has another form.

    Examples:
      >>> parse_fake("fake:224x224x3:1000")
      ((224, 224, 3), 1000)
    """
    try:
        _, sizes, classes = name.split(":")
        height, width, channels = (int(size) for size in sizes.split("x"))
        if min(height, width) < 1 or channels not in (1, 3):
            raise ValueError
        if not 1 <= int(classes) < 2**31:  # labels are int32
            raise ValueError
    except ValueError:
        raise UserError(
            f"{name!r} is not a dataset of noise; write "
            "fake:HEIGHTxWIDTHxCHANNELS:CLASSES with 1 or 3 channels, e.g. "
            "fake:224x224x3:1000"
        ) from None
    return (height, width, channels), int(classes)

"""Sources of images: arrays, encoded files, noise."""

import contextlib
import dataclasses
import io
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast

import numpy as np
from jaxtyping import Int32, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from mupax.zoo.weights.files import open_regular, read_bytes

from .. import memory
from ..errors import UserError, reason
from .augment import GREY, Transform

_LARGEST = 2**30  # bytes of an image file
_SCANNED = 100_000  # image files whose headers are read for their sizes
_ORIENTATION = 0x0112  # tag of EXIF; from 5 on, width and height are exchanged

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

    def turn(self, picture: Image.Image) -> None:
        """Turn a picture upright where its file says how."""

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


@dataclasses.dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files, or arrays of different sizes, of one split."""

    images: Any
    labels: np.ndarray
    shape: Shape = (None, None, 3)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: np.ndarray) -> tuple[list[Any], np.ndarray]:
        return [self._content(int(k)) for k in indices], self.labels[indices]

    def _content(self, k: int) -> bytes | np.ndarray:
        image = self.images[k]
        if isinstance(image, Mapping) and image.get("bytes") is not None:
            return image["bytes"]
        if not isinstance(image, str | Mapping):
            return image
        path = image if isinstance(image, str) else image["path"]
        try:
            return read_bytes(pathlib.Path(path), _LARGEST)
        except (OSError, ValueError) as error:
            raise UserError(self.undecodable(k, error)) from None

    def turn(self, picture: Image.Image) -> None:
        """Turn a photograph upright."""
        ImageOps.exif_transpose(picture, in_place=True)

    def undecodable(self, k: int, error: Exception) -> str:
        image = self.images[k]
        path = image.get("path") if isinstance(image, Mapping) else image
        what = path if isinstance(path, str) else f"image {k}"
        return f"{what} cannot be read as an image ({why(error)}); replace or remove it"

    def header(self, k: int) -> tuple[int, int, bool]:
        """Height and width as `turn` leaves them, and whether the image is grey."""
        image = self.images[k]
        if isinstance(image, np.ndarray):
            return *image.shape[:2], image.shape[2] == 1
        try:
            # Only the beginning of a file is read.
            if isinstance(image, str):
                source: Any = open_regular(pathlib.Path(image))
            else:
                source = io.BytesIO(cast(bytes, self._content(k)))
            with source, Image.open(source) as picture:
                width, height = picture.size
                # Pillow would decode a PNG file for its EXIF data.
                known = picture.format != "PNG" or "exif" in picture.info
                if known and picture.getexif().get(_ORIENTATION, 1) >= 5:
                    width, height = height, width
                grey = picture.mode in GREY and not picture.has_transparency_data
                return height, width, grey
        except Exception as error:  # of Pillow: OSError, SyntaxError, ValueError, ...
            raise UserError(self.undecodable(k, error)) from None


def common_shape(sources: Sequence[ImageFiles]) -> Shape:
    """Height and width, if they are the same for all images, and 1 or 3 channels."""
    if sum(map(len, sources)) > _SCANNED:
        return None, None, 3
    with ThreadPoolExecutor(8) as pool:
        found = [x for s in sources for x in pool.map(s.header, range(len(s)))]
    sizes = {(height, width) for height, width, _ in found}
    channels = 1 if all(grey for _, _, grey in found) else 3
    height, width = sizes.pop() if len(sizes) == 1 else (None, None)
    return height, width, channels


def no_labels(split: str, others: Iterable[str] = ()) -> str:
    """A clause about a split without labels, and which split to set."""
    names = ", ".join(others)
    remedy = f"one that has labels (there are {names})" if names else "one with labels"
    return (
        f"the split {split!r} has examples without labels (-1); set data.train_split "
        f"and data.test_split to {remedy}"
    )


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
      source: of the images.
      transform: of an image; None for those of an array that stay as they are.
      shape: (height, width, channels) of the result.
    """

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
                source.turn(picture)
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

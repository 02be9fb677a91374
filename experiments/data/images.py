"""Image datasets in memory, read from files that TFDS prepared."""

import contextlib
import io
import math
import os
import stat
from pathlib import Path

import jax
import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from jaxtyping import Array, Float, Integer, UInt8

from .. import memory
from ..errors import UserError
from . import intact, prepared, sources
from .augment import Transform

DATASETS = ("digits", "digit_sums", "mnist", "fashion_mnist", "cifar10")

# Part of the definition of digit_sums.
_SUMS_SEED = 0
_SUMS = {"train": 20_000, "test": 2_000}

_CHUNK = 4096  # records per read; single reads are slower


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


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> ImageData:
    """Read a dataset into memory.

    Digits that are missing are prepared in one of the default directories.

    Args:
      name: one of `DATASETS`.
      data_dir: a TFDS data directory, which is only read; by default TFDS_DATA_DIR,
        then ~/tensorflow_datasets.

    Raises:
      UserError: an unknown name, or a dataset that is not prepared; the message gives
        the directories and the command.
    """
    if name not in DATASETS:
        raise UserError(
            f"there is no dataset {name!r}; choose one of {', '.join(DATASETS)}"
        )
    if name == "digit_sums":
        return digit_sums(load("digits", data_dir))
    places = prepared.data_dirs(data_dir, name)
    builder = prepared.find(name, places)
    if builder is None and name == "digits":
        # Not in `data_dir`, which may be that of other data.
        places = prepared.data_dirs(None, name)
        builder = prepared.find(name, places)
        if builder is None:
            prepare_digits(_first_writable(places))
            builder = prepared.find(name, places)
    if builder is None:
        raise UserError(prepared.how_to_prepare(name, places))
    try:
        with intact.reading(builder.data_dir):
            splits = [_decode(builder, split) for split in ("train", "test")]
            label = builder.info.features["label"]
    except NotImplementedError as error:  # TFRecord files, which need TensorFlow
        raise UserError(prepared.not_array_record(builder)) from error
    classes = label.num_classes
    intact.check_all_seen(builder.data_dir, splits[0][1], classes)
    white = 16 if name == "digits" else 255
    return ImageData(name, splits[0], splits[1], classes, class_names(label), white)


def class_names(label: tfds.features.ClassLabel) -> tuple[str, ...] | None:
    """The names of a dataset's classes; None where TFDS only knows numbers."""
    names = tuple(label.names or ())
    numbers = tuple(map(str, range(len(names))))
    return None if not names or names == numbers else names


def digit_sums(digits: ImageData) -> ImageData:
    """Pairs of digits side by side, labelled with their sum: 19 classes, 0 to 18.

    20,000 pairs of training images and 2,000 pairs of test images, drawn with a fixed
    seed. No test pair holds an image of a training pair.
    """
    rng = np.random.default_rng(_SUMS_SEED)

    def pairs(
        images: np.ndarray, labels: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        left, right = rng.integers(len(images), size=(2, count))
        both = np.concatenate([images[left], images[right]], axis=2)
        return both, labels[left] + labels[right]

    train = pairs(digits.train_images, digits.train_labels, _SUMS["train"])
    test = pairs(digits.test_images, digits.test_labels, _SUMS["test"])
    classes = 2 * digits.num_classes - 1
    return ImageData("digit_sums", train, test, classes)


def prepare_digits(data_dir: Path) -> None:
    """Write the digits dataset to a TFDS data directory, all of it or nothing."""
    from .digits import Digits  # imports scikit-learn

    tfds.disable_progress_bar()
    try:
        # TFDS prints "Downloading" although nothing is downloaded.
        with contextlib.redirect_stdout(io.StringIO()):
            Digits(
                data_dir=os.fspath(data_dir), file_format="array_record"
            ).download_and_prepare()
    except OSError as error:
        # Another process may have prepared it at the same time.
        if prepared.find("digits", [data_dir]) is None:
            raise UserError(
                f"Cannot write the digits dataset to {data_dir} ({error}); give a "
                "directory that can be written with TFDS_DATA_DIR."
            ) from error
    finally:
        tfds.enable_progress_bar()
    logging.info("Prepared digits in %s.", data_dir)


def _first_writable(places: list[Path]) -> Path:
    for place in places:
        existing = next(p for p in (place, *place.absolute().parents) if p.exists())
        # Root can write to directories without a write bit, which are read-only.
        marked_read_only = not stat.S_IMODE(existing.stat().st_mode) & 0o222
        if os.access(existing, os.W_OK) and not marked_read_only:
            return place
    raise UserError(
        f"The digits dataset is not in {prepared.listed(places)}, and none of these "
        "can be written; give a directory that can with TFDS_DATA_DIR."
    )


def _decode(
    builder: tfds.core.DatasetBuilder, split: str
) -> tuple[np.ndarray, np.ndarray]:
    source = sources.Records(builder, split, ("image", "label"))
    name, shape = f"{builder.name}, {split},", builder.info.features["image"].shape
    memory.check(len(source) * math.prod(shape), name, "use a smaller dataset")
    load = sources.ImageLoad(name, source, Transform((), shape), shape)
    images = np.empty((len(source), *shape), np.uint8)
    labels = np.empty(len(source), np.int32)
    for start in range(0, len(source), _CHUNK):
        keys = np.arange(start, min(start + _CHUNK, len(source)))
        batch = load(keys, np.empty((len(keys), 0)))
        images[keys], labels[keys] = batch["image"], batch["label"]
    return images, labels

"""Image datasets as arrays in memory, read from what TFDS has prepared."""

import contextlib
import dataclasses
import io
import math
import os
import stat
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from jaxtyping import Array, Float, Int32, UInt8

from .. import memory
from ..errors import UserError
from . import intact, prepared, sources

DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10")

# Records read at once: ArrayRecord reads a list some ten times faster than one by one.
_CHUNK = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class ImageData:
    """A labelled image dataset, whole and undecorated.

    Attributes:
      name: as TFDS calls it.
      train_images: raw pixels, shape (train, height, width, channels).
      train_labels: classes 0..num_classes-1, shape (train,).
      test_images: raw pixels, shape (test, height, width, channels).
      test_labels: shape (test,).
      mean: mean raw pixel of the training images, shape (channels,); 0..255 for
        photographs, 0..16 for digits.
      std: their standard deviation, in the same unit (1 where it is 0), (channels,).
      num_classes: number of classes.
    """

    name: str
    train_images: UInt8[np.ndarray, "train height width channels"]
    train_labels: Int32[np.ndarray, " train"]
    test_images: UInt8[np.ndarray, "test height width channels"]
    test_labels: Int32[np.ndarray, " test"]
    mean: np.ndarray
    std: np.ndarray
    num_classes: int

    @property
    def examples(self) -> tuple[np.ndarray, ...]:
        """Training images and labels."""
        return self.train_images, self.train_labels

    @property
    def model_options(self) -> dict[str, Any]:
        """What tells a zoo model the sizes of its input and output."""
        shape = self.train_images.shape[1:]
        return {"input_shape": shape, "out_features": self.num_classes}

    def inputs(self, batch: tuple[Array, ...]) -> tuple[Array, Array]:
        """(normalized images, labels) of rows of `examples`; works under jit."""
        return normalize(batch[0], self.mean, self.std), batch[1]

    @classmethod
    def from_arrays(
        cls,
        name: str,
        train: tuple[np.ndarray, np.ndarray],
        test: tuple[np.ndarray, np.ndarray],
        num_classes: int,
    ) -> "ImageData":
        """Data of one's own: (images, labels) for each split; measures mean and std."""
        # Sums of integers are exact, and take no float copy of the images.
        images = train[0]
        pixels = images.size // images.shape[-1]
        mean = images.sum((0, 1, 2), dtype=np.int64) / pixels
        squares = np.einsum("nhwc,nhwc->c", images, images, dtype=np.int64)
        variance = squares / pixels - mean**2
        return cls(
            name=name,
            train_images=images,
            train_labels=train[1].astype(np.int32),
            test_images=test[0],
            test_labels=test[1].astype(np.int32),
            mean=mean.astype(np.float32),
            # A channel of one value has nothing to scale.
            std=np.where(variance > 0, np.sqrt(variance), 1).astype(np.float32),
            num_classes=num_classes,
        )


def normalize(
    images: UInt8[Array, "*batch channels"] | np.ndarray,
    mean: Float[np.ndarray, " channels"],
    std: Float[np.ndarray, " channels"],
) -> Float[Array, "*batch channels"]:
    """Raw pixels to float32 of mean 0 and standard deviation 1; works under jit."""
    # Broadcast by hand, for callers who let rank promotion raise.
    shape = (1,) * (images.ndim - 1) + (-1,)
    shifted = jax.numpy.asarray(images, np.float32) - np.reshape(mean, shape)
    return shifted / np.reshape(std, shape)


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> ImageData:
    """Reads a dataset into memory; prepares digits first, where they are missing.

    Args:
      name: one of `DATASETS`.
      data_dir: a TFDS data directory. None: TFDS_DATA_DIR, where that is set, then
        ~/tensorflow_datasets.

    Returns:
      Both splits, decoded.

    Raises:
      UserError: if the name is unknown, or if no directory holds the dataset; the
        message says which were looked in, and how to prepare it.
    """
    if name not in DATASETS:
        raise UserError(
            f"There is no dataset {name!r}; choose of {', '.join(DATASETS)}."
        )
    places = prepared.data_dirs(data_dir)
    builder = prepared.find(name, places)
    if builder is None and name == "digits":
        prepare_digits(_first_writable(places))
        builder = prepared.find(name, places)
    if builder is None:
        raise UserError(prepared.how_to_prepare(name, places))
    try:
        with intact.reading(builder.data_dir):
            splits = [_decode(builder, split) for split in ("train", "test")]
            classes = builder.info.features["label"].num_classes
    except NotImplementedError as error:  # TFRecord files, which need TensorFlow
        raise UserError(prepared.not_array_record(builder, places)) from error
    intact.check_all_seen(builder.data_dir, splits[0][1], classes)
    intact.check_labels(builder.data_dir, splits[1][1], classes)
    return ImageData.from_arrays(name, splits[0], splits[1], classes)


def prepare_digits(data_dir: Path) -> None:
    """Writes the digits dataset below data_dir.

    TFDS writes into a directory of another name and renames it when all is written,
    so that a killed preparation leaves nothing that reads as a dataset.

    Raises:
      UserError: if the directory cannot be written.
    """
    from .digits import Digits  # scikit-learn: only where it is needed

    tfds.disable_progress_bar()
    try:
        # TFDS prints "Downloading", which would alarm: nothing is downloaded.
        with contextlib.redirect_stdout(io.StringIO()):
            Digits(
                data_dir=os.fspath(data_dir), file_format="array_record"
            ).download_and_prepare()
    except OSError as error:
        # Another process may have renamed its own copy into place first.
        if prepared.find("digits", [data_dir]) is None:
            raise UserError(
                f"Cannot write the digits dataset to {data_dir} ({error}); give a "
                "directory that can be written, with data_dir or TFDS_DATA_DIR."
            ) from error
    finally:
        tfds.enable_progress_bar()
    logging.info("Prepared digits in %s.", data_dir)


def _first_writable(places: list[Path]) -> Path:
    for place in places:
        existing = next(p for p in (place, *place.absolute().parents) if p.exists())
        # Root may write anywhere; a directory without a write bit was meant not to be.
        marked_read_only = not stat.S_IMODE(existing.stat().st_mode) & 0o222
        if os.access(existing, os.W_OK) and not marked_read_only:
            return place
    raise UserError(
        f"The digits dataset is not in {prepared.listed(places)}, and none of these "
        "can be written; give a directory that can, with data_dir or TFDS_DATA_DIR."
    )


def _decode(
    builder: tfds.core.DatasetBuilder, split: str
) -> tuple[np.ndarray, np.ndarray]:
    source = sources.Records(builder, split, ("image", "label"))
    height, width, channels = shape = builder.info.features["image"].shape
    memory.check(len(source) * math.prod(shape), f"{builder.name}, {split},")
    images = np.empty((len(source), height, width, channels), np.uint8)
    labels = np.empty(len(source), np.int32)
    for start in range(0, len(source), _CHUNK):
        keys = np.arange(start, min(start + _CHUNK, len(source)))
        files, labels[keys] = source.read(keys)
        for key, file in zip(keys, files, strict=True):
            with sources.opened(file, int(key), f"{builder.name}, {split},") as image:
                pixels = np.asarray(image)
            pixels = pixels[..., None] if pixels.ndim == 2 else pixels
            intact.check_picture(builder.data_dir, pixels.shape, shape)
            images[key] = pixels.reshape(shape)
    return images, labels

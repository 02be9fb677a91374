"""Datasets that TFDS prepared: find and read them, or tell how to prepare one."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32
from PIL import Image

from mupax.zoo.weights import remote

from ..errors import UserError, reason
from .augment import Transform, unnormalized
from .sources import Arrays, ImageLoad, Shape, no_labels, why

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

_CHUNK = 4096  # records per read; single reads are slower
_HELD_BYTES = 2**28  # a split up to this size, decoded, is kept in memory

# Datasets that TFDS cannot download.
_FETCHED_BY_HAND = {
    "imagenet2012": (
        " ImageNet is not downloaded for you: first put ILSVRC2012_img_train.tar and "
        "ILSVRC2012_img_val.tar, from https://image-net.org/download.php, into {target}"
        "/downloads/manual."
    ),
}


def data_dirs(data_dir: str | os.PathLike[str] | None, name: str) -> list[Path]:
    """The TFDS data directories to search: `data_dir`, or by default the user's.

    The dataset `name` is copied here if its directory is in object storage.
    """
    if data_dir is not None:
        return [_local(data_dir, name)]
    environment = os.environ.get("TFDS_DATA_DIR")
    places = [_local(environment, name)] if environment else []
    # TFDS_DATA_DIR is often read-only; users prepare datasets in their home.
    return [*places, Path.home() / "tensorflow_datasets"]


def _local(data_dir: str | os.PathLike[str], name: str) -> Path:
    if not remote.is_remote(data_dir):
        return Path(data_dir).expanduser()
    dataset = name.partition(":")[0].partition("/")[0]
    return remote.local(f"{os.fspath(data_dir).rstrip('/')}/{dataset}").parent


def find(name: str, places: Sequence[Path]) -> "tfds.core.DatasetBuilder | None":
    """The prepared dataset of this name in the first directory that has it.

    Raises:
      UserError: its metadata is damaged.
    """
    import tensorflow_datasets as tfds  # slow to import, as below

    for place in places:
        try:
            # From the files, so that any version of the dataset works.
            return tfds.core.read_only_builder.builder_from_files(
                name, data_dir=os.fspath(place)
            )
        except tfds.core.registered.DatasetNotFoundError:
            continue
        except Exception as error:
            raise UserError(
                f"{name!r} cannot be read from {os.fspath(place)!r} ({reason(error)}); "
                "check data_dir, or remove the dataset there and prepare it again"
            ) from error
    return None


def names() -> list[str]:
    """The datasets that TFDS can prepare."""
    import tensorflow_datasets as tfds

    return tfds.list_builders(with_community_datasets=False)


@contextlib.contextmanager
def _reading(name: str, folder: str) -> Iterator[None]:
    """Turn errors of TFDS and ArrayRecord into a UserError that names the folder."""
    try:
        yield
    except UserError:
        raise
    except NotImplementedError:  # TFRecord files, which need TensorFlow
        raise UserError(
            f"{name} in {folder} is not in ArrayRecord files; "
            "prepare it in another directory and set data_dir: "
            f"{_command(name, 'DIRECTORY')}"
        ) from None
    except Exception as error:
        raise UserError(
            f"{folder} is damaged ({reason(error)}); remove it and prepare "
            "the dataset again"
        ) from error


def how_to_prepare(name: str, places: Sequence[Path]) -> str:
    """The error for a missing dataset, with the command that prepares it."""
    command = _command(name, os.fspath(places[0]))
    folders = " or ".join(map(os.fspath, places))
    return f"{name} is not in {folders}; prepare it once: {command}"


def _command(name: str, target: str) -> str:
    """The command that prepares a dataset in the directory `target`."""
    return (
        "where TensorFlow is installed (pip install tensorflow tensorflow-datasets "
        "importlib_resources), python -c "
        f'"import tensorflow_datasets as tfds; tfds.builder({name!r}, '
        f"data_dir={target!r}, file_format='array_record').download_and_prepare()\"."
        + _FETCHED_BY_HAND.get(name, "").format(target=target)
    )


class Records:
    """A split of a TFDS dataset of ArrayRecord files.

    Args:
      builder: of the dataset.
      split: a split or slice, e.g. "train[:90%]".
      keys: the features of image and label.

    Raises:
      UserError: the files are damaged or not ArrayRecord, or have no labels.
    """

    def __init__(
        self, builder: "tfds.core.DatasetBuilder", split: str, keys: tuple[str, str]
    ):
        self._image, self._label = keys
        self._split, self._splits = split, list(builder.info.splits)
        self._name, self._folder = builder.name, os.fspath(builder.data_dir)
        with _reading(self._name, self._folder):
            features = builder.info.features
            self.shape: Shape = features[self._image].shape
            self._classes = features[self._label].num_classes
        try:
            builder.info.splits[split]
        except Exception:  # TFDS raises several types
            raise UserError(
                f"{self._name} has no split {split!r}; set data.train_split and "
                f"data.test_split to splits of {self._folder}: "
                f"{', '.join(self._splits)}"
            ) from None
        import tensorflow_datasets as tfds

        with _reading(self._name, self._folder):
            # Decoded with Pillow below; TFDS would do the same, with a warning.
            self._records: Any = builder.as_data_source(
                split, decoders={self._image: tfds.decode.SkipDecoding()}
            )
        self.read(np.arange(1))

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: np.ndarray) -> tuple[list[bytes], Int32[np.ndarray, " b"]]:
        with _reading(self._name, self._folder):
            examples = self._records.__getitems__(indices.tolist())
        labels = np.array([e[self._label] for e in examples], np.int32)
        if (labels == -1).any():
            others = [name for name in self._splits if name != self._split]
            raise UserError(f"{self._folder}: {no_labels(self._split, others)}")
        if (labels >= self._classes).any():
            raise UserError(
                f"{self._folder} is damaged: it has {self._classes} classes, and a "
                f"record has label {labels.max()}; remove it and prepare the dataset "
                "again"
            )
        return [e[self._image] for e in examples], labels

    def turn(self, picture: Image.Image) -> None:
        """TFDS ignores the orientation of photographs, too."""

    def undecodable(self, k: int, error: Exception) -> str:
        return (
            f"Image {k} of the split {self._split!r} in {self._folder} cannot "
            f"be decoded ({why(error)}); prepare the dataset again."
        )


def in_memory(records: Records) -> Arrays | None:
    """A split of small images of one size, decoded; None for another one.

    Raises:
      UserError: it is damaged.
    """
    (height, width, channels), count = records.shape, len(records)
    if not (height and width and channels) or (
        count * height * width * channels > _HELD_BYTES
    ):
        return None
    shape = height, width, channels
    load = ImageLoad(records, Transform((), unnormalized(shape)), shape)
    images = np.empty((count, *shape), np.uint8)
    labels = np.empty(count, np.int32)
    for start in range(0, count, _CHUNK):
        keys = np.arange(start, min(start + _CHUNK, count))
        batch = load(keys, np.empty((len(keys), 0)))
        images[keys], labels[keys] = batch["image"], batch["label"]
    return Arrays(images, labels)


def class_names(label: "tfds.features.ClassLabel") -> tuple[str, ...] | None:
    """The names of a dataset's classes; None where TFDS only knows numbers."""
    names = tuple(label.names or ())
    numbers = tuple(map(str, range(len(names))))
    return None if not names or names == numbers else names


def open_splits(
    builder: "tfds.core.DatasetBuilder", train_split: str, test_split: str | None
) -> "tuple[Records, Records, tfds.features.ClassLabel]":
    """The training and the test split, and the feature of the labels.

    By default, the test split is "test", else "validation".
    """
    keys = _keys(builder)
    train = Records(builder, train_split, keys)
    test = Records(builder, test_split or _test_split(builder), keys)
    return train, test, builder.info.features[keys[1]]


def _keys(builder: "tfds.core.DatasetBuilder") -> tuple[str, str]:
    import tensorflow_datasets as tfds

    features = builder.info.features
    image, label = "image", "label"
    match builder.info.supervised_keys:
        case (str(first), str(second)):
            image, label = first, second
    kinds = (tfds.features.Image, tfds.features.ClassLabel)
    for key, kind in zip((image, label), kinds, strict=True):
        if key not in features or not isinstance(features[key], kind):
            raise UserError(
                f"{builder.name} is not a dataset of labelled images: it has no "
                f"{kind.__name__} feature {key!r}; its features are "
                f"{', '.join(features)}"
            )
    return image, label


def _test_split(builder: "tfds.core.DatasetBuilder") -> str:
    splits = builder.info.splits
    # ImageNet's test labels are not public.
    names = (
        ("validation",) if builder.name == "imagenet2012" else ("test", "validation")
    )
    for name in names:
        if name in splits:
            return name
    raise UserError(
        f"{builder.name} has no split {' or '.join(names)}; set data.test_split to "
        f"one of {', '.join(splits)}, or to a slice"
    )

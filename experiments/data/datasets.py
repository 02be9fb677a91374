"""Open datasets by name: in memory, prepared by TFDS, text, or noise."""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mupax.zoo.preprocessing import LARGEST_SIDE, STATISTICS

from ..checks import shown
from ..errors import UserError, nearest
from . import arrays, digits, folders, prepared, sources
from . import augment as augmentations
from .dataset import Dataset
from .images import ImageData
from .pipeline import Workers
from .splits import Split, train_and_test
from .text import fake_text, is_fake_text, open_text

#: Datasets that are kept in memory.
DATASETS = ("digits", "digit_sums", "mnist", "fashion_mnist", "cifar10")

TEXT = "text:"  # start of the names of text files

# The usual mean and standard deviation of pixels of ImageNet's training images.
_IMAGENET = (
    np.array([123.675, 116.28, 103.53], np.float32),
    np.array([58.395, 57.12, 57.375], np.float32),
)
_STATISTICS = {"imagenet2012": _IMAGENET}

# Evaluation keeps this central share of photographs of different sizes.
_PHOTOGRAPH_CROP = 0.875


def open_dataset(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    image_size: int | Sequence[int] | None = None,
    augment: Iterable[str | Mapping[str, Any]] = (),
    train_split: str = "train",
    test_split: str | None = None,
    crop: float | None = None,
    crop_mode: str = "center",
    crop_rounding: str = "even",
    resample: str = "bilinear",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    context: int | None = None,
    tokenizer: str | os.PathLike[str] = "bytes",
    test_path: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    workers: int = 0,
) -> Dataset:
    """Open a dataset by its name. A large dataset is read later, batch by batch.

    Args:
      name: digits, digit_sums (pairs of digits and their sum), mnist, fashion_mnist
        or cifar10 (kept in memory); imagenet2012 or another labelled image
        dataset that TFDS prepared as ArrayRecord files; your own images,
        "images:DIRECTORY", "npz:FILE" or a name of `register_dataset`; noise, e.g.
        "fake:224x224x3:1000" or "fake:CONTEXT:VOCABULARY"; or text, "text:FILE" or
        "text:DIRECTORY".
      data_dir: a TFDS data directory; by default TFDS_DATA_DIR, then
        ~/tensorflow_datasets.
      image_size: side, or (height, width), to which images are resized; by default
        their own size, if all have the same.
      augment: augmentations of training images, in order: names of
        `augment.OPERATIONS`, or {"name": ..., option: value}.
      train_split: a split or, of TFDS, a slice.
      test_split: likewise; by default "test", else "validation". Your own images
        without one are split: a tenth of each class, drawn with seed 0, is for testing.
      crop: share of the shorter side that evaluation keeps; by default 0.875 for images
        of different sizes, else 1.
      crop_mode: "center" keeps the aspect ratio of test images; "squash" resizes both
        sides; "border" fits the longer side and pads with `mean`.
      crop_rounding: "even" or "down": where an odd number of pixels is cut off, as in
        timm or as in transformers; see `augment.Transform`.
      resample: filter for resizing without augmentation: "bilinear", "bicubic",
        "lanczos" or "nearest".
      mean: mean of the pixels, per channel, where white is 1; by default that of the
        training images.
      std: standard deviation of the pixels, likewise.
      context: tokens per window of text.
      tokenizer: "bytes", or a tokenizer.json: its path, that of its directory, or the
        id of a repository on the Hugging Face hub.
      test_path: test text, a file or directory; by default the last tenth of the text.
      threads: number of threads that prepare batches; by default one per core, at
        most 8.
      workers: number of Python processes that prepare batches of images, in place of
        the threads; 0: none.

    Raises:
      UserError: an unknown name, a dataset that is not prepared (the message gives the
        command), an unknown or unsuitable option, or a missing size.

    Examples:
      >>> dataset = open_dataset("fake:32x32x3:10")
      >>> dataset.spec(64)["image"]
      ShapeDtypeStruct(shape=(64, 32, 32, 3), dtype=uint8)
    """
    operations = augmentations.parse(augment)
    if threads is None:
        threads = min(8, os.cpu_count() or 1)
    pool = Workers(threads, workers)
    slices = {"train_split": train_split != "train", "test_split": test_split}
    if name.startswith(TEXT):
        of_images = {
            "image_size": image_size,
            "augment": operations,
            "crop": crop,
            "crop_mode": crop_mode != "center",
            "crop_rounding": crop_rounding != "even",
            "resample": resample != "bilinear",
            "mean": mean,
            "std": std,
            "workers": workers,
        }
        _refuse(name, slices | of_images)
        if context is None:
            raise UserError(
                f"{name} is text; set data.context, the number of tokens per window"
            )
        return open_text(
            name.removeprefix(TEXT),
            context=context,
            tokenizer=tokenizer,
            test_path=test_path,
            workers=pool,
        )
    if is_fake_text(name):
        return fake_text(name, pool)
    of_user = name in REGISTERED or name.startswith((folders.FOLDER, arrays.NPZ))
    of_tfds = not (of_user or name in DATASETS or name.startswith("fake:"))
    if of_tfds:  # before other keys are judged
        places = prepared.data_dirs(data_dir, name)
        builder = _find(name, places)
    of_text = {"context": context, "test_path": test_path}
    _refuse(name, {**of_text, "tokenizer": tokenizer != "bytes"})
    size = _size(image_size)
    augmentations.check_fitting(crop, crop_mode, resample, crop_rounding)
    if crop_mode == "border" and mean is None:
        raise UserError(
            "crop_mode='border' pads images with their mean; set data.mean and data.std"
        )
    if name.startswith("fake:"):
        _refuse(name, slices)
        splits = _noise(name)
    elif name in DATASETS:
        _refuse(name, slices)
        splits = _in_memory(load(name, data_dir))
    elif of_user:
        splits = _of_user(name, train_split, test_split)
    elif builder is None:
        raise UserError(prepared.how_to_prepare(name, places))
    else:
        splits = _prepared(name, builder, train_split, test_split)
    fitting = {
        "crop_mode": crop_mode,
        "crop_rounding": crop_rounding,
        "resample": resample,
    }
    fill = _statistic("mean", mean)  # before pixels are read
    dataset = splits.build(size, operations, crop, pool, fill.tolist(), fitting)
    return _normalized_by(dataset, mean, std)


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> ImageData:
    """Read one of `DATASETS` into memory.

    Args:
      name: digits and digit_sums come with scikit-learn; TFDS prepared the others.
      data_dir: a TFDS data directory; by default TFDS_DATA_DIR, then
        ~/tensorflow_datasets.

    Raises:
      UserError: an unknown name, or a dataset that is not prepared; the message gives
        the directories and the command.
    """
    if name not in DATASETS:
        raise UserError(
            f"there is no dataset {name!r}; choose one of {', '.join(DATASETS)}"
        )
    match name:
        case "digits":
            return digits.digits()
        case "digit_sums":
            return digits.digit_sums()
    return prepared.in_memory(name, data_dir)


def _normalized_by(
    dataset: Dataset, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Dataset:
    """A dataset with other statistics, where white is 1."""
    if mean is None and std is None:
        return dataset
    channels, white = dataset.input_shape[2], np.float32(dataset.white)
    given = [_statistic(n, v, channels) for n, v in (("mean", mean), ("std", std))]
    known = (given[0] * white, given[1] * white)
    return dataclasses.replace(dataset, known_statistics=known)


def _statistic(name: str, values: Any, channels: int | None = None) -> np.ndarray:
    """The mean or std of pixels, one for each channel, where white is 1."""
    array: np.ndarray = np.empty(())  # raises below
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        array = np.asarray(() if values is None else values, np.float32)
    low, high = STATISTICS[name]
    inside = array.ndim == 1 and bool(((low <= array) & (array <= high)).all())
    if not inside or channels not in (None, len(array)):
        raise UserError(
            f"{name} is {shown(values)}; set both mean and std, each a number from "
            f"{low:g} to {high:g} for each channel{f' ({channels})' * bool(channels)}"
        )
    return array


def _refuse(name: str, options: dict[str, Any]) -> None:
    for option, given in options.items():
        if given:
            raise UserError(f"{option} has no effect on {name}; remove it")


def _size(image_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    both = image_size if isinstance(image_size, Sequence) else (image_size,) * 2
    integers = all(isinstance(x, int) and not isinstance(x, bool) for x in both)
    if (
        len(both) != 2
        or not integers
        or not 1 <= min(both) <= max(both) <= LARGEST_SIDE
    ):
        raise UserError(
            f"image_size is {image_size}; it must be a side or (height, width) in "
            f"pixels, each from 1 to {LARGEST_SIDE}"
        )
    return both[0], both[1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Splits:
    """The splits of an image dataset, before images are resized."""

    name: str
    classes: int
    train: sources.Source
    test: sources.Source
    statistics: tuple[np.ndarray, np.ndarray] | None
    labels: tuple[str, ...] | None = None
    white: int = 255

    def build(
        self,
        image_size: tuple[int, int] | None = None,
        operations: Sequence[augmentations.Operation] = (),
        crop: float | None = None,
        workers: Workers | None = None,
        mean: Sequence[float] = (),
        fitting: Mapping[str, str] | None = None,
    ) -> Dataset:
        """The dataset of resized images; see `open_dataset`."""
        height, width, channels = self.train.shape
        own_size = (height, width) if height and width else None
        size = image_size or own_size
        if size is None:
            raise UserError(
                f"the images of {self.name} have different sizes; set "
                "data.image_size, e.g. 224"
            )
        shape = (*size, 1 if channels == 1 else 3)
        if crop is None:
            crop = 1.0 if own_size else _PHOTOGRAPH_CROP
        encoded = not isinstance(self.train, sources.Arrays | sources.Noise)
        resized = encoded or size != own_size or crop != 1
        options: dict[str, Any] = {"crop": crop, **(fitting or {})}
        fill = [round(self.white * value) for value in mean] or [0]

        def load(
            split: str,
            source: sources.Source,
            operations: Sequence[augmentations.Operation] = (),
        ) -> sources.ImageLoad:
            transform = None
            if resized or operations:
                transform = augmentations.Transform(
                    operations, shape, fill=fill, **options
                )
            return sources.ImageLoad(f"{self.name}, {split},", source, transform, shape)

        return Dataset(
            name=self.name,
            kind="images",
            out_features=self.classes,
            input_shape=shape,
            train_size=len(self.train),
            test_size=len(self.test),
            load_train=load("train", self.train, operations),
            load_plain=load("train", self.train),
            load_test=load("test", self.test),
            draws=sum(operation.draws for operation in operations),
            workers=workers or Workers(),
            known_statistics=self.statistics,
            labels=self.labels,
            white=self.white,
            read=(self.train.read, self.test.read),
            **options,
        )


def from_memory(data: ImageData) -> Dataset:
    """A dataset of images in memory."""
    return _in_memory(data).build()


def _in_memory(data: ImageData) -> _Splits:
    return _Splits(
        data.name,
        data.num_classes,
        sources.Arrays(data.train_images, data.train_labels),
        sources.Arrays(data.test_images, data.test_labels),
        (data.mean, data.std),
        data.labels,
        data.white,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Registered:
    """The splits of registered data, by name. A cache's key: equal only to itself."""

    splits: dict[str, Split]


#: Data by name; see `register_dataset`.
REGISTERED: dict[str, Registered] = {}


def register_dataset(
    name: str, data: Any, *, image: str | None = None, label: str | None = None
) -> None:
    """Name images in Python, so that a config can use them as its dataset.

    They can be used by every command's function in this process, e.g. `mupax.train`.

    Args:
      name: to use as `config.dataset`. It replaces earlier data of this name.
      data: a dictionary of splits, e.g. "train" and "test", or one of them: a pair
        (images, labels) of arrays, a dictionary of arrays as in an .npz file
        (x_train, ...), a dataset of Hugging Face, or any iterable of (image, label) or
        {"image": ..., "label": ...}, or of batches, which is read into memory once.
        Images are 0..255 or floats 0..1, of shape (height, width) or (height, width,
        channels), or Pillow's. Labels are 0, 1, ... or texts.
      image: the column of the images in a dataset of Hugging Face, if it has several.
      label: likewise, of the labels.

    Raises:
      UserError: a name of another dataset, or data of another form.

    Examples:
      >>> import numpy as np
      >>> x, y = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 2
      >>> register_dataset("mine", {"train": (x, y), "test": (x[:10], y[:10])})
      >>> open_dataset("mine").input_shape
      (8, 8, 1)
    """
    if not name.isidentifier() or name in DATASETS:
        raise UserError(f"{name!r} cannot name your data; choose a new word")
    REGISTERED[name] = Registered(arrays.from_python(name, data, image, label))


def examples_of(data: Any) -> Any:
    """Training examples for `mupax.sweep`; a pytree of arrays is returned as it is.

    An open `Dataset`, and a dataset of Hugging Face, a loader or an iterator as in
    `register_dataset`, become the arrays "image" and "label".
    """
    if isinstance(data, Dataset):
        return data.training_arrays()
    if isinstance(data, Mapping) and any(map(arrays.is_table, data.values())):
        raise UserError(
            f"data has the splits {', '.join(data)}; pass one, e.g. data['train']"
        )
    alone = jax.tree_util.all_leaves([data]) and not hasattr(data, "shape")
    iterable = any(hasattr(data, x) for x in ("__iter__", "__getitem__"))
    if arrays.is_table(data) or (alone and iterable and not isinstance(data, str)):
        part = arrays.from_python("data", data, None, None)["train"]
        both = {"train": part, "test": part}
        train, test, classes, names = train_and_test("data", both, "train", "test")
        dataset = _Splits("data", classes, train, test, None, names).build()
        return dataset.training_arrays()
    return data


def _of_user(name: str, train_split: str, test_split: str | None) -> _Splits:
    where = name.partition(":")[2] or name
    if name in REGISTERED:
        splits = REGISTERED[name].splits
    else:
        folder = name.startswith(folders.FOLDER)
        splits = folders.open_folder(where) if folder else arrays.open_npz(where)
    train, test, classes, names = train_and_test(where, splits, train_split, test_split)
    return _Splits(name, classes, train, test, None, names)


# Few examples, for short epochs and evaluations.
_NOISE_TRAIN, _NOISE_TEST = 10_000, 100


def _noise(name: str) -> _Splits:
    shape, classes = sources.parse_fake(name)
    uniform = (np.full(shape[2], x, np.float32) for x in (127.5, 73.9))
    return _Splits(
        name,
        classes,
        sources.Noise(_NOISE_TRAIN, shape, classes, seed=0),
        sources.Noise(_NOISE_TEST, shape, classes, seed=1),
        (next(uniform), next(uniform)),
    )


# A name of TFDS, with a config and a version.
_OF_TFDS = re.compile(r"[A-Za-z_]\w*(/[\w.+-]+)?(:[\d.*]+)?")


def _prepared(
    name: str, builder: Any, train_split: str, test_split: str | None
) -> _Splits:
    train, test, label = prepared.open_splits(builder, train_split, test_split)
    statistics = _STATISTICS.get(name.split("/")[0].split(":")[0])
    names = prepared.class_names(label)
    return _Splits(name, label.num_classes, train, test, statistics, names)


def _find(name: str, places: Sequence[pathlib.Path]) -> Any:
    """A prepared dataset; None for one of TFDS that is not prepared.

    Raises:
      UserError: there is no such dataset.
    """
    if _OF_TFDS.fullmatch(name) and (found := prepared.find(name, places)):
        return found
    known = prepared.names()
    if name.split("/")[0].split(":")[0] in known:
        return None
    hint = _with_prefix(name) or nearest(name, [*DATASETS, *known]) or "."
    raise UserError(
        f"there is no dataset {name!r}{hint} Give the name of a prepared TFDS dataset, "
        "images:DIRECTORY, npz:FILE, text:FILE, or noise, e.g. fake:224x224x3:1000"
    )


def _with_prefix(name: str) -> str:
    """What a path or an id of Hugging Face should have been, as the end of a clause.

    Examples:
      >>> _with_prefix("my.txt"), _with_prefix("mnits")
      ("; did you mean 'text:my.txt'?", '')
    """
    suffix = pathlib.PurePath(name).suffix.lower()
    forms = []
    if os.path.isdir(name):
        forms = [folders.FOLDER, TEXT]
    elif suffix == ".npz":
        forms = [arrays.NPZ]
    elif os.path.isfile(name) or suffix in (".txt", ".md", ".json", ".jsonl"):
        forms = [TEXT]
    if forms:
        return f"; did you mean {' or '.join(repr(x + name) for x in forms)}?"
    if name.startswith("hf:") or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return (
            "; a dataset of Hugging Face is given from Python: mupax.train(config, "
            "workdir, data=datasets.load_dataset(...))."
        )
    return ""

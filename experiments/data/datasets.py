"""Open datasets by name: digits, prepared by TFDS, your own, text, or noise."""

import dataclasses
import inspect
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mupax.zoo.preprocessing import DataConfig

from ..errors import UserError, nearest
from . import arrays, digits, folders, prepared, sources
from . import augment as augmentations
from .dataset import Dataset
from .images import pixel_statistics
from .pipeline import Workers
from .splits import Split, train_and_test
from .text import fake_text, is_fake_text, open_text

#: The datasets that come with scikit-learn.
DIGITS = {"digits": digits.digits, "digit_sums": digits.digit_sums}

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
    interpolation: str = "bilinear",
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
      name: digits or digit_sums (pairs of digits and their sum); mnist, imagenet2012
        or another labelled image dataset that TFDS prepared as ArrayRecord files (one
        of up to 256 MiB of pixels, as mnist or cifar10, is kept in memory); your own
        images, "images:DIRECTORY", "npz:FILE" or a name of `register_dataset`; noise,
        e.g. "fake:224x224x3:1000" or "fake:CONTEXT:VOCABULARY"; or text, "text:FILE"
        or "text:DIRECTORY".
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
        timm or as in transformers; see `zoo.DataConfig`.
      interpolation: filter for resizing without augmentation: "bilinear", "bicubic",
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
    options = locals()
    operations = augmentations.parse(augment)
    pool = Workers(min(8, os.cpu_count() or 1) if threads is None else threads, workers)
    if name.startswith(TEXT):
        _refuse_others(options, *_OF_TEXT)
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
    drawn = name in DIGITS or name.startswith("fake:")
    if not of_user and not drawn:  # before other keys are judged
        places = prepared.data_dirs(data_dir, name)
        builder = _find(name, places)
    _refuse_others(options, *_OF_IMAGES, *(() if drawn else _OF_SPLITS))
    given: dict[str, Any] = {key: options[key] for key in _PREPROCESSING}
    channels = len(mean) if isinstance(mean, Sequence) and mean else 1
    _preprocessing((1, 1, channels), **given)  # checked before data are read
    if of_user:
        images = _of_user(name, train_split, test_split)
    elif drawn:
        images = _noise(name) if name.startswith("fake:") else _of_digits(name)
    elif builder is None:
        raise UserError(prepared.how_to_prepare(name, places))
    else:
        images = _prepared(name, builder, train_split, test_split)
    return images.open(operations, pool, **given)


_OF_TEXT = ("context", "tokenizer", "test_path", "threads")
_OF_SPLITS = ("train_split", "test_split")
_PREPROCESSING = (
    *("image_size", "crop", "crop_mode", "crop_rounding", "interpolation"),
    *("mean", "std"),
)
_OF_IMAGES = (*_PREPROCESSING, "augment", "threads", "workers")


def _refuse_others(given: Mapping[str, Any], *known: str) -> None:
    """Raise UserError for options that have no effect on a dataset.

    Args:
      given: the arguments of `open_dataset`.
      *known: the options that have one.
    """
    for key, parameter in inspect.signature(open_dataset).parameters.items():
        allowed = ("name", "data_dir", *known)
        if key not in allowed and given[key] not in (parameter.default, [], {}):
            other = "; remove it"
            if key in _OF_TEXT and key not in known:
                other = ", which has images: give a dataset of text, or remove it"
            raise UserError(f"{key} has no effect on {given['name']}{other}")


def _preprocessing(
    shape: sources.Shape,
    *,
    image_size: int | Sequence[int] | None = None,
    crop: float | None = None,
    mean: Any = None,
    std: Any = None,
    **options: str,
) -> DataConfig:
    """The preprocessing of images of a shape; see `open_dataset`.

    If the statistics are not given, they are 0 and 1.
    """
    height, width, channels = shape
    if (mean is None) != (std is None):
        raise UserError(f"mean is {mean} and std is {std}; set both, or neither")
    if options.get("crop_mode") == "border" and mean is None:
        raise UserError(
            "crop_mode='border' pads images with their mean; set data.mean and data.std"
        )
    if crop is None:
        crop = 1.0 if height and width else _PHOTOGRAPH_CROP
    size: Any = image_size if isinstance(image_size, Sequence) else (image_size,) * 2
    try:
        config = augmentations.unnormalized(
            ((height, width) if image_size is None else (*size,)) + (channels,),
            crop=crop,
            **options,
        )
        if mean is None:
            return config
        return dataclasses.replace(config, mean=mean, std=std)
    except (TypeError, ValueError) as error:
        raise UserError(re.sub("^size=", "image_size=", str(error))) from None


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

    def open(
        self,
        operations: Sequence[augmentations.Operation] = (),
        workers: Workers | None = None,
        **given: Any,
    ) -> Dataset:
        """The dataset of resized images; for `given`, see `_preprocessing`."""
        height, width, channels = self.train.shape
        if not (given.get("image_size") or (height and width)):
            raise UserError(
                f"the images of {self.name} have different sizes; set "
                "data.image_size, e.g. 224"
            )
        channels = 1 if channels == 1 else 3
        config = _preprocessing((height, width, channels), **given)
        statistics = self.statistics
        if given.get("mean") is not None:
            mean, std = (np.array(x, np.float32) for x in (config.mean, config.std))
            statistics = mean * np.float32(self.white), std * np.float32(self.white)
        encoded = not isinstance(self.train, sources.Arrays | sources.Noise)
        fits = not encoded and config.size[:2] == (height, width) and config.crop == 1

        def load(
            source: sources.Source, operations: Sequence[augmentations.Operation] = ()
        ) -> sources.ImageLoad:
            transform = None
            if operations or not fits:
                transform = augmentations.Transform(operations, config, self.white)
            return sources.ImageLoad(source, transform, config.size)

        return Dataset(
            name=self.name,
            kind="images",
            out_features=self.classes,
            input_shape=config.size,
            train_size=len(self.train),
            test_size=len(self.test),
            load_train=load(self.train, operations),
            load_plain=load(self.train),
            load_test=load(self.test),
            draws=sum(operation.draws for operation in operations),
            workers=workers or Workers(),
            known_statistics=statistics,
            labels=self.labels,
            white=self.white,
            read=(self.train.read, self.test.read),
            preprocessing=config,
        )


def _in_memory(
    name: str,
    train: sources.Arrays,
    test: sources.Arrays,
    classes: int,
    labels: tuple[str, ...] | None = None,
    white: int = 255,
) -> _Splits:
    """Splits whose statistics are those of all training images."""
    statistics = pixel_statistics(train.images)
    return _Splits(name, classes, train, test, statistics, labels, white)


def _of_digits(name: str) -> _Splits:
    train, test, classes, _ = train_and_test(name, DIGITS[name](), "train", "test")
    assert isinstance(train, sources.Arrays)
    assert isinstance(test, sources.Arrays)
    white = 16 if name == "digits" else 255
    return _in_memory(name, train, test, classes, white=white)


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
    if not name.isidentifier() or name in DIGITS:
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
        dataset = _Splits("data", classes, train, test, None, names).open()
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
    names = prepared.class_names(label)
    held = prepared.in_memory(train), prepared.in_memory(test)
    if held[0] and held[1]:
        return _in_memory(name, held[0], held[1], label.num_classes, names)
    statistics = _STATISTICS.get(name.split("/")[0].split(":")[0])
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
    hint = nearest(name, [*DIGITS, *known]) or "."
    raise UserError(
        f"there is no dataset {name!r}{hint} Give the name of a prepared TFDS dataset, "
        "images:DIRECTORY, npz:FILE, text:FILE, or noise, e.g. fake:224x224x3:1000; a "
        "dataset of Hugging Face from Python, by mupax.train(config, workdir, data=...)"
    )

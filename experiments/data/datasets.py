"""Datasets as a trainer sees them: this process's part of batches in a fixed order."""

import contextlib
import dataclasses
import difflib
import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Array
from PIL import Image

from .. import memory
from ..errors import UserError
from . import augment as augmentations
from . import images, intact, prepared, sources
from .pipeline import Hosts, Workers, check_batch, iterate, run_through
from .text import fake_text, is_fake_text, open_text

Batch = dict[str, np.ndarray]

# Mean and deviation of the pixels of ImageNet's training images, as all use them.
_IMAGENET = (
    np.array([123.675, 116.28, 103.53], np.float32),
    np.array([58.395, 57.12, 57.375], np.float32),
)
_STATISTICS = {"imagenet2012": _IMAGENET, "tiny_imagenet": _IMAGENET}
_MEASURED = 1024  # training images that a dataset's own statistics are measured on

# Images of one size have nothing to crop away; of photographs the middle is kept.
_PHOTOGRAPH_CROP = 0.875


class Dataset(Protocol):
    """A training and a test split, ready for a model."""

    @property
    def name(self) -> str:
        """As it was asked for."""

    @property
    def kind(self) -> str:
        """ "images" or "text"."""

    @property
    def out_features(self) -> int:
        """Classes, or size of the vocabulary."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(height, width, channels), or (context,)."""

    @property
    def train_size(self) -> int:
        """Examples in the training split."""

    @property
    def test_size(self) -> int:
        """Examples in the test split."""

    def spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one whole training batch; nothing is read."""

    def train(
        self,
        batch_size: int,
        seed: int,
        *,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> grain.DatasetIterator[Batch]:
        """Endless training batches: this process's contiguous rows of each.

        The state of the iterator (get_state, set_state) counts batches of the whole
        run: it may be restored with another number of processes.

        Args:
          batch_size: examples in a step, over all processes.
          seed: gives the order and the augmentations, 0 <= seed < 2**32.
          process_index: jax.process_index() by default.
          process_count: jax.process_count() by default.

        Raises:
          UserError: the batch does not divide over the processes, or is larger than
            the training split.
        """

    def test(
        self,
        batch_size: int,
        *,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> Iterator[Batch]:
        """Every test example once; the last batch is filled up.

        Returns:
          Batches as `train` gives, and "counts", float32 (rows,): 1 for an example, 0
          for what fills up.

        Raises:
          UserError: the batch does not divide over the processes.
        """

    def normalize(self, batch: dict[str, Array]) -> dict[str, Array]:
        """What the model takes, under jit: images as float32 of mean 0 and std 1."""


@dataclasses.dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images and labels: "image", uint8 (b, h, w, c), and "label", int32 (b,).

    Attributes:
      name: as it was asked for.
      out_features: classes.
      input_shape: (height, width, channels).
      kind: "images".
    """

    name: str
    out_features: int
    input_shape: tuple[int, int, int]
    _train: sources.Source
    _test: sources.Source
    _augment: augmentations.Transform | None
    _fit: augmentations.Transform | None
    _workers: Workers
    _known: tuple[np.ndarray, np.ndarray] | None
    kind: str = "images"

    @property
    def train_size(self) -> int:
        return len(self._train)

    @property
    def test_size(self) -> int:
        return len(self._test)

    def spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """As `Dataset.spec`."""
        return {
            "image": jax.ShapeDtypeStruct((batch_size, *self.input_shape), np.uint8),
            "label": jax.ShapeDtypeStruct((batch_size,), np.int32),
        }

    def train(
        self,
        batch_size: int,
        seed: int,
        *,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> grain.DatasetIterator[Batch]:
        """As `Dataset.train`."""
        check_batch(batch_size, self.train_size, self.name)
        memory.check(
            batch_size * math.prod(self.input_shape),
            f"A batch of {batch_size} images of {self.input_shape}",
            "make batch_size or data.image_size smaller",
        )
        return iterate(
            self.train_size,
            Load(f"{self.name}, train,", self._train, self._augment, self.input_shape),
            batch_size,
            seed,
            draws=self._augment.draws if self._augment else 0,
            hosts=Hosts.of(process_index, process_count),
            workers=self._workers,
        )

    def test(
        self,
        batch_size: int,
        *,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> Iterator[Batch]:
        """As `Dataset.test`."""
        return run_through(
            self.test_size,
            Load(f"{self.name}, test,", self._test, self._fit, self.input_shape),
            batch_size,
            hosts=Hosts.of(process_index, process_count),
            # Worker processes take seconds to start: not for each evaluation.
            workers=dataclasses.replace(self._workers, processes=0),
        )

    def whole(self) -> images.ImageData:
        """Both splits in memory, as they are evaluated: brought to size, unchanged."""

        each = math.prod(self.input_shape)
        memory.check(
            (self.train_size + self.test_size) * each,
            f"{self.name} at {self.input_shape}",
            "make data.image_size smaller",
        )

        def split(name: str, source: sources.Source) -> tuple[np.ndarray, np.ndarray]:
            load = Load(f"{self.name}, {name},", source, self._fit, self.input_shape)
            batch = load(np.arange(len(source)), np.empty((len(source), 0)))
            return batch["image"], batch["label"]

        train, test = split("train", self._train), split("test", self._test)
        return images.ImageData.from_arrays(self.name, train, test, self.out_features)

    def normalize(self, batch: dict[str, Array]) -> dict[str, Array]:
        """As `Dataset.normalize`."""
        image = images.normalize(batch["image"], *self.statistics)
        return {**batch, "image": image}

    @functools.cached_property
    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of a raw pixel, each float32 (channels,).

        Known for ImageNet and for data in memory; else measured on 1,024 training
        images, evenly spaced.
        """
        if self._known:
            return self._known
        n = min(_MEASURED, self.train_size)
        load = Load(f"{self.name}, train,", self._train, self._fit, self.input_shape)
        batch = load(np.arange(n) * self.train_size // n, np.empty((n, 0)))
        split = batch["image"], batch["label"]
        data = images.ImageData.from_arrays(self.name, split, split, self.out_features)
        return data.mean, data.std


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """Numbers of examples to a batch of images; a class, for worker processes."""

    name: str
    source: sources.Source
    transform: augmentations.Transform | None
    shape: tuple[int, int, int]

    def __call__(self, indices: np.ndarray, u: np.ndarray) -> Batch:
        found, labels = self.source.read(indices)
        if self.transform is None:
            return {"image": np.asarray(found), "label": labels}
        out = np.empty((len(labels), *self.shape), np.uint8)
        for row, k, image, numbers in zip(out, indices, found, u.tolist(), strict=True):
            with self._picture(image, k) as picture:
                pixels = np.asarray(self.transform(picture, numbers))
            row[...] = pixels.reshape(self.shape)
        return {"image": out, "label": labels}

    @contextlib.contextmanager
    def _picture(self, image: np.ndarray | bytes, k: int) -> Iterator[Image.Image]:
        if not isinstance(image, bytes):
            yield Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
            return
        with sources.opened(image, k, self.name) as picture:
            if isinstance(self.source, sources.Records):
                size = picture.height, picture.width, len(picture.getbands())
                intact.check_picture(self.source.folder, size, self.source.shape)
            yield picture


def open_dataset(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    image_size: int | Sequence[int] | None = None,
    augment: Iterable[str | Mapping[str, Any]] = (),
    train_split: str = "train",
    test_split: str | None = None,
    crop: float | None = None,
    resample: str = "bilinear",
    context: int | None = None,
    tokenizer: str | os.PathLike[str] = "bytes",
    test_path: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    workers: int = 0,
) -> Dataset:
    """A dataset by its name, with nothing of a large one read yet.

    Args:
      name: digits, mnist, fashion_mnist or cifar10 (held in memory); imagenet2012,
        tiny_imagenet or any other dataset of labelled images that TFDS has prepared
        as ArrayRecord files (read as it is needed); noise of any shape, as
        "fake:224x224x3:1000"; or text, as "text:FILE" or "text:DIRECTORY", or noise
        of tokens, "fake:CONTEXT:VOCABULARY".
      data_dir: a TFDS data directory. None: TFDS_DATA_DIR, where that is set, then
        ~/tensorflow_datasets.
      image_size: side, or (height, width), that images are brought to; None leaves
        them as they are, where all are of one size.
      augment: random changes of the training images, in order: names out of
        `augment.OPERATIONS`, or {"name": ..., option: value}.
      train_split: as TFDS names it, slices included.
      test_split: likewise. None: "test", or else "validation".
      crop: share of the shorter side that is kept for evaluation; None: 0.875 for
        photographs of many sizes, all of it for those of one size.
      resample: how images are resized where no augmentation does it: "bilinear",
        "bicubic" or "nearest".
      context: of text: tokens that a model sees at once.
      tokenizer: of text: "bytes", or the path of a Hugging Face tokenizer.json.
      test_path: of text: a file or directory to test on; None: the last tenth.
      threads: that prepare batches in each process; None: one a core, 8 at most.
      workers: of images: Python processes that prepare batches in each process of the
        run, for hosts of many cores, where Python's lock holds threads up; 0: threads
        alone.

    Raises:
      UserError: an unknown name, a dataset that is not prepared (the message gives
        the command), an unknown augmentation or option, a size that is missing, or
        an option that means nothing for this dataset.

    >>> dataset = open_dataset("fake:32x32x3:10")
    >>> dataset.spec(64)["image"]
    ShapeDtypeStruct(shape=(64, 32, 32, 3), dtype=uint8)
    """
    operations = augmentations.parse(augment)
    if threads is None:
        threads = min(8, os.cpu_count() or 1)
    pool = Workers(threads, workers)
    splits = {"train_split": train_split != "train", "test_split": test_split}
    if name.startswith("text:"):
        _refuse(name, {**splits, "image_size": image_size, "augment": operations})
        resampled = resample != "bilinear"
        _refuse(name, {"crop": crop, "resample": resampled, "workers": workers})
        if context is None:
            raise UserError(f"{name} is text; give context, the tokens in a window.")
        return open_text(
            name.removeprefix("text:"),
            context=context,
            tokenizer=tokenizer,
            test_path=test_path,
            workers=pool,
        )
    if is_fake_text(name):
        return fake_text(name, pool)
    _refuse(name, {"context": context, "test_path": test_path})
    _refuse(name, {"tokenizer": tokenizer != "bytes"})
    size = _size(image_size)
    if resample not in augmentations.RESAMPLE:
        raise UserError(
            f"resample is {resample!r}; choose of {', '.join(augmentations.RESAMPLE)}."
        )
    if crop is not None and not 0 < crop <= 1:
        raise UserError(f"crop is {crop}, and must be more than 0 and at most 1.")
    if name.startswith("fake:"):
        _refuse(name, splits)
        found = _fake(name)
    elif name in images.DATASETS:
        _refuse(name, splits)
        found = _in_memory(name, data_dir)
    else:
        found = _prepared(name, data_dir, train_split, test_split)
    if size is None and found.size is None:
        raise UserError(
            f"The images of {name} are of many sizes; give the one that the model "
            "takes, as image_size, such as 224."
        )
    return found.build(size, operations, crop, resample, pool)


def _refuse(name: str, options: dict[str, Any]) -> None:
    for option, given in options.items():
        if given:
            raise UserError(f"{option} means nothing for {name}; leave it out.")


def _size(image_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    both = image_size if isinstance(image_size, Sequence) else (image_size,) * 2
    whole = all(isinstance(x, int) and not isinstance(x, bool) for x in both)
    # 2^15 pixels a side are more than any codec and resize here can take.
    if len(both) != 2 or not whole or not 1 <= min(both) <= max(both) <= 2**15:
        raise UserError(
            f"image_size is {image_size}; give a side or (height, width), in "
            "pixels, each from 1 to 32768."
        )
    return both[0], both[1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Found:
    """A dataset before its images are brought to a size."""

    name: str
    classes: int
    size: tuple[int, int] | None  # of all images; None: of many sizes
    channels: int
    train: sources.Source
    test: sources.Source
    encoded: bool  # the source gives files, not arrays
    known: tuple[np.ndarray, np.ndarray] | None

    def build(
        self,
        size: tuple[int, int] | None,
        operations: Sequence[augmentations.Operation],
        crop: float | None,
        resample: str,
        workers: Workers,
    ) -> ImageDataset:
        height, width = shape2 = size or self.size or (0, 0)
        shape = (height, width, self.channels)
        if crop is None:
            crop = 1.0 if self.size else _PHOTOGRAPH_CROP
        options: dict[str, Any] = {"crop": crop, "resample": resample}
        fit = augmentations.Transform((), shape, **options)
        change = augmentations.Transform(operations, shape, **options)
        untouched = shape2 == self.size and not self.encoded
        return ImageDataset(
            name=self.name,
            out_features=self.classes,
            input_shape=shape,
            _train=self.train,
            _test=self.test,
            _augment=None if untouched and not operations else change,
            _fit=None if untouched else fit,
            _workers=workers,
            _known=self.known,
        )


def from_memory(data: images.ImageData) -> ImageDataset:
    """A dataset of images that are in memory already."""
    return _held(data).build(None, (), None, "bilinear", Workers())


def _in_memory(name: str, data_dir: str | os.PathLike[str] | None) -> _Found:
    return _held(images.load(name, data_dir))


def _held(data: images.ImageData) -> _Found:
    height, width, channels = data.train_images.shape[1:]
    return _Found(
        name=data.name,
        classes=data.num_classes,
        size=(height, width),
        channels=channels,
        train=sources.Arrays(data.train_images, data.train_labels),
        test=sources.Arrays(data.test_images, data.test_labels),
        encoded=False,
        known=(data.mean, data.std),
    )


# As many as ImageNet has would be as good; these few make an epoch and a test short.
_FAKE_TRAIN, _FAKE_TEST = 10_000, 100


def _fake(name: str) -> _Found:
    (height, width, channels), classes = sources.parse_fake(name)
    uniform = np.full(channels, 127.5, np.float32), np.full(channels, 73.9, np.float32)
    return _Found(
        name=name,
        classes=classes,
        size=(height, width),
        channels=channels,
        train=sources.Noise(_FAKE_TRAIN, (height, width, channels), classes, 0),
        test=sources.Noise(_FAKE_TEST, (height, width, channels), classes, 1),
        encoded=False,
        known=uniform,
    )


def _prepared(
    name: str,
    data_dir: str | os.PathLike[str] | None,
    train_split: str,
    test_split: str | None,
) -> _Found:
    places = prepared.data_dirs(data_dir)
    builder = prepared.find(name, places)
    if builder is None:
        raise UserError(_unknown(name) or prepared.how_to_prepare(name, places))
    with intact.reading(builder.data_dir):
        keys = _keys(builder)
        if test_split is None:
            test_split = _test_split(builder)
        lost = {train_split, test_split} - set(builder.info.splits)
    try:
        train = sources.Records(builder, train_split, keys)
        test = sources.Records(builder, test_split, keys)
    except NotImplementedError as error:  # TFRecord files, which need TensorFlow
        raise UserError(prepared.not_array_record(builder, places)) from error
    except Exception as error:
        if lost:
            raise UserError(
                f"{name} has no split {train_split!r} or {test_split!r}; "
                f"{builder.data_dir} has {', '.join(builder.info.splits)}."
            ) from error
        with intact.reading(builder.data_dir):
            raise
    with intact.reading(builder.data_dir):
        height, width, channels = train.shape
        label = builder.info.features[keys[1]]
        intact.compare_classes(builder.data_dir, train, keys[1], label.num_classes)
    return _Found(
        name=name,
        classes=label.num_classes,
        size=(height, width) if height and width else None,
        channels=1 if channels == 1 else 3,
        train=train,
        test=test,
        encoded=True,
        known=_STATISTICS.get(name.split("/")[0].split(":")[0]),
    )


def _unknown(name: str) -> str | None:
    """What to say of a name that neither we nor TFDS know."""
    known = [
        *images.DATASETS,
        "tiny_imagenet",
        *tfds.list_builders(with_community_datasets=False),
    ]
    if name.split("/")[0].split(":")[0] in known:
        return None
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "is it a TFDS name?"
    return (
        f"There is no dataset {name!r}; {hint} Names are those of prepared TFDS "
        "datasets, text:FILE, or fake:224x224x3:1000."
    )


def _keys(builder: tfds.core.DatasetBuilder) -> tuple[str, str]:
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
                f"{kind.__name__} feature {key!r}, but {', '.join(features)}."
            )
    return image, label


def _test_split(builder: tfds.core.DatasetBuilder) -> str:
    splits = builder.info.splits
    # The labels of ImageNet's test split were never published.
    names = (
        ("validation",) if builder.name == "imagenet2012" else ("test", "validation")
    )
    for name in names:
        if name in splits:
            return name
    raise UserError(
        f"{builder.name} has no split {' or '.join(names)}; name one of "
        f"{', '.join(splits)}, or a slice, as test_split."
    )

"""A dataset: batches of a training and a test split, and model inputs."""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from mupax import zoo
from mupax.zoo.addresses import public

from .. import memory
from ..errors import UserError
from . import images
from .pipeline import Batches, Hosts, Load, Workers, iterate, run_through

Batch = dict[str, np.ndarray]

_MEASURED = 1024  # training images for measuring statistics
_COMPARED = 256  # examples of each split in the fingerprint


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """A dataset with a training and a test split.

    Batches of images have "image", uint8 (b, h, w, c), and "label", int32 (b,). Batches
    of text have "tokens", int32 (b, context + 1).

    Attributes:
      name: that it was opened with; addresses lose user, password and query.
      kind: "images" or "text".
      out_features: number of classes, or size of the vocabulary.
      input_shape: (height, width, channels), or (context,).
      train_size: number of training examples.
      test_size: number of test examples.
      load_train: loads training examples, augmented.
      load_plain: loads training examples, not augmented.
      load_test: loads test examples.
      draws: random numbers per augmented example.
      workers: prepare batches.
      known_statistics: mean and standard deviation of raw pixels, if known.
      decode: maps tokens to text.
      tokenizer: the tokenizer.json of text; None for bytes.
      labels: names of the classes, if they have any.
      white: the raw value of a white pixel.
      preprocessing: of test images; its statistics are not used. None for text.
      read: read training and test examples as they are stored, for the fingerprint.
    """

    name: str
    kind: str
    out_features: int
    input_shape: tuple[int, ...]
    train_size: int
    test_size: int
    load_train: Load
    load_plain: Load
    load_test: Load
    draws: int = 0
    workers: Workers = dataclasses.field(default_factory=Workers)
    known_statistics: tuple[np.ndarray, np.ndarray] | None = None
    decode: Callable[[Sequence[int] | np.ndarray], str] | None = None
    tokenizer: pathlib.Path | None = None
    labels: tuple[str, ...] | None = None
    white: int = 255
    preprocessing: zoo.DataConfig | None = None
    read: tuple[Callable[[np.ndarray], Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", public(self.name))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the sizes and of some examples of both splits; empty if not known.

        It does not see a change of the other examples.

        Raises:
          UserError: an example is damaged.
        """
        if not self.read:
            return ""
        sizes = self.train_size, self.test_size
        digest = hashlib.sha256(str((*sizes, self.out_features)).encode())
        for read, size in zip(self.read, sizes, strict=True):
            indices = np.linspace(0, size - 1, min(size, _COMPARED)).astype(np.int64)
            for leaf in jax.tree.leaves(read(indices)):
                whole = isinstance(leaf, bytes)
                digest.update(leaf if whole else np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()[:16]

    def spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a training batch. Reads nothing."""
        if self.kind == "text":
            shape = batch_size, self.input_shape[0] + 1
            return {"tokens": jax.ShapeDtypeStruct(shape, np.int32)}
        return {
            "image": jax.ShapeDtypeStruct((batch_size, *self.input_shape), np.uint8),
            "label": jax.ShapeDtypeStruct((batch_size,), np.int32),
        }

    def train(
        self,
        batch_size: int,
        seed: int,
        *,
        start: int = 0,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> Batches:
        """Endless training batches: this process's contiguous rows.

        Args:
          batch_size: examples per step, over all processes.
          seed: of order and augmentation, 0 <= seed < 2**32.
          start: number of the first batch, e.g. the step that a run resumes from.
          process_index: by default jax.process_index().
          process_count: by default jax.process_count().
        """
        self.check_batch(batch_size)
        self._check_memory(batch_size, f"A batch of {batch_size} examples of")
        return iterate(
            self.train_size,
            self.load_train,
            batch_size,
            seed,
            draws=self.draws,
            hosts=Hosts.of(process_index, process_count),
            workers=self.workers,
            start=start,
        )

    def test(
        self,
        batch_size: int,
        *,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> Batches:
        """Every test example once. The last batch is padded.

        Batches are those of `train` with a key "counts", float32 (rows,): 1 for an
        example, 0 for padding.
        """
        return run_through(
            self.test_size,
            self.load_test,
            batch_size,
            hosts=Hosts.of(process_index, process_count),
            # Worker processes would take seconds to start, at each evaluation.
            workers=dataclasses.replace(self.workers, processes=0),
        )

    def check_batch(self, batch_size: int) -> None:
        """Raise UserError if a batch is larger than the training split."""
        if batch_size > self.train_size:
            raise UserError(
                f"batch_size {batch_size} is more than the {self.train_size} training "
                f"examples of {self.name}; make it smaller."
            )

    def training_arrays(self) -> Batch:
        """The training split in memory, not augmented."""
        self._check_memory(self.train_size, "The training split of")
        return self._plain(np.arange(self.train_size))

    def normalize(self, batch: dict[str, Array]) -> dict[str, Array]:
        """Model inputs: images as float32 of mean 0 and standard deviation 1."""
        if self.kind == "text":
            return batch
        return {**batch, "image": images.normalize(batch["image"], *self.statistics)}

    @functools.cached_property
    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of raw pixels, each float32 (channels,).

        They are known for ImageNet and for data in memory. Otherwise they are measured
        on 1,024 evenly spaced training images.
        """
        if self.known_statistics:
            return self.known_statistics
        n = min(_MEASURED, self.train_size)
        indices = np.arange(n) * self.train_size // n
        return images.pixel_statistics(self._plain(indices)["image"])

    @property
    def data_config(self) -> zoo.DataConfig:
        """The preprocessing of test images, as `zoo.save` writes it."""
        if self.preprocessing is None:
            raise ValueError(f"{self.name} is text, which has no such preprocessing")
        channels = self.input_shape[2]
        mean, std = (
            tuple(float(x) / self.white for x in np.broadcast_to(values, channels))
            for values in self.statistics
        )
        return dataclasses.replace(
            self.preprocessing, mean=mean, std=std, labels=self.labels
        )

    def _plain(self, indices: np.ndarray) -> Batch:
        return self.load_plain(indices, np.empty((len(indices), 0)))

    def bytes_of(self, examples: int) -> int:
        """Bytes of this number of examples in a batch."""
        return sum(s.size * s.dtype.itemsize for s in self.spec(examples).values())

    def _check_memory(self, examples: int, what: str) -> None:
        memory.check(
            self.bytes_of(examples),
            f"{what} {self.name}",
            "make the batch, data.image_size or data.context smaller, or use less data",
        )

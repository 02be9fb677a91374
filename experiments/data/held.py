"""Data that a sweep holds whole on the device: images, or windows of tokens."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array, Int32

from ..errors import UserError
from . import datasets, images
from .text import TextDataset, is_fake_text


class Held(Protocol):
    """Training examples as arrays, and what a model of them needs to know."""

    @property
    def name(self) -> str:
        """As it was asked for."""

    @property
    def num_classes(self) -> int:
        """Classes, or size of the vocabulary."""

    @property
    def examples(self) -> tuple[np.ndarray, ...]:
        """Arrays with a leading axis of training examples."""

    @property
    def model_options(self) -> dict[str, Any]:
        """What tells a zoo model the sizes of its input and output."""

    def inputs(self, batch: tuple[Array, ...]) -> tuple[Array, Array]:
        """(what the model takes, labels) of rows of `examples`; works under jit."""


@dataclasses.dataclass(frozen=True, eq=False)
class TextData:
    """The training windows of a text.

    Attributes:
      name: as it was asked for.
      tokens: shape (windows, context + 1).
      num_classes: size of the vocabulary.
    """

    name: str
    tokens: Int32[np.ndarray, "windows tokens"]
    num_classes: int

    @property
    def examples(self) -> tuple[np.ndarray, ...]:
        """The windows."""
        return (self.tokens,)

    @property
    def model_options(self) -> dict[str, Any]:
        """Vocabulary and context."""
        return {"vocab_size": self.num_classes, "context": self.tokens.shape[1] - 1}

    def inputs(self, batch: tuple[Array, ...]) -> tuple[Array, Array]:
        """All tokens but the last, and all but the first."""
        return batch[0][:, :-1], batch[0][:, 1:]


def hold(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> images.ImageData | TextData:
    """A dataset, whole.

    Args:
      name: one of `images.DATASETS`, "text:FILE" or "fake:CONTEXT:VOCABULARY".
      data_dir: a TFDS data directory; see `images.load`.
      options: of text, as `open_dataset` takes them: context, tokenizer.

    Raises:
      UserError: a name or an option that is none, or data that is not there.

    Examples:
      >>> hold("fake:16:100").tokens.shape
      (9000, 17)
    """
    options = dict(options or {})
    if name.startswith("text:") or is_fake_text(name):
        try:
            found = datasets.open_dataset(name, data_dir, **options)
        except TypeError as error:
            raise UserError(f"data: {str(error).split('() ')[-1]}") from None
        assert isinstance(found, TextDataset)
        batch = found.windows()
        return TextData(name, batch["tokens"], found.out_features)
    if options:
        raise UserError(
            f"data.{next(iter(options))} means nothing for {name} in a sweep; leave it "
            "out"
        )
    return images.load(name, data_dir)

"""Data that a sweep holds whole on the device: images, or windows of tokens."""

import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array

from ..errors import UserError
from . import datasets, images
from .text import TextData


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


def hold(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> images.ImageData | TextData:
    """A dataset, whole.

    Args:
      name: as `open_dataset` takes it: digits, mnist, "text:FILE", ...
      data_dir: a TFDS data directory; see `images.load`.
      options: of `open_dataset`, as image_size, or context and tokenizer of text.
        Nothing is augmented.

    Raises:
      UserError: a name or an option that is none, or data that is not there.

    Examples:
      >>> hold("fake:16:100").tokens.shape
      (9000, 17)
    """
    options = dict(options or {})
    if name in images.DATASETS and not options:
        return images.load(name, data_dir)
    if options.get("augment"):
        raise UserError("data.augment: a sweep trains on images as they are")
    try:
        found: Any = datasets.open_dataset(name, data_dir, **options)
    except TypeError as error:
        raise UserError(f"data: {str(error).split('() ')[-1]}") from None
    return found.whole()

"""Datasets: reading, order of the examples, augmentation, normalization."""

from . import augment, mixing
from .dataset import Dataset
from .datasets import (
    REGISTERED,
    examples_of,
    open_dataset,
    register_dataset,
)
from .images import normalize
from .pipeline import BatchIterator, batch_indices
from .prefetch import Prefetched

__all__ = [
    "REGISTERED",
    "BatchIterator",
    "Dataset",
    "Prefetched",
    "augment",
    "batch_indices",
    "examples_of",
    "mixing",
    "normalize",
    "open_dataset",
    "register_dataset",
]

"""Datasets: reading, order of the examples, augmentation, normalization."""

from . import augment, mixing
from .dataset import Dataset
from .datasets import (
    DATASETS,
    REGISTERED,
    examples_of,
    from_memory,
    load,
    open_dataset,
    register_dataset,
)
from .images import ImageData, normalize
from .pipeline import BatchIterator, batch_indices
from .prefetch import Prefetched

__all__ = [
    "DATASETS",
    "REGISTERED",
    "BatchIterator",
    "Dataset",
    "ImageData",
    "Prefetched",
    "augment",
    "batch_indices",
    "examples_of",
    "from_memory",
    "load",
    "mixing",
    "normalize",
    "open_dataset",
    "register_dataset",
]

"""Datasets: reading, order of the examples, augmentation, normalization."""

from . import augment, mixing
from .dataset import Dataset
from .datasets import from_memory, open_dataset
from .images import DATASETS, ImageData, load, normalize, prepare_digits
from .pipeline import BatchIterator, batch_indices
from .prefetch import Prefetched

__all__ = [
    "DATASETS",
    "BatchIterator",
    "Dataset",
    "ImageData",
    "Prefetched",
    "augment",
    "batch_indices",
    "from_memory",
    "load",
    "mixing",
    "normalize",
    "open_dataset",
    "prepare_digits",
]

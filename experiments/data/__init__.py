"""Datasets for the experiments: read, ordered, augmented, normalized."""

from . import augment, mixing
from .datasets import Dataset, ImageDataset, from_memory, open_dataset
from .images import DATASETS, ImageData, load, normalize, prepare_digits
from .pipeline import BatchIterator, batch_indices, batches
from .prefetch import Prefetched, prefetch
from .text import TextDataset

__all__ = [
    "DATASETS",
    "BatchIterator",
    "Dataset",
    "ImageData",
    "ImageDataset",
    "Prefetched",
    "TextDataset",
    "augment",
    "batch_indices",
    "batches",
    "from_memory",
    "load",
    "mixing",
    "normalize",
    "open_dataset",
    "prefetch",
    "prepare_digits",
]

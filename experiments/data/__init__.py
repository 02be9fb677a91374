"""Datasets for the experiments: read, ordered, augmented, normalized."""

from . import augment, mixing
from .datasets import Dataset, ImageDataset, from_memory, open_dataset
from .held import Held, hold
from .images import DATASETS, ImageData, load, normalize, prepare_digits
from .pipeline import BatchIterator, batch_indices, batches
from .prefetch import Prefetched, prefetch
from .text import TextData, TextDataset

__all__ = [
    "DATASETS",
    "BatchIterator",
    "Dataset",
    "Held",
    "ImageData",
    "ImageDataset",
    "Prefetched",
    "TextData",
    "TextDataset",
    "augment",
    "batch_indices",
    "batches",
    "from_memory",
    "hold",
    "load",
    "mixing",
    "normalize",
    "open_dataset",
    "prefetch",
    "prepare_digits",
]

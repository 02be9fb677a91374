"""Datasets for the experiments: read, ordered, normalized."""

from .images import DATASETS, ImageData, load, normalize, prepare_digits
from .pipeline import batch_indices, batches

__all__ = [
    "DATASETS",
    "ImageData",
    "batch_indices",
    "batches",
    "load",
    "normalize",
    "prepare_digits",
]

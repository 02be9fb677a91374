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
from .pipeline import batch_indices, placed_ahead

__all__ = [
    "REGISTERED",
    "Dataset",
    "augment",
    "batch_indices",
    "examples_of",
    "mixing",
    "normalize",
    "open_dataset",
    "placed_ahead",
    "register_dataset",
]

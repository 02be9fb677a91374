"""scikit-learn's digits, and pairs of them. Neither needs a download."""

import gzip
import hashlib
import importlib.util
import math
import pathlib

import numpy as np

from .images import ImageData

# Parts of the definition of the datasets.
_SPLIT_SEED = 0
_TEST_FRACTION = 0.2
_SUMS_SEED = 0
_SUMS = {"train": 20_000, "test": 2_000}


def digits() -> ImageData:
    """1,797 scanned digits, 8x8 pixels of 0..16: 1,437 to train and 360 to test.

    The test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak,
    1998). Both splits are stratified by class, and have the order in which TFDS would
    store them: by the MD5 of the split's name and the example's index.
    """
    table = _table()
    images, labels = table[:, :64].reshape(-1, 8, 8, 1), table[:, 64].astype(np.int64)
    train, test = _split(labels)

    def ordered(split: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = [hashlib.md5(f"{split}{k}".encode()).digest() for k in indices]
        order = [k for _, k in sorted(zip(places, indices, strict=True))]
        return images[order], labels[order]

    return ImageData(
        "digits", ordered("train", train), ordered("test", test), 10, white=16
    )


def _table() -> np.ndarray:
    """scikit-learn's file, whose import takes half a second: 64 pixels and a label."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    path = pathlib.Path(package.origin).parent / "datasets/data/digits.csv.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    return np.array([row.split(",") for row in text.split()], np.uint8)


def _split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the two splits, those of scikit-learn's `train_test_split`."""
    rng = np.random.RandomState(_SPLIT_SEED)
    counts = np.bincount(labels)
    test = math.ceil(_TEST_FRACTION * len(labels))
    sizes = _shares(counts, len(labels) - test, rng)
    _shares(counts - sizes, test, rng)  # draws as scikit-learn does
    orders = [rng.permutation(np.flatnonzero(labels == c)) for c in range(len(counts))]
    parts = [(x[:n], x[n:]) for x, n in zip(orders, sizes, strict=True)]
    first, second = map(np.concatenate, zip(*parts, strict=True))
    return first, second


def _shares(counts: np.ndarray, total: int, rng: np.random.RandomState) -> np.ndarray:
    """`total` in proportion to `counts`; the largest remainders are rounded up."""
    exact = counts / counts.sum() * total
    sizes = np.floor(exact).astype(int)
    remainders = exact - sizes
    for value in np.unique(remainders)[::-1]:
        if missing := total - sizes.sum():
            (tied,) = np.nonzero(remainders == value)
            sizes[rng.choice(tied, min(len(tied), missing), replace=False)] += 1
    return sizes


def digit_sums() -> ImageData:
    """Pairs of digits side by side, labelled with their sum: 19 classes, 0 to 18.

    20,000 pairs of training images and 2,000 pairs of test images, drawn with a fixed
    seed. No test pair holds an image of a training pair.
    """
    single = digits()
    rng = np.random.default_rng(_SUMS_SEED)

    def pairs(
        images: np.ndarray, labels: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        left, right = rng.integers(len(images), size=(2, count))
        both = np.concatenate([images[left], images[right]], axis=2)
        return both, labels[left] + labels[right]

    train = pairs(single.train_images, single.train_labels, _SUMS["train"])
    test = pairs(single.test_images, single.test_labels, _SUMS["test"])
    classes = 2 * single.num_classes - 1
    return ImageData("digit_sums", train, test, classes)

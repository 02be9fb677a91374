"""scikit-learn's digits, and pairs of them. Neither needs a download."""

import hashlib

import numpy as np

from .splits import Split

_SUMS_SEED = 0
_SUMS = {"train": 20_000, "test": 2_000}


def digits() -> dict[str, Split]:
    """1,797 scanned digits, 8x8 pixels of 0..16: 1,437 to train and 360 to test.

    The test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak,
    1998). Both splits are stratified by class, and have the order in which TFDS would
    store them: by the MD5 of the split's name and the example's index.
    """
    from sklearn import datasets, model_selection  # slow to import

    table = datasets.load_digits()
    images, labels = table.images.astype(np.uint8)[..., None], table.target
    train, test = model_selection.train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )

    def ordered(split: str, indices: np.ndarray) -> Split:
        places = [hashlib.md5(f"{split}{k}".encode()).digest() for k in indices]
        order = [k for _, k in sorted(zip(places, indices, strict=True))]
        return Split(images[order], labels[order])

    return {"train": ordered("train", train), "test": ordered("test", test)}


def digit_sums() -> dict[str, Split]:
    """Pairs of digits side by side, labelled with their sum: 19 classes, 0 to 18.

    20,000 pairs of training images and 2,000 pairs of test images, drawn with a fixed
    seed. No test pair holds an image of a training pair.
    """
    rng = np.random.default_rng(_SUMS_SEED)

    def pairs(single: Split, count: int) -> Split:
        left, right = rng.integers(len(single.images), size=(2, count))
        both = np.concatenate([single.images[left], single.images[right]], axis=2)
        return Split(both, single.labels[left] + single.labels[right])

    return {name: pairs(split, _SUMS[name]) for name, split in digits().items()}

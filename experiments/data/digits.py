"""scikit-learn's digits, and pairs of them. Neither needs a download."""

import hashlib

import numpy as np

from .images import ImageData

_SUMS_SEED = 0
_SUMS = {"train": 20_000, "test": 2_000}


def digits() -> ImageData:
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

    def ordered(split: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = [hashlib.md5(f"{split}{k}".encode()).digest() for k in indices]
        order = [k for _, k in sorted(zip(places, indices, strict=True))]
        return images[order], labels[order]

    return ImageData(
        "digits",
        ordered("train", train),
        ordered("test", test),
        10,
        white=16,
    )


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

"""scikit-learn's digits, and pairs of them. Neither needs a download."""

import gzip
import hashlib
import importlib.util
import pathlib

import numpy as np

from .images import ImageData

# Parts of the definition of the datasets. A bit of each image: is it a test image?
# As in scikit-learn: train_test_split(..., test_size=0.2, stratify=labels,
# random_state=0).
_TEST = bytes.fromhex(
    "000004883524104000064100934205001a00080100240028062c12001000940a009019120420"
    "f8a0028110a000080a8820441524494240a00a0000004004d80000818020004805c400104008"
    "a0100005404800301000020ec409000224840083a8013c20a6980a0000000b08400804a01848"
    "02024041c1008004404684376a810216004480004042a0a4180a5000840b8561c60810800800"
    "4c80c02004068e00010882008100380803c008190000100e01008410a0210033282904c044c0"
    "80680e0102830082008822a6402c24042108a860809081a00c02820242120138a41500"
)
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
    is_test = np.unpackbits(np.frombuffer(_TEST, np.uint8), count=len(labels)) > 0

    def ordered(split: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = [hashlib.md5(f"{split}{k}".encode()).digest() for k in indices]
        order = [k for _, k in sorted(zip(places, indices, strict=True))]
        return images[order], labels[order]

    return ImageData(
        "digits",
        ordered("train", np.flatnonzero(~is_test)),
        ordered("test", np.flatnonzero(is_test)),
        10,
        white=16,
    )


def _table() -> np.ndarray:
    """scikit-learn's file, read without importing it: 64 pixels and a label a row."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    path = pathlib.Path(package.origin).parent / "datasets/data/digits.csv.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    return np.array([row.split(",") for row in text.split()], np.uint8)


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

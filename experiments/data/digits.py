"""scikit-learn's digits as a TFDS dataset, which needs no download."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from PIL import Image
from sklearn import datasets, model_selection

# Part of the definition of the dataset.
_SPLIT_SEED = 0
_TEST_FRACTION = 0.2


class Digits(tfds.core.GeneratorBasedBuilder):
    """1,797 scanned digits, 8x8 pixels of 0..16: 1,437 to train and 360 to test.

    Both splits are stratified by class. Preparing takes a second, without network and
    TensorFlow.
    """

    VERSION = tfds.core.Version("1.0.0")
    # Without this path, TFDS 4.9 needs importlib_resources, which nothing installs.
    code_path = epath.Path(__file__)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=(
                "The test part of 'Optical Recognition of Handwritten Digits' "
                "(Alpaydin and Kaynak, 1998), as scikit-learn carries it: 8x8 counts "
                "of 0..16."
            ),
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(
                        shape=(8, 8, 1), encoding_format="png"
                    ),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://scikit-learn.org/stable/datasets/toy_dataset.html",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager  # nothing is downloaded
        digits = datasets.load_digits()
        train, test = model_selection.train_test_split(
            np.arange(len(digits.target)),
            test_size=_TEST_FRACTION,
            stratify=digits.target,
            random_state=_SPLIT_SEED,
        )
        return {
            name: self._generate_examples(digits.images, digits.target, indices)
            for name, indices in (("train", train), ("test", test))
        }

    def _generate_examples(
        self, images: np.ndarray, labels: np.ndarray, indices: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in indices:
            # TFDS needs TensorFlow to encode arrays, and stores encoded bytes as is.
            png = io.BytesIO()
            Image.fromarray(images[index].astype(np.uint8)).save(png, format="PNG")
            png.seek(0)
            yield int(index), {"image": png, "label": int(labels[index])}

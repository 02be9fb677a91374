"""The digits that scikit-learn carries, as a TFDS dataset that needs no download."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from PIL import Image
from sklearn import datasets, model_selection

# The split is part of the dataset: another seed would be another dataset.
_SPLIT_SEED = 0
_TEST_FRACTION = 0.2


class Digits(tfds.core.GeneratorBasedBuilder):
    """1,797 scanned digits, 8x8 pixels of 0..16, split 1,437 train and 360 test.

    Both splits hold the ten classes in the same proportions. Preparing takes about
    a second and needs neither the network nor TensorFlow.
    """

    VERSION = tfds.core.Version("1.0.0")
    # TFDS 4.9 looks its builders' files up with importlib_resources, which nothing
    # installs on Python 3.9 and later; a known path spares it the look-up.
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
            # TFDS encodes arrays with TensorFlow, and takes encoded bytes as they are.
            png = io.BytesIO()
            Image.fromarray(images[index].astype(np.uint8)).save(png, format="PNG")
            png.seek(0)
            yield int(index), {"image": png, "label": int(labels[index])}

"""Prepare Tiny ImageNet as a TFDS dataset.

    python -m mupax.experiments.data.tiny_imagenet tiny-imagenet-200.zip DATA_DIR

The file is http://cs231n.stanford.edu/tiny-imagenet-200.zip (ImageNet's terms:
research and education only). TensorFlow is not needed: JPEG files are stored as is.
"""

import io
import os
import pathlib
import posixpath
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds
from etils import epath

from ..errors import UserError


class TinyImagenet(tfds.core.GeneratorBasedBuilder):
    """200 classes of ImageNet, 64x64 pixels, some grey; 500 and 50 images per class."""

    name = "tiny_imagenet"
    VERSION = tfds.core.Version("1.0.0")
    # Without this path, TFDS 4.9 needs importlib_resources, which nothing installs.
    code_path = epath.Path(__file__)

    def __init__(self, *, archive: zipfile.ZipFile, **options: Any):
        self._archive = archive
        self._root = _root(archive)
        # The order of this file is the usual order of the labels.
        self._classes = archive.read(f"{self._root}wnids.txt").decode().split()
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Tiny-ImageNet-200: the original JPEG files.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(
                        shape=(64, 64, 3), encoding_format="jpeg"
                    ),
                    "label": tfds.features.ClassLabel(names=self._classes),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager  # the archive is here already
        train = [
            (path, path.removeprefix(self._root).split("/")[1])
            for path in self._archive.namelist()
            if path.startswith(f"{self._root}train/") and path.endswith(".JPEG")
        ]
        table = self._archive.read(f"{self._root}val/val_annotations.txt").decode()
        rows = [line.split("\t")[:2] for line in table.splitlines()]
        validation = [(f"{self._root}val/images/{file}", name) for file, name in rows]
        return {
            "train": self._generate_examples(train),
            "validation": self._generate_examples(validation),
        }

    def _generate_examples(
        self, files: list[tuple[str, str]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, name in files:
            # TFDS needs TensorFlow to encode arrays, and stores encoded bytes as is.
            image = io.BytesIO(self._archive.read(path))
            yield posixpath.basename(path), {"image": image, "label": name}


def prepare_tiny_imagenet(
    archive: str | os.PathLike[str], data_dir: str | os.PathLike[str]
) -> None:
    """Write tiny-imagenet-200.zip to a TFDS data directory, if it is not there yet.

    Raises:
      UserError: not the right archive, or data_dir cannot be written.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            TinyImagenet(
                archive=opened, data_dir=os.fspath(data_dir), file_format="array_record"
            ).download_and_prepare()
    except (zipfile.BadZipFile, FileNotFoundError, KeyError) as error:
        raise UserError(
            f"{os.fspath(archive)} is not the Tiny ImageNet archive ({error}); get "
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip."
        ) from error
    except OSError as error:
        raise UserError(
            f"Cannot write Tiny ImageNet to {os.fspath(data_dir)} ({error}); give "
            "another directory."
        ) from error


def _root(archive: zipfile.ZipFile) -> str:
    """The folder in the archive that holds wnids.txt, with its slash."""
    for path in archive.namelist():
        if posixpath.basename(path) == "wnids.txt":
            return path.removesuffix("wnids.txt")
    raise KeyError("there is no wnids.txt in it")


def main(argv: list[str]) -> int:
    """Run the command of this module. Returns 2 for wrong arguments or failures."""
    if len(argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        prepare_tiny_imagenet(pathlib.Path(argv[1]), pathlib.Path(argv[2]).expanduser())
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

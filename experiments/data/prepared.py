"""Find datasets that TFDS prepared, and tell how to prepare a missing one."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import tensorflow_datasets as tfds

from .. import remote
from ..errors import UserError, reason
from . import intact

# Datasets that TFDS cannot download.
_FETCHED_BY_HAND = {
    "imagenet2012": (
        " ImageNet is not downloaded for you: first put ILSVRC2012_img_train.tar and "
        "ILSVRC2012_img_val.tar, from https://image-net.org/download.php, into {target}"
        "/downloads/manual."
    ),
}


def data_dirs(data_dir: str | os.PathLike[str] | None, name: str) -> list[Path]:
    """The TFDS data directories to search: `data_dir`, or by default the user's.

    The dataset `name` is copied here if its directory is in object storage.
    """
    if data_dir is not None:
        return [_local(data_dir, name)]
    environment = os.environ.get("TFDS_DATA_DIR")
    places = [_local(environment, name)] if environment else []
    # TFDS_DATA_DIR is often read-only; users prepare datasets in their home.
    return [*places, Path.home() / "tensorflow_datasets"]


def _local(data_dir: str | os.PathLike[str], name: str) -> Path:
    if not remote.is_remote(data_dir):
        return Path(data_dir).expanduser()
    dataset = name.partition(":")[0].partition("/")[0]
    return remote.local(f"{os.fspath(data_dir).rstrip('/')}/{dataset}").parent


def find(name: str, places: Sequence[Path]) -> tfds.core.DatasetBuilder | None:
    """The prepared dataset of this name in the first directory that has it.

    Raises:
      UserError: its metadata is damaged or incomplete.
    """
    for place in places:
        if (builder := _find(name, place)) is not None:
            return builder
    if message := intact.incomplete(name, places):
        raise UserError(message)
    return None


def _find(name: str, place: Path) -> tfds.core.DatasetBuilder | None:
    try:
        # From the files, so that any version of the dataset works.
        return tfds.core.read_only_builder.builder_from_files(
            name, data_dir=os.fspath(place)
        )
    except tfds.core.registered.DatasetNotFoundError:
        return None
    except Exception as error:
        folder = _version(name, place)
        if folder is None:
            raise UserError(
                f"{name!r} cannot be read from {os.fspath(place)!r} ({reason(error)}); "
                "check data_dir"
            ) from error
        with intact.reading(folder):
            raise
    return None


def _version(name: str, place: Path) -> Path | None:
    """The folder of a dataset's version that contains metadata."""
    with contextlib.suppress(OSError, ValueError):
        base = place / name.split(":")[0]
        folders = [base, *sorted(base.glob("*"), reverse=True)]
        return next(
            (f for f in folders if any((f / m).exists() for m in intact.METADATA)), None
        )
    return None


def how_to_prepare(name: str, places: Sequence[Path]) -> str:
    """The error for a missing dataset, with the command that prepares it."""
    command = _command(name, os.fspath(places[0]))
    return f"{name} is not in {listed(places)}; prepare it once: {command}"


def not_array_record(builder: tfds.core.DatasetBuilder) -> str:
    """The error for TFRecord files, which need TensorFlow."""
    return (
        f"{builder.name} in {builder.data_dir} is not in ArrayRecord files; prepare it "
        f"in another directory and set data_dir: {_command(builder.name, 'DIRECTORY')}"
    )


def _command(name: str, target: str) -> str:
    """The command that prepares a dataset in the directory `target`."""
    if name == "tiny_imagenet":
        return (
            "get http://cs231n.stanford.edu/tiny-imagenet-200.zip, then python -m "
            f"mupax.experiments.data.tiny_imagenet tiny-imagenet-200.zip {target}"
        )
    return (
        "where TensorFlow is installed (pip install tensorflow tensorflow-datasets "
        "importlib_resources), python -c "
        f'"import tensorflow_datasets as tfds; tfds.builder({name!r}, '
        f"data_dir={target!r}, file_format='array_record').download_and_prepare()\"."
        + _FETCHED_BY_HAND.get(name, "").format(target=target)
    )


def listed(places: Sequence[Path]) -> str:
    """Directories as a part of a sentence."""
    return " or ".join(os.fspath(p) for p in places)

"""Damage of prepared TFDS datasets: found where they are read, and said with the file.

ArrayRecord files carry checksums of their own. The metadata, dataset_info.json and
features.json, carry none, and are compared with the records.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from ..errors import UserError

METADATA = ("dataset_info.json", "features.json")

# Files of a split that are opened to count their records; of more, none is.
_COUNTED = 64

# Records whose labels are compared with the number of classes that the metadata says.
_SAMPLED = 1024


@contextlib.contextmanager
def reading(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what TFDS raises for damaged metadata into one sentence with the file.

    Args:
      folder: of the dataset's version.

    Raises:
      UserError: in place of any other exception but NotImplementedError, which TFDS
        raises for files that need TensorFlow.
    """
    try:
        yield
    except (UserError, NotImplementedError):
        raise
    except Exception as error:
        path = _culprit(Path(folder))
        said = f"is damaged ({short(error)})" if path.exists() else "is missing"
        raise UserError(f"{path} {said}; {_remedy(folder)}") from error


def check_files(files: Sequence[Any]) -> None:
    """Compare the files of a split with what dataset_info.json says of them.

    Args:
      files: TFDS's file instructions.

    Raises:
      UserError: a file is missing, is damaged, or holds another number of records.
    """
    for file in files:
        path = Path(os.fspath(file.filename))
        _check_shard(path, file.examples_in_shard, len(files))


def _check_shard(path: Path, count: int, shards: int) -> None:
    if not path.is_file():
        raise UserError(
            f"{path} is missing, and {METADATA[0]} lists it; {_remedy(path.parent)}"
        )
    if shards > _COUNTED or "array_record" not in path.name:
        return
    from array_record.python import array_record_module

    reader = None
    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        found = reader.num_records()
    except Exception as error:
        raise UserError(broken(path, error)) from error
    finally:
        with contextlib.suppress(RuntimeError):  # it raises the error again
            if reader is not None:
                reader.close()
    if found != count:
        raise UserError(
            f"{path} holds {found} records, and {path.parent / METADATA[0]} says "
            f"{count}: one of them is damaged; {_remedy(path.parent)}"
        )


def broken(path: Path, error: Exception) -> str:
    """What to say of a file of records that cannot be read."""
    return f"{path} is damaged ({short(error)}); {_remedy(path.parent)}"


def check_labels(
    folder: str | os.PathLike[str], labels: np.ndarray, classes: int
) -> None:
    """Refuse labels that the metadata has no class for.

    Raises:
      UserError: naming features.json.
    """
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise UserError(
            f"{Path(folder) / METADATA[1]} says {classes} classes, and a record has "
            f"the label {wrong}: one of them is damaged; {_remedy(folder)}"
        )


def check_all_seen(
    folder: str | os.PathLike[str], labels: np.ndarray, classes: int
) -> None:
    """Refuse more classes than a dataset that has examples of each.

    Raises:
      UserError: naming features.json.
    """
    check_labels(folder, labels, classes)
    if len(np.unique(labels)) < classes:
        raise UserError(
            f"{Path(folder) / METADATA[1]} says {classes} classes, and the records "
            f"have {len(np.unique(labels))}: one is damaged; {_remedy(folder)}"
        )


def compare_classes(
    folder: str | os.PathLike[str], source: Any, key: str, classes: int
) -> None:
    """Compare the number of classes with the labels of up to 1,024 records.

    Nothing is read where the names of the classes tell their number. Where they have
    no names, a class without an example may be meant, so that more classes than labels
    are only warned of.

    Args:
      folder: of the dataset's version.
      source: its records.
      key: the feature that holds the label.
      classes: as features.json says.

    Raises:
      UserError: there are fewer classes than labels, or not as many as names.
    """
    file = Path(folder) / f"{key}.labels.txt"
    if file.is_file():
        names = [line for line in file.read_text().splitlines() if line.strip()]
        if len(names) != classes:
            raise UserError(
                f"{Path(folder) / METADATA[1]} says {classes} classes, and {file} has "
                f"{len(names)} names: one of them is damaged; {_remedy(folder)}"
            )
        return
    count = min(_SAMPLED, len(source))
    _, labels = source.read(np.arange(count) * len(source) // count)
    check_labels(folder, labels, classes)
    if labels.max() + 1 < classes and count >= 4 * classes:
        logging.warning(
            "%s says %d classes, and %d records have labels up to %d. If a class is "
            "missing, the file is damaged: prepare the dataset again.",
            Path(folder) / METADATA[1],
            classes,
            count,
            labels.max(),
        )


def check_picture(
    folder: str | os.PathLike[str],
    found: Sequence[int | None],
    said: Sequence[int | None],
) -> None:
    """Compare an image's (height, width, channels) with what features.json says.

    Grey images among coloured ones are common, and coloured ones among grey are not.

    Raises:
      UserError: they differ.
    """
    sizes = zip(found[:2], said[:2], strict=True)
    if all(s in (None, f) for f, s in sizes) and not (said[2] == 1 != found[2]):
        return
    raise UserError(
        f"{Path(folder) / METADATA[1]} says images of (height, width, channels) = "
        f"{tuple(said)}, and a record has {tuple(found)}: one of them is damaged; "
        f"{_remedy(folder)}"
    )


def incomplete(name: str, places: Sequence[Path]) -> str | None:
    """What to say of a dataset whose files are there, but not all of its metadata."""
    for place in places:
        base = place / name.split(":")[0]
        with contextlib.suppress(OSError, ValueError):
            records = [*base.glob("*array_record*"), *base.glob("*/*array_record*")]
            for folder in sorted({file.parent for file in records}):
                # What TFDS writes to before it is complete.
                if "incomplete" in folder.name:
                    continue
                for file in METADATA:
                    if not (folder / file).is_file():
                        return f"{folder / file} is missing; {_remedy(folder)}"
    return None


def _culprit(folder: Path) -> Path:
    """The file that is damaged, as well as can be told."""
    for name in METADATA:
        try:
            found = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            return folder / name
        if not isinstance(found, dict):
            return folder / name
    try:
        tfds.features.FeatureConnector.from_config(os.fspath(folder))
    except Exception:  # whatever TFDS raises
        return folder / METADATA[1]
    return folder / METADATA[0]


def short(error: BaseException) -> str:
    """The first line of an error's message, and its type."""
    lines = str(error).strip().splitlines()
    return (
        f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    )


def _remedy(folder: str | os.PathLike[str]) -> str:
    if Path(folder).parent.name == "digits":
        return f"remove {os.fspath(folder)}, and digits are prepared again when read"
    return f"remove {os.fspath(folder)} and prepare the dataset again"

"""Detect damaged TFDS datasets, and name the damaged file.

ArrayRecord files have checksums. The metadata files, dataset_info.json and
features.json, have none and are compared with the records.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from ..errors import UserError, reason

METADATA = ("dataset_info.json", "features.json")

# Records are counted only in splits of at most this many files.
_COUNTED = 64

# Records whose labels are compared with the number of classes.
_SAMPLED = 1024


@contextlib.contextmanager
def reading(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of TFDS into a UserError that names the damaged file.

    NotImplementedError, which TFDS raises for files that need TensorFlow, passes.
    `folder` is the folder of the dataset's version.
    """
    try:
        yield
    except (UserError, NotImplementedError):
        raise
    except Exception as error:
        path = _culprit(Path(folder))
        state = f"is damaged ({reason(error)})" if path.exists() else "is missing"
        raise UserError(f"{path} {state}; {_remedy(folder)}") from error


def check_file(path: Path, count: int, shards: int) -> None:
    """Raise UserError if a file of records is missing, damaged or has another length.

    `count` is the number of its records in dataset_info.json. The records are counted
    if the split has few files (`shards`).
    """
    if not path.is_file():
        raise UserError(
            f"{path} is missing, and {METADATA[0]} lists it; {_remedy(path.parent)}"
        )
    if shards > _COUNTED or "array_record" not in path.name:
        return
    from array_record.python import array_record_module

    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        try:
            records = reader.num_records()
        finally:
            with contextlib.suppress(RuntimeError):  # close raises the error again
                reader.close()
    except Exception as error:
        raise UserError(broken(path, error)) from error
    if records != count:
        raise UserError(
            f"{path} holds {records} records, and {path.parent / METADATA[0]} says "
            f"{count}: one of them is damaged; {_remedy(path.parent)}"
        )


def broken(path: Path, error: Exception) -> str:
    """The error for a file of records that cannot be read."""
    return f"{path} is damaged ({reason(error)}); {_remedy(path.parent)}"


def check_labels(
    folder: str | os.PathLike[str], labels: np.ndarray, classes: int
) -> None:
    """Check that all labels are below the number of classes."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise _conflict(folder, f"{classes} classes", f"a record has label {wrong}")


def no_labels(split: str, labelled: Iterable[str] = ()) -> str:
    """A clause about a split without labels, and which split to set."""
    others = ", ".join(labelled)
    remedy = f"one that has labels ({others})" if others else "one that has labels"
    return (
        f"the split {split!r} has examples without labels (-1); set data.train_split "
        f"and data.test_split to {remedy}"
    )


def check_all_seen(
    folder: str | os.PathLike[str], labels: np.ndarray, classes: int
) -> None:
    """Check that every class has an example."""
    if (count := len(np.unique(labels))) < classes:
        raise _conflict(folder, f"{classes} classes", f"the records have {count}")


def compare_classes(
    folder: str | os.PathLike[str], source: Any, key: str, classes: int
) -> None:
    """Compare the number of classes with the class names, or else with 1,024 labels.

    Without class names, fewer labels than classes only cause a warning, because a class
    may have no examples. `key` is the feature of the label, and `classes` are those of
    features.json.
    """
    file = Path(folder) / f"{key}.labels.txt"
    if file.is_file():
        names = [line for line in file.read_text().splitlines() if line.strip()]
        if len(names) != classes:
            actual = f"{file} has {len(names)} names"
            raise _conflict(folder, f"{classes} classes", actual)
        return
    count = min(_SAMPLED, len(source))
    _, labels = source.read(np.arange(count) * len(source) // count)
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
    actual: Sequence[int | None],
    declared: Sequence[int | None],
) -> None:
    """Compare an image's (height, width, channels) with features.json.

    A grey image in a colour dataset is allowed.
    """
    sizes = zip(actual[:2], declared[:2], strict=True)
    if all(d in (None, a) for a, d in sizes) and not (declared[2] == 1 != actual[2]):
        return
    raise _conflict(
        folder,
        f"images of (height, width, channels) = {tuple(declared)}",
        f"a record has {tuple(actual)}",
    )


def incomplete(name: str, places: Sequence[Path]) -> str | None:
    """The error for a dataset that has records but lacks metadata, if there is one."""
    for place in places:
        base = place / name.split(":")[0]
        with contextlib.suppress(OSError, ValueError):
            records = [*base.glob("*array_record*"), *base.glob("*/*array_record*")]
            for folder in sorted({file.parent for file in records}):
                # TFDS's temporary directory.
                if "incomplete" in folder.name:
                    continue
                for file in METADATA:
                    if not (folder / file).is_file():
                        return f"{folder / file} is missing; {_remedy(folder)}"
    return None


def _culprit(folder: Path) -> Path:
    """The metadata file that is probably damaged."""
    for file in (folder / name for name in METADATA):
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                return file
        except (OSError, ValueError, RecursionError):
            return file
    try:
        tfds.features.FeatureConnector.from_config(os.fspath(folder))
    except Exception:  # whatever TFDS raises
        return folder / METADATA[1]
    return folder / METADATA[0]


def _conflict(folder: str | os.PathLike[str], declared: str, actual: str) -> UserError:
    """The error for a features.json that contradicts the records."""
    return UserError(
        f"{Path(folder) / METADATA[1]} says {declared}, and {actual}: one of them is "
        f"damaged; {_remedy(folder)}"
    )


def _remedy(folder: str | os.PathLike[str]) -> str:
    if Path(folder).parent.name == "digits":
        return f"remove {os.fspath(folder)}, and digits are prepared again when read"
    return f"remove {os.fspath(folder)} and prepare the dataset again"

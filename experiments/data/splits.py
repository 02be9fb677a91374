"""Labelled images of your own: their splits, and their labels as classes.

`folders` and `arrays` open the splits, and `train_and_test` chooses two of them.
"""

import dataclasses
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from ..errors import UserError
from .sources import Arrays, ImageFiles, Source, common_shape, no_labels

#: Names of a test split, the first of which is chosen.
TEST_NAMES = ("test", "validation", "val", "valid")

_TEST_SHARE = 10  # one image in ten, if there is no test split


class Split(NamedTuple):
    """A split: its images and labels.

    Attributes:
      images: an array, uint8 (n, height, width, channels); or an array or column of
        images, paths, or records {"bytes", "path"} of Hugging Face.
      labels: integers or texts, shape (n,).
      names: names of the classes, if they are known.
    """

    images: Any
    labels: np.ndarray
    names: tuple[str, ...] | None = None


def objects(items: Sequence[Any]) -> np.ndarray:
    """An array of shape (n,) whose elements are objects, e.g. paths."""
    return np.fromiter(items, object, len(items))


def labelled(where: str, images: Any, labels: Any, names: Any = None) -> Split:
    """A split with one label per image, or a UserError."""
    array = np.asarray(labels)
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.ndim != 1 or not len(array) or len(array) != len(images):
        found, remedy = f"labels of shape {array.shape}", " (argmax of one-hot labels)"
        if array.ndim == 1:
            found, remedy = f"{len(array)} labels", ""
        raise UserError(
            f"{where}: {len(images)} images have {found}; give one integer or text per "
            f"image{remedy}"
        )
    return Split(images, array, tuple(names) if names else None)


def train_and_test(
    where: str, parts: Mapping[str, Split], train_split: str, test_split: str | None
) -> tuple[Source, Source, int, tuple[str, ...] | None]:
    """The training and the test split, the number of classes, and their names.

    Without a test split, a tenth of the images of each class, drawn with seed 0, is the
    test split.
    """
    test_split = test_split or next((n for n in TEST_NAMES if n in parts), None)
    for key, split in (("train_split", train_split), ("test_split", test_split)):
        if split is not None and split not in parts:
            raise UserError(
                f"{where} has no split {split!r}; set data.{key} to one of "
                f"{', '.join(parts)}"
            )
    train = parts[train_split]
    if test_split is None:
        kept, held = _drawn(where, train.labels)
        logging.warning(
            "%s has no test split, so that %d of its %d images, a tenth of each class, "
            "are the test split: always the same ones, drawn with seed 0.",
            *(where, len(held), len(train.labels)),
        )
        train, test = _rows(train, kept), _rows(train, held)
    else:
        test = parts[test_split]
    train_labels, test_labels, classes, names = _classes(
        where, train, test, (train_split, test_split or "test")
    )
    if train.images.ndim == 4 == test.images.ndim:
        if train.images.shape[1:] != test.images.shape[1:]:
            raise UserError(
                f"{where}: training images have shape {train.images.shape[1:]} and "
                f"test images {test.images.shape[1:]}; make them equal"
            )
        sources = Arrays(train.images, train_labels), Arrays(test.images, test_labels)
        return *sources, classes, names
    both = ImageFiles(train.images, train_labels), ImageFiles(test.images, test_labels)
    shape = common_shape(both)
    first, second = (dataclasses.replace(source, shape=shape) for source in both)
    return first, second, classes, names


def _drawn(where: str, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and of test examples; each class is split alike."""
    rng = np.random.default_rng(0)
    held = []
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        held.append(rows[: max(len(rows) // _TEST_SHARE, int(len(rows) > 1))])
    test = np.sort(np.concatenate([[], *held]).astype(np.int64))
    if not len(test):
        raise UserError(f"{where} has too few images for a test split; add one")
    return np.setdiff1d(np.arange(len(labels)), test), test


def _rows(part: Split, rows: np.ndarray) -> Split:
    return part._replace(images=part.images[rows], labels=part.labels[rows])


def _classes(
    where: str, train: Split, test: Split, splits: tuple[str, str]
) -> tuple[np.ndarray, np.ndarray, int, tuple[str, ...] | None]:
    """Labels as int32 0..classes-1, the number of classes, and their names."""
    names, labels = train.names, []
    if names is not None and test.names not in (None, names):
        raise UserError(f"{where}: the splits have other classes; make them equal")
    for split, part in zip(splits, (train, test), strict=True):
        given = part.labels
        if given.dtype.kind in "OUS":
            given = given.astype(str)
            if names is None:
                names = tuple(map(str, np.unique(given)))
            unknown = sorted(set(given.tolist()) - set(names))
            if unknown:
                raise UserError(
                    f"{where}, {split}: no training image has class {unknown[0]!r}; "
                    "classes are those of the training split"
                )
            index = {name: k for k, name in enumerate(names)}
            given = np.array([index[x] for x in given.tolist()])
        if given.dtype.kind == "f" and not (given == np.round(given)).all():
            raise UserError(
                f"{where}, {split}: some labels are not integers, e.g. "
                f"{given[given != np.round(given)][0]}; give classes 0, 1, ..."
            )
        labels.append(given.astype(np.int64))
        if (labels[-1] == -1).any():
            raise UserError(f"{where}: {no_labels(split)}")
    seen = np.unique(labels[0])
    classes = int(seen[-1]) + 1 if names is None else len(names)
    span = f"0..{classes - 1}"
    for split, given in zip(splits, labels, strict=True):
        wrong = given[(given < 0) | (given >= classes)]
        if len(wrong):
            raise UserError(
                f"{where}, {split}: an image has label {wrong[0]}, and classes are "
                f"{span}; correct the label"
            )
    if names is None and len(seen) < classes:
        gap = np.flatnonzero(seen != np.arange(len(seen)))[0]
        raise UserError(
            f"{where}: labels go up to {classes - 1}, and no training image has label "
            f"{gap}; number the classes 0, 1, ... without gaps"
        )
    alike: dict[str, str] = {}
    for name in names or ():
        other = alike.setdefault(unicodedata.normalize("NFKC", name).strip(), name)
        if other != name:
            raise UserError(
                f"{where} has two names of one class, {other!r} and {name!r}; merge or "
                "rename them"
            )
    if classes < 2:
        raise UserError(f"{where} has one class only; give at least two")
    first, second = (x.astype(np.int32) for x in labels)
    return first, second, classes, names

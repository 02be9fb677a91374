"""A folder of images, with a subfolder per class."""

import os
import pathlib
from collections.abc import Mapping

from absl import logging
from PIL import Image

from mupax.zoo.weights import remote

from ..errors import UserError, reason
from .splits import TEST_NAMES, Split, labelled, objects

#: Prefix of the names of datasets.
FOLDER = "images:"


def open_folder(path: str) -> dict[str, Split]:
    """The splits of a folder of images, with a subfolder per class.

    Splits are subfolders train, test, validation, val and valid, which contain those of
    the classes; without them, all images are in "train". Classes are numbered in the
    order of their names. Hidden files are left out.
    """
    root = remote.local(path)
    if not os.path.isdir(root):  # False, too, for names that no path can have
        raise UserError(
            f"there is no folder {root}; give {FOLDER}DIR, with a subfolder per class"
        )
    inside = _subfolders(root)
    splits = {n: inside[n] for n in ("train", *TEST_NAMES) if n in inside}
    if "train" not in splits or not _subfolders(splits["train"]):
        return {"train": _folder(root, inside)}
    if others := sorted(set(inside) - set(splits)):
        logging.warning("%s: left out, as it is no split: %s", root, ", ".join(others))
    classes = _subfolders(splits["train"])
    names = tuple(sorted(classes))
    parts = {n: _folder(place, _subfolders(place)) for n, place in splits.items()}
    return {split: part._replace(names=names) for split, part in parts.items()}


def _subfolders(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    hidden = (".", "__MACOSX")
    try:
        paths = sorted(folder.iterdir())
        return {
            p.name: p for p in paths if p.is_dir() and not p.name.startswith(hidden)
        }
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({reason(error)})") from None


def _folder(folder: pathlib.Path, classes: Mapping[str, pathlib.Path]) -> Split:
    """The images in the subfolders of classes."""
    if not classes:
        raise UserError(
            f"{folder} has no subfolders; put the images of each class into a "
            "subfolder with its name"
        )
    Image.init()
    paths: list[str] = []
    labels: list[str] = []
    others: list[str] = []
    for name, place in classes.items():
        before = len(paths)
        read = {os.path.realpath(place)}  # links may lead back
        for at, folders, files in os.walk(place, followlinks=True):
            real = {f: os.path.realpath(os.path.join(at, f)) for f in folders}
            folders[:] = sorted(
                f for f in folders if f[0] != "." and real[f] not in read
            )
            read.update(real.values())
            for file in sorted(f for f in files if not f.startswith(".")):
                known = pathlib.PurePath(file).suffix.lower() in Image.EXTENSION
                (paths if known else others).append(os.path.join(at, file))
        if len(paths) == before:
            raise UserError(f"{place} holds no image; add some, or remove the folder")
        labels += [name] * (len(paths) - before)
    if others:
        logging.warning(
            "%s: %d file(s) without an image's name are left out, e.g. %s",
            *(folder, len(others), others[0]),
        )
    return labelled(str(folder), objects(paths), labels, sorted(classes))

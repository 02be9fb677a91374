"""Your own images: a folder, an .npz file, or data from Python.

Each opener returns the examples of every split. `chosen` picks the training and the
test split, and checks labels. Images are kept with 8 bits per channel.
"""

import dataclasses
import io
import os
import pathlib
import unicodedata
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import numpy as np
from absl import logging
from PIL import Image, ImageOps

from .. import remote
from ..errors import UserError, reason, short
from . import intact
from .augment import GREY, eight_bits
from .sources import Arrays, Shape, Source, why

#: Prefixes of the names of datasets.
FOLDER, NPZ = "images:", "npz:"

_TEST_NAMES = ("test", "validation", "val", "valid")
_IMAGE_KEYS = ("image", "images", "img", "x")
_LABEL_KEYS = ("label", "labels", "y")
_TEST_SHARE = 10  # one image in ten, if there is no test split
_SCANNED = 100_000  # image files whose headers are read for their sizes
_ORIENTATION = 0x0112  # tag of EXIF; from 5 on, width and height are exchanged


class Part(NamedTuple):
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


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
    """Registered data. Two of them are different keys of a cache."""

    parts: dict[str, Part]


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """Image files, or arrays of different sizes, of one split."""

    images: Any
    labels: np.ndarray
    shape: Shape = (None, None, 3)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: np.ndarray) -> tuple[list[Any], np.ndarray]:
        return [self._content(int(k)) for k in indices], self.labels[indices]

    def _content(self, k: int) -> bytes | np.ndarray:
        image = self.images[k]
        if isinstance(image, Mapping) and image.get("bytes") is not None:
            return image["bytes"]
        if not isinstance(image, str | Mapping):
            return image
        path = image if isinstance(image, str) else image["path"]
        try:
            return pathlib.Path(path).read_bytes()
        except OSError as error:
            raise UserError(self.undecodable(k, error)) from None

    def check(self, picture: Image.Image) -> None:
        """Turn a photograph upright."""
        ImageOps.exif_transpose(picture, in_place=True)

    def undecodable(self, k: int, error: Exception) -> str:
        image = self.images[k]
        path = image.get("path") if isinstance(image, Mapping) else image
        what = path if isinstance(path, str) else f"image {k}"
        return f"{what} cannot be read as an image ({why(error)}); replace or remove it"

    def header(self, k: int) -> tuple[int, int, bool]:
        """Height and width as `check` leaves them, and whether the image is grey."""
        image = self.images[k]
        if isinstance(image, np.ndarray):
            return *image.shape[:2], image.shape[2] == 1
        try:
            file = isinstance(image, str)
            # Only the beginning of a file is read.
            source: Any = image if file else io.BytesIO(cast(bytes, self._content(k)))
            with Image.open(source) as picture:
                width, height = picture.size
                # Pillow would decode a PNG file for its EXIF data.
                known = picture.format != "PNG" or "exif" in picture.info
                if known and picture.getexif().get(_ORIENTATION, 1) >= 5:
                    width, height = height, width
                grey = picture.mode in GREY and not picture.has_transparency_data
                return height, width, grey
        except Exception as error:  # of Pillow: OSError, SyntaxError, ValueError, ...
            raise UserError(self.undecodable(k, error)) from None


def checked(where: str, images: Any, labels: Any, names: Any = None) -> Part:
    """A part with one label per image, or a UserError."""
    array = np.asarray(labels)
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.ndim != 1 or not len(array) or len(array) != len(images):
        raise UserError(
            f"{where}: {len(images)} images have labels of shape {array.shape}; give "
            "one integer or text per image (argmax of one-hot labels)"
        )
    return Part(images, array, tuple(names) if names else None)


def _listed(items: Sequence[Any]) -> np.ndarray:
    """An array whose elements are objects."""
    return np.fromiter(items, object, len(items))


# ----- A training and a test split.


def chosen(
    where: str, parts: Mapping[str, Part], train_split: str, test_split: str | None
) -> tuple[Source, Source, int, tuple[str, ...] | None]:
    """The training and the test split, the number of classes, and their names.

    Without a test split, a tenth of the images of each class, drawn with seed 0, is the
    test split.
    """
    test_split = test_split or next((n for n in _TEST_NAMES if n in parts), None)
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
    both = Encoded(train.images, train_labels), Encoded(test.images, test_labels)
    shape = _shape(both)
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


def _rows(part: Part, rows: np.ndarray) -> Part:
    return part._replace(images=part.images[rows], labels=part.labels[rows])


def _classes(
    where: str, train: Part, test: Part, splits: tuple[str, str]
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
            raise UserError(f"{where}: {intact.no_labels(split)}")
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


def _shape(sources: Sequence[Encoded]) -> Shape:
    """Height and width, if they are the same for all images, and 1 or 3 channels."""
    if sum(map(len, sources)) > _SCANNED:
        return None, None, 3
    with ThreadPoolExecutor(8) as pool:
        found = [x for s in sources for x in pool.map(s.header, range(len(s)))]
    sizes = {(height, width) for height, width, _ in found}
    channels = 1 if all(grey for _, _, grey in found) else 3
    height, width = sizes.pop() if len(sizes) == 1 else (None, None)
    return height, width, channels


# ----- A folder of images.


def open_folder(path: str) -> dict[str, Part]:
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
    splits = {n: inside[n] for n in ("train", *_TEST_NAMES) if n in inside}
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


def _folder(folder: pathlib.Path, classes: Mapping[str, pathlib.Path]) -> Part:
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
        for at, folders, files in os.walk(place, followlinks=True):
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            for file in sorted(f for f in files if not f.startswith(".")):
                known = pathlib.PurePath(file).suffix.lower() in Image.EXTENSION
                (paths if known else others).append(os.path.join(at, file))
        if len(paths) == before:
            raise UserError(f"{place} holds no image; add some, or remove the folder")
        labels += [name] * (len(paths) - before)
    if others:
        logging.warning(
            "%s: %d files are left out, as their names are not those of images, e.g. "
            "%s",
            *(folder, len(others), others[0]),
        )
    return checked(str(folder), _listed(paths), labels, sorted(classes))


# ----- Arrays.


def open_npz(path: str) -> dict[str, Part]:
    """The splits of an .npz file.

    Images are named image, images or x, and labels label, labels or y: alone, or with
    the split before or behind, e.g. x_train, y_train, x_test and y_test.
    """
    file = remote.local(path)
    try:
        if os.path.exists(file) and not zipfile.is_zipfile(file):
            raise ValueError("it is no .npz file")
        with np.load(file, allow_pickle=False) as content:
            arrays = {key: content[key] for key in content.files}
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        what = (
            "is missing"
            if not os.path.exists(file)
            else f"is not usable ({reason(error)})"
        )
        raise UserError(
            f"{file} {what}; write numeric arrays with np.savez({file.name!r}, "
            "x_train=..., y_train=..., x_test=..., y_test=...)"
        ) from None
    return arrays_of(str(file), arrays)


def arrays_of(where: str, arrays: Mapping[str, Any]) -> dict[str, Part]:
    """The splits of arrays by name, as `open_npz` reads them."""
    found: dict[str, dict[str, str]] = {}
    for key in arrays:
        words = key.lower().split("_")
        for kind, known in (("images", _IMAGE_KEYS), ("labels", _LABEL_KEYS)):
            if len(words) <= 2 and (role := {*words} & {*known}):
                split = "_".join(w for w in words if w not in role) or "train"
                if kind in found.setdefault(split, {}):
                    raise UserError(
                        f"{where} holds both {found[split][kind]} and {key}; keep one"
                    )
                found[split][kind] = key
    splits = {split: keys for split, keys in found.items() if len(keys) == 2}
    if "train" not in splits:
        raise UserError(
            f"{where} holds {short(', '.join(arrays)) or 'nothing'}; name its arrays x "
            "and y, or x_train, y_train, x_test and y_test"
        )
    used = {key for keys in splits.values() for key in keys.values()}
    if others := sorted(set(arrays) - used):
        logging.warning("%s: not used are %s", where, ", ".join(others))
    images = pixels(where, {k["images"]: arrays[k["images"]] for k in splits.values()})
    return {
        split: checked(
            f"{where}, {split}", images[keys["images"]], arrays[keys["labels"]]
        )
        for split, keys in splits.items()
    }


def pixels(where: str, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Images as uint8 (n, height, width, channels), with 1 or 3 channels.

    Values are 0..255, or floats 0..1, which are rounded to 8 bits.

    Raises:
      UserError: another shape or type, other values, or arrays of different ranges.
    """
    out, ranges = {}, {}
    for name, given in arrays.items():
        what, array = f"{where}: {name}", np.asarray(given)
        array = array[..., None] if array.ndim == 3 else array
        if array.ndim != 4 or array.shape[3] not in (1, 3) or not array.size:
            raise UserError(
                f"{what} has shape {np.shape(given)}; images have shape (n, height, "
                "width) or (n, height, width, channels) with 1 or 3 channels"
            )
        if array.dtype.kind not in "biuf":
            raise UserError(f"{what} has dtype {array.dtype}; give numbers")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = np.argwhere(~np.isfinite(array))
            raise UserError(
                f"{what} holds {len(bad)} values that are NaN or infinite, the first "
                f"in image {bad[0, 0]}; replace them"
            )
        low, high = float(array.min()), float(array.max())
        share = array.dtype.kind in "bf" and high <= 1
        # Just above 1: shares that were resized with a filter that overshoots.
        if low < 0 or high > 255 or (array.dtype.kind == "f" and 1 < high < 2):
            raise UserError(
                f"{what} holds values from {low:.4g} to {high:.4g}; give pixels of "
                "0..255, or floats of 0..1, not normalized (mupax does that)"
            )
        if array.dtype.kind in "bf":
            ranges[name] = share
        if array.dtype != np.uint8:
            array = np.rint(array * 255.0 if share else array).astype(np.uint8)
        out[name] = array
    if len(set(ranges.values())) > 1:
        raise UserError(
            f"{where}: {' and '.join(ranges)} have different ranges, 0..1 and 0..255; "
            "use one"
        )
    return out


# ----- Data from Python.


def from_python(where: str, data: Any, image: str | None, label: str | None) -> Any:
    """The splits of data from Python; see `register_dataset`."""
    if not isinstance(data, Mapping):
        return {"train": _part(where, data, image, label)}
    if "train" in data or any(map(is_table, data.values())):
        return {k: _part(f"{where}, {k}", v, image, label) for k, v in data.items()}
    return arrays_of(where, data)


def is_table(data: Any) -> bool:
    """Whether data are a `datasets.Dataset` of Hugging Face, which is not imported."""
    methods = ("with_format", "cast_column", "__len__")  # a streamed one has no length
    return hasattr(data, "features") and all(hasattr(data, x) for x in methods)


def _part(where: str, data: Any, image: str | None, label: str | None) -> Part:
    """A split in any form that `register_dataset` takes."""
    if is_table(data):
        return _table(where, data, image, label)
    if isinstance(data, Mapping):
        return arrays_of(where, data)["train"]
    pair = isinstance(data, tuple | list) and len(data) == 2
    if pair and getattr(data[0], "ndim", 0) >= 3:
        images, labels = data
        return checked(where, pixels(where, {"images": images})["images"], labels)
    if not hasattr(data, "__iter__") and hasattr(data, "__len__"):  # as of PyTorch
        data = map(data.__getitem__, range(len(data)))
    if not isinstance(data, Iterable):
        raise UserError(
            f"{where} is a {type(data).__name__}; give a pair (images, labels), a "
            "Hugging Face dataset, or an iterable of pairs (image, label)"
        )
    examples = [_example(where, k, example) for k, example in enumerate(data)]
    if not examples:
        raise UserError(f"{where} is empty; give examples")
    images, labels = zip(*examples, strict=True)
    if len({image.shape for image in images}) == 1:
        stacked = pixels(where, {"images": np.stack(images)})["images"]
        return checked(where, stacked, labels)
    if any(image.dtype != np.uint8 for image in images):
        raise UserError(
            f"{where}: images of different sizes must be uint8; convert them"
        )
    each = [pixels(where, {"images": image[None]})["images"][0] for image in images]
    return checked(where, _listed(each), labels)


def _example(where: str, k: int, example: Any) -> tuple[np.ndarray, Any]:
    """The image, with a channel axis, and the label of an example."""
    if isinstance(example, Mapping):
        keys = (_key(example, known) for known in (_IMAGE_KEYS, _LABEL_KEYS))
        example = tuple(example[key] for key in keys if key is not None)
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise UserError(
            f"{where}: example {k} is no pair (image, label) or dictionary "
            '{"image": ..., "label": ...}; make it one'
        )
    image, label = example
    if isinstance(image, Image.Image):
        image = eight_bits(ImageOps.exif_transpose(image))
    array = np.asarray(image)
    array = array[..., None] if array.ndim == 2 else array
    return array, label.item() if hasattr(label, "item") else label


def _key(keys: Iterable[str], known: Sequence[str]) -> str | None:
    return next((name for name in known if name in keys), None)


@dataclasses.dataclass(frozen=True)
class _Column:
    """The encoded images of a table: one by its index, or some by their indices."""

    table: Any
    key: str
    ndim = 1

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, k: Any) -> Any:
        if np.ndim(k):
            return _Column(self.table.select(k), self.key)
        return self.table[int(k)][self.key]


def _table(where: str, table: Any, image: str | None, label: str | None) -> Part:
    """A dataset of Hugging Face. Encoded images are read when they are needed."""
    features = table.features
    image = image or _feature(where, "image", features, "Image", _IMAGE_KEYS)
    label = label or _feature(where, "label", features, "ClassLabel", _LABEL_KEYS)
    for key in (image, label):
        if key not in features:
            raise UserError(
                f"{where} has no column {key!r}; its columns are {', '.join(features)}"
            )
    table = table.with_format(None)
    labels = list(table[label])
    names = getattr(features[label], "names", None)
    kind = type(features[image])
    if kind.__name__ == "Image":
        images: Any = _Column(table.cast_column(image, kind(decode=False)), image)
    else:
        images = pixels(where, {image: np.asarray(list(table[image]))})[image]
    return checked(where, images, labels, names)


def _feature(
    where: str, role: str, features: Any, kind: str, known: Sequence[str]
) -> str:
    """The column of a role: the only one of its kind, or one with a known name."""
    of_kind = [key for key, value in features.items() if type(value).__name__ == kind]
    key = of_kind[0] if len(of_kind) == 1 else _key(features, known)
    if key is None:
        raise UserError(
            f"{where}: set {role}=..., the column of the {role}, to one of "
            f"{', '.join(of_kind or features)}"
        )
    return key

"""Images from an .npz file, or from Python. They are kept with 8 bits per channel."""

import dataclasses
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from PIL import Image, ImageOps

from mupax.zoo.weights import remote
from mupax.zoo.weights.files import open_regular

from ..errors import UserError, reason, short
from .augment import eight_bits
from .splits import Split, labelled, objects

#: Prefix of the names of datasets.
NPZ = "npz:"

_IMAGE_KEYS = ("image", "images", "img", "x")
_LABEL_KEYS = ("label", "labels", "y")


def open_npz(path: str) -> dict[str, Split]:
    """The splits of an .npz file.

    Images are named image, images or x, and labels label, labels or y: alone, or with
    the split before or behind, e.g. x_train, y_train, x_test and y_test.
    """
    file = remote.local(path)
    try:
        with open_regular(file) as opened:
            if not zipfile.is_zipfile(opened):
                raise ValueError("it is no .npz file")
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as content:
                arrays = {key: content[key] for key in content.files}
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        what = (
            "is missing"
            if not os.path.exists(file)
            else f"is not usable ({reason(error)})"
        )
        raise UserError(
            f"{file} {what}; write numeric arrays with np.savez('{file.stem}.npz', "
            "x_train=..., y_train=..., x_test=..., y_test=...)"
        ) from None
    return arrays_of(str(file), arrays)


def arrays_of(where: str, arrays: Mapping[str, Any]) -> dict[str, Split]:
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
        split: labelled(
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
        return {"train": _split(where, data, image, label)}
    if "train" in data or any(map(is_table, data.values())):
        return {k: _split(f"{where}, {k}", v, image, label) for k, v in data.items()}
    if all(isinstance(part, tuple | list) for part in data.values()):
        raise UserError(
            f"{where} has the splits {short(', '.join(map(str, data)))}; name one of "
            "them 'train'"
        )
    return arrays_of(where, data)


def is_table(data: Any) -> bool:
    """Whether data are a `datasets.Dataset` of Hugging Face, which is not imported."""
    methods = ("with_format", "cast_column", "__len__")  # a streamed one has no length
    return hasattr(data, "features") and all(hasattr(data, x) for x in methods)


def _split(where: str, data: Any, image: str | None, label: str | None) -> Split:
    """A split in any form that `register_dataset` takes."""
    if is_table(data):
        return _table(where, data, image, label)
    if isinstance(data, Mapping):
        return arrays_of(where, data)["train"]
    pair = isinstance(data, tuple | list) and len(data) == 2
    if pair and getattr(data[0], "ndim", 0) >= 3:
        images, labels = data
        return labelled(where, pixels(where, {"images": images})["images"], labels)
    if not hasattr(data, "__iter__") and hasattr(data, "__len__"):  # as of PyTorch
        data = map(data.__getitem__, range(len(data)))
    if not isinstance(data, Iterable):
        raise UserError(
            f"{where} is a {type(data).__name__}; give a pair (images, labels), a "
            "Hugging Face dataset, or an iterable of pairs (image, label)"
        )
    examples = [x for k, item in enumerate(data) for x in _examples(where, k, item)]
    if not examples:
        raise UserError(f"{where} is empty; give examples")
    images, labels = zip(*examples, strict=True)
    if len({image.shape for image in images}) == 1:
        stacked = pixels(where, {"images": np.stack(images)})["images"]
        return labelled(where, stacked, labels)
    if any(image.dtype != np.uint8 for image in images):
        raise UserError(
            f"{where}: images of different sizes must be uint8; convert them"
        )
    each = [pixels(where, {"images": image[None]})["images"][0] for image in images]
    return labelled(where, objects(each), labels)


def _examples(where: str, k: int, item: Any) -> list[tuple[np.ndarray, Any]]:
    """Images, with a channel axis, and labels of an example or a batch."""
    if isinstance(item, Mapping):
        keys = (_key(item, known) for known in (_IMAGE_KEYS, _LABEL_KEYS))
        item = tuple(item[key] for key in keys if key is not None)
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise UserError(
            f"{where}: example {k} is no pair (image, label) or dictionary "
            '{"image": ..., "label": ...}; make it one'
        )
    image, label = item
    if isinstance(image, Image.Image):
        image = eight_bits(ImageOps.exif_transpose(image))
    array, labels = np.asarray(image), np.asarray(label)
    single = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3))
    if labels.ndim == 1 and not single and len(array) == len(labels):
        pairs = zip(array, labels, strict=True)
        return [x for pair in pairs for x in _examples(where, k, pair)]
    if labels.ndim:
        raise UserError(
            f"{where}: the label of example {k} has shape {labels.shape}; give one "
            "integer or text per image (argmax of one-hot labels)"
        )
    array = array[..., None] if array.ndim == 2 else array
    return [(array, label.item() if hasattr(label, "item") else label)]


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


def _table(where: str, table: Any, image: str | None, label: str | None) -> Split:
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
    return labelled(where, images, labels, names)


def _feature(
    where: str, role: str, features: Any, kind: str, known: Sequence[str]
) -> str:
    """The column of a role: the only one of its kind, or one with a known name."""
    of_kind = [key for key, value in features.items() if type(value).__name__ == kind]
    key = of_kind[0] if len(of_kind) == 1 else _key(features, known)
    if key is None:
        raise UserError(
            f"{where}: which column holds the {role}? It has "
            f"{', '.join(of_kind or features)}; rename it by "
            f"rename_column(COLUMN, '{role}')"
        )
    return key

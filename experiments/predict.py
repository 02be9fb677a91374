"""Classify image files with a trained model."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from PIL import Image, ImageOps, UnidentifiedImageError

from mupax import zoo
from mupax.zoo.addresses import public
from mupax.zoo.families.decoder import Decoder
from mupax.zoo.layers.basic import single
from mupax.zoo.weights import remote

from .data import normalize
from .data.augment import Transform
from .errors import UserError, visible
from .loading import load_model

_REMEDY = (
    "compute its features in Python with zoo.load_pretrained and "
    "zoo.data_config(model), or fine-tune a classifier with --config.init_from"
)


class Prediction(NamedTuple):
    """A likely class of an image.

    Attributes:
      label: name of the class, or "class 7" where the model has no names.
      number: of the class, from 0.
      probability: softmax of the logits.
    """

    label: str
    number: int
    probability: float


def run(
    model: str,
    images: Sequence[str],
    *,
    name: str | None = None,
    top: int = 5,
) -> None:
    """Print the likeliest classes of images; see the flags of `mupax predict`.

    Raises:
      UserError: a model or an image that cannot be read, or a model without known
        preprocessing.
    """
    if not images:
        raise UserError(
            "no image is given; put the paths of image files after the flags"
        )
    if top < 1:
        raise UserError(f"--top={top} must be 1 or more")
    for path in images:  # before a model is loaded
        _open(path).close()
    loaded = load_model(model, name=name)
    for path, rows in zip(images, predict(loaded, images, top=top), strict=True):
        print(visible(public(path)))
        for row in rows:
            print(f"  {row.probability:7.2%}  {visible(row.label)}")


def predict(
    model: nnx.Module, images: Sequence[str], *, top: int = 5
) -> list[list[Prediction]]:
    """The likeliest classes of each image.

    Args:
      model: in evaluation mode, with a `zoo.data_config`.
      images: paths.
      top: number of classes per image; all, if there are fewer.

    Raises:
      UserError: an image that cannot be read, or a model that does not classify images
        or whose preprocessing is not known.
    """
    kind = type(model).__name__
    if isinstance(model, Decoder):
        raise UserError(f"a {kind} takes tokens, not images; use `mupax generate`")
    if getattr(model, "readout", None) is None:
        raise UserError(
            f"this {kind} has no readout, so it returns features and not classes; "
            + _REMEDY
        )
    try:
        config = zoo.data_config(model)
    except ValueError as error:
        raise UserError(
            f"{error} and zoo.save(model, DIR) in Python, then give --model DIR"
        ) from None
    if config.projection is not None:
        raise UserError(
            f"this {kind} is the image tower of a CLIP: its {config.projection} "
            f"outputs are an embedding, not classes; {_REMEDY}"
        )
    transform = Transform((), config)
    graph, state = nnx.split(model)
    mean, std = (255 * np.asarray(v, np.float32) for v in (config.mean, config.std))

    @jax.jit
    def probabilities(state: nnx.State, pixels: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, state)(normalize(pixels, mean, std))
        return jax.nn.softmax(logits.astype(single(logits.dtype)), axis=-1)

    out = []
    for path in images:
        with _open(path) as image:
            try:
                pixels = np.asarray(transform(ImageOps.exif_transpose(image), ()))
            except ValueError as error:
                raise UserError(f"{path!r} cannot be used: {error}") from None
        (likely,) = np.asarray(probabilities(state, pixels.reshape(1, *config.size)))
        labels = config.labels or [f"class {i}" for i in range(len(likely))]
        best = np.argsort(-likely, kind="stable")[:top].tolist()
        out.append([Prediction(labels[i], i, float(likely[i])) for i in best])
    return out


def _open(path: str) -> Image.Image:
    """An image, decoded; UserError if the file is missing or not an image."""
    place = remote.local(path) if remote.is_remote(path) else pathlib.Path(path)
    if not place.is_file():
        raise UserError(f"there is no image file {path!r}; check the path")
    try:
        with place.open("rb") as file:
            image = Image.open(file)
            image.load()
    # Pillow raises OSError, SyntaxError, ValueError and more for damaged files.
    except Exception as error:
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise UserError(
            f"{path!r} cannot be read as an image{reason}; give a JPEG, PNG or another "
            "format that Pillow reads"
        ) from None
    return image

"""`load_pretrained`: models with weights, ours or other libraries'."""

import importlib.resources
import os
import pathlib
from typing import Any

from flax import nnx

from . import foreign, saving
from .registry import create

_SHIPPED = "checkpoints"


def list_pretrained() -> list[str]:
    """Names of the trained models that come with the package.

    Examples:
      >>> from mupax import zoo
      >>> zoo.list_pretrained()
      ['cnn_mnist', 'resmlp_digits']
    """
    folder = importlib.resources.files(__package__) / _SHIPPED
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())


def load_pretrained(
    name: str, source: str | os.PathLike[str] | None = None, **overrides: Any
) -> nnx.Module:
    """A model with trained weights.

    Args:
      name: of a model that comes with the package, or of the kind of model that
        `source` holds.
      source: a directory that `zoo.save` wrote; a .safetensors file with the names
        of timm, torchvision or transformers; a .npz file of big_vision; the id of
        such a repository on the Hugging Face hub. None for what comes with the
        package, which needs no network.
      **overrides: options other than the saved ones, or other than the defaults
        where the source holds weights alone. With another `out_features` the
        readout starts anew, from `rngs`.

    Returns:
      The model. It is its own base unless `base_width` or `base_depth` say otherwise:
      it keeps what it computes, and learning rates follow from there.

    Raises:
      ValueError: an unknown name, or a source that holds another model, cannot be
        read, or does not fit; nothing is filled in part.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mupax import zoo
      >>> model = zoo.load_pretrained("resmlp_digits")
      >>> model(jnp.zeros((1, 8, 8, 1))).shape
      (1, 10)
    """
    if source is None:
        if name not in list_pretrained():
            raise ValueError(
                f"no weights of {name!r} come with the package, only of "
                f"{', '.join(list_pretrained())}; give a source"
            )
        # A directory on disk: the package is installed unzipped.
        folder = importlib.resources.files(__package__) / _SHIPPED / name
        return saving.load(pathlib.Path(str(folder)), **overrides)
    if foreign.is_foreign(source):
        return read_foreign(name, source, **overrides)[0]
    source = pathlib.Path(source)
    if not source.is_dir():
        raise ValueError(
            f"there is no directory {str(source)!r}; give one that zoo.save wrote, a "
            ".safetensors or .npz file, or the id of a repository on the hub"
        )
    held = saving.read_config(source)["model"]
    if held != name:
        raise ValueError(f"{str(source)!r} holds a {held!r}, not a {name!r}")
    return saving.load(source, **overrides)


def read_foreign(
    name: str, source: str | os.PathLike[str], **overrides: Any
) -> tuple[nnx.Module, list[str]]:
    """A model with the weights of another library's file.

    Args:
      name: of the kind of model.
      source: a file, or the id of a repository on the hub.
      **overrides: as in `load_pretrained`.

    Returns:
      (model, the keys of the file that were left unused on purpose).

    Raises:
      ValueError: as `load_pretrained`.
    """
    rngs = overrides.pop("rngs", None) or nnx.Rngs(0)
    # What cannot be read is said before a large model is made.
    arrays = foreign.read(source)
    model = create(name, **overrides, rngs=rngs)
    return model, foreign.fill(model, arrays, new_head="out_features" in overrides)

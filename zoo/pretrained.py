"""`load_pretrained`: models with weights, ours or a directory's."""

import importlib.resources
import os
import pathlib
from typing import Any

from flax import nnx

from . import saving

_SHIPPED = "checkpoints"


def list_pretrained() -> list[str]:
    """Names of the trained models that come with the package.

    Examples:
      >>> from mupax import zoo
      >>> zoo.list_pretrained()
      ['resmlp_digits']
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
      source: a directory that `zoo.save` wrote; None for what comes with the
        package, which needs no network.
      **overrides: options other than the saved ones. With another `out_features`
        the readout starts anew, from `rngs`.

    Returns:
      The model, in the parametrization and at the size it was saved with.

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
    source = pathlib.Path(source)
    if not source.is_dir():
        raise ValueError(
            f"there is no directory {str(source)!r}; give one that zoo.save wrote"
        )
    held = saving.read_config(source)["model"]
    if held != name:
        raise ValueError(f"{str(source)!r} holds a {held!r}, not a {name!r}")
    return saving.load(source, **overrides)

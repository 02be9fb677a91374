"""Masks: which parameters a weight decay acts on."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from ..scales.paths import flatten, map_with_paths
from ..scales.table import Scales

# A mask as in Optax, or "matrices" for the weights with a fan-in; see `decay_mask`.
Mask = Any | Callable[[optax.Params], Any] | None


def decay_mask(mask: Mask, scales: Scales) -> Mask:
    """Convert the mask of a weight decay to a function of the parameters.

    Args:
      mask: as in Optax; or "matrices" for the parameters that have a fan-in: kernels,
        convolutions and embeddings. Then biases and norm scales do not decay, as in the
        reference code of CompleteP and in nanoGPT, and neither do the positions and
        class tokens of the zoo. A table of positions with the role "input" does.
      scales: of the model.

    Raises:
      ValueError: `mask` is another string; a tree has an entry that is no
        parameter; from the function, it lacks a parameter.
    """
    if isinstance(mask, str):
        if mask != "matrices":
            raise ValueError(
                f"mask={mask!r} must be 'matrices', a tree of booleans, or a function "
                "that returns one for the parameters"
            )
        return lambda params: map_with_paths(
            lambda path, _: bool(scales[path].in_axes), params
        )
    # A mask made from a model, e.g. of Equinox, is a tree that can be called.
    if mask is None or (callable(mask) and jax.tree_util.all_leaves([mask])):
        return mask
    # By path: an NNX optimizer passes parameters in boxes to `init`, and without to
    # `update`, so that a tree has the structure of one of them only.
    flags = dict(flatten(mask))
    inside = {folder for path in scales for folder in _folders(path)}
    if wrong := sorted(flags.keys() - inside):
        raise ValueError(
            f"the mask has an entry {wrong[0]!r}, which is no parameter; make it from "
            "the parameters: jax.tree.map(lambda x: x.ndim >= 2, params)"
        )

    def find(path: str, _: Any) -> bool:
        found = [folder for folder in _folders(path) if folder in flags]
        if not found:
            raise ValueError(
                f"the mask has no entry for parameter {path!r}; make it from the "
                "parameters: jax.tree.map(lambda x: x.ndim >= 2, params)"
            )
        return bool(flags[found[0]])

    return lambda params: map_with_paths(find, params)


def _folders(path: str) -> list[str]:
    """A path and those of the folders that it is in: a/b, a, ""."""
    names = path.split("/")
    return ["/".join(names[:n]) for n in range(len(names), -1, -1)]

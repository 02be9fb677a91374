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
      ValueError: `mask` is another string; from the function, a tree lacks a parameter.
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

    def find(path: str, _: Any) -> bool:
        folder = path
        while folder and folder not in flags:
            folder = folder.rpartition("/")[0]
        if folder not in flags:
            raise ValueError(
                f"the mask has no entry for parameter {path!r}; make it from the "
                "parameters: jax.tree.map(lambda x: x.ndim >= 2, params)"
            )
        return bool(flags[folder])

    return lambda params: map_with_paths(find, params)

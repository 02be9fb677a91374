"""Masks: which parameters a weight decay acts on."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from ..scales.paths import flatten, map_with_paths
from ..scales.table import ChainWarning, Scales, stacked_vectors

# A mask as in Optax, or "matrices" for the weights with a fan-in; see `decay_mask`.
Mask = Any | Callable[[optax.Params], Any] | None


def decay_mask(mask: Mask, scales: Scales) -> Mask:
    """Convert the mask of a weight decay to one that Optax accepts.

    Args:
      mask: as in Optax; or "matrices" for the parameters that have a fan-in: kernels,
        convolutions and embeddings. Then biases and norm scales do not decay, as in the
        reference code of CompleteP and in nanoGPT, and neither do the positions and
        class tokens of the zoo. A table of positions with the role "input" does.
      scales: of the model.

    Raises:
      ValueError: `mask` is another string.
    """
    if mask == "matrices":
        return lambda params: map_with_paths(
            lambda path, _: bool(scales[path].in_axes), params
        )
    if isinstance(mask, str):
        raise ValueError(
            f"mask={mask!r} must be 'matrices', a tree of booleans, or a function that "
            "returns one for the parameters"
        )
    if mask is None:
        return None
    # A mask made from a model, e.g. of Equinox, is a tree that can be called.
    is_function = callable(mask) and jax.tree_util.all_leaves([mask])
    function = mask if is_function else _by_path(mask, scales)
    warned = False

    def checked(params: optax.Params) -> Any:
        nonlocal warned
        tree = function(params)
        chosen = {path for path, decays in flatten(tree) if decays is True}
        layered = sorted(chosen & stacked_vectors(scales))
        if layered and not warned and len(chosen) < len(flatten(params)):
            warned = True
            warnings.warn(
                f"the mask of the weight decay is True for {layered[0]!r}, of shape "
                f"{scales[layered[0]].shape}: a bias or norm scale in each layer of a "
                "stack; to decay only kernels, pass mask='matrices' "
                "(weight_decay_mask= of muon and adafactor)",
                ChainWarning,
                stacklevel=2,
            )
        return tree

    return checked


def _by_path(mask: Any, scales: Scales) -> Callable[[Any], Any]:
    """A mask as a function of the parameters, from a tree, or the first levels of one.

    An NNX optimizer passes parameters in boxes to `init`, and without to `update`, so
    that a tree has the structure of one of them only.
    """
    flags = dict(flatten(mask))
    inside = {start for path in scales for start in _starts(path)}
    for path, flag in flags.items():
        if path not in inside:
            raise ValueError(
                f"the mask has an entry {path!r}, which is no parameter; make the mask "
                "from the parameters: jax.tree.map(lambda x: x.ndim >= 2, params)"
            )
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(
                f"the mask is {flag!r} at {path!r}; its leaves must be True or False"
            )

    def find(path: str, _: Any) -> bool:
        for start in _starts(path):
            if start in flags:
                return bool(flags[start])
        raise ValueError(
            f"the mask has no entry for parameter {path!r}; make it from the "
            "parameters: jax.tree.map(lambda x: x.ndim >= 2, params)"
        )

    return lambda params: map_with_paths(find, params)


def _starts(path: str) -> list[str]:
    """A path and the paths of the folders that it is in: a/b, a, ""."""
    names = path.split("/")
    return ["/".join(names[:n]) for n in range(len(names), -1, -1)]

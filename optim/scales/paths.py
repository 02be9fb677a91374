"""Parameter paths as strings, the same for trees of every library."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Linen keeps parameters under this key, next to collections that are not trained.
_LINEN_PARAMS = "params"


def path_string(path: tuple[Any, ...]) -> str:
    """Format a key path as a string, e.g. `"blocks/3/kernel"`.

    Examples:
      >>> from jax.tree_util import DictKey, GetAttrKey, SequenceKey
      >>> path_string((DictKey("blocks"), SequenceKey(3), GetAttrKey("value")))
      'blocks/3/value'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def open_numbers(path: str) -> str:
    """The path with "#" for every number; equal for all blocks of a list."""
    return re.sub(r"\d+", "#", path)


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """List (path, leaf) of a tree, in the tree's order."""
    trained = str(_trained_at(tree))
    found = []
    for keys, leaf in unboxed(tree, is_leaf):
        inside = bool(keys) and str(keys[0]) == trained
        found.append((path_string(keys[1:] if inside else keys), leaf))
    return found


def unboxed(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[tuple[Any, ...], Any]]:
    """List (key path, leaf) of a tree, without the attribute `.value` of Flax's boxes.

    It is part of the path in an optimizer's `init`, but not in its `update`. Other
    modules may call a parameter `value`, and keep it.
    """

    def stops(node: Any) -> bool:
        return _is_box(node) or (is_leaf is not None and is_leaf(node))

    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops)[0]:
        if not _is_box(leaf) or (is_leaf is not None and is_leaf(leaf)):
            found.append((path, leaf))
            continue
        for keys, inner in jax.tree_util.tree_flatten_with_path(leaf, is_leaf)[0]:
            first = getattr(keys[0], "name", None) if keys else None
            found.append((path + keys[first == "value" :], inner))
    return found


def map_with_paths(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` with a function whose first argument is the path, a string."""
    paths = iter([path for path, _ in flatten(tree)])
    return jax.tree.map(lambda *leaves: function(next(paths), *leaves), tree, *rest)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries with leaves by path; flat if a path leads on from another.

    Examples:
      >>> nested({"a/b": 1, "c": 2}), nested({"a": 1, "a/b": 2})
      ({'a': {'b': 1}, 'c': 2}, {'a': 1, 'a/b': 2})
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
            if not isinstance(inner, dict):
                return dict(leaves)
        if name in inner:
            return dict(leaves)
        inner[name] = leaf
    return tree


def trainable(tree: Any) -> Any:
    """The `"params"` of Linen variables, the module of an Equinox (module, state).

    Any other tree is unchanged.
    """
    key = _trained_at(tree)
    if key is None:
        return tree
    return tree[_LINEN_PARAMS] if isinstance(tree, Mapping) else tree[0]


def float_leaves(tree: Any) -> dict[str, Any]:
    """Floating-point leaves, by path; for Linen variables, those of "params"."""
    return {
        path: leaf
        for path, leaf in flatten(trainable(tree))
        if jnp.issubdtype(getattr(leaf, "dtype", np.int32), jnp.inexact)
    }


def map_float_leaves(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """As `map_with_paths` for `float_leaves`; other leaves stay as they are."""
    inside = float_leaves(tree)
    return map_with_paths(lambda p, x: function(p, x) if p in inside else x, tree)


def has_base(thing: Any, *names: str, package: str = "") -> bool:
    """Whether an object is of a class with one of these names, or derived from it.

    By name, so that `optim` does not import Flax or Equinox. `package` is the beginning
    of the name of their module.
    """
    return any(
        c.__name__ in names and c.__module__.startswith(package)
        for c in type(thing).__mro__
    )


def _is_box(thing: Any) -> bool:
    """Whether an object is a box of Flax, around one array."""
    return has_base(thing, "Variable", "AxisMetadata", package="flax.")


def _trained_at(tree: Any) -> Any:
    """The key of the part of a tree that is trained; None if that is all of it."""
    if isinstance(tree, Mapping) and isinstance(tree.get(_LINEN_PARAMS), Mapping):
        return jax.tree_util.DictKey(_LINEN_PARAMS)
    is_pair = isinstance(tree, tuple) and len(tree) == 2
    if is_pair and has_base(tree[1], "State", package="equinox"):
        return jax.tree_util.SequenceKey(0)
    return None

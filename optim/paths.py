"""Parameter paths as strings, the same for trees of every library."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Linen keeps parameters under this key, next to collections that are not trained.
_LINEN_PARAMS = "params"


def path_string(path: tuple[Any, ...]) -> str:
    """Format a key path as a string, e.g. `"blocks/3/kernel"`.

    The attribute `.value` of Flax variables is left out: it is part of the path in an
    optimizer's `init`, but not in its `update`.

    Examples:
      >>> from jax.tree_util import DictKey, GetAttrKey, SequenceKey
      >>> path_string((DictKey("blocks"), SequenceKey(3), GetAttrKey("value")))
      'blocks/3'
    """
    last = path[-1] if path else None
    if isinstance(last, jax.tree_util.GetAttrKey) and last.name == "value":
        path = path[:-1] or path
    return jax.tree_util.keystr(path, simple=True, separator="/")


def biases_of(path: str) -> tuple[str, ...]:
    """Possible paths of a kernel's bias, by the naming of common libraries.

    Examples:
      >>> biases_of("first/kernel"), biases_of("layers/0/w1"), biases_of("0/0")
      (('first/bias',), ('layers/0/b1',), ('0/1',))
      >>> biases_of("W1"), biases_of("a")
      (('b1', 'B1'), ())
    """
    if path.endswith("/array"):  # a NamedArray of Haliax
        return tuple(b + "/array" for b in biases_of(path.removesuffix("/array")))
    cut = max(path.rfind("/"), path.rfind(".")) + 1
    head, name = path[:cut], path[cut:]
    for kernel, bias in (("kernel", "bias"), ("weight", "bias"), ("w", "b")):
        if re.match(kernel + r"(?![a-z])", name, re.IGNORECASE):
            spelled = (bias,) if name[0].islower() else (bias, bias.capitalize())
            return tuple(head + b + name[len(kernel) :] for b in spelled)
    # Pairs (kernel, bias) in a tuple or list.
    return (head + "1",) if head and name == "0" else ()


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """List (path, leaf) of a tree, in the tree's order."""
    skip = _prefix(tree)
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(_path(path, skip), leaf) for path, leaf in pairs]


def map_with_paths(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` with a function whose first argument is the path, a string."""
    skip = _prefix(tree)
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(_path(path, skip), *leaves), tree, *rest
    )


def trainable(tree: Any) -> Any:
    """The `"params"` collection of Linen variables; any other tree unchanged."""
    return tree[_LINEN_PARAMS] if _prefix(tree) else tree


def _prefix(tree: Any) -> str:
    is_linen = (
        isinstance(tree, Mapping)
        and _LINEN_PARAMS in tree
        and isinstance(tree[_LINEN_PARAMS], Mapping)
    )
    return _LINEN_PARAMS if is_linen else ""


def _path(path: tuple[Any, ...], skip: str) -> str:
    inside = bool(skip) and path[0] == jax.tree_util.DictKey(skip)
    return path_string(path[1:] if inside else path)

"""The parameters of any model, as shapes: nothing is computed or stored."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from .paths import path_string, trainable


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What is known of a parameter from the model that holds it.

    Attributes:
      shape: its shape.
      layout: "in_out" or "out_in".
      embedding: whether it belongs to an embedding layer.
      rank: number of axes that its layer gives it; more are stacked copies. None
        where no layer tells.
    """

    shape: tuple[int, ...]
    layout: str = "in_out"
    embedding: bool = False
    rank: int | None = None


def leaves(model: Any, which: str) -> dict[str, Leaf]:
    """The floating-point parameters of a model, by path.

    Args:
      model: a module, parameters, or a function of no arguments that builds either.
        A function is only traced.
      which: what to call it in errors: "base" or "target".

    Raises:
      ValueError: there are none.

    Examples:
      >>> leaves(lambda: {"w": jnp.zeros((10**6, 10**6))}, "base")["w"].shape
      (1000000, 1000000)
    """
    found: dict[str, Leaf] = {}
    if _is_function(model):
        # Read inside the trace: shared variables are still the same object there.
        jax.eval_shape(lambda: found.update(_read(model())))
    else:
        found = _read(model)
    if not found:
        raise ValueError(
            f"the {which} has no floating-point parameters; pass a model, its "
            "parameters, or a function that builds one"
        )
    return found


def _read(model: Any) -> dict[str, Leaf]:
    model = trainable(model)
    pairs, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_variable)
    found, seen = {}, set()
    for path, leaf in pairs:
        if _is_variable(leaf):
            # Batch statistics and random state are no parameters; and a variable
            # that stands in two places is one parameter, under the first path.
            if not _has_base(leaf, "Param") or id(leaf) in seen:
                continue
            seen.add(id(leaf))
            leaf = next(iter(jax.tree.leaves(leaf)), None)
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            continue
        owner = _owner(model, path)
        found[path_string(path)] = Leaf(
            tuple(leaf.shape),
            "out_in" if type(owner).__module__.startswith("equinox.nn") else "in_out",
            _has_base(owner, "Embedding") or _has_base(owner, "Embed"),
            _rank(owner, path),
        )
    return found


def _is_function(model: Any) -> bool:
    # Modules of NNX and Equinox are callable too, and are not to be called.
    return (
        inspect.isroutine(model)
        or inspect.isclass(model)
        or isinstance(model, functools.partial)
    )


def _is_variable(node: Any) -> bool:
    return _has_base(node, "Variable") and type(node).__module__.startswith("flax.nnx")


def _has_base(thing: Any, name: str) -> bool:
    # By name, so that the optimizer side imports no module library.
    return any(c.__name__ == name for c in type(thing).__mro__)


def _owner(model: Any, path: tuple[Any, ...]) -> Any:
    """The object that holds the leaf, or None where the path cannot be walked."""
    node = model
    for key in path[:-1]:
        if isinstance(key, jax.tree_util.GetAttrKey):
            node = getattr(node, key.name, None)
        elif isinstance(key, jax.tree_util.SequenceKey):
            node = node[key.idx]
        elif isinstance(key, jax.tree_util.DictKey):
            node = node.get(key.key) if hasattr(node, "get") else None
        else:
            return None
    return node


def _rank(owner: Any, path: tuple[Any, ...]) -> int | None:
    """Number of axes that a layer of Flax NNX or Equinox gives its kernel."""
    name = getattr(path[-1], "name", None) if path else None
    if name not in ("kernel", "weight", "embedding"):
        return None
    if _has_base(owner, "Conv") or _has_base(owner, "ConvTranspose"):
        size = getattr(owner, "kernel_size", None)
        return len(size) + 2 if isinstance(size, tuple | list) else None
    plain = ("Linear", "Embed", "Embedding")
    return 2 if any(_has_base(owner, kind) for kind in plain) else None

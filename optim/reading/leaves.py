"""Read the shapes of a model's parameters, without computing or storing arrays."""

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..rules.parametrizations import Parametrization
from ..scales.paths import has_base, path_string, trainable, unboxed

# Ends the path of a segment; numbers count layers.
_SEGMENT = re.compile(r" \[part [a-z0-9.]+\]$")


def whole(path: str) -> str:
    """The path of the parameter that holds a segment.

    Examples:
      >>> whole("block/qkv [part b]"), whole("block/qkv")
      ('block/qkv', 'block/qkv')
    """
    return _SEGMENT.sub("", path)


class Leaves(dict[str, jax.ShapeDtypeStruct]):
    """The shapes of a model's parameters, by path.

    Attributes:
      parametrization: the one that the model was built with, for models of the zoo;
        None for others.
      layers: {path: axes, as they are declared} of parameters of well-known layers.
    """

    parametrization: Parametrization | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, str] = {}


def leaves(model: Any, which: str) -> Leaves:
    """Read the floating-point parameters of a model, by path.

    A plain array in an NNX module (a mask, a table of sinusoids) is not a parameter:
    `nnx.state(model, nnx.Param)` leaves it out, so no optimizer trains it.

    Args:
      model: a module, parameters, or a function of no arguments that builds either.
        A function is only traced.
      which: the name of the model in errors, "base" or "target".

    Raises:
      ValueError: there are no parameters; `model` is not a model, or a function that
        cannot build one without arguments; a Flax variable holds a tree.

    Examples:
      >>> leaves(lambda: {"w": jnp.zeros((10**6, 10**6))}, "base")["w"].shape
      (1000000, 1000000)
    """
    read = Leaves()
    if is_function(model):
        _trace(model, which, read)
    else:
        _check_kind(model, which)
        read_into(model, read)
    if not read:
        raise ValueError(
            f"the {which} has no floating-point parameters; pass a model, its "
            "parameters, or a function that builds one. In an NNX module, wrap the "
            "arrays that are trained: nnx.Param(array)"
        )
    return read


def _trace(model: Any, which: str, read: Leaves) -> None:
    """Build a model under `eval_shape`, and read it there into `read`.

    Inside of the trace, shared variables are still the same object.
    """
    check_takes_nothing(model, which)
    build_abstract(lambda: read_into(model(), read), which)


def build_abstract(build: Any, which: str, *arguments: Any) -> None:
    """Run a function that builds a model under `jax.eval_shape`.

    A function that needs the values of its arrays, e.g. to branch on a rate of dropout
    out of `jnp.linspace`, is computed.

    Raises:
      ValueError: it changes an object from outside, e.g. an `nnx.Rngs`.
    """
    try:
        jax.eval_shape(build, *arguments)
    except jax.errors.ConcretizationTypeError:
        build(*arguments)
    except Exception as error:
        if type(error).__name__ != "TraceContextError":
            raise
        raise ValueError(
            f"the function that builds the {which} changes an object from outside "
            "(most often an nnx.Rngs); create Rngs inside the function: lambda: "
            "MyModel(64, rngs=nnx.Rngs(0))"
        ) from error


def check_takes_nothing(function: Any, which: str) -> None:
    """Raise a `ValueError` if a function that builds a model needs arguments."""
    if needed := _required(function):
        raise ValueError(
            f"the {which} is a function or class that needs arguments "
            f"({', '.join(needed)}); pass one without: lambda: MyModel(64, "
            "rngs=nnx.Rngs(0))"
        )


def _required(function: Any) -> list[str]:
    """Names of the arguments without a default."""
    # The metaclass of NNX modules hides the arguments of a class.
    is_class = inspect.isclass(function)
    try:
        signature = inspect.signature(function.__init__ if is_class else function)
    except (TypeError, ValueError):  # of some built-in functions
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in list(signature.parameters.values())[is_class:]
        if p.default is p.empty and p.kind not in variadic
    ]


def _check_kind(model: Any, which: str) -> None:
    if isinstance(model, dict):
        return  # its attributes, if it has any, are its keys
    if hasattr(model, "params") and hasattr(model, "opt_state"):
        raise ValueError(
            f"the {which} is a {type(model).__name__}, which also has the state of an "
            "optimizer; pass its parameters, state.params"
        )
    if has_base(model, "Module") and hasattr(model, "init") and hasattr(model, "bind"):
        raise ValueError(
            f"the {which} is a Linen module, which has no parameters of its own; pass "
            "a function that makes them: lambda: model.init(key, x)"
        )
    if isinstance(model, bool | int | float | str):
        raise ValueError(
            f"the {which} is {model!r}, a {type(model).__name__} and not a model; pass "
            f"a function that builds the model: infer_scales(lambda: MyModel(...), "
            "lambda: MyModel(...))"
        )


def read_into(model: Any, read: Leaves) -> None:
    """Read the parameters of a model into `read`."""
    if not isinstance(model, dict):  # an attribute of some dictionaries is a key
        own = getattr(getattr(model, "plan", None), "parametrization", None)
        if isinstance(own, Parametrization):
            read.parametrization = own
        read.layers |= _of_layers(model)
    model = trainable(model)
    # Who passes a state has chosen its variables.
    chosen = has_base(model, "State")
    found = unboxed(model, is_variable)
    # A state of a whole module holds its plain arrays too; one of `nnx.as_pure`,
    # no variables at all.
    in_state = chosen and any(is_variable(leaf) for _, leaf in found)
    modules = [x for x in jax.tree.leaves(model, is_leaf=is_nnx) if is_nnx(x)]
    plain = {id(x) for m in modules for x in jax.tree.leaves(m, is_leaf=is_variable)}
    seen = set()
    for path, leaf in found:
        if is_variable(leaf):
            # Batch statistics and random state are no parameters; and a variable
            # that stands in two places is one parameter, under the first path.
            trained = has_base(leaf, "Param") or (chosen and _is_users(leaf))
            if not trained or id(leaf) in seen:
                continue
            seen.add(id(leaf))
            leaf = _content(path_string(path), leaf)
        elif in_state or id(leaf) in plain or isinstance(leaf, type):  # e.g. a dtype
            continue
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            continue
        if path_string(path) in read:
            raise ValueError(
                f"two parameters have the path {path_string(path)!r}; rename one of "
                "them, so that no name holds a slash"
            )
        read[path_string(path)] = jax.ShapeDtypeStruct(leaf.shape, dtype)


_NORM, _BIAS = {"scale": "d", "bias": "d"}, {"bias": "d"}
_EQUINOX_NORM = {"weight": "d", "bias": "d"}
# By package and class, what its parameters do wherever a model calls it.
_LAYERS = {
    ("flax", "Linear"): {"kernel": "in -> out", **_BIAS},
    ("flax", "Embed"): {"embedding": "vocab: d"},
    ("flax", "Conv"): {"kernel": "h w in -> out", **_BIAS},
    **{("flax", n + "Norm"): _NORM for n in ("Layer", "RMS", "Batch", "Group")},
    ("equinox", "Linear"): {"weight": "out <- in", **_BIAS},
    ("equinox", "Embedding"): {"weight": "vocab: d"},
    ("equinox", "Conv2d"): {"weight": "out <- in h w", "bias": "d h w"},
    **{("equinox", n + "Norm"): _EQUINOX_NORM for n in ("Layer", "RMS", "Group")},
}


def _of_layers(model: Any) -> dict[str, str]:
    """The axes of the parameters of well-known layers, by path."""

    def known(node: Any) -> dict[str, str]:
        kind = type(node)
        axes = _LAYERS.get((kind.__module__.partition(".")[0], kind.__name__), {})
        # A convolution may be over another number of axes.
        is_known = axes and np.size(getattr(node, "kernel_size", (1, 1))) == 2
        return axes if is_known else {}

    layers = jax.tree_util.tree_flatten_with_path(model, lambda x: bool(known(x)))[0]
    return {
        "/".join(filter(None, (path_string(keys), name))): axes
        for keys, layer in layers
        for name, axes in known(layer).items()
    }


def _content(path: str, variable: Any) -> Any:
    """The array of a Flax variable."""
    arrays = jax.tree_util.tree_flatten_with_path(variable)[0]
    if len(arrays) > 1 or any(len(keys) > 1 for keys, _ in arrays):
        names = ", ".join(path_string(keys[1:]) for keys, _ in arrays)
        raise ValueError(
            f"the nnx.Param {path!r} holds a tree ({names}), whose paths differ "
            "between an optimizer's init and its update; give each array an nnx.Param "
            "of its own: nnx.data({name: nnx.Param(array), ...})"
        )
    return arrays[0][1] if arrays else None


def is_function(model: Any) -> bool:
    # NNX and Equinox modules are callable too, but they are models already.
    return (
        inspect.isroutine(model)
        or inspect.isclass(model)
        or isinstance(model, functools.partial)
    )


def is_variable(node: Any) -> bool:
    return has_base(node, "Variable", package="flax.nnx")


def _is_users(variable: Any) -> bool:
    """Whether a variable is of a kind that the user defined, or of none."""
    kinds = (c for c in type(variable).__mro__ if c.__module__.startswith("flax.nnx"))
    return next(kinds).__name__ == "Variable"


def is_nnx(node: Any) -> bool:
    """Whether an object is an NNX module, or another object whose state NNX tracks."""
    return has_base(node, "Module", "Object", "Pytree", package="flax.nnx")

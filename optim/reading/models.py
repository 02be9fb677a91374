"""Trace the forward pass of a model of any JAX library."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..scales.paths import flatten, has_base
from .leaves import (
    Leaves,
    build_abstract,
    check_takes_nothing,
    is_function,
    is_variable,
    read_into,
)
from .program import Program

Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Reading:
    """The program of a model's forward pass.

    Attributes:
      leaves: the parameters, by path.
      program: the graph of the forward pass.
      path_of: paths of the parameters, in the order of `program.params`.
    """

    leaves: Leaves
    program: Program
    path_of: list[str]


def trace(
    model: Any, inputs: tuple[Any, ...], call: Call | None, which: str
) -> Reading:
    """Trace the forward pass of a model, without computing or storing arrays.

    Args:
      model: see `infer_scales`.
      inputs: arguments of the forward pass. Arrays and `jax.ShapeDtypeStruct`s are
        traced, other leaves (flags, None, strings) are passed as they are.
      call: the forward pass; None for that of the model's library.
      which: "base" or "target", for messages.

    Raises:
      ValueError: there is no forward pass, or it fails on these inputs.
    """
    if not isinstance(inputs, tuple | list):
        raise ValueError(
            f"inputs={type(inputs).__name__} must be a tuple of the arguments of the "
            "forward pass: inputs=(x,)"
        )
    arguments, structure = jax.tree.flatten(tuple(inputs), is_leaf=lambda x: x is None)
    traced = [i for i, x in enumerate(arguments) if _is_array(x)]
    shapes = [_abstract(arguments[i]) for i in traced]

    def fill(arrays: Any) -> Any:
        filled = list(arguments)
        for i, array in zip(traced, arrays, strict=True):
            filled[i] = array
        return jax.tree.unflatten(structure, filled)

    built = _build(model, shapes, fill, call, which)
    if call is None and not callable(built.kind) and not _is_forward(built.kind):
        raise ValueError(
            f"the {which} is a {type(built.kind).__name__}, which has no forward pass "
            "of its own; pass call=lambda params, *inputs: ..., the forward pass or "
            "the loss"
        )

    def run(params: Any, state: Any, *arrays: Any) -> Any:
        model, given = _bound(built.kind, built.rebuild(params, state)), fill(arrays)
        result = model(*given) if call is None else call(model, *given)
        if call is None and _has_state(built.kind):
            result, _ = result
        # Anything else (a cache object, a string) computes nothing.
        return [x for x in jax.tree.leaves(result) if _is_array(x)]

    try:
        program = Program(run, built.params, built.state, tuple(shapes))
    except Exception as error:
        raise _failed(which, arguments, error) from error
    return Reading(built.shapes, program, built.paths)


def _failed(which: str, arguments: Sequence[Any], error: Exception) -> ValueError:
    """The error for a forward pass that fails, as Linen's and Haiku's init, too."""
    given = ", ".join(map(_shape_text, arguments))
    return ValueError(
        f"the forward pass of the {which} fails on inputs=({given}): "
        f"{type(error).__name__}: {str(error).rstrip('.')}. Pass the arguments of "
        "one forward pass as inputs=(...), flags such as train=False among them, "
        "and call=lambda model, *inputs: ... where it is not model(*inputs)"
    )


@dataclasses.dataclass(frozen=True)
class _Built:
    """A model taken apart into parameters, other arrays and everything else.

    Attributes:
      shapes: the parameters, by path.
      kind: the module or function that has the forward pass.
      structure, leaves: all of the model's tree.
      paths: of the parameters, in their order in the tree.
      params_at: where each parameter stands among the leaves.
      state_at: where each other array stands.
    """

    shapes: Leaves
    kind: Any
    structure: Any
    leaves: list[Any]
    paths: list[str]
    params_at: list[list[int]]
    state_at: list[int]

    @property
    def params(self) -> list[jax.ShapeDtypeStruct]:
        return [_abstract(self.leaves[first]) for first, *_ in self.params_at]

    @property
    def state(self) -> list[jax.ShapeDtypeStruct]:
        return [_abstract(self.leaves[i]) for i in self.state_at]

    def rebuild(self, params: Any, state: Any) -> Any:
        leaves = list(self.leaves)
        for places, array in zip(self.params_at, params, strict=True):
            for i in places:
                leaves[i] = array
        for i, array in zip(self.state_at, state, strict=True):
            leaves[i] = array
        return jax.tree.unflatten(self.structure, leaves)


def _build(
    model: Any,
    shapes: list[Any],
    fill: Callable[[Any], Any],
    call: Call | None,
    which: str,
) -> _Built:
    """Take a model apart, under `eval_shape`, also where a function builds it."""
    taken: list[_Built] = []
    built = is_function(model)
    if built:
        check_takes_nothing(model, which)

    def build(arrays: Any) -> None:
        made = model() if built else model
        taken.append(_build_module(made, fill(arrays), call, which))

    build_abstract(build, which, shapes)
    return taken[0]


def _build_module(
    model: Any, inputs: tuple[Any, ...], call: Call | None, which: str
) -> _Built:
    if _is_linen(model) or _is_haiku(model):
        try:
            trees = _initial(model, inputs, call)
        except Exception as error:
            leaves = jax.tree.leaves(inputs, is_leaf=lambda x: x is None)
            raise _failed(which, leaves, error) from error
        return _take_apart((model, *trees), which)
    return _take_apart(model, which)


def _initial(model: Any, inputs: Sequence[Any], call: Call | None) -> tuple[Any, ...]:
    """Linen's variables, or Haiku's parameters and its state, if it has one."""
    key = jax.random.key(0)
    try:
        made = model.init(key, *inputs)
    except Exception:
        if call is None or not _is_linen(model):
            raise
        made = model.init(key, *inputs, method=call)  # they are arguments of `call`
    return made if _has_state(model) else (made,)


def _has_state(model: Any) -> bool:
    return type(model).__name__ == "TransformedWithState"


def _take_apart(model: Any, which: str) -> _Built:
    kind: Any = None
    if isinstance(model, tuple) and len(model) > 1 and _is_forward(model[0]):
        kind, *rest = model
        model = rest[0] if len(rest) == 1 else tuple(rest)
    trained = Leaves()
    # Of a Haiku function with state, only the first tree is trained.
    is_pair = _has_state(kind)
    read_into(model[0] if is_pair else model, trained)
    if not trained:
        first = next(iter(jax.tree.leaves(model)), None)
        raise ValueError(
            f"the {which} has no floating-point parameters"
            + (
                "; for an NNX module with pytree=False pass (lambda state, *inputs, "
                "graph=graph: nnx.merge(graph, state)(*inputs), state), after graph, "
                "state = nnx.split(model)"
                if first is model and has_base(model, "Module")
                else ""
            )
        )
    leaves, structure = jax.tree.flatten(model)
    names = [path for path, _ in flatten(model[0] if is_pair else model)]
    paths: list[str] = []
    params_at: list[list[int]] = []
    state_at: list[int] = []
    known: dict[int, list[int]] = {}  # places of variables, which may have two
    each = itertools.zip_longest(leaves, names, _variables(model))
    for i, (leaf, path, variable) in enumerate(each):
        if variable in known:
            known[variable].append(i)
        elif path in trained and path not in paths and _is_array(leaf):
            places = [i]
            if variable:
                known[variable] = places
            paths.append(path)
            params_at.append(places)
        elif _is_array(leaf) and not _is_known(leaf):
            state_at.append(i)
    return _Built(trained, kind or model, structure, leaves, paths, params_at, state_at)


def _variables(model: Any) -> list[int]:
    """For each leaf, the identity of the variable that holds it, or 0."""
    found = []
    for node in jax.tree.leaves(model, is_leaf=is_variable):
        count = len(jax.tree.leaves(node))
        found += [id(node) if is_variable(node) else 0] * count
    return found


def initialized(model: Any, inputs: tuple[Any, ...] | None, call: Call | None) -> Any:
    """The model, or a function that initializes it where it has no values of its own.

    Linen and Haiku find shapes by the inputs of the forward pass.
    """
    if not (_is_linen(model) or _is_haiku(model)):
        return model

    def build() -> Any:
        filled = jax.tree.map(
            lambda x: jax.numpy.zeros(x.shape, x.dtype) if _is_array(x) else x, inputs
        )
        return _initial(model, filled, call)[0]

    return build


def _bound(kind: Any, trees: Any) -> Any:
    """The model that is called: a forward pass with its parameters.

    For NNX and Equinox, `trees` is the module itself.
    """
    if _is_linen(kind):
        state = [name for name in trees if name != "params"]
        # Streams of random numbers without a key of their own take that of "params".
        return kind.bind(trees, rngs={"params": jax.random.key(0)}, mutable=state)
    if _is_haiku(kind):
        # hk.without_apply_rng removes the key.
        takes_key = "rng" in inspect.signature(kind.apply).parameters
        key = (jax.random.key(0),) if takes_key else ()
        first = trees if _has_state(kind) else (trees,)
        return functools.partial(kind.apply, *first, *key)
    return functools.partial(kind, trees) if is_function(kind) else trees


def _is_forward(thing: Any) -> bool:
    """Whether it is the forward pass in a pair (forward pass, parameters)."""
    return _is_linen(thing) or _is_haiku(thing) or is_function(thing)


def _is_linen(model: Any) -> bool:
    return has_base(model, "Module") and all(
        hasattr(model, name) for name in ("init", "apply", "bind")
    )


def _is_haiku(model: Any) -> bool:
    return type(model).__name__ in ("Transformed", "TransformedWithState") and all(
        hasattr(model, name) for name in ("init", "apply")
    )


def _is_array(leaf: Any) -> bool:
    is_type = isinstance(leaf, type)  # e.g. numpy.float32, which has both
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_type


def _is_known(leaf: Any) -> bool:
    """Whether it is a number that the graph should know, e.g. a stored multiplier."""
    return (
        isinstance(leaf, jax.Array | np.ndarray)
        and not isinstance(leaf, jax.core.Tracer)
        and leaf.size == 1
        and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    )


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _shape_text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if _is_array(leaf) else repr(leaf)

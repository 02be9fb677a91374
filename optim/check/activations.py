"""Collect the activations of a model that does not return them.

While a forward pass is traced, the outputs of submodules and the values that NNX
modules `sow` are tagged by name. The tags stay in the traced program, also inside the
body of a `jax.lax.scan`. Evaluating that program collects the tagged values.

How calls of submodules are intercepted:

- Linen: by `flax.linen.intercept_methods`, which acts in the current thread only.
  (`capture_intermediates` is an argument of `apply`, which the user's loss calls.)
- NNX: each module of a private copy of the model becomes an instance of a subclass of
  its own class, whose `__call__` tags the output. The graph definition of that copy
  records the subclass, so `nnx.merge` inside a scan creates tagging modules too. No
  existing class is changed. `nnx.capture(model, ..., method_outputs=...)` is not used,
  for two reasons that hold in flax 0.12.8: it replaces the methods of the classes, for
  every thread of the process; and it stores values on the module objects, which loses
  the outputs of blocks that are merged inside a `jax.lax.scan`.

Not collected: calls of methods other than `__call__`, modules that the loss does not
reach through its model argument, modules created during the forward pass, the bodies of
`jax.lax.while_loop` and `jax.lax.cond`, and classes whose subclasses need arguments.
Sow such values, or return them from the `activations` function of `coord_check`.
"""

import threading
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

_PREFIX = "mupax:"
# Primitives that only wrap a program; the wrapped program is evaluated instead.
_WRAPPERS = {
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "jit",
    "pjit",
    "remat",
    "remat2",
}


class Activation(NamedTuple):
    """Values of one layer; `stacked` if the first axis counts layers of a scan."""

    value: jax.Array
    stacked: bool


def collect(function: Callable[[Any], Any], model: Any) -> dict[str, Activation]:
    """Collect the activations of `function(model)`, by the path of the submodule.

    Args:
      function: runs the model; its result is discarded.
      model: an NNX module, or Linen variables whose module `function` applies.

    Returns:
      The floating-point outputs of each submodule that was called, and each value that
      was sown. Layers of a `jax.lax.scan` are stacked along the first axis.
    """
    parts, assemble = _take_apart(model)
    arrays, treedef = jax.tree.flatten(parts)

    def run(arrays: list[jax.Array]) -> None:
        fresh = tagged(assemble(jax.tree.unflatten(treedef, arrays)))
        with _linen_tags():
            function(fresh)

    program = jax.make_jaxpr(run)(arrays)
    activations: dict[str, Activation] = {}
    _evaluate(program.jaxpr, program.consts, arrays, activations)
    return activations


def is_nnx(model: Any) -> bool:
    """Whether the model is a Flax NNX module, without importing Flax."""
    return any(
        c.__name__ == "Module" and c.__module__.startswith("flax.nnx")
        for c in type(model).__mro__
    )


def _take_apart(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Split a model into its arrays and a function that builds a copy around them."""
    if is_nnx(model):
        from flax import nnx

        graph, state = nnx.split(model)
        return state, lambda state: nnx.merge(graph, state, copy=True)
    leaves, treedef = jax.tree.flatten(model)
    arrays = [x if isinstance(x, jax.Array) else None for x in leaves]

    def assemble(arrays: list[Any]) -> Any:
        both = zip(arrays, leaves, strict=True)
        return jax.tree.unflatten(treedef, [x if a is None else a for a, x in both])

    return arrays, assemble


def tagged(model: Any) -> Any:
    """Make the modules of an NNX model tag the values that they return and sow.

    Args:
      model: an NNX module that is not used elsewhere, because its modules change their
        class. Any other model is returned unchanged.

    Returns:
      The model. Its modules are instances of subclasses of their own classes.
    """
    if not is_nnx(model):
        return model
    from flax import nnx

    for path, module in list(nnx.iter_modules(model)):
        subclass = _tagging(type(module), "/".join(map(str, path)))
        if subclass is not None:
            object.__setattr__(module, "__class__", subclass)
    return model


# Flax keeps every registered subclass, so each one is created only once.
_subclasses: "weakref.WeakKeyDictionary[type, dict[str, type | None]]"
_subclasses = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _tagging(cls: type, name: str) -> type | None:
    """A subclass that tags outputs under this name; None if it cannot be created."""
    with _lock:
        known = _subclasses.setdefault(cls, {})
        if name not in known:
            known[name] = _subclass(cls, name)
        return known[name]


def _subclass(cls: type, name: str) -> type | None:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound: Any = call.__get__(self)  # type: ignore[union-attr]
        return _tag(name or "output", bound(*args, **kwargs))

    def sow(self: Any, kind: Any, label: str, value: Any, *_: Any, **__: Any) -> bool:
        # The value is not stored; the traced program keeps the tag.
        _tag(f"{name}/{label}" if name else label, value)
        return True

    same = {k: getattr(cls, k) for k in ("__module__", "__qualname__", "__doc__")}
    members: dict[str, Any] = {**same, "sow": sow}
    call = next(
        (vars(c)["__call__"] for c in cls.__mro__ if "__call__" in vars(c)), None
    )
    if call is not None:
        members["__call__"] = __call__
    options = {"pytree": getattr(cls, "_pytree__is_pytree", True)}
    try:
        return types.new_class(
            cls.__name__, (cls,), options, lambda n: n.update(members)
        )
    except TypeError:
        return None  # subclasses need arguments, or are forbidden


def _tag(name: str, output: Any) -> Any:
    leaves, treedef = jax.tree.flatten(output)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating):
            suffix = f"/{i}" if len(leaves) > 1 else ""
            leaves[i] = checkpoint_name(leaf, f"{_PREFIX}{name}{suffix}")
    return jax.tree.unflatten(treedef, leaves)


def _linen_tags() -> AbstractContextManager[None]:
    """Tag the outputs of Linen submodules inside the context."""
    import sys

    # A Linen model can only exist if Linen was imported.
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return nullcontext()

    def tag(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        output = call(*args, **kwargs)
        if context.method_name != "__call__":
            return output
        return _tag("/".join(context.module.path) or "output", output)

    return linen.intercept_methods(tag)


def _evaluate(
    jaxpr: core.Jaxpr, consts: Any, args: Any, activations: dict[str, Activation]
) -> list[Any]:
    """Evaluate a traced program, and put its tagged values into `activations`."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        name, params = eqn.primitive.name, eqn.params
        tag = params.get("name") if name == "name" else None
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if isinstance(tag, str) and tag.startswith(_PREFIX):
            _add(activations, tag.removeprefix(_PREFIX), Activation(values[0], False))
            outs = values
        elif name == "scan" and _is_tagged(inner):
            outs = _scan(params, values, activations)
        elif name in _WRAPPERS and _is_tagged(inner):
            body, held = _open(inner)
            outs = _evaluate(body, held, values, activations)
        else:
            # Releases of JAX differ in whether this returns functions too.
            bound = eqn.primitive.get_bind_params(params)
            functions, settings = bound if isinstance(bound, tuple) else ((), bound)
            outs = eqn.primitive.bind(*functions, *values, **settings)
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _scan(
    params: dict[str, Any], values: list[Any], activations: dict[str, Activation]
) -> list[Any]:
    """Evaluate a scan that also returns its tagged values, stacked."""
    body, held = _open(params["jaxpr"])
    constants, start, xs = _arguments(params, values)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], Any]:
        inner: dict[str, Activation] = {}
        outs = _evaluate(body, held, [*constants, *carry, *x], inner)
        tagged = {name: a.value for name, a in inner.items()}
        return outs[: len(start)], (outs[len(start) :], tagged)

    carry, (ys, stacks) = jax.lax.scan(
        step, start, xs, params["length"], reverse=params["reverse"]
    )
    for name, value in stacks.items():
        _add(activations, name, Activation(value, True))
    return [*carry, *ys]


def _arguments(params: dict[str, Any], values: list[Any]) -> list[list[Any]]:
    """Constants, carry and stacked inputs of a scan."""
    if "ft_in" in params:  # from JAX 0.11 on
        return [list(part) for part in params["ft_in"].update(values).unpack()]
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    return [values[:first], values[first:last], values[last:]]


def _add(activations: dict[str, Activation], name: str, value: Activation) -> None:
    unique, times = name, 1
    while unique in activations:  # the module was called before
        times += 1
        unique = f"{name}#{times}"
    activations[unique] = value


def _open(jaxpr: Any) -> tuple[core.Jaxpr, Any]:
    closed = isinstance(jaxpr, core.ClosedJaxpr)
    return (jaxpr.jaxpr, jaxpr.consts) if closed else (jaxpr, ())


def _is_tagged(jaxpr: Any) -> bool:
    if jaxpr is None:
        return False
    for eqn in _open(jaxpr)[0].eqns:
        name = eqn.params.get("name") if eqn.primitive.name == "name" else None
        if isinstance(name, str) and name.startswith(_PREFIX):
            return True
        if eqn.primitive.name in {"scan"} | _WRAPPERS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if _is_tagged(inner):
                return True
    return False

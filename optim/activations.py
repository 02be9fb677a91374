"""Activations of a model that was not written to return them.

While a forward pass is traced, the outputs of submodules are tagged by name (and
NNX's `sow`, likewise). The tags stay in the traced program, inside scanned layers
too, and evaluating that program collects what they name.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

_PREFIX = "mupax:"
# Primitives that only wrap a program: what they hold is evaluated in their place.
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
    """The activations of `function(model)`, by the path of the submodule.

    Args:
      function: runs the model; its result is thrown away.
      model: an NNX module, or Linen variables whose module `function` applies.

    Returns:
      For each submodule that was called, and each value that was sown, its output of
      floating point. Layers of a `jax.lax.scan` are stacked along the first axis.
    """
    leaves, treedef = jax.tree.flatten(model)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]

    def run(arrays: list[jax.Array]) -> None:
        given = iter(arrays)
        filled = [next(given) if isinstance(x, jax.Array) else x for x in leaves]
        fresh = jax.tree.unflatten(treedef, filled)
        with tags(fresh), _linen_tags():
            function(fresh)

    program = jax.make_jaxpr(run)(arrays)
    found: dict[str, Activation] = {}
    _evaluate(program.jaxpr, program.consts, jax.tree.leaves(arrays), found)
    return found


def is_nnx(model: Any) -> bool:
    """Whether the model is a Flax NNX module, without importing Flax."""
    return any(
        c.__name__ == "Module" and c.__module__.startswith("flax.nnx")
        for c in type(model).__mro__
    )


def _tag(name: str, output: Any) -> Any:
    leaves, treedef = jax.tree.flatten(output)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating):
            suffix = f"/{i}" if len(leaves) > 1 else ""
            leaves[i] = checkpoint_name(leaf, f"{_PREFIX}{name}{suffix}")
    return jax.tree.unflatten(treedef, leaves)


@contextlib.contextmanager
def tags(model: Any) -> Iterator[None]:
    """Tag what NNX submodules return and sow, as long as the context lasts."""
    if not is_nnx(model):
        yield
        return
    from flax import nnx

    names: dict[int, str] = {}
    kept = []  # a module that is gone could lend its id to another
    homes: dict[type, str] = {}

    def register(root: Any, prefix: str) -> None:
        for path, module in nnx.iter_modules(root):
            name = "/".join([*filter(None, [prefix]), *map(str, path)])
            names.setdefault(id(module), name)
            homes.setdefault(type(module), name)
            kept.append(module)

    def name_of(module: Any) -> str:
        if id(module) not in names:
            # Merged anew inside a scan. Stacked, it stood where its type is known.
            register(module, homes.get(type(module), type(module).__name__))
        return names[id(module)] or "output"

    def calling(call: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            name = name_of(self)
            return _tag(name, call(self, *args, **kwargs))

        return __call__

    def sow(self: Any, kind: Any, name: str, value: Any, *_: Any, **__: Any) -> bool:
        # The tagged value goes nowhere; the program keeps the tag.
        _tag(f"{name_of(self)}/{name}".removeprefix("output/"), value)
        return True

    register(model, "")
    classes = {type(module) for module in kept}
    with contextlib.ExitStack() as stack:
        for cls in classes:
            stack.enter_context(_attribute(cls, "sow", sow))
            if "__call__" in dir(cls):
                stack.enter_context(_attribute(cls, "__call__", calling(cls.__call__)))
        yield


@contextlib.contextmanager
def _attribute(cls: type, name: str, value: Any) -> Iterator[None]:
    own = cls.__dict__.get(name)
    setattr(cls, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(cls, name)
        else:
            setattr(cls, name, own)


@contextlib.contextmanager
def _linen_tags() -> Iterator[None]:
    """Tag what Linen submodules return, as long as the context lasts."""
    import sys

    # A model of Linen is there only if its user imported Linen.
    linen = sys.modules.get("flax.linen")
    if linen is None:
        yield
        return

    def tag(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        output = call(*args, **kwargs)
        if context.method_name != "__call__":
            return output
        return _tag("/".join(context.module.path) or "output", output)

    with linen.intercept_methods(tag):
        yield


def _evaluate(
    jaxpr: core.Jaxpr, consts: Any, args: Any, found: dict[str, Activation]
) -> list[Any]:
    """Evaluate a traced program, and put what is tagged into `found`."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        name, params = eqn.primitive.name, eqn.params
        tag = params.get("name") if name == "name" else None
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if isinstance(tag, str) and tag.startswith(_PREFIX):
            _add(found, tag.removeprefix(_PREFIX), Activation(values[0], False))
            outs = values
        elif name == "scan" and _is_tagged(inner):
            outs = _scan(params, values, found)
        elif name in _WRAPPERS and _is_tagged(inner):
            body, held = _open(inner)
            outs = _evaluate(body, held, values, found)
        else:
            # Releases of JAX differ in whether functions are returned beside.
            bound = eqn.primitive.get_bind_params(params)
            functions, settings = bound if isinstance(bound, tuple) else ((), bound)
            outs = eqn.primitive.bind(*functions, *values, **settings)
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _scan(
    params: dict[str, Any], values: list[Any], found: dict[str, Activation]
) -> list[Any]:
    """A scan that also returns what is tagged inside, stacked."""
    body, held = _open(params["jaxpr"])
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], Any]:
        inner: dict[str, Activation] = {}
        args = [*values[:first], *carry, *x]
        outs = _evaluate(body, held, args, inner)
        tagged = {name: a.value for name, a in inner.items()}
        return outs[: params["num_carry"]], (outs[params["num_carry"] :], tagged)

    carry, (ys, stacks) = jax.lax.scan(
        step,
        values[first:last],
        values[last:],
        params["length"],
        reverse=params["reverse"],
    )
    for name, value in stacks.items():
        _add(found, name, Activation(value, True))
    return [*carry, *ys]


def _add(found: dict[str, Activation], name: str, value: Activation) -> None:
    unique, times = name, 1
    while unique in found:  # a module that is called again
        times += 1
        unique = f"{name}#{times}"
    found[unique] = value


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

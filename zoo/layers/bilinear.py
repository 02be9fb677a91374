"""Functions of two arrays that are linear in each, with fast gradients of their own."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array


class Form(Hashable, Protocol):
    """A form <y, f(x, kernel)>, linear in each of the three, as its three gradients.

    Each gradient takes the other two and is linear in both. So its own derivatives are
    gradients of the same form, in forward and in reverse mode and of every order. They
    may depend on further arrays of whole numbers, `data`.
    """

    def x(self, kernel: Array, y: Array, *data: Array) -> Array:
        """The gradient with respect to x."""

    def kernel(self, x: Array, y: Array, *data: Array) -> Array:
        """The gradient with respect to the kernel."""

    def y(self, x: Array, kernel: Array, *data: Array) -> Array:
        """The function."""


_NAMES = ("x", "kernel", "y")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def formed(form: Form, x: Array, kernel: Array, *data: Array) -> Array:
    """The function of a form."""
    if _loops(form):
        return _gradient(form, "y", x, kernel, *data)
    return form.y(x, kernel, *data)


def _loops(form: Form) -> bool:
    """Whether `jax.vmap` over some of the arrays of a form is a loop."""
    return getattr(form, "loops", False)


@functools.partial(formed.defjvp, symbolic_zeros=True)
def _formed_jvp(form: Form, primals: Any, tangents: Any) -> tuple[Array, Any]:
    (x, kernel, *data), (dx, dkernel, *_) = primals, tangents
    pairs = ((dx, kernel), dx), ((x, dkernel), dkernel)
    terms = [
        _gradient(form, "y", *pair, *data)
        for pair, tangent in pairs
        if not isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    ]
    out = formed(form, x, kernel, *data)
    return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)


# A primitive, because only those have a transpose of their own.
_gradient_p = core.Primitive("bilinear_form")


def _gradient(
    form: Form, name: str, first: Array, second: Array, *data: Array
) -> Array:
    """A gradient of a form, given the other two in order, as one operation."""
    avals = (jax.typeof(array) for array in (first, second, *data))
    # A program remembers the mesh under which it was traced.
    mesh = jax.sharding.get_abstract_mesh()
    program = _program(form, name, mesh, *((a.shape, a.dtype) for a in avals))
    bound = {"form": form, "name": name, "call_jaxpr": program}
    out: Array = _gradient_p.bind(first, second, *data, **bound)
    return out


@functools.lru_cache(maxsize=1024)
def _program(
    form: Any, name: str, mesh: Hashable, *shapes: tuple[Any, Any]
) -> core.ClosedJaxpr:
    # What counts operations in programs finds them in here.
    return jax.make_jaxpr(getattr(form, name))(
        *(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    )


def _run(*arrays: Array, call_jaxpr: core.ClosedJaxpr, **_: Any) -> Array:
    (out,) = core.jaxpr_as_fun(call_jaxpr)(*arrays)
    return jnp.asarray(out)


def _derivative(
    primals: Any, tangents: Any, *, form: Form, name: str, **_: Any
) -> tuple[Array, Any]:
    first, second, *data = primals
    pairs = zip(tangents, ((tangents[0], second), (first, tangents[1])), strict=False)
    terms = [
        _gradient(form, name, *pair, *data)
        for tangent, pair in pairs
        if not isinstance(tangent, ad.Zero)
    ]
    return _gradient(form, name, *primals), sum(terms[1:], terms[0])


def _transpose(
    cotangent: Any, first: Any, second: Any, *data: Any, form: Form, name: str, **_: Any
) -> list[Any]:
    """The cotangent of the argument that is not known."""
    others = [other for other in _NAMES if other != name]
    which = 0 if isinstance(first, ad.UndefinedPrimal) else 1
    if isinstance(cotangent, ad.Zero):
        return [None] * (2 + len(data))
    known = {name: cotangent, others[1 - which]: (second, first)[which]}
    asked = others[which]
    pair = (known[other] for other in _NAMES if other != asked)
    out = _gradient(form, asked, *pair, *data)
    return [out if i == which else None for i in range(2 + len(data))]


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A form under `jax.vmap`; gradients of what is not mapped are sums.

    Attributes:
      form: of one element.
      mapped: those of "x", "kernel" and "y" that are mapped.
      data: whether each array of data is.
    """

    form: Form
    mapped: tuple[str, ...]
    data: tuple[bool, ...]

    def _of(self, name: str, *arrays: Array) -> Array:
        others = [other in self.mapped for other in _NAMES if other != name]
        run, are_mapped = getattr(self.form, name), (*others, *self.data)
        if _loops(self.form) and not all(are_mapped):
            out = _looped(run, are_mapped, arrays)
        else:
            out = jax.vmap(run, tuple(0 if x else None for x in are_mapped))(*arrays)
        return out if name in self.mapped else out.sum(0)

    def x(self, *arrays: Array) -> Array:
        return self._of("x", *arrays)

    def kernel(self, *arrays: Array) -> Array:
        return self._of("kernel", *arrays)

    def y(self, *arrays: Array) -> Array:
        return self._of("y", *arrays)


def _looped(
    run: Callable[..., Array], are_mapped: tuple[bool, ...], arrays: tuple[Array, ...]
) -> Array:
    """As `jax.vmap`, one element after another."""

    def one(parts: tuple[Array, ...]) -> Array:
        left = iter(parts)
        pairs = zip(arrays, are_mapped, strict=True)
        return run(*(next(left) if is_mapped else array for array, is_mapped in pairs))

    parts = itertools.compress(arrays, are_mapped)
    out: Array = jax.lax.map(one, tuple(parts))
    return out


def _vmapped(
    arguments: Any, dims: Any, *, form: Form, name: str, **_: Any
) -> tuple[Array, int]:
    are_mapped = [dim is not None for dim in dims]
    others = [other for other in _NAMES if other != name]
    names = [o for o, is_mapped in zip(others, are_mapped, strict=False) if is_mapped]
    moved = (
        a if dim is None else jnp.moveaxis(a, dim, 0)
        for a, dim in zip(arguments, dims, strict=True)
    )
    mapped = Mapped(form, (*names, name), tuple(are_mapped[2:]))
    return _gradient(mapped, name, *moved), 0


_gradient_p.def_impl(_run)
_gradient_p.def_abstract_eval(lambda *_, call_jaxpr, **__: call_jaxpr.out_avals[0])
ad.primitive_jvps[_gradient_p] = _derivative
ad.primitive_transposes[_gradient_p] = _transpose
batching.primitive_batchers[_gradient_p] = _vmapped
mlir.register_lowering(_gradient_p, mlir.lower_fun(_run, multiple_results=False))

"""Transforms of hidden matrices, as arrays of shape (copies, fan-in, fan-out)."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from ..rules.multipliers import multipliers, shape_factor
from ..scales.paths import map_with_paths
from ..scales.probe import mode
from ..scales.table import Scales
from .transforms import resolve

Transform: TypeAlias = optax.GradientTransformation
# A function of arrays of shape (copies, fan-in, fan-out).
OfMatrices: TypeAlias = Callable[..., jax.Array]
# Builds an optimizer from the scales of parameters, or of their segments.
Maker: TypeAlias = Callable[[Scales], Transform]


def orthogonalize(
    optimizer: str,
    ns_coeffs: Any,
    ns_steps: int,
    beta: Any,
    *moments: Any,
    consistent_rms: float | None = None,
    **options: Any,
) -> Maker:
    """`optax.contrib.scale_by_muon` of matrices whose axes scales know.

    `optimizer` is whose shape factor multiplies the updates; `beta` is that of the
    base; `moments` are eps and mu_dtype.
    """
    if isinstance(ns_coeffs, str):
        raise ValueError(
            f"ns_coeffs={ns_coeffs!r} must be numbers, e.g. (3.4445, -4.775, 2.0315), "
            "or a triple for each step"
        )

    def make(scales: Scales) -> Transform:
        def numbers(path: str, _: Any) -> contrib.MuonDimensionNumbers:
            axes = scales[path].in_axes, scales[path].out_axes
            return contrib.MuonDimensionNumbers(*axes)

        updates = contrib.scale_by_muon(
            *(ns_coeffs, ns_steps, scales.training.beta(beta), *moments),
            weight_dimension_numbers=functools.partial(map_with_paths, numbers),
            **options,
        )
        return optax.chain(updates, scale_by_shape(optimizer, scales, consistent_rms))

    return make


def on_matrices(
    function: OfMatrices, scales: Scales, tree: Any, *rest: Any, own: Any = None
) -> Any:
    """Map a function over trees, with each leaf as (copies, fan-in, fan-out).

    It computes in float32 at least; the first tree's dtypes stay. Leaves of `own` are
    passed to it as they are.
    """

    def apply(path: str, *leaves: jax.Array) -> jax.Array:
        count = 1 + len(rest)
        matrices = [_matrices(scales, path, x) for x in leaves[:count]]
        changed = function(*matrices, *leaves[count:])
        back = _views(scales, path, leaves[0].shape)[1]
        return back(changed).astype(leaves[0].dtype)

    return map_with_paths(apply, tree, *rest, *([] if own is None else [own]))


def _matrices(scales: Scales, path: str, leaf: jax.Array) -> jax.Array:
    """A leaf as (copies, fan-in, fan-out), in float32 at least."""
    x = _views(scales, path, leaf.shape)[0](leaf)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _views(
    scales: Scales, path: str, shape: tuple[int, ...]
) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Functions to (copies, fan-in, fan-out), and back."""
    into, out = scales[path].in_axes, scales[path].out_axes
    copies = [a for a in range(len(shape)) if a not in (*into, *out)]
    order = (*copies, *into, *out)
    sizes = [math.prod(shape[a] for a in axes) for axes in (copies, into, out)]
    moved = [shape[a] for a in order]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return (
        lambda x: x.transpose(order).reshape(sizes),
        lambda x: x.reshape(moved).transpose(inverse),
    )


def scale_by_shape(
    optimizer: str, scales: Scales, consistent_rms: float | None = None
) -> Transform:
    """Multiply updates by the shape factor of an optimizer."""
    consistent = consistent_rms is not None

    def scale(path: str, x: jax.Array) -> jax.Array:
        x = x if consistent_rms is None else x * consistent_rms
        return x * shape_factor(optimizer, scales[path], x.shape, consistent=consistent)

    return optax.stateless(lambda u, _: map_with_paths(scale, u))


def frobenius_norm(x: jax.Array) -> jax.Array:
    """The Frobenius norm of each matrix."""
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True))


def spectral_norm(x: jax.Array, steps: int = 12) -> jax.Array:
    """The spectral norm of each matrix, by power iteration from its largest row."""
    rows = jnp.linalg.norm(x, axis=2)
    start = jnp.take_along_axis(x, rows.argmax(1)[:, None, None], 1)[:, 0]

    def unit(v: jax.Array) -> jax.Array:
        norm = jnp.linalg.norm(v, axis=1, keepdims=True)
        return v / jnp.where(norm == 0, 1, norm)

    def step(_: int, v: jax.Array) -> jax.Array:
        return unit(jnp.einsum("cij,ci->cj", x, jnp.einsum("cij,cj->ci", x, v)))

    v = jax.lax.fori_loop(0, steps, step, unit(start))
    return frobenius_norm(jnp.einsum("cij,cj->ci", x, v)[:, :, None])


def divide_by(norm: Callable[[jax.Array], jax.Array], scales: Scales) -> Transform:
    """Divide the update of each matrix by its norm, unless that is zero."""

    def normalize(x: jax.Array) -> jax.Array:
        size = norm(x)
        return x / jnp.where(size == 0, 1, size)

    return optax.stateless(lambda u, _: on_matrices(normalize, scales, u))


# --- preconditioners of Kronecker form ---


class KroneckerState(NamedTuple):
    """State of SOAP and Shampoo: trees of the parameters' structure."""

    steps: jax.Array  # number of updates
    mu: Any  # averages of gradients, of the parameters' shapes
    left: Any  # averages of G Gᵀ of each block
    right: Any  # averages of Gᵀ G
    rows: Any  # inverse roots of `left`, or for SOAP its eigenvectors
    columns: Any  # those of `right`
    nu: Any = ()  # for SOAP, averages of squares in the eigenbasis


def scale_by_kronecker(
    scales: Scales,
    eps: float,
    frequency: int,
    block_size: int | None,
    mu_dtype: Any,
    *,
    b1: Any,
    b2: Any = None,
    shampoo_beta: Any,
) -> Transform:
    """Precondition each block of a matrix from both sides, for `soap` and `shampoo`.

    The arguments are theirs. Without `b2` it is Shampoo.
    """
    soap = b2 is not None

    def blocked(path: str, leaf: jax.Array) -> jax.Array:
        """(blocks, rows, columns)."""
        x = _matrices(scales, path, leaf)
        c, n, m = x.shape
        p, q = _block(n, block_size), _block(m, block_size)
        return x.reshape(c, n // p, p, m // q, q).swapaxes(2, 3).reshape(-1, p, q)

    def joined(path: str, x: jax.Array, like: jax.Array) -> jax.Array:
        to, back = _views(scales, path, like.shape)
        c, n, m = jax.eval_shape(to, like).shape
        p, q = x.shape[1:]
        x = x.reshape(c, n // p, m // q, p, q).swapaxes(2, 3).reshape(c, n, m)
        return back(x).astype(like.dtype)

    def init(params: optax.Params) -> KroneckerState:
        def zeros(part: Callable[[jax.Array], jax.Array]) -> Any:
            def zero(path: str, x: jax.Array) -> jax.Array:
                made = jax.eval_shape(lambda x: part(blocked(path, x)), x)
                if made.shape == x.shape:  # takes over the sharding
                    return jnp.zeros_like(x, made.dtype)
                return jnp.zeros(made.shape, made.dtype)

            return map_with_paths(zero, params)

        def identity(x: jax.Array) -> jax.Array:
            return x + jnp.eye(x.shape[1], dtype=x.dtype)[None]

        left, right = zeros(_left), zeros(_right)
        return KroneckerState(
            jnp.zeros([], jnp.int32),
            optax.tree.zeros_like(params, dtype=mu_dtype),
            *(left, right, jax.tree.map(identity, left), jax.tree.map(identity, right)),
            zeros(lambda x: x) if soap else (),
        )

    def update(updates: Any, state: KroneckerState, params: Any = None) -> Any:
        # SOAP's first gradient only gives the basis, in which it has few entries.
        known = state.steps if soap else state.steps + 1
        last = jnp.maximum(known, 1)
        grads = map_with_paths(blocked, updates)
        squares = tuple(
            jax.tree.map(lambda x, g, of=of: _ema(x, of(g), shampoo_beta), old, grads)
            for old, of in ((state.left, _left), (state.right, _right))
        )
        old = state.rows, state.columns
        decompose = functools.partial(_eigenvectors if soap else _roots, eps=eps)
        start = functools.partial(decompose, iterations=8) if soap else decompose
        bases = jax.lax.switch(
            jnp.where(state.steps % frequency, 0, jnp.where(state.steps, 1, 2)),
            [
                lambda: old,
                lambda: jax.tree.map(decompose, squares, old),
                lambda: jax.tree.map(start, squares, old),
            ],
        )
        mu = jax.tree.map(lambda x, g: _ema(x, g, b1, known > 0), state.mu, updates)
        nu: Any = ()

        def square(x: Any, g: Any, into: Any, out: Any) -> jax.Array:
            return _ema(x, jnp.square(into.mT @ g @ out), b2, known > 0)

        def in_basis(x: Any, nu: Any, into: Any, out: Any) -> Any:
            size = jnp.sqrt(nu / (1 - b2**last))
            size += eps * size.max((1, 2), keepdims=True)
            size = jnp.where(size == 0, 1, size)
            return into @ ((into.mT @ x @ out) / size) @ out.mT

        steps = map_with_paths(lambda path, x: blocked(path, x / (1 - b1**last)), mu)
        if soap:
            nu = jax.tree.map(square, state.nu, grads, *old)
            steps = jax.tree.map(in_basis, steps, nu, *old)
        else:
            steps = jax.tree.map(lambda x, into, out: into @ x @ out, steps, *bases)
        steps = map_with_paths(joined, steps, updates)
        count = optax.safe_increment(state.steps)
        (left, right), (rows, columns) = squares, bases
        return steps, KroneckerState(count, mu, left, right, rows, columns, nu)

    return Transform(init, update)


def _ema(old: jax.Array, new: jax.Array, beta: Any, known: Any = True) -> jax.Array:
    """The moving average; `old` where the new value is not known."""
    average = beta * old + (1 - beta) * new
    return jnp.where(known, average, old).astype(old.dtype)


def _left(x: jax.Array) -> jax.Array:
    return x @ x.mT


def _right(x: jax.Array) -> jax.Array:
    return x.mT @ x


def _block(size: int, most: int | None) -> int:
    """The largest divisor of a size that is at most `most`."""
    return next(n for n in range(min(size, most or size), 0, -1) if size % n == 0)


def _eigenvectors(
    square: jax.Array, basis: jax.Array, eps: Any, iterations: int = 1
) -> jax.Array:
    """Eigenvectors of L + eps² ‖L‖, by orthogonal iteration from earlier ones.

    Without eps rounding would decide between those that L leaves free.
    """
    ridge = eps**2 * spectral_norm(square)
    square = square + ridge * jnp.eye(square.shape[-1], dtype=square.dtype)[None]
    for _ in range(iterations):
        basis = jnp.linalg.qr(square @ basis)[0]
    return basis


def _roots(square: jax.Array, _: jax.Array, eps: Any) -> jax.Array:
    """The inverse fourth root of L + eps ‖L‖; the identity of a gradient of zero."""
    is_zero = (square == 0).all((1, 2), keepdims=True)

    def root(x: jax.Array) -> jax.Array:
        power: jax.Array = optax.matrix_inverse_pth_root(x, 4, ridge_epsilon=eps)[0]
        return power

    return jax.vmap(root)(jnp.where(is_zero, jnp.eye(square.shape[-1]), square))


# --- weights on a sphere ---


def keep_norms(scales: Scales) -> Transform:
    """Multiply updates by the norm of their weight, which keeps it; see `adam_h`."""
    point = resolve(scales)

    def radius(path: str, weight: jax.Array) -> jax.Array:
        x, scale = _matrices(scales, path, weight), scales[path]
        fan_in = math.prod(scale.base_shape[a] for a in scale.in_axes)
        usual = (math.prod(x.shape[1:]) / fan_in) ** 0.5
        ratio = jnp.sqrt(jnp.mean(jnp.square(multipliers(scale, point).init_std)))
        norm = frobenius_norm(x)
        return jnp.where(norm == 0, (usual * ratio).astype(norm.dtype), norm)

    def project(update: jax.Array, weight: jax.Array, radius: jax.Array) -> jax.Array:
        update = radius * update
        # A probe measures the size of updates, which the projection does not set.
        if mode() is not None:
            return update
        before, after = frobenius_norm(weight), frobenius_norm(weight + update)
        # The radius, unless the weight started at zero and grows.
        norm = jnp.minimum(jnp.maximum(before, after), radius)
        shrink = norm / jnp.where(after == 0, 1, after)
        return update * shrink + weight * (shrink - 1)

    def step(updates: Any, radii: Any, params: Any = None) -> tuple[Any, Any]:
        return on_matrices(project, scales, updates, params, own=radii), radii

    return Transform(lambda params: map_with_paths(radius, params), step)

"""Optimizers of hidden matrices, beside a partner for all other parameters."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from ..rules.multipliers import shape_of
from ..rules.optimizers import is_hidden_matrix
from ..rules.parametrizations import unknown
from ..scales.paths import flatten, map_with_paths
from ..scales.probe import Mode, Recorder, mode, running
from ..scales.table import Scales

Transform: TypeAlias = optax.GradientTransformation
# A function of arrays of shape (copies, fan-in, fan-out).
OfMatrices: TypeAlias = Callable[..., jax.Array]


def hidden_matrices(scales: Scales, optimizer: str) -> frozenset[str]:
    """The paths of hidden matrices.

    Raises:
      ValueError: there are none.
    """
    matrices = frozenset(
        path for path, s in scales.items() if all(map(is_hidden_matrix, s.parts))
    )
    if not matrices:
        raise ValueError(
            f"no parameter is a hidden matrix, which {optimizer} needs; use "
            "optim.adamw, or make scales from a base that differs in width"
        )
    return matrices


def beside(
    scales: Scales, matrices: frozenset[str], own: Transform, partner: Transform
) -> Transform:
    """Hidden matrices by one optimizer, and all other parameters by another."""

    def label(path: str, _: Any) -> str:
        return "matrices" if path in matrices else "partner"

    transforms = {"matrices": own, "partner": partner}
    return optax.partition(transforms, functools.partial(map_with_paths, label))


def descends(tx: Transform, scales: Scales) -> bool:
    """Whether a transform is a whole optimizer, whose updates lower the loss.

    Transforms that give updates their size point along the gradient. One that cannot
    be run on a small tree of these paths counts as whole.
    """
    tree = {path: jnp.ones((1,) * len(s.shape)) for path, s in scales.items()}
    try:
        with jax.ensure_compile_time_eval(), running(Recorder(Mode.TARGET)):
            updates, _ = tx.update(tree, tx.init(tree), tree)
            return not any(bool((u > 0).any()) for u in jax.tree.leaves(updates))
    except (TypeError, ValueError, KeyError):
        return True


# --- updates of matrices ---


# The coefficients of Newton-Schulz steps that `optax.contrib.muon` knows by name: those
# of Keller Jordan, and of Ahn et al. 2025 (arXiv:2504.05295).
PRESETS = {
    "standard": (3.4445, -4.7750, 2.0315),
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def orthogonalize(
    scales: Scales, ns_coeffs: Any, ns_steps: int, *moments: Any, **options: Any
) -> Transform:
    """`optax.contrib.scale_by_muon` of matrices whose axes the scales know.

    Args:
      scales: of the matrices.
      ns_coeffs: coefficients, or the name of a preset.
      ns_steps: number of Newton-Schulz steps.
      *moments: beta, eps and mu_dtype.
      **options: further arguments of Optax.

    Raises:
      ValueError: no preset has this name.
    """
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in PRESETS:
            raise ValueError(unknown("ns_coeffs", ns_coeffs, PRESETS))
        ns_coeffs = PRESETS[ns_coeffs]

    def numbers(path: str, _: Any) -> contrib.MuonDimensionNumbers:
        return contrib.MuonDimensionNumbers(scales[path].in_axes, scales[path].out_axes)

    return contrib.scale_by_muon(
        *(ns_coeffs, ns_steps, *moments),
        weight_dimension_numbers=functools.partial(map_with_paths, numbers),
        **options,
    )


def on_matrices(function: OfMatrices, scales: Scales, tree: Any, *rest: Any) -> Any:
    """Map a function over trees, with each leaf as (copies, fan-in, fan-out).

    It computes in float32 at least; the first tree's dtypes stay.
    """

    def apply(path: str, *leaves: jax.Array) -> jax.Array:
        to, back = _views(scales, path, leaves[0].shape)
        wide = [to(x).astype(jnp.promote_types(x.dtype, jnp.float32)) for x in leaves]
        return back(function(*wide)).astype(leaves[0].dtype)

    return map_with_paths(apply, tree, *rest)


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
    shape = shape_of(optimizer, consistent=consistent_rms is not None)

    def scale(path: str, x: jax.Array) -> jax.Array:
        axes = scales[path].in_axes, scales[path].out_axes
        x = x if consistent_rms is None else x * consistent_rms
        return x * shape(*(math.prod(x.shape[a] for a in each) for each in axes))

    return optax.stateless(lambda u, _: map_with_paths(scale, u))


def spectral_norm(x: jax.Array, steps: int = 12) -> jax.Array:
    """The spectral norm of each matrix, by power iteration from its largest row.

    Examples:
      >>> float(spectral_norm(jnp.diag(jnp.array([3.0, 1.0]))[None])[0, 0, 0])
      3.0
    """
    rows = jnp.linalg.norm(x, axis=2)
    start = jnp.take_along_axis(x, rows.argmax(1)[:, None, None], 1)[:, 0]

    def unit(v: jax.Array) -> jax.Array:
        norm = jnp.linalg.norm(v, axis=1, keepdims=True)
        return v / jnp.where(norm == 0, 1, norm)

    def step(_: int, v: jax.Array) -> jax.Array:
        return unit(jnp.einsum("cij,ci->cj", x, jnp.einsum("cij,cj->ci", x, v)))

    v = jax.lax.fori_loop(0, steps, step, unit(start))
    return _norm(jnp.einsum("cij,cj->ci", x, v)[:, :, None])


def scale_by_spectral_norm(scales: Scales) -> Transform:
    """Divide the update of each matrix by its spectral norm."""

    def normalize(x: jax.Array) -> jax.Array:
        norm = spectral_norm(x)
        return x / jnp.where(norm == 0, 1, norm)

    return optax.stateless(lambda u, _: on_matrices(normalize, scales, u))


# --- preconditioners of Kronecker form ---


class KroneckerState(NamedTuple):
    """State of `scale_by_shampoo` and `scale_by_soap`.

    Attributes:
      steps: number of updates.
      mu: averages of gradients, of the parameters' shapes.
      squares: averages of G Gᵀ and Gᵀ G of each block.
      bases: their inverse roots or eigenvectors.
      nu: for SOAP, averages of squares in the eigenbasis; () for Shampoo.
    """

    steps: jax.Array
    mu: Any
    squares: tuple[Any, Any]
    bases: tuple[Any, Any]
    nu: Any


def scale_by_kronecker(
    scales: Scales,
    *,
    b1: Any,
    b2: Any,
    shampoo_beta: Any,
    eps: float,
    frequency: int,
    block_size: int | None,
    adam: bool,
    mu_dtype: Any = None,
) -> Transform:
    """Precondition each block of a matrix from both sides.

    Args:
      scales: of the matrices.
      b1: memory of the average of gradients.
      b2: memory of SOAP's squares.
      shampoo_beta: memory of G Gᵀ and Gᵀ G.
      eps: of Adam, or relative to the spectral norm of L and R under Shampoo.
      frequency: steps between two decompositions.
      block_size: largest size of a block; None for whole matrices.
      adam: SOAP, Adam in the eigenbasis; or else Shampoo, L^-¼ M R^-¼.
      mu_dtype: of the average of gradients.
    """

    def blocked(path: str, leaf: jax.Array) -> jax.Array:
        """(blocks, rows, columns)."""
        x = _views(scales, path, leaf.shape)[0](leaf)
        c, n, m = x.shape
        p, q = _block(n, block_size), _block(m, block_size)
        x = x.reshape(c, n // p, p, m // q, q).swapaxes(2, 3).reshape(-1, p, q)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def joined(path: str, x: jax.Array, like: jax.Array) -> jax.Array:
        to, back = _views(scales, path, like.shape)
        c, n, m = jax.eval_shape(to, like).shape
        p, q = x.shape[1:]
        x = x.reshape(c, n // p, m // q, p, q).swapaxes(2, 3).reshape(c, n, m)
        return back(x).astype(like.dtype)

    def init(params: optax.Params) -> KroneckerState:
        def zeros(gram: Callable[[jax.Array], jax.Array]) -> Any:
            def zero(path: str, x: jax.Array) -> jax.Array:
                if path not in scales:  # a placeholder of optax.tree.map_params
                    return x
                made = jax.eval_shape(lambda x: gram(blocked(path, x)), x)
                if made.shape == x.shape:  # takes over the sharding
                    return jnp.zeros_like(x, made.dtype)
                return jnp.zeros(made.shape, made.dtype)

            return map_with_paths(zero, params)

        return KroneckerState(
            jnp.zeros([], jnp.int32),
            optax.tree.zeros_like(params, dtype=mu_dtype),
            (zeros(_rows), zeros(_columns)),
            (zeros(_rows), zeros(_columns)),
            zeros(lambda x: x) if adam else (),
        )

    def update(
        updates: optax.Updates, state: KroneckerState, params: Any = None
    ) -> tuple[optax.Updates, KroneckerState]:
        del params
        first = state.steps == 0
        count = optax.safe_increment(state.steps)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        # SOAP's first gradient only gives the basis, in which it has few entries.
        known = jnp.maximum(state.steps, 1) if adam else count
        if adam:
            mu = jax.tree.map(lambda x, old: jnp.where(first, old, x), mu, state.mu)
        average = dict(flatten(optax.tree.bias_correction(mu, b1, known)))
        grads = {path: blocked(path, g) for path, g in flatten(updates)}

        def ema(old: Any, new: Any, beta: Any) -> Any:
            return beta * old + (1 - beta) * new

        old, bases = (
            tuple(dict(flatten(tree)) for tree in pair)
            for pair in (state.squares, state.bases)
        )
        before = dict(flatten(state.nu)) if adam else {}
        squares = tuple(
            {p: ema(each[p], gram(g), shampoo_beta) for p, g in grads.items()}
            for each, gram in zip(old, (_rows, _columns), strict=True)
        )
        decompose = functools.partial(_basis if adam else _roots, eps=eps)
        stage = jnp.where(first, 0, jnp.where(state.steps % frequency, 2, 1))
        new_bases = jax.lax.switch(
            stage,
            [
                lambda: jax.tree.map(
                    functools.partial(decompose, first=True), squares, bases
                ),
                lambda: jax.tree.map(decompose, squares, bases),
                lambda: bases,
            ],
        )
        nu, found = {}, {}
        for path, grad in grads.items():
            into, out = (each[path] for each in (bases if adam else new_bases))
            step = blocked(path, average[path])
            if adam:
                square = jnp.square(into.mT @ grad @ out)
                nu[path] = ema(before[path], square, b2)
                size = jnp.sqrt(nu[path] / (1 - b2**known)) + eps
                size = jnp.where(size == 0, 1, size)
                if mode() is not None:
                    # Gradients of a probe have rank one; the rest is rounding.
                    size += 1e-3 * size.max((1, 2), keepdims=True)
                step = into @ ((into.mT @ step @ out) / size) @ out.mT
            else:
                step = into @ step @ out
            found[path] = step
        new = map_with_paths(lambda path, g: joined(path, found[path], g), updates)

        def tree(by_path: Mapping[str, jax.Array]) -> Any:
            return map_with_paths(lambda path, _: by_path[path], updates)

        return new, KroneckerState(
            count,
            optax.tree.cast(mu, mu_dtype),
            (tree(squares[0]), tree(squares[1])),
            (tree(new_bases[0]), tree(new_bases[1])),
            tree(nu) if adam else (),
        )

    return Transform(init, update)


def _rows(x: jax.Array) -> jax.Array:
    return x @ x.mT


def _columns(x: jax.Array) -> jax.Array:
    return x.mT @ x


def _block(size: int, most: int | None) -> int:
    """The largest divisor of a size that is at most `most`.

    Examples:
      >>> _block(768, 256), _block(7, 4), _block(7, None)
      (256, 1, 7)
    """
    return next(n for n in range(min(size, most or size), 0, -1) if size % n == 0)


def _basis(
    square: jax.Array, old: jax.Array, *, eps: Any, first: bool = False
) -> jax.Array:
    """Eigenvectors, by one step of orthogonal iteration; at first by several."""
    del eps
    if first:
        old = jnp.broadcast_to(jnp.eye(square.shape[-1], dtype=old.dtype), old.shape)
    step = lambda _, basis: jnp.linalg.qr(square @ basis)[0]  # noqa: E731
    basis: jax.Array = jax.lax.fori_loop(0, 8 if first else 1, step, old)
    return basis


def _roots(
    square: jax.Array, old: jax.Array, *, eps: Any, first: bool = False
) -> jax.Array:
    """The inverse fourth root of L + eps ‖L‖; the identity of a gradient of zero."""
    del old, first
    is_zero = (square == 0).all((1, 2), keepdims=True)

    def root(x: jax.Array) -> jax.Array:
        power: jax.Array = optax.matrix_inverse_pth_root(x, 4, ridge_epsilon=eps)[0]
        return power

    return jax.vmap(root)(jnp.where(is_zero, jnp.eye(square.shape[-1]), square))


# --- weights on a sphere ---


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True))


def scale_to_weights(scales: Scales, *, orthogonal: bool) -> Transform:
    """Give the update of each matrix the Frobenius norm of its weight.

    Args:
      scales: of the matrices.
      orthogonal: whether the singular values of updates in training are alike.
    """

    def resize(update: jax.Array, weight: jax.Array) -> jax.Array:
        norm = _norm(update)
        if orthogonal and mode() is not None:
            # The gradients of a probe have rank one, those of training full rank.
            norm *= math.sqrt(min(update.shape[1:]))
        return update * _norm(weight) / jnp.where(norm == 0, 1, norm)

    return optax.stateless(lambda u, p: on_matrices(resize, scales, u, p))


def keep_norms(scales: Scales) -> Transform:
    """Project the updated weight of each matrix to the sphere of its norm."""

    def project(update: jax.Array, weight: jax.Array) -> jax.Array:
        norm = _norm(weight)
        shrink = norm / jnp.where(norm == 0, 1, _norm(weight + update))
        return update * shrink + weight * (shrink - 1)

    def step(updates: Any, params: Any) -> Any:
        # A probe measures the size of updates, which the projection does not set.
        if mode() is not None:
            return updates
        return on_matrices(project, scales, updates, params)

    return optax.stateless(step)

r"""Averages of activations over correlated Gaussians.

For (h, h') ~ N(0, [[q, c], [c, q']]) the lazy limit needs Φ = <φ(h) φ(h')> and
Φ' = <φ'(h) φ'(h')> (Bordelon et al., eq. 6). ReLU, |x|, erf and the identity have
closed forms (Cho & Saul 2009; Williams 1997). Others are expanded in normalized
Hermite polynomials, φ(√q z) = Σ_k a_k(q) h_k(z), so that

    Φ = Σ_k a_k(q) a_k(q') (c / √(q q'))^k

(Mehler), with the a_k by Gauss-Hermite quadrature: positive semidefinite term by
term, and exponentially precise for smooth φ.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..errors import UserError

Matrix = Float[Array, "P P"]
Activation = str | Callable[[Array], Array]

# Terms of the expansion, and nodes of the quadrature of each coefficient.
_TERMS, _NODES = 48, 128


class Averages(NamedTuple):
    """Averages of every pair of points."""

    phi: Matrix  # <φ φ'>, or the covariance of φ and φ' where centred
    slope: Matrix  # <φ'(h) φ'(h')>


def averages(covariance: Matrix, activation: Activation, centred: bool) -> Averages:
    """Φ and the average product of slopes, for every pair of points.

    Args:
      covariance: H, symmetric positive semidefinite.
      activation: "relu", "abs", "erf", "linear", or a smooth scalar JAX function.
      centred: subtract the mean over neurons from φ (MS of Tensor Programs VI).

    Raises:
      UserError: an unknown name.
    """
    scale = jnp.sqrt(jnp.diagonal(covariance))
    both = scale[:, None] * scale[None]
    # A point at zero has no correlation with anything.
    rho = jnp.clip(covariance / jnp.where(both > 0, both, 1), -1, 1)
    if callable(activation):
        phi, slope, mean = _by_quadrature(activation, scale, rho)
    elif activation in _CLOSED:
        phi, slope, mean = _CLOSED[activation](scale, both, rho)
    else:
        raise UserError(
            f"activation {activation!r} must be one of {', '.join(sorted(_CLOSED))}, "
            "or a JAX function"
        )
    return Averages(phi - mean[:, None] * mean[None] if centred else phi, slope)


Closed = tuple[Matrix, Matrix, Float[Array, " P"]]


def _relu(scale: Array, both: Matrix, rho: Matrix) -> Closed:
    angle = jnp.arccos(rho)
    phi = both * (jnp.sin(angle) + (jnp.pi - angle) * rho) / (2 * jnp.pi)
    return phi, (jnp.pi - angle) / (2 * jnp.pi), scale / jnp.sqrt(2 * jnp.pi)


def _abs(scale: Array, both: Matrix, rho: Matrix) -> Closed:
    sine = jnp.arcsin(rho)
    phi = both * (jnp.sqrt(1 - rho**2) + rho * sine) * 2 / jnp.pi
    return phi, sine * 2 / jnp.pi, scale * jnp.sqrt(2 / jnp.pi)


def _erf(scale: Array, both: Matrix, rho: Matrix) -> Closed:
    wide = 1 + 2 * scale**2
    product = wide[:, None] * wide[None]
    c = both * rho
    phi = jnp.arcsin(2 * c / jnp.sqrt(product)) * 2 / jnp.pi
    slope = 4 / jnp.pi / jnp.sqrt(product - 4 * c**2)
    return phi, slope, jnp.zeros_like(scale)


def _linear(scale: Array, both: Matrix, rho: Matrix) -> Closed:
    return both * rho, jnp.ones_like(rho), jnp.zeros_like(scale)


_CLOSED: dict[str, Callable[[Array, Matrix, Matrix], Closed]] = {
    "relu": _relu,
    "abs": _abs,
    "erf": _erf,
    "linear": _linear,
}


@functools.cache
def _rule() -> tuple[np.ndarray, np.ndarray]:
    """Nodes of the standard Gaussian; normalized Hermite polynomials times weights."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    rows = [np.ones(_NODES), nodes]
    for k in range(1, _TERMS - 1):
        rows.append((nodes * rows[k] - np.sqrt(k) * rows[k - 1]) / np.sqrt(k + 1))
    return nodes, np.stack(rows) * weights / np.sqrt(2 * np.pi)


def _by_quadrature(
    activation: Callable[[Array], Array], scale: Array, rho: Matrix
) -> Closed:
    nodes, rule = (jnp.asarray(a) for a in _rule())
    h = scale[:, None] * nodes[None]
    slope = jax.vmap(jax.vmap(jax.grad(activation)))(h)
    weights = rule[0][None]  # the polynomial of order 0 is one
    values = activation(h)

    def pairs(values: Float[Array, "P nodes"]) -> Matrix:
        coefficients = values @ rule.T
        total = _powers(coefficients, rho)
        own = jnp.sum(values**2 * weights, axis=1)
        # On the diagonal the quadrature itself is exact to more orders.
        return jnp.where(jnp.eye(len(rho), dtype=bool), own[:, None], total)

    return pairs(values), pairs(slope), jnp.sum(values * weights, axis=1)


def _powers(coefficients: Float[Array, "P terms"], rho: Matrix) -> Matrix:
    """Σ_k a_k a_k' ρ^k by Horner's scheme."""

    def term(total: Matrix, a: Float[Array, " P"]) -> tuple[Matrix, None]:
        return total * rho + a[:, None] * a[None], None

    return jax.lax.scan(term, jnp.zeros_like(rho), coefficients.T, reverse=True)[0]

r"""The lazy limit of residual networks: kernels that follow an ODE in the layer.

Bordelon et al., section 4.3.1 and G.1. The network (eq. 1)

    h^0 = D^-½ W^0 x,   h^{l+1} = h^l + a (L N)^-½ W^l φ(h^l),   f ∝ w·φ(h^L),

of infinite width has Gaussian h at initialization. With τ = l/L in the limit of
infinite depth (eq. 6, 85, 86):

    ∂H/∂τ =  a² Φ,     H(0) = x·x'/D,       Φ(τ) = <φ(h) φ(h')>,
    ∂G/∂τ = -a² G Φ',  G(1) = Φ'(1),        Φ'(τ) = <φ'(h) φ'(h')>,
    K = a² ∫ G Φ dτ + r G(0) H(0) + r' Φ(1).

Eq. 6 and 87 hold for a linear readout that is frozen: with φ before the readout,
as in eq. 1, G starts from G(1) = <φ'φ'> at H(1); a trained readout adds Φ(1) with
weight r' and a trained read-in G(0) H(0) with weight r. In the limit of no feature
learning (μ0 to 0) the predictor is kernel regression with K, e.g. by scikit-learn's
`KernelRidge(kernel="precomputed")`.

Since G(τ) = G(1) exp(E(1) - E(τ)) for E = a² ∫_0 Φ', one forward solve gives all:
the state is (H, E, I) with I = a² ∫_0 exp(-E) Φ, and K = G(1) exp(E(1)) I(1) + ends.
At finite depth H_{l+1} = H_l + a² Φ_l/L and G_l = G_{l+1} (1 + a² Φ'_l/L).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import memory
from ..errors import UserError, import_extra
from .gaussian import Activation, Matrix, averages


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels of P points through the layers, in float64.

    Attributes:
      times: layer times l/L.
      h: covariance of the preactivations at the times, (times, P, P).
      phi: <φ(h) φ(h')> at the times.
      g: covariance of the gradients N ∂f/∂h at the times.
      kernel: K, the neural tangent kernel, (P, P).
    """

    times: np.ndarray
    h: np.ndarray
    phi: np.ndarray
    g: np.ndarray
    kernel: np.ndarray


def gram(x: Any) -> np.ndarray:
    """H(0) = x·x'/D of points x of shape (P, D).

    Examples:
      >>> gram([[1.0, 1.0], [1.0, -1.0]]).tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    x = np.asarray(x, np.float64)
    return x @ x.T / x.shape[1]


def kernels(
    covariance: Any,
    activation: Activation = "relu",
    *,
    depth: int | None = None,
    multiplier: float = 1.0,
    centred: bool = False,
    activate_readout: bool = True,
    readin: float = 0.0,
    readout: float = 0.0,
    times: int = 9,
    tolerance: float = 1e-8,
) -> Kernels:
    """Φ, G and K, of infinite depth by an ODE solver or of finite depth.

    Args:
      covariance: H(0), of shape (P, P); see `gram`.
      activation: "relu", "abs", "erf", "linear" in closed form, or a smooth scalar
        JAX function, by quadrature.
      depth: L for the recursion at finite depth; None for its limit.
      multiplier: a.
      centred: subtract the mean over neurons in each block (MS of Tensor Programs
        VI, section 6.3).
      activate_readout: apply φ before the readout, as in eq. 1.
      readin: the learning rate of W^0 over that of W^l; 0 freezes it.
      readout: the learning rate of w over that of W^l.
      times: how many layer times of [0, 1] to keep in infinite depth; a finite depth
        gives all its layers.
      tolerance: relative and absolute tolerance of the ODE solver.

    Raises:
      UserError: H(0) is not a covariance, an unknown activation, kernels that would
        not fit in memory (with their bytes), one that is not finite (with the layer
        time), or infinite depth without diffrax.

    Source: Bordelon et al., eq. 6 and 83 to 87; TP-VI's mean subtraction.

    Examples:
      >>> linear = kernels([[1.0]], "linear")
      >>> bool(abs(linear.kernel[0, 0] - np.e) < 1e-6)  # ∫ e^(1-τ) e^τ dτ
      True
    """
    start = np.asarray(covariance, np.float64)
    if start.ndim != 2 or start.shape[0] != start.shape[1] or not len(start):
        raise UserError(f"covariance {start.shape} must be (P, P), with P at least 1")
    if not np.allclose(start, start.T) or np.diagonal(start).min() < 0:
        raise UserError("covariance must be symmetric, with no negative diagonal")
    if depth is not None and depth < 1:
        raise UserError(f"depth={depth} must be at least 1, or None for its limit")
    if times < 2:
        raise UserError(f"times={times} must be at least 2")
    points, layers = len(start), times if depth is None else depth + 1
    memory.check(
        memory_needed(points, layers),
        f"kernels of {points} points at {layers} layers",
        "take fewer points or layers",
    )
    grid = np.linspace(0, 1, layers)
    with jax.enable_x64(True):
        setup = _Setup(activation, centred, activate_readout)
        constants = jnp.asarray([multiplier**2, readin, readout], jnp.float64)
        first, factor = jnp.asarray(start), constants[0]
        if depth is None:
            h, back, inner = _continuum(first, setup, factor, grid, tolerance)
        else:
            h, back, inner = _recursion(first, setup, factor, depth)
        _check_finite(grid, np.asarray(h), np.asarray(back))
        phi, g, kernel = _assemble(h, back, inner, setup, constants)
        return Kernels(grid, *(np.asarray(x) for x in (h, phi, g, kernel)))


def memory_needed(points: int, layers: int) -> int:
    """The bytes that `kernels` needs: its result, and 24 matrices of the ODE solver."""
    return (5 * layers + 24) * points**2 * 8


class _Setup(NamedTuple):
    activation: Activation
    centred: bool
    activate_readout: bool


@functools.partial(jax.jit, static_argnames=("setup", "tolerance"))
def _continuum(
    start: Matrix,
    setup: _Setup,
    multiplier: Array,
    grid: Float[Array, " times"],
    tolerance: float,
) -> tuple[Array, Array, Matrix]:
    """H and G/G(1) at the layer times of a grid, and K/G(1), at infinite depth."""
    diffrax = import_extra("diffrax", "theory", "infinite depth")

    def flow(time: Array, state: tuple[Matrix, Matrix, Matrix], args: None):
        h, e, _ = state
        phi, slope = averages(h, setup.activation, setup.centred)
        return multiplier * phi, multiplier * slope, multiplier * jnp.exp(-e) * phi

    nothing = jnp.zeros_like(start)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(flow),
        diffrax.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=0.05,
        y0=(start, nothing, nothing),
        saveat=diffrax.SaveAt(ts=grid),
        stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
        adjoint=diffrax.DirectAdjoint(),
        max_steps=1024,
        throw=False,  # times that are not reached become infinite and are reported
    )
    h, e, i = solution.ys
    return h, jnp.exp(e[-1][None] - e), jnp.exp(e[-1]) * i[-1]


@functools.partial(jax.jit, static_argnames=("setup", "depth"))
def _recursion(
    start: Matrix, setup: _Setup, multiplier: Array, depth: int
) -> tuple[Array, Array, Matrix]:
    """H_l, G_l/G_L and K/G_L at finite depth, where 1 + a²Φ'/L replaces the ODE."""
    step = multiplier / depth

    def up(h: Matrix, _: None) -> tuple[Matrix, tuple[Matrix, Matrix, Matrix]]:
        phi, slope = averages(h, setup.activation, setup.centred)
        return h + step * phi, (h, phi, slope)

    def down(back: Matrix, layer: tuple[Matrix, Matrix]):
        phi, slope = layer
        return back * (1 + step * slope), (back, step * back * phi)

    last, (h, phi, slope) = jax.lax.scan(up, start, length=depth)
    first, (back, parts) = jax.lax.scan(
        down, jnp.ones_like(start), (phi, slope), reverse=True
    )
    every = jnp.concatenate([h, last[None]])
    return every, jnp.concatenate([first[None], back]), parts.sum(axis=0)


@functools.partial(jax.jit, static_argnames=("setup",))
def _assemble(
    h: Float[Array, "times P P"],
    back: Float[Array, "times P P"],
    inner: Matrix,
    setup: _Setup,
    constants: Array,
) -> tuple[Array, Array, Array]:
    """Φ, G and K from H, G/G(1) and a² ∫ Φ G/G(1)."""
    _, readin, readout = constants
    phi = jax.lax.map(lambda c: averages(c, setup.activation, setup.centred).phi, h)
    if setup.activate_readout:
        # The readout sees φ itself: no mean is subtracted there.
        last, top = averages(h[-1], setup.activation, False)
    else:
        last, top = h[-1], jnp.ones_like(h[-1])
    g = top[None] * back
    return phi, g, top * inner + readin * g[0] * h[0] + readout * last


def _check_finite(grid: np.ndarray, *parts: np.ndarray) -> None:
    for part in parts:
        finite = np.isfinite(part).all(axis=(1, 2))
        if finite.all():
            continue
        # Of infinite depth only the kept times are known.
        first = int(np.argmin(finite))
        raise UserError(
            f"the kernels are not finite at layer time {grid[first]:g} (they were at "
            f"{grid[max(first - 1, 0)]:g}); take an activation that grows no faster "
            "than its argument, or a smaller multiplier"
        )

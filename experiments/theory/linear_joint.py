r"""The joint limit of a linear residual network with feature learning.

Bordelon et al., sections 4.3.2 and G.2: infinite width and depth with any richness
μ0. In the paper's gauge f = w·h(1)/(μ0 N), learning rate η0 μ0² N. Before training
(eq. 92, where the printed G0 does not solve its equation)

    H0(τ) = e^τ H0(0),    G0(τ) = e^(1-τ).

**One step on one sample** (eq. 93 to 99), with c = η0 μ0 y, f_0 = 0, h0 = H0(0). The
response A = δh/δr over η0 μ0 and its mirror B = δg/δu solve

     ∂A/∂τ = A + H0 y,   A(0) = 0, or h0 y where the read-in is trained,
    -∂B/∂τ = B + G0 y,   B(1) = 0, or y where the readout is trained,

so A = (τ + r) e^τ h0 y and B = (1 - τ + r') e^(1-τ) y with r, r' = 0 or 1. Inserted in
eq. 95, with <g0(τ) g0(τ')> = G0(max(τ, τ')), the change of H obeys

    ∂ΔH/∂τ = ΔH + 2 c² h0² e^(1+τ) (τ + r)(τ + r + 1),    ΔH(0) = r c² h0² e,

    ΔH(τ) = c² h0² e^(1+τ) [r + 2 P(τ)],
    P(τ) = τ³/3 + τ²/2 (frozen),  τ³/3 + 3τ²/2 + 2τ (trained),

which differs from eq. 7 and 99: they lack y², print 1 + 1/e where the integral of eq.
98 gives 1 - 1/e, and use the wrong G0. By symmetry, with σ = 1 - τ and r' for r,
ΔG(τ) = c² h0 e^(1+σ) [r' + 2 P(σ)]. The output changes by η0 K y with
K = e (1 + r + r') h0, which is exact: the terms of second order average to zero.

**Many samples and steps** (eq. 88 to 91): the kernels and responses of the DMFT are
C and Γ of Tensor Programs VI in another notation, and `dynamics` solves them with
`linear_sgd`, at finite depth exactly and at infinite depth by extrapolation.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from ..errors import UserError
from . import linear_sgd


@dataclasses.dataclass(frozen=True)
class OneStep:
    """One sample before and after one step, at the given layer times.

    Attributes:
      h: H0, before the step.
      g: G0, before the step.
      a: the response A = δh/δr after the step, over η0 μ0.
      b: the response B = δg/δu after the step, over η0 μ0.
      change_h: ΔH.
      change_g: ΔG.
      output: f after the step.
    """

    h: Float[np.ndarray, " times"]
    g: Float[np.ndarray, " times"]
    a: Float[np.ndarray, " times"]
    b: Float[np.ndarray, " times"]
    change_h: Float[np.ndarray, " times"]
    change_g: Float[np.ndarray, " times"]
    output: float


def one_step(
    times: Any,
    *,
    label: float = 1.0,
    input_norm: float = 1.0,
    learning_rate: float = 1.0,
    richness: float = 1.0,
    readin: bool = False,
    readout: bool = False,
) -> OneStep:
    """H, G, responses and their change by a step of the loss ½(f - y)², closed form.

    Args:
      times: τ, layer times in [0, 1].
      label: y.
      input_norm: h0 = |x|²/D.
      learning_rate: η0.
      richness: μ0.
      readin: the read-in is trained.
      readout: the readout is trained.

    Raises:
      UserError: a time outside of [0, 1].

    Source: Bordelon et al., eq. 92 to 99, corrected as this module's docstring says.

    Examples:
      >>> step = one_step([0.0, 0.5, 1.0], learning_rate=0.1)
      >>> [round(float(x), 4) for x in step.change_h]
      [0.0, 0.0149, 0.1232]
    """
    tau = np.asarray(times, np.float64)
    if tau.size and (tau.min() < 0 or tau.max() > 1):
        raise UserError(f"layer times {tau.min():g} to {tau.max():g} must be in [0, 1]")
    sigma = 1 - tau
    r, r_out = float(readin), float(readout)
    c = learning_rate * richness * label
    return OneStep(
        h=np.exp(tau) * input_norm,
        g=np.exp(sigma),
        a=(tau + r) * np.exp(tau) * input_norm * label,
        b=(sigma + r_out) * np.exp(sigma) * label,
        change_h=(c * input_norm) ** 2 * _profile(tau, readin),
        change_g=c**2 * input_norm * _profile(sigma, readout),
        output=learning_rate * math.e * (1 + r + r_out) * input_norm * label,
    )


def _profile(tau: np.ndarray, trained: bool) -> np.ndarray:
    """e^(1+τ) [r + 2 ∫_0 (s + r)(s + r + 1) ds]."""
    r = float(trained)
    inner = tau**3 / 3 + (r + 0.5) * tau**2 + (r**2 + r) * tau
    return np.exp(1 + tau) * (r + 2 * inner)


@dataclasses.dataclass(frozen=True)
class Dynamics:
    """Kernels in the layer time and in training, of N = steps · batch vectors.

    Attributes:
      times: layer times l/L.
      h: <h_i h_j>, (times, N, N).
      g: <g_i g_j> of the gradients of f, (times, N, N).
      outputs: f, of shape (steps, batch).
      losses: of shape (steps,).
      error: of the outputs at infinite depth, an estimate; 0 at finite depth.
    """

    times: np.ndarray
    h: np.ndarray
    g: np.ndarray
    outputs: np.ndarray
    losses: np.ndarray
    error: np.ndarray


def dynamics(
    inputs: Any,
    targets: Any,
    *,
    depth: int | None = None,
    resolution: int = 32,
    loss: Callable[[Array, Array], Array] = linear_sgd.squared_loss,
    learning_rate: Any = 1.0,
    richness: float = 1.0,
    readin: bool = False,
    readout: bool = False,
    **settings: Any,
) -> Dynamics:
    """The full DMFT of a linear network: several samples, any number of steps.

    Args:
      inputs: of shape (steps, batch, D); H0(0) is x·x'/D.
      targets: of shape (steps, batch).
      depth: L, solved exactly; None for infinite depth, extrapolated from depths
        `resolution`, 2 · `resolution` and 4 · `resolution`.
      resolution: the number of layer times, less one, at infinite depth.
      loss: of one output and target; the batch takes its mean.
      learning_rate: η0, a number or one per step.
      richness: μ0. Small values are lazy.
      readin: the read-in is trained.
      readout: the readout is trained.
      settings: `multiplier` and `weights` of `linear_sgd.train`.

    Raises:
      UserError: as in `linear_sgd.train`, or a gradient that vanishes, so that G does
        not follow from the kernel of χ g.

    Source: Bordelon et al., eq. 88 to 91.

    Examples:
      >>> x, y = np.ones((2, 1, 1)), np.ones((2, 1))
      >>> result = dynamics(x, y, learning_rate=0.1)
      >>> closed = one_step(result.times, learning_rate=0.1)
      >>> bool(np.allclose(result.h[:, 1, 1] - closed.h, closed.change_h, rtol=1e-3))
      True
    """
    x, y = scalar_stream(inputs, targets, richness)
    scaled = _Scaled(loss, richness)
    arguments = (x / np.sqrt(x.shape[2]), y[..., None])
    settings = settings | {
        "loss": scaled,
        "learning_rate": np.asarray(learning_rate) * richness**2,
        "readin": float(readin),
        "readout": float(readout),
    }
    if depth is not None:
        run = linear_sgd.train(*arguments, depth, **settings)
        h, backward, f, losses = run.forward, run.backward, run.outputs, run.losses
        times, error = np.linspace(0, 1, depth + 1), np.zeros(y.shape)
    else:
        limit = linear_sgd.infinite_depth(*arguments, depth=resolution, **settings)
        h, backward = limit.forward.value, limit.backward.value
        f, losses = limit.outputs.value, limit.losses.value
        times, error = limit.times, limit.outputs.error[..., 0] / richness
    outputs = f[..., 0] / richness
    g = backward / _chi(scaled, outputs, y)
    return Dynamics(times, h, g, outputs, losses, error)


def scalar_stream(
    inputs: Any, targets: Any, richness: float
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (steps, batch, D) and scalar targets (steps, batch), checked.

    Raises:
      UserError: other shapes, or a richness that is not positive.
    """
    x, y = np.asarray(inputs, np.float64), np.asarray(targets, np.float64)
    if x.ndim != 3 or y.shape != x.shape[:2]:
        raise UserError(
            f"inputs {x.shape} and targets {y.shape} must be (steps, batch, D) and "
            "(steps, batch)"
        )
    if richness <= 0:
        raise UserError(f"richness={richness} must be positive")
    return x, y


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """The loss of f = F/μ0, as a function of the F = w·h/N that `linear_sgd` trains."""

    loss: Callable[[Array, Array], Array]
    richness: float

    def __call__(self, f: Array, y: Array) -> Array:
        return self.loss(f / self.richness, y)


def _chi(loss: _Scaled, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """χ_i χ_j of every pair, the factor of G in the backward kernel."""
    with jax.enable_x64(True):
        f = jnp.asarray(outputs.reshape(-1, 1) * loss.richness)
        y = jnp.asarray(targets.reshape(-1, 1))
        chi = np.asarray(jax.vmap(jax.grad(loss))(f, y))[:, 0]
    if np.abs(chi).min() < 1e-9 * np.abs(chi).max() or not chi.any():
        raise UserError(
            f"the loss of vector {int(np.abs(chi).argmin())} has no gradient: G of a "
            "fitted sample is unknown; change its target a little"
        )
    return (chi[:, None] * chi[None])[None]

r"""Deep linear residual network under SGD, at infinite width: Γ and C of Lemma 4.3.

Tensor Programs VI, section 4. The network of width n and depth L is

    x^0 = U ξ,   x^l = x^{l-1} + a L^-½ W^l x^{l-1},   f = Vᵀ x^L,

with U and nV of standard Gaussian entries and W^l of variance 1/n, in μP. As the
width grows, each coordinate of x_t^l and of the gradient δ_t^l becomes a Gaussian
variable (Program 1), a combination of independent base variables with coefficients
Γ:

    x_t^l     = x_t^{l-1} + a L^-½ ŵ_t^l + a²/L Σ_{s<t} θ_ts^l δ_s^l,
    δ_t^{l-1} = δ_t^l     + a L^-½ v̂_t^l + a²/L Σ_{s<t} ψ_ts^l x_s^{l-1},

    θ_ts^l = Γ_{t,s,0,1}(l-1, l) - η_s C_{t,s,0}(l),
    ψ_ts^l = Γ_{t,s,1,0}(l, l)   - η_s C_{t,s,1}(l),

    C_{t,s,0}(l) = <x_t^{l-1} x_s^{l-1}>,   C_{t,s,1}(l) = <δ_t^l δ_s^l>,

where ŵ_t^l stands for the paper's hat of W_0^l x_t^{l-1} and v̂_t^l for that of
W_0^lᵀ δ_t^l (Definition 4.1), of covariances C_0 and C_1. That is Lemma 4.3, with
η = a = 1 in the paper.

**How it is solved.** Γ(l, m) as printed has T² L² entries. For each time, however, the
equations are a linear two-point boundary problem in the layer. The response to a source
at layer m is, on either side of m, a solution without sources. Let P(l) be the
solutions with x_t^0 = 1 (columns u_t) or δ_t^L = χ-term = 1 (columns v_t). Then

    Γ(l, m) = P_u(l) R_u(m) for m <= l,    P_v(l) R_v(m) for m > l,

and R(m) is, up to signs, the inverse of P at the source, (P_x(m-1), P_δ(m)). P is
unit triangular in time, so that each step appends rows to it and to its inverse. Memory
is O(T² L) and time O(T³ L).

A batch is several vectors with one time. Vectors of weight zero do not affect training.
Trained U and V only change the ends:

    x_t^0 = ξ_t U - r Σ_{s<t} η_s (ξ_t·ξ_s) δ_s^0,
    δ_t^L = χ_t nV - r' Σ_{s<t} η_s (χ_t·χ_s) x_s^L.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import memory
from ..errors import UserError

Loss = Callable[[Array, Array], Array]


def squared_loss(f: Array, y: Array) -> Array:
    """½ |f - y|² of one vector."""
    return jnp.sum((f - y) ** 2) / 2


@dataclasses.dataclass(frozen=True)
class Training:
    """The training of a network of infinite width.

    The N = steps · batch vectors are numbered in order of time.

    Attributes:
      outputs: f of each vector, before its step.
      losses: of each step's batch, before the step.
      rms: root mean square of the coordinates of x^0, ..., x^L.
      forward: <x_i^l x_j^l>, at l = 0, ..., L. C_{t,s,0} at (l+1)/L of the paper.
      backward: <δ_i^l δ_j^l> of the gradients times n, times their χ. C_{t,s,1}.
      solutions: P_x and P_δ.
      inverse: R at l = 1, ..., L.
    """

    outputs: Float[np.ndarray, "steps batch out"]
    losses: Float[np.ndarray, " steps"]
    rms: Float[np.ndarray, "steps batch layers"]
    forward: Float[np.ndarray, "layers N N"]
    backward: Float[np.ndarray, "layers N N"]
    solutions: tuple[
        Float[np.ndarray, "layers N 2*N"], Float[np.ndarray, "layers N 2*N"]
    ]
    inverse: Float[np.ndarray, "depth 2*N 2*N"]

    def gamma(
        self, t: int, s: int, a: int, b: int
    ) -> Float[np.ndarray, "layers depth"]:
        """Γ_{t,s,a,b}(l/L, m/L) for l = 0, ..., L and m = 1, ..., L.

        The coefficient of vector t's x^l (a = 0) or δ^l (a = 1) on the source of
        vector s at layer m: ŵ (b = 0) or v̂ (b = 1), over a L^-½.
        """
        count = self.forward.shape[-1]
        rows = self.solutions[a][:, t]
        columns = self.inverse[:, :, s + b * count]
        later = rows[:, :count] @ columns[:, :count].T
        earlier = rows[:, count:] @ columns[:, count:].T
        layers, depth = later.shape
        reached = np.arange(1, depth + 1)[None] <= np.arange(layers)[:, None]
        return np.where(reached, later, earlier)


def train(
    inputs: Any,
    targets: Any,
    depth: int,
    *,
    loss: Loss = squared_loss,
    learning_rate: Any = 1.0,
    multiplier: float = 1.0,
    readin: float = 0.0,
    readout: float = 0.0,
    weights: Any = None,
) -> Training:
    """Train at infinite width and finite depth (Lemma 4.3).

    Args:
      inputs: ξ, of shape (steps, batch, features): each step's batch.
      targets: y, of shape (steps, batch, outputs).
      depth: L.
      loss: of one vector's output and target; differentiable by JAX.
      learning_rate: η, a number or one per step, in μP units: independent of the width.
      multiplier: a, of the branches.
      readin: the learning rate of U over that of W; 0 freezes it, as in the paper.
      readout: the learning rate of V over that of W.
      weights: of the batch in the loss, of shape (batch,); by default 1/batch each.
        A vector of weight 0 does not affect training.

    Raises:
      UserError: shapes that do not fit, a depth below one, tensors that would not
        fit into memory, or training that diverges (with the step and the layer time).

    Source: Tensor Programs VI, Program 1 and Lemma 4.3.

    Examples:
      >>> import numpy as np
      >>> ones = np.ones((3, 1, 1))  # three steps on one point
      >>> run = train(ones, ones, depth=16, learning_rate=0.2)
      >>> [round(float(f), 4) for f in run.outputs[:, 0, 0]]
      [0.0, 0.4966, 0.7767]
    """
    x, y = np.asarray(inputs, np.float64), np.asarray(targets, np.float64)
    if x.ndim != 3 or y.ndim != 3 or x.shape[:2] != y.shape[:2]:
        raise UserError(
            f"inputs {x.shape} and targets {y.shape} must be (steps, batch, features) "
            "and (steps, batch, outputs)"
        )
    steps, batch = x.shape[:2]
    check_sizes(steps, batch, depth)
    count = steps * batch
    memory.check(
        memory_needed(steps, batch, depth),
        f"{steps} steps of {batch} vectors at depth {depth}",
        "take fewer steps, fewer vectors or a smaller depth",
    )
    rates = np.broadcast_to(np.asarray(learning_rate, np.float64), steps)
    share = batch_weights(weights, batch)
    flat = x.reshape(count, -1)
    with jax.enable_x64(True):
        state, outputs, losses = _train(
            jnp.asarray(flat @ flat.T),
            jnp.asarray(y),
            jnp.asarray(np.outer(rates, share)),
            jnp.asarray(share),
            jnp.asarray([multiplier**2 / depth, readin, readout], jnp.float64),
            depth,
            loss,
        )
        state = jax.device_get(state)
        outputs, losses = np.asarray(outputs), np.asarray(losses)
    kernels = {"<x x>": state.x_cov[None], "<δ δ>": state.d_cov[None]}
    check_finite(kernels, [outputs], batch)
    power = np.diagonal(state.x_cov, axis1=1, axis2=2).T.reshape(steps, batch, -1)
    # Rounding can make it negative.
    rms = np.sqrt(np.maximum(power, 0))
    return Training(
        outputs, losses, rms, state.x_cov, state.d_cov, (state.px, state.pd), state.r
    )


def memory_needed(steps: int, batch: int, depth: int) -> int:
    """The bytes that `train` needs: 12 numbers per layer and pair of vectors."""
    return 12 * (depth + 1) * (steps * batch) ** 2 * 8


class Estimate(NamedTuple):
    """A quantity and an estimate of its error, which is not a bound."""

    value: np.ndarray
    error: np.ndarray


@dataclasses.dataclass(frozen=True)
class InfiniteDepth:
    """The training of a network of infinite width and depth (Proposition 4.4).

    Attributes:
      times: layer times l/L, a grid of [0, 1].
      outputs: of shape (steps, batch, out).
      losses: of shape (steps,).
      rms: of x at the layer times, (steps, batch, times).
      forward: <x_i x_j> at the layer times, (times, N, N).
      backward: <δ_i δ_j> at the layer times, (times, N, N).
    """

    times: np.ndarray
    outputs: Estimate
    losses: Estimate
    rms: Estimate
    forward: Estimate
    backward: Estimate


def infinite_depth(
    inputs: Any, targets: Any, *, depth: int = 32, **settings: Any
) -> InfiniteDepth:
    """The limit of infinite depth, by Richardson extrapolation in 1/L.

    Args:
      inputs: as in `train`.
      targets: as in `train`.
      depth: the smallest L; 2L and 4L are solved too. Quantities of layers are given at
        the L + 1 layer times of this one.
      settings: other arguments of `train`.

    Raises:
      UserError: as in `train`.

    Source: Tensor Programs VI, Proposition 4.4; the errors at finite depth are a
    series in 1/L, of which two terms are removed.

    Examples:
      >>> import numpy as np
      >>> ones = np.ones((2, 1, 1))
      >>> limit = infinite_depth(ones, ones, learning_rate=0.2)
      >>> # After one step f = η K y, with K = e (Bordelon et al., eq. 6).
      >>> bool(abs(limit.outputs.value[1, 0, 0] - 0.2 * np.e) < 1e-5)
      True
    """
    runs = {k: train(inputs, targets, depth * k, **settings) for k in (1, 2, 4)}

    def limit(value: Callable[[Training, int], np.ndarray]) -> Estimate:
        return richardson(*(value(run, k) for k, run in runs.items()))

    return InfiniteDepth(
        times=np.linspace(0, 1, depth + 1),
        outputs=limit(lambda run, k: run.outputs),
        losses=limit(lambda run, k: run.losses),
        rms=limit(lambda run, k: run.rms[..., ::k]),
        forward=limit(lambda run, k: run.forward[::k]),
        backward=limit(lambda run, k: run.backward[::k]),
    )


def richardson(at_1: np.ndarray, at_2: np.ndarray, at_4: np.ndarray) -> Estimate:
    """Remove the 1/L and the 1/L² term from values at depths L, 2L and 4L.

    The error is the distance of the last two extrapolations.

    Examples:
      >>> limit = richardson(*(np.asarray(3 + 1 / L + 2 / L**2) for L in (4, 8, 16)))
      >>> round(float(limit.value), 12)
      3.0
    """
    first, second = 2 * at_2 - at_1, 2 * at_4 - at_2
    value = (4 * second - first) / 3
    return Estimate(value, np.abs(value - second))


def check_sizes(steps: int, batch: int, depth: int) -> None:
    """Raise UserError for a size below one."""
    if min(steps, batch, depth) < 1:
        raise UserError(
            f"depth={depth}, steps={steps}, batch={batch} must each be at least 1"
        )


def batch_weights(weights: Any, batch: int) -> np.ndarray:
    """The weight of each vector of a batch in the loss; 1/batch each if None."""
    share = np.full(batch, 1 / batch) if weights is None else np.asarray(weights)
    if share.shape != (batch,):
        raise UserError(f"weights {share.shape} must be ({batch},), one per vector")
    return share


def check_finite(
    kernels: dict[str, np.ndarray], others: Sequence[np.ndarray], batch: int
) -> None:
    """Raise UserError where training diverged, with the step and the layer time.

    Args:
      kernels: the kernels of the forward and of the backward pass, by name, of shape
        (replicas, layers, vectors, vectors).
      others: outputs and responses.
      batch: vectors of a step.
    """
    cause = "training diverges; take a smaller learning rate"
    for name, first in zip(kernels, (0, -1), strict=True):  # gradients run downwards
        diagonal = np.diagonal(kernels[name], axis1=2, axis2=3)
        bad = ~np.isfinite(diagonal).all(axis=0)
        if bad.any():
            vector = int(np.argmax(bad.any(axis=0)))
            layer = np.flatnonzero(bad[:, vector])[first]
            raise UserError(
                f"the kernel {name} is not finite at step {vector // batch}, layer "
                f"time {layer / (len(bad) - 1):g}: {cause}"
            )
    if not all(np.isfinite(part).all() for part in others):
        raise UserError(f"outputs or responses are not finite: {cause}")


class _State(NamedTuple):
    """Solutions and kernels by layer; rows of later vectors are zero."""

    px: Float[Array, "layers N 2*N"]  # P_x(l)
    pd: Float[Array, "layers N 2*N"]  # P_δ(l)
    r: Float[Array, "depth 2*N 2*N"]  # R(l), l = 1, ..., L
    su: Float[Array, "layers N N"]  # covariance of P_u's amplitudes at l
    sv: Float[Array, "layers N N"]  # covariance of P_v's amplitudes at l
    x_cov: Float[Array, "layers N N"]
    d_cov: Float[Array, "layers N N"]
    chi: Float[Array, "N out"]


@functools.partial(jax.jit, static_argnames=("depth", "loss"))
def _train(
    gram: Float[Array, "N N"],
    targets: Float[Array, "steps batch out"],
    rates: Float[Array, "steps batch"],
    share: Float[Array, " batch"],
    constants: Float[Array, "3"],
    depth: int,
    loss: Loss,
) -> tuple[_State, Float[Array, "steps batch out"], Float[Array, " steps"]]:
    steps, batch, out = targets.shape
    count = steps * batch
    rate = rates.reshape(count)
    step_of_layers, readin_rate, readout_rate = constants  # a²/L, r, r'

    def step(state: _State, now: tuple[Array, Array]):
        t, y = now
        start = t * batch
        past = (jnp.arange(count) < start)[None]
        seen = (jnp.arange(count) < start + batch)[None]
        rows = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start)
        eye = rows(jnp.eye(2 * count), slice_size=batch)
        eye_v = jax.lax.dynamic_slice_in_dim(jnp.eye(2 * count), start + count, batch)
        own_gram = rows(gram, slice_size=batch) * seen
        # Put the rows of these vectors into the matrices of all layers.
        put = jax.vmap(lambda matrix, new: _rows(matrix, new, start))
        put_mirrored = jax.vmap(lambda matrix, new: _set(matrix, new, start))

        # Forward: x_t^l for l = 0, ..., L.
        update = jnp.where(past, rate[None] * own_gram, 0)
        p0 = eye - readin_rate * update @ state.pd[0]

        def up(carry, layer):
            p, su = carry
            px, pd, r, su_all, sv, x_cov, d_cov = layer
            su_all = _set(su_all, su, start)
            px = _rows(px, p, start)
            cov = _covariance(p, px, su_all, sv)
            gamma = p[:, count:] @ r[count:, count:]  # Γ_{t,s,0,1}(l-1, l)
            theta = jnp.where(past, gamma - rate[None] * cov, 0)
            row = eye - _signed(p - eye) @ r
            r_u = _rows(r[:count], row, start)
            spread = _sources(row, _set(x_cov, cov, start), d_cov) @ r_u.T
            new = p + step_of_layers * theta @ pd, su + step_of_layers * spread
            return new, (p, su, cov, row)

        layers = (
            state.px[:-1], state.pd[1:], state.r, state.su[:-1], state.sv[:-1],
            state.x_cov[:-1], state.d_cov[1:],
        )  # fmt: skip
        (p, su), (ps, sus, covs, r_rows) = jax.lax.scan(up, (p0, own_gram), layers)
        px = put(state.px, jnp.concatenate([ps, p[None]]))
        su_all = put_mirrored(state.su, jnp.concatenate([sus, su[None]]))
        last = _covariance(p, px[-1], su_all[-1], state.sv[-1])
        x_cov = put_mirrored(state.x_cov, jnp.concatenate([covs, last[None]]))
        r = put(state.r, r_rows)

        # f_t = <x_t^L nV_t>; χ is zero for vectors that are yet to come.
        f = p[:, count:] @ state.chi
        f -= readout_rate * jnp.where(past, rate[None] * last, 0) @ state.chi
        losses, chi_t = jax.vmap(jax.value_and_grad(loss))(f, y)
        chi = _rows(state.chi, chi_t, start)

        # Backward: δ_t^l for l = L, ..., 0.
        own = chi_t @ chi.T
        update = jnp.where(past, rate[None] * own, 0)
        q_top = eye_v - readout_rate * update @ px[-1]

        def down(carry, layer):
            q, sv = carry
            px, pd, r, su, sv_all, x_cov, d_cov = layer
            sv_all = _set(sv_all, sv, start)
            pd = _rows(pd, q, start)
            cov = _covariance(q, pd, su, sv_all)
            gamma = q[:, :count] @ r[:count, :count]  # Γ_{t,s,1,0}(l, l)
            psi = jnp.where(past, gamma - rate[None] * cov, 0)
            row = eye_v + _signed(q - eye_v) @ r
            r_v = _rows(r[count:], row, start)
            spread = _sources(row, x_cov, _set(d_cov, cov, start)) @ r_v.T
            new = q + step_of_layers * psi @ px, sv + step_of_layers * spread
            return new, (q, sv, cov, row)

        layers = (
            px[:-1], state.pd[1:], r, su_all[1:], state.sv[1:], x_cov[:-1],
            state.d_cov[1:],
        )  # fmt: skip
        (q, sv), (qs, svs, covs, r_rows) = jax.lax.scan(
            down, (q_top, own), layers, reverse=True
        )
        pd = put(state.pd, jnp.concatenate([q[None], qs]))
        sv_all = put_mirrored(state.sv, jnp.concatenate([sv[None], svs]))
        first = _covariance(q, pd[0], su_all[0], sv_all[0])
        d_cov = put_mirrored(state.d_cov, jnp.concatenate([first[None], covs]))
        r = jax.vmap(lambda m, v: _rows(m, v, start + count))(r, r_rows)
        new_state = _State(px, pd, r, su_all, sv_all, x_cov, d_cov, chi)
        return new_state, (f, losses @ share)

    solutions = jnp.zeros((depth + 1, count, 2 * count))
    inverse = jnp.zeros((depth, 2 * count, 2 * count))
    kernel, chi = jnp.zeros((depth + 1, count, count)), jnp.zeros((count, out))
    start = _State(solutions, solutions, inverse, kernel, kernel, kernel, kernel, chi)
    state, (outputs, losses) = jax.lax.scan(step, start, (jnp.arange(steps), targets))
    return state, outputs, losses


def _rows(matrix: Array, rows: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(matrix, rows, start, 0)


def _set(matrix: Array, rows: Array, start: Array) -> Array:
    """Put rows, and their mirror image, into a symmetric matrix."""
    matrix = jax.lax.dynamic_update_slice_in_dim(matrix, rows.T, start, 1)
    return jax.lax.dynamic_update_slice_in_dim(matrix, rows, start, 0)


def _signed(rows: Array) -> Array:
    """Columns u kept, columns v negated."""
    count = rows.shape[1] // 2
    return jnp.concatenate([rows[:, :count], -rows[:, count:]], axis=1)


def _covariance(rows: Array, every: Array, su: Array, sv: Array) -> Array:
    """C of Lemma 4.3: amplitudes below and above a layer are independent."""
    count = su.shape[0]
    below = rows[:, :count] @ su @ every[:, :count].T
    return below + rows[:, count:] @ sv @ every[:, count:].T


def _sources(rows: Array, x_cov: Array, d_cov: Array) -> Array:
    """Rows times the covariance of the sources ŵ and v̂ of a layer."""
    count = x_cov.shape[0]
    return jnp.concatenate([rows[:, :count] @ x_cov, rows[:, count:] @ d_cov], axis=1)

r"""Feature learning at infinite width and finite depth, any smooth activation.

Bordelon et al., appendix D, in discrete time (K.4) and with both ends trained (K.3).
The network (eq. 1; a = 1 and no φ' for a linear readout)

    h^0 = D^-½ W^0 x,   h^{l+1} = h^l + a (L N)^-½ W^l φ(h^l),   f = w·φ(h^L)/(μ0 N),

with all entries N(0, 1) before training, is trained at the rate η0 μ0² N. Number the
vectors that it sees by time and sample, i = (t, x), of weight p_i in the loss of their
batch, and let g = N μ0 ∂f/∂h, Δ_i = -∂loss/∂f_i and c_i = η0 μ0 p_i Δ_i. As N grows
each neuron becomes an independent draw from one process (eq. 38), s < t meaning all
vectors of earlier batches and s <= t the own vector too:

    h_t^{l+1} = h_t^l + a L^-½ u_t^{l+1} + Σ_{s<t} θ_ts^l g_s^{l+1},
    z_t^l     = a L^-½ r_t^l + Σ_{s<=t} ψ_ts^l φ(h_s^l),
    g_t^l     = g_t^{l+1} + φ'(h_t^l) z_t^l,

    θ_ts^l = a L^-½ A_ts^l + a²/L c_s Φ_ts^l,
    ψ_ts^l = a L^-½ B_ts^l + a²/L c_s G_ts^{l+1} [s < t],

    h_t^0 = u_t^0 + ρ Σ_{s<t} c_s H_ts^0 g_s^0,             u^0 ~ N(0, x·x'/D),
    g_t^L = φ'(h_t^L) w_t,   w_t = w + ρ' Σ_{s<t} c_s φ(h_s^L),   w ~ N(0, 1),

where u^{l+1} ~ N(0, Φ^l) and r^l ~ N(0, G^{l+1}) over all vectors, ρ and ρ'
are the rates of W^0 and w over that of the W^l, and (eq. 39, 131)

    Φ_ts^l = <φ(h_t^l) φ(h_s^l)>,         G_ts^l = <g_t^l g_s^l>,
    A_ts^l = <∂φ(h_t^l)/∂r_s^l>,          B_ts^l = <∂g_t^{l+1}/∂u_s^{l+1}>,
    μ0 f_t = <w_t φ(h_t^L)> = <∂φ(h_t^L)/∂w> + ρ' Σ_{s<t} c_s Φ_ts^L.

**The response at equal times.** A_ts is zero unless s < t, but B_tt is not zero: g_t
depends on h_t through φ', so that B_tt contains <φ''(h_t) z_t ∂h_t/∂u_t>. It is zero
for linear networks and before training. Later it is of the order of the learned
features. In the time integral of eq. 38 it is a delta function of t - s, which eq. 39
omits. Without it, `papers/tests/test_theory_feature_learning.py` fails.

**How it is solved.** h_t^{l+1} depends on lower layers and earlier times, and g_t^l
also on higher layers. One sweep, forward and backward through the layers for each time,
therefore solves all equations without iterations. Averages are over `samples` draws,
with u = R ε and R the Cholesky root of Φ. The same equations, linearized, give the
derivatives of every h and g with respect to every source for each draw. Memory is
O(samples T² L²) for T vectors, time O(samples T³ L²).

**The error.** The draws have exact first and second moments, so that a linear network
has no sampling error. Errors of the `replicas` are independent; their mean and standard
error are returned. A bias of order 1/samples is below this error if there are far fewer
replicas than samples. Responses replace averages over w, also in f_t, so that a small
μ0 is as precise as a large one.

ReLU and |x| raise an error: at their kink there is no second derivative to sample, and
B would be wrong. softplus(k x)/k is a smooth ReLU.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import memory
from ..errors import UserError
from .gaussian import Activation
from .linear_joint import scalar_stream
from .linear_sgd import (
    Estimate,
    batch_weights,
    check_finite,
    check_sizes,
    squared_loss,
)

Scalar = Callable[[Array], Array]
_NAMED: dict[str, Scalar] = {"erf": jax.scipy.special.erf, "linear": lambda x: x}

# Below this share of its variance, a draw is a linear combination of earlier draws.
_DEPENDENT = 1e-12


@dataclasses.dataclass(frozen=True)
class Dynamics:
    """A network of infinite width as it trains, on N = steps · batch vectors.

    In float64: the mean over replicas, and its standard error.

    Attributes:
      times: layer times l/L.
      outputs: f, before the step in which its vector is used, (steps, batch).
      losses: of each step's batch, before the step, (steps,).
      h: <h_i h_j>, (L + 1, N, N).
      phi: Φ, (L + 1, N, N).
      g: G, (L + 1, N, N).
      a: the response A, (L, N, N).
      b: the response B, (L, N, N).
    """

    times: Float[np.ndarray, " layers"]
    outputs: Estimate
    losses: Estimate
    h: Estimate
    phi: Estimate
    g: Estimate
    a: Estimate
    b: Estimate


def dynamics(
    inputs: Any,
    targets: Any,
    depth: int,
    *,
    activation: Activation = jnp.tanh,
    loss: Callable[[Array, Array], Array] = squared_loss,
    learning_rate: Any = 1.0,
    richness: float = 1.0,
    multiplier: float = 1.0,
    activate_readout: bool = True,
    readin: float = 1.0,
    readout: float = 1.0,
    weights: Any = None,
    samples: int = 512,
    replicas: int = 16,
    seed: int = 0,
) -> Dynamics:
    """Solve eq. 38 and 39 by Monte Carlo.

    Args:
      inputs: x of each step's batch, (steps, batch, D); H^0 is x·x'/D.
      targets: y, (steps, batch).
      depth: L.
      activation: φ, a scalar JAX function with two derivatives, "erf" or "linear".
      loss: of one output and target, both scalar.
      learning_rate: η0, a number or one per step.
      richness: μ0. Small values are lazy.
      multiplier: a, of the branches.
      activate_readout: apply φ before the readout, as in eq. 1.
      readin: ρ, the learning rate of W^0 over that of W^l; 0 freezes it.
      readout: ρ', the learning rate of w over that of W^l; 0 freezes it.
      weights: of the batch in the loss, (batch,); by default 1/batch each. A vector
        of weight 0 does not affect training.
      samples: draws of a replica.
      replicas: independent solutions, at least 2 for an error.
      seed: of the draws. With the same seed and sizes, differences between two settings
        have far smaller errors than each result.

    Raises:
      UserError: shapes that do not fit, sizes below one, too few samples, an unknown
        activation or one with a kink, tensors that do not fit into memory, or training
        that diverges (with the step and the layer time).

    Source: Bordelon et al., eq. 36 to 39, 129 to 131.

    Examples:
      >>> x, y = np.ones((3, 1, 1)), np.ones((3, 1))
      >>> result = dynamics(x, y, 2, activation="linear", learning_rate=0.1)
      >>> from . import linear_joint
      >>> ends = {"readin": True, "readout": True}
      >>> exact = linear_joint.dynamics(x, y, depth=2, learning_rate=0.1, **ends)
      >>> bool(np.allclose(result.outputs.value, exact.outputs, atol=1e-10))
      True
    """
    x, y = scalar_stream(inputs, targets, richness)
    steps, batch = y.shape
    check_sizes(steps, batch, depth)
    if replicas < 2:
        raise UserError(
            f"replicas={replicas} must be at least 2, to estimate the error"
        )
    least = (2 * depth + 1) * steps * batch + 2
    if samples < least:
        raise UserError(
            f"samples={samples} must be at least {least}: one more than the sources"
        )
    memory.check(
        memory_needed(steps, batch, depth, samples),
        f"{samples} samples of {steps} steps of {batch} vectors at depth {depth}",
        "take fewer samples (and more replicas), steps or vectors",
    )
    rates = np.broadcast_to(np.asarray(learning_rate, np.float64), steps)
    share = batch_weights(weights, batch)
    with jax.enable_x64(True):
        setup = _Setup(depth, _smooth(activation), activate_readout, loss, samples)
        flat = jnp.asarray(x.reshape(steps * batch, -1))
        fields = _replicate(
            jax.random.split(jax.random.key(seed), replicas),
            flat @ flat.T / x.shape[2],
            jnp.asarray(y),
            jnp.asarray(rates),
            jnp.asarray(share, jnp.float64),
            jnp.asarray([multiplier, richness, readin, readout], jnp.float64),
            setup,
        )
        parts = {name: np.asarray(field) for name, field in fields.items()}
    check_finite({"Φ": parts["phi"], "G": parts["g"]}, list(parts.values()), batch)
    estimates = {
        name: Estimate(part.mean(axis=0), part.std(axis=0, ddof=1) / np.sqrt(replicas))
        for name, part in parts.items()
    }
    return Dynamics(np.linspace(0, 1, depth + 1), **estimates)


def memory_needed(steps: int, batch: int, depth: int, samples: int) -> int:
    """The bytes that `dynamics` needs: derivatives by source, and copies in a step."""
    count = steps * batch
    derivatives = 2 * (depth + 1) * count * (2 * depth * count + 1)
    return int(2.5 * derivatives * samples * 8)


def _smooth(activation: Activation) -> Scalar:
    """The function of a name. Raises UserError if it has a kink."""
    if not callable(activation):
        if activation in ("relu", "abs"):
            raise UserError(f"activation {activation!r} has a kink; {_REMEDY}")
        if activation not in _NAMED:
            raise UserError(
                f"activation {activation!r} must be one of "
                f"{', '.join(sorted(_NAMED))}, or a JAX function"
            )
        return _NAMED[activation]
    if not float(_kink(activation)) < 1e-6:
        raise UserError(f"the activation has a kink; {_REMEDY}")
    return activation


@functools.partial(jax.jit, static_argnames=("activation",))
def _kink(activation: Scalar) -> Array:
    """The largest difference between φ' and the integral of φ'' on [-8, 8]."""
    first, second = _derivatives(activation)
    grid = jnp.linspace(-8.0, 8.0, 16001)
    inner, middle = second(grid), second((grid[1:] + grid[:-1]) / 2)
    simpson = (grid[1] - grid[0]) / 6 * (inner[1:] + 4 * middle + inner[:-1])
    return jnp.abs(jnp.diff(first(grid)) - simpson).max()


_REMEDY = "pass a smooth one, e.g. lambda x: jax.nn.softplus(10 * x) / 10"


def _derivatives(function: Scalar) -> tuple[Scalar, Scalar]:
    """φ' and φ'', elementwise."""

    def derivative(f: Scalar) -> Scalar:
        return lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]

    return derivative(function), derivative(derivative(function))


class _Setup(NamedTuple):
    """The static arguments of the compiled functions."""

    depth: int
    activation: Scalar
    activate_readout: bool
    loss: Callable[[Array, Array], Array]
    samples: int


class _Noise(NamedTuple):
    """Standard Gaussian draws, which are multiplied by roots of the kernels."""

    u0: Float[Array, "N S"]
    u: Float[Array, "L N S"]
    r: Float[Array, "L N S"]
    w: Float[Array, " S"]


class _State(NamedTuple):
    """Fields by layer and vector; zero for later vectors.

    Derivatives are with respect to the sources r of every layer and vector, then u, and
    w last.
    """

    h: Float[Array, "layers N S"]
    g: Float[Array, "layers N S"]
    dh: Float[Array, "layers N sources S"]
    dg: Float[Array, "layers N sources S"]
    c: Float[Array, " N"]


@functools.partial(jax.jit, static_argnames=("setup",))
def _replicate(
    keys: Array,
    gram: Float[Array, "N N"],
    targets: Float[Array, "steps batch"],
    rates: Float[Array, " steps"],
    share: Float[Array, " batch"],
    constants: Float[Array, "4"],
    setup: _Setup,
) -> dict[str, Array]:
    """The fields of `Dynamics`, by replica."""

    def replica(key: Array) -> dict[str, Array]:
        noise = _draw(key, len(gram), setup)
        return _sweep(noise, gram, targets, rates, share, constants, setup)

    # One after another, because each may need all memory.
    return jax.lax.map(replica, keys)


def _draw(key: Array, count: int, setup: _Setup) -> _Noise:
    """Draws with exact first and second moments."""
    ups, depth, samples = (setup.depth + 1) * count, setup.depth, setup.samples
    sources = ups + depth * count + 1
    draws = jax.random.normal(key, (samples, 1 + sources), jnp.float64)
    # Orthogonal to a constant too: the mean is zero.
    draws = jnp.linalg.qr(draws.at[:, 0].set(1))[0].T * np.sqrt(samples)
    up, down = draws[1 : ups + 1], draws[ups + 1 :]
    shape = (depth, count, samples)
    return _Noise(
        up[:count], up[count:].reshape(shape), down[1:].reshape(shape), down[0]
    )


def _sweep(
    noise: _Noise,
    gram: Float[Array, "N N"],
    targets: Float[Array, "steps batch"],
    rates: Float[Array, " steps"],
    share: Float[Array, " batch"],
    constants: Float[Array, "4"],
    setup: _Setup,
) -> dict[str, Array]:
    """Solve all times in order: forward through the layers, then backward."""
    steps, batch = targets.shape
    count, depth, samples = steps * batch, setup.depth, setup.samples
    sources = 2 * depth * count + 1
    multiplier, richness, readin, readout = constants
    branch = multiplier / np.sqrt(depth)  # a L^-½
    phi = setup.activation
    phi_1, phi_2 = _derivatives(phi)
    top = phi if setup.activate_readout else _NAMED["linear"]
    top_1, top_2 = _derivatives(top)
    input_root = _root(gram)

    def step(state: _State, now: tuple[Array, Array, Array]):
        t, y, rate = now
        start = t * batch
        past = jnp.arange(count) < start
        seen = jnp.arange(count) < start + batch
        answers = _answers(count, start, batch)
        rows = functools.partial(_rows, start_index=start, slice_size=batch)

        def kernel(fields: Float[Array, "N S"]) -> Float[Array, "N N"]:
            known = fields * seen[:, None]
            return known @ known.T / samples

        def kick(half: int, layer: Array) -> Float[Array, "batch sources 1"]:
            """The derivative with respect to the sources of these vectors."""
            first = (half * depth + layer) * count + start
            place = first + jnp.arange(batch)
            return jax.nn.one_hot(place, sources)[..., None]

        def up(carry: tuple[Array, Array], below: Any):
            h, dh = carry
            layer, h_all, g_above, dg_above, noise_u = below
            covariance = kernel(phi(_put(h_all, h, start)))  # Φ^l
            own = _rows(dh, layer * count, count, axis=1)  # ∂h/∂r^l
            a = jnp.mean(phi_1(h)[:, None] * own, axis=-1) * past[None]
            c_phi = rows(covariance) * (state.c * past)[None]
            theta = branch * a + branch**2 * c_phi
            u = rows(_root(covariance)) @ noise_u
            new_h = h + branch * u + theta @ g_above
            new_dh = dh + branch * kick(1, layer) + jnp.tensordot(theta, dg_above, 1)
            return (new_h, new_dh), (h, dh, a)

        def down(carry: tuple[Array, Array], here: Any):
            g, dg = carry
            layer, h_all, g_all, dh_all, c, noise_r = here
            covariance = kernel(_put(g_all, g, start))  # G^{l+1}
            own = _rows(dg, (depth + layer) * count, count, axis=1)  # ∂g/∂u^{l+1}
            b = jnp.mean(own, axis=-1) * answers[None]
            c_g = rows(covariance) * (c * past)[None]
            psi = branch * b + branch**2 * c_g
            r = rows(_root(covariance)) @ noise_r
            z = branch * r + psi @ (phi(h_all) * seen[:, None])
            h, dh = rows(h_all), rows(dh_all)
            d_phi = jnp.tensordot(psi, phi_1(h_all)[:, None] * dh_all, 1)
            dz = branch * kick(0, layer) + d_phi
            new_dg = dg + phi_1(h)[:, None] * dz + (phi_2(h) * z)[:, None] * dh
            return (g + phi_1(h) * z, new_dg), (g, dg, b)

        past_c = (past * state.c)[None]
        from_inputs = readin * past_c * rows(gram)
        h_0 = rows(input_root) @ noise.u0 + from_inputs @ state.g[0]
        carry = h_0, jnp.tensordot(from_inputs, state.dg[0], 1)
        layers = jnp.arange(depth)
        upward = layers, state.h[:-1], state.g[1:], state.dg[1:], noise.u
        (h, dh), (hs, dhs, a) = jax.lax.scan(up, carry, upward)
        every_h = _put(state.h, jnp.concatenate([hs, h[None]]), start, axis=1)
        every_dh = _put(state.dh, jnp.concatenate([dhs, dh[None]]), start, axis=1)

        learned = readout * jnp.broadcast_to(past_c, (batch, count))
        last = top(every_h[-1])
        w = noise.w[None] + learned @ last
        response = jnp.mean(top_1(h) * dh[:, -1], axis=-1)  # <∂φ/∂w>
        f = (response + jnp.mean(learned @ last * top(h), axis=-1)) / richness
        losses, slopes = jax.vmap(jax.value_and_grad(setup.loss))(f, y)
        c = _put(state.c, -rate * richness * share * slopes, start)

        dw = jnp.tensordot(learned, top_1(every_h[-1])[:, None] * every_dh[-1], 1)
        dw = dw.at[:, -1].add(1)  # w itself
        carry = w * top_1(h), top_1(h)[:, None] * dw + (w * top_2(h))[:, None] * dh
        every_c = jnp.broadcast_to(c, (depth, count))
        downward = layers, every_h[:-1], state.g[1:], every_dh[:-1], every_c, noise.r
        (g, dg), (gs, dgs, b) = jax.lax.scan(down, carry, downward, reverse=True)
        every_g = _put(state.g, jnp.concatenate([g[None], gs]), start, axis=1)
        every_dg = _put(state.dg, jnp.concatenate([dg[None], dgs]), start, axis=1)
        new = _State(every_h, every_g, every_dh, every_dg, c)
        return new, (f, losses @ share, a, b)

    fields = jnp.zeros((depth + 1, count, samples))
    derivatives = jnp.zeros((depth + 1, count, sources, samples))
    nothing = _State(fields, fields, derivatives, derivatives, jnp.zeros(count))
    state, (outputs, losses, a, b) = jax.lax.scan(
        step, nothing, (jnp.arange(steps), targets, rates)
    )

    def average(fields: Array) -> Array:
        return fields @ fields.swapaxes(1, 2) / samples

    def by_layer(response: Float[Array, "steps L batch N"]) -> Array:
        return response.swapaxes(0, 1).reshape(depth, count, count)

    return {
        "outputs": outputs,
        "losses": losses,
        "h": average(state.h),
        "phi": average(phi(state.h)),
        "g": average(state.g),
        "a": by_layer(a),
        "b": by_layer(b),
    }


def _answers(count: int, start: Array, batch: int) -> Array:
    """The vectors whose B is not zero, including the present ones."""
    return jnp.arange(count) < start + batch


def _root(covariance: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """Lower triangular R with R Rᵀ the covariance, which may be singular."""
    count = len(covariance)
    scale = jnp.diagonal(covariance)

    def column(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, root = carry
        pivot = rest[j, j]
        independent = pivot > _DEPENDENT * scale[j]
        below = jnp.where(jnp.arange(count) >= j, rest[:, j], 0)
        new = below / jnp.sqrt(jnp.where(independent, pivot, 1)) * independent
        return rest - new[:, None] * new[None], root.at[:, j].set(new)

    nothing = jnp.zeros_like(covariance)
    return jax.lax.fori_loop(0, count, column, (covariance, nothing))[1]


_rows = jax.lax.dynamic_slice_in_dim


def _put(array: Array, rows: Array, start: Array, axis: int = 0) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, rows, start, axis)

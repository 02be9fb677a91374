r"""The NTK and its differentials at initialization, which measure feature learning.

Yaida, "Meta-principled family of hyperparameter scaling strategies". A perceptron of
L layers and width n (eq. 2.1, 2.2) in the family s (eq. 3.16 to 3.20), s = 0 the
neural-tangent and s = 1 the maximal-update scaling, with optional biases:

    W^l ~ N(0, C_W / n_{l-1}),  η λ_l = n^s λ_W / n_{l-1}   for l < L,
    W^L ~ N(0, C_W / n^{1+s}),  η λ_L = λ_W / n,
    b^l ~ N(0, C_b),            η λ_l = n^s λ_b             for l < L,
    b^L ~ N(0, C_b / n^s),      η λ_L = λ_b.

With v_j = Λ ∇f_j and all powers of η included, the differentials are derivatives of f
along the v (eq. 2.11 to 2.13, 2.15):

    ηH_ij        = ∇f_i · v_j
    η²dH_ijk     = f_i''[v_j, v_k]
    η³ddH^I_ijkl = f_i'''[v_j, v_k, v_l]
    η³ddH^II_ijkl = f_i''[v_k] · Λ f_j''[v_l]

Nested forward derivatives compute them without tensors of second or third order in the
parameters. Over initializations (eq. 4.3, 4.6, 4.9, 4.10)

    E[z η²dH] / E[ηH]²                  ~ L/n      at any s,
    n^s E[z²] E[η³ddH] / E[ηH]³         ~ γ = L / n^{1-s}.

The power of E[ηH] in the second line is 3. With 2, as in footnote 16 of our copy, the
ratio would depend on the unit of the learning rate. The factor E[z²] is from that
footnote: tanh at criticality has E[z²] ~ 1/L. Labels of order one instead of z would
give another power of L.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mupax.experiments import memory
from mupax.experiments.errors import UserError

from .valley import jackknife

Activation = Callable[[Array], Array]


class Differentials(NamedTuple):
    """The NTK and its differentials at P inputs, of one network or by seed."""

    output: Array  # z, (P,)
    ntk: Array  # ηH, (P, P)
    dntk: Array  # η²dH, (P, P, P)
    ddntk_1: Array  # η³ddH of type I, (P, P, P, P)
    ddntk_2: Array  # η³ddH of type II, (P, P, P, P)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Averages over initializations, for a single input; `error` of each.

    Attributes:
      width: n.
      depth: L.
      s: the metaparameter.
      output_variance: E[z²].
      ntk: E[ηH].
      ntk_variance: Var[ηH] / E[ηH]².
      z_dntk: E[z η²dH] / E[ηH]².
      ddntk_1: n^s E[z²] E[η³ddH^I] / E[ηH]³.
      ddntk_2: n^s E[z²] E[η³ddH^II] / E[ηH]³.
      error: the standard error of each of these by name, over seeds.
    """

    width: int
    depth: int
    s: float
    output_variance: float
    ntk: float
    ntk_variance: float
    z_dntk: float
    ddntk_1: float
    ddntk_2: float
    error: dict[str, float]

    @property
    def gamma(self) -> float:
        """γ = L/n^{1-s} (eq. 1.1): feature learning is proportional to it."""
        return float(self.depth / self.width ** (1 - self.s))


def differentials(
    f: Callable[[Any, Array], Array], params: Any, x: Any
) -> Differentials:
    """NTK, dNTK and ddNTKs of any function in a gauge of unit learning rates.

    Args:
      f: `f(params, x)`, a scalar, three times differentiable.
      params: a pytree of arrays, each in units in which its learning rate is one.
      x: P inputs, along the first axis.

    Source: Yaida, eq. 2.11, 2.12, 2.13 and 2.15.

    Examples:
      >>> result = differentials(lambda p, x: p**2 * x, jnp.array(3.0),
      ...                        jnp.array([1.0]))
      >>> float(result.ntk[0, 0]), float(result.dntk[0, 0, 0])  # (2p)², 2 (2p)²
      (36.0, 72.0)
    """
    flat, rebuild = jax.flatten_util.ravel_pytree(params)

    def value(p: Array, x: Array) -> Array:
        return f(rebuild(p), x)

    def along(g: Callable[[Array], Array], v: Array) -> Callable[[Array], Array]:
        return lambda p: jax.jvp(g, (p,), (v,))[1]

    def second(x: Array, v: Array) -> Array:
        return along(jax.grad(lambda p: value(p, x)), v)(flat)

    def third(x: Array, u: Array, v: Array, w: Array) -> Array:
        return along(along(along(lambda p: value(p, x), u), v), w)(flat)

    v = jax.vmap(jax.grad(value), (None, 0))(flat, x)
    hv = jax.vmap(jax.vmap(second, (None, 0)), (0, None))(x, v)  # (P, P, params)
    count = len(x)
    first, *others = jnp.indices((count,) * 4).reshape(4, -1)  # i; j, k, l
    third_order = jax.vmap(third)(x[first], *(v[at] for at in others))
    return Differentials(
        output=jax.vmap(value, (None, 0))(flat, x),
        ntk=v @ v.T,
        dntk=jnp.einsum("ijp,kp->ijk", hv, v),
        ddntk_1=third_order.reshape((count,) * 4),
        ddntk_2=jnp.einsum("ikp,jlp->ijkl", hv, hv),
    )


def statistics(
    width: int,
    depth: int,
    s: float = 0.0,
    *,
    activation: Activation = jnp.tanh,
    features: int | None = None,
    weight_scale: float = 1.0,
    rate: float = 1.0,
    bias_scale: float = 0.0,
    bias_rate: float = 0.0,
    seeds: int = 64,
) -> Statistics:
    """Measure the averages of eq. 4.3, 4.6 and 4.9 over random networks.

    Args:
      width: n of all hidden layers.
      depth: L, the number of weight layers; at least 2.
      s: the metaparameter, in [0, 1].
      activation: smooth; ReLU has no third derivative (Yaida, footnote 7).
      features: n_0; by default `width`. The input has all entries one.
      weight_scale: C_W; 1 is critical for tanh and linear networks.
      rate: λ_W η_0, of every layer.
      bias_scale: C_b; 0 is critical for tanh and linear networks.
      bias_rate: λ_b η_0, of every layer; 0 for a network without biases.
      seeds: number of networks.

    Raises:
      UserError: depth below 2, width, seeds or a scale that is not positive, biases
        that do not train, s out of [0, 1], or a network that would not fit in memory
        (with its bytes).

    Source: Yaida, eq. 3.16 to 3.20 and section IV.

    Examples:
      >>> result = statistics(16, 2, s=1.0, activation=lambda z: z, seeds=16)
      >>> bool(abs(result.z_dntk - 2 / 16 / 4) < 4 * result.error["z_dntk"])
      True
    """
    if depth < 2 or width < 1 or seeds < 2 or min(weight_scale, rate) <= 0:
        raise UserError(
            f"depth={depth} and seeds={seeds} must be at least 2; width={width}, "
            f"weight_scale={weight_scale:g} and rate={rate:g} positive"
        )
    if min(bias_scale, bias_rate) < 0 or (bias_scale > 0 and bias_rate == 0):
        raise UserError(
            f"bias_scale={bias_scale:g} and bias_rate={bias_rate:g} must not be "
            "negative, and biases must train: give bias_rate too"
        )
    if not 0 <= s <= 1:
        raise UserError(f"s={s:g} must be in [0, 1] (Yaida, section III C)")
    parameters = width * ((features or width) + width * (depth - 2) + depth)
    memory.check(
        16 * parameters * 8,  # the parameters and their derivatives to third order
        f"the derivatives of a network of width {width} and depth {depth}",
        "take a smaller width or depth",
    )
    with jax.enable_x64(True):
        # Seed by seed: memory does not grow with their number.
        sample = _sample(
            jnp.arange(seeds),
            (features or width, width, depth),
            activation,
            jnp.asarray([s, weight_scale, rate, bias_scale, bias_rate], jnp.float64),
            bias_rate > 0,
        )
        z, ntk, dntk, dd_1, dd_2 = (np.asarray(part).reshape(seeds) for part in sample)

    def averages(keep: np.ndarray) -> dict[str, float]:
        h, variance = ntk[keep].mean(), (z[keep] ** 2).mean()
        scale = width**s * variance / h**3
        return {
            "output_variance": variance,
            "ntk": h,
            "ntk_variance": ntk[keep].var() / h**2,
            "z_dntk": (z[keep] * dntk[keep]).mean() / h**2,
            "ddntk_1": scale * dd_1[keep].mean(),
            "ddntk_2": scale * dd_2[keep].mean(),
        }

    # Jackknife: ratios of averages have no plain standard error.
    every = np.arange(seeds)
    left_out = [averages(np.delete(every, i)) for i in every]
    value = {name: float(x) for name, x in averages(every).items()}
    error = {name: jackknife([x[name] for x in left_out]) for name in value}
    return Statistics(width, depth, s, **value, error=error)


@functools.partial(jax.jit, static_argnames=("shape", "activation", "biased"))
def _sample(
    seeds: Array,
    shape: tuple[int, int, int],
    activation: Activation,
    scales: Float[Array, "5"],
    biased: bool,
) -> Differentials:
    features, width, depth = shape
    s, weight_scale, rate, bias_scale, bias_rate = scales
    # In units of √(η λ_l) every learning rate is one, and W^l = unit · parameter.
    first = jnp.sqrt(rate * width**s / features)
    hidden, last = jnp.sqrt(rate * width**s / width), jnp.sqrt(rate / width)
    # √(C_W / n_{l-1}) / unit is n^(-s/2) √(C_W / rate) in every layer.
    std = jnp.sqrt(weight_scale / rate) * width ** (-s / 2)
    # The same holds for biases.
    shift, last_shift = jnp.sqrt(bias_rate * width**s), jnp.sqrt(bias_rate)
    bias_std = jnp.sqrt(bias_scale / bias_rate) * width ** (-s / 2)

    def f(params: Any, x: Array) -> Array:
        (read, blocks, out), biases = params
        bs, b = biases or (jnp.zeros(depth - 1), 0.0)
        z = first * read @ x + shift * bs[0]
        for w, bias in zip(blocks, bs[1:], strict=True):
            z = hidden * w @ activation(z) + shift * bias
        return last * out @ activation(z) + last_shift * b

    def network(seed: Array) -> Differentials:
        keys = jax.random.split(jax.random.key(seed), 5)
        weights = (
            std * jax.random.normal(keys[0], (width, features)),
            std * jax.random.normal(keys[1], (depth - 2, width, width)),
            std * jax.random.normal(keys[2], (width,)),
        )
        biases = (
            bias_std * jax.random.normal(keys[3], (depth - 1, width)),
            bias_std * jax.random.normal(keys[4]),
        )
        params = weights, biases if biased else ()
        return differentials(f, params, jnp.ones((1, features)))

    return jax.lax.map(network, seeds)

r"""The change of preactivations in the first step of a plain ReLU network.

Jelassi et al., "Depth dependence of μP learning rates in ReLU MLPs". A network of
widths n_0, ..., n_L with He initialization and a mean-field readout (eq. 1.1, 1.2)
takes one step of gradient descent on ½(f - y)². To first order in the learning
rate the change of a preactivation is (eq. 2.5)

    Δz_i^ℓ = Σ_k Σ_j K_ij^ℓ (∂z_k^{L+1} / ∂z_j^ℓ) (y_k - z_k^{L+1}),

with K^ℓ_ij = Σ_{μ≤ℓ} η_μ ∂_μ z_i^ℓ ∂_μ z_j^ℓ. Its mean square is A + B (Lemma 2.1):
B is driven by the label, A by the output at initialization, which is smaller by
1/n_L (Lemma 2.2). `mean_squared_change` gives B exactly, for any widths, depth and
learning rates.

The paper's averages B, B~, C, C~ (eq. 2.11, 2.15, 2.16, 2.22) each hold a sum over
two neurons. A ReLU keeps one neuron in two and a pair of different neurons in four,
so the terms with equal and with different neurons need their own coefficients. With
these eight moments of a layer the recursion closes and is exact:

    a1 = E K_11²      b1 = E K_12²      b2 = E K_11 K_22
    a2 = E z_1² K_11  b3 = E z_1² K_22  b4 = E z_1 K_12 z_2
    a3 = E z_1⁴       b5 = E z_1² z_2²

B = (E y²) (a1 + (n_ℓ - 1) b1) / (2 n_ℓ n_L), B~ is of a1 and b2, C of a2 and b3,
C~ of a2 and b4.

Two slips of the paper cancel in its leading term. Eq. 2.1, 2.2 and 2.11 lack a factor
½ (σ'² of the last hidden layer); eq. 2.19 uses ¼ for equal neurons, where ½ is
correct. The first doubles B, the second halves its ℓ³ term. At infinite width, with
E x_i² = 1,

    B = η² (2ℓ³ + ℓ) / 6,    η* = √3 L^-3/2 (1 + O(L^-2)),

while the paper prints η² (ℓ³/3 + ℓ²/2 + ...). Layers whose neurons are all off, of
probability 2^-n, are ignored: σ'(0) is a fair coin, as in the paper.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from ..errors import UserError

Scalar = Float[Array, ""]


class _Moments(NamedTuple):
    """The eight moments of a layer, averaged over its weights."""

    a1: Scalar
    a2: Scalar
    a3: Scalar
    b1: Scalar
    b2: Scalar
    b3: Scalar
    b4: Scalar
    b5: Scalar


class _Traces(NamedTuple):
    """Averages of the inputs of the next layer: s = σ(z), P = σ'(z) K σ'(z)."""

    pp: Scalar  # tr P²
    p_p: Scalar  # (tr P)²
    s_p: Scalar  # |s|² tr P
    sps: Scalar  # sᵀ P s
    s_s: Scalar  # |s|⁴


def mean_squared_change(
    widths: Sequence[int],
    learning_rates: float | Sequence[float] = 1.0,
    *,
    input_scale: float = 1.0,
    label_scale: float = 1.0,
) -> Float[np.ndarray, " depth"]:
    """E[(Δz_i^ℓ)²] of every hidden layer after one small step: B of Lemma 2.1.

    Exact in the linear response, at any width. The contribution of the output at
    initialization (A of Lemma 2.1) is smaller by 1/n_L and is not included: the result
    holds for a network whose output at initialization is subtracted.

    Args:
      widths: n_0 (of the input), n_1, ..., n_L: L hidden layers.
      learning_rates: the learning rates of W^1, ..., W^L, or one for all.
      input_scale: |x|²/n_0.
      label_scale: E|y|², of a label with mean zero, independent of the weights.

    Returns:
      For ℓ = 1, ..., L. Multiply by η² for rates η times larger.

    Raises:
      UserError: fewer than one hidden layer, a width below one, or a number of
        learning rates that is not L.

    Source: Jelassi et al., Lemmas 2.1 to 2.8, with the corrections that this
    module's docstring derives.

    Examples:
      >>> change = mean_squared_change([4, 4, 4], 0.5)
      >>> [round(float(c), 4) for c in change]
      [0.125, 1.0625]
    """
    n = np.asarray(widths, dtype=np.float64)
    if n.ndim != 1 or len(n) < 2 or n.min() < 1:
        raise UserError(
            f"widths={list(widths)} must be the input's and at least one hidden "
            "layer's, each at least 1"
        )
    depth = len(n) - 1
    rates = np.asarray(learning_rates, dtype=np.float64)
    if rates.ndim and rates.shape != (depth,):
        raise UserError(
            f"{rates.size} learning rates for {depth} hidden layers; pass one for "
            "all or one per layer"
        )
    with jax.enable_x64(True):
        change = _response(jnp.asarray(n), jnp.asarray(np.broadcast_to(rates, depth)))
    # |x|⁴/n_0² multiplies every moment.
    return np.asarray(change) * input_scale**2 * label_scale


def maximal_learning_rate(
    width: int,
    depth: int,
    *,
    threshold: float = 1.0,
    layer: int | None = None,
    exact: bool = False,
    networks: int = 64,
    seed: int = 0,
) -> float:
    """η* at which E[(Δz)²] reaches the threshold (eq. 1.4), in the linear response.

    A threshold of 1 is as large as the preactivations themselves, so that the linear
    response is used outside its range: it leaves out that the step changes which
    neurons are on, and all products of weight changes. At width 512 its η* is 1.2
    (depth 4), 2.2 (depth 16) and 5 (depth 64) times below that of the real step,
    which `exact=True` measures on random networks (here 24; docs/theory.md has the
    command). The law L^-3/2 is one of small changes: at a threshold of 10^-4 the two
    agree (`papers/tests/test_theory_relu_mlp.py`).

    Args:
      width: n of the input and of all hidden layers.
      depth: L, the number of hidden layers.
      threshold: the mean square to reach; the paper takes 1.
      layer: ℓ, by default L, where the change is largest.
      exact: take real gradient steps on random networks, instead of the formula. The
        mean over networks has a statistical error, which grows with depth/width.
      networks: how many networks are averaged, if exact.
      seed: seed of those networks.

    Returns:
      η*, for all layers alike. In the linear response it falls as depth^-3/2 (Theorem
      1.1) while the depth is small against the width.

    Raises:
      UserError: width or depth below one, no such layer, or, if exact, a threshold
        that is reached neither at a quarter of the linear η* nor up to 64 times it.

    Examples:
      >>> shallow, deep = (maximal_learning_rate(10**6, L) for L in (64, 256))
      >>> round(deep / shallow, 3)  # 4^-3/2 = 0.125
      0.125
    """
    layer = depth if layer is None else layer
    if depth < 1 or not 1 <= layer <= depth:
        raise UserError(
            f"depth={depth}, layer={layer} must be at least 1, with layer <= depth"
        )
    change = mean_squared_change([width] * (depth + 1))[layer - 1]
    linear = float(np.sqrt(threshold / change))
    if not exact:
        return linear
    rates = linear * 2.0 ** np.linspace(-2, 6, 49)
    changes = exact_mean_squared_change(
        width, depth, rates, layer=layer, networks=networks, seed=seed
    )
    above = np.flatnonzero(changes >= threshold)
    if not above.size or above[0] == 0:
        raise UserError(
            f"threshold={threshold:g} is not crossed between {rates[0]:.3g} and "
            f"{rates[-1]:.3g}, around the linear response's η* = {linear:.3g}; average "
            f"more than networks={networks}, or choose another threshold"
        )
    pair = slice(above[0] - 1, above[0] + 1)
    logs = np.log(changes[pair]), np.log(rates[pair])
    return float(np.exp(np.interp(np.log(threshold), *logs)))


def exact_mean_squared_change(
    width: int,
    depth: int,
    learning_rates: Sequence[float] | np.ndarray,
    *,
    layer: int | None = None,
    networks: int = 64,
    seed: int = 0,
) -> Float[np.ndarray, " rates"]:
    """E[(Δz^ℓ)²] after one real step of gradient descent, measured on networks.

    The setting is that of `mean_squared_change`: |x|²/n = 1, a label of ±1, and the
    output at initialization subtracted. For small rates it is η² times that.

    Args:
      width: n of the input and of all hidden layers.
      depth: L, the number of hidden layers.
      learning_rates: each is used for all layers, in one step from the same networks.
      layer: ℓ, by default L.
      networks: how many are averaged, one after another.
      seed: seed of the networks.

    Source: Jelassi et al., eqs. 1.1 to 1.4.

    Examples:
      >>> small = exact_mean_squared_change(64, 2, [1e-3], networks=4)
      >>> bool(0.3 < small[0] / (1e-6 * mean_squared_change([64] * 3)[-1]) < 3)
      True
    """
    keys = jax.random.split(jax.random.key(seed), networks)
    rates = jnp.asarray(learning_rates, jnp.float32)
    changes = _exact(keys, rates, width, depth, layer or depth)
    return np.asarray(changes, np.float64).mean(0)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _exact(
    keys: jax.Array, rates: Float[Array, " rates"], n: int, depth: int, layer: int
) -> Float[Array, "networks rates"]:
    def network(key: jax.Array) -> Float[Array, " rates"]:
        first, middle, last = jax.random.split(key, 3)
        x = jax.random.normal(first, (n,))
        x *= n**0.5 / jnp.linalg.norm(x)
        weights = jax.random.normal(middle, (depth, n, n)) * (2 / n) ** 0.5
        readout = jax.random.normal(last, (n,)) / n

        def forward(s: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
            z = w @ s
            return jax.nn.relu(z), (s, z)

        _, (signals, z) = jax.lax.scan(forward, x, weights)

        def backward(g: Array, layer: tuple[Array, Array]) -> tuple[Array, Array]:
            w, z = layer
            g = jnp.where(z > 0, g, 0)
            return w.T @ g, g

        _, gradients = jax.lax.scan(backward, readout, (weights, z), reverse=True)

        def again(s: Array, layer: tuple[Array, ...]) -> tuple[Array, Array]:
            # The step adds η y g sᵀ to each weight: a matrix of rank one.
            w, before, g = layer
            new = s @ w.T + jnp.outer(rates * (s @ before), g)
            return jax.nn.relu(new), new

        start = jnp.broadcast_to(x, (len(rates), n))
        upto = (weights[:layer], signals[:layer], gradients[:layer])
        after = jax.lax.scan(again, start, upto)[1][-1]
        return jnp.mean((after - z[layer - 1][None]) ** 2, axis=-1)

    return jax.lax.map(network, keys)


def fit_power_law(sizes: ArrayLike, values: ArrayLike) -> float:
    """The exponent of values that are proportional to a power of the size.

    Examples:
      >>> fit_power_law([1, 4, 16], [1.0, 0.125, 0.015625])
      -1.5
    """
    return round(float(np.polyfit(np.log(sizes), np.log(values), 1)[0]), 12)


@jax.jit
def _response(
    n: Float[Array, " layers"], rates: Float[Array, " depth"]
) -> Float[Array, " depth"]:
    # Layer 1 sees the input, |x|² = n_0, and no K below it.
    nothing = jnp.zeros_like(n[0])
    first = _through_weights(
        _Traces(nothing, nothing, nothing, nothing, n[0] ** 2), 2 / n[0], rates[0]
    )

    def layer(m: _Moments, below_and_rate: tuple[Scalar, Scalar]):
        below, rate = below_and_rate
        m = _through_weights(_through_relu(m, below), 2 / below, rate)
        return m, m

    _, rest = jax.lax.scan(layer, first, (n[1:-1], rates[1:]))
    every = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)
    # E[∂z/∂z_j ∂z/∂z_j'] over the layers above: δ_jj' σ'(z_j)² / (n_ℓ n_L),
    # the exact form of eq. 2.12; σ'² is ½ on average.
    width = n[1:]
    return (every.a1 + (width - 1) * every.b1) / (2 * width * n[-1])


def _through_relu(m: _Moments, n: Scalar) -> _Traces:
    """Signs of the rows of W are symmetric: σ' is a fair coin for each neuron."""

    def total(equal: Scalar, different: Scalar) -> Scalar:
        return n * equal / 2 + n * (n - 1) * different / 4

    return _Traces(
        pp=total(m.a1, m.b1),
        p_p=total(m.a1, m.b2),
        s_p=total(m.a2, m.b3),
        sps=total(m.a2, m.b4),
        s_s=total(m.a3, m.b5),
    )


def _through_weights(t: _Traces, c: Scalar, rate: Scalar) -> _Moments:
    """Wick's theorem for z = W s, K = η|s|² + W P Wᵀ, W of variance c."""
    own = rate**2 * t.s_s + 2 * rate * c * t.s_p  # η²|s|⁴, eq. 2.17, and eq. 2.18
    return _Moments(
        a1=own + c**2 * (t.p_p + 2 * t.pp),
        a2=c * rate * t.s_s + c**2 * (t.s_p + 2 * t.sps),
        a3=3 * c**2 * t.s_s,
        b1=c**2 * t.pp,
        b2=own + c**2 * t.p_p,
        b3=c * rate * t.s_s + c**2 * t.s_p,
        b4=c**2 * t.sps,
        b5=c**2 * t.s_s,
    )

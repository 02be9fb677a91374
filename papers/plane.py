r"""Measure the stability of (α, γ): Figure 1 of Tensor Programs VI.

Section 6.3: a residual network with mean subtraction,

    x^0 = U ξ,   x^l = x^{l-1} + L^-α MS(φ(h^l)),   h^l = W^l x^{l-1},   f = Vᵀ x^L,

trained by (eq. 4) W ← W - η n^-1 L^-γ Q(n L^α g), with Q the identity (SGD) or the
sign. U and V are not trained; otherwise no point would be trivial. Section 7 defines
properties by the growth of sizes with depth:

  - stable at initialization (Def. 7.2, Claim 7.1): x^L = O(1), iff α >= ½;
  - stable in training (Def. 7.2, Claim 7.2): Δx, Δf = O(1), iff α + γ >= 1;
  - nontrivial (Def. 7.4): Δf does not vanish, iff α + γ <= 1;
  - faithful (Def. 7.3, Claim 7.3): h = Θ(1) before and in training, iff ½ <= α <= 1;
  - feature learning (Def. 7.5): Δh = Θ(1);
  - feature diversity (Def. 7.6): |x^{(λ+ε)L} - x^{λL}| ~ ε^{1-κ}, with κ = ½ at α = ½
    and 0 for larger α (Claims 7.4, 7.5);
  - layerwise linearization (Def. 7.7, Claim 7.6): the part of a block's change that
    is not linear in ΔW is o(1/L), iff ½ <= α < 1.

Definition 7.2 also requires Δh = O(1). The step of a layer changes its h by L^-γ, so
that this fails on the line α + γ = 1 for α > 1, where Claim 7.2 still says stable.
Claim 7.3 and the verdicts here count it as faithfulness.

Exponents are slopes of log rms against log L. Changes are those of one step at a small
η, where they are linear in η. Diversity and linearization are measured after a few
steps at a larger rate.

At finite depth |x^{(λ+ε)L} - x^{λL}|² has a part from the random weights, A ε with
A ~ L^{1-2α}, and a learned part, B ε². The limit of infinite depth is taken before that
of small ε: κ is ½ if A does not vanish as L grows, and 0 if only B remains.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import stats

from mupax.experiments import memory
from mupax.experiments.errors import UserError
from mupax.experiments.theory.plane import Verdicts

Activation = Callable[[Array], Array]

_FEATURES, _BATCH = 8, 4


@dataclasses.dataclass(frozen=True)
class Point:
    """The measurements at a point of the plane.

    Attributes:
      alpha: exponent of the branch multiplier L^-α.
      gamma: exponent of the learning rate L^-γ.
      family: "sgd" or "sign".
      depths: the L that were trained.
      exponents: slopes against log L of "x" and "h" at initialization, of their changes
        "dx", "dh" and "df" by one step, and of "residual", L times the part of a
        block's change that is not linear in ΔW.
      errors: standard errors of the exponents over seeds.
      diversities: κ of each network, shape (depths, seeds): 1 minus the slope of
        log |x^{(λ+ε)L} - x^{λL}| against log ε.
      noise: the exponent of A in L; 1 - 2α is expected.
      tolerance: largest slope of a bounded quantity.
    """

    alpha: float
    gamma: float
    family: str
    depths: tuple[int, ...]
    exponents: dict[str, float]
    errors: dict[str, float]
    diversities: Float[np.ndarray, "depths seeds"]
    noise: float
    tolerance: float

    @property
    def diversity(self) -> tuple[float, ...]:
        """κ at each depth, the mean over seeds."""
        return tuple(map(float, self.diversities.mean(axis=1)))

    @property
    def verdicts(self) -> Verdicts:
        """The measured properties of section 7; see `theory.plane.predicted`."""
        return self._properties(0.0)

    @property
    def decided(self) -> dict[str, bool | None]:
        """The same; None where the slopes' one-sided 95 % bounds leave it open."""
        seeds = self.diversities.shape[1]
        wide = float(stats.t.ppf(0.95, seeds - 1)) if seeds > 1 else np.inf
        surely, possibly = self._properties(wide), self._properties(-wide)
        return {k: v if v == possibly[k] else None for k, v in surely.items()}

    def _properties(self, wide: float) -> Verdicts:
        """The properties if each slope is `wide` errors less favourable to them."""
        slope, tolerance = self.exponents, self.tolerance
        away = {name: wide * error for name, error in self.errors.items()}
        bounded = {name: slope[name] + away[name] <= tolerance for name in slope}
        kept = {name: slope[name] - away[name] >= -tolerance for name in slope}
        stable_at_init = bounded["x"] and bounded["h"]
        return {
            "stable at initialization": stable_at_init,
            "stable in training": bounded["dx"] and bounded["df"],
            "nontrivial": kept["df"],
            "faithful": stable_at_init and kept["h"] and bounded["dh"],
            "feature learning": kept["dh"],
            "diverse": self.kappa > 0.25,
            "linearizes": slope["residual"] + away["residual"] < -tolerance,
        }

    @property
    def kappa(self) -> float:
        """κ of Definition 7.6 at infinite depth: ½ if the random part remains, else 0.

        NaN if training diverged.
        """
        if not np.isfinite(self.noise):
            return float("nan")
        return 0.5 if self.noise >= -self.tolerance else 0.0


def measure(
    alpha: float,
    gamma: float,
    *,
    family: str = "sgd",
    activation: Activation = jax.nn.gelu,
    depths: Sequence[int] = (16, 64, 256),
    width: int = 64,
    seeds: int = 8,
    steps: int = 3,
    rate: float = 0.5,
    small_rate: float = 1e-4,
    tolerance: float = 0.15,
) -> Point:
    """Train networks of several depths, and fit the growth of sizes with depth.

    Args:
      alpha: α.
      gamma: γ.
      family: "sgd", or "sign" (Adam without memory).
      activation: φ. If it is smooth, the residual of Def. 7.7 falls as L^-γ on the line
        α + γ = 1; with the kink of a ReLU it falls as L^(-γ/2).
      depths: L of the networks, powers of two of at least 16.
      width: n.
      seeds: number of networks per depth.
      steps: number of steps before diversity and linearization are measured.
      rate: η of those steps.
      small_rate: η of the step whose changes are measured.
      tolerance: largest slope of a bounded quantity.

    Raises:
      UserError: an unknown family, fewer than two depths, a depth that is not a power
        of two, or networks that do not fit into memory.

    Source: Tensor Programs VI, Definitions 6.2 and 7.2 to 7.7.

    Examples:
      >>> point = measure(0.5, 0.5, depths=(16, 64), width=16, seeds=4)
      >>> point.verdicts["stable at initialization"]
      True
    """
    if family not in ("sgd", "sign"):
        raise UserError(f"family {family!r} must be 'sgd' or 'sign'")
    sizes = tuple(depths)
    if len(set(sizes)) < 2 or any(d < 16 or d & (d - 1) for d in sizes):
        raise UserError(
            f"depths={sizes} must be at least two different powers of two, from 16"
        )
    memory.check(
        4 * max(sizes) * width**2 * 8,
        f"a network of depth {max(sizes)} and width {width}, its gradient and updates",
        "take a smaller depth or width",
    )
    samples = []
    with jax.enable_x64(True):
        constants = jnp.asarray([alpha, gamma, rate, small_rate], jnp.float64)
        for depth in sizes:
            sample = _sample(
                jnp.arange(seeds), constants, depth, width, steps, family, activation
            )
            samples.append(jax.device_get(sample))
    size = np.log(np.asarray(sizes, float))
    size -= size.mean()
    weights = size / (size**2).sum()
    exponents, errors = {}, {}
    squares = [np.mean(np.square(s["distance"]), axis=0) for s in samples]
    random = [_random_part(d, s) for d, s in zip(sizes, squares, strict=True)]
    with np.errstate(divide="ignore", invalid="ignore"):
        for name in ("x", "h", "dx", "dh", "df", "residual"):
            slopes = weights @ np.log([sample[name] for sample in samples])
            exponents[name] = float(slopes.mean())
            errors[name] = float(slopes.std(ddof=1) / np.sqrt(seeds))
        noise = float(weights @ np.log(random))
        diversities = np.stack([_diversity(sample["distance"]) for sample in samples])
    return Point(
        alpha, gamma, family, sizes, exponents, errors, diversities, noise, tolerance
    )


@functools.partial(
    jax.jit, static_argnames=("depth", "width", "steps", "family", "activation")
)
def _sample(
    seeds: Array,
    constants: Float[Array, "4"],
    depth: int,
    width: int,
    steps: int,
    family: str,
    activation: Activation,
) -> dict[str, Array]:
    alpha, gamma, rate, small_rate = constants
    branch = depth**-alpha

    def centre(x: Array) -> Array:
        return x - x.mean(axis=-1, keepdims=True)

    def features(blocks: Array, start: Array) -> tuple[Array, Array]:
        """x^0, ..., x^L, and h^L."""

        def block(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
            h = x @ w.T
            x = x + branch * centre(activation(h))
            return x, (x, h)

        _, (x, h) = jax.lax.scan(block, start, blocks)
        return jnp.concatenate([start[None], x]), h[-1]

    def network(seed: Array) -> dict[str, Array]:
        keys = jax.random.split(jax.random.key(seed), 5)
        inputs = jax.random.normal(keys[0], (_BATCH, _FEATURES))
        read = jax.random.normal(keys[1], (_FEATURES, width)) / np.sqrt(_FEATURES)
        out = jax.random.normal(keys[2], (width,)) / width
        y = jax.random.normal(keys[3], (_BATCH,))
        blocks = jax.random.normal(keys[4], (depth, width, width)) / np.sqrt(width)
        start = inputs @ read

        def loss(blocks: Array) -> Array:
            return jnp.mean((features(blocks, start)[0][-1] @ out - y) ** 2) / 2

        def update(blocks: Array, eta: Array) -> Array:
            g = width * depth**alpha * jax.grad(loss)(blocks)
            q = jnp.sign(g) if family == "sign" else g
            return blocks - eta * depth**-gamma / width * q

        def residual(new: Array, x: Array) -> Array:
            """Def. 7.7 at the x of the trained network, rms over blocks."""

            def one(w: Array, moved: Array, x: Array) -> Array:
                h, change = x @ w.T, x @ (moved - w).T
                value, linear = jax.jvp(activation, (h,), (change,))
                left = activation(h + change) - value - linear
                return _rms(branch * centre(left))

            return _rms(jax.lax.map(lambda layer: one(*layer), (blocks, new, x[:-1])))

        x, h = features(blocks, start)
        x_1, h_1 = features(update(blocks, small_rate), start)
        trained = jax.lax.fori_loop(0, steps, lambda _, b: update(b, rate), blocks)
        x_t, _ = features(trained, start)
        gaps = [2**k for k in range(int(np.log2(depth)) - 1)]  # ε up to a quarter
        return {
            "x": _rms(x[-1]),
            "h": _rms(h),
            "dx": _rms(x_1[-1] - x[-1]) / small_rate,
            "dh": _rms(h_1 - h) / small_rate,
            "df": _rms((x_1[-1] - x[-1]) @ out) / small_rate,
            "residual": depth * residual(trained, x_t),
            "distance": jnp.stack([_rms(x_t[k:] - x_t[:-k]) for k in gaps]),
        }

    return jax.lax.map(network, seeds)


def _rms(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _diversity(distance: np.ndarray) -> np.ndarray:
    """κ of each network, from its distances at ε L = 1, 2, 4, ...; NaN if it diverged.

    `distance` has shape (seeds, gaps).
    """
    gap = np.arange(distance.shape[1]) * np.log(2)
    gap -= gap.mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        return 1 - np.log(distance) @ gap / (gap @ gap)


def _random_part(depth: int, squares: np.ndarray) -> float:
    """A of |x^{(λ+ε)L} - x^{λL}|² = A ε + B ε², fitted in relative error."""
    if not np.isfinite(squares).all():
        return np.nan
    gap = 2.0 ** np.arange(len(squares)) / depth
    basis = np.stack([gap, gap**2], axis=1) / squares[:, None]
    return float(np.linalg.lstsq(basis, np.ones(len(squares)), rcond=None)[0][0])

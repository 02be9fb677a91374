r"""Errors of finite width and depth after training, and the effect of ensembles.

Bordelon et al., Figures 5 and B.7 and appendices H, I: after a fixed number of steps
the output of a network of width N and depth L differs from its joint limit by

    f_{N,L} = f_∞ + b/L + c/N + noise,    Var[noise] ~ 1/N at any L.

Averaging over initializations removes the noise and leaves the bias. The networks are
those of eq. 1, with W ~ N(0, 1) in every layer:

    h^0 = D^-½ W^0 x,   h^{l+1} = h^l + (L N)^-½ W^l φ(h^l),   f = w·φ(h^L)/(μ0 N),

trained by gradient descent at the rate η0 μ0² N on all of W^0, ..., w.

The noise of the width would be larger than the bias of the depth. Networks of different
depths therefore share their weights, as discretizations of one Brownian motion: a layer
at depth L is the sum of two layers at depth 2L over √2. Only the difference of their
outputs is averaged.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mupax.experiments import memory
from mupax.experiments.errors import UserError
from mupax.experiments.theory.relu_mlp import fit_power_law

Activation = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class Errors:
    """Outputs of finite networks after training, by width and depth.

    Attributes:
      widths: N.
      depths: L, each twice the one before.
      outputs: f at the points, of shape (widths, depths, seeds, P).
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    outputs: Float[np.ndarray, "widths depths seeds P"]

    @property
    def variance(self) -> Float[np.ndarray, "widths depths"]:
        """Variance over initializations, averaged over points."""
        return self.outputs.var(axis=2, ddof=1).mean(axis=-1)

    @property
    def depth_gaps(self) -> Float[np.ndarray, "widths gaps"]:
        """Root mean square over points of E[f_L - f_2L], for all L but the last."""
        gaps = self.outputs[:, :-1] - self.outputs[:, 1:]
        # Subtract the variance of the mean.
        mean = gaps.mean(axis=2)
        noise = gaps.var(axis=2, ddof=1) / gaps.shape[2]
        return np.sqrt(np.maximum((mean**2 - noise).mean(axis=-1), 0))

    def width_law(self) -> float:
        """Exponent of the variance in the width, at the largest depth; -1 expected."""
        return fit_power_law(self.widths, self.variance[:, -1])

    def depth_law(self) -> float:
        """Exponent of the gaps in the depth, at the largest width; -1 expected."""
        return fit_power_law(self.depths[:-1], self.depth_gaps[-1])

    def ensembled(self, size: int) -> Float[np.ndarray, "widths depths"]:
        """The variance of averages of `size` networks each.

        Raises:
          UserError: fewer than two such ensembles were trained.
        """
        count = self.outputs.shape[2] // size
        if size < 1 or count < 2:
            raise UserError(
                f"ensembles of {size} need {2 * size} seeds; there are "
                f"{self.outputs.shape[2]}"
            )
        shape = (*self.outputs.shape[:2], count, size, -1)
        means = self.outputs[:, :, : count * size].reshape(shape).mean(axis=3)
        return means.var(axis=2, ddof=1).mean(axis=-1)


def train(
    x: Any,
    y: Any,
    *,
    widths: Sequence[int] = (64, 128, 256),
    depths: Sequence[int] = (4, 8, 16),
    activation: Activation = jnp.tanh,
    steps: int = 5,
    learning_rate: float = 0.5,
    richness: float = 1.0,
    seeds: int = 16,
) -> Errors:
    """Train finite networks of every width and depth on the mean of ½(f - y)².

    Args:
      x: points, (P, D).
      y: labels, (P,).
      widths: N.
      depths: L, each twice the one before.
      activation: φ.
      steps: number of steps of full-batch gradient descent.
      learning_rate: η0.
      richness: μ0.
      seeds: networks of each width and depth.

    Raises:
      UserError: depths that do not double, or networks that do not fit into memory.

    Source: Bordelon et al., eq. 1 and Table 1; Figures 5 and B.7.

    Examples:
      >>> x, y = np.eye(2), np.array([1.0, -1.0])
      >>> errors = train(x, y, widths=(16, 64), depths=(2, 4), seeds=8)
      >>> errors.outputs.shape
      (2, 2, 8, 2)
    """
    if any(b != 2 * a for a, b in itertools.pairwise(depths)):
        raise UserError(f"depths={tuple(depths)}: each must be twice the one before")
    if not depths or not widths or min(*depths, *widths, steps, seeds - 1) < 1:
        raise UserError("widths, depths and steps must be at least 1, seeds at least 2")
    widest, deepest = max(widths), depths[-1]
    memory.check(
        5 * deepest * widest**2 * 8,
        f"a network of width {widest} and depth {deepest}, its gradient and updates",
        "take a smaller width or depth",
    )
    with jax.enable_x64(True):
        points, labels = jnp.asarray(x, jnp.float64), jnp.asarray(y, jnp.float64)
        constants = jnp.asarray([learning_rate, richness], jnp.float64)
        run = functools.partial(
            _train, depths=tuple(depths), activation=activation, steps=steps
        )
        seed = jnp.arange(seeds)
        by_width = [run(seed, points, labels, constants, width=n) for n in widths]
        outputs = np.stack([np.asarray(f).swapaxes(0, 1) for f in by_width])
    if not np.isfinite(outputs).all():
        raise UserError("training diverges; take a smaller learning rate")
    return Errors(tuple(widths), tuple(depths), outputs)


@functools.partial(jax.jit, static_argnames=("width", "depths", "activation", "steps"))
def _train(
    seeds: Array,
    x: Float[Array, "P D"],
    y: Float[Array, " P"],
    constants: Float[Array, "2"],
    width: int,
    depths: tuple[int, ...],
    activation: Activation,
    steps: int,
) -> Float[Array, "seeds depths P"]:
    learning_rate, richness = constants
    features = x.shape[1]

    def outputs(params: Any) -> Array:
        first, blocks, last = params
        scale = 1 / jnp.sqrt(blocks.shape[0] * width)

        def block(h: Array, w: Array) -> tuple[Array, None]:
            return h + scale * activation(h) @ w.T, None

        h, _ = jax.lax.scan(block, x @ first.T / np.sqrt(features), blocks)
        return activation(h) @ last / (richness * width)

    def loss(params: Any) -> Array:
        return jnp.mean((outputs(params) - y) ** 2) / 2

    def step(params: Any, _: None) -> tuple[Any, None]:
        rate = learning_rate * richness**2 * width
        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), None

    def network(seed: Array) -> Array:
        keys = jax.random.split(jax.random.key(seed), 3)
        first = jax.random.normal(keys[0], (width, features))
        last = jax.random.normal(keys[2], (width,))
        blocks = jax.random.normal(keys[1], (depths[-1], width, width))
        trained: list[Array] = []
        for _ in depths:
            params, _ = jax.lax.scan(step, (first, blocks, last), length=steps)
            trained.insert(0, outputs(params))
            if blocks.shape[0] > depths[0]:
                pairs = blocks.reshape(-1, 2, width, width)
                blocks = pairs.sum(axis=1) / np.sqrt(2)
        return jnp.stack(trained)

    return jax.lax.map(network, seeds)

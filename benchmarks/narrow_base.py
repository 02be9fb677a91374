"""Measure learning-rate transfer from very narrow bases: a ConvNet with BatchNorm.

    python -m benchmarks.narrow_base [--widths 8 16 32 64] [--seeds 2] [--steps 60]

Sweeps the learning rate of a small Linen ConvNet on scikit-learn's digits at each
width, under SGD with momentum, in several variants. Prints the optimal log2 learning
rate (the minimum of a parabola through the best three grid points), the loss there, and
by how much the optimum moves from the first to the last width. Under μP the first width
is the base. Results: `docs/tune.md`.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

from mupax import optim


class ConvNet(nn.Module):
    """Three convolutions and a linear readout of the mean over positions."""

    width: int
    norm: bool = True
    readout: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in range(3):
            x = nn.Conv(self.width, (3, 3), use_bias=not self.norm)(x)
            if self.norm:
                x = nn.BatchNorm(use_running_average=False)(x)
            x = nn.relu(x)
            if layer == 0:
                x = nn.avg_pool(x, (2, 2), (2, 2))
        return self.readout * nn.Dense(10)(x.mean((1, 2)))


@dataclasses.dataclass(frozen=True)
class Variant:
    """What differs from the ConvNet under μP with the first width as base."""

    name: str
    parametrization: str = "mup"
    norm: bool = True
    readout: float = 1.0


VARIANTS = (
    Variant("mup"),
    Variant("mup, readout x 4", readout=4.0),
    Variant("mup, readout x 16", readout=16.0),
    Variant("sp", "sp"),
    Variant("mup, no BatchNorm", norm=False),
)


def losses(
    variant: Variant, width: int, base: int, rates: jax.Array, seeds: int, steps: int
) -> np.ndarray:
    """Mean log loss of the last quarter of the steps, for each learning rate."""
    digits = load_digits()
    images = jnp.asarray(digits.images[..., None] / 16, jnp.float32)
    labels = jnp.asarray(digits.target)

    def build(width: int, key: jax.Array) -> jax.Array:
        net = ConvNet(width, variant.norm, variant.readout)
        return net.init(key, images[:1])["params"]

    def forward(params: dict, x: jax.Array) -> jax.Array:
        width = len(params["Dense_0"]["kernel"])
        net = ConvNet(width, variant.norm, variant.readout)
        return net.apply({"params": params}, x, mutable="batch_stats")[0]

    key = jax.random.key(0)
    scales = optim.infer_scales(
        lambda: build(base, key),
        lambda: build(width, key),
        inputs=(images[:1],),
        call=forward,
        delta=lambda: build(2 * base, key),
        parametrization=variant.parametrization,
    )

    def loss(params: dict, rows: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            forward(params, images[rows]), labels[rows]
        ).mean()

    def optimizer(rate: jax.Array) -> optax.GradientTransformation:
        return optim.sgd(rate, scales, momentum=0.9)

    @jax.jit
    def start(key: jax.Array) -> tuple:
        params = optim.rescale_init(build(width, key), scales)
        return params, optimizer(jnp.ones(())).init(params)

    # Not a scan: on CPUs, convolutions inside of loops are slow.
    @jax.jit
    def step(carry: tuple, rate: jax.Array, key: jax.Array) -> tuple:
        params, state = carry
        rows = jax.random.randint(key, (64,), 0, len(labels))
        value, grads = jax.value_and_grad(loss)(params, rows)
        updates, state = optimizer(rate).update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    def train(rate: jax.Array, key: jax.Array) -> float:
        carry, values = start(key), []
        for number in range(steps):
            carry, value = step(carry, rate, jax.random.key(number))
            values.append(float(value))
        return float(np.log(values[-(steps // 4) :]).mean())

    trained = [
        [train(rate, jax.random.key(100 + seed)) for seed in range(seeds)]
        for rate in rates
    ]
    return np.nan_to_num(np.asarray(trained), nan=np.inf)


def optimum(exponents: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """The exponent at which the mean over seeds is minimal, and the loss there."""
    mean = values.mean(-1)
    best = int(np.argmin(mean))
    if not 0 < best < len(mean) - 1 or not np.isfinite(mean[best + 1]):
        return float(exponents[best]), float(np.exp(mean[best]))
    near = slice(best - 1, best + 2)
    a, b, c = np.polyfit(exponents[near], mean[near], 2)
    return float(-b / (2 * a)), float(np.exp(c - b * b / (4 * a)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="+", default=[v.name for v in VARIANTS])
    arguments = parser.parse_args()
    exponents = np.arange(-7.0, 2.0)
    head = " | ".join(f"width {width}" for width in arguments.widths)
    print(f"| variant | {head} | moves by |\n|---|{'---|' * len(arguments.widths)}---|")
    for variant in VARIANTS:
        if variant.name not in arguments.only:
            continue
        optima = [
            optimum(
                exponents,
                losses(
                    variant,
                    width,
                    arguments.widths[0],
                    2.0 ** jnp.asarray(exponents),
                    arguments.seeds,
                    arguments.steps,
                ),
            )
            for width in arguments.widths
        ]
        cells = " | ".join(f"2^{rate:.1f} ({loss:.3f})" for rate, loss in optima)
        moved = optima[-1][0] - optima[0][0]
        print(f"| {variant.name} | {cells} | {moved:+.1f} octaves |", flush=True)


if __name__ == "__main__":
    main()

"""Compare two ways to compute a convolution of few channels on a CPU.

    python -m benchmarks.narrow_conv [--pairs 15] [--batch 64]

The gradient of eight residual convolutions of 3x3 pixels in a scan, by products of
matrices (`Narrow`, as `convolve` does it on CPUs) and by XLA's convolution (`Direct`).
Prints the median ratio of processor times, of pairs in alternating order.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mupax.zoo.layers.bilinear import formed
from mupax.zoo.layers.convolve import Direct, Narrow

LAYERS, STEPS = 8, 10


def gradients(
    convolve: Callable[[jax.Array, jax.Array], jax.Array],
    kernels: jax.Array,
    x: jax.Array,
) -> jax.Array:
    """A few steps of gradient descent on the kernels, so that one call takes long."""

    def loss(kernels: jax.Array) -> jax.Array:
        def block(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return x + 0.1 * convolve(jax.nn.relu(x), kernel), None

        return (jax.lax.scan(block, x, kernels)[0] ** 2).mean()

    def step(kernels: jax.Array, _: None) -> tuple[jax.Array, None]:
        return kernels - 1e-3 * jax.grad(loss)(kernels), None

    return jax.lax.scan(step, kernels, length=STEPS)[0]


def _way(form: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda x, k: formed(form.of(x, k, 1, ((1, 1), (1, 1))), x, k)


def ratio(channels: int, pixels: int, batch: int, pairs: int) -> float:
    """Median ratio of processor times, products of matrices over convolutions."""
    keys = jax.random.split(jax.random.key(0))
    kernels = jax.random.normal(keys[0], (LAYERS, 3, 3, channels, channels)) / 10
    x = jax.random.normal(keys[1], (batch, pixels, pixels, channels))
    ways = [
        jax.jit(lambda k, x, way=way: gradients(way, k, x))
        for way in map(_way, (Narrow, Direct))
    ]
    results = [way(kernels, x) for way in ways]
    assert jnp.allclose(*results, atol=1e-5)
    ratios = []
    for pair in range(pairs):
        seconds = {}
        for i in (0, 1) if pair % 2 else (1, 0):
            begun = time.process_time()
            jax.block_until_ready(ways[i](kernels, x))
            seconds[i] = time.process_time() - begun
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    for channels in (2, 4, 8, 16):
        for pixels in (8, 16, 32):
            found = round(ratio(channels, pixels, given.batch, given.pairs), 3)
            row = {"channels": channels, "pixels": pixels, "ratio": found}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

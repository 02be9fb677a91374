"""Compare `mupax.sweep` of plain NNX models with the user's own training loop.

    python -m benchmarks.own_sweep [--only convnet|mlp|gpt] [--pairs 3]

The loop trains the same runs one after another: a jitted step, whose learning rate is
an argument, is called from Python. Both include compilation. The processor time of
further steps is printed too. Results: docs/performance.md.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mupax

BATCH, RATES, SEEDS = 64, (0.01, 0.03), 1


class ConvNet(nnx.Module):
    """Convolutions of 3x3 pixels, then a mean over pixels."""

    def __init__(self, width: int, depth: int, rngs: nnx.Rngs):
        sizes = [3, *[width] * depth]
        self.layers = nnx.List(
            nnx.Conv(m, n, (3, 3), rngs=rngs) for m, n in itertools.pairwise(sizes)
        )
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x.mean((1, 2)))


class MLP(nnx.Module):
    """Linear layers."""

    def __init__(self, width: int, depth: int, rngs: nnx.Rngs):
        sizes = [16 * 16 * 3, *[width] * depth]
        self.layers = nnx.List(
            nnx.Linear(m, n, rngs=rngs) for m, n in itertools.pairwise(sizes)
        )
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(len(x), -1)
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)


class Block(nnx.Module):
    """A transformer block."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norms = nnx.List(nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            4, width, decode=False, rngs=rngs, deterministic=True
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    """A small language model of 64 characters."""

    def __init__(self, width: int, depth: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(64, width, rngs=rngs)
        self.blocks = nnx.List(Block(width, rngs) for _ in range(depth))
        self.head = nnx.Linear(width, 64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODELS = {
    "convnet": (ConvNet, 32, 3),
    "mlp": (MLP, 256, 4),
    "gpt": (GPT, 64, 2),
}


def examples(name: str) -> dict[str, np.ndarray]:
    """Random images with labels, or random text."""
    random = np.random.default_rng(0)
    if name == "gpt":
        text = random.integers(0, 64, (512, 65)).astype(np.int32)
        return {"x": text[:, :-1], "y": text[:, 1:]}
    images = random.normal(size=(512, 16, 16, 3)).astype(np.float32)
    return {"x": images, "y": random.integers(0, 10, 512).astype(np.int32)}


def loss(model: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy."""
    logits, labels = model(batch["x"]), batch["y"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def ours(name: str, steps: int) -> None:
    """Train all runs by `mupax.sweep`."""
    make, width, depth = MODELS[name]
    mupax.sweep(
        lambda key, width, depth: make(width, depth, nnx.Rngs(key)),
        lambda model, learning_rate, **sizes: optax.adam(learning_rate),
        loss,
        examples(name),
        grid={"learning_rate": RATES},
        sizes=[(width, depth)],
        seeds=SEEDS,
        steps=steps,
        batch_size=BATCH,
        progress=False,
    )


def loop(name: str, steps: int) -> None:
    """Train all runs one after another."""
    make, width, depth = MODELS[name]
    data = jax.tree.map(jnp.asarray, examples(name))

    @jax.jit
    def init(key: jax.Array) -> Any:
        params = nnx.state(make(width, depth, nnx.Rngs(key)), nnx.Param)
        return params, optax.adam(0.0).init(params)

    graph = nnx.split(make(width, depth, nnx.Rngs(0)), nnx.Param, ...)[0]
    rest = nnx.split(make(width, depth, nnx.Rngs(0)), nnx.Param, ...)[2]

    @jax.jit
    def step(state: Any, rate: Any, order: jax.Array) -> Any:
        params, optimizer = state
        batch = jax.tree.map(lambda x: x[order], data)
        of = lambda params: loss(nnx.merge(graph, params, rest), batch)  # noqa: E731
        value, grads = jax.value_and_grad(of)(params)
        updates, optimizer = optax.adam(rate).update(grads, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), value

    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        orders = [random.integers(0, 512, BATCH) for _ in range(steps)]
        for rate in RATES:
            state = init(jax.random.key(seed))
            values = []
            for order in orders:
                state, value = step(state, rate, order)
                values.append(value)
            np.stack(jax.device_get(values))


def measure(train: Callable[[str, int], None], name: str, steps: int) -> np.ndarray:
    """Wall and processor time in seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    train(name, steps)
    return np.array([time.perf_counter() - wall, time.process_time() - processor])


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(MODELS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    runs = len(RATES) * SEEDS
    for name in [given.only] if given.only else MODELS:
        for train in (ours, loop):
            train(name, 2)  # what is done once in a process
        short, long = given.steps, 3 * given.steps
        ratios = []
        for _ in range(given.pairs):
            times = {}
            for train in (ours, loop):
                less, more = (measure(train, name, n) for n in (short, long))
                step = (more[1] - less[1]) / ((long - short) * runs)
                times[train] = np.array([*more, step])
            ratios.append(times[ours] / times[loop])
            wall, processor, step = zip(times[ours], times[loop], strict=True)
            print(
                f"{name}, sweep and loop: {wall[0]:.2f} and {wall[1]:.2f} s; processor "
                f"time {processor[0]:.2f} and {processor[1]:.2f} s; of a further step "
                f"{1e3 * step[0]:.2f} and {1e3 * step[1]:.2f} ms"
            )
        wall, processor, step = map(statistics.median, zip(*ratios, strict=True))
        print(
            f"{name}, {runs} runs of {long} steps, the sweep's time over the loop's, "
            f"median of {given.pairs}: {wall:.2f}, of processor time {processor:.2f}, "
            f"of a further step {step:.2f}"
        )


if __name__ == "__main__":
    main()

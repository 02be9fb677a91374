"""Measure the temporary memory of a training step with and without `remat`.

    python -m benchmarks.memory [--pairs 5]

For each model a training step (forward, backward, AdamW, float32) is compiled with
`remat=False` and `remat=True`. Prints the peak temporary memory that XLA plans, and the
median ratio of processor times (all cores) over pairs of steps.
"""

import argparse
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax import optim, zoo

from .zoo_step import Step

# {model: (options, shape of a batch, number of classes)}
CASES = {
    "resmlp": ({"width": 256, "depth": 64}, (256, 8, 8, 1), 10),
    "resnet18": (
        {"stem": "cifar", "out_features": 10, "depth": 2},
        (16, 32, 32, 3),
        10,
    ),
    "vit_tiny_patch4_32": ({}, (16, 32, 32, 3), 10),
    "gpt": ({"width": 192, "depth": 12}, (4, 256), 256),
}


def batch_of(shape: tuple[int, ...], classes: int) -> tuple[jax.Array, jax.Array]:
    """Inputs and labels: images and classes, or tokens and next tokens."""
    random = np.random.default_rng(0)
    if len(shape) == 2:
        tokens = random.integers(classes, size=(shape[0], shape[1] + 1))
        return jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])
    images = random.normal(size=shape).astype(np.float32)
    return jnp.asarray(images), jnp.asarray(random.integers(classes, size=shape[0]))


def step_of(name: str, remat: bool) -> Step:
    """A compiled training step of one model."""
    options, shape, classes = CASES[name]
    model = zoo.create(name, **options, remat=remat, rngs=nnx.Rngs(0))
    tx = optim.adamw(1e-3, zoo.scales(model), weight_decay=0.05)
    return Step(model, tx, batch_of(shape, classes))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", choices=CASES)
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, float32")
    for name in [args.only] if args.only else CASES:
        steps = [step_of(name, remat) for remat in (False, True)]
        times: tuple[list[float], list[float]] = ([], [])
        for pair in range(args.pairs + 1):
            for which in (0, 1) if pair % 2 else (1, 0):
                seconds = steps[which]()[1]
                if pair:
                    times[which].append(seconds)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        megabytes = [step.temporary / 1e6 for step in steps]
        options, shape, _ = CASES[name]
        print(
            f"{name} {options}, batch {shape}: {megabytes[0]:.1f} MB, with remat "
            f"{megabytes[1]:.1f} MB ({megabytes[1] / megabytes[0]:.2f}), "
            f"{ratio:.2f} of the time",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Compare the speed of the input pipeline with that of training steps.

    TFDS_DATA_DIR=... python -m benchmarks.input_pipeline [--profile]

Measures images per second of `data.open_dataset(...).train(64, seed)`: CIFAR-10 in
memory with the papers' augmentations, Tiny ImageNet from its JPEG files with crop and
flip, and digits without augmentation. Then measures images per second of a jitted
training step (forward, backward, AdamW, float32, batch 64) of models for these
datasets. The pipeline should be at least 3x as fast as the model. Processor time per
image is printed too, because other work on the machine affects it less. Numbers are
medians of 3 measurements. --profile prints where the pipeline spends its time. Results:
docs/performance.md.
"""

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax import optim, zoo
from mupax.experiments import data

BATCH = 64
STRETCHES = 3

Models = dict[str, dict[str, Any]]

CASES: dict[str, tuple[tuple[str, ...], Models]] = {
    "cifar10": (
        ("flip", "rotate", "affine", "color_jitter"),
        {
            "cnn": {"width": 64, "depth": 4},
            "resnet18": {"stem": "cifar"},
            "vit_tiny_patch4_32": {},
        },
    ),
    "images:tiny-imagenet-200/train": (
        ("random_resized_crop", "flip"),
        {"vit_tiny_patch8_64": {}},
    ),
    "digits": ((), {"resmlp": {"width": 64, "depth": 8}}),
}


def rate(work: Callable[[], None], images: int) -> tuple[float, float]:
    """Measure images per second, and processor seconds (all threads) per image.

    Args:
      work: processes `images` images per call.
      images: number of images.
    """
    work()
    seconds, processor = [], []
    for _ in range(STRETCHES):
        start, busy = time.perf_counter(), time.process_time()
        work()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
    return images / statistics.median(seconds), statistics.median(processor) / images


def pipeline_rate(dataset: data.Dataset, batches: int = 50) -> tuple[float, float]:
    """`rate` of the pipeline, which prefetches as in training."""
    iterator = dataset.train(BATCH, 0, process_index=0, process_count=1)

    def consume() -> None:
        for _ in itertools.islice(iterator, batches):
            pass

    measured = rate(consume, batches * BATCH)
    iterator.close()
    return measured


def model_rate(
    dataset: data.Dataset, name: str, options: dict[str, Any]
) -> tuple[float, float]:
    """`rate` of a training step, on a batch on the device."""
    sizes = {"out_features": dataset.out_features}
    if "patch" not in name:
        sizes["input_shape"] = dataset.input_shape
    model = zoo.create(name, **options, **sizes, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tx = optim.adamw(1e-3, zoo.scales(model))
    iterator = dataset.train(BATCH, 0, process_index=0, process_count=1)
    batch = jax.device_put(next(iterator))
    iterator.close()

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, rest, optimizer = state
        batch = dataset.normalize(batch)

        def loss(params: nnx.State) -> tuple[jax.Array, nnx.State]:
            net = nnx.merge(graph, params, rest, copy=True)
            losses = optax.softmax_cross_entropy_with_integer_labels(
                net(batch["image"]), batch["label"]
            )
            return jnp.mean(losses), nnx.state(net, nnx.Not(nnx.Param))

        grads, new = jax.grad(loss, has_aux=True)(params)
        updates, optimizer = tx.update(grads, optimizer, params)
        return optax.apply_updates(params, updates), new, optimizer

    state = params, rest, tx.init(params)

    def run() -> None:
        nonlocal state
        state = jax.block_until_ready(step(state, batch))

    return rate(run, BATCH)


def profile(dataset: data.Dataset) -> None:
    """Print where one thread of the pipeline spends its time."""
    rows = data.batch_indices(dataset.train_size, BATCH, 0, 20)
    draws = np.random.default_rng(0).random((BATCH, dataset.draws))
    profiler = cProfile.Profile()
    profiler.runcall(lambda: [dataset.load_train(row, draws) for row in rows])
    pstats.Stats(profiler).sort_stats("tottime").print_stats(15)


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", choices=CASES, action="append")
    arguments = parser.parse_args()
    for name in arguments.only or CASES:
        augment, models = CASES[name]
        dataset = data.open_dataset(name, augment=augment)
        if arguments.profile:
            profile(dataset)
            continue
        fed, cost = pipeline_rate(dataset)
        print(
            f"{name} with {', '.join(augment) or 'nothing'}: {fed:,.0f} images/s, "
            f"{cost * 1e6:.0f} µs of processor time an image",
            flush=True,
        )
        for model, options in models.items():
            eaten, step = model_rate(dataset, model, options)
            print(
                f"  {model} takes {eaten:,.0f} images/s, {step * 1e6:,.0f} µs of "
                f"processor time: ratios {fed / eaten:.1f} and {step / cost:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

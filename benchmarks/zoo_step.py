"""Compare the training step of zoo models with the same networks in plain Flax NNX.

    python -m benchmarks.zoo_step [--pairs 15] [--torch PYTHON]

A step is forward, backward and AdamW, at batch 64, float32, with parameters and state
donated. The models are ResNet-18 with the stem for small images, and ViT-Ti with
patches of 4 (65 tokens), on 32x32 pixels. Ours are from `zoo.create`, updated by
`optim.adamw`. The others use Flax NNX's own layers (benchmarks/plain.py), unrolled, and
`optax.adamw`. Steps run in pairs of alternating order; the median of the paired ratios
should be at most 1.02. With `--torch`, the Python of an environment with torch
and torchvision, benchmarks/torch_step.py is measured on the same machine.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from mupax import optim, zoo

from . import plain

BATCH, PIXELS, CLASSES = 64, 32, 10
VIT = {"pixels": PIXELS, "patch": 4, "width": 192, "depth": 12, "heads": 3}


def our_resnet() -> nnx.Module:
    return zoo.create("resnet18", stem="cifar", out_features=CLASSES, rngs=nnx.Rngs(0))


def their_resnet() -> nnx.Module:
    return plain.ResNet(depth=18, classes=CLASSES, rngs=nnx.Rngs(0))


def our_vit() -> nnx.Module:
    return zoo.create("vit_tiny_patch4_32", rngs=nnx.Rngs(0))


def their_vit() -> nnx.Module:
    return plain.ViT(**VIT, classes=CLASSES, rngs=nnx.Rngs(0))


def images() -> tuple[jax.Array, jax.Array]:
    """A batch of noise."""
    random = np.random.default_rng(0)
    pixels = random.normal(size=(BATCH, PIXELS, PIXELS, 3)).astype(np.float32)
    return jax.device_put((pixels, random.integers(CLASSES, size=BATCH)))


class Step:
    """A compiled training step with its own state."""

    def __init__(
        self, model: nnx.Module, tx: optax.GradientTransformation, batch: Any = None
    ):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        self.batch = images() if batch is None else batch
        self.state = params, rest, tx.init(params)

        def loss(params: nnx.State, rest: nnx.State, batch: tuple) -> tuple:
            model = nnx.merge(graph, params, rest, copy=True)
            logits = model(batch[0])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
            return losses.mean(), nnx.state(model, nnx.Not(nnx.Param))

        def step(state: tuple, batch: tuple) -> tuple:
            params, rest, opt = state
            (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(
                params, rest, batch
            )
            updates, opt = tx.update(grads, opt, params)
            return (optax.apply_updates(params, updates), rest, opt), value

        start = time.perf_counter()
        self.step = jax.jit(step, donate_argnums=0).lower(self.state, self.batch)
        self.step = self.step.compile()
        self.compile_seconds = time.perf_counter() - start
        self.temporary = self.step.memory_analysis().temp_size_in_bytes
        self.parameters = sum(x.size for x in jax.tree.leaves(params))

    def __call__(self) -> tuple[float, float]:
        """Seconds of a step: by the clock, and of all cores together."""
        start = time.perf_counter(), time.process_time()
        self.state, loss = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, loss))
        return time.perf_counter() - start[0], time.process_time() - start[1]


def compare(
    name: str,
    ours: Callable[[], nnx.Module],
    theirs: Callable[[], nnx.Module],
    pairs: int,
) -> None:
    """Print what both take."""
    model = ours()
    scales = zoo.scales(model)
    steps = (
        Step(model, optim.adamw(1e-3, scales, weight_decay=0.05)),
        Step(theirs(), optax.adamw(1e-3, weight_decay=0.05)),
    )
    if steps[0].parameters != steps[1].parameters:
        raise AssertionError([s.parameters for s in steps])
    times: tuple[list, list] = ([], [])
    for pair in range(pairs + 1):
        for which in (0, 1) if pair % 2 else (1, 0):
            seconds = steps[which]()
            if pair:  # the first pays for what is done once
                times[which].append(seconds)
    compiled = [s.compile_seconds for s in steps]
    print(
        f"{name}, {steps[0].parameters / 1e6:.2f} million parameters; tracing and "
        f"compiling {compiled[0]:.1f} s, plain NNX {compiled[1]:.1f} s"
    )
    # On a busy machine wall time is noisy; processor time is less so.
    for i, clock in enumerate(("by the clock", "of processor time")):
        ours_s, theirs_s = ([pair[i] for pair in column] for column in times)
        ratios = sorted(a / b for a, b in zip(ours_s, theirs_s, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        print(
            f"  {clock}: {1e3 * statistics.median(ours_s):.0f} ms, plain NNX "
            f"{1e3 * statistics.median(theirs_s):.0f} ms; ratio "
            f"{statistics.median(ratios):.3f} (median of {pairs} pairs; quartiles "
            f"{low:.3f} to {high:.3f})",
            flush=True,
        )


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--torch", help="a Python with torch and torchvision")
    parser.add_argument("--only", choices=("resnet", "vit"))
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, batch {BATCH}, {PIXELS} pixels, float32")
    if args.only != "vit":
        compare("ResNet-18 (CIFAR stem)", our_resnet, their_resnet, args.pairs)
    if args.only != "resnet":
        compare("ViT-Ti (patches of 4)", our_vit, their_vit, args.pairs)
    if args.torch:
        for name, kind, sizes in (
            ("ResNet-18", "resnet", {"depth": 18, "classes": CLASSES}),
            ("ViT-Ti", "vit", VIT | {"classes": CLASSES}),
        ):
            case = {"kind": kind, "sizes": sizes, "batch": BATCH, "pixels": PIXELS}
            words = ["-m", "benchmarks.torch_step", f"--steps={args.pairs}"]
            command = [args.torch, *words, json.dumps([case])]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            took = json.loads(done.stdout)
            print(
                f"torch {took['torch']}, {name}: {took['ms']:.0f} ms by the clock, "
                f"{took['processor_ms']:.0f} ms of processor time (medians of "
                f"{args.pairs})"
            )


if __name__ == "__main__":
    main()

"""A small run of `experiments.run`, as a process of its own that can be killed.

    python tests/train_child.py WORKDIR [--kill-at-step N | --kill-in-save N]

Prints the result as JSON, with a digest of every weight. Not a test: test_train.py
starts it.
"""

import argparse
import hashlib
import json
import os
import pathlib
import signal
import sys
import threading

import jax
import numpy as np
import optax
from flax import nnx

from mupax.experiments.data import Dataset, open_dataset, register_dataset
from mupax.experiments.run import TrainResult, fit

STEPS = 60


class Frozen(nnx.Variable):
    """A weight that is not trained."""


class TinyMLP(nnx.Module):
    """One hidden layer, with all that a run has to carry: statistics and dropout."""

    def __init__(self, rngs: nnx.Rngs, inputs: int = 16, plain: bool = False):
        # No bias where a norm follows: its gradient is rounding error, of which Adam
        # makes steps of full size, and no two devices round alike.
        self.hidden = nnx.Linear(inputs, 24, use_bias=plain, rngs=rngs)
        self.norm = None if plain else nnx.BatchNorm(24, rngs=rngs)
        self.drop = None if plain else nnx.Dropout(0.1, rngs=rngs)
        self.gain = Frozen(jax.numpy.full((24,), 1.5))
        self.readout = nnx.Linear(24, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.hidden(x.reshape(x.shape[0], -1))
        x = x if self.norm is None else self.norm(x)
        x = jax.nn.relu(x) * self.gain[None]
        x = x if self.drop is None else self.drop(x)
        return self.readout(x)


def toy_data(train_examples: int = 200, test_examples: int = 37) -> Dataset:
    """Four classes of 4x4 images, which differ in one bright quarter."""
    rng = np.random.default_rng(0)

    def split(n: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(0, 4, n)
        images = rng.integers(0, 200, (n, 4, 4, 1))
        images[np.arange(n), labels] += 50
        return images.astype(np.uint8), labels

    splits = {"train": split(train_examples), "test": split(test_examples)}
    register_dataset("toy", splits)
    return open_dataset("toy")


def digest(model: nnx.Module) -> str:
    """A hash of every bit of every variable."""
    sums = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.state(model)):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        sums.update(np.asarray(leaf).tobytes())
    return sums.hexdigest()


def run(workdir: pathlib.Path, **changes) -> tuple[TrainResult, nnx.Module]:
    """The run that the tests kill, or another by its changes."""
    plain = changes.pop("plain", False)
    model = changes.pop("model", None) or TinyMLP(nnx.Rngs(0), plain=plain)
    settings = {
        "batch_size": 16,
        "steps": STEPS,
        "seed": 1,
        "eval_every": 7,
        "save_every": 5,
        "settings": {"lr": 0.01},
    }
    tx = changes.pop("tx", optax.adamw(0.01))
    data = changes.pop("data", None) or toy_data()
    return fit(model, tx, data, workdir=workdir, **(settings | changes)), model


def die() -> None:
    """As a machine that goes away: nothing is flushed, nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_save(workdir: pathlib.Path, number: int) -> None:
    """Dies when the n-th temporary checkpoint of this process shows up."""
    seen: set[str] = set()
    while len(seen) < number:
        try:
            names = os.listdir(workdir / "checkpoints")
        except FileNotFoundError:
            continue
        seen |= {name for name in names if "tmp" in name}
    die()


def main() -> None:
    """Runs, perhaps to its death."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--kill-at-step", type=int)
    parser.add_argument("--kill-in-save", type=int)
    parser.add_argument("--process", type=int, help="which of two")
    parser.add_argument("--port", type=int, help="where process 0 listens")
    args = parser.parse_args()
    if args.process is not None:
        jax.distributed.initialize(f"127.0.0.1:{args.port}", 2, args.process)
    if args.kill_in_save:
        threading.Thread(
            target=die_in_save, args=(args.workdir, args.kill_in_save), daemon=True
        ).start()

    def on_step(step: int, loss: float) -> None:
        if step == args.kill_at_step:
            die()

    result, model = run(args.workdir, on_step=on_step)
    json.dump(
        {
            "digest": digest(model),
            "curve": result.curve,
            "evals": result.evals,
            "resumed_from": result.resumed_from,
            "devices": jax.device_count(),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()

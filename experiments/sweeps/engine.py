"""One cell of a sweep as one program: learning rates and seeds are vmap axes.

Steps are a `lax.scan`, depth is a scanned axis of the model, the data stays on the
device. A run that diverges fills its own lane with NaN and no other.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax import optim, zoo

from ..data import ImageData, batch_indices, normalize
from ..training.optimizer import build_optimizer
from .results import Cell

POINTS = 40  # of a learning curve that is kept

# A run that ends above so many times the loss of guessing counts as diverged.
_HOPELESS = 2.0

# On a CPU the time goes into matrix products, which are called, not compiled: half
# the compile time for the same speed (benchmarks/sweep.py).
_COMPILER: dict[str, dict[str, str | bool]] = {
    "cpu": {"xla_backend_optimization_level": "1"}
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A cell to be run.

    Attributes:
      parametrization: its key in the config.
      point: the parametrization itself.
      width: of the model.
      depth: of the model.
      model: name and options of the zoo model, as pairs.
      base_width: the width that was tuned.
      base_depth: the depth that was tuned.
      optimizer: name and options of an optimizer of `mupax.optim`, as pairs.
      log2_lr: the grid.
      seeds: number of seeds.
      steps: number of steps.
      batch_size: examples a step.
      average_last: a run's loss is the mean over its last steps.
    """

    parametrization: str
    point: optim.Parametrization
    width: int
    depth: int
    model: tuple[tuple[str, Any], ...]
    base_width: int
    base_depth: int
    optimizer: tuple[tuple[str, Any], ...]
    log2_lr: tuple[float, ...]
    seeds: int
    steps: int
    batch_size: int
    average_last: int

    @property
    def name(self) -> str:
        """As a file is named."""
        return f"{self.parametrization}-w{self.width}-d{self.depth}"

    @property
    def runs(self) -> int:
        """How many trainings it holds."""
        return self.seeds * len(self.log2_lr)

    def build(self, data: ImageData, rngs: nnx.Rngs) -> nnx.Module:
        """The model, freshly initialized."""
        return build_model(
            dict(self.model),
            data,
            width=self.width,
            depth=self.depth,
            base_width=self.base_width,
            base_depth=self.base_depth,
            parametrization=self.point,
            rngs=rngs,
        )


def build_model(
    options: dict[str, Any], data: ImageData, *, rngs: nnx.Rngs, **sizes: Any
) -> nnx.Module:
    """A zoo model for a dataset.

    Args:
      options: `name`, and the model's own options.
      data: tells the sizes of input and output.
      rngs: random state.
      **sizes: `width`, `depth` and their bases, `parametrization`.
    """
    options = dict(options)
    return zoo.create(
        options.pop("name"),
        input_shape=data.train_images.shape[1:],
        out_features=data.num_classes,
        **options,
        **sizes,
        rngs=rngs,
    )


def compile_cell(job: Job, data: ImageData) -> Callable[[], Cell]:
    """Compile a cell's program.

    Args:
      job: the cell.
      data: images and labels.

    Returns:
      A function that runs it. Its cell counts compilation into `seconds`.
    """
    start = time.perf_counter()
    abstract = nnx.eval_shape(lambda: job.build(data, nnx.Rngs(0)))
    scales = zoo.scales(abstract)
    graph = nnx.graphdef(abstract)
    mean, std = data.mean, data.std

    def run(
        log2_lr: jax.Array,
        params: nnx.State,
        rest: nnx.State,
        images: jax.Array,
        labels: jax.Array,
    ) -> jax.Array:
        tx = build_optimizer(dict(job.optimizer), 2.0**log2_lr, scales, job.point)

        def step(carry: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
            params, state = carry

            def loss(params: nnx.State) -> jax.Array:
                images = normalize(batch[0], mean, std)
                # Copied: batch statistics change under the trace of the gradient.
                logits = nnx.merge(graph, params, rest, copy=True)(images)
                return optax.softmax_cross_entropy_with_integer_labels(
                    logits, batch[1]
                ).mean()

            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, tx.init(params)), (images, labels))[1]

    def seed(
        key: jax.Array,
        indices: jax.Array,
        log2_lr: jax.Array,
        images: jax.Array,
        labels: jax.Array,
    ) -> jax.Array:
        model = job.build(data, nnx.Rngs(params=key))
        params, rest = nnx.state(model, nnx.Param, ...)
        # Gathered once a seed, as bytes: every learning rate sees the same batches.
        return jax.vmap(run, in_axes=(0, None, None, None, None))(
            log2_lr, params, rest, images[indices], labels[indices]
        )

    arguments = (
        jax.random.split(jax.random.key(0), job.seeds),
        np.stack(
            [
                batch_indices(len(data.train_labels), job.batch_size, s, job.steps)
                for s in range(job.seeds)
            ]
        ),
        jnp.asarray(job.log2_lr, jnp.float32),
        data.train_images,
        data.train_labels,
    )
    program = jax.jit(jax.vmap(seed, in_axes=(0, 0, None, None, None)))
    compiled = program.lower(*arguments).compile(_COMPILER.get(jax.default_backend()))
    compiling = time.perf_counter() - start

    def call() -> Cell:
        start = time.perf_counter()
        losses = np.asarray(compiled(*arguments))
        seconds = compiling + time.perf_counter() - start
        return _cell(job, losses, math.log(data.num_classes), seconds)

    return call


def _cell(job: Job, losses: np.ndarray, guess: float, seconds: float) -> Cell:
    """Summarize losses of shape (seeds, lrs, steps); `guess` is a guesser's loss."""
    losses = losses.astype(np.float64)
    broken = np.maximum.accumulate(~np.isfinite(losses), axis=-1)
    losses = np.where(broken, np.nan, losses)
    final = losses[..., -job.average_last :].mean(axis=-1)
    # Finite and far above a guesser's loss is diverged too: nothing was learned.
    final = np.where(final < _HOPELESS * guess, final, np.nan)
    spans = np.array_split(losses, min(POINTS, job.steps), axis=-1)
    curves = np.stack([span.mean(axis=-1) for span in spans], axis=-1)
    return Cell(
        job.parametrization,
        job.width,
        job.depth,
        np.asarray(job.log2_lr, dtype=float),
        final,
        curves,
        seconds,
    )

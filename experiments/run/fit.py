"""Train or evaluate a given model on a dataset of images."""

import pathlib
from collections.abc import Callable
from typing import Any

import optax
from flax import nnx
from jax.sharding import Mesh

from ..data import Dataset
from .evaluate import means, tester
from .loop import LoopOptions, TrainResult, train
from .loss import Classification
from .mesh import check_batch, make_mesh
from .program import Program, loss_of
from .step import Batch, Hyper, Recipe


def fit(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    dataset: Dataset,
    *,
    workdir: pathlib.Path,
    batch_size: int,
    steps: int,
    seed: int,
    eval_every: int,
    save_every: int,
    mesh: Mesh | None = None,
    on_step: Callable[[int, float], None] | None = None,
    settings: dict[str, Any] | None = None,
    label_smoothing: float = 0.0,
) -> TrainResult:
    """Train an image classifier in place, or resume from its last checkpoint.

    Args:
      model: maps normalized float32 images (batch, height, width, channels) to logits
        (batch, classes). Its `nnx.Param`s are trained; other variables (frozen weights,
        batch statistics, random streams) are kept.
      tx: the optimizer, with its learning rate.
      dataset: of images, e.g. from `open_dataset`.
      workdir: directory of this run only.
      batch_size: examples per step, over all devices.
      steps: number of training steps.
      seed: of the order of the examples.
      eval_every: steps between evaluations on the test split.
      save_every: steps between checkpoints.
      mesh: by default all devices along "data".
      on_step: called with (step, training loss) one step late, and with the step that
        the run resumes from.
      settings: JSON-ready settings that decide the result, e.g. the learning rate. A
        run resumes only if they are the same.
      label_smoothing: probability that is spread over all classes, 0..1.

    Raises:
      UserError: see `train`.
      Stopped: see `train`.
    """
    program = _program(model, tx, dataset, seed, mesh, label_smoothing)
    result, state = train(
        model,
        program,
        dataset,
        LoopOptions(batch_size, steps, seed, eval_every, save_every),
        workdir=workdir,
        on_step=None if on_step is None else lambda step, loss, _: on_step(step, loss),
        settings=settings,
    )
    nnx.update(model, state["params"], state["rest"])
    return result


def evaluate(
    model: nnx.Module,
    dataset: Dataset,
    *,
    batch_size: int = 256,
    mesh: Mesh | None = None,
) -> tuple[float, float]:
    """Mean cross-entropy (nats) and accuracy (0..1) on the whole test split.

    Args:
      model: as in `fit`.
      dataset: as in `fit`.
      batch_size: examples per batch, over all devices.
      mesh: by default all devices along "data".

    Raises:
      UserError: the mesh cannot divide the batch.
    """
    program = _program(model, optax.identity(), dataset, 0, mesh)
    check_batch(batch_size, program.mesh)
    test = tester(program, dataset, batch_size)
    return means(test(program.start_on_mesh(model)))


def _program(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    dataset: Dataset,
    seed: int,
    mesh: Mesh | None,
    label_smoothing: float = 0.0,
) -> Program:
    objective = Classification(
        lambda images: dataset.normalize({"image": images})["image"],
        dataset.out_features,
        label_smoothing=label_smoothing,
    )
    model.train()
    graph = nnx.graphdef(model)

    def loss(params: Any, rest: Any, batch: Batch, hyper: Hyper, key: Any) -> Any:
        return loss_of(graph, objective, params, rest, batch, key)

    recipe = Recipe(loss, lambda hyper, params, rest: tx)
    return Program(model, recipe, objective, mesh or make_mesh(), seed=seed)

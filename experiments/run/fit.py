"""Train or evaluate a model that is there, on images in memory."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from .. import data as datasets
from .evaluate import means, tester
from .loop import Plan, TrainResult, train
from .mesh import check_batch, make_mesh, put
from .objective import Classification
from .program import Program, make_program, recipe_of


def fit(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    data: datasets.ImageData,
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
    """Trains a classifier of images in place; a killed run goes on where it stopped.

    Args:
      model: takes float32 (batch, height, width, channels), normalized, and gives
        logits (batch, classes). Its `nnx.Param`s are trained; its other variables
        (frozen weights, statistics, random streams) are carried along.
      tx: the optimizer, with its learning rate.
      data: the dataset.
      workdir: directory of this run alone.
      batch_size: examples in a step, over all devices.
      steps: how many to train for.
      seed: of the order of the examples. The model comes initialized.
      eval_every: steps between evaluations on the test split; the last step has one.
      save_every: steps between checkpoints; the last step has one.
      mesh: all devices along "data" by default.
      on_step: called with (step, training loss) one step late, and with the step that
        a run goes on from.
      settings: JSON-ready; what decides the result, learning rate and model among
        them. A workdir goes on only with the settings that it began with.
      label_smoothing: share of each label that is spread over all classes.

    Raises:
      UserError: as `train`.
      Stopped: as `train`.
    """
    dataset = datasets.from_memory(data)
    program = _program(model, tx, data, seed, mesh, label_smoothing)
    result, state = train(
        model,
        program,
        dataset,
        Plan(batch_size, steps, seed, eval_every, save_every),
        workdir=workdir,
        on_step=None if on_step is None else lambda step, loss, _: on_step(step, loss),
        settings=settings,
    )
    nnx.update(model, state["params"], state["rest"])
    return result


def evaluate(
    model: nnx.Module,
    data: datasets.ImageData,
    *,
    batch_size: int = 256,
    mesh: Mesh | None = None,
) -> tuple[float, float]:
    """Mean cross-entropy (nats) and accuracy (0..1) on the whole test split.

    Raises:
      UserError: if the batch does not divide over the devices.
    """
    program = _program(model, optax.identity(), data, 0, mesh)
    check_batch(batch_size, program.mesh)
    test = tester(program, datasets.from_memory(data), batch_size)
    params, rest = nnx.state(model, nnx.Param, ...)
    start = jax.jit(program.start, out_shardings=program.shardings)
    state = start(
        put(params, program.shardings["params"]), put(rest, program.shardings["rest"])
    )
    return means(test(state))


def _program(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    data: datasets.ImageData,
    seed: int,
    mesh: Mesh | None,
    label_smoothing: float = 0.0,
) -> Program:
    objective = Classification(
        lambda images: datasets.normalize(images, data.mean, data.std),
        data.num_classes,
        label_smoothing=label_smoothing,
    )
    recipe = recipe_of(model, objective, tx)
    return make_program(model, recipe, objective, mesh or make_mesh(), seed=seed)

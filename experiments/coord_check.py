"""`mupax coord-check`: whether activations change alike at every width and depth."""

import dataclasses
import math
import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mupax import optim

from . import io, memory
from .errors import UserError
from .run.build import (
    create_model,
    make_objective,
    make_optimizer,
    model_shapes,
    open_dataset,
    scales_of,
)
from .run.config import Component, parse, plain
from .run.loss import Classification

_MOST_SEEDS = 1000


def run(
    config: ConfigDict,
    folder: str | pathlib.Path,
    *,
    widths: str = "",
    depths: str = "",
    learning_rate: float | None = None,
    seeds: int = 4,
    tolerance: float = 0.15,
) -> optim.CoordCheck:
    """Check a training config's model, optimizer and data; print and plot the result.

    Args:
      config: a training config.
      folder: directory for coord_check.png and coord_check.txt.
      widths: e.g. "64,128,256"; by default 1, 2 and 4 times the base width.
      depths: e.g. "4,8,16"; by default 1, 2 and 4 times the base depth.
      learning_rate: by default the config's.
      seeds: number of initializations.
      tolerance: largest absolute slope that passes.

    Raises:
      UserError: bad input; names the flag or key.
    """
    if not 0 < tolerance < math.inf:
        raise UserError(f"--tolerance={tolerance} must be a positive number")
    if not 1 <= seeds <= _MOST_SEEDS:
        raise UserError(f"--seeds={seeds} must lie in 1 to {_MOST_SEEDS}")
    given = plain(config)
    if learning_rate is not None:
        given["learning_rate"] = learning_rate
    run = parse(given)
    if learning_rate is not None:  # transfer_from has another one
        run = dataclasses.replace(run, learning_rate=learning_rate)
    if run.init_from:
        print("init_from is not used: the check starts from random weights")
    dataset = open_dataset(run, stand_in=True)
    shapes = model_shapes(dataset, run.model.name)
    objective = make_objective(run, dataset)
    options = run.model.options
    base: dict[str, Any] = {
        "width": run.base_width or options.get("width"),
        "depth": run.base_depth or options.get("depth"),
    }
    for key, size in base.items():
        if size is None:
            raise UserError(
                f"the config sets neither model.{key} nor base_{key}; set one of them"
            )
    run = dataclasses.replace(run, base_width=base["width"], base_depth=base["depth"])

    def build(key: jax.Array, width: int, depth: int) -> nnx.Module:
        return create_model(run.sized(width, depth), shapes, key)

    def optimizer(model: nnx.Module, **_: int) -> Any:
        constant = dataclasses.replace(run, schedule=Component("constant"))
        return make_optimizer(constant, scales_of(constant, model))

    def logits(model: nnx.Module, batch: Any) -> jax.Array:
        if isinstance(objective, Classification):
            return model(objective.normalize(batch["image"]))
        return model(batch["tokens"][:, :-1])

    directory = pathlib.Path(folder)
    io.check_writable(directory)
    batch = next(iter(dataset.train(min(run.batch_size, 64), run.seed)))
    wide = _sizes("widths", widths, base["width"])
    deep = _sizes("depths", depths, base["depth"])
    try:
        _check_memory(build, wide, deep)
        result = optim.coord_check(
            build,
            optimizer,
            logits,
            {key: np.asarray(value) for key, value in batch.items()},
            widths=wide,
            depths=deep,
            seeds=seeds,
            tolerance=tolerance,
        )
    except (OverflowError, TypeError, ValueError) as error:
        raise UserError(f"the model cannot be checked: {error}") from None
    directory.mkdir(parents=True, exist_ok=True)
    io.write_durably(directory / "coord_check.txt", f"{result}\n")
    print(result)
    result.plot(directory / "coord_check.png")
    print(directory / "coord_check.png")
    return result


def _check_memory(build: Any, widths: tuple[int, ...], depths: tuple[int, ...]) -> None:
    """Check that parameters, gradients and the moments of Adam fit into memory."""
    free = memory.available()
    for width, depth in ((max(widths), min(depths)), (min(widths), max(depths))):
        model = nnx.eval_shape(
            lambda w=width, d=depth: build(jax.random.key(0), width=w, depth=d)
        )
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        memory.check(
            4 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
            f"a model of width {width} and depth {depth}",
            "give smaller --widths or --depths",
            free,
        )


def _sizes(name: str, given: str, base: int) -> tuple[int, ...]:
    if not given:
        return base, 2 * base, 4 * base
    try:
        return tuple(int(size) for size in given.split(","))
    except ValueError:
        raise UserError(
            f"--{name}={given!r} must be whole numbers, e.g. 64,128,256"
        ) from None

"""The job of `mupax coord-check`: do activations move alike at every size?"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mupax import optim, zoo

from .errors import UserError
from .io import write_durably
from .run import workdir
from .run.build import (
    create_model,
    make_objective,
    make_optimizer,
    model_shapes,
    open_dataset,
)
from .run.config import Named, parse
from .run.objective import Classification, Objective


def run(
    config: ConfigDict,
    folder: str | None,
    *,
    widths: str = "",
    depths: str = "",
    learning_rate: float | None = None,
    seeds: int = 4,
    tolerance: float = 0.1,
) -> optim.CoordCheck:
    """Check a training config's model, optimizer and data; print and draw it.

    Args:
      config: of `mupax train`.
      folder: where coord_check-width.png, coord_check-depth.png and coord_check.txt
        are written; None for runs/<dataset>_<model>.
      widths: as "64,128,256"; by default the base's, and 2 and 4 times it.
      depths: likewise.
      learning_rate: the config's own by default.
      seeds: how many initializations.
      tolerance: how far from zero a slope may be.

    Raises:
      UserError: bad input, said in one sentence.
    """
    given = config.copy_and_resolve_references()
    with given.unlocked():
        if learning_rate is not None:
            given.learning_rate = learning_rate
    run = parse(given)
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
                f"the config gives {run.model.name} no {key} and no base_{key}; set "
                "one of them"
            )
    run = dataclasses.replace(run, base_width=base["width"], base_depth=base["depth"])

    def build(key: jax.Array, width: int, depth: int) -> nnx.Module:
        return create_model(run.sized(width, depth), shapes, key)

    def optimizer(model: nnx.Module, **_: int) -> Any:
        constant = Named("constant")
        return make_optimizer(
            dataclasses.replace(run, schedule=constant), zoo.scales(model)
        )

    batch = next(iter(dataset.train(min(run.batch_size, 64), run.seed)))
    try:
        found = optim.coord_check(
            build,
            optimizer,
            _loss(objective),
            {key: np.asarray(value) for key, value in batch.items()},
            widths=_sizes("widths", widths, base["width"]),
            depths=_sizes("depths", depths, base["depth"]),
            seeds=seeds,
            tolerance=tolerance,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"the model cannot be checked: {error}") from None
    directory = workdir.named(config, folder)
    directory.mkdir(parents=True, exist_ok=True)
    write_durably(directory / "coord_check.txt", f"{found}\n")
    print(found)
    for path in found.plot(directory / "coord_check.png"):
        print(pathlib.Path(path))
    return found


def _loss(objective: Objective) -> Any:
    """A loss that is linear in the logits.

    Its gradient does not see how large they start, which is m^-½ under μP and would
    bend the slopes of small models.
    """

    def loss(model: nnx.Module, batch: Any) -> jax.Array:
        if isinstance(objective, Classification):
            logits, labels = model(objective.normalize(batch["image"])), batch["label"]
        else:
            tokens = batch["tokens"]
            logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
        right = jax.nn.one_hot(labels, logits.shape[-1])
        return (logits * (1 / logits.shape[-1] - right)).sum(-1).mean()

    return loss


def _sizes(name: str, given: str, base: int) -> tuple[int, ...]:
    if not given:
        return base, 2 * base, 4 * base
    try:
        return tuple(int(size) for size in given.split(","))
    except ValueError:
        raise UserError(f"--{name}={given!r} must be sizes, as 64,128,256") from None

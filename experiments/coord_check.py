"""The job of `mupax coord-check`: do activations move alike at every size?"""

import dataclasses
import math
import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mupax import optim, zoo
from mupax.zoo.registry import default_options

from . import io, memory
from .errors import UserError
from .run.build import (
    create_model,
    make_objective,
    make_optimizer,
    model_shapes,
    open_dataset,
)
from .run.config import Named, RunConfig, parse
from .run.objective import Classification, Objective

_MOST_SEEDS = 1000


def run(
    config: ConfigDict,
    folder: str,
    *,
    widths: str = "",
    depths: str = "",
    learning_rate: float | None = None,
    seeds: int = 4,
    tolerance: float = 0.15,
) -> optim.CoordCheck:
    """Check a training config's model, optimizer and data; print and draw it.

    Args:
      config: of `mupax train`.
      folder: where coord_check-width.png, coord_check-depth.png and coord_check.txt
        are written.
      widths: as "64,128,256"; by default the base's, and 2 and 4 times it.
      depths: likewise.
      learning_rate: the config's own by default.
      seeds: how many initializations.
      tolerance: how far from zero a slope may surely be.

    Raises:
      UserError: bad input, said in one sentence.
    """
    if not 0 < tolerance < math.inf:
        raise UserError(f"--tolerance={tolerance} must be a positive number")
    if not 1 <= seeds <= _MOST_SEEDS:
        raise UserError(f"--seeds={seeds} must lie in 1 to {_MOST_SEEDS}")
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

    # Before minutes are spent on what would go there.
    directory = pathlib.Path(folder)
    io.check_writable(directory)
    batch = next(iter(dataset.train(min(run.batch_size, 64), run.seed)))
    wide = _sizes("widths", widths, base["width"])
    deep = _sizes("depths", depths, base["depth"])
    try:
        _check_memory(build, wide, deep)
        found = optim.coord_check(
            build,
            optimizer,
            _outputs(objective),
            {key: np.asarray(value) for key, value in batch.items()},
            widths=wide,
            depths=deep,
            seeds=seeds,
            tolerance=tolerance,
            strength=_strength(run),
        )
    except (OverflowError, TypeError, ValueError) as error:
        raise UserError(f"the model cannot be checked: {error}") from None
    directory.mkdir(parents=True, exist_ok=True)
    io.write_durably(directory / "coord_check.txt", f"{found}\n")
    print(found)
    for path in found.plot(directory / "coord_check.png"):
        print(pathlib.Path(path))
    return found


def _strength(run: RunConfig) -> float | None:
    """a²·base_depth of a model with residual branches; None of one without."""
    known = default_options(run.model.name)
    if "branch_multiplier" not in known or run.base_depth is None:
        return None
    a = run.model.options.get("branch_multiplier", known["branch_multiplier"])
    return float(a) ** 2 * run.base_depth


def _check_memory(build: Any, widths: tuple[int, ...], depths: tuple[int, ...]) -> None:
    """Refuse sizes whose parameters, gradients and Adam's moments do not fit.

    Raises:
      UserError: naming the sizes.
    """
    here = memory.available()
    for width, depth in ((max(widths), min(depths)), (min(widths), max(depths))):
        model = nnx.eval_shape(
            lambda w=width, d=depth: build(jax.random.key(0), width=w, depth=d)
        )
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        needed = 4 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        if needed > here:
            raise UserError(
                f"width {width} at depth {depth} needs at least {needed / 2**30:,.1f} "
                f"GiB, and {here / 2**30:,.1f} GiB are free; give smaller --widths or "
                "--depths"
            )


def _outputs(objective: Objective) -> Any:
    """The logits; the check takes a loss that is linear in them."""

    def outputs(model: nnx.Module, batch: Any) -> jax.Array:
        if isinstance(objective, Classification):
            return model(objective.normalize(batch["image"]))
        return model(batch["tokens"][:, :-1])

    return outputs


def _sizes(name: str, given: str, base: int) -> tuple[int, ...]:
    if not given:
        return base, 2 * base, 4 * base
    try:
        return tuple(int(size) for size in given.split(","))
    except ValueError:
        raise UserError(f"--{name}={given!r} must be sizes, as 64,128,256") from None

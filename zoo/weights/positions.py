"""Tables of positions of models with a grid of patches, for images of other sizes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..layers.rotary import resize_positions
from .misfits import Misfit
from .sources import Source


def has_grid(model: nnx.Module) -> bool:
    """Whether a model reads patches of images, whose grid is `model.grid`."""
    return hasattr(model, "grid")


def fits(model: Any, source: Source, shape: tuple[int, ...], can_resize: bool) -> bool:
    """Whether a file's table of positions of another size can be interpolated.

    Args:
      model: whose table has `source`.
      source: of the table.
      shape: of the file's table.
      can_resize: whether it may be interpolated.

    Raises:
      Misfit: an option of the model makes it fit.
    """
    if not has_grid(model):
        return False
    grid = _grid(model, shape)
    if grid is None:
        _check_class_position(model, source, shape)
        return False
    if not can_resize:
        size = "x".join(str(n * model.patch_size) for n in grid)
        height, width = (n * model.patch_size for n in model.grid)
        raise Misfit(
            f"{source.key!r} has positions for images of {size} pixels, but the model "
            f"takes {height}x{width}; pass ",
            {"input_shape": f"({height}, {width}, {model.channels})"},
            " to interpolate them",
        )
    return True


def _grid(model: Any, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The square grid of patches of a table (..., positions, width)."""
    positions, width = model.position.shape
    first = positions - model.grid[0] * model.grid[1]
    if len(shape) < 2 or math.prod(shape[:-2]) != 1 or shape[-1] != width:
        return None
    patches = max(shape[-2] - first, 0)
    side = math.isqrt(patches)
    return (side, side) if side and side * side == patches else None


def _check_class_position(model: Any, source: Source, shape: tuple[int, ...]) -> None:
    if model.token is None or len(shape) < 2:
        return
    side = math.isqrt(shape[-2] - int(not model.class_position))
    if side * side == shape[-2] - int(not model.class_position):
        raise Misfit(
            f"{source.key!r} has {shape[-2]} positions, so the class token has "
            f"{'no' if model.class_position else 'a'} position; pass ",
            {"class_position": str(not model.class_position)},
        )


def resized(model: Any, table: np.ndarray) -> np.ndarray:
    """A file's table of positions, interpolated to the grid of a model."""
    grid = _grid(model, table.shape)
    assert grid is not None, table.shape
    rows = jnp.asarray(table).reshape(table.shape[-2:])
    return np.asarray(resize_positions(rows, grid, model.grid))


def between(saved: Any, model: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a model, abstract or not, for another model's images."""
    if not has_grid(saved) or not has_grid(model) or saved.position is None:
        return arrays
    if saved.grid == model.grid:
        return arrays

    def resize(table: jax.Array) -> jax.Array:
        return resize_positions(table, saved.grid, model.grid)

    table = arrays["position"]
    is_abstract = isinstance(table, jax.ShapeDtypeStruct)
    new = jax.eval_shape(resize, table) if is_abstract else resize(table)
    return {**arrays, "position": new}

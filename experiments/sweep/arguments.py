"""Checks of the arguments of `mupax.sweep`; each error names the argument."""

import concurrent.futures
import contextlib
import inspect
import json
import math
import numbers
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mupax.zoo.addresses import public

from ..errors import UserError, nearest
from ..run import mirror
from . import grids
from .own import OwnTask
from .results import Sizes

_RESERVED = ("key", "model", "width", "depth")


def is_whole(x: Any) -> bool:
    """Whether a value is an integer of at least 1."""
    whole = isinstance(x, int | np.integer) and not isinstance(x, bool)
    return whole and int(x) >= 1


def is_positive(x: Any) -> bool:
    """Whether x is a finite number above zero."""
    number = isinstance(x, numbers.Real | jax.Array) and not isinstance(x, bool)
    return number and np.ndim(x) == 0 and math.isfinite(x) and float(x) > 0


def listed(x: Any) -> Any:
    """An array as a list, and everything else as it is."""
    return x.tolist() if isinstance(x, np.ndarray) else x


def base_of(
    widths: Sequence[int],
    depths: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    base: tuple[int, int] | None,
) -> Sizes:
    """The base's size, after all sizes are checked."""
    for name, values in (("widths", widths), ("depths", depths)):
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise UserError(f"{name}={values!r} must be a sequence, e.g. (4, 8, 16)")
    try:
        pairs = [(width, depth) for width, depth in [*sizes, *([base] if base else [])]]
    except (TypeError, ValueError):
        raise UserError(
            f"sizes={sizes!r} and base={base!r} must be pairs (width, depth)"
        ) from None
    paired = [size for pair in pairs for size in pair]
    for name, values in (("widths", widths), ("depths", depths), ("sizes", paired)):
        for x in values:
            if not is_whole(x):
                raise UserError(f"{name} must hold integers of at least 1; got {x!r}")
    if base is None and not (widths and depths) and not sizes:
        raise UserError("give widths and depths, or sizes as pairs (width, depth)")
    first = (widths[0], depths[0]) if widths and depths else pairs[0]
    at = Sizes(*map(int, base or first))
    if (widths and at.width not in widths) or (depths and at.depth not in depths):
        raise UserError(
            f"base={tuple(at)} is not among widths={tuple(widths)} and "
            f"depths={tuple(depths)}, where the two axes cross; add it"
        )
    return at


def count_examples(data: Any) -> int:
    """The number of examples, after the shapes are checked."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(data)]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or 0 in counts:
        raise UserError(
            "data must be arrays with the same leading axis of examples; got shapes "
            f"{shapes}"
        )
    return counts.pop()


def parse_grid(
    grid: Mapping[str, str | Sequence[float]],
    make_model: Callable[..., Any],
    make_optimizer: Callable[..., Any],
) -> dict[str, tuple[float, ...]]:
    """The values of each hyperparameter, after its name is checked."""
    arguments = _hyperparameters(make_model) | _hyperparameters(make_optimizer)
    if not isinstance(grid, Mapping):
        raise UserError(
            f"grid={grid!r} must be a dictionary of hyperparameters and their values, "
            'e.g. {"learning_rate": (0.1, 0.2)}'
        )
    axes = {}
    for name, values in grid.items():
        if name in _RESERVED:
            raise UserError(
                f"the grid has {name!r}, which mupax passes itself; give sizes as "
                "widths, depths or sizes, or rename the hyperparameter"
            )
        if name not in arguments:
            raise UserError(
                f"the grid has {name!r}, and neither make_model nor make_optimizer "
                f"takes an argument of that name; {_taken(name, arguments)}"
            )
        axes[name] = grids.parse(name, values)
        # Here a share such as warmup may be a number of steps.
        if grids.unit(name) != "linear":
            try:
                grids.check_range(name, axes[name])
            except UserError as error:
                raise UserError(
                    f"{error}; leave the value out, or give the hyperparameter another "
                    "name if it means something else"
                ) from None
    if not axes:
        raise UserError('the grid is empty; e.g. {"learning_rate": (0.1, 0.2)}')
    return axes


def _hyperparameters(function: Callable[..., Any]) -> set[str]:
    """Names of arguments after the first, which is the key or the model."""
    others = list(inspect.signature(function).parameters.values())[1:]
    return {p.name for p in others if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _taken(name: str, arguments: set[str]) -> str:
    """The hyperparameters that the functions take, for an error about another name."""
    names = sorted(arguments.difference(_RESERVED))
    if not names:
        return f"they take no hyperparameter; give one of them an argument {name!r}"
    return f"they take {', '.join(map(repr, names))}{nearest(name, names)}"


@contextlib.contextmanager
def opened(
    folder: str | os.PathLike[str] | None,
) -> Iterator[pathlib.Path | None]:
    """Make the folder, or open its address in object storage; None for no folder.

    Raises:
      UserError: the folder cannot be made, or its address cannot be used.
    """
    if folder is None:
        yield None
        return
    if not isinstance(folder, str | os.PathLike):
        raise UserError(f"folder={folder!r} must be a path, or None")
    with mirror.opened(os.fspath(folder)) as at:
        try:
            place = at.expanduser()
            place.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte
            raise UserError(
                f"folder={os.fspath(folder)!r} cannot be made: {error}; choose another"
            ) from None
        yield place


def settings_text(settings: Any) -> str | None:
    """Settings as text, with public addresses; None if there are none."""
    try:
        text = json.dumps(settings, sort_keys=True)
        return None if settings is None else public(text)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"settings must be JSON-ready data (numbers, text, lists, dicts): {error}"
        ) from None


def check_executor(executor: Any, task: OwnTask) -> None:
    """Raise UserError if it is no executor, or cannot be sent the functions."""
    if executor is not None and not hasattr(executor, "submit"):
        raise UserError(
            f"executor={executor!r} has no method submit; pass a "
            "concurrent.futures.Executor, e.g. ProcessPoolExecutor(2), or "
            "client.get_executor() of Dask"
        )
    if not isinstance(executor, concurrent.futures.ProcessPoolExecutor):
        return
    try:
        pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"the functions cannot be sent to another process ({error}); define them "
            "at the top level of a module, or use an executor of Dask"
        ) from None

"""Sweeps of one's own model: four functions in place of a config."""

import concurrent.futures
import contextlib
import dataclasses
import inspect
import json
import math
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.progress
from absl import logging
from jaxtyping import Array, Float

from mupax.optim.display import html_table

from ..errors import UserError
from ..io import write_durably
from ..memory import check as check_memory
from . import (
    engine,
    executors,
    fingerprint,
    grids,
    optima,
    statistics,
    transfers,
    verdict,
)
from .engine import Limits as Limits
from .own import OwnTask
from .results import Population

_RESERVED = ("key", "model", "width", "depth")


@dataclasses.dataclass(frozen=True, repr=False)
class Sweep:
    """What `sweep` returns: a table when printed.

    Attributes:
      populations: all runs, one population a shape.
      verdicts: as `transfers.verdicts` gives them, for "width", for "depth" and, where
        `sizes` were swept, for "joint": from the base to shapes of another width and
        depth. "regret" says which share of its loss the largest model gives up at the
        base's best value, with a 90 % interval.
      base: the sizes where the axes cross.
    """

    populations: list[Population]
    verdicts: Mapping[str, Any]
    base: statistics.Sizes

    @property
    def best(self) -> dict[str, float]:
        """The best point of the base model's grid; the optimum, where one is fitted.

        Raises:
          UserError: every run of the base diverged.
        """
        base = _population(self.populations, *self.base)
        if not np.isfinite(base.loss).any():
            raise UserError(
                f"every run of the base, width {base.width} and depth {base.depth}, "
                "diverged; extend the grid to smaller values"
            )
        found = base.best()
        if len(found) == 1:
            (name,) = found
            best = optima.optimum(base.cell(name))
            if best is not None:
                found[name] = grids.value(name, best.log2_lr)
        return found

    def __repr__(self) -> str:
        runs = sum(population.loss.size for population in self.populations)
        base = f"base {self.base.width} x {self.base.depth}"
        told = "; ".join(f"{name}: {words}" for name, words, *_ in self._told())
        return f"<Sweep of {runs} runs, {base}; {told}>"

    def __str__(self) -> str:
        lines = []
        for name, words, at, change in self._told():
            lines.append(f"{name}: {words}")
            lines.append(f"  best at {at}" + f"; {change}" * bool(change))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = ["hyperparameter", "verdict", "best at", "change of the best value"]
        title = f"{len(self.populations)} shapes, base {self.base.width} x "
        return html_table(title + str(self.base.depth), head, self._told())

    def _told(self) -> list[tuple[str, str, str, str]]:
        """(what over which axis, the verdict, the optima by size, their change)."""
        rows = []
        for name, by_key in self.verdicts.items():
            for axis, told in next(iter(by_key.values())).items():
                if axis == "predicted":
                    continue
                at = ", ".join(
                    f"{_size_text(size)}: "
                    + ("none" if x is None else f"{grids.value(name, x):.3g}")
                    for size, x in zip(told["sizes"], told["optimum"], strict=True)
                )
                over = "width and depth" if axis == "joint" else axis
                rows.append((f"{name} over {over}", told["words"], at, told["change"]))
        return rows


def sweep(
    make_model: Callable[..., Any],
    make_optimizer: Callable[..., optax.GradientTransformation],
    loss: Callable[[Any, Any], Float[Array, ""]],
    data: Any,
    *,
    grid: Mapping[str, str | Sequence[float]],
    widths: Sequence[int] = (),
    depths: Sequence[int] = (),
    sizes: Sequence[tuple[int, int]] = (),
    base: tuple[int, int] | None = None,
    seeds: int = 3,
    steps: int = 200,
    batch_size: int = 64,
    average_last: int | None = None,
    guess: float | None = None,
    folder: str | os.PathLike[str] | None = None,
    settings: Any = None,
    executor: Any = None,
    limits: engine.Limits | None = None,
    progress: bool | None = None,
) -> Sweep:
    """Train a model at several sizes over a grid, and say where its optimum goes.

    Each shape is one program, of which the grid and the seeds are axes: vmapped on
    accelerators, while a core of a CPU trains one run after another.

    With a `folder`, finished runs are kept and used by the next call, also after a
    kill. They are used only where the program is the same: the initialization and the
    training step are lowered and compared with their constants, with the data, the
    steps and the batch size. A changed class, global or config value trains again.

    Args:
      make_model: `make_model(key, width=..., depth=..., **hyper)`: the model at
        initialization: an NNX module, Linen variables, an Equinox module, any pytree.
        It gets those of the hyperparameters that are among its named arguments. They
        are traced.
      make_optimizer: `make_optimizer(model, width=..., depth=..., **hyper)`, likewise.
      loss: `loss(model, batch)`, a scalar.
      data: a pytree of arrays with a leading axis of examples; a batch is some of
        them.
      grid: for each hyperparameter numbers, or a range, as "2**[-12:-3:1]". Of
        several all combinations are run.
      widths: swept at the base's depth.
      depths: swept at the base's width.
      sizes: further (width, depth), as the target's own shape, to compare with the
        base.
      base: (width, depth); by default the first of `widths` and of `depths`, or the
        first of `sizes`.
      seeds: of initialization and of the order of examples.
      steps: of each run.
      batch_size: examples a step.
      average_last: a run's loss is the mean over so many last steps; a quarter of
        them by default.
      guess: loss of a guesser, as log of the number of classes; a run that ends
        above twice of it has diverged. None: only where it is no number.
      folder: where finished runs are kept, and results.csv and report.html are
        written; None for nowhere.
      settings: JSON-ready data that stands for your code: the stored runs are used
        wherever `settings` is the same, whatever the program. None compares the
        program. Needed only for programs that call back into Python.
      executor: any `concurrent.futures.Executor`, which needs a `folder`; None runs
        here.
      limits: of memory, and of runs at once (`Limits(lanes=...)`). Runs that are
        trained at once are written at once: on a CPU those of one grid point, on
        accelerators by default all of a shape that fit into memory.
      progress: whether to show a progress bar; None shows it in a terminal.

    Returns:
      A `Sweep`: print it, or read `.best`, `.verdicts` and `.populations`.

    Raises:
      UserError: a grid that does not parse, sizes that cannot be compared, a
        hyperparameter that neither function takes, or a failure inside one of the
        functions: it names the function, the shape and what was traced.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from mupax.experiments.sweep.api import sweep
      >>> def model(key, width, depth):
      ...     return {"w": jax.random.normal(key, (2, width))}
      >>> def loss(model, x):
      ...     return jnp.mean((x @ model["w"]) ** 2)
      >>> def optimizer(model, learning_rate, **sizes):
      ...     return optax.sgd(learning_rate)
      >>> found = sweep(
      ...     model, optimizer, loss, jnp.ones((64, 2)),
      ...     grid={"learning_rate": "2**[-3:1:1]"},
      ...     widths=(4, 8), depths=(1,), seeds=2, steps=3, batch_size=8)
      >>> list(found.verdicts["learning_rate"]["own"])
      ['depth', 'width']
    """
    at = _base(widths, depths, sizes, base)
    numbers = {"seeds": seeds, "steps": steps, "batch_size": batch_size}
    average_last = max(1, steps // 4) if average_last is None else average_last
    _check_numbers(**numbers, average_last=average_last)
    if average_last > steps:
        raise UserError(f"average_last={average_last} is more than the {steps} steps")
    if executor is not None and folder is None:
        raise UserError("an executor's workers meet in a folder; pass folder=...")
    examples = _count(data)
    if batch_size > examples:
        raise UserError(
            f"batch_size={batch_size} is more than the {examples} examples of data; "
            "make it smaller"
        )
    axes = _axes(grid, make_model, make_optimizer)
    points = seeds * math.prod(map(len, axes.values()))
    # The order of examples of each seed; and a learning curve of each run, with text.
    check_memory(
        16.0 * seeds * steps * batch_size + 4096.0 * points,
        f"{points} runs of {steps} steps of {batch_size}",
        "make steps, seeds, batch_size or the grid smaller",
    )
    place = _folder(folder)
    limits = limits or engine.Limits()
    common = OwnTask(
        *at,
        seeds,
        steps,
        batch_size,
        average_last,
        tuple(axes.items()),
        make_model,
        make_optimizer,
        loss,
        guess,
        data="" if folder is None else fingerprint.of_arrays(data),
        settings=_settings(settings),
        stop_diverged=limits.stop_diverged,
    )
    shapes = {(at.width, d) for d in depths} | {(w, at.depth) for w in widths}
    shapes |= {(at.width, at.depth), *((int(w), int(d)) for w, d in sizes)}
    tasks = [
        dataclasses.replace(common, width=width, depth=depth)
        for width, depth in sorted(shapes)
    ]
    _check_executor(executor, tasks[0])
    data = jax.tree.map(jnp.asarray, data)
    with _bar(tasks, progress, executor) as (on_done, on_runs):
        populations = executors.run_all(
            tasks,
            data,
            place,
            _kept_often(limits, seeds, place),
            executor,
            on_done,
            ahead=False,  # the caller's code is traced in the caller's thread
            on_runs=on_runs,
        )
    found = Sweep(populations, _verdicts(populations, at, sizes), at)
    if place is not None:
        try:
            _report(found, place, tasks[0])
        except OSError as error:  # the runs are there, and are returned
            logging.warning("%s: the report cannot be written: %s", place, error)
    return found


# ----- Arguments.


def _base(
    widths: Sequence[int],
    depths: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    base: tuple[int, int] | None,
) -> statistics.Sizes:
    """The sizes where the axes cross, once all sizes are known to be good."""
    try:
        pairs = [(width, depth) for width, depth in [*sizes, *([base] if base else [])]]
    except (TypeError, ValueError):
        raise UserError(
            f"sizes={sizes!r} and base={base!r} must be pairs (width, depth)"
        ) from None
    for name, values in (
        ("widths", widths),
        ("depths", depths),
        ("sizes", [size for pair in pairs for size in pair]),
    ):
        for x in values:
            if not isinstance(x, (int, np.integer)) or isinstance(x, bool) or x < 1:
                raise UserError(f"{name} must hold integers of at least 1; got {x!r}")
    if base is None and not (widths and depths) and not sizes:
        raise UserError("give widths and depths, or sizes as pairs (width, depth)")
    first = (widths[0], depths[0]) if widths and depths else pairs[0]
    at = statistics.Sizes(*map(int, base or first))
    lost = widths and at.width not in widths, depths and at.depth not in depths
    if any(lost):
        raise UserError(
            f"base={tuple(at)} is not among widths={tuple(widths)} and "
            f"depths={tuple(depths)}, where the two axes cross; add it"
        )
    return at


def _check_numbers(**numbers: Any) -> None:
    for name, x in numbers.items():
        if not isinstance(x, (int, np.integer)) or isinstance(x, bool) or x < 1:
            raise UserError(f"{name} must be an integer of at least 1; got {x!r}")


def _count(data: Any) -> int:
    """How many examples there are."""
    leaves = jax.tree.leaves(data)
    counts = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        shapes = [np.shape(leaf) for leaf in leaves]
        raise UserError(
            "data must be arrays with the same leading axis of examples; got shapes "
            f"{shapes}"
        )
    return counts.pop()


def _axes(
    grid: Mapping[str, str | Sequence[float]],
    make_model: Callable[..., Any],
    make_optimizer: Callable[..., Any],
) -> dict[str, tuple[float, ...]]:
    """The grid's values, once each of its names is known to be used."""
    taken = {
        name
        for function in (make_model, make_optimizer)
        for name in inspect.signature(function).parameters
    }
    axes = {}
    for name, values in grid.items():
        if name in _RESERVED:
            raise UserError(
                f"the grid has {name!r}, which mupax passes itself; give sizes as "
                "widths, depths or sizes, or rename the hyperparameter"
            )
        if name not in taken:
            raise UserError(
                f"the grid has {name!r}, and neither make_model nor make_optimizer "
                "takes an argument of that name"
            )
        axes[name] = grids.parse(name, values)
        # A name of our own, as warmup, may be a number of steps here.
        if grids.unit(name) != "linear":
            try:
                grids.check_range(name, axes[name])
            except UserError as error:
                raise UserError(
                    f"{error}; leave the value out, or give the hyperparameter another "
                    "name if it means something else"
                ) from None
    if not axes:
        raise UserError('the grid is empty; give one, as {"learning_rate": (0.1, 0.2)}')
    return axes


def _folder(folder: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """The folder, made before anything is trained."""
    if folder is None:
        return None
    try:
        place = pathlib.Path(folder).expanduser()
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        raise UserError(
            f"folder={os.fspath(folder)!r} cannot be made: {error}; choose another"
        ) from None
    return place


def _settings(settings: Any) -> str | None:
    if settings is None:
        return None
    try:
        return json.dumps(settings, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"settings must be JSON-ready data (numbers, text, lists, dicts): {error}"
        ) from None


def _check_executor(executor: Any, task: OwnTask) -> None:
    """Refuse functions that cannot be sent to other processes."""
    if not isinstance(executor, concurrent.futures.ProcessPoolExecutor):
        return
    try:
        pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"the functions cannot be sent to another process ({error}); define them "
            "at the top level of a module, or use an executor of Dask"
        ) from None


def _kept_often(limits: engine.Limits, seeds: int, place: Any) -> engine.Limits:
    """A CPU trains one run after another: then each grid point is kept at once."""
    if limits.lanes or place is None or jax.default_backend() != "cpu":
        return limits
    return dataclasses.replace(limits, lanes=seeds * jax.local_device_count())


# ----- Progress.


@contextlib.contextmanager
def _bar(
    tasks: Sequence[OwnTask], wanted: bool | None, executor: Any
) -> Iterator[tuple[Callable[[Any], None], Callable[[int], None]]]:
    """A progress bar, and what moves it: called for each task, and for its runs."""
    console = rich.console.Console(stderr=True)
    if not (console.is_terminal if wanted is None else wanted):
        yield (lambda task: None), (lambda count: None)
        return
    # Matrix products a run; here one task is trained after another, in this order.
    work = {task.name: task.depth * task.width**2 for task in tasks}
    total = sum(task.runs * work[task.name] for task in tasks)
    waiting, done = list(tasks), 0
    columns = (
        *rich.progress.Progress.get_default_columns(),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as shown:
        bar = shown.add_task("sweep", total=total)

        def on_runs(count: int) -> None:
            shown.advance(bar, count * work[waiting[0].name])

        def on_done(task: Any) -> None:
            nonlocal done
            waiting[:] = [other for other in waiting if other.name != task.name]
            done += task.runs * work[task.name]
            shown.update(bar, completed=done, description=f"swept {task.name}")

        yield on_done, on_runs


# ----- Verdicts.


def _verdicts(
    populations: Sequence[Population],
    base: statistics.Sizes,
    sizes: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """The verdicts over width, depth and both."""
    found = transfers.transfers(populations, base)
    pairs = {tuple(map(int, pair)) for pair in sizes} - {tuple(base)}
    chain = [tuple(base), *sorted(pairs, key=lambda pair: (math.prod(pair), pair))]
    if pairs:
        names = dict.fromkeys(one.name for one in found)
        found += [
            verdict.transfer(
                [_population(populations, *pair).cell(name) for pair in chain],
                "joint",
                name=name,
            )
            for name in names
        ]
    return transfers.verdicts(found, base)


def _size_text(size: int | Sequence[int]) -> str:
    """A width or depth, or both."""
    return str(size) if isinstance(size, int) else " x ".join(map(str, size))


def _population(
    populations: Sequence[Population], width: int, depth: int
) -> Population:
    return next(p for p in populations if (p.width, p.depth) == (width, depth))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _report(found: Sweep, folder: pathlib.Path, task: OwnTask) -> None:
    """Write results.csv and report.html beside the finished runs."""
    from .. import report  # drawing is slow to import, and not always wanted

    data = report.SweepData(
        populations=found.populations,
        base=found.base,
        labels={task.parametrization: "this model"},
        featured=task.parametrization,
        steps=task.steps,
        settings={
            "sweep": {
                "seeds": task.seeds,
                "steps": task.steps,
                "batch_size": task.batch_size,
                "average_last": task.average_last,
                **task.grid,
            },
            "machine": report.machine(),
        },
        subject=getattr(task.make_model, "__name__", "a model of one's own"),
        command="",
    )
    write_durably(folder / "results.csv", data.table)
    report.write_report(data, folder)

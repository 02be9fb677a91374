"""Sweeps of one's own model: four functions in place of a config."""

import dataclasses
import hashlib
import inspect
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from mupax.optim.coord_check import _split

from ..errors import UserError
from ..io import write_durably
from ..run.step import Hyper, Recipe
from . import engine, executors, grids, optima, statistics, verdict
from .results import Population
from .tasks import Task, Training, own_training


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What `sweep` returns: a table when printed.

    Attributes:
      populations: all runs, one population a shape.
      verdicts: as `verdict.verdicts` gives them.
      base: the sizes where the axes cross.
    """

    populations: list[Population]
    verdicts: Mapping[str, Any]
    base: statistics.Sizes

    @property
    def best(self) -> dict[str, float]:
        """The best point of the base model's grid; the optimum, where one is fitted."""
        base = next(
            p for p in self.populations if (p.width, p.depth) == tuple(self.base)
        )
        found = base.best()
        if len(found) == 1:
            (name,) = found
            best = optima.optimum(base.cell(name))
            if best is not None:
                found[name] = grids.value(name, best.log2_lr)
        return found

    def __str__(self) -> str:
        lines = []
        for name, by_key in self.verdicts.items():
            for axis, told in next(iter(by_key.values())).items():
                if axis == "predicted":
                    continue
                at = ", ".join(
                    f"{size}: "
                    + ("none" if x is None else f"{grids.value(name, x):.3g}")
                    for size, x in zip(told["sizes"], told["optimum"], strict=True)
                )
                lines.append(f"{name} over {axis}: {told['words']}  (best at {at})")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Own(Task):
    """A shape of the user's model."""

    width: int
    depth: int
    seeds: int
    steps: int
    batch_size: int
    average_last: int
    axes: tuple[tuple[str, tuple[float, ...]], ...]
    make_model: Callable[..., Any]
    make_optimizer: Callable[..., optax.GradientTransformation]
    loss: Callable[[Any, Any], Float[Array, ""]]
    guess: float | None
    data: str
    parametrization: str = "own"

    @property
    def name(self) -> str:
        """As a file is named."""
        return f"w{self.width}-d{self.depth}"

    @property
    def grid(self) -> dict[str, tuple[float, ...]]:
        """The axes and their values."""
        return dict(self.axes)

    @property
    def chosen(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    @property
    def key(self) -> str:
        """The sizes, the data, and the source of the user's functions."""
        names = [name for name, _ in self.axes]
        numbers = (self.steps, self.batch_size, self.average_last, self.guess)
        made = (self.make_model, self.make_optimizer, self.loss)
        return f"{names}, {numbers}, {self.data}, " + ", ".join(map(_source, made))

    def training(self, data: Any) -> Training:
        """What is compiled."""
        sizes = {"width": self.width, "depth": self.depth}
        wanted = inspect.signature(self.make_model).parameters

        def build(key: jax.Array, hyper: Hyper) -> Any:
            mine = {k: x for k, x in hyper.items() if k in wanted}
            return self.make_model(key, **sizes, **mine)

        # One trace's model may not be used in another: each makes its own structure.
        def init(key: jax.Array, hyper: Hyper) -> tuple[Any, Any]:
            return _parts(build(key, hyper))[:2]

        def assemble(params: Any, rest: Any, hyper: Hyper) -> Any:
            # Of this one only the structure is used, so nothing else is compiled.
            twin = build(jax.random.key(0), hyper)
            return _parts(twin)[2](params, rest)

        def loss(params: Any, rest: Any, batch: Any, hyper: Hyper, key: Any) -> Any:
            model = assemble(params, rest, hyper)
            value = self.loss(model, batch)
            return value, (value, _parts(model)[1])

        def optimizer(
            hyper: Hyper, params: Any, rest: Any
        ) -> optax.GradientTransformation:
            used = inspect.signature(self.make_optimizer).parameters
            mine = {k: x for k, x in hyper.items() if k in used}
            return self.make_optimizer(assemble(params, rest, hyper), **sizes, **mine)

        return own_training(Recipe(loss, optimizer), init, data, self, self.guess)


def _source(function: Callable[..., Any]) -> str:
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):  # typed into a session
        text = repr(getattr(function, "__code__", function))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _digest(data: Any) -> str:
    """Tells data apart."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(data):
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:12]


def _parts(model: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """Trained weights, what changes beside them, and what puts both back."""
    if isinstance(model, nnx.Module):
        graph, params, *others = nnx.split(model, nnx.Param, ...)
        rest = others[0]
        return params, rest, lambda p, r: nnx.merge(graph, p, r, copy=True)
    params, assemble = _split(model)
    return params, (), lambda p, _: assemble(p)


def sweep(
    make_model: Callable[..., Any],
    make_optimizer: Callable[..., optax.GradientTransformation],
    loss: Callable[[Any, Any], Float[Array, ""]],
    data: Any,
    *,
    grid: Mapping[str, str | Sequence[float]],
    widths: Sequence[int],
    depths: Sequence[int],
    base: tuple[int, int] | None = None,
    seeds: int = 3,
    steps: int = 200,
    batch_size: int = 64,
    average_last: int | None = None,
    guess: float | None = None,
    folder: str | os.PathLike[str] | None = None,
    executor: Any = None,
    limits: engine.Limits | None = None,
) -> Sweep:
    """Train a model at several sizes over a grid, and say where its optimum goes.

    Each shape is one program, of which the grid and the seeds are axes: vmapped on
    accelerators, while a core of a CPU trains one run after another.

    Args:
      make_model: `make_model(key, width=..., depth=..., **hyper)`: the model at
        initialization: an NNX module, Linen variables, an Equinox module, any pytree.
        Of the hyperparameters it gets those that it names. They are traced.
      make_optimizer: `make_optimizer(model, width=..., depth=..., **hyper)`, likewise.
      loss: `loss(model, batch)`, a scalar.
      data: a pytree of arrays with a leading axis of examples; a batch is some of
        them.
      grid: for each hyperparameter numbers, or a range, as "2**[-12:-3:1]". Of
        several all combinations are run.
      widths: swept at the base's depth.
      depths: swept at the base's width.
      base: (width, depth); the first of each by default.
      seeds: of initialization and of the order of examples.
      steps: of each run.
      batch_size: examples a step.
      average_last: a run's loss is the mean over so many last steps; a quarter of
        them by default.
      guess: loss of a guesser, as log of the number of classes; a run that ends
        above twice of it has diverged. None: only where it is no number.
      folder: where finished runs are kept, for the next call of the same functions,
        and results.csv and report.html are written; None for nowhere.
      executor: any `concurrent.futures.Executor`, which needs a `folder`; None runs
        here.
      limits: of memory.

    Returns:
      A `Sweep`: print it, or read `.best`, `.verdicts` and `.populations`.

    Raises:
      UserError: a grid that does not parse, sizes that cannot be compared, or a
        hyperparameter that neither function takes.

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
    at = statistics.Sizes(*(base or (widths[0], depths[0])))
    if at.width not in widths or at.depth not in depths:
        raise UserError(
            f"base={tuple(at)} is not among widths={tuple(widths)} and "
            f"depths={tuple(depths)}, where the two axes cross; add it"
        )
    if executor is not None and folder is None:
        raise UserError("an executor's workers meet in a folder; pass folder=...")
    taken = {
        name
        for function in (make_model, make_optimizer)
        for name in inspect.signature(function).parameters
    }
    axes = {}
    for name, values in grid.items():
        if name not in taken:
            raise UserError(
                f"the grid has {name!r}, and neither make_model nor make_optimizer "
                "takes an argument of that name"
            )
        axes[name] = grids.parse(name, values)
        grids.check_range(name, axes[name])
    digest = _digest(data) if folder is not None else ""
    shapes = {(at.width, d) for d in depths} | {(w, at.depth) for w in widths}
    tasks = [
        _Own(
            width,
            depth,
            seeds,
            steps,
            batch_size,
            average_last or max(1, steps // 4),
            tuple(axes.items()),
            make_model,
            make_optimizer,
            loss,
            guess,
            digest,
        )
        for width, depth in sorted(shapes)
    ]
    data = jax.tree.map(jnp.asarray, data)
    limits = limits or engine.Limits()
    if folder is None:
        populations = [engine.run(task, data, None, limits) for task in tasks]
    else:
        place = pathlib.Path(folder)
        # The caller's own code is traced in the caller's thread.
        populations = executors.run_all(
            tasks, data, place, limits, executor, ahead=False
        )
    found = Sweep(populations, verdict.verdicts(populations, at), at)
    if folder is not None:
        _report(found, pathlib.Path(folder), tasks[0])
    return found


def _report(found: Sweep, folder: pathlib.Path, task: _Own) -> None:
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

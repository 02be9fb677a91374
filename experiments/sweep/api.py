"""`mupax.sweep`: a sweep of a user's own model, from three functions and data."""

import concurrent.futures
import contextlib
import dataclasses
import inspect
import itertools
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
from absl import logging
from jaxtyping import Array, Float

from .. import data as datasets
from .. import report
from ..checks import number as finite_number
from ..checks import optional, shown, whole
from ..errors import UserError, nearest
from ..memory import check as check_memory
from ..report import sentences
from ..run import bucket
from . import engine, fingerprint, grids, optima
from .engine import Limits as Limits
from .functions import KEY, FunctionTask
from .results import Population, Sizes
from .store import Store
from .training import PROCESSES, STORED, train

_RESERVED = ("key", "model", "width", "depth")


@dataclasses.dataclass(frozen=True, repr=False)
class Sweep:
    """The result of `sweep`: a table when printed.

    Attributes:
      data: all that a report shows.
    """

    data: report.SweepData

    @property
    def populations(self) -> Sequence[Population]:
        """All runs, a population for each shape."""
        return self.data.populations

    @property
    def base(self) -> Sizes:
        """The sizes where the axes cross."""
        return self.data.base

    @property
    def verdicts(self) -> Mapping[str, Any]:
        """By hyperparameter, "model", and axis of size.

        The axes are "width", "depth" and, where `sizes` were swept, "joint": from the
        base to shapes of another width and depth. "regret" is the share of its loss
        that the largest model gives up at the base's best value, with a 90 % interval.
        """
        return self.data.verdicts

    @property
    def best(self) -> dict[str, float]:
        """The best point of the base model's grid; the optimum, if one is fitted.

        Raises:
          UserError: every run of the base diverged.
        """
        base = self.data.at_base(KEY)
        if not np.isfinite(base.loss).any():
            raise UserError(
                f"every run of the base, width {base.width} and depth {base.depth}, "
                "diverged; extend the grid to smaller values. If it has small values "
                "already, check the data for NaN and for labels out of range"
            )
        best = base.best()
        if len(best) == 1:
            (name,) = best
            optimum = optima.optimum(base.cell(name))
            if optimum is not None:
                best[name] = grids.value(name, optimum.log2_lr)
        return best

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every run as a dictionary, e.g. for `pandas.DataFrame`.

        Its keys are parametrization, width, depth, the hyperparameters, seed and loss.
        The loss of a run that diverged is None.
        """
        return [row for population in self.populations for row in population.rows()]

    def plot(self, name: str = "learning_rate") -> list[Any]:
        """Draw loss against a hyperparameter, a figure for each axis of size.

        Args:
          name: of the hyperparameter.

        Returns:
          Figures of Matplotlib.

        Raises:
          UserError: it has one value only, or is unknown.
        """
        from ..report.page import sweep_figures  # imports Matplotlib

        return sweep_figures(self.data, name)

    def __repr__(self) -> str:
        lines = []
        for t in self.data.transfers:
            best = ", ".join(f"{size}: {best}" for size, best in sentences.best(t))
            lines.append(f"{t.name} over {t.over}: {t.words}")
            lines.append(
                f"  best at {best}" + f"; {t.change_words}" * bool(t.change_words)
            )
        return "\n".join(lines)


def sweep(
    make_model: Callable[..., Any],
    make_optimizer: Callable[..., optax.GradientTransformation],
    loss: Callable[..., Float[Array, ""]],
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
    executor: Any = None,
    limits: engine.Limits | None = None,
    progress: bool | None = None,
) -> Sweep:
    """Train a model at several sizes over a grid, and fit how its optimum changes.

    All runs of a shape are one compiled program: vmapped on accelerators, one run after
    another on a CPU core.

    With a `folder`, finished runs are stored and used by the next call, also after a
    kill. They are used only if the program is the same: the initialization and the
    training step are lowered and compared with their constants, with the data, the
    steps and the batch size. After an edit of a class, global or config value, the runs
    are trained again.

    Args:
      make_model: `make_model(key, width=..., depth=..., **hyper)` returns the model at
        initialization: an NNX module, Linen variables, an Equinox module, any pytree.
        It gets the hyperparameters that are among its named arguments. They are traced.
      make_optimizer: `make_optimizer(model, width=..., depth=..., **hyper)`, likewise.
      loss: `loss(model, batch)` returns a scalar that is not negative: verdicts compare
        shares of it. `loss(model, batch, key)` also gets a random key, another one at
        each step, e.g. for dropout and noise. Variables of an NNX model that the loss
        changes, such as batch statistics, are kept from step to step.
      data: a pytree of arrays with a leading axis of examples, of which batches are
        taken. An open `Dataset` of images, a dataset of Hugging Face or an iterator
        over (image, label) becomes {"image": uint8 (n, height, width, channels),
        "label": int32 (n,)}.
      grid: the values of each hyperparameter: numbers, or a range such as
        "2**[-12:-3:1]". All combinations are run.
      widths: swept at the base's depth.
      depths: swept at the base's width.
      sizes: more pairs (width, depth) to compare with the base, e.g. the target's;
        their width times depth is above that of the base.
      base: (width, depth); by default the first of `widths` and of `depths`, or the
        first of `sizes`.
      seeds: number of seeds of initialization and of the order of examples.
      steps: of each run.
      batch_size: examples of each step.
      average_last: a run's loss is the mean over so many last steps; by default a
        quarter of them.
      guess: chance-level loss, e.g. the log of the number of classes. A run that ends
        above twice this loss counts as diverged; a value does not transfer if some seed
        of the largest size ends at this loss there, and learns at another value. None:
        a run counts as diverged only if its loss is not finite.
      folder: stores finished runs, results.csv and report.html, on a disk or in object
        storage (s3://, gs://); None for nowhere.
      executor: any `concurrent.futures.Executor`, whose workers see the `folder`; None
        for this process.
      limits: of memory, and of runs at once (`Limits(lanes=...)`). Runs that train at
        once are stored at once, on accelerators by default all of a shape that fit into
        memory. On a CPU runs train in turn, and are stored every half minute.
      progress: whether to show progress on stderr: a bar in a terminal, elsewhere a
        line for each finished shape. None shows it outside of notebooks.

    Returns:
      A `Sweep`: print it, or read `.best`, `.verdicts` and `.populations`.

    Raises:
      UserError: a grid that does not parse, sizes that cannot be compared, a
        hyperparameter that neither function takes, a model of the same shapes at every
        width, or a failure inside one of the functions; it names the function, the
        shape and what was traced.

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
      >>> list(found.verdicts["learning_rate"]["model"])
      ['depth', 'width']
    """
    functions = {"make_model": make_model, "make_optimizer": make_optimizer}
    for name, function in {**functions, "loss": loss}.items():
        if not callable(function):
            raise UserError(f"{name} must be a function; got {shown(function)}")
    guess = float(guess) if isinstance(guess, jax.Array) else guess
    optional(finite_number(0, above=True))("guess", guess)
    shapes, at = _shapes(*map(_listed, (widths, depths, sizes, base)))
    average_last = max(1, steps // 4) if average_last is None else average_last
    numbers = {"seeds": seeds, "steps": steps, "batch_size": batch_size}
    for name, x in {**numbers, "average_last": average_last}.items():
        whole(most=10**15)(name, x)
    if average_last > steps:
        raise UserError(f"average_last={average_last} is more than the {steps} steps")
    if executor is not None and folder is None:
        raise UserError("an executor's workers share a folder; pass folder=...")
    data = datasets.examples_of(data)
    examples = _count_examples(data)
    if batch_size > examples:
        raise UserError(
            f"batch_size={batch_size} is more than the {examples} examples of data; "
            "make it smaller"
        )
    axes = _parse_grid(grid, make_model, make_optimizer)
    runs = seeds * math.prod(map(len, axes.values()))
    # The order of examples of each seed; and a learning curve of each run, with text.
    check_memory(
        16.0 * seeds * steps * batch_size + 4096.0 * runs,
        f"{runs} runs of {steps} steps of {batch_size}",
        "make steps, seeds, batch_size or the grid smaller",
    )
    limits = engine.Limits() if limits is None else limits
    if not isinstance(limits, engine.Limits):
        raise UserError(f"limits={limits!r} must be Limits(...), e.g. Limits(lanes=8)")
    tasks = [
        FunctionTask(
            *shape,
            seeds,
            steps,
            batch_size,
            average_last,
            axes,
            make_model,
            make_optimizer,
            loss,
            guess,
            data="" if folder is None else fingerprint.of_arrays(data),
        )
        for shape in shapes
    ]
    _check_executor(executor, tasks[0])
    with _opened(folder) as place:
        known, left = tasks, True
        if place is not None and executor is None:
            store = Store(place.absolute() / STORED)
            known = [task.bound(data) for task in tasks]
            left = any(engine.missing(task, store) for task in known)
        if left:
            _check_models(tasks)
        described = report.SweepData(
            base=at,
            steps=steps,
            labels={KEY: "this model"},
            featured=KEY,
            subject=getattr(make_model, "__name__", "this model"),
            settings={"sweep": {**numbers, "average_last": average_last, **axes}},
        )
        console = rich.console.Console(stderr=True)
        visible = not console.is_jupyter if progress is None else progress
        swept = train(
            known,
            described,
            limits,
            data=jax.tree.map(jnp.asarray, data),
            folder=place,
            executor=executor,
            ahead=False,  # the caller's code is traced in the caller's thread
            console=console if visible else None,
        )
    _warn(swept.populations, data)
    return Sweep(swept)


# ----- Arguments. Each error names one.


def _listed(x: Any) -> Any:
    """An array as a list, and everything else as it is."""
    return x.tolist() if isinstance(x, np.ndarray) else x


def _shapes(
    widths: Sequence[int],
    depths: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    base: tuple[int, int] | None,
) -> tuple[list[Sizes], Sizes]:
    """All sizes, by rising width, and that of the base."""
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
            whole()(f"a value in {name}", x)
    if base is None and not (widths and depths) and not sizes:
        raise UserError("give widths and depths, or sizes as pairs (width, depth)")
    first = (widths[0], depths[0]) if widths and depths else pairs[0]
    at = Sizes(*map(int, base or first))
    if (widths and at.width not in widths) or (depths and at.depth not in depths):
        raise UserError(
            f"base={tuple(at)} is not among widths={tuple(widths)} and "
            f"depths={tuple(depths)}, where the two axes cross; add it"
        )
    others = {Sizes(int(width), int(depth)) for width, depth in sizes} - {at}
    for pair in sorted(others):
        if math.prod(pair) <= math.prod(at):
            raise UserError(
                f"sizes has {tuple(pair)}, whose width times depth is not above that "
                f"of the base {tuple(at)}, and the verdict over both is one over this "
                "product: choose a smaller base=..., or leave this size out"
            )
    crossing = {Sizes(at.width, int(d)) for d in depths}
    crossing |= {Sizes(int(w), at.depth) for w in widths}
    return sorted({at, *crossing, *others}), at


def _count_examples(data: Any) -> int:
    """The number of examples, after the shapes are checked."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(data)]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or 0 in counts:
        raise UserError(
            "data must be arrays with the same leading axis of examples; got shapes "
            f"{shapes}"
        )
    return counts.pop()


def _parse_grid(
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
def _opened(
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
    with bucket.opened(os.fspath(folder)) as at:
        try:
            place = at.expanduser()
            place.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte
            raise UserError(
                f"folder={os.fspath(folder)!r} cannot be made: {error}; choose another"
            ) from None
        yield place


def _check_executor(executor: Any, task: FunctionTask) -> None:
    """Raise UserError if it is no executor, or cannot be sent the functions."""
    if executor is not None and not hasattr(executor, "submit"):
        raise UserError(
            f"executor={executor!r} has no method submit; pass a "
            f"concurrent.futures.Executor, e.g. {PROCESSES}, or "
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


# ----- Mistakes in the user's functions and data.


def _check_models(tasks: Sequence[FunctionTask]) -> None:
    """Raise UserError for models of one shape; warn of one that is not scaled."""
    for small, other in itertools.pairwise(tasks):  # sorted by width
        if small.width < other.width and small.shapes == other.shapes:
            raise UserError(
                "make_model returned parameters of the same shapes for "
                f"width={small.width} and width={other.width}; use its argument width "
                "to build the model"
            )
    large = tasks[-1]
    if len(tasks) > 1 and not large.is_scaled():
        logging.warning(
            "mupax scales nothing in the optimizer that make_optimizer returned for "
            "width=%d, depth=%d. That is right if you scale it yourself, or measure a "
            "model without scaling. Otherwise return an optimizer of mupax.optim, made "
            "from the scales of this size.",
            large.width,
            large.depth,
        )
    if large.seeds > 1 and not tasks[0].uses_key():
        logging.warning(
            "make_model returned the same parameters for two keys, so that intervals "
            "leave out what initialization changes. That is right if you start from "
            "fixed weights; otherwise use the key, as in nnx.Rngs(key)."
        )


def _warn(populations: Sequence[Population], data: Any) -> None:
    """Warn of data that are not finite, and of arguments without effect."""
    if not any(np.isfinite(p.loss).any() for p in populations):
        for path, x in jax.tree_util.tree_leaves_with_path(data):
            if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
                continue
            if bad := int(np.sum(~np.isfinite(np.asarray(x)))):
                logging.warning(
                    "every run diverged, and data%s has %d values that are not finite; "
                    "leave these examples out",
                    jax.tree_util.keystr(path),
                    bad,
                )
        return
    for at, (name, values) in enumerate(populations[0].axes.items(), 1):
        if len(values) > 1 and all(_equal_along(p.loss, at) for p in populations):
            logging.warning(
                "%r changes no loss: all its values give bit-identical results. Use "
                "the argument in make_model or make_optimizer, or leave it out of the "
                "grid",
                name,
            )
    for one, other in itertools.combinations(populations, 2):
        same = np.array_equal(one.loss, other.loss, equal_nan=True)
        if same and np.isfinite(one.loss).any():
            logging.warning(
                "all losses of width %d, depth %d and of width %d, depth %d are "
                "bit-identical; use the arguments width and depth of make_model to "
                "build the model",
                *one.sizes,
                *other.sizes,
            )
            return


def _equal_along(loss: np.ndarray, axis: int) -> bool:
    """Whether losses, some of them finite, are equal along an axis."""
    first = loss.take([0], axis)
    return bool(np.isfinite(loss).any()) and np.array_equal(
        loss, np.broadcast_to(first, loss.shape), equal_nan=True
    )

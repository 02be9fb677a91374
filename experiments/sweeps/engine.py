"""Populations: many trainings of one shape as one program.

Seeds and grid points are axes of `jax.vmap`, steps a `lax.scan`, depth a scanned axis
of the model; the data stays on the device. A run that diverges fills its own lane
with NaN and no other. A population is split into chunks that fit into memory, and the
lanes of a chunk are shared among the devices.
"""

import abc
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from mupax import optim, zoo
from mupax.optim.paths import map_with_paths

from ..data import Held, batch_indices
from ..errors import UserError
from ..training.optimizer import build_optimizer
from . import hyperparameters, memory
from .results import Cell, Population
from .store import Run, Store

POINTS = 40  # of a learning curve that is kept

# A run that ends above so many times the loss of guessing counts as diverged.
_HOPELESS = 2.0
# With stop_diverged a run is given up where its loss is above so many times that.
_GIVEN_UP = 16.0

# On a CPU the time goes into matrix products, which are called, not compiled: half
# the compile time for the same speed (benchmarks/sweep.py).
_COMPILER: dict[str, dict[str, str | bool]] = {
    "cpu": {"xla_backend_optimization_level": "1"}
}

Hyper = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may take.

    Attributes:
      share: of the free memory.
      lanes: at most so many runs at once; 0 for as many as fit.
      stop_diverged: no step is done for a chunk whose every run has diverged.
    """

    share: float = 0.5
    lanes: int = 0
    stop_diverged: bool = False


class Task(abc.ABC):
    """Trainings of one shape, which differ in numbers and seeds."""

    parametrization: str
    width: int
    depth: int
    seeds: int
    steps: int
    batch_size: int
    average_last: int

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """As a file is named."""

    @property
    @abc.abstractmethod
    def grid(self) -> dict[str, tuple[float, ...]]:
        """The axes and their values."""

    @property
    @abc.abstractmethod
    def chosen(self) -> dict[str, Any]:
        """What is no axis and yet differs between tasks."""

    @property
    @abc.abstractmethod
    def key(self) -> str:
        """Tells tasks apart whose runs differ."""

    @abc.abstractmethod
    def training(self, data: Any) -> "Training":
        """What is compiled."""

    @property
    def runs(self) -> int:
        """How many trainings it holds."""
        return self.seeds * math.prod(map(len, self.grid.values()))


@dataclasses.dataclass(frozen=True)
class Training:
    """The functions of a training; all are traced, for one lane.

    Attributes:
      init: (key, hyper) to (trained weights, variables that change, those that do
        not). The last may not depend on `hyper`.
      loss: (weights, changing, fixed, batch, hyper) to (what is minimized, (the loss
        that is kept, changing)).
      optimizer: (weights, changing, fixed, hyper) to an optimizer.
      examples: arrays with a leading axis of examples.
      count: how many there are.
      guess: loss of a guesser; None where nobody knows.
    """

    init: Callable[[jax.Array, Hyper], tuple[Any, Any, Any]]
    loss: Callable[[Any, Any, Any, Any, Hyper], tuple[jax.Array, tuple[Any, Any]]]
    optimizer: Callable[[Any, Any, Any, Hyper], optax.GradientTransformation]
    examples: Any
    count: int
    guess: float | None


@dataclasses.dataclass(frozen=True)
class Job(Task):
    """A cell to be run: a zoo model of one shape.

    Attributes:
      parametrization: its key in the config.
      point: the parametrization itself.
      width: of the model.
      depth: of the model.
      model: name and options of the zoo model, as pairs.
      base_width: the width that was tuned.
      base_depth: the depth that was tuned.
      optimizer: name and options of an optimizer of `mupax.optim`, as pairs.
      log2_lr: the grid of learning rates.
      seeds: number of seeds.
      steps: number of steps.
      batch_size: examples a step.
      average_last: a run's loss is the mean over its last steps.
      axes: further hyperparameters and their grids, as pairs. Warm-up is counted as
        a share of the steps.
      schedule: its name and options, as pairs; constant where there are none.
      label_smoothing: share of each label that is spread over all classes.
      choices: what tells it from other jobs of its shape, as pairs.
    """

    parametrization: str
    point: optim.Parametrization
    width: int
    depth: int
    model: tuple[tuple[str, Any], ...]
    base_width: int
    base_depth: int
    optimizer: tuple[tuple[str, Any], ...]
    log2_lr: tuple[float, ...]
    seeds: int
    steps: int
    batch_size: int
    average_last: int
    axes: tuple[tuple[str, tuple[float, ...]], ...] = ()
    schedule: tuple[tuple[str, Any], ...] = ()
    label_smoothing: float = 0.0
    choices: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """As a file is named."""
        chosen = "".join(f"-{value}" for _, value in self.choices)
        return f"{self.parametrization}-w{self.width}-d{self.depth}{chosen}"

    @property
    def grid(self) -> dict[str, tuple[float, ...]]:
        """The axes and their values."""
        rates = tuple(2.0**x for x in self.log2_lr)
        return {"learning_rate": rates, **dict(self.axes)}

    @property
    def chosen(self) -> dict[str, Any]:
        """Its choices."""
        return dict(self.choices)

    @property
    def key(self) -> str:
        """All that decides a run, but for its seed and place in the grid."""
        names = [name for name, _ in self.axes]
        same = dataclasses.replace(self, log2_lr=(), seeds=0, axes=())
        return f"{same!r}, {names}"

    def build(
        self, data: Held, rngs: nnx.Rngs, hyper: Hyper | None = None
    ) -> nnx.Module:
        """The model, freshly initialized."""
        hyper, options = hyper or {}, dict(self.model)
        if "branch_multiplier" in hyper:
            options["branch_multiplier"] = optim.Traced(hyper["branch_multiplier"])
        return build_model(
            options,
            data,
            width=self.width,
            depth=self.depth,
            base_width=self.base_width,
            base_depth=self.base_depth,
            parametrization=self._point(hyper),
            rngs=rngs,
        )

    def _point(self, hyper: Hyper) -> optim.Parametrization:
        if "richness" not in hyper:
            return self.point
        traced: Any = optim.Traced(hyper["richness"])
        return dataclasses.replace(self.point, richness=traced)

    def training(self, data: Held) -> Training:
        """What is compiled."""
        abstract = nnx.eval_shape(lambda: self.build(data, nnx.Rngs(0)))
        scales = zoo.scales(abstract)
        kinds = (nnx.Param, zoo.Frozen, ...)

        def init(key: jax.Array, hyper: Hyper) -> tuple[Any, Any, Any]:
            rngs = nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1))
            params, fixed, rest = nnx.state(self.build(data, rngs), *kinds)
            if "init_scale" in hyper:
                params = _scaled_init(params, scales, hyper["init_scale"])
            return params, rest, fixed

        def loss(
            params: Any, rest: Any, fixed: Any, batch: Any, hyper: Hyper
        ) -> tuple[jax.Array, Any]:
            # Static parts of a model may hold traced numbers: made anew in each trace.
            twin = nnx.eval_shape(
                lambda: self.build(data, nnx.Rngs(0, dropout=1), hyper)
            )
            # Copied: batch statistics change under the trace of the gradient.
            model = nnx.merge(nnx.graphdef(twin), params, fixed, rest, copy=True)
            inputs, labels = data.inputs(batch)
            logits = model(inputs)
            smoothing = hyper.get("label_smoothing", self.label_smoothing)
            # Losses under different smoothing cannot be compared: one without is kept.
            value, kept = hyperparameters.losses(logits, labels, smoothing)
            return value, (kept, nnx.state(model, *kinds)[2])

        def optimizer(
            params: Any, rest: Any, fixed: Any, hyper: Hyper
        ) -> optax.GradientTransformation:
            options = dict(self.optimizer)
            for name in hyperparameters.of_optimizer(options["name"]):
                if name in hyper:
                    options[name] = hyper[name]
            schedule = {"name": "constant", **dict(self.schedule)}
            if "warmup" in hyper:
                schedule["warmup"] = hyper["warmup"] * self.steps
            rate = hyperparameters.schedule(
                peak=hyper["learning_rate"], steps=self.steps, **schedule
            )
            return build_optimizer(options, rate, scales, self._point(hyper))

        return Training(
            init,
            loss,
            optimizer,
            data.examples,
            len(data.examples[0]),
            math.log(data.num_classes),
        )


def _scaled_init(params: Any, scales: optim.Scales, factor: jax.Array) -> Any:
    """The weights that have a fan-in, times a factor; biases and norms as they are."""

    def scaled(path: str, leaf: jax.Array) -> jax.Array:
        return leaf * factor.astype(leaf.dtype) if scales[path].in_axes else leaf

    return map_with_paths(scaled, params)


def build_model(
    options: dict[str, Any], data: Held, *, rngs: nnx.Rngs, **sizes: Any
) -> nnx.Module:
    """A zoo model for a dataset.

    Args:
      options: `name`, and the model's own options.
      data: tells the sizes of input and output.
      rngs: random state.
      **sizes: `width`, `depth` and their bases, `parametrization`.
    """
    options = dict(options)
    return zoo.create(
        options.pop("name"),
        **data.model_options,
        **options,
        **sizes,
        rngs=rngs,
    )


def run(
    task: Task, data: Any, store: Store | None = None, limits: Limits | None = None
) -> Population:
    """Run what a store lacks of a task; each finished chunk is kept at once.

    Args:
      task: the trainings.
      data: what it trains on.
      store: where finished runs are; None for nowhere.
      limits: of memory.

    Raises:
      UserError: a single run does not fit into memory.
    """
    start = time.perf_counter()
    limits = limits or Limits()
    training = task.training(data)
    axes = task.grid
    points = list(itertools.product(*axes.values()))
    done: dict[Run, Any] = store.runs(task.name, task.key) if store else {}
    missing = [
        at for at in points if any((s, at) not in done for s in range(task.seeds))
    ]
    if missing:
        chunks = _Chunks(task, training, limits, len(missing))
        while missing:
            now, missing = missing[: chunks.points], missing[chunks.points :]
            losses = chunks(now)
            if losses is None:  # too large after all; it has become smaller
                missing = now + missing
                continue
            fresh = _records(task, now, losses, training.guess)
            if store is not None:
                store.add(task.name, task.key, fresh)
            done |= fresh
    table = [[done[s, at] for at in points] for s in range(task.seeds)]
    found = np.array(table, dtype=float)  # (seeds, points, 1 + POINTS)
    sizes = tuple(map(len, axes.values()))
    return Population(
        task.name,
        task.parametrization,
        task.width,
        task.depth,
        task.chosen,
        {name: list(values) for name, values in axes.items()},
        found[..., 0].reshape(task.seeds, *sizes),
        found[..., 1:].reshape(task.seeds, *sizes, -1),
        time.perf_counter() - start,
    )


def compile_cell(job: Job, data: Held) -> Callable[[], Cell]:
    """A job as a function that runs it, for benchmarks and tests.

    Returns:
      A function of no arguments; its cell counts compilation into `seconds`.
    """
    return lambda: run(job, data).cell()


class _Chunks:
    """A compiled program for as many runs at once as memory allows."""

    def __init__(self, task: Task, training: Training, limits: Limits, missing: int):
        self._task, self._training, self._limits = task, training, limits
        self._devices = jax.local_device_count()
        self._rows = task.seeds  # seeds at once
        lanes = limits.lanes or missing * task.seeds
        self.points = min(missing, max(1, lanes // task.seeds))
        self._orders = np.stack(
            [
                batch_indices(training.count, task.batch_size, s, task.steps)
                for s in range(task.seeds)
            ],
            axis=1,
        )  # (steps, seeds, batch)
        self._keys = jax.random.split(jax.random.key(0), task.seeds)
        self._compile()

    def __call__(self, points: list[tuple[float, ...]]) -> np.ndarray | None:
        """Losses of shape (seeds, points, steps); None: out of memory, now smaller."""
        filled = points + points[-1:] * (self._width - len(points))
        hyper = self._hyper(filled)
        parts = []
        try:
            for first in range(0, self._task.seeds, self._rows):
                # The last part is as large as all, and begins earlier.
                begin = min(first, self._task.seeds - self._rows)
                rows = slice(begin, begin + self._rows)
                losses = self._program(
                    self._keys[rows],
                    self._orders[:, rows],
                    hyper,
                    self._training.examples,
                )
                parts.append(np.asarray(losses)[first - begin :, : len(points)])
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._shrink(0.5)
            return None
        return np.concatenate(parts)

    @property
    def _width(self) -> int:
        """Points of the program: a multiple of the devices."""
        return -(-self.points // self._devices) * self._devices

    def _hyper(self, points: list[tuple[float, ...]]) -> dict[str, np.ndarray]:
        table = np.array(points, np.float32)
        return dict(zip(self._task.grid, table.T, strict=True))

    def _compile(self) -> None:
        limit = self._limits.share * memory.available()
        while True:
            arguments = (
                self._keys[: self._rows],
                self._orders[:, : self._rows],
                self._hyper([(1.0,) * len(self._task.grid)] * self._width),
                self._training.examples,
            )
            program = _program(self._training, self._limits.stop_diverged)
            options = _COMPILER.get(jax.default_backend())
            self._program = program.lower(*arguments).compile(options)
            needed = memory.needed(self._program)
            if needed <= limit:
                return
            self._reduce(limit / needed, needed, limit)

    def _shrink(self, ratio: float) -> None:
        self._reduce(ratio, 0.0, 0.0)
        self._compile()

    def _reduce(self, ratio: float, needed: float, limit: float) -> None:
        if self.points > 1:
            self.points = max(1, math.floor(self.points * ratio))
        elif self._rows > 1:
            self._rows = max(1, math.floor(self._rows * ratio))
        else:
            raise UserError(
                f"one run of {self._task.name} does not fit into memory: it needs "
                f"{needed / 2**30:.3g} GiB of the {limit / 2**30:.3g} GiB that it may "
                "take; make batch_size or the model smaller, or sweep.memory_share "
                "larger"
            )


def _program(training: Training, stop_diverged: bool) -> Any:
    """Losses (seeds, points, steps) from keys, orders (steps, seeds, batch), hyper."""

    def start(key: jax.Array, hyper: Hyper) -> Any:
        params, rest, fixed = training.init(key, hyper)
        tx = training.optimizer(params, rest, fixed, hyper)
        return params, rest, tx.init(params)

    def step(state: Any, fixed: Any, hyper: Hyper, batch: Any) -> Any:
        params, rest, moments = state

        def loss(params: Any) -> Any:
            return training.loss(params, rest, fixed, batch, hyper)

        (_, (kept, rest)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        tx = training.optimizer(params, rest, fixed, hyper)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), rest, moments), kept

    def run(
        keys: jax.Array, orders: jax.Array, hyper: Hyper, examples: Any
    ) -> jax.Array:
        first = {name: values[0] for name, values in hyper.items()}
        fixed = jax.vmap(lambda key: training.init(key, first)[2])(keys)
        every = jax.vmap(jax.vmap(start, (None, 0)), (0, None))
        steps = jax.vmap(jax.vmap(step, (0, None, 0, None)), (0, 0, None, 0))

        def advance(state: Any, order: jax.Array) -> Any:
            # Every point of a seed sees the same batches.
            batch = jax.tree.map(lambda x: x[order], examples)
            return steps(state, fixed, hyper, batch)

        state = every(keys, hyper)
        if not stop_diverged:
            return jnp.moveaxis(jax.lax.scan(advance, state, orders)[1], 0, -1)

        def careful(carry: Any, order: jax.Array) -> Any:
            state, bound = carry
            nothing = jnp.full(bound.shape, jnp.nan)
            state, losses = jax.lax.cond(
                ~jnp.isnan(bound).all(),
                lambda s: advance(s, order),
                lambda s: (s, nothing),
                state,
            )
            # The bound of the first step is that of guessing, or of what it was.
            now = _GIVEN_UP * jnp.maximum(losses, training.guess or 0.0)
            bound = jnp.where(jnp.isinf(bound), now, bound)
            alive = losses < bound
            losses = jnp.where(alive, losses, jnp.nan)
            return (state, jnp.where(alive, bound, jnp.nan)), losses

        bound = jnp.full((len(keys), len(next(iter(hyper.values())))), jnp.inf)
        return jnp.moveaxis(jax.lax.scan(careful, (state, bound), orders)[1], 0, -1)

    if jax.local_device_count() == 1:
        return jax.jit(run)
    mesh = jax.make_mesh(
        (jax.local_device_count(),), ("runs",), axis_types=(AxisType.Auto,)
    )
    runs, none = PartitionSpec("runs"), PartitionSpec()
    shared = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    return jax.jit(
        shared(
            run,
            in_specs=(none, none, runs, none),
            out_specs=PartitionSpec(None, "runs"),
        )
    )


def _records(
    task: Task,
    points: list[tuple[float, ...]],
    losses: np.ndarray,
    guess: float | None,
) -> dict[Run, list[float | None]]:
    """Final loss and learning curve of each run; None for NaN."""
    losses = losses.astype(np.float64)
    broken = np.maximum.accumulate(~np.isfinite(losses), axis=-1)
    losses = np.where(broken, np.nan, losses)
    final = losses[..., -task.average_last :].mean(axis=-1)
    if guess is not None:
        # Finite and far above a guesser's loss is diverged too: nothing was learned.
        final = np.where(final < _HOPELESS * guess, final, np.nan)
    spans = np.array_split(losses, min(POINTS, task.steps), axis=-1)
    curves = np.stack([span.mean(axis=-1) for span in spans], axis=-1)
    both = np.concatenate([final[..., None], curves], axis=-1)
    return {
        (seed, at): [None if math.isnan(x) else x for x in both[seed, i].tolist()]
        for seed in range(task.seeds)
        for i, at in enumerate(points)
    }

"""What a sweep trains: a task is as many runs of one shape as there are grid points.

A `Job` is one of a zoo model; `own.py` has that of a user's own model.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mupax import optim, zoo
from mupax.optim.paths import map_with_paths

from ..data import Held
from ..run.optimizer import build_optimizer
from . import hyperparameters

Hyper = Mapping[str, Any]


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
                params = scaled_init(params, scales, hyper["init_scale"])
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


def scaled_init(params: Any, scales: optim.Scales, factor: jax.Array | float) -> Any:
    """The weights that have a fan-in, times a factor; biases and norms as they are."""

    def scaled(path: str, leaf: jax.Array) -> jax.Array:
        return leaf * jnp.asarray(factor, leaf.dtype) if scales[path].in_axes else leaf

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

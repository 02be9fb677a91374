"""What a sweep trains: a task is many runs of one shape, as many as grid points.

A `Job` is one of a zoo model, whose every run is that of a `RunConfig`; `api.py` has
that of a user's own model.
"""

import abc
import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax import zoo

from .. import data as datasets
from ..data import Dataset, batch_indices
from ..errors import UserError
from ..run.build import build, create_model, open_dataset
from ..run.config import RunConfig, tuned
from ..run.program import parts
from ..run.step import Hyper, Recipe

# A dataset up to this size is held whole on the device.
_HELD_BYTES = 2**30


class Task(abc.ABC):
    """Runs of one shape, which differ in hyperparameters and seeds."""

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
        """The hyperparameters and their values."""

    @property
    @abc.abstractmethod
    def chosen(self) -> dict[str, Any]:
        """Other keys of a config that differ between tasks."""

    @property
    @abc.abstractmethod
    def key(self) -> str:
        """Tells tasks apart whose runs differ, but for seed and place in the grid."""

    @abc.abstractmethod
    def training(self, data: Any) -> "Training":
        """The functions that are compiled, and the examples."""

    @property
    def runs(self) -> int:
        """How many trainings it holds."""
        return self.seeds * math.prod(map(len, self.grid.values()))


@dataclasses.dataclass(frozen=True)
class Training:
    """The functions of a run, all traced for a single one, and its examples.

    Attributes:
      init: (key, hyper) to (state, variables that never change). The latter may not
        depend on `hyper`, and are shared by the runs of a seed.
      step: (state, fixed, batch, hyper, key) to (state, the loss that is kept).
      feed: seeds to (examples, a pytree of arrays with a leading axis; which of them
        each step takes, int32 of shape (steps, seeds, batch)).
      keys: seeds to a key each.
      guess: chance-level loss; None where it is not known.
    """

    init: Callable[[jax.Array, Hyper], tuple[Any, Any]]
    step: Callable[[Any, Any, Any, Hyper, jax.Array], tuple[Any, jax.Array]]
    feed: Callable[[Sequence[int]], tuple[Any, np.ndarray]]
    keys: Callable[[Sequence[int]], jax.Array]
    guess: float | None


def own_training(
    recipe: Recipe,
    init: Callable[[jax.Array, Hyper], tuple[Any, Any]],
    examples: Any,
    task: Task,
    guess: float | None = None,
) -> Training:
    """The training of a recipe on examples in memory.

    Args:
      recipe: of its step.
      init: (key, hyper) to (params, rest).
      examples: a pytree of arrays with a leading axis.
      task: its steps and batch size.
      guess: chance-level loss; None where it is not known.
    """
    count = len(jax.tree.leaves(examples)[0])

    def start(key: jax.Array, hyper: Hyper) -> tuple[Any, Any]:
        return recipe.start(*init(key, hyper), hyper), ()

    def step(state: Any, fixed: Any, batch: Any, hyper: Hyper, key: Any) -> Any:
        state, out = recipe.step(state, batch, hyper, key)
        return state, out.plain

    def feed(seeds: Sequence[int]) -> tuple[Any, np.ndarray]:
        return examples, _orders(count, task.batch_size, seeds, task.steps)

    return Training(start, step, feed, keys_of, guess)


def keys_of(seeds: Sequence[int]) -> jax.Array:
    """A key for each seed, as the trainer makes one."""
    return jax.vmap(jax.random.key)(jnp.asarray(list(seeds), jnp.uint32))


def _orders(
    count: int, batch_size: int, seeds: Sequence[int], steps: int
) -> np.ndarray:
    return np.stack([batch_indices(count, batch_size, s, steps) for s in seeds], axis=1)


@dataclasses.dataclass(frozen=True)
class Job(Task):
    """Runs of a zoo model of one shape: what `mupax train` does, many times.

    Attributes:
      parametrization: its key in the sweep.
      config: of each run, but for the hyperparameters of `axes` and the seed, which
        counts upwards from the config's.
      axes: hyperparameters and their grids, as pairs. Warm-up is a share of the steps.
      seeds: number of seeds.
      average_last: a run's loss is the mean over its last steps.
      choices: what tells it from other jobs of its shape, as pairs.
    """

    parametrization: str
    config: RunConfig
    axes: tuple[tuple[str, tuple[float, ...]], ...]
    seeds: int
    average_last: int
    choices: tuple[tuple[str, Any], ...] = ()

    @property
    def width(self) -> int:  # type: ignore[override]
        """Of the model."""
        return self.config.model.options["width"]

    @property
    def depth(self) -> int:  # type: ignore[override]
        """Of the model."""
        return self.config.model.options["depth"]

    @property
    def steps(self) -> int:  # type: ignore[override]
        """Of each run."""
        return self.config.steps

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Examples a step."""
        return self.config.batch_size

    @property
    def name(self) -> str:
        """As a file is named; letters that file systems dislike are hashed away."""
        chosen = "".join(f"-{value}" for _, value in self.choices)
        whole = f"{self.parametrization}-w{self.width}-d{self.depth}{chosen}"
        if re.fullmatch(r"[\w.=+-]{1,120}", whole):
            return whole
        digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
        return f"{re.sub(r'[^A-Za-z0-9_.=+-]', '_', whole)[:80]}-{digest}"

    @property
    def grid(self) -> dict[str, tuple[float, ...]]:
        """The hyperparameters and their values."""
        return dict(self.axes)

    @property
    def chosen(self) -> dict[str, Any]:
        """Its choices."""
        return dict(self.choices)

    @property
    def key(self) -> str:
        """All that decides a run, but for its seed and place in the grid."""
        decisive = self.config.decisive() | {"first_seed": self.config.seed}
        if "learning_rate" in self.grid:
            del decisive["learning_rate"]
        kept = [self.average_last, sorted(self.grid)]
        return json.dumps([decisive, kept], sort_keys=True, default=str)

    def sized(self, width: int, depth: int) -> "Job":
        """The same runs at another size."""
        return dataclasses.replace(self, config=self.config.sized(width, depth))

    def dataset(self, data: Any = None) -> Dataset:
        """The dataset: the given one, or the config's."""
        if isinstance(data, datasets.ImageData):
            return datasets.from_memory(data)
        return data if data is not None else open_dataset(self.config)

    def training(self, data: Any = None) -> Training:
        """The functions that are compiled, and the examples.

        Args:
          data: a `Dataset` or `ImageData` in place of the config's dataset.
        """
        dataset = self.dataset(data)
        # The average is only evaluated, which a sweep does not do.
        config = dataclasses.replace(self.config, ema=None)
        built = build(config, dataset)
        smoothed = "label_smoothing" in self.grid

        def init(key: jax.Array, hyper: Hyper) -> tuple[Any, Any]:
            model = create_model(tuned(config, hyper), built.shapes, key)
            state = built.recipe.start(*parts(model), hyper)
            fixed, state["rest"] = nnx.split_state(state["rest"], zoo.Frozen, ...)
            return state, fixed

        def step(state: Any, fixed: Any, batch: Any, hyper: Hyper, key: Any) -> Any:
            whole = {**state, "rest": nnx.merge_state(fixed, state["rest"])}
            state, out = built.recipe.step(whole, batch, hyper, key)
            state["rest"] = nnx.split_state(state["rest"], zoo.Frozen, ...)[1]
            # Losses under different smoothing cannot be compared.
            return state, out.plain if smoothed else out.loss

        def feed(seeds: Sequence[int]) -> tuple[Any, np.ndarray]:
            return examples_of(config, dataset, tuple(seeds))

        def keys(seeds: Sequence[int]) -> jax.Array:
            return keys_of([config.seed + seed for seed in seeds])

        return Training(init, step, feed, keys, math.log(dataset.out_features))


def examples_of(
    config: RunConfig, dataset: Any, seeds: tuple[int, ...]
) -> tuple[Any, np.ndarray]:
    """The examples of runs, and which of them each step takes, as the trainer has them.

    A dataset that is small and not augmented is held whole. Of any other the batches of
    all steps are made on the host, by the trainer's own pipeline.

    Returns:
      Arrays with a leading axis of examples, and their numbers, (steps, seeds, batch).
    """
    seeds = tuple(config.seed + seed for seed in seeds)
    batch = sum(s.size * s.dtype.itemsize for s in dataset.spec(1).values())
    if not config.augment and batch * dataset.train_size <= _HELD_BYTES:
        order = _orders(dataset.train_size, config.batch_size, seeds, config.steps)
        return _whole(dataset), order
    return _staged(dataset, config.batch_size, config.steps, seeds)


@functools.lru_cache(maxsize=2)
def _whole(dataset: Any) -> dict[str, np.ndarray]:
    """The training split in memory."""
    found = dataset.whole().examples
    return dict(zip(dataset.spec(1), found, strict=True))


@functools.lru_cache(maxsize=2)
def _staged(
    dataset: Any, batch_size: int, steps: int, seeds: tuple[int, ...]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The batches of all steps and seeds, in order."""
    shape = (steps, len(seeds), batch_size)
    count = math.prod(shape)
    if count > np.iinfo(np.int32).max:
        raise UserError(
            f"the sweep holds the batches of all its steps, {count} examples, which is "
            "more than an index counts; make sweep.steps smaller, or leave augment out"
        )
    try:
        arrays = {
            key: np.empty((*shape, *spec.shape[1:]), spec.dtype)
            for key, spec in dataset.spec(batch_size).items()
        }
    except MemoryError:
        raise UserError(
            f"the sweep holds the batches of all its steps, {count} examples, which do "
            "not fit into memory; make sweep.steps smaller, or leave augment out"
        ) from None
    for place, seed in enumerate(seeds):
        feed = dataset.train(batch_size, seed, process_index=0, process_count=1)
        try:
            for step in range(steps):
                for key, value in next(feed).items():
                    arrays[key][step, place] = value
        finally:
            feed.close()
    flat = {key: x.reshape(count, *x.shape[3:]) for key, x in arrays.items()}
    return flat, np.arange(count, dtype=np.int32).reshape(shape)

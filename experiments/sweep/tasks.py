"""Tasks: all runs of one model shape, over a grid and seeds.

`ZooTask` trains a zoo model, each run as `mupax train` does;
`functions.FunctionTask` trains a user's model.
"""

import abc
import dataclasses
import functools
import hashlib
import json
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax import zoo

from ..data import Dataset, batch_indices
from ..errors import UserError
from ..run.build import build, create_model, open_dataset
from ..run.config import RunConfig
from ..run.hyperparameters import tuned
from ..run.program import parts
from ..run.step import Hyper

# A dataset up to this size that is not augmented is held whole on the device. For any
# other, the trainer's pipeline prepares the batches of all steps on the host.
_HELD_BYTES = 2**30


class Task(abc.ABC):
    """Runs of one shape, which differ in hyperparameters and seeds."""

    parametrization: str  # its key in the sweep
    width: int
    depth: int
    seeds: int  # their number
    steps: int  # of each run
    batch_size: int
    average_last: int  # a run's loss is the mean over so many last steps
    grid: Mapping[str, tuple[float, ...]]  # the values of each hyperparameter
    # Other config keys that differ between tasks, and their values.
    choices: Mapping[str, Any] = types.MappingProxyType({})

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The stem of its files' names."""

    @property
    @abc.abstractmethod
    def key(self) -> str:
        """Everything that determines a run, apart from its seed and grid point."""

    @abc.abstractmethod
    def training(self, data: Any) -> "Training":
        """The functions that are compiled, and the examples."""

    def bound(self, data: Any) -> "Task":
        """The same task, completed by the data that its key needs."""
        return self

    @property
    def runs(self) -> int:
        """Number of runs."""
        return self.seeds * math.prod(map(len, self.grid.values()))

    @property
    def work(self) -> int:
        """Relative cost of a run: width squared times depth."""
        return self.depth * self.width**2


class Point(dict[str, Any]):
    """Hyperparameters, and the structure of the model that they were built into.

    The structure holds for one trace. A JAX transformation makes a plain dictionary of
    a point.
    """

    structure: Any = None


@dataclasses.dataclass(frozen=True)
class Training:
    """The functions of one run, and the examples of all runs."""

    # (key, hyper) -> (state, fixed). `fixed` holds variables that never change. It must
    # not depend on `hyper`, because the runs of a seed share it.
    init: Callable[[jax.Array, Hyper], tuple[Any, Any]]
    # (state, fixed, batch, hyper, key) -> (state, loss).
    step: Callable[[Any, Any, Any, Hyper, jax.Array], tuple[Any, jax.Array]]
    # seeds -> (keys, orders, examples): a random key for each seed; which examples each
    # step takes, int32 of shape (steps, seeds, batch); and the examples, a pytree of
    # arrays with a leading axis.
    feed: Callable[[Sequence[int]], tuple[jax.Array, np.ndarray, Any]]
    guess: float | None  # chance-level loss


def keys_of(seeds: Sequence[int]) -> jax.Array:
    """One random key for each seed, as the trainer makes it."""
    return jax.vmap(jax.random.key)(jnp.asarray(list(seeds), jnp.uint32))


def orders(count: int, batch_size: int, seeds: Sequence[int], steps: int) -> np.ndarray:
    """Which of `count` examples each step takes, shape (steps, seeds, batch)."""
    return np.stack([batch_indices(count, batch_size, s, steps) for s in seeds], axis=1)


@dataclasses.dataclass(frozen=True)
class ZooTask(Task):
    """Runs of a zoo model of one shape."""

    parametrization: str
    # Of every run, without the hyperparameters of `grid`. Its seed is the first seed.
    config: RunConfig
    grid: Mapping[str, tuple[float, ...]]  # warm-up: a share of the steps
    seeds: int
    average_last: int
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.config.model.options["width"]

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self.config.model.options["depth"]

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.config.steps

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return self.config.batch_size

    @property
    def name(self) -> str:
        # Unusual characters are replaced by a hash.
        chosen = "".join(f"-{value}" for value in self.choices.values())
        name = f"{self.parametrization}-w{self.width}-d{self.depth}{chosen}"
        if re.fullmatch(r"[\w.=+-]{1,120}", name):
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:12]
        return f"{re.sub(r'[^A-Za-z0-9_.=+-]', '_', name)[:80]}-{digest}"

    @property
    def key(self) -> str:
        settings = self.config.loss_settings() | {"first_seed": self.config.seed}
        if "learning_rate" in self.grid:
            del settings["learning_rate"]
        others = [self.average_last, sorted(self.grid)]
        return json.dumps([settings, others], sort_keys=True, default=str)

    def dataset(self, data: Dataset | None = None) -> Dataset:
        """The dataset: the given one, or the config's."""
        return data if data is not None else open_dataset(self.config)

    def training(self, data: Any = None) -> Training:
        """The functions that are compiled, and the examples.

        Args:
          data: a `Dataset` in place of the config's dataset, or None.
        """
        dataset = self.dataset(data)
        # The moving average is for evaluation; a sweep does not evaluate.
        config = dataclasses.replace(self.config, ema=None)
        built = build(config, dataset)
        smoothed = "label_smoothing" in self.grid

        def init(key: jax.Array, hyper: Hyper) -> tuple[Any, Any]:
            model = create_model(tuned(config, hyper), built.shapes, key)
            state = built.recipe.start(*parts(model), hyper)
            fixed, state["rest"] = nnx.split_state(state["rest"], zoo.Frozen, ...)
            return state, fixed

        def step(state: Any, fixed: Any, batch: Any, hyper: Hyper, key: Any) -> Any:
            rest = nnx.merge_state(fixed, state["rest"])
            state, out = built.recipe.step({**state, "rest": rest}, batch, hyper, key)
            state["rest"] = nnx.split_state(state["rest"], zoo.Frozen, ...)[1]
            # Losses with different smoothing cannot be compared.
            return state, out.plain if smoothed else out.loss

        def feed(seeds: Sequence[int]) -> tuple[jax.Array, np.ndarray, Any]:
            # Both ways give the trainer's batches.
            drawn = tuple(config.seed + seed for seed in seeds)
            keys = keys_of(drawn)
            if config.augment or dataset.bytes_of(dataset.train_size) > _HELD_BYTES:
                return keys, *_prepared(dataset, config.batch_size, config.steps, drawn)
            rows = orders(dataset.train_size, config.batch_size, drawn, config.steps)
            return keys, rows, _whole(dataset)

        return Training(init, step, feed, math.log(dataset.out_features))


@functools.lru_cache(maxsize=2)
def _whole(dataset: Any) -> dict[str, np.ndarray]:
    """The training split."""
    return dataset.training_arrays()


@functools.lru_cache(maxsize=2)
def _prepared(
    dataset: Any, batch_size: int, steps: int, seeds: tuple[int, ...]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Orders and examples of `Training.feed`: the batches of all steps and seeds."""
    shape = (steps, len(seeds), batch_size)
    count = math.prod(shape)
    try:
        if count > np.iinfo(np.int32).max:  # of an index
            raise MemoryError
        arrays = {
            key: np.empty((*shape, *spec.shape[1:]), spec.dtype)
            for key, spec in dataset.spec(batch_size).items()
        }
    except MemoryError:
        raise UserError(
            f"the batches of all steps and seeds ({count} examples) do not fit into "
            "memory; make sweep.steps smaller, or leave augment out"
        ) from None
    for place, seed in enumerate(seeds):
        batches = dataset.train(batch_size, seed, process_index=0, process_count=1)
        try:
            for step in range(steps):
                for key, value in next(batches).items():
                    arrays[key][step, place] = value
        finally:
            batches.close()
    flat = {key: x.reshape(count, *x.shape[3:]) for key, x in arrays.items()}
    return np.arange(count, dtype=np.int32).reshape(shape), flat

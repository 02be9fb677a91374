"""What tests of sweeps share, importable by their worker processes."""

import dataclasses
import os
import pathlib
import signal
import types
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax.experiments import data as datasets
from mupax.experiments.run.config import parse
from mupax.experiments.run.step import Recipe
from mupax.experiments.sweep.functions import training_of
from mupax.experiments.sweep.store import Store
from mupax.experiments.sweep.tasks import Task, Training, ZooTask


def stripes() -> datasets.Dataset:
    """Four classes of 4 x 4 pixels, which differ in brightness."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 200).astype(np.int32)
    images = rng.integers(0, 64, (200, 4, 4, 1)) + 48 * labels[:, None, None, None]
    images = images.astype(np.uint8)
    split = slice(160), slice(160, None)
    train, test = ((images[s], labels[s]) for s in split)
    datasets.register_dataset("stripes", {"train": train, "test": test})
    return datasets.open_dataset("stripes")


def task(
    *,
    log2_lr: tuple[float, ...] = (-9.0, -7.0, -5.0),
    axes: Mapping[str, tuple[float, ...]] = types.MappingProxyType({}),
    width: int = 16,
    depth: int = 4,
    model: dict | None = None,
    parametrization: str = "depth_mup",
    seeds: int = 2,
    average_last: int = 5,
    **config: object,
) -> ZooTask:
    """A task of six runs; what is left over are keys of a run's config."""
    given = {
        "dataset": "stripes",
        "model": {**(model or {"name": "resmlp"}), "width": width, "depth": depth},
        "base_width": 8,
        "base_depth": 2,
        "parametrization": {"name": parametrization},
        "optimizer": {"name": "adam"},
        "schedule": {"name": "constant"},
        "learning_rate": 1.0,
        "steps": 20,
        "batch_size": 16,
    }
    rates = tuple(2.0**x for x in log2_lr)
    return ZooTask(
        parametrization=parametrization,
        config=parse(given | config),
        grid={"learning_rate": rates, **axes},
        seeds=seeds,
        average_last=average_last,
    )


@dataclasses.dataclass(frozen=True)
class Deadly(ZooTask):
    """A task that kills its worker the first time, once its first chunk is stored."""

    mark: str = ""

    def training(self, data: datasets.Dataset) -> Training:
        """As a task's."""
        mark = pathlib.Path(self.mark)
        add = Store.add

        def last(*arguments, **options):
            add(*arguments, **options)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        if not mark.exists():
            Store.add = last  # type: ignore[method-assign]
        return super().training(data)


@dataclasses.dataclass(frozen=True)
class Line(Task):
    """Linear regression with noisy weights: it compiles at once; a key is state."""

    rates: tuple[float, ...] = tuple(2.0**x for x in range(-9, 3))
    width: int = 4
    depth: int = 1
    seeds: int = 2
    steps: int = 40
    batch_size: int = 8
    average_last: int = 10
    parametrization: str = "p"
    name = "line"

    @property
    def grid(self) -> dict[str, tuple[float, ...]]:
        """Learning rates."""
        return {"learning_rate": self.rates}

    @property
    def key(self) -> str:
        """All but seeds and grid."""
        return repr(dataclasses.replace(self, rates=(), seeds=0))

    def training(self, data: jax.Array) -> Training:
        """Of data of shape (examples, width)."""

        def init(key, hyper):
            # Nearly the same, so that the seeds agree on the optimum.
            return 1.0 + 0.1 * jax.random.normal(key, (self.width,)), key

        def loss(params, rest, batch, hyper, key):
            rest, key = jax.random.split(rest)
            noisy = params + 0.01 * jax.random.normal(key, params.shape)
            value = jnp.mean((batch @ noisy) ** 2)
            return value, (value, rest)

        def optimizer(hyper, params, rest):
            return optax.adam(hyper["learning_rate"])

        return training_of(Recipe(loss, optimizer), init, data, self)


def points() -> np.ndarray:
    """What a `Line` is fitted to: 64 points, by which some weights learn slowly."""
    drawn = np.random.default_rng(0).normal(size=(64, 4))
    return (drawn * [1.0, 0.5, 0.2, 0.1]).astype(np.float32)

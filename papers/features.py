r"""Distances between the layers' features: Figures 17 to 19 of Tensor Programs VI.

Section 10.4: residual MLPs train on CIFAR-10 with Adam. After some steps,

    d(ε)² = mean |x^{(λ+ε)L} - x^{λL}|² / n

over all layers λL and a batch of images. κ "as seen" is 1 minus the slope of log d
against log ε, between the spacing of the shallowest network's layers and ¼, at every
depth the same. It is ½ if x^l is a random walk over the layers, and 0 if it is smooth.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mupax.experiments import memory
from mupax.experiments.io import write_durably
from mupax.experiments.run.build import build, create_model
from mupax.experiments.sweep import space
from mupax.experiments.sweep.tasks import ZooTask
from mupax.zoo.layers.basic import flattened

from . import sizes
from .numbers import Row
from .parts import Part
from .request import Request

_STEPS = (100, 500, 1000)  # the paper's
_BASE_DEPTH = 8
# Both hyperparameters of the base, after as many steps.
BASE = Part(
    "resmlp_sweep",
    "features-base",
    {
        "steps": str(_STEPS[-1]),
        "sweep.only": "('depth_mup',)",
        "sweep.depths": f"({_BASE_DEPTH},)",
        "sweep.axes.branch_multiplier": "2**[-3:1]",
        "model.branch_multiplier": "1.0",
    },
    sizes.FEATURES_BASE,
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Networks that differ in their seeds alone."""

    depth: int
    multiplier: float
    learning_rate: float
    law: str = "depth_mup"
    nonlinearity: str = "relu"

    def task(self, request: Request) -> ZooTask:
        """The training."""
        part = Part(
            "resmlp_sweep",
            "features",
            {
                "steps": str(_STEPS[-1]),
                "sweep.only": f"('{self.law}',)",
                "sweep.depths": f"({_BASE_DEPTH}, {self.depth})",
                "model.nonlinearity": self.nonlinearity,
                "model.branch_multiplier": f"{self.multiplier:g}",
            },
            sizes.FEATURES,
        )
        tasks = space.tasks(space.parse_sweep(part.parsed(request)))
        return next(task for task in tasks if task.depth == self.depth)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The base's best hyperparameters: Depth-μP, ReLU, after the last step.

    Attributes:
      multiplier: the best block multiplier a.
      learning_rates: the best learning rate for each a.
    """

    multiplier: float
    learning_rates: dict[float, float]

    def setting(
        self, depth: int, given: Mapping[str, str], a: float | None = None
    ) -> Setting:
        """Networks at the best a, or another, and its best learning rate."""
        a = self.multiplier if a is None else a
        return Setting(depth, a, self.learning_rates[a], **given)


def tuned(request: Request) -> Tuned:
    """Sweep the base, unless its table has the runs."""
    (population,) = BASE.train(request).data.populations
    name = "branch_multiplier"
    rates = {
        a: population.at(name, a).best()["learning_rate"]
        for a in population.axes[name]
        if np.isfinite(population.at(name, a).loss).all(axis=0).any()
    }
    return Tuned(population.best()[name], rates)


# ----- Tables.

LAWS = {"depth_mup": {"law": "depth_mup"}, "ode": {"law": "ode"}}
ACTIVATIONS = {"relu": {"nonlinearity": "relu"}, "abs": {"nonlinearity": "abs"}}


def _measured(request: Request, networks: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """κ of networks that differ in one thing, and how it changes.

    Columns "network", "depth", "multiplier" and "steps" say which. "kappa" is the mean
    over seeds. "rise" is κ at these depth and steps less κ at "from_depth" and
    "from_steps"; "gain" is κ of the second network less κ of the first. Networks of a
    seed have the same weights at first, so both are compared seed by seed. "shape" is
    d(ε)/√ε over its value at the first shared ε. "standard_error" belongs to each.
    """
    depths, base = sizes.FEATURES_DEPTHS[request.scale], tuned(request)
    task = base.setting(depths[0], {}).task(request)
    shared = {"width": task.width, "seeds": task.seeds}
    rows: list[Row] = []
    first: dict[tuple[int, float], np.ndarray] = {}
    for name, given in networks.items():
        at_best = {}
        for depth, a in _places(base, depths):
            found = distances(base.setting(depth, given, a), request)
            kappas = _kappas(found, depths[0])
            place = {"network": name, "depth": depth, "multiplier": a}
            if a == base.multiplier:
                at_best[depth] = kappas
                rows += [place | row for row in _shapes(found[-1], depths[0])]
            gains = kappas - first.setdefault((depth, a), kappas)
            for step, own, gain in zip(_STEPS, kappas, gains, strict=True):
                row = place | shared | {"steps": step}
                rows.append(row | _value("kappa", own))
                if name != next(iter(networks)):
                    rows.append(row | _value("gain", gain))
        rows += _rises(name, at_best)
    return rows


def _places(base: Tuned, depths: Sequence[int]) -> list[tuple[int, float]]:
    """Depths with the multiplier: the best at each, and at the first every one."""
    places = [(depth, base.multiplier) for depth in depths]
    others = [a for a in base.learning_rates if a != base.multiplier]
    return places + [(depths[0], a) for a in others]


def _shapes(found: np.ndarray, shallowest: int) -> list[Row]:
    """d(ε)/√ε over its value at the first ε that every depth has."""
    count = _shared(shallowest)
    x = 2.0 ** np.arange(-count - 1, -1)
    shape = found[:, -count:] / np.sqrt(x)
    shape /= shape[:, :1]
    return [
        {"steps": _STEPS[-1], "epsilon": at} | _value("shape", own)
        for at, own in zip(x, shape.T, strict=True)
    ]


def _rises(name: str, kappas: Mapping[int, np.ndarray]) -> list[Row]:
    """Over depths at the last step, and over steps at the largest depth."""
    depths, last = list(kappas), len(_STEPS) - 1
    pairs = [((a, last), (b, last)) for a, b in itertools.pairwise(depths)]
    pairs += [((depths[0], last), (depths[-1], last))] if depths[2:] else []
    pairs.append(((depths[-1], 0), (depths[-1], last)))
    return [
        {
            "network": name,
            "depth": to[0],
            "steps": _STEPS[to[1]],
            "from_depth": start[0],
            "from_steps": _STEPS[start[1]],
        }
        | _value("rise", kappas[to[0]][to[1]] - kappas[start[0]][start[1]])
        for start, to in pairs
    ]


def _value(name: str, seeds: np.ndarray) -> dict[str, float]:
    error = seeds.std(ddof=1) / np.sqrt(len(seeds))
    return {name: float(seeds.mean()), "standard_error": float(error)}


measure_laws = functools.partial(_measured, networks=LAWS)
measure_activations = functools.partial(_measured, networks=ACTIVATIONS)

# ----- Measurements.


def distances(
    setting: Setting, request: Request
) -> Float[np.ndarray, "steps seeds gaps"]:
    """d(ε) after each of the steps, at ε L = 1, 2, 4, ..., L/4.

    Each seed is kept in a file, and measured once.
    """
    task = setting.task(request)
    files = [_file(setting, task, seed, request) for seed in range(task.seeds)]
    if not all(file.exists() for file in files):
        measure = _measurement(setting, task)
        for seed, file in enumerate(files):
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_durably(file, json.dumps(measure(seed)))
    return np.stack([json.loads(file.read_text()) for file in files], axis=1)


def _file(setting: Setting, task: ZooTask, seed: int, request: Request) -> pathlib.Path:
    # A file of other data, sizes or steps has another name.
    settings = f"{task.key} {setting.learning_rate} {_STEPS}"
    digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
    name = f"{task.name}-{setting.nonlinearity}-seed{seed}-{digest}.json"
    return request.folder / request.scale / "features" / name


def _measurement(setting: Setting, task: ZooTask) -> Any:
    """A function of a seed, compiled once: the distances after each of the steps."""
    depth, width = task.depth, task.width
    memory.check(
        depth * width**2 * 4 * 6 + depth * width * task.batch_size * 4 * 4,
        f"a network of depth {depth} and width {width}, its optimizer and features",
        "take a smaller scale",
    )
    dataset = task.dataset()
    training, built = task.training(), build(task.config, dataset)
    hyper = {"learning_rate": jnp.float32(setting.learning_rate)}
    gaps = [2**k for k in range(int(math.log2(depth)) - 1)]
    init = jax.jit(training.init)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(
        state: Any, fixed: Any, key: Array, batches: Array, examples: Any, span: Array
    ) -> Any:
        def step(t: Array, state: Any) -> Any:
            batch = jax.tree.map(lambda x: x[batches[t]], examples)
            return training.step(state, fixed, batch, hyper, key)[0]

        return jax.lax.fori_loop(span[0], span[1], step, state)

    @jax.jit
    def measured(params: Any, key: Array, batch: Any) -> Array:
        model: Any = create_model(task.config, built.shapes, key)
        nnx.update(model, params)
        model.eval()
        images = dataset.normalize(batch)["image"]
        start = model.readin(flattened(images, model.input_shape))
        graph, blocks = nnx.split(model.blocks)

        def block(x: Array, weights: Any) -> tuple[Array, Array]:
            x = nnx.merge(graph, weights)(x)
            return x, x

        _, later = jax.lax.scan(block, start, blocks)
        x = jnp.concatenate([start[None], later])
        return jnp.stack([jnp.sqrt(jnp.mean((x[k:] - x[:-k]) ** 2)) for k in gaps])

    def measure(seed: int) -> list[list[float]]:
        keys, orders, examples = training.feed([seed])
        examples = jax.tree.map(jnp.asarray, examples)
        key, batches = keys[0], jnp.asarray(orders[:, 0])
        first = {"image": examples["image"][batches[0]]}
        state, fixed = init(key, hyper)
        found = []
        for span in itertools.pairwise((0, *_STEPS)):
            state = train(state, fixed, key, batches, examples, jnp.asarray(span))
            found.append(measured(state["params"], key, first).tolist())
        return found

    return measure


def _shared(shallowest: int) -> int:
    """How many ε all depths have."""
    return int(math.log2(shallowest)) - 1


def _kappas(
    found: Float[np.ndarray, "steps seeds gaps"], shallowest: int
) -> Float[np.ndarray, "steps seeds"]:
    """κ of each network, over the ε that the shallowest networks have too."""
    count = _shared(shallowest)
    gap = np.arange(count) * np.log(2)
    gap -= gap.mean()
    return 1 - np.log(found[..., -count:]) @ gap / (gap @ gap)

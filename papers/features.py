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
from mupax.zoo.layers import flattened, scan_keeping

from . import curves, sizes
from .parts import Part
from .registry import Drawing, Line, Panel, Request

_STEPS = (100, 500, 1000)  # the paper's
_DIVERSE = 0.4  # our tolerance for κ = ½
_LAWS = {"Depth-μP": "depth_mup", "ODE": "ode"}
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


def diversity(request: Request) -> Drawing:
    """κ at growing depths, of Depth-μP and of the ODE (Figure 17)."""
    depths = sizes.FEATURES_DEPTHS[request.scale]
    base = tuned(request)
    measured = {
        name: [distances(base.setting(n, {"law": law}), request)[-1] for n in depths]
        for name, law in _LAWS.items()
    }
    panels = [_curves(name, depths, found) for name, found in measured.items()]
    kappas = {name: _kappas(found) for name, found in measured.items()}
    lines = [_line(name, depths, found) for name, found in kappas.items()]
    panels.append(_kappa("By depth", "depth", lines))
    laws = {name: {"law": law} for name, law in _LAWS.items()}
    panels.append(_over_multipliers(base, laws, request))
    deep, ode = (kappas[name] for name in _LAWS)
    ours = (
        f"κ from {_mean(deep[0])} to {_mean(deep[-1])} for Depth-μP (agrees above "
        f"{_DIVERSE}), from {_mean(ode[0])} to {_mean(ode[-1])} for the ODE (agrees if "
        "it falls)"
    )
    falls = [curves.over_seeds(b - a).negative for a, b in itertools.pairwise(ode)]
    agrees = curves.conjunction(_diverse(deep), *falls)
    return _drawing(request, panels, ours, agrees)


def diversity_in_time(request: Request) -> Drawing:
    """κ after more steps of training (Figure 18)."""
    depths = sizes.FEATURES_DEPTHS[request.scale]
    base = tuned(request)
    panels, kappas = [], {}
    for name, law in _LAWS.items():
        found = [distances(base.setting(n, {"law": law}), request) for n in depths]
        kappas[name] = np.stack([_kappas(at) for at in zip(*found, strict=True)])
        lines = [
            _line(f"L = {depth}", _STEPS, kappas[name][:, i])
            for i, depth in enumerate(depths)
        ]
        panels.append(_kappa(name, "steps", lines))
    deep, ode = (kappas[name] for name in _LAWS)
    over_steps, over_depths = ode[-1, -1] - ode[0, -1], ode[-1, -1] - ode[-1, 0]
    least = deep.reshape(-1, deep.shape[-1])
    least = least[least.mean(axis=-1).argmin()]
    ours = (
        f"κ of the ODE is {_mean(ode[-1, -1])} at the end; it changes by "
        f"{_mean(over_steps, '+.2f')} over steps and {_mean(over_depths, '+.2f')} over "
        f"depths (agrees if both fall); that of Depth-μP falls to {_mean(least)} "
        f"(agrees above {_DIVERSE})"
    )
    falls = [curves.over_seeds(x).negative for x in (over_steps, over_depths)]
    every = deep.reshape(-1, deep.shape[-1])
    agrees = curves.conjunction(_diverse(every), *falls)
    return _drawing(request, panels, ours, agrees)


def absolute_value(request: Request) -> Drawing:
    """κ with |x| and with ReLU, under Depth-μP (Figure 19)."""
    depths = sizes.FEATURES_DEPTHS[request.scale]
    base = tuned(request)
    names = {"ReLU": "relu", "|x|": "abs"}
    both = {label: {"nonlinearity": name} for label, name in names.items()}
    kappas = {}
    for label, given in both.items():
        found = [distances(base.setting(n, given), request) for n in depths]
        kappas[label] = np.stack([_kappas(at) for at in zip(*found, strict=True)])
    panels = [
        _kappa(
            f"L = {depth}",
            "steps",
            [_line(label, _STEPS, kappas[label][:, i]) for label in names],
        )
        for i, depth in enumerate(depths)
    ]
    panels.append(_gains_over_multipliers(base, both, request))
    # The networks of a seed have the same weights at first.
    gains = kappas["|x|"][:, -1] - kappas["ReLU"][:, -1]
    each = ", ".join(_mean(gain, "+.3f") for gain in gains)
    steps = ", ".join(f"{step:,}" for step in _STEPS)
    ours = (
        f"κ of |x| less κ of ReLU is {each} after {steps} steps at depth {depths[-1]}"
    )
    answers = [curves.negation(curves.over_seeds(gain).negative) for gain in gains]
    return _drawing(request, panels, ours, curves.conjunction(*answers))


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
        _, later = scan_keeping(model.blocks, start, keep=range(depth))
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


def _kappas(found: Sequence[np.ndarray]) -> Float[np.ndarray, "depths seeds"]:
    """κ of each network, over the ε that all have.

    `found` are distances at each depth, (seeds, gaps).
    """
    count = min(d.shape[1] for d in found)
    gap = np.arange(count) * np.log(2)
    gap -= gap.mean()
    return np.stack([1 - np.log(d[:, -count:]) @ gap / (gap @ gap) for d in found])


# ----- Panels.


def _drawing(
    request: Request, panels: Sequence[Panel], ours: str, agrees: bool | None
) -> Drawing:
    base = tuned(request)
    depths = sizes.FEATURES_DEPTHS[request.scale]
    task = base.setting(depths[0], {}).task(request)
    length = (
        f"{task.steps:,} steps, width {task.width}, depth "
        f"{', '.join(map(str, depths))}, {task.seeds} seeds, a = {base.multiplier:g}"
    )
    return Drawing(panels, ours, agrees, length)


def _over_multipliers(
    base: Tuned, named: dict[str, dict[str, str]], request: Request
) -> Panel:
    """κ after the last step against the block multiplier."""
    depth = sizes.FEATURES_DEPTHS[request.scale][0]
    multipliers = list(base.learning_rates)
    lines = [
        _line(label, multipliers, _by_multiplier(base, depth, given, request)[-1])
        for label, given in named.items()
    ]
    return _kappa(f"L = {depth}, by multiplier", "block multiplier a", lines)


def _gains_over_multipliers(
    base: Tuned, named: dict[str, dict[str, str]], request: Request
) -> Panel:
    """κ of the second less κ of the first, after each of the steps."""
    depth = sizes.FEATURES_DEPTHS[request.scale][0]
    multipliers = list(base.learning_rates)
    first, second = (
        _by_multiplier(base, depth, given, request) for given in named.values()
    )
    lines = [
        _line(f"{step:,} steps", multipliers, gain)
        for step, gain in zip(_STEPS, second - first, strict=True)
    ]
    ends = multipliers[0], multipliers[-1]
    lines.append(Line("equal", ends, [0.0, 0.0], look="theory"))
    one, other = named
    labels = "block multiplier a", f"κ of {other} less κ of {one}"
    return Panel(f"L = {depth}, by multiplier", *labels, lines, log_x=True)


def _by_multiplier(
    base: Tuned, depth: int, given: Mapping[str, str], request: Request
) -> Float[np.ndarray, "steps multipliers seeds"]:
    """κ after each of the steps; each multiplier at its best learning rate."""
    found = [
        distances(base.setting(depth, given, a), request) for a in base.learning_rates
    ]
    return np.stack([_kappas(at) for at in zip(*found, strict=True)])


def _curves(title: str, depths: Sequence[int], found: Sequence[np.ndarray]) -> Panel:
    """d(ε)/√ε over its value at the first shared ε, as in the paper's Figure 18."""
    count = found[0].shape[1]
    x = 2.0 ** np.arange(-count - 1, -1)
    lines = []
    for depth, d in zip(depths, found, strict=True):
        shape = d[:, -count:] / np.sqrt(x)
        shape /= shape[:, :1]
        error = shape.std(axis=0, ddof=1) / np.sqrt(len(shape))
        lines.append(Line(f"L = {depth}", x, shape.mean(axis=0), error))
    lines.append(Line("κ = ½", x, np.ones(count), look="theory"))
    label = "|x(λ+ε) - x(λ)| / √ε, relative"
    return Panel(title, "ε", label, lines, log_x=True, log_y=True)


def _kappa(title: str, x_label: str, lines: list[Line]) -> Panel:
    ends = [min(lines[0].x), max(lines[0].x)]
    half = Line("½", ends, [0.5, 0.5], look="theory")
    return Panel(title, x_label, "κ as seen", [*lines, half], log_x=True)


def _line(label: str, x: Sequence[float], kappas: np.ndarray) -> Line:
    """The means of rows of networks, with standard errors."""
    errors = kappas.std(axis=1, ddof=1) / np.sqrt(kappas.shape[1])
    return Line(label, x, kappas.mean(axis=1).tolist(), errors.tolist())


def _mean(kappas: np.ndarray, form: str = ".2f") -> str:
    """The mean over seeds, e.g. "0.49 ± 0.01" with half of the 95 % interval."""
    mean = curves.over_seeds(kappas)
    return f"{mean.value:{form}} ± {mean.wide:{form.lstrip('+')}}"


def _diverse(kappas: np.ndarray) -> bool | None:
    """Whether κ is above the tolerance in every row of networks."""
    below = (curves.over_seeds(row).under(_DIVERSE) for row in kappas)
    return curves.conjunction(*map(curves.negation, below))

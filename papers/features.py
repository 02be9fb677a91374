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
from .numbers import Numbers, Row
from .parts import Part
from .registry import Drawing, Line, Panel
from .request import Request

_STEPS = (100, 500, 1000)  # the paper's
_DIVERSE = 0.4  # our tolerance for κ = ½
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

_LAWS = {"depth_mup": {"law": "depth_mup"}, "ode": {"law": "ode"}}
_ACTIVATIONS = {"relu": {"nonlinearity": "relu"}, "abs": {"nonlinearity": "abs"}}


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


measure_laws = functools.partial(_measured, networks=_LAWS)
measure_activations = functools.partial(_measured, networks=_ACTIVATIONS)

# ----- Drawings.

_TITLES = {"depth_mup": "Depth-μP", "ode": "ODE", "relu": "ReLU", "abs": "|x|"}


class Kappas(Numbers):
    """The numbers of `_measured`."""

    @property
    def depths(self) -> list[int]:
        return self.distinct("depth")

    @property
    def steps(self) -> list[int]:
        return self.distinct("steps")

    @property
    def best(self) -> float:
        """The base's best block multiplier: the only one of the deepest networks."""
        (best,) = set(
            self.where(depth=self.depths[-1]).having("multiplier")["multiplier"]
        )
        return float(best)

    def of(self, column: str, network: str, **place: float) -> Numbers:
        """The rows of a network that have a column."""
        return self.where(network=network, **place).having(column)

    def at_best(self, network: str, **place: float) -> Numbers:
        """κ of a network at the best multiplier."""
        return self.of("kappa", network, multiplier=self.best, **place)

    def intervals(self, rows: Numbers, column: str = "kappa") -> list[curves.Interval]:
        """The values of a column, each with its 95 % interval."""
        (seeds,) = self.distinct("seeds")
        numbers = zip(rows[column], rows["standard_error"], strict=True)
        return [curves.interval(*pair, seeds - 1) for pair in numbers]

    def interval(self, column: str, network: str, **place: float) -> curves.Interval:
        """The only value at a place."""
        (one,) = self.intervals(self.of(column, network, **place), column)
        return one

    def drawing(
        self, panels: Sequence[Panel], ours: str, *answers: bool | None
    ) -> Drawing:
        (width,), (seeds,) = self.distinct("width"), self.distinct("seeds")
        length = (
            f"{self.steps[-1]:,} steps, width {width}, depth "
            f"{', '.join(map(str, self.depths))}, {seeds} seeds, a = {self.best:g}"
        )
        return Drawing(panels, ours, curves.conjunction(*answers), length)


def diversity(numbers: Numbers) -> Drawing:
    """κ at growing depths, of Depth-μP and of the ODE (Figure 17)."""
    own = Kappas(numbers.rows)
    last = own.steps[-1]
    panels = [_shape_panel(own, name) for name in _LAWS]
    at_best = {name: own.at_best(name, steps=last) for name in _LAWS}
    lines = [_line(_TITLES[name], rows, "depth") for name, rows in at_best.items()]
    panels.append(_kappa("By depth", "depth", lines))
    first = {"depth": own.depths[0], "steps": last}
    lines = [
        _line(_TITLES[name], own.of("kappa", name, **first), "multiplier")
        for name in _LAWS
    ]
    title = f"L = {own.depths[0]}, by multiplier"
    panels.append(_kappa(title, "block multiplier a", lines))
    deep, ode = map(own.intervals, at_best.values())
    ours = (
        f"κ from {_text(deep[0])} to {_text(deep[-1])} for Depth-μP (agrees above "
        f"{_DIVERSE}), from {_text(ode[0])} to {_text(ode[-1])} for the ODE (agrees if "
        "it falls)"
    )
    falls = [
        own.interval("rise", "ode", depth=b, from_depth=a).negative
        for a, b in itertools.pairwise(own.depths)
    ]
    return own.drawing(panels, ours, *_diverse(deep), *falls)


def diversity_in_time(numbers: Numbers) -> Drawing:
    """κ after more steps of training (Figure 18)."""
    own = Kappas(numbers.rows)
    shallow, deepest = own.depths[0], own.depths[-1]
    first, last = own.steps[0], own.steps[-1]
    panels = []
    for name in _LAWS:
        lines = [
            _line(f"L = {n}", own.at_best(name, depth=n), "steps") for n in own.depths
        ]
        panels.append(_kappa(_TITLES[name], "steps", lines))
    end = own.interval("kappa", "ode", depth=deepest, steps=last)
    over_steps = own.interval("rise", "ode", depth=deepest, from_steps=first)
    over_depths = own.interval("rise", "ode", depth=deepest, from_depth=shallow)
    every = own.intervals(own.at_best("depth_mup"))
    least = min(every, key=lambda one: one.value)
    ours = (
        f"κ of the ODE is {_text(end)} at the end; it changes by "
        f"{_text(over_steps, '+.2f')} over steps and {_text(over_depths, '+.2f')} over "
        f"depths (agrees if both fall); that of Depth-μP falls to {_text(least)} "
        f"(agrees above {_DIVERSE})"
    )
    falls = over_steps.negative, over_depths.negative
    return own.drawing(panels, ours, *_diverse(every), *falls)


def absolute_value(numbers: Numbers) -> Drawing:
    """κ with |x| and with ReLU, under Depth-μP (Figure 19)."""
    own = Kappas(numbers.rows)
    panels = []
    for depth in own.depths:
        lines = [
            _line(_TITLES[name], own.at_best(name, depth=depth), "steps")
            for name in _ACTIVATIONS
        ]
        panels.append(_kappa(f"L = {depth}", "steps", lines))
    panels.append(_gain_panel(own))
    gains = [
        own.interval(
            "gain", "abs", depth=own.depths[-1], multiplier=own.best, steps=step
        )
        for step in own.steps
    ]
    each = ", ".join(_text(gain, "+.3f") for gain in gains)
    steps = ", ".join(f"{step:,}" for step in own.steps)
    ours = (
        f"κ of |x| less κ of ReLU is {each} after {steps} steps at depth "
        f"{own.depths[-1]}"
    )
    answers = [curves.negation(gain.negative) for gain in gains]
    return own.drawing(panels, ours, *answers)


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


# ----- Panels.


def _shape_panel(own: Kappas, network: str) -> Panel:
    """d(ε)/√ε over its value at the first shared ε, as in the paper's Figure 18."""
    lines = []
    for depth in own.depths:
        rows = own.of("shape", network, depth=depth)
        line = rows["epsilon"], rows["shape"], rows["standard_error"]
        lines.append(Line(f"L = {depth}", *line))
    x = lines[0].x
    lines.append(Line("κ = ½", x, np.ones(len(x)), look="theory"))
    label = "|x(λ+ε) - x(λ)| / √ε, relative"
    return Panel(_TITLES[network], "ε", label, lines, log_x=True, log_y=True)


def _gain_panel(own: Kappas) -> Panel:
    """κ of |x| less κ of ReLU against the multiplier, after each of the steps."""
    lines = []
    for step in own.steps:
        rows = own.of("gain", "abs", depth=own.depths[0], steps=step)
        lines.append(_line(f"{step:,} steps", rows, "multiplier", "gain"))
    ends = lines[0].x[0], lines[0].x[-1]
    lines.append(Line("equal", ends, [0.0, 0.0], look="theory"))
    labels = "block multiplier a", "κ of |x| less κ of ReLU"
    title = f"L = {own.depths[0]}, by multiplier"
    return Panel(title, *labels, lines, log_x=True)


def _kappa(title: str, x_label: str, lines: list[Line]) -> Panel:
    ends = [min(lines[0].x), max(lines[0].x)]
    half = Line("½", ends, [0.5, 0.5], look="theory")
    return Panel(title, x_label, "κ as seen", [*lines, half], log_x=True)


def _line(label: str, rows: Numbers, over: str, column: str = "kappa") -> Line:
    order = np.argsort(rows[over])
    x, y, error = (rows[name][order] for name in (over, column, "standard_error"))
    return Line(label, x, y, error)


def _text(kappa: curves.Interval, form: str = ".2f") -> str:
    """E.g. "0.49 ± 0.01", with half of the 95 % interval."""
    return f"{kappa.value:{form}} ± {kappa.wide:{form.lstrip('+')}}"


def _diverse(kappas: Sequence[curves.Interval]) -> list[bool | None]:
    """Whether each κ is above the tolerance."""
    return [curves.negation(kappa.under(_DIVERSE)) for kappa in kappas]

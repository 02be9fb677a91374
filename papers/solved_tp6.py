"""The figures of Tensor Programs VI that are computed from solvers."""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mupax.experiments.theory import linear_sgd
from mupax.experiments.theory.plane import Verdicts, predicted
from mupax.experiments.theory.relu_mlp import fit_power_law

from . import curves, plane
from .numbers import Numbers, Row
from .registry import Drawing, Line, Panel, near
from .request import Request

_REGIONS = ("unstable", "trivial", "unfaithful", "redundant", "diverse")
_TOLERANCE = 0.15  # of the exponent of a bounded quantity


def measure_regions(request: Request) -> list[Row]:
    """Growth with depth at points of the (α, γ) plane; columns as in `plane.Point`."""
    points = [
        *((0.25, 0.5), (0.5, 0.25), (0.75, 0.0), (0.5, 0.5), (0.75, 0.25)),
        *((1.0, 0.0), (1.5, -0.5), (0.5, 1.0), (0.75, 0.75), (1.0, 0.5)),
    ]
    width, seeds = 64 if request.paper else 32, 32
    rows: list[Row] = []
    for alpha, gamma in points:
        point = plane.measure(
            alpha, gamma, width=width, seeds=seeds, tolerance=_TOLERANCE
        )
        errors = {f"{name}_error": value for name, value in point.errors.items()}
        place = {"alpha": alpha, "gamma": gamma, "seeds": seeds}
        rows.append({**place, **point.exponents, **errors, "noise": point.noise})
    return rows


def _point(row: Row) -> plane.Point:
    numbers = {name: float(value) for name, value in row.items()}
    names = ("x", "h", "dx", "dh", "df", "residual")
    return plane.Point(
        numbers["alpha"],
        numbers["gamma"],
        family="sgd",
        depths=(),
        exponents={name: numbers[name] for name in names},
        errors={name: numbers[f"{name}_error"] for name in names},
        diversities=np.empty((0, int(numbers["seeds"]))),
        noise=numbers["noise"],
        tolerance=_TOLERANCE,
    )


def regions(numbers: Numbers) -> Drawing:
    """Measured behaviour at points of the (α, γ) plane (section 7)."""
    members: dict[str, list[tuple[float, float]]] = {name: [] for name in _REGIONS}
    answers: list[bool | None] = []
    for point in map(_point, numbers.rows):
        known = point.decided
        for name, expected in predicted(point.alpha, point.gamma).items():
            answer = known[name]
            answers.append(None if answer is None else answer == expected)
        members[_region(point.verdicts)].append((point.alpha, point.gamma))
    lines = [
        Line(name, [a for a, _ in where], [g for _, g in where], look="points")
        for name, where in members.items()
        if where
    ]
    border = [Line("α + γ = 1", [0.2, 1.6], [0.8, -0.6], look="theory")]
    border.append(Line("α = ½", [0.5, 0.5], [-0.6, 1.1], look="theory"))
    panel = Panel("Measured at points of the plane", "α", "γ", [*lines, *border])
    ours = (
        f"{answers.count(True)} of {len(answers)} verdicts at {len(numbers.rows)} "
        f"points are as claimed, {answers.count(None)} undecided"
    )
    return Drawing([panel], ours, curves.conjunction(*answers))


def _region(verdicts: Verdicts) -> str:
    if not (verdicts["stable at initialization"] and verdicts["stable in training"]):
        return "unstable"
    if not verdicts["nontrivial"]:
        return "trivial"
    if not verdicts["faithful"]:
        return "unfaithful"
    return "diverse" if verdicts["diverse"] else "redundant"


_RATE = 0.1
_SHOWN = (1, 5, 10)  # steps


def measure_widths(request: Request) -> list[Row]:
    """Rms of layers of linear networks over widths; at width inf that of Lemma 4.3."""
    depth, steps, layers = 64, 10, (0, 16, 32, 48, 64)
    widths = [2**k for k in (range(7, 14) if request.paper else range(5, 10))]
    seeds = jnp.arange(4 if request.paper else 8)
    inputs, targets = _stream(steps)
    limit = linear_sgd.train(inputs, targets, depth, learning_rate=_RATE).rms[:, 0]
    x, y = inputs[:, 0], targets[:, 0, 0]
    rows: list[Row] = []
    for width in (*widths, math.inf):
        measured = None if width == math.inf else _simulate(seeds, x, y, width, depth)
        for step, layer in itertools.product(range(1, steps + 1), layers):
            row = {"step": step, "layer": layer, "width": width}
            exact = limit[step - 1, layer]
            if measured is None:
                rows.append(row | {"rms": exact})
                continue
            own = np.asarray(measured)[:, step - 1, layer]
            error = own.std(ddof=1) / np.sqrt(len(own))
            away = ((own - exact) ** 2).mean()
            numbers = {"rms": own.mean(), "standard_error": error}
            rows.append(row | numbers | {"squared_distance": away})
    return rows


def finite_width(numbers: Numbers) -> Drawing:
    """Linear networks of growing width against Lemma 4.3 (section 10.1)."""
    measured, limit = numbers.finite("width"), numbers.where(width=math.inf)
    widths = measured.distinct("width")
    panels = []
    for step in _SHOWN:
        lines = []
        for layer in measured.distinct("layer"):
            own = measured.where(step=step, layer=layer)
            line = own["rms"], own["standard_error"]
            lines.append(Line(f"layer {layer}", widths, *line))
        lines += _levels("infinite width", widths, limit.where(step=step)["rms"])
        panels.append(Panel(f"Step {step}", "width", "rms of x", lines, log_x=True))
    distance = [measured.where(width=n)["squared_distance"].mean() for n in widths]
    slope = fit_power_law(widths, distance)
    ours = (
        f"squared distance from the limit falls as width^{slope:.2f} "
        "(agrees within 0.35 of -1)"
    )
    return Drawing(panels, ours, near(slope, -1, 0.35))


def _levels(name: str, sizes: Sequence[int], levels: Iterable[float]) -> list[Line]:
    """Horizontal lines, of which the first has a name."""
    ends = [sizes[0], sizes[-1]]
    return [
        Line("" if i else name, ends, [level] * 2, look="theory")
        for i, level in enumerate(levels)
    ]


def _stream(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a linear teacher, one example per step."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, 1, 16)) / 4
    return x, x @ rng.normal(size=(16, 1))


@functools.partial(jax.jit, static_argnames=("width", "depth"))
def _simulate(seeds: Any, x: Any, y: Any, width: int, depth: int) -> Any:
    """Root mean square of every layer before each step, (seeds, steps, layers)."""

    def layers(blocks: Any, start: Any) -> Any:
        def block(h: Any, w: Any) -> tuple[Any, Any]:
            h = h + w @ h / np.sqrt(depth)
            return h, h

        return jnp.concatenate([start[None], jax.lax.scan(block, start, blocks)[1]])

    def network(seed: Any) -> Any:
        # With the same key, wide networks would contain the weights of narrow ones.
        key = jax.random.fold_in(jax.random.key(seed), width)
        keys = jax.random.split(key, 3)
        read = jax.random.normal(keys[0], (width, x.shape[1]))
        out = jax.random.normal(keys[1], (width,)) / width
        blocks = jax.random.normal(keys[2], (depth, width, width)) / np.sqrt(width)

        def loss(blocks: Any, sample: Any) -> tuple[Any, Any]:
            h = layers(blocks, read @ sample[0])
            return (h[-1] @ out - sample[1]) ** 2 / 2, h

        def step(blocks: Any, sample: Any) -> tuple[Any, Any]:
            grads, h = jax.grad(loss, has_aux=True)(blocks, sample)
            # In μP the entries of gradients and of updates are of order 1/n. With
            # weights of standard deviation n^-½ the learning rate needs no factor.
            return blocks - _RATE * grads, jnp.sqrt((h**2).mean(axis=-1))

        return jax.lax.scan(step, blocks, (x, y))[1]

    return jax.lax.map(network, seeds)


def measure_depths(request: Request) -> list[Row]:
    """Rms at layer times of infinitely wide networks over depths; inf is the limit."""
    depths, parts = [2**k for k in range(4, 10)], (0, 0.25, 0.5, 0.75, 1)
    inputs, targets = _stream(max(_SHOWN))
    train = functools.partial(linear_sgd.train, inputs, targets, learning_rate=_RATE)
    runs = {depth: train(depth=depth).rms[:, 0] for depth in depths}
    start = 64 if request.paper else 32
    limit = linear_sgd.infinite_depth(inputs, targets, depth=start, learning_rate=_RATE)
    # The layer times of the limit are a grid of 1/`start`.
    runs[math.inf] = limit.rms.value[:, 0]
    return [
        {
            "step": step,
            "layer_time": part,
            "depth": depth,
            "rms": rms[step - 1, int(part * (rms.shape[1] - 1))],
        }
        for step in _SHOWN
        for part in parts
        for depth, rms in runs.items()
    ]


def depth_convergence(numbers: Numbers) -> Drawing:
    """The infinitely wide linear network over depths (section 10.1)."""
    runs, limit = numbers.finite("depth"), numbers.where(depth=math.inf)
    depths = runs.distinct("depth")
    panels = []
    for step in _SHOWN:
        exact = limit.where(step=step)
        lines = [
            Line(
                f"layer time {part:g}",
                depths,
                runs.where(step=step, layer_time=part)["rms"],
            )
            for part in exact["layer_time"]
        ]
        lines += _levels("infinite depth", depths, exact["rms"])
        panels.append(Panel(f"Step {step}", "depth", "rms of x", lines, log_x=True))
    last = {"step": _SHOWN[-1], "layer_time": 1}
    away = np.abs(runs.where(**last)["rms"] - limit.where(**last)["rms"])
    slope = fit_power_law(depths[-4:], away[-4:])
    ours = (
        f"distance of the last layer from infinite depth at step 10 falls as "
        f"depth^{slope:.2f} (agrees within 0.1 of -1)"
    )
    return Drawing(panels, ours, near(slope, -1, 0.1))

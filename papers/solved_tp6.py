"""The figures of Tensor Programs VI that are computed from solvers."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mupax.experiments.theory import linear_sgd, plane
from mupax.experiments.theory.relu_mlp import fit_power_law

from . import curves
from .registry import Drawing, Line, Panel, near

_REGIONS = ("unstable", "trivial", "unfaithful", "redundant", "diverse")


def regions(paper: bool) -> Drawing:
    """Measured behaviour at points of the (α, γ) plane (section 7)."""
    points = [
        *((0.25, 0.5), (0.5, 0.25), (0.75, 0.0), (0.5, 0.5), (0.75, 0.25)),
        *((1.0, 0.0), (1.5, -0.5), (0.5, 1.0), (0.75, 0.75), (1.0, 0.5)),
    ]
    sizes: dict[str, Any] = {"depths": (16, 64, 256), "width": 32, "seeds": 32}
    if paper:
        sizes |= {"width": 64}
    members: dict[str, list[tuple[float, float]]] = {name: [] for name in _REGIONS}
    answers: list[bool | None] = []
    for alpha, gamma in points:
        point = plane.measure(alpha, gamma, **sizes)
        known = point.decided
        for name, expected in plane.predicted(alpha, gamma).items():
            answer = known[name]
            answers.append(None if answer is None else answer == expected)
        members[_region(point.verdicts)].append((alpha, gamma))
    lines = [
        Line(name, [a for a, _ in where], [g for _, g in where], look="points")
        for name, where in members.items()
        if where
    ]
    border = [Line("α + γ = 1", [0.2, 1.6], [0.8, -0.6], look="theory")]
    border.append(Line("α = ½", [0.5, 0.5], [-0.6, 1.1], look="theory"))
    panel = Panel("Measured at points of the plane", "α", "γ", [*lines, *border])
    ours = (
        f"{answers.count(True)} of {len(answers)} verdicts at {len(points)} points are "
        f"as claimed, {answers.count(None)} undecided"
    )
    return Drawing([panel], ours, curves.conjunction(*answers))


def _region(verdicts: plane.Verdicts) -> str:
    if not (verdicts["stable at initialization"] and verdicts["stable in training"]):
        return "unstable"
    if not verdicts["nontrivial"]:
        return "trivial"
    if not verdicts["faithful"]:
        return "unfaithful"
    return "diverse" if verdicts["diverse"] else "redundant"


def finite_width(paper: bool) -> Drawing:
    """Linear networks of growing width against Lemma 4.3 (section 10.1)."""
    depth, steps = 64, 10
    widths = [2**k for k in (range(7, 14) if paper else range(5, 10))]
    seeds = 4 if paper else 8
    inputs, targets = _stream(steps)
    limit = linear_sgd.train(inputs, targets, depth, learning_rate=_RATE).rms[:, 0]
    layers = [0, 16, 32, 48, 64]
    seed, x, y = jnp.arange(seeds), inputs[:, 0], targets[:, 0, 0]
    measured = np.stack([_simulate(seed, x, y, n, depth) for n in widths])[..., layers]
    mean = measured.mean(axis=1)
    error = measured.std(axis=1, ddof=1) / np.sqrt(seeds)
    panels = []
    for step in (1, 5, 10):
        lines = [
            Line(f"layer {n}", widths, mean[:, step - 1, k], error[:, step - 1, k])
            for k, n in enumerate(layers)
        ]
        lines += _levels("infinite width", widths, limit[step - 1, layers])
        panels.append(Panel(f"Step {step}", "width", "rms of x", lines, log_x=True))
    distance = ((measured - limit[:, layers]) ** 2).mean(axis=(1, 2, 3))
    slope = fit_power_law(widths, distance)
    ours = (
        f"squared distance from the limit falls as width^{slope:.2f} "
        "(agrees within 0.35 of -1)"
    )
    return Drawing(panels, ours, near(slope, -1, 0.35))


_RATE = 0.1


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


def depth_convergence(paper: bool) -> Drawing:
    """The infinitely wide linear network over depths (section 10.1)."""
    depths, steps = [2**k for k in range(4, 10)], 10
    inputs, targets = _stream(steps)
    train = functools.partial(linear_sgd.train, inputs, targets, learning_rate=_RATE)
    runs = [train(depth=depth).rms[:, 0] for depth in depths]
    parts = (0, 0.25, 0.5, 0.75, 1)
    start = 64 if paper else 32
    limit = linear_sgd.infinite_depth(inputs, targets, depth=start, learning_rate=_RATE)
    # The layer times of the limit are a grid of 1/`start`.
    rms = limit.rms.value[:, 0]
    panels = []
    for step in (1, 5, 10):
        at = step - 1
        lines = []
        for part in parts:
            values = [run[at, int(part * (run.shape[1] - 1))] for run in runs]
            lines.append(Line(f"layer time {part:g}", depths, values))
        levels = (rms[at, int(part * start)] for part in parts)
        lines += _levels("infinite depth", depths, levels)
        panels.append(Panel(f"Step {step}", "depth", "rms of x", lines, log_x=True))
    away = [float(abs(run[-1, -1] - rms[-1, -1])) for run in runs]
    slope = fit_power_law(depths[-4:], away[-4:])
    ours = (
        f"distance of the last layer from infinite depth at step 10 falls as "
        f"depth^{slope:.2f} (agrees within 0.1 of -1)"
    )
    return Drawing(panels, ours, near(slope, -1, 0.1))

"""The figures of Bordelon et al. that are computed from solvers."""

import functools

import numpy as np

from mupax.experiments.theory import feature_learning, finite_size, lazy, linear_joint
from mupax.experiments.theory.relu_mlp import fit_power_law

from . import curves
from .registry import Drawing, Line, Panel, loglog, near

_BIAS = 0.3  # tolerance of the exponent of a bias in depth


@functools.cache
def _trained(paper: bool) -> finite_size.Errors:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 5)), rng.normal(size=6)
    # The bias is far smaller than the noise of one network, so many seeds are needed.
    widths, seeds = ((64, 128, 256, 512), 256) if paper else ((16, 32, 64), 400)
    return finite_size.train(x, y, widths=widths, depths=(4, 8, 16, 32), seeds=seeds)


def _bias_law(errors: finite_size.Errors) -> tuple[float, float]:
    """The exponent of the bias in depth, with its bootstrap standard error."""
    draw, count = np.random.default_rng(0), errors.outputs.shape[2]
    slopes = []
    for _ in range(100):
        chosen = errors.outputs[:, :, draw.integers(0, count, count)]
        again = finite_size.Errors(errors.widths, errors.depths, chosen)
        slopes.append(again.depth_law())
    return errors.depth_law(), float(np.std(slopes))


def depths_agree(paper: bool) -> Drawing:
    """Training at infinite width at several depths, against networks (Figure 5a)."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 5)), rng.normal(size=2)
    steps, rate, depths = 5, 0.5, (2, 4, 8, 16)
    stream = np.repeat(x[None], steps, 0), np.repeat(y[None], steps, 0)
    replicas, width, seeds = (64, 512, 128) if paper else (16, 256, 32)
    runs = [
        feature_learning.dynamics(*stream, d, learning_rate=rate, replicas=replicas)
        for d in depths
    ]
    networks = finite_size.train(
        x, y, widths=(width,), depths=depths, steps=steps - 1, learning_rate=rate,
        seeds=seeds,
    ).outputs[0]  # fmt: skip
    mean, noise = networks.mean(1), networks.std(1, ddof=1) / np.sqrt(seeds)
    value, error = (np.stack([run.outputs[k][-1] for run in runs]) for k in (0, 1))
    away = float((np.abs(mean - value) / np.hypot(noise, error)).max())
    slope, slope_error = _gap_law(runs, depths)
    losses = [
        Line(f"L = {d}", range(steps), run.losses.value)
        for d, run in zip(depths, runs, strict=True)
    ]
    outputs = []
    for k in (0, 1):
        label = f"N = {width}, point {k + 1}"
        outputs.append(Line(label, depths, mean[:, k], noise[:, k], look="points"))
        name = f"infinite width, point {k + 1}"
        outputs.append(Line(name, depths, value[:, k], look="theory"))
    panels = [
        Panel("Training at infinite width", "step", "loss", losses),
        Panel(f"After {steps - 1} steps", "depth L", "f", outputs, log_x=True),
    ]
    ours = (
        f"losses of depths L and 2L differ as L^({slope:.2f} ± {slope_error:.2f}) "
        f"(agrees within {_BIAS} of -1); networks of width "
        f"{width} are within {away:.1f} standard errors (agrees below 4)"
    )
    law = curves.surely_near(slope, slope_error, -1, _BIAS)
    return Drawing(panels, ours, curves.conjunction(law, away < 4))


def _gap_law(
    runs: list[feature_learning.Dynamics], depths: tuple[int, ...]
) -> tuple[float, float]:
    """The exponent in L of the last losses' difference between L and 2L, with error."""
    last = np.array([[part[-1] for part in run.losses] for run in runs])
    draws = np.random.default_rng(0).normal(size=(200, len(depths)))

    def slope(losses: np.ndarray) -> float:
        return fit_power_law(depths[:-1], np.abs(np.diff(losses)))

    spread = np.std([slope(last[:, 0] + draw * last[:, 1]) for draw in draws])
    return slope(last[:, 0]), float(spread)


def finite_sizes(paper: bool) -> Drawing:
    """Squared distance of single networks from the limit (Figure 5b)."""
    networks = _trained(paper)
    # As in the paper, the ensemble of the largest networks stands for the limit.
    proxy = networks.outputs[-1, -1].mean(axis=0)
    errors = ((networks.outputs - proxy) ** 2).mean(axis=(2, 3))
    lines = [
        Line(f"N = {n}", networks.depths, row)
        for n, row in zip(networks.widths, errors, strict=True)
    ]
    title = "Single networks, and the large ensemble"
    single = loglog(title, "depth L", "squared error of f", lines)
    width = networks.width_law()
    bias, error = _bias_law(networks)
    ours = (
        f"noise falls as N^{width:.2f} (agrees within 0.15 of -1), the bias in depth "
        f"as L^({bias:.2f} ± {error:.2f}) (agrees within {_BIAS} of -1)"
    )
    law = curves.surely_near(bias, error, -1, _BIAS)
    agrees = curves.conjunction(near(width, -1, 0.15), law)
    return Drawing([single, _bias(networks, 1, "bias of f")], ours, agrees)


def ensembles(paper: bool) -> Drawing:
    """Variance over initializations, and the bias of the average (Figure B.7)."""
    networks = _trained(paper)
    widths, variances = networks.widths, networks.variance.T
    lines = [
        Line(f"L = {d}", widths, variance)
        for d, variance in zip(networks.depths, variances, strict=True)
    ]
    law = variances[:, 0].mean() * widths[0] / np.array(widths)
    lines.append(Line("1/N", widths, law, look="theory"))
    noise = loglog("Over initializations", "width N", "variance of f", lines)
    slopes = [fit_power_law(widths, variance) for variance in variances]
    bias, error = (2 * value for value in _bias_law(networks))
    ours = (
        f"variance falls as N^{min(slopes):.2f} to N^{max(slopes):.2f} over the depths "
        f"(agrees within 0.15 of -1), the square of the ensemble's bias as "
        f"L^({bias:.2f} ± {error:.2f}) (agrees within {2 * _BIAS:g} of -2)"
    )
    law = curves.surely_near(bias, error, -2, 2 * _BIAS)
    agrees = curves.conjunction(*(near(s, -1, 0.15) for s in slopes), law)
    return Drawing([noise, _bias(networks, 2, "squared bias of f")], ours, agrees)


def _bias(errors: finite_size.Errors, power: int, label: str) -> Panel:
    depths, gaps = errors.depths[:-1], errors.depth_gaps[-1] ** power
    law = gaps[-1] * (depths[-1] / np.array(depths)) ** power
    lines = [
        Line("measured", depths, gaps),
        Line(f"L^-{power}" if power > 1 else "1/L", depths, law, look="theory"),
    ]
    title = f"Averaged over initializations, N = {errors.widths[-1]}"
    return loglog(title, "depth L", f"{label}: L against 2L", lines)


def lazy_kernel(paper: bool) -> Drawing:
    """The ReLU network's NTK over the angle, and its convergence (Figure 6)."""
    angles = np.linspace(-np.pi, np.pi, 65 if paper else 33)
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.sqrt(2)
    gram, zero = lazy.gram(points), len(angles) // 2
    limit = lazy.kernels(gram, "relu").kernel[zero]
    depths = [2**k for k in range(0, 9 if paper else 8)]
    kernels = [lazy.kernels(gram, "relu", depth=d).kernel[zero] for d in depths]
    lines = [Line(f"L = {depths[i]}", angles, kernels[i]) for i in (0, 2, 4)]
    lines.append(Line("infinite depth", angles, limit, look="theory"))
    shape = Panel("NTK at initialization", "angle", "K", lines)
    away = [float(((k - limit) ** 2).mean()) for k in kernels]
    slope = fit_power_law(depths[-4:], away[-4:])
    law = away[-1] * (depths[-1] / np.array(depths)) ** 2
    lines = [Line("recursion", depths, away), Line("L^-2", depths, law, look="theory")]
    title = "Distance from infinite depth"
    rate = loglog(title, "depth L", "mean squared error of K", lines)
    ours = f"squared error falls as L^{slope:.2f} (agrees within 0.1 of -2)"
    return Drawing([shape, rate], ours, near(slope, -2, 0.1))


def linear_features(paper: bool) -> Drawing:
    """H before and after a step of a linear network, over layers (Figure 7)."""
    rate, depths = 0.5, [5, 10, 20, 50, 100, 300]
    depths = [*depths, 500] if paper else depths
    times = np.linspace(0, 1, 51)
    closed = linear_joint.one_step(times, learning_rate=rate)
    before, after, away = [], [], []
    for depth in depths:
        run = linear_joint.dynamics(
            np.ones((2, 1, 1)), np.ones((2, 1)), depth=depth, learning_rate=rate
        )
        start, change = run.h[:, 0, 0], run.h[:, 1, 1] - run.h[:, 0, 0]
        exact = linear_joint.one_step(run.times, learning_rate=rate).change_h
        away.append(float(np.abs(change - exact).max() / exact.max()))
        if depth in (5, 10, 50, 300):
            at = np.unique(np.linspace(0, depth, 11).round().astype(int))
            before.append(Line(f"L = {depth}", run.times[at], start[at]))
            # The frozen read-in does not change, and zero has no logarithm.
            after.append(Line(f"L = {depth}", run.times[at[1:]], change[at[1:]]))
    name = "infinite depth"
    before.append(Line(name, times, closed.h, look="theory"))
    after.append(Line(name, times[1:], closed.change_h[1:], look="theory"))
    slope = fit_power_law(depths[-3:], away[-3:])
    ours = (
        f"ΔH at depth {depths[-1]} is within {away[-1]:.2%} of the limit, the gap "
        f"falls as L^{slope:.2f} (agrees within 0.1 of -1)"
    )
    panels = [
        Panel("At initialization", "layer time τ", "H0", before),
        Panel("Change by one step", "layer time τ", "ΔH", after, log_y=True),
    ]
    return Drawing(panels, ours, near(slope, -1, 0.1))

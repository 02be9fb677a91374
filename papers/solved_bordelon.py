"""The figures of Bordelon et al. that are computed from solvers."""

import math
from collections.abc import Sequence

import numpy as np

from mupax.experiments.theory import feature_learning, lazy, linear_joint
from mupax.experiments.theory.relu_mlp import fit_power_law

from . import curves, finite_size
from .numbers import Numbers, Row
from .registry import Drawing, Line, Look, Panel, loglog, near
from .request import Request

_BIAS = 0.3  # tolerance of the exponent of a bias in depth


# ----- Figure 5a.

_STEPS = 5  # losses; four of them follow an update


def measure_infinite_width(request: Request) -> list[Row]:
    """Losses and outputs at infinite width, and the outputs of finite networks."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 5)), rng.normal(size=2)
    rate, depths = 0.5, (2, 4, 8, 16)
    stream = np.repeat(x[None], _STEPS, 0), np.repeat(y[None], _STEPS, 0)
    replicas, width, seeds = (64, 512, 128) if request.paper else (16, 256, 32)
    networks = finite_size.train(
        x, y, widths=(width,), depths=depths, steps=_STEPS - 1, learning_rate=rate,
        seeds=seeds,
    ).outputs[0]  # fmt: skip
    noise = networks.std(1, ddof=1) / np.sqrt(seeds)
    rows: list[Row] = []
    for i, depth in enumerate(depths):
        run = feature_learning.dynamics(
            *stream, depth, learning_rate=rate, replicas=replicas
        )
        at = {"depth": depth, "width": math.inf}
        for step, (value, error) in enumerate(zip(*run.losses, strict=True)):
            loss = {"step": step, "loss": value, "standard_error": error}
            rows.append(at | loss)
        for point in (1, 2):
            value, error = (part[-1, point - 1] for part in run.outputs)
            limit = {"output": value, "standard_error": error}
            rows.append(at | {"point": point} | limit)
            value, error = networks[i, :, point - 1].mean(), noise[i, point - 1]
            measured = {"output": value, "standard_error": error}
            rows.append({"depth": depth, "width": width, "point": point} | measured)
    return rows


def depths_agree(numbers: Numbers) -> Drawing:
    """Training at infinite width at several depths, against networks (Figure 5a)."""
    depths, steps = numbers.distinct("depth"), numbers.distinct("step")
    limit, networks = numbers.where(width=math.inf), numbers.finite("width")
    (width,) = networks.distinct("width")
    trained = [limit.where(depth=d, step=steps[-1]) for d in depths]
    last = [(run["loss"][0], run["standard_error"][0]) for run in trained]
    slope, slope_error = _gap_law(np.array(last), depths)
    losses = [
        Line(
            f"L = {d}", steps, [limit.where(depth=d, step=t)["loss"][0] for t in steps]
        )
        for d in depths
    ]
    outputs, away = [], 0.0
    for point in (1, 2):
        own, exact = networks.where(point=point), limit.where(point=point)
        line = own["output"], own["standard_error"]
        label = f"N = {width}, point {point}"
        outputs.append(Line(label, depths, *line, look="points"))
        name = f"infinite width, point {point}"
        outputs.append(Line(name, depths, exact["output"], look="theory"))
        error = np.hypot(own["standard_error"], exact["standard_error"])
        apart = np.abs(own["output"] - exact["output"]) / error
        away = max(away, float(apart.max()))
    panels = [
        Panel("Training at infinite width", "step", "loss", losses),
        Panel(f"After {steps[-1]} steps", "depth L", "f", outputs, log_x=True),
    ]
    ours = (
        f"losses of depths L and 2L differ as L^({slope:.2f} ± {slope_error:.2f}) "
        f"(agrees within {_BIAS} of -1); networks of width "
        f"{width} are within {away:.1f} standard errors (agrees below 4)"
    )
    law = curves.surely_near(slope, slope_error, -1, _BIAS)
    return Drawing(panels, ours, curves.conjunction(law, away < 4))


def _gap_law(last: np.ndarray, depths: Sequence[int]) -> tuple[float, float]:
    """The exponent in L of the difference of losses between L and 2L, with its error.

    `last` are the losses of each depth, with their standard errors: (depths, 2).
    """
    draws = np.random.default_rng(0).normal(size=(200, len(depths)))

    def slope(losses: np.ndarray) -> float:
        return fit_power_law(depths[:-1], np.abs(np.diff(losses)))

    spread = np.std([slope(last[:, 0] + draw * last[:, 1]) for draw in draws])
    return slope(last[:, 0]), float(spread)


# ----- Figures 5b and B.7.


def measure_finite_sizes(request: Request) -> list[Row]:
    """Errors of trained networks over widths and depths.

    Columns: "squared_error" of single networks, "variance" over initializations, and at
    the largest width the "gap" between the mean outputs of depths L and 2L. The last
    row has the gap's exponent in L.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 5)), rng.normal(size=6)
    # The bias is far smaller than the noise of one network, so many seeds are needed.
    paper = (64, 128, 256, 512), 256
    widths, seeds = paper if request.paper else ((16, 32, 64), 400)
    depths = (4, 8, 16, 32)
    trained = finite_size.train(x, y, widths=widths, depths=depths, seeds=seeds)
    # As in the paper, the ensemble of the largest networks stands for the limit.
    proxy = trained.outputs[-1, -1].mean(axis=0)
    errors = ((trained.outputs - proxy) ** 2).mean(axis=(2, 3))
    rows: list[Row] = []
    for i, width in enumerate(widths):
        for j, depth in enumerate(depths):
            row: Row = {
                "squared_error": errors[i, j],
                "variance": trained.variance[i, j],
            }
            if width == widths[-1] and depth != depths[-1]:
                row["gap"] = trained.depth_gaps[i, j]
            rows.append({"width": width, "depth": depth} | row)
    exponent, error = _bias_law(trained)
    law = {"gap_exponent": exponent, "standard_error": error}
    return [*rows, {"width": widths[-1]} | law]


def _bias_law(errors: finite_size.Errors) -> tuple[float, float]:
    """The exponent of the bias in depth, with its bootstrap standard error."""
    draw, count = np.random.default_rng(0), errors.outputs.shape[2]
    slopes = []
    for _ in range(100):
        chosen = errors.outputs[:, :, draw.integers(0, count, count)]
        again = finite_size.Errors(errors.widths, errors.depths, chosen)
        slopes.append(again.depth_law())
    return errors.depth_law(), float(np.std(slopes))


def finite_sizes(numbers: Numbers) -> Drawing:
    """Squared distance of single networks from the limit (Figure 5b)."""
    networks, (law,) = numbers.having("depth"), numbers.having("gap_exponent").rows
    widths, depths = networks.distinct("width"), networks.distinct("depth")
    lines = [
        Line(f"N = {n}", depths, networks.where(width=n)["squared_error"])
        for n in widths
    ]
    title = "Single networks, and the large ensemble"
    single = loglog(title, "depth L", "squared error of f", lines)
    width = fit_power_law(widths, networks.where(depth=depths[-1])["variance"])
    bias, error = float(law["gap_exponent"]), float(law["standard_error"])
    ours = (
        f"noise falls as N^{width:.2f} (agrees within 0.15 of -1), the bias in depth "
        f"as L^({bias:.2f} ± {error:.2f}) (agrees within {_BIAS} of -1)"
    )
    known = curves.surely_near(bias, error, -1, _BIAS)
    agrees = curves.conjunction(near(width, -1, 0.15), known)
    return Drawing([single, _bias(networks, 1, "bias of f")], ours, agrees)


def ensembles(numbers: Numbers) -> Drawing:
    """Variance over initializations, and the bias of the average (Figure B.7)."""
    networks, (law,) = numbers.having("depth"), numbers.having("gap_exponent").rows
    widths, depths = networks.distinct("width"), networks.distinct("depth")
    variances = [networks.where(depth=d)["variance"] for d in depths]
    lines = [
        Line(f"L = {d}", widths, variance)
        for d, variance in zip(depths, variances, strict=True)
    ]
    falling = np.mean([one[0] for one in variances]) * widths[0] / np.array(widths)
    lines.append(Line("1/N", widths, falling, look="theory"))
    noise = loglog("Over initializations", "width N", "variance of f", lines)
    slopes = [fit_power_law(widths, variance) for variance in variances]
    bias, error = 2 * float(law["gap_exponent"]), 2 * float(law["standard_error"])
    ours = (
        f"variance falls as N^{min(slopes):.2f} to N^{max(slopes):.2f} over the depths "
        f"(agrees within 0.15 of -1), the square of the ensemble's bias as "
        f"L^({bias:.2f} ± {error:.2f}) (agrees within {2 * _BIAS:g} of -2)"
    )
    known = curves.surely_near(bias, error, -2, 2 * _BIAS)
    agrees = curves.conjunction(*(near(s, -1, 0.15) for s in slopes), known)
    return Drawing([noise, _bias(networks, 2, "squared bias of f")], ours, agrees)


def _bias(networks: Numbers, power: int, label: str) -> Panel:
    width = networks.distinct("width")[-1]
    measured = networks.having("gap")
    depths, gaps = measured["depth"], measured["gap"] ** power
    law = gaps[-1] * (depths[-1] / depths) ** power
    lines = [
        Line("measured", depths, gaps),
        Line(f"L^-{power}" if power > 1 else "1/L", depths, law, look="theory"),
    ]
    title = f"Averaged over initializations, N = {width}"
    return loglog(title, "depth L", f"{label}: L against 2L", lines)


# ----- Figure 6.


def measure_kernel(request: Request) -> list[Row]:
    """The ReLU network's NTK over the angle and the depth; inf is the limit."""
    angles = np.linspace(-np.pi, np.pi, 65 if request.paper else 33)
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.sqrt(2)
    gram, zero = lazy.gram(points), len(angles) // 2
    depths = [2**k for k in range(0, 9 if request.paper else 8)]
    kernels = {d: lazy.kernels(gram, "relu", depth=d).kernel[zero] for d in depths}
    kernels[math.inf] = lazy.kernels(gram, "relu").kernel[zero]
    return [
        {"depth": depth, "angle": angle, "kernel": value}
        for depth, kernel in kernels.items()
        for angle, value in zip(angles, kernel, strict=True)
    ]


def lazy_kernel(numbers: Numbers) -> Drawing:
    """The ReLU network's NTK over the angle, and its convergence (Figure 6)."""
    limit = numbers.where(depth=math.inf)
    depths = numbers.finite("depth").distinct("depth")
    kernels = [numbers.where(depth=d)["kernel"] for d in depths]
    angles = limit["angle"]
    lines = [Line(f"L = {depths[i]}", angles, kernels[i]) for i in (0, 2, 4)]
    lines.append(Line("infinite depth", angles, limit["kernel"], look="theory"))
    shape = Panel("NTK at initialization", "angle", "K", lines)
    away = [float(((k - limit["kernel"]) ** 2).mean()) for k in kernels]
    slope = fit_power_law(depths[-4:], away[-4:])
    law = away[-1] * (depths[-1] / np.array(depths)) ** 2
    lines = [Line("recursion", depths, away), Line("L^-2", depths, law, look="theory")]
    title = "Distance from infinite depth"
    rate = loglog(title, "depth L", "mean squared error of K", lines)
    ours = f"squared error falls as L^{slope:.2f} (agrees within 0.1 of -2)"
    return Drawing([shape, rate], ours, near(slope, -2, 0.1))


# ----- Figure 7.


def measure_features(request: Request) -> list[Row]:
    """H and its change by a step over layer times; depth inf is the closed form."""
    rate, depths = 0.5, [5, 10, 20, 50, 100, 300]
    depths = [*depths, 500] if request.paper else depths
    times = np.linspace(0, 1, 51)
    closed = linear_joint.one_step(times, learning_rate=rate)
    rows: list[Row] = [
        {"depth": math.inf, "time": time, "h": h, "change": change}
        for time, h, change in zip(times, closed.h, closed.change_h, strict=True)
    ]
    for depth in depths:
        run = linear_joint.dynamics(
            np.ones((2, 1, 1)), np.ones((2, 1)), depth=depth, learning_rate=rate
        )
        start, change = run.h[:, 0, 0], run.h[:, 1, 1] - run.h[:, 0, 0]
        exact = linear_joint.one_step(run.times, learning_rate=rate).change_h
        gap = np.abs(change - exact).max() / exact.max()
        rows.append({"depth": depth, "gap": gap})
        for at in np.unique(np.linspace(0, depth, 11).round().astype(int)):
            row = {"time": run.times[at], "h": start[at], "change": change[at]}
            rows.append({"depth": depth} | row)
    return rows


def linear_features(numbers: Numbers) -> Drawing:
    """H before and after a step of a linear network, over layers (Figure 7)."""
    layers, gaps = numbers.having("time"), numbers.having("gap")
    depths, away = gaps.distinct("depth"), gaps["gap"]
    before, after = [], []
    for depth in (5, 10, 50, 300, math.inf):
        own = layers.where(depth=depth)
        label = f"L = {depth}" if depth < math.inf else "infinite depth"
        look: Look = "measured" if depth < math.inf else "theory"
        before.append(Line(label, own["time"], own["h"], look=look))
        # The frozen read-in does not change, and zero has no logarithm.
        line = own["time"][1:], own["change"][1:]
        after.append(Line(label, *line, look=look))
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

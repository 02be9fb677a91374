"""Jelassi et al., Depth dependence of μP learning rates in ReLU MLPs."""

import numpy as np

from mupax.experiments.theory import relu_mlp

from .numbers import Numbers, Row
from .registry import Drawing, Figure, Line, loglog, near
from .request import Request


def measure(request: Request) -> list[Row]:
    """η* at which preactivations move by one, over widths and depths."""
    depths = [2**k for k in range(1, 11 if request.paper else 10)]
    return [
        {
            "width": width,
            "depth": depth,
            "rate": relu_mlp.maximal_learning_rate(width, depth),
        }
        for width in (256, 4096, 10**6)
        for depth in depths
        if depth <= width  # the law holds while the depth is small against the width
    ]


def threshold(numbers: Numbers) -> Drawing:
    """η* at which preactivations move by one, against the depth (Theorem 1.1)."""
    lines, slope = [], float("nan")
    for width in numbers.distinct("width"):
        own = numbers.where(width=width)
        lines.append(Line(f"width {width:,}", own["depth"], own["rate"]))
        slope = relu_mlp.fit_power_law(own["depth"][-4:], own["rate"][-4:])
    depths = np.array(numbers.distinct("depth"))
    law = 3**0.5 * depths**-1.5
    lines.append(Line("√3 L^(-3/2)", depths, law, look="theory"))
    title = "Largest learning rate of a plain ReLU network"
    panel = loglog(title, "depth L", "η*", lines)
    ours = f"exponent {slope:.3f} at width 10⁶ (agrees within 0.01)"
    return Drawing([panel], ours, near(slope, -1.5, 0.01))


FIGURES = [
    Figure(
        id="jelassi-1",
        paper="Jelassi",
        number="Theorem 1.1",
        claim="η* of a ReLU network of depth L falls as L^(-3/2)",
        measure=measure,
        draw=threshold,
        how="the paper has no figure; eq. 1.4 solved in the linear response",
    ),
]

"""Jelassi et al., Depth dependence of μP learning rates in ReLU MLPs."""

from mupax.experiments.theory import relu_mlp

from .registry import Drawing, Figure, Line, loglog, near


def threshold(paper: bool) -> Drawing:
    """η* at which preactivations move by one, against the depth (Theorem 1.1)."""
    depths = [2**k for k in range(1, 11 if paper else 10)]
    widths = (256, 4096, 10**6)
    lines, slope = [], float("nan")
    for width in widths:
        # The law holds while the depth is small against the width.
        deep = [d for d in depths if d <= width]
        rates = [relu_mlp.maximal_learning_rate(width, d) for d in deep]
        lines.append(Line(f"width {width:,}", deep, rates))
        slope = relu_mlp.fit_power_law(deep[-4:], rates[-4:])
    law = [3**0.5 * d**-1.5 for d in depths]
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
        draw=threshold,
        how="the paper has no figure; eq. 1.4 solved in the linear response",
    ),
]

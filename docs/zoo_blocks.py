"""Draws docs/zoo_blocks.png: where the multipliers sit in a block of each family.

    python docs/zoo_blocks.py

The rows below the blocks are computed by `optim.multipliers`, not typed.
"""

import math
import pathlib

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Circle, FancyBboxPatch

from mupax import optim

OUT = pathlib.Path(__file__).with_name("zoo_blocks.png")
COLORS = {
    "input": "#bcd7f0",
    "hidden": "#f7d6ae",
    "output": "#c9e7c2",
    "vector": "#e3e3e3",
    "none": "white",
}
A = r"$a\,M^{-\alpha}$"

# From the bottom: (text, role). "+" closes the branch that "split" opens, behind the
# factor in front of it; "*" is a factor of its own.
MLP = [
    ("$W^0$ read-in", "input"),
    (r"$\phi$", "none"),
    ("$W^l$", "hidden"),
    (r"$\phi$", "none"),
    ("readout", "output"),
    ("*", r"$1/\mu_0$"),
]
RESMLP = [
    ("$U$ read-in", "input"),
    ("split", ""),
    ("LayerNorm (option)", "vector"),
    ("$W^l$", "hidden"),
    (r"$\phi$, mean subtraction", "none"),
    ("+", A),
    ("$V$ readout", "output"),
    ("*", r"$1/\mu_0$"),
]
CNN = [
    ("3×3 read-in", "input"),
    ("split", ""),
    (r"$\phi$", "none"),
    ("3×3 $W^l$", "hidden"),
    ("+", A),
    ("pool, 3×3 doubling", "hidden"),
    ("readout", "output"),
    ("*", r"$1/\mu_0$"),
]
RESNET = [
    ("stem", "input"),
    ("norm", "vector"),
    ("split", "1×1, norm where shapes change"),
    ("3×3", "hidden"),
    ("norm, relu", "vector"),
    ("3×3", "hidden"),
    ("norm", "vector"),
    ("+", A),
    ("relu", "none"),
    ("mean, readout", "output"),
    ("*", r"$1/\mu_0$"),
]
TRANSFORMER = [
    ("patches or tokens", "input"),
    ("positions, token", "vector"),
    ("split", ""),
    ("LayerNorm", "vector"),
    ("queries, keys, values", "hidden"),
    ("*", r"$1/d_{\mathrm{head}}$"),
    ("softmax, mix", "none"),
    ("out", "hidden"),
    ("+", A),
    ("split", ""),
    ("LayerNorm", "vector"),
    ("up, gelu, down", "hidden"),
    ("+", A),
    ("LayerNorm", "vector"),
    ("readout", "output"),
    ("*", r"$1/\mu_0$; tied: $1/m\mu_0$"),
]
PANELS = {
    "mlp": MLP,
    "resmlp": RESMLP,
    "cnn": CNN,
    "resnet": RESNET,
    "vit, gpt": TRANSFORMER,
}
STEP, HALF = 1.0, 2.1


def draw(axes: plt.Axes, name: str, parts: list[tuple[str, str]]) -> None:
    """One family, from its input at the bottom to its logits."""
    y, starts = 0.0, []
    gray = {"color": "#555555", "lw": 1.2}
    for i, (text, role) in enumerate(parts):
        if i:
            axes.plot([0, 0], [y - STEP + 0.32, y - 0.32], **gray, zorder=0)
        if text == "split":
            # Here the residual stream leaves the branch.
            axes.plot([0, 0], [y - 0.4, y + 0.4], **gray, zorder=0)
            starts.append((y, role))
        elif text in ("+", "*"):
            circle = Circle((0, y), 0.27, fc="white", ec="#b22222", lw=1.4)
            axes.add_patch(circle)
            sign = "+" if text == "+" else "×"
            axes.text(0, y, sign, ha="center", va="center", color="#b22222")
            axes.text(0.42, y, role, va="center", color="#b22222", fontsize=11)
            if text == "+":
                start, shortcut = starts.pop()
                left = -HALF - 0.45
                axes.plot(
                    [0, left, left, -0.27], [start, start, y, y], **gray, zorder=0
                )
                if shortcut:
                    axes.text(
                        left - 0.15,
                        (start + y) / 2,
                        shortcut,
                        ha="right",
                        va="center",
                        rotation=90,
                        fontsize=8,
                    )
        else:
            box = FancyBboxPatch(
                (-HALF, y - 0.3),
                2 * HALF,
                0.6,
                boxstyle="round,pad=0.02",
                fc=COLORS[role],
                ec="#555555",
                lw=0.8,
            )
            axes.add_patch(box)
            axes.text(0, y, text, ha="center", va="center", fontsize=7.5)
        y += STEP
    axes.set_title(name, fontsize=12)
    axes.set(xlim=(-3.1, 3.3), ylim=(-0.6, 15.5))
    axes.set_aspect("equal")
    axes.axis("off")


def power(base: float, value: float, letter: str) -> str:
    """`value` as a power of `letter`, which stands for `base`."""
    exponent = math.log(value, base)
    if abs(exponent) < 1e-9:
        return ""
    if abs(exponent - 1) < 1e-9:
        return f"${letter}$"
    shown = f"{exponent:.0f}" if abs(exponent - round(exponent)) < 1e-9 else None
    shown = shown or {-0.5: "-1/2", 0.5: "1/2"}[round(exponent, 9)]
    return f"${letter}^{{{shown}}}$"


def rows() -> list[list[str]]:
    """For each role: initialization and learning rates under Depth-μP."""
    m, depth = 4, 9
    point = optim.parametrization("depth_mup")
    ends = {
        "input": ((3, 8), (3, 8 * m), (0,), (1,)),
        "hidden": ((8, 8), (8 * m, 8 * m), (0,), (1,)),
        "output": ((8, 3), (8 * m, 3), (0,), (1,)),
        "vector": ((8,), (8 * m,), (), (0,)),
    }
    found = []
    for role, shapes in ends.items():
        in_branch = role == "hidden"
        scale = optim.param_scale(
            role, *shapes, depth=float(depth), in_branch=in_branch
        )
        cells = [role + (" (in a branch)" if in_branch else "")]
        outside = optim.param_scale(role, *shapes, in_branch=False)
        for family in ("", "adam", "sgd"):
            inner, outer = (
                optim.multipliers(s, point, family or "adam") for s in (scale, outside)
            )
            value = inner.learning_rate if family else inner.init_std
            width = outer.learning_rate if family else outer.init_std
            text = power(m, width, "m") + power(depth, value / width, "M")
            cells.append(text.replace("$$", r"\,") or "1")
        found.append(cells)
    return found


def main() -> None:
    """Draw and save it."""
    figure = plt.figure(figsize=(15, 11))
    grid = figure.add_gridspec(2, len(PANELS), height_ratios=(5, 1), hspace=0.02)
    for i, (name, parts) in enumerate(PANELS.items()):
        draw(figure.add_subplot(grid[0, i]), name, parts)
    axes = figure.add_subplot(grid[1, :])
    axes.axis("off")
    cells = rows()
    table = axes.table(
        cells,
        colLabels=["role", "initial size", "Adam's learning rate", "SGD's"],
        cellColours=[[COLORS[c[0].split()[0]]] + ["white"] * 3 for c in cells],
        colWidths=[0.2, 0.15, 0.2, 0.15],
        cellLoc="center",
        loc="center",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(11)
    table.scale(1, 1.5)
    figure.savefig(OUT, dpi=80, bbox_inches="tight")


if __name__ == "__main__":
    main()

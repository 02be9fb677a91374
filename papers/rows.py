"""Claims about the rules that no figure of the papers shows, measured the same way."""

import dataclasses
import functools

from mupax.experiments.report import SweepData

from . import curves, sizes
from .parts import Part
from .registry import CIFAR, TEXT, Drawing, beyond
from .request import DRAWN
from .tp6 import GPT, GPT_ALPHA_1


def keeps_and_moves(
    data: SweepData, keeps: tuple[str, str], moves: tuple[str, str]
) -> Drawing:
    """One parametrization keeps the optimum over depth, and another does not.

    `keeps` and `moves` are the title and the key of a parametrization.
    """
    transfers = {title: curves.judge(data, key) for title, key in (keeps, moves)}
    kept, moved = transfers.values()
    drawing = curves.drawing(transfers, curves.stays(kept), curves.moves(moved))
    panels = [*drawing.panels, curves.shift_panel(transfers)]
    return dataclasses.replace(drawing, panels=panels)


_DEPTH_LAW = functools.partial(
    keeps_and_moves, keeps=("μP and L^(-3/2)", "relu_mlp"), moves=("μP", "mup")
)
_LONG_BRANCHES = functools.partial(
    keeps_and_moves, keeps=("α = 1", "completep"), moves=("α = ½", "depth_mup")
)


def _in_two_sweeps(half: SweepData, one: SweepData) -> Drawing:
    """`_LONG_BRANCHES` of α = ½ and α = 1, at the depths that both sweeps have."""
    runs = [*half.populations, *one.populations]
    depths = {p.depth for p in half.populations} & {p.depth for p in one.populations}
    runs = [p for p in runs if p.depth in depths]
    return _LONG_BRANCHES(dataclasses.replace(half, populations=runs))


def both_axes(data: SweepData) -> Drawing:
    """Depth-μP keeps the optimum over depth and over width."""
    depth = curves.judge(data, "depth_mup")
    width = curves.judge(data, "depth_mup", "width")
    kept = curves.conjunction(curves.stays(depth), curves.stays(width))
    return Drawing(
        [
            curves.panel("Over depth", depth.cells),
            curves.panel("Over width", width.cells, "width"),
        ],
        curves.describe({"over depth": depth, "over width": width}),
        kept,
        keeps=kept,
    )


_FOUR = {scale: {"sweep.seeds": "4"} for scale in DRAWN}
_MLP = sizes.joined(
    _FOUR,
    {
        "laptop": {"sweep.seeds": "8"},
        "medium": {"steps": "1560", "sweep.average_last": "200", "sweep.seeds": "24"},
        "paper": {"steps": "39100", "sweep.average_last": "1000"},
    },
)
_MUON = sizes.joined(
    sizes.MLP,
    _FOUR,
    {scale: {"sweep.axes.learning_rate": "2**[-11:-3:1]"} for scale in DRAWN},
    {
        "laptop": {"sweep.widths": "(32,64,128)"},
        "medium": {"sweep.widths": "(32,64,128)"},
        "paper": {"sweep.widths": "(128,256,512)"},
    },
)
_VIT = sizes.joined(sizes.VIT, _FOUR)
_BRANCHES = {"sweep.only": "('depth_mup', 'completep')"}
_PLAIN = "the best learning rate of plain ReLU networks scales as L^(-3/2) with "
_TWO = "with branches of two layers α = 1 keeps the best learning rate, α = ½ does not"

_MUON_ALONE = {"optimizer.name": "muon", "sweep.only": "('depth_mup',)"}
_SGD = {
    "optimizer": "{'name': 'sgd', 'momentum': 0.9}",
    "sweep.axes.learning_rate": "2**[-11:-2:1]",
}
_NO_CHOICES = {"sweep.choices": "()"}
_FIRST_STEP = f"the theorem is about SGD's first step; {CIFAR}"

FIGURES = [
    beyond(
        "mlp-adam",
        "Plain networks, Adam",
        f"{_PLAIN}Adam; it moves without this factor",
        _DEPTH_LAW,
        [Part("mlp_sweep", "mlp-adam", {}, _MLP)],
        _FIRST_STEP,
    ),
    beyond(
        "mlp-sgd",
        "Plain networks, SGD",
        f"{_PLAIN}momentum; it moves without this factor",
        _DEPTH_LAW,
        [Part("mlp_sweep", "mlp-sgd", _SGD, _MLP)],
        _FIRST_STEP,
    ),
    beyond(
        "muon",
        "Muon",
        "Depth-μP keeps Muon's best learning rate over depth and width",
        both_axes,
        [Part("resmlp_sweep", "muon", _MUON_ALONE, _MUON)],
    ),
    beyond(
        "vit-branches",
        "Two-layer branches, ViT",
        _TWO,
        _LONG_BRANCHES,
        [Part("vit_sweep", "vit-branches", _BRANCHES | _NO_CHOICES, _VIT)],
        "CIFAR-10",
    ),
    beyond(
        "gpt-branches",
        "Two-layer branches, GPT",
        _TWO,
        _in_two_sweeps,
        [GPT, GPT_ALPHA_1],
        TEXT,
    ),
]

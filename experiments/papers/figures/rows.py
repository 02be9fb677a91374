"""Claims of the rules that no figure of the papers shows, measured the same way."""

import functools
from collections.abc import Callable

from ml_collections import ConfigDict

from ...report import SweepData
from . import curves, sizes
from .parts import Part, Sweeps
from .registry import SCALES, Drawing, Figure


def keeps_and_moves(
    data: SweepData, keeps: tuple[str, str], moves: tuple[str, str]
) -> Drawing:
    """One parametrization keeps the optimum over depth, and another does not.

    Args:
      data: a sweep over depth.
      keeps: title and key of the parametrization that should transfer.
      moves: of the one that should not.
    """
    by_name = {title: curves.cells(data, key) for title, key in (keeps, moves)}
    verdicts = {n: curves.move(cells, base=data.base) for n, cells in by_name.items()}
    right, wrong = verdicts.values()
    return Drawing(
        [curves.panel(title, cells) for title, cells in by_name.items()],
        curves.told(verdicts),
        curves.every(curves.stays(right), curves.moves(wrong)),
    )


_DEPTH_LAW = functools.partial(
    keeps_and_moves, keeps=("μP and L^(-3/2)", "relu_mlp"), moves=("μP", "mup")
)
_LONG_BRANCHES = functools.partial(
    keeps_and_moves, keeps=("α = 1", "completep"), moves=("α = ½", "depth_mup")
)


def both_axes(data: SweepData) -> Drawing:
    """Depth-μP keeps the optimum over depth and over width."""
    deep = curves.cells(data, "depth_mup")
    wide = curves.cells(data, "depth_mup", "width")
    moves = {
        "over depth": curves.move(deep, base=data.base),
        "over width": curves.move(wide, "width", data.base),
    }
    return Drawing(
        [
            curves.panel("Over depth", deep),
            curves.panel("Over width", wide, "width"),
        ],
        curves.told(moves),
        curves.every(*(curves.stays(one) for one in moves.values())),
    )


def _sgd(config: ConfigDict) -> None:
    # No override adds a momentum to Adam's options.
    with config.unlocked():
        config.optimizer = ConfigDict({"name": "sgd", "momentum": 0.9})


def _always(given: dict[str, str]) -> sizes.Sizes:
    return dict.fromkeys(SCALES, given)


_MLP = sizes.joined(
    {
        "laptop": {},
        "medium": {"steps": "1560", "sweep.average_last": "200"},
        "paper": {"steps": "39100", "sweep.average_last": "1000"},
    },
    _always({"sweep.seeds": "4"}),
)
_MUON = sizes.joined(
    sizes.MLP,
    _always({"sweep.axes.learning_rate": "2**[-11:-3:1]", "sweep.seeds": "4"}),
    {
        "laptop": {"sweep.widths": "(32,64,128)"},
        "medium": {"sweep.widths": "(32,64,128)"},
        "paper": {"sweep.widths": "(128,256,512)"},
    },
)
_BRANCHES = {"sweep.only": "('depth_mup', 'completep')"}
_FOUR = _always({"sweep.seeds": "4"})
_CIFAR = "CIFAR-10 of 16 x 16 pixels"


def _row(
    name: str,
    about: str,
    claim: str,
    sweep: tuple[Part, Callable[..., Drawing]],
    how: str,
) -> Figure:
    part, draw = sweep
    train = Sweeps((part,), draw)
    return Figure(name, "Beyond the papers", about, claim, train=train, how=how)


_PLAIN = "the best learning rate of plain ReLU networks goes as L^(-3/2) with "
_TWO = "with branches of two layers α = 1 keeps the best learning rate, α = ½ does not"

FIGURES = [
    _row(
        "mlp-adam",
        "Plain networks, Adam",
        f"{_PLAIN}Adam",
        (Part("mlp_sweep", "mlp-adam", {}, _MLP), _DEPTH_LAW),
        f"the theorem is of SGD's first step; {_CIFAR}",
    ),
    _row(
        "mlp-sgd",
        "Plain networks, SGD",
        f"{_PLAIN}momentum",
        (
            Part(
                "mlp_sweep",
                "mlp-sgd",
                {"sweep.axes.learning_rate": "2**[-11:-2:1]"},
                _MLP,
                edit=_sgd,
            ),
            _DEPTH_LAW,
        ),
        f"the theorem is of SGD's first step; {_CIFAR}",
    ),
    _row(
        "muon",
        "Muon",
        "Depth-μP keeps Muon's best learning rate over depth and width",
        (
            Part(
                "resmlp_sweep",
                "muon",
                {"optimizer.name": "muon", "sweep.only": "('depth_mup',)"},
                _MUON,
            ),
            both_axes,
        ),
        _CIFAR,
    ),
    _row(
        "vit-branches",
        "Two-layer branches, ViT",
        _TWO,
        (
            Part(
                "vit_sweep",
                "vit-branches",
                _BRANCHES | {"sweep.choices": "()"},
                sizes.joined(sizes.VIT, _FOUR),
            ),
            _LONG_BRANCHES,
        ),
        "CIFAR-10",
    ),
    _row(
        "gpt-branches",
        "Two-layer branches, GPT",
        _TWO,
        (
            Part(
                "gpt_sweep", "gpt-branches", _BRANCHES, sizes.joined(sizes.GPT, _FOUR)
            ),
            _LONG_BRANCHES,
        ),
        "a text file of yours: --dataset=text:FILE",
    ),
]

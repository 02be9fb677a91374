"""The figures of both papers that are sweeps of networks on data.

Each is a packaged config, what is overridden, and a check. Laptop sizes run in ten
minutes on two cores.
"""

import functools

from ml_collections import ConfigDict

from . import claims_bordelon as bordelon
from . import claims_tp6 as tp6
from . import sizes
from .parts import Part, Sweeps
from .registry import Figure


def _only(*keys: str) -> dict[str, str]:
    return {"sweep.only": f"({', '.join(repr(key) for key in keys)},)"}


def _resnet(*norms: str) -> Part:
    choices = {"sweep.choices": f"(('model.norm', {norms!r}),)"}
    given = _only("mup", "depth_mup") | choices
    return Part("resnet_sweep", given, sizes.RESNET_PAPER)


def _mlp(
    given: dict[str, str],
    paper: dict[str, str] | None = None,
    name: str = "sweep",
) -> Part:
    return Part(
        "resmlp_sweep", sizes.MLP | given, sizes.MLP_PAPER | (paper or {}), name
    )


def _two(given: dict[str, str], paper: dict[str, str], name: str) -> Part:
    paper = sizes.TWO_PAPER | paper
    return Part("resmlp_sweep", sizes.TWO | _only("depth_mup") | given, paper, name)


def _adamw(config: ConfigDict) -> None:
    # No override takes SGD's momentum away.
    with config.unlocked():
        config.optimizer = ConfigDict({"name": "adamw"})


def _zero_readouts(config: ConfigDict) -> None:
    with config.unlocked():
        config.model.update(zero_init=True, activation_first=True)


_SHORT = {"steps": "11000"}

TP6 = {
    "2": Sweeps(
        (
            _mlp(_only("depth_mup") | {"model.activation_first": "True"}),
            _mlp(_only("depth_mup"), name="weights-first"),
        ),
        tp6.weights_last,
    ),
    "3": Sweeps(
        (
            _mlp(_only("depth_mup") | {"model.nonlinearity": "abs"}, name="abs"),
            _mlp(_only("depth_mup"), name="relu"),
        ),
        tp6.absolute_gains,
    ),
    "4": Sweeps(
        (
            _two({}, _SHORT, "two-layers"),
            _mlp(_only("depth_mup"), _SHORT, "one-layer"),
        ),
        tp6.two_layers_lose,
    ),
    "5": Sweeps(
        (
            _two(sizes.ABS, _SHORT, "two-layers"),
            _mlp(_only("depth_mup") | sizes.ABS, _SHORT, "one-layer"),
        ),
        tp6.two_layers_lose,
    ),
    "6": Sweeps(
        (_two({}, {}, "relu"), _two(sizes.ABS, {}, "abs")),
        tp6.two_layers_move,
    ),
    "7": Sweeps(
        (
            Part(
                "resmlp_sweep",
                sizes.TWO
                | _only("depth_mup")
                | sizes.ABS
                | {
                    "model.depth": "2",
                    "sweep.depths": "(2,8,32)",
                    "sweep.axes.learning_rate": "2**[-9:-3:1]",
                    "sweep.axes.branch_multiplier": "2**[-7:-1]",
                },
                sizes.TWO_PAPER | {"sweep.depths": "(2,32,1024)"},
            ),
        ),
        tp6.valley_turns,
    ),
    "10": Sweeps(
        (_mlp(_only("no_depth_scaling", "half_alpha", "depth_mup")),),
        tp6.rate_over_depth,
    ),
    "11": Sweeps((_mlp(_only("ode", "depth_mup")),), tp6.ode_moves),
    "12": Sweeps(
        (_mlp(_only("half_alpha", "depth_mup") | sizes.ABS),), tp6.rate_over_depth
    ),
    "13": Sweeps(
        (
            _mlp(
                _only("depth_mup")
                | {"sweep.axes.branch_multiplier": "2**[-5:0]"}
                | {"sweep.axes.learning_rate": "2**[-11:-6:1]"}
            ),
        ),
        tp6.multiplier_settles,
    ),
    "14": Sweeps(
        (
            Part(
                "gpt_sweep",
                _only("depth_mup")
                | sizes.A
                | {
                    "sweep.depths": "(2,4,8)",
                    "sweep.axes.learning_rate": "2**[-9:-4:1]",
                },
                sizes.GPT_PAPER,
            ),
        ),
        tp6.multiplier_is_free,
    ),
    "15": Sweeps(
        (Part("gpt_sweep", _only("depth_mup"), sizes.GPT_PAPER),),
        tp6.deeper_starts_worse,
    ),
    "16": Sweeps(
        (Part("gpt_sweep", _only("depth_mup"), sizes.GPT_PAPER),),
        tp6.root_law_at_the_end,
    ),
}


def _cnn(given: dict[str, str], name: str = "sweep") -> Part:
    return Part(
        "cnn_sweep", sizes.FLAT | _only("depth_mup") | given, sizes.FLAT_PAPER, name
    )


def _equal_sizes(depth: int, multiplier: float, small: str, large: str) -> Part:
    """Widths of one depth, which is its own base; 1/√L is in the multiplier."""
    widths, paper_widths = (
        {"model.width": widths[1:].split(",")[0], "sweep.widths": widths}
        for widths in (small, large)
    )
    given = {
        "model.depth": str(depth),
        "sweep.depths": f"({depth},)",
        "sweep.axes.learning_rate": "2**[-8:-4:1]",
        "sweep.seeds": "3",
        "model.branch_multiplier": f"{multiplier:.6g}",
    }
    return Part(
        "cnn_sweep",
        _only("depth_mup") | given | widths,
        sizes.CNN_PAPER | given | paper_widths,
        f"depth-{depth}",
    )


_AXIS = {"sweep.axes.learning_rate": "2**[-6:-2:1]", "sweep.depths": "(3,6,12)"}

BORDELON = {
    "1": Sweeps(
        (Part("cnn_sweep", _only("mup", "depth_mup"), sizes.CNN_PAPER),),
        bordelon.both_sizes,
    ),
    "2": Sweeps(
        (_resnet("batch", "none"),),
        functools.partial(
            bordelon.norm_is_not_enough, norm="batch", label="batch norm"
        ),
    ),
    "3": Sweeps(
        (
            Part(
                "vit_sweep",
                _only("mup", "depth_mup") | {"sweep.depths": "(2,4,8)"},
                sizes.VIT_PAPER,
            ),
        ),
        bordelon.transformers,
    ),
    "4": Sweeps(
        (
            _cnn(_AXIS | {"sweep.axes.momentum": "1-2**[-4:0]"}, "momentum"),
            _cnn(_AXIS | {"sweep.axes.richness": "2**[-4:1]"}, "richness"),
        ),
        bordelon.other_axes,
    ),
    "B.1": Sweeps(
        (
            _equal_sizes(3, 1.0, "(14,28)", "(448,896)"),
            _equal_sizes(6, 0.5**0.5, "(10,20)", "(320,640)"),
            _equal_sizes(12, 0.5, "(7,14)", "(224,448)"),
        ),
        bordelon.middle_depth,
    ),
    "B.2": Sweeps(
        (Part("cnn_sweep", _only("sp", "mup"), sizes.CNN_PAPER),),
        bordelon.without_scaling,
    ),
    "B.3": Sweeps((_cnn({}),), bordelon.decided_early),
    "B.4": Sweeps(
        (_resnet("layer", "none"),),
        functools.partial(bordelon.norm_helps, norm="layer", label="LayerNorm"),
    ),
    "B.5": Sweeps(
        (_resnet("batch", "none"),),
        functools.partial(bordelon.norm_helps, norm="batch", label="batch norm"),
    ),
    "B.8": Sweeps(
        (
            Part(
                "cnn_sweep",
                sizes.FLAT
                | _only("depth_mup")
                | {
                    "sweep.depths": "(3,6,12)",
                    "sweep.axes.learning_rate": "2**[-11:-6:1]",
                    "sweep.axes.weight_decay": "2**[-4:4:2]",
                },
                sizes.FLAT_PAPER,
                edit=_adamw,
            ),
        ),
        bordelon.decay_stays,
    ),
    "M.1": Sweeps(
        (
            Part(
                "resmlp_sweep",
                _only("ode", "depth_mup")
                | {
                    "model.block_depth": "4",
                    "model.depth": "2",
                    "sweep.depths": "(2,8,32)",
                },
                sizes.MLP_PAPER | {"sweep.depths": "(2,8,32,128)"},
                edit=_zero_readouts,
            ),
        ),
        bordelon.long_branches,
    ),
}

SMALL_MLP = "width 64, CIFAR-10 of 16 x 16 pixels, 300 steps"
SMALL_CNN = "width 16, CIFAR-10 of 16 x 16 pixels, 200 steps"
_SMALL_GPT = "width 32 on a text file of yours, 200 steps: --dataset=text:FILE"


def tp6_figure(number: str, claim: str, how: str = "") -> Figure:
    """A figure of Tensor Programs VI that is a sweep."""
    small = _SMALL_GPT if number in ("14", "15", "16") else SMALL_MLP
    return Figure(
        f"tp6-{number}",
        "TP-VI",
        f"Figure {number}",
        claim,
        train=TP6[number],
        how="; ".join(filter(None, (how, small))),
    )


def bordelon_figure(number: str, claim: str, how: str = SMALL_CNN) -> Figure:
    """A figure of Bordelon et al. that is a sweep."""
    return Figure(
        f"bordelon-{number.lower()}",
        "Bordelon",
        f"Figure {number}",
        claim,
        train=BORDELON[number],
        how=how,
    )

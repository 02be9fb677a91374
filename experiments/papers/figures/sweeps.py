"""The figures of both papers that are sweeps of networks on data.

Each is one or more sweeps, and a check. Figures that need the same runs share a sweep.
"""

import dataclasses
import functools

from ml_collections import ConfigDict

from . import claims_bordelon as bordelon
from . import claims_tp6 as tp6
from . import sizes
from .parts import Part, Sweeps
from .registry import Figure


def _only(*keys: str) -> dict[str, str]:
    return {"sweep.only": f"({', '.join(repr(key) for key in keys)},)"}


# ----- Residual MLPs of Tensor Programs VI.

_ABS = {"model.nonlinearity": "abs", "model.layer_norm": "True"}
_TWO = {"model.block_depth": "2"}
# The value itself is swept; the same number at every scale keeps tables comparable.
_SWEPT = {"model.branch_multiplier": "1.0"}


def _base(name: str, given: dict[str, str]) -> Part:
    """The base alone, over the learning rate and the block multiplier."""
    base = _only("depth_mup") | _SWEPT | {"sweep.depths": "(8,)"} | given
    return Part("resmlp_sweep", f"{name}-base", base, sizes.BASE)


def _mlp(name: str, keys: tuple[str, ...], given: dict[str, str]) -> Part:
    """Over depth at the base's best block multiplier."""
    return Part(
        "resmlp_sweep",
        name,
        _only(*keys) | given,
        sizes.MLP,
        tuned=_base(name, given),
    )


def _both(name: str, given: dict[str, str], more: sizes.Sizes | None = None) -> Part:
    """Depth-μP over depth, the learning rate and the block multiplier."""
    return Part(
        "resmlp_sweep",
        f"{name}-both",
        _only("depth_mup") | _SWEPT | given,
        sizes.joined(sizes.BOTH, more or {}),
    )


_ONE_RELU = _mlp("one-relu", ("no_depth_scaling", "half_alpha", "ode", "depth_mup"), {})
_ONE_ABSLN = _mlp("one-absln", ("half_alpha", "depth_mup"), _ABS)
_ONE_RELU_BOTH = _both("one-relu", {})
_ONE_ABSLN_BOTH = _both("one-absln", _ABS)
_TWO_RELU_BOTH = _both("two-relu", _TWO | {"model.depth": "4"}, sizes.TWO)
_TWO_ABSLN_BOTH = _both("two-absln", _TWO | _ABS | {"model.depth": "2"}, sizes.TWO_ABS)


def _seen(part: Part, *keys: str) -> Part:
    """The same sweep, of which the figure is about some parametrizations."""
    return dataclasses.replace(part, keys=keys)


def _at_best(part: Part) -> Part:
    """The same sweep, at the base's best block multiplier."""
    return dataclasses.replace(part, at_best=True)


def _zero_readouts(config: ConfigDict) -> None:
    with config.unlocked():
        config.model.update(zero_init=True, activation_first=True)


_GPT = Part("gpt_sweep", "gpt", _only("depth_mup"), sizes.GPT)

TP6 = {
    "2": Sweeps(
        (_both("first-relu", {"model.activation_first": "True"}), _ONE_RELU_BOTH),
        tp6.weights_last,
    ),
    "3": Sweeps(
        (_both("one-abs", {"model.nonlinearity": "abs"}), _ONE_RELU_BOTH),
        tp6.absolute_gains,
    ),
    "4": Sweeps((_TWO_RELU_BOTH, _ONE_RELU_BOTH), tp6.two_layers_lose),
    "5": Sweeps((_TWO_ABSLN_BOTH, _ONE_ABSLN_BOTH), tp6.two_layers_lose),
    "6": Sweeps(
        (_at_best(_TWO_RELU_BOTH), _at_best(_TWO_ABSLN_BOTH)),
        tp6.two_layers_move,
    ),
    "7": Sweeps((_TWO_ABSLN_BOTH,), tp6.valley_turns),
    "10": Sweeps(
        (_seen(_ONE_RELU, "no_depth_scaling", "half_alpha", "depth_mup"),),
        tp6.rate_over_depth,
    ),
    "11": Sweeps((_seen(_ONE_RELU, "ode", "depth_mup"),), tp6.ode_moves),
    "12": Sweeps((_ONE_ABSLN,), tp6.rate_over_depth),
    "13": Sweeps((_ONE_RELU_BOTH,), tp6.multiplier_settles),
    "14": Sweeps(
        (
            Part(
                "gpt_sweep",
                "gpt-multiplier",
                _only("depth_mup")
                | {
                    "sweep.depths": "(2,4,8)",
                    "sweep.axes.branch_multiplier": "2**[-2:2]",
                    "sweep.axes.learning_rate": "2**[-9:-4:1]",
                },
                sizes.GPT,
            ),
        ),
        tp6.multiplier_is_free,
    ),
    "15": Sweeps((_GPT,), tp6.deeper_starts_worse),
    "16": Sweeps((_GPT,), tp6.root_law_at_the_end),
}

# ----- Networks of Bordelon et al.

_CNN = Part("cnn_sweep", "cnn", _only("sp", "mup", "depth_mup"), sizes.CNN)
_RESNET = Part(
    "resnet_sweep",
    "resnet",
    _only("mup", "depth_mup")
    | {"sweep.choices": "(('model.norm', ('batch', 'instance', 'none')),)"},
    sizes.RESNET,
)


def _flat(name: str, given: dict[str, str]) -> Part:
    """Depth-μP at one width, over another hyperparameter too."""
    return Part(
        "cnn_sweep",
        f"cnn-{name}",
        _only("depth_mup") | given,
        sizes.joined(sizes.CNN, sizes.FLAT, {"laptop": {"sweep.depths": "(3,6,12)"}}),
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
        "sweep.axes.learning_rate": "2**[-9:-4:1]",
        "sweep.seeds": "3",
        "model.branch_multiplier": f"{multiplier:.6g}",
    }
    return Part(
        "cnn_sweep",
        f"cnn-depth-{depth}",
        _only("depth_mup"),
        sizes.joined(
            sizes.CNN,
            {"laptop": given | widths, "medium": given | widths},
            {"paper": given | paper_widths},
        ),
    )


def _adamw(config: ConfigDict) -> None:
    # No override takes SGD's momentum away.
    with config.unlocked():
        config.optimizer = ConfigDict({"name": "adamw"})


_RATES = {"sweep.axes.learning_rate": "2**[-6:-2:1]"}

BORDELON = {
    "1": Sweeps((_seen(_CNN, "mup", "depth_mup"),), bordelon.both_sizes),
    "2": Sweeps(
        (_RESNET,),
        functools.partial(
            bordelon.norm_is_not_enough, norm="batch", label="batch norm"
        ),
    ),
    "3": Sweeps(
        (Part("vit_sweep", "vit", _only("mup", "depth_mup"), sizes.VIT),),
        bordelon.transformers,
    ),
    "4": Sweeps(
        (
            _flat("momentum", _RATES | {"sweep.axes.momentum": "1-2**[-4:0]"}),
            _flat("richness", _RATES | {"sweep.axes.richness": "2**[-4:1]"}),
        ),
        bordelon.other_axes,
    ),
    "B.1": Sweeps(
        (
            _equal_sizes(3, 1.0, "(80,160)", "(448,896)"),
            _equal_sizes(6, 0.5**0.5, "(56,112)", "(320,640)"),
            _equal_sizes(12, 0.5, "(40,80)", "(224,448)"),
        ),
        bordelon.middle_depth,
    ),
    "B.2": Sweeps((_seen(_CNN, "sp", "mup"),), bordelon.without_scaling),
    "B.3": Sweeps((_seen(_CNN, "depth_mup"),), bordelon.decided_early),
    "B.4": Sweeps(
        (_RESNET,),
        functools.partial(
            bordelon.norm_helps, norm="instance", label="LayerNorm of each channel"
        ),
    ),
    "B.5": Sweeps(
        (_RESNET,),
        functools.partial(bordelon.norm_helps, norm="batch", label="batch norm"),
    ),
    "B.8": Sweeps(
        (
            Part(
                "cnn_sweep",
                "cnn-decay",
                _only("depth_mup")
                | {
                    "sweep.axes.learning_rate": "2**[-11:-6:1]",
                    "sweep.axes.weight_decay": "2**[-4:4:2]",
                },
                sizes.joined(
                    sizes.CNN, sizes.FLAT, {"laptop": {"sweep.depths": "(3,6,12)"}}
                ),
                edit=_adamw,
            ),
        ),
        bordelon.decay_stays,
    ),
    "M.1": Sweeps(
        (
            Part(
                "resmlp_sweep",
                "long-branches",
                _only("ode", "depth_mup")
                | _SWEPT
                | {"model.block_depth": "4", "model.depth": "2"},
                sizes.joined(sizes.MLP, sizes.LONG),
                edit=_zero_readouts,
            ),
        ),
        bordelon.long_branches,
    ),
}

_CIFAR = "CIFAR-10 of 16 x 16 pixels"
_TEXT = "a text file of yours: --dataset=text:FILE"


def tp6_figure(number: str, claim: str, how: str = "") -> Figure:
    """A figure of Tensor Programs VI that is a sweep."""
    data = _TEXT if number in ("14", "15", "16") else _CIFAR
    return Figure(
        f"tp6-{number}",
        "TP-VI",
        f"Figure {number}",
        claim,
        train=TP6[number],
        how="; ".join(filter(None, (how, data))),
    )


def bordelon_figure(number: str, claim: str, how: str = "") -> Figure:
    """A figure of Bordelon et al. that is a sweep."""
    return Figure(
        f"bordelon-{number.lower()}",
        "Bordelon",
        f"Figure {number}",
        claim,
        train=BORDELON[number],
        how="; ".join(filter(None, (how, _CIFAR))),
    )

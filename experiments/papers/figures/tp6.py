"""Yang, Yu, Zhu and Hayou, Tensor Programs VI: its figures, and their sweeps.

Figures that need the same runs share a sweep.
"""

import dataclasses
from collections.abc import Callable, Sequence

from . import claims_tp6 as claims
from . import sizes
from . import solved_tp6 as solved
from .parts import Part, Sweeps
from .registry import CIFAR, TEXT, Drawing, Figure

# ----- Sweeps of residual MLPs.

_ABS = {"model.nonlinearity": "abs", "model.layer_norm": "True"}
_TWO = {"model.block_depth": "2"}
_DEPTH_MUP = {"sweep.only": "('depth_mup',)"}
# The multiplier itself is swept; the same number at every scale keeps tables
# comparable.
_SWEPT = {"model.branch_multiplier": "1.0"}


def _mlp(
    name: str,
    keys: str,
    overrides: dict[str, str],
    more: sizes.Sizes | None = None,
) -> Part:
    """Over depth, at the base's best block multiplier."""
    base = _DEPTH_MUP | _SWEPT | {"sweep.depths": "(8,)"} | overrides
    return Part(
        "resmlp_sweep",
        name,
        {"sweep.only": keys} | overrides,
        sizes.joined(sizes.MLP, more or {}),
        tuned=Part("resmlp_sweep", f"{name}-base", base, sizes.BASE),
    )


def _both(
    name: str, overrides: dict[str, str], more: sizes.Sizes | None = None
) -> Part:
    """Depth-μP over depth, the learning rate and the block multiplier."""
    return Part(
        "resmlp_sweep",
        f"{name}-both",
        _DEPTH_MUP | _SWEPT | overrides,
        sizes.joined(sizes.BOTH, more or {}),
    )


_RELU = _mlp("one-relu", "('no_depth_scaling', 'half_alpha', 'ode', 'depth_mup',)", {})
_ABSLN = _mlp(
    "one-absln",
    "('half_alpha', 'depth_mup',)",
    _ABS,
    {"medium": {"sweep.seeds": "8"}},
)
_RELU_BOTH = _both("one-relu", {})
_ABSLN_BOTH = _both("one-absln", _ABS)
_TWO_RELU_BOTH = _both("two-relu", _TWO | {"model.depth": "4"}, sizes.TWO)
_TWO_ABSLN_BOTH = _both("two-absln", _TWO | _ABS | {"model.depth": "2"}, sizes.TWO_ABS)

# ----- Sweeps of transformers.

_GPT = Part("gpt_sweep", "gpt", _DEPTH_MUP, sizes.GPT)
_GPT_MULTIPLIER = Part(
    "gpt_sweep",
    "gpt-multiplier",
    _DEPTH_MUP
    | {
        "sweep.depths": "(2,4,8)",
        "sweep.axes.branch_multiplier": "2**[-2:2]",
        "sweep.axes.learning_rate": "2**[-9:-4:1]",
    },
    sizes.GPT,
)


# ----- Figures.


def _swept(
    number: int,
    claim: str,
    parts: Sequence[Part],
    draw: Callable[..., Drawing],
    how: str = CIFAR,
) -> Figure:
    train = Sweeps(parts, draw)
    name = f"Figure {number}"
    return Figure(f"tp6-{number}", "TP-VI", name, claim, train=train, how=how)


def _solved(
    number: int, claim: str, draw: Callable[[bool], Drawing], how: str
) -> Figure:
    name = f"Figure {number}"
    return Figure(f"tp6-{number}", "TP-VI", name, claim, draw=draw, how=how)


_SLOPES = "slopes of the paper's curves; SGD on random data in place of CIFAR-10"

FIGURES = [
    _solved(
        1,
        "of all (α, γ) only α = γ = ½ is stable, nontrivial and diverse",
        solved.regions,
        "measured at ten points with SGD",
    ),
    _swept(
        2,
        "the nonlinearity before the weights transfers, but depth does not help",
        (_both("first-relu", {"model.activation_first": "True"}), _RELU_BOTH),
        claims.weights_last,
    ),
    _swept(
        3,
        "|x| instead of ReLU improves deep networks",
        (_both("one-abs", {"model.nonlinearity": "abs"}), _RELU_BOTH),
        claims.absolute_gains,
    ),
    _swept(
        4,
        "ReLU branches of two layers do worse than branches of one at the same depth",
        (_TWO_RELU_BOTH, _RELU_BOTH),
        claims.two_layers_lose,
    ),
    _swept(
        5,
        "|x| branches of two layers do worse than branches of one at the same depth",
        (_TWO_ABSLN_BOTH, _ABSLN_BOTH),
        claims.two_layers_lose,
    ),
    _swept(
        6,
        "the best learning rate of branches of two layers moves with depth",
        [
            dataclasses.replace(part, at_best=True)
            for part in (_TWO_RELU_BOTH, _TWO_ABSLN_BOTH)
        ],
        claims.two_layers_move,
    ),
    _swept(
        7,
        "the slope of the best (η, a) goes from -2 to -1 with depth at block depth 2",
        (_TWO_ABSLN_BOTH,),
        claims.valley_turns,
        f"|x| and LayerNorm; {CIFAR}",
    ),
    _solved(
        8,
        "trained linear networks converge to Lemma 4.3 as the width grows",
        solved.finite_width,
        "a linear teacher in place of MNIST, widths 2⁵ to 2⁹ at laptop scale",
    ),
    _solved(
        9,
        "infinitely wide linear networks converge as the depth grows",
        solved.depth_convergence,
        "a linear teacher in place of MNIST",
    ),
    _swept(
        10,
        "Depth-μP keeps the best learning rate and improves with depth; others do not",
        (_RELU.about("no_depth_scaling", "half_alpha", "depth_mup"),),
        claims.rate_over_depth,
    ),
    _swept(
        11,
        "the ODE's best learning rate moves with depth, and Depth-μP trains better",
        (_RELU.about("ode", "depth_mup"),),
        claims.ode_moves,
    ),
    _swept(
        12,
        "with LayerNorm, Depth-μP keeps the best learning rate; α = ½, γ = 0 does not",
        (_ABSLN,),
        claims.rate_over_depth,
        f"|x|, as the paper; {CIFAR}",
    ),
    _swept(
        13,
        "the best block multiplier a converges as depth grows",
        (_RELU_BOTH,),
        claims.multiplier_settles,
    ),
    _swept(
        14,
        "the block multiplier hardly changes the loss of transformers",
        (_GPT_MULTIPLIER,),
        claims.multiplier_is_free,
        TEXT,
    ),
    _swept(
        15,
        "deeper transformers have a higher loss at first and a lower loss at the end",
        (_GPT,),
        claims.deeper_starts_worse,
        TEXT,
    ),
    _swept(
        16,
        "a transformer's best learning rate scales as 1/√L only at the end of training",
        (_GPT,),
        claims.root_law_at_the_end,
        TEXT,
    ),
    _solved(
        17,
        "κ stays ½ for Depth-μP and falls to 0 with depth for the ODE",
        solved.diversity,
        _SLOPES,
    ),
    _solved(
        18,
        "for the ODE κ falls with depth and time; for Depth-μP it hardly does",
        solved.diversity_in_time,
        _SLOPES,
    ),
    _solved(
        19,
        "features are more diverse with |x| than with ReLU",
        solved.absolute_value,
        _SLOPES,
    ),
]

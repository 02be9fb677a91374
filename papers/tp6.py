"""Yang, Yu, Zhu and Hayou, Tensor Programs VI: its figures, and their sweeps.

Figures that need the same runs share a sweep.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from . import claims_features, features, sizes
from . import claims_tp6 as claims
from . import solved_tp6 as solved
from .parts import Part
from .registry import CIFAR, TEXT, Drawing, Figure

# ----- Sweeps of residual MLPs.

_WITH_NORM = {"model.nonlinearity": "abs", "model.layer_norm": "True"}
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
    base: sizes.Sizes | None = None,
) -> Part:
    """Over depth, at the base's best block multiplier.

    `more` and `base` are further sizes, of the sweep over depth and of the base's.
    """
    alone = _DEPTH_MUP | _SWEPT | {"sweep.depths": "(8,)"} | overrides
    tuning = sizes.joined(sizes.BASE, base or {})
    return Part(
        "resmlp_sweep",
        name,
        {"sweep.only": keys} | overrides,
        sizes.joined(sizes.MLP, more or {}),
        tuned=Part("resmlp_sweep", f"{name}-base", alone, tuning),
    )


def _both(name: str, overrides: dict[str, str], *more: sizes.Sizes) -> Part:
    """Depth-μP over depth, the learning rate and the block multiplier."""
    return Part(
        "resmlp_sweep",
        f"{name}-both",
        _DEPTH_MUP | _SWEPT | overrides,
        sizes.joined(sizes.BOTH, *more),
    )


_RELU = _mlp("one-relu", "('no_depth_scaling', 'half_alpha', 'ode', 'depth_mup',)", {})
_ABS = _mlp(
    "one-abs",
    "('depth_mup',)",
    {"model.nonlinearity": "abs"},
    sizes.ABS,
    sizes.ABS_BASE,
)
_ABSLN = _mlp(
    "one-absln",
    "('half_alpha', 'depth_mup',)",
    _WITH_NORM,
    sizes.ABSLN,
    sizes.ABSLN_BASE,
)
_RELU_BOTH = _both("one-relu", {}, sizes.RELU_BOTH)
_FIRST_BOTH = _both("first-relu", {"model.activation_first": "True"}, sizes.FIRST_BOTH)
_ABSLN_BOTH = _both("one-absln", _WITH_NORM, sizes.ABSLN_BOTH)
_TWO_RELU_BOTH = _both("two-relu", _TWO | {"model.depth": "4"}, sizes.TWO)
# The mean is subtracted at the end of each branch only, as we read section 9.
_TWO_OUTER_BOTH = _both(
    "two-relu-outer",
    _TWO | {"model.depth": "4", "model.subtract_inner_mean": "False"},
    sizes.TWO,
)
_TWO_ABSLN_BOTH = _both(
    "two-absln", _TWO | _WITH_NORM | {"model.depth": "2"}, sizes.TWO_ABS
)


def _at_best(both: Part, more: sizes.Sizes) -> Part:
    """Over depth, at the block multiplier that is best at the base of another sweep."""
    rates = {
        scale: {k: v for k, v in own.items() if k != "sweep.axes.branch_multiplier"}
        for scale, own in both.sizes.items()
    }
    return Part(
        both.config,
        both.name.removesuffix("-both"),
        {k: v for k, v in both.overrides.items() if k not in _SWEPT},
        sizes.joined(rates, more),
        tuned=both,
    )


_TWO_RELU = _at_best(_TWO_RELU_BOTH, sizes.TWO_FINE)
_TWO_ABSLN = _at_best(_TWO_ABSLN_BOTH, sizes.TWO_ABS_DEEP)


def _early(part: Part, name: str, more: sizes.Sizes) -> Part:
    """The same sweep for Figure 4, of fewer steps at the scale "long"."""
    given = sizes.joined(part.sizes, more)
    return dataclasses.replace(part, name=name, sizes=given)


# ----- Sweeps of transformers.

GPT = Part("gpt_sweep", "gpt", _DEPTH_MUP, sizes.joined(sizes.GPT, sizes.GPT_DEEP))
GPT_ALPHA_1 = Part(
    "gpt_sweep", "gpt-completep", {"sweep.only": "('completep',)"}, sizes.GPT
)
_GPT_MULTIPLIER = Part(
    "gpt_sweep",
    "gpt-multiplier",
    _DEPTH_MUP
    | {
        "sweep.depths": "(2,4,8)",
        "sweep.axes.branch_multiplier": "2**[-2:2]",
        "sweep.axes.learning_rate": "2**[-9:-4:1]",
    },
    sizes.joined(sizes.GPT, sizes.GPT_MULTIPLIER),
)


# ----- Figures.


def _figure(
    number: int,
    claim: str,
    draw: Callable[..., Drawing],
    parts: Sequence[Part] = (),
    how: str = CIFAR,
    **more: Any,
) -> Figure:
    name = f"Figure {number}"
    key = f"tp6-{number}"
    return Figure(key, "TP-VI", name, claim, draw, parts, how, **more)


_FROM_64 = "the paper expects the best rate to stay from depth 64 on; ours: 8, 32, 128"
_TUNED = "at the best block multiplier of our base; the paper's is 2"

FIGURES = [
    _figure(
        1,
        "of all (α, γ) only α = γ = ½ is stable, nontrivial and diverse",
        solved.regions,
        measure=solved.measure_regions,
        how="measured at ten points with SGD",
    ),
    _figure(
        2,
        "the nonlinearity before the weights transfers, but depth does not help, and "
        "the loss is higher",
        claims.weights_last,
        (_FIRST_BOTH, _RELU_BOTH),
    ),
    _figure(
        3,
        "|x| instead of ReLU improves deep networks",
        claims.absolute_gains,
        (_ABS, _RELU.about("depth_mup")),
    ),
    _figure(
        4,
        "ReLU branches of two layers do worse than branches of one at the same depth",
        claims.two_layers_lose,
        (
            _early(_TWO_OUTER_BOTH, "two-relu-outer-early", sizes.TWO_EARLY),
            _early(_RELU_BOTH, "one-relu-early", sizes.ONE_EARLY),
            _early(_TWO_RELU_BOTH, "two-relu-early", sizes.TWO_EARLY),
        ),
        decided_by="the first two sweeps, of three seeds",
    ),
    _figure(
        5,
        "|x| branches of two layers do worse than branches of one at the same depth",
        claims.two_layers_lose,
        (_TWO_ABSLN_BOTH, _ABSLN_BOTH),
        f"|x| and LayerNorm; {CIFAR}",
    ),
    _figure(
        6,
        "the best learning rate of branches of two layers moves with depth",
        claims.two_layers_move,
        (_TWO_RELU, _TWO_ABSLN),
    ),
    _figure(
        7,
        "the slope of the best (η, a) goes from -2 to -1 with depth at block depth 2",
        claims.valley_turns,
        (_TWO_ABSLN_BOTH,),
        f"|x| and LayerNorm; {CIFAR}",
        untested="the paper's slope of -1 is that of depth 1,024; ours end at 32",
    ),
    _figure(
        8,
        "trained linear networks converge to Lemma 4.3 as the width grows",
        solved.finite_width,
        measure=solved.measure_widths,
        how="a linear teacher in place of MNIST, widths 2⁵ to 2⁹ at laptop scale",
    ),
    _figure(
        9,
        "infinitely wide linear networks converge as the depth grows",
        solved.depth_convergence,
        measure=solved.measure_depths,
        how="a linear teacher in place of MNIST",
    ),
    _figure(
        10,
        "Depth-μP keeps the best learning rate and improves with depth; others do not",
        claims.rate_over_depth,
        (_RELU.about("no_depth_scaling", "half_alpha", "depth_mup"),),
        untested=_FROM_64,
    ),
    _figure(
        11,
        "the ODE's best learning rate moves with depth, and Depth-μP trains better",
        claims.ode_moves,
        (_RELU.about("ode", "depth_mup"),),
    ),
    _figure(
        12,
        "with LayerNorm, Depth-μP keeps the best learning rate and improves with "
        "depth; α = ½, γ = 0 does not keep it",
        claims.rate_over_depth,
        (_ABSLN,),
        f"|x|, as the paper; {CIFAR}",
        untested=_FROM_64,
    ),
    _figure(
        13,
        "the best block multiplier a stays in deep networks",
        claims.multiplier_settles,
        (_RELU_BOTH,),
    ),
    _figure(
        14,
        "the block multiplier hardly changes the loss of transformers",
        claims.multiplier_is_free,
        (_GPT_MULTIPLIER,),
        TEXT,
        small="at width 128, in place of 32, the loss differs by half as much",
    ),
    _figure(
        15,
        "deeper transformers have a higher loss at first and a lower loss at the end",
        claims.deeper_starts_worse,
        (GPT,),
        TEXT,
        small="at width 128, in place of 32, the claim agrees",
    ),
    _figure(
        16,
        "a transformer's best learning rate scales as 1/√L only at the end of training",
        claims.root_law_at_the_end,
        (GPT,),
        TEXT,
        small="width 32 and 512 tokens a step; the paper's steps have a million",
    ),
    _figure(
        17,
        "κ stays ½ for Depth-μP and falls with depth for the ODE",
        claims_features.diversity,
        measure=features.measure_laws,
        how=_TUNED,
        base=features.BASE,
    ),
    _figure(
        18,
        "for the ODE κ falls with depth and time; for Depth-μP it hardly does",
        claims_features.diversity_in_time,
        measure=features.measure_laws,
        table="tp6-17",
        how=_TUNED,
        base=features.BASE,
    ),
    _figure(
        19,
        "features are more diverse with |x| than with ReLU",
        claims_features.absolute_value,
        measure=features.measure_activations,
        how=_TUNED,
        base=features.BASE,
        untested="at the paper's a = 2 we trained depth 64 only, where it agrees",
    ),
]

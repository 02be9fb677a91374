"""Bordelon, Noci, Li, Hanin and Pehlevan, Depthwise transfer: figures and sweeps.

Figures that need the same runs share a sweep.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from . import claims_bordelon as claims
from . import sizes
from . import solved_bordelon as solved
from .parts import Part
from .registry import CIFAR, Drawing, Figure
from .request import DRAWN

# ----- Sweeps.

_DEPTH_MUP = {"sweep.only": "('depth_mup',)"}
_RATES = {"sweep.axes.learning_rate": "2**[-6:-2:1]"}
_NORMS = {"sweep.choices": "(('model.norm', ('batch', 'instance', 'none')),)"}
_FLAT = sizes.joined(sizes.CNN, sizes.FLAT, {"laptop": {"sweep.depths": "(3,6,12)"}})

_BOTH = sizes.joined(sizes.CNN, sizes.CNN_BOTH)
_CNN = Part("cnn_sweep", "cnn", {"sweep.only": "('mup', 'depth_mup',)"}, _BOTH)
# At the base's width SP is μP: only widths are trained.
_SP = Part(
    "cnn_sweep",
    "cnn-sp",
    {"sweep.only": "('sp',)"},
    sizes.joined(_BOTH, {s: {"sweep.depths": "(3,)"} for s in DRAWN}),
)
_RESNET = Part(
    "resnet_sweep",
    "resnet",
    {"sweep.only": "('mup', 'depth_mup',)"} | _NORMS,
    sizes.RESNET,
)
_VIT = Part("vit_sweep", "vit", {"sweep.only": "('mup', 'depth_mup',)"}, sizes.VIT)


def _flat(name: str, overrides: dict[str, str], *more: sizes.Sizes) -> Part:
    """Depth-μP at one width, over another hyperparameter too."""
    given = sizes.joined(_FLAT, *more)
    return Part("cnn_sweep", f"cnn-{name}", _DEPTH_MUP | overrides, given)


def _resnets(*runs: str) -> Part:
    """ResNets of some parametrizations and norms, e.g. "mup batch"."""
    return _RESNET.about(*(run.replace(" ", ", model.norm=") for run in runs))


def _equal_sizes(depth: int, *widths: str) -> Part:
    """Widths of one depth, which is its own base; 1/√L is in the multiplier.

    Channels double after each pooling. Depths 3, 12 and 21 have about as many
    parameters at widths that are as 6 : 4 : 3. `widths` are those of the scales
    "laptop", "medium", "wide" and "paper".
    """
    shared = {
        "model.depth": str(depth),
        "sweep.depths": f"({depth},)",
        "sweep.axes.learning_rate": "2**[-8:-4:1]",
        "sweep.seeds": "4",
        # As in the other sweeps, the convolutions after the three poolings count.
        "model.branch_multiplier": f"{((3 + 3) / (depth + 3)) ** 0.5:.6g}",
    }
    scales = "laptop", "medium", "wide", "paper"
    by_scale = {
        scale: shared | {"model.width": own[1:].split(",")[0], "sweep.widths": own}
        for scale, own in zip(scales, widths, strict=True)
    }
    given = sizes.joined(sizes.CNN, by_scale, sizes.EQUAL)
    return Part("cnn_sweep", f"cnn-depth-{depth}", _DEPTH_MUP, given)


_LONG_BRANCHES = Part(
    "resmlp_sweep",
    "long-branches",
    {
        "sweep.only": "('ode', 'depth_mup',)",
        "model.branch_multiplier": "1.0",
        "model.block_depth": "4",
        "model.depth": "2",
        "model.zero_init": "True",
        "model.activation_first": "True",
        "optimizer": "{'name': 'sgd', 'momentum': 0.9}",
    },
    sizes.joined(sizes.MLP, sizes.LONG),
)

# ----- Figures.

_STAGES = f"two stages; {CIFAR}, at scale `long` 8 x 8"


def _figure(
    number: str,
    claim: str,
    draw: Callable[..., Drawing],
    parts: Sequence[Part] = (),
    how: str = "",
    name: str = "",
    **more: Any,
) -> Figure:
    name = name or f"Figure {number}"
    if parts and "CIFAR" not in how:
        how = f"{how}; {CIFAR}" if how else CIFAR
    key = f"bordelon-{number.lower()}"
    return Figure(key, "Bordelon", name, claim, draw, parts, how, **more)


_SHALLOW = "depths 1 and 4, images of 8 x 8 pixels"
_WITH_BATCH_NORM = "the networks with batch norm, of four seeds"

FIGURES = [
    _figure(
        "1",
        "the best learning rate of 1/√L-scaled networks stays over depth and width; "
        "that of μP moves over depth",
        claims.both_sizes,
        (_CNN,),
    ),
    _figure(
        "2",
        "with batch norm alone the best learning rate shifts more with depth than "
        "with 1/√L scaling",
        claims.norm_is_not_enough,
        (_resnets("mup batch", "depth_mup batch", "depth_mup none"),),
        _STAGES,
        small=_SHALLOW,
        decided_by=_WITH_BATCH_NORM,
    ),
    _figure(
        "3",
        "the learning rate of ViTs under Adam transfers over depth; with 1/√L depth "
        "helps more",
        claims.transformers,
        (_VIT,),
        "CIFAR-10 in place of Tiny ImageNet and ImageNet",
    ),
    _figure(
        "4",
        "momentum and the richness μ0 transfer over depth",
        claims.other_axes,
        (
            _flat(
                "momentum",
                _RATES | {"sweep.axes.momentum": "1-2**[-4:0]"},
                sizes.MOMENTUM,
            ),
            _flat(
                "richness",
                _RATES | {"sweep.axes.richness": "2**[-4:1]"},
                sizes.RICHNESS,
            ),
        ),
    ),
    _figure(
        "5a",
        "training at large width agrees across depths, and better as depth grows",
        solved.depths_agree,
        measure=solved.measure_infinite_width,
        how="tanh networks of infinite width (eq. 38, 39) on 2 random points, 4 steps",
    ),
    _figure(
        "5",
        "finite networks approach the joint limit as 1/N in variance, 1/L in f",
        solved.finite_sizes,
        measure=solved.measure_finite_sizes,
        how="tanh networks on 6 random points in place of CNNs on CIFAR-10",
        name="Figure 5b",
    ),
    _figure(
        "6",
        "the NTK of depth L converges to its limit as L^-2 in squared error",
        solved.lazy_kernel,
        measure=solved.measure_kernel,
        how="at infinite width",
    ),
    _figure(
        "7",
        "H and its change by a step converge to the profiles of infinite depth",
        solved.linear_features,
        measure=solved.measure_features,
        how="exact recursion at infinite width in place of N = 1000; eq. 7 corrected",
    ),
    _figure(
        "B.1",
        "a medium depth is best at a given number of parameters",
        claims.middle_depth,
        (
            _equal_sizes(3, "(48,96)", "(48,)", "(96,)", "(384,768)"),
            _equal_sizes(12, "(32,64)", "(32,)", "(64,)", "(256,512)"),
            _equal_sizes(21, "(24,48)", "(24,)", "(48,)", "(192,384)"),
        ),
        small="at twice the widths, and after 5 epochs, the claim agrees",
    ),
    _figure(
        "B.2",
        "SP and μP do not transfer over depth",
        claims.without_scaling,
        (_CNN.about("mup"), _SP),
        decided_by="μP, of four seeds",
    ),
    _figure(
        "B.3",
        "the best learning rate is known after a few epochs",
        claims.decided_early,
        (
            _flat(
                "rate", {"sweep.axes.learning_rate": "2**[-9:-5:1]"}, sizes.TWO_DEPTHS
            ),
        ),
        small="width 16; the paper's is 512",
    ),
    _figure(
        "B.4",
        "with LayerNorm the best learning rate of μP shifts less with depth; with "
        "1/√L scaling less still",
        functools.partial(
            claims.norm_helps, norm="instance", label="LayerNorm of each channel"
        ),
        (_resnets("mup none", "mup instance", "depth_mup instance"),),
        _STAGES,
    ),
    _figure(
        "B.5",
        "with batch norm the best learning rate of μP shifts less with depth; with "
        "1/√L scaling less still",
        functools.partial(claims.norm_helps, norm="batch", label="batch norm"),
        (_resnets("mup none", "mup batch", "depth_mup batch"),),
        _STAGES,
        small=_SHALLOW,
        decided_by=_WITH_BATCH_NORM,
    ),
    Figure(
        id="bordelon-b.6",
        paper="Bordelon",
        number="Figure B.6",
        claim="the learning rate of ResNet-18 on ImageNet stays over depth",
        how="a sweep on ImageNet: weeks on a GPU; on CIFAR-10 it is bordelon-2",
        command=(
            "mupax sweep --config resnet_sweep --config.dataset=imagenet2012 "
            "--config.data.image_size=64"
        ),
    ),
    _figure(
        "B.7",
        "variance falls as 1/N at any L; squared bias of ensembles as L^-2",
        solved.ensembles,
        measure=solved.measure_finite_sizes,
        table="bordelon-5",
        how="the networks of bordelon-5",
        name="Figure B.7a, c",
    ),
    _figure(
        "B.8",
        "the loss depends on weight decay in the same way at every depth",
        claims.decay_stays,
        (
            _flat(
                "decay",
                {
                    "optimizer": "{'name': 'adamw'}",
                    "sweep.axes.learning_rate": "2**[-11:-6:1]",
                    "sweep.axes.weight_decay": "2**[-4:4:2]",
                },
                sizes.DECAY,
            ),
        ),
        "AdamW in place of SGD",
    ),
    _figure(
        "M.1",
        "branches of 4 layers: early on, at one learning rate, the loss falls with "
        "depth under ODE scaling and rises under SDE scaling",
        claims.long_branches,
        (_LONG_BRANCHES,),
        "residual MLPs in place of ResNets",
    ),
]

"""Sizes of the figures' sweeps at each scale, as overrides of the packaged configs.

"laptop" takes minutes on two cores and less than an epoch. "medium" takes hours of one
core and two epochs. "long" has the sizes of "medium" (fewer depths where these take too
long, a larger one for GPTs and in Figure 6), trains for as many steps as the papers,
and averages losses over the last tenth of them. "wide" has wider models or larger
images than "long", at few depths, and at most its steps; only some sweeps have it.
"paper" has the papers' sizes, as far as their texts give them: the widths of Megatron
and of the ViTs are missing.
"""

from collections.abc import Mapping

from mupax.experiments.errors import UserError

Sizes = Mapping[str, Mapping[str, str]]

_MEDIUM = {"steps": "1560", "sweep.average_last": "200", "sweep.seeds": "3"}
_SEEDS_2, _SEEDS_3, _SEEDS_4, _SEEDS_5 = ({"sweep.seeds": n} for n in "2345")
# What "long" takes from "paper".
_LENGTH = ("steps", "schedule.name", "schedule.warmup")


def at_scale(sizes: Sizes, scale: str) -> dict[str, str]:
    """The overrides of a scale.

    Raises:
      UserError: the scale is "wide", and the sweep has no sizes for it.
    """
    own = dict(sizes.get(scale, {}))
    if scale == "wide":
        if not own:
            raise UserError("this figure has no sizes of its own at --scale wide")
        return at_scale({**sizes, "long": {**sizes.get("long", {}), **own}}, "long")
    if scale != "long":
        return own
    paper = sizes.get("paper", {})
    length = {key: paper[key] for key in _LENGTH if key in paper}
    given = {**sizes.get("medium", {}), **length, **own}
    if "steps" in given:
        # After 50 epochs means over 1,000 steps vary by 10 % from one to the next.
        given["sweep.average_last"] = str(int(given["steps"]) // 10)
    return given


def joined(*many: Sizes) -> dict[str, dict[str, str]]:
    """The overrides of each scale; later ones replace earlier ones."""
    scales = dict.fromkeys(scale for sizes in many for scale in sizes)
    return {
        scale: {k: v for sizes in many for k, v in sizes.get(scale, {}).items()}
        for scale in scales
    }


def _grid(rates: str, multipliers: str = "", depths: str = "") -> dict[str, str]:
    """The overrides of a grid of learning rates, block multipliers and depths."""
    grid = {
        "sweep.depths": depths,
        "sweep.axes.learning_rate": rates,
        "sweep.axes.branch_multiplier": multipliers,
    }
    return {key: values for key, values in grid.items() if values}


def _powers(*exponents: float) -> str:
    """A grid of powers of two that are not evenly spaced."""
    return str(tuple(2.0**x for x in exponents))


# ----- Residual MLPs of Tensor Programs VI.

_MLP_PAPER = {
    "data.image_size": "32",
    "model.width": "256",
    "sweep.widths": "(256,)",
    "sweep.seeds": "5",
    "steps": "39100",
    "sweep.average_last": "1000",
}
# Finer near the optimum of Depth-μP: after 50 epochs a quarter of an octave costs 3 %.
_FINE = (-9, -8.5, -8.25, -8, -7.75, -7.5, -7.25, -7)
MLP: Sizes = {
    "laptop": _SEEDS_4 | _grid("2**[-11:-4:1]", depths="(8,32,128)"),
    "medium": _MEDIUM | _grid("2**[-11:-5:1]", depths="(8,32,128)"),
    "long": _SEEDS_4 | _grid(_powers(-13, -12, -11, -10, *_FINE)),
    "paper": _MLP_PAPER | {"sweep.depths": "(8,16,32,64,128,256,512,1024)"},
}
# With |x|, and with LayerNorm too.
ABS: Sizes = {"long": _SEEDS_2 | _grid("2**[-9:-6:0.5]")}
ABS_BASE: Sizes = {"long": _grid("2**[-11:-6:1]", "2**[-5:-1]")}
# Costs near 1 % need a fine grid.
ABSLN: Sizes = {
    "medium": {"sweep.seeds": "12"} | _grid("2**[-9:-5:0.5]"),
    "long": {"sweep.seeds": "6"} | _grid(_powers(-9.5, *_FINE, -6.5)),
}
ABSLN_BASE: Sizes = {
    "medium": _grid("2**[-10:-4:1]", "2**[-7:-2]"),
    "long": _grid("2**[-10:-6:1]", "2**[-6:-2]"),
}
# Sweeps over the learning rate and the block multiplier a together: of the base alone,
# and over depth.
BASE: Sizes = {
    "laptop": _grid("2**[-10:-4:1]", "2**[-4:1]"),
    "medium": _MEDIUM | _grid("2**[-10:-5:1]", "2**[-4:1]"),
    "long": _SEEDS_2 | _grid("2**[-12:-8:1]", "2**[-4:-1]"),
    "paper": _MLP_PAPER | _grid("2**[-13:-7:1]", "2**[-2:3]"),
}
BOTH: Sizes = {
    "laptop": _SEEDS_4 | _grid("2**[-10:-4:1]", "2**[-4:0]", "(8,32,128)"),
    "medium": _MEDIUM | _grid("2**[-10:-6:1]", "2**[-4:0]", "(8,32,64)"),
    "paper": _MLP_PAPER
    | _grid("2**[-13:-7:1]", "2**[-2:3]", "(8,16,32,64,128,256,512,1024)"),
}
RELU_BOTH: Sizes = {
    "medium": {"sweep.seeds": "12"},
    "long": _SEEDS_2 | _grid("2**[-10:-6:0.5]", "2**[-3:0]"),
}
FIRST_BOTH: Sizes = {"long": _SEEDS_2 | _grid("2**[-10:-7:1]", "2**[-3:-1]")}
ABSLN_BOTH: Sizes = {"long": _SEEDS_5 | _grid("2**[-9:-7:1]", "2**[-5:-3]", "(8,64)")}
# Branches of two layers, with as many layers as above.
TWO: Sizes = {
    "laptop": {"sweep.depths": "(4,16,64)"},
    "medium": {"sweep.depths": "(4,16,32)"},
    "long": _SEEDS_2 | _grid("2**[-11:-8:1]", "2**[-2:0]"),
    "paper": {"sweep.depths": "(4,8,16,32,64,128,256,512)"},
}
# Figure 4, left: fewer steps, after which block depths 1 and 2 differ.
_EARLY = {"steps": "11000", "sweep.seeds": "3"}
# At twice the width, best learning rates are half as large.
_EARLY_WIDE = {
    "data.image_size": "32",
    "model.width": "128",
    "sweep.widths": "(128,)",
    "sweep.seeds": "2",
}
ONE_EARLY: Sizes = {
    "long": _EARLY | _grid("2**[-9:-6:1]", "2**[-3:0]", "(8,32,128)"),
    "wide": _EARLY_WIDE | _grid("2**[-9:-7:1]", "2**[-3:-1]", "(8,32)"),
}
TWO_EARLY: Sizes = {
    "long": _EARLY | _grid("2**[-10:-8:1]", "2**[-2:1]", "(4,16,64)"),
    "wide": _EARLY_WIDE | _grid("2**[-11:-9:1]", "2**[-1:1]", "(4,16)"),
}
# From depth 2 on, for the slope of the valley.
TWO_ABS: Sizes = {
    "laptop": _grid("2**[-9:-3:1]", "2**[-6:-1]", "(2,4,16,64,1024)"),
    "medium": _grid("2**[-9:-4:1]", "2**[-6:-1]", "(2,4,16,32)"),
    "long": _SEEDS_5 | _grid("2**[-9:-6:1]", "2**[-6:-1]", "(2,4,32)"),
    "paper": {"sweep.depths": "(2,4,8,16,32,64,128,256,512,1024)"},
}
# At the base's best block multiplier: finer, and with |x| to a larger depth.
TWO_FINE: Sizes = {"long": _SEEDS_3 | _grid(_powers(-11, -10, -9.5, -9, -8.5, -8))}
TWO_ABS_DEEP: Sizes = {
    "long": _SEEDS_2 | _grid("2**[-9:-7:0.5]", depths="(2,4,32,128)")
}
# 20 epochs of CIFAR-10, as in Bordelon et al., who name no length for Figure M.1.
_EPOCHS_20 = {"steps": "15640", "sweep.average_last": "782"}
LONG: Sizes = {
    "laptop": _grid("2**[-9:-1:1]", depths="(2,8,32)"),
    "medium": _grid("2**[-9:-1:1]", depths="(2,8,32)"),
    "long": _SEEDS_2 | _grid("2**[-8:-4.5:0.5]"),
    "paper": _EPOCHS_20 | _grid("2**[-9:-1:1]", depths="(2,8,32,128)"),
}

# Distances between features: as many steps as in the paper at every scale.
_WIDE = {"model.width": "256", "sweep.widths": "(256,)", "data.image_size": "32"}
FEATURES: Sizes = {
    "laptop": _SEEDS_4,
    "medium": _WIDE | _SEEDS_3,
    "paper": _WIDE | {"sweep.seeds": "5"},
}
FEATURES_BASE: Sizes = joined(
    FEATURES,
    {"laptop": _grid("2**[-11:-5:1]"), "medium": _grid("2**[-13:-7:1]")},
    {"paper": _grid("2**[-13:-7:1]")},
)
FEATURES_DEPTHS = {
    "laptop": (64, 256, 1024),
    "medium": (64, 256),
    "long": (64, 256),
    "paper": (256, 512, 1024),
}

# ----- Transformers of Tensor Programs VI.

_GPT_WIDE = {"model.width": "128", "sweep.widths": "(128,)", "sweep.seeds": "4"}
GPT: Sizes = {
    "laptop": _SEEDS_4,
    "medium": _MEDIUM | {"sweep.seeds": "8"},
    "long": _SEEDS_4 | _grid(_powers(-9, -8, -7, -6.5, -6, -5.5, -5, -4)),
    "wide": _GPT_WIDE | _grid("2**[-9:-7:1]", depths="(2,4)"),
    "paper": {
        "data.context": "4096",
        "batch_size": "256",
        "model.head_dim": "64",
        "schedule.name": "cosine",
        "schedule.warmup": "500",
        "model.width": "1024",
        "model.depth": "4",
        "sweep.widths": "(1024,)",
        "sweep.depths": "(4,8,16,32)",
        "steps": "3900",
        "sweep.average_last": "100",
    },
}

# With α = ½.
GPT_DEEP: Sizes = {"long": {"sweep.depths": "(2,4,8,16,32)"}}
# Over the block multiplier too.
GPT_MULTIPLIER: Sizes = {
    "long": {"sweep.seeds": "6"} | _grid("2**[-7:-5:1]", "2**[-2:2:2]"),
    "wide": _GPT_WIDE
    | {"sweep.seeds": "6"}
    | _grid("2**[-9:-7:1]", "2**[-2:2:2]", "(2,)"),
}

# ----- Bordelon et al.: batches of 64; augmentation of CIFAR-10 as in App. A.4.

_AUGMENT = "('flip', 'rotate', 'affine', 'color_jitter')"
_LONG_CNN = _EPOCHS_20 | {"batch_size": "64"}
CNN: Sizes = {
    "laptop": {"sweep.depths": "(3,6,12,24)", "sweep.seeds": "4"},
    "medium": _MEDIUM | {"batch_size": "64", "sweep.depths": "(3,6,12,30)"},
    "paper": _LONG_CNN
    | {
        "augment": _AUGMENT,
        "data.image_size": "32",
        "model.width": "64",
        "sweep.widths": "(64,128,256,512)",
        "sweep.depths": "(3,6,9,12,15,18,30)",
    },
}
# Over width and depth.
CNN_BOTH: Sizes = {
    "long": _SEEDS_4
    | {"sweep.widths": "(8,16,32)"}
    | _grid("2**[-9:-6:0.5]", depths="(3,12,30)")
}
# At one width.
FLAT: Sizes = {
    "laptop": {"sweep.widths": "(16,)"},
    "medium": {"sweep.widths": "(16,)"},
    "long": _SEEDS_2 | {"sweep.depths": "(3,12)"},
    "paper": {"model.width": "512", "sweep.widths": "(512,)"},
}
# The values of Figures 4 and B.8, fewer where a run takes long.
MOMENTUM: Sizes = {
    "long": _grid("2**[-8:-4:1]") | {"sweep.axes.momentum": "1-2**[-3:0]"}
}
RICHNESS: Sizes = {
    "long": _grid("2**[-11:-6:0.5]") | {"sweep.axes.richness": "2**[-1:2]"}
}
DECAY: Sizes = {
    "laptop": {"sweep.seeds": "16"},
    "long": _SEEDS_4
    | _grid("2**[-11:-8:1]")
    | {"sweep.axes.weight_decay": "2**[-4:2:2]"},
}
# The paper shows two depths.
TWO_DEPTHS: Sizes = {
    "laptop": {"sweep.depths": "(3,12)"},
    "medium": {"sweep.depths": "(3,12)"},
    "long": _SEEDS_4 | _grid("2**[-8:-6:0.5]"),
    "paper": {"sweep.depths": "(3,12)"},
}
# Networks with as many parameters, of different depths.
_EQUAL_LONG = _SEEDS_2 | _grid("2**[-8:-6:1]")
EQUAL: Sizes = {
    "long": _EQUAL_LONG,
    "wide": {"steps": "3910"} | _SEEDS_4 | _grid("2**[-8:-5:1]"),
}
RESNET: Sizes = {
    "laptop": {"sweep.seeds": "24"} | _grid("2**[-8:0:1]", depths="(1,2,4,8)"),
    "medium": _MEDIUM
    | {"batch_size": "64", "sweep.axes.learning_rate": "2**[-9:-2:1]"},
    # Finer where the loss with a norm is flat.
    "long": _SEEDS_4
    | {"data.image_size": "8"}
    | _grid(_powers(-9, -8, -7, -6, -5, -4.5, -4, -3.5, -3, -2.5, -2), depths="(1,4)"),
    "paper": _LONG_CNN
    | {
        "augment": _AUGMENT,
        "data.image_size": "32",
        "model.blocks": "(2,2,2,2)",
        "model.width": "64",
        "model.depth": "1",
        "sweep.widths": "(64,)",
        "sweep.depths": "(1,2,4,8)",
    },
}
VIT: Sizes = {
    "laptop": {"sweep.depths": "(2,4,8)", "sweep.seeds": "8"},
    "medium": _MEDIUM | {"batch_size": "64", "sweep.depths": "(2,4,8)"},
    # 20 epochs of CIFAR-10, as the paper's of Tiny ImageNet.
    "long": {"steps": "15640"}
    | _SEEDS_3
    | _grid("2**[-12.5:-7.5:0.5]", depths="(2,8)"),
    "paper": {
        "dataset": "images:tiny-imagenet-200/train",
        "augment": "('random_resized_crop', 'flip')",
        "batch_size": "64",
        "schedule.warmup": "1000",
        "model.width": "256",
        "model.depth": "3",
        "sweep.widths": "(256,)",
        "sweep.depths": "(3,6,9,12,15)",
        "steps": "31260",
        "sweep.average_last": "1563",
    },
}

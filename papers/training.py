"""Claims about batch size, training length and weight decay beyond the papers."""

import functools
import math

from mupax.experiments.report import SweepData
from mupax.experiments.sweep.statistics import Axis
from mupax.experiments.sweep.verdict import Transfer, transfer

from . import curves
from .parts import Part
from .registry import CIFAR, TEXT, Drawing, Figure, Panel, beyond

_HIDDEN = "hidden/weight_decay"


def follows(unscaled: SweepData, scaled: SweepData) -> Drawing:
    """Over batch size or length, the rule keeps the optimum; without it, it moves."""
    (plain,), (ruled,) = unscaled.shown, scaled.shown
    transfers = {"with the rule": ruled, "without it": plain}
    return Drawing(
        [
            _panel("Without the rule", plain),
            _panel("With the rule", ruled),
            curves.shift_panel(transfers),
        ],
        f"{curves.describe(transfers)}; loss at the base's optimum, small to large: "
        f"with the rule {_losses(ruled)}, without it {_losses(plain)}",
        curves.conjunction(curves.stays(ruled), curves.moves(plain)),
        keeps=curves.stays(ruled),
    )


def _panel(title: str, judged: Transfer) -> Panel:
    labels = [judged.size_text(i) for i in range(len(judged.cells))]
    return curves.panel(title, judged.cells, labels=labels)


def _losses(judged: Transfer) -> str:
    losses = curves.at_base_best(judged)
    return ", ".join("unknown" if math.isnan(x) else f"{x:.3f}" for x in losses)


def decays(
    decayed: SweepData, none: SweepData, axis: Axis = "width", power: float = 1.0
) -> Drawing:
    """A constant learning rate × decay keeps the optimum, a constant decay does not.

    The learning rate of hidden weights scales as 1/size^power, and mupax scales the
    decay by size^power. A constant decay is the share (base/size)^power of mupax's.

    Args:
      decayed: a sweep over sizes and over such shares of the decay of hidden weights.
      none: a sweep over sizes without decay.
      axis: "width" or "depth".
      power: 1 over width, ½ over depth under Depth-μP.
    """
    key = decayed.populations[0].parametrization
    populations = decayed.along(key, axis)
    sizes = [getattr(p, axis) for p in populations]
    shares = [(sizes[0] / size) ** power for size in sizes]
    runs = {
        "learning rate × decay constant": [p.at(_HIDDEN, 1.0) for p in populations],
        "decay constant": [
            p.at(_HIDDEN, share) for p, share in zip(populations, shares, strict=True)
        ],
        "no decay": none.along(key, axis),
    }
    transfers = {
        name: transfer([p.cell() for p in populations], axis)
        for name, populations in runs.items()
    }
    kept, lost, _ = transfers.values()
    return curves.drawing(transfers, curves.stays(kept), curves.moves(lost), axis=axis)


# ----- Sweeps over batch size and length, without and with the rule.

_DATA = {
    "text": ("GPT", TEXT),
    "cnn": ("CNN", CIFAR),
    "digits": ("residual MLP", "1,437 digits, seen several times"),
}
# By name: title, claim, overrides, further overrides of the rule.
_RULES: dict[str, tuple[str, str, dict[str, str], dict[str, str]]] = {
    "batch": (
        "Batch size",
        "AdamW's best learning rate stays over batch sizes 16 to 512 at equal examples "
        "with the square-root rule, and moves without it",
        {},
        {"base_batch_size": "64"},
    ),
    "length": (
        "Training length",
        "AdamW's best learning rate stays over lengths 1x to 16x with the rule of "
        "length, and moves without it",
        {
            "batch_size": "32",
            "steps": "100",
            "schedule.warmup": "10",
            "sweep.average_last": "12",
            "sweep.equal_examples": "False",
            "sweep.choices": "(('steps', (100, 400, 1600)),)",
        },
        {"base_examples": "3200"},
    ),
}
# Where the rest does not decide.
_MORE = {
    "text-length": {"sweep.seeds": "6"},
    "cnn-length": {
        "sweep.axes.learning_rate": "2**[-9:-4:0.5]",
        "sweep.seeds": "12",
    },
    "digits-length": {"sweep.seeds": "32"},
}


def _over(data: str, rule: str) -> Figure:
    model, how = _DATA[data]
    title, claim, overrides, base = _RULES[rule]
    name, config = f"{data}-{rule}", f"{data}_batch"
    overrides = overrides | _MORE.get(name, {})
    parts = (
        Part(config, name, overrides),
        Part(config, f"{name}-rule", overrides | base),
    )
    return beyond(name, f"{title}, {model}", claim, follows, parts, how)


# ----- Sweeps over the decay of hidden weights.

_DECAY = {
    "sweep.choices": "()",
    "sweep.equal_examples": "False",
    "model.width": "16",
    "base_width": "16",
    "batch_size": "16",
    "steps": "1600",
    "schedule.warmup": "160",
    "sweep.average_last": "200",
    "sweep.seeds": "4",
    "optimizer.weight_decay": "0.3",
}
_RATES = "2**[-8:-4:1]"
_WIDE = {"sweep.widths": "(16,64)"}
_DEEP = {
    "sweep.depths": "(2,8)",
    "parametrization.name": "depth_mup",
    "sweep.seeds": "6",  # four did not decide
}
_DECAY_CLAIM = (
    "AdamW's best learning rate stays over {} where learning rate × decay is constant, "
    "and moves where the decay is"
)


def _decay(name: str, overrides: dict[str, str], shares: str) -> tuple[Part, Part]:
    """A sweep over shares of the decay of hidden weights, and one without decay."""
    overrides = _DECAY | overrides
    decayed = {
        "modules": "{'hidden': {'pattern': 'role:hidden'}}",
        "sweep.axes": f"{{'learning_rate': '{_RATES}', '{_HIDDEN}': '{shares}'}}",
    }
    without = {"sweep.axes.learning_rate": _RATES, "optimizer.weight_decay": "0.0"}
    return (
        Part("text_batch", name, overrides | decayed),
        Part("text_batch", f"{name}-none", overrides | without),
    )


FIGURES = [
    *(_over(data, rule) for rule in _RULES for data in _DATA),
    beyond(
        "decay",
        "Weight decay over width",
        _DECAY_CLAIM.format("width"),
        decays,
        _decay("decay", _WIDE, "2**[-2:0:2]"),
        TEXT,
    ),
    beyond(
        "decay-depth",
        "Weight decay over depth, Depth-μP",
        _DECAY_CLAIM.format("depth"),
        functools.partial(decays, axis="depth", power=0.5),
        _decay("decay-depth", _DEEP, "2**[-1:0:1]"),
        TEXT,
    ),
]

"""Claims about batch size, training length and weight decay beyond the papers."""

import functools

from ml_collections import ConfigDict

from ...report import SweepData
from ...sweep import optima
from ...sweep.statistics import Axis
from ...sweep.verdict import Transfer, transfer
from . import curves
from .parts import Part, Sweeps
from .registry import BEYOND, CIFAR, TEXT, Drawing, Figure, Panel

_HIDDEN = "hidden/weight_decay"


def follows(unscaled: SweepData, scaled: SweepData) -> Drawing:
    """The rule keeps the optimum over batch size or length; without it moves.

    Args:
      unscaled: a sweep over batch sizes or steps, with hyperparameters as they are.
      scaled: the same with the rule.
    """
    (plain,), (ruled,) = unscaled.over_training, scaled.over_training
    transfers = {"with the rule": ruled, "without it": plain}
    return Drawing(
        [
            _panel("Hyperparameters as they are", plain),
            _panel("With the rule", ruled),
        ],
        f"{curves.describe(transfers)}; loss at the base's optimum, small to large: "
        f"with the rule {_losses(ruled)}, without it {_losses(plain)}",
        curves.conjunction(curves.stays(ruled), curves.moves(plain)),
    )


def _panel(title: str, judged: Transfer) -> Panel:
    labels = [judged.size_text(i) for i in range(len(judged.cells))]
    return curves.panel(title, judged.cells, labels=labels)


def _losses(judged: Transfer) -> str:
    """The loss of each size at the base's best value."""
    best = judged.optima[judged.base]
    losses = []
    for cell in judged.cells:
        fitted = optima.fit(cell)
        if fitted is None or best is None or not fitted.holds(best):
            losses.append("unknown")
        else:
            losses.append(f"{2 ** fitted.at(best).mean():.3f}")
    return ", ".join(losses)


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
    return Drawing(
        curves.panels(transfers, axis),
        curves.describe(transfers),
        curves.conjunction(curves.stays(kept), curves.moves(lost)),
    )


# ----- Sweeps over batch size and length, without and with the rule.


def _pair(
    config: str, name: str, overrides: dict[str, str], base: dict[str, str]
) -> tuple[Part, Part]:
    """A sweep of hyperparameters as they are, and the same with the rule."""
    name = f"{config.partition('_')[0]}-{name}"
    return Part(config, name, overrides), Part(config, f"{name}-rule", overrides | base)


def _batch(config: str) -> Sweeps:
    return Sweeps(_pair(config, "batch", {}, {"base_batch_size": "64"}), follows)


def _length(config: str) -> Sweeps:
    overrides = {
        "batch_size": "32",
        "steps": "100",
        "schedule.warmup": "10",
        "sweep.average_last": "12",
        "sweep.equal_examples": "False",
        "sweep.choices": "(('steps', (100, 400, 1600)),)",
    }
    return Sweeps(
        _pair(config, "length", overrides, {"base_examples": "3200"}), follows
    )


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
    "sweep.axes.learning_rate": "2**[-8:-4:1]",
    "sweep.seeds": "4",
    "optimizer.weight_decay": "0.3",
}
_WIDE = {"sweep.widths": "(16,64)"}
_DEEP = {"sweep.depths": "(2,8)", "parametrization.name": "depth_mup"}


def _share_of_hidden(config: ConfigDict, shares: str) -> None:
    # No override names a group of parameters.
    with config.unlocked():
        config.modules = ConfigDict({"hidden": {"pattern": "role:hidden"}})
        config.sweep.axes[_HIDDEN] = shares


def _decay(name: str, overrides: dict[str, str], shares: str) -> tuple[Part, Part]:
    """A sweep over shares of the decay of hidden weights, and one without decay."""
    edit = functools.partial(_share_of_hidden, shares=shares)
    overrides = _DECAY | overrides
    without = overrides | {"optimizer.weight_decay": "0.0"}
    return (
        Part("text_batch", name, overrides, edit=edit),
        Part("text_batch", f"{name}-none", without),
    )


_BATCH_RULE = (
    "AdamW's best learning rate stays over batch sizes 16 to 512 at equal examples "
    "with the square-root rule, and moves without it"
)
_LENGTH_RULE = (
    "AdamW's best learning rate stays over lengths 1x to 16x with the rule of length, "
    "and moves without it"
)
_DECAY_RULE = "where learning rate × decay is constant, and moves where the decay is"

FIGURES = [
    Figure(
        "text-batch",
        BEYOND,
        "Batch size, GPT",
        _BATCH_RULE,
        train=_batch("text_batch"),
        how=TEXT,
    ),
    Figure(
        "cnn-batch",
        BEYOND,
        "Batch size, CNN",
        _BATCH_RULE,
        train=_batch("cnn_batch"),
        how=CIFAR,
    ),
    Figure(
        "text-length",
        BEYOND,
        "Training length, GPT",
        _LENGTH_RULE,
        train=_length("text_batch"),
        how=TEXT,
    ),
    Figure(
        "cnn-length",
        BEYOND,
        "Training length, CNN",
        _LENGTH_RULE,
        train=_length("cnn_batch"),
        how=CIFAR,
    ),
    Figure(
        "decay",
        BEYOND,
        "Weight decay over width",
        f"AdamW's best learning rate stays over width {_DECAY_RULE}",
        train=Sweeps(_decay("decay", _WIDE, "2**[-2:0:2]"), decays),
        how=TEXT,
    ),
    Figure(
        "decay-depth",
        BEYOND,
        "Weight decay over depth, Depth-μP",
        f"AdamW's best learning rate stays over depth {_DECAY_RULE}",
        train=Sweeps(
            _decay("decay-depth", _DEEP, "2**[-1:0:1]"),
            functools.partial(decays, axis="depth", power=0.5),
        ),
        how=TEXT,
    ),
]

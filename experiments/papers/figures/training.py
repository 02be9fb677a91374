"""Claims about batch size, training length and weight decay, measured as the others."""

import dataclasses
import functools
from collections.abc import Callable

from ml_collections import ConfigDict

from ...report import SweepData
from ...report.data import Axis
from ...sweep import optima
from ...sweep.results import Cell, Population
from ...sweep.verdict import Transfer
from . import curves
from .parts import Part, Sweeps
from .registry import Drawing, Figure, Panel

_HIDDEN = "hidden/weight_decay"


def follows(as_it_is: SweepData, scaled: SweepData) -> Drawing:
    """The rule keeps the optimum over batch size or length; without it moves.

    Args:
      as_it_is: a sweep over batch sizes or steps.
      scaled: the same with the rule.
    """
    (plain,), (ruled,) = as_it_is.over_training, scaled.over_training
    verdicts = {"with the rule": ruled, "without it": plain}
    return Drawing(
        [
            _panel("Hyperparameters as they are", plain),
            _panel("With the rule", ruled),
        ],
        f"{curves.told(verdicts)}; loss at the base's optimum, sizes rising: with the "
        f"rule {_losses(ruled)}, without it {_losses(plain)}",
        curves.every(curves.stays(ruled), curves.moves(plain)),
    )


def _losses(found: Transfer) -> str:
    """The loss of each size at the base's best value."""
    best = found.optima[found.base]
    losses = []
    for cell in found.cells:
        fitted = optima.fit(cell)
        if fitted is None or best is None or not fitted.holds(best):
            losses.append("unknown")
        else:
            losses.append(f"{2 ** fitted.at(best).mean():.3f}")
    return ", ".join(losses)


def decays(
    decayed: SweepData, none: SweepData, axis: Axis = "width", power: float = 1.0
) -> Drawing:
    """Learning rate times decay is to be constant over sizes, not the decay.

    The learning rate of hidden weights goes as 1/size^power, and mupax keeps its
    product with the decay. Decay that is constant is a share (base/size)^power of it.

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
    by_name = {
        "learning rate × decay constant": [_share(p, 1.0) for p in populations],
        "decay constant": [
            _share(p, share) for p, share in zip(populations, shares, strict=True)
        ],
        "no decay": curves.cells(none, key, axis),
    }
    verdicts = {n: curves.move(cells, axis) for n, cells in by_name.items()}
    kept, lost, _ = verdicts.values()
    return Drawing(
        [curves.panel(name, cells, axis) for name, cells in by_name.items()],
        curves.told(verdicts),
        curves.every(curves.stays(kept), curves.moves(lost)),
    )


def _share(population: Population, share: float) -> Cell:
    """Loss over the learning rate, at one share of the hidden weights' decay."""
    at = list(population.axes).index(_HIDDEN)
    i = population.axes[_HIDDEN].index(share)
    return dataclasses.replace(
        population,
        axes={k: v for k, v in population.axes.items() if k != _HIDDEN},
        loss=population.loss.take(i, axis=1 + at),
        curves=population.curves.take(i, axis=1 + at),
    ).cell()


def _panel(title: str, found: Transfer) -> Panel:
    labels = [found.size_text(i) for i in range(len(found.cells))]
    return curves.panel(title, found.cells, labels=labels)


_LENGTH = {
    "batch_size": "32",
    "steps": "100",
    "schedule.warmup": "10",
    "sweep.average_last": "12",
    "sweep.equal_examples": "False",
    "sweep.choices": "(('steps', (100, 400, 1600)),)",
}


def _pair(
    config: str, what: str, shared: dict[str, str], base: dict[str, str]
) -> tuple[Part, Part]:
    """A sweep of hyperparameters as they are, and the same with the rule."""
    name = f"{config.partition('_')[0]}-{what}"
    return Part(config, name, shared), Part(config, f"{name}-rule", shared | base)


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
    "sweep.seeds": "2",
    "optimizer.weight_decay": "0.3",
}


_WIDE = {"sweep.widths": "(16,64)"}
_DEEP = {"sweep.depths": "(2,8)", "parametrization.name": "depth_mup"}


def _share_of_hidden(config: ConfigDict, shares: str) -> None:
    # No override names a group of parameters.
    with config.unlocked():
        config.modules = ConfigDict({"hidden": {"pattern": "role:hidden"}})
        config.sweep.axes[_HIDDEN] = shares


def _decays(name: str, sizes: dict[str, str], shares: str) -> tuple[Part, Part]:
    """A sweep with shares of the decay of hidden weights, and one without decay."""
    edit = functools.partial(_share_of_hidden, shares=shares)
    without = {"optimizer.weight_decay": "0.0"}
    return (
        Part("text_batch", name, _DECAY | sizes, edit=edit),
        Part("text_batch", f"{name}-none", _DECAY | sizes | without),
    )


_TEXT = "a text file of yours: --dataset=text:FILE"
_CIFAR = "CIFAR-10 of 16 x 16 pixels"
_BATCH_RULE = (
    "AdamW's best learning rate stays over batch sizes 16 to 512 at equal examples "
    "with the square-root rule, and moves without it"
)
_DECAY_RULE = "where learning rate × decay is constant, and moves where the decay is"
_LENGTH_RULE = (
    "AdamW's best learning rate stays over lengths 1x to 16x with the rule of length, "
    "and moves without it"
)


def _row(
    name: str,
    about: str,
    claim: str,
    parts: tuple[Part, ...],
    draw: Callable[..., Drawing],
    how: str,
) -> Figure:
    train = Sweeps(parts, draw)
    return Figure(name, "Beyond the papers", about, claim, train=train, how=how)


_BATCH = functools.partial(
    _pair, what="batch", shared={}, base={"base_batch_size": "64"}
)
_LONG = functools.partial(
    _pair, what="length", shared=_LENGTH, base={"base_examples": "3200"}
)

FIGURES = [
    _row(
        "text-batch",
        "Batch size, GPT",
        _BATCH_RULE,
        _BATCH("text_batch"),
        follows,
        _TEXT,
    ),
    _row(
        "cnn-batch",
        "Batch size, CNN",
        _BATCH_RULE,
        _BATCH("cnn_batch"),
        follows,
        _CIFAR,
    ),
    _row(
        "text-length",
        "Training length, GPT",
        _LENGTH_RULE,
        _LONG("text_batch"),
        follows,
        _TEXT,
    ),
    _row(
        "cnn-length",
        "Training length, CNN",
        _LENGTH_RULE,
        _LONG("cnn_batch"),
        follows,
        _CIFAR,
    ),
    _row(
        "decay",
        "Weight decay over width",
        f"AdamW's best learning rate stays over width {_DECAY_RULE}",
        _decays("decay", _WIDE, "2**[-2:0:2]"),
        decays,
        _TEXT,
    ),
    _row(
        "decay-depth",
        "Weight decay over depth, Depth-μP",
        f"AdamW's best learning rate stays over depth {_DECAY_RULE}",
        _decays("decay-depth", _DEEP, "2**[-1:0:1]"),
        functools.partial(decays, axis="depth", power=0.5),
        _TEXT,
    ),
]

"""Claims about batch size, training length and weight decay, measured as the others."""

import dataclasses
import functools
from collections.abc import Callable

from ml_collections import ConfigDict

from ...report import SweepData
from ...sweep import optima
from ...sweep.results import Cell, Population
from ...sweep.verdict import Transfer
from . import curves
from .parts import Part, Sweeps
from .registry import Drawing, Figure, Panel

_KEY, _HIDDEN = "completep", "hidden/weight_decay"


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


def decays(decayed: SweepData, none: SweepData) -> Drawing:
    """Learning rate times decay is to be constant over width, not the decay.

    The learning rate of hidden weights goes as 1/width, and mupax keeps its product
    with the decay. Decay that is constant is a share base width/width of that.

    Args:
      decayed: a sweep over width and over such shares of the decay of hidden weights.
      none: a sweep over width without decay.
    """
    populations = decayed.along(_KEY, "width")
    base = populations[0].width
    by_name = {
        "learning rate × decay constant": [_share(p, 1.0) for p in populations],
        "decay constant": [_share(p, base / p.width) for p in populations],
        "no decay": curves.cells(none, _KEY, "width"),
    }
    verdicts = {n: curves.move(cells, "width") for n, cells in by_name.items()}
    kept, lost, _ = verdicts.values()
    return Drawing(
        [curves.panel(name, cells, "width") for name, cells in by_name.items()],
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
    "sweep.widths": "(16,64)",
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


def _share_of_hidden(config: ConfigDict) -> None:
    # No override names a group of parameters.
    with config.unlocked():
        config.modules = ConfigDict({"hidden": {"pattern": "role:hidden"}})
        config.sweep.axes[_HIDDEN] = "2**[-2:0:2]"


_DECAYS = (
    Part("text_batch", "decay", _DECAY, edit=_share_of_hidden),
    Part("text_batch", "decay-none", _DECAY | {"optimizer.weight_decay": "0.0"}),
)

_TEXT = "a text file of yours: --dataset=text:FILE"
_CIFAR = "CIFAR-10 of 16 x 16 pixels"
_BATCH_RULE = (
    "AdamW's best learning rate stays over batch sizes 16 to 512 at equal examples "
    "with the square-root rule, and moves without it"
)
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
        "Weight decay",
        "AdamW's best learning rate stays over width where learning rate × decay is "
        "constant, and moves where the decay is",
        _DECAYS,
        decays,
        _TEXT,
    ),
]

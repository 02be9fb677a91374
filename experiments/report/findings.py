"""What a transferred hyperparameter costs, and how the target did, in words."""

from collections.abc import Sequence

from ..sweep.verdict import Transfer, Verdict, listed, percent
from . import names
from .data import SweepData, finite


def loss(value: float) -> str:
    """A loss to three digits."""
    return f"{value:.3g}"


def cost(found: Transfer) -> str:
    """The cost of the base's best value at the largest size: "0.4% (0% to 0.9%)"."""
    if len(found.sizes) < 2:
        return "–"
    if found.verdict in (Verdict.DIVERGES, Verdict.FAILS):
        return found.reason
    if found.regret is None:
        return "not measured"
    told = percent(found.regret.share)
    if finite(found.regret.high) is None:
        return told
    return f"{told} ({percent(found.regret.low)} to {percent(found.regret.high)})"


def target(data: SweepData) -> str:
    """How the target did, in one sentence; "" where none was trained."""
    found = data.trained
    if found is None:
        return ""
    name = f"The target (width {found.sizes.width}, depth {found.sizes.depth})"
    rate = f"{found.learning_rate:.2g}"
    accuracy, train = finite(found.test_accuracy), finite(found.train_loss)
    if train is None:
        return f"{name} diverged at the transferred learning rate {rate}."
    reaches = f"training loss {loss(train)}"
    if accuracy is not None:
        reaches = f"{accuracy:.1%} test accuracy"
    return (
        f"{name}, trained once at the transferred learning rate {rate}, reaches "
        f"{reaches}."
    )


def regret_title(data: SweepData, found: Sequence[Transfer]) -> str:
    """What the transferred learning rate costs, for the picture of regrets."""
    mine = [t for t in found if t.key == data.main]
    parts = [
        f"{t.size_text()} " + (f"gives up {t.cost}" if t.cost else "diverges")
        for t in mine
        if t.cost or t.verdict is Verdict.DIVERGES
    ]
    if not parts:
        return "No loss to compare at the transferred learning rate"
    label = data.keys[data.main]
    return f"At the base's best learning rate, with {label}, {listed(parts)}"


def notes(data: SweepData, found: Sequence[Transfer]) -> list[str]:
    """Which optima of an axis lie at the edge of the grid."""
    return [
        f"{data.keys[t.key]}: at {t.axis} {listed(t.at_edge)} the optimum lies at the "
        f"edge of the grid of {names.noun(t.name)}. The true optimum may lie outside."
        for t in found
        if t.at_edge
    ]

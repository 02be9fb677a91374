"""The cost of a transferred hyperparameter, and the target's results, in words."""

from collections.abc import Sequence

from ..sweep.verdict import Transfer, Verdict, listed
from . import names
from .data import SweepData, finite


def loss(value: float) -> str:
    """A loss to three digits."""
    return f"{value:.3g}"


def cost(transfer: Transfer) -> str:
    """The cost of the base's best value at the largest size, "0.4% (0% to 0.9%)"."""
    if len(transfer.sizes) < 2:
        return "–"
    if transfer.verdict in (Verdict.DIVERGES, Verdict.DIES, Verdict.FAILS):
        return transfer.reason
    return "not measured" if transfer.regret is None else transfer.regret.words


def target(data: SweepData) -> str:
    """The target's result in one sentence; "" if none was trained."""
    trained = data.trained
    if trained is None:
        return ""
    name = f"The target (width {trained.sizes.width}, depth {trained.sizes.depth})"
    rate = f"{trained.learning_rate:.2g}"
    accuracy, train = finite(trained.test_accuracy), finite(trained.train_loss)
    if train is None:
        return f"{name} diverged at the transferred learning rate {rate}."
    result = f"training loss {loss(train)}"
    if accuracy is not None:
        result = f"{accuracy:.1%} test accuracy"
    return (
        f"{name}, trained once at the transferred learning rate {rate}, reaches "
        f"{result}."
    )


def regret_title(data: SweepData, transfers: Sequence[Transfer]) -> str:
    """The cost of the transferred learning rate, for the picture of regrets."""
    parts = [
        f"{t.size_text()} " + (f"gives up {t.cost}" if t.cost else "diverges")
        for t in transfers
        if t.key == data.main and (t.cost or t.verdict is Verdict.DIVERGES)
    ]
    if not parts:
        return "No loss to compare at the transferred learning rate"
    label = data.keys[data.main]
    return f"At the base's best learning rate, with {label}, {listed(parts)}"


def notes(data: SweepData, transfers: Sequence[Transfer]) -> list[str]:
    """Which optima lie at the edge of the grid."""
    return [
        f"{data.keys[t.key]}: at {t.axis} {listed(t.at_edge)} the optimum lies at the "
        f"edge of the grid of {names.noun(t.name)}. The true optimum may lie outside."
        for t in transfers
        if t.at_edge
    ]

"""The opening of a transfer's report: one picture, and one sentence below it."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..sweep.statistics import BASE
from .data import SweepData, Trained, finite
from .style import POINTS, Page, canvas, end_label, ramp

_LIGHT, _DARK = ramp(2)


def shown(data: SweepData) -> bool:
    """Whether there is a target, a baseline and an accuracy to compare."""
    return bool(data.compared) and any(run.accuracies.size for run in _runs(data))


def sentence(data: SweepData) -> str:
    """The result of the transfer, without names of parametrizations."""
    target = data.trained
    if target is None:
        return ""
    small = _small(data)
    other = next((run for run in data.compared if run.baseline != BASE), None)
    size = f"one {_times(target, small)} larger" if small else "a large one"
    subject = "The learning rate of a small network"
    unscaled = ""
    if other is not None:
        unscaled = f"{_accuracy(other)} for the large one without mupax's scaling"
    reached = _value(target)
    if reached is None:
        return f"{subject} made {size} diverge."
    result = f"{_accuracy(target)} test accuracy"
    if small is None:
        return f"{subject} on {size}: {result}, against {unscaled}."
    before = _value(small)
    better = before is None or reached > before
    verb = "works unchanged on" if better else "gives no gain on"
    against = f"{_accuracy(small)} for the small one"
    if unscaled:
        against += f" and {unscaled}"
    return f"{subject} {verb} {size}: {result}, against {against}."


def bought(data: SweepData) -> str:
    """The test errors that the larger network saves, and its cost; or ""."""
    target, small = data.trained, _small(data)
    if target is None or small is None:
        return ""
    large_accuracy, small_accuracy = _value(target), _value(small)
    if large_accuracy is None or small_accuracy is None or small_accuracy == 1:
        return ""
    errors = 1 - small_accuracy, 1 - large_accuracy
    change = errors[1] / errors[0] - 1
    order = "fewer" if change < 0 else "more"
    cost = f"{_times(target, small)} the parameters"
    if small.seconds > 0:
        longer = target.seconds / small.seconds
        cost += f" and {_digits(longer)} times the training time"
    return (
        f"The large network makes {abs(change):.0%} {order} test errors "
        f"({errors[1]:.1%} instead of {errors[0]:.1%}), at {cost} (width "
        f"{target.sizes.width} and depth {target.sizes.depth} instead of "
        f"{small.sizes.width} and {small.sizes.depth}; one run each, with the same "
        "number of steps and the same learning rate)."
    )


def figure(data: SweepData, page: Page) -> Figure:
    """Test accuracy over the steps: the target, and each baseline."""
    main = 3.3 if page.columns > 1 else 2.7
    body = canvas(page, main + 1.4, sentence(data))
    ax = body.subplots()
    ends, handles = [], []
    for run in _runs(data):
        label, look = _look(run)
        handles.append(Line2D([], [], lw=2.6, label=label, **look))
        if not run.accuracies.size:
            continue
        ax.plot(*run.accuracies.T, lw=2.6, marker="o", ms=4.5, clip_on=False, **look)
        step, accuracy = run.accuracies[-1]
        text = "diverged" if run.train_loss is None else f"{accuracy:.1%}"
        ends.append((accuracy, step, text, look["color"]))
    body.legend(handles=handles, loc="outside upper left")
    ax.set(xlim=(0, max(end[1] for end in ends)), ylim=(0, 1))
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.xaxis.set_major_locator(MaxNLocator(3 + page.columns, integer=True))
    ax.set(xlabel="training step", ylabel="test accuracy")
    # The numbers at the ends of lines are at least a line of text apart.
    apart = 1.45 * POINTS / 72 / main
    height = -1.0
    for accuracy, step, text, color in sorted(ends, key=lambda end: end[0]):
        height = max(accuracy, height + apart)
        end_label(ax, (step, height), text, color=color)
    return body.figure


def _runs(data: SweepData) -> list[Trained]:
    return [*([data.trained] if data.trained else []), *data.compared]


def _small(data: SweepData) -> Trained | None:
    return next((run for run in data.compared if run.baseline == BASE), None)


def _look(run: Trained) -> tuple[str, dict[str, Any]]:
    """The label and the style of a run's line."""
    if run.baseline is None:
        return "large network, learning rate of the small one", {"color": _DARK}
    if run.baseline == BASE:
        return "small network, where it was tuned", {"color": _LIGHT}
    dashed = {"color": "#7c8494", "linestyle": (0, (4, 1.5))}
    return "large network, without mupax's scaling", dashed


def _value(run: Trained) -> float | None:
    """The test accuracy; None if the run diverged."""
    return None if run.train_loss is None else finite(run.test_accuracy)


def _accuracy(run: Trained) -> str:
    value = _value(run)
    return "divergence" if value is None else f"{value:.1%}"


def _times(large: Trained, small: Trained) -> str:
    return f"{_digits(large.parameters / max(1, small.parameters))} times"


def _digits(ratio: float) -> str:
    """A ratio with two digits below 10, and without decimals above."""
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"

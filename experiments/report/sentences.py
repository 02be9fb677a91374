"""Every sentence of a report: headline, findings, next steps.

The words of a verdict are those of `mupax.experiments.sweep.verdict.Transfer`, and the
words for hyperparameters and their values those of `mupax.experiments.sweep.grids`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..sweep import grids, optima
from ..sweep.results import Population
from ..sweep.statistics import BASE
from ..sweep.verdict import SHARE, Transfer, Verdict, listed, percent
from .data import Axis, SweepData, Trained, finite, least

GUIDE = (
    "The cost is the share of the loss that the largest model gives up at the base's "
    "best value, with a 90 % interval (losses are compared seed by seed). A "
    f"hyperparameter transfers if the upper end is below {percent(SHARE)}. It does not "
    "transfer if the lower end is above it, and either the best value surely moves "
    "or the base's value surely costs less at the base. Nor does it transfer "
    "if the largest model diverges at the base's value, or learns nothing there with "
    "some seed. Otherwise the runs cannot tell. An octave is a factor of two."
)
MANY = 3  # the headline counts the hyperparameters if there are more
_MARKS = {True: "✓", False: "✗", None: "?"}


def tick(name: str, coordinate: float) -> str:
    """The label of a value on the axis of a picture.

    Examples:
      >>> tick("learning_rate", -5.0), tick("b1", 3.0), tick("warmup", 0.1)
      ('$2^{-5}$', '$1-2^{-3}$', '0.1')
    """
    match grids.unit(name):
        case "log2":
            return f"$2^{{{coordinate:g}}}$"
        case "log2(1-x)":
            return f"$1-2^{{{-coordinate:g}}}$" if coordinate else "0"
    return f"{coordinate:g}"


def loss(value: float) -> str:
    """A loss to three digits."""
    return f"{value:.3g}"


def capital(text: str) -> str:
    """The text with a capital first letter; the others stay."""
    return text[:1].upper() + text[1:]


# ----- One verdict.


def sign(transfer: Transfer) -> str:
    """The verdict as one character."""
    swept = transfer.verdict is not Verdict.ONE_SIZE
    return _MARKS[transfer.verdict.known] if swept else "–"


def unit(name: str) -> str:
    """The unit of a shift: "octaves" or "units"."""
    return "units" if grids.unit(name) == "linear" else "octaves"


def shift(transfer: Transfer) -> str:
    """The shift per doubling with its interval, "−0.98 [−1.05, −0.91]"."""
    slope, ends = transfer.trend.slope, transfer.trend.interval
    if not math.isfinite(slope):
        return "–"
    text = grids.signed(transfer.name, slope)
    if math.isfinite(ends[0]):
        low, high = (grids.signed(transfer.name, x) for x in ends)
        text += f" [{low}, {high}]"
    return text


def best(transfer: Transfer) -> list[tuple[int, str]]:
    """Each size and its best value."""
    values = [
        "nothing trained" if x is None else grids.text(transfer.name, x)
        for x in transfer.optima
    ]
    return list(zip(transfer.sizes, values, strict=True))


def moved(transfer: Transfer) -> str:
    """How the best value changes, or ""; with the shift per doubling of the size."""
    if not transfer.change_words:
        return ""
    per = f"{unit(transfer.name)} per doubling"
    return f"{transfer.change_words} ({shift(transfer)} {per})"


def phrase(transfers: Sequence[Transfer]) -> str:
    """The verdicts on one hyperparameter: "transfers across depth and …".

    The verdicts are of one parametrization.
    """
    most = max(transfers, key=_cost).at_most
    clauses: dict[tuple[str, str], list[str]] = {}
    for t in sorted(transfers, key=lambda t: t.verdict is not Verdict.TRANSFERS):
        reason = t.reason
        if t.verdict is Verdict.ONE_SIZE:
            clause, reason = "was not swept across", ""
        elif t.at_most:
            clause, reason = f"can be kept at a cost of {most} across", ""
        elif t.verdict.known is None:
            clause = "cannot be judged across"
        else:
            clause = (
                "transfers across" if t.verdict.known else "does not transfer across"
            )
        why = f" ({reason})" if reason else ""
        clauses.setdefault((clause, why), []).append(t.over)
    return listed(
        [f"{text} {listed(axes)}{why}" for (text, why), axes in clauses.items()]
    )


def _cost(transfer: Transfer) -> float:
    """The upper bound of a cost that seeds would not judge; 0 for others."""
    cost = transfer.regret
    return cost.high if transfer.at_most and cost is not None else 0.0


# ----- The whole sweep.


def headline(data: SweepData) -> str:
    """The verdict, in one sentence about the featured parametrization."""
    if all(dead(p) for p in data.populations):
        return "Nothing trained: every run of the sweep diverged."
    label = data.keys[data.main]
    if all(dead(p) for p in data.of(data.main)):
        return f"No answer: with {label}, nothing trained."
    transfers = featured(data)
    if not transfers:
        missing = "size" if data.names else "value of each hyperparameter"
        return f"No answer: with {label}, only one {missing} was swept."
    label = data.all_labels[min((t.key for t in transfers), key=len)]
    return f"With {label}, {_findings(data)}."


def _findings(data: SweepData) -> str:
    """The featured verdicts; of many hyperparameters, how many transfer."""
    transfers = featured(data)
    if len(data.names) <= MANY:
        groups = ([t for t in transfers if t.name == name] for name in data.names)
        return "; ".join(
            f"the {grids.noun(g[0].name)} {phrase(g)}" for g in groups if g
        )
    good = [grids.noun(name) for name in data.names if _all_transfer(transfers, name)]
    axes = listed(list(dict.fromkeys(t.over for t in transfers)))
    return (
        f"{len(good)} of {len(data.names)} hyperparameters transfer across {axes}"
        f"{f': {listed(good)}' if good else ''}"
    )


def featured(data: SweepData) -> list[Transfer]:
    """The verdicts of the featured parametrization along axes of several sizes."""
    return [t for t in data.shown if t.key in data.mains and len(t.sizes) > 1]


def dead(population: Population) -> bool:
    """Whether every run of a population diverged."""
    return bool(np.isnan(population.loss).all())


def at_base(data: SweepData) -> str:
    """The base's best values and its loss there, in a sentence."""
    population = data.at_base(data.main)
    size = f"The base (width {data.base.width}, depth {data.base.depth})"
    lowest = least(population)
    if lowest == math.inf:
        return f"{size} has no grid point at which every seed trained."
    values = [
        f"{grids.noun(n)} {value}"
        for n in data.names
        if (value := _base_value(data, n)) is not None
    ]
    at = f" at {listed(values)}" if values else ""
    return f"{size} trains best{at}; its least loss is {loss(lowest)}."


def _base_value(data: SweepData, name: str) -> str | None:
    population = data.at_base(data.main)
    if name not in population.axes:
        return None
    found = optima.optimum(population.cell(name))
    return None if found is None else grids.text(name, found.log2_lr)


def next_steps(data: SweepData) -> list[str]:
    """What to do next: one sentence for each step."""
    if all(dead(p) for p in data.of(data.main)):
        return [
            "Sweep smaller values of the "
            f"{listed([*map(grids.noun, data.names)]) or 'learning rate'}."
        ]
    transfers = featured(data)
    if not transfers:
        what = "two or more depths or widths"
        if not data.names:
            what = "two or more values of the learning rate"
        return [f"Sweep {what}."]
    # A transfer has trained its target with what these runs found.
    kept = "it keeps its runs"
    if data.command.startswith("mupax transfer"):
        kept = "give it a new --workdir"
    groups: dict[str, list[Transfer]] = {}
    for t in transfers:
        more = t.verdict is Verdict.SEEDS and t.seeds_needed
        kind = "seeds" if more else t.name if t.at_most else t.remedy
        groups.setdefault(kind, []).append(t)
    groups.pop("", None)
    steps = []
    for kind, group in groups.items():
        most = max(group, key=lambda t: (t.seeds_needed or 0, _cost(t)))
        order = most.remedy
        if kind == "seeds" and data.command.startswith("mupax "):
            flag = f"--config.sweep.seeds={most.seeds_needed}"
            order += f": run the command again with {flag}; {kept}"
        if most.verdict.known is None and not most.at_most:
            nouns = listed(list(dict.fromkeys(grids.noun(t.name) for t in group)))
            axes = listed(list(dict.fromkeys(t.over for t in group)))
            order = f"to judge the {nouns} across {axes}, {order}"
        steps.append(f"{capital(order)}.")
    good = [n for n in data.names if _all_transfer(transfers, n)]
    if good:
        values = [f"{grids.noun(n)}, {_base_value(data, n)}" for n in good]
        steps.insert(0, f"Use the base's best {listed(values)}, for larger models.")
    return steps


def _all_transfer(transfers: Sequence[Transfer], name: str) -> bool:
    verdicts = {t.verdict for t in transfers if t.name == name}
    return verdicts == {Verdict.TRANSFERS}


def groups(data: SweepData) -> list[dict[str, Any]]:
    """The rows of the table of verdicts, a group for each hyperparameter."""
    return [
        {
            "noun": capital(grids.noun(name)),
            "rows": [
                {
                    "label": data.all_labels[t.key],
                    "axis": t.over,
                    "sign": sign(t),
                    "words": _kept(t) or t.words,
                    "change": moved(t),
                    "best": best(t),
                    "featured": t.key in data.mains,
                }
                for t in data.shown
                if t.name == name
            ],
        }
        for name in data.names
    ]


def _kept(transfer: Transfer) -> str:
    """The bound of a cost that seeds would not judge, as in the headline; or ""."""
    if not transfer.at_most:
        return ""
    return (
        f"can be kept at a cost of {transfer.at_most} at {transfer.size_text()} "
        f"({transfer.reason} to tell more)"
    )


# ----- Pictures.


def title(data: SweepData, name: str, axis: Axis) -> str:
    """The finding about one hyperparameter along one axis, for its picture."""
    transfers = data.along_axis(name, axis)
    if all(all(x is None for x in t.optima) for t in transfers):
        return f"{capital(grids.noun(name))}: nothing trained"
    # The featured one first.
    transfers.sort(key=lambda t: t.key != data.main)
    clauses: dict[str, list[str]] = {}
    for t in transfers[:MANY]:
        clauses.setdefault(phrase([t]), []).append(data.keys[t.key])
    parts = [f"{clause} with {listed(labels)}" for clause, labels in clauses.items()]
    return f"The best {grids.noun(name)} {'; it '.join(parts)}"


# ----- The target and its baselines.


def score(data: SweepData, run: Trained) -> float | None:
    """Test accuracy, or test loss where it has none or predicts text; None: neither.

    None also if the run diverged.
    """
    if run.train_loss is None:
        return None
    return finite(run.test_loss if data.by_loss else run.test_accuracy)


def scored(data: SweepData, value: float | None, *, named: bool = True) -> str:
    """A `score` in words: "97.2% test accuracy", "a test loss of 1.52"."""
    if value is None:
        return "divergence"
    if not data.by_loss:
        share = f"{value + 1e-9:.1%}"  # a half is rounded up
        return f"{share} test accuracy" if named else share
    perplexity = ""
    if data.text:
        perplexity = f"perplexity {loss(math.exp(min(value, 700)))}"
    if not named:
        return loss(value)
    return f"a test loss of {loss(value)}" + (f" ({perplexity})" if perplexity else "")


def small_run(data: SweepData) -> Trained | None:
    """The baseline of the base's size."""
    return next((run for run in data.compared if run.baseline == BASE), None)


def way(data: SweepData, run: Trained) -> str:
    """How a baseline of the target's size was scaled."""
    if run.baseline == "sp":
        return "without mupax's scaling"
    return f"with {data.labels[run.baseline or '']}"


def compared(data: SweepData) -> str:
    """Whether the target "is better" than the base, "is no better", or neither.

    Test losses, or shares of test errors, that differ by less than `SHARE` are the
    same: each is of one run.
    """
    small = small_run(data)
    assert data.trained is not None
    large, before = score(data, data.trained), score(data, small) if small else None
    if large is None or before is None:
        return "is better"
    if not data.by_loss:
        large, before = 1 - large, 1 - before
    if abs(large - before) < SHARE * before:
        return "is about as good"
    return "is better" if large < before else "is worse"


def result(data: SweepData) -> str:
    """The verdict and the result of the target in one sentence; "" without a target."""
    target, small = data.trained, small_run(data)
    if target is None:
        return ""
    other = next((run for run in data.compared if run.baseline != BASE), None)
    reached = score(data, target)
    large = (
        f"a network {_times(target, small)} times larger" if small else "a large one"
    )
    that = "those" if data.names[1:] else "that"
    found = _findings(data) or "no second size was swept"
    with_it = f"{capital(found)}. With {that} of a small network, {large}"
    if target.train_loss is None:
        return f"{with_it} diverges."
    if reached is None:
        return f"{with_it} reaches a training loss of {loss(target.train_loss)}."
    unscaled = ""
    if other is not None:
        known = scored(data, score(data, other), named=False)
        known = known if other.train_loss is not None else "it diverges"
        unscaled = f"; {way(data, other)}, {known}"
    if small is None:
        return f"{with_it} reaches {scored(data, reached)}{unscaled}."
    before = score(data, small)
    verb = compared(data)
    return (
        f"{with_it} {verb}: {scored(data, reached)} instead of "
        f"{scored(data, before, named=False)}{unscaled}."
    )


def target(data: SweepData) -> str:
    """The target's result in one sentence; "" if none was trained."""
    trained = data.trained
    if trained is None:
        return ""
    name = f"The target (width {trained.sizes.width}, depth {trained.sizes.depth})"
    rate = f"{trained.learning_rate:.2g}"
    train = finite(trained.train_loss)
    if train is None:
        again = "Train it again at a lower one."
        return f"{name} diverged at the transferred learning rate {rate}. {again}"
    reached = score(data, trained)
    text = f"training loss {loss(train)}" if reached is None else scored(data, reached)
    compare = ""
    if small_run(data) is None:
        compare = (
            " To learn whether it is better than the small network, train that too: "
            "--config.target.compare=\"('base',)\"."
        )
    return (
        f"{name}, trained once at the transferred learning rate {rate}, reaches "
        f"{text}.{compare}"
    )


def _times(large: Trained, small: Trained) -> str:
    ratio = large.parameters / max(1, small.parameters)
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"

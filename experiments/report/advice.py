"""The next steps after a sweep: where to train the target, which runs to repeat."""

import math

from ..sweep import optima
from ..sweep.verdict import Verdict, listed
from . import findings, names, words
from .data import SweepData, least


def at_base(data: SweepData) -> str:
    """The base's best values and its loss there, in a sentence."""
    population = data.at_base(data.main)
    size = f"The base (width {data.base.width}, depth {data.base.depth})"
    loss = least(population)
    if loss == math.inf:
        return f"{size} has no grid point at which every seed trained."
    best = [
        f"{names.noun(n)} {names.value(n, fit.log2_lr)}"
        for n in data.names
        if n in population.axes and (fit := optima.optimum(population.cell(n)))
    ]
    at = f" at {listed(best)}" if best else ""
    return f"{size} trains best{at}; its least loss is {findings.loss(loss)}."


def advice(data: SweepData) -> list[str]:
    """Where to train the target, and which runs to repeat."""
    sentences = [at_base(data)]
    predictions = {n: words.prediction(data, n, data.main) for n in data.names}
    parts = [f"{names.noun(n)} at {text}" for n, text in predictions.items() if text]
    if parts:
        sentences.append(f"At {words.target(data)}, expect the best {listed(parts)}.")
    transfers = words.featured(data)
    for verdict, remedy in (
        (Verdict.SEEDS, "with more seeds"),
        (Verdict.GRID, "on a finer grid"),
    ):
        axes = dict.fromkeys(t.axis for t in transfers if t.verdict is verdict)
        if axes:
            over = listed(list(axes))
            sentences.append(f"For a verdict over {over}, sweep again {remedy}.")
    edge = dict.fromkeys(names.noun(t.name) for t in transfers if t.at_edge)
    if edge:
        sentences.append(f"Widen the grid of {listed(list(edge))}.")
    return sentences


def contrast(data: SweepData) -> str:
    """The verdicts of SP, or of the first other parametrization, in a sentence."""
    others = [key for key in data.keys if key != data.main]
    if not others or all(words.dead(p) for p in data.populations):
        return ""
    key = next((k for k in others if k.split(",")[0] == "sp"), others[0])
    label = data.keys[key]
    if all(words.dead(p) for p in data.of(key)):
        return f"With {label}, nothing trained."
    parts = []
    for name in data.names[: words.MANY]:
        transfers = [
            t
            for t in data.transfers
            if (t.key, t.name) == (key, name) and len(t.sizes) > 1
        ]
        if transfers:
            parts.append(f"the {names.noun(name)} {words.phrase(transfers)}")
    return f"With {label}, {'; '.join(parts)}." if parts else ""

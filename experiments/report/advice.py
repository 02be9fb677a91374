"""What to do with a sweep: where to train, what to run next."""

import math

from ..sweep.verdict import Verdict, listed
from . import findings, names
from .data import SweepData, least
from .words import MANY, dead, every, phrase, prediction, target


def at_base(data: SweepData) -> str:
    """Where the base does best, in a sentence."""
    population = data.at_base(data.main)
    size = f"The base (width {data.base.width}, depth {data.base.depth})"
    loss = least(population)
    if loss == math.inf:
        return f"{size} has no point of the grid at which every seed trained."
    where = (data.main, data.base.width, data.base.depth)
    best = [
        f"{names.noun(n)} {names.value(n, found.log2_lr)}"
        for n in data.names
        if (found := data.lines(n).optima.get(where)) is not None
    ]
    at = f" at {listed(best)}" if best else ""
    return f"{size} trains best{at}; its least loss is {findings.loss(loss)}."


def advice(data: SweepData) -> list[str]:
    """What to do with it: where to train the target, what to run next."""
    out = [at_base(data)]
    found = {n: prediction(data, n, data.main) for n in data.names}
    parts = [f"{names.noun(n)} at {text}" for n, text in found.items() if text]
    if parts:
        out.append(f"At {target(data)}, expect the best {listed(parts)}.")
    mine = [v for v in every(data) if v.key == data.main and len(v.sizes) > 1]
    unsure = dict.fromkeys(v.axis for v in mine if v.verdict is Verdict.SEEDS)
    if unsure:
        axes = listed(list(unsure))
        out.append(f"To tell across {axes}, run it again with more seeds.")
    edge = dict.fromkeys(v.name for v in mine if v.told["at_edge"])
    if edge:
        out.append(f"Widen the grid of {listed([names.noun(n) for n in edge])}.")
    return out


def contrast(data: SweepData) -> str:
    """What the first other parametrization does with the same hyperparameters."""
    others = [key for key in data.keys if key != data.main]
    if not others or all(dead(p) for p in data.populations):
        return ""
    key = next((k for k in others if k.split(",")[0] == "sp"), others[0])
    label = data.keys[key]
    if all(dead(p) for p in data.of(key)):
        return f"With {label}, nothing trained."
    parts = []
    for name in data.names[:MANY]:
        found = [
            v
            for v in every(data)
            if v.name == name and v.key == key and len(v.sizes) > 1
        ]
        if found:
            parts.append(f"the {names.noun(name)} {phrase(found)}")
    return f"With {label}, {'; '.join(parts)}." if parts else ""

"""Tables of runs, small enough to commit: a figure is drawn from them without training.

A table is a CSV file with a line for each run. A comment above them holds the facts
that all runs share: epochs, sizes and settings. Words are made when it is read.
"""

import csv
import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mupax.experiments.errors import UserError
from mupax.experiments.io import csv_text, write_durably
from mupax.experiments.report import SweepData
from mupax.experiments.sweep.results import Population, Sizes, key_of
from mupax.experiments.sweep.space import LABELS, subject
from mupax.experiments.sweep.tasks import Task

# Points of a learning curve in a table: each is the mean over a 20th of the run.
SPANS = 20
_FIXED = ("parametrization", "width", "depth")


@dataclasses.dataclass(frozen=True)
class Table:
    """The runs of a sweep, and the facts that they share.

    Attributes:
      data: the populations; sizes, labels and steps.
      facts: JSON-ready: "epochs", "guess" (chance-level loss), "settings" (which
        determine the losses), "base", "featured", "command" and "measured" (a date).
    """

    data: SweepData
    facts: Mapping[str, Any]

    @property
    def length(self) -> str:
        """Steps, sizes and seeds: "300 steps (0.4 epochs), width 64, depth 8, ..."."""
        seeds = sorted({len(p.loss) for p in self.data.populations}) or [0]
        number = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
        widths = ", ".join(map(str, sorted({p.width for p in self.data.populations})))
        depths = ", ".join(map(str, sorted({p.depth for p in self.data.populations})))
        wide = f"width {widths}, depth {depths}"
        steps = f"{self.data.steps:,} steps"
        if self.facts.get("epochs"):
            steps += f" ({self.facts['epochs']:.3g} epochs)"
        return f"{steps}, {wide}, {number} seeds"


def facts(data: SweepData, *, epochs: float | None, measured: str) -> dict[str, Any]:
    """The facts of a new table.

    `epochs` is how often a run sees each example, None for text; `measured`, the date.
    """
    settings = data.settings["config"]
    return {
        "epochs": epochs,
        "guess": next((p.guess for p in data.populations), None),
        "base": list(data.base),
        "featured": data.featured,
        "command": data.command,
        "measured": measured,
        "settings": {k: v for k, v in settings.items() if k != "sweep"},
    }


def text(populations: Sequence[Population], shared: Mapping[str, Any]) -> str:
    """The table as CSV. All runs have the same hyperparameters and choices."""
    choices = list(dict.fromkeys(k for p in populations for k in p.choices))
    names = dict.fromkeys(k for p in populations for k in p.axes)
    axes = {
        k: sorted({float(_grid(x)) for p in populations for x in p.axes.get(k, ())})
        for k in names
    }
    head = {**shared, "choices": choices, "axes": axes}
    spans = [f"at_{(i + 1) / SPANS:g}" for i in range(SPANS)]
    rows: list[list[Any]] = [[*_FIXED, *choices, *axes, "seed", "loss", *spans]]
    for p in sorted(populations, key=lambda p: (p.parametrization, *p.sizes)):
        curves = _coarse(p.curves).reshape(-1, SPANS)
        for run, loss, curve in zip(p.rows(), p.loss.flat, curves, strict=True):
            fixed = [run[k] for k in _FIXED]
            chosen = [json.dumps(run.get(k)) for k in choices]
            values = [_grid(run[k]) for k in axes]
            losses = [_short(x) for x in (loss, *curve)]
            rows.append([*fixed, *chosen, *values, run["seed"], *losses])
    return f"# {json.dumps(head, ensure_ascii=False)}\n{csv_text(rows)}"


def _coarse(curves: np.ndarray) -> np.ndarray:
    """Learning curves in `SPANS` parts, the means of the finer ones."""
    count = curves.shape[-1]
    if count < SPANS or count % SPANS:
        ends = np.linspace(0, count, SPANS + 1)
        at = np.minimum(((ends[:-1] + ends[1:]) / 2).astype(int), count - 1)
        return curves[..., at]
    return curves.reshape(*curves.shape[:-1], SPANS, -1).mean(axis=-1)


def _grid(value: float) -> str:
    return f"{value:.10g}"


def _short(loss: float) -> str:
    """Five digits; empty where the run diverged."""
    return f"{loss:.5g}" if math.isfinite(loss) else ""


def parse(csv_text: str, where: str) -> Table:
    """The inverse of `text`.

    The first seeds are used for which every size of a parametrization has its whole
    grid: sizes are compared seed by seed. Populations without any are left out.

    Raises:
      UserError: it is not such a table; names the file, `where`.
    """
    head, _, body = csv_text.partition("\n")
    try:
        shared = json.loads(head.removeprefix("# "))
        choices, axes = shared.pop("choices"), shared.pop("axes")
        groups: dict[tuple[Any, ...], list[dict[str, str]]] = {}
        for row in csv.DictReader(io.StringIO(body)):
            key = (row["parametrization"], int(row["width"]), int(row["depth"]))
            chosen = tuple(row[k] for k in choices)
            groups.setdefault((*key, chosen), []).append(row)
        guess = shared["guess"]
        parsed = [_population(*x, choices, axes, guess) for x in groups.items()]
        seeds: dict[str, int] = {}
        for p, whole in parsed:
            if whole:
                seeds[p.key()] = min(whole, seeds.get(p.key(), whole))
        populations = [_first(p, seeds[p.key()]) for p, whole in parsed if whole]
        featured, held = shared["featured"], [p.parametrization for p in populations]
        if held and featured not in held:  # it has not been trained yet
            featured = held[0]
        data = SweepData(
            populations=populations,
            base=Sizes(*shared["base"]),
            labels={key: LABELS.get(key, key) for key in held},
            featured=featured,
            steps=shared["settings"]["steps"],
            settings={"config": shared["settings"]},
            subject=subject(shared["settings"]),
            command=shared["command"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where} is not a table of runs ({type(error).__name__}: {error}); remove "
            "it and run the figure again"
        ) from None
    return Table(data, shared)


def _first(population: Population, seeds: int) -> Population:
    """The first seeds of a population."""
    loss, curves = population.loss[:seeds], population.curves[:seeds]
    return dataclasses.replace(population, loss=loss, curves=curves)


def _population(
    key: tuple[Any, ...],
    rows: list[dict[str, str]],
    choices: list[str],
    grid: dict[str, list[float]],
    guess: float | None,
) -> tuple[Population, int]:
    """A population, and how many of its first seeds have the whole grid."""
    name, width, depth, chosen = key
    shape = (1 + max(int(row["seed"]) for row in rows), *map(len, grid.values()))
    loss, curves = np.full(shape, np.nan), np.full((*shape, SPANS), np.nan)
    there = np.zeros(shape, bool)
    for row in rows:
        at = (int(row["seed"]), *(grid[k].index(float(row[k])) for k in grid))
        values = [float(x) if x else np.nan for x in list(row.values())[-SPANS - 1 :]]
        loss[at], curves[at], there[at] = values[0], values[1:], True
    seeds = int(there.reshape(shape[0], -1).all(axis=1).cumprod().sum())
    chosen = {k: json.loads(v) for k, v in zip(choices, chosen, strict=True)}
    label = f"{name}-w{width}-d{depth}"
    axes = {k: list(values) for k, values in grid.items()}
    found = Population(
        label, name, width, depth, chosen, axes, loss, curves, 0.0, guess
    )
    return found, seeds


def read(path: pathlib.Path) -> Table | None:
    """A table, or None where there is no such file.

    Raises:
      UserError: it is not a table.
    """
    try:
        return parse(path.read_text(), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def add(path: pathlib.Path, data: SweepData, shared: Mapping[str, Any]) -> Table:
    """Write the runs of a sweep into its table, and return the new table.

    Populations that `data` lacks stay if their settings are the same.

    Args:
      path: the table's file.
      data: the sweep's results.
      shared: the facts, from `facts`.
    """
    populations = list(data.populations)
    old = read(path)
    if old is not None and same_settings(old, shared["settings"]):
        new = {_key(p) for p in populations}
        kept = [p for p in old.data.populations if _key(p) not in new]
        axes = {tuple(p.axes) for p in (*kept, *populations)}
        populations = [*kept, *populations] if len(axes) == 1 else populations
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text(populations, shared))
    table = read(path)
    assert table is not None
    return table


def same_settings(table: Table, settings: Mapping[str, Any]) -> bool:
    """Whether a table's runs have these settings, of `SweepConfig.settings`."""
    own = {k: v for k, v in settings.items() if k != "sweep"}
    return bool(table.facts["settings"] == json.loads(json.dumps(own)))


def _key(runs: Population | Task) -> tuple[Any, ...]:
    chosen = json.dumps(dict(runs.choices), sort_keys=True)
    return runs.parametrization, runs.width, runs.depth, chosen


# ----- Parts of a table, for a figure.


def only(data: SweepData, keys: Iterable[str]) -> SweepData:
    """The runs of some parametrizations; see `is_among`."""
    keys = set(keys)
    kept = [p for p in data.populations if is_among(keys, p)]
    held = {p.parametrization for p in kept}
    labels = {k: v for k, v in data.labels.items() if k in held}
    featured = data.featured if data.featured in held else kept[0].parametrization
    return dataclasses.replace(data, populations=kept, labels=labels, featured=featured)


def is_among(keys: Iterable[str], runs: Population | Task) -> bool:
    """Whether runs are among keys: "mup", or of one choice "mup, model.norm=batch"."""
    whole = key_of(runs.parametrization, runs.choices)
    return any(key in (runs.parametrization, whole) for key in keys)


def of_tasks(data: SweepData, tasks: Iterable[Task]) -> SweepData:
    """The runs of some tasks."""
    keys = {_key(task) for task in tasks}
    kept = [p for p in data.populations if _key(p) in keys]
    return dataclasses.replace(data, populations=kept)


def covers(table: Table, tasks: Iterable[Task], seeds: int) -> bool:
    """Whether a table, of the same settings, holds all runs of so many seeds."""
    return all(seeds_of(table, task) >= seeds for task in tasks)


def seeds_of(table: Table, task: Task) -> int:
    """The number of seeds for which a table, of the same settings, has the task."""
    held = next((p for p in table.data.populations if _key(p) == _key(task)), None)
    if held is None or list(held.axes) != list(task.grid):
        return 0
    for name, values in task.grid.items():
        own = held.axes[name]
        if len(own) != len(values) or not np.allclose(own, values, 1e-6, 0):
            return 0
    return len(held.loss)


def after(table: Table, data: SweepData, seeds: int) -> SweepData:
    """Runs of later seeds, after the table's first `seeds` of the same population."""
    known = {_key(p): p for p in table.data.populations}
    joined = []
    for p in data.populations:
        first = known[_key(p)]
        old = _first(first, seeds)
        loss = np.concatenate([old.loss, p.loss])
        curves = np.concatenate([_coarse(old.curves), _coarse(p.curves)])
        joined.append(dataclasses.replace(p, loss=loss, curves=curves))
    return dataclasses.replace(data, populations=joined)

"""The space of a sweep: from a config to grids, sizes, choices, and their runs."""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from mupax import optim
from mupax.zoo.registry import default_options

from ..errors import UserError
from ..run.checks import (
    LARGEST,
    MOST,
    Check,
    number,
    optional,
    options,
    several,
    shown,
    text,
    whole,
)
from ..run.config import (
    SECTIONS,
    Named,
    RunConfig,
    defaults,
    parse,
    plain,
    retargeted,
    sectionless,
    tunable,
)
from . import grids
from .engine import Limits
from .statistics import Sizes
from .tasks import Job

# Values of a learning rate's default grid, a factor of two apart.
_VALUES = 7
_MOST_RUNS = 1_000_000
_KEY = re.compile(r"[A-Za-z0-9_.+-]{1,60}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep: the run at its base, and what is varied.

    Attributes:
      base: the run at the base's size, for the sweep's steps.
      parametrizations: what is swept, by key.
      widths: swept at the base's depth, rising.
      depths: swept at the base's width.
      axes: the hyperparameters and their values; the learning rate comes first.
      choices: combinations of other keys' values; one empty one where there are none.
      seeds: runs of each grid point.
      average_last: a run's final loss is the mean over so many last steps.
      tradeoff: numbers of parameters, or (width, depth) pairs.
      limits: of memory, and how runs are stopped.
      featured: key of the parametrization that reports are about.
      target: the run at the target's size, before it is tuned; None for none.
    """

    base: RunConfig
    parametrizations: Mapping[str, Named]
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    axes: Mapping[str, tuple[float, ...]]
    choices: tuple[Mapping[str, Any], ...]
    seeds: int
    average_last: int
    tradeoff: tuple[int | tuple[int, int], ...]
    limits: Limits
    featured: str
    target: RunConfig | None

    @property
    def sizes(self) -> Sizes:
        """The base's width and depth."""
        return sizes_of(self.base)

    @property
    def target_sizes(self) -> Sizes | None:
        """The target's width and depth."""
        return None if self.target is None else sizes_of(self.target)

    def settings(self) -> dict[str, Any]:
        """What a run directory is claimed for, as JSON-ready data."""
        found = self.base.decisive() | {"seed": self.base.seed}
        for key in ("parametrization", "learning_rate"):  # each run has its own
            del found[key]
        section = {
            "parametrizations": {
                key: value.plain() for key, value in self.parametrizations.items()
            },
            "axes": {k: list(v) for k, v in self.axes.items()},
            "choices": [dict(choice) for choice in self.choices],
            **{
                key: plain(getattr(self, key))
                for key in ("widths", "depths", "seeds", "average_last", "tradeoff")
            },
        }
        return {**found, "sweep": section}


def sizes_of(config: RunConfig) -> Sizes:
    """A run's width and depth."""
    return Sizes(config.model.options["width"], config.model.options["depth"])


_CHECKS: dict[str, Check] = {
    "widths": several,
    "depths": several,
    "axes": options,
    "choices": several,
    "parametrizations": options,
    "only": several,
    "seeds": whole(1, 10_000),
    "steps": optional(whole()),
    "average_last": optional(whole()),
    "tradeoff": several,
    "memory_share": number(0, 1, above=True),
    "lanes": whole(0),
}


def parse_sweep(config: ConfigDict | Mapping[str, Any]) -> SweepConfig:
    """Check the config of a sweep and freeze it.

    A training config is a sweep of its base's learning rate.

    Raises:
      UserError: in one sentence, naming the key.
    """
    given = plain(config)
    section = _section(given)
    swept = sectionless(given)
    if (rate := swept.get("learning_rate")) is None and not swept.get("transfer_from"):
        swept["learning_rate"] = 1.0  # every run's comes from the grid
    run = parse(swept)
    base = _at_base(run)
    if section["steps"] is not None:
        base = retargeted(base, [("steps", section["steps"])])
    limits = Limits(section["memory_share"], section["lanes"])
    average = section["average_last"] or max(1, base.steps // 4)
    if average > base.steps:
        raise UserError(
            f"sweep.average_last={average} is more than the {base.steps} steps of a "
            "run (sweep.steps)"
        )
    parametrizations = _parametrizations(section, run)
    featured = _featured(given, parametrizations, run)
    base = dataclasses.replace(base, parametrization=parametrizations[featured])
    found = SweepConfig(
        base=base,
        parametrizations=parametrizations,
        widths=_sizes("widths", section, sizes_of(base).width),
        depths=_sizes("depths", section, sizes_of(base).depth),
        axes=_axes(section, base, None if rate is None else run.learning_rate),
        choices=tuple(_choices(section, base)),
        seeds=section["seeds"],
        average_last=average,
        tradeoff=_tradeoff(section),
        limits=limits,
        featured=featured,
        target=_target(given, run, base, parametrizations[featured]),
    )
    runs = found.seeds
    for values in found.axes.values():
        runs *= len(values)
    if runs > _MOST_RUNS:
        raise UserError(
            f"sweep.axes and sweep.seeds make {runs} runs of each size; at most "
            f"{_MOST_RUNS} are allowed"
        )
    examples = base.steps * base.batch_size * found.seeds
    if examples > MOST:
        raise UserError(
            f"the sweep's runs take {examples} examples (steps, batch_size and "
            f"sweep.seeds); it holds the order of all of them, {MOST} at most: make "
            "sweep.steps smaller"
        )
    return found


def _section(given: Mapping[str, Any]) -> dict[str, Any]:
    wanted = plain(defaults("sweep").sweep)
    section = options("sweep", given.get("sweep", {}))
    for key in section:
        if key not in wanted:
            raise UserError(
                f"the config has no key sweep.{key}; there are {', '.join(wanted)}"
            )
    wanted |= section
    return {key: check(f"sweep.{key}", wanted[key]) for key, check in _CHECKS.items()}


def _at_base(run: RunConfig) -> RunConfig:
    """The run with the model at its base's size."""
    sizes = {}
    for key in ("width", "depth"):
        size = getattr(run, f"base_{key}") or _own_size(run, key)
        if size is None:
            raise UserError(
                f"the config gives {run.model.name} no {key}; set model.{key}, the "
                "base's"
            )
        sizes[key] = size
    return dataclasses.replace(
        run.sized(sizes["width"], sizes["depth"]),
        base_width=sizes["width"],
        base_depth=sizes["depth"],
    )


def _own_size(run: RunConfig, key: str) -> int | None:
    """The model's width or depth, as the config or else the zoo has it."""
    return {**default_options(run.model.name), **run.model.options}.get(key)


def _sizes(name: str, section: Mapping[str, Any], base: int) -> tuple[int, ...]:
    found = section[name]
    for size in found:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UserError(
                f"sweep.{name} holds {shown(size)}; it must be a whole number, at "
                "least 1"
            )
        whole(1, LARGEST)(f"sweep.{name}", size)
    if len(set(found)) < len(found):
        raise UserError(f"sweep.{name} is {shown(found)}; it has a size twice")
    if found and base not in found:
        raise UserError(
            f"sweep.{name} is {shown(found)} and lacks the base's {base}, where the "
            "two axes cross; add it"
        )
    return tuple(sorted(found)) or (base,)


def _parametrizations(section: Mapping[str, Any], run: RunConfig) -> dict[str, Named]:
    given = section["parametrizations"]
    if not given:
        return {run.parametrization.name: run.parametrization}
    only = section["only"]
    for key in only:
        if key not in given:
            raise UserError(
                f"sweep.only has {shown(key)}, which sweep.parametrizations lacks; "
                f"there are {', '.join(given)}"
            )
    found = {}
    for key, value in given.items():
        name = f"sweep.parametrizations.{key}"
        if not _KEY.fullmatch(key):
            raise UserError(
                f"{shown(name)}: a key names files; use at most 60 letters, digits, "
                "'_', '.', '+' and '-'"
            )
        chosen = options(name, value)
        if "name" not in chosen:
            raise UserError(f"{name} lacks a name")
        made = Named(text(f"{name}.name", chosen.pop("name")), chosen)
        try:
            optim.parametrization(made.name, **made.options)
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}: {error}") from None
        if not only or key in only:
            found[key] = made
    return found


def _featured(
    given: Mapping[str, Any], known: Mapping[str, Named], run: RunConfig
) -> str:
    """The parametrization of the target; else the config's own, or the last."""
    wanted = options("target", given.get("target", {})).get("parametrization")
    if isinstance(wanted, str) and wanted in known:
        return wanted
    mine = (key for key, value in known.items() if value == run.parametrization)
    return next(mine, list(known)[-1])


def _axes(
    section: Mapping[str, Any], base: RunConfig, rate: float | None
) -> dict[str, tuple[float, ...]]:
    """The swept hyperparameters and their values; the learning rate comes first."""
    given = {k: grid for k, grid in section["axes"].items() if grid not in (None, "")}
    known = tunable(base.optimizer.name)
    for name in given:
        if name not in known:
            raise UserError(
                f"sweep.axes has {name!r}, which is no hyperparameter of "
                f"{base.optimizer.name!r} that is a number; there are "
                f"{', '.join(known)}; anything else goes into sweep.choices, as "
                "(('schedule.name', ('constant', 'cosine')),)"
            )
    if "learning_rate" not in given:
        if rate is None:
            raise UserError(
                "sweep.axes lacks learning_rate, and the config has none to sweep "
                "around; write a grid, as sweep.axes.learning_rate='2**[-12:-3:1]'"
            )
        half = _VALUES // 2
        given["learning_rate"] = [rate * 2.0**i for i in range(-half, half + 1)]
    found = {name: grids.parse(name, grid) for name, grid in given.items()}
    for name, values in found.items():
        grids.check_range(name, values)
    rates = found.pop("learning_rate")
    if len(rates) < 3:
        raise UserError(
            f"sweep.axes.learning_rate is {given['learning_rate']!r}; an optimum needs "
            "at least three learning rates to stand between, as '2**[-12:-3:1]'"
        )
    return {"learning_rate": rates, **found}


def _choices(section: Mapping[str, Any], base: RunConfig) -> list[dict[str, Any]]:
    """The combinations of other keys; one empty one where nothing is chosen."""
    given = section["choices"]
    try:
        pairs = [(str(key), tuple(values)) for key, values in given]
    except (TypeError, ValueError):
        raise UserError(
            f"sweep.choices is {shown(given)}; write pairs of a config key and its "
            "values, as (('schedule.name', ('constant', 'cosine')),)"
        ) from None
    for key, values in pairs:
        if key.split(".")[0] not in ("model", "optimizer", "schedule", "batch_size"):
            raise UserError(
                f"sweep.choices has {shown(key)}; it can choose model.*, optimizer.*, "
                "schedule.* and batch_size"
            )
        for value in values:
            retargeted(base, [(key, value)])
    names = [key for key, _ in pairs]
    products = itertools.product(*(values for _, values in pairs))
    return [dict(zip(names, values, strict=True)) for values in products]


def _tradeoff(section: Mapping[str, Any]) -> tuple[int | tuple[int, int], ...]:
    """Numbers of parameters, or (width, depth) pairs."""
    given = section["tradeoff"]
    found: list[int | tuple[int, int]] = []
    for entry in given:
        sizes = entry if isinstance(entry, tuple | list) else (entry,)
        counts = all(isinstance(x, int) and x is not True and x > 0 for x in sizes)
        if not counts or len(sizes) not in (1, 2):
            raise UserError(
                f"sweep.tradeoff is {shown(given)}; write numbers of parameters, as "
                "(30_000, 120_000), or pairs of width and depth, as ((90, 4), (64, 8))"
            )
        found.append((sizes[0], sizes[1]) if len(sizes) == 2 else sizes[0])
    return tuple(found)


def _target(
    given: Mapping[str, Any], run: RunConfig, base: RunConfig, point: Named
) -> RunConfig | None:
    """The run at the target's size; the config's own model where it is larger."""
    section = options("target", given.get("target", {}))
    wanted = section.pop("parametrization", None)
    swept = given.get("sweep", {}).get("parametrizations") or {point.name: 0}
    if wanted is not None and wanted not in swept:
        raise UserError(
            f"target.parametrization={shown(wanted)} is not one of the swept ones: "
            f"{', '.join(swept)}"
        )
    for key in SECTIONS:
        if key in section:
            raise UserError(f"target.{key}: a target has no sections of its own")
    changes = []
    for key, value in section.items():
        if value is None:
            continue
        if key in ("width", "depth"):
            whole()(f"target.{key}", value)
            changes.append((f"model.{key}", value))
        elif isinstance(value, Mapping):
            changes += [(f"{key}.{name}", x) for name, x in value.items()]
        else:
            changes.append((key, value))
    own = run.sized(_own_size(run, "width") or 0, _own_size(run, "depth") or 0)
    if "target" not in given and sizes_of(base) == sizes_of(own):
        return None
    own = dataclasses.replace(
        own, base_width=base.base_width, base_depth=base.base_depth
    )
    try:
        found = retargeted(own, changes)
    except UserError as error:
        raise UserError(f"target: {error}") from None
    return dataclasses.replace(found, parametrization=point)


def jobs(config: SweepConfig) -> list[Job]:
    """Both axes of size under every parametrization and choice, the cross once."""
    base = config.sizes
    shapes = {(base.width, depth) for depth in config.depths}
    shapes |= {(width, base.depth) for width in config.widths}
    return [
        Job(
            key,
            dataclasses.replace(
                retargeted(config.base, chosen.items()), parametrization=point
            ).sized(width, depth),
            tuple(config.axes.items()),
            config.seeds,
            config.average_last,
            tuple(chosen.items()),
        )
        for key, point in config.parametrizations.items()
        for chosen in config.choices
        for width, depth in sorted(shapes)
    ]

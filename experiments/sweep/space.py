"""The config of a sweep, parsed once: sizes, hyperparameters, choices, tasks."""

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from mupax import optim
from mupax.zoo.addresses import public
from mupax.zoo.registry import default_options

from .. import report
from ..checks import (
    LARGEST,
    MOST,
    Check,
    flag,
    number,
    optional,
    options,
    several,
    shown,
    text,
    texts,
    whole,
)
from ..errors import UserError, nearest
from ..run.config import (
    KEYS,
    SECTIONS,
    Component,
    RunConfig,
    defaults,
    parse,
    plain,
    with_keys,
    without_sections,
)
from ..run.hyperparameters import check_schedule, tunable
from . import grids
from .engine import Limits
from .results import Sizes
from .statistics import BASE
from .tasks import ZooTask

# Names of parametrizations in reports, by key.
LABELS = {
    "sp": "Standard (SP)",
    "half_alpha": "α = ½, γ = 0",
    "no_depth_scaling": "No depth scaling",
    "ode": "ODE",
    "depth_mup": "Depth-μP",
    "mup": "μP",
    "completep": "CompleteP",
}

_DEFAULT_VALUES = 7  # of a learning rate without a grid, a factor of two apart
_MOST_RUNS = 1_000_000
_CHOSEN = ("model", "optimizer", "schedule", "batch_size", "steps")
_KEY = re.compile(r"[A-Za-z0-9_.+-]{1,60}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep: the run at its base, and the values that are swept."""

    base: RunConfig  # at the base's size, with the sweep's number of steps
    parametrizations: Mapping[str, Component]
    widths: tuple[int, ...]  # at the base's depth, rising
    depths: tuple[int, ...]  # at the base's width, rising
    axes: Mapping[str, tuple[float, ...]]  # of hyperparameters, learning rate first
    base_axes: Mapping[str, tuple[float, ...]]  # factors of groups, tuned at the base
    choices: tuple[Mapping[str, Any], ...]  # combinations of other keys, at least {}
    seeds: int  # runs of each grid point
    average_last: int  # a run's final loss is the mean over so many last steps
    limits: Limits
    featured: str  # key of the parametrization that reports are about
    target: RunConfig | None  # at the target's size, before it is tuned
    equal_examples: bool = False  # each batch size takes the base's number of examples
    compare: tuple[str, ...] = ()  # baselines: "base", or keys of `parametrizations`

    @property
    def sizes(self) -> Sizes:
        """The base's width and depth."""
        return sizes_of(self.base)

    def settings(self) -> dict[str, Any]:
        """The settings that all runs of a run directory share, as JSON-ready data."""
        settings = self.base.loss_settings() | {"seed": self.base.seed}
        for key in ("parametrization", "learning_rate"):  # each run has its own
            del settings[key]
        section = {
            "parametrizations": {
                key: value.plain() for key, value in self.parametrizations.items()
            },
            "axes": {name: list(values) for name, values in self.axes.items()},
            "base_axes": {name: list(grid) for name, grid in self.base_axes.items()},
            "choices": public([dict(choice) for choice in self.choices]),
            "widths": list(self.widths),
            "depths": list(self.depths),
            "seeds": self.seeds,
            "average_last": self.average_last,
        }
        if self.equal_examples:
            section["equal_examples"] = True
        return {**settings, "sweep": section}


def sizes_of(config: RunConfig) -> Sizes:
    """A run's width and depth."""
    return Sizes(config.model.options["width"], config.model.options["depth"])


def tasks(config: SweepConfig) -> list[ZooTask]:
    """A task for each size, parametrization and choice; the base's size comes once."""
    base = config.sizes
    shapes = {(base.width, depth) for depth in config.depths}
    shapes |= {(width, base.depth) for width in config.widths}
    return [
        ZooTask(
            key,
            dataclasses.replace(chosen, parametrization=value).sized(width, depth),
            config.axes,
            config.seeds,
            max(1, round(config.average_last * chosen.steps / config.base.steps)),
            choice,
        )
        for key, value in config.parametrizations.items()
        for choice in config.choices
        for chosen in [_chosen(config, choice)]
        for width, depth in sorted(shapes)
    ]


def described(config: SweepConfig, command: Sequence[str] = ()) -> report.SweepData:
    """A report without runs; `command` is the command line that makes it again."""
    return report.SweepData(
        base=config.sizes,
        steps=config.base.steps,
        labels={
            key: LABELS.get(
                key, optim.parametrization(value.name, **value.options).name
            )
            for key, value in config.parametrizations.items()
        },
        featured=config.featured,
        subject=subject(config.settings()),
        settings={"config": config.settings()},
        command=shlex.join(map(public, command)),
    )


def subject(settings: Mapping[str, Any]) -> str:
    """What runs of these settings train, e.g. "resmlp on digits, adam".

    Factors of groups of parameters follow, e.g. "hidden: 8 x learning rate".
    """
    model, optimizer = settings["model"]["name"], settings["optimizer"]["name"]
    factors = [
        f"{name}: {value:g} x {grids.noun(factor)}"
        for name, group in settings.get("modules", {}).items()
        for factor, value in group.items()
        if factor != "pattern"
    ]
    return ", ".join([f"{model} on {public(settings['dataset'])}", optimizer, *factors])


def _chosen(config: SweepConfig, choice: Mapping[str, Any]) -> RunConfig:
    """The base's run with a choice of other keys."""
    others = [(key, value) for key, value in choice.items() if key != "steps"]
    chosen = with_keys(config.base, others)
    if config.equal_examples:
        return chosen.lasting(max(1, round(config.base.examples / chosen.batch_size)))
    # Warm-up and decay keep their share of the steps.
    return chosen.lasting(choice["steps"]) if "steps" in choice else chosen


# ----- Parsing.

_CHECKS: dict[str, Check] = {
    "widths": several,
    "depths": several,
    "axes": options,
    "base_axes": options,
    "choices": several,
    "parametrizations": options,
    "only": texts,
    "equal_examples": flag,
    "seeds": whole(1, 10_000),
    "steps": optional(whole()),
    "average_last": optional(whole()),
    "memory_share": number(0, 1, above=True),
    "lanes": whole(0),
}


def parse_sweep(config: ConfigDict | Mapping[str, Any]) -> SweepConfig:
    """Check the config of a sweep and freeze it.

    A training config is a sweep of its learning rate at its base's size.

    Raises:
      UserError: in one sentence that names the key.
    """
    given = plain(config)
    section = _section(given)
    target = options("target", given.get("target", {}))
    training = without_sections(given)
    if (rate := training.get("learning_rate")) is None and not training.get(
        "transfer_from"
    ):
        training["learning_rate"] = 1.0  # each run's comes from the grid
    run = parse(training)
    if run.init_from:
        raise UserError(
            f"init_from={run.init_from!r} starts a training from trained weights, and "
            "the runs of a sweep start from random ones; leave it out, or call "
            "`mupax train` for each value"
        )
    base = _at_base(run)
    if section["steps"] is not None:
        base = base.lasting(section["steps"])
    average = section["average_last"] or max(1, base.steps // 4)
    if average > base.steps:
        raise UserError(
            f"sweep.average_last={average} is more than the {base.steps} steps of a "
            "run (sweep.steps)"
        )
    parametrizations = _parametrizations(section, run)
    _check_parametrization(training, section["parametrizations"], run)
    featured = _featured(target, parametrizations, run)
    base = dataclasses.replace(base, parametrization=parametrizations[featured])
    axes = _axes(section, base, None if rate is None else run.learning_rate)
    parsed = SweepConfig(
        base=base,
        parametrizations=parametrizations,
        widths=_sizes("widths", section, sizes_of(base).width),
        depths=_sizes("depths", section, sizes_of(base).depth),
        axes=axes,
        base_axes=_base_axes(section, base, axes),
        choices=_choices(section, base, axes),
        seeds=section["seeds"],
        average_last=average,
        limits=Limits(section["memory_share"], section["lanes"]),
        featured=featured,
        target=_target(target, section, run, base),
        equal_examples=section["equal_examples"],
        compare=_compare(target, section, parametrizations, featured),
    )
    _check_amounts(parsed)
    return parsed


def check_untracked(config: ConfigDict) -> None:
    """Check that no tracker is asked for by a sweep.

    Before `parse_sweep`, which would ask for the tracker's package.
    """
    for key in ("wandb", "mlflow"):
        if config.get(key):
            raise UserError(
                f"{key} logs trainings, and a sweep only writes report.html and "
                f"results.csv; leave {key} out"
            )


def _check_amounts(config: SweepConfig) -> None:
    axes = {**config.axes, **config.base_axes}
    runs = config.seeds * math.prod(map(len, axes.values()))
    if runs > _MOST_RUNS:
        raise UserError(
            f"sweep.axes and sweep.seeds make {runs} runs of each size; at most "
            f"{_MOST_RUNS} are allowed"
        )
    examples = config.base.steps * config.base.batch_size * config.seeds
    if examples > MOST:
        raise UserError(
            f"sweep.steps, batch_size and sweep.seeds make {examples} examples; their "
            f"order is held in memory, and at most {MOST} are allowed: make "
            "sweep.steps smaller"
        )


def _section(given: Mapping[str, Any]) -> dict[str, Any]:
    """The section `sweep`, with defaults and checked."""
    values = plain(defaults("sweep").sweep)
    section = options("sweep", given.get("sweep", {}))
    for key in section:
        if key not in values:
            raise UserError(
                f"the config has no key sweep.{key}; its keys are {', '.join(values)}"
                f"{nearest(key, values)}"
            )
    values |= section
    return {key: check(f"sweep.{key}", values[key]) for key, check in _CHECKS.items()}


def _at_base(run: RunConfig) -> RunConfig:
    """The run with the model at its base's size."""
    width, depth = (
        getattr(run, f"base_{key}") or _size_of(run, key) for key in Sizes._fields
    )
    if width is None or depth is None:
        key = "width" if width is None else "depth"
        raise UserError(
            f"the config gives {run.model.name} no {key}; set model.{key} to the base's"
        )
    return dataclasses.replace(
        run.sized(width, depth), base_width=width, base_depth=depth
    )


def _size_of(run: RunConfig, key: str) -> int | None:
    """The model's width or depth: the config's, or else the zoo's default."""
    return {**default_options(run.model.name), **run.model.options}.get(key)


def _sizes(name: str, section: Mapping[str, Any], base: int) -> tuple[int, ...]:
    """The swept widths or depths."""
    sizes = section[name]
    for size in sizes:
        whole(1, LARGEST)(f"a size in sweep.{name}", size)
    if len(set(sizes)) < len(sizes):
        raise UserError(f"sweep.{name} is {shown(sizes)}; it has a size twice")
    if sizes and base not in sizes:
        raise UserError(
            f"sweep.{name} is {shown(sizes)} and lacks the base's {base}, where the "
            "two axes cross; add it"
        )
    return tuple(sorted(sizes)) or (base,)


def _parametrizations(
    section: Mapping[str, Any], run: RunConfig
) -> dict[str, Component]:
    given, only = section["parametrizations"], section["only"]
    if not given:
        return {run.parametrization.name: run.parametrization}
    for key in only:
        if key not in given:
            raise UserError(
                f"sweep.only has {shown(key)}, which sweep.parametrizations lacks; "
                f"its keys are {', '.join(given)}"
            )
    parsed = {}
    for key, value in given.items():
        name = f"sweep.parametrizations.{key}"
        if not _KEY.fullmatch(key):
            raise UserError(
                f"{shown(name)}: a key names files; use at most 60 letters, digits, "
                "'_', '.', '+' and '-'"
            )
        values = options(name, value)
        if "name" not in values:
            raise UserError(f"{name} has no 'name'; write e.g. {{'name': 'depth_mup'}}")
        parsed[key] = Component(text(f"{name}.name", values.pop("name")), values)
        try:
            optim.parametrization(parsed[key].name, **parsed[key].options)
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}: {error}") from None
    return {key: value for key, value in parsed.items() if key in (only or parsed)}


def _check_parametrization(
    training: Mapping[str, Any], swept: Mapping[str, Any], run: RunConfig
) -> None:
    """Check that a parametrization that the config names is among the swept ones."""
    named = options("parametrization", training.get("parametrization", {})).get("name")
    if named and swept and run.parametrization.plain() not in swept.values():
        raise UserError(
            f"parametrization.name={shown(named)} is not among the swept ones: "
            f"sweep.parametrizations has {', '.join(swept)}; name one of them, or add "
            f"--config.sweep.parametrizations.{named}.name={named}"
        )


def _featured(
    target: Mapping[str, Any], known: Mapping[str, Component], run: RunConfig
) -> str:
    """The target's parametrization; else the config's own, or the last one."""
    key = optional(text)("target.parametrization", target.get("parametrization"))
    if key in known:
        return key
    named = (key for key, value in known.items() if value == run.parametrization)
    return next(named, list(known)[-1])


def _axes(
    section: Mapping[str, Any], base: RunConfig, rate: float | None
) -> dict[str, tuple[float, ...]]:
    """The swept hyperparameters and their values; the learning rate comes first."""
    axes = _grids("axes", section, base)
    if "learning_rate" not in axes:
        if rate is None:
            raise UserError(
                "sweep.axes lacks learning_rate, and the config has none to sweep "
                "around; write a grid, e.g. sweep.axes.learning_rate='2**[-12:-3:1]'"
            )
        half = _DEFAULT_VALUES // 2
        around = [rate * 2.0**i for i in range(-half, half + 1)]
        axes["learning_rate"] = grids.parse("learning_rate", around)
    rates = axes.pop("learning_rate")
    if len(rates) < 3:
        raise UserError(
            f"sweep.axes.learning_rate is {shown(list(rates))}; an optimum needs at "
            "least three learning rates, e.g. '2**[-12:-3:1]'"
        )
    return {"learning_rate": rates, **axes}


def _base_axes(
    section: Mapping[str, Any], base: RunConfig, axes: Collection[str]
) -> dict[str, tuple[float, ...]]:
    """The factors of groups that are tuned at the base, before the sweep."""
    base_axes = _grids("base_axes", section, base)
    for name in base_axes:
        if "/" not in name:
            raise UserError(
                f"sweep.base_axes has {name!r}; it tunes factors of groups, e.g. "
                f"'hidden/learning_rate'; put {name} into sweep.axes"
            )
        if name in axes:
            raise UserError(
                f"sweep.base_axes has {name!r}, and the sweep has this axis at every "
                "size; leave it out of sweep.base_axes"
            )
    return base_axes


def _grids(
    key: str, section: Mapping[str, Any], base: RunConfig
) -> dict[str, tuple[float, ...]]:
    """The values of sweep.axes or sweep.base_axes, whose names are checked."""
    axes = {}
    known = tunable(base.optimizer.name, base.modules)
    for name, grid in section[key].items():
        if grid in (None, ""):
            continue
        if name not in known:
            raise UserError(
                f"sweep.{key} has {name!r}, which is not a number that "
                f"{base.optimizer.name!r} or the run takes; it can have "
                f"{', '.join(known)}; anything else goes into sweep.choices, e.g. "
                "(('schedule.name', ('constant', 'cosine')),)"
            )
        axes[name] = grids.parse(name, grid)
        grids.check_range(name, axes[name])
    return axes


def _choices(
    section: Mapping[str, Any], base: RunConfig, axes: Collection[str]
) -> tuple[Mapping[str, Any], ...]:
    """The combinations of other keys' values; a single empty one if there are none."""
    given = section["choices"]
    try:
        pairs = [(str(key), tuple(values)) for key, values in given]
    except (TypeError, ValueError):
        raise UserError(
            f"sweep.choices is {shown(given)}; write pairs of a config key and its "
            "values, e.g. (('schedule.name', ('constant', 'cosine')),)"
        ) from None
    for key, values in pairs:
        if key.split(".")[0] not in _CHOSEN:
            raise UserError(
                f"sweep.choices has {shown(key)}; it can choose model.*, optimizer.*, "
                "schedule.*, batch_size and steps"
            )
        if key in ("model.width", "model.depth"):
            size = key.removeprefix("model.")
            raise UserError(
                f"sweep.choices has {key!r}; sizes go into sweep.{size}s, e.g. "
                f"sweep.{size}s={shown(values)}"
            )
        if (axis := key.rpartition(".")[2]) in axes:
            raise UserError(
                f"sweep.choices has {key!r}, and sweep.axes has {axis!r}; leave one of "
                "them out"
            )
        if key == "steps" and section["equal_examples"]:
            raise UserError(
                "sweep.choices has 'steps', and sweep.equal_examples sets the steps of "
                "each batch size; leave one of them out"
            )
        for value in values:
            with_keys(base, [(key, value)])
    names = [key for key, _ in pairs]
    products = itertools.product(*(values for _, values in pairs))
    return tuple(dict(zip(names, values, strict=True)) for values in products)


def _compare(
    target: Mapping[str, Any],
    section: Mapping[str, Any],
    known: Mapping[str, Component],
    featured: str,
) -> tuple[str, ...]:
    """The baselines of the target. Parametrizations that are not swept are left out."""
    keys = texts("target.compare", target.get("compare", ()))
    swept = section["parametrizations"] or known
    choices = [BASE, *(key for key in swept if key != featured)]
    for key in keys:
        if key not in choices:
            raise UserError(
                f"target.compare has {shown(key)}; it can have {', '.join(choices)}"
            )
    return tuple(key for key in keys if key == BASE or key in known)


def _target(
    given: Mapping[str, Any],
    section: Mapping[str, Any],
    run: RunConfig,
    base: RunConfig,
) -> RunConfig | None:
    """The run at the target's size; by default, the config's own larger model."""
    full = run.sized(_size_of(run, "width") or 0, _size_of(run, "depth") or 0)
    if not given and sizes_of(base) == sizes_of(full):
        return None
    changes = _target_changes(given, section["parametrizations"], base)
    length_rule = flag("target.length_rule", given.get("length_rule", False))
    full = dataclasses.replace(
        full,
        base_width=base.base_width,
        base_depth=base.base_depth,
        base_batch_size=base.base_batch_size or base.batch_size,
        base_examples=base.base_examples or (base.examples if length_rule else None),
    )
    steps = dict(changes).get("steps")
    scheduled = any(key.startswith("schedule") for key, _ in changes)
    if isinstance(steps, int) and steps > 0 and not scheduled:
        full = full.lasting(steps)
    try:
        target = with_keys(full, changes)
    except UserError as error:
        raise UserError(f"target: {error}") from None
    check_schedule(base.schedule.name, target.schedule.name, "the target")
    if base.base_batch_size is None:
        _check_batch_rule(target.batch_size, base.batch_size)
    return dataclasses.replace(target, parametrization=base.parametrization)


def _check_batch_rule(size: int, base: int) -> None:
    """Check that a target's batch size is close enough to the base's for the rule.

    At four times the base's it failed for two of three models (papers/evidence.md).
    """
    if not 0.5 <= size / base <= 2:
        raise UserError(
            f"target.batch_size={size} is {size / base:.3g} times the {base} of the "
            "sweep, where the rule of batch size is unsure (docs/howto/batch_size.md): "
            f"sweep at the target's, --config.batch_size={size}, or use the rule all "
            f"the same, --config.base_batch_size={base}"
        )


# Keys of a run that are those of the sweep, or that it finds.
_FROM_SWEEP = (
    *("base_width", "base_depth", "base_batch_size", "base_examples"),
    *("learning_rate", "optimizer", "init_scale", "transfer_from"),
)


def _target_changes(
    given: Mapping[str, Any], parametrizations: Mapping[str, Any], base: RunConfig
) -> list[tuple[str, Any]]:
    """The keys of a run that the section `target` changes, and their values."""
    swept = parametrizations or [base.parametrization.name]
    key = optional(text)("target.parametrization", given.get("parametrization"))
    if key is not None and key not in swept:
        raise UserError(
            f"target.parametrization={shown(key)} is not one of the swept ones: "
            f"{', '.join(swept)}"
        )
    known = {*defaults("target").target, *KEYS}
    changes: list[tuple[str, Any]] = []
    for key, value in given.items():
        if key not in known or key in SECTIONS:
            hint = nearest(key, known) or "; docs/reference/config.md lists all keys"
            raise UserError(f"target has no key {key!r}{hint}")
        if key in _FROM_SWEEP:
            raise UserError(
                f"target.{key}: the target gets {key} from the sweep; set {key} itself"
            )
        if value is None or key in ("compare", "parametrization", "length_rule"):
            continue
        if key in ("width", "depth"):
            whole()(f"target.{key}", value)
            changes.append((f"model.{key}", value))
        elif isinstance(value, Mapping):
            changes += [(f"{key}.{name}", x) for name, x in value.items()]
        else:
            changes.append((key, value))
    return changes

"""Configs: checked before any work."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from mupax import optim

from .errors import UserError
from .run.optimizer import check_optimizer


def plain(config: Any) -> Any:
    """A config as plain JSON-ready data."""
    if isinstance(config, ConfigDict):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [plain(value) for value in config]
    return config


def points(config: ConfigDict) -> dict[str, optim.Parametrization]:
    """The parametrizations of a sweep, by their keys in the config."""
    found = {}
    given = plain(config.sweep.parametrizations)
    only = config.sweep.get("only", ())
    for key in only:
        if key not in given:
            raise UserError(
                f"sweep.only has {key!r}, which sweep.parametrizations has not; there "
                f"are {', '.join(given)}"
            )
    for key, options in given.items():
        if only and key not in only:
            continue
        try:
            found[key] = optim.parametrization(options.pop("name"), **options)
        except KeyError:
            raise UserError(f"sweep.parametrizations.{key} lacks a name") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"sweep.parametrizations.{key}: {error}") from None
    return found


def check(config: ConfigDict) -> None:
    """Raise a `UserError` for values with which `transfer` could not end well."""
    _has(config, "sweep", "target", "base")
    check_sweep(config)
    for axis in ("widths", "depths"):
        if len(config.sweep[axis]) < 2:
            raise UserError(
                f"sweep.{axis} is {tuple(config.sweep[axis])}; `transfer` needs at "
                "least two sizes along each axis; for one alone there is `mupax sweep`"
            )
    target = config.target
    sizes = ("width", "depth", "steps", "eval_every", "save_every")
    _check_counts({f"target.{name}": [target[name]] for name in sizes})
    known = points(config)
    if target.parametrization not in known:
        raise UserError(
            f"target.parametrization={target.parametrization!r} is not one of the "
            f"swept ones: {', '.join(known)}"
        )


def _has(config: ConfigDict, *keys: str) -> None:
    for key in keys:
        if key not in config:
            raise UserError(
                f"the config has no {key!r}, and is none of a sweep; train it with: "
                "mupax train, or take --config=digits_resmlp"
            )


def _check_counts(counts: Mapping[str, Any]) -> None:
    for name, values in counts.items():
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(
                    f"{name} holds {value!r}; it must be a whole number, at least 1"
                )


def sweep_defaults() -> ConfigDict:
    """What a config of `mupax sweep` starts from; it adds data, model and sizes.

    Examples:
      >>> sorted(sweep_defaults().sweep)[:3]
      ['average_last', 'axes', 'choices']
    """
    from .sweep import hyperparameters  # it needs this module

    c = ConfigDict()
    c.data_dir = config_dict.placeholder(str)  # None: TFDS_DATA_DIR, or TFDS's own
    c.data = ConfigDict()  # options of the dataset, as image_size or context
    c.schedule = ConfigDict({"name": "constant", "warmup": 0.0})
    c.sweep = ConfigDict()
    # A grid each, as "2**[-2:2]"; nothing where it is not swept.
    c.sweep.axes = ConfigDict(dict.fromkeys(hyperparameters.NUMBERS, ""))
    c.sweep.choices = ()  # what is no number, as (("schedule.name", ("constant",)),)
    c.sweep.tradeoff = ()  # deeper or wider? parameters, as (30_000, 120_000)
    c.sweep.only = ()  # keys of the parametrizations to sweep; all where there are none
    c.sweep.memory_share = 0.5  # of the free memory; larger populations go in chunks
    c.sweep.average_last = 50  # the loss of a run: mean over its last steps
    return c


def check_sweep(config: ConfigDict) -> None:
    """Raise a `UserError` for values with which `sweep` could not end well."""
    from .sweep import plan, shapes  # they need this module

    _has(config, "sweep", "base")
    sweep, base = config.sweep, config.base
    _check_counts(
        {
            "base.width": [base.width],
            "base.depth": [base.depth],
            "sweep.widths": sweep.widths,
            "sweep.depths": sweep.depths,
            "batch_size": [config.batch_size],
            "sweep.seeds": [sweep.seeds],
            "sweep.steps": [sweep.steps],
            "sweep.average_last": [sweep.average_last],
        }
    )
    for axis, size in (("widths", base.width), ("depths", base.depth)):
        swept = list(sweep[axis])
        if len(set(swept)) < len(swept):
            raise UserError(f"sweep.{axis} is {tuple(swept)}; it has a size twice")
        if size not in swept:
            raise UserError(
                f"sweep.{axis} is {tuple(swept)} and lacks the base's {size}, where "
                "the two axes cross; add it"
            )
    if len(sweep.widths) == len(sweep.depths) == 1:
        raise UserError(
            f"sweep.widths is {tuple(sweep.widths)} and sweep.depths is "
            f"{tuple(sweep.depths)}; one of them needs at least two sizes, for "
            "anything to transfer"
        )
    check_optimizer(plain(config.optimizer))
    if len(plan.axes(config)["learning_rate"]) < 3:
        raise UserError(
            f"sweep.axes.learning_rate is {sweep.axes.learning_rate!r}; an optimum "
            "needs at least three learning rates to stand between, as '2**[-12:-3:1]'"
        )
    if sweep.average_last > sweep.steps:
        raise UserError(
            f"sweep.average_last={sweep.average_last} is more than "
            f"sweep.steps={sweep.steps}"
        )
    points(config)
    plan.choices(config)
    shapes.wanted(config)

"""The hyperparameters that a sweep can tune, and their place in a run's config."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mupax import optim
from mupax.zoo.registry import (
    REGULARIZATION,
    ROUNDING,
    default_options,
    list_models,
    options_of,
)

from .. import io
from ..checks import number, options, shown, text, whole
from ..errors import UserError, reason
from .optimizer import RANGES, check_optimizer

_COMMON = (
    "learning_rate",
    "branch_multiplier",
    "richness",
    "init_scale",
    "warmup",
    "label_smoothing",
)
# Factors of a group of parameters, named e.g. "attention/learning_rate".
OF_MODULES = ("learning_rate", "weight_decay", "init_scale", "multiplier")
TUNABLE = (*_COMMON, *RANGES)


def tunable(optimizer: str, modules: Iterable[str]) -> tuple[str, ...]:
    """The hyperparameters that a sweep can tune with this optimizer.

    `modules` are the names of the config's groups of parameters.

    Examples:
      >>> tunable("sgd", ())[-2:]
      ('label_smoothing', 'momentum')
    """
    accepted = check_optimizer({"name": optimizer})
    own = tuple(name for name in RANGES if name in accepted)
    return _COMMON + own + tuple(f"{m}/{name}" for m in modules for name in OF_MODULES)


def groups(key: str, value: Any) -> dict[str, dict[str, Any]]:
    """Check for groups of parameters: a pattern, and factors of hyperparameters."""
    parsed = {}
    for name, given in options(key, value).items():
        here = f"{key}.{name}"
        if not re.fullmatch(r"[A-Za-z]\w{0,30}", name):
            raise UserError(
                f"{shown(here)}: the name of a group has letters, digits and '_', and "
                "begins with a letter"
            )
        group = options(here, given)
        if not group.get("pattern"):
            raise UserError(
                f"{here} lacks a pattern, e.g. 'attention' or 'role:hidden'"
            )
        pattern = text(f"{here}.pattern", group["pattern"])
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"{here}.pattern={shown(pattern)} is not a regular expression: {error}"
            ) from None
        for factor, x in group.items():
            if factor == "pattern":
                continue
            if factor not in OF_MODULES:
                raise UserError(
                    f"{here} has {shown(factor)}; besides its pattern it can have "
                    f"{', '.join(OF_MODULES)}"
                )
            number(0, above=factor != "weight_decay")(f"{here}.{factor}", x)
        parsed[name] = group
    return parsed


def tuned(config: Any, values: Mapping[str, Any]) -> Any:
    """Replace hyperparameters of a run.

    A sweep calls this inside its compiled program, with traced values. `mupax transfer`
    and `transfer_from` call it with floats.

    Args:
      config: of the run, a `RunConfig`.
      values: hyperparameters by name; see `tunable`. Warm-up is a share of the steps.
    """
    changes: dict[str, Any] = {}
    for name, value in values.items():
        traced = not isinstance(value, int | float)
        module, _, factor = name.rpartition("/")
        if module:
            modules = changes.get("modules", config.modules)
            group = {**modules[module], factor: value}
            changes["modules"] = {**modules, module: group}
        elif name in ("learning_rate", "init_scale", "label_smoothing"):
            changes[name] = value
        elif name in ("branch_multiplier", "richness"):
            section = "model" if name == "branch_multiplier" else "parametrization"
            option = {name: optim.Traced(value) if traced else value}
            changes[section] = getattr(config, section).with_options(**option)
        elif name == "warmup":
            steps = value * config.steps
            steps = steps if traced else round(steps)
            changes["schedule"] = config.schedule.with_options(warmup=steps)
        else:
            optimizer = changes.get("optimizer", config.optimizer)
            changes["optimizer"] = optimizer.with_options(**{name: value})
    return dataclasses.replace(config, **changes)


# Keys of the base's config that a transfer replaces or checks.
_TUNED = (
    *("model", "parametrization", "optimizer", "schedule", "modules"),
    *("batch_size", "base_batch_size", "clip_norm", "init_scale", "label_smoothing"),
)


def transfer_record(
    base: Any,
    values: Mapping[str, float],
    base_examples: int | None = None,
) -> dict[str, Any]:
    """The part of summary.json that `transfer_from` reads.

    Args:
      base: config of the sweep's base, a `RunConfig`.
      values: its best hyperparameters, by name.
      base_examples: examples of the base's training, if the hyperparameters follow the
        length of training.
    """
    config = tuned(base, values).plain()
    return {
        "hyperparameters": dict(values),
        "base_examples": base_examples,
        "config": {key: config[key] for key in _TUNED},
    }


def transferred_keys(path: pathlib.Path) -> tuple[str, ...]:
    """The keys of a config that `apply_transfer` replaces.

    Raises:
      UserError: see `apply_transfer`.
    """
    sections: dict[str, Any] = {"model": {}, "schedule": {}, "steps": 1}
    after = apply_transfer(sections, path)
    inside = [f"{s}.{key}" for s in ("model", "schedule") for key in after[s]]
    return (*(key for key in after if key not in sections), *inside)


def apply_transfer(config: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Replace the values of a plain config by those of the summary.json at `path`.

    Raises:
      UserError: the file is missing, damaged or of another kind; or another kind of
        model, or another schedule, was tuned.
    """
    own = options("model", config["model"])
    try:
        record = options("transfer", io.read_json(path)["transfer"])
        given = options("hyperparameters", record["hyperparameters"])
        values = {key: number(0)(key, value) for key, value in given.items()}
        base = options("config", record["config"])
        model = options("model", base["model"])
        config = config | {
            "learning_rate": values["learning_rate"],
            "model": own,
            "base_width": model["width"],
            "base_depth": model["depth"],
            **{
                key: base[key] for key in ("parametrization", "optimizer", "init_scale")
            },
        }
        following = {
            "base_batch_size": base["base_batch_size"] or base["batch_size"],
            "base_examples": record["base_examples"],
            **{key: base[key] for key in ("clip_norm", "modules")},
        }
        schedule, smoothing = base["schedule"]["name"], base["label_smoothing"]
    except (OSError, ValueError, LookupError, TypeError, UserError) as error:
        inside = path / "summary.json"
        hint = f"; did you mean {str(inside)!r}?" if inside.is_file() else ""
        why = f"it lacks {error}" if isinstance(error, KeyError) else reason(error)
        raise UserError(
            f"{shown(str(path))} is not the summary.json of a `mupax transfer` run "
            f"({why}){hint}"
        ) from None
    config |= {key: value for key, value in following.items() if value}
    known = default_options(model["name"]) if model["name"] in list_models() else {}
    if "branch_multiplier" in {**known, **model}:
        config["model"]["branch_multiplier"] = model.get("branch_multiplier", 1.0)
    _check_model(model["name"], config["model"].get("name"), path)
    _check_options(model, config["model"], path)
    name = options("schedule", config["schedule"]).get("name")
    if name is not None:
        check_schedule(schedule, name, shown(str(path)))
    # Smoothing and warm-up that were not swept keep the config's values.
    warmup = values.get("warmup", 0.0)
    if smoothing or "label_smoothing" in values:
        config["label_smoothing"] = smoothing
    if warmup or "warmup" in values:
        steps = round(warmup * whole()("steps", config["steps"]))
        config["schedule"] = options("schedule", config["schedule"]) | {"warmup": steps}
    return config


# Options of a model that may differ between the base and the run: sizes, the ends of
# the model, which depend on the data, and what changes only regularization or nothing.
_OWN = (
    *("name", "width", "depth", "heads", "base_width", "base_depth"),
    *("branch_multiplier", "parametrization"),
    *("input_shape", "out_features", "context", "vocab_size"),
    *("patch_size", "pool", "class_token", "stem"),
    *REGULARIZATION,
    *ROUNDING,
)


def _check_options(
    tuned: Mapping[str, Any], model: Mapping[str, Any], path: pathlib.Path
) -> None:
    """Check that the run's model differs from the tuned one in size only."""
    if not {tuned["name"], model.get("name")} <= set(list_models()):
        return
    whole, given = with_defaults(tuned), with_defaults(model)
    for key in sorted((whole.keys() | given.keys()) - set(_OWN)):
        one, other = whole.get(key), given.get(key)
        if one != other:
            raise UserError(
                f"{shown(str(path))} was tuned with model.{key}={shown(one)}, and here "
                f"it is {shown(other)}; the base must be the same model, only smaller"
            )


def with_defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    """A section `model` with the zoo's defaults, as JSON-ready data.

    Options without a value are left out. So two sections of the same model are equal.
    A section may be a user's own, of another kind.
    """
    known = model.get("name") in list_models()
    options = default_options(model["name"]) if known else {}
    options |= {key: value for key, value in model.items() if value is not None}
    options = {key: value for key, value in options.items() if value is not None}
    return json.loads(json.dumps(options, default=str))


def check_schedule(tuned: str, name: str, source: str) -> None:
    """Check that a learning rate is used with the schedule that it was tuned with."""
    if name != tuned:
        raise UserError(
            f"{source} was tuned with schedule.name={shown(tuned)}, and here it is "
            f"{shown(name)}, which has another best learning rate; tune and train with "
            "the same schedule"
        )


def _check_model(tuned: Any, name: Any, path: pathlib.Path) -> None:
    """Check that the tuned model and the config's are of one class, if known."""
    known = list_models()
    if tuned not in known or name not in known:
        return
    if options_of(tuned)[0] is not options_of(name)[0]:
        raise UserError(
            f"{shown(str(path))} has the hyperparameters of {tuned!r}, and model.name "
            f"is {name!r}; tune a model of the same kind"
        )

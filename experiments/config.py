"""Configs: found by name, parsed from the command line, checked before any work."""

import importlib.resources
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from mupax import optim

from .errors import UserError
from .run.optimizer import check_optimizer


def list_configs() -> list[str]:
    """The names of the packaged configs."""
    folder = importlib.resources.files("mupax.configs")
    names = (entry.name for entry in folder.iterdir())
    return sorted(
        n.removesuffix(".py") for n in names if n.endswith(".py") and n[0] != "_"
    )


def find_config(name: str) -> str:
    """The path of a config: a file, or the bare name of a packaged one.

    Raises:
      UserError: there is neither.
    """
    if pathlib.Path(name).is_file():
        return name
    if name in list_configs():
        return str(importlib.resources.files("mupax.configs") / f"{name}.py")
    raise UserError(
        f"there is no config file {name!r}; give a path, or one of the packaged "
        f"configs: {', '.join(list_configs())}"
    )


class Parsed(NamedTuple):
    """A command line.

    Attributes:
      config: with its overrides.
      workdir: where to write, or None.
      flags: the command's own, by name.
    """

    config: ConfigDict
    workdir: str | None
    flags: dict[str, Any]


def parse(argv: list[str], extra: Mapping[str, Any] | None = None) -> Parsed:
    """Read `--config`, its overrides, `--workdir`, and a command's own flags.

    Args:
      argv: the command's name and its flags.
      extra: defaults of the command's own flags, by name; False and True make flags
        of yes or no.

    Raises:
      UserError: an unknown flag or config key, or a value of the wrong type.
    """
    argv = _with_config_path(argv)
    values = flags.FlagValues()
    config = config_flags.DEFINE_config_file(
        "config", None, "Config file, or name of a packaged one.", flag_values=values
    )
    workdir = flags.DEFINE_string(
        "workdir", None, "Where to write; by default runs/<config>.", flag_values=values
    )
    for name, default in (extra or {}).items():
        define: Any = flags.DEFINE_string
        if isinstance(default, bool):
            define = flags.DEFINE_bool
        elif isinstance(default, int):
            define = flags.DEFINE_integer
        define(name, default, "", flag_values=values)
    before = sys.argv
    # ml_collections finds the overrides of config keys in sys.argv.
    sys.argv = argv
    try:
        rest = values(argv)
        found = config.value
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(_one_line(error)) from None
    except Exception as error:
        raise UserError(f"the config does not load: {_one_line(error)}") from None
    finally:
        sys.argv = before
    if len(rest) > 1:
        raise UserError(f"{rest[1]!r} is not understood; flags start with --")
    if found is None:
        raise UserError(
            f"--config is missing; packaged configs are: {', '.join(list_configs())}"
        )
    own = {name: values[name].value for name in extra or {}}
    return Parsed(found, workdir.value, own)


def _with_config_path(argv: list[str]) -> list[str]:
    """`argv` with the config's name replaced by its path, as one argument."""
    out, rest = argv[:1], iter(argv[1:])
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag.lstrip("-") == "config" and word.startswith("-"):
            value = value if equals else next(rest, "")
            out.append(f"--config={find_config(value)}")
        else:
            out.append(word)
    return out


def _one_line(error: BaseException) -> str:
    text = str(error).replace("\\n", " ").replace("\\'", "'").replace('\\"', '"')
    if isinstance(error, AttributeError | KeyError):
        while len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            text = text[1:-1]  # a KeyError quotes what it is given
        text = f"the config has no key {text}"
    return " ".join(text.split())


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

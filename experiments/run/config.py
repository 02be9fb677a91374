"""The config of a run: every key, its default, and its checks.

All commands share one schema. A training config has the keys of `defaults()`. A sweep
config adds a section `sweep`, a transfer config also a section `target`, which holds
only what differs from the base. `parse` turns a ConfigDict into a `RunConfig` once;
`mupax.experiments.sweep.space` does the same with both sections.
"""

import dataclasses
import difflib
import importlib.util
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import optax
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from mupax import optim, zoo
from mupax.zoo.registry import default_parametrization

from .. import io
from ..errors import UserError
from . import checks
from .checks import flag, number, optional, options, several, text, whole
from .optimizer import check_optimizer, make_schedule

SECTIONS = ("sweep", "target")


def defaults(*sections: str) -> ConfigDict:
    """A config with every key; a config file changes what it needs.

    Args:
      *sections: "sweep" for a config of `mupax sweep`; "target" too for one of
        `mupax transfer`.

    Examples:
      >>> sorted(defaults("sweep").sweep)[:3]
      ['average_last', 'axes', 'choices']
    """
    c = ConfigDict()
    c.seed = 0

    # Data. See `mupax.experiments.data.open_dataset`.
    c.dataset = "digits"
    c.data_dir = placeholder(str)  # a TFDS directory; TFDS_DATA_DIR by default
    c.stand_in = placeholder(str)  # noise of its shapes, for plans without the data
    c.data = ConfigDict()  # further options of open_dataset
    c.augment = ()  # names, or {"name": ..., option: value}
    c.mixup = 0.0  # α of its Beta distribution; 0 for none
    c.cutmix = 0.0
    c.label_smoothing = 0.0

    # Model. `model` holds its name, width, depth and other options. The base is the
    # size that was tuned; None: the model's own size.
    c.model = ConfigDict({"name": "resmlp"})
    c.base_width = placeholder(int)
    c.base_depth = placeholder(int)
    # None: "depth_mup" for residual branches of one layer, "completep" for deeper ones.
    c.parametrization = ConfigDict({"name": placeholder(str)})
    c.init_scale = 1.0  # factor of the initial weights that have a fan-in
    c.init_from = placeholder(str)  # pretrained weights: a file, directory or hub id
    c.transfer_from = placeholder(str)  # the summary.json of `mupax transfer`

    # Optimization.
    c.batch_size = 128
    c.accumulate = 1  # parts that a batch is computed in
    c.steps = 1000
    c.learning_rate = placeholder(float)  # of the base
    c.optimizer = ConfigDict({"name": "adamw"})
    c.schedule = ConfigDict({"name": "cosine", "warmup": 0, "decay": 0, "final": 0.0})
    c.clip_norm = placeholder(float)
    c.ema = placeholder(float)

    # Devices: how many along each axis of the mesh, -1 for what remains.
    c.mesh = ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})
    c.sharding = ConfigDict()  # changes to zoo.RULES

    # What is written, and when.
    c.log_every = 10
    c.eval_every = 500
    c.save_every = 500
    c.keep_last = 2
    c.keep_best = True  # the best of those that were evaluated when they were saved
    c.tensorboard = True
    c.wandb = placeholder(str)  # a project
    c.profile = ()  # (first step, last step)
    if "sweep" in sections:
        c.sweep = _sweep()
    if "target" in sections:
        c.target = _target()
    return c


def _sweep() -> ConfigDict:
    """The section of a sweep; an empty value means: as the run."""
    s = ConfigDict()
    s.widths = ()  # swept at the base's depth; the base's width alone by default
    s.depths = ()  # swept at the base's width
    # A grid each, as "2**[-2:2]" or (0.1, 0.2); None where it is not swept. Of the
    # learning rate by default seven values around the config's, a factor of 2 apart.
    s.axes = ConfigDict({name: placeholder(object) for name in TUNABLE})
    s.choices = ()  # other keys and their values: (("schedule.name", ("constant",)),)
    s.parametrizations = ConfigDict()  # by key; the config's own by default
    s.only = ()  # keys of the parametrizations to sweep; empty: all
    s.seeds = 2  # runs of each grid point, with seeds from the config's seed upwards
    s.steps = placeholder(int)  # of each run; None: the config's
    s.average_last = placeholder(int)  # steps in a run's final loss; None: a quarter
    s.memory_share = 0.5  # of the free memory; larger populations go in chunks
    s.lanes = 0  # at most so many runs in a chunk; 0: as many as fit
    return s


def _target() -> ConfigDict:
    """The section of a target; None means: as the base. Any other key may be added."""
    t = ConfigDict()
    t.parametrization = placeholder(str)  # a key of sweep.parametrizations
    for key in ("width", "depth", "steps", "seed", "eval_every", "save_every"):
        t[key] = placeholder(int)
    return t


@dataclasses.dataclass(frozen=True)
class Named:
    """Something chosen by name, with its options.

    Attributes:
      name: as the config gives it.
      options: all other keys of its section.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As the config's section."""
        return {"name": self.name, **self.options}

    def with_options(self, **changes: Any) -> "Named":
        """With some options replaced."""
        return Named(self.name, {**self.options, **changes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: the keys of `defaults()`, checked. See there for their meaning."""

    seed: int
    dataset: str
    data_dir: str | None
    stand_in: str | None
    data: Mapping[str, Any]
    augment: tuple[Any, ...]
    mixup: float
    cutmix: float
    label_smoothing: float
    model: Named
    base_width: int | None
    base_depth: int | None
    parametrization: Named
    init_scale: float
    init_from: str | None
    transfer_from: str | None
    batch_size: int
    accumulate: int
    steps: int
    learning_rate: float
    optimizer: Named
    schedule: Named
    clip_norm: float | None
    ema: float | None
    mesh: Mapping[str, int]
    sharding: Mapping[str, Any]
    log_every: int
    eval_every: int
    save_every: int
    keep_last: int
    keep_best: bool
    tensorboard: bool
    wandb: str | None
    profile: tuple[int, ...]

    @property
    def point(self) -> optim.Parametrization:
        """The parametrization itself."""
        chosen = self.parametrization
        return optim.parametrization(chosen.name, **chosen.options)

    @property
    def rate(self) -> optax.Schedule:
        """The schedule of the learning rate."""
        chosen = self.schedule
        return make_schedule(
            chosen.name, self.learning_rate, self.steps, **chosen.options
        )

    def plain(self) -> dict[str, Any]:
        """As JSON-ready data, in the layout of the config."""
        return {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }

    def settings(self) -> dict[str, Any]:
        """What decides the result of `mupax train`, as JSON-ready data."""
        found = {k: v for k, v in self.plain().items() if k not in _INCIDENTAL}
        if self.init_scale == 1:  # so that directories from before this key are read
            del found["init_scale"]
        return found

    def decisive(self) -> dict[str, Any]:
        """What decides the training losses alone: `settings` without the records."""
        return {k: v for k, v in self.settings().items() if k not in _RECORDS}

    def sized(self, width: int, depth: int) -> "RunConfig":
        """The same run at another size; the base stays."""
        return dataclasses.replace(
            self, model=self.model.with_options(width=width, depth=depth)
        )


# What may differ between a run and its continuation: nothing of the result.
_INCIDENTAL = (
    "data_dir",
    "stand_in",
    "mesh",
    "sharding",
    "save_every",
    "keep_last",
    "keep_best",
    "tensorboard",
    "wandb",
    "profile",
)
_RECORDS = ("transfer_from", "log_every", "eval_every", "ema", "seed")

_CHECKS: dict[str, checks.Check] = {
    "seed": whole(0, 2**32 - 1),
    "dataset": text,
    "data_dir": optional(text),
    "stand_in": optional(text),
    "data": options,
    "augment": several,
    "mixup": number(0),
    "cutmix": number(0),
    "label_smoothing": number(0, 1, below=True),
    "base_width": optional(whole()),
    "base_depth": optional(whole()),
    "init_scale": number(0, above=True),
    "init_from": optional(text),
    "transfer_from": optional(text),
    "batch_size": whole(),
    "accumulate": whole(),
    "steps": whole(),
    "clip_norm": optional(number(0, above=True)),
    "ema": optional(number(0, 1, above=True, below=True)),
    "mesh": options,
    "sharding": options,
    "log_every": whole(),
    "eval_every": whole(),
    "save_every": whole(),
    "keep_last": whole(),
    "keep_best": flag,
    "tensorboard": flag,
    "wandb": optional(text),
    "profile": several,
}
_NAMED = ("model", "parametrization", "optimizer", "schedule")


def parse(config: ConfigDict | Mapping[str, Any]) -> RunConfig:
    """Check a config and freeze it; sections of a sweep and a target are left out.

    Keys that are missing get their defaults. With `transfer_from`, what the sweep
    found replaces the config's values.

    Raises:
      UserError: in one sentence, naming the key.
    """
    given = sectionless(plain(config))
    for key in (key for key in given if key not in known_keys()):
        raise UserError(_unknown(key))
    given = plain(defaults()) | given
    if given["transfer_from"] is not None:
        path = text("transfer_from", given["transfer_from"])
        given = _transferred(given, pathlib.Path(path))
    given["parametrization"] = _parametrization(given)
    found = {key: check(key, given[key]) for key, check in _CHECKS.items()}
    found |= {key: _named(key, given[key]) for key in _NAMED}
    if given["learning_rate"] is None:
        raise UserError(
            "learning_rate is not set; give --config.learning_rate=..., or what a "
            "sweep found, as --config.transfer_from=runs/demo/summary.json"
        )
    rate = number(0, above=True)("learning_rate", given["learning_rate"])
    parsed = RunConfig(**found, learning_rate=rate)
    _check_together(parsed)
    return parsed


def _parametrization(given: Mapping[str, Any]) -> dict[str, Any]:
    """The section `parametrization`, with the model's default where it has no name."""
    section = options("parametrization", given["parametrization"])
    if section.get("name") is not None:
        return section
    model = options("model", given["model"])
    name = model.pop("name", None)
    if name not in zoo.list_models():  # `_check_together` refuses it
        return {**section, "name": "depth_mup"}
    return {**section, "name": default_parametrization(name, **model)}


def _check_together(config: RunConfig) -> None:
    """Checks that need more than one value, or a look outside."""
    models = zoo.list_models()
    if config.model.name not in models:
        near = difflib.get_close_matches(config.model.name, models, n=1, cutoff=0.0)
        raise UserError(
            f"model.name={config.model.name!r} is not in the zoo; the nearest is "
            f"{near[0]!r}, and `mupax models` lists all"
        )
    for key in ("width", "depth"):
        if (size := config.model.options.get(key)) is not None:
            whole(1, checks.LARGEST)(f"model.{key}", size)
    if config.profile:
        for step in config.profile:
            whole()("profile", step)
        if len(config.profile) != 2:
            raise UserError(f"profile={config.profile} must be (first step, last step)")
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"wandb={config.wandb!r} needs its package: pip install 'mupax[wandb]'"
        )
    if config.init_from and config.init_scale != 1:
        raise UserError(
            f"init_scale={config.init_scale} changes an initialization, and init_from="
            f"{config.init_from!r} replaces it; leave one of them out"
        )
    check_optimizer(config.optimizer.plain())
    for key, build in (
        ("parametrization", lambda: config.point),
        ("schedule", lambda: config.rate),
    ):
        try:
            build()
        except (TypeError, ValueError) as error:
            raise UserError(f"{key}: {error}") from None


def known_keys() -> tuple[str, ...]:
    """The keys of a training config."""
    return tuple(field.name for field in dataclasses.fields(RunConfig))


def sectionless(given: Mapping[str, Any]) -> dict[str, Any]:
    """A plain config without the sections of a sweep and a target."""
    return {key: value for key, value in given.items() if key not in SECTIONS}


def _unknown(key: str) -> str:
    if key == "base":
        return (
            "the config has 'base', which is no key any more: write the base's sizes "
            "as model.width and model.depth, and start from "
            "mupax.experiments.run.config.defaults('sweep', 'target')"
        )
    return f"the config has no key {key!r}; its keys are {', '.join(known_keys())}"


def _named(key: str, value: Any) -> Named:
    found = options(key, value)
    if not found.get("name"):
        raise UserError(f"{key} lacks a name; set {key}.name")
    return Named(text(f"{key}.name", found.pop("name")), found)


def plain(config: Any) -> Any:
    """A config as plain JSON-ready data."""
    if isinstance(config, ConfigDict | Mapping):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [plain(value) for value in config]
    return config


def _plain(value: Any) -> Any:
    return plain(value.plain() if isinstance(value, Named) else value)


# ----- Hyperparameters: what a sweep can tune, and where each stands in a run.

# Of every run.
_COMMON = (
    "learning_rate",
    "branch_multiplier",
    "richness",
    "init_scale",
    "warmup",
    "label_smoothing",
)
# Of some optimizers.
_OF_OPTIMIZERS = (
    "momentum",
    "b1",
    "b2",
    "beta",
    "eps",
    "weight_decay",
    "adam_b1",
    "adam_b2",
    "adam_weight_decay",
)
TUNABLE = _COMMON + _OF_OPTIMIZERS


def tunable(optimizer: str) -> tuple[str, ...]:
    """The hyperparameters of a run with this optimizer that a sweep can tune.

    Examples:
      >>> tunable("sgd")[-2:]
      ('label_smoothing', 'momentum')
    """
    accepted = check_optimizer({"name": optimizer})
    return _COMMON + tuple(name for name in _OF_OPTIMIZERS if name in accepted)


def tuned(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A run with some hyperparameters replaced.

    This is the one place that knows where a hyperparameter stands in a config. Sweeps
    call it inside their program, with traced values; `transfer` and `transfer_from`
    call it with numbers.

    Args:
      config: the run.
      values: by name, out of `tunable`. Warm-up is a share of the steps.
    """
    changes: dict[str, Any] = {}
    for name, value in values.items():
        traced = not isinstance(value, int | float)
        if name in ("learning_rate", "init_scale", "label_smoothing"):
            changes[name] = value
        elif name == "branch_multiplier":
            value = optim.Traced(value) if traced else value
            changes["model"] = config.model.with_options(branch_multiplier=value)
        elif name == "richness":
            value = optim.Traced(value) if traced else value
            point = config.parametrization.with_options(richness=value)
            changes["parametrization"] = point
        elif name == "warmup":
            steps = value * config.steps
            steps = steps if traced else round(steps)
            changes["schedule"] = config.schedule.with_options(warmup=steps)
        else:
            chosen = changes.get("optimizer", config.optimizer)
            changes["optimizer"] = chosen.with_options(**{name: value})
    return dataclasses.replace(config, **changes)


def retargeted(config: RunConfig, changes: Iterable[tuple[str, Any]]) -> RunConfig:
    """A run with some keys of its config replaced, checked again.

    Args:
      config: the run.
      changes: keys, dotted where they lie in a section, and their values.

    Raises:
      UserError: a key that the config does not have, or a value it cannot have.
    """
    given = config.plain()
    given["transfer_from"] = None  # it has been read already
    for key, value in changes:
        part, _, name = key.partition(".")
        if part not in given:
            raise UserError(_unknown(part))
        if name:
            given[part] = {**options(part, given[part]), name: plain(value)}
        else:
            given[part] = plain(value)
    found = parse(given)
    return dataclasses.replace(found, transfer_from=config.transfer_from)


def found_by_transfer(config: RunConfig, values: Mapping[str, float]) -> dict[str, Any]:
    """What summary.json holds for `transfer_from`.

    Args:
      config: the base of the sweep.
      values: its best hyperparameters, by name.
    """
    best = tuned(config, values)
    return {
        "hyperparameters": dict(values),
        "base_width": best.model.options["width"],
        "base_depth": best.model.options["depth"],
        "parametrization": best.parametrization.plain(),
        "optimizer": best.optimizer.plain(),
        "clip_norm": best.clip_norm,
        "branch_multiplier": best.model.options.get("branch_multiplier", 1.0),
        "init_scale": best.init_scale,
        "label_smoothing": best.label_smoothing,
    }


def _transferred(given: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """A plain config with everything that a sweep found in place of its own values."""
    try:
        found = io.read_sealed(path)["transfer"]
        values = dict(found.get("hyperparameters", {}))
        if "log2_learning_rate" in found:  # of mupax 0.1
            values |= {"learning_rate": 2.0 ** float(found["log2_learning_rate"])}
            values |= {"warmup": w} if (w := found.get("warmup")) else {}
        given = given | {
            "learning_rate": float(values["learning_rate"]),
            "base_width": int(found["base_width"]),
            "base_depth": int(found["base_depth"]),
            "parametrization": dict(found["parametrization"]),
            "optimizer": dict(found["optimizer"]),
            "init_scale": float(found.get("init_scale", 1.0)),
        }
        model = options("model", given["model"])
        if "branch_multiplier" in found:
            model["branch_multiplier"] = float(found["branch_multiplier"])
        smoothing = float(found.get("label_smoothing", 0.0))
        warmup = float(values.get("warmup", 0.0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{checks.shown(str(path))} is not the summary.json of a `mupax transfer` "
            f"run ({checks.shown(str(error))})"
        ) from None
    given["model"] = model
    # Without smoothing or warm-up in the sweep, the longer run keeps its own.
    if smoothing or "label_smoothing" in values:
        given["label_smoothing"] = smoothing
    if found.get("clip_norm") is not None:
        given["clip_norm"] = found["clip_norm"]
    if warmup or "warmup" in values:
        schedule = options("schedule", given["schedule"])
        steps = whole()("steps", given["steps"])
        given["schedule"] = {**schedule, "warmup": round(warmup * steps)}
    return given

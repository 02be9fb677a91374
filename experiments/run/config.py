"""The config of a training run: every key, its default, and what is checked of it."""

import importlib.util
import pathlib
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from mupax import optim, zoo

from .. import io
from ..config import plain
from ..errors import UserError
from .optimizer import check_optimizer, schedule


def defaults() -> ConfigDict:
    """A config with every key; a config file changes what it needs."""
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

    # Model. Its width and depth, and those that were tuned; None for its own.
    c.model = ConfigDict({"name": "resmlp"})
    c.base_width = placeholder(int)
    c.base_depth = placeholder(int)
    c.parametrization = ConfigDict({"name": "depth_mup"})
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
    return c


# What may differ between a run and its continuation: nothing of the result.
INCIDENTAL = (
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


_COUNTS = (
    "batch_size",
    "accumulate",
    "steps",
    "log_every",
    "eval_every",
    "save_every",
    "keep_last",
)


def check(config: ConfigDict) -> ConfigDict:
    """The config with what a sweep found put in, once it is known to be sound.

    Raises:
      UserError: in one sentence, naming the key.
    """
    unknown = set(config) - set(defaults())
    if unknown:
        raise UserError(
            f"the config has no key {sorted(unknown)[0]!r}; its keys are "
            f"{', '.join(defaults())}"
        )
    missing = set(defaults()) - set(config)
    if missing:
        raise UserError(
            f"the config lacks {sorted(missing)[0]!r}, which `mupax train` needs; "
            "start it from mupax.experiments.run.config.defaults()"
        )
    for key in _COUNTS:
        if config[key] < 1:
            raise UserError(f"{key} is {config[key]}; it must be 1 or more")
    if config.transfer_from:
        config = _transferred(config, pathlib.Path(config.transfer_from))
    if config.learning_rate is None:
        raise UserError(
            "learning_rate is not set; give --config.learning_rate=..., or what a "
            "sweep found, as --config.transfer_from=runs/demo/summary.json"
        )
    if not config.learning_rate > 0:
        raise UserError(f"learning_rate={config.learning_rate} must be positive")
    for key in ("mixup", "cutmix"):
        if config[key] < 0:
            raise UserError(f"{key}={config[key]} must be 0, for none, or more")
    if not 0 <= config.label_smoothing < 1:
        raise UserError(f"label_smoothing={config.label_smoothing} must lie in 0 to 1")
    if config.ema is not None and not 0 < config.ema < 1:
        raise UserError(f"ema={config.ema} must lie between 0 and 1")
    if config.clip_norm is not None and not config.clip_norm > 0:
        raise UserError(f"clip_norm={config.clip_norm} must be positive")
    if config.profile and (len(config.profile) != 2 or config.profile[0] < 1):
        raise UserError(
            f"profile={tuple(config.profile)} must be (first step, last step)"
        )
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"wandb={config.wandb!r} needs its package: pip install 'mupax[wandb]'"
        )
    check_optimizer(plain(config.optimizer))
    point(config)
    rate(config)
    return config


def point(config: ConfigDict) -> optim.Parametrization:
    """The parametrization."""
    options = plain(config.parametrization)
    try:
        return optim.parametrization(options.pop("name"), **options)
    except KeyError:
        raise UserError("parametrization lacks a name") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"parametrization: {error}") from None


def rate(config: ConfigDict) -> Any:
    """The learning rate's schedule."""
    options = plain(config.schedule)
    try:
        name = options.pop("name")
        return schedule(name, config.learning_rate, config.steps, **options)
    except KeyError:
        raise UserError("schedule lacks a name") from None
    except TypeError as error:
        raise UserError(f"schedule: {error}") from None


def model_options(config: ConfigDict) -> tuple[str, dict[str, Any]]:
    """The model's name, and its options without those that the dataset gives."""
    options = plain(config.model)
    name = options.pop("name", None)
    if name not in zoo.list_models():
        raise UserError(
            f"model.name={name!r} is not in the zoo; `mupax models` lists what is"
        )
    return name, {
        **options,
        "base_width": config.base_width,
        "base_depth": config.base_depth,
        "parametrization": point(config),
    }


# What a sweep may have tuned beside, and what it is where nothing is said of it.
_TUNED = {
    "branch_multiplier": 1.0,
    "init_scale": 1.0,
    "warmup": 0.0,
    "label_smoothing": 0.0,
}


def _transferred(config: ConfigDict, path: pathlib.Path) -> ConfigDict:
    """With base sizes, parametrization and hyperparameters as a sweep found them."""
    try:
        summary = io.read_sealed(path)
        found = summary["transfer"]
        changes = {
            "learning_rate": 2.0 ** float(found["log2_learning_rate"]),
            "base_width": int(found["base_width"]),
            "base_depth": int(found["base_depth"]),
        }
        parametrization = dict(found["parametrization"])
        optimizer = dict(found["optimizer"])
        tuned = {name: float(found.get(name, x)) for name, x in _TUNED.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not the summary.json of a `mupax transfer` run ({error})"
        ) from None
    if tuned["init_scale"] != 1:
        raise UserError(
            f"{path} was tuned at init_scale={tuned['init_scale']:g}, which `mupax "
            "train` has not; train it with `mupax transfer`"
        )
    config = config.copy_and_resolve_references()

    def put(part: ConfigDict, key: str, value: Any, unset: Any, name: str) -> None:
        if part.get(key, unset) not in (unset, value):
            raise UserError(
                f"{name} is {part[key]} in the config and {value} in {path}; leave one "
                "of them out"
            )
        part[key] = value

    with config.unlocked():
        for key, value in changes.items():
            put(config, key, value, None, key)
        multiplier = tuned["branch_multiplier"]
        put(config.model, "branch_multiplier", multiplier, 1.0, "branch_multiplier")
        # None in the sweep says nothing of a longer run.
        if smoothing := tuned["label_smoothing"]:
            put(config, "label_smoothing", smoothing, 0.0, "label_smoothing")
        if warmup := round(tuned["warmup"] * config.steps):
            put(config.schedule, "warmup", warmup, 0, "schedule.warmup")
        config.parametrization = ConfigDict(parametrization)
        config.optimizer = ConfigDict(optimizer)
    return config

"""The config schema: every key of a run, its default and its check.

All commands share one schema. A training config has the keys of `RunConfig`. A sweep
config adds a section `sweep`. A transfer config also adds a section `target`, which
holds only what differs from the base. `parse` turns a ConfigDict into a `RunConfig`;
`mupax.experiments.sweep.space` parses the two sections.
"""

# ruff: noqa: RUF009 (`_key` returns a dataclass field)
import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

import optax
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from mupax import optim, zoo
from mupax.zoo.addresses import public
from mupax.zoo.registry import default_options, default_parametrization
from mupax.zoo.weights import remote

from .. import checks
from ..checks import flag, number, one_of, optional, options, several, text, whole
from ..errors import UserError, nearest
from .hyperparameters import TUNABLE, apply_transfer, groups
from .optimizer import check_optimizer
from .schedule import make_schedule

SECTIONS = ("sweep", "target")


@dataclasses.dataclass(frozen=True)
class Component:
    """A part of a run that the config chooses by name: model, optimizer, schedule, ...

    `options` holds all other keys of its section.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The component as a section of a config."""
        return {"name": self.name, **self.options}

    def with_options(self, **changes: Any) -> "Component":
        return Component(self.name, {**self.options, **changes})


def component(key: str, value: Any) -> Component:
    """Check a section of a config that has a name."""
    given = options(key, value)
    if not given.get("name"):
        raise UserError(f"{key} lacks a name; set {key}.name")
    return Component(text(f"{key}.name", given.pop("name")), given)


def _learning_rate(key: str, value: Any) -> float:
    if value is None:
        raise UserError(
            "learning_rate is not set; give --config.learning_rate=..., or the result "
            "of a transfer, e.g. --config.transfer_from=runs/demo/summary.json"
        )
    return number(0, above=True)(key, value)


def _key(
    default: Any, check: checks.Check, *, result: bool = True, losses: bool = True
) -> Any:
    """The dataclass field of a key of the config.

    Args:
      default: its default; a type stands for None and the type of other values.
      check: checks and converts a value.
      result: whether the key can change the results of a run. A run resumes only if
        all these keys are the same.
      losses: whether the key can change the training losses of a run.
    """
    return dataclasses.field(
        metadata={
            "default": default,
            "check": check,
            "result": result,
            "losses": losses and result,
        }
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. The fields are the keys of a training config."""

    seed: int = _key(0, whole(0, 2**32 - 1), losses=False)

    # Data. See `mupax.experiments.data.open_dataset`.
    dataset: str = _key("digits", text)
    # A TFDS directory; by default TFDS_DATA_DIR.
    data_dir: str | None = _key(str, optional(text), result=False)
    # A noise dataset of the same shapes, for estimates without the data.
    stand_in: str | None = _key(str, optional(text), result=False)
    # Further options of open_dataset.
    data: Mapping[str, Any] = _key({}, options)
    # Image size, resizing and normalization of "dataset", or of the "weights" of
    # init_from; options in `data` replace them.
    preprocessing: str = _key("dataset", one_of("dataset", "weights"))
    # Names, or {"name": ..., option: value}.
    augment: tuple[Any, ...] = _key((), several)
    # The α of the Beta distribution of mixup and of cutmix; 0: off.
    mixup: float = _key(0.0, number(0))
    cutmix: float = _key(0.0, number(0))
    label_smoothing: float = _key(0.0, number(0, 1, below=True))

    # Model. `model` holds its name, width, depth and other options. The base sizes are
    # those at which the hyperparameters were tuned; by default the model's own sizes.
    model: Component = _key({"name": "resmlp"}, component)
    base_width: int | None = _key(int, optional(whole()))
    base_depth: int | None = _key(int, optional(whole()))
    # The batch size and number of examples (batch_size * steps) at which they were
    # tuned. With them, the learning rate, betas, eps and decay of another batch size or
    # length follow docs/rules.md, section 8; None: no rule.
    base_batch_size: int | None = _key(int, optional(whole()))
    base_examples: int | None = _key(int, optional(whole()))
    # By default "depth_mup" for residual branches of one layer, else "completep".
    parametrization: Component = _key({"name": str}, component)
    # Factor of the initial values of weights that have a fan-in.
    init_scale: float = _key(1.0, number(0, above=True))
    # Pretrained weights: a file, directory or hub id.
    init_from: str | None = _key(str, optional(text))
    # The summary.json of `mupax transfer`.
    transfer_from: str | None = _key(str, optional(text), losses=False)

    # Optimization.
    batch_size: int = _key(128, whole())
    # Number of parts of a batch, which are computed one after another to save memory.
    accumulate: int = _key(1, whole())
    steps: int = _key(1000, whole())
    learning_rate: float = _key(float, _learning_rate)  # of the base
    optimizer: Component = _key({"name": "adamw"}, component)
    schedule: Component = _key(
        {"name": "cosine", "warmup": 0, "decay": 0, "final": 0.0}, component
    )
    # Groups of parameters by name: a pattern of paths (or "role:hidden" and the like)
    # and factors learning_rate, weight_decay, init_scale and multiplier.
    modules: Mapping[str, Mapping[str, Any]] = _key({}, groups)
    clip_norm: float | None = _key(float, optional(number(0, above=True)))
    # Decay of the moving average of the parameters.
    ema: float | None = _key(
        float, optional(number(0, 1, above=True, below=True)), losses=False
    )

    # Devices along each axis of the mesh; -1: the remaining devices.
    mesh: Mapping[str, int] = _key(
        {"data": -1, "fsdp": 1, "tensor": 1}, options, result=False
    )
    # Changes to zoo.RULES.
    sharding: Mapping[str, Any] = _key({}, options, result=False)

    # Records and checkpoints.
    log_every: int = _key(10, whole(), losses=False)
    eval_every: int = _key(500, whole(), losses=False)
    save_every: int = _key(500, whole(), result=False)
    keep_last: int = _key(2, whole(), result=False)
    # Keep the checkpoint of the lowest test loss too.
    keep_best: bool = _key(True, flag, result=False)
    tensorboard: bool = _key(True, flag, result=False)
    # A project of Weights & Biases, for trainings; None: off.
    wandb: str | None = _key(str, optional(text), result=False)
    # The same of MLflow: an experiment, at MLFLOW_TRACKING_URI.
    mlflow: str | None = _key(str, optional(text), result=False)
    # The first and last step of a profiler trace; empty: none.
    profile: tuple[int, ...] = _key((), several, result=False)

    @property
    def rules(self) -> optim.Parametrization:
        chosen = self.parametrization
        return optim.parametrization(chosen.name, **chosen.options)

    @property
    def learning_rates(self) -> optax.Schedule:
        chosen = self.schedule
        return make_schedule(
            chosen.name, self.learning_rate, self.steps, **chosen.options
        )

    @property
    def examples(self) -> int:
        """The number of examples of training, counted as often as they are seen."""
        return self.batch_size * self.steps

    @property
    def training(self) -> optim.TrainingScale:
        """Ratios of batch size and training length to those of the base."""
        return optim.TrainingScale(
            self.batch_size / (self.base_batch_size or self.batch_size),
            self.examples / (self.base_examples or self.examples),
        )

    def plain(self) -> dict[str, Any]:
        return {
            key.name: plain(value.plain() if isinstance(value, Component) else value)
            for key in _FIELDS
            for value in [getattr(self, key.name)]
        }

    def settings(self) -> dict[str, Any]:
        """The keys that can change the result of `mupax train`.

        Addresses lose user, password and query.
        """
        return self._selected("result")

    def loss_settings(self) -> dict[str, Any]:
        """The keys that can change the training losses, without the seed."""
        return self._selected("losses")

    def _selected(self, mark: str) -> dict[str, Any]:
        values = self.plain()
        return {f.name: public(values[f.name]) for f in _FIELDS if f.metadata[mark]}

    def lasting(self, steps: int) -> "RunConfig":
        """A copy with other steps, and warm-up and decay of the same share of them."""
        shares = {
            key: max(1, round(self.schedule.options[key] * steps / self.steps))
            for key in ("warmup", "decay")
            if self.schedule.options.get(key)
        }
        if len(shares) == 2:  # both may be rounded up
            shares["decay"] = min(shares["decay"], max(1, steps - shares["warmup"]))
        return dataclasses.replace(
            self, steps=steps, schedule=self.schedule.with_options(**shares)
        )

    def sized(self, width: int, depth: int) -> "RunConfig":
        """A copy with another model size and the same base."""
        return dataclasses.replace(
            self, model=self.model.with_options(width=width, depth=depth)
        )


_FIELDS = dataclasses.fields(RunConfig)
KEYS = tuple(key.name for key in _FIELDS)


def defaults(*sections: str) -> ConfigDict:
    """A config that has every key.

    Args:
      *sections: "sweep" for a config of `mupax sweep`; "sweep" and "target" for a
        config of `mupax transfer`.

    Examples:
      >>> sorted(defaults("sweep").sweep)[:3]
      ['average_last', 'axes', 'base_axes']
    """
    config = ConfigDict()
    for key in _FIELDS:
        default = key.metadata["default"]
        if isinstance(default, dict):
            default = ConfigDict({k: _placeholder(v) for k, v in default.items()})
        config[key.name] = _placeholder(default)
    if "sweep" in sections:
        config.sweep = _sweep()
    if "target" in sections:
        config.target = _target()
    return config


def _placeholder(default: Any) -> Any:
    return placeholder(default) if isinstance(default, type) else default


def _sweep() -> ConfigDict:
    """The section of a sweep. An empty value means: as in the run."""
    s = ConfigDict()
    s.widths = ()  # swept at the base's depth; by default only the base's width
    s.depths = ()  # swept at the base's width
    # Grids such as "2**[-2:2]" or (0.1, 0.2); None: not swept. The default grid of the
    # learning rate has seven values around the config's, a factor of 2 apart.
    s.axes = ConfigDict({name: placeholder(object) for name in TUNABLE})
    # Grids of factors of groups, e.g. "hidden/learning_rate", tuned at the base
    # alone, together with `axes`, before the sweep; sweep and target keep the best.
    s.base_axes = ConfigDict()
    s.choices = ()  # other keys and their values: (("schedule.name", ("constant",)),)
    s.parametrizations = ConfigDict()  # by key; by default the config's own
    s.only = ()  # keys of the parametrizations to sweep; empty: all
    # With choices of batch_size: as many steps as give the base's number of examples.
    s.equal_examples = False
    s.seeds = 2  # runs per grid point, with seeds from the config's seed upwards
    s.steps = placeholder(int)  # of each run; None: the config's
    s.average_last = placeholder(int)  # steps in a run's final loss; None: a quarter
    s.memory_share = 0.5  # of the free memory; larger populations run in chunks
    s.lanes = 0  # maximal number of runs in a chunk; 0: as many as fit
    return s


def _target() -> ConfigDict:
    """The section of a target. None means: as the base. Any other key may be added."""
    t = ConfigDict()
    t.parametrization = placeholder(str)  # a key of sweep.parametrizations
    # Baselines, trained for as many steps at the same hyperparameters: "base", the
    # model of the base's size; or a key of sweep.parametrizations, the model of the
    # target's size in that parametrization.
    t.compare = ()
    # Whether hyperparameters follow the number of examples too; they follow the batch
    # size from half to twice the base's.
    t.length_rule = False
    for key in ("width", "depth", "batch_size", "steps", "seed"):
        t[key] = placeholder(int)
    for key in ("eval_every", "save_every"):
        t[key] = placeholder(int)
    return t


def parse(config: ConfigDict | Mapping[str, Any]) -> RunConfig:
    """Check a config and freeze it. Ignores the sections `sweep` and `target`.

    Missing keys get their defaults. With `transfer_from`, the tuned hyperparameters
    replace the config's values.

    Raises:
      UserError: an unknown key or a value out of range; names the key.
    """
    given = without_sections(plain(config))
    for key in (key for key in given if key not in KEYS):
        raise UserError(_unknown(key))
    given = plain(defaults()) | given
    if given["transfer_from"] is not None:
        path = text("transfer_from", given["transfer_from"])
        given = apply_transfer(given, remote.local(path))
    given["parametrization"] = _with_default_name(given)
    parsed = RunConfig(
        **{f.name: f.metadata["check"](f.name, given[f.name]) for f in _FIELDS}
    )
    _check_together(parsed)
    return parsed


def _with_default_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """The section `parametrization`; without a name it gets the model's default."""
    section = options("parametrization", given["parametrization"])
    if section.get("name") is not None:
        return section
    model = options("model", given["model"])
    name = model.pop("name", None)
    if name not in zoo.list_models():  # `_check_together` raises an error for it
        return {**section, "name": "depth_mup"}
    try:
        return {**section, "name": default_parametrization(name, **model)}
    except (TypeError, ValueError) as error:
        raise UserError(f"model.{error}") from None


def _check_together(config: RunConfig) -> None:
    """Checks of several values, or of values that depend on the environment."""
    models = zoo.list_models()
    if config.model.name not in models:
        hint = nearest(config.model.name, models) or ";"
        raise UserError(
            f"model.name={config.model.name!r} is not in the zoo{hint} `mupax models` "
            "lists all models"
        )
    for key in ("width", "depth"):
        if (size := config.model.options.get(key)) is not None:
            whole(1, checks.LARGEST)(f"model.{key}", size)
    known = {**default_options(config.model.name), **config.model.options}
    for key in ("width", "depth"):
        size, base = known.get(key), getattr(config, f"base_{key}")
        if size is not None and base is not None and size < base:
            raise UserError(
                f"model.{key}={size} is below base_{key}={base}, and learning rates "
                f"are transferred to larger models only; set model.{key} to {base} or "
                f"more, or tune at a base of at most {key} {size}"
            )
    for key in ("base_width", "base_depth", "parametrization"):
        if key in config.model.options:
            raise UserError(f"model.{key} has no effect in a config; set {key} instead")
    if config.profile:
        for step in config.profile:
            whole()("profile", step)
        if len(config.profile) != 2 or config.profile[0] > config.profile[1]:
            raise UserError(f"profile={config.profile} must be (first step, last step)")
    rows, over = divmod(config.batch_size, config.accumulate)
    if (config.mixup or config.cutmix) and not over and rows % 2:
        raise UserError(
            "mixup and cutmix mix pairs of images, so batch_size / accumulate must be "
            f"even; it is {rows}"
        )
    for name in ("wandb", "mlflow"):
        wanted = getattr(config, name)
        if wanted and importlib.util.find_spec(name) is None:
            raise UserError(
                f"{name}={wanted!r} needs its package: pip install '.[{name}]' in a "
                "clone of mupax"
            )
    if config.init_from and config.init_scale != 1:
        raise UserError(
            f"init_scale={config.init_scale} scales a random initialization, and "
            f"init_from={config.init_from!r} replaces it; leave one of them out"
        )
    for name, group in config.modules.items() if config.init_from else ():
        for key in ("multiplier", "init_scale"):
            if group.get(key, 1) != 1:
                raise UserError(
                    f"modules.{name}.{key}={group[key]} scales a random "
                    f"initialization, and init_from={config.init_from!r} replaces it; "
                    "leave it out, and set learning_rate of the group"
                )
    if config.preprocessing == "weights" and not config.init_from:
        raise UserError(
            "preprocessing='weights' needs weights: set init_from, or leave it at "
            "'dataset'"
        )
    check_optimizer(config.optimizer.plain())
    for key in config.schedule.options:
        if key not in ("warmup", "decay", "final"):
            raise UserError(
                f"schedule has no option {key!r}; its options are warmup, decay, final"
                f"{nearest(key, ('warmup', 'decay', 'final'))}"
            )
    for key, build in (
        ("parametrization", lambda: config.rules),
        ("schedule", lambda: config.learning_rates),
    ):
        try:
            build()
        except (TypeError, ValueError) as error:
            raise UserError(f"{key}: {error}") from None


def with_keys(config: RunConfig, changes: Iterable[tuple[str, Any]]) -> RunConfig:
    """Replace keys of a run's config, and check the config again.

    `changes` are pairs of a key, e.g. "steps" or "model.width", and its value.

    Raises:
      UserError: an unknown key or a value out of range; names the key.
    """
    given = config.plain()
    given["transfer_from"] = None  # its values are in the config already
    for key, value in changes:
        section, _, name = key.partition(".")
        if section not in given:
            raise UserError(_unknown(section))
        if name:
            given[section] = {**options(section, given[section]), name: plain(value)}
        else:
            given[section] = plain(value)
    return dataclasses.replace(parse(given), transfer_from=config.transfer_from)


def without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """A plain config without the sections `sweep` and `target`."""
    return {key: value for key, value in config.items() if key not in SECTIONS}


def _unknown(key: str) -> str:
    hint = nearest(key, KEYS) or "; docs/reference/config.md lists all keys"
    return f"the config has no key {key!r}{hint}"


def plain(config: Any) -> Any:
    """A config as JSON-ready data."""
    if isinstance(config, ConfigDict | Mapping):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [plain(value) for value in config]
    return config

"""Build the dataset, model, optimizer, loss and step of a run from its config."""

import ast
import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging
from flax import nnx

from mupax import optim, zoo
from mupax.optim.scales.paths import map_with_paths
from mupax.zoo.families.decoder import Decoder
from mupax.zoo.preprocessing import known_data_config
from mupax.zoo.weights import foreign
from mupax.zoo.weights.pretrained import read_data_config

from .. import data as datasets
from ..checks import shown
from ..data import Dataset, mixing
from ..errors import UserError, reason
from ..loading import find_model
from .config import RunConfig
from .hyperparameters import tuned
from .loss import Classification, NextToken, Objective
from .optimizer import RANGES
from .program import loss_of
from .step import Hyper, Recipe

Shapes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Built:
    """The parts of a run before it starts.

    Attributes:
      config: of the run.
      dataset: the open dataset.
      shapes: options of the model that follow from the dataset; see `model_shapes`.
      model: an abstract model (shapes only), or the pretrained model.
      recipe: the training step, a function of the hyperparameters of `tuned`.
    """

    config: RunConfig
    dataset: Dataset
    shapes: Shapes
    model: nnx.Module
    recipe: Recipe

    @property
    def pretrained(self) -> bool:
        """Whether the run starts from pretrained weights."""
        return self.config.init_from is not None

    @property
    def scales(self) -> optim.Scales:
        return scales_of(self.config, self.model)

    @property
    def objective(self) -> Objective:
        return make_objective(self.config, self.dataset)

    def create(self) -> nnx.Module:
        """The model, initialized with the config's seed."""
        return create_model(self.config, self.shapes, self.config.seed)


def build(config: RunConfig, dataset: Dataset | None = None) -> Built:
    """Build a run without training it or allocating its state.

    `dataset` replaces the config's dataset.

    Raises:
      UserError: the config does not fit the dataset or the model; names the key.
    """
    dataset = dataset or open_dataset(config)
    shapes = model_shapes(dataset, config.model.name)
    _check_shapes(config, dataset, shapes)
    try:
        if config.init_from:
            try:
                model = _pretrained(config, shapes)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"init_from={config.init_from}: {reason(error, 500)}"
                ) from None
            if dataset.kind == "text":
                shapes = _shapes_of_decoder(model, dataset)
            _check_preprocessing(config, dataset, model)
        else:
            model = nnx.eval_shape(
                lambda: create_model(config, shapes, jax.random.key(0))
            )
        recipe = make_recipe(config, dataset, shapes, model)
        make_optimizer(config, scales_of(config, model))
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"the model cannot be built: {reason(error, 500)}") from None
    return Built(config, dataset, shapes, model, recipe)


def _check_shapes(config: RunConfig, dataset: Dataset, shapes: Shapes) -> None:
    """Raise UserError for options of the model that the dataset determines."""
    remedies = {"context": "set data.context", "input_shape": "set data.image_size"}
    for key, value in shapes.items():
        given = config.model.options.get(key)
        # A plain config has lists in place of tuples.
        given = tuple(given) if isinstance(given, list) else given
        if given not in (None, value):
            raise UserError(
                f"model.{key}={shown(given)}, but {config.dataset} gives {value}; "
                f"{remedies.get(key, 'use other data')}, or leave model.{key} out"
            )


def _pretrained(config: RunConfig, shapes: Shapes) -> nnx.Module:
    # Saved options apply where the config sets none.
    options = {k: v for k, v in _options(config, shapes).items() if v is not None}
    # Weights may have more tokens than their tokenizer, and a longer context.
    for key in ("vocab_size", "context"):
        if key not in config.model.options:
            options.pop(key, None)
    try:
        return zoo.load_pretrained(
            config.model.name, _weights(config), rngs=nnx.Rngs(config.seed), **options
        )
    except foreign.Misfit as error:
        raise ValueError(_as_flags(error, shapes)) from None


def _as_flags(error: foreign.Misfit, shapes: Shapes) -> str:
    """The message of a `Misfit` with options as flags that set keys of the config."""
    parts: list[str | dict[str, str]] = []
    for part in error.parts:
        if isinstance(part, str):
            parts.append(part)
            continue
        keys: dict[str, str] = {}
        for option, value in part.items():
            if option in ("base_width", "base_depth"):
                keys[option] = value
            elif option == "parametrization":  # e.g. 'completep(alpha=1)'
                name, _, given = value.strip("'").partition("(")
                keys["parametrization.name"] = name
                for key, number in re.findall(r"(\w+)=([^,)]+)", given):
                    keys[f"parametrization.{key}"] = number
            elif option == "input_shape":
                *side, channels = ast.literal_eval(value)
                if channels == shapes[option][-1]:
                    keys["data.image_size"] = f"({side[0]},{side[1]})"
                else:
                    parts.append(
                        f"images of {channels} channel(s), from another dataset, "
                    )
            else:
                keys[f"model.{option}"] = value
        parts.append(keys)
    return foreign.Misfit(*parts).as_flags("--config.")


def _weights(config: RunConfig) -> str:
    """The source of the pretrained weights: a local copy, the model of a run."""
    try:
        return find_model(config.init_from or "")
    except UserError as error:
        raise ValueError(str(error)) from None


def _shapes_of_decoder(model: nnx.Module, dataset: Dataset) -> Shapes:
    """Vocabulary and context of pretrained weights, which the text must fit into."""
    assert isinstance(model, Decoder)
    shapes = {"vocab_size": model.embedding.shape[0], "context": model.context}
    for key, needed, remedy in (
        ("vocab_size", dataset.out_features, "set data.tokenizer to that of the model"),
        ("context", dataset.input_shape[0], "make data.context smaller"),
    ):
        if needed > shapes[key]:
            raise ValueError(
                f"{dataset.name} needs {key}={needed}, and the weights have "
                f"{shapes[key]}; {remedy}"
            )
    return shapes


def _options(config: RunConfig, shapes: Shapes) -> dict[str, Any]:
    return {
        **config.model.options,
        "base_width": config.base_width,
        "base_depth": config.base_depth,
        "parametrization": config.rules,
        **shapes,
    }


def create_model(config: RunConfig, shapes: Shapes, seed: Any) -> nnx.Module:
    """Create and initialize the model of a run; `seed` is an int or a JAX key."""
    options = _options(config, shapes)
    model = zoo.create(config.model.name, **options, rngs=nnx.Rngs(seed))
    scales = scales_of(config, model)
    if scales.modules:
        params = nnx.state(model, nnx.Param)
        nnx.update(model, optim.rescale_init(params, scales))
    if isinstance(config.init_scale, jax.Array) or config.init_scale != 1:
        params = nnx.state(model, nnx.Param)

        def scaled(path: str, leaf: jax.Array) -> jax.Array:
            factor = jnp.asarray(config.init_scale, leaf.dtype)
            return leaf * factor if scales[path].in_axes else leaf

        nnx.update(model, map_with_paths(scaled, params))
    return model


def make_recipe(
    config: RunConfig, dataset: Dataset, shapes: Shapes, model: nnx.Module
) -> Recipe:
    """The training step of a run, as a function of its hyperparameters."""
    model.train()
    structure = nnx.graphdef(model)

    def graph(hyper: Hyper) -> nnx.GraphDef:
        if not set(hyper) & {"branch_multiplier", "richness"}:
            return structure
        # These two change the structure of the model, so build it again.
        fixed_init = {k: v for k, v in hyper.items() if k != "init_scale"}
        abstract = nnx.eval_shape(
            lambda: create_model(tuned(config, fixed_init), shapes, jax.random.key(0))
        )
        abstract.train()
        return nnx.graphdef(abstract)

    def loss(params: Any, rest: Any, batch: Any, hyper: Hyper, key: Any) -> Any:
        objective = make_objective(tuned(config, hyper), dataset)
        return loss_of(graph(hyper), objective, params, rest, batch, key)

    def optimizer(hyper: Hyper, params: Any, rest: Any) -> Any:
        chosen = tuned(config, hyper)
        return make_optimizer(chosen, scales_of(chosen, model))

    ema = None if config.ema is None else config.training.beta(config.ema)
    return Recipe(loss, optimizer, config.accumulate, ema)


def scales_of(config: RunConfig, model: nnx.Module) -> optim.Scales:
    """The scales of a model, with the run's batch size, length and groups."""
    batch, examples = config.training.batch, config.training.examples
    scales = zoo.scales(model, batch=(1, batch), examples=(1, examples))
    scales = scales.for_parametrization(config.rules)  # its richness may be swept
    groups = {
        group["pattern"]: {k: v for k, v in group.items() if k != "pattern"}
        for group in config.modules.values()
    }
    return optim.for_modules(scales, groups) if groups else scales


def make_optimizer(
    config: RunConfig, scales: optim.Scales
) -> optax.GradientTransformation:
    """The optimizer of a run, with its schedule and gradient clipping."""
    chosen = config.optimizer
    maker = getattr(optim, chosen.name)
    options = {  # JAX refuses large integers
        key: float(value) if key in RANGES and type(value) is int else value
        for key, value in chosen.options.items()
    }
    tx = maker(config.learning_rates, scales, **options)
    if config.clip_norm is None:
        return tx
    if chosen.name == "sgd":
        warnings.warn(
            "clip_by_global_norm compares gradients with a fixed number, but their "
            "norm changes with width and depth, and SGD's step follows it; tune "
            "clip_norm again at the target, leave it out, or use Adam",
            optim.ChainWarning,
            stacklevel=2,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), tx)


def make_objective(config: RunConfig, dataset: Dataset) -> Objective:
    """The loss and the evaluation of a run."""
    if dataset.kind == "text":
        for key in ("mixup", "cutmix"):
            if getattr(config, key):
                raise UserError(
                    f"{key} mixes images, and {config.dataset} is text; set {key}=0"
                )
        return NextToken(config.label_smoothing)
    mix: Callable[..., Any] | None = None
    if config.mixup or config.cutmix:
        mix = functools.partial(
            mixing.mix, mixup_alpha=config.mixup, cutmix_alpha=config.cutmix
        )
    return Classification(
        lambda images: dataset.normalize({"image": images})["image"],
        dataset.out_features,
        mix,
        config.label_smoothing,
    )


def open_dataset(config: RunConfig, *, stand_in: bool = False) -> Dataset:
    """Open the dataset of a run.

    With `stand_in`, a dataset that is not prepared is replaced by `config.stand_in`.

    Raises:
      UserError: the dataset does not exist or does not have such an option.
    """
    if stand_in and config.stand_in:
        try:
            return open_dataset(config)
        except UserError:
            return datasets.open_dataset(config.stand_in)
    given = config.plain()
    options = given["data"]
    if config.preprocessing == "weights":
        options = {**_preprocessing_of_weights(config), **options}
    if config.augment:
        options["augment"] = given["augment"]
    text = json.dumps(options, sort_keys=True, default=str)
    registered = datasets.REGISTERED.get(config.dataset)
    return _opened(config.dataset, config.data_dir, text, registered)


def _preprocessing_of_weights(config: RunConfig) -> dict[str, Any]:
    """The options of a dataset that the weights of a run expect."""
    try:
        preprocessing = read_data_config(_weights(config))
    except ValueError as error:
        raise UserError(f"init_from: {reason(error, 500)}") from None
    if preprocessing is None:
        raise UserError(
            f"preprocessing='weights' needs weights that record their preprocessing, "
            f"and {config.init_from} does not; set preprocessing='dataset' and "
            "data.image_size, data.mean, data.std, data.crop and data.interpolation"
        )
    keys = ("crop", "crop_mode", "crop_rounding", "interpolation", "mean", "std")
    options = {key: getattr(preprocessing, key) for key in keys}
    return {"image_size": preprocessing.size[:2], **options}


def _check_preprocessing(
    config: RunConfig, dataset: Dataset, model: nnx.Module
) -> None:
    """Warn if images are not prepared as the weights expect."""
    config_of_model = known_data_config(model)
    if config_of_model is None or dataset.kind != "images":
        return
    # `config_of_model` has the dataset's image size, the file has the original one.
    expected = read_data_config(_weights(config)) or config_of_model
    if differ := dataset.data_config.differences(expected):
        logging.warning(
            f"images of {dataset.name} are not prepared as the weights of "
            f"{config.init_from} expect: {'; '.join(differ)}. Set preprocessing="
            "'weights' to prepare them as expected, or ignore this warning to train "
            "with the new preprocessing"
        )


@functools.lru_cache(maxsize=2)
def _opened(name: str, data_dir: str | None, options: str, registered: Any) -> Dataset:
    """An open dataset, shared by the runs of a process.

    `registered` tells apart data that were registered under one name.
    """
    del registered
    try:
        return datasets.open_dataset(name, data_dir, **json.loads(options))
    except (TypeError, AttributeError) as error:
        raise UserError(f"data: {reason(error, 500).split('() ')[-1]}") from None


def model_shapes(dataset: Dataset, name: str) -> Shapes:
    """The options of a model that follow from its dataset.

    Raises:
      UserError: the model takes text and the dataset has images, or the reverse.
    """
    text = dataset.kind == "text"
    if text != zoo.reads_tokens(name):
        raise UserError(
            f"{name} takes {'images' if text else 'text'}, and {dataset.name} is "
            f"{dataset.kind}; choose another model or dataset"
        )
    if text:
        return {"vocab_size": dataset.out_features, "context": dataset.input_shape[0]}
    return {"input_shape": dataset.input_shape, "out_features": dataset.out_features}

"""From the config of a run to its data, model, optimizer, loss and step."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax import optim, zoo
from mupax.optim.paths import map_with_paths

from .. import data as datasets
from ..data import Dataset, mixing
from ..errors import UserError
from .config import RunConfig, tuned
from .objective import Classification, NextToken, Objective
from .optimizer import build_optimizer
from .program import loss_of
from .step import Hyper, Recipe

Shapes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Built:
    """A run, built but not begun.

    Attributes:
      config: of the run.
      dataset: opened.
      shapes: what the dataset tells a model.
      model: its abstract twin; the pretrained model itself where there is one.
      recipe: what a step computes; its hyperparameters are those of `config.tuned`.
    """

    config: RunConfig
    dataset: Dataset
    shapes: Shapes
    model: nnx.Module
    recipe: Recipe

    @property
    def pretrained(self) -> bool:
        """Whether the run starts from given weights."""
        return self.config.init_from is not None

    @property
    def scales(self) -> optim.Scales:
        """Of the model's parameters."""
        return zoo.scales(self.model)

    @property
    def objective(self) -> Objective:
        """What is minimized and evaluated."""
        return make_objective(self.config, self.dataset)

    def create(self) -> nnx.Module:
        """The model, initialized by the config's seed."""
        return create_model(self.config, self.shapes, self.config.seed)


def build(config: RunConfig, dataset: Dataset | None = None) -> Built:
    """Build a run; nothing of it is computed yet.

    Args:
      config: of the run.
      dataset: an open one, in place of the config's.

    Raises:
      UserError: bad input, in one sentence that names the key.
    """
    dataset = dataset or open_dataset(config)
    shapes = model_shapes(dataset, config.model.name)
    try:
        if config.init_from:
            model = _pretrained(config, shapes)
        else:
            model = nnx.eval_shape(
                lambda: create_model(config, shapes, jax.random.key(0))
            )
        recipe = make_recipe(config, dataset, shapes, model)
        make_optimizer(config, zoo.scales(model))
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"the model cannot be built: {_line(error)}") from None
    return Built(config, dataset, shapes, model, recipe)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def _pretrained(config: RunConfig, shapes: Shapes) -> nnx.Module:
    # What the config does not say is as it was saved.
    given = {k: v for k, v in _options(config, shapes).items() if v is not None}
    return zoo.load_pretrained(config.model.name, config.init_from or "", **given)


def _options(config: RunConfig, shapes: Shapes) -> dict[str, Any]:
    return {
        **config.model.options,
        "base_width": config.base_width,
        "base_depth": config.base_depth,
        "parametrization": config.point,
        **shapes,
    }


def create_model(config: RunConfig, shapes: Shapes, seed: Any) -> nnx.Module:
    """The model of a run, initialized.

    Args:
      config: of the run.
      shapes: as `model_shapes` gives them.
      seed: a number, or a key, which may be traced.
    """
    options = _options(config, shapes)
    model = zoo.create(config.model.name, **options, rngs=nnx.Rngs(seed))
    if isinstance(config.init_scale, jax.Array) or config.init_scale != 1:
        params = nnx.state(model, nnx.Param)
        scaled = scaled_init(params, zoo.scales(model), config.init_scale)
        nnx.update(model, scaled)
    return model


def scaled_init(params: Any, scales: optim.Scales, factor: Any) -> Any:
    """Multiply the weights that have a fan-in; biases and norms stay as they are."""

    def scaled(path: str, leaf: jax.Array) -> jax.Array:
        return leaf * jnp.asarray(factor, leaf.dtype) if scales[path].in_axes else leaf

    return map_with_paths(scaled, params)


def make_recipe(
    config: RunConfig, dataset: Dataset, shapes: Shapes, model: nnx.Module
) -> Recipe:
    """What a step of a run computes, for any values of its hyperparameters.

    Args:
      config: of the run.
      dataset: tells how a batch becomes a model's input.
      shapes: as `model_shapes` gives them.
      model: its abstract twin, or itself.
    """
    model.train()
    plain = nnx.graphdef(model)
    scales = zoo.scales(model)

    def graph(hyper: Hyper) -> nnx.GraphDef:
        if not set(hyper) & {"branch_multiplier", "richness"}:
            return plain
        # These stand in the model's structure: it is made anew in each trace.
        some = {k: v for k, v in hyper.items() if k != "init_scale"}
        twin = nnx.eval_shape(
            lambda: create_model(tuned(config, some), shapes, jax.random.key(0))
        )
        twin.train()
        return nnx.graphdef(twin)

    def loss(params: Any, rest: Any, batch: Any, hyper: Hyper, key: Any) -> Any:
        objective = make_objective(tuned(config, hyper), dataset)
        return loss_of(graph(hyper), objective, params, rest, batch, key)

    def optimizer(hyper: Hyper, params: Any, rest: Any) -> Any:
        return make_optimizer(tuned(config, hyper), scales)

    return Recipe(loss, optimizer, config.accumulate, config.ema)


def make_optimizer(config: RunConfig, scales: optim.Scales) -> Any:
    """The optimizer of a run."""
    return build_optimizer(
        config.optimizer.plain(),
        config.rate,
        scales,
        config.point,
        clip_norm=config.clip_norm,
    )


def make_objective(config: RunConfig, dataset: Dataset) -> Objective:
    """What a run minimizes on a dataset."""
    if dataset.kind == "text":
        for key in ("mixup", "cutmix"):
            if getattr(config, key):
                raise UserError(f"{key} mixes images; {config.dataset} is text")
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
    """The dataset of a run.

    Args:
      config: of the run.
      stand_in: take the config's stand-in for data that is not prepared.

    Raises:
      UserError: there is no such dataset, or an option that means nothing for it.
    """
    if stand_in and config.stand_in:
        try:
            return open_dataset(config)
        except UserError:
            return datasets.open_dataset(config.stand_in)
    named = config.plain()
    options = named["data"]
    if config.augment:
        datasets.augment.parse(named["augment"])
        options["augment"] = named["augment"]
    text = json.dumps(options, sort_keys=True, default=str)
    return _opened(config.dataset, config.data_dir, text)


@functools.lru_cache(maxsize=2)
def _opened(name: str, data_dir: str | None, options: str) -> Dataset:
    """An open dataset, which the many runs of a process share."""
    try:
        return datasets.open_dataset(name, data_dir, **json.loads(options))
    except (TypeError, AttributeError) as error:
        raise UserError(f"data: {_line(error).split('() ')[-1]}") from None


def model_shapes(dataset: Dataset, name: str) -> Shapes:
    """What a dataset tells a model.

    Raises:
      UserError: a model of text for images, or the reverse.
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

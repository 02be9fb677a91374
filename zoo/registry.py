"""Families of models by their records, and models by name: `create`, `list_models`."""

import dataclasses
import fnmatch
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.optim.rules.parametrizations import closest

from .family import Family
from .weights.configs import Config
from .weights.sources import Layout

Sizes = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What the zoo knows of a family besides its layers.

    `register(Record(...))` at the end of a family's file makes it part of the zoo.

    Attributes:
      model: its class.
      sizes: {name: options} of the models that `create` knows.
      base: the name, one of `sizes`, by which networks of other libraries are created
        that no other name fits; "" for the first.
      timm: {name: options} of the architectures of timm.
      transformers: {model_type: function that returns the options of a `Config`}.
      layouts: function that lists the layouts of other libraries for a model, the
        default first.
      layout: function that returns the `Layout` of a model under such a name.
      check: function that raises a `ValueError` if the network of a layout would not
        compute what the model does.
      unused: function from a model and the name of a layout to a pattern of keys that
        the model deliberately does not use.
      factor: function from a model and the path of a parameter to the product of the
        multipliers outside of the parameter's own layer.
      reads_tokens: whether the models read tokens rather than images.
      unseen: what the weights do not show, for a warning: e.g. ", with its rope_theta".
    """

    model: type[Family]
    sizes: Sizes
    base: str = ""
    timm: Sizes = dataclasses.field(default_factory=dict)
    transformers: Mapping[str, Callable[[Config], dict[str, Any]]] = dataclasses.field(
        default_factory=dict
    )
    layouts: Callable[[Any], tuple[str, ...]] = lambda model: ()
    layout: Callable[[Any, str], Layout] = lambda model, name: Layout({})
    check: Callable[[Any, str], None] = lambda model, name: None
    unused: Callable[[Any, str], re.Pattern[str]] = lambda model, name: re.compile(
        r"(?!)"
    )
    factor: Callable[[Any, str], float] = lambda model, path: 1.0
    reads_tokens: bool = False
    unseen: str = ""


_RECORDS: dict[type[nnx.Module], Record] = {}
_MODELS: dict[str, tuple[Record, Mapping[str, Any]]] = {}
# Not an attribute: a model's static parts are compared whenever it is traced.
_RECIPES: weakref.WeakKeyDictionary[nnx.Module, tuple[str, dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)


def register(record: Record) -> Record:
    """Add a family and its models to the zoo."""
    _RECORDS[record.model] = record
    _MODELS.update({name: (record, options) for name, options in record.sizes.items()})
    return record


def records() -> tuple[Record, ...]:
    """The records of all families."""
    return tuple(_RECORDS.values())


def record_of(model: nnx.Module | str) -> Record:
    """The record of a model, or of a name of `list_models()`.

    Raises:
      ValueError: the model is not of the zoo, or the name is unknown.
    """
    if isinstance(model, str):
        options_of(model)
        return _MODELS[model][0]
    if type(model) not in _RECORDS:
        raise ValueError(
            f"{type(model).__name__} is not a model of mupax.zoo; create it by "
            "zoo.create"
        )
    return _RECORDS[type(model)]


def create(name: str, **overrides: Any) -> Family:
    """Create a model of the zoo.

    Args:
      name: one of `list_models()`.
      **overrides: `width`, `depth`, `base_width`, `base_depth`, `parametrization`,
        `branch_multiplier`, `rngs`, and the model's own options; see its class.

    Returns:
      An `nnx.Module` that maps a batch of inputs to logits.

    Raises:
      ValueError: the model or an option is unknown (the message names a similar one),
        or an option is missing or out of range.

    Examples:
      >>> from flax import nnx
      >>> from mupax import zoo
      >>> model = zoo.create("resmlp", width=256, depth=64, base_width=64, base_depth=8,
      ...                    parametrization="depth_mup", rngs=nnx.Rngs(0))
      >>> model.plan.branch  # (64 / 8)^-½
      0.3535533905932738
      >>> zoo.create("resmpl", width=8, depth=2, rngs=nnx.Rngs(0))
      Traceback (most recent call last):
      ...
      ValueError: unknown model 'resmpl'; the nearest is 'resmlp'
    """
    model, options = _full(name, overrides)
    made: Family = _make(model, options)
    _RECIPES[made] = (name, {k: v for k, v in overrides.items() if k != "rngs"})
    return made


def abstract(name: str, **overrides: Any) -> Family:
    """The model of `create` with shapes in place of arrays: nothing is drawn.

    `complete` draws the values that it lacks after weights were loaded.

    Args:
      name: one of `list_models()`.
      **overrides: as in `create`, without `rngs`.

    Raises:
      ValueError: as `create`.

    Examples:
      >>> model = abstract("resmlp", width=8, depth=2)
      >>> model.readout.kernel.shape, recipe(model)
      ((8, 10), ('resmlp', {'width': 8, 'depth': 2}))
    """
    made = nnx.eval_shape(lambda: create(name, **overrides, rngs=nnx.Rngs(0)))
    _RECIPES[made] = (name, overrides)
    return made


def complete(model: nnx.Module, rngs: nnx.Rngs) -> None:
    """Draw the values that a model of `abstract` still lacks, as `create` would.

    Args:
      model: from `abstract`, possibly with some of its values filled.
      rngs: random state. It is not used if the model lacks nothing.
    """
    state = nnx.state(model)
    variables = dict(nnx.to_flat_state(state))
    lacking = frozenset(
        path
        for path, variable in variables.items()
        if isinstance(variable.get_value(), jax.ShapeDtypeStruct)
    )
    if not lacking:
        return
    name, overrides = recipe(model)
    kind, options = _full(name, {**overrides, "rngs": rngs})
    for path, value in _make(kind, options, lacking).items():
        variables[path].set_value(value)
    nnx.update(model, state)


def _full(
    name: str, overrides: Mapping[str, Any]
) -> tuple[type[Family], dict[str, Any]]:
    """The class of a model and all options that its constructor gets; see `create`."""
    model, defaults = options_of(name)
    options = list(inspect.signature(model.__init__).parameters)[1:]
    for key in overrides:
        if key not in options:
            ours = _OF_TIMM.get(key)
            said = f"; it is {ours!r} here" if ours in options else ""
            raise ValueError(
                f"{name} has no option {key!r}{said or _near(key, options)}"
            )
    for key in ("width", "depth", "rngs"):
        if key not in overrides and key not in defaults:
            raise ValueError(f"{name} needs {key}=...")
    return model, {**defaults, **overrides}


def _make(
    model: Callable[..., nnx.Module],
    options: dict[str, Any],
    only: frozenset[tuple[Any, ...]] | None = None,
) -> Any:
    """Build a model, drawing all variables in one jitted program outside of traces.

    Separate draws would compile once per shape, which takes most of the time.

    Args:
      model: its class.
      options: of its constructor.
      only: paths of values; they are returned by path, and no others are drawn.
    """
    rngs = options.pop("rngs")
    traced = isinstance(jnp.zeros(()), jax.core.Tracer) or any(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(rngs)
    )
    meshed = not jax.sharding.get_abstract_mesh().empty
    if traced or meshed or not isinstance(rngs, nnx.Rngs):
        return _picked(model(**options, rngs=rngs), only)
    graph, state = nnx.split(rngs)
    # The repr distinguishes equal values of different types: 2.0 is not a valid width.
    known = tuple((key, repr(value), value) for key, value in options.items())
    try:
        program = _program(model, known, graph, only)
    except TypeError:  # an option cannot be hashed, e.g. a list
        program = _program.__wrapped__(model, known, graph, only)
    made, after = nnx.merge(*program(state))
    nnx.update(rngs, nnx.state(after))
    return made


def _picked(made: nnx.Module, only: frozenset[tuple[Any, ...]] | None) -> Any:
    """The model; with `only`, its values at these paths."""
    if only is None:
        return made
    variables = dict(nnx.to_flat_state(nnx.state(made)))
    return {path: variables[path].get_value() for path in only}


@functools.lru_cache(maxsize=64)
def _program(
    model: Callable[..., nnx.Module],
    options: tuple[tuple[str, str, Any], ...],
    graph: nnx.GraphDef[Any],
    only: frozenset[tuple[Any, ...]] | None,
) -> Callable[[nnx.State[Any, Any]], tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]]:
    """A function from the state of `rngs` to the split (model, `rngs` after it)."""
    # On CPUs, optimizing a program that runs once takes longer than it saves.
    cpu = jax.default_backend() == "cpu"
    quick = {"xla_backend_optimization_level": 1} if cpu else {}

    @functools.partial(jax.jit, compiler_options=quick)
    def run(
        state: nnx.State[Any, Any],
    ) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
        rngs = nnx.merge(graph, state, copy=True)
        given = {key: value for key, _, value in options}
        return nnx.split((_picked(model(**given, rngs=rngs), only), rngs))

    return run


def recipe(model: nnx.Module) -> tuple[str, dict[str, Any]]:
    """The name and options from which `create` built a model.

    Raises:
      ValueError: the model is not from `create`, or is a copy.
    """
    if model not in _RECIPES:
        raise ValueError(
            f"this {type(model).__name__} was not created by zoo.create, so its name "
            "and options are unknown; create it by zoo.create"
        )
    return _RECIPES[model]


# Options that change the function of a model by rounding at most, and those that only
# regularize training.
ROUNDING = ("attention", "dispatch", "remat", "dtype", "param_dtype")
REGULARIZATION = ("dropout", "drop_path", "drop_rest")


def default_options(name: str) -> dict[str, Any]:
    """The default options of a model, by name of the option.

    Examples:
      >>> default_options("vit_tiny_patch16_224")["width"]
      192
    """
    record, defaults = _MODELS[name]
    return {**class_options(record.model), **defaults}


def class_options(model: type[nnx.Module]) -> dict[str, Any]:
    """The default options of a class, by name of the option."""
    parameters = inspect.signature(model.__init__).parameters.items()
    return {k: p.default for k, p in parameters if p.default is not p.empty}


def default_parametrization(name: str, **options: Any) -> str:
    """The parametrization that `create` uses by default.

    Args:
      name: of a model of the zoo.
      **options: as in `create`; only those that change the number of layers in a
        residual branch matter.

    Raises:
      ValueError: the model is unknown.

    Examples:
      >>> default_parametrization("resmlp"), default_parametrization("gpt")
      ('depth_mup', 'completep')
      >>> default_parametrization("resmlp", block_depth=2)
      'completep'
    """
    model, defaults = options_of(name)
    kind = model.options_type
    known = {field.name for field in dataclasses.fields(kind)}
    given = {"width": 1, "depth": 1, **defaults, **options}
    full = kind(**{key: value for key, value in given.items() if key in known})
    return full.default_parametrization


def list_models(pattern: str = "*") -> list[str]:
    """List the names of the zoo's models that match a shell pattern.

    Examples:
      >>> from mupax import zoo
      >>> zoo.list_models("resm*")
      ['resmlp']
    """
    return sorted(fnmatch.filter(_MODELS, pattern))


def options_of(name: str) -> tuple[type[Family], Mapping[str, Any]]:
    """The class of a registered model, and the defaults under its name.

    Raises:
      ValueError: the model is unknown.
    """
    if name not in _MODELS:
        raise ValueError(f"unknown model {name!r}{_near(name, _MODELS)}")
    record, options = _MODELS[name]
    return record.model, options


def reads_tokens(name: str) -> bool:
    """Whether a registered model takes tokens (a decoder) rather than images.

    Args:
      name: one of `zoo.list_models()`.

    Raises:
      ValueError: the model is unknown.

    Examples:
      >>> from mupax import zoo
      >>> zoo.reads_tokens("llama"), zoo.reads_tokens("vit")
      (True, False)
    """
    return record_of(name).reads_tokens


# Options of timm, transformers and torchvision, and what they are here.
_OF_TIMM = {
    "num_classes": "out_features",
    "num_labels": "out_features",
    "img_size": "input_shape",
    "image_size": "input_shape",
    "in_chans": "input_shape",
    "global_pool": "pool",
    "drop_rate": "dropout",
    "drop_path_rate": "drop_path",
    "init_values": "layer_scale",
    "act_layer": "nonlinearity",
    "embed_dim": "width",
    "num_heads": "heads",
}


def _near(name: str, known: Any) -> str:
    """End of a message about an unknown name: a similar name, or all known ones."""
    if known is _MODELS and "/" in name:
        return "; zoo.load_pretrained(...) loads a repository of the Hugging Face hub"
    if close := closest(name, known):
        return f"; the nearest is {close!r}"
    if known is _MODELS:
        return f"; zoo.list_models() and `mupax models` list all {len(known)}"
    return f"; known are {', '.join(known)}"

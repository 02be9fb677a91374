"""Create models by name: `create`, `list_models`."""

import dataclasses
import fnmatch
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.optim.rules.parametrizations import closest

from .family import Family

if TYPE_CHECKING:
    from .families.cnn import CNN
    from .families.convnext import ConvNeXt
    from .families.efficientnet import EfficientNet
    from .families.gpt import GPT
    from .families.llama import Llama
    from .families.mlp import MLP
    from .families.regnet import RegNet
    from .families.resmlp import ResMLP
    from .families.resnet import ResNet
    from .families.vit import ViT

# Names by class, for completion in editors. Add new models here too.
GPTName = Literal["gpt", "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"]
LlamaName = Literal[
    "llama",
    "smollm2_135m",
    "smollm2_360m",
    "qwen3_0_6b",
    "llama3_2_1b",
    "llama3_2_3b",
]
ResNetName = Literal[
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet26d",
    "resnet50d",
    "resnet101d",
    "wide_resnet50_2",
    "wide_resnet101_2",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "seresnet50",
    "seresnext50_32x4d",
    "resnetblur50",
    "resnetaa50",
    "resnetrs50",
    "resnetrs101",
]
RegNetName = Literal[
    "regnetx_002",
    "regnetx_016",
    "regnetx_032",
    "regnety_002",
    "regnety_008",
    "regnety_016",
    "regnety_032",
    "regnety_160",
]
ConvNeXtName = Literal[
    "convnext_atto",
    "convnext_tiny",
    "convnext_small",
    "convnext_base",
    "convnext_large",
    "convnextv2_atto",
    "convnextv2_nano",
    "convnextv2_tiny",
    "convnextv2_base",
    "convnextv2_large",
]
EfficientNetName = Literal[
    "efficientnet_b0",
    "efficientnet_b1",
    "efficientnet_b2",
    "efficientnet_b3",
    "efficientnetv2_s",
    "tf_efficientnet_b0",
    "tf_efficientnetv2_s",
    "mobilenetv2_100",
    "mobilenetv3_small_100",
    "mobilenetv3_large_100",
]
ViTName = Literal[
    "vit",
    "vit_tiny_patch4_32",
    "vit_small_patch4_32",
    "vit_base_patch4_32",
    "vit_tiny_patch8_64",
    "vit_small_patch8_64",
    "vit_base_patch8_64",
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "deit3_small_patch16_224",
    "deit3_medium_patch16_224",
    "deit3_base_patch16_224",
    "deit3_large_patch16_224",
    "deit3_huge_patch14_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch14_dinov2",
    "vit_base_patch14_reg4_dinov2",
    "vit_large_patch14_dinov2",
    "vit_large_patch14_reg4_dinov2",
    "vit_giant_patch14_dinov2",
    "vit_giant_patch14_reg4_dinov2",
    "vit_base_patch32_clip_224",
    "vit_base_patch32_clip_quickgelu_224",
    "vit_base_patch16_clip_224",
    "vit_base_patch16_clip_quickgelu_224",
    "vit_large_patch14_clip_224",
    "vit_large_patch14_clip_quickgelu_224",
    "vit_small_patch16_dinov3",
    "vit_small_plus_patch16_dinov3",
    "vit_base_patch16_dinov3",
    "vit_large_patch16_dinov3",
    "vit_huge_plus_patch16_dinov3",
    "vit_base_patch16_siglip_224",
    "vit_large_patch16_siglip_256",
    "vit_so400m_patch14_siglip_384",
    "eva02_tiny_patch14_336",
    "eva02_small_patch14_336",
    "eva02_base_patch14_448",
    "eva02_large_patch14_448",
]

M = TypeVar("M", bound=type[nnx.Module])

# Not an attribute: a model's static parts are compared whenever it is traced.
_RECIPES: weakref.WeakKeyDictionary[nnx.Module, tuple[str, dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)
_MODELS: dict[str, tuple[type[nnx.Module], dict[str, Any]]] = {}


def register(name: str, **defaults: Any) -> Callable[[M], M]:
    """Class decorator that registers a model under a name, with defaults.

    Args:
      name: for `create`.
      **defaults: options that replace the class's defaults under this name.
    """

    def add(model: M) -> M:
        _MODELS[name] = (model, defaults)
        return model

    return add


@overload
def create(name: Literal["mlp"], **overrides: Any) -> "MLP": ...
@overload
def create(name: Literal["resmlp"], **overrides: Any) -> "ResMLP": ...
@overload
def create(name: Literal["cnn"], **overrides: Any) -> "CNN": ...
@overload
def create(name: ResNetName, **overrides: Any) -> "ResNet": ...
@overload
def create(name: RegNetName, **overrides: Any) -> "RegNet": ...
@overload
def create(name: ConvNeXtName, **overrides: Any) -> "ConvNeXt": ...
@overload
def create(name: EfficientNetName, **overrides: Any) -> "EfficientNet": ...
@overload
def create(name: ViTName, **overrides: Any) -> "ViT": ...
@overload
def create(name: GPTName, **overrides: Any) -> "GPT": ...
@overload
def create(name: LlamaName, **overrides: Any) -> "Llama": ...
@overload
def create(name: str, **overrides: Any) -> nnx.Module: ...
def create(name: str, **overrides: Any) -> nnx.Module:
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
    made = _make(model, options)
    _RECIPES[made] = (name, {k: v for k, v in overrides.items() if k != "rngs"})
    return made


def abstract(name: str, **overrides: Any) -> nnx.Module:
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
) -> tuple[type[nnx.Module], dict[str, Any]]:
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
    graph: nnx.GraphDef,
    only: frozenset[tuple[Any, ...]] | None,
) -> Callable[[nnx.State], tuple[nnx.GraphDef, nnx.State]]:
    """A function from the state of `rngs` to the split (model, `rngs` after it)."""
    # On CPUs, optimizing a program that runs once takes longer than it saves.
    cpu = jax.default_backend() == "cpu"
    quick = {"xla_backend_optimization_level": 1} if cpu else {}

    @functools.partial(jax.jit, compiler_options=quick)
    def run(state: nnx.State) -> tuple[nnx.GraphDef, nnx.State]:
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
    model, defaults = _MODELS[name]
    parameters = inspect.signature(model.__init__).parameters.items()
    given = {k: p.default for k, p in parameters if p.default is not p.empty}
    return {**given, **defaults}


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
    kind = cast(type[Family], model).options_type
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


def options_of(name: str) -> tuple[type[nnx.Module], dict[str, Any]]:
    """The class of a registered model, and the defaults under its name.

    Raises:
      ValueError: the model is unknown.
    """
    if name not in _MODELS:
        raise ValueError(f"unknown model {name!r}{_near(name, _MODELS)}")
    return _MODELS[name]


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
